"""Callbacks: when they are told what, what each of them does, and what they keep."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dlsys import optim, train
from dlsys.errors import DataError, DlsysError, GraphError
from dlsys.files import FolderLock
from support.small_runs import InFolder, OnStep, Scripted, loader, model


class Events(train.Callback):
    """Writes down everything that it is told."""

    def __init__(self, log: list[str], name: str = "") -> None:
        self.log, self.name = log, name

    def say(self, text: str) -> None:
        self.log.append(f"{self.name}{text}")

    def on_start(self, run: train.Run) -> None:
        self.say("start")

    def on_step(self, run: train.Run) -> None:
        self.say(f"step {run.epoch} {run.batch} {run.step}")

    def on_log(self, run: train.Run, record: Any) -> None:
        self.say(f"log {record['step']}")

    def on_epoch_end(self, run: train.Run, record: Any) -> None:
        self.say(f"epoch {record['epoch']}")
        record["extra"] = 5

    def on_record(self, run: train.Run, record: Any) -> None:
        self.say(f"record {record['extra']} {run.epoch} {run.batch} {len(run.history.epochs)}")

    def on_commit(self, run: train.Run) -> None:
        self.say("commit")

    def on_stop(self, run: train.Run) -> None:
        self.say(run.outcome)


class Late(Scripted):
    """A Scripted that names its figure, as Validation does."""

    adds = frozenset(["val_loss"])

    def __init__(self, values: Any) -> None:
        super().__init__("val_loss", values)


class Order(InFolder):
    def test_the_earlier_name_of_on_commit_works_with_a_warning(self) -> None:
        calls = []
        with self.assertWarnsRegex(DeprecationWarning, "on_settled is on_commit now"):

            class Earlier(train.Callback):
                def on_settled(self, run: train.Run) -> None:
                    calls.append(run.step)

        self.fit(Earlier(), epochs=1)
        self.assertEqual(calls, [1, 2, 2])

    def test_the_earlier_name_of_schemas_works_with_a_warning(self) -> None:
        with self.assertWarnsRegex(DeprecationWarning, "forms is schemas now"):
            earlier = type("Earlier", (train.Callback,), {"forms": {"count": str}})
        self.assertEqual(earlier.schemas, {"count": str})

    def test_methods_are_called_in_this_order(self) -> None:
        log: list[str] = []
        self.fit(Events(log), epochs=2, log_every=3)
        self.assertEqual(log, [
            "start",
            "step 0 1 1", "commit", "step 0 2 2", "log 2", "commit",
            "epoch 1", "record 5 1 0 1", "commit",
            "step 1 1 3", "log 3", "commit", "step 1 2 4", "log 4", "commit",
            "epoch 2", "record 5 2 0 2", "commit",
            "finished",
        ])  # fmt: skip

    def test_the_first_is_called_first_and_stopped_last(self) -> None:
        log: list[str] = []
        self.fit(Events(log, "a "), Events(log, "b "), epochs=1, data=loader(5))
        self.assertEqual([x for x in log if "start" in x], ["a start", "b start"])
        self.assertEqual(log[-2:], ["b finished", "a finished"])
        commit = log.index("a commit")
        self.assertEqual(
            log[commit - 4 : commit], ["a step 0 1 1", "b step 0 1 1", "a log 1", "b log 1"]
        )

    def test_a_stop_ends_after_the_step(self) -> None:
        log: list[str] = []
        stop = OnStep(lambda run: run.stop("enough") if run.step == 3 else None)
        history = self.fit(Events(log), stop)
        self.assertEqual(log[-3:], ["step 1 1 3", "commit", "stopped"])
        self.assertEqual(len(history.epochs), 1)

    def test_a_callback_that_fails_stops_all(self) -> None:
        class Fails(train.Callback):
            def on_start(self, run: train.Run) -> None:
                raise DlsysError("no")

        log: list[str] = []
        with self.assertRaisesRegex(DlsysError, "no"):
            self.fit(Events(log, "a "), Fails(), Events(log, "b "))
        self.assertEqual(log, ["a start", "a failed"])


class Validations(InFolder):
    def test_every_so_many_epochs_and_the_last(self) -> None:
        history = self.fit(train.Validation(loader(20, seed=1), every=3), epochs=8)
        has = [record["epoch"] for record in history.epochs if "val_loss" in record]
        self.assertEqual(has, [3, 6, 8])
        self.assertEqual(len(history.column("val_loss")), 3)

    def test_several_sets_have_prefixes(self) -> None:
        other = train.Validation(loader(20, seed=2), prefix="other_")
        history = self.fit(other, validation=loader(20, seed=1), epochs=1)
        self.assertLessEqual({"val_loss", "other_loss"}, set(history.epochs[0]))
        self.assertNotEqual(history.epochs[0]["val_loss"], history.epochs[0]["other_loss"])

    def test_averaged_weights_are_used_for_it_alone(self) -> None:
        ema = optim.EMA(0.5)
        data, net = loader(20, seed=1), model(0.0)
        averaged = train.Validation(data, prefix="ema_", ema=ema)
        history = self.fit(
            averaged, validation=data, net=net, optimizer=optim.SGD(0.1, ema=ema), epochs=3
        )
        last = history.epochs[-1]
        self.assertEqual(train.evaluate(net, data)["loss"], last["val_loss"])
        with ema.applied():
            self.assertEqual(train.evaluate(net, data)["loss"], last["ema_loss"])
        self.assertNotEqual(last["val_loss"], last["ema_loss"])


class Stopping(InFolder):
    def stopped_after(self, values: Any, **options: Any) -> int:
        name = options.setdefault("monitor", "val_loss")
        scripted = Scripted(name, [*values, *[values[-1]] * 10])
        return len(self.fit(scripted, train.EarlyStopping(**options)).epochs)

    def test_patience(self) -> None:
        values = [5, 4, 3, 3.5, 3.2, 2.9, 3, 3, 3]
        self.assertEqual(self.stopped_after(values, patience=2), 5)
        self.assertEqual(self.stopped_after(values, patience=3), 9)
        self.assertEqual(self.stopped_after(values, patience=9), 10)

    def test_small_improvements_do_not_count(self) -> None:
        values = [5, 4.9, 4.8, 4.7, 4.6, 4.5]
        self.assertEqual(self.stopped_after(values, patience=2, min_delta=0.15), 7)
        self.assertEqual(self.stopped_after(values, patience=2, min_delta=1), 3)
        self.assertEqual(self.stopped_after(values, patience=2), 8)

    def test_what_is_no_loss_should_rise(self) -> None:
        values = [0.5, 0.6, 0.5, 0.5, 0.7]
        self.assertEqual(self.stopped_after(values, patience=2, monitor="val_accuracy"), 4)
        self.assertEqual(self.stopped_after(values, patience=3, monitor="val_accuracy"), 8)
        falling = [0.5, 0.4, 0.3, 0.4, 0.4]
        self.assertEqual(self.stopped_after(falling, patience=2, monitor="error", higher=False), 5)

    def test_nan_is_no_improvement(self) -> None:
        self.assertEqual(self.stopped_after([1, np.nan, np.nan], patience=2), 3)
        self.assertEqual(self.stopped_after([np.nan, 2, 1, 1, 1], patience=2), 5)

    def test_a_figure_that_is_never_a_number_stops_it_too(self) -> None:
        net = model()
        before = net.state_dict()
        stop = train.EarlyStopping(2)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.fit(Scripted("val_loss", [np.nan] * 9), stop, train.Progress(), net=net)
        self.assertIn("stopped: val_loss was NaN in each of 2 epochs", out.getvalue())
        self.assertFalse(np.array_equal(net[0].weight.asnumpy(), before["0.weight"]))

    def test_one_that_has_served_serves_again(self) -> None:
        stop, keep = train.EarlyStopping(2), train.Checkpoint(self.folder)
        self.assertEqual(len(self.fit(Scripted("val_loss", [1] * 9), stop, keep).epochs), 3)
        for path in (keep.last, keep.best):
            path.unlink()
        history = self.fit(Scripted("val_loss", [3, 2, 2, 2]), stop, keep)
        self.assertEqual((len(history.epochs), stop.best_epoch), (4, 2))
        self.assertEqual(train.load(keep.best).header["epoch"], 4)  # of all, since loss falls

    def test_what_is_measured_after_it_in_the_list_counts(self) -> None:
        schedule = optim.ReduceOnPlateau(0.1, factor=0.5, patience=0)
        history = self.fit(
            train.EarlyStopping(2),
            train.PlateauSchedule(schedule),
            train.Checkpoint(self.folder),
            Late([3, 4, 5, 1]),
            optimizer=optim.SGD(schedule),
        )
        self.assertEqual(len(history.epochs), 3)
        self.assertEqual(schedule(0), np.float32(0.1) / 4)
        self.assertEqual(train.load(self.folder / "best.safetensors").header["epoch"], 1)

    def test_the_best_weights_come_back(self) -> None:
        values = [5, 4, 3, 9, 9, 9, 9, 9, 9, 9]
        for restore, epochs in ((True, 3), (False, 5)):
            net, other = model(), model()
            stop = train.EarlyStopping(2, restore_best=restore)
            self.fit(Scripted("val_loss", values), stop, net=net)
            self.assertEqual(stop.best_epoch, 3)
            self.fit(net=other, epochs=epochs)
            for name, value in other.state_dict().items():
                np.testing.assert_array_equal(net.state_dict()[name], value, name)

    def test_the_best_weights_survive_a_resume(self) -> None:
        values = [5, 4, 3, 9, 9, 9, 9, 9, 9, 9]

        def callbacks() -> list[train.Callback]:
            return [
                Scripted("val_loss", values),
                train.EarlyStopping(2),
                train.Checkpoint(self.folder),
            ]

        halt = OnStep(lambda run: run.stop("halt") if run.step == 7 else None)  # in epoch 4
        self.fit(*callbacks(), halt)
        net, wanted = model(), model()
        resumed = self.fit(*callbacks(), net=net, resume=self.folder)
        self.fit(Scripted("val_loss", values), train.EarlyStopping(2), net=wanted)
        self.assertEqual(len(resumed.epochs), 5)
        again = model()  # of the run that had been stopped already
        self.assertEqual(len(self.fit(*callbacks(), net=again, resume=self.folder).epochs), 5)
        for name, value in wanted.state_dict().items():
            np.testing.assert_array_equal(net.state_dict()[name], value, name)
            np.testing.assert_array_equal(again.state_dict()[name], value, name)

    def test_a_figure_that_does_not_exist_is_named_at_once(self) -> None:
        with self.assertRaisesRegex(
            DlsysError, "has no figure val_loss, it has epoch, step, loss, "
        ):
            self.fit(train.EarlyStopping(2))

    def test_a_figure_of_some_epochs_is_waited_for(self) -> None:
        every = train.Validation(loader(20, seed=1), every=4)
        history = self.fit(
            every, train.EarlyStopping(1, min_delta=100), train.Checkpoint(self.folder)
        )
        self.assertEqual(len(history.epochs), 8)

    def test_numbers_that_make_no_sense(self) -> None:
        with self.assertRaisesRegex(GraphError, "patience >= 1 and min_delta >= 0, got 0 and 0"):
            train.EarlyStopping(0)
        with self.assertRaisesRegex(GraphError, "Validation: expected every >= 1, got 0"):
            train.Validation(loader(20), every=0)


class Checkpoints(InFolder):
    def test_the_best_and_the_last(self) -> None:
        scripted = Scripted("val_loss", [5, 3, 4, 3, 6])
        keep = train.Checkpoint(self.folder / "made", monitor="val_loss")
        net = model()
        self.fit(scripted, keep, epochs=5, net=net)
        self.assertEqual(train.load(keep.best).header["epoch"], 2)
        last = train.load(keep.last)
        self.assertEqual(last.header["epoch"], 5)
        for name, value in net.state_dict().items():
            np.testing.assert_array_equal(last.part("model")[name], value)
        self.assertEqual({p.name for p in keep.folder.iterdir()}, {keep.best.name, keep.last.name})

    def test_how_often(self) -> None:
        written: list[tuple[str, int, int]] = []
        save = train.callbacks.save

        def counted(path: Path, tensors: Any, header: Any, *narrow: Any) -> None:
            written.append((path.stem, header["epoch"], header["batch"]))
            save(path, tensors, header, *narrow)

        falling = Scripted("loss", [1, 2, 3, 4, 5])  # only the first is the best
        with mock.patch.object(train.callbacks, "save", counted):
            self.fit(falling, train.Checkpoint(self.folder / "a", epochs=2), epochs=5)
            self.assertEqual(
                written, [("best", 1, 0), ("last", 2, 0), ("last", 4, 0), ("last", 5, 0)]
            )
            written.clear()
            self.fit(falling, train.Checkpoint(self.folder / "b", epochs=9, steps=3), epochs=4)
            last = [entry[1:] for entry in written if entry[0] == "last"]
            self.assertEqual(last, [(1, 1), (2, 2), (4, 0)])  # steps 3 and 6, and the end

    def test_the_best_of_an_earlier_run_is_remembered(self) -> None:
        def keep() -> list[train.Callback]:
            scripted = Scripted("val_loss", [5, 1, 4, 3])
            return [scripted, train.Checkpoint(self.folder, monitor="val_loss")]

        self.fit(*keep(), epochs=3)
        self.fit(*keep(), epochs=4, resume=self.folder)
        self.assertEqual(train.load(self.folder / "best.safetensors").header["epoch"], 2)

    def test_what_a_killed_process_left_is_removed(self) -> None:
        half = ".0123456789abcdef.dlsys-partial"
        kept = {"other.txt", ".last.safetensors.old", f"x.last.safetensors{half}"}
        for name in {f".last.safetensors{half}", f".best.safetensors{half}"} | kept:
            (self.folder / name).write_text("half")
        self.fit(train.Checkpoint(self.folder), epochs=1)
        left = {path.name for path in self.folder.iterdir()}
        self.assertEqual(left, {"last.safetensors", "best.safetensors"} | kept)

    def test_a_folder_is_one_run_s_at_a_time(self) -> None:
        other = train.Checkpoint(self.folder)
        half = self.folder / ".last.safetensors.0123456789abcdef.dlsys-partial"

        def begin(run: train.Run) -> None:
            if run.step == 2:
                half.write_text("what this run is writing")
                with self.assertRaisesRegex(DataError, "another run keeps its checkpoints"):
                    self.fit(other, epochs=1)
                self.assertTrue(half.exists())

        self.fit(train.Checkpoint(self.folder), OnStep(begin), epochs=1)
        self.assertTrue(half.exists())
        self.fit(other, epochs=2, resume=self.folder)
        self.assertFalse(half.exists())

    def test_the_checkpoints_of_another_run_are_never_overwritten(self) -> None:
        steps: list[int] = []
        seen = OnStep(lambda run: steps.append(run.step))
        run, other = self.folder / "run", self.folder / "other"
        keep = train.Checkpoint(run)
        for folder in (run, other):
            self.fit(train.Checkpoint(folder), epochs=1)
        before = {path: path.read_bytes() for path in self.folder.rglob("*.safetensors")}
        self.assertEqual(len(before), 4)
        refused = r"run has the checkpoints of another run \(.*\): .*resume=.*run|another folder"
        for options in ({}, {"resume": other, "epochs": 2}, {"resume": other / keep.last.name}):
            with self.assertRaisesRegex(DataError, refused):
                self.fit(keep, seen, **options)
        for path, content in before.items():
            self.assertEqual(path.read_bytes(), content)
        self.assertEqual(steps, [])
        keep.last.unlink()
        with self.assertRaisesRegex(DataError, r"another run \(best.safetensors\)"):
            self.fit(keep, seen)
        self.fit(keep, seen, resume=keep.best, epochs=2)
        self.assertTrue(steps)

    def test_a_folder_that_is_removed_is_made_again(self) -> None:
        keep = train.Checkpoint(self.folder / "run", steps=1)

        def remove(run: train.Run) -> None:
            if run.step == 2:
                shutil.rmtree(keep.folder)

        self.fit(keep, OnStep(remove), epochs=1)
        self.assertEqual(train.load(keep.last).header["epoch"], 1)

    def test_a_folder_that_became_another_runs_is_left_to_it(self) -> None:
        """It is removed, and another run makes and locks one of the same name."""
        keep = train.Checkpoint(self.folder / "run", steps=1)

        def replace(run: train.Run) -> None:
            if run.step == 2:
                shutil.rmtree(keep.folder)
                keep.folder.mkdir()
                self.lock = FolderLock(keep.folder)

        with self.assertRaisesRegex(DataError, "another run keeps its checkpoints"):
            self.fit(keep, OnStep(replace), epochs=1)
        self.assertEqual(os.listdir(keep.folder), [])
        self.lock.release()

    def test_a_folder_that_takes_no_files_is_told_before_the_training(self) -> None:
        steps: list[int] = []
        seen = OnStep(lambda run: steps.append(run.step))
        (self.folder / "file").write_text("")
        for path in (self.folder / "file", self.folder / "file" / "run"):
            with self.assertRaisesRegex(DataError, "no folder can be made there"):
                self.fit(train.Checkpoint(path), seen)
            with self.assertRaisesRegex(DataError, "log cannot be written: (File|Not a dir)"):
                self.fit(train.JsonLog(path / "log.jsonl"), seen)
        with (
            mock.patch("os.access", return_value=False),
            self.assertRaisesRegex(DataError, "nothing can be written into this folder"),
        ):
            self.fit(train.Checkpoint(self.folder), seen)
        self.assertEqual(steps, [])

    def test_numbers_of_numpy_are_kept(self) -> None:
        class Counts(train.Callback):
            best = np.float32(0)

            def on_step(self, run: train.Run) -> None:
                self.best += np.float32(0.5)

            def state_dict(self) -> dict[str, Any]:
                return {"best": self.best}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.best = state["best"][()]

        self.fit(Counts(), train.Checkpoint(self.folder), epochs=1)
        again = Counts()
        self.fit(again, train.Checkpoint(self.folder), epochs=3, resume=self.folder)
        self.assertEqual(again.best, 3)

    def test_a_state_that_is_no_json_is_refused_by_name(self) -> None:
        class Odd(train.Callback):
            def state_dict(self) -> dict[str, Any]:
                return {"seen": {1, 2}}

        with self.assertRaisesRegex(DataError, "header is not JSON values: .*set"):
            self.fit(Odd(), train.Checkpoint(self.folder))

    def test_a_schedule_on_a_plateau_goes_on_where_it_was(self) -> None:
        values = [1.0, 1, 1, 1, 1, 1, 1, 1]

        def run(epochs: int, folder: str, **options: Any) -> list[float]:
            schedule = optim.ReduceOnPlateau(0.1, factor=0.5, patience=1)
            callbacks = [
                Scripted("val_loss", values),
                train.PlateauSchedule(schedule),
                train.Checkpoint(self.folder / folder, monitor="val_loss"),
            ]
            history = self.fit(*callbacks, optimizer=optim.SGD(schedule), epochs=epochs, **options)
            return [record["lr"] for record in history.epochs]

        rates = run(8, "whole")
        np.testing.assert_allclose(
            rates, [0.1] * 3 + [0.05] * 2 + [0.025] * 2 + [0.0125], rtol=1e-6
        )
        run(4, "cut")
        self.assertEqual(run(8, "cut", resume=self.folder / "cut"), rates)

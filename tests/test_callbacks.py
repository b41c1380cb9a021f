"""Callbacks: when they are told what, what each of them does, and what they keep."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dlsys import optim, train
from dlsys.errors import DataError, DlsysError, GraphError
from small_runs import OnStep, loader, model, sgd


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

    def on_settled(self, run: train.Run) -> None:
        self.say("settled")

    def on_stop(self, run: train.Run) -> None:
        self.say(run.outcome)


class Scripted(train.Callback):
    """Gives every epoch's record a figure from a list."""

    def __init__(self, name: str, values: Any) -> None:
        self.name, self.values = name, values

    def on_epoch_end(self, run: train.Run, record: Any) -> None:
        record[self.name] = self.values[record["epoch"] - 1]


class Late(Scripted):
    """The same, and says so, as Validation does."""

    adds = frozenset(["val_loss"])

    def __init__(self, values: Any) -> None:
        super().__init__("val_loss", values)


class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def fit(self, *callbacks: train.Callback, **options: Any) -> train.History:
        options = {"epochs": 10, "metrics": ()} | options
        net, data = options.pop("net", None) or model(), options.pop("data", None) or loader(20)
        optimizer = options.pop("optimizer", None) or sgd()
        return train.fit(net, data, optimizer, callbacks=callbacks, **options)


class Order(InFolder):
    def test_what_is_told_when(self) -> None:
        log: list[str] = []
        self.fit(Events(log), epochs=2, log_every=3)
        self.assertEqual(log, [
            "start",
            "step 0 1 1", "settled", "step 0 2 2", "log 2", "settled",
            "epoch 1", "record 5 1 0 1", "settled",
            "step 1 1 3", "log 3", "settled", "step 1 2 4", "log 4", "settled",
            "epoch 2", "record 5 2 0 2", "settled",
            "finished",
        ])  # fmt: skip

    def test_the_first_is_told_first_and_stopped_last(self) -> None:
        log: list[str] = []
        self.fit(Events(log, "a "), Events(log, "b "), epochs=1, data=loader(5))
        self.assertEqual([x for x in log if "start" in x], ["a start", "b start"])
        self.assertEqual(log[-2:], ["b finished", "a finished"])
        settled = log.index("a settled")
        self.assertEqual(
            log[settled - 4 : settled], ["a step 0 1 1", "b step 0 1 1", "a log 1", "b log 1"]
        )

    def test_a_stop_ends_after_the_step(self) -> None:
        log: list[str] = []
        stop = OnStep(lambda run: run.stop("enough") if run.step == 3 else None)
        history = self.fit(Events(log), stop)
        self.assertEqual(log[-3:], ["step 1 1 3", "settled", "stopped"])
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

        def counted(path: Path, tensors: Any, header: Any) -> None:
            written.append((path.stem, header["epoch"], header["batch"]))
            save(path, tensors, header)

        falling = Scripted("loss", [1, 2, 3, 4, 5])  # only the first is the best
        with mock.patch.object(train.callbacks, "save", counted):
            self.fit(falling, train.Checkpoint(self.folder, epochs=2), epochs=5)
            self.assertEqual(
                written, [("best", 1, 0), ("last", 2, 0), ("last", 4, 0), ("last", 5, 0)]
            )
            written.clear()
            self.fit(falling, train.Checkpoint(self.folder, epochs=9, steps=3), epochs=4)
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
        for name in (".last.safetensors.x1y2", ".best.safetensors.abc", "other.txt"):
            (self.folder / name).write_text("half")
        self.fit(train.Checkpoint(self.folder), epochs=1)
        left = {path.name for path in self.folder.iterdir()}
        self.assertEqual(left, {"other.txt", "last.safetensors", "best.safetensors"})

    def test_a_folder_is_one_run_s_at_a_time(self) -> None:
        other = train.Checkpoint(self.folder)
        half = self.folder / ".last.safetensors.x1y2"

        def begin(run: train.Run) -> None:
            if run.step == 2:
                half.write_text("what this run is writing")
                with self.assertRaisesRegex(DataError, "another run keeps its checkpoints"):
                    self.fit(other, epochs=1)
                self.assertTrue(half.exists())

        self.fit(train.Checkpoint(self.folder), OnStep(begin), epochs=1)
        self.fit(other, epochs=1)

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

        def run(epochs: int, **options: Any) -> list[float]:
            schedule = optim.ReduceOnPlateau(0.1, factor=0.5, patience=1)
            callbacks = [
                Scripted("val_loss", values),
                train.PlateauSchedule(schedule),
                train.Checkpoint(self.folder, monitor="val_loss"),
            ]
            history = self.fit(*callbacks, optimizer=optim.SGD(schedule), epochs=epochs, **options)
            return [record["lr"] for record in history.epochs]

        rates = run(8)
        np.testing.assert_allclose(
            rates, [0.1] * 3 + [0.05] * 2 + [0.025] * 2 + [0.0125], rtol=1e-6
        )
        run(4)
        self.assertEqual(run(8, resume=self.folder), rates)


class Terminal(io.StringIO):
    """A text that takes itself for a terminal."""

    def isatty(self) -> bool:
        return True


class Reports(InFolder):
    def shown(self, errors: io.StringIO, *others: train.Callback, **options: Any) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            self.fit(train.Progress(), *others, **{"metrics": (train.accuracy,)} | options)
        return out.getvalue()

    def test_lines_where_there_is_no_terminal(self) -> None:
        errors = io.StringIO()
        text = self.shown(errors, epochs=2, validation=loader(10))
        self.assertEqual(errors.getvalue(), "")
        lines = text.splitlines()
        self.assertEqual(len(lines), 2)
        number = r"[\d.e-]+"
        self.assertRegex(lines[1], (
            rf"^epoch 2/2  loss {number}  accuracy {number}  val_loss {number}  "
            rf"val_accuracy {number}  [\d,]+ images/s$"
        ))  # fmt: skip

    def test_a_bar_on_a_terminal_that_is_clean_afterwards(self) -> None:
        errors = Terminal()
        with mock.patch.object(train.report.time, "monotonic", iter(range(10**6)).__next__):
            self.shown(errors, epochs=1, data=loader(160), log_every=2)
        text = errors.getvalue()
        self.assertIn("epoch 1/1", text)
        self.assertRegex(text, r"\d+/160")
        self.assertRegex(text, r"images/s, loss [\d.]+  accuracy [\d.]+")
        self.assertRegex(text, r"\r *\r$")  # the bar is gone

    def test_why_it_stopped(self) -> None:
        stop = OnStep(lambda run: run.stop("the test said so") if run.step == 3 else None)
        self.assertIn("stopped: the test said so\n", self.shown(io.StringIO(), stop))

    def test_json_lines(self) -> None:
        path = self.folder / "logs" / "run.jsonl"
        matrix = train.ConfusionMatrix(3)
        self.fit(train.JsonLog(path), epochs=2, log_every=1, metrics=(train.accuracy, matrix))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        self.assertEqual([x["event"] for x in lines], ["log", "log", "epoch"] * 2)
        self.assertEqual([x["step"] for x in lines], [1, 2, 2, 3, 4, 4])
        self.assertEqual(np.sum(lines[2]["confusion"]), 20)
        self.assertLessEqual({"loss", "accuracy", "lr", "seconds"}, set(lines[2]))

    def test_a_log_that_cannot_be_written(self) -> None:
        with self.assertRaisesRegex(DataError, "the log cannot be written: Is a directory"):
            self.fit(train.JsonLog(self.folder))
        full = Path("/dev/full")  # Linux's disk without a byte left
        if full.exists():
            with self.assertRaisesRegex(DataError, "full: the log cannot be written: No space"):
                self.fit(train.JsonLog(full))

    def test_a_part_of_a_line_is_taken_away(self) -> None:
        path = self.folder / "run.jsonl"
        path.write_text('{"event": "epoch"}\n{"event": "ep')
        self.fit(train.JsonLog(path), epochs=1)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        self.assertEqual([len(lines), lines[0], lines[1]["step"]], [3, {"event": "epoch"}, 2])

    def test_only_the_lines_of_the_run_that_is_resumed_are_taken_back(self) -> None:
        keep = train.Checkpoint(self.folder)
        self.fit(train.JsonLog(self.folder / "run.jsonl"), keep, epochs=1)
        other = self.folder / "other.jsonl"
        foreign = [
            json.dumps({"event": "epoch", "of": "another run", "epoch": k}) for k in range(9)
        ]
        other.write_text("".join(f"{line}\n" for line in foreign))
        self.fit(train.JsonLog(other), epochs=2, resume=keep.last)
        self.assertEqual(other.read_text().splitlines()[:9], foreign)

    def test_nan_is_null_in_json(self) -> None:
        path = self.folder / "run.jsonl"
        self.fit(Scripted("odd", [np.nan, np.inf]), train.JsonLog(path), epochs=2)
        for line in path.read_text().splitlines():
            entry = json.loads(line, parse_constant=self.fail)
            self.assertIsNone(entry.get("odd"))

    def test_tensorboard(self) -> None:
        try:
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.record_writer import RecordWriter  # noqa: F401
        except ImportError:
            self.skipTest("not here: tensorboardX")
        self.fit(train.TensorBoard(self.folder), epochs=2, metrics=(train.accuracy,), log_every=1)
        values: dict[str, list[int]] = {}
        content = next(self.folder.glob("events*")).read_bytes()
        while content:  # length (8), its checksum (4), the event, its checksum (4)
            size = int.from_bytes(content[:8], "little")
            event = Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            for value in event.summary.value:
                values.setdefault(value.tag, []).append(event.step)
        self.assertEqual(values["train/loss"], [1, 2, 3, 4])
        self.assertEqual(values["epoch/accuracy"], [2, 4])
        self.assertIn("epoch/samples_per_second", values)

    def test_without_tensorboardx_it_says_what_to_install(self) -> None:
        with mock.patch.dict(sys.modules, {"tensorboardX": None}):
            with self.assertRaisesRegex(DlsysError, r"pip install 'dlsys\[tensorboard\]'"):
                train.TensorBoard(self.folder)


class Histories(InFolder):
    def test_a_history_is_saved_and_loaded(self) -> None:
        history = self.fit(epochs=2, metrics=(train.ConfusionMatrix(3),))
        path = self.folder / "history.json"
        history.save(path)
        self.assertEqual(train.History.load(path).as_dict(), history.as_dict())
        path.write_text('{"epoch": []}')
        with self.assertRaisesRegex(DlsysError, "history.json is no history of a run"):
            train.History.load(path)

    def test_a_long_curve_is_thinned_out_evenly(self) -> None:
        history = train.History()
        for step in range(10_000):
            history.add_to_curve({"step": step})
        steps = [entry["step"] for entry in history.curve]
        self.assertLessEqual(len(steps), 4096)
        self.assertGreater(len(steps), 2000)
        self.assertEqual(set(np.diff(steps)), {4})


if __name__ == "__main__":
    unittest.main()

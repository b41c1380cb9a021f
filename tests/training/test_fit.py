"""fit, evaluate and predict: what they compute, what they read from the device, how they fail."""

from __future__ import annotations

import contextlib
import gc
import signal
import tempfile
import tracemalloc
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim, train
from dlsys.data import DeviceLoader, Loader
from dlsys.errors import DataError, DivergedError, GraphError, ShapeError
from dlsys.executor.run.parameters import Slot
from dlsys.ndarray import NDArray
from dlsys.runtime.device import Context, gpu, memory_stats
from dlsys.settings import settings
from support import sample
from support.devices import EMULATED, on_native_devices, slow
from support.small_runs import CLASSES, OnStep, final, loader, model, points, sgd


def probabilities(net: nn.Module, x: np.ndarray) -> np.ndarray:
    """The small model's softmax in inference mode, in float64."""
    value = {name: p.asnumpy().astype(np.float64) for name, p in net.named_state()}
    hidden = np.maximum(x @ value["0.weight"].T + value["0.bias"], 0)
    hidden = hidden - hidden.mean(axis=1, keepdims=True)
    hidden /= np.sqrt((hidden**2).mean(axis=1, keepdims=True) + 1e-5)
    hidden = hidden * value["3.weight"] + value["3.bias"]
    logits = hidden @ value["4.weight"].T + value["4.bias"]
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


class Explosive(nn.Module):
    """One layer; its outputs are exponentials, so that a wild input is a loss of infinity."""

    def __init__(self) -> None:
        self.layer = nn.Linear(4, CLASSES, rng=np.random.default_rng(1))

    def forward(self, x: ad.Node) -> ad.Node:
        return ad.exp_op(self.layer(x))


def square(output: ad.Node, label: ad.Node) -> ad.Node:
    return ad.mean_op(output * output)


class Fit:
    ctx: Context | None

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)  # type: ignore[attr-defined]
        self.folder = Path(folder.name)

    def fit(self, net: nn.Module, data: Any = None, optimizer: Any = None, **options: Any) -> Any:
        return train.fit(
            net, data or loader(), optimizer or sgd(), ctx=self.ctx, **options, quiet=True
        )

    # ---- results ----
    def test_it_learns_and_says_how_well(self) -> None:
        net = model(0.0)
        history = self.fit(net, loader(200), epochs=20, validation=loader(100, seed=1))
        self.assertEqual([r["epoch"] for r in history.epochs], list(range(1, 21)))
        last = history.epochs[-1]
        self.assertEqual(last["step"], 20 * 13)
        self.assertGreater(last["accuracy"], 0.9)
        self.assertLess(last["loss"], history.epochs[0]["loss"] / 2)
        self.assertAlmostEqual(last["lr"], 0.1, places=7)
        self.assertAlmostEqual(last["samples_per_second"] * last["seconds"], 200, places=3)
        x, labels = points(100, seed=1)
        p = probabilities(net, x)
        self.assertAlmostEqual(last["val_accuracy"], np.mean(p.argmax(1) == labels), places=12)
        loss = -np.log(p[np.arange(100), labels]).mean()
        np.testing.assert_allclose(last["val_loss"], loss, rtol=1e-5)

    def test_steps_are_those_of_a_loop_by_hand(self) -> None:
        def unregular() -> nn.Module:
            return nn.Linear(4, CLASSES, rng=3)

        net, optimizer, data = unregular(), sgd(), loader()
        history = self.fit(net, data, optimizer, epochs=2, log_every=4)
        w, b = (p.asnumpy().astype(np.float64) for p in unregular().parameters())
        velocity = [np.zeros_like(w), np.zeros_like(b)]
        losses, right = [], []
        for epoch in range(2):
            for x, labels in loader().batches(epoch):
                logits = x @ w.T + b
                p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
                losses += list(-np.log(p[np.arange(len(x)), labels]))
                right += list(logits.argmax(1) == labels)
                p[np.arange(len(x)), labels] -= 1
                velocity[0] = 0.9 * velocity[0] + p.T @ x / len(x)
                velocity[1] = 0.9 * velocity[1] + p.mean(axis=0)
                w, b = w - 0.1 * velocity[0], b - 0.1 * velocity[1]
        np.testing.assert_allclose(net.weight.asnumpy(), w, rtol=1e-4, atol=1e-5)
        for epoch, record in enumerate(history.epochs):
            part = slice(70 * epoch, 70 * epoch + 70)  # the last batch is smaller than the others
            np.testing.assert_allclose(record["loss"], np.mean(losses[part]), rtol=1e-5)
            self.assertAlmostEqual(record["accuracy"], np.mean(right[part]), places=12)
        self.assertEqual([entry["step"] for entry in history.curve], [4, 5, 8, 10])
        np.testing.assert_allclose(history.curve[0]["loss"], np.mean(losses[:64]), rtol=1e-5)
        np.testing.assert_allclose(history.curve[1]["loss"], np.mean(losses[64:70]), rtol=1e-5)

    def test_runs_are_alike_and_another_seed_is_not(self) -> None:
        def trained(seed: int) -> np.ndarray:
            net = model()
            self.fit(net, Loader(points(), 16, shuffle=True, seed=seed), epochs=2)
            return net.state_dict()["0.weight"]

        np.testing.assert_array_equal(trained(1), trained(1))
        self.assertFalse(np.array_equal(trained(1), trained(2)))

    def test_only_the_chosen_parameters_are_trained(self) -> None:
        net = model()
        before = net.state_dict()
        self.fit(net, parameters=net[4].parameters())
        after = net.state_dict()
        changed = {n for n in after if not np.array_equal(after[n], before[n])}
        self.assertEqual(changed, {"4.weight", "4.bias", "2.step"})

    def test_any_loss_and_several_inputs(self) -> None:
        class Sum(nn.Module):
            def __init__(self) -> None:
                self.weight = ad.Parameter(np.float32([3.0]), "weight")

            def forward(self, a: ad.Node, b: ad.Node) -> ad.Node:
                return (a - b) * self.weight

        class Pairs:
            samples = 4
            nodes = tuple(ad.Variable(n, (None, 1), np.float32) for n in ("a", "b", "target"))

            def __len__(self) -> int:
                return 2

            def inputs(self) -> tuple[ad.Node, ...]:
                return self.nodes

            def epoch(self, number: int, start: int = 0) -> Iterator[dict[ad.Node, Any]]:
                a = np.arange(4, dtype=np.float32).reshape(4, 1)
                for k in range(start, 2):
                    part = a[2 * k : 2 * k + 2]
                    yield dict(zip(self.nodes, (part, -part, 5 * part)))

        net = Sum()
        history = self.fit(
            net, Pairs(), optim.SGD(0.01), loss=ad.mean_squared_error, epochs=60, metrics=()
        )
        np.testing.assert_allclose(net.weight.asnumpy(), [2.5], rtol=1e-4)
        self.assertEqual(set(history.epochs[0]) - {"seconds"}, {
            "epoch", "step", "loss", "lr", "samples_per_second"
        })  # fmt: skip

    def test_a_set_that_lives_on_the_device(self) -> None:
        images = np.random.default_rng(0).integers(0, 256, (48, 4)).astype(np.uint8)
        labels = images.argmax(axis=1) % CLASSES
        net, data = model(0.0), DeviceLoader((images, labels), 16, shuffle=True, seed=2)
        history = self.fit(net, data, epochs=30, validation=data)
        self.assertGreater(history.epochs[-1]["accuracy"], 0.8)
        figures = train.evaluate(net, data, ctx=self.ctx)
        self.assertEqual(figures["accuracy"], history.epochs[-1]["val_accuracy"])

    # ---- evaluation ----
    def test_evaluation_changes_nothing_and_keeps_modes(self) -> None:
        net, data = model(), loader()
        net[2].eval()
        self.fit(net, data)
        self.assertEqual(
            [m.training for _, m in net.named_modules()], [True] * 3 + [False] + [True] * 2
        )
        before = net.state_dict()
        twice = [train.evaluate(net, data, ctx=self.ctx) for _ in range(2)]
        self.assertEqual(twice[0], twice[1])
        for name, value in net.state_dict().items():
            np.testing.assert_array_equal(value, before[name], name)

    def test_predict(self) -> None:
        net = model()
        self.fit(net)
        x, _ = points(70)
        wanted = probabilities(net, x)
        for given in (x, x.astype(np.float64), x[::-1][::-1], x.tolist()):
            outputs = train.predict(net, given, self.ctx, batch_size=32)
            e = np.exp(outputs - outputs.max(1, keepdims=True))
            np.testing.assert_allclose(e / e.sum(1, keepdims=True), wanted, rtol=1e-4, atol=1e-6)
        for bad in (x[:0], np.float32(1), (x, x[:3])):
            with self.assertRaisesRegex(ShapeError, "predict: expected arrays of one length"):
                train.predict(net, bad, self.ctx)

        with self.assertRaisesRegex(ShapeError, "batch_size >= 1, got 0"):
            train.predict(net, x, self.ctx, batch_size=0)

    def test_a_trained_model_is_asked_where_it_is(self) -> None:
        net, data = model(), loader()
        self.fit(net)
        self.assertEqual(train.evaluate(net, data), train.evaluate(net, data, ctx=self.ctx))
        x, _ = points(9)
        np.testing.assert_array_equal(train.predict(net, x), train.predict(net, x, self.ctx))

    # ---- what leaves the device ----
    def test_nothing_is_read_between_logs(self) -> None:
        reads: list[int] = []
        counts: list[int] = []
        asnumpy, slot_asnumpy = NDArray.asnumpy, Slot.asnumpy

        def counted(self: Any) -> np.ndarray:
            reads.append(1)
            return asnumpy(self) if isinstance(self, NDArray) else slot_asnumpy(self)

        class Watch(train.Callback):
            def on_step(self, run: train.Run) -> None:
                counts.append(len(reads))

            def on_log(self, run: train.Run, record: Any) -> None:
                logs.append((run.step, len(reads)))

        logs: list[tuple[int, int]] = []
        with (
            mock.patch.object(NDArray, "asnumpy", counted),
            mock.patch.object(Slot, "asnumpy", counted),
        ):
            self.fit(model(), loader(960), callbacks=[Watch()], log_every=20)
        self.assertEqual(len(counts), 60)
        self.assertEqual([step for step, _ in logs], [20, 40, 60])
        for start in (0, 20, 40):
            self.assertEqual(len(set(counts[start : start + 20])), 1, counts)
        self.assertLess(counts[0], counts[20])  # the watch does see reads
        self.assertLessEqual(logs[2][1] - logs[1][1], 4)  # totals and rate, whichever way they go

    @slow
    def test_memory_is_flat_over_hundreds_of_epochs(self) -> None:
        tenth = 20 if EMULATED and self.ctx is gpu(0) else sample.count(40, 20)
        marks: dict[int, Any] = {}
        ctx = self.ctx

        class Mark(train.Callback):
            def on_record(self, run: train.Run, record: Any) -> None:
                if record["epoch"] == 9 * tenth:
                    tracemalloc.start()  # late, since it makes all slow
                if record["epoch"] in (tenth * 22 // 10, tenth * 92 // 10, 10 * tenth):
                    gc.collect()
                    device = memory_stats(ctx) if ctx is not None else None
                    marks[record["epoch"]] = tracemalloc.get_traced_memory()[0], device

        data = loader(8, batch_size=8)
        try:
            self.fit(model(), data, epochs=10 * tenth, validation=loader(8), callbacks=[Mark()])
        finally:
            tracemalloc.stop()
        (_, device), (host, _), (later_host, later_device) = marks.values()
        records = tenth * 80 // 100 * 2 * 10 * 100  # bytes: two records an epoch of ten figures
        self.assertLess(later_host - host, records)
        if self.ctx is not None:
            self.assertEqual(later_device.in_use_nbytes, device.in_use_nbytes)
            self.assertEqual(later_device.reserved_nbytes, device.reserved_nbytes)
            self.assertEqual(later_device.device_allocations, device.device_allocations)

    # ---- failures ----
    def wild_data(self, value: float) -> Loader:
        """Batches in order, one of whose inputs in step 8 is `value`."""
        x, labels = points(64)
        x = np.concatenate([x] * 2)
        x[64 + 3 * 16 + 5, 2] = value
        return Loader((x, np.concatenate([labels] * 2)), 16)

    def test_a_bad_input_is_named_with_step_and_rate(self) -> None:
        for value, kind in ((np.nan, "NaN"), (1e30, "infinity")):
            with self.subTest(value=value):
                net, optimizer = Explosive(), optim.SGD(1e-3, momentum=0.9)
                states: dict[int, Any] = {}
                keep = OnStep(
                    lambda run, states=states: states.update({run.step: run.state.read()})
                )
                with self.assertRaises(DivergedError) as caught:
                    self.fit(
                        net, self.wild_data(value), optimizer, loss=square, epochs=3,
                        callbacks=[keep], metrics=(), log_every=5,
                    )  # fmt: skip
                text = str(caught.exception)
                self.assertRegex(
                    text, r"the loss became NaN or infinite in step 8 \(epoch 1, batch 8"
                )
                self.assertIn("learning rate 0.001", text)
                self.assertRegex(text, f"is the first node that made {kind}")
                node = r"(linear|matmul|layer)" if value != value else r"exp\.\d+ \(exp\)"
                self.assertRegex(text, node)
                self.assertFalse(settings.debug_nan)
                for name, got in final(net, optimizer).items():
                    np.testing.assert_array_equal(got, states[7][name], name)

    def test_an_update_that_breaks_a_parameter_is_found_before_the_loss_shows_it(self) -> None:
        net, optimizer = Explosive(), optim.SGD(1e-3)
        at_6 = OnStep(lambda run: optimizer.lr.set(np.float32(3e38)) if run.step == 6 else None)
        with self.assertRaisesRegex(
            DivergedError, r"between step 6 and \d+, but not when .* repeated"
        ):  # the rate that a callback sets is no part of a repetition
            self.fit(net, optimizer=optimizer, loss=square, callbacks=[at_6], epochs=9, log_every=9)
        huge = optim.SGD(3e38)
        with self.assertRaises(DivergedError) as caught:
            self.fit(Explosive(), optimizer=huge, loss=square, epochs=2)
        self.assertRegex(
            str(caught.exception), r"^model\.layer\.\w+ became NaN or infinite in step 1 "
        )
        self.assertIn("learning rate 3e+38", str(caught.exception))
        self.assertRegex(str(caught.exception), r"sgd_update.* is the first node that made inf")

    def test_the_search_goes_back_to_the_newest_good_state(self) -> None:
        runs: list[int] = []
        run = ad.Executor.run

        def counted(self: ad.Executor, *arguments: Any) -> Any:
            runs.append(1)
            return run(self, *arguments)

        # Eight steps, as many of them again as follow the good state, and the bad one by node.
        for good_for, count in ((60.0, 8 + 8 + 1), (-1.0, 8 + 3 + 1)):
            runs.clear()
            with (
                mock.patch.object(train.run, "_FINITE_STATE_SECONDS", good_for),
                mock.patch.object(ad.Executor, "run", counted),
                self.assertRaisesRegex(DivergedError, "in step 8 "),
            ):
                data, rate = self.wild_data(np.nan), optim.SGD(1e-3)
                self.fit(Explosive(), data, rate, loss=square, log_every=5)
            self.assertEqual(len(runs), count)

    def test_the_last_good_checkpoint_is_kept(self) -> None:
        for steps in (1, 3):
            with self.subTest(steps=steps):
                folder = self.folder / f"{steps}"
                keep = train.Checkpoint(folder, steps=steps)
                with self.assertRaises(DivergedError):
                    self.fit(
                        Explosive(), self.wild_data(np.inf), loss=square, callbacks=[keep],
                        optimizer=optim.SGD(1e-3), metrics=(), log_every=100,
                    )  # fmt: skip
                saved = train.load(keep.last)
                self.assertEqual(saved.header["step"], 7 // steps * steps)
                for name, value in saved.tensors.items():
                    self.assertTrue(np.isfinite(value).all(), name)

    def test_what_is_infinite_from_the_start_is_let_be(self) -> None:
        class Masked(nn.Module):
            def __init__(self) -> None:
                self.inner = model(0.0)
                mask = np.float32([0, 0, -np.inf])
                self.mask = ad.Parameter(mask, "mask", trainable=False)

            def forward(self, x: ad.Node) -> ad.Node:
                return self.inner(x) + ad.maximum_op(self.mask, -1e9)

        data = Loader((points()[0], np.zeros(70, np.int64)), 16)
        self.fit(Masked(), data, callbacks=[train.Checkpoint(self.folder)])
        self.assertTrue((self.folder / "last.safetensors").exists())

    def test_ctrl_c_ends_after_a_step_and_saves(self) -> None:
        def press(run: train.Run) -> None:
            if run.step == 13:
                signal.raise_signal(signal.SIGINT)

        wanted, optimizer = model(), sgd()
        self.fit(wanted, optimizer=optimizer, epochs=4)
        keep = train.Checkpoint(self.folder)
        message = (
            r"^2 of 4 epochs and 3 of 5 batches, 13 steps; the state of step 13 is in "
            r".*last\.safetensors$"
        )
        with self.assertRaisesRegex(KeyboardInterrupt, message):
            self.fit(model(), epochs=4, callbacks=[OnStep(press), keep])
        self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)
        net, resumed = model(), sgd()
        self.fit(net, optimizer=resumed, epochs=4, resume=self.folder)
        for name, value in final(wanted, optimizer).items():
            np.testing.assert_array_equal(final(net, resumed)[name], value, name)

    def test_ctrl_c_leaves_the_history_and_a_model_to_train_on(self) -> None:
        def press(run: train.Run) -> None:
            if run.step == 13:
                signal.raise_signal(signal.SIGINT)

        undisturbed, net = model(), model()
        wanted = self.fit(undisturbed, epochs=2, log_every=4)
        with self.assertRaisesRegex(KeyboardInterrupt, "^2 of 4 epochs and 3 of 5 batches, 13"):
            self.fit(net, epochs=4, callbacks=[OnStep(press)], log_every=4)
        self.assertEqual(net.history.column("loss"), wanted.column("loss"))
        self.assertEqual(max(point["step"] for point in net.history.curve), 12)
        again = self.fit(net, epochs=1)  # from the weights of step 13
        self.assertIs(net.history, again)
        self.assertLess(again.column("loss")[0], wanted.column("loss")[0])

    def test_ctrl_c_when_no_step_is_left_is_not_lost(self) -> None:
        def press(*_: Any) -> None:
            signal.raise_signal(signal.SIGINT)

        for when in ("on_start", "on_stop"):
            keep = train.Checkpoint(self.folder / when)
            self.fit(model(), epochs=2, callbacks=[keep])
            late = train.Callback()
            setattr(late, when, press)
            with self.subTest(when), self.assertRaisesRegex(KeyboardInterrupt, "^2 of 2 epochs, "):
                self.fit(model(), epochs=2, callbacks=[late], resume=keep.last)

    def test_a_second_ctrl_c_does_not_wait(self) -> None:
        def press(run: train.Run) -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

        stopped: list[str] = []

        class Last(train.Callback):
            def on_stop(self, run: train.Run) -> None:
                stopped.append(run.outcome)

        with self.assertRaises(KeyboardInterrupt):
            self.fit(model(), callbacks=[Last(), OnStep(press)])
        self.assertEqual(stopped, ["failed"])
        self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)

    def test_an_error_in_the_data_reaches_the_caller_and_all_callbacks(self) -> None:
        class Broken(Loader):
            def epoch(self, number: int, start: int = 0) -> Any:
                with contextlib.closing(super().epoch(number, start)) as feeds:
                    yield next(feeds)
                raise DataError("the third image is torn")

        outcomes: list[str] = []

        class Last(train.Callback):
            def on_stop(self, run: train.Run) -> None:
                outcomes.append(run.outcome)

        with self.assertRaisesRegex(DataError, "the third image is torn"):
            self.fit(model(), Broken(points(), 16), callbacks=[Last(), Last()])
        self.assertEqual(outcomes, ["failed", "failed"])

    def test_what_is_no_loader_metric_or_callback_is_named(self) -> None:
        with self.assertRaisesRegex(DataError, "expected a Loader of batches, got tuple"):
            train.fit(model(), points(), sgd(), ctx=self.ctx, quiet=True)
        with self.assertRaisesRegex(DataError, "expected a Loader of batches, got tuple"):
            train.evaluate(model(), points(), ctx=self.ctx)
        wrong: list[tuple[str, dict[str, Any]]] = [
            (
                "metrics is a list of objects of train.Metric, got \\['acc",
                {"metrics": ["accuracy"]},
            ),
            ("train.Metric, got .*Accuracy", {"metrics": train.accuracy}),
            ("train.Callback, got .*class", {"callbacks": [train.Progress]}),
            ("expected an optimizer such as .*, got 'adam'", {"optimizer": "adam"}),
            ("expected an optimizer such as .*, got .*class", {"optimizer": optim.Adam}),
        ]
        for message, options in wrong:
            with self.assertRaisesRegex(GraphError, message):
                self.fit(model(), **options)

    def test_numbers_that_make_no_run(self) -> None:
        for options in ({"epochs": 0}, {"log_every": 0}):
            with self.assertRaisesRegex(GraphError, "epochs and log_every >= 1"):
                self.fit(model(), **options)


class NumpyFit(Fit, unittest.TestCase):
    ctx = None


CpuFit, GpuFit = on_native_devices(Fit)

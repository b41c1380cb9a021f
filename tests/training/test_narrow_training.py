"""Training with Parameters stored in 16 bits: kernels, slots, updates and checkpoints."""

from __future__ import annotations

import functools
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import optim
from dlsys.dtypes import FLOAT16, FLOAT32, ROUNDING, bfloat16, host, is_narrow, rounded
from dlsys.errors import ShapeError
from dlsys.train.files import checkpoint
from dlsys.train.state import State
from support.devices import native_contexts

STEPS = 12
RULES: dict[str, Callable[[], Any]] = {
    "momentum": lambda: optim.SGD(0.01, momentum=0.9),
    "adam": lambda: optim.Adam(0.01),
    "clipped, averaged and accumulated": lambda: optim.Adam(
        0.01, clip_norm=1.0, accumulate=2, ema=0.9, weight_decay=0.01
    ),
}


class Mlp:
    """Two layers with batch and layer normalization, over data that they can learn."""

    def __init__(self, storage: Any, affine: Any = None, optimizer: Any = None) -> None:
        rng = np.random.default_rng(7)
        affine = affine or storage
        self.x = ad.Variable("x", (32, 12), storage)
        self.labels = ad.Variable("labels", (32, 4), storage)
        self.parameters = [
            ad.Parameter(rounded(value, bfloat16), name, dtype)
            for name, value, dtype in (
                ("w1", rng.normal(size=(16, 12)) / 4, storage),
                ("scale1", np.ones(16), affine),
                ("bias1", np.zeros(16), affine),
                ("scale2", np.ones(16), affine),
                ("bias2", np.zeros(16), affine),
                ("w2", rng.normal(size=(4, 16)) / 4, storage),
            )
        ]
        self.running = [
            ad.Parameter(np.full(16, value, np.float32), name, trainable=False)
            for name, value in (("mean", 0.0), ("variance", 1.0))
        ]
        w1, scale1, bias1, scale2, bias2, w2 = self.parameters
        hidden = ad.matmul_op(self.x, w1, trans_B=True)
        hidden = ad.relu_op(ad.batch_normalization(hidden, scale1, bias1, *self.running))
        hidden = ad.layer_normalization(hidden, scale2, bias2)
        logits = ad.matmul_op(hidden, w2, trans_B=True)
        self.loss = ad.mean_op(ad.softmaxcrossentropy_op(logits, self.labels))
        inputs = rounded(rng.normal(size=(32, 12)), bfloat16)
        labels = np.eye(4, dtype=np.float32)[np.argmax(inputs[:, :4], axis=1)]
        self.feeds = {
            x: v.astype(host(storage)) for x, v in ((self.x, inputs), (self.labels, labels))
        }
        self.optimizer = optimizer or optim.SGD(0.1, momentum=0.9)
        self.train = self.optimizer.minimize(self.loss, self.parameters)

    def trained(self, ctx: Any, steps: int = STEPS) -> tuple[list[float], ad.Executor]:
        executor = ad.Executor([self.loss, self.train], ctx)
        run = lambda: executor.run(self.feeds, convert_to_numpy_ret_vals=True)[0]  # noqa: E731
        return [float(run()) for _ in range(steps)], executor

    def named_state(self) -> list[tuple[str, Any]]:
        return [(p.name, p) for p in (*self.parameters, *self.running)]

    def state(self, executor: ad.Executor) -> State:
        return State(self, self.optimizer, SimpleNamespace(inputs=list), executor)


def on_each_device(test: Callable) -> Callable:
    """The test on each native device with each storage type."""

    @functools.wraps(test)
    def tests(self: Any) -> None:
        for ctx in native_contexts():
            for storage in (bfloat16, FLOAT16):
                with self.subTest(ctx=ctx, storage=storage):
                    test(self, ctx, storage)

    return tests


class NarrowTraining(unittest.TestCase):
    @on_each_device
    def test_losses_are_those_of_float32_within_the_rounding(self, ctx: Any, storage: Any) -> None:
        """A step rounds each weight once, so that errors of the loss grow with the steps at most.
        Measured: 0.7 of what is allowed.
        """
        for name, make in RULES.items():
            for affine in (storage, FLOAT32):
                wanted, _ = Mlp(FLOAT32, optimizer=make()).trained(ctx)
                losses, _ = Mlp(storage, affine, make()).trained(ctx)
                error = np.abs(np.array(losses) - wanted)
                allowed = ROUNDING[storage] * (1 + np.arange(STEPS))
                self.assertTrue((error <= allowed).all(), (name, error / allowed))
                self.assertLess(losses[-1], losses[0] - 0.05, name)

    @on_each_device
    def test_slots_are_float32_and_updates_take_no_casts(self, ctx: Any, storage: Any) -> None:
        for affine in (storage, FLOAT32):
            net = Mlp(storage, affine, optim.Adam(0.01, ema=0.9))
            _, executor = net.trained(ctx, 2)
            for p in net.parameters[:1]:
                slots = net.optimizer.slots[p].values()
                self.assertEqual({slot.storage.array.dtype for slot in slots}, {FLOAT32})
                self.assertIs(p.storage.array.dtype, storage)
                self.assertEqual(net.optimizer.ema.averages[p].dtype, FLOAT32)
            self.check_plan(executor, affine)

    def check_plan(self, executor: ad.Executor, affine: Any) -> None:
        """Normalizations read and write two bytes an element of x; cast are at most the sums, to
        gradients of Parameters of 16 bits.
        """
        ((runner, *_),) = executor._runners.values()
        seen = set()
        for step in runner.plan.steps:
            kernel = step.node.op.kernel or ""
            own = [*step.inputs, *step.outputs]
            if "norm" in kernel and kernel != "global_norm":
                large = [value.spec for value in own if value.spec.shape == (32, 16)]
                self.assertTrue(all(is_narrow(spec.dtype) for spec in large), kernel)
                seen.add(kernel)
            if kernel == "adam_update":
                seen.add(kernel)
            if kernel == "cast" and own[0].spec.shape == (16,):
                self.assertTrue(is_narrow(affine) and is_narrow(own[1].spec.dtype))
        self.assertIn("adam_update", seen)
        self.assertGreaterEqual(len(seen), 5)
        if executor.target.has("batch_normalize_map"):  # the fusion is for these types, too
            self.assertTrue({"batch_normalize_map", "batch_normalize_map_sums"} <= seen, seen)

    @on_each_device
    def test_a_checkpoint_continues_to_the_bit(self, ctx: Any, storage: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            net = Mlp(storage, optimizer=RULES["clipped, averaged and accumulated"]())
            _, executor = net.trained(ctx, 5)
            state = net.state(executor)
            checkpoint.save(path, state.read(), {}, state.narrow)
            rest = net.trained(ctx, 4)[0]
            other = Mlp(storage, optimizer=RULES["clipped, averaged and accumulated"]())
            again = other.state(ad.Executor([other.loss, other.train], ctx))
            saved = checkpoint.load(path).tensors
            again.check("the checkpoint", saved)
            again.write(saved)
            self.assertEqual(other.trained(ctx, 4)[0], rest)

    def test_what_is_of_the_wrong_storage_is_refused(self) -> None:
        x = ad.Variable("x", (4, 3), "bfloat16")
        scale, running = (
            ad.Parameter(np.ones(3, np.float32), name, dtype)
            for name, dtype in (("scale", "float16"), ("running", "bfloat16"))
        )
        bias = ad.Variable("bias", (3,), np.float32)
        for call, message in (
            (lambda: ad.layer_normalization(x, scale, bias), "scale is float16, expected bfloat16"),
            (
                lambda: ad.batch_normalization(x, bias, bias, running, running, training=False),
                "running is bfloat16, expected float32 as x is bfloat16",
            ),
        ):
            with self.assertRaisesRegex(ShapeError, message):
                call()


if __name__ == "__main__":
    unittest.main()

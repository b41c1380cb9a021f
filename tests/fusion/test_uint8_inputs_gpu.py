"""Batches that stay bytes, on a GPU: that training sees no difference. The kernels alone are in
test_uint8_kernels.py.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.data import Dataset, DeviceLoader
from dlsys.graph.node import Node
from dlsys.runtime.device import Context, gpu
from dlsys.runtime.library import load
from executor.tune.test_tune import Cached
from fusion.test_uint8_inputs import Layer, Pixels, trained
from fusion.test_weight_update import FLOAT32, OPTIMIZERS
from support.devices import require
from support.fusion import without

PRECISIONS = ("fp32", "tf32")


def as_floats() -> AbstractContextManager:
    """Executors without the pass."""
    return without("uint8_inputs")


def one_layer(shape: Sequence[int], **options: Any) -> tuple:
    pixels = Pixels(*shape, batch=37)
    layer = Layer(pixels.flat, 12, **options)
    return [layer.y, trained(layer), pixels.advance], layer.parameters


def four_layers() -> tuple:
    """The first reads no bytes, two read them as the same rows."""
    pixels = Pixels(2, 8, batch=30)
    rows = ad.reshape_op(pixels.x, (60, 8))
    layers = [
        Layer(ad.constant(np.full((30, 7), 2, FLOAT32)), 40),
        Layer(pixels.flat, transposed=True, seed=1),
        Layer(rows, 3, seed=2),
        Layer(rows, 20, bias=False, seed=3),
    ]
    parameters = [p for layer in layers for p in layer.parameters]
    return [trained(*layers), pixels.advance, *(x.y for x in layers)], parameters


def under_a_rule(optimizer: Callable[[], optim.Optimizer]) -> tuple:
    """Gradients do not depend on weights, which rules make no small integers of."""
    linear, pixels = {"activation": None}, Pixels(1, 4, 8, batch=20)
    layers = [
        Layer(pixels.flat, 6, **linear),
        Layer(pixels.flat, 9, transposed=True, seed=1, **linear),
    ]
    made, parameters = optimizer(), [p for x in layers for p in x.parameters]
    train = made.minimize(ad.sum_node_list([x.loss for x in layers]), parameters)
    return [train, pixels.advance], [*parameters, *(state for _, state in made.named_state())]


def network() -> tuple[DeviceLoader, nn.MLP, list[Node]]:
    """Of pixels of all values, whose weights tf32 rounds."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 1, 28, 28)).astype(np.uint8)
    loader = DeviceLoader(Dataset(images, rng.integers(0, 5, 60)), 25, shuffle=True, seed=3)
    x, labels = loader.inputs()
    model = nn.MLP((784, 48, 5), seed=0)
    loss = ad.softmax_cross_entropy(model(x), labels)
    train = optim.Adam(0.01, eps=1e-3).minimize(loss, model.parameters())
    return loader, model, [loss, train]


@require(gpu(0))
class GpuTraining(unittest.TestCase):
    """Steps on a GPU that read bytes, against those that read floats and against numpy."""

    ctx: Context = gpu(0)

    def run_on(
        self, ctx: Context | None, build: Callable[[], tuple], precision: str = "fp32"
    ) -> list[np.ndarray]:
        """What is fetched of some runs, of which a GPU records the second, and then all states."""
        fetches, states = build()
        for state in states:
            state.to(ctx)
        executor = ad.Executor(fetches, ctx, precision)
        values = [executor.run({}, True) for _ in range(4)]
        if ctx is not None:
            self.kernels = [step.node.op.name for step in executor.plan({}).steps]
        return [y for run in values for y in run if y is not None] + [p.asnumpy() for p in states]

    def check(self, build: Callable[[], tuple], *, exact: bool = True) -> None:
        """The bits are those of floats, and where nothing is rounded those of numpy."""
        for precision in PRECISIONS:
            with as_floats():
                wanted = self.run_on(self.ctx, build, precision)
            self.assertIn("shuffled_batch", self.kernels)
            found = self.run_on(self.ctx, build, precision)
            self.assertIn("shuffled_rows", self.kernels)
            self.assertNotIn("shuffled_batch", self.kernels)
            for got, right, numpys in zip(found, wanted, self.run_on(None, build), strict=True):
                np.testing.assert_array_equal(got, right)
                np.testing.assert_allclose(got, numpys, rtol=0 if exact else 1e-4)

    def test_steps_have_the_bits_of_floats(self) -> None:
        for shape in ((16,), (1, 4, 8), (1, 28, 28), (33,), (1,)):
            for transposed in (False, True):
                for bias in (False, True):
                    with self.subTest(shape=shape, transposed=transposed, bias=bias):
                        self.check(partial(one_layer, shape, transposed=transposed, bias=bias))

    def test_updates_with_and_without_bytes(self) -> None:
        self.check(four_layers)
        names = self.kernels
        self.assertEqual([name for name in names if "update" in name], ["matmul_sgd_update"])

    def test_every_rule(self) -> None:
        for optimizer in OPTIMIZERS:
            with self.subTest(optimizer=optimizer().rule):
                self.check(partial(under_a_rule, optimizer), exact=False)

    def test_training_follows_the_reference(self) -> None:
        found = []
        for ctx, precision in ((None, "fp32"), (self.ctx, "fp32"), (self.ctx, "tf32")):
            loader, model, fetches = network()
            executor = ad.Executor(fetches, ctx, precision)
            names = [step.node.op.name for step in executor.plan({}).steps]
            self.assertEqual("matmul_u8_bias" in names, ctx is not None)
            found.append([float(executor.run({}, True)[0]) for _ in range(8)])
        np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
        np.testing.assert_allclose(found[2], found[0], rtol=2e-3)  # factors of 10 bits
        self.assertNotEqual(found[2], found[1])

    def test_runs_give_the_same_bits(self) -> None:
        for precision in PRECISIONS:
            bits = []
            for many in (False, True, False, True):
                loader, model, fetches = network()
                executor = ad.Executor(fetches, self.ctx, precision)
                if many:
                    executor.run_many(6)
                else:
                    for _ in range(6):
                        executor.run()
                values = [loader.step, *model.parameters()]
                bits.append(b"".join(value.asnumpy().tobytes() for value in values))
            self.assertEqual(len(set(bits)), 1)

    def test_every_step_passes_the_check(self) -> None:
        for precision in PRECISIONS:
            ad.Executor(network()[2], self.ctx, precision).check({})


@require(gpu(0))
class GpuChoosing(Cached):
    """Products of bytes by measurement."""

    def test_the_fastest_is_used(self) -> None:
        names = load().algorithms("cuda", "matmul_u8_bias")
        best = "tensor 64x32 by 2"
        found = []
        for mode in ("full", "cached", "off"):
            self.mode(mode)
            with self.times(heuristic=10, **dict.fromkeys(names, 10) | {best: 5}) as said:
                executor = ad.Executor(network()[2], gpu(0), "tf32")
                found.append([executor.run({}, True)[0] for _ in range(3)])
                chosen = executor.report().plans[0].algorithms
            self.assertEqual(chosen, (f"matmul_u8_bias by {best}",) * (mode != "off"))
            if mode == "full":
                self.assertRegex(said[0], f"measured matmul_u8_bias .*: {best} 5.0 us")
                self.assertNotIn("wrong", "".join(said))
        self.assertEqual(found[0], found[1])
        np.testing.assert_allclose(found[0], found[2], rtol=1e-5)

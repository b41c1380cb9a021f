"""The error class of the algorithms of convolution: what each is off by, and that times alone take
none of another class than the precision allows.
"""

from __future__ import annotations

import itertools
import unittest
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys.errors import DeviceError, KernelError
from dlsys.executor.tune import autotune as tune
from dlsys.executor.tune.microbenchmark import DRAWN, Microbenchmark
from dlsys.learn.conv import DIRECTIONS, Shape, errors_of, node_of
from dlsys.rungs import Algorithm
from dlsys.runtime.device import Context
from dlsys.runtime.interface import interface
from dlsys.runtime.library import load
from support.devices import on_native_devices

SHAPES = [Shape(4, 16, 14, 16, 3, 1, 1), Shape(4, 16, 14, 16, 5, 1, 2), Shape(8, 6, 14, 16, 5)]
SUM = 8  # units of a sum in any order: 3 at most were measured


class Accuracy:
    ctx: Context

    def test_units(self) -> None:
        drawn = np.random.default_rng(0).standard_normal(DRAWN).astype(np.float32)
        seen = set()
        for shape, direction in itertools.product(SHAPES, DIRECTIONS):
            node = node_of(shape, direction, "fp32")
            benchmark = Microbenchmark(node, self.ctx, drawn)
            for number, name in enumerate(("", *self.algorithms(node))):
                if name.count(" ") and name not in interface.units:
                    continue  # a tile
                most = interface.units.get(name, SUM) if name else interface.limits["units_fp32"]
                with self.subTest(shape=str(shape), direction=direction, algorithm=name):
                    try:
                        off = errors_of(benchmark, shape, direction, Algorithm(number, name))
                    except (KernelError, DeviceError):
                        continue  # it cannot compute this, or its library is not here
                    self.assertLessEqual(off.max(), most)
                    seen.add(name)
        self.assertLessEqual({"", "naive", "im2col", "implicit", "winograd 2x2"}, seen)

    def test_the_autotuner_leaves_the_inaccurate(self) -> None:
        fast = "winograd 4x4"
        most = interface.limits["units_fp32"]
        for units, precision, taken in (
            (most, "fp32", True), (most + 1, "fp32", False), (most + 1, "3xtf32", False),
            (most + 1, "tf32", True), (interface.limits["units_tf32"] + 1, "tf32", False),
        ):  # fmt: skip
            node = node_of(SHAPES[0], "forward", precision)
            named = node.derive(node.inputs, node.spec)
            named.attrs = {**node.attrs, "algo": "winograd"}
            with mock.patch.dict(interface.units, {fast: units}):
                for one in (node, named):
                    names = {str(each) for each in tune._candidates(one, self.ctx)}
                    with self.subTest(units=units, precision=precision, attrs=one.attrs):
                        self.assertEqual(fast in names, taken)
                        self.assertIn("winograd 2x2", names)
                # Neither does a measurement of before; by its own name it runs.
                number = self.algorithms(node).index(fast) + 1
                measured = mock.Mock(algorithm=fast, source="")
                found = tune._algorithm(node, self.ctx, measured)
                self.assertEqual(found, Algorithm(number, fast) if taken else None)
                x, f = (ad.Variable(k, shape=a) for k, a in zip("xf", SHAPES[0].arrays))
                executor = ad.Executor([ad.conv2d(x, f, padding=1, algo=fast)], self.ctx)
                (step,) = executor.plan({x: x.spec.shape, f: f.spec.shape}).steps
                self.assertEqual(step.node.attrs["algorithm"].name, fast)

    def algorithms(self, node: ad.Node) -> tuple[str, ...]:
        return load().algorithms(self.ctx.kernel_device, node.op.kernel)


CpuAccuracy, GpuAccuracy = on_native_devices(Accuracy)


class Names(unittest.TestCase):
    def test_every_entry_is_an_algorithm(self) -> None:
        """Of any device whose kernels the library has."""
        there = {kernel for kernel in load().signature if kernel[1] == "conv2d"}
        known = set(itertools.chain(*(load().algorithms(*kernel) for kernel in there)))
        self.assertLessEqual({"winograd", "winograd 2x2", "winograd 4x4", "fft"}, known)
        if ("cuda", "conv2d") in there:
            self.assertLessEqual(set(interface.units), known)

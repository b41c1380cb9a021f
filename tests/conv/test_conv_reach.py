"""One element that is not finite makes those results not finite that it has a part in.

What it meets of the zeros that pad x is a part: 0 · NaN is NaN in the formula of families/conv.py,
though depthwise kernels leave those products out, so that there either is right. Beyond that no
result may show it, with one exception: a GPU makes gradients for the data by products that pad dy
with zeros, as those of cuDNN do, where a bad filter element reaches elements that it has no part
in. To find that out would take a launch more.
"""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Iterator
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.runtime.device import Context, cpu, gpu
from support.devices import fewer, require

CASES = [
    (channels, filters, groups, dict(stride=stride, padding=padding, dilation=dilation))
    for (channels, filters, groups), stride, padding, dilation in itertools.product(
        ((2, 3, 1), (4, 6, 2), (3, 6, 3), (1, 20, 1)), (1, 2, 3), (0, 1, ((0, 2), (1, 0))), (1, 2)
    )
]


class Reach:
    ctx: Context | None = None
    pads_dy = False

    def run_on(self, nodes: list[ad.Node], feeds: dict, ctx: Any) -> list[np.ndarray]:
        executor = ad.Executor(nodes, ctx)
        used = set(executor.topo_order)
        given = {x: value for x, value in feeds.items() if x in used}
        return executor.run(given, convert_to_numpy_ret_vals=True)

    def bad_feeds(
        self, rng: np.random.Generator, shapes: list[tuple[int, ...]]
    ) -> Iterator[tuple[int, list[np.ndarray], list[np.ndarray]]]:
        """The bad input's index; the inputs; and positive ones, 0 but for the bad element."""
        for which, value in itertools.product(range(3), (np.nan, np.inf)):
            arrays = [rng.uniform(1, 2, shape).astype(np.float32) for shape in shapes]
            marks = [np.ones(shape, np.float32) for shape in shapes]
            at = rng.integers(arrays[which].size)
            arrays[which].flat[at] = value
            marks[which].fill(0)
            marks[which].flat[at] = 1
            yield which, arrays, marks

    def test_what_is_not_finite_stays_within_its_reach(self) -> None:
        rng = np.random.default_rng(0)
        for channels, filters, groups, attrs in CASES[:: len(CASES) // fewer(len(CASES))]:
            shapes = [(2, channels, 7, 8), (filters, channels // groups, 3, 2)]
            inputs = [ad.Variable(name, dtype=np.float32) for name in ("x", "f", "dy")]
            y = ad.conv2d(*inputs[:2], groups=groups, **attrs)
            ones = {v: np.ones(s, np.float32) for v, s in zip(inputs, shapes)}
            shapes.append(self.run_on([y], ones, None)[0].shape)
            nodes = [y, *ad.gradients(ad.sum_op(y * inputs[2]), inputs[:2])]
            for which, arrays, marks in self.bad_feeds(rng, shapes):
                got = self.run_on(nodes, dict(zip(inputs, arrays)), self.ctx)
                part = self.run_on(nodes, dict(zip(inputs, marks)), None)
                for name, result, size in zip(("y", "dx", "df"), got, part):
                    if (name, which) in (("y", 2), ("dx", 0), ("df", 1)):
                        continue  # it does not depend on that
                    with self.subTest(name, bad=inputs[which].name, groups=groups, **attrs):
                        bad = ~np.isfinite(result)
                        self.assertTrue(bad[size != 0].all())
                        padded = attrs["padding"] != 0 and name != "dx" and which > 0
                        if not padded and not (self.pads_dy and (name, which) == ("dx", 1)):
                            self.assertFalse(bad[size == 0].any())


class NumpyReach(Reach, unittest.TestCase):
    pass


@require(cpu(0))
class CpuReach(Reach, unittest.TestCase):
    ctx = cpu(0)


@require(gpu(0))
class GpuReach(Reach, unittest.TestCase):
    ctx = gpu(0)
    pads_dy = True

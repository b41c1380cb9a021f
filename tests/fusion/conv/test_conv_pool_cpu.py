"""The CPU's kernels of small convolutions: batches that fill no vector, threads, what is not
finite.
"""

from __future__ import annotations

import ctypes
import unittest
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dlsys import autodiff as ad
from dlsys.runtime.device import cpu
from dlsys.runtime.library import load
from fusion.conv.test_conv_pool import BACKWARD, Layer, run
from support.devices import require
from support.fusion import require_fusion

# Layers of several kinds, by the shape of an image and arguments of Layer.
LAYERS = {
    "lenet": ((1, 28, 28), dict(channels=1, filters=6, size=5, padding=2)),
    "lenet's second": ((6, 14, 14), dict(channels=6, filters=16, size=5)),
    "odd planes": ((3, 13, 11), dict(channels=3, filters=7, size=(2, 4), padding=((1, 0), (0, 3)))),
    "pool 3": ((5, 16, 17), dict(channels=5, filters=5, size=3, padding=1, pool=3, relu="")),
    "1 x 1": ((9, 7, 6), dict(channels=9, filters=3, size=1, bias=False)),
}  # fmt: skip


@contextmanager
def threads(count: int) -> Iterator[None]:
    """With so many threads of the CPU device."""
    library, before = load(), ctypes.c_int32()
    library.check(library.cdll.DLCpuGetThreads(ctypes.byref(before)))
    library.check(library.cdll.DLCpuSetThreads(count))
    try:
        yield
    finally:
        library.check(library.cdll.DLCpuSetThreads(before.value))


@require(cpu(0))
class Blocks(unittest.TestCase):
    def test_an_image_does_not_depend_on_its_batch(self):
        """Lanes are images of a batch, or strips of an image where they are few."""
        for name, (shape, attrs) in LAYERS.items():
            layer = Layer(**attrs)
            feeds = layer.feeds((37, *shape))
            whole = run(layer.fetches, feeds, cpu(0))[:2]  # y and the gradient for x
            for first, last in ((0, 1), (1, 3), (5, 10), (2, 15), (3, 19), (36, 37)):
                with self.subTest(name, first=first, last=last):
                    part = {
                        node: value[first:last] if node in {layer.x, layer.weights} else value
                        for node, value in feeds.items()
                    }
                    for of_part, of_whole in zip(run(layer.fetches, part, cpu(0)), whole):
                        np.testing.assert_array_equal(of_part, of_whole[first:last])

    def test_any_number_of_threads_gives_the_same_bits(self):
        for name, (shape, attrs) in LAYERS.items():
            for images in (1, 23, 150):
                layer = Layer(**attrs)
                feeds = layer.feeds((images, *shape))
                results = []
                for count in (1, 2, 5):
                    with threads(count):
                        results.append([a.tobytes() for a in run(layer.fetches, feeds, cpu(0))])
                with self.subTest(name, images=images):
                    self.assertEqual(results[0], results[1])
                    self.assertEqual(results[0], results[2])

    def test_sums_over_a_batch_are_those_of_its_parts(self):
        for name, (shape, attrs) in LAYERS.items():
            with self.subTest(name):
                layer = Layer(**attrs)
                feeds = layer.feeds((50, *shape))
                halves = []
                for half in (slice(0, 21), slice(21, 50)):
                    part = {**feeds, layer.x: feeds[layer.x][half]}
                    part[layer.weights] = feeds[layer.weights][half]
                    halves.append(run(layer.gradients[1:], part, cpu(0)))
                for total, *parts in zip(run(layer.gradients[1:], feeds, cpu(0)), *halves):
                    scale = 1e-5 * np.abs(total).max()
                    np.testing.assert_allclose(total, sum(parts), atol=scale)


@require_fusion("conv_pool")
@require(cpu(0))
class NotFinite(unittest.TestCase):
    def test_a_gradient_that_is_not_finite_reaches_its_own_patch_only(self):
        for bad in (np.nan, np.inf):
            for name, (shape, attrs) in LAYERS.items():
                with self.subTest(name, bad=bad):
                    layer = Layer(**{**attrs, "relu": ""})
                    feeds = layer.feeds((3, *shape))
                    feeds[layer.weights][1, 2, 1, 1] = bad
                    self.assertIn(BACKWARD[0], layer.names(feeds, cpu(0)))
                    got, wanted = (run(layer.gradients, feeds, ctx)[0] for ctx in (cpu(0), None))
                    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
                    good = np.isfinite(wanted)
                    self.assertTrue(0 < (~good).sum() < good.sum())
                    np.testing.assert_allclose(got[good], wanted[good], rtol=1e-4, atol=1e-5)

    def test_what_relu_cuts_off_passes_nothing_on(self):
        x, f = ad.Variable("x"), ad.Variable("f")
        weights = ad.Variable("weights")
        y = ad.max_pool2d(ad.relu_op(ad.conv2d(x, f)), 2)
        dx, df = ad.gradients(ad.sum_op(y * weights), [x, f])
        planes = np.ones((1, 1, 4, 4), np.float32)
        planes[:, :, :2, :2] = -1
        scale = np.ones((1, 1, 2, 2), np.float32)
        scale[0, 0, 0, 0] = np.nan
        feeds = {x: planes, f: np.full((1, 1, 1, 1), 2, np.float32), weights: scale}
        of_x, of_f = run([dx, df], feeds, cpu(0))
        np.testing.assert_array_equal(of_f, [[[[3]]]])
        np.testing.assert_array_equal(of_x[0, 0, :2, :2], 0)
        self.assertEqual(of_x.sum(), 6)

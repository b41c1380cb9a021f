"""Small pooled convolutions in numpy, images innermost: as the plain operators compute them."""

from __future__ import annotations

import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys.ops.conv.tiles import MOST_CHANNELS, Tiles
from fusion.conv.test_conv_pool import BACKWARD, FORWARD, LAYERS, LEFT, Layer, run
from support.fusion import require_fusion


@require_fusion("conv_pool")
class Values(unittest.TestCase):
    def test_as_the_plain_operators(self) -> None:
        for name, (shape, attrs) in LAYERS.items():
            layer = Layer(**attrs)
            feeds = layer.feeds(shape)
            names = layer.names(feeds, None)
            few = max(attrs["channels"], attrs["filters"]) <= MOST_CHANNELS
            with self.subTest(name):
                self.assertEqual(FORWARD in names, few)
                self.assertEqual(set(BACKWARD) <= set(names), few)
                for got, wanted in zip(
                    run(layer.fetches, feeds, None), run(layer.fetches, feeds, None, fused=False)
                ):
                    self.assertEqual(got.shape, wanted.shape)
                    # Sums in another order: measured at most 6e-7 of the largest, 937 images.
                    scale = 4e-6 * np.abs(wanted).max(initial=0)
                    np.testing.assert_allclose(got, wanted, rtol=0, atol=scale)

    def test_what_windows_of_this_kind_are_not_stays(self) -> None:
        for name, (shape, attrs) in LEFT.items():
            if name == "9 offsets":
                continue  # numpy has no limit on the size of filters
            with self.subTest(name):
                layer = Layer(**attrs)
                self.assertNotIn(FORWARD, layer.names(layer.feeds(shape), None))

    def test_float64_is_computed_plainly(self) -> None:
        layer = Layer(channels=3, filters=5, size=3, padding=1)
        feeds = {x: np.float64(a) for x, a in layer.feeds((3, 3, 9, 11)).items()}
        for got, wanted in zip(
            run(layer.fetches, feeds, None), run(layer.fetches, feeds, None, fused=False)
        ):
            self.assertEqual(got.dtype, np.float64)
            np.testing.assert_array_equal(got, wanted)

    def test_what_is_not_finite(self) -> None:
        shape, attrs = LAYERS["one image"]
        for value in (np.inf, -np.inf, np.nan):
            for relu in ("before", "after", ""):
                layer = Layer(**{**attrs, "relu": relu})
                for operand in (layer.x, layer.f, layer.b, layer.weights):
                    feeds = {x: a.copy() for x, a in layer.feeds(shape).items()}
                    feeds[operand].reshape(-1)[feeds[operand].size // 2] = value
                    got = run(layer.fetches, feeds, None)
                    wanted = run(layer.fetches, feeds, None, fused=False)
                    with self.subTest(value=value, relu=relu, operand=operand.name):
                        for a, b in zip(got, wanted):
                            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    def test_the_first_of_equal_maxima_takes_the_gradient(self) -> None:
        layer = Layer(channels=1, filters=1, size=1, relu="")
        feeds = layer.feeds((2, 1, 4, 4))
        feeds[layer.x][:] = 1
        dx = run(layer.gradients[:1], feeds, None)[0]
        self.assertTrue(np.all(dx[:, :, ::2, ::2] != 0))
        self.assertEqual(np.count_nonzero(dx), 2 * 4)


class Chunks(unittest.TestCase):
    def test_they_are_about_equal(self) -> None:
        tiles = Tiles(1, 6, (28, 28), (5, 5), (2, 2), 2, (14, 14))
        for images in (1, 5, 100, 128, 937, 1000):
            sizes = [part.stop - part.start for part in tiles.chunks(images)]
            self.assertEqual(sum(sizes), images)
            self.assertLess(max(sizes) - min(sizes), len(sizes) + 1)
        self.assertEqual(list(tiles.chunks(0)), [])

    def test_steps_do_not_depend_on_what_the_scratch_held(self) -> None:
        layer = Layer(channels=2, filters=3, size=3, padding=1)
        feeds = layer.feeds((150, 2, 13, 12))
        executor = ad.Executor(layer.fetches)
        first = [a.copy() for a in executor.run(feeds, convert_to_numpy_ret_vals=True)]
        other = {x: np.full_like(a, 7) if x is layer.x else a for x, a in feeds.items()}
        executor.run(other)
        for a, b in zip(executor.run(feeds, convert_to_numpy_ret_vals=True), first):
            np.testing.assert_array_equal(a, b)


if __name__ == "__main__":
    unittest.main()

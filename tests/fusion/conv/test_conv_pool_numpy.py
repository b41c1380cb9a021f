"""Small pooled convolutions in numpy, one or several, images innermost: as the plain operators
compute them, and where they are fused.
"""

from __future__ import annotations

import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys.graph.node import Node
from dlsys.ops.conv import tiles
from fusion.conv.test_conv_pool import BACKWARD, FORWARD, LAYERS, LEFT, Layer, run
from support.fusion import require_fusion, without

CHAIN, GRADIENT = "conv2d_pool_chain", "conv2d_pool_chain_gradient"


@require_fusion("conv_pool", "conv_pool_chain")
class Values(unittest.TestCase):
    def test_as_the_plain_operators(self) -> None:
        for name, (shape, attrs) in LAYERS.items():
            layer = Layer(**attrs)
            feeds = layer.feeds(shape)
            names = layer.names(feeds, None)
            few = max(attrs["channels"], attrs["filters"]) <= tiles.MOST_CHANNELS
            with self.subTest(name):
                found = [each for each in names if "pool" in each]
                wanted = [CHAIN, GRADIENT] if few else ["max_pool2d", "max_pool2d_gradient"]
                self.assertEqual(found, wanted)
                for got, wanted in zip(
                    run(layer.fetches, feeds, None), run(layer.fetches, feeds, None, fused=False)
                ):
                    self.assertEqual(got.shape, wanted.shape)
                    # Sums in another order: measured at most 1.1e-6 of the largest, 937 images.
                    scale = 4e-6 * np.abs(wanted).max(initial=0)
                    np.testing.assert_allclose(got, wanted, rtol=0, atol=scale)

    def test_what_windows_of_this_kind_are_not_stays(self) -> None:
        for name, (shape, attrs) in LEFT.items():
            if name == "9 offsets":
                continue  # numpy has no limit on the size of filters
            with self.subTest(name):
                layer = Layer(**attrs)
                self.assertNotIn(CHAIN, layer.names(layer.feeds(shape), None))

    def test_without_chains(self) -> None:
        """Fused convolutions stay as `conv_pool` makes them, and numpy computes their bodies."""
        shape, attrs = LAYERS["same"]
        layer = Layer(**attrs)
        feeds = layer.feeds(shape)
        with without("conv_pool_chain"):
            self.assertLessEqual({FORWARD, *BACKWARD}, set(layer.names(feeds, None)))
            got = run(layer.fetches, feeds, None)
        for a, b in zip(got, run(layer.fetches, feeds, None, fused=False)):
            np.testing.assert_array_equal(a, b)

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


def network(
    shape: tuple[int, ...], *layers: dict, seed: int = 0
) -> tuple[Node, list[Node], list[Node], dict[Node, np.ndarray]]:
    """The loss of convolutions, relu and pools in a row; what each layer gives; x and parameters;
    feeds. A layer: filters, and perhaps size, padding, pool, relu, bias.
    """
    rng = np.random.default_rng(seed)
    x = ad.Variable("x")
    feeds = {x: rng.standard_normal(shape).astype(np.float32)}
    y, outputs, channels = x, [], shape[1]
    for k, layer in enumerate(layers):
        filters, size = layer["filters"], layer.get("size", (3, 3))
        f, b = ad.Variable(f"f{k}"), ad.Variable(f"b{k}")
        feeds[f] = 0.3 * rng.standard_normal((filters, channels, *size)).astype(np.float32)
        if layer.get("bias", True):
            feeds[b] = 0.3 * rng.standard_normal(filters).astype(np.float32)
        y = ad.conv2d(y, f, b if b in feeds else None, padding=layer.get("padding", 0))
        y = ad.relu_op(y) if layer.get("relu", True) else y
        y = ad.max_pool2d(y, layer.get("pool", 2))
        outputs.append(y)
        channels = filters
    wanted = list(feeds)
    return ad.sum_op(ad.sin_op(y)), outputs, wanted, feeds


LENET = dict(filters=6, size=(5, 5), padding=2), dict(filters=16, size=(5, 5))
NETWORKS = {
    "lenet": ((37, 1, 28, 28), LENET),
    "one image": ((1, 1, 28, 28), LENET),
    "chunks, the last of one image": ((33, 1, 28, 28), LENET),
    "chunks, the last with sums in more parts": ((127, 6, 16, 16), (dict(filters=16),)),
    "no images": ((0, 1, 28, 28), LENET),
    "three layers": (
        (21, 3, 31, 30),
        (dict(filters=4, padding=1), dict(filters=7, size=(2, 4)), dict(filters=2, padding=1)),
    ),
    "windows of 3 and 2": (
        (5, 2, 20, 23), (dict(filters=20, padding=1, pool=3), dict(filters=3, size=(1, 1))),
    ),
    "rows and columns that no window sees": (
        (18, 2, 15, 17), (dict(filters=5, size=(2, 3)), dict(filters=4, size=(2, 2), pool=3)),
    ),
    "padding on some sides": (
        (33, 1, 12, 12),
        (dict(filters=3, padding=((2, 0), (0, 1))), dict(filters=9, padding=((0, 2), (1, 0)))),
    ),
    "no bias, no relu": (
        (6, 3, 14, 14), (dict(filters=8, bias=False, relu=False), dict(filters=8, bias=False)),
    ),
    "a bias in the second only": (
        (6, 3, 14, 14), (dict(filters=8, bias=False), dict(filters=8, relu=False)),
    ),
}  # fmt: skip


@require_fusion("conv_pool", "conv_pool_chain")
class Networks(unittest.TestCase):
    def steps(self, fetches: list[Node], feeds: dict[Node, np.ndarray]) -> list[str]:
        executor = ad.Executor(fetches)
        used = {x: a.shape for x, a in feeds.items() if x in set(executor.topo_order)}
        names = [step.node.op.name for step in executor.plan(used).steps]
        return [name for name in names if "pool" in name]

    def compare(self, fetches: list[Node], feeds: dict[Node, np.ndarray]) -> None:
        """As the plain operators compute it."""
        got, wanted = (run(fetches, feeds, None, fused=fused) for fused in (True, False))
        for a, b in zip(got, wanted):
            self.assertEqual(a.shape, b.shape)
            # Sums in another order: of six draws of each network at most 4.7e-6 of the largest, of
            # a bias's gradient, whose terms cancel.
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max(initial=0))

    def test_as_the_plain_operators(self) -> None:
        for name, (shape, layers) in NETWORKS.items():
            loss, outputs, wanted, feeds = network(shape, *layers)
            for of in (wanted, wanted[1:]):  # with the gradient of the data, and without
                fetches = [outputs[-1], *ad.gradients(loss, of)]
                with self.subTest(name, data=len(of) == len(wanted)):
                    self.assertEqual(self.steps(fetches, feeds), [CHAIN, GRADIENT])
                    self.compare(fetches, feeds)

    def test_forward_alone(self) -> None:
        loss, outputs, _, feeds = network((21, 1, 28, 28), *LENET)
        self.assertEqual(self.steps([outputs[-1]], feeds), [CHAIN])
        self.compare([outputs[-1]], feeds)

    def test_values_that_somebody_wants_end_a_chain(self) -> None:
        loss, outputs, wanted, feeds = network((5, 1, 28, 28), *LENET)
        gradients = ad.gradients(loss, wanted[1:])
        between = ad.gradients(loss, [outputs[0]])
        for fetches in ([*outputs, *gradients], [outputs[1], *gradients, *between]):
            names = self.steps(fetches, feeds)
            self.assertEqual(sorted(names), [CHAIN, CHAIN, GRADIENT, GRADIENT])
            self.compare(fetches, feeds)
        read = ad.sum_op(outputs[0]) + loss
        fetches = [outputs[1], *ad.gradients(read, wanted[1:])]
        self.assertEqual(self.steps(fetches, feeds).count(CHAIN), 2)
        self.compare(fetches, feeds)

    def test_only_some_gradients(self) -> None:
        loss, outputs, (x, f0, b0, f1, b1), feeds = network((5, 1, 28, 28), *LENET)
        for of in ([f1, b1], [f1], [f0, f1], [f0], [b0, b1], [x], [x, f0, b1]):
            fetches = [outputs[-1], *ad.gradients(loss, of)]
            with self.subTest(of=[each.name for each in of]):
                self.compare(fetches, feeds)

    def test_several_ways_back(self) -> None:
        loss, outputs, wanted, feeds = network((5, 1, 28, 28), *LENET)
        other = ad.sum_op(outputs[-1])
        fetches = [*ad.gradients(loss, wanted), *ad.gradients(other, wanted)]
        self.assertEqual(self.steps(fetches, feeds).count(GRADIENT), 4)
        self.compare(fetches, feeds)

    def test_what_is_not_finite(self) -> None:
        """NaN and infinities go where the plain operators take them, and the next run is right."""
        loss, outputs, wanted, feeds = network(
            (3, 1, 16, 16), *LENET[:1], dict(filters=4, relu=False)
        )
        fetches = [outputs[-1], *ad.gradients(loss, wanted)]
        executor, plain = ad.Executor(fetches), run(fetches, feeds, None, fused=False)
        for value in (np.inf, -np.inf, np.nan):
            for operand in wanted:
                given = {x: a.copy() for x, a in feeds.items()}
                given[operand].reshape(-1)[given[operand].size // 2] = value
                got = executor.run(given, convert_to_numpy_ret_vals=True)
                with self.subTest(value=value, operand=operand.name):
                    for a, b in zip(got, run(fetches, given, None, fused=False)):
                        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
                for a, b in zip(executor.run(feeds, convert_to_numpy_ret_vals=True), plain):
                    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())

    def test_large_gradients_overflow_as_in_the_plain_operators(self) -> None:
        loss, outputs, wanted, feeds = network((3, 1, 16, 16), *LENET[:1], dict(filters=4))
        large = ad.sum_op(outputs[-1]) * 3e38
        fetches = ad.gradients(large, wanted)
        for a, b in zip(run(fetches, feeds, None), run(fetches, feeds, None, fused=False)):
            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
            self.assertFalse(np.isfinite(b).all())

    def test_feeds_that_are_not_contiguous_and_a_second_batch(self) -> None:
        loss, outputs, wanted, feeds = network((20, 1, 28, 28), *LENET)
        x, fetches = wanted[0], [outputs[-1], *ad.gradients(loss, wanted)]
        executor = ad.Executor(fetches)
        for batch in (20, 7, 20, 33):
            given = {**feeds, x: np.tile(feeds[x], (4, 1, 1, 1))[: 2 * batch : 2, :, ::-1]}
            got = executor.run(given, convert_to_numpy_ret_vals=True)
            for a, b in zip(got, run(fetches, given, None, fused=False)):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())

    def test_nodes_keep_nothing_of_a_plan(self) -> None:
        """Views of scratch belong to the steps of a plan, which other plans do not share."""
        loss, _, wanted, feeds = network((20, 1, 28, 28), *LENET)
        executor = ad.Executor(ad.gradients(loss, wanted))
        executor.run(feeds)
        plan = executor.plan({x: a.shape for x, a in feeds.items()})
        self.assertEqual([vars(step.node) for step in plan.steps if vars(step.node)], [])

    def test_ufuncs_have_their_buffer_back(self) -> None:
        loss, _, _, feeds = network((20, 1, 28, 28), *LENET)
        before = np.getbufsize()
        ad.Executor([loss]).run({x: a for x, a in feeds.items()})
        self.assertEqual(np.getbufsize(), before)


class Chunks(unittest.TestCase):
    def test_they_are_of_whole_vectors(self) -> None:
        layers = (tiles.Layer(1, 6, (28, 28), (5, 5), (2, 2), 2, (14, 14), True),)
        for images in (1, 5, 100, 128, 937, 1000):
            sizes = [part.stop - part.start for part in tiles.chunks(layers, images)]
            self.assertEqual(sum(sizes), images)
            self.assertEqual(len({*sizes[:-1], max(sizes)}), 1)
            self.assertTrue(all(size % tiles.RUN == 0 for size in sizes[:-1]))
        self.assertEqual(tiles.chunks(layers, 0), [])
        self.assertGreaterEqual(len(tiles.chunks(layers, 128)), tiles.PARTS)

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

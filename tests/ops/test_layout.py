"""Facts that the rows of families/movement.py cannot state: errors of values, memory, random
attributes, and PyTorch.
"""

from __future__ import annotations

import tracemalloc
import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray
from dlsys.errors import DlsysError, GraphError, ShapeError
from dlsys.ops import concat, indexing, movement, pad, resize
from dlsys.runtime.device import Context
from support.devices import needs_torch, on_native_devices
from support.seeds import SEED


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(SEED).uniform(-2, 2, shape).astype(np.float32)


def run(nodes: Any, feeds: Any, ctx: Context | None = None) -> list[np.ndarray]:
    return ad.Executor(nodes, ctx).run(feeds, convert_to_numpy_ret_vals=True)


def random_key(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple:
    """Integers, slices of all kinds, None and ... in any order that fits the shape."""
    key: list[Any] = []
    for extent in shape:
        if rng.random() < 0.15:
            key.append(None)
        if rng.random() < 0.25 and extent:
            key.append(int(rng.integers(-extent, extent)))
            continue
        start, stop = (None if rng.random() < 0.3 else int(rng.integers(-9, 9)) for _ in range(2))
        key.append(slice(start, stop, int(rng.choice([-3, -2, -1, 1, 2, 4]))))
    at = int(rng.integers(len(key) + 1))
    return (*key[:at], ...) if rng.random() < 0.5 else tuple(key[:at])


class Layout:
    ctx: Context | None = None

    def test_random_keys(self) -> None:
        rng = np.random.default_rng(SEED)
        x = ad.Variable("x")
        for _ in range(200):
            shape = tuple(int(n) for n in rng.integers(0, 6, rng.integers(0, 5)))
            key = random_key(rng, shape)
            value = rng.uniform(-1, 1, shape).astype(np.float32)
            part = x[key]
            gradient = ad.gradients(ad.sum_op(part * part), [x])[0]
            with self.subTest(seed=SEED, shape=shape, key=key):
                got, slope = run([part, gradient], {x: value}, self.ctx)
                np.testing.assert_array_equal(got, value[key])
                expected = np.zeros(shape, np.float32)
                expected[key] = 2 * value[key]
                np.testing.assert_array_equal(slope, expected)

    def test_random_paddings(self) -> None:
        rng = np.random.default_rng(SEED)
        x = ad.Variable("x")
        for _ in range(60):
            shape = tuple(int(n) for n in rng.integers(1, 7, rng.integers(1, 5)))
            mode = str(rng.choice(["constant", "edge", "reflect"]))
            most = [n - 1 if mode == "reflect" else 9 for n in shape]
            pads = [tuple(int(p) for p in rng.integers(0, n + 1, 2)) for n in most]
            value = rng.uniform(-1, 1, shape).astype(np.float32)
            with self.subTest(seed=SEED, shape=shape, mode=mode, pads=pads):
                got = run([pad.pad_op(x, pads, mode)], {x: value}, self.ctx)[0]
                np.testing.assert_array_equal(got, np.pad(value, pads, mode))

    def test_random_resizes(self) -> None:
        rng = np.random.default_rng(SEED)
        x = ad.Variable("x")
        for _ in range(60):
            old, new = rng.integers(1, 40, 2), rng.integers(1, 40, 2)
            value = rng.uniform(-1, 1, (2, *old)).astype(np.float32)
            for mode in ("nearest", "bilinear"):
                align = bool(rng.integers(2))
                y = resize.resize(x, new.tolist(), mode=mode, align_corners=align)
                slope = ad.gradients(ad.sum_op(y * y), [x])[0]
                with self.subTest(seed=SEED, old=old, new=new, mode=mode, align=align):
                    y1, dx1 = run([y, slope], {x: value.astype(np.float64)})
                    y2, dx2 = run([y, slope], {x: value}, self.ctx)
                    np.testing.assert_allclose(y2, y1, atol=1e-6)
                    np.testing.assert_allclose(dx2, dx1, atol=1e-5 * np.abs(dx1).max())

    def test_transposes_of_short_axes(self) -> None:
        rng = np.random.default_rng(SEED)
        for dtype in ("float32", "int64", "uint8"):
            for shape in ((2, 3, 1000), (2, 1000, 3), (5, 513), (2, 33, 40), (4, 1030, 16),
                          (1, 2, 2049), (3, 2, 17, 19), (2, 1100, 1, 2)):  # fmt: skip
                axes = tuple(int(axis) for axis in rng.permutation(len(shape)))
                x = ad.Variable("x", shape, dtype)
                value = rng.integers(0, 200, shape).astype(dtype)
                with self.subTest(seed=SEED, dtype=dtype, shape=shape, axes=axes):
                    got = run([movement.transpose_op(x, axes=axes)], {x: value}, self.ctx)[0]
                    np.testing.assert_array_equal(got, value.transpose(axes))

    def test_colors_move_last(self) -> None:
        """Few values side by side, of rows that fill warps, vectors of 16 bytes, and of others."""
        rng = np.random.default_rng(SEED)
        for channels in (1, 2, 3, 4, 5):
            for height, width in ((4, 16), (5, 7), (16, 64)):
                shape = (2, channels, height, width)
                for dtype in (np.float32, np.float16, np.int64, np.uint8):
                    x = ad.Variable("x", shape, dtype=np.dtype(dtype))
                    values = rng.integers(0, 100, shape).astype(dtype)
                    y = ad.Executor([ad.transpose_op(x, (0, 2, 3, 1))], self.ctx)
                    (moved,) = y.run({x: values}, True)
                    np.testing.assert_array_equal(moved, values.transpose(0, 2, 3, 1))

    def test_all_dtypes_move(self) -> None:
        for dtype in ("float32", "int32", "int64", "uint8", "bool"):
            x = ad.Variable("x", (3, 4), dtype)
            ids = ad.Variable("ids", (2,), "int64")
            value = (np.arange(12).reshape(3, 4) % 3).astype(dtype)
            nodes = [
                x[1:, ::-2], indexing.gather_op(x, ids, 1), concat.concat_op(x, x, 1),
                concat.tile(x, 2),
                pad.pad_op(x, (1, 1), constant_values=1), pad.pad_op(x, (1, 1), "edge"),
            ]  # fmt: skip
            got = run(nodes, {x: value, ids: np.array([3, 0])}, self.ctx)
            expected = [
                value[1:, ::-2], value[:, [3, 0]], np.hstack([value, value]), np.tile(value, 2),
                np.pad(value, 1, constant_values=1), np.pad(value, 1, "edge"),
            ]  # fmt: skip
            for one, other in zip(got, expected):
                self.assertEqual(one.dtype, dtype)
                np.testing.assert_array_equal(one, other)

    def test_indices_out_of_range(self) -> None:
        """An index that does not exist raises, with its value, its place and how many there are."""
        x, updates = ad.Variable("x", dtype="float32"), ad.Variable("u", dtype="float32")
        for dtype in ("int32", "int64"):
            ids = ad.Variable("ids", dtype=dtype)
            nodes = {
                "gather": (indexing.gather_op(x, ids, 1), {x: floats(3, 5)}),
                "scatter_add": (indexing.scatter_op(updates, ids, 5), {updates: floats(3, 2)}),
                "one_hot": (indexing.one_hot_op(ids, 5), {}),
            }
            for bad in (5, -1, 2**31 - 1):
                for op, (node, feeds) in nodes.items():
                    feeds = feeds | {ids: np.array([4, bad, 0], dtype)}
                    message = f"{op}: index {bad} at position 1 is out of range: there are 5"
                    with (
                        self.subTest(op=op, bad=bad, dtype=dtype),
                        self.assertRaisesRegex(DlsysError, message),
                    ):
                        run([node], feeds, self.ctx)

    def test_failed_lookup_leaves_parameters_alone(self) -> None:
        table = ad.Parameter(floats(5, 3), "table")
        ids = ad.Variable("ids", (2,), "int64")
        rows = indexing.embedding_op(table, ids)
        slope = ad.gradients(ad.sum_op(rows), [table])[0]
        step = ad.Executor([ad.sgd_update_op(table, slope, ad.constant(1.0))], self.ctx)
        if self.ctx is not None and ndarray.is_gpu_ctx(self.ctx):
            step.run({ids: np.array([1, 5])})  # which tells when the update is done
            with self.assertRaises(DlsysError):
                table.asnumpy()
            self.assertTrue(np.isnan(table.asnumpy()).all())
            return
        with self.assertRaises(DlsysError):
            step.run({ids: np.array([1, 5])})
        np.testing.assert_array_equal(table.asnumpy(), floats(5, 3))

    def test_scatter_by_count_of_updates(self) -> None:
        """Rows of no, one, two and more updates, narrow and in several pieces; sums of whole
        numbers have no rounding, and those beyond float32 are infinite.
        """
        at = np.repeat(np.arange(6), [1, 0, 2, 3, 9, 2])[[7, 2, 0, 16, 5, 11, 3, 1, 13, 9, 4, 15,
                                                          8, 14, 6, 12, 10]]  # fmt: skip
        for cols in (1, 5, 513, 1030):
            updates = np.random.default_rng(SEED).integers(-99, 99, (3, 17, cols)).astype("f4")
            updates[:, at == 5] = 3e38
            u, ids = ad.Variable("u", dtype="float32"), ad.Variable("ids", dtype="int64")
            [found] = run([indexing.scatter_op(u, ids, 6, 1)], {u: updates, ids: at}, self.ctx)
            expected = np.zeros((3, 6, cols))
            np.add.at(expected, (slice(None), at), updates)
            expected[:, 5] = np.inf
            np.testing.assert_array_equal(found, expected, str(cols))

    def test_scatter_of_many(self) -> None:
        """A vocabulary of 50,000 with 16,000 tokens, one of them very frequent; and one of 30, each
        of which is frequent.
        """
        for vocabulary, count, share in ((50_000, 16_000, 0.2), (30, 4_000, 0)):
            with self.subTest(vocabulary=vocabulary):
                self.check_scatter_of_many(vocabulary, count, share)

    def check_scatter_of_many(self, vocabulary: int, count: int, share: float) -> None:
        rng = np.random.default_rng(SEED)
        tokens = rng.integers(0, vocabulary, count)
        tokens[rng.uniform(size=tokens.size) < share] = 7
        dy = rng.uniform(-1, 1, (count, 33)).astype(np.float32)
        updates, ids = (
            ad.Variable("u", dy.shape, "float32"),
            ad.Variable("ids", tokens.shape, "int64"),
        )
        executor = ad.Executor([indexing.scatter_op(updates, ids, vocabulary)], self.ctx)
        feeds = {updates: dy, ids: tokens}
        first, second = (executor.run(feeds, convert_to_numpy_ret_vals=True)[0] for _ in range(2))
        expected = np.zeros((vocabulary, 33))
        np.add.at(expected, tokens, dy.astype(np.float64))
        size = np.zeros((vocabulary, 33))
        np.add.at(size, tokens, np.abs(dy))
        self.assertEqual(first.tobytes(), second.tobytes())
        np.testing.assert_array_less(np.abs(first - expected), 1e-6 * size + 1e-12)


class NumpyLayout(Layout, unittest.TestCase):
    def test_views_share_memory(self) -> None:
        """Reshapes of every name cost no copy: the next operator sees the memory of the last."""
        seen = {}

        class PeekOp(ad.Op):
            def infer_shape(self, node: ad.Node, shapes: Any) -> tuple[int, ...]:
                return shapes[0]

            def compute(
                self, node: ad.Node, values: Any, output: Any, use_numpy: bool = True
            ) -> None:
                seen[node.name] = values[0]
                output[...] = values[0]

        peek = PeekOp()
        x = ad.Variable("x", (2, 1, 3), "float32")
        views = {
            "squeeze": movement.squeeze_op(x), "expand_dims": movement.expand_dims_op(x, -1),
            "flatten": movement.flatten_op(x), "newaxis": x[None, ..., None], "whole": x[:, :],
            "array_reshape": movement.array_reshape_op(x, (3, 2)),
        }  # fmt: skip
        value = floats(2, 1, 3)
        run([peek(node, name=name) for name, node in views.items()], {x: value})
        for name in views:
            self.assertTrue(np.shares_memory(seen[name], value), name)

    def test_no_hidden_temporaries(self) -> None:
        """A step takes little memory besides its plan."""
        x = ad.Variable("x", (512, 1024), "float32")
        nodes = [
            x[::-1, ::2], concat.concat_op(x, x), pad.pad_op(x, (2, 2), "reflect"),
            concat.tile(x, 2),
            resize.resize(x, scale=1.5, mode="bilinear"), resize.resize(x, scale=1.5),
        ]  # fmt: skip
        for node in nodes:
            executor = ad.Executor([node])
            feeds = {x: floats(512, 1024)}
            executor.run(feeds)
            tracemalloc.start()
            result = executor.run(feeds)[0]
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            self.assertLess(peak - result.nbytes, 100_000, node)

    def test_operators_with_several_outputs_keep_their_index(self) -> None:
        class HalvesOp(ad.Op):
            outputs = 2

            def infer_shape(self, node: ad.Node, shapes: Any) -> Any:
                return shapes[0], shapes[0]

        node = HalvesOp()(ad.Variable("x", (4,), "float32"))
        self.assertIs(node[1], node[1])
        self.assertEqual(node[1].spec.shape, (4,))
        self.assertEqual(node[1][2:].spec.shape, (2,))
        for bad in (2, slice(0, 1), -1):
            with self.assertRaisesRegex(GraphError, "has 2 output"):
                node[bad]

    def test_place_differentiates(self) -> None:
        x = ad.Variable("x", (2, 3), "float32")
        node = indexing.place_op(x, (5, 7), (1, 5), (3, -2))
        weights = floats(5, 7)
        slope = ad.gradients(ad.sum_op(node * ad.constant(weights)), [x])[0]
        np.testing.assert_array_equal(run([slope], {x: floats(2, 3)})[0], weights[1::3, 5:0:-2])
        with self.assertRaisesRegex(GraphError, "the shape of y is not known yet; use pad_op"):
            indexing.place_op(ad.Variable("y"), (5,), (1,))

    def test_errors_name_the_line(self) -> None:
        x = ad.Variable("x", (3, 4), "float32")
        with self.assertRaisesRegex(
            ShapeError, r"slice: index 3 .* x \(3, 4\) \[test_layout.py:\d+\]"
        ):
            x[3]
        late = ad.Variable("late")[3]
        with self.assertRaisesRegex(
            ShapeError, r"slice: index 3 .* late \(3, 4\) \[test_layout.py"
        ):
            ad.Executor([late]).run({late.inputs[0]: floats(3, 4)})


CpuLayout, GpuLayout = on_native_devices(Layout)


@needs_torch
class AgainstTorch(unittest.TestCase):
    def setUp(self) -> None:
        import torch

        self.torch = torch

    def check(self, ours: Any, theirs: Any, value: np.ndarray, *feeds: Any) -> None:
        x = ad.Variable("x")
        y = ours(x)
        got, slope = run([y, ad.gradients(ad.sum_op(y * y), [x])[0]], {x: value})
        leaf = self.torch.tensor(value, requires_grad=True)
        wanted = theirs(leaf)
        (wanted * wanted).sum().backward()
        np.testing.assert_allclose(got, wanted.detach().numpy(), atol=1e-5)
        np.testing.assert_allclose(slope, leaf.grad.numpy(), atol=1e-4)

    def test_images(self) -> None:
        functional = self.torch.nn.functional
        value = floats(2, 4, 7, 5)
        for size in ((14, 10), (3, 11), (7, 5), (1, 1)):
            self.check(
                lambda x, size=size: resize.resize(x, size),
                lambda x, size=size: functional.interpolate(x, size, mode="nearest-exact"),
                value,
            )
            for align in (False, True):
                more = dict(mode="bilinear", align_corners=align)
                self.check(
                    lambda x, size=size, more=more: resize.resize(x, size, **more),
                    lambda x, size=size, more=more: functional.interpolate(x, size, **more),
                    value,
                )
        self.check(
            lambda x: resize.depth_to_space_op(x, 2, "CRD"),
            lambda x: functional.pixel_shuffle(x, 2),
            value,
        )
        for mode, torch_mode in (("reflect", "reflect"), ("edge", "replicate")):
            self.check(
                lambda x, mode=mode: pad.pad_op(x, (0, 0, (2, 3), (1, 4)), mode),
                lambda x, mode=torch_mode: functional.pad(x, (1, 4, 2, 3), mode),
                value,
            )

    def test_embedding(self) -> None:
        ids = np.random.default_rng(SEED).integers(0, 11, (4, 6))
        self.check(
            lambda x: indexing.embedding_op(x, ad.constant(ids)),
            lambda x: self.torch.nn.functional.embedding(self.torch.tensor(ids), x),
            floats(11, 3),
        )

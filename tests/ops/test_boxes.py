"""Non-maximum suppression and Soft-NMS: every device chooses what numpy does, to the bit."""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.errors import GraphError
from dlsys.ops.boxes import corners, iou
from support.allocations import requests_of_kernels
from support.devices import EMULATED, fewer, on_native_devices

Array = np.ndarray
ALL = {"max_output_boxes_per_class": 1 << 40}


def computed(op: Any, arrays: tuple[Array, ...], ctx: Any, **attrs: Any) -> list[Array]:
    """The outputs of an operator."""
    inputs = [ad.Variable(f"x{k}", x.shape, x.dtype) for k, x in enumerate(arrays)]
    executor = ad.Executor([*op(*inputs, **attrs)], ctx)
    return executor.run(dict(zip(inputs, arrays)), convert_to_numpy_ret_vals=True)


def chosen(boxes: Any, scores: Any, ctx: Any, **attrs: Any) -> list[list[int]]:
    """The rows of non-maximum suppression that are boxes."""
    given = np.asarray(boxes, np.float32), np.asarray(scores, np.float32)
    rows, count = computed(ad.non_max_suppression_op, given, ctx, **ALL | attrs)
    assert (rows[count:] == -1).all()
    return rows[:count].tolist()


class Choices:
    ctx: Any = None

    def test_scores_that_are_no_numbers_are_never_chosen(self) -> None:
        boxes = [[[k, 0, k + 1, 1] for k in range(6)]]
        scores = [[[np.nan, -np.inf, 0.5, np.inf, -0.0, 0.0]]]
        everything = [[0, 0, k] for k in (3, 2, 4, 5, 1)]
        self.assertEqual(chosen(boxes, scores, self.ctx), everything)
        for least, count in ((-np.inf, 4), (-1.0, 4), (0.0, 2), (0.5, 1), (np.inf, 0)):
            found = chosen(boxes, scores, self.ctx, score_threshold=least)
            self.assertEqual(found, everything[:count])

    def test_boxes_without_area_or_with_nan_overlap_none(self) -> None:
        odd = [[1, 1, 1, 3], [2, 2, 2, 2], [np.nan, 0, 4, 4], [0, 0, 4, np.nan],
               [-np.inf, 0, np.inf, 4], [0, 0, np.inf, 4]]  # fmt: skip
        boxes = [[[0, 0, 4, 4], *odd, *odd, [4, 4, 0, 0]]]
        scores = [[np.linspace(0.9, 0.1, 14)]]
        for limit in (0.0, 0.5):
            found = chosen(boxes, scores, self.ctx, iou_threshold=limit)
            self.assertEqual(found, [[0, 0, k] for k in range(13)])

    def test_boxes_at_the_limit(self) -> None:
        """The IoU is the rounded quotient of rounded numbers. Where a product is contracted with
        the sum behind it, some of these pairs are beyond their limit.
        """
        first, second, limit = at_the_limit()
        self.assertGreater(len(first), 100)
        boxes = np.stack([first, second], 1)
        scores = np.broadcast_to(np.float32([0.9, 0.8]), (len(boxes), 1, 2))
        found = chosen(boxes, scores, self.ctx, iou_threshold=float(limit))
        self.assertEqual(found, [[k, 0, at] for k in range(len(boxes)) for at in (0, 1)])
        below = float(np.nextafter(limit, np.float32(0)))
        found = chosen(boxes, scores, self.ctx, iou_threshold=below)
        self.assertEqual(found, [[k, 0, 0] for k in range(len(boxes))])

    def test_random_boxes(self) -> None:
        rng = np.random.default_rng(3)
        for _ in range(fewer(30)):
            images, classes, count = rng.integers(1, 4), rng.integers(1, 6), rng.integers(1, 300)
            shape = int(images), int(classes), int(count)
            attrs = dict(
                max_output_boxes_per_class=int(rng.integers(1, 310)),
                iou_threshold=float(rng.random()), score_threshold=float(rng.random() / 2),
                center_point_box=bool(rng.integers(2)),
            )  # fmt: skip
            self.agree(shape, attrs, rng)

    def test_more_columns_than_blocks(self) -> None:
        attrs = dict(max_output_boxes_per_class=4, score_threshold=0.2)
        self.agree((3, 100 if EMULATED else 400, 9), attrs, np.random.default_rng(4))

    def test_more_boxes_than_shared_memory_holds(self) -> None:
        rng = np.random.default_rng(5)
        for count, most in ((4096, 9), (4097, 9), (9000, 70)):
            attrs = dict(max_output_boxes_per_class=most, iou_threshold=0.4, score_threshold=0.01)
            self.agree((1, 2, count), attrs, rng, soft=count < 5000)

    def agree(
        self, shape: tuple[int, int, int], attrs: dict, rng: Any, soft: bool = True
    ) -> None:  # fmt: skip
        """Random boxes and scores, of which half are tied, of so many images, classes and boxes."""
        images, classes, count = shape
        low, side = rng.uniform(0, 60, (images, count, 2)), rng.uniform(1, 30, (images, count, 2))
        end = side if attrs.get("center_point_box") else low + side
        boxes = np.concatenate([low, end], -1).astype(np.float32)
        scores = rng.random(shape).astype(np.float32)
        scores = np.where(rng.random(shape) < 0.5, scores, scores.round(1))
        ops = [(ad.non_max_suppression_op, {})]
        for method in ("linear", "gaussian") if soft else ():
            ops.append((ad.soft_nms_op, {"method": method}))
        for op, more in ops:
            with self.subTest(op=op.name, shape=shape, **attrs | more):
                wanted = computed(op, (boxes, scores), None, **attrs, **more)
                got = computed(op, (boxes, scores), self.ctx, **attrs, **more)
                for a, b in zip(got, wanted, strict=True):
                    np.testing.assert_array_equal(a, b)

    def test_a_program_runs_again_without_new_memory(self) -> None:
        """As a captured graph where the device has them; how many boxes stay changes."""
        boxes, scores = (
            ad.Variable(n, s, "f4") for n, s in (("b", (1, 600, 4)), ("s", (1, 2, 600)))
        )
        outputs = [
            *ad.non_max_suppression_op(boxes, scores, score_threshold=0.5, **ALL),
            *ad.soft_nms_op(boxes, scores, max_output_boxes_per_class=30),
        ]
        executor, reference = ad.Executor(outputs, self.ctx), ad.Executor(outputs)
        rng = np.random.default_rng(6)
        counts = set()
        with requests_of_kernels(self.ctx) as requests:
            for scale in (0.4, 1.0, 0.8, 0.6, 0.9):
                low = rng.uniform(0, 60, (1, 600, 2))
                sides = rng.uniform(1, 30, (1, 600, 2))
                feeds = {
                    boxes: np.concatenate([low, low + sides], -1).astype(np.float32),
                    scores: (rng.random((1, 2, 600)) * scale).astype(np.float32),
                }
                got, wanted = (e.run(feeds, True) for e in (executor, reference))
                for a, b in zip(got, wanted, strict=True):
                    np.testing.assert_array_equal(a, b)
                counts.add(int(got[1]))
        self.assertEqual(len(counts), 5)
        self.assertFalse(any(requests), requests)
        report = executor.report()
        self.assertNotIn("falls back", str(report))
        if self.ctx.name == "gpu":
            self.assertIn("5 steps captured", str(report))


class NumpyChoices(unittest.TestCase):
    def test_overlaps(self) -> None:
        given = np.array([[0, 0, 10, 10], [0, 0, 10, 9], [20, 0, 30, 10], [0, 0, 10, 5]], float)
        np.testing.assert_allclose(iou(given[0], given), [1, 0.9, 0, 0.5])
        turned = given[:, [2, 1, 0, 3]]
        np.testing.assert_array_equal(corners(turned, False), given)
        middle = np.concatenate([(given[:, :2] + given[:, 2:]) / 2, given[:, 2:] - given[:, :2]], 1)
        np.testing.assert_array_equal(corners(middle, True), given)

    def test_soft_nms_lowers_scores_by_overlap(self) -> None:
        given = np.array([[[0, 0, 10, 10], [0, 0, 10, 5], [20, 0, 30, 10]]], float)
        scores = np.array([[[0.9, 0.8, 0.6]]])
        for attrs, factor in (
            ({}, np.exp(-0.25 / 0.5)), ({"sigma": 2}, np.exp(-0.25 / 2)),
            ({"method": "linear", "iou_threshold": 0.4}, 0.5), ({"method": "linear"}, 1),
        ):  # fmt: skip
            rows, values, count = computed(ad.soft_nms_op, (given, scores), None, **ALL | attrs)
            order = [0, 2, 1] if 0.8 * factor < 0.6 else [0, 1, 2]
            self.assertEqual((rows[:, 2].tolist(), int(count)), (order, 3))
            np.testing.assert_allclose(values, (scores[0, 0] * [1, factor, 1])[order])
        attrs = ALL | {"score_threshold": 0.5}
        rows, values, count = computed(ad.soft_nms_op, (given, scores), None, **attrs)
        self.assertEqual((rows.tolist()[:2], int(count)), ([[0, 0, 0], [0, 0, 2]], 2))
        self.assertEqual((rows[2].tolist(), values[2]), ([-1] * 3, 0))

    def test_there_is_no_gradient(self) -> None:
        boxes, scores = ad.Variable("b", (1, 5, 4)), ad.Variable("s", (1, 2, 5))
        for op, k in ((ad.non_max_suppression_op, 0), (ad.soft_nms_op, 1)):
            output = op(boxes, scores, max_output_boxes_per_class=3)[k]
            with self.assertRaisesRegex(GraphError, f"{op.name} has no gradient .test_boxes.py:"):
                ad.gradients(output, [scores])

    def test_what_is_no_setting(self) -> None:
        boxes, scores = ad.Variable("b", (1, 5, 4)), ad.Variable("s", (1, 2, 5))
        for attrs, message in (
            ({"max_output_boxes_per_class": -1}, "max_output_boxes_per_class must be an integer"),
            ({"iou_threshold": 1.5}, "iou_threshold must be a number from 0 to 1, got 1.5"),
            ({"score_threshold": np.nan}, "score_threshold must be a number"),
        ):
            with self.assertRaisesRegex(GraphError, message):
                ad.non_max_suppression_op(boxes, scores, **ALL | attrs)
        with self.assertRaisesRegex(GraphError, "sigma must be a number above 0"):
            ad.soft_nms_op(boxes, scores, sigma=0, **ALL)


def at_the_limit() -> tuple[Array, Array, Any]:
    """Pairs of boxes whose IoU is the limit as numpy rounds it, and above it where the product that
    is the intersection's area is contracted with the sum that is the union's.
    """
    limit = np.float32(0.25)
    rng = np.random.default_rng(7)
    low, side = rng.uniform(0, 9, (2, 100_000, 2))
    a = np.concatenate([low, low + side], -1).astype(np.float32)
    moved = low + side * [0.6, 0]
    b = np.concatenate([moved, moved + side], -1).astype(np.float32)
    sides = np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2])
    exact = sides.astype(np.float64).prod(1)
    first, second = ((x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1]) for x in (a, b))
    union = ((first + second).astype(np.float64) - exact).astype(np.float32)
    found = (iou(a, b) == limit) & (exact.astype(np.float32) / union > limit)
    return a[found], b[found], limit


CpuChoices, GpuChoices = on_native_devices(Choices)


if __name__ == "__main__":
    unittest.main()

"""Products by groups of rows: every rung, of every storage type, against float64 of the same
operands; sizes that change between replays, and sizes that do not fit.
"""

from __future__ import annotations

import itertools
import unittest
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys.dtypes import FLOAT16, FLOAT32, ROUNDING, bfloat16, rounded
from dlsys.errors import DeviceError, NotApplicableError, OutOfRangeError
from dlsys.executor.tune.microbenchmark import Microbenchmark
from dlsys.ndarray import NDArray, array, empty, launch
from dlsys.ops.matmul import PRECISIONS
from dlsys.rungs import HEURISTIC
from dlsys.runtime.device import Context, cpu, gpu
from dlsys.runtime.library import load
from dlsys.settings import settings
from support import sample
from support.devices import on_native_devices, require

UNIT = 2.0**-24  # of float32, rounded to nearest

# Rows, K, N and sizes: nothing, one row, empty groups, primes, all rows in one group, rows behind
# all groups, tiles that are filled and panels that are, rows that are aligned and not.
GROUPS = [
    *((0, 3, 4, (0, 0)), (3, 0, 2, (1, 2)), (1, 1, 1, (0, 1, 0)), (13, 5, 7, (3, 0, 4))),
    *((131, 67, 33, (17, 0, 101, 13)), (129, 64, 128, (0, 129)), (200, 40, 136, (1, 128, 64, 5))),
    *((150, 72, 8, (150,)), (97, 131, 264, (2, 3, 5, 7, 11, 0, 67)), (64, 32, 16, ())),
]
KINDS = ("grouped_matmul", "transposed", "grouped_contraction")


def bound(k: int, precision: str) -> float:
    """The most that an element may be off, relative to that of |A| |B|: as in test_gemm_ladder."""
    if precision == "fp32":
        return (k + 1) * UNIT / (1 - (k + 1) * UNIT)
    if precision == "tf32":
        return 2.0**-10 + 2.0**-22 + (k + 1) * 2 * UNIT
    return 3 * 2.0**-22 + (3 * k + 1) * 2 * UNIT


def by_groups(a: np.ndarray, b: np.ndarray, sizes: Any, kind: str) -> np.ndarray:
    """The product in float64, a group after the other."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    ends = np.cumsum(sizes, dtype=np.int64)
    rows = [slice(end - size, end) for size, end in zip(sizes, ends)]
    if kind == "grouped_contraction":
        shape = len(sizes), a.shape[1], b.shape[1]
        return np.array([a[one].T @ b[one] for one in rows]).reshape(shape)
    w = b.swapaxes(1, 2) if kind == "transposed" else b
    y = np.zeros((len(a), w.shape[2]))
    for one, each in zip(rows, w):
        y[one] = a[one] @ each
    return y


def operands_of(m: int, k: int, n: int, sizes: Any, kind: str) -> list[np.ndarray]:
    rng = np.random.default_rng(m + 3 * n + 7 * k)
    groups = len(sizes)
    shapes = {"grouped_matmul": (groups, k, n), "transposed": (groups, n, k)}
    return [rng.standard_normal(s, np.float32) for s in ((m, k), shapes.get(kind, (m, n)))]


class Grouped:
    ctx: Context

    def rungs(self: Any, dtype: Any = FLOAT32) -> list[tuple[str, str]]:
        """The rungs that work here, the heuristic among them, with the precisions of float32."""
        device, found = self.ctx.kernel_device, [("", "fp32"), ("", "tf32")]
        for number, rung in enumerate(load().algorithms(device, "grouped_matmul"), 1):
            if rung == "blas" and settings.blas == "own":
                continue  # it is forbidden
            try:
                load().algorithm_source(device, "grouped_matmul", number)
            except DeviceError:
                continue  # what it needs is not here
            precisions = {"tensor": ("tf32", "3xtf32"), "hopper": ("tf32",)}
            found += [(rung, one) for one in precisions.get(rung, ("fp32",))]
        return (
            found
            if dtype == FLOAT32
            else list({rung: (rung, "fp32") for rung, _ in found}.values())
        )

    def placed(self: Any, x: np.ndarray, dtype: Any, offset: int) -> NDArray:
        """An array so many elements behind the beginning of its memory."""
        held = empty((x.size + offset,), self.ctx, dtype)
        nbytes = 4 if dtype == FLOAT32 else 2
        view = NDArray.from_block(held.block, nbytes * offset, x.shape, dtype)
        if x.size:
            view[:] = x
        return view

    def launched(
        self: Any, operands: Any, sizes: Any, kind: str, rung: str, precision: str = "fp32",
        dtype: Any = FLOAT32, offset: int = 0,
    ) -> np.ndarray:  # fmt: skip
        names = ("", *load().algorithms(self.ctx.kernel_device, "grouped_matmul"))
        a, b = (self.placed(x, dtype, offset) for x in operands)
        shape = by_groups(operands[0], operands[1], np.zeros(len(sizes), np.int64), kind).shape
        c = self.placed(np.full(shape, np.nan, np.float32), dtype, offset)
        given = array(np.array(sizes, np.int32), self.ctx)
        how = names.index(rung), PRECISIONS[precision]
        flag = () if kind == "grouped_contraction" else (int(kind == "transposed"),)
        name = "grouped_contraction" if kind == "grouped_contraction" else "grouped_matmul"
        launch(name, self.ctx, a, b, given, *flag, *how, c)
        return c.asnumpy().astype(np.float64)

    def check(
        self: Any, got: np.ndarray, operands: Any, sizes: Any, kind: str, limit: float,
        dtype: Any = FLOAT32,
    ) -> None:  # fmt: skip
        left, right = operands
        wanted = by_groups(left, right, sizes, kind)
        scale = by_groups(np.abs(left), np.abs(right), sizes, kind)
        self.assertEqual(got.shape, wanted.shape)
        rounding = 0 if dtype == FLOAT32 else ROUNDING[dtype] * np.abs(wanted) + 2.0**-25
        over = np.abs(got - wanted) - limit * scale - rounding
        self.assertTrue((over <= 0).all(), f"off by {over.max(initial=0)} more than {limit:.3g}")

    def test_every_rung(self: Any) -> None:
        for (rung, precision), groups, kind in itertools.product(self.rungs(), GROUPS, KINDS):
            with self.subTest(rung=rung, precision=precision, groups=groups, kind=kind):
                operands, sizes = operands_of(*groups, kind), groups[3]
                got = self.launched(operands, sizes, kind, rung, precision)
                terms = max((0, *sizes)) if kind == "grouped_contraction" else groups[1]
                self.check(got, operands, sizes, kind, bound(terms, precision))

    def test_storage_types(self: Any) -> None:
        """Products of 16 bits are exact in float32, whose sums tensor cores cut."""
        groups = sample.of(GROUPS, 6)
        for dtype in (bfloat16, FLOAT16):
            for (rung, _), one, kind in itertools.product(self.rungs(dtype), groups, KINDS):
                with self.subTest(dtype=dtype, rung=rung, groups=one, kind=kind):
                    sizes = one[3]
                    operands = [rounded(x, dtype) for x in operands_of(*one, kind)]
                    got = self.launched(operands, sizes, kind, rung, dtype=dtype)
                    terms = max((0, *sizes)) if kind == "grouped_contraction" else one[1]
                    self.check(got, operands, sizes, kind, 2 * bound(terms, "fp32"), dtype)

    def test_arrays_need_no_alignment(self: Any) -> None:
        for dtype in (FLOAT32, bfloat16):
            for (rung, precision), kind in itertools.product(self.rungs(dtype), KINDS):
                with self.subTest(dtype=dtype, rung=rung, precision=precision, kind=kind):
                    sizes = (9, 0, 40)
                    operands = [rounded(x, dtype) for x in operands_of(50, 40, 72, sizes, kind)]
                    got = self.launched(operands, sizes, kind, rung, precision, dtype, offset=1)
                    limit = bound(40, precision) if dtype == FLOAT32 else 2 * bound(40, "fp32")
                    self.check(got, operands, sizes, kind, limit, dtype)

    def test_groups_know_nothing_of_each_other(self: Any) -> None:
        """Infinities in the rows behind a group would make NaN of zeros."""
        for dtype in (FLOAT32, bfloat16):
            for (rung, precision), kind in itertools.product(self.rungs(dtype), KINDS):
                with self.subTest(dtype=dtype, rung=rung, precision=precision, kind=kind):
                    sizes = (70, 3, 30)
                    a, b = (rounded(x, dtype) for x in operands_of(110, 24, 16, sizes, kind))
                    a[70:73] = np.inf
                    a[103:] = np.nan
                    got = self.launched((a, b), sizes, kind, rung, precision, dtype)
                    others = (
                        [0, 2] if kind == "grouped_contraction" else [*range(70), *range(73, 110)]
                    )
                    self.assertTrue(np.isfinite(got[others]).all())
                    b_of_others = np.abs(got[[k for k in range(len(got)) if k not in others]])
                    self.assertFalse(np.isfinite(b_of_others).any())

    def test_long_groups(self: Any) -> None:
        rows = sample.count(9001, 1301)
        sizes = (1, rows - 300, 7, 250)
        for rung, precision in self.rungs():
            with self.subTest(rung=rung, precision=precision):
                operands = operands_of(rows, 12, 20, sizes, "grouped_contraction")
                got = self.launched(operands, sizes, "grouped_contraction", rung, precision)
                self.check(got, operands, sizes, "grouped_contraction", bound(rows, precision))

    def test_gradients_have_the_rung(self: Any) -> None:
        sizes = np.array([4, 0, 9], np.int64)
        for (rung, precision), flag in itertools.product(self.rungs(), (False, True)):
            with self.subTest(rung=rung, precision=precision, transposed=flag):
                kind = "transposed" if flag else "grouped_matmul"
                x, w = operands_of(15, 11, 14, sizes, kind)
                dy = operands_of(15, 11, 14, sizes, "grouped_contraction")[1]
                nodes = [ad.Variable(name) for name in ("x", "w", "dy")]
                of = ad.Variable("sizes", dtype=np.int64)
                y = F.grouped_matmul(nodes[0], nodes[1], of, flag, algo=rung or None)
                grads = ad.gradients(ad.sum_op(y * nodes[2]), nodes[:2])
                executor = ad.Executor([y, *grads], self.ctx, precision)
                feeds = {**dict(zip(nodes, (x, w, dy))), of: sizes}
                got = executor.run(feeds, convert_to_numpy_ret_vals=True)
                if rung:
                    names = executor.report().plans[0].algorithms
                    self.assertEqual(
                        sorted(names),
                        [f"grouped_contraction by {rung}", *[f"grouped_matmul by {rung}"] * 2],
                    )
                self.check(got[0], (x, w), sizes, kind, bound(11, precision))
                back = "grouped_matmul" if flag else "transposed"
                self.check(got[1], (dy, w), sizes, back, bound(14, precision))
                of_rows = (dy, x) if flag else (x, dy)
                self.check(got[2], of_rows, sizes, "grouped_contraction", bound(9, precision))

    def test_sizes_change_between_runs(self: Any) -> None:
        """A program, on a GPU a captured graph, reads them as it runs."""
        x, w = operands_of(40, 24, 16, (0, 0, 0), "grouped_matmul")
        nodes = ad.Variable("x", x.shape), ad.Variable("w", w.shape)
        of = ad.Variable("sizes", (3,), np.int32)
        executor = ad.Executor([F.grouped_matmul(*nodes, of)], self.ctx)
        for sizes in ((40, 0, 0), (0, 1, 39), (13, 13, 13), (0, 0, 0), (1, 30, 2)):
            feeds = {**dict(zip(nodes, (x, w))), of: np.array(sizes, np.int32)}
            (got,) = executor.run(feeds, convert_to_numpy_ret_vals=True)
            self.check(got, (x, w), sizes, "grouped_matmul", bound(24, "fp32"))

    def test_sizes_that_do_not_fit(self: Any) -> None:
        for (rung, precision), kind in itertools.product(self.rungs(), KINDS):
            for sizes, at, size, left in (((5, 3, 9), 2, 9, 4), ((5, -2, 3), 1, -2, 7)):
                with self.subTest(rung=rung, kind=kind, sizes=sizes):
                    operands = operands_of(12, 8, 16, sizes, kind)
                    text = (
                        rf"group size {size} at position {at} is out of range: there are {left + 1}"
                    )
                    with self.assertRaisesRegex(OutOfRangeError, text):
                        self.launched(operands, sizes, kind, rung, precision)

    def test_is_measured_with_groups_of_rows(self: Any) -> None:
        """Zeros, as other integers are, would measure nothing."""
        x, w = ad.Variable("x", (40, 6), FLOAT32), ad.Variable("w", (3, 6, 5), FLOAT32)
        node = ad.grouped_matmul_op(x, w, ad.Variable("sizes", (3,), np.int32))
        (results,) = Microbenchmark(node, self.ctx).results(HEURISTIC)
        self.assertTrue(results[:39].any(axis=1).all())
        self.assertFalse(results[39:].any())

    def test_a_rung_that_cannot(self: Any) -> None:
        names = load().algorithms(self.ctx.kernel_device, "grouped_matmul")
        if "tensor" not in names:
            return
        operands = operands_of(12, 8, 16, (5, 7), "grouped_matmul")
        for rung in ("tensor", "hopper"):
            if rung in dict(self.rungs()):
                with self.assertRaisesRegex(NotApplicableError, rf"algo={rung}.*; use auto, naive"):
                    self.launched(operands, (5, 7), "grouped_matmul", rung, "fp32")


CpuGrouped, GpuGrouped = on_native_devices(Grouped)


@require(cpu(0))
class OfTheCpu(unittest.TestCase):
    def test_bits_do_not_depend_on_threads(self) -> None:
        self.addCleanup(load().set_threads, settings.threads)
        sizes = (90, 0, 7, 203)
        for kind in KINDS:
            operands = operands_of(310, 70, 130, sizes, kind)
            found = set()
            for threads in (1, 2, 3):
                load().set_threads(threads)
                nodes = [ad.Variable(name) for name in ("a", "b")]
                of = ad.Variable("sizes", dtype=np.int32)
                if kind == "grouped_contraction":
                    y = ad.grouped_contraction_op(*nodes, of)
                else:
                    y = ad.grouped_matmul_op(*nodes, of, trans_w=kind == "transposed")
                feeds = {**dict(zip(nodes, operands)), of: np.array(sizes, np.int32)}
                run = ad.Executor([y], cpu(0)).run(feeds, convert_to_numpy_ret_vals=True)
                found.add(run[0].tobytes())
            self.assertEqual(len(found), 1, kind)


@require(gpu(0))
class OfTheGpu(unittest.TestCase):
    def test_a_size_that_does_not_fit_reaches_no_other_memory(self) -> None:
        """Such a size counts as the nearest one that fits."""
        grouped = GpuGrouped("test_every_rung")
        for rung, precision in grouped.rungs():
            with self.subTest(rung=rung, precision=precision):
                operands = operands_of(12, 8, 16, (0, 0, 0), "grouped_matmul")
                with mock.patch.object(NDArray, "asnumpy", asnumpy_despite_faults):
                    got = grouped.launched(operands, (5, 20, -3), "grouped_matmul", rung, precision)
                grouped.check(got, operands, (5, 7, 0), "grouped_matmul", bound(8, precision))


_asnumpy = NDArray.asnumpy


def asnumpy_despite_faults(x: NDArray) -> np.ndarray:
    """The values, behind the error that tells of the sizes."""
    try:
        _asnumpy(x)
    except OutOfRangeError:
        return _asnumpy(x)
    raise AssertionError("nobody told of the sizes")


if __name__ == "__main__":
    unittest.main()

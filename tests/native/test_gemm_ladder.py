"""The ladder of the matrix product: every rung computes every product that it takes, forward and in
gradients, within the error of its arithmetic, and says what it does not take.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterable
from typing import Any
from unittest import mock

import numpy as np

import dlsys
import dlsys.functional as F
from dlsys import autodiff as ad
from dlsys import gpu_op
from dlsys.dtypes import FLOAT32
from dlsys.errors import DeviceError, NotApplicableError, SignatureError
from dlsys.executor.tune.microbenchmark import Microbenchmark
from dlsys.fusion.shared.body import ACTIVATIONS, GRADIENTS
from dlsys.ndarray import NDArray, array, empty, launch
from dlsys.ops.matmul import PRECISIONS
from dlsys.rungs import GEMM, Algorithm, rung_of, rungs_among
from dlsys.runtime.device import Context, cpu
from dlsys.runtime.library import load
from dlsys.settings import settings
from support import sample
from support.devices import on_native_devices
from support.table.families.fused.gemm import DACTS, FORMULAS

UNIT = 2.0**-24  # of float32, rounded to nearest

# m, n, k: 1, 0, primes, what fills tiles and what does not, with rows that are aligned and not.
SHAPES = [
    *((1, 1, 1), (0, 3, 4), (3, 0, 2), (2, 3, 0), (1, 67, 29), (31, 1, 17), (13, 5, 1)),
    *((17, 31, 13), (64, 48, 16), (37, 132, 40), (129, 67, 33), (130, 131, 71)),
]
TRANSPOSES = list(itertools.product((False, True), repeat=2))


def bound(k: int, precision: str) -> float:
    """The most that an element may be off, relative to that of |A| |B|.

    float32: K + 1 roundings in any order, Higham's gamma. tf32: each factor is rounded to 11
    bits, and tensor cores cut what they add. 3xtf32: what the split leaves out, below 3 x 2^-22,
    and three sums that are cut.
    """
    if precision == "fp32":
        return (k + 1) * UNIT / (1 - (k + 1) * UNIT)
    if precision == "tf32":
        return 2.0**-10 + 2.0**-22 + (k + 1) * 2 * UNIT
    return 3 * 2.0**-22 + (3 * k + 1) * 2 * UNIT


class Ladder:
    ctx: Context

    def algorithms(self: Any, kernel: str = "matmul") -> tuple[str, ...]:
        return load().algorithms(self.ctx.kernel_device, kernel)

    def rungs(self: Any) -> list[tuple[str, str]]:
        """The rungs that work here, each with the precisions at which it differs."""
        found = []
        for rung in rungs_among(self.algorithms()):
            if rung == "cublas" and settings.blas == "own":
                continue  # it is forbidden
            try:
                number = self.algorithms().index(rung) + 1
                load().algorithm_source(self.ctx.kernel_device, "matmul", number)
            except DeviceError:
                continue  # its library is not here
            precisions = {"tensor": ("tf32", "3xtf32"), "hopper": ("tf32", "3xtf32")}
            found += [(rung, one) for one in precisions.get(rung, ("fp32",))]
        return found

    def operands(self: Any, m: int, n: int, k: int, flags: tuple[bool, bool]) -> list[np.ndarray]:
        rng = np.random.default_rng(m + 3 * n + 7 * k)
        shapes = (k, m) if flags[0] else (m, k), (n, k) if flags[1] else (k, n)
        return [rng.standard_normal(shape, np.float32) for shape in shapes]

    def check(
        self: Any, got: np.ndarray, operands: list[np.ndarray], flags: Any, limit: float
    ) -> None:
        a, b = (
            x.astype(np.float64).T if t else x.astype(np.float64) for x, t in zip(operands, flags)
        )
        wanted, scale = a @ b, np.abs(a) @ np.abs(b)
        self.assertEqual(got.shape, wanted.shape)
        over = np.abs(got - wanted) - limit * scale
        self.assertTrue((over <= 0).all(), f"off by {over.max(initial=0)} more than {limit:.3g}")

    def product(
        self: Any, operands: Any, flags: Any, rung: str, precision: str, offset: int = 0
    ) -> np.ndarray:
        number = self.algorithms().index(rung) + 1
        given = [self.placed(x, offset) for x in operands]
        m = operands[0].shape[flags[0]]
        n = operands[1].shape[not flags[1]]
        c = self.placed(np.full((m, n), np.nan, np.float32), offset)
        how = number, PRECISIONS[precision]
        launch("matmul", self.ctx, given[0], flags[0], given[1], flags[1], *how, c)
        return c.asnumpy()

    def placed(self: Any, x: np.ndarray, offset: int) -> NDArray:
        """An array so many elements behind the beginning of its memory."""
        held = empty((x.size + offset,), self.ctx)
        view = NDArray.from_block(held.block, 4 * offset, x.shape, np.dtype(np.float32))
        if x.size:
            view[:] = x
        return view

    def test_every_shape_and_transpose(self: Any) -> None:
        for (rung, precision), shape, flags in itertools.product(self.rungs(), SHAPES, TRANSPOSES):
            with self.subTest(rung=rung, precision=precision, shape=shape, transposed=flags):
                operands = self.operands(*shape, flags)
                got = self.product(operands, flags, rung, precision)
                self.check(got, operands, flags, bound(shape[2], precision))

    def test_arrays_need_no_alignment(self: Any) -> None:
        for (rung, precision), flags in itertools.product(self.rungs(), TRANSPOSES):
            with self.subTest(rung=rung, transposed=flags):
                operands = self.operands(36, 68, 40, flags)
                got = self.product(operands, flags, rung, precision, offset=1)
                self.check(got, operands, flags, bound(40, precision))

    def test_a_large_k(self: Any) -> None:
        k = sample.count(9001, 3001)
        for (rung, precision), flags in itertools.product(self.rungs(), ((True, False), (0, 1))):
            with self.subTest(rung=rung, precision=precision, transposed=flags):
                operands = self.operands(12, 20, k, flags)
                got = self.product(operands, flags, rung, precision)
                self.check(got, operands, flags, bound(k, precision))

    def test_every_variant(self: Any) -> None:
        """But for two rungs with tests of their own, which racecheck runs side by side."""
        self.check_variants(x for x in self.algorithms() if rung_of(x) not in ("warp", "tensor"))

    def check_variants(self: Any, names: Iterable[str]) -> None:
        operands = self.operands(45, 70, 150, (False, True))
        asked, served = set(), set()
        for name in names:
            asked.add(rung_of(name))
            for precision in PRECISIONS:
                with self.subTest(algorithm=name, precision=precision):
                    try:
                        got = self.product(operands, (False, True), name, precision)
                    except (NotApplicableError, DeviceError):
                        continue
                    served.add(rung_of(name))
                    rounded = "tf32" if precision == "tf32" else "3xtf32"
                    self.check(got, operands, (False, True), bound(150, rounded))
        self.assertEqual(served, asked & {rung for rung, _ in self.rungs()})

    def test_epilogues(self: Any) -> None:
        m, n, k = 35, 70, 21
        x, w = self.operands(m, n, k, (False, False))
        bias, side = self.operands(1, n, 1, (False, False))[1][0], self.operands(m, 1, n, (0, 0))[0]
        nodes = [ad.Variable(name) for name in ("x", "w", "bias", "side")]
        values = dict(zip(nodes, (x, w, bias, side)))
        for rung, precision in self.rungs():
            y = ad.matmul_op(nodes[0], nodes[1], algo=rung)
            fetches = {
                "matmul_map": (ad.tanh_op(y), nodes[:2]),
                "matmul_bias": (ad.relu_op(y + nodes[2]), nodes[:3]),
                "matmul_gradient": (ad.relu_gradient_op(nodes[3], y), (*nodes[:2], nodes[3])),
            }
            for kernel, (fetch, given) in fetches.items():
                feeds = {node: values[node] for node in given}
                with self.subTest(rung=rung, precision=precision, kernel=kernel):
                    executor = ad.Executor([fetch], self.ctx, precision)
                    (got,) = executor.run(feeds, convert_to_numpy_ret_vals=True)
                    self.assertEqual(
                        executor.report().plans[0].algorithms, (f"{kernel} by {rung}",)
                    )
                    (wanted,) = ad.Executor([fetch_without_rung(fetch)]).run(feeds)
                    # Activations are no steeper than 1, and a bias adds one rounding.
                    scale = np.abs(x) @ np.abs(w) + np.abs(bias)
                    limit = (2 * bound(k, precision) + 16 * UNIT) * scale
                    self.assertTrue((np.abs(got - wanted) <= limit).all())

    def test_residuals(self: Any) -> None:
        """Also in the memory of the result, which is then read before it is written."""
        shapes = ((35, 70, 21), (68, 136, 40), (20, 36, 1100), (4, 6, 0), (1, 40, 33), (40, 1, 33))
        for (rung, precision), flags, (m, n, k) in itertools.product(
            self.rungs(), TRANSPOSES, shapes
        ):
            x, w = self.operands(m, n, k, flags)
            bias, r = self.operands(1, n, 1, (0, 0))[1][0], self.operands(m, 1, n, (0, 0))[0]
            left, right = (x.T if flags[0] else x), (w.T if flags[1] else w)
            plain = left.astype(np.float64) @ right + r
            scale = np.abs(left) @ np.abs(right) + np.abs(r)
            number = self.algorithms().index(rung) + 1
            for with_bias, relu, inplace in itertools.product((False, True), repeat=3):
                with self.subTest(
                    rung=rung, precision=precision, transposed=flags, shape=(m, n, k),
                    bias=with_bias, relu=relu, inplace=inplace,
                ):  # fmt: skip
                    given = [array(a, self.ctx) for a in (x, w, *((bias,) if with_bias else ()), r)]
                    y = given[-1] if inplace else array(np.full((m, n), np.nan, "f"), self.ctx)
                    kernel = "matmul_bias_add" if with_bias else "matmul_add"
                    how = *map(int, flags), number, PRECISIONS[precision], int(relu)
                    launch(kernel, self.ctx, *given, *how, y)
                    wanted = plain + bias * with_bias
                    wanted = np.maximum(wanted, 0) if relu else wanted
                    limit = (bound(k, precision) + 4 * UNIT) * (scale + np.abs(bias) * with_bias)
                    self.assertTrue((np.abs(y.asnumpy() - wanted) <= limit).all())

    def test_sums_of_an_operand(self: Any) -> None:
        x, dy = self.operands(33, 18, 41, (True, False))
        nodes = ad.Variable("x"), ad.Variable("dy")
        for rung, precision in self.rungs():
            with self.subTest(rung=rung, precision=precision):
                product = ad.matmul_op(*nodes, trans_A=True, algo=rung)
                executor = ad.Executor([product, ad.sum_op(nodes[1], axis=0)], self.ctx, precision)
                feeds = dict(zip(nodes, (x, dy)))
                got, sums = executor.run(feeds, convert_to_numpy_ret_vals=True)
                self.check(got, [x, dy], (True, False), bound(41, precision))
                limit = bound(41, "fp32") * np.abs(dy).sum(0)
                self.assertTrue((np.abs(sums - dy.sum(0, np.float64)) <= limit).all())
                self.assertEqual(executor.report().plans[0].algorithms, (f"matmul_sums by {rung}",))

    def test_gradients_have_the_rung(self: Any) -> None:
        for (rung, precision), flags in itertools.product(self.rungs(), TRANSPOSES):
            with self.subTest(rung=rung, transposed=flags):
                a, b = self.operands(9, 14, 11, flags)
                dy = self.operands(9, 1, 14, (False, False))[0]
                nodes = [ad.Variable(name) for name in ("a", "b", "dy")]
                y = ad.matmul_op(*nodes[:2], *flags, algo=rung)
                grads = ad.gradients(ad.sum_op(y * nodes[2]), nodes[:2])
                executor = ad.Executor([y, *grads], self.ctx, precision)
                feeds = dict(zip(nodes, (a, b, dy)))
                got = executor.run(feeds, convert_to_numpy_ret_vals=True)
                self.assertEqual(executor.report().plans[0].algorithms, (f"matmul by {rung}",) * 3)
                left, right = (a.T if flags[0] else a), (b.T if flags[1] else b)
                self.check(got[0], [left, right], (0, 0), bound(11, precision))
                da, db = (got[1].T if flags[0] else got[1]), (got[2].T if flags[1] else got[2])
                self.check(da, [dy, right], (False, True), bound(14, precision))
                self.check(db, [left, dy], (True, False), bound(9, precision))

    def test_batched(self: Any) -> None:
        rng = np.random.default_rng(5)
        a, b = (rng.standard_normal(s, np.float32) for s in ((3, 1, 17, 9), (2, 9, 21)))
        dy = rng.standard_normal((3, 2, 17, 21), np.float32)
        nodes = [ad.Variable(name) for name in ("a", "b", "dy")]
        for rung, precision in self.rungs():
            with self.subTest(rung=rung, precision=precision):
                y = F.matmul(*nodes[:2], algo=rung)
                grads = ad.gradients(ad.sum_op(y * nodes[2]), nodes[:2])
                executor = ad.Executor([y, *grads], self.ctx, precision)
                got = executor.run(dict(zip(nodes, (a, b, dy))), convert_to_numpy_ret_vals=True)
                self.assertEqual(
                    executor.report().plans[0].algorithms, (f"batched_matmul by {rung}",) * 3
                )
                scale = np.abs(a) @ np.abs(b)
                off = np.abs(got[0] - a.astype(np.float64) @ b) - bound(9, precision) * scale
                self.assertLessEqual(off.max(), 0)
                da = (dy.astype(np.float64) @ b.swapaxes(-1, -2)).sum(1, keepdims=True)
                np.testing.assert_allclose(
                    got[1], da, rtol=0, atol=2e-2 if precision == "tf32" else 2e-5
                )

    def test_setting_names_the_rung_of_all_others(self: Any) -> None:
        x, w = ad.Variable("x"), ad.Variable("w")
        rung = self.rungs()[0][0]
        feeds = dict(zip((x, w), self.operands(5, 6, 7, (False, False))))
        with mock.patch.object(settings, "gemm", rung):
            executor = ad.Executor([x @ w, ad.matmul_op(x, w, algo="auto")], self.ctx)
            executor.run(feeds)
            self.assertEqual(executor.report().plans[0].algorithms, (f"matmul by {rung}",))
            self.assertEqual(set(executor.algorithms().values()), {rung, ""})

    def test_products_of_two_rungs_stay_two(self: Any) -> None:
        x, w = ad.Variable("x"), ad.Variable("w")
        rungs = sorted({rung for rung, precision in self.rungs() if precision == "fp32"})[:2]
        feeds = dict(zip((x, w), self.operands(5, 6, 7, (False, False))))
        executor = ad.Executor([ad.matmul_op(x, w, algo=rung) for rung in rungs], self.ctx)
        executor.run(feeds)
        found = executor.report().plans[0].algorithms
        self.assertEqual(set(found), {f"matmul by {rung}" for rung in rungs})

    def test_a_rung_that_the_device_lacks(self: Any) -> None:
        x, w = ad.Variable("x"), ad.Variable("w")
        missing = next(rung for rung in GEMM.rungs if rung not in rungs_among(self.algorithms()))
        executor = ad.Executor([ad.matmul_op(x, w, algo=missing)], self.ctx)
        with self.assertRaisesRegex(NotApplicableError, f"algo='{missing}'.*use auto, "):
            executor.run(dict(zip((x, w), self.operands(2, 3, 4, (False, False)))))
        held = [array(np.ones((2, 2), np.float32), self.ctx) for _ in range(3)]
        with self.assertRaisesRegex(NotApplicableError, f"{missing!r} on .*; use auto, "):
            gpu_op.matrix_multiply(held[0], False, held[1], False, held[2], algo=missing)

    def test_plain_function_takes_a_rung(self: Any) -> None:
        for rung, precision in self.rungs():
            if precision == "fp32":
                operands = self.operands(9, 5, 12, (False, True))
                given = [array(x, self.ctx) for x in operands]
                c = empty((9, 5), self.ctx)
                gpu_op.matrix_multiply(given[0], False, given[1], True, c, algo=rung)
                self.check(c.asnumpy(), operands, (False, True), bound(12, "fp32"))

    def test_tensors(self: Any) -> None:
        device = "cpu" if self.ctx is cpu(0) else "gpu"
        a, b = self.operands(6, 7, 8, (False, True))
        for rung, precision in self.rungs():
            if precision == "fp32":
                x = dlsys.tensor(a, device=device, requires_grad=True)
                y = F.matmul(x, dlsys.tensor(b, device=device), transpose_b=True, algo=rung)
                y.sum().backward()
                self.check(y.numpy(), [a, b], (False, True), bound(8, "fp32"))
                grad = np.ones((6, 7), np.float32)
                self.check(x.grad.numpy(), [grad, b], (False, False), bound(7, "fp32"))
        # The rung is part of what a tape is known by: after the same product by another one too.
        missing = next(rung for rung in GEMM.rungs if rung not in rungs_among(self.algorithms()))
        y = F.matmul(x, dlsys.tensor(b, device=device), transpose_b=True, algo=missing)
        with self.assertRaisesRegex(NotApplicableError, f"algo='{missing}'"):
            y.numpy()


def fetch_without_rung(fetch: ad.Node) -> ad.Node:
    """The same computation without a rung, for numpy."""
    copies = [x if x.op.leaf else fetch_without_rung(x) for x in fetch.inputs]
    made = fetch.derive(copies, None)
    made.attrs = {name: value for name, value in fetch.attrs.items() if name != "algo"}
    return made


CpuLadder, GpuLadder = on_native_devices(Ladder)


class OfTheCpu(CpuLadder):  # type: ignore[misc, valid-type]
    """What the packed rungs of the CPU have cases for."""

    # Small: read in place, tiles that overlap. Rows 1024 apart: packed. Several blocks of N and
    # of K. Rows and columns alone, few rows. A long K in parts.
    CASES = [
        *((7, 16, 5), (61, 63, 400), (12, 33, 401), (3, 20, 1024), (40, 33, 1024), (5, 100, 33)),
        *((50, 800, 410), (26, 399, 801), (1, 700, 33), (2, 130, 70), (300, 1, 70), (13, 1, 32)),
        *((10, 64, 20011), (33, 9, 8192)),
    ]

    def test_every_case_of_the_packed_rungs(self) -> None:
        for shape, flags, rung in itertools.product(self.CASES, TRANSPOSES, ("simd", "threads")):
            with self.subTest(rung=rung, shape=shape, transposed=flags):
                operands = self.operands(*shape, flags)
                got = self.product(operands, flags, rung, "fp32")
                self.check(got, operands, flags, bound(shape[2], "fp32"))

    def test_bits_do_not_depend_on_threads(self) -> None:
        self.addCleanup(load().set_threads, settings.threads)
        for shape, flags in itertools.product([*self.CASES, (97, 101, 103)], TRANSPOSES):
            operands = self.operands(*shape, flags)
            wanted = self.product(operands, flags, "simd", "fp32").tobytes()
            for threads in (1, 2, 3):
                with self.subTest(shape=shape, transposed=flags, threads=threads):
                    load().set_threads(threads)
                    got = self.product(operands, flags, "threads", "fp32").tobytes()
                    self.assertEqual(got, wanted)

    def test_infinities_stay_in_their_rows_and_columns(self) -> None:
        for rung, (m, n) in itertools.product(("simd", "blocked", "naive"), ((31, 37), (100, 150))):
            a, b = self.operands(m, n, 33, (False, False))
            a[3, 5], b[2, 4] = np.inf, np.nan
            with self.subTest(rung=rung, shape=(m, n)), np.errstate(invalid="ignore"):
                got = self.product([a, b], (False, False), rung, "fp32")
                np.testing.assert_array_equal(np.isfinite(got), np.isfinite(a @ b))

    def test_without_a_blas_it_says_so(self) -> None:
        # A process without numpy has none loaded; the system may have one.
        program = f"""if True:
            import ctypes
            library = ctypes.CDLL({str(load().path)!r})
            source = ctypes.c_char_p()
            number = {load().index["cpu", "matmul", FLOAT32]}
            status = library.DLAlgorithmSource(
                ctypes.c_int64(number), ctypes.c_int64(5), ctypes.byref(source)
            )
            library.DLGetLastError.restype = ctypes.c_char_p
            print(status, (source.value if status == 0 else library.DLGetLastError()).decode())
        """
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertRegex(
            done.stdout,
            "(?i)^4 no BLAS is loaded .*libopenblas.so.0|^0 .*(blas|blis|mkl)",
            done.stderr,
        )


class Numpy(unittest.TestCase):
    """The rungs of numpy, at float32 and float64."""

    def test_rungs_forward_and_gradients(self) -> None:
        rng = np.random.default_rng(8)
        shapes = [((3, 1, 5, 4), (2, 4, 6)), ((5, 4), (4, 6)), ((5, 0), (0, 6))]
        for rung, dtype, (left, right) in itertools.product(
            GEMM.numpy, (np.float32, np.float64), shapes
        ):
            with self.subTest(rung=rung, dtype=dtype, shapes=(left, right)):
                a, b = rng.standard_normal(left), rng.standard_normal(right)
                nodes = ad.Variable("a", dtype=dtype), ad.Variable("b", dtype=dtype)
                y = F.matmul(*nodes, algo=rung)
                executor = ad.Executor([y, *ad.gradients(ad.sum_op(y), nodes)])
                a, b = a.astype(dtype), b.astype(dtype)
                got = executor.run(dict(zip(nodes, (a, b))))
                exact, ones = a.astype(np.float64) @ b, np.ones(got[0].shape)
                atol = 1e2 * np.finfo(dtype).eps
                np.testing.assert_allclose(got[0], exact, rtol=0, atol=atol)
                da = ones @ b.swapaxes(-1, -2)
                db = a.astype(np.float64).swapaxes(-1, -2) @ ones
                if a.ndim > 2:
                    da, db = da.sum(1, keepdims=True), db.sum(0)
                np.testing.assert_allclose(got[1], da, rtol=0, atol=atol)
                np.testing.assert_allclose(got[2], db, rtol=0, atol=atol)

    def test_a_rung_of_other_devices(self) -> None:
        x, w = ad.Variable("x"), ad.Variable("w")
        executor = ad.Executor([ad.matmul_op(x, w, algo="simd")])
        with self.assertRaisesRegex(NotApplicableError, "use auto, naive, blas"):
            executor.run({x: np.ones((2, 3), np.float32), w: np.ones((3, 2), np.float32)})


class OfTheGpu(GpuLadder):  # type: ignore[misc, valid-type]
    """What only rungs of the GPU do."""

    def test_every_variant_of_warp(self) -> None:
        self.check_variants(x for x in self.algorithms() if rung_of(x) == "warp")

    def test_every_variant_of_tensor(self) -> None:
        self.check_variants(x for x in self.algorithms() if rung_of(x) == "tensor")

    def test_refusals_name_those_that_can(self) -> None:
        operands = self.operands(5, 6, 7, (False, False))
        with self.assertRaisesRegex(
            NotApplicableError,
            "matmul: algo=tensor cannot compute this: .*the precision is fp32; use auto, naive, ",
        ):
            self.product(operands, (False, False), "tensor", "fp32")

    def test_the_autotuner_stays_within_the_rung(self) -> None:
        x, w = ad.Variable("x"), ad.Variable("w")
        feeds = dict(zip((x, w), self.operands(40, 48, 64, (False, False))))
        tried: set[str] = set()

        def us_of(benchmark: Microbenchmark, algorithm: Algorithm, about: float = 0) -> float:
            benchmark.results(algorithm)
            tried.add(algorithm.name)
            return 1.0 if algorithm.name == "warp 64x64 by 1" else 2.0

        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(settings, "tune", "full"),
            mock.patch.object(settings, "tune_cache", f"{folder}/tuning.json"),
            mock.patch.object(Microbenchmark, "us", us_of),
            mock.patch.object(Microbenchmark, "us_about", us_of),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            executor = ad.Executor([ad.matmul_op(x, w, algo="warp")], self.ctx)
            executor.run(feeds)
        self.assertGreater(len(tried), 8)
        self.assertEqual({rung_of(name) for name in tried}, {"warp"})
        self.assertEqual(executor.report().plans[0].algorithms, ("matmul by warp 64x64 by 1",))

    TMA = "warp 128x128 TMA", "warp 256x128 TMA"

    def of_sm90(self) -> None:
        """Skips the test where the GPU does not have tiles fed by TMA."""
        operands = self.operands(1, 1, 1, (False, False))
        try:
            self.product(operands, (False, False), self.TMA[0], "fp32")
        except NotApplicableError as error:
            self.skipTest(str(error))

    def test_tiles_fed_by_tma(self) -> None:
        self.of_sm90()
        shapes = [(256, 128, 32), (300, 68, 90), (257, 131, 100), (64, 200, 16), (300, 68, 332)]
        shapes += [(520, 260, 700), (40, 520, 1100)]  # whose tiles several blocks share
        cases = itertools.product(self.TMA, shapes, TRANSPOSES)
        for name, shape, flags in sample.of(cases, 30):
            with self.subTest(name=name, shape=shape, transposed=flags):
                operands = self.operands(*shape, flags)
                got = self.product(operands, flags, name, "fp32", offset=shape[0] % 2)
                self.check(got, operands, flags, bound(shape[2], "fp32"))
                again = self.product(operands, flags, name, "fp32")
                self.assertEqual(got.tobytes(), again.tobytes())

    def test_tiles_fed_by_tma_have_epilogues_and_sums(self) -> None:
        self.of_sm90()
        for name in self.TMA:
            with self.subTest(name=name):
                self.check_epilogues_and_sums(self.algorithms().index(name) + 1)

    def check_epilogues_and_sums(
        self, number: int, m: int = 270, n: int = 133, k: int = 50
    ) -> None:
        x, w = self.operands(m, n, k, (True, False))
        bias = self.operands(1, n, 1, (False, False))[1][0]
        given = [array(value, self.ctx) for value in (x, w, bias)]
        c, sums = empty((m, n), self.ctx), empty((n,), self.ctx)
        relu, of_b = 1, 0
        launch("matmul_bias", self.ctx, *given, 1, 0, number, 0, relu, c)
        wanted = np.maximum(x.astype(np.float64).T @ w + bias, 0)
        scale = np.abs(x).T @ np.abs(w) + np.abs(bias)
        off = np.abs(c.asnumpy() - wanted) - bound(k + 1, "fp32") * scale
        self.assertLessEqual(off.max(), 0)
        launch("matmul_sums", self.ctx, *given[:2], 1, 0, number, 0, of_b, c, sums)
        self.check(c.asnumpy(), [x, w], (True, False), bound(k, "fp32"))
        off = np.abs(sums.asnumpy() - w.sum(0, np.float64))
        self.assertTrue((off <= bound(k, "fp32") * np.abs(w).sum(0)).all())

    def test_tiles_fed_by_tma_split_long_sums_over_any_block(self) -> None:
        """More splits than a cluster has, which the heuristic of the rung takes here."""
        number = self.algorithms().index("warp") + 1
        m, n, k = 784, 128, 8192
        x, w = self.operands(m, n, k, (True, False))
        given = [array(value, self.ctx) for value in (x, w)]
        c, sums = empty((m, n), self.ctx), empty((n,), self.ctx)
        launch("matmul_sums", self.ctx, *given, 1, 0, number, 0, 0, c, sums)
        self.check(c.asnumpy(), [x, w], (True, False), bound(k, "fp32"))
        off = np.abs(sums.asnumpy() - w.sum(0, np.float64))
        self.assertTrue((off <= bound(k, "fp32") * np.abs(w).sum(0)).all())
        bias = self.operands(1, n, 1, (False, False))[1][0]
        relu = 1
        launch("matmul_bias", self.ctx, *given, array(bias, self.ctx), 1, 0, number, 0, relu, c)
        wanted = np.maximum(x.astype(np.float64).T @ w + bias, 0)
        scale = np.abs(x).T @ np.abs(w) + np.abs(bias)
        off = np.abs(c.asnumpy() - wanted) - bound(k + 1, "fp32") * scale
        self.assertLessEqual(off.max(), 0)

    def test_slim_products(self) -> None:
        """At most 16 rows or columns, with K in one share, in a cluster's and in those of several
        clusters; the bits are the same each time.
        """
        columns = [(4, 16, 5), (132, 1, 70), (1000, 7, 777), (128, 10, sample.count(9000, 3000))]
        rows = [(1, 516, 1000), (3, 4, 300), (16, 260, 1024), (5, 8, sample.count(20000, 5000))]
        cases = [(shape, (True, flag)) for shape in columns for flag in (False, True)]
        cases += [(shape, (flag, False)) for shape in rows for flag in (False, True)]
        for shape, flags in cases:
            with self.subTest(shape=shape, transposed=flags):
                operands = self.operands(*shape, flags)
                got = self.product(operands, flags, "warp slim", "fp32")
                self.check(got, operands, flags, bound(shape[2], "fp32"))
                again = self.product(operands, flags, "warp slim", "fp32")
                self.assertEqual(got.tobytes(), again.tobytes())
        for shape, flags in (((17, 20, 9), (False, False)), ((16, 18, 9), (False, False))):
            with self.subTest(shape=shape), self.assertRaises(NotApplicableError):
                self.product(self.operands(*shape, flags), flags, "warp slim", "fp32")

    def test_slim_products_have_epilogues_and_sums(self) -> None:
        number = self.algorithms().index("warp slim") + 1
        for m, n in ((132, 10), (9, 132)):
            with self.subTest(rows=m, columns=n):
                self.check_epilogues_and_sums(number, m, n, 700)

    def test_edges_of_tiles_fed_by_tma(self) -> None:
        """A few rows and columns beyond those that fill warps: slim products of their own where K
        is as long as here, unless the kernel transposes what they would read; else half tiles.
        """
        self.of_sm90()
        m, n, k = sample.count(512, 256), sample.count(256, 128), 12000
        cases = [(self.TMA[1], e, flags) for e in range(1, 17) for flags in TRANSPOSES]
        cases += [(self.TMA[0], e, flags) for e in (1, 8, 16) for flags in TRANSPOSES]
        for name, e, flags in sample.of(cases, 2):
            with self.subTest(name=name, beyond=e, transposed=flags):
                operands = self.operands(m + e, n + 17 - e, k, flags)
                got = self.product(operands, flags, name, "fp32")
                self.check(got, operands, flags, bound(k, "fp32"))
                again = self.product(operands, flags, name, "fp32")
                self.assertEqual(got.tobytes(), again.tobytes())
        lengths = (self.TMA[1], 600), *sample.rest(((self.TMA[0], 600), (self.TMA[1], k)))
        for name, length in lengths:
            number = self.algorithms().index(name) + 1
            self.check_epilogues_and_sums(number, 520, 265, length)

    def test_operands_packed_while_tiles_are_multiplied(self) -> None:
        """Operands along K, of many rows or columns of C: in whole tiles and in shares of some."""
        self.of_sm90()
        shapes = [(264, 1736, 104), (33, 1540, 36), (3080, 1545, 136)]
        for shape, flags in sample.of(itertools.product(shapes, TRANSPOSES), 6):
            with self.subTest(shape=shape, transposed=flags):
                operands = self.operands(*shape, flags)
                got = self.product(operands, flags, self.TMA[1], "fp32")
                self.check(got, operands, flags, bound(shape[2], "fp32"))
                again = self.product(operands, flags, self.TMA[1], "fp32")
                self.assertEqual(got.tobytes(), again.tobytes())

    def test_long_sums_of_few_tiles_on_tensor_cores(self) -> None:
        """Every tiling of the rung `hopper` cuts K among all blocks; the bits are the same."""
        flags, served = (True, False), 0
        names = [name for name in self.algorithms() if name.startswith("hopper ")]
        shapes = ((200, 128, 4000), (36, 20, 3000))
        cases = itertools.product(shapes, ("tf32", "3xtf32"), names)
        for shape, precision, name in sample.of(cases, 5):
            with self.subTest(name=name, shape=shape, precision=precision):
                operands = self.operands(*shape, flags)
                try:
                    got = self.product(operands, flags, name, precision)
                except (NotApplicableError, DeviceError):
                    continue
                served += 1
                self.check(got, operands, flags, bound(shape[2], precision))
                again = self.product(operands, flags, name, precision)
                self.assertEqual(got.tobytes(), again.tobytes())
        if not served:
            self.skipTest("needs an H100 or H200")

    def test_long_sums_of_the_rung_tensor(self) -> None:
        """More splits than a cluster has, of large tiles too, with the sums of an operand."""
        number = self.algorithms().index("tensor") + 1
        m, n, k = 200, 128, 8200
        x, w = self.operands(m, n, k, (True, False))
        given = [array(value, self.ctx) for value in (x, w)]
        for precision in ("tf32", "3xtf32"):
            with self.subTest(precision=precision):
                c, sums = empty((m, n), self.ctx), empty((n,), self.ctx)
                how = number, PRECISIONS[precision]
                launch("matmul_sums", self.ctx, *given, 1, 0, *how, 0, c, sums)
                self.check(c.asnumpy(), [x, w], (True, False), bound(k, precision))
                off = np.abs(sums.asnumpy() - w.sum(0, np.float64))
                self.assertTrue((off <= bound(k, "fp32") * np.abs(w).sum(0)).all())

    def test_hopper_reads_tf32_however_it_lies(self) -> None:
        """With every epilogue and sums, where rows are at multiples of 16 bytes and where not, and
        where tiles are cut along K.
        """
        shapes = ((300, 136, 72), (70, 264, 100), (40, 132, 900), (45, 67, 33))
        names = [name for name in self.algorithms() if name.startswith("hopper ")]
        served = 0
        for shape, flags, name in sample.of(itertools.product(shapes, TRANSPOSES, names), 13):
            with self.subTest(name=name, shape=shape, transposed=flags):
                try:
                    self.check_tf32(name, shape, flags)
                except (NotApplicableError, DeviceError):
                    continue
                served += 1
        if not served:
            self.skipTest("the GPU does not have the rung hopper")

    def test_hopper_turns_what_lies_across(self) -> None:
        """Both operands, as in the gradient of weights: tiles of C and of its transpose, as wide as
        their number makes them, K in one piece and in many, with the sums of the smaller operand.
        """
        name, flags = "hopper 128x256 fitted", (True, False)
        shapes = ((420, 36, 1500), (40, 600, 700), (784, 128, 40), (128, 132, 200), (4, 4, 1))
        for m, n, k in sample.of(shapes, 4):
            with self.subTest(shape=(m, n, k)):
                try:
                    self.check_tf32(name, (m, n, k), flags, (int(m < n),))
                except DeviceError as error:
                    self.skipTest(str(error))
                operands = self.operands(m, n, k, flags)
                first, again = (self.product(operands, flags, name, "tf32") for _ in range(2))
                self.assertEqual(first.tobytes(), again.tobytes())
        for shape, other in (((48, 32, 64), (False, True)), ((45, 32, 64), flags)):
            with self.subTest(shape=shape), self.assertRaises((NotApplicableError, DeviceError)):
                self.product(self.operands(*shape, other), other, name, "tf32")

    def test_hopper_reads_3xtf32_however_it_lies(self) -> None:
        """Either operand in registers, the other packed, or turned, in both of its parts: rows at
        multiples of 16 bytes and not, K in one piece and in many, with an epilogue.
        """
        shapes = ((300, 68, 100), (68, 300, 100), (45, 67, 33), (40, 132, 900), (784, 128, 40))
        names = [name for name in self.algorithms() if name.startswith("hopper ")]
        served, fitted = set(), "hopper 128x128 fitted"
        cases = [((40, 132, 900), (True, False), fitted), ((784, 128, 40), (True, False), fitted)]
        cases += sample.of(itertools.product(shapes, TRANSPOSES, names), 7)
        for shape, flags, name in cases:
            with self.subTest(name=name, shape=shape, transposed=flags):
                operands = self.operands(*shape, flags)
                try:
                    got = self.product(operands, flags, name, "3xtf32")
                except (NotApplicableError, DeviceError):
                    continue
                served.add(name)
                self.check(got, operands, flags, bound(shape[2], "3xtf32"))
                again = self.product(operands, flags, name, "3xtf32")
                self.assertEqual(got.tobytes(), again.tobytes())
                given = [array(x, self.ctx) for x in operands]
                bias = self.operands(1, shape[1], 1, (False, False))[1][0]
                number, relu, c = self.algorithms().index(name) + 1, 1, empty(shape[:2], self.ctx)
                how = *flags, number, PRECISIONS["3xtf32"], relu
                launch("matmul_bias", self.ctx, *given, array(bias, self.ctx), *how, c)
                rounded = np.maximum(got + bias, 0)
                np.testing.assert_allclose(c.asnumpy(), rounded, rtol=0, atol=0)
        if not served:
            self.skipTest("the GPU does not have the rung hopper")
        self.assertIn(fitted, served)

    def check_tf32(
        self, name: str, shape: tuple[int, int, int], flags: tuple, sums_of_a: tuple = (1, 0)
    ) -> None:
        m, n, k = shape
        number, tf32 = self.algorithms().index(name) + 1, PRECISIONS["tf32"]
        operands = self.operands(*shape, flags)
        self.check(self.product(operands, flags, name, "tf32"), operands, flags, bound(k, "tf32"))
        a, b = (x.astype(np.float64).T if t else x for x, t in zip(operands, flags))
        bias, side = self.operands(1, n, 1, (False, False))[1][0], self.operands(m, 1, n, (0, 0))[0]
        exact, scale = a @ b, np.abs(a) @ np.abs(b)
        given = [array(x, self.ctx) for x in operands]
        c = empty((m, n), self.ctx)

        def check(wanted: np.ndarray, own: np.ndarray) -> None:
            """Slopes are 1.13 at most, and functions off by 2^-18 of `own`."""
            off = np.abs(c.asnumpy() - wanted)
            allowed = 1.13 * (bound(k + 1, "tf32") * scale + UNIT * np.abs(bias)) + 2.0**-18 * own
            self.assertLessEqual((off - allowed).max(), 0)
            c[:] = np.nan

        for function in ("relu", "gelu_tanh"):
            code, wanted = ACTIVATIONS.index(function) + 1, FORMULAS[function](exact + bias)
            how = *flags, number, tf32, code
            launch("matmul_bias", self.ctx, *given, array(bias, self.ctx), *how, c)
            check(wanted, np.abs(wanted))
        for function in ("relu_gradient", "gelu_tanh_gradient"):
            code = GRADIENTS.index(function) + 1
            how = *flags, number, tf32, code
            launch("matmul_gradient", self.ctx, *given, array(side, self.ctx), *how, c)
            check(DACTS[function](side.astype(np.float64)) * exact, np.abs(exact))
        for of_a in sums_of_a:
            summed = a.T if of_a else b
            sums = empty((summed.shape[1],), self.ctx)
            launch("matmul_sums", self.ctx, *given, *flags, number, tf32, of_a, c, sums)
            check(exact, np.zeros_like(exact))
            off = np.abs(sums.asnumpy() - summed.sum(0, np.float64))
            self.assertTrue((off <= bound(k, "fp32") * np.abs(summed).sum(0)).all())

    def test_3xtf32_has_infinities(self) -> None:
        a, b = self.operands(20, 9, 16, (False, False))
        a[3, 5], b[2, 4] = np.inf, np.nan
        got = self.product([a, b], (False, False), "tensor", "3xtf32")
        with np.errstate(invalid="ignore"):
            wanted = a.astype(np.float64) @ b
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))


class Words(unittest.TestCase):
    def test_unknown_rungs_fail_where_they_are_written(self) -> None:
        x, w = ad.Variable("x"), ad.Variable("w")
        for call in (ad.matmul_op, ad.batched_matmul_op, F.matmul, ad.linear_op):
            with self.assertRaisesRegex(SignatureError, "algo must be auto, naive, .*, got 'wrap'"):
                call(x, w, algo="wrap")


del Ladder, CpuLadder, GpuLadder

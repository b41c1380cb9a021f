"""Matrix products of floats of 16 bits on the GPU: every rung, alone, batched and with epilogues,
against float64 of the same operands.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn
from dlsys.dtypes import FLOAT16, ROUNDING, bfloat16, rounded
from dlsys.errors import DeviceError, NotApplicableError
from dlsys.fusion.shared.body import ACTIVATIONS, BY_SIDES, GRADIENTS
from dlsys.graph.spec import Spec
from dlsys.ndarray import array, empty, launch
from dlsys.rungs import rungs_among
from dlsys.runtime.device import gpu
from dlsys.runtime.library import load
from dlsys.settings import settings
from support import sample
from support.devices import EMULATED, require
from support.fusion import require_fusion
from support.table.families.fused.gemm import DACTS, FORMULAS

NARROW = (bfloat16, FLOAT16)
TRANSPOSES = list(itertools.product((False, True), repeat=2))
SHAPES = [
    *((1, 1, 1), (3, 0, 2), (0, 3, 2), (2, 3, 0), (13, 5, 1), (17, 31, 13), (64, 48, 16)),
    *((40, 136, 72), *(() if EMULATED else ((129, 67, 33), (264, 144, 128)))),
]
LARGE = (60, 40, 300) if EMULATED else (300, 260, 2100)


def limit(wanted: np.ndarray, scale: np.ndarray, k: int, dtype: Any) -> np.ndarray:
    """The most by which an element may be off: products of 16 bits are exact in float32, whose sums
    tensor cores may cut rather than round, and the result is rounded once; the smallest float16
    are subnormal.
    """
    return ROUNDING.get(dtype, 2.0**-24) * np.abs(wanted) + (k + 1) * 2.0**-23 * scale + 2.0**-25


def dequantized(slopes: np.ndarray) -> np.ndarray:
    """The derivatives that quantized ones stand for."""
    return (slopes.astype(np.float64) - 27) / 200


@require(gpu(0))
class NarrowGemm(unittest.TestCase):
    ctx = gpu(0)

    def algorithms(self) -> tuple[str, ...]:
        return ("", *load().algorithms("cuda", "matmul"))

    def rungs(self) -> Iterator[tuple[int, str]]:
        """The rungs that work here by number and name, and the heuristic."""
        yield 0, ""
        for rung in rungs_among(self.algorithms()[1:]):
            if rung == "cublas" and settings.blas == "own":
                continue  # it is forbidden
            number = self.algorithms().index(rung)
            try:
                load().algorithm_source("cuda", "matmul", number)
            except DeviceError:
                continue
            yield number, rung

    def operands(self, m: int, n: int, k: int, flags: Any, dtype: Any) -> list[np.ndarray]:
        rng = np.random.default_rng(m + 3 * n + 7 * k)
        shapes = (k, m) if flags[0] else (m, k), (n, k) if flags[1] else (k, n)
        return [rounded(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]

    def product(self, operands: Sequence[np.ndarray], flags: Any, number: int, dtype: Any) -> Any:
        a, b = (array(x, self.ctx, dtype) for x in operands)
        c = empty((operands[0].shape[flags[0]], operands[1].shape[not flags[1]]), self.ctx, dtype)
        c[:] = np.nan
        launch("matmul", self.ctx, a, flags[0], b, flags[1], number, 0, c)
        return c.asnumpy().astype(np.float64)

    def check(self, got: np.ndarray, operands: Any, flags: Any, dtype: Any) -> None:
        a, b = (
            x.astype(np.float64).T if t else x.astype(np.float64) for x, t in zip(operands, flags)
        )
        off = np.abs(got - a @ b) - limit(a @ b, np.abs(a) @ np.abs(b), a.shape[1], dtype)
        self.assertTrue((off <= 0).all(), f"off by {off.max(initial=0):.3g} too much")

    def test_every_shape_and_transpose(self) -> None:
        cases = itertools.product(self.rungs(), NARROW, SHAPES, TRANSPOSES)
        for (number, rung), dtype, shape, flags in cases:
            with self.subTest(rung=rung, dtype=str(dtype), shape=shape, transposed=flags):
                operands = self.operands(*shape, flags, dtype)
                self.check(self.product(operands, flags, number, dtype), operands, flags, dtype)

    def test_every_variant_of_bfloat16(self) -> None:
        self.check_variants(bfloat16)

    def test_every_variant_of_float16(self) -> None:
        self.check_variants(FLOAT16)

    def check_variants(self, dtype: Any) -> None:
        flags, served = (False, True), 0
        for shape in ((45, 70, 150), LARGE):
            operands = self.operands(*shape, flags, dtype)
            for number, name in enumerate(self.algorithms()):
                if not name.startswith(("hopper", "cublas", "tensor")):
                    continue
                with self.subTest(algorithm=name, dtype=str(dtype), shape=shape):
                    try:
                        got = self.product(operands, flags, number, dtype)
                    except (NotApplicableError, DeviceError):
                        continue
                    served += 1
                    self.check(got, operands, flags, dtype)
        self.assertGreater(served, 2)

    def test_the_same_bits_each_time(self) -> None:
        """Also where K is split."""
        for (number, rung), k in itertools.product(
            self.rungs(), (100, 2000 if EMULATED else 20000)
        ):
            operands = self.operands(24, 40, k, (False, False), bfloat16)
            with self.subTest(rung=rung, k=k):
                found = {
                    self.product(operands, (False, False), number, bfloat16).tobytes()
                    for _ in range(3)
                }
                self.assertEqual(len(found), 1)
                got = self.product(operands, (False, False), number, bfloat16)
                self.check(got, operands, (False, False), bfloat16)

    def test_long_sums_of_few_tiles(self) -> None:
        """As gradients of weights have them, by every tiling of the rung `hopper`, and with so few
        columns that no tensor cores are used.
        """
        flags = (True, False)
        k = 2000 if EMULATED else 20000
        shapes = (200, 128, k), (784, 24, k), (150, 44, k), (36, 10, k)
        names = [name for name in self.algorithms() if not name or name.startswith("hopper")]
        cases = itertools.product(shapes, NARROW, names)
        for shape, dtype, name in sample.of(cases, 2 * len(names)):
            with self.subTest(name=name, shape=shape, dtype=str(dtype)):
                operands = self.operands(*shape, flags, dtype)
                number = self.algorithms().index(name)
                try:
                    got = self.product(operands, flags, number, dtype)
                except (NotApplicableError, DeviceError):
                    continue
                self.check(got, operands, flags, dtype)
                again = self.product(operands, flags, number, dtype)
                self.assertEqual(got.tobytes(), again.tobytes())
                self.check_sums(operands, number, dtype)

    def check_sums(self, operands: Sequence[np.ndarray], number: int, dtype: Any) -> None:
        """Those of A, (k, m), beside the product with B, (k, n)."""
        (k, m), n = operands[0].shape, operands[1].shape[1]
        given = [array(x, self.ctx, dtype) for x in operands]
        c, sums = empty((m, n), self.ctx, dtype), empty((m,), self.ctx)
        c[:] = sums[:] = np.nan
        of_a = 1
        try:
            launch("matmul_sums", self.ctx, *given, 1, 0, number, 0, of_a, c, sums)
        except NotApplicableError:
            self.assertIn("ping-pong", self.algorithms()[number])
            return
        self.check(c.asnumpy().astype(np.float64), operands, (True, False), dtype)
        wide = operands[0].astype(np.float64)
        off = np.abs(sums.asnumpy() - wide.sum(0)) - (k + 1) * 2.0**-23 * np.abs(wide).sum(0)
        self.assertLessEqual(off.max(), 0)

    def test_epilogues(self) -> None:
        m, n, k = 70, 48, 33
        for dtype in NARROW:
            x, w = self.operands(m, n, k, (False, False), dtype)
            bias, side = self.operands(1, n, m, (False, False), dtype)[1][0], None
            side = self.operands(m, 1, n, (False, False), dtype)[0]
            nodes = [ad.Variable(name, dtype=dtype) for name in ("x", "w", "bias", "side")]
            values = dict(zip(nodes, (x, w, bias, side)))
            exact = x.astype(np.float64) @ w
            scale = np.abs(x).astype(np.float64) @ np.abs(w) + np.abs(bias)
            for _, rung in self.rungs():
                y = ad.matmul_op(nodes[0], nodes[1], algo=rung or None)
                cases = {
                    "matmul_map": (ad.tanh_op(y), nodes[:2], np.tanh(exact)),
                    "matmul_bias": (
                        ad.relu_op(y + nodes[2]), nodes[:3], np.maximum(exact + bias, 0),
                    ),
                    "matmul_gradient": (
                        ad.relu_gradient_op(nodes[3], y),
                        (*nodes[:2], nodes[3]), np.where(side > 0, exact, 0),
                    ),
                }  # fmt: skip
                for kernel, (fetch, given, wanted) in cases.items():
                    with self.subTest(rung=rung, dtype=str(dtype), kernel=kernel):
                        executor = ad.Executor([fetch], self.ctx)
                        (got,) = executor.run({x: values[x] for x in given}, True)
                        (step,) = executor.plan({x: x.spec or values[x].shape for x in given}).steps
                        self.assertEqual(step.node.op.kernel, kernel)
                        off = np.abs(got - wanted) - limit(wanted, scale, k, dtype)
                        self.assertLessEqual(off.max(), 2.0**-20)

    def test_fast_functions_of_the_rung_hopper(self) -> None:
        """Results are rounded to 16 bits of what is off by 2^-18 of itself, or of dy, at most, and
        by the product's error times the largest slope, 1.13. Of bfloat16 the slope may have been
        rounded to float16, by 2^-11. Products reach from -20 to 20.
        """
        m, n, k = 70, 136, 40
        cases = [("matmul_map", name) for name in ("sigmoid", "silu", "gelu", "gelu_tanh")]
        cases += [("matmul_gradient", f"{name}_gradient") for name in ("silu", "gelu", "gelu_tanh")]
        hopper = [name for name in self.algorithms() if name.startswith("hopper ")]
        for dtype, name in itertools.product(NARROW, hopper):
            x, w = self.operands(m, n, k, (False, False), dtype)
            side = rounded(3 * self.operands(m, 1, n, (False, False), dtype)[0], dtype)
            exact = x.astype(np.float64) @ w
            scale = np.abs(x).astype(np.float64) @ np.abs(w)
            given = [array(values, self.ctx, dtype) for values in (x, w, side)]
            y, number = empty((m, n), self.ctx, dtype), self.algorithms().index(name)
            for kernel, function in cases:
                with self.subTest(algorithm=name, dtype=str(dtype), function=function):
                    y[:] = np.nan
                    if kernel == "matmul_map":
                        wanted, codes, used = FORMULAS[function](exact), ACTIVATIONS, given[:2]
                    else:
                        slope = DACTS[function](side.astype(np.float64))
                        wanted, codes, used = slope * exact, GRADIENTS, given
                    code = codes.index(function) + 1
                    try:
                        launch(kernel, self.ctx, *used, 0, 0, number, 0, code, y)
                    except (NotApplicableError, DeviceError):
                        continue
                    own = abs(wanted) if kernel == "matmul_map" else abs(exact)
                    allowed = limit(wanted, 1.13 * scale, k, dtype) + 2.0**-18 * own
                    if kernel == "matmul_gradient" and dtype == bfloat16:
                        allowed += 2.0**-11 * abs(wanted)
                    off = abs(y.asnumpy() - wanted) - allowed
                    self.assertLessEqual(off.max(), 0)

    def test_residuals(self) -> None:
        """Also in the memory of the result, by every rung and tiling, and where K is split."""
        names = [n for n in self.algorithms() if n in dict(self.rungs()).values()]
        names += [n for n in self.algorithms() if n.startswith("hopper ")]
        shapes = ((70, 136, 40), (20, 45, 24), (60, 40, 900), (5, 16, 0))
        kinds = itertools.product((False, True), repeat=3)  # bias, relu, in place
        cases = itertools.product(NARROW, shapes, names, TRANSPOSES, kinds)
        for dtype, (m, n, k), name, flags, (with_bias, relu, inplace) in sample.of(cases, 300):
            x, w = self.operands(m, n, k, flags, dtype)
            bias = self.operands(n, 1, 1, (False, False), dtype)[0][:, 0]
            r = self.operands(m, 1, n, (False, False), dtype)[0]
            others = (bias, r) if with_bias else (r,)
            left, right = (x.T if flags[0] else x), (w.T if flags[1] else w)
            exact = left.astype(np.float64) @ right + sum(map(np.float64, others))
            scale = np.abs(left).astype(np.float64) @ np.abs(right) + sum(map(np.abs, others))
            given = [array(values, self.ctx, dtype) for values in (x, w, *others)]
            with self.subTest(
                algorithm=name, dtype=str(dtype), shape=(m, n, k), transposed=flags,
                bias=with_bias, relu=relu, inplace=inplace,
            ):  # fmt: skip
                y = given[-1] if inplace else empty((m, n), self.ctx, dtype)
                if not inplace:
                    y[:] = np.nan
                kernel = "matmul_bias_add" if with_bias else "matmul_add"
                how = *map(int, flags), self.algorithms().index(name), 0, int(relu)
                try:
                    launch(kernel, self.ctx, *given, *how, y)
                except (NotApplicableError, DeviceError):
                    continue
                wanted = np.maximum(exact, 0) if relu else exact
                off = abs(y.asnumpy() - wanted) - limit(wanted, scale, k + 4, dtype)
                self.assertLessEqual(off.max(), 0)

    def test_an_activation_and_its_input(self) -> None:
        """By the rung hopper at once, also where K is split, or else in two steps, the second of
        which reads the input as it was rounded. Slopes are 1.13 at most.
        """
        names = [n for n in self.algorithms() if n in ("", "naive") or n.startswith("hopper")]
        shapes = ((70, 136, 40), (20, 45, 24), (60, 40, 900))
        for dtype, (m, n, k), name in itertools.product(NARROW, shapes, names):
            x, w = self.operands(m, n, k, (False, False), dtype)
            bias = self.operands(n, 1, 1, (False, False), dtype)[0][:, 0]
            exact = x.astype(np.float64) @ w + bias
            scale = np.abs(x).astype(np.float64) @ np.abs(w) + np.abs(bias)
            given = [array(values, self.ctx, dtype) for values in (x, w, bias)]
            for function in ("gelu_tanh", "relu", "softplus"):
                with self.subTest(algorithm=name, dtype=str(dtype), shape=(m, n, k), by=function):
                    y, z = (empty((m, n), self.ctx, dtype) for _ in range(2))
                    y[:] = z[:] = np.nan
                    number, code = self.algorithms().index(name), ACTIVATIONS.index(function) + 1
                    try:
                        launch("matmul_bias_both", self.ctx, *given, 0, 0, number, 0, code, y, z)
                    except (NotApplicableError, DeviceError):
                        continue
                    wanted = FORMULAS[function](exact)
                    off = abs(y.asnumpy() - exact) - limit(exact, scale, k, dtype)
                    self.assertLessEqual(off.max(), 0)
                    allowed = limit(wanted, 1.13 * scale, k, dtype) + 2.0**-18 * abs(wanted)
                    allowed += 1.13 * ROUNDING[dtype] * abs(exact)
                    self.assertLessEqual((abs(z.asnumpy() - wanted) - allowed).max(), 0)

    def test_an_activation_and_its_derivative(self) -> None:
        """As above; a derivative's own slope is 1.13 at most, too, and its code is off by half a
        step, 0.0025.
        """
        names = [n for n in self.algorithms() if n in ("", "naive") or n.startswith("hopper")]
        shapes = ((70, 136, 40), (20, 45, 24), (60, 48, 900), (300, 528, 72))
        for dtype, (m, n, k), name in sample.of(itertools.product(NARROW, shapes, names), 32):
            x, w = self.operands(m, n, k, (False, False), dtype)
            bias = self.operands(n, 1, 1, (False, False), dtype)[0][:, 0]
            exact = x.astype(np.float64) @ w + bias
            scale = np.abs(x).astype(np.float64) @ np.abs(w) + np.abs(bias)
            given = [array(values, self.ctx, dtype) for values in (x, w, bias)]
            for function in ("silu", "gelu", "gelu_tanh"):
                with self.subTest(algorithm=name, dtype=str(dtype), shape=(m, n, k), by=function):
                    slopes, z = empty((m, n), self.ctx, np.uint8), empty((m, n), self.ctx, dtype)
                    slopes[:], z[:] = 255, np.nan
                    number, code = self.algorithms().index(name), ACTIVATIONS.index(function) + 1
                    made = slopes, z
                    try:
                        launch("matmul_bias_slope", self.ctx, *given, 0, 0, number, 0, code, *made)
                    except (NotApplicableError, DeviceError):
                        continue
                    slope = dequantized(slopes.asnumpy())
                    found = (
                        (slope, DACTS[f"{function}_gradient"](exact), 0.0025),
                        (z.asnumpy(), FORMULAS[function](exact), 0.0),
                    )
                    for got, value, step in found:
                        # Where a derivative crosses 0 it is off by 2^-18 of what it is made of.
                        own = 2.0**-18 * np.maximum(abs(value), 1) + step
                        allowed = limit(value, 1.13 * scale, k, dtype) + own
                        allowed += 1.13 * ROUNDING[dtype] * abs(exact)
                        self.assertLessEqual((abs(got - value) - allowed).max(), 0)

    def test_a_product_with_quantized_derivatives(self) -> None:
        shapes = ((70, 144, 40), (20, 45, 24), (60, 48, 900), (300, 528, 72), (5, 16, 0))
        names = [n for n in self.algorithms() if n in ("", "naive") or n.startswith("hopper")]
        for (m, n, k), name in itertools.product(shapes, names):
            for dtype in (*NARROW, np.dtype(np.float32)):
                with self.subTest(algorithm=name, dtype=str(dtype), shape=(m, n, k)):
                    a, b = self.operands(m, n, k, (False, False), dtype)
                    slopes = np.random.default_rng(m).integers(0, 256, (m, n)).astype(np.uint8)
                    given = [array(x, self.ctx, dtype) for x in (a, b)]
                    given.append(array(slopes, self.ctx, np.uint8))
                    y, number = empty((m, n), self.ctx, dtype), self.algorithms().index(name)
                    y[:] = np.nan
                    code = BY_SIDES.index("mul_quantized") + 1
                    try:
                        launch("matmul_gradient", self.ctx, *given, 0, 0, number, 0, code, y)
                    except (NotApplicableError, DeviceError):
                        continue
                    wanted = a.astype(np.float64) @ b * dequantized(slopes)
                    scale = np.abs(a).astype(np.float64) @ np.abs(b) * abs(dequantized(slopes))
                    off = abs(y.asnumpy() - wanted) - limit(wanted, scale, k + 4, dtype)
                    self.assertLessEqual(off.max(), 0)

    @require_fusion("gemm_epilogue")
    def test_a_perceptron_under_bf16_has_no_kernel_of_its_activation(self) -> None:
        x, y = (ad.Variable(name, (16, 24), np.float32) for name in "xy")
        up, down = nn.Linear(24, 40, rng=0), nn.Linear(40, 24, rng=1)
        loss = F.mse_loss(down(F.gelu(up(x), approximate="tanh")), y)
        parameters = [*up.parameters(), *down.parameters()]
        fetches = [loss, *ad.gradients(loss, parameters)]
        feeds = dict(zip((x, y), np.random.default_rng(0).normal(size=(2, 16, 24)).astype("f")))
        executor = ad.Executor(fetches, self.ctx, "bf16")
        plan = executor.plan({x: (16, 24), y: (16, 24)})
        names = [step.node.op.kernel for step in plan.steps]
        self.assertIn("matmul_bias_slope", names)
        self.assertIn("matmul_gradient", names)
        self.assertFalse([name for name in names if name and name.startswith("gelu")])
        executor.check(feeds)

    def test_a_query_knows_bias_and_side(self) -> None:
        """Scratch for them is planned before they have addresses."""
        names = load().algorithms("cuda", "matmul")
        x, w, side = (Spec(s, bfloat16) for s in ((40, 16), (16, 24), (40, 24)))
        bias, number = Spec((24,), bfloat16), names.index("naive") + 1
        query = functools.partial(load().workspace, "cuda")
        alone = query("matmul", x, 0, w, 0, number, 0, side)
        with_bias = query("matmul_bias", x, w, bias, 0, 0, number, 0, 0, side)
        with_side = query("matmul_gradient", x, w, side, 0, 0, number, 0, 1, side)
        self.assertGreaterEqual(with_bias - alone, 24 * 4)
        self.assertGreaterEqual(with_side - alone, 40 * 24 * 4)

    def test_batches_broadcast(self) -> None:
        rng = np.random.default_rng(5)
        for (number, rung), dtype in itertools.product(self.rungs(), NARROW):
            for left, right in (((3, 1, 17, 24), (2, 24, 40)), ((4, 64, 40), (4, 40, 72))):
                with self.subTest(rung=rung, dtype=str(dtype), left=left):
                    a, b = (
                        rounded(rng.standard_normal(s, np.float32), dtype) for s in (left, right)
                    )
                    wide = a.astype(np.float64) @ b
                    c = empty(wide.shape, self.ctx, dtype)
                    c[:] = np.nan
                    given = array(a, self.ctx, dtype), array(b, self.ctx, dtype)
                    launch("batched_matmul", self.ctx, given[0], 0, given[1], 0, number, 0, c)
                    scale = np.abs(a).astype(np.float64) @ np.abs(b)
                    off = np.abs(c.asnumpy() - wide) - limit(wide, scale, a.shape[-1], dtype)
                    self.assertLessEqual(off.max(), 0)

    def test_no_cast_stands_before_a_product(self) -> None:
        x, w = (
            ad.Variable(name, shape, bfloat16) for name, shape in (("x", (8, 16)), ("w", (16, 8)))
        )
        y = ad.relu_op(x @ w)
        fetches = [y, *ad.gradients(ad.sum_op(y * y), [x, w])]
        plan = ad.Executor(fetches, self.ctx).plan({x: (8, 16), w: (16, 8)})
        names = [step.node.op.name for step in plan.steps]
        self.assertNotIn("cast", names)
        self.assertEqual(sum(name.startswith("matmul") for name in names), 3)

    def test_the_autotuner_measures_them(self) -> None:
        x, w = (ad.Variable(name, dtype=bfloat16) for name in ("x", "w"))
        feeds = dict(zip((x, w), self.operands(16, 24, 32, (False, False), bfloat16)))
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(settings, "tune", "full"),
            mock.patch.object(settings, "tune_cache", f"{folder}/tuning.json"),
            contextlib.redirect_stderr(io.StringIO()) as said,
        ):
            (got,) = ad.Executor([x @ w], self.ctx).run(feeds, True)
            self.assertIn("matmul bfloat16(16,32)", (Path(folder) / "tuning.json").read_text())
        self.assertNotIn("wrong", said.getvalue())
        self.check(got, list(feeds.values()), (False, False), bfloat16)

    def test_infinities_and_nan(self) -> None:
        for number, rung in self.rungs():
            a, b = self.operands(20, 24, 16, (False, False), FLOAT16)
            a[3, 5], b[2, 4] = np.inf, np.nan
            with self.subTest(rung=rung), np.errstate(invalid="ignore"):
                got = self.product([a, b], (False, False), number, FLOAT16)
                wanted = a.astype(np.float64) @ b
                np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))

    def test_what_is_beyond_float16_is_infinite(self) -> None:
        a = np.full((16, 16), 200, np.float16)
        for number, rung in self.rungs():
            with self.subTest(rung=rung):
                got = self.product([a, a], (False, False), number, FLOAT16)
                self.assertTrue(np.isposinf(got).all())


@require(gpu(0))
class OnHopper(unittest.TestCase):
    """What tests of all rungs leave out where this one is missing."""

    def test_the_rung_is_there(self) -> None:
        number = load().algorithms("cuda", "matmul").index("hopper") + 1
        try:
            load().algorithm_source("cuda", "matmul", number)
        except DeviceError as error:
            self.skipTest(str(error))
        x = array(np.ones((256, 256), np.float32), gpu(0), bfloat16)
        c = empty((256, 256), gpu(0), bfloat16)
        launch("matmul", gpu(0), x, 0, x, 0, number, 0, c)
        np.testing.assert_array_equal(c.asnumpy(), 256)

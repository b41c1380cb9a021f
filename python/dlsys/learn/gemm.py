"""Measures the rungs of the matrix product: time, rate, workspace, and error against float64.

Rungs of one shape share their operands, which are normally distributed, and are timed one after
another, the shortest of several rounds. The error is that of sampled elements, relative to the same
elements of |A| |B|, in units of float32's rounding, 2^-24: so a sum of K terms in any order stays
below K, and is usually far below its square root.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..autodiff import Variable
from ..dtypes import FLOAT16, FLOAT32, bfloat16, rounded
from ..errors import DeviceError, KernelError
from ..gpu_op.fp8 import Fp8Product
from ..ndarray import NDArray, empty, launch
from ..ops.matmul import PRECISIONS, matmul_op
from ..rungs import GEMM, rung_of, rungs_among
from ..runtime.device import Context, synchronize
from ..runtime.library import load

ROUNDING = 2.0**-24
NARROW = {"bf16": bfloat16, "fp16": FLOAT16}  # precisions that are storage types
# Rungs that multiply in float32 at a precision below it, those of a GPU.
_FFMA = ("naive", "tiled", "register", "warp")
_FLOAT32 = {"3xtf32": (*_FFMA, "cublas"), **dict.fromkeys(("tf32", "bf16", "fp16"), _FFMA)}
_DRAWN = 1_000_003  # elements; larger operands repeat them, a prime so that rows differ
_SAMPLED = 16  # rows and columns whose elements are compared
_ROUND_SECONDS = 0.02
_ROUNDS = 5
_LONG_SECONDS = 0.1  # of one call, which is then not repeated
# Of products in TFLOP/s, by a word of the chip's name and the precision: fp32 as FFMA loops
# measure it, the others as NVIDIA's data sheets have them for dense matrices.
_HOPPER = {"fp32": 61.0, "3xtf32": 494.7 / 3, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}
_HOPPER["fp8"] = 1978.9
LIMITS = {
    "H200": _HOPPER,
    "H100": _HOPPER,
}


class Shape(NamedTuple):
    """A product (m, k) by (k, n), with its operands stored as told."""

    m: int
    n: int
    k: int
    trans_A: bool = False
    trans_B: bool = False

    def __str__(self) -> str:
        flags = "NT"[self.trans_A] + "NT"[self.trans_B]
        return f"{self.m} x {self.n} x {self.k} {flags}"

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k


class Figures(NamedTuple):
    """The measurement of a rung, or of one of its variants, on one shape.

    Attributes:
        ms: milliseconds of one product.
        tflops: 10^12 operations a second.
        workspace_nbytes: scratch memory.
        error, mean_error: the largest and the mean, as the module says.
    """

    algorithm: str
    precision: str
    ms: float
    tflops: float
    workspace_nbytes: int
    error: float
    mean_error: float


class Product:
    """A product of one shape in one storage type, on a native device or, where there is no context,
    in numpy, and its exact sampled elements.
    """

    def __init__(
        self, ctx: Context | None, shape: Shape, dtype: Any = FLOAT32, seed: int = 0
    ) -> None:
        self.ctx, self.shape, self.dtype = ctx, shape, dtype
        rng = np.random.default_rng(seed)
        drawn = rounded(rng.standard_normal(_DRAWN, np.float32), dtype)
        size_A = (shape.k, shape.m) if shape.trans_A else (shape.m, shape.k)
        size_B = (shape.n, shape.k) if shape.trans_B else (shape.k, shape.n)
        self._A = _repeated(drawn, size_A, ctx, dtype)
        self._B = _repeated(drawn[::-1], size_B, ctx, dtype)
        size_C = shape.m, shape.n
        self._C: Any = np.empty(size_C, dtype) if ctx is None else empty(size_C, ctx, dtype)
        self._rows = rng.choice(shape.m, min(_SAMPLED, shape.m), replace=False)
        self._columns = rng.choice(shape.n, min(4 * _SAMPLED, shape.n), replace=False)
        left = _sampled_rows(drawn, size_A, self._rows, shape.trans_A)
        right = _sampled_rows(drawn[::-1], size_B, self._columns, not shape.trans_B).T
        self._exact, self._scale = left @ right, np.abs(left) @ np.abs(right)

    def figures(self, algorithm: str, number: int, precision: str) -> Figures:
        """Measures one algorithm. KernelError or DeviceError where it cannot."""
        assert self.ctx is not None
        arguments = (
            *(self._A, int(self.shape.trans_A), self._B, int(self.shape.trans_B)),
            *(number, PRECISIONS.get(precision, 0), self._C),
        )
        key = self.ctx.kernel_device, "matmul"
        nbytes = load().workspace(*key, *arguments, device_id=self.ctx.device_id)
        call = partial(launch, "matmul", self.ctx, *arguments)
        return self._measured(algorithm, precision, nbytes, call)

    def fp8_figures(self) -> Iterator[Figures]:
        """Measures the product in fp8 with the rounding of both operands, then that of codes.
        DeviceError or NotApplicableError where the device has none.
        """
        flags = self.shape.trans_A, self.shape.trans_B
        product = Fp8Product(self._A, flags[0], self._B, flags[1], self._C)

        def both() -> None:
            product.round()
            product.multiply()

        for name, call in {"hopper": both, "hopper codes": product.multiply}.items():
            yield self._measured(name, "fp8", product.nbytes, call)

    def numpy_figures(self, rung: str) -> Figures:
        """Measures one of numpy's rungs."""
        flags = dict(trans_A=self.shape.trans_A, trans_B=self.shape.trans_B)
        node = matmul_op(Variable("A"), Variable("B"), **flags, algo=rung)
        call = partial(node.op.numpy, node, self._A, self._B, self._C)
        tracemalloc.start()
        call()
        nbytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return self._measured(rung, "fp32", nbytes, call)

    def _measured(
        self, algorithm: str, precision: str, nbytes: int, call: Callable[[], object]
    ) -> Figures:
        self._C[:] = np.float32(np.inf)  # so that an element that is not written is seen
        call()
        error = np.abs(self._sampled() - self._exact) / np.maximum(self._scale, 1e-300) / ROUNDING
        seconds = self._seconds(call)
        rate = self.shape.operations / seconds / 1e12
        worst, mean = float(error.max(initial=0)), float(error.mean()) if error.size else 0.0
        return Figures(algorithm, precision, seconds * 1e3, rate, nbytes, worst, mean)

    def _sampled(self) -> np.ndarray:
        if self.ctx is None:
            return self._C[self._rows][:, self._columns].astype(np.float64)
        n = self.shape.n
        pitch = n * self.dtype.itemsize
        rows = [
            NDArray.from_block(self._C.block, int(row) * pitch, (n,), self.dtype).asnumpy()
            for row in self._rows
        ]
        return np.array(rows, np.float64)[:, self._columns]

    def _seconds(self, call: Callable[[], object]) -> float:
        """Of one call: the least over rounds of as many as make a round long enough."""
        once = self._round(call, 1)
        if once >= _LONG_SECONDS:
            return once
        calls = max(1, int(_ROUND_SECONDS / max(once, 1e-6)))
        return min(self._round(call, calls) for _ in range(_ROUNDS))

    def _round(self, call: Callable[[], object], calls: int) -> float:
        self._synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self._synchronize()
        return (time.perf_counter() - start) / calls

    def _synchronize(self) -> None:
        if self.ctx is not None:
            synchronize(self.ctx)


def _repeated(drawn: np.ndarray, size: tuple[int, int], ctx: Context | None, dtype: Any) -> Any:
    """numpy.resize(drawn, size) on a device, where what is there is copied, each time as much as
    that or what is left.
    """
    if ctx is None:
        return np.resize(drawn, size)
    whole = empty(size, ctx, dtype)

    def part(first: int, count: int) -> NDArray:
        return NDArray.from_block(whole.block, first * dtype.itemsize, (count,), dtype)

    there = min(drawn.size, whole.size)
    part(0, there)[:] = drawn[:there]
    while there < whole.size:
        count = min(there, whole.size - there)
        part(there, count)[:] = part(0, count)
        there += count
    return whole


def _sampled_rows(
    drawn: np.ndarray, size: tuple[int, int], rows: np.ndarray, transposed: bool
) -> np.ndarray:
    """Rows of numpy.resize(drawn, size), or of its transpose, in float64."""
    along = np.arange(size[0] if transposed else size[1])
    places = along * size[1] + rows[:, None] if transposed else rows[:, None] * size[1] + along
    return drawn[places % drawn.size].astype(np.float64)


def climb(
    ctx: Context | None,
    shape: Shape,
    precisions: Sequence[str] = ("fp32",),
    variants: str = "",
    once: bool = False,
    auto: bool = False,
    down: bool = False,
) -> Iterator[Figures]:
    """The figures of every rung that can compute a shape, in the order of the ladder, at each
    precision, or of floats of 16 bits; of the variants of a rung where one is named. Rungs multiply
    in float32 also where less is asked of them: with `once` those are at fp32 only. With `auto`,
    those of the heuristic come first. With `down` the order is the opposite one. Without a context,
    of numpy's, which are all float32's. At fp8 operands are bfloat16, and one rung has two figures:
    with the rounding of operands, and of codes.
    """
    if ctx is None:
        yield from map(Product(None, shape).numpy_figures, GEMM.numpy)
        return
    names = load().algorithms(ctx.kernel_device, "matmul")
    numbers = {"auto": 0} | {name: number for number, name in enumerate(names, 1)}
    wanted = [name for name in names if rung_of(name) == variants] or [*rungs_among(names)]
    product = None
    for precision in precisions:
        dtype = bfloat16 if precision == "fp8" else NARROW.get(precision, FLOAT32)
        if product is None or product.dtype != dtype:
            product = Product(ctx, shape, dtype)
        if precision == "fp8":
            with suppress(KernelError, DeviceError):
                yield from product.fp8_figures()
            continue
        rungs = ["auto", *wanted] if auto else wanted
        for name in reversed(rungs) if down else rungs:
            if once and rung_of(name) in _FLOAT32.get(precision, ()):
                continue
            try:
                yield product.figures(name, numbers[name], precision)
            except (KernelError, DeviceError):
                continue  # it cannot serve this, or its library is not here


def limit_of(chip: str, precision: str) -> float | None:
    """A chip's peak at a precision in TFLOP/s; None where it is not known."""
    return next((by.get(precision) for word, by in LIMITS.items() if word in chip), None)

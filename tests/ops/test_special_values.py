"""Every elementwise operator of the table and its first gradient at zeros of both signs,
infinities, NaN, denormals and the ends of float32: devices agree with numpy.

Equal are NaN with NaN (whatever its bits), infinities, zeros with their signs, and finite numbers
within the row's rounding. Of a gradient that is measured against the size of what came in, too:
what cancels, such as 1 - tanh², leaves errors of that size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.runtime.device import Context
from support.devices import on_native_devices
from support.table.cases import Use, apply_formula
from support.table.rows import Case, Sample
from support.table.samples import SAMPLES

FLOAT = np.finfo(np.float32)
SIZES = (
    0.0, np.inf, FLOAT.smallest_subnormal, 1e-39, FLOAT.tiny, 1e-20, 1e-5, 0.5, 1, 2, 3, 6, 88.8,
    104.5, 1e20, FLOAT.max,
)  # fmt: skip
VALUES = np.array([*SIZES, *(-size for size in SIZES), np.nan], np.float32)
INCOMING = (1.0, -3.0, 0.0, -0.0, np.inf, FLOAT.max)
MORE: Mapping[str, tuple[Mapping[str, Any], ...]] = {  # attributes beside those of a row
    "pow_const": tuple({"const": c} for c in (-0.5, -2, 1 / 3, 1e20, -np.inf)),
    "rpow_const": tuple({"const": c} for c in (0, 0.0, 1.0, -2.0, np.inf)),
    "mul_const": ({"const": 0.0}, {"const": -0.0}),
    "div_const": ({"const": 1e20},),
    "rdiv_const": ({"const": -0.0},),
    "clip": ({"low": 0.0, "high": 6.0}, {"low": -1.0, "high": -0.0}),
    "leaky_relu": ({"alpha": 0.0}, {"alpha": 1e-3}, {"alpha": -1.0}),
    "elu": ({"alpha": 0.0}, {"alpha": 1.0}, {"alpha": 3.0}),
}


def rows() -> Iterator[tuple[Sample, Case]]:
    """Each elementwise row once for each of its attributes, all inputs of one shape."""
    for sample in SAMPLES:
        if not getattr(sample.op, "elementwise", False):
            continue
        count = len(sample.cases[0].shapes)
        given = [case.attrs for case in sample.cases] + list(MORE.get(sample.name, ()))
        for attrs in {repr(attrs): attrs for attrs in given}.values():
            if count and attrs.get("dtype", "float32") == "float32":
                yield sample, Case(((VALUES.size**count,),) * count, attrs)


def grid(count: int) -> list[np.ndarray]:
    """Every value beside every other."""
    return [x.reshape(-1).copy() for x in np.meshgrid(*[VALUES] * count, indexing="ij")]


def differing(a: np.ndarray, b: np.ndarray, ulps: float, scale: np.ndarray) -> np.ndarray:
    """The elements where b is not what a is."""
    if a.dtype.kind != "f":
        return a != b
    exact = a.astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.abs(exact - b)
        close = error <= ulps * (FLOAT.eps * np.fmax(np.abs(exact), scale))
        close |= error <= ulps * FLOAT.smallest_subnormal
    zeros = (a == 0) & (b == 0)
    finite = np.isfinite(a) & np.isfinite(b)
    same = np.where(finite, close, (a == b) | (np.isnan(a) & np.isnan(b)))
    return ~np.where(zeros, np.signbit(a) == np.signbit(b), same)


class Specials:
    ctx: Context

    def compare(
        self, nodes: Any, feeds: Mapping, arrays: list[np.ndarray], ulps: float, scale: Any
    ) -> None:
        results = []
        for ctx in (None, self.ctx):
            executor = ad.Executor(nodes, ctx)
            used = set(executor.topo_order)
            given = {x: array for x, array in feeds.items() if x in used}
            results.append(executor.run(given, convert_to_numpy_ret_vals=True))
        for k, (a, b) in enumerate(zip(*results, strict=True)):
            wrong = np.flatnonzero(differing(a, b, ulps, scale))
            seen = [f"{[x[i] for x in arrays]}: {a[i]} and {b[i]}" for i in wrong[:5]]
            self.assertEqual(seen, [], f"value {k}, {wrong.size} of {a.size}")

    def test_values(self) -> None:
        for sample, case in rows():
            with self.subTest(sample.name, **case.attrs):
                arrays = grid(len(case.shapes))
                use = Use(sample, case, arrays)
                scale: Any = 0.0
                if sample.scale is not None:
                    wide = [x.astype(np.float64) for x in arrays]
                    scale = apply_formula(sample.scale, case, wide)[0]
                self.compare([use.node], use.feeds, arrays, 2 * max(sample.ulps, 0.5), scale)

    def test_gradients(self) -> None:
        for sample, case in rows():
            count = len(case.shapes)
            chosen = range(count) if sample.differentiable is None else sample.differentiable
            if not chosen:
                continue
            arrays = grid(count)
            use = Use(sample, case, arrays)
            dy = ad.Variable("dy", dtype=np.float32)
            inputs = list(use.feeds)
            gradients = ad.gradients(ad.sum_op(use.node * dy), [inputs[k] for k in chosen])
            for size in INCOMING:
                with self.subTest(sample.name, dy=size, **case.attrs):
                    incoming = np.full(arrays[0].shape, size, np.float32)
                    feeds = {**use.feeds, dy: incoming}
                    self.compare(gradients, feeds, arrays, sample.gradient_ulps, abs(size))


CpuSpecials, GpuSpecials = on_native_devices(Specials)

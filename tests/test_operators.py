"""Every operator on every device: one body that runs every row of the table in samples.py.

A row becomes a test method for each property, such as `NumpyOperators.test_sum_gradients`.
"""

from __future__ import annotations

import inspect
import os
import unittest
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from devices import require
from dlsys import autodiff as ad
from dlsys import gpu_op, ndarray
from dlsys.errors import DlsysError, GraphError, KernelError, ShapeError
from dlsys.ops import FAMILIES
from dlsys.runtime.device import Context
from dlsys.runtime.library import load
from dlsys.settings import settings
from gradcheck import check_gradients
from samples import SAMPLES, Case, Refusal, Sample

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
LARGE = 50_000  # elements; beyond, values and their bits are tested, but no gradients
SPECIALS = (np.nan, np.inf, -np.inf, 0.0, -0.0)
LEAVES = {"placeholder_op", "parameter_op", "Variable"}  # every row feeds and stores values


# ---- a case of a row as arrays and as a graph ----


def generator(sample: Sample, case: Case) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(f"{sample.name} {case.shapes} {case.attrs}".encode()))


def make_arrays(sample: Sample, case: Case) -> list[np.ndarray]:
    """Inputs in float64 whose values are exact in float32, or integers."""
    rng = generator(sample, case)
    return [domain(rng, shape) for domain, shape in zip(sample.domains(case), case.shapes)]


def in_dtype(arrays: Sequence[np.ndarray], dtype: np.dtype) -> list[np.ndarray]:
    return [x.astype(dtype) if x.dtype.kind == "f" else x for x in arrays]


def apply_formula(formula: Callable, case: Case, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        values = formula(*arrays, **case.attrs)
    return [np.asarray(value) for value in (values if isinstance(values, tuple) else (values,))]


class Use:
    """A case as a graph: `node` over `inputs`, and `feeds` for those that are fed."""

    def __init__(
        self, sample: Sample, case: Case | Refusal, arrays: Sequence[np.ndarray], declare: bool = True
    ) -> None:
        states = case.states if isinstance(case, Refusal) else sample.states
        self.parameters = [ad.Parameter(x, name=f"p{k}") for k, x in enumerate(arrays[:states])]
        fed = arrays[states:]
        variables = [
            ad.Variable(f"x{k}", x.shape, x.dtype) if declare else ad.Variable(f"x{k}")
            for k, x in enumerate(fed)
        ]
        self.node = sample.node(*self.parameters, *variables, **case.attrs)
        self.feeds = dict(zip(variables, fed))

    def run(self, ctx: Context | None) -> list[np.ndarray]:
        """The value, or of updates what the Parameters then hold."""
        values = ad.Executor([self.node], ctx).run(self.feeds, convert_to_numpy_ret_vals=True)
        return [p.asnumpy() for p in self.parameters] or values


class Gradients:
    """A case as one number, Σ weights · output, and that number's gradients.

    `wrap` makes what the operator gets of each floating input.
    """

    def __init__(
        self, sample: Sample, case: Case, dtype: np.dtype, wrap: Callable = lambda x: x
    ) -> None:
        arrays = make_arrays(sample, case)
        shape = apply_formula(sample.reference, case, arrays)[0].shape
        weights = generator(sample, case).uniform(-1, 1, shape).astype(np.float32).astype(np.float64)
        self.arrays = in_dtype([*arrays, weights], dtype)
        self.inputs = [
            ad.Variable(f"x{k}", dtype=None if x.dtype == dtype else x.dtype)
            for k, x in enumerate(self.arrays)
        ]
        wrapped = [wrap(x) if a.dtype == dtype else x for x, a in zip(self.inputs, self.arrays)]
        self.node = sample.node(*wrapped[:-1], **case.attrs)
        self.total = ad.sum_op(self.inputs[-1] * self.node)
        chosen = sample.differentiable
        self.chosen = list(range(len(arrays)) if chosen is None else chosen)
        self.gradients = ad.gradients(self.total, [self.inputs[k] for k in self.chosen])

    def run(self, nodes: Sequence[Any], ctx: Context | None = None) -> list[np.ndarray]:
        executor = ad.Executor(nodes, ctx)
        return executor.run(self.feeds_of(executor, self.arrays), convert_to_numpy_ret_vals=True)

    def feeds_of(self, executor: ad.Executor, arrays: Sequence[np.ndarray]) -> dict:
        used = set(executor.topo_order)
        return {x: array for x, array in zip(self.inputs, arrays) if x in used}

    def add_second(self, rng: np.random.Generator) -> None:
        """The total becomes Σ random · gradient, to be differentiated in its turn."""
        total = ad.sum_op(self.inputs[-1] * 0)
        for gradient, k in zip(list(self.gradients), self.chosen):
            direction = ad.constant(rng.uniform(-1, 1, self.arrays[k].shape))
            total = total + ad.sum_op(direction * gradient)
        self.total = total
        self.chosen = [*self.chosen, len(self.inputs) - 1]
        self.gradients = ad.gradients(total, [self.inputs[k] for k in self.chosen])

    def check(self, rng: np.random.Generator, factor: float) -> None:
        """Compares the gradients with finite differences on numpy."""
        executor = ad.Executor([self.total])
        gradients = self.run(self.gradients)
        point = [self.arrays[k] for k in self.chosen]
        if not all(x.size for x in self.arrays):
            assert [g.shape for g in gradients] == [x.shape for x in point]
            return

        def value(moved: Sequence[np.ndarray]) -> float:
            arrays = list(self.arrays)
            for k, x in zip(self.chosen, moved):
                arrays[k] = x
            return executor.run(self.feeds_of(executor, arrays))[0]

        check_gradients(value, gradients, point, rng, factor)


# ---- the body ----


class Operators(unittest.TestCase):
    """What is true of every operator on the device `ctx`; each check_… runs one row."""

    ctx: Context | None = None
    dtypes = (FLOAT32,)

    def cases(self, sample: Sample, largest: float = np.inf) -> Iterator[Case]:
        for case in sample.cases:
            if case.size <= largest:
                with self.subTest(shapes=case.shapes, **case.attrs):
                    yield case

    def check_values(self, sample: Sample) -> None:
        """Values, shape and dtype are those of the formula and of the declaration."""
        for case in self.cases(sample):
            arrays = make_arrays(sample, case)
            for dtype in self.dtypes:
                use = Use(sample, case, in_dtype(arrays, dtype))
                self.compare(sample, case, dtype, use, arrays)

    def compare(
        self, sample: Sample, case: Case, dtype: np.dtype, use: Use, arrays: Sequence[np.ndarray]
    ) -> None:
        results = use.run(self.ctx)
        expected = apply_formula(sample.reference, case, arrays)
        scales = apply_formula(sample.scale, case, arrays) if sample.scale else map(np.abs, expected)
        if not use.parameters:
            self.assertEqual(results[0].shape, use.node.spec.shape)
            self.assertEqual(results[0].dtype, self.on_device(use.node.spec.dtype))
        for result, wanted, scale in zip(results, expected, scales):
            self.close(sample, dtype, result, wanted, scale)

    def on_device(self, dtype: np.dtype) -> np.dtype:
        return FLOAT32 if self.ctx is not None and dtype == FLOAT64 else dtype

    def close(
        self, sample: Sample, dtype: np.dtype, result: np.ndarray, wanted: np.ndarray, scale: Any
    ) -> None:
        """|error| <= ulps * eps * scale; in float64 the formula's own error comes on top."""
        self.assertEqual(result.shape, wanted.shape)
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(result[~finite], wanted[~finite])
        if result.dtype.kind != "f":
            np.testing.assert_array_equal(result, wanted)
            return
        ulps = sample.ulps if result.dtype == FLOAT32 else 2 * sample.ulps + 4
        info = np.finfo(result.dtype)
        allowed = np.broadcast_to(ulps * info.eps * scale + info.smallest_subnormal, result.shape)
        error = np.abs(result - wanted)[finite]
        wrong = error > allowed[finite]
        self.assertTrue(np.isfinite(result[finite]).all(), f"{sample.name} is not finite")
        if wrong.any():
            worst = (error[wrong] / allowed[finite][wrong]).max()
            self.fail(f"{sample.name}: {wrong.sum()} of {wrong.size} errors, {worst:.3g} x the bound")

    def check_specials(self, sample: Sample) -> None:
        """NaN, infinities and zeros flow through as in the formula."""
        case = next(c for c in sample.cases if c.size <= LARGE and all(map(np.prod, c.shapes)))
        for k in range(sample.states, len(case.shapes)):
            for special in SPECIALS:
                arrays = make_arrays(sample, case)
                if arrays[k].dtype.kind == "f":
                    with self.subTest(input=k, special=special, shapes=case.shapes):
                        arrays[k].flat[arrays[k].size // 2] = special
                        use = Use(sample, case, in_dtype(arrays, FLOAT32))
                        self.compare(sample, case, FLOAT32, use, arrays)

    def check_bits(self, sample: Sample) -> None:
        """The same bits every run, whether memory is shared or not, for any number of threads."""
        for case in self.cases(sample):
            expected = self.bits(sample, case)
            settings.separate_arena = True
            try:
                self.assertEqual(self.bits(sample, case), expected, "memory is not shared")
            finally:
                settings.separate_arena = False
            self.compare_threads(sample, case, expected)

    def compare_threads(self, sample: Sample, case: Case, expected: list[bytes]) -> None:
        pass

    def bits(self, sample: Sample, case: Case) -> list[bytes]:
        if sample.states or sample.differentiable == () or not case.shapes:
            return [x.tobytes() for x in Use(sample, case, in_dtype(make_arrays(sample, case), FLOAT32)).run(self.ctx)]
        graph = Gradients(sample, case, FLOAT32, wrap=lambda x: -(-x))  # inputs that may be overwritten
        fetches = [ad.reshape_op(graph.node, (-1,))] if graph.node_has_elements else [graph.node]
        if case.size <= LARGE:
            fetches += graph.gradients
        executor = ad.Executor(fetches, self.ctx)
        feeds = graph.feeds_of(executor, graph.arrays)
        runs = [executor.run(feeds, convert_to_numpy_ret_vals=True) for _ in range(2)]
        first, second = ([x.tobytes() for x in run] for run in runs)
        self.assertEqual(first, second, "two runs differ")
        return first

    def check_integers(self, sample: Sample) -> None:
        """Integers promote to floats, stay integers (on numpy only) or are moved as they are."""
        case = next(
            c for c in sample.cases if min(map(np.prod, c.shapes)) >= 1 < max(map(np.prod, c.shapes))
            and c.attrs.get("const") not in (0, 1)
        )
        rng = generator(sample, case)
        small = sample.integers == "same"
        for dtype in ("int32", "int64") if small else ("int32", "int64", "uint8", "bool"):
            with self.subTest(dtype=dtype):
                arrays = [rng.integers(1, 5, shape).astype(dtype) for shape in case.shapes]
                use = Use(sample, case, arrays)
                if small and self.ctx is not None:
                    with self.assertRaisesRegex(GraphError, "arithmetic runs on numpy only"):
                        use.run(self.ctx)
                    continue
                floats = [x.astype(np.float64) for x in arrays]
                self.compare(sample, case, FLOAT64, use, floats)
                kind = {"float": "f", "same": "i"}.get(sample.integers, use.node.spec.dtype.kind)
                self.assertEqual(use.node.spec.dtype.kind, kind)

    def check_partners(self, sample: Sample) -> None:
        """Integers promote to the dtype of their floating partner."""
        case = next(c for c in sample.cases if min(map(np.prod, c.shapes)) > 1)
        for k in (0, 1):
            arrays = in_dtype(make_arrays(sample, case), FLOAT32)
            arrays[k] = generator(sample, case).integers(1, 5, arrays[k].shape)
            use = Use(sample, case, arrays)
            self.assertEqual(use.node.spec.dtype, FLOAT32)
            self.compare(sample, case, FLOAT32, use, [x.astype(np.float64) for x in arrays])

    def check_refusals(self, sample: Sample) -> None:
        """Inputs that do not fit are refused when the node is made, or else when it runs."""
        for refusal in sample.refusals:
            with self.subTest(shapes=refusal.shapes, **refusal.attrs):
                bad = [np.ones(s, t) for s, t in zip(refusal.shapes, refusal.dtypes)]
                with self.assertRaisesRegex((ShapeError, GraphError), refusal.message):
                    Use(sample, refusal, bad)
                if refusal.states or "float64" in refusal.dtypes:
                    continue
                with self.assertRaisesRegex((ShapeError, GraphError), refusal.message):
                    use = Use(sample, refusal, bad, declare=False)
                    executor = ad.Executor([use.node], self.ctx)
                    executor.run(use.feeds)
                for case in [c for c in sample.cases if c.attrs == refusal.attrs and not sample.states][:1]:
                    good = in_dtype(make_arrays(sample, case), FLOAT32)
                    executor.run(dict(zip(use.feeds, good)))


def per_sample(**conditions: Callable[[Sample], Any]) -> Callable[[type], type]:
    """Adds a test method for each row and each check_… of a class whose condition holds."""

    def decorate(cls: type) -> type:
        for name, check in inspect.getmembers(cls, inspect.isfunction):
            prefix, _, what = name.partition("_")
            if prefix == "check":
                for sample in filter(conditions.get(what, lambda sample: True), SAMPLES):
                    setattr(cls, f"test_{sample.name}_{what}", bound(check, sample))
        return cls

    return decorate


def bound(check: Callable, sample: Sample) -> Callable:
    def test(self: Operators) -> None:
        check(self, sample)

    test.__doc__ = check.__doc__
    return test

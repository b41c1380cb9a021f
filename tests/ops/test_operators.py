"""Every operator on every device: one body that runs every row of the table in samples.py.

A row becomes a test method for each property, such as `NumpyOperators.test_sum_gradients`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray
from dlsys.dtypes import FLOAT16, ROUNDING, as_dtype, bfloat16, rounded
from dlsys.errors import DlsysError, GraphError, ShapeError
from dlsys.fusion.shared.body import Fused
from dlsys.graph.node import output_op
from dlsys.runtime.device import Context, unavailable
from dlsys.runtime.library import load
from dlsys.runtime.target import target_of
from dlsys.settings import settings
from support import sample as sampling
from support.allocations import requests_of_kernels
from support.devices import require
from support.table.cases import Gradients, Use, apply_formula, generator, in_dtype, make_arrays
from support.table.operators import modules_of_operators
from support.table.rows import Case, Refusal, Sample
from support.table.samples import SAMPLES

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
LARGE = 50_000  # elements; beyond, values and their bits are tested, but no gradients
QUICK = os.environ.get("DLSYS_TEST_QUICK") == "1"  # as `run.py --quick` sets it
SMALL = 2000  # elements of the cases that are quick
SMALLEST = {bfloat16: 2.0**-133, FLOAT16: 2.0**-24}  # the subnormals
SPECIALS = (np.nan, np.inf, -np.inf, 0.0, -0.0)
LEAVES = {"placeholder_op", "parameter_op", "Variable"}  # every row feeds and stores values


class Operators:
    """Properties of every operator on the device `ctx`; check_… runs a row, each_… a case."""

    ctx: Context | None = None
    dtypes: tuple[np.dtype, ...] = (FLOAT32,)
    threaded = False

    def each_values(self, sample: Sample, case: Case) -> None:
        """Values, shape and dtype are those of the formula and of the declaration."""
        arrays = make_arrays(sample, case)
        uses = [Use(sample, case, in_dtype(arrays, dtype)) for dtype in self.dtypes]
        self.compare(sample, case, uses, arrays)

    def compare(
        self, sample: Sample, case: Case, uses: Sequence[Use], arrays: Sequence[np.ndarray]
    ) -> None:
        expected = apply_formula(sample.reference, case, arrays)
        scales = (
            apply_formula(sample.scale, case, arrays)
            if sample.scale
            else [np.abs(values) for values in expected]
        )
        for use in uses:
            self.compare_with(sample, use, expected, scales)

    def compare_with(
        self, sample: Sample, use: Use, expected: Sequence[np.ndarray], scales: Sequence[Any]
    ) -> None:
        results = use.run(self.ctx)
        if not use.parameters:
            spec = use.node.spec
            narrowed = self.ctx is not None and spec.dtype == FLOAT64
            self.assertEqual(results[0].shape, spec.shape)
            self.assertEqual(results[0].dtype, FLOAT32 if narrowed else spec.dtype)
        for result, wanted, scale in zip(results, expected, scales):
            self.close(sample, result, wanted, scale)

    def close(self, sample: Sample, result: np.ndarray, wanted: np.ndarray, scale: Any) -> None:
        """|error| <= ulps * eps * scale; in float64 the formula's own error comes on top."""
        self.assertEqual(result.shape, wanted.shape)
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(result[~finite], wanted[~finite])
        if result.dtype.kind != "f":
            np.testing.assert_array_equal(result, wanted)
            return
        info = np.finfo(result.dtype)
        ulps = sample.ulps if result.dtype == FLOAT32 else 2 * sample.ulps + 8
        with np.errstate(invalid="ignore"):  # of elements that are not finite, compared above
            allowed = ulps * info.eps * scale + info.smallest_subnormal
        allowed = np.broadcast_to(allowed, result.shape)
        self.assert_within(result[finite], wanted[finite], allowed[finite], sample.name)

    def assert_within(
        self, result: np.ndarray, wanted: np.ndarray, allowed: np.ndarray, what: str
    ) -> None:
        self.assertTrue(np.isfinite(result).all(), f"{what} is not finite")
        error = np.abs(result - wanted)
        wrong = error > allowed
        if wrong.any():
            worst = (error[wrong] / allowed[wrong]).max()
            self.fail(
                f"{what}: {wrong.sum()} of {wrong.size} are wrong, by {worst:.3g} x the bound"
            )

    def check_specials(self, sample: Sample) -> None:
        """NaN, infinities and zeros flow through as in the formula."""
        case = next(c for c in sample.cases if has_elements(c))
        for k, shape in enumerate(case.shapes):
            for special in SPECIALS:
                arrays = make_arrays(sample, case)
                if arrays[k].dtype.kind != "f" or k < sample.states:
                    continue
                with self.subTest(input=k, special=special, shapes=case.shapes):
                    arrays[k].flat[int(np.prod(shape)) // 2] = special
                    use = Use(sample, case, in_dtype(arrays, FLOAT32))
                    self.compare(sample, case, [use], arrays)

    def each_bits(self, sample: Sample, case: Case) -> None:
        """Bits are the same every run, with memory shared or not, for any number of threads."""
        bits = self.bits(sample, case)
        with self.planned(separate=False, threads=2):
            expected = bits()
        with self.planned(separate=True, threads=1):
            self.assertEqual(bits(), expected, "buffers apart, one thread")
        if self.threaded:
            with self.planned(separate=False, threads=3):
                self.assertEqual(bits(), expected, "3 threads")

    @contextlib.contextmanager
    def planned(self, *, separate: bool, threads: int) -> Iterator[None]:
        """Plans have buffers that share memory or not, and on the CPU so many threads."""
        before, settings.separate_arena = settings.separate_arena, separate
        if self.threaded:
            load().set_threads(threads)
        try:
            yield
        finally:
            settings.separate_arena = before
            if self.threaded:
                load().set_threads(settings.threads)

    def bits(self, sample: Sample, case: Case) -> Callable[[], list[bytes]]:
        """Plans anew each time, and gives output and gradients of two runs that agree, from inputs
        that the operator may overwrite; or else of one run, where it is an update.
        """
        if sample.states or sample.differentiable == () or not case.shapes:

            def updated() -> list[bytes]:
                use = Use(sample, case, in_dtype(make_arrays(sample, case), FLOAT32))
                return [x.tobytes() for x in use.run(self.ctx)]

            return updated
        graph = Gradients(sample, case, FLOAT32, wrap=lambda x: ad.neg_op(ad.neg_op(x)))
        fetches = [ad.reshape_op(graph.node, (-1,))]
        if case.size <= LARGE:
            fetches += graph.gradients

        def bits() -> list[bytes]:
            executor = ad.Executor(fetches, self.ctx)
            feeds = graph.feeds_of(executor, graph.arrays)
            first, second = (self.first_run(executor, feeds) for _ in range(2))
            self.assertEqual(first, second, "two runs differ")
            return first

        return bits

    def first_run(self, executor: ad.Executor, feeds: Mapping[Any, Any]) -> list[bytes]:
        executor.draws = 0
        return [x.tobytes() for x in executor.run(feeds, convert_to_numpy_ret_vals=True)]

    def check_integers(self, sample: Sample) -> None:
        """Integers promote to floats, or stay integers, or are moved as they are."""
        case = next(
            c for c in sample.cases if has_elements(c) and c.attrs.get("const") not in (0, 1)
        )
        same = sample.integers == "same"
        for dtype in ("int32", "int64") if same else ("int32", "int64", "uint8", "bool"):
            with self.subTest(dtype=dtype):
                rng = generator(sample, case)
                arrays = [rng.integers(1, 5, shape).astype(dtype) for shape in case.shapes]
                use = Use(sample, case, arrays)
                self.compare(sample, case, [use], [x.astype(np.float64) for x in arrays])
                if sample.integers != "moved":
                    self.assertEqual(use.node.spec.dtype.kind, "i" if same else "f")

    def check_partners(self, sample: Sample) -> None:
        """Integers promote to the dtype of their floating partner."""
        case = next(c for c in sample.cases if has_elements(c))
        for k in (0, 1):
            arrays = in_dtype(make_arrays(sample, case), FLOAT32)
            arrays[k] = generator(sample, case).integers(1, 5, arrays[k].shape)
            use = Use(sample, case, arrays)
            self.assertEqual(use.node.spec.dtype, FLOAT32)
            self.compare(sample, case, [use], [x.astype(np.float64) for x in arrays])

    def check_refusals(self, sample: Sample) -> None:
        """Inputs that do not fit are refused when the node is made, or else when it runs."""
        for refusal in sample.refusals:
            with self.subTest(shapes=refusal.shapes, **refusal.attrs):
                bad = [np.ones(s, t) for s, t in zip(refusal.shapes, refusal.dtypes)]
                with self.assertRaisesRegex((ShapeError, GraphError), refusal.message):
                    Use(sample, refusal, bad)
                if not refusal.states and "float64" not in refusal.dtypes:
                    self.refuse_at_run(sample, refusal, bad)

    def refuse_at_run(self, sample: Sample, refusal: Refusal, bad: Sequence[np.ndarray]) -> None:
        try:
            use = Use(sample, refusal, bad, declare=False)
        except DlsysError:
            return  # the attributes alone are wrong
        executor = ad.Executor([use.node], self.ctx)
        with self.assertRaisesRegex((ShapeError, GraphError), refusal.message):
            executor.run(use.feeds)
        for case in sample.cases:
            good = in_dtype(make_arrays(sample, case), FLOAT32)
            fits = [x.dtype for x in good] == [x.dtype for x in bad]
            if fits and str(case.attrs) == str(refusal.attrs) and not sample.states:
                feeds = dict(zip(use.feeds, good))
                result = executor.run(feeds, convert_to_numpy_ret_vals=True)[0]
                fresh = Use(sample, case, good).run(self.ctx)[0]
                self.assertEqual(result.tobytes(), fresh.tobytes())
                break


def has_elements(case: Case) -> bool:
    sizes = [int(np.prod(shape)) for shape in case.shapes]
    return bool(sizes) and min(sizes) >= 1 and max(sizes) > 1


SAYS = {  # of which rows a check says something; of all, if it is not here
    "specials": lambda row: row.specials and row.cases[0].shapes,
    "integers": lambda row: row.integers,
    "partners": lambda row: row.integers in ("float", "same") and len(row.cases[0].shapes) == 2,
    "refusals": lambda row: row.refusals,
    "narrow": lambda row: row.storages,
    "unknown_extents": lambda row: not (row.states or row.fused or isinstance(row.op, Fused)),
    "gradients": lambda row: row.differentiable != () and row.cases[0].shapes,
    "second_gradients": lambda row: row.differentiable != () and row.cases[0].shapes,
}


# Cases of a row in a sample (sample.py), where numpy's values are those of all cases.
SAMPLE = {"bits": 2, "narrow": 2, "gradients": 2, "second_gradients": 2, "unknown_extents": 2}
NATIVE_SAMPLE = SAMPLE | {"values": 6}


def per_sample(cls: type) -> type:
    """Adds a test method for each row and each check of the class."""
    counts = SAMPLE if getattr(cls, "ctx", None) is None else NATIVE_SAMPLE
    for name, check in inspect.getmembers(cls, inspect.isfunction):
        kind, _, what = name.partition("_")
        if kind in ("check", "each"):
            largest = LARGE if "gradients" in what else np.inf
            rows = [row for row in SAMPLES if runs(row, getattr(cls, "ctx", None))]
            for sample in filter(SAYS.get(what, lambda row: True), rows):
                test = row_test(check, sample, kind == "each", largest, counts.get(what))
                test.__doc__ = check.__doc__
                test.row = sample
                setattr(cls, f"test_{sample.name}_{what}", test)
    return cls


def runs(sample: Sample, ctx: Context | None) -> bool:
    """False for fused operators on devices without their kernels: no plan there has them."""
    if ctx is None or unavailable(ctx) is not None:
        return True
    fused = sample.fused or isinstance(sample.op, Fused)
    return not fused or target_of(ctx).has(sample.op.kernel)


def cases_of(sample: Sample, largest: float, count: int | None) -> list[Case]:
    """Its cases of so many elements at most; the small ones, or else the smallest, if QUICK. With a
    count, a sample takes as many, from the smallest to the largest.
    """
    cases = [case for case in sample.cases if case.size <= largest]
    by_size = sorted(cases, key=lambda case: case.size)
    if QUICK:
        cases = by_size = [case for case in by_size if case.size <= SMALL] or by_size[:1]
    return cases if count is None else sampling.of(by_size, count)


def row_test(
    check: Callable, sample: Sample, each_case: bool, largest: float, count: int | None
) -> Callable:
    def test(self: Any) -> None:
        if not each_case:
            check(self, sample)
            return
        for case in cases_of(sample, largest, count):
            with self.subTest(shapes=case.shapes, **case.attrs):
                check(self, sample, case)

    return test


@per_sample
class NumpyOperators(Operators, unittest.TestCase):
    dtypes = (FLOAT64, FLOAT32)

    def each_gradients(self, sample: Sample, case: Case) -> None:
        """Gradients are what finite differences say, times the factor that the row declares."""
        factor = sample.gradient_factor(*case.shapes)
        Gradients(sample, case, FLOAT64).check(generator(sample, case, "directions"), factor)

    def each_second_gradients(self, sample: Sample, case: Case) -> None:
        """Gradients of gradients are what finite differences say."""
        graph = Gradients(sample, case, FLOAT64)
        graph.differentiate_again(generator(sample, case, "second weights"))
        graph.check(generator(sample, case, "directions"))

    def each_inferred_shapes(self, sample: Sample, case: Case) -> None:
        """Shapes are known without running."""
        use = Use(sample, case, in_dtype(make_arrays(sample, case), FLOAT32))
        executor = ad.Executor([use.node])
        executor.infer_shape({x: array.shape for x, array in use.feeds.items()})
        if not sample.states:
            self.assertEqual(executor.node_to_shape_map[use.node], use.run(None)[0].shape)

    def each_unknown_extents(self, sample: Sample, case: Case) -> None:
        """What is known of a result where extents are free is true of those that are fed."""
        arrays = in_dtype(make_arrays(sample, case), FLOAT32)
        spec = Use(sample, case, arrays).node.spec
        for axis in (0, -1):
            free = [[*x.shape] for x in arrays]
            for shape in filter(None, free):
                shape[axis] = None
            inputs = [ad.Variable(shape=s, dtype=x.dtype) for s, x in zip(free, arrays)]
            try:
                node = sample.node(*inputs, **case.attrs)
            except GraphError as error:
                self.assertRegex(str(error), "not known|unknown")
                continue
            if node.shape is not None:
                self.assertEqual(len(node.shape), len(spec.shape))
                told = zip(node.shape, spec.shape)
                self.assertEqual([m for m, n in told if m not in (None, n)], [])


class NativeOperators(Operators):
    def each_narrow(self, sample: Sample, case: Case) -> None:
        """Values over floats that are stored in 16 bits are those of the formula, rounded."""
        for storage in map(as_dtype, sample.storages):
            given = in_dtype(make_arrays(sample, case), FLOAT32)
            given = [
                rounded(x, sample.storage_of(k, storage)) if x.dtype.kind == "f" else x
                for k, x in enumerate(given)
            ]
            arrays = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in given]
            expected = apply_formula(sample.reference, case, arrays)
            scales = (
                apply_formula(sample.scale, case, arrays) if sample.scale else map(np.abs, expected)
            )
            results = Use(sample, case, given, storage=storage).run(self.ctx)
            for k, (result, wanted, scale) in enumerate(
                zip(results, expected, scales, strict=True)
            ):
                if k < sample.states and k in sample.wide:
                    self.close(sample, result, wanted, scale)
                else:
                    self.close_narrow(sample, result, wanted, scale, storage)

    def close_narrow(
        self, sample: Sample, result: np.ndarray, wanted: np.ndarray, scale: Any, storage: Any
    ) -> None:
        """|error| <= the roundings to the storage type, and the row's bound in float32."""
        self.assertEqual(result.shape, wanted.shape)
        if result.dtype.kind != "f":
            np.testing.assert_array_equal(result, wanted)
            return
        finite = np.isfinite(wanted)
        if storage == FLOAT16:
            finite &= np.abs(wanted) < 60_000  # which may round beyond its range
        narrow = 1.01 * sample.roundings * ROUNDING[storage]
        with np.errstate(invalid="ignore"):
            allowed = sample.ulps * np.finfo(FLOAT32).eps * scale + SMALLEST[storage]
            allowed = allowed + narrow * np.maximum(scale, np.abs(wanted))
        allowed = np.broadcast_to(allowed, result.shape)
        what = f"{sample.name} in {storage}"
        self.assert_within(result[finite], wanted[finite], allowed[finite], what)

    def each_gradients(self, sample: Sample, case: Case) -> None:
        """Gradients are those of numpy in float64."""
        exact = Gradients(sample, case, FLOAT64)
        native = Gradients(sample, case, FLOAT32)
        results = native.run(native.gradients, self.ctx)
        for result, wanted in zip(results, exact.run(exact.gradients)):
            largest = np.abs(wanted).max(initial=1)  # terms of that size may have canceled
            allowed = sample.gradient_ulps * np.finfo(FLOAT32).eps * largest
            self.assertEqual(result.shape, wanted.shape)
            allowed = np.full(wanted.shape, allowed)
            self.assert_within(result, wanted, allowed, f"the gradient of {sample.name}")


@require(ndarray.cpu(0))
@per_sample
class CpuOperators(NativeOperators, unittest.TestCase):
    """In all of their runs no kernel asks the allocator for anything."""

    ctx = ndarray.cpu(0)
    threaded = True

    def setUp(self) -> None:
        counting = requests_of_kernels(self.ctx)
        requests = counting.__enter__()
        self.addCleanup(lambda: self.assertFalse(any(requests), requests))
        self.addCleanup(counting.__exit__, None, None, None)


@require(ndarray.gpu(0))
@per_sample
class GpuOperators(NativeOperators, unittest.TestCase):
    ctx = ndarray.gpu(0)


class Table(unittest.TestCase):
    def test_every_operator_has_a_row(self) -> None:
        covered = {id(sample.op) for sample in SAMPLES}
        missing = [
            f"{family.__name__}.{name}"
            for family in modules_of_operators()
            for name, value in vars(family).items()
            if makes_nodes(family, name, value) and id(value) not in covered
        ]
        self.assertEqual(missing, [], "add a row to tests/support/table/samples.py")

    def test_rows_have_names_of_their_own(self) -> None:
        names = [sample.name for sample in SAMPLES]
        self.assertEqual(len(set(names)), len(names))


def makes_nodes(family: Any, name: str, value: Any) -> bool:
    """Operators, and public functions that return a node."""
    if name.startswith("_") or name in LEAVES:
        return False
    if isinstance(value, ad.Op):
        return name.endswith("_op") and value is not output_op
    if family.__name__.startswith("dlsys.fusion."):
        return False  # patterns, which make nodes of their own operators
    own = inspect.isfunction(value) and value.__module__ == family.__name__
    return own and value.__annotations__.get("return") in ("Node", ad.Node)

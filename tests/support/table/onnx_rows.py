"""Rows of the operator table as ONNX files, run by other runtimes and judged as the table says."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from dlsys import autodiff as ad
from dlsys.graph.node import Node, find_topo_sort
from support.table.cases import apply_formula, in_dtype, make_arrays
from support.table.rows import Case, Sample

Arrays = Mapping[str, np.ndarray]
MISSING = [name for name in ("onnx", "onnxruntime") if not find_spec(name)]
SMALL = 2000  # elements of the cases that are run
FLOAT32 = np.dtype(np.float32)
# Bounds of a runtime that is less exact than a row asks for, as a factor of the row's bound: the
# largest that was measured, rounded up, and why.
LESS_EXACT = {
    ("onnxruntime", "resize_bilinear"): (2.5, "positions are computed in float32"),
    ("onnxruntime", "recurrence"): (1.5, "maps are composed in another order: log2(n) products"),
    ("reference", "recurrence"): (1.5, "maps are composed in another order: log2(n) products"),
}
# Rows of which a runtime computes something else than ONNX defines.
DEFECTS = {
    ("reference", name): "LogSoftmax is the logarithm of a softmax that underflows"
    for name in (
        "log_softmax", "sparse_softmax_cross_entropy_rows", "sparse_softmax_cross_entropy",
        "softmax_cross_entropy_options",
    )
} | {
    ("reference", name): "indices of a MaxPool with padding, or GatherElements of fewer rows"
    for name in ("max_pool2d_gradient_op", "max_pool2d_read")
} | {
    ("reference", name): "ConvTranspose with output_padding or dilation does not run"
    for name in ("conv2d_data_gradient_like", "conv_transpose2d")
}  # fmt: skip


def run_onnxruntime(path: Path, feeds: Arrays) -> list[np.ndarray]:
    """The outputs of a file by ONNX Runtime on the CPU, in one thread. Skips the test where the
    version that is installed is too old for the file.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # a class of its own, which no module exports
        if "Unsupported model IR version" not in str(error):
            raise
        raise unittest.SkipTest(
            f"not here: an ONNX Runtime for this IR version, but {onnxruntime.__version__}"
        ) from None
    return session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})


def run_reference(path: Path, feeds: Arrays) -> list[np.ndarray]:
    """The outputs of a file by the evaluator of the package onnx."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(str(path))
    with np.errstate(all="ignore"):
        return evaluator.run(None, {name: feeds[name] for name in evaluator.input_names})


RUNTIMES: dict[str, Callable[[Path, Arrays], list[np.ndarray]]] = {
    "onnxruntime": run_onnxruntime,
    "reference": run_reference,
}


def small_cases(sample: Sample) -> list[Case]:
    """The cases of a row with elements, but not many, smallest first."""
    small = [c for c in sample.cases if c.size <= SMALL and all(map(np.prod, c.shapes))]
    return sorted(small, key=lambda c: c.size)


class RowFile:
    """A case of a row as a file: `run` computes it elsewhere and holds it to the row's bound.

    free: axis 0 of the inputs that share the first one's extent is free, and called batch.
    """

    def __init__(self, sample: Sample, case: Case, opset: int = 21, free: bool = False) -> None:
        from dlsys.onnx import export

        self.sample, self.case = sample, case
        self.arrays = make_arrays(sample, case)
        count = case.shapes[0][0] if free else None
        self.batched = [bool(s) and s[0] == count for s in case.shapes]
        self.variables = [
            ad.Variable(f"x{k}", (None, *x.shape[1:]) if batched else x.shape, _dtype(x))
            for k, (x, batched) in enumerate(zip(self.arrays, self.batched))
        ]
        self.parameters = [
            ad.Parameter(x.astype(_dtype(x)), f"p{k}")
            for k, x in enumerate(self.arrays[: sample.states])
        ]
        rest = self.variables[sample.states :]
        self.node: Node = sample.node(*self.parameters, *rest, **case.attrs)
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name) / "row.onnx"
        export(self.node, self.path, opset=opset, training=True)

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def with_batch(self, count: int) -> Sequence[np.ndarray]:
        """Inputs of another batch."""
        rng = np.random.default_rng(count)
        return [
            domain(rng, (count, *x.shape[1:])) if batched else x
            for domain, x, batched in zip(self.sample.domains(self.case), self.arrays, self.batched)
        ]

    def here(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """What the row's graph gives for other inputs, in numpy."""
        feeds = dict(zip(self.variables, in_dtype(arrays, FLOAT32)))
        executor = ad.Executor([self.node])
        used = set(executor.topo_order)
        return executor.run({x: a for x, a in feeds.items() if x in used}, True)[0]

    def agrees(self, arrays: Sequence[np.ndarray], expected: np.ndarray) -> None:
        """Raises AssertionError where ONNX Runtime gives something else: floats may differ by 1e-4,
        and by 1e-5 of the largest where terms cancel.
        """
        feeds = {f"x{k}": np.asarray(x) for k, x in enumerate(in_dtype(arrays, FLOAT32))}
        (got,) = run_onnxruntime(self.path, feeds)
        assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
        if expected.dtype.kind != "f":
            np.testing.assert_array_equal(got, expected)
            return
        finite = np.abs(expected[np.isfinite(expected)])
        largest = float(finite.max()) if finite.size else 1.0
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * largest)

    def run(self, runtime: str, arrays: Sequence[np.ndarray] | None = None) -> None:
        """Raises AssertionError where the result is not the formula's within the row's bound."""
        given = self.arrays if arrays is None else arrays
        feeds = {f"x{k}": np.asarray(x) for k, x in enumerate(in_dtype(given, FLOAT32))}
        (got,) = RUNTIMES[runtime](self.path, feeds)
        (expected, *_) = apply_formula(self.sample.reference, self.case, given)
        scale = np.abs(expected)
        if self.sample.scale is not None:
            (scale, *_) = apply_formula(self.sample.scale, self.case, given)
        factor, _ = LESS_EXACT.get((runtime, self.sample.name), (1.0, ""))
        judge(got, expected, scale, factor * self.sample.ulps)
        if self.node.spec is not None:
            assert got.dtype == self.node.spec.dtype, (got.dtype, self.node.spec.dtype)


def judge(got: np.ndarray, expected: np.ndarray, scale: np.ndarray, ulps: float) -> None:
    """|error| <= ulps * eps * scale, of floats; other dtypes are equal."""
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    if got.dtype.kind != "f":
        np.testing.assert_array_equal(got, expected)
        return
    finite, info = np.isfinite(expected), np.finfo(got.dtype)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    with np.errstate(invalid="ignore"):
        allowed = np.broadcast_to(ulps * info.eps * scale + info.smallest_subnormal, got.shape)
    error = np.abs(got[finite] - expected[finite])
    assert (error <= allowed[finite]).all(), f"wrong by {np.max(error / allowed[finite]):.3g} x"


def refused(sample: Sample) -> bool:
    """True where one of the row's operators has no ONNX form, and a reason is known."""
    from dlsys.onnx.exporter.registry import refusal_of

    case = sample.cases[0]
    arrays = [domain(np.random.default_rng(0), shape) for domain, shape in
              zip(sample.domains(case), case.shapes)]  # fmt: skip
    states = [ad.Parameter(x.astype(_dtype(x)), f"p{k}") for k, x in enumerate(arrays)]
    inputs = [ad.Variable(f"x{k}", x.shape, _dtype(x)) for k, x in enumerate(arrays)]
    node = sample.node(*states[: sample.states], *inputs[sample.states :], **case.attrs)
    return any(refusal_of(x.op) is not None for x in find_topo_sort([node]))


def _dtype(x: np.ndarray) -> np.dtype:
    return FLOAT32 if x.dtype.kind == "f" else x.dtype

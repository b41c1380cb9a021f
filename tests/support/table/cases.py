"""A case of a row of samples.py as arrays, as a graph, and as a number with gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.runtime.device import Context
from support.gradcheck import check_gradients
from support.table.rows import Case, Refusal, Sample


def generator(sample: Sample, case: Case, use: str = "") -> np.random.Generator:
    """Numbers of its own for each `use`: weights like the inputs would hide wrong gradients."""
    name = f"{sample.name} {case.shapes} {case.attrs}{use}"
    return np.random.default_rng(zlib.crc32(name.encode()))


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


def declared_dtype(x: np.ndarray, declare: bool, storage: Any = None) -> Any:
    """Native devices take what is fed as float32 unless it is declared otherwise."""
    if x.dtype.kind == "f" and storage is not None:
        return storage
    return x.dtype if declare or x.dtype.kind != "f" else None


class Use:
    """A case as a graph: `node` over `inputs`, and `feeds` for those that are fed; floats are
    declared to be of a `storage` type, if one is given, but for the row's wide inputs.
    """

    def __init__(
        self,
        sample: Sample,
        case: Case | Refusal,
        arrays: Sequence[np.ndarray],
        declare: bool = True,
        storage: Any = None,
    ) -> None:
        states = case.states if isinstance(case, Refusal) else sample.states
        types = [storage and sample.storage_of(k, storage) for k in range(len(arrays))]
        self.parameters = [
            ad.Parameter(x, f"p{k}", declared_dtype(x, False, type_) if storage else None)
            for k, (x, type_) in enumerate(zip(arrays[:states], types))
        ]
        fed = arrays[states:]
        variables = [
            ad.Variable(f"x{k}", x.shape if declare else None, declared_dtype(x, declare, type_))
            for k, (x, type_) in enumerate(zip(fed, types[states:]))
        ]
        self.node = sample.node(*self.parameters, *variables, **case.attrs)
        self.feeds = dict(zip(variables, fed))

    def run(self, ctx: Context | None) -> list[np.ndarray]:
        """The value, or of updates what the Parameters then hold."""
        executor = ad.Executor([self.node], ctx)
        feeds = {x: array for x, array in self.feeds.items() if x in set(executor.topo_order)}
        values = executor.run(feeds, convert_to_numpy_ret_vals=True)
        return [p.asnumpy() for p in self.parameters] or values


class Gradients:
    """A case as one number, Σ weights · output, and that number's gradients.

    `wrap` makes what the operator gets of each floating input.
    """

    def __init__(
        self, sample: Sample, case: Case, dtype: np.dtype, wrap: Callable = lambda x: x
    ) -> None:
        arrays = make_arrays(sample, case)
        shape = Use(sample, case, arrays).node.spec.shape
        rng = generator(sample, case, "weights")
        weights = rng.uniform(-1, 1, shape).astype(np.float32).astype(np.float64)
        self.arrays = in_dtype([*arrays, weights], dtype)
        self.inputs = [
            ad.Variable(f"x{k}", dtype=None if x.dtype == dtype else x.dtype)
            for k, x in enumerate(self.arrays)
        ]
        wrapped = [wrap(x) if a.dtype == dtype else x for x, a in zip(self.inputs, self.arrays)]
        self.node = sample.node(*wrapped[:-1], **case.attrs)
        self.terms = [self.inputs[-1] * self.node]  # the number is their sum
        self.total = ad.sum_op(self.terms[0])
        chosen = sample.differentiable
        self.chosen = list(range(len(arrays)) if chosen is None else chosen)
        self.gradients = ad.gradients(self.total, [self.inputs[k] for k in self.chosen])

    def run(self, nodes: Sequence[Any], ctx: Context | None = None) -> list[np.ndarray]:
        executor = ad.Executor(nodes, ctx)
        return executor.run(self.feeds_of(executor, self.arrays), convert_to_numpy_ret_vals=True)

    def feeds_of(self, executor: ad.Executor, arrays: Sequence[np.ndarray]) -> dict:
        used = set(executor.topo_order)
        return {x: array for x, array in zip(self.inputs, arrays) if x in used}

    def differentiate_again(self, rng: np.random.Generator) -> None:
        """The number becomes Σ random · gradient, with gradients of its own."""
        directions = [ad.constant(rng.uniform(-1, 1, self.arrays[k].shape)) for k in self.chosen]
        self.terms = [d * gradient for d, gradient in zip(directions, self.gradients)]
        self.total = ad.sum_node_list([ad.sum_op(term) for term in self.terms])
        self.chosen = [*self.chosen, len(self.inputs) - 1]
        self.gradients = ad.gradients(self.total, [self.inputs[k] for k in self.chosen])

    def check(self, rng: np.random.Generator, factor: float = 1.0) -> None:
        """Compares the gradients with finite differences, on numpy."""
        executor = ad.Executor([self.total])
        values = self.run([*self.gradients, *self.terms])
        gradients, terms = values[: len(self.gradients)], values[len(self.gradients) :]
        point = [self.arrays[k] for k in self.chosen]
        if not all(x.size for x in self.arrays):
            assert [g.shape for g in gradients] == [x.shape for x in point]
            return

        def value(moved: Sequence[np.ndarray]) -> float:
            arrays = list(self.arrays)
            for k, x in zip(self.chosen, moved):
                arrays[k] = x
            executor.draws = 0  # the numbers that the gradients have seen
            return executor.run(self.feeds_of(executor, arrays))[0]

        magnitude = sum(float(np.abs(term).sum()) for term in terms)
        check_gradients(value, gradients, point, rng, factor, magnitude)

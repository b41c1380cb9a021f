"""A host rule as an operator of graphs: Python runs it between the steps of any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import GraphError
from ...graph.node import Node, Op
from ...graph.spec import Spec


class HostOp(Op):
    """A function of numpy arrays; its shapes, which no values decide, are those of its result for
    inputs of ones.

    name: of the ONNX operator. function: takes and returns arrays. outputs: how many it makes.
    """

    fallible = True
    vocabulary = False

    def __init__(self, name: str, function: Callable[..., Any], outputs: int) -> None:
        self.name, self.function, self.outputs = name, function, outputs

    def results(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The function's arrays, as many as the operator has outputs."""
        made = self.function(*arrays)
        several = made if isinstance(made, (tuple, list)) else [made]
        return [np.asarray(y) for y in several[: self.outputs]]

    def infer(self, node: Node, *specs: Spec) -> Spec | tuple[Spec, ...]:
        arrays = [np.ones(spec.shape, spec.dtype or np.float32) for spec in specs]
        with np.errstate(all="ignore"):
            made = [Spec(y.shape, y.dtype, False) for y in self.results(arrays)]
        return made[0] if self.outputs == 1 else tuple(made)

    def compute(
        self, node: Node, input_vals: list, output_val: Any, use_numpy: bool = True
    ) -> None:
        arrays = [x if use_numpy else x.asnumpy() for x in input_vals]
        with np.errstate(all="ignore"):
            made = self.results(arrays)
        for y, result in zip([output_val] if self.outputs == 1 else output_val, made):
            if tuple(y.shape) != result.shape:
                raise GraphError(f"{self.name}: shape {result.shape}, expected {tuple(y.shape)}")
            y[:] = result

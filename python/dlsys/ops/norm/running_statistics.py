"""The update of running statistics, once the number of values that they were taken of is known."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...graph.node import Node, Op, Spec
from ...graph.signature import Number, Signature


class RunningUpdateOp(Op):
    """running = (1 - momentum) · running + momentum · new, the new variance times `correction`, of
    one layer or of several that share these numbers. What is new with no weight, momentum 0 or
    correction 0, changes nothing, whatever its value.

    Inputs: the means of all, their variances, then the new means and the new variances. The values
    are the means' new ones.
    """

    name = kernel = "running_update"

    def __init__(self, count: int = 1) -> None:
        self.outputs = count
        kinds = dict(momentum=Number(low=0, high=1), correction=Number(low=0))
        states = ("running_mean", "running_variance", "mean", "variance", "*")
        self.signature = Signature(*(states if count == 1 else ("*inputs",)), **kinds)
        self.writes = tuple(range(2 * count))

    def infer(self, node: Node, *specs: Spec) -> Any:
        return specs[0] if self.outputs == 1 else tuple(specs[: self.outputs])

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [max(inputs, key=lambda spec: spec.size)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        n = self.outputs
        states, taken, scratch = arrays[: 2 * n], arrays[2 * n : 4 * n], arrays[4 * n]
        momentum = node.attrs["momentum"]
        for k, (state, value) in enumerate(zip(states, taken)):
            weight = momentum * (1.0 if k < n else node.attrs["correction"])
            if weight == 0:
                continue
            part = scratch[: value.size]
            np.multiply(value, weight, out=part)
            if momentum == 1:
                np.copyto(state, part)  # what was there before is forgotten, infinite or not
                continue
            np.multiply(state, 1 - momentum, out=state)
            np.add(state, part, out=state)

    def scalars(self, node: Node) -> tuple[float, float, float]:
        momentum = node.attrs["momentum"]
        return 1 - momentum, momentum, momentum * node.attrs["correction"]

    def lists(self, node: Node) -> tuple[int, int]:
        return 2 * self.outputs, 2 * self.outputs

    def merge_key(self, node: Node) -> Hashable | None:
        dtype = node.inputs[0].spec.dtype
        return ("running_update", dtype, *sorted(node.attrs.items())) if self.outputs == 1 else None

    def merged(self, nodes: Sequence[Node]) -> Node:
        inputs = [node.inputs[k] for k in range(4) for node in nodes]
        name = f"{self.name} of {len(nodes)}"
        return Node(running_updates_op(len(nodes)), inputs, nodes[0].attrs, name)


@lru_cache
def running_updates_op(count: int) -> RunningUpdateOp:
    """The update of so many layers at once."""
    return RunningUpdateOp(count)


running_update_op = RunningUpdateOp()

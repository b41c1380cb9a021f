"""Operators that write a Parameter in place at the end of a step, and the node that groups
them. The rules of optimizers are in apply.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...arguments.kinds import Input, Int
from ...arguments.signature import Signature
from ...dtypes import host, is_narrow
from ...errors import GraphError
from ...graph.node import Node, Op
from ...graph.spec import Spec, describe

__all__ = ["accumulate_op", "advance_step_op", "assign_op", "group_op"]


class AssignOp(Op):
    """Stores a value in a Parameter; every other reader of this run sees the value from before."""

    name = "assign"
    signature = Signature("target", "value")
    kernel = "cast"
    writes = (0,)
    any_dtype = True

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_parameter(node, node.inputs[0])
        if specs[0].shape != specs[1].shape:
            raise node.error(f"shapes differ: {describe(node, specs)}")
        target, value = specs[0].dtype, specs[1].dtype
        known = target is not None and value is not None
        if known and not np.can_cast(host(value), host(target), "same_kind"):
            raise node.error(
                f"{node.inputs[0].name} is {target}, which cannot hold {value} of "
                f"{node.inputs[1].name}"
            )
        return specs[0]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        np.copyto(arrays[0], arrays[1], casting="same_kind")


class AdvanceStepOp(Op):
    """step += 1, at the end of a training step.

    With `count`, the number of runs before this one, only the last of every `every` runs counts.
    """

    name = kernel = "advance_step"
    any_dtype = True

    def __init__(self, steps: int) -> None:
        self.outputs = steps
        self.writes = tuple(range(steps))
        names = ["step"] if steps == 1 else [f"step{k}" for k in range(steps)]
        self.signature = Signature(*names, "*", count=Input(None), every=Int(1, low=1))

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        return Node(self, inputs, attrs if len(inputs) > self.outputs else {}, name)

    def infer(self, node: Node, *specs: Spec) -> Any:
        for k, spec in enumerate(specs):
            if k < self.outputs:
                check_parameter(node, node.inputs[k])
            check_count(node, "step" if k < self.outputs else "count", spec)
        return specs[0] if self.outputs == 1 else tuple(specs[: self.outputs])

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        steps, counts = arrays[: self.outputs], arrays[self.outputs :]
        if counts and (int(counts[0].item()) + 1) % node.attrs["every"]:
            return
        for step in steps:
            np.add(step, 1, out=step)

    def scalars(self, node: Node) -> tuple[int]:
        return (node.attrs.get("every", 1),)

    def lists(self, node: Node) -> tuple[int, int]:
        return self.outputs, len(node.inputs) - self.outputs

    def merge_key(self, node: Node) -> Hashable | None:
        if self.outputs > 1:
            return None
        return self, *node.attrs.items(), *map(id, node.inputs[1:])

    def merged(self, nodes: Sequence[Node]) -> Node:
        inputs = [*(node.inputs[0] for node in nodes), *nodes[0].inputs[1:]]
        name = f"{self.name} of {len(nodes)}"
        return Node(_advance_steps(len(nodes)), inputs, nodes[0].attrs, name)


class GroupOp(Op):
    """Several nodes as one to fetch; its own value is None."""

    name = "group"
    signature = Signature("*nodes")
    outputs = 0

    def infer(self, node: Node, *specs: Any) -> tuple[Spec, ...]:
        return ()


class AccumulateOp(Op):
    """total[0] + total[1] += x, for a Parameter `total` (2, n) and x (n,): a sum over the steps of
    a run that stays on the device, such as a loss or a count of right answers.

    A float32 sum stops counting at 2^24 and loses the digits of small terms long before. A total is
    therefore two rows, the sums and what rounding took from them (Knuth, The Art of Computer
    Programming 2, 4.2.2, theorem B): together 48 bits, so that counts are exact.
    """

    name = kernel = "accumulate"
    writes = (0,)
    signature = Signature("total", "x")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_parameter(node, node.inputs[0])
        if len(specs[1].shape) != 1 or specs[0].shape != (2, *specs[1].shape):
            raise node.error(f"expected a total (2, n) and (n,), got {describe(node, specs)}")
        if is_narrow(specs[0].dtype):
            raise node.error(f"expected a total of float32, got {specs[0].dtype}")
        return specs[0]

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [inputs[0], inputs[0]._replace(shape=inputs[1].shape)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        (sums, errors), x, (total, added), lost = arrays
        np.add(sums, x, out=total)
        np.subtract(total, sums, out=added)
        np.subtract(x, added, out=lost)
        np.subtract(total, added, out=added)
        np.subtract(sums, added, out=added)
        np.add(lost, added, out=lost)
        np.add(errors, lost, out=errors)
        np.copyto(sums, total)

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 7 * inputs[1].size


def check_parameter(node: Node, target: Node) -> None:
    """Refuses to write anything that has no storage of its own."""
    if target.op.leaf != "state":
        raise GraphError(
            f"{node.op.name}: {target.name} is no Parameter and cannot be written [{node.where}]"
        )


def check_count(node: Node, what: str, spec: Spec) -> None:
    """Refuses what is no count of steps or runs."""
    if spec.size != 1 or spec.dtype != np.int64:
        raise node.error(f"expected a {what} of one int64, got {spec.dtype} {spec.shape}")


@lru_cache
def _advance_steps(steps: int) -> AdvanceStepOp:
    return AdvanceStepOp(steps)


assign_op = AssignOp()
advance_step_op = AdvanceStepOp(1)
accumulate_op = AccumulateOp()
group_op = GroupOp()

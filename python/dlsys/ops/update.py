"""Operators that write a Parameter in place at the end of a step, and the node that groups them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import GraphError
from ..graph.node import Node, Op, Spec
from ..graph.shapes import describe

_CHUNK = 16384  # elements updated at a time on numpy, so that scratch stays in the cache


class AssignOp(Op):
    """Stores a value in a Parameter; every other reader of this run sees the value from before."""

    name = "assign"
    kernel = "cast"
    writes = (0,)
    any_dtype = True

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_parameter(node, node.inputs[0])
        if specs[0].shape != specs[1].shape:
            raise node.error(f"shapes differ: {describe(node, specs)}")
        target, value = specs[0].dtype, specs[1].dtype
        if target is not None and value is not None and not np.can_cast(value, target, "same_kind"):
            raise node.error(
                f"{node.inputs[0].name} is {target}, which cannot hold {value} of "
                f"{node.inputs[1].name}"
            )
        return specs[0]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        np.copyto(arrays[0], arrays[1], casting="same_kind")


class SgdUpdateOp(Op):
    """param -= lr · grad; `lr` is a node of one element, so that a schedule may change it
    between runs.
    """

    name = kernel = "sgd_update"
    writes = (0,)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_update(node, specs, states=1)
        return specs[0]

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [Spec((min(_CHUNK, inputs[0].size),), inputs[0].dtype)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        param, grad, lr, scratch = arrays
        for p, g, s in _chunks(scratch, param, grad):
            np.multiply(g, lr, out=s)
            np.subtract(p, s, out=p)

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 2 * inputs[0].size


class SgdMomentumUpdateOp(Op):
    """velocity = momentum · velocity + grad; param -= lr · velocity."""

    name = kernel = "sgd_momentum_update"
    writes = (0, 1)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_update(node, specs, states=2)
        return specs[0]

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [Spec((min(_CHUNK, inputs[0].size),), inputs[0].dtype)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        param, velocity, grad, lr, scratch = arrays
        for p, v, g, s in _chunks(scratch, param, velocity, grad):
            np.multiply(v, node.attrs["momentum"], out=v)
            np.add(v, g, out=v)
            np.multiply(v, lr, out=s)
            np.subtract(p, s, out=p)

    def scalars(self, node: Node) -> tuple[float]:
        return (float(node.attrs["momentum"]),)

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 4 * inputs[0].size


class AdamUpdateOp(Op):
    """Adam of Kingma and Ba (2015): with t = step + 1,

    m += (1 - beta1) · (grad - m); v += (1 - beta2) · (grad² - v);
    param -= lr / (1 - beta1^t) · m / (sqrt(v / (1 - beta2^t)) + eps).

    Inputs are param, m, v, grad, lr (one element) and step (one int64), which is only read: an
    effect advances it once for all parameters.
    """

    name = kernel = "adam_update"
    writes = (0, 1, 2)
    any_dtype = (5,)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_update(node, specs, states=3)
        if specs[5].size != 1 or specs[5].dtype != np.int64:
            raise node.error(f"expected a step of one int64, got {specs[5].dtype} {specs[5].shape}")
        return specs[0]

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [Spec((min(_CHUNK, inputs[0].size),), inputs[0].dtype)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        param, mean, square, grad, lr, step, scratch = arrays
        decay1, decay2 = 1 - node.attrs["beta1"], 1 - node.attrs["beta2"]
        t = int(step) + 1
        rate = float(lr.item()) / -np.expm1(t * np.log1p(-decay1))
        scale = 1 / np.sqrt(-np.expm1(t * np.log1p(-decay2)))
        for p, m, v, g, s in _chunks(scratch, param, mean, square, grad):
            _move(m, g, decay1, s)
            np.multiply(g, g, out=s)
            _move(v, s, decay2, s)
            np.sqrt(v, out=s)
            np.multiply(s, float(scale), out=s)
            np.add(s, node.attrs["eps"], out=s)
            np.divide(m, s, out=s)
            np.multiply(s, float(rate), out=s)
            np.subtract(p, s, out=p)

    def scalars(self, node: Node) -> tuple[float, float, float]:
        return 1 - node.attrs["beta1"], 1 - node.attrs["beta2"], float(node.attrs["eps"])

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 12 * inputs[0].size


class GroupOp(Op):
    """Several nodes as one to fetch; its own value is None."""

    name = "group"
    outputs = 0

    def infer(self, node: Node, *specs: Any) -> tuple[Spec, ...]:
        return ()


def check_parameter(node: Node, target: Node) -> None:
    """Refuses to write anything that has no storage of its own."""
    if target.op.leaf != "state":
        raise GraphError(
            f"{node.op.name}: {target.name} is no Parameter and cannot be written [{node.where}]"
        )


def check_update(node: Node, specs: tuple[Spec, ...], states: int) -> None:
    """Parameters first, then a gradient of their shape and a rate of one element."""
    for target in node.inputs[:states]:
        check_parameter(node, target)
    if (
        any(spec.shape != specs[0].shape for spec in specs[: states + 1])
        or specs[states + 1].size != 1
    ):
        raise node.error(
            "expected states and gradient of one shape and a scalar rate, got "
            f"{describe(node, specs)}"
        )


def _chunks(scratch: np.ndarray, *arrays: np.ndarray) -> Iterator[list[np.ndarray]]:
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _CHUNK):
        parts = [array[start : start + _CHUNK] for array in flat]
        yield [*parts, scratch[: parts[0].size]]


def _move(state: np.ndarray, target: np.ndarray, share: float, scratch: np.ndarray) -> None:
    np.subtract(target, state, out=scratch)
    np.multiply(scratch, share, out=scratch)
    np.add(state, scratch, out=state)


assign_op = AssignOp()
sgd_update_op = SgdUpdateOp()
sgd_momentum_update_op = SgdMomentumUpdateOp()
adam_update_op = AdamUpdateOp()
group_op = GroupOp()

"""Operators of batch normalization with its surroundings, which several fusions make or read; the
fusion `batch_norm` says what they are for.

Of relu's gradient only the sign of relu's output is asked: a bit for each element that is positive
tells it, eight a byte from the lowest bit on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arguments.kinds import Instance, Kind
from ...arguments.signature import Signature
from ...graph.lines import attributed_to
from ...graph.node import Node, Op
from ...graph.spec import Spec
from ...ops.leaf import constant_op, placeholder_op
from ...ops.norm.batch_norm import EPS
from .body import ACTIVATIONS, GRADIENTS, Body, Fused, Selected, check_body, close
from .rewrite import value_of

_BYTE = np.dtype(np.uint8)


class FusedNorm(Fused):
    """Inputs: x, mean, variance, and those of the body that follow. `select` is a further
    attribute of the kernel.
    """

    tolerance = 1e-4

    def __init__(self, name: str, outputs: int = 1, select: Selected | None = None) -> None:
        super().__init__(name, outputs)
        self.inplace = outputs == 1
        self._select = select
        kinds: dict[str, Kind] = {"body": Instance(Body), "eps": EPS}
        if select is not None:
            kinds[select.name] = select.kind
        self.signature = Signature("*inputs", **kinds)

    def scalars(self, node: Node) -> tuple[Any, ...]:
        eps = float(node.attrs["eps"])
        return (eps,) if self._select is None else (eps, self._select.code(node))


class NormalizeMap(FusedNorm):
    """y = activation(normalized x + addend), of which either may be left out. Inputs: x, mean,
    variance, scale, bias, then the addend, or such five for an addend that is normalized.
    """

    def lists(self, node: Node) -> tuple[int]:
        return (len(node.inputs) - 5,)


class Gradient(FusedNorm):
    """The gradient of x; further inputs: scale, bias, dscale, dbias, dy."""

    cache_local = True


class Sums(FusedNorm):
    """Single-pass sums of each channel: the last input is an arrival counter for each."""

    zeroed_workspace = (-1,)

    def __init__(self, name: str, inputs: int, outputs: int = 2, **select: Any) -> None:
        super().__init__(name, outputs, **select)
        self.any_dtype = (inputs,)  # the arrival counters

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        body: Body = attrs["body"]
        check_body(self, inputs, body)
        assert inputs[0].spec is not None
        channels = inputs[0].spec.shape[1]
        arrivals = constant_op(np.zeros(channels, np.int32), name="arrivals")
        over_all = Body((*body.inputs, placeholder_op("arrivals")), body.outputs)
        return Node(self, (*inputs, arrivals), attrs | {"body": over_all}, name)


class Statistics(Sums):
    """Mean and variance of x, as `batch_statistics` has them."""

    def __init__(self, name: str, inputs: int) -> None:
        super().__init__(name, inputs)
        self.signature = Signature("*inputs", body=Instance(Body))

    def scalars(self, node: Node) -> tuple[()]:
        return ()


class ReluSums(Sums):
    """dscale, dbias and dz = relu's gradient of one or two dys that are added, for a normalization
    whose value, or whose sum with something, the relu is of. Inputs: x, mean, variance, then scale
    and bias or else the relu's output, then the dys. Attributes: body, eps, output.
    """

    def __init__(self, output: bool, dys: int) -> None:
        self._lists = 1 if output else 2, dys
        super().__init__("batch_normalize_relu_sums", 3 + sum(self._lists), 3)

    def lists(self, node: Node) -> tuple[int, int]:
        return self._lists


_GRADIENT = Selected("gradient", GRADIENTS)
batch_statistics_single_pass_op = Statistics("batch_statistics_single_pass", 1)
batch_normalize_map_op = NormalizeMap("batch_normalize_map", 1, Selected("activation", ACTIVATIONS))
batch_normalize_sums_single_pass_op = Sums("batch_normalize_sums_single_pass", 4)
batch_normalize_map_sums_op = Sums("batch_normalize_map_sums", 6, select=_GRADIENT)
batch_normalize_map_gradient_op = Gradient("batch_normalize_map_gradient", 1, _GRADIENT)
relu_sums_ops = {(output, dys): ReluSums(output, dys) for output in (True, False) for dys in (1, 2)}


# ---- relu by bits ----


class PositiveBitsOp(Op):
    """A bit for each element of x that is positive, eight a byte from the lowest bit on."""

    name = kernel = "positive_bits"
    vocabulary = False
    signature = Signature("x")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return Spec((-(-specs[0].size // 8),), _BYTE, specs[0].declared)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, bits = arrays
        bits[...] = np.packbits(x.ravel() > 0, bitorder="little")


class KeepByBitsOp(Op):
    """The elements of x whose bit is set, 0 for the others; inputs: bits, x."""

    name = kernel = "keep_by_bits"
    vocabulary = False
    any_dtype = (0,)
    signature = Signature("bits", "x")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return specs[1]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        bits, x, y = arrays
        kept = np.unpackbits(bits, count=x.size, bitorder="little").reshape(x.shape)
        np.multiply(x, 0, out=y)
        np.copyto(y, x, where=kept.astype(bool))


class ReluBits(NormalizeMap):
    """relu(normalized x + addend) as a NormalizeMap, and a bit for each positive element."""

    def __init__(self) -> None:
        super().__init__("batch_normalize_relu_bits", 2)


class ReluBitsSums(ReluSums):
    """The sums of `ReluSums` by the bits of relu's output."""

    def __init__(self, dys: int) -> None:
        super().__init__(True, dys)
        self.any_dtype = (3, 4 + dys)  # the bits, and the arrival counters


positive_bits_op = PositiveBitsOp()
keep_by_bits_op = KeepByBitsOp()
batch_normalize_relu_bits_op = ReluBits()
relu_bits_sums_ops = {dys: ReluBitsSums(dys) for dys in (1, 2)}


def keeps_bits(y: Node) -> bool:
    """True where a kernel can write the bits together with y."""
    by_eight = len(y.spec.shape) == 2 and y.spec.shape[1] % 8 == 0
    is_relu = y.op is batch_normalize_map_op and y.attrs["activation"] == "relu"
    return is_relu and by_eight


def with_bits(y: Node) -> Node:
    """y as the first value of an operator that keeps its bits."""
    with attributed_to(y):
        body = close(y.inputs, (y, positive_bits_op(y)))
        made = batch_normalize_relu_bits_op(*y.inputs, body=body, eps=y.attrs["eps"])
        made.stand_for(y)
        return value_of(made, 0, y)

"""Batch normalisation with what stands around it, made by `fusion/batch_norm.py` for GPUs: the sum
with a shortcut and the activation behind it, and the activation's gradient before the sums and the
gradient on the way back. Statistics and sums have each a place where their blocks meet, so that
they are one kernel.

What an activation was given is found again from x on the way back, by the same operations and so to
the bit. Where it was given a sum, its output tells instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph.kinds import Instance, Kind
from ..graph.node import Node
from ..graph.signature import Signature
from ..ops.leaf import constant_op, placeholder_op
from ..ops.norm.batch_norm import EPS
from .body import ACTIVATIONS, GRADIENTS, Body, Fused, check_body, chosen


class FusedNorm(Fused):
    """Inputs: x, mean, variance, and those of the body that follow. `select` names the attribute
    that is one of `choices`, which count from 1; without one of them the number is 0.
    """

    tolerance = 1e-4

    def __init__(
        self, name: str, outputs: int = 1, select: str = "", choices: Sequence[str] = ()
    ) -> None:
        super().__init__(name, outputs)
        self.inplace = outputs == 1
        self._select = select
        self._choices = choices
        kinds: dict[str, Kind] = {"body": Instance(Body), "eps": EPS}
        if select:
            kinds[select] = chosen(choices)
        self.signature = Signature("*inputs", **kinds)

    def scalars(self, node: Node) -> tuple[Any, ...]:
        eps = float(node.attrs["eps"])
        if not self._select:
            return (eps,)
        chosen = node.attrs[self._select]
        return eps, self._choices.index(chosen) + 1 if chosen else 0


class NormalizeMap(FusedNorm):
    """y = activation(normalised x + addend), of which either may be left out."""

    def lists(self, node: Node) -> tuple[int]:
        return (len(node.inputs) - 5,)


class Gradient(FusedNorm):
    """The gradient of x; further inputs: scale, bias, dscale, dbias, dy."""

    cache_local = True


class Sums(FusedNorm):
    """Sums of each channel over blocks that meet: the last input is a place for each channel."""

    zeroed_workspace = (-1,)

    def __init__(self, name: str, inputs: int, outputs: int = 2, **select: Any) -> None:
        super().__init__(name, outputs, **select)
        self.any_dtype = (inputs,)  # the meeting

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        body: Body = attrs["body"]
        check_body(self, inputs, body)
        assert inputs[0].spec is not None
        channels = inputs[0].spec.shape[1]
        meeting = constant_op(np.zeros(channels, np.int32), name="meeting")
        whole = Body((*body.inputs, placeholder_op("meeting")), body.outputs)
        return Node(self, (*inputs, meeting), attrs | {"body": whole}, name)


class Statistics(Sums):
    """Mean and variance of x, as `batch_statistics` has them."""

    def __init__(self, name: str, inputs: int) -> None:
        super().__init__(name, inputs)
        self.signature = Signature("*inputs", body=Instance(Body))

    def scalars(self, node: Node) -> tuple[()]:
        return ()


class ReluSums(Sums):
    """dscale, dbias and dz = relu's gradient of one or two dys that are added, for a normalisation
    whose value, or whose sum with something, the relu is of. Inputs: x, mean, variance, then scale
    and bias or else the relu's output, then the dys. Attributes: body, eps, output.
    """

    def __init__(self, output: bool, dys: int) -> None:
        self._lists = 1 if output else 2, dys
        super().__init__("batch_normalize_relu_sums", 3 + sum(self._lists), 3)

    def lists(self, node: Node) -> tuple[int, int]:
        return self._lists


batch_statistics_single_pass_op = Statistics("batch_statistics_single_pass", 1)
batch_normalize_map_op = NormalizeMap("batch_normalize_map", 1, "activation", ACTIVATIONS)
batch_normalize_sums_single_pass_op = Sums("batch_normalize_sums_single_pass", 4)
batch_normalize_map_sums_op = Sums(
    "batch_normalize_map_sums", 6, select="gradient", choices=GRADIENTS
)
batch_normalize_map_gradient_op = Gradient("batch_normalize_map_gradient", 1, "gradient", GRADIENTS)
relu_sums_ops = {(output, dys): ReluSums(output, dys) for output in (True, False) for dys in (1, 2)}

"""Operators that stand for several, made by `fusion/gemm_epilogue.py`.

Each keeps the nodes that it replaced as its body, closed over its inputs: the body is its shape
rule, its numpy form, its text, and so what its kernels are checked against. Passes run after
gradients are built, so none of them has a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import GraphError
from ..graph.kinds import Bool, Choice, Instance, Kind, Number
from ..graph.lines import where
from ..graph.node import Node, Op, find_topo_sort
from ..graph.signature import Signature
from ..graph.spec import FLOAT32, Spec
from ..ops.leaf import constant_op, placeholder_op
from ..ops.matmul import algorithm_number, precision_number
from ..ops.movement import reshape_op
from ..ops.random.device_batch import scaled_op

# By the numbers of src/math/epilogue.h, which count from 1: kernels of activations, y = f(x), and
# of their gradients, dx = f(x or y, dy).
ACTIVATIONS = (
    "relu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "softplus", "hard_sigmoid",
    "hard_swish",
)  # fmt: skip
GRADIENTS = (
    "relu_gradient", "silu_gradient", "gelu_gradient", "gelu_tanh_gradient", "softplus_gradient",
    "hard_swish_gradient",
)  # fmt: skip
_MEETING = 512  # numbers that the blocks of a loss kernel meet at: kMeetingPlaces and a count


class Body(NamedTuple):
    """What a fused node computes: `outputs` of its operator over `inputs`, which stand for the
    node's own.
    """

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    def __str__(self) -> str:
        return "; ".join(_expression(node) for node in self.outputs)

    @property
    def steps(self) -> list[Node]:
        """The nodes that compute, inputs before users."""
        return [node for node in find_topo_sort(self.outputs) if not node.op.leaf]


def close(
    inputs: Sequence[Node], outputs: Sequence[Node], shown: Mapping[Node, Node] | None = None
) -> Body:
    """The nodes between `inputs` and `outputs` as a body of their own, which later rewrites of the
    graph do not touch. `shown` maps nodes that are views of an input's memory to that input.
    """
    copies: dict[Node, Node] = {}
    for x in inputs:
        copies[x] = placeholder_op(x.name)
        copies[x].spec = x.spec
    for view, x in (shown or {}).items():
        copies.setdefault(view, reshape_op(copies[x], view.spec.shape))

    made = tuple(_copy(node, copies) for node in outputs)
    return Body(tuple(copies[x] for x in inputs), made)


def on_bytes(body: Body, numbers: Sequence[int]) -> Body:
    """The body with bytes for the inputs of those numbers, and behind all inputs the scale of
    these.
    """
    scale = placeholder_op("scale")
    scale.spec = Spec((), FLOAT32)
    inputs, copies = list(body.inputs), {x: x for x in body.inputs}
    for k in numbers:
        x = body.inputs[k]
        inputs[k] = stored = placeholder_op(x.name)
        stored.spec = x.spec._replace(dtype=np.dtype(np.uint8))
        copies[x] = scaled_op(stored, scale)
    made = tuple(_copy(node, copies) for node in body.outputs)
    return Body((*inputs, scale), made)


def _copy(node: Node, copies: dict[Node, Node]) -> Node:
    """The copy of a node and of what it is made of: as deep as a pattern, which is a few nodes."""
    if node not in copies:
        copies[node] = node.derive([_copy(x, copies) for x in node.inputs], node.spec)
    return copies[node]


class Fused(Op):
    """What all fused operators share: their attribute `body` says what they compute."""

    signature = Signature("*inputs", body=Instance(Body))

    def __init__(self, name: str, outputs: int = 1, any_dtype: bool | tuple[int, ...] = ()) -> None:
        self.name = self.kernel = name
        self.outputs = outputs
        self.any_dtype = any_dtype

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        check_body(self, inputs, attrs["body"])
        return Node(self, inputs, attrs, name)

    def infer(self, node: Node, *specs: Spec) -> Spec | tuple[Spec, ...]:
        body: Body = node.attrs["body"]
        found = dict(zip(body.inputs, specs))
        for step in body.steps:
            found[step] = step.op.infer(step, *(found[x] for x in step.inputs))  # type: ignore[assignment]
        made = tuple(found[x] for x in body.outputs)
        return made if self.outputs > 1 else made[0]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        body: Body = node.attrs["body"]
        given, made = arrays[: len(body.inputs)], arrays[len(body.inputs) :]
        specs: dict[Node, Any] = {
            x: Spec(a.shape, a.dtype, declared=False) for x, a in zip(body.inputs, given)
        }
        values: dict[Node, Any] = dict(zip(body.inputs, given))
        for step in body.steps:
            inputs = [values[x] for x in step.inputs]
            spec: Any = step.op.infer(step, *(specs[x] for x in step.inputs))
            specs[step] = spec
            if step.op.projection:
                values[step] = inputs[0][step.attrs["index"]]
                continue
            if step.op.view:
                values[step] = inputs[0].reshape(spec.shape)
                continue
            wanted = [spec] if step.op.outputs == 1 else list(spec)
            results = [np.empty(s.shape, s.dtype) for s in wanted]
            given_specs = [specs[x] for x in step.inputs]
            scratch = [
                np.empty(s.shape, s.dtype) for s in step.op.workspace(step, given_specs, wanted)
            ]
            step.op.numpy(step, *inputs, *scratch, *results)
            values[step] = results[0] if step.op.outputs == 1 else results
        for array, output in zip(made, body.outputs):
            np.copyto(array, values[output], casting="same_kind")

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        steps = node.attrs["body"].steps
        return sum(s.op.cost(s, [x.spec for x in s.inputs], s.spec) for s in steps)


def chosen(choices: Sequence[Any]) -> Kind:
    """The kind of an attribute that selects one of some words, or none of them."""
    return Bool() if True in choices else Choice("", *choices)


def check_body(op: Op, inputs: Sequence[Any], body: Body) -> None:
    """Refuses inputs that are not one for each of the body's."""
    if len(inputs) != len(body.inputs):
        raise GraphError(
            f"{op.name}: its body takes {len(body.inputs)} inputs, got {len(inputs)} [{where()}]"
        )


class FusedProduct(Fused):
    """A matrix product with what follows it. `select` names the attribute that chooses among
    `choices`, whose numbers count from 1; without one the number is 0.
    """

    tolerance = 1e-4
    has_precision = tunable = True

    def __init__(
        self, name: str, select: str, choices: Sequence[Any] = (True,), outputs: int = 1
    ) -> None:
        super().__init__(name, outputs)
        self._select = select
        self._choices = choices
        kinds: dict[str, Kind] = {"body": Instance(Body), select: chosen(choices)}
        self.signature = Signature("*inputs", **kinds, trans_A=Bool(), trans_B=Bool())

    def scalars(self, node: Node) -> tuple[int, ...]:
        attrs = node.attrs
        chosen = attrs[self._select]
        number = self._choices.index(chosen) + 1 if chosen else 0
        flags = int(attrs["trans_A"]), int(attrs["trans_B"])
        return *flags, algorithm_number(node), precision_number(node), number


class FusedLoss(Fused):
    """Σ of the rows' losses times `scale`, and the gradient of each row's loss times `dy`: values
    () and (…, classes) of logits, labels and a place to meet. Labels out of range are refused.
    """

    tolerance = 1e-4
    fallible = True
    zeroed_workspace = (-1,)

    def __init__(self, name: str, of_any_dtype: tuple[int, ...]) -> None:
        super().__init__(name, 2, of_any_dtype)
        self.of_any_dtype = of_any_dtype
        numbers = dict(scale=Number(nan=True), dy=Number(nan=True))
        self.signature = Signature("logits", "labels", body=Instance(Body), **numbers)

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        body: Body = attrs["body"]
        inputs = (*inputs, constant_op(np.zeros(_MEETING, np.int32), name="meeting"))
        whole = Body((*body.inputs, placeholder_op("meeting")), body.outputs)
        return super().make(inputs, attrs | {"body": whole}, name)

    def scalars(self, node: Node) -> tuple[float, float]:
        return node.attrs["scale"], node.attrs["dy"]


class Layer(NamedTuple):
    """A dense layer of a head: activation(x op(W) + bias) forward, slope(x, dy op(W)^T) back."""

    transposed: bool
    has_bias: bool
    activation: str = ""  # of ACTIVATIONS, or none
    slope: str = ""  # of GRADIENTS, or none; by the layer's own input

    @property
    def code(self) -> int:
        """Ten bits, as src/cuda/loss/mlp_head.cu reads them."""
        activation = ACTIVATIONS.index(self.activation) + 1 if self.activation else 0
        slope = GRADIENTS.index(self.slope) + 1 if self.slope else 0
        return activation | slope << 4 | self.transposed << 8 | self.has_bias << 9


class FusedHead(Fused):
    """The dense layers at a network's end, their loss as FusedLoss has it, and the gradients that
    go back through the last `back` of them. Inputs: x, the weights, the biases, the labels, a place
    to meet. Values: the loss, the gradient of the logits, what each layer but the last makes, and
    the gradients of the layers' inputs, last layer first. Attributes: body, layers (a tuple of
    Layer), scale, dy.
    """

    tolerance = 1e-4
    fallible = True
    has_precision = True  # of the products by which very many rows are done
    zeroed_workspace = (-1,)
    MOST_LAYERS = 6

    def __init__(self, loss: FusedLoss, layers: int, biases: int, back: int) -> None:
        super().__init__(loss.name.replace("cross_entropy", "mlp_head"), 1 + layers + back)
        self._lists = layers, biases, layers - 1, back
        numbers = dict(scale=Number(nan=True), dy=Number(nan=True))
        self.signature = Signature(
            "*inputs", body=Instance(Body), layers=Instance(tuple), **numbers
        )
        self.any_dtype = tuple(layers + biases + k for k in loss.of_any_dtype)

    def scalars(self, node: Node) -> tuple[int, float, float]:
        code = precision_number(node) << 10 * self.MOST_LAYERS
        code |= sum(layer.code << 10 * k for k, layer in enumerate(node.attrs["layers"]))
        return code, node.attrs["scale"], node.attrs["dy"]

    def lists(self, node: Node) -> tuple[int, ...]:
        return self._lists


@lru_cache
def head_op(loss: FusedLoss, layers: int, biases: int, back: int) -> FusedHead:
    """The head of so many layers that ends in the loss of `loss`."""
    return FusedHead(loss, layers, biases, back)


def _expression(node: Node) -> str:
    if not node.inputs:
        return node.name if node.op.leaf else node.op.name
    inputs = [_expression(x) for x in node.inputs]
    if node.op.projection:
        return f"{inputs[0]}[{node.attrs['index']}]"
    for k, transposed in enumerate(("trans_A", "trans_B")):
        if node.attrs.get(transposed):
            inputs[k] += "ᵀ"
    return f"{node.op.name}({', '.join(inputs)})"


matmul_bias_op = FusedProduct("matmul_bias", "activation", ACTIVATIONS)  # activation(A B + bias)
matmul_map_op = FusedProduct("matmul_map", "activation", ACTIVATIONS)  # activation(A B)
# The two of scale · A, where A is bytes: the scale is a further input.
matmul_u8_op = FusedProduct("matmul_u8", "activation", ACTIVATIONS)
matmul_u8_bias_op = FusedProduct("matmul_u8_bias", "activation", ACTIVATIONS)
matmul_gradient_op = FusedProduct("matmul_gradient", "gradient", GRADIENTS)  # gradient(side, A B)
matmul_sums_op = FusedProduct("matmul_sums", "of_A", outputs=2)  # A B, Σ over the depth of A or B
fused_cross_entropy_op = FusedLoss("fused_cross_entropy", (2,))
fused_sparse_cross_entropy_op = FusedLoss("fused_sparse_cross_entropy", (1, 2))

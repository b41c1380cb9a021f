"""Fused operators stand for several; this is the base of them all.

Each keeps the nodes that it replaced as its body, closed over its inputs: the body is its shape
rule, its numpy form, its text, and so what its kernels are checked against. Passes run after
gradients are built, so none of them has a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arguments.kinds import Bool, Instance, Kind, OneOf, Rung
from ...arguments.signature import Signature
from ...dtypes import is_narrow
from ...errors import GraphError
from ...graph.lines import where
from ...graph.node import Node, Op, find_topo_sort
from ...graph.spec import FLOAT32, Spec
from ...ops.leaf import placeholder_op
from ...ops.matmul import algorithm_number, precision_number
from ...ops.movement import reshape_op
from ...ops.random.device_batch import scaled_op
from ...rungs import GEMM
from ...runtime.interface import interface

# By their numbers, which count from 1: kernels of activations, y = f(x), and of their gradients,
# dx = f(x or y, dy), behind which are the product of a derivative and dy, and sums.
ACTIVATIONS = tuple(interface.activations)
BY_SIDES = tuple(interface.activation_gradients)
GRADIENTS = tuple(name for name in BY_SIDES if name.endswith("_gradient"))


class Body(NamedTuple):
    """The computation of a fused node: `outputs` of its operator over `inputs`, which stand for the
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
    inputs: Sequence[Node], outputs: Sequence[Node], aliases: Mapping[Node, Node] | None = None
) -> Body:
    """The nodes between `inputs` and `outputs` as a body of their own, which later rewrites of the
    graph do not touch. `aliases` maps nodes that are views of an input's memory to that input.
    """
    copies: dict[Node, Node] = {}
    for x in inputs:
        copies[x] = placeholder_op(x.name)
        copies[x].spec = x.spec
    for view, x in (aliases or {}).items():
        copies.setdefault(view, reshape_op(copies[x], view.spec.shape))

    made = tuple(_copy(node, copies) for node in outputs)
    return Body(tuple(copies[x] for x in inputs), made)


def with_uint8(body: Body, positions: Sequence[int]) -> Body:
    """The body over uint8 instead of the inputs at these positions, with their scale as a further,
    last input.
    """
    scale = placeholder_op("scale")
    scale.spec = Spec((), FLOAT32)
    inputs, copies = list(body.inputs), {x: x for x in body.inputs}
    for k in positions:
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
    """The base of fused operators, whose attribute `body` is what they compute."""

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
            spec: Any = computed(step.op.infer(step, *(specs[x] for x in step.inputs)))
            specs[step] = spec
            if step.op.projection:
                values[step] = inputs[0][step.attrs["index"]]
                continue
            if step.op.view:
                first = step.attrs.get("offset", 0)
                values[step] = inputs[0].ravel()[first : first + spec.size].reshape(spec.shape)
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

    def with_uint8(self, node: Node, positions: Sequence[int]) -> tuple[Op, dict[str, Any]] | None:
        """The operator, and its attributes, that takes uint8 for the inputs at these positions and
        their scale as a further input; None where there is no such kernel.
        """
        return None


def computed(spec: Any) -> Any:
    """The specs of values as kernels compute them, which round those of 16 bits in the end."""
    if not isinstance(spec, Spec):
        return tuple(map(computed, spec))
    return spec._replace(dtype=FLOAT32) if is_narrow(spec.dtype) else spec


def check_body(op: Op, inputs: Sequence[Any], body: Body) -> None:
    """Refuses inputs that are not one for each of the body's."""
    if len(inputs) != len(body.inputs):
        raise GraphError(
            f"{op.name}: its body takes {len(body.inputs)} inputs, got {len(inputs)} [{where()}]"
        )


class Selected(NamedTuple):
    """An attribute that selects one of several words, or none, and its code for the kernel: the
    position of the word, which counts from 1, or 0.
    """

    name: str
    choices: Sequence[Any] = (True,)

    @property
    def kind(self) -> Kind:
        """The values that the attribute may have."""
        return Bool() if True in self.choices else OneOf("", *self.choices)

    def code(self, node: Node) -> int:
        """The kernel's argument."""
        word = node.attrs[self.name]
        return self.choices.index(word) + 1 if word else 0


class FusedGemm(Fused):
    """A matrix product with an epilogue, which the attribute `select` chooses."""

    tolerance = 1e-4
    has_precision = tunable = True
    autocast = "bf16"
    ladder = GEMM

    def __init__(
        self, name: str, select: Selected, outputs: int = 1, any_dtype: tuple[int, ...] = ()
    ) -> None:
        super().__init__(name, outputs, any_dtype)
        self._select = select
        kinds: dict[str, Kind] = {"body": Instance(Body), select.name: select.kind}
        kinds |= {"trans_A": Bool(), "trans_B": Bool(), "algo": Rung(GEMM)}
        self.signature = Signature("*inputs", **kinds)

    def scalars(self, node: Node) -> tuple[int, ...]:
        flags = int(node.attrs["trans_A"]), int(node.attrs["trans_B"])
        return *flags, algorithm_number(node), precision_number(node), self._select.code(node)


def in_shape(node: Node, shape: tuple[int, ...]) -> Node:
    """A node's values in a shape."""
    return node if node.spec.shape == shape else reshape_op(node, shape)


def shaped(node: Node, like: Node) -> Node:
    """A node in the shape of the one that it replaces."""
    view = in_shape(node, like.spec.shape)
    if view is not node:
        view.stand_for(like)
    return view


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

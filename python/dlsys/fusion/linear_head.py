"""Linear classifiers: the loss of a few classes and the gradients of weight and bias as one kernel
that reads the samples once, and an update that adds up what its blocks leave.

Pattern: a fused head of one layer whose logits' gradient makes nothing but the gradients of one
update's weight and bias. The head and the product of the update would each read the samples, and
the gradient of the logits would lie between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..arguments.kinds import Bool, Instance, Number
from ..arguments.signature import Signature
from ..graph.lines import attributed_to
from ..graph.node import Node
from ..graph.spec import FLOAT32, Spec
from ..ops.optim.apply import RuleOp, options_of, several
from ..ops.reduce import sum_op
from ..passes.pipeline import Options, Pass
from ..runtime.interface import interface
from ..runtime.target import Target
from .shared.body import Body, Fused, close, in_shape
from .shared.head_operators import HEADS, FusedHead
from .shared.rewrite import Graph, exchange, strip_views, value_of
from .shared.update_operators import FusedUpdate, UpdateOfBody

_KERNELS = dict(zip(HEADS.values(), ("linear_head", "sparse_linear_head")))
_Layer, _Options = map(interface.struct, ("HeadLayer", "HeadOptions"))

ROWS = 8  # that a part's gradients take at a time
MOST_PARTS = 128  # about as many blocks as a large GPU has multiprocessors


class LinearHead(Fused):
    """The loss of a linear classifier and the gradients of its weight and, if `sums`, its bias, in
    parts that are to be added: part p has rows ROWS · p up to ROWS · (p + 1), and so on, ROWS times
    the number of parts further. Inputs: x (rows, k), the weight, a bias or none, the labels, the
    workspace of the loss. Values: the loss, (parts, *weight), and (parts, classes). The body makes
    the loss and the gradient of the logits. Attributes: body, transposed (the weight is (classes,
    k)), scale, dy.
    """

    tolerance = 1e-4
    fallible = True
    zeroed_workspace = (-1,)

    def __init__(self, head: FusedHead, biases: int, sums: bool) -> None:
        super().__init__(_KERNELS[head.name], 2 + sums, head.any_dtype)
        self._lists = biases, 1 + sums
        self.signature = Signature(
            "*inputs", body=Instance(Body), transposed=Bool(),
            scale=Number(nan=True), dy=Number(nan=True),
        )  # fmt: skip

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, ...]:
        made = super().infer(node, *specs)
        assert not isinstance(made, Spec)
        (x, weight), (loss, dlogits) = specs[:2], made
        parts = parts_of(x.shape[0])
        of_weight = weight._replace(shape=(parts, *weight.shape), dtype=FLOAT32)
        of_bias = dlogits._replace(shape=(parts, dlogits.shape[1]), dtype=FLOAT32)
        return (loss, of_weight, of_bias)[: self.outputs]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        count = len(node.inputs)
        loss, of_weight, *of_bias = arrays[count:]
        x = arrays[0]
        dlogits = np.empty((len(x), of_weight.shape[1 if node.attrs["transposed"] else 2]), x.dtype)
        super().numpy(node, *arrays[:count], loss, dlogits)
        part_of = np.arange(len(x)) // ROWS % len(of_weight)
        for part, to in enumerate(of_weight):
            own = part_of == part
            pair = (dlogits[own], x[own]) if node.attrs["transposed"] else (x[own], dlogits[own])
            np.matmul(pair[0].T, pair[1], out=to)
            for sums in of_bias:
                dlogits[own].sum(axis=0, out=sums[part])

    def scalars(self, node: Node) -> tuple[Any]:
        layer = _Layer(transposed=node.attrs["transposed"])
        return (_Options(scale=node.attrs["scale"], dy=node.attrs["dy"], layers=(layer,)),)

    def lists(self, node: Node) -> tuple[int, ...]:
        return self._lists

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return super().cost(node, inputs, output) + 2 * inputs[0].size * inputs[1].size // max(
            1, inputs[0].shape[1]
        )


class SummedUpdate(UpdateOfBody):
    """A rule applied to parameters whose gradients are sums over the first axis of `parts`.

    Inputs: the states of all parameters as RuleOp has them, the parts of each gradient, the rate
    and options of the rule. The values are the parameters' new ones. Attributes: body, and those of
    the rule.
    """

    tolerance = 1e-4

    def __init__(self, update: RuleOp) -> None:
        super().__init__(f"summed_{update.name}", update, update.outputs)

    def scalars(self, node: Node) -> tuple[Any]:
        return (options_of(self.update.rule, node.attrs),)

    def lists(self, node: Node) -> tuple[int, ...]:
        return self.update.lists(node)


@lru_cache
def linear_head_op(head: FusedHead, biases: int, sums: bool) -> LinearHead:
    """The operator in place of a head of one layer."""
    return LinearHead(head, biases, sums)


@lru_cache
def summed_update(update: RuleOp, parameters: int) -> SummedUpdate:
    """The operator for so many parameters under the rule of `update`."""
    return SummedUpdate(several(update, parameters))


def parts_of(rows: int) -> int:
    """How many parts the gradients of so many rows come in."""
    return max(1, min(MOST_PARTS, -(-rows // ROWS)))


# ---- the pattern ----


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose linear classifiers make their gradients. The graph must be the
    executor's own, with its updates fused: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for node in graph.order:
        found = _found(graph, node)
        if found is not None and _fits(found, options.target):
            replaced.update(_replaced(found))
    return exchange(fetches, replaced)


class _Classifier(NamedTuple):
    """A head of one layer, and the update that its gradients are for."""

    head: Node
    update: Node

    @property
    def biases(self) -> int:
        return len(self.head.inputs) - 4  # x, the weight, the labels and the workspace

    @property
    def sums(self) -> bool:
        return bool(self.update.attrs["sums"][0])

    @property
    def transposed(self) -> bool:
        return self.head.attrs["layers"][0].transposed


def _found(graph: Graph, update: Node) -> _Classifier | None:
    op = update.op
    if not isinstance(op, FusedUpdate) or op.products != 1 or op.uint8:
        return None
    left, right = map(strip_views, update.inputs[len(op.writes) :][:2])
    for x, dlogits in ((right, left), (left, right)):
        head = dlogits.inputs[0] if dlogits.op.projection else dlogits
        if not isinstance(head.op, FusedHead) or dlogits.attrs.get("index") != 1:
            continue
        transposed = dlogits is left
        sums = update.attrs["sums"][0] in ("", "A" if transposed else "B")
        one = len(head.attrs["layers"]) == 1 and head.op.outputs == 2
        layer = head.attrs["layers"][0]
        alone = [reader for reader, _ in graph.readers(dlogits)] == [update]
        if one and sums and alone and layer.transposed == transposed and not layer.activation:
            if strip_views(head.inputs[0]) is x:
                return _Classifier(head, update)
    return None


def _fits(found: _Classifier, target: Target) -> bool:
    head, update = found
    assert isinstance(head.op, FusedHead) and isinstance(update.op, FusedUpdate)
    kernel, x, weight = _KERNELS[head.op.name], *(node.spec for node in head.inputs[:2])
    if not target.has(kernel) or not target.has(f"summed_{update.op.update.name}"):
        return False
    biases = [node.spec for node in head.inputs[2 : 2 + found.biases]]
    labels, workspace = (node.spec for node in head.inputs[-2:])
    parts = parts_of(x.shape[0])
    classes = weight.shape[0 if found.transposed else 1]
    made = [Spec((parts, *weight.shape), FLOAT32), Spec((parts, classes), FLOAT32)]
    layer = _Layer(transposed=found.transposed)
    given = x, weight, biases, labels, workspace, _Options(layers=(layer,)), Spec((), FLOAT32)
    return target.fits(kernel, *given, made[: 1 + found.sums])


def _replaced(found: _Classifier) -> dict[Node, Node]:
    head, update = found
    assert isinstance(head.op, FusedHead) and isinstance(update.op, FusedUpdate)
    op = linear_head_op(head.op, found.biases, found.sums)
    factors = {name: head.attrs[name] for name in ("scale", "dy", "body")}
    with attributed_to(head):
        made = op(*head.inputs, transposed=found.transposed, **factors)
        made.stand_for(head)
    with attributed_to(update):
        parts = [value_of(made, 1 + k) for k in range(update.op.outputs)]
        shapes = [node.spec.shape for node in update.inputs[: len(parts)]]
        made_of = zip(parts, shapes)
        body = close(parts, [in_shape(sum_op(part, axes=0), shape) for part, shape in made_of])
        first = len(update.op.writes)
        inputs = [*update.inputs[:first], *parts, *update.inputs[first + 2 :]]
        summed = summed_update(update.op.update, len(parts))
        attrs = {name: value for name, value in update.attrs.items() if name != "sums"}
        node = Node(summed, inputs, attrs | {"body": body}, f"{summed.name} of {len(parts)}")
        node.stand_for(update)
    return {head: made, update: node}


FUSION = Pass("linear_head", fuse, position=85, needs=(*_KERNELS.values(), "summed_sgd_update"))

"""Scattered sums that are added to an array: one kernel, without an array of the sums.

Pattern: x plus the updates that scatter_add adds to zeros, x as it is or cast from 16 bits; and
with it a cast of the total back to these. So is the gradient of a table whose rows are looked up
and that a product reads as well, as a language model's embedding that is tied to its logits: of
float32, or of 16 bits where ranks add it up.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..arguments.kinds import Instance, Int
from ..arguments.signature import Signature
from ..dtypes import is_narrow
from ..graph.lines import attributed_to
from ..graph.node import Node
from ..graph.spec import FLOAT32
from ..ops.elementwise import add_op, cast_op
from ..passes.pipeline import Options, Pass
from .shared.body import Body, Fused, close
from .shared.rewrite import Graph, Pattern, exchange


class ScatterTo(Fused):
    """Updates by indices, added to x along an axis; float32, x perhaps of 16 bits, and then the
    total too, perhaps.
    """

    fallible = True
    inplace = (2,)
    tolerance = 1e-4
    signature = Signature("updates", "indices", "x", body=Instance(Body), axis=Int())

    def scalars(self, node: Node) -> tuple[int]:
        return (node.attrs["axis"],)


scatter_to_op = ScatterTo("scatter_add_to", any_dtype=(1, 2))
_SCATTER = Pattern("scatter_add", "updates", "indices", name="sums", alone=True)
_SUM = Pattern(add_op, "x", _SCATTER, commutes=True)


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose scattered sums are added where they arise. The graph must be
    the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for total in graph.order:
        found = _SUM.match(graph, total)
        if found is None or total.spec.dtype != FLOAT32:
            continue
        x, sums = found["x"], found["sums"]
        if x.spec.shape != total.spec.shape or x is sums:
            continue
        if x.op is cast_op and is_narrow(x.inputs[0].spec.dtype):
            x = x.inputs[0]
        user = graph.only_user(total)
        if user is not None and _narrows(user):
            if user.spec.dtype != x.spec.dtype:
                continue  # a pointwise program makes it together with the addition
            total = user
        inputs = found["updates"], found["indices"], x
        axis = sums.attrs["axis"] % len(total.spec.shape)
        with attributed_to(total):
            made = scatter_to_op(*inputs, body=close(inputs, (total,)), axis=axis)
        made.stand_for(total)
        replaced[total] = made
    return exchange(fetches, replaced)


def _narrows(node: Node) -> bool:
    """True of a cast to 16 bits."""
    return node.op is cast_op and is_narrow(node.spec.dtype)


FUSION = Pass("scattered", fuse, position=58, needs=("scatter_add_to",))

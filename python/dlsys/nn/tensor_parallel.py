"""Linear layers whose weight is divided among ranks: tensor parallelism (Shoeybi et al., 2019).

Every rank feeds the same batch. A ColumnLinear makes this rank's part of the outputs of inputs that
all ranks have; a RowLinear takes its part of the inputs, and adds up what all ranks make of theirs.
One after the other, with an activation between them, they take one sum over ranks.
"""

from __future__ import annotations

from .. import functional as F
from ..arguments.kinds import Bool, Instance
from ..arguments.signature import declared
from ..dist.collectives import all_reduce_op
from ..dist.group import Group
from ..dist.shard import Slice
from ..errors import GraphError
from ..graph.node import Node
from ..init import Initializer, Rng, he_normal, zeros
from ..ops.leaf import Parameter
from .layers import DRAWN, SIZE, drawn
from .module import Module


class DividedLinear(Module):
    """Base of both layers. The complete weight is drawn on rank 0, so that ranks agree."""

    divided: int  # the axis of the weight (outputs, inputs) that is cut

    @declared(inputs=SIZE, outputs=SIZE, bias=Bool(), group=Instance(Group), **DRAWN)
    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        *,
        group: Group,
        initializer: Initializer = he_normal,
        rng: Rng = None,
    ) -> None:
        what, cut = type(self).__name__, (outputs, inputs)[self.divided]
        if cut % group.size:
            raise GraphError(
                f"{what}: {group.size} ranks do not divide {cut} "
                f"{('outputs', 'inputs')[self.divided]}; expected a multiple"
            )
        weight = group.broadcast(drawn(what, initializer, (outputs, inputs), rng))
        self.group = group
        self.weight = Slice(weight, "weight", group, self.divided)
        self.bias = self._bias(outputs) if bias else None

    def _bias(self, outputs: int) -> Parameter:
        raise NotImplementedError

    def options(self) -> str:
        outputs, inputs = self.weight.saved_shape
        bias = ", bias=False" if self.bias is None else ""
        return f"{inputs}, {outputs}{bias}, group={self.group}"


class ColumnLinear(DividedLinear):
    """A Linear of which each rank computes a part of the outputs: x (…, inputs), the same on all
    ranks, to (…, outputs / ranks).

    initializer: a function of `init`, which draws the complete weight. GraphError where the ranks
    do not divide the outputs.
    """

    divided = 0

    def _bias(self, outputs: int) -> Parameter:
        return Slice(zeros((outputs,)), "bias", self.group, 0)

    def forward(self, x: Node) -> Node:
        return F.linear(x, self.weight, self.bias)


class RowLinear(DividedLinear):
    """A Linear of which each rank has a part of the inputs, as ColumnLinear makes them: x (…,
    inputs / ranks) to (…, outputs), the same on all ranks.

    initializer: a function of `init`, which draws the complete weight. GraphError where the ranks
    do not divide the inputs.
    """

    divided = 1

    def _bias(self, outputs: int) -> Parameter:
        return Parameter(zeros((outputs,)), "bias")

    def forward(self, x: Node) -> Node:
        y = all_reduce_op(F.linear(x, self.weight, None), group=self.group)
        return y if self.bias is None else y + self.bias

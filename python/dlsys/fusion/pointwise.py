"""fuse_chain: one kernel in place of elementwise operators that feed each other.

The nodes of a chain share one shape, and only its last value is read elsewhere: the others never
reach memory. That saves a launch for each of the few numbers that a learning rate's formula has,
and a trip through memory for each operator on large arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.lines import attributed_to
from ..graph.node import Node
from ..graph.spec import FLOAT32
from ..ops.comparison import BOOL
from ..passes.rewrite import Graph, exchange
from .pointwise_op import INPUTS, INSTRUCTIONS, NUMBERS, chain_op, computes, operands

_SMALL = 1 << 20  # bytes that are not worth the care for how long they live
Reads = tuple[list[Node], set[str]]  # the nodes and the numbers that a chain has for operands
_NEAR = 2 * INSTRUCTIONS  # nodes that are looked at to tell whether a value lives longer


def fuse_chains(fetches: Sequence[Node]) -> list[Node]:
    """The fetches over a graph with its elementwise chains fused. The graph, simplified for native
    devices, must be the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    replaced = {}
    for chain in _chains(graph):
        last = chain.last
        with attributed_to(last):
            made = chain_op(*chain.inputs, output=last, name=last.name)
            made.stand_for(last)
            replaced[last] = made
    return exchange(fetches, replaced)


class _Chain:
    """Nodes that become one; found from the last to the first."""

    def __init__(self, last: Node) -> None:
        self.last = last
        self.nodes: set[Node] = set()
        self.inputs: list[Node] = []
        self.numbers: set[str] = set()
        self.add(last, self.reads_with(last))

    def add(self, node: Node, reads: Reads) -> None:
        """Takes a node in; `reads` are those that it then has."""
        self.nodes.add(node)
        self.inputs, self.numbers = reads

    def has_room(self, reads: Reads) -> bool:
        """Whether one more node fits, with which it reads this."""
        inputs, numbers = reads
        fits = len(inputs) <= INPUTS and len(numbers) <= NUMBERS
        return fits and len(self.nodes) < INSTRUCTIONS

    def reads_with(self, node: Node) -> Reads:
        """What it reads when the node is one of it."""
        read = operands(node)
        found = dict.fromkeys([*self.inputs, *(x for x in read if isinstance(x, Node))])
        found.pop(node, None)
        return list(found), self.numbers | {repr(x) for x in read if isinstance(x, float)}


def _chains(graph: Graph) -> list[_Chain]:
    """Chains of two nodes or more that read something. A node joins the chain that all its users
    belong to; so nothing between two nodes of a chain is outside of it, and no cycle arises.
    """
    chain_of: dict[Node, _Chain] = {}
    for node in reversed(graph.order):
        if not computes(node):
            continue
        chain = _only_chain(graph, chain_of, node)
        reads = chain.reads_with(node) if chain is not None else ([], set())
        if chain is not None and chain.has_room(reads) and not _keeps_more(graph, chain, node):
            chain.add(node, reads)
            chain_of[node] = chain
        elif node.spec.dtype in (FLOAT32, BOOL):
            chain_of[node] = _Chain(node)
    found = dict.fromkeys(chain_of.values())
    return [chain for chain in found if len(chain.nodes) > 1 and chain.inputs]


def _only_chain(graph: Graph, chain_of: dict[Node, _Chain], node: Node) -> _Chain | None:
    """The chain of all users of a node, where its value can stay inside."""
    chains = {chain_of.get(user) for user in graph.users[node]}
    chain = chains.pop() if len(chains) == 1 else None
    if chain is None or graph.is_fetched(node) or chain.last.spec.shape != node.spec.shape:
        return None
    if node.spec.dtype in (FLOAT32, BOOL):
        return chain
    converted = all(user.spec.dtype == FLOAT32 for user in graph.users[node])  # casts
    return chain if converted else None


def _keeps_more(graph: Graph, chain: _Chain, node: Node) -> bool:
    """Whether memory would be held for longer: where a node reads more bytes than it makes, and
    others run between it and the end of the chain.
    """
    own, inside = node.spec.nbytes, {node, *chain.nodes}
    read = {x for x in node.inputs if not x.op.leaf and x not in inside}
    if own <= _SMALL or sum(x.spec.nbytes for x in read) <= own:
        return False
    first, last = graph.position[node], graph.position[chain.last]
    between = graph.order[first : min(last, first + _NEAR)]
    return last > first + _NEAR or any(not (x in inside or x.op.leaf or x.op.view) for x in between)

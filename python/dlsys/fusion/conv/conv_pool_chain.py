"""Chains of small convolutions, relu and max-pools as one operator forward and one back, for numpy,
which takes a few images at a time through all of them (`ops/conv/tiles.py`).

Pattern: the convolutions that `conv_pool` fused, each the only reader of the one before it but for
its gradients, and the gradients of each, all of one dy, which for all layers but the last is the
gradient of the next one's data. A convolution alone is a chain too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from operator import is_
from typing import Any, NamedTuple, cast

import numpy as np

from ...arguments.kinds import Instance
from ...arguments.signature import Signature
from ...graph.lines import attributed_to
from ...graph.node import Node
from ...graph.spec import FLOAT32, Spec
from ...ops.conv.tiles import (
    UNKNOWN,
    Gradients,
    Kept,
    Layer,
    Layers,
    Scratch,
    backward,
    forward,
    sums_spec,
)
from ...passes.pipeline import Options, Pass
from ..shared.body import Body, Fused, close
from ..shared.conv_pool_operators import (
    conv_pool_data_gradient_op,
    conv_pool_filter_bias_gradient_op,
    conv_pool_filter_gradient_op,
    conv_pool_op,
)
from ..shared.rewrite import Graph, exchange, value_of

Array = np.ndarray


# ---- the operators ----


class ThreadScratch:
    """The scratch of each thread. Its views are made when the memory is not that of the call
    before; in a plan it always is.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._memory: Sequence[Array] = ()
        self._made: list[Scratch] = []

    def of(self, memory: Sequence[Array]) -> list[Scratch]:
        """That in a memory, which has a row for each thread."""
        if len(memory) != len(self._memory) or not all(map(is_, memory, self._memory)):
            self._memory = memory
            self._made = [Scratch(self._layers, *each) for each in zip(*memory)]
        return self._made


class ConvPoolChain(Fused):
    """Base of the operators of a chain. Attributes: body, layers (a tuple of `Layer`)."""

    tolerance = 1e-4
    shares = True

    def __init__(self, name: str, outputs: int, **kinds: Any) -> None:
        super().__init__(name, outputs)
        kinds |= dict(body=Instance(Body), layers=Instance(tuple))
        self.signature = Signature("*inputs", **kinds)

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        if inputs[0].dtype != FLOAT32:
            return []
        return Scratch.specs(node.attrs["layers"], inputs[0].shape[0])

    def numpy(self, node: Node, *arrays: Array) -> None:
        self.bound(node)(*arrays)

    def bound(self, node: Node) -> Callable[..., None]:
        return partial(self.run, node, ThreadScratch(node.attrs["layers"]))

    def run(self, node: Node, scratch: ThreadScratch, *arrays: Array) -> None:
        """The numpy form, with what is made of its scratch."""
        super().numpy(node, *arrays)


class ConvPoolChainForward(ConvPoolChain):
    """x (N, C, H, W), and the filter and perhaps bias of each layer → the maxima (N, O, oH, oW) of
    the last, and what the way back needs, as `Kept` has it, which is numpy's own affair: the body
    gives the maxima alone.
    """

    discrete_outputs = (1, 2)  # there is nothing to compare them with

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, ...]:
        (y,) = cast(tuple[Spec, ...], super().infer(node, *specs))
        return y, *Kept.specs(node.attrs["layers"], specs[0].shape[0])

    def run(self, node: Node, scratch: ThreadScratch, *arrays: Array) -> None:
        count, layers = len(node.inputs), node.attrs["layers"]
        (x, *weights), memory, (y, *kept) = arrays[:count], arrays[count:-3], arrays[-3:]
        if memory:
            operands = _by_layer(layers, weights)
            if forward(layers, x, operands, scratch.of(memory), y, Kept(*kept)):
                return
        super().run(node, scratch, *arrays[:count], y)
        for array, value in zip(kept, (0, UNKNOWN)):
            array.fill(value)


class ConvPoolChainGradient(ConvPoolChain):
    """The gradients of `ConvPoolChainForward`, of x, dy, filters and biases as these are there, and
    what it kept → for each layer those of filter and, where `biases` has it, bias; with one more
    output that of x. The body computes all layers forward again.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__("conv2d_pool_chain_gradient", outputs, biases=Instance(tuple))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        memory = super().workspace(node, inputs, outputs)
        return memory and [*memory, sums_spec(node.attrs["layers"], inputs[0].shape[0])]

    def run(self, node: Node, scratch: ThreadScratch, *arrays: Array) -> None:
        count, layers, biases = len(node.inputs), node.attrs["layers"], node.attrs["biases"]
        (x, dy, *weights), kept = arrays[: count - 2], Kept(*arrays[count - 2 : count])
        memory, made = [*arrays[count : -self.outputs]], arrays[-self.outputs :]
        if memory and not np.any(kept.codes[:1, :1] == UNKNOWN):
            values = iter(made)
            pairs = [(next(values), next(values) if has else None) for has in biases]
            of_filters, of_biases = zip(*pairs)
            gradients = Gradients(of_filters, of_biases, next(values, None))
            filters = [f for f, _ in _by_layer(layers, weights)]
            *memory, sums = memory
            if backward(layers, (x, dy), filters, scratch.of(memory), sums, kept, gradients):
                return
        super().run(node, scratch, *arrays[:count], *made)

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        again = [s for s in node.attrs["body"].steps if s.op is conv_pool_op]
        twice = sum(s.op.cost(s, [x.spec for x in s.inputs], s.spec) for s in again)
        return super().cost(node, inputs, output) - twice


conv_pool_chain_op = ConvPoolChainForward("conv2d_pool_chain", 3)


@lru_cache
def conv_pool_chain_gradient_op(outputs: int) -> ConvPoolChainGradient:
    """The operator of so many gradients."""
    return ConvPoolChainGradient(outputs)


def _by_layer(layers: Layers, weights: Iterable[Array]) -> list[tuple[Array, Array | None]]:
    """The filter and bias of each layer."""
    values = iter(weights)
    return [(next(values), next(values) if layer.bias else None) for layer in layers]


# ---- the pattern ----


class Way(NamedTuple):
    """The gradients of a convolution, of one dy."""

    filter: Node
    data: Node | None

    @property
    def dy(self) -> Node:
        return self.filter.inputs[1]


class Link(NamedTuple):
    """A fused convolution and its ways back."""

    node: Node
    ways: list[Way]

    @property
    def layer(self) -> Layer:
        """What it computes."""
        g = self.node.attrs["geometry"]
        sizes = g.channels, g.filters, g.plane, g.size, g.before, g.window, g.out
        return Layer(*sizes, self.node.attrs["relu"], len(self.node.inputs) == 3)


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose chains are fused. The graph must be the executor's own, after
    `conv_pool`: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for chain in _chains(graph):
        _fuse(graph, chain, replaced)
    return exchange(fetches, replaced)


def _chains(graph: Graph) -> Iterator[list[Link]]:
    links = {node: _link(graph, node) for node in graph.order if node.op is conv_pool_op}
    taken: set[Node] = set()
    for node, link in links.items():
        if node in taken or link is None:
            continue
        chain = [link]
        while (following := _following(graph, chain[-1], links)) is not None:
            chain.append(following)
        taken.update(each.node for each in chain)
        yield chain


_FILTER = conv_pool_filter_gradient_op, conv_pool_filter_bias_gradient_op


def _link(graph: Graph, node: Node) -> Link | None:
    """A convolution with its ways back; None where these are not a filter's gradient each, and
    perhaps one of the data.
    """
    code = _value(graph, node, 1)
    users = list(graph.users[code]) if code is not None else []
    ways = []
    for user in users:
        if user.op in _FILTER:
            data = [d for d in users if d.op is conv_pool_data_gradient_op]
            data = [d for d in data if d.inputs[1] is user.inputs[1]]
            ways.append(Way(user, data[0] if data else None))
    told = sum(1 + (way.data is not None) for way in ways)
    return Link(node, ways) if told == len(users) else None


def _value(graph: Graph, node: Node, index: int) -> Node | None:
    """A value of an operator with several, where anybody reads it."""
    found = [value for value in graph.users[node] if value.attrs["index"] == index]
    return found[0] if found else None


def _following(graph: Graph, link: Link, links: dict[Node, Link | None]) -> Link | None:
    """The next link of a chain."""
    y = _value(graph, link.node, 0)
    if y is None or graph.is_fetched(y):
        return None
    readers = [links[user] for user in graph.users[y] if user.op is conv_pool_op]
    following = readers[0] if len(readers) == 1 else None
    if following is None or following.node.inputs[0] is not y:
        return None
    if len(link.ways) != len(following.ways) or len(link.ways) > 1:
        return None
    known = {following.node, *(way.filter for way in following.ways)}
    if not known.issuperset(graph.users[y]):
        return None
    for way, back in zip(link.ways, following.ways):
        readers_of_data = {way.filter, way.data}
        if back.data is None or way.dy is not back.data or graph.is_fetched(back.data):
            return None
        if not readers_of_data.issuperset(graph.users[back.data]):
            return None
    return following


# ---- what comes of it ----


def _fuse(graph: Graph, chain: list[Link], replaced: dict[Node, Node]) -> None:
    layers = tuple(link.layer for link in chain)
    first, last = chain[0].node, chain[-1].node
    weights = [x for link in chain for x in link.node.inputs[1:]]
    y = _value(graph, last, 0)
    with attributed_to(first):
        inputs = first.inputs[0], *weights
        body = close(inputs, (value_of(last, 0) if y is None else y,))
        made = conv_pool_chain_op(*inputs, body=body, layers=layers)
        made.stand_for(first)
        if y is not None:
            replaced[y] = value_of(made, 0, y)
        kept = value_of(made, 1), value_of(made, 2)
    for k in range(len(chain[-1].ways)):
        ways = [link.ways[k] for link in chain]
        values = [value for way in ways for value in _values(graph, way)]
        values += [ways[0].data] if ways[0].data is not None else []
        with attributed_to(ways[0].filter):
            inputs = first.inputs[0], ways[-1].dy, *weights, *kept
            made = conv_pool_chain_gradient_op(len(values))(
                *inputs,
                body=close(inputs, values),
                layers=layers,
                biases=tuple(way.filter.op.outputs == 2 for way in ways),
            )
            made.stand_for(ways[-1].filter)
        for index, value in enumerate(values):
            replaced[value] = made if len(values) == 1 else value_of(made, index, value)


def _values(graph: Graph, way: Way) -> list[Node]:
    """The gradients of filter and perhaps bias."""
    if way.filter.op.outputs == 1:
        return [way.filter]
    found = (_value(graph, way.filter, index) for index in range(2))
    return [value_of(way.filter, k) if v is None else v for k, v in enumerate(found)]


FUSION = Pass("conv_pool_chain", fuse, position=11, needs=("conv2d_pool_chain",))

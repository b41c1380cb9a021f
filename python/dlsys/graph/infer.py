"""The inference of shapes and dtypes of a whole graph from those of its feeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ShapeError
from .node import Node
from .spec import FLOAT32, FLOAT64, Spec


def infer(
    order: Iterable[Node], leaves: Mapping[Node, Spec], native: bool = False
) -> dict[Node, Any]:
    """The spec of every node of a topological order, with no execution.

    `leaves` gives the specs of feeds and of state whose storage decided them. On native devices
    undeclared float64 becomes float32, the one floating dtype there. Raises ShapeError naming the
    operator, the rule and what it got.
    """
    specs: dict[Node, Any] = {}
    for node in order:
        spec = leaves.get(node) or node.spec
        if type(spec) is not Spec or spec.dtype is None:
            spec = node.op.infer(node, *[specs[x] for x in node.inputs])
        if native:
            spec = (
                _narrow(node, spec)
                if isinstance(spec, Spec)
                else tuple(_narrow(node, s) for s in spec)
            )
        specs[node] = spec
    return specs


def _narrow(node: Node, spec: Spec) -> Spec:
    if spec.dtype != FLOAT64:
        return spec
    if spec.declared and node.op.leaf:
        raise ShapeError(
            f"{node.name} is declared float64, but native devices compute in float32: declare "
            f"float32, or run on numpy (ctx=None) [{node.where}]"
        )
    return spec._replace(dtype=FLOAT32)

"""The inference of shapes and dtypes of a whole graph from those of its feeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..dtypes import bfloat16
from ..errors import ShapeError
from .node import Node
from .spec import FLOAT32, FLOAT64, Spec


def infer(
    order: Iterable[Node], leaves: Mapping[Node, Spec], native: bool = False
) -> dict[Node, Any]:
    """The spec of every node of a topological order, with no execution.

    `leaves` gives the specs of feeds and of state whose storage decided them. A device holds some
    dtypes as others: undeclared float64 becomes float32 on native ones, and bfloat16 on numpy.
    Raises ShapeError naming the operator, the rule and what it got.
    """
    held = _on_native if native else _on_numpy
    specs: dict[Node, Any] = {}
    for node in order:
        spec = leaves.get(node) or node.spec
        if type(spec) is not Spec or spec.dtype is None:
            spec = node.op.infer(node, *[specs[x] for x in node.inputs])
        if not isinstance(spec, Spec):
            spec = tuple([held(node, s) for s in spec])
        elif spec.dtype is not FLOAT32:  # which every device holds as it is
            spec = held(node, spec)
        specs[node] = spec
    return specs


def _on_numpy(node: Node, spec: Spec) -> Spec:
    return spec._replace(dtype=FLOAT32) if spec.dtype is bfloat16 else spec


def _on_native(node: Node, spec: Spec) -> Spec:
    if spec.dtype != FLOAT64:
        return spec
    if spec.declared and node.op.leaf:
        raise ShapeError(
            f"{node.name} is declared float64, but native devices compute in float32: declare "
            f"float32, or run on numpy (ctx=None) [{node.where}]"
        )
    return spec._replace(dtype=FLOAT32)

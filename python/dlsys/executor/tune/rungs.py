"""rungs: selects which rung of its ladder each product and convolution runs by.

A node's own `algo` counts, else the setting of its ladder (DLSYS_GEMM, DLSYS_CONV). The pass stands
before the fusions, which take a node with a rung only where the fused kernel has that rung too; a
node without the attribute is left to the heuristics and to the autotuner.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...dtypes import is_integral
from ...errors import NotApplicableError
from ...graph.node import Node, find_topo_sort
from ...graph.spec import Spec
from ...passes.pipeline import Options, Pass
from ...rungs import AUTO, Algorithm
from ...runtime.target import Target
from ...settings import settings


def select_rungs(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The nodes of an executor's own graph, each with its rung as `algo`, or without for auto.

    NotApplicableError, which lists those that there are, where the target lacks a node's rung.
    """
    for node in find_topo_sort(fetches):
        if node.op.ladder is not None:
            _select(node, options.target)
    return list(fetches)


def _select(node: Node, target: Target) -> None:
    ladder = node.op.ladder
    assert ladder is not None
    own = node.attrs.get("algo")
    rung = own or getattr(settings, ladder.setting)
    if own is None and _is_integral(node):
        rung = AUTO  # a setting is about floats
    attrs = {name: value for name, value in node.attrs.items() if name != "algo"}
    if rung != AUTO:
        there = target.rungs(node.op.kernel) if target.native else ladder.numpy
        if rung not in there or _is_integral(node):
            raise _refusal(node, rung, target, own is not None, there)
        attrs["algo"] = rung
        if not target.native:
            attrs["algorithm"] = Algorithm(ladder.numpy.index(rung) + 1, rung)
    node.attrs = attrs


def _is_integral(node: Node) -> bool:
    made = [node.spec] if isinstance(node.spec, Spec) else node.spec
    return any(is_integral(spec.dtype) for spec in made)


def _refusal(
    node: Node, rung: str, target: Target, own: bool, there: Sequence[str]
) -> NotApplicableError:
    assert node.op.ladder is not None
    by = f"algo={rung!r}" if own else f"DLSYS_{node.op.ladder.setting.upper()}={rung}"
    if _is_integral(node):
        why, there = "rungs are for floats, and this is of integers", ()
    else:
        why = f"device {target.name} has no such rung"
    known = ", ".join((AUTO, *there))
    return NotApplicableError(f"{node.op.name}: {by}: {why}; use {known} [{node.where}]")


RUNGS = Pass("rungs", select_rungs, position=2)

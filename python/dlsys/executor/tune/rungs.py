"""rungs: selects which rung of its ladder each node runs by that has one: products, convolutions,
attention, activations, pooling and batch normalization.

A node's own `algo` counts, else the setting of its ladder (DLSYS_GEMM, DLSYS_CONV, …). The pass
stands before the fusions, which take a node with a rung only where the fused kernel has that rung
too; a node without the attribute is left to the heuristics and to the autotuner. A rung that is a
composition of other operators, or an operator of its own, takes the node's place here.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...dtypes import is_integral
from ...errors import NotApplicableError
from ...fusion.shared.rewrite import exchange
from ...graph.lines import attributed_to
from ...graph.node import Node, find_topo_sort
from ...graph.spec import Spec
from ...passes.pipeline import Options, Pass
from ...passes.precision import of_products
from ...passes.simplify import simplify
from ...rungs import AUTO, Algorithm, rung_of
from ...runtime.library import load
from ...runtime.target import Target
from ...settings import settings
from ..run.tables import in_kernel_order


def select_rungs(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The nodes of an executor's own graph, each with its rung as `algo`, or without for auto,
    or as the composition or the operator of its own that this rung is.

    NotApplicableError, which lists those that there are, where the target lacks a node's rung.
    """
    replaced: dict[Node, Node] = {}
    composed: dict[Node, list[Node]] = {}
    cudnn: list[Node] = []
    for node in find_topo_sort(fetches):
        if node.op.ladder is not None:
            _select(node, options.target)
            if node.op.ladder.kernel and "algo" in node.attrs:
                cudnn.append(node)
            if node.op.ladder.composed and _is_composed(node, options):
                with attributed_to(node):
                    composed[node] = node.op.compose(node)
                if node.op.outputs == 1:
                    replaced[node] = composed[node][0]
        elif node.op.projection and node.inputs[0] in composed:
            replaced[node] = composed[node.inputs[0]][node.attrs["index"]]
    if not composed and not cudnn:
        return list(fetches)
    fetches = exchange(fetches, replaced)
    if cudnn:
        from ...fusion.shared.cudnn_operators import by_cudnn  # which few programs need

        fetches = exchange(fetches, by_cudnn(fetches, cudnn))
    specs = {node: node.spec for node in find_topo_sort(fetches)}
    return simplify(specs, fetches, options.target)


def _is_composed(node: Node, options: Options) -> bool:
    """True where a composition computes the node: by its rung, or under auto where the target's
    kernel does not fit.
    """
    target, kernel = options.target, node.op.kernel
    assert node.op.ladder is not None and kernel is not None
    if "algo" in node.attrs:
        return node.attrs["algo"] in node.op.ladder.composed
    if not target.native or not target.has(kernel):
        return target.native
    bare = node.derive(node.inputs, node.spec)
    bare.attrs = {**node.attrs, "precision": of_products(options.precision)}
    signature = load().signature[target.name, kernel].rstrip("s")
    specs = [x.spec for x in node.inputs]
    return not target.fits(kernel, *in_kernel_order(bare, signature, specs, _made(node)))


def _select(node: Node, target: Target) -> None:
    ladder = node.op.ladder
    assert ladder is not None
    own = node.attrs.get("algo")
    rung = settings.rung(ladder, own)
    if own is None and _is_integral(node):
        rung = AUTO  # a setting is about floats
    attrs = {name: value for name, value in node.attrs.items() if name != "algo"}
    if rung != AUTO:
        there = target.rungs(node.op.kernel) if target.native else ladder.numpy
        if ladder.kernel and target.has(ladder.kernel):
            there = ladder.rungs
        there = tuple(dict.fromkeys((*ladder.composed, *there)))
        there += tuple(one for one in ladder.variants if rung_of(one) in there)
        if rung not in there or _is_integral(node):
            raise _refusal(node, rung, target, own is not None, there)
        attrs["algo"] = rung
        if not target.native:
            attrs["algorithm"] = Algorithm(there.index(rung) + 1, rung)
    node.attrs = attrs


def _is_integral(node: Node) -> bool:
    return is_integral(_made(node)[0].dtype)  # of several, which a maximum's index may be among


def _made(node: Node) -> Sequence[Spec]:
    """The specs of what a node makes."""
    return [node.spec] if isinstance(node.spec, Spec) else node.spec


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

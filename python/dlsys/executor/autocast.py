"""autocast: the policy `precision="bf16"`, as casts in the graph; "fp8" begins with it.

Products take and give bfloat16, and so does what follows them: activations and their gradients.
Parameters, slots, running statistics, losses and the results of sums stay float32. Each operator
says by its trait `autocast` which of these it is; docs/precision.md has the families, with reasons:

bf16     its floats are cast to bfloat16, and its result is one.
follow   bfloat16 where an input is, unless another input is a float32 activation.
sum      reads bfloat16 as it comes and gives float32, in which it adds anyway.
reads    takes bfloat16 as it comes; its results are its own, as of an optimizer's rule.
float32  what was cast is cast back.

Casts are ordinary nodes: equal ones are merged, so that a Parameter has one copy for all its
readers, and fusions take them. Fetches keep the dtypes that the user's graph gives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..dtypes import bfloat16, is_narrow
from ..graph.lines import attributed_to
from ..graph.node import Node, find_topo_sort, hooks, same_nodes
from ..graph.spec import FLOAT32, Spec
from ..passes.pipeline import Options, Pass
from ..passes.simplify import simplify
from ..runtime.target import Target


def autocast(fetches: Sequence[Node], target: Target) -> list[Node]:
    """The fetches over a graph under the policy; that of `fetches` is simplified."""
    made = _Policy(fetches).fetches()
    order = find_topo_sort(made)
    made = simplify({node: node.spec for node in order}, made, target)
    return made if target.native else _rounded(made)


class _Policy:
    """The rewrite of one graph. `_new` has what stands for each of its nodes."""

    def __init__(self, fetches: Sequence[Node]) -> None:
        self._fetches = fetches
        self._order = find_topo_sort(fetches)
        self._to_updates = _only_for_updates(self._order, fetches)
        self._new: dict[Node, Node] = {}
        self._casts: dict[tuple[Node, Any], Node] = {}

    def fetches(self) -> list[Node]:
        """What stands for the fetches, in their own dtypes."""
        for node in self._order:
            with attributed_to(node):
                self._new[node] = node if node.op.leaf else self._rewritten(node)
        return [
            self._cast(self._new[node], node.spec.dtype)
            if isinstance(node.spec, Spec) and node.op.outputs
            else self._new[node]
            for node in self._fetches
        ]

    def _rewritten(self, node: Node) -> Node:
        op, inputs = node.op, [self._new[x] for x in node.inputs]
        if op.outputs == 0:
            return node.derive(inputs, node.spec)
        if op.projection:
            return node.derive(inputs, inputs[0].spec[node.attrs["index"]])
        rule = "float32" if node in self._to_updates else op.autocast
        own = [
            k for k, x in enumerate(node.inputs)
            if x.spec.dtype == FLOAT32 and (op.autocast_inputs is None or k in op.autocast_inputs)
        ]  # fmt: skip
        if any(is_narrow(x.spec.dtype) for x in node.inputs):
            rule = "float32"  # the user chose its dtypes
        if rule == "follow":
            rule = self._followed(node, inputs, own)
        if rule == "bf16":
            return self._narrow(node, inputs, own)
        if rule == "reads":
            return self._derived(node, inputs)
        wide = [self._cast(x, before.spec.dtype) for x, before in zip(inputs, node.inputs)]
        if rule == "sum" and not same_nodes(wide, inputs):
            made = node.derive(inputs, node.spec)
            made.attrs = {**node.attrs, "dtype": FLOAT32}
            return made
        return self._derived(node, wide, node.spec)

    def _followed(self, node: Node, inputs: Sequence[Node], own: Sequence[int]) -> str:
        """bf16 where one of the node's own inputs is, and none is a float32 activation."""
        if not any(inputs[k].spec.dtype is bfloat16 for k in own):
            return "float32"
        activations = (
            k for k in own
            if inputs[k].spec.dtype == FLOAT32
            and not _is_given(node.inputs[k])
            and not _is_repeated(node, k)
        )  # fmt: skip
        return "bf16" if next(activations, None) is None else "float32"

    def _narrow(self, node: Node, inputs: list[Node], own: Sequence[int]) -> Node:
        """The node in bfloat16. Where it repeats something float32, such as a mean, it computes in
        float32 and rounds its result: the casts are free in a pointwise program.
        """
        computed = [
            k for k in own
            if inputs[k].spec.dtype == FLOAT32
            and not _is_given(node.inputs[k])
            and _is_repeated(node, k)
        ]  # fmt: skip
        if computed and isinstance(node.spec, Spec) and node.spec.dtype == FLOAT32:
            wide = [self._cast(x, before.spec.dtype) for x, before in zip(inputs, node.inputs)]
            return self._cast(self._derived(node, wide, node.spec), bfloat16)
        cast = [self._cast(x, bfloat16) if k in own else x for k, x in enumerate(inputs)]
        for k, before in enumerate(node.inputs):
            if k not in own:
                cast[k] = self._cast(cast[k], before.spec.dtype)
        return self._derived(node, cast)

    def _derived(self, node: Node, inputs: list[Node], spec: Any = None) -> Node:
        made = node.derive(inputs, spec)
        if spec is None:
            made.spec = node.op.infer(made, *[x.spec for x in inputs])
        return made

    def _cast(self, x: Node, dtype: Any) -> Node:
        """x in a dtype. What moves a Parameter moves its copy, so that there is one of it; what
        was widened is as it was before.
        """
        if x.spec.dtype == dtype or FLOAT32 not in (x.spec.dtype, dtype):
            return x
        key = x, dtype
        if key not in self._casts:
            self._casts[key] = self._cast_anew(x, dtype)
        return self._casts[key]

    def _cast_anew(self, x: Node, dtype: Any) -> Node:
        if x.op.casts and dtype is bfloat16 and x.inputs[0].spec.dtype is bfloat16:
            return x.inputs[0]
        if _moves(x) and _source(x).op.leaf == "state":
            moved = x.derive([self._cast(x.inputs[0], dtype)], x.spec._replace(dtype=dtype))
            return moved
        made: Node = hooks["cast"](x, dtype)
        made.stand_for(x)
        return made


def _moves(node: Node) -> bool:
    """True for one that shows or moves the elements of one value."""
    movement = node.op.movement or node.op.view
    return movement and not node.op.projection and len(node.inputs) == 1


def _source(node: Node) -> Node:
    """The node whose elements a moved one has."""
    while _moves(node):
        node = node.inputs[0]
    return node


def _is_given(node: Node) -> bool:
    """True for Parameters and constants, which take the dtype of what they meet."""
    return node.op.constant_fill or _source(node).op.leaf in ("state", "constant")


def _is_repeated(node: Node, k: int) -> bool:
    """True where an elementwise operator repeats its input k."""
    return node.op.elementwise and node.inputs[k].spec.size < node.spec.size


def _only_for_updates(order: Sequence[Node], fetches: Sequence[Node]) -> set[Node]:
    """The elementwise nodes, views among them, whose values nothing but updates read: sums,
    clippings and averages of the gradients of Parameters, which stay float32.
    """
    users = _users(order)
    found: set[Node] = set()
    kept = set(fetches)
    for node in reversed(order):
        reads = users.get(node, ())
        if (node.op.elementwise or node.op.view) and reads and node not in kept:
            if all(user.op.writes or user in found for user in reads):
                found.add(node)
    return found


def _rounded(fetches: Sequence[Node]) -> list[Node]:
    """The fetches over a graph for numpy, which has no bfloat16: its values are float32 there,
    rounded where kernels store them. What moves or selects them has nothing to round, and what
    only an elementwise operator reads stays in registers there.
    """
    new: dict[Node, Node] = {}
    order = find_topo_sort(fetches)
    users = _users(order)
    kept = set(fetches)
    for node in order:
        inputs = [new[x] for x in node.inputs]
        narrow = isinstance(node.spec, Spec) and node.spec.dtype is bfloat16
        if node.op.casts and node.spec.dtype == FLOAT32 and node.inputs[0].spec.dtype is bfloat16:
            new[node] = inputs[0]
            continue
        new[node] = made = node.derive(inputs, _held(node.spec))
        exact = node.op.casts or _moves(node) or node.op.leaf
        if narrow and not exact and not _in_registers(node, users, kept):
            rounding = hooks["cast"](made, bfloat16)
            rounding.spec = made.spec
            rounding.stand_for(node)
            new[node] = rounding
    return [new[node] for node in fetches]


def _in_registers(node: Node, users: Mapping[Node, list[Node]], kept: set[Node]) -> bool:
    """True where a kernel goes on with a value: the only one that reads it is elementwise."""
    if not (node.op.elementwise or node.op.has_precision):
        return False
    while True:
        reads = users.get(node, [])
        if node in kept or len(reads) != 1:
            return False
        node = reads[0]
        if not node.op.view:
            return node.op.elementwise


def _users(order: Sequence[Node]) -> dict[Node, list[Node]]:
    users: dict[Node, list[Node]] = {}
    for node in order:
        for x in node.inputs:
            users.setdefault(x, []).append(node)
    return users


def _held(spec: Any) -> Any:
    """The spec as numpy holds it."""
    if isinstance(spec, Spec):
        return spec._replace(dtype=FLOAT32) if spec.dtype is bfloat16 else spec
    return spec if spec is None else tuple(map(_held, spec))


def _run(fetches: Sequence[Node], options: Options) -> list[Node]:
    made = autocast(fetches, options.target)
    return hooks["in_fp8"](made) if options.precision == "fp8" else made


AUTOCAST = Pass(
    "autocast", _run, position=5, when=lambda options: options.precision in ("bf16", "fp8")
)

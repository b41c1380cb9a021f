"""simplify: lowers shape-dependent operators, folds constants, drops identities, merges equal
nodes.

Operators state their own rules in `Op.simplify`; this pass applies them until nothing changes, in
one walk.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from ..dtypes import INT64, host, is_integral, is_narrow, storage_dtype
from ..graph.lines import attributed_to
from ..graph.node import Node, hooks, output_op, same_nodes
from ..graph.spec import FLOAT32, Spec
from ..runtime.target import NUMPY, Target


def simplify(
    specs: Mapping[Node, Any], fetches: Sequence[Node], target: Target = NUMPY
) -> list[Node]:
    """The fetches over a new graph whose nodes all carry their spec; the user's graph is left
    alone.

    `specs` has the spec of each node, in a topological order. For a native target it also inserts
    the casts that kernels need: an operator over floats of 16 bits whose kernel is not for them is
    computed in float32, and integers are computed in int64.
    """
    rewriter = _Rewriter(target)
    new: dict[Node, Node] = {}
    for node, spec in specs.items():
        derived = node.derive([new[x] for x in node.inputs], spec)
        new[node] = rewriter.canonicalize(derived)
    return [new[node] for node in fetches]


class _Rewriter:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._canonical: dict[Node, Node] = {}
        self._equal: dict[tuple, Node] = {}

    def canonicalize(self, node: Node) -> Node:
        """The canonical form of a node whose inputs have theirs."""
        known = self._canonical.get(node)
        if known is not None:
            return known
        key = self._key(node)
        merged = self._equal.get(key) if key is not None else None
        if merged is None:
            merged = self._rewrite(node)
            if key is not None:
                self._equal[key] = merged
        self._canonical[node] = self._canonical[merged] = merged
        return merged

    def _rewrite(self, node: Node) -> Node:
        if node.op.leaf:
            return node
        with attributed_to(node):
            simpler = node.op.simplify(node)
            if simpler is None:
                simpler = _fold(node)
        if simpler is not None:
            assert simpler.spec[:2] == node.spec[:2], f"{node!r} became {simpler!r}"
            return self._canonicalize_new(simpler, node)
        return self._native_form(node) if self._target.native else node

    def _canonicalize_new(self, node: Node, made_for: Node) -> Node:
        """A node that a rule made in canonical form, its new inputs first: a few nodes deep."""
        canonical = self._canonical
        if node in canonical:
            return canonical[node]
        inputs = [
            canonical[x] if x in canonical else self._canonicalize_new(x, made_for)
            for x in node.inputs
        ]
        if not same_nodes(inputs, node.inputs):
            node = node.derive(inputs, node.spec)
        node.stand_for(made_for)
        return self.canonicalize(node)

    def _native_form(self, node: Node) -> Node:
        """The node over inputs of the storage type that its kernel takes; in float32, with casts
        around it, where there is a kernel for that alone.
        """
        op = node.op
        if op is output_op:
            return self._selected(node)
        if op.kernel is None:
            return node
        dtypes = [x.spec.dtype for x in node.inputs] + [s.dtype for s in _outputs(node)]
        if dtypes.count(FLOAT32) == len(dtypes):
            return node
        dtype = storage_dtype(dtypes)
        known = dtype is FLOAT32 or self._target.has(op.kernel, dtype)
        if not known and self._target.has(op.kernel) and not op.writes:
            narrow = {k for k, x in enumerate(node.inputs) if is_narrow(x.spec.dtype)}
            return self._in_dtype(node, narrow, FLOAT32)
        if op.any_dtype is True:
            return node
        if isinstance(node.spec, Spec) and is_integral(node.spec.dtype):
            other = {k for k, x in enumerate(node.inputs) if x.spec.dtype != INT64}
            int64_alone = node.spec.dtype == INT64 and not other
            if int64_alone or not self._target.has(op.kernel, INT64):
                return node  # for its kernel of int64, or its numpy form on the host
            return self._in_dtype(node, other, INT64)
        free = op.any_dtype or ()
        wrong = {k for k, x in enumerate(node.inputs) if x.spec.dtype not in (dtype, FLOAT32)}
        return self._with_casts(node, wrong.difference(free), dtype)

    def _with_casts(self, node: Node, which: Container[int], dtype: Any) -> Node:
        inputs = list(node.inputs)
        for k, x in enumerate(inputs):
            if k in which:
                inputs[k] = self._cast(x, dtype, node)
        return node if same_nodes(inputs, node.inputs) else node.derive(inputs, node.spec)

    def _cast(self, x: Node, dtype: Any, made_for: Node) -> Node:
        with attributed_to(made_for):
            return self._canonicalize_new(hooks["cast"](x, dtype), made_for)

    def _in_dtype(self, node: Node, which: Container[int], dtype: Any) -> Node:
        """The operator with these inputs cast to a wider dtype, and its output cast back; those of
        several outputs are cast where they are selected. Modulo 2^n the sums and products of
        smaller integers are those of int64.
        """
        wide = self._with_casts(node, which, dtype)
        if not isinstance(node.spec, Spec):
            return self.canonicalize(wide.derive(wide.inputs, tuple(map(_wide, node.spec))))
        made = _wide(node.spec) if dtype is FLOAT32 else node.spec._replace(dtype=dtype)
        if made.dtype == node.spec.dtype:
            return self.canonicalize(wide)
        return self._cast(self.canonicalize(wide.derive(wide.inputs, made)), node.spec.dtype, node)

    def _selected(self, node: Node) -> Node:
        made = node.inputs[0].spec[node.attrs["index"]]
        if made.dtype == node.spec.dtype:
            return node
        return self._cast(self.canonicalize(node.derive(node.inputs, made)), node.spec.dtype, node)

    def _key(self, node: Node) -> tuple | None:
        """The key that equal nodes share; None for those that are never merged."""
        op = node.op
        if op.leaf or op.writes or op.random or (op.kernel is None and not op.view):
            return None
        attrs: tuple = ()
        if node.attrs:
            attrs = tuple([(name, repr(node.attrs[name])) for name in sorted(node.attrs)])
        return (op, node.spec, tuple(map(id, node.inputs)), attrs)


def _outputs(node: Node) -> tuple[Spec, ...]:
    return (node.spec,) if isinstance(node.spec, Spec) else node.spec


def _wide(spec: Spec) -> Spec:
    return spec._replace(dtype=FLOAT32) if is_narrow(spec.dtype) else spec


def _fold(node: Node) -> Node | None:
    """Arithmetic on known constants: everything that depends on filled arrays only."""
    op = node.op
    if not (op.elementwise or op.movement) or not node.inputs:
        return None
    if not all(x.op.constant_fill for x in node.inputs):
        return None
    value = node.inputs[0].attrs["value"]
    if op.elementwise:
        inputs = [np.full((), x.attrs["value"], host(x.spec.dtype)) for x in node.inputs]
        output = np.empty((), host(node.spec.dtype))
        scratch = [
            np.empty(s.shape, s.dtype) for s in op.workspace(node, [], [Spec((), output.dtype)])
        ]
        with np.errstate(all="ignore"):
            op.numpy(node, *inputs, *scratch, output)
        value = output.item()
    return hooks["full"](node.spec.shape, value, node.spec.dtype)

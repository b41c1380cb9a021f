"""The extents of attention, and the rule that its arrays fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...dtypes import is_narrow
from ...graph.node import Node
from ...graph.spec import FLOAT32, Spec


class Extra(NamedTuple):
    """What attention reads besides q, k and v, None where it is not there: nodes, specs or
    arrays.
    """

    mask: Any = None  # (L, S), or more axes that broadcast to (N, heads, L, S)
    lengths: Any = None  # (N,): keys of each sample
    query_lengths: Any = None  # (N,)
    step: Any = None  # of the draw that drops weights


class Problem(NamedTuple):
    """q (batch, heads, rows, size), k (batch, kv_heads, columns, size) and v (batch, kv_heads,
    columns, value_size), where each head of k and v serves `group` heads of q.
    """

    batch: int
    heads: int
    kv_heads: int
    rows: int
    columns: int
    size: int
    value_size: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads if self.kv_heads else 1

    @classmethod
    def of(cls, node: Node, specs: Sequence[Spec], extra: Extra) -> Problem:
        """The extents of a node's arrays. ShapeError where they do not fit."""
        q, k, v = (spec.shape for spec in specs)
        given = f"q {q}, k {k} and v {v}"
        if not len(q) == len(k) == len(v) == 4:
            raise node.error(f"expected q, k and v (N, heads, positions, size), got {given}")
        if k[:3] != v[:3] or k[0] != q[0] or k[3] != q[3]:
            raise node.error(
                f"expected q (N, heads, L, d), k (N, heads, S, d) and v (N, heads, S, dv), got "
                f"{given}"
            )
        if q[1] != k[1] and (k[1] == 0 or q[1] % k[1]):
            raise node.error(f"{k[1]} heads of keys do not divide {q[1]} of queries: {given}")
        made = cls(q[0], q[1], k[1], q[2], k[2], q[3], v[3])
        made._check_mask(node, specs[0], extra.mask)
        for what, lengths in (("lengths", extra.lengths), ("query_lengths", extra.query_lengths)):
            made._check_lengths(node, what, lengths)
        return made

    def _check_mask(self, node: Node, q: Spec, mask: Spec | None) -> None:
        if mask is None:
            return
        scores = (self.batch, self.heads, self.rows, self.columns)
        pairs = zip(mask.shape[::-1], scores[::-1])
        if len(mask.shape) > 4 or any(own != 1 and own != wanted for own, wanted in pairs):
            raise node.error(f"the mask {mask.shape} does not broadcast to the scores {scores}")
        narrow = is_narrow(q.dtype) and mask.dtype == FLOAT32
        if mask.dtype is not None and mask.dtype.kind != "b" and mask.dtype != q.dtype:
            if q.dtype is not None and not narrow:
                raise node.error(
                    f"the mask is {mask.dtype}, expected bool, True where a key takes part, or "
                    f"{q.dtype} that is added to the scores"
                )

    def _check_lengths(self, node: Node, what: str, lengths: Spec | None) -> None:
        if lengths is None:
            return
        integral = lengths.dtype is None or lengths.dtype.name in ("int32", "int64")
        if lengths.shape != (self.batch,) or not integral:
            raise node.error(
                f"expected {what} ({self.batch},) of int32 or int64, one for each sample, got "
                f"{lengths.dtype} {lengths.shape}"
            )

"""Attention in numpy, a block of rows and keys at a time, so that memory grows with T, not T²."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..random.philox import words_of
from .problem import Extra

_ROWS, _COLUMNS = 256, 512  # of a block


class Arrays(NamedTuple):
    """Attention's arrays and attributes."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    extra: Extra
    causal: bool
    scale: float
    attrs: dict[str, Any]

    def samples(self) -> Iterator[Samples]:
        """The samples, all at once where they are of one length, else one after the other."""
        batch, rows, columns = self.q.shape[0], self.q.shape[2], self.k.shape[2]
        lengths, query_lengths = self.extra.lengths, self.extra.query_lengths
        if lengths is None and query_lengths is None:
            yield Samples(self, slice(0, batch), rows, columns)
            return
        for n in range(batch):
            own_rows = rows if query_lengths is None else int(np.clip(query_lengths[n], 0, rows))
            own = columns if lengths is None else int(np.clip(lengths[n], 0, columns))
            yield Samples(self, slice(n, n + 1), own_rows, own)


class Samples:
    """Samples of which the first `rows` queries and the first `columns` keys count; nothing behind
    them is read. Arrays are (samples, kv heads, group, positions, size).
    """

    def __init__(self, arrays: Arrays, at: slice, rows: int, columns: int) -> None:
        self.arrays, self.at, self.rows, self.columns = arrays, at, rows, columns
        self.heads = arrays.q.shape[1]
        self.kv_heads = arrays.k.shape[1]
        self.q = self.by_group(arrays.q)
        self.k, self.v = (x[at, :, None] for x in (arrays.k, arrays.v))

    def by_group(self, x: np.ndarray) -> np.ndarray:
        """An array (N, heads, …) as (samples, kv heads, group, …), a view."""
        x = x[self.at]
        group = self.heads // max(self.kv_heads, 1)
        return x.reshape(x.shape[0], self.kv_heads, group, *x.shape[2:])

    def row_blocks(self) -> Iterator[slice]:
        """The blocks of the rows that count."""
        for begin in range(0, self.rows, _ROWS):
            yield slice(begin, min(begin + _ROWS, self.rows))

    def column_blocks(self, rows: slice) -> Iterator[slice]:
        """The blocks of the keys that some of these rows see."""
        end = min(self.columns, rows.stop) if self.arrays.causal else self.columns
        for begin in range(0, end, _COLUMNS):
            yield slice(begin, min(begin + _COLUMNS, end))

    def scores(self, rows: slice, columns: slice) -> np.ndarray:
        """The scores of a block, -inf where a key is hidden."""
        keys = np.swapaxes(self.k[..., columns, :], -1, -2)
        scores = np.matmul(self.q[..., rows, :], keys)
        scores *= self.arrays.scale
        mask = self.arrays.extra.mask
        if mask is not None:
            part = self._masks(mask, rows, columns)
            if mask.dtype == bool:
                np.copyto(scores, -np.inf, where=~part)
            else:
                scores += part
        if self.arrays.causal:
            later = np.arange(columns.start, columns.stop) > np.arange(*_range(rows))[:, None]
            np.copyto(scores, -np.inf, where=later)
        return scores

    def _masks(self, mask: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
        q, k = self.arrays.q, self.arrays.k
        full = np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))
        return self.by_group(full[:, :, rows, columns])

    def factors(self, rows: slice, columns: slice) -> np.ndarray | None:
        """What dropout multiplies the weights of a block by, None without it."""
        attrs, step = self.arrays.attrs, self.arrays.extra.step
        if step is None:
            return None
        of_rows, of_columns = self.arrays.q.shape[2], self.arrays.k.shape[2]
        first = np.arange(*_range(self.at))[:, None] * self.heads + np.arange(self.heads)
        row = first[:, :, None] * of_rows + np.arange(*_range(rows))
        elements = row[..., None] * of_columns + np.arange(*_range(columns))
        made = words_of(attrs["seed"], step.item(), attrs["node"], elements)
        factors = (made < np.uint64(attrs["threshold"])) * self.arrays.q.dtype.type(attrs["keep"])
        return factors.reshape(len(first), self.kv_heads, -1, *factors.shape[2:])


def _range(at: slice) -> tuple[int, int]:
    return at.start, at.stop


def _exponentials(scores: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """exp(scores - shift), in place; 0 where a row has seen no key yet and its shift is -inf."""
    scores -= np.where(np.isneginf(shift), 0, shift)
    return np.exp(scores, out=scores)


def forward(arrays: Arrays, y: np.ndarray, lse: np.ndarray) -> None:
    """Writes the output, and the logarithm of the sum of each row."""
    y.fill(0)
    lse.fill(-np.inf)
    for samples in arrays.samples():
        to_y, to_lse = samples.by_group(y), samples.by_group(lse)
        for rows in samples.row_blocks():
            _forward_rows(samples, rows, to_y[..., rows, :], to_lse[..., rows])


def _forward_rows(samples: Samples, rows: slice, y: np.ndarray, lse: np.ndarray) -> None:
    """The online softmax: what was summed so far is scaled down where a row's maximum grows."""
    largest = np.full((*y.shape[:-1], 1), -np.inf, y.dtype)
    total = np.zeros_like(largest)
    for columns in samples.column_blocks(rows):
        scores = samples.scores(rows, columns)
        grown = np.maximum(largest, scores.max(axis=-1, keepdims=True))
        shrink = _exponentials(largest, grown)
        weights = _exponentials(scores, grown)
        total *= shrink
        total += weights.sum(axis=-1, keepdims=True)
        factors = samples.factors(rows, columns)
        if factors is not None:
            weights *= factors
        y *= shrink
        y += np.matmul(weights, samples.v[..., columns, :])
        largest = grown
    seen = total != 0  # a row that sees no key stays 0
    np.divide(y, total, out=y, where=seen)
    np.log(total, out=lse[..., None], where=seen)
    np.add(lse[..., None], largest, out=lse[..., None], where=seen)


def backward(
    arrays: Arrays, y: np.ndarray, lse: np.ndarray, dy: np.ndarray,
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray,
) -> None:  # fmt: skip
    """Writes the gradients, with each block's weights computed anew from `lse`."""
    for gradient in (dq, dk, dv):
        gradient.fill(0)
    for samples in arrays.samples():
        of_q, of_k, of_v = samples.by_group(dq), dk[samples.at], dv[samples.at]
        ys, sums, dys = (samples.by_group(x) for x in (y, lse, dy))
        for rows in samples.row_blocks():
            dys_ = dys[..., rows, :]
            row_sums = np.einsum("...d,...d->...", dys_, ys[..., rows, :])[..., None]
            for columns in samples.column_blocks(rows):
                weights = _exponentials(samples.scores(rows, columns), sums[..., rows, None])
                d_weights = np.matmul(dys_, np.swapaxes(samples.v[..., columns, :], -1, -2))
                factors = samples.factors(rows, columns)
                used = weights if factors is None else weights * factors
                if factors is not None:
                    d_weights *= factors
                d_scores = weights * (d_weights - row_sums) * arrays.scale
                of_q[..., rows, :] += np.matmul(d_scores, samples.k[..., columns, :])
                queries = samples.q[..., rows, :]
                of_k[..., columns, :] += _summed(d_scores, queries)
                of_v[..., columns, :] += _summed(used, dys_)


def _summed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """aᵀ b, summed over the heads of a group."""
    return np.matmul(np.swapaxes(a, -1, -2), b).sum(axis=2)

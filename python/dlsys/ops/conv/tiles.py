"""Convolution with the max-pool behind it in numpy, images innermost: a chunk of images is laid out
(C, H, W, images), so that every slice of it is long runs of memory and every product has many
columns. A window of the pool is one column of outputs, (window², O) of them, which one GEMM
computes from the patch of the image that the window sees; its maximum is that of a few slabs.

What the patches of windows meet is copied to columns (C, rows, columns, windows down, windows
across, images), in which a filter occurs once for each position in the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...graph.spec import FLOAT32, Spec
from .geometry import Pair

CHUNK_NBYTES = 3 << 20  # of columns
FEWEST = 16  # images of a chunk: a run of memory is as long
MOST_CHANNELS = 32  # with more, the elements of a patch that a filter does not meet cost too much
CUT = 255  # the code of a window whose maximum relu cut off

UINT8, BOOL = np.dtype(np.uint8), np.dtype(np.bool_)


class Tiles(NamedTuple):
    """A convolution of stride 1 of images (C, *plane) by filters (O, C, *size), and windows over
    it that do not overlap.
    """

    channels: int
    filters: int
    plane: Pair
    size: Pair
    before: Pair  # padding above and to the left
    window: int
    out: Pair  # windows

    @property
    def patch(self) -> Pair:
        """The extents that a window sees."""
        return self.size[0] + self.window - 1, self.size[1] + self.window - 1

    @property
    def steps(self) -> Pair:
        """Rows and columns of windows' corners that patches reach over, in windows."""
        height, width = (n + (p - 1) // self.window for n, p in zip(self.out, self.patch))
        return height, width

    @property
    def k(self) -> int:
        """The elements of a patch."""
        return self.channels * self.patch[0] * self.patch[1]

    @property
    def windows(self) -> int:
        """The windows of an image."""
        return self.out[0] * self.out[1]

    @property
    def positions(self) -> int:
        """The positions in a window."""
        return self.window * self.window

    @property
    def pays(self) -> bool:
        """True where this is no slower than a convolution and a pool."""
        return max(self.channels, self.filters) <= MOST_CHANNELS

    def chunk(self, images: int) -> int:
        """The images of a chunk: chunks are about equal."""
        one = max(self.k * self.windows * FLOAT32.itemsize, 1)
        most = max(CHUNK_NBYTES // one, FEWEST)
        chunks = max(-(-images // most), 1)
        return max(-(-images // chunks), 1)

    def chunks(self, images: int) -> Iterator[slice]:
        """All images in chunks."""
        step = self.chunk(images)
        for start in range(0, images, step):
            yield slice(start, min(start + step, images))


class Scratch:
    """The arrays that a chunk is computed in, of any number of images up to that of a chunk."""

    def __init__(self, tiles: Tiles, count: int, floats: np.ndarray, masks: np.ndarray) -> None:
        self._floats, self._taken = floats, 0
        t, w = tiles, tiles.window
        self.plane = self._take(t.channels, *t.plane, count)
        self.phases = self._take(w, w, t.channels, *t.steps, count)
        self.columns = self._take(t.channels, *t.patch, *t.out, count)
        self.outputs = self._take(w, w, t.filters, *t.out, count)
        self.pooled = self._take(t.filters, *t.out, count)
        shape = t.filters, *t.out, count
        size = self.pooled.size
        self.codes = masks[:size].reshape(shape)
        self.mask = masks[size : 2 * size].reshape(shape).view(BOOL)
        self.open = masks[2 * size : 3 * size].reshape(shape).view(BOOL)

    def _take(self, *shape: int) -> np.ndarray:
        start = self._taken
        self._taken += int(np.prod(shape))
        return self._floats[start : self._taken].reshape(shape)

    @staticmethod
    def specs(tiles: Tiles, images: int) -> list[Spec]:
        """The scratch for a batch: floats, and bytes."""
        t, count = tiles, tiles.chunk(images)
        pooled = t.filters * t.windows
        planes = t.channels * (t.plane[0] * t.plane[1] + t.positions * t.steps[0] * t.steps[1])
        floats = planes + t.k * t.windows + (t.positions + 1) * pooled
        return [Spec((floats * count,), FLOAT32), Spec((3 * pooled * count,), UINT8)]


def forward(
    tiles: Tiles,
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray | None],
    relu: bool,
    floats: np.ndarray,
    masks: np.ndarray,
    y: np.ndarray,
    code: np.ndarray,
) -> bool:
    """The maxima y (N, O, *out) of the convolution of x by f with bias and relu, and the codes of
    their positions, uint8. False, with part of it computed, where a result is NaN, as the zeros
    around filters make of infinities, or where a bias is not finite, which makes maxima equal.
    """
    x, f, bias = arrays
    if bias is not None and not np.isfinite(bias).all():
        return False
    matrix = spread(tiles, f)
    for images in tiles.chunks(len(x)):
        s = Scratch(tiles, images.stop - images.start, floats, masks)
        load(tiles, x[images], s)
        gather(tiles, s)
        np.matmul(matrix, _rows(s.columns, tiles.k), out=_rows(s.outputs, len(matrix)))
        slabs = s.outputs.reshape(tiles.positions, *s.pooled.shape)
        np.max(slabs, axis=0, out=s.pooled)
        if np.isnan(s.pooled, out=s.mask).any():
            return False
        locate(slabs, s)
        if bias is not None:
            np.add(s.pooled, bias[:, None, None, None], out=s.pooled)
        if relu:
            np.maximum(s.pooled, 0, out=s.pooled)
            np.equal(s.pooled, 0, out=s.mask)
            np.copyto(s.codes, CUT, where=s.mask)
        _to_images(s.pooled, y[images])
        _to_images(s.codes, code[images])
    return True


def filter_gradient(
    tiles: Tiles,
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    floats: np.ndarray,
    masks: np.ndarray,
    df: np.ndarray,
    db: np.ndarray | None,
) -> bool:
    """The gradients for filter and bias, of x, dy and the codes. False where dy is not finite."""
    x, dy, code = arrays
    total = np.zeros((tiles.positions * tiles.filters, tiles.k), x.dtype)
    part = np.empty_like(total)
    if db is not None:
        db.fill(0)
    for images in tiles.chunks(len(x)):
        s = Scratch(tiles, images.stop - images.start, floats, masks)
        if not unpool(tiles, dy[images], code[images], s):
            return False
        if db is not None:
            np.add(db, s.pooled.reshape(tiles.filters, -1).sum(axis=1), out=db)
        load(tiles, x[images], s)
        gather(tiles, s)
        np.matmul(_rows(s.outputs, len(part)), _rows(s.columns, tiles.k).T, out=part)
        np.add(total, part, out=total)
    gather_filters(tiles, total, df)
    return True


def data_gradient(
    tiles: Tiles,
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    floats: np.ndarray,
    masks: np.ndarray,
    dx: np.ndarray,
) -> bool:
    """The gradient for the data, of f, dy and the codes. False where f or dy is not finite."""
    f, dy, code = arrays
    if not np.isfinite(f).all():
        return False
    matrix = spread(tiles, f).T
    for images in tiles.chunks(len(dx)):
        s = Scratch(tiles, images.stop - images.start, floats, masks)
        if not unpool(tiles, dy[images], code[images], s):
            return False
        np.matmul(matrix, _rows(s.outputs, matrix.shape[1]), out=_rows(s.columns, tiles.k))
        s.phases.fill(0)
        for (i, j), at in offsets(tiles):
            np.add(s.phases[at], s.columns[:, i, j], out=s.phases[at])
        s.plane.fill(0)
        for inside, phase in interior(tiles):
            np.copyto(s.plane[inside], s.phases[phase])
        _to_images(s.plane, dx[images])
    return True


# ---- their parts ----


def spread(tiles: Tiles, f: np.ndarray) -> np.ndarray:
    """The filters at each position of a window: (window² · O, elements of a patch)."""
    (height, width), w = tiles.size, tiles.window
    matrix = np.zeros((w, w, tiles.filters, tiles.channels, *tiles.patch), f.dtype)
    for i in range(w):
        for j in range(w):
            matrix[i, j, :, :, i : i + height, j : j + width] = f
    return matrix.reshape(-1, tiles.k)


def gather_filters(tiles: Tiles, matrix: np.ndarray, df: np.ndarray) -> None:
    """Adds the filters of a matrix like that of `spread` up: the adjoint."""
    (height, width), w = tiles.size, tiles.window
    matrix = matrix.reshape(w, w, tiles.filters, tiles.channels, *tiles.patch)
    df.fill(0)
    for i in range(w):
        for j in range(w):
            np.add(df, matrix[i, j, :, :, i : i + height, j : j + width], out=df)


def load(tiles: Tiles, x: np.ndarray, s: Scratch) -> None:
    """Images (images, C, H, W) as phases: the padded rows and columns whose numbers have the same
    rest modulo the window stand together.
    """
    np.copyto(_rows(s.plane, -1), x.reshape(len(x), -1).T)
    s.phases.fill(0)
    for inside, phase in interior(tiles):
        np.copyto(s.phases[phase], s.plane[inside])


def interior(tiles: Tiles) -> Iterator[tuple[tuple, tuple]]:
    """For each phase the slices of the plane (C, H, W, images) that lie in it, and where."""
    axes = [
        [_reach(phase, tiles.window, tiles.plane[a], tiles.before[a], tiles.steps[a])
         for phase in range(tiles.window)]
        for a in (0, 1)
    ]  # fmt: skip
    for i, (rows, to_rows) in enumerate(axes[0]):
        for j, (columns, to_columns) in enumerate(axes[1]):
            yield (slice(None), rows, columns), (i, j, slice(None), to_rows, to_columns)


def _reach(phase: int, window: int, extent: int, before: int, steps: int) -> tuple[slice, slice]:
    first = (phase - before) % window
    start = (first + before) // window
    count = max(min((extent - 1 - first) // window + 1, steps - start), 0)
    return slice(first, first + count * window, window), slice(start, start + count)


def offsets(tiles: Tiles) -> Iterator[tuple[Pair, tuple]]:
    """Each element of a patch, with what all windows see there among the phases."""
    w, (down, across) = tiles.window, tiles.out
    for i in range(tiles.patch[0]):
        for j in range(tiles.patch[1]):
            rows = slice(i // w, i // w + down)
            yield (i, j), (i % w, j % w, slice(None), rows, slice(j // w, j // w + across))


def gather(tiles: Tiles, s: Scratch) -> None:
    """Phases to columns."""
    for (i, j), at in offsets(tiles):
        np.copyto(s.columns[:, i, j], s.phases[at])


def locate(slabs: np.ndarray, s: Scratch) -> None:
    """The codes of the first slabs that hold the maxima: each slab that none up to it equals adds
    one.
    """
    s.codes.fill(0)
    s.open.fill(True)
    for slab in slabs[:-1]:
        np.not_equal(slab, s.pooled, out=s.mask)
        np.logical_and(s.open, s.mask, out=s.open)
        np.add(s.codes, s.open.view(UINT8), out=s.codes)


def unpool(tiles: Tiles, dy: np.ndarray, code: np.ndarray, s: Scratch) -> bool:
    """The gradient of the convolution's outputs, and in `pooled` dy where relu did not cut it off.
    False where dy is not finite.
    """
    np.copyto(_rows(s.pooled, -1), dy.reshape(len(dy), -1).T)
    np.copyto(_rows(s.codes, -1), code.reshape(len(code), -1).T)
    if not np.isfinite(s.pooled, out=s.mask).all():
        return False
    for position, slab in enumerate(s.outputs.reshape(tiles.positions, *s.pooled.shape)):
        np.multiply(s.pooled, np.equal(s.codes, position, out=s.mask), out=slab)
    np.multiply(s.pooled, np.not_equal(s.codes, CUT, out=s.mask), out=s.pooled)
    return True


def _rows(array: np.ndarray, count: int) -> np.ndarray:
    """A contiguous array as a matrix of that many rows; -1 of a column for each image."""
    return array.reshape(count, -1) if count >= 0 else array.reshape(-1, array.shape[-1])


def _to_images(array: np.ndarray, images: np.ndarray) -> None:
    """(…, images) to (images, …), contiguous both."""
    np.copyto(images.reshape(len(images), -1), array.reshape(-1, len(images)).T)

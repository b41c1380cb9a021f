"""Convolution with the max-pool behind it in numpy, images innermost: a chunk of images is laid out
(H, C, W, images) or so, that every slice of it is long runs of memory and every product has many
columns. A window of the pool is one column of outputs, (window², O) of them, which one GEMM
computes from the patch of the image that the window sees; its maximum is that of a few slabs.

What the patches of windows meet is copied to columns (rows, C, columns of a patch, windows across,
images), once for each column of a patch but not for each row: the patches of a row of windows are
then consecutive rows of one matrix, those of the next row begin `window` image rows further down,
and BLAS reads both in place. Chunks are shared by threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ...graph.spec import FLOAT32, Spec
from ...runtime.host_threads import share, thread_count
from .geometry import Pair

CHUNK_NBYTES = 4 << 20  # of scratch, that it stays in the cache of a core
PARTS = 4  # at least, of a batch, for threads to share
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
    def seen(self) -> Pair:
        """The rows and columns of the padded plane that windows see."""
        height, width = (p + (n - 1) * self.window for n, p in zip(self.out, self.patch))
        return height, width

    @property
    def windows(self) -> int:
        """The windows of an image."""
        return self.out[0] * self.out[1]

    @property
    def k(self) -> int:
        """The elements of a patch."""
        return self.channels * self.patch[0] * self.patch[1]

    @property
    def m(self) -> int:
        """The outputs of a window."""
        return self.filters * self.window * self.window

    @property
    def pays(self) -> bool:
        """True where this is no slower than a convolution and a pool."""
        return max(self.channels, self.filters) <= MOST_CHANNELS

    def chunk(self, images: int) -> int:
        """The images of a chunk: chunks are about equal."""
        most = max(CHUNK_NBYTES // max(self.floats * FLOAT32.itemsize, 1), FEWEST)
        chunks = max(-(-images // most), min(PARTS, images // FEWEST), 1)
        return max(-(-images // chunks), 1)

    def chunks(self, images: int) -> Iterator[slice]:
        """All images in chunks."""
        step = self.chunk(images)
        for start in range(0, images, step):
            yield slice(start, min(start + step, images))

    @property
    def floats(self) -> int:
        """The scratch for an image."""
        height, width = self.seen
        columns = self.channels * self.patch[1] * self.out[1]
        return (
            self.channels * height * width
            + columns * height
            + self.k * self.windows
            + (self.m + self.filters) * self.windows
        )


class Scratch:
    """The arrays that a thread computes a chunk in, of a number of images."""

    def __init__(self, tiles: Tiles, count: int, floats: np.ndarray, masks: np.ndarray) -> None:
        self._tiles, self._count, self._memory, self._taken = tiles, count, (floats, masks), 0
        t, w, (height, width), (down, across) = tiles, tiles.window, tiles.seen, tiles.out
        self.plane = self._take(height, t.channels, width, count)
        self.columns = self._take(height, t.channels, t.patch[1], across, count)
        self.outputs = self._take(down, w, w, t.filters, across, count)
        self.pooled = self._take(down, t.filters, across, count)
        self.codes, mask = masks[: 2 * self.pooled.size].reshape(2, *self.pooled.shape)
        self.mask = mask.view(BOOL)
        self.slabs = [self.outputs[:, i, j] for i in range(w) for j in range(w)]
        # For each column of a patch what all windows see there, of the plane.
        y, c, x, image = self.plane.strides
        self.seen = as_strided(self.plane, self.columns.shape, (y, c, x, w * x, image))
        # For each row of windows the outputs and the patches as matrices; patches overlap.
        self.products = self.outputs.reshape(down, t.m, -1)
        rows = self.columns.reshape(height, t.channels * t.patch[1], -1)
        shape, (y, row, image) = (down, t.k, rows.shape[2]), rows.strides
        self.patches = as_strided(rows, shape, (w * y, row, image))
        self.gradients = self._take(*self.patches.shape)
        self.rows = rows

    def _take(self, *shape: int) -> np.ndarray:
        start = self._taken
        self._taken += int(np.prod(shape))
        return self._memory[0][start : self._taken].reshape(shape)

    def sized(self, images: slice) -> Scratch:
        """This, or the same memory for fewer images."""
        count = images.stop - images.start
        return self if count == self._count else Scratch(self._tiles, count, *self._memory)

    @staticmethod
    def specs(tiles: Tiles, images: int) -> list[Spec]:
        """The scratch for a batch: floats and bytes of each thread."""
        count, parts = tiles.chunk(images), len(list(tiles.chunks(images)))
        threads = max(min(thread_count(), parts), 1)
        masks = 2 * tiles.filters * tiles.windows
        shapes = (tiles.floats, FLOAT32), (masks, UINT8)
        return [Spec((threads, size * count), dtype) for size, dtype in shapes]


class Memory(NamedTuple):
    """What `Scratch.specs` asks for."""

    floats: np.ndarray
    masks: np.ndarray

    def scratches(self, tiles: Tiles, images: int) -> list[Scratch]:
        """That of each thread."""
        return [Scratch(tiles, tiles.chunk(images), *each) for each in zip(*self)]


def forward(
    tiles: Tiles,
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray | None],
    relu: bool,
    memory: Memory,
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

    def chunk(images: slice, scratch: Scratch) -> bool:
        s = scratch.sized(images)
        load(tiles, x[images], s)
        np.matmul(matrix, s.patches, out=s.products)
        locate(s)
        if np.isnan(s.pooled.max(initial=0)):
            return False
        if bias is not None:
            np.add(s.pooled, bias[:, None, None], out=s.pooled)
        if relu:
            np.maximum(s.pooled, 0, out=s.pooled)
            raise_codes(s, np.equal(s.pooled, 0, out=s.mask), CUT)
        np.copyto(y[images], _images_first(s.pooled))
        np.copyto(code[images], _images_first(s.codes))
        return True

    return all(share(chunk, list(tiles.chunks(len(x))), memory.scratches(tiles, len(x))))


def sums_spec(tiles: Tiles, images: int) -> Spec:
    """The scratch for the filters' gradient of each chunk and row of windows."""
    chunks = len(list(tiles.chunks(images)))
    return Spec((chunks, tiles.out[0], tiles.m, tiles.k), FLOAT32)


def filter_gradient(
    tiles: Tiles,
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    memory: Memory,
    sums: np.ndarray,
    df: np.ndarray,
    db: np.ndarray | None,
) -> bool:
    """The gradients for filter and bias, of x, dy and the codes. False where dy is not finite."""
    x, dy, code = arrays

    def chunk(part: tuple[int, slice], scratch: Scratch) -> np.ndarray | None:
        number, images = part
        s = scratch.sized(images)
        if not unpool(dy[images], code[images], s):
            return None
        load(tiles, x[images], s)
        np.matmul(s.products, s.patches.transpose(0, 2, 1), out=sums[number])
        return s.pooled.reshape(*s.pooled.shape[:2], -1).sum(axis=2).sum(axis=0)

    parts = list(enumerate(tiles.chunks(len(x))))
    found = share(chunk, parts, memory.scratches(tiles, len(x)))
    of_bias = [each for each in found if each is not None]
    if len(of_bias) < len(found):
        return False
    # In the order of chunks, whichever thread had them.
    rows = sums.reshape(-1, tiles.m, tiles.k)
    gather_filters(tiles, rows.sum(axis=0), df)
    if db is not None:
        np.sum(np.reshape(of_bias, (-1, len(db))), axis=0, out=db)
    return True


def data_gradient(
    tiles: Tiles,
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    memory: Memory,
    dx: np.ndarray,
) -> bool:
    """The gradient for the data, of f, dy and the codes. False where f or dy is not finite."""
    f, dy, code = arrays
    if not np.isfinite(f).all():
        return False
    matrix = spread(tiles, f).T

    def chunk(images: slice, scratch: Scratch) -> bool:
        s = scratch.sized(images)
        if not unpool(dy[images], code[images], s):
            return False
        np.matmul(matrix, s.products, out=s.gradients)
        gather_patches(tiles, s)
        made = dx[images]
        padded, plane = interior(tiles, s, made)
        if plane.size < made.size:
            made.fill(0)  # where no window sees it
        np.copyto(plane, _images_first(padded))
        return True

    return all(share(chunk, list(tiles.chunks(len(dx))), memory.scratches(tiles, len(dx))))


# ---- their parts ----


def spread(tiles: Tiles, f: np.ndarray) -> np.ndarray:
    """The filters at each position of a window: (window² · O, elements of a patch)."""
    (height, width), w = tiles.size, tiles.window
    (rows, columns), by_rows = tiles.patch, f.transpose(0, 2, 1, 3)
    matrix = np.zeros((w, w, tiles.filters, rows, tiles.channels, columns), f.dtype)
    for i in range(w):
        for j in range(w):
            matrix[i, j, :, i : i + height, :, j : j + width] = by_rows
    return matrix.reshape(tiles.m, tiles.k)


def gather_filters(tiles: Tiles, matrix: np.ndarray, df: np.ndarray) -> None:
    """Adds the filters of a matrix like that of `spread` up: the adjoint."""
    (height, width), w = tiles.size, tiles.window
    (rows, columns), by_rows = tiles.patch, df.transpose(0, 2, 1, 3)
    matrix = matrix.reshape(w, w, tiles.filters, rows, tiles.channels, columns)
    df.fill(0)
    for i in range(w):
        for j in range(w):
            np.add(by_rows, matrix[i, j, :, i : i + height, :, j : j + width], out=by_rows)


def load(tiles: Tiles, x: np.ndarray, s: Scratch) -> None:
    """Images (images, C, H, W) to columns."""
    padded, plane = interior(tiles, s, x)
    if padded.size < s.plane.size:
        s.plane.fill(0)
    np.copyto(padded, plane.transpose(2, 1, 3, 0))
    np.copyto(s.columns, s.seen)


def interior(tiles: Tiles, s: Scratch, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What windows see of images (images, C, H, W): its place in the padded plane, and itself."""
    (above, left), (height, width) = tiles.before, tiles.seen
    plane = x[:, :, : max(height - above, 0), : max(width - left, 0)]
    rows, columns = plane.shape[2:]
    return s.plane[above : above + rows, :, left : left + columns], plane


def gather_patches(tiles: Tiles, s: Scratch) -> None:
    """Adds the gradients of patches up, into columns and from there into the plane."""
    down, w = tiles.out[0], tiles.window
    rows = s.gradients.reshape(down, tiles.patch[0], *s.rows.shape[1:])
    s.rows.fill(0)
    for i in range(tiles.patch[0]):
        met = s.rows[i : i + w * down : w]
        np.add(met, rows[:, i], out=met)
    s.plane.fill(0)
    for j in range(tiles.patch[1]):
        seen = s.seen[:, :, j]
        np.add(seen, s.columns[:, :, j], out=seen)


def locate(s: Scratch) -> None:
    """The maxima of the slabs, and the codes of the first ones that hold them."""
    np.copyto(s.pooled, s.slabs[0])
    s.codes.fill(0)
    for position, slab in enumerate(s.slabs[1:], 1):
        raise_codes(s, np.greater(slab, s.pooled, out=s.mask), position)
        np.maximum(slab, s.pooled, out=s.pooled)


def raise_codes(s: Scratch, mask: np.ndarray, code: int) -> None:
    """Sets codes to a larger one where the mask, which it uses up, says so: with arithmetic, since
    numpy's `where` takes a branch for each element.
    """
    codes = mask.view(UINT8)
    np.multiply(codes, UINT8.type(code), out=codes)
    np.maximum(s.codes, codes, out=s.codes)


def unpool(dy: np.ndarray, code: np.ndarray, s: Scratch) -> bool:
    """The gradient of the convolution's outputs, and in `pooled` dy where relu did not cut it off.
    False where dy is not finite.
    """
    np.copyto(s.pooled, dy.transpose(2, 1, 3, 0))
    np.copyto(s.codes, code.transpose(2, 1, 3, 0))
    if not np.isfinite(s.pooled, out=s.mask).all():
        return False
    for position, slab in enumerate(s.slabs):
        np.multiply(s.pooled, np.equal(s.codes, position, out=s.mask), out=slab)
    np.multiply(s.pooled, np.not_equal(s.codes, CUT, out=s.mask), out=s.pooled)
    return True


def _images_first(array: np.ndarray) -> np.ndarray:
    """(H, C, W, images) as (images, C, H, W)."""
    return array.transpose(3, 1, 0, 2)

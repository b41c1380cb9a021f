"""Layers of a convolution, relu and a max-pool in numpy, images innermost: a chunk of images (rows,
C, columns, images) goes through all layers forward, and later through all of them back, in scratch
that the cache of a core holds. Threads share the chunks. Every slice of such an array is long runs
of memory, every product has many columns, and only the first and the last layer transpose images.

A column of a product computes the outputs of a window's columns, and where there are few filters
those of its rows too, from the part of the image that these see. The scratch `columns` (rows, C,
columns of a patch, windows across, images) holds for each row what any window sees of it. So the
patches of a row of outputs are consecutive rows of one matrix, those of the next begin a row of the
image further down, and BLAS reads both in place.

Outputs are (rows, window, filters, windows across, images): columns with one remainder modulo the
window lie side by side, so that each element of windows is a slab. The padded plane that a layer
sees is kept so too, (rows, C, window, columns / window, images).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from ...graph.spec import FLOAT32, Spec
from ...runtime.host_threads import share, thread_count
from .geometry import Pair

CHUNK_NBYTES = 5 << 20  # of a layer's scratch: less fits caches better, but threads meet more often
PARTS = 2  # at least, of a batch, for threads to share
RUN = 16  # images of a vector: a chunk has a multiple of it
BUFFER = 64  # elements; with numpy's own size ufuncs copy what is not contiguous to buffers first
MOST_CHANNELS = 32  # with more, the elements of a patch that a filter does not meet cost too much
FEW_OUTPUTS = 16  # of a column of a product, which then computes the rows of a window too
SMALL_PRODUCT = 10**6  # multiplications; OpenBLAS first copies the operands of larger ones
NARROW = 64  # columns that are left of a product, at least, where it is cut
CUT = 255  # the code of a window whose maximum relu cut off
UNKNOWN = 254  # the first code, where there are none

UINT8, BOOL = np.dtype(np.uint8), np.dtype(np.bool_)


class Layer(NamedTuple):
    """A convolution of stride 1 of images (C, *plane) by filters (O, C, *size), and the maxima of
    windows over it that do not overlap, with relu or without.
    """

    channels: int
    filters: int
    plane: Pair
    size: Pair
    before: Pair  # padding above and to the left
    window: int
    out: Pair  # windows
    relu: bool
    bias: bool = True

    @property
    def rows(self) -> int:
        """The rows of outputs that windows cover."""
        return self.out[0] * self.window

    @property
    def seen(self) -> Pair:
        """The rows and columns of the padded plane that windows see."""
        height, width = (n * self.window + k - 1 for n, k in zip(self.out, self.size))
        return height, width

    @property
    def patch(self) -> int:
        """The columns that a window sees."""
        return self.size[1] + self.window - 1

    @property
    def rows_at_once(self) -> int:
        """The rows of outputs that a column of the forward product computes."""
        return self.window if self.filters * self.window < FEW_OUTPUTS else 1

    @property
    def maxima(self) -> tuple[int, int, int]:
        """The shape of a chunk's maxima, but for the images."""
        return self.out[0], self.filters, self.out[1]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those of plane, columns and outputs, but for the images."""
        (height, width), w, c = self.seen, self.window, self.channels
        across = self.out[1]
        plane = height, c, w, -(-width // w)
        return plane, (height, c, self.patch, across), (self.rows, w, self.filters, across)

    @property
    def floats(self) -> int:
        """The scratch for an image."""
        return sum(map(math.prod, self.shapes))

    @property
    def rows_back(self) -> list[tuple[int, int, slice]]:
        """For rows of the padded plane, one or those that meet all rows of a filter: their number,
        the first row of outputs that they meet, and which rows of the filter, the lowest first.
        """
        found: list[tuple[int, int, slice]] = []
        height = self.size[0]
        for row in range(self.seen[0]):
            above = row - height + 1
            first, end = max(above, 0), min(row + 1, self.rows)
            met = slice(first - above, end - above)
            if found and found[-1][2] == met == slice(0, height):
                found[-1] = found[-1][0] + 1, *found[-1][1:]
            else:
                found.append((1, first, met))
        return found

    @property
    def sums(self) -> tuple[int, int, int]:
        """Rows of outputs, elements of a patch for one, outputs of a column: what the gradients of
        filters and biases are summed of.
        """
        return self.rows, self.size[0] * self.channels * self.patch, self.window * self.filters

    def parts_of_sums(self, images: int) -> int:
        """The products into which one for the filters' gradient is cut."""
        return parts_of(math.prod(self.sums[1:]), self.out[1] * images)

    def sums_size(self, images: int) -> int:
        """The scratch for the gradients of filters and biases of each row."""
        rows, patch, outputs = self.sums
        return rows * outputs * (self.parts_of_sums(images) * patch + 1)


Layers = tuple[Layer, ...]


def pays(channels: int, filters: int) -> bool:
    """True where this is no slower than a convolution and a pool."""
    return max(channels, filters) <= MOST_CHANNELS


def chunks(layers: Layers, images: int) -> list[slice]:
    """All images in chunks, which do not depend on the number of threads."""
    floats = max(layer.floats + math.prod(layer.maxima) for layer in layers)
    most = CHUNK_NBYTES // (max(floats, 1) * FLOAT32.itemsize) // RUN
    few = -(-images // (PARTS * RUN))
    step = max(min(most, few), 1) * RUN
    return [slice(start, min(start + step, images)) for start in range(0, images, step)]


class Kept(NamedTuple):
    """What the way back needs of the way forward: the maxima of all layers but the last, and the
    codes of their positions in all, (images, …) chunk by chunk.
    """

    maxima: np.ndarray
    codes: np.ndarray

    @staticmethod
    def specs(layers: Layers, images: int) -> tuple[Spec, Spec]:
        """Their shapes and dtypes."""
        sizes = [math.prod(layer.maxima) for layer in layers]
        return Spec((images, sum(sizes[:-1])), FLOAT32), Spec((images, sum(sizes)), UINT8)

    def of(self, layers: Layers, images: slice) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The maxima and codes of each layer in a chunk."""
        shapes, count = [layer.maxima for layer in layers], images.stop - images.start
        maxima, codes = (array[images].reshape(-1) for array in self)
        return divide(maxima, shapes[:-1], count), divide(codes, shapes, count)


def divide(memory: np.ndarray, shapes: Sequence[tuple[int, ...]], images: int) -> list[np.ndarray]:
    """Arrays (*shape, images) one behind the other in memory."""
    made, start = [], 0
    for shape in shapes:
        stop = start + math.prod(shape) * images
        made.append(memory[start:stop].reshape(*shape, images))
        start = stop
    return made


class Scratch:
    """The scratch of a thread, with the views of it that chunks take: made once for a number of
    images.
    """

    def __init__(self, layers: Layers, floats: np.ndarray, masks: np.ndarray) -> None:
        self._layers, self._memory = layers, (floats, masks)
        self._chunks: dict[int, tuple[list[Views], list[np.ndarray]]] = {}

    def chunk(self, images: slice) -> tuple[list[Views], list[np.ndarray]]:
        """For each layer its views, and what layers pass on: forward maxima, back the gradients
        of these.
        """
        count = images.stop - images.start
        if count not in self._chunks:
            layers, floats = self._layers, self._memory[0]
            passed = floats[max(layer.floats for layer in layers) * count :]
            views = [Views(layer, count, *self._memory) for layer in layers]
            shapes = [layer.maxima for layer in layers]
            self._chunks[count] = views, divide(passed, shapes, count)
        return self._chunks[count]

    @staticmethod
    def specs(layers: Layers, images: int) -> list[Spec]:
        """The scratch for a batch, floats and bytes: a row for each thread."""
        parts = chunks(layers, images)
        count = parts[0].stop if parts else 0
        threads = max(min(thread_count(), len(parts)), 1)
        floats = max(layer.floats for layer in layers)
        floats += sum(math.prod(layer.maxima) for layer in layers)
        counts = {part.stop - part.start for part in parts}
        sums = max((layer.sums_size(n) for layer in layers for n in counts), default=0)
        sums = -(-sums // RUN) * RUN  # rows begin at vectors
        masks = max(math.prod(layer.shapes[-1]) for layer in layers)
        return [
            Spec((threads, floats * count + sums), FLOAT32),
            Spec((threads, masks * count), UINT8),
        ]


class Part(NamedTuple):
    """A part of images (H, C, W, images), of which the columns may be taken apart."""

    rows: int
    columns: slice
    shape: tuple[int, ...]

    def of(self, images: np.ndarray) -> np.ndarray:
        """A view of the part."""
        return images[: self.rows, :, self.columns].reshape(self.shape)


class Views:
    """Views of the scratch in which a thread computes a number of images of a layer."""

    def __init__(self, layer: Layer, count: int, floats: np.ndarray, masks: np.ndarray) -> None:
        self._layer, self._floats, w = layer, floats, layer.window
        self._plane, self._columns, outputs = divide(floats, layer.shapes, count)
        self._interior = list(self._parts_of_plane())
        self._inside = sum(inner.size for inner, _ in self._interior)
        self._seen = list(self._parts_of_columns())
        length = layer.out[1] * count
        self._rows = self._columns.reshape(layer.seen[0], layer.channels * layer.patch, length)
        self._products = outputs.reshape(layer.rows, w * layer.filters, length)
        self._windows = outputs.reshape(layer.out[0], w, w, *outputs.shape[2:])
        self._slabs = [self._windows[:, i, j] for i in range(w) for j in range(w)]
        # Bytes of an element of windows each; those of the first say where relu cuts off.
        self._chosen = masks[: self._windows.size].reshape(self._windows.shape).view(BOOL)
        codes = masks[: self._windows.size].reshape(-1, *self._slabs[0].shape)
        positions = np.array([CUT, *range(1, w * w)], UINT8)[:, None, None, None, None]
        self._larger, first = codes.view(BOOL), 0 if layer.relu else 1
        self._codes, self._positions = codes[first:], positions[first:]
        self._elements = np.arange(w * w, dtype=UINT8).reshape(w, w, 1, 1, 1)
        self._ones, self._zeros = np.ones(length, FLOAT32), np.zeros((layer.out[1], count), FLOAT32)
        # The operands and results of products; those of data gradients are made by need.
        patches = self._patches(layer.rows_at_once)
        self._forward = cut(patches, self._products.reshape(len(patches), -1, length))
        self._back: list[tuple[np.ndarray, np.ndarray]] = []
        self._added = list(self._sums_of_columns())
        parts, (rows, k, m) = layer.parts_of_sums(count), layer.sums
        self._patches_cut, outputs_cut = (
            x.reshape(rows, -1, parts, length // parts).transpose(0, 2, 1, 3)
            for x in (self._patches(1), self._products)
        )
        self._outputs_transposed = outputs_cut.transpose(0, 1, 3, 2)
        sums = floats[len(floats) - layer.sums_size(count) :]
        self._of_filters = sums[: rows * parts * k * m].reshape(rows, parts, k, m)
        self._of_biases = sums[rows * parts * k * m :].reshape(rows, m)

    def _strided(self, of: np.ndarray, shape: tuple[int, ...], *strides: int) -> np.ndarray:
        """A view of the scratch from the first element of another one on; strides in bytes."""
        start = of.__array_interface__["data"][0] - self._floats.__array_interface__["data"][0]
        return np.ndarray(shape, FLOAT32, self._floats, start, strides)

    def _parts_of_plane(self) -> Iterator[tuple[np.ndarray, Part]]:
        """Where the plane has what windows see of images (H, C, W, images), and where the images
        have it: the columns by their remainders modulo the window, or all of them.
        """
        layer, w = self._layer, self._layer.window
        (above, left), (height, width) = layer.before, layer.seen
        rows, columns = min(layer.plane[0], height - above), min(layer.plane[1], width - left)
        plane = self._plane[above : above + rows]
        if left % w == columns % w == 0:
            inner = plane[:, :, :, left // w : (left + columns) // w].transpose(0, 1, 3, 2, 4)
            yield inner, Part(rows, slice(columns), inner.shape)
            return
        for first in range(min(w, columns)):
            begin, remainder = divmod(left + first, w)
            inner = plane[:, :, remainder, begin : begin + len(range(first, columns, w))]
            yield inner, Part(rows, slice(first, columns, w), inner.shape)

    def _parts_of_columns(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The columns of patches by their remainders modulo the window, or all of them, and where
        the plane has them.
        """
        (height, c, patch, across, count), w = self._columns.shape, self._layer.window
        y, channel, remainder, x, image = self._plane.strides
        if patch % w == 0:
            to = self._columns.reshape(height, c, patch // w, w, across, count)
            strides = y, channel, x, remainder, x, image
            yield to, self._strided(self._plane, to.shape, *strides)
            return
        for first in range(min(w, patch)):
            to = self._columns[:, :, first::w]
            seen = self._plane[:, :, first]
            yield to, self._strided(seen, to.shape, y, channel, x, x, image)

    def _sums_of_columns(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For the columns of patches, a window's width at a time, where the plane has them, and
        they themselves.
        """
        w, across = self._layer.window, self._layer.out[1]
        for first in range(0, self._layer.patch, w):
            columns = self._columns[:, :, first : first + w]
            at = first // w
            yield self._plane[:, :, : columns.shape[2], at : at + across], columns

    def _patches(self, rows: int) -> np.ndarray:
        """The columns as matrices, each for so many rows of outputs; they overlap."""
        height, depth, length = self._rows.shape
        y, row, column = self._rows.strides
        shape = self._layer.rows // rows, (height - self._layer.rows + rows) * depth, length
        return self._strided(self._rows, shape, rows * y, row, column)

    # ---- forward ----

    def load(self, images: np.ndarray) -> None:
        """Images (H, C, W, images) to columns."""
        if self._inside < self._plane.size:
            self._plane.fill(0)
        for inner, part in self._interior:
            np.copyto(inner, part.of(images))
        for columns, seen in self._seen:
            np.copyto(columns, seen)

    def multiply(self, matrix: np.ndarray) -> None:
        """The convolution of the columns, by the filters as `spread` makes them."""
        np.matmul(matrix, self._forward[0], out=self._forward[1])

    def pool(self, bias: np.ndarray | None, y: np.ndarray, code: np.ndarray) -> None:
        """The maxima of windows with bias (O, 1, 1) and relu, and the codes of the first that hold
        them: with arithmetic, since numpy's `where` takes a branch for each element.
        """
        first, second, *others = self._slabs
        np.greater(second, first, out=self._larger[1])
        np.maximum(second, first, out=y)
        for slab, larger in zip(others, self._larger[2:]):
            np.greater(slab, y, out=larger)
            np.maximum(slab, y, out=y)
        if bias is not None:
            np.add(y, bias, out=y)
        if self._layer.relu:
            np.maximum(y, self._zeros, out=y)  # a number takes twice as long
            np.equal(y, 0, out=self._larger[0])
        np.multiply(self._codes, self._positions, out=self._codes)
        np.maximum.reduce(self._codes, axis=0, out=code)

    # ---- back ----

    def unpool(self, dy: np.ndarray, code: np.ndarray) -> None:
        """The gradient of the convolution's outputs, of that of the maxima."""
        np.equal(code[:, None, None], self._elements, out=self._chosen)
        np.copyto(self._windows, self._chosen)
        np.multiply(self._windows, dy[:, None, None], out=self._windows)

    def filter_gradient(self, df: np.ndarray, db: np.ndarray) -> None:
        """The gradients, summed over the images, for filters as `spread` makes them, transposed,
        and for the outputs of a column.
        """
        np.matmul(self._patches_cut, self._outputs_transposed, out=self._of_filters)
        np.add.reduce(self._of_filters, axis=(0, 1), out=df)
        np.matmul(self._products, self._ones, out=self._of_biases)
        np.add.reduce(self._of_biases, axis=0, out=db)

    def data_gradient(self, matrices: Sequence[np.ndarray], dx: np.ndarray) -> None:
        """dx (H, C, W, images), by the filters as `spread_back` makes them."""
        self._back = self._back or list(self._products_back())
        for matrix, (outputs, rows) in zip(matrices, self._back):
            np.matmul(matrix, outputs, out=rows)
        self._plane.fill(0)
        for plane, columns in self._added:
            np.add(plane, columns, out=plane)
        if self._inside < dx.size:
            dx.fill(0)  # where no window sees it
        for inner, part in self._interior:
            np.copyto(part.of(dx), inner)

    def _products_back(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each matrix of `spread_back` the rows of outputs that it is multiplied with, and the
        rows of columns that the product makes.
        """
        (_, m, length), strides = self._products.shape, self._products.strides
        at = 0
        for count, first, met in self._layer.rows_back:
            shape = count, (met.stop - met.start) * m, length
            outputs = self._strided(self._products[first:], shape, *strides)
            yield cut(outputs, self._rows[at : at + count])
            at += count


def cut(b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The operand b (products, k, columns) and the result c (products, m, columns) of products with
    a matrix, cut into small products of fewer columns where that is possible.
    """
    parts = parts_of(b.shape[1] * c.shape[1], b.shape[2])
    b, c = (x.reshape(*x.shape[:2], parts, -1).transpose(0, 2, 1, 3) for x in (b, c))
    return b, c


def parts_of(multiplications: int, columns: int) -> int:
    """The products of fewer columns into which one is cut, of so many multiplications a column."""
    for parts in range(1, columns // NARROW + 1):
        if columns % parts == 0 and multiplications * (columns // parts) <= SMALL_PRODUCT:
            return parts
    return 1


# ---- filters as matrices ----


def spread(layer: Layer, f: np.ndarray, rows: int) -> np.ndarray:
    """The filters at each position of the outputs that a column computes, rows · window of them:
    (rows · window · O, elements of a patch).
    """
    (height, width), w, by_rows = layer.size, layer.window, f.transpose(0, 2, 1, 3)
    shape = rows, w, layer.filters, height + rows - 1, layer.channels, layer.patch
    matrix = np.zeros(shape, f.dtype)
    for i in range(rows):
        for j in range(w):
            matrix[i, j, :, i : i + height, :, j : j + width] = by_rows
    return matrix.reshape(rows * w * layer.filters, -1)


def spread_back(layer: Layer, f: np.ndarray) -> list[np.ndarray]:
    """What takes the rows of outputs that rows of the plane meet to their columns, for each of
    `rows_back`: (C · columns of a patch, rows of the filter · window · O).
    """
    matrix = spread(layer, f, 1).reshape(-1, layer.size[0], layer.channels * layer.patch)
    back = np.ascontiguousarray(matrix[:, ::-1].transpose(2, 1, 0))
    return [back[:, met].reshape(len(back), -1) for _, _, met in layer.rows_back]


def gather(layer: Layer, matrix: np.ndarray, df: np.ndarray) -> None:
    """Adds the filters of a matrix up that is like `spread`'s for one row, transposed."""
    (height, width), w = layer.size, layer.window
    shape = height, layer.channels, layer.patch, w, layer.filters
    matrix = matrix.reshape(shape).transpose(3, 4, 1, 0, 2)
    np.copyto(df, matrix[0, ..., :width])
    for j in range(1, w):
        np.add(df, matrix[j, ..., j : j + width], out=df)


# ---- all layers ----


@contextmanager
def unbuffered() -> Iterator[None]:
    """Ufuncs of this thread read arrays in place."""
    before = np.setbufsize(BUFFER)
    try:
        yield
    finally:
        np.setbufsize(before)


def forward(
    layers: Layers,
    x: np.ndarray,
    weights: Sequence[tuple[np.ndarray, np.ndarray | None]],
    scratch: Sequence[Scratch],
    y: np.ndarray,
    kept: Kept,
) -> bool:
    """The maxima y (N, O, *out) of the last layer, of x (N, C, H, W) and the filter and perhaps
    bias of each layer. False where a result is NaN, as the zeros around filters make of infinities,
    or where a bias is not finite, which makes maxima equal: y is not computed then.
    """
    if not all(bias is None or np.isfinite(bias).all() for _, bias in weights):
        return False
    matrices = [spread(layer, f, layer.rows_at_once) for layer, (f, _) in zip(layers, weights)]
    biases = [bias if bias is None else bias[:, None, None] for _, bias in weights]

    def chunk(images: slice, own: Scratch) -> bool:
        views, passed = own.chunk(images)
        maxima, codes = kept.of(layers, images)
        given = x[images].transpose(2, 1, 3, 0)
        made = (*maxima, passed[-1])
        with unbuffered():
            for s, matrix, bias, pooled, code in zip(views, matrices, biases, made, codes):
                s.load(given)
                s.multiply(matrix)
                s.pool(bias, pooled, code)
                given = pooled
            np.copyto(y[images], given.transpose(3, 1, 0, 2))
            return not np.isnan(given.max(initial=0))

    return all(share(chunk, chunks(layers, len(x)), scratch))


class Gradients(NamedTuple):
    """What `backward` computes: None for what is not asked for."""

    filters: Sequence[np.ndarray]
    biases: Sequence[np.ndarray | None]
    dx: np.ndarray | None


def sums_spec(layers: Layers, images: int) -> Spec:
    """The scratch for the sums of each chunk."""
    size = sum((patch + 1) * outputs for _, patch, outputs in (layer.sums for layer in layers))
    return Spec((len(chunks(layers, images)), size), FLOAT32)


def backward(
    layers: Layers,
    arrays: tuple[np.ndarray, np.ndarray],
    filters: Sequence[np.ndarray],
    scratch: Sequence[Scratch],
    sums: np.ndarray,
    kept: Kept,
    made: Gradients,
) -> bool:
    """The gradients for filters, biases and perhaps data, of x, dy, and what the way forward kept.
    False where one of them, or of those between, is not finite: the zeros around filters make NaN
    of infinities.
    """
    (x, dy), lowest = arrays, 0 if made.dx is not None else 1
    matrices = [spread_back(layer, f) for layer, f in zip(layers[lowest:], filters[lowest:])]

    def chunk(part: tuple[int, slice], own: Scratch) -> None:
        number, images = part
        views, passed = own.chunk(images)
        maxima, codes = kept.of(layers, images)
        given = [x[images].transpose(2, 1, 3, 0), *maxima]
        below = [None if made.dx is None else made.dx[images].transpose(2, 1, 3, 0), *passed]
        own_sums = _sums_of(layers, sums[number])
        with unbuffered():
            np.copyto(passed[-1], dy[images].transpose(2, 1, 3, 0))
            for k in reversed(range(len(layers))):
                views[k].unpool(passed[k], codes[k])
                views[k].load(given[k])
                views[k].filter_gradient(*own_sums[k])
                if (dx := below[k]) is not None:
                    views[k].data_gradient(matrices[k - lowest], dx)

    share(chunk, list(enumerate(chunks(layers, len(x)))), scratch)
    total = sums.sum(axis=0)  # in the order of chunks, whichever thread had them
    for layer, df, db, of in zip(layers, made.filters, made.biases, _sums_of(layers, total)):
        gather(layer, of[0], df)
        if db is not None:
            np.sum(of[1].reshape(-1, layer.filters), axis=0, out=db)
    # Whatever is not finite on the way is so in the sums for biases.
    return all(np.isfinite(a).all() for a in (total, made.dx) if a is not None)


def _sums_of(layers: Layers, memory: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each layer the sums of filters (patch, outputs) and of biases (outputs,)."""
    made, start = [], 0
    for layer in layers:
        _, patch, outputs = layer.sums
        middle, stop = start + patch * outputs, start + (patch + 1) * outputs
        made.append((memory[start:middle].reshape(patch, outputs), memory[middle:stop]))
        start = stop
    return made

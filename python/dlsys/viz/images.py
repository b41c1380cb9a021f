"""Images side by side: learned filters, activations, mistakes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ShapeError
from .figure import INK, bare, class_names, new_figure, plot
from .samples import labeled
from .samples import probabilities as answers
from .svg import BLUE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TILE = 0.62  # inches that a small image takes
_BARS = 200  # above which a vector is one area: bars are a path each
_NAME = 13  # letters of a class next to an image
_SMALLEST = 4  # pixels on a side of what may be taken for an image unasked


def filters(
    weights: Any, shape: tuple[int, ...] | None = None, limit: int = 64, title: str = ""
) -> Figure:
    """The filters of a first layer: those of a convolution (O, C, kH, kW), or the weights of each
    output of a matrix as an image of `shape`, (H, W) or (C, H, W).

    `weights` is an array or a Parameter. Filters of three channels are drawn in color, those of
    others plane by plane: red is positive, blue negative, white 0. The inputs are that axis of a
    matrix that has as many elements as the image; without `shape` the longer one that is a square
    image. limit: how many are shown. title: above them. ShapeError where none fits.
    """
    array = weights.asnumpy() if hasattr(weights, "asnumpy") else np.asarray(weights)
    images = _filter_images(array, shape)
    count = len(images)
    drawn = images[:limit]
    caption = (
        title or f"{count} filter{'s' * (count != 1)} of {' × '.join(map(str, images.shape[1:3]))}"
    )
    if count > limit:
        caption += f", the first {limit} of {count}" if title else f", the first {limit}"
    caption += _not_finite(drawn)
    if images.ndim == 4:
        return _mosaic_figure(np.stack([stretched(image) for image in drawn]), caption)
    finite = np.abs(drawn[np.isfinite(drawn)])
    bound = float(finite.max(initial=0.0)) or 1.0
    return _mosaic_figure(drawn, caption, cmap="RdBu_r", vmin=-bound, vmax=bound)


def activations(values: Any, limit: int = 64, title: str = "") -> Figure:
    """The activations of a layer for one image: planes (C, H, W), or a vector as bars.

    values: of one image, an array or a Tensor. limit: how many planes are shown. title: above them.
    """
    figure = new_figure(6.4, 1.0)
    array = np.asarray(values)
    figure.set_size_inches(6.4, draw_activations(figure, (1, 1, 1), array, limit, title) + 0.1)
    return figure


def mistakes(
    images: Any,
    labels: Any = None,
    predictions: Any = None,
    probabilities: Any = None,
    limit: int = 30,
    classes: Sequence[str] | None = None,
    *,
    model: Any = None,
) -> Figure:
    """The worst mistakes, the surest first: the image, its label, and what it was taken for with
    the probability given to that.

    images: (n, H, W), (n, C, H, W), or (n, pixels) of square images; or with a `model` a Loader or
    a Dataset, whose labels its answers are compared with. labels, predictions: (n,). probabilities:
    (n,) of the prediction, or (n, classes). Images that were recognized are passed over. limit: how
    many are shown. classes: their names. model: an `nn.Module`.
    """
    if model is not None:
        found, probabilities = labeled("mistakes", images), answers(model, images)
        images, labels, predictions = found.samples, found.labels, probabilities.argmax(axis=1)
        classes = found.classes if classes is None else classes
    truth, taken = np.asarray(labels), np.asarray(predictions)
    given = np.asarray(probabilities, np.float64)
    if not len(images) == truth.size == taken.size == len(given) or truth.ndim != 1:
        raise ShapeError(
            f"mistakes: expected labels, predictions and probabilities of each image, got "
            f"{np.shape(images)} images, labels {truth.shape}, predictions {taken.shape}, "
            f"probabilities {given.shape}"
        )
    sure = given if given.ndim == 1 else given[np.arange(len(taken)), taken.astype(np.int64)]
    wrong = np.flatnonzero(truth != taken)
    worst = wrong[np.argsort(-sure[wrong], kind="stable")][:limit]
    plural = "" if len(wrong) == 1 else "s"
    head = f"{len(wrong):,} mistake{plural} in {len(truth):,} image{'s' * (len(truth) != 1)}"
    if not len(worst):
        figure = new_figure(4, 0.6)
        bare(plot(figure, title=head))
        return figure
    if len(worst) < len(wrong):
        head += f", the {len(worst)} surest"
    elif len(wrong) > 1:
        head += ", the surest first"
    tiles = np.stack([stretched(as_image(images[k])) for k in worst])
    names = class_names(classes, int(max(truth.max(), taken.max())) + 1, _NAME)
    pairs = [(names[truth[k]], names[taken[k]]) for k in worst]
    between = " → " if max(len(a) + len(b) for a, b in pairs) < _NAME else "\n→ "
    captions = [f"{a}{between}{b}\n{sure[k]:.0%}" for k, (a, b) in zip(worst, pairs)]
    return captioned(tiles, captions, f"{head}: label → prediction")


def as_image(values: Any) -> np.ndarray:
    """(H, W) or, in color, (H, W, 3), from (H, W), (C, H, W) or the pixels of a square image."""
    array = np.asarray(values)
    if array.ndim == 1:
        array = array.reshape(_square(array.size) or array.shape)
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = array[0] if array.shape[0] == 1 else np.moveaxis(array, 0, -1)
    if array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3):
        return array
    raise ShapeError(
        f"an array of shape {np.asarray(values).shape} is no image, expected (H, W), (1, H, W), "
        f"(3, H, W) or the pixels of a square image"
    )


def draw_input(figure: Figure, position: Any, image: np.ndarray) -> float:
    """Draws an image as one part of a figure; returns the height that suits it."""
    axes = plot(figure, position, title=f"input  {image.shape}")
    axes.imshow(stretched(as_image(image)), cmap="gray", interpolation="none")
    bare(axes)
    return 1.4


def draw_activations(
    figure: Figure, position: tuple[int, int, int] | Any, values: np.ndarray, limit: int, title: str
) -> float:
    """Draws what `activations` shows as one part of a figure; returns the height that suits it."""
    position = position if isinstance(position, tuple) else (position,)
    array = np.asarray(values, np.float64)
    caption = f"{title}  {array.shape}".strip() + _not_finite(array)
    if array.ndim in (2, 3):
        planes = (array if array.ndim == 3 else array[None])[:limit]
        if array.ndim == 3 and len(array) > limit:
            caption += f", the first {limit}"
        axes = plot(figure, *position, title=caption)
        mosaic, columns = in_rows(planes, columns=16)
        picture = axes.imshow(mosaic, cmap="viridis", interpolation="none")
        width = 6.0 * columns / max(columns, 8)
        height = width * mosaic.shape[0] / mosaic.shape[1]
        _scaled(axes, picture, width * min(4.0 / height, 1.0), height)
        return 0.4 + min(height, 4.0)
    axes = plot(figure, *position, title=caption)
    flat = array.reshape(-1)
    if flat.size <= _BARS:
        axes.bar(np.arange(flat.size), flat, width=0.9, color=BLUE)
    else:
        axes.fill_between(np.arange(flat.size), flat, step="mid", color=BLUE, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.6, alpha=0.5)
    return 1.4


def _not_finite(array: np.ndarray) -> str:
    """A title's note on values that cannot be drawn."""
    missing = int((~np.isfinite(array)).sum())
    return f", {missing:,} not finite" if missing else ""


def _scaled(axes: Any, picture: Any, width: float, height: float) -> None:
    """Adds the color bar of an image of that size in inches."""
    bare(axes)
    bar = axes.inset_axes((1 + 0.06 / width, 0, 0.1 / width, 1))
    axes.figure.colorbar(picture, cax=bar)
    bar.locator_params(axis="y", nbins=min(max(int(4 * height), 1), 8))
    bar.tick_params(colors=INK, labelsize=7)
    bar.spines[:].set_visible(False)


def _filter_images(array: np.ndarray, shape: tuple[int, ...] | None) -> np.ndarray:
    """(n, H, W), or (n, H, W, 3) in color."""
    if array.ndim == 2:
        array = _matrix_images(array, shape)
        if array.ndim == 3:
            return array
    if array.ndim != 4:
        raise ShapeError(
            f"filters: expected weights (O, C, kH, kW) or (inputs, outputs), got {array.shape}"
        )
    if array.shape[1] == 3:
        return np.moveaxis(array, 1, -1)
    return array.reshape(-1, *array.shape[2:])


def image_inputs(
    matrix: tuple[int, ...], shape: tuple[int, ...] | None = None
) -> tuple[int, tuple[int, ...]] | None:
    """The axis of a matrix of weights that is over the pixels of an image, and the image's shape;
    None where neither is.
    """
    for axis in sorted((0, 1), key=lambda axis: -matrix[axis]):
        wanted = shape or _square(matrix[axis])
        if wanted and math.prod(wanted) == matrix[axis]:
            return axis, wanted
    return None


def _matrix_images(matrix: np.ndarray, shape: tuple[int, ...] | None) -> np.ndarray:
    found = image_inputs(matrix.shape, shape)
    if found is None:
        raise ShapeError(
            f"filters: neither axis of {matrix.shape} is an image{f' of {shape}' if shape else ''}"
            f"; say its shape: (H, W) or (C, H, W)"
        )
    axis, wanted = found
    return np.moveaxis(matrix, axis, 1).reshape(-1, *wanted)


def _square(pixels: int) -> tuple[int, ...] | None:
    """The shape of a square image, gray or in color, with so many values."""
    for channels in (1, 3):
        side = math.isqrt(pixels // channels)
        if side >= _SMALLEST and channels * side * side == pixels:
            return (side, side) if channels == 1 else (3, side, side)
    return None


def stretched(image: np.ndarray) -> np.ndarray:
    """An image between 0 and 1, whatever it was normalized to; black where it is not finite."""
    image = image.astype(np.float64)
    seen = np.isfinite(image)
    low, high = image[seen].min(initial=np.inf), image[seen].max(initial=-np.inf)
    return np.where(seen, (image - low) / ((high - low) or 1.0), 0.0)


def in_rows(tiles: np.ndarray, columns: int) -> tuple[np.ndarray, int]:
    """Tiles (n, H, W) or (n, H, W, 3) in rows, a transparent line between them; and how many are in
    a row.
    """
    columns = max(min(columns, len(tiles)), 1)
    rows = -(-len(tiles) // columns)
    height, width = tiles.shape[1:3]
    gap = max(1, round(width / 14))
    full = np.full(
        (rows * (height + gap) - gap, columns * (width + gap) - gap, *tiles.shape[3:]), np.nan
    )
    for k, tile in enumerate(tiles):
        y, x = k // columns * (height + gap), k % columns * (width + gap)
        full[y : y + height, x : x + width] = tile
    if full.ndim == 3:
        clear = np.isnan(full[..., :1])
        full = np.concatenate([np.nan_to_num(full), np.where(clear, 0.0, 1.0)], axis=-1)
    return full, columns


def _mosaic_figure(tiles: np.ndarray, title: str, **colors: Any) -> Figure:
    columns = min(max(4, math.ceil(math.sqrt(2 * len(tiles)))), 12)
    mosaic, columns = in_rows(tiles, columns)
    width = max(_TILE * columns, 2.4)
    height = width * mosaic.shape[0] / mosaic.shape[1]
    figure = new_figure(width + 0.7 * bool(colors), min(height, 12.0) + 0.4)
    axes = plot(figure, title=title)
    axes.title.set_fontsize(10)
    picture = axes.imshow(mosaic, interpolation="none", **colors)
    if colors:
        _scaled(axes, picture, width, height)
    bare(axes)
    return figure


def captioned(tiles: np.ndarray, captions: Sequence[str], title: str) -> Figure:
    """Tiles (n, h, w) or in color in rows of ten, each under its caption."""
    columns = min(len(tiles), 10)
    rows = -(-len(tiles) // columns)
    high = min(max(tiles.shape[1] / tiles.shape[2], 0.3), 3.0)
    lines = captions[0].count("\n") + 1
    figure = new_figure(max(0.85 * columns, 4.2), (0.8 * high + 0.17 * lines) * rows + 0.4)
    figure.suptitle(title, color=INK, fontsize=10)
    for k, (tile, caption) in enumerate(zip(tiles, captions)):
        axes = plot(figure, rows, columns, k + 1)
        axes.imshow(tile, cmap=None if tile.ndim == 3 else "gray", interpolation="none")
        axes.set_title(caption, color=INK, fontsize=8 if lines == 2 else 7)
        bare(axes)
    return figure

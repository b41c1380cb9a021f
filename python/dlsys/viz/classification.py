"""Pictures of classifiers: the confusion matrix, and regions of a plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..autodiff import Executor, Variable
from ..errors import ShapeError
from ..ops.leaf import home_of
from .figure import INK, class_names, legend, new_figure, plot
from .layers import prepared
from .samples import is_set, labeled, probabilities
from .svg import COLORS, GREEN, ORANGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LETTERED = 25  # classes up to which each cell shows its count
_TINY = 1e-12  # instead of 0 below a fraction
_MARKERS = "os^Dv"  # one for each round of the colors


def confusion_matrix(
    counts: Any, classes: Sequence[str] | None = None, *, model: Any = None
) -> Figure:
    """The counts of how often each class (rows) was predicted as each (columns), or with a `model`
    those of its answers for a Loader or a Dataset.

    Right answers are green and mistakes orange; each is the stronger, the larger its share of the
    row, mistakes compared with the largest share of a mistake. Shares instead of counts will do.
    counts: (n, n), or a Loader or a Dataset. classes: their names. model: an `nn.Module`.
    """
    if model is not None:
        found = labeled("confusion_matrix", counts)
        taken = probabilities(model, counts)
        classes = found.classes if classes is None else classes
        truth = found.labels.astype(np.int64)
        counts = np.zeros((max(taken.shape[1], truth.max() + 1),) * 2, np.int64)
        np.add.at(counts, (truth, taken.argmax(axis=1)), 1)
    array = np.asarray(counts)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not array.size:
        raise ShapeError(f"confusion_matrix: expected counts (classes, classes), got {array.shape}")
    n, lettered = len(array), len(array) <= _LETTERED
    names = class_names(classes, n)[:n]
    side = min(max(0.42 * n, 2.6), 9.0)
    longest = 0.08 * max(map(len, names))
    figure = new_figure(side + 1.4 + longest, side + 0.9 + (longest if longest > 0.3 else 0))
    axes = plot(figure, title=_share_right(array))
    axes.imshow(_cell_colors(array), interpolation="none")
    every = 1 if n <= 40 else -(-n // 20)
    recall = np.diag(array) / np.maximum(array.sum(axis=1), _TINY)
    rows = [f"{name}\u2002{share:.1%}" if lettered else name for name, share in zip(names, recall)]
    turned = 90 if max(map(len, names)) > 3 else 0
    axes.set_xticks(range(0, n, every), names[::every], rotation=turned)
    axes.set_yticks(range(0, n, every), rows[::every])
    axes.tick_params(length=0)
    axes.set_xlabel("prediction")
    axes.set_ylabel("label, with the share that is right" if lettered else "label")
    if lettered:
        size = 8 if array.sum() < 10**5 else 6.5
        form = "{:.0f}" if _counted(array) else "{:.2f}"
        for y, x in zip(*np.nonzero(array)):
            axes.text(
                x, y, form.format(array[y, x]), ha="center", va="center", size=size, color=INK
            )
    return figure


def decision_boundary(
    classifier: Callable[[np.ndarray], Any] | Any,
    points: Any,
    labels: Any = None,
    classes: Sequence[str] | None = None,
    resolution: int = 200,
) -> Figure:
    """The regions into which a classifier divides the plane, with points in their classes' colors.

    classifier: a model (an `nn.Module`) or a function of points (n, 2) float32; it gives scores (n,
    classes), of which the largest wins, or (n,) or (n, 1), whose sign decides between 0 and 1.
    points: (n, 2), or a Loader or a Dataset of them, which has the labels too. labels: (n,),
    negative ones count as 0. classes: their names. resolution: points along each axis.
    """
    if is_set(points):
        found = labeled("decision_boundary", points)
        points, labels = found.samples[:], found.labels
        classes = found.classes if classes is None else classes
    points, labels = np.asarray(points, np.float32), np.asarray(labels).reshape(-1)
    if points.ndim != 2 or points.shape[1] != 2 or len(points) != len(labels) or not len(points):
        raise ShapeError(
            f"decision_boundary: expected points (n, 2) and labels (n,), got {points.shape} and "
            f"{labels.shape}"
        )
    labels = np.maximum(labels, 0).astype(np.int64)
    low, high = points.min(axis=0), points.max(axis=0)
    margin = 0.08 * np.maximum(high - low, 1e-6)
    (left, bottom), (right, top) = low - margin, high + margin
    x, y = np.linspace(left, right, resolution), np.linspace(bottom, top, resolution)
    grid = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2).astype(np.float32)
    regions = _winners(classifier, grid).reshape(resolution, resolution)
    wrong = int((_winners(classifier, points) != labels).sum())
    figure = new_figure(4.6, 4.0)
    title = f"{wrong:,} of {len(labels):,} points on the wrong side"
    axes = plot(figure, title=title)
    _draw_regions(axes, x, y, regions)
    axes.set_xlabel("first coordinate")
    axes.set_ylabel("second coordinate")
    names = class_names(classes, int(labels.max()) + 1)
    for k in np.unique(labels):
        own = points[labels == k]
        axes.scatter(
            *own.T, s=14, color=_color(k), marker=_MARKERS[k // len(COLORS) % len(_MARKERS)],
            edgecolor=INK, linewidth=0.4, label=names[k] if classes is not None else f"class {k}",
        )  # fmt: skip
    legend(axes, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _counted(counts: np.ndarray) -> bool:
    return bool((counts == np.round(counts)).all())


def _share_right(counts: np.ndarray) -> str:
    right, total = np.trace(counts), counts.sum()
    share = f"{right / (total or 1):.2%}"
    return f"{right:,.0f} of {total:,.0f} right, {share}" if _counted(counts) else f"{share} right"


def _cell_colors(counts: np.ndarray) -> np.ndarray:
    """Red, green, blue and opacity of each cell."""
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), _TINY)
    off = share * (1 - np.eye(len(counts)))
    strength = np.where(off > 0, 0.08 + 0.8 * off / (off.max(initial=0.0) or 1.0), 0.0)
    colors = np.empty((*counts.shape, 4))
    colors[...] = (*_rgb(ORANGE), 0.0)
    colors[..., 3] = strength
    for k in range(len(counts)):
        colors[k, k] = (*_rgb(GREEN), 0.2 + 0.5 * share[k, k] if share[k, k] else 0.0)
    return colors


def _winners(classifier: Any, points: np.ndarray) -> np.ndarray:
    if hasattr(classifier, "named_modules"):
        x = Variable("points", shape=(None, 2), dtype=np.float32)
        with classifier.in_mode(training=False):
            scores = classifier(x)
        feeds = {x: prepared(classifier, points)}
        run = Executor([scores], home_of(classifier)).run(feeds, convert_to_numpy_ret_vals=True)
        values = run[0]
    else:
        values = np.asarray(classifier(points))
    if values.ndim == 2 and values.shape[1] > 1:
        return values.argmax(axis=1)
    return (values.reshape(len(points)) > 0).astype(np.int64)


def _draw_regions(axes: Any, x: np.ndarray, y: np.ndarray, regions: np.ndarray) -> None:
    count = int(regions.max()) + 1
    colors = np.array([(*_rgb(_color(k)), 0.22) for k in range(count)])
    extent = (x[0], x[-1], y[0], y[-1])
    axes.imshow(colors[regions], origin="lower", extent=extent, aspect="auto", interpolation="none")
    for k in np.unique(regions)[1:]:
        axes.contour(x, y, regions == k, levels=[0.5], colors=INK, linewidths=0.8)


def _color(k: int) -> str:
    return COLORS[int(k) % len(COLORS)]


def _rgb(color: str) -> tuple[float, float, float]:
    red, green, blue = (int(color[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return red, green, blue

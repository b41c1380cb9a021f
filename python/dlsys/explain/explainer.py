"""Maps of evidence as functions of the graph: of gradients, and of what hiding a part changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import functional as F
from ..autodiff import Executor, Node, Variable, gradients
from ..describe import described
from ..errors import GraphError, ShapeError, quoted
from ..graph.node import find_topo_sort
from ..nn import Module
from ..ops.leaf import home_of

METHODS = ("grad_cam", "saliency", "grad_cam++", "integrated_gradients", "occlusion")
Ask = Callable[[np.ndarray, np.ndarray], Any]
_ROWS = 32  # images that occlusion shows the model at once, at least one of each sample


class Explanation(NamedTuple):
    """Maps of evidence with the predictions that they are about.

    maps: (n, H, W) float32 from 0 to 1, the size of the images; a map without any evidence is 0.
    classes: (n,) int64, what each map speaks for. probabilities: (n, classes) float32.
    """

    maps: np.ndarray
    classes: np.ndarray
    probabilities: np.ndarray

    def peaks(self) -> np.ndarray:
        """Where each map is strongest: (n, 2) int64, row and column. Of several such pixels, as at
        the edge of an image, where a map of few cells is constant, it is the one nearest to their
        middle.
        """
        found = np.zeros((len(self.maps), 2), np.int64)
        for k, values in enumerate(self.maps):
            strongest = np.argwhere(values == values.max())
            apart = np.abs(strongest - strongest.mean(axis=0)).sum(axis=1)
            found[k] = strongest[apart.argmin()]
        return found


class Explainer:
    """A model with the program that explains it: call it with images (n, C, H, W).

    model: a classifier, whose output is logits (n, classes). It is used in inference mode, with the
    weights that it has at each call. method: one of METHODS, "grad_cam" by default. layer: the name
    of the layer whose output Grad-CAM and Grad-CAM++ weigh; by default the last images of more than
    one pixel in the graph, before a pooling if they come from one: in LeNet5 the second ReLU's.
    ctx: where it runs, by default where the model's Parameters are. steps: of integrated gradients.
    window: pixels (height, width) that occlusion hides at once, by default an eighth of the image,
    at least 3; it moves by half of it.

    Grad-CAM (Selvaraju et al., 2017) is relu(Σ_c w_c A_c), where A are the channels of that layer,
    and w_c is the mean over all positions of g = ∂ logit / ∂ A_c; it is resized to the image.
    Grad-CAM++ (Chattopadhyay et al., 2018) takes w_c = Σ α relu(g) with
    α = g² / (2 g² + g³ Σ A_c), so that a thing counts wherever it is, however small.
    Saliency (Simonyan et al., 2014) is |∂ logit / ∂ x|, the largest of the channels of the image x.
    Integrated gradients (Sundararajan et al., 2017) are x times the mean of ∂ logit / ∂ x on the
    way from an image of 0, in the values that the model takes, to x: of `steps` points in the
    middles of as many parts; the map is the size of their sum over channels. Occlusion (Zeiler and
    Fergus, 2014) is how much the logit falls when a window is 0, the mean over the windows
    that a pixel lies in, where that is above 0. The last three need no layer, so that they explain
    a network without convolutions too.

    >>> explainer = explain.Explainer(nn.LeNet5(seed=0))
    >>> explainer(np.ones((2, 1, 28, 28), np.float32)).maps.shape
    (2, 28, 28)
    """

    __repr__ = described

    def __init__(
        self,
        model: Module,
        method: str = "grad_cam",
        layer: str | None = None,
        ctx: Any = None,
        *,
        steps: int = 32,
        window: tuple[int, int] | None = None,
    ) -> None:
        if method not in METHODS:
            raise GraphError(
                f"Explainer: method {quoted(method)}, expected one of {', '.join(METHODS)}"
            )
        if steps < 1 or (window is not None and min(window) < 1):
            raise GraphError(f"Explainer: expected steps and window >= 1, got {steps} and {window}")
        self.method, self.layer, self.steps, self.window = method, layer, steps, window
        self._model, self._ctx = model, ctx
        self._programs: dict[tuple[int, ...], tuple[Executor, Node, Node]] = {}

    def __call__(self, samples: Any, classes: Any = None) -> Explanation:
        """The maps of images.

        samples: (n, C, H, W), uint8 or floats as the model was trained on them, and normalized as
        they were then (`model.trained_on`). classes: an index for each image, or one for all; by
        default each image's likeliest class. ShapeError for what is no images, or an index that is
        none of the model's classes; GraphError where the model has no layer as Grad-CAM needs it.
        """
        images = self._prepared(np.asarray(samples))
        executor, x, wanted = self._program(images.shape[1:])
        indices = self._indices(classes, len(images), executor.eval_node_list[2].shape)

        def ask(images: np.ndarray, indices: np.ndarray) -> Any:
            return executor.run({x: images, wanted: indices}, True)

        maps, predicted, probabilities = ask(images, indices)  # of occlusion: the logits
        chosen = np.where(indices < 0, predicted, indices)
        if self.method == "integrated_gradients":
            maps = np.abs(self._integrated(ask, images, chosen).sum(axis=1))
        elif self.method == "occlusion":
            maps = self._occluded(ask, images, chosen, maps)
        highest = maps.max(axis=(1, 2), keepdims=True)
        maps = np.divide(maps, highest, out=np.zeros_like(maps), where=highest > 0)
        return Explanation(maps, chosen, probabilities)

    def _prepared(self, samples: np.ndarray) -> np.ndarray:
        if samples.ndim != 4 or 0 in samples.shape:
            raise ShapeError(f"Explainer: expected images (n, C, H, W), got {samples.shape}")
        trained_on = self._model.trained_on
        prepared = samples if trained_on is None else trained_on.prepared(samples)
        return prepared.astype(np.float32, copy=False)

    @staticmethod
    def _indices(classes: Any, count: int, shape: Any) -> np.ndarray:
        """The class of each image, -1 for its likeliest."""
        given = -1 if classes is None else classes
        indices = np.broadcast_to(np.asarray(given, np.int64), (count,))
        if classes is not None and not ((indices >= 0) & (indices < shape[1])).all():
            raise ShapeError(
                f"Explainer: class {quoted(classes)} is out of range: there are {shape[1]}, "
                "counted from 0"
            )
        return indices

    def _program(self, shape: tuple[int, ...]) -> tuple[Executor, Node, Node]:
        if shape not in self._programs:
            x = Variable("x", (None, *shape), np.float32)
            wanted = Variable("class", (None,), np.int64)
            with self._model.in_mode(False):
                calls = self._model.calls(x)
            logits = calls[0].output
            if not isinstance(logits, Node) or len(logits.shape or ()) != 2:
                raise GraphError("Explainer: expected a model whose output is logits (n, classes)")
            predicted = F.argmax(logits, axis=1)
            chosen = F.where(wanted < 0, predicted, wanted)
            mark = F.one_hot(chosen, logits.shape[1])
            if self.method == "occlusion":
                evidence = F.sum(logits * mark, axis=1)
            else:
                evidence = self._evidence(x, calls, F.sum(logits * mark))
            ctx = home_of(self._model) if self._ctx is None else self._ctx
            fetches = [evidence, predicted, F.softmax(logits, axis=1)]
            self._programs[shape] = Executor(fetches, ctx), x, wanted
        return self._programs[shape]

    def _evidence(self, x: Node, calls: Any, score: Node) -> Node:
        """The map (n, H, W) before it is scaled to 1; of integrated gradients the gradient."""
        if self.method == "saliency":
            return F.max(F.abs(gradients(score, [x])[0]), axis=1)
        if self.method == "integrated_gradients":
            return gradients(score, [x])[0]
        features = self._features(x, calls)
        (slope,) = gradients(score, [features])
        weights = self._channel_weights(slope, features)
        found = F.relu(F.sum(weights * features, axis=1, keepdims=True))
        found = F.resize(found, size=x.shape[2:], mode="bilinear")
        return F.squeeze(found, 1)

    def _channel_weights(self, slope: Node, features: Node) -> Node:
        """How much each channel of a layer counts, (n, C, 1, 1)."""
        if self.method == "grad_cam":
            return F.mean(slope, axis=(2, 3), keepdims=True)
        square = slope * slope
        total = F.sum(features, axis=(2, 3), keepdims=True)
        below = 2.0 * square + square * slope * total
        alpha = F.where(below != 0.0, square / F.where(below != 0.0, below, 1.0), 0.0)
        return F.sum(alpha * F.relu(slope), axis=(2, 3), keepdims=True)

    # ---- methods that ask the model several times ----
    def _integrated(self, ask: Ask, images: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """The share (n, C, H, W) of each value of prepared images in the logit of a class, less
        that of an image of 0: the shares' sum is that difference, nearly.
        """
        total = np.zeros_like(images)
        for k in range(self.steps):
            part = np.float32((k + 0.5) / self.steps)
            total += ask(images * part, classes)[0]
        return images * total / np.float32(self.steps)

    def _occluded(
        self, ask: Ask, images: np.ndarray, classes: np.ndarray, found: np.ndarray
    ) -> np.ndarray:
        """The mean fall of the logits `found` over the windows that a pixel lies in."""
        count, _, *extents = images.shape
        size = self.window or tuple(max(extent // 8, 3) for extent in extents)
        windows = [
            (slice(i, i + size[0]), slice(j, j + size[1]))
            for i in _starts(extents[0], size[0])
            for j in _starts(extents[1], size[1])
        ]
        falls = np.zeros((count, *extents), np.float32)
        met = np.zeros(extents, np.float32)
        at_once = max(_ROWS // count, 1)
        for k in range(0, len(windows), at_once):
            part = windows[k : k + at_once]
            hidden = np.tile(images, (len(part), 1, 1, 1))
            for j, (rows, columns) in enumerate(part):
                hidden[j * count : (j + 1) * count, :, rows, columns] = 0
            left = ask(hidden, np.tile(classes, len(part)))[0].reshape(-1, count)
            for (rows, columns), values in zip(part, left):
                falls[:, rows, columns] += (found - values)[:, None, None]
                met[rows, columns] += 1
        return np.maximum(falls / met, 0)

    def _features(self, x: Node, calls: Any) -> Node:
        """The output of the layer that Grad-CAM weighs."""
        if self.layer is not None:
            named = {call.name: call.output for call in calls}
            if self.layer not in named:
                raise GraphError(
                    f"Explainer: the model has no layer {quoted(self.layer)}; it has "
                    f"{', '.join(name for name in named if name)}"
                )
            if not _is_images(named[self.layer]):
                raise GraphError(f"Explainer: layer {quoted(self.layer)} makes no images")
            return named[self.layer]
        order = find_topo_sort([calls[0].output])
        found = [node for node in order if node is not x and _is_images(node)]
        if not found:
            raise GraphError(
                "Explainer: Grad-CAM needs a layer that makes images, and the model has none: use "
                'method="saliency"'
            )
        last = found[-1]
        while (before := _unpooled(last)) is not None:
            last = before
        return last


def _starts(extent: int, size: int) -> list[int]:
    """Where windows begin that move by half of their size and meet each pixel."""
    last = max(extent - size, 0)
    return [*range(0, last, max(size // 2, 1)), last]


def _unpooled(node: Node) -> Node | None:
    """The input of a pooling: it has as many channels and more pixels."""
    before = node.inputs[0] if node.inputs else None
    if before is None or not _is_images(before) or before.op.leaf:
        return None
    pools = before.shape[1] == node.shape[1] and _pixels(before) > _pixels(node)
    return before if pools else None


def _is_images(node: Any) -> bool:
    """True for (n, C, H, W) of more than one pixel."""
    shape = getattr(node, "shape", None) or ()
    return len(shape) == 4 and None not in shape[2:] and _pixels(node) > 1


def _pixels(node: Node) -> int:
    return int(np.prod(node.shape[2:]))


def grad_cam(
    model: Module, samples: Any, classes: Any = None, layer: str | None = None, ctx: Any = None
) -> Explanation:
    """The Grad-CAM of images, see `Explainer`, of which one is made for this call.

    model, samples, classes, layer, ctx: as there. ShapeError and GraphError as there.

    >>> model = nn.LeNet5(seed=0)
    >>> explained = explain.grad_cam(model, np.ones((1, 1, 28, 28), np.float32), classes=3)
    >>> explained.maps.shape, explained.classes
    ((1, 28, 28), array([3]))
    """
    return Explainer(model, "grad_cam", layer, ctx)(samples, classes)


def saliency(model: Module, samples: Any, classes: Any = None, ctx: Any = None) -> Explanation:
    """The saliency of images, see `Explainer`, of which one is made for this call.

    model, samples, classes, ctx: as there. ShapeError and GraphError as there.

    >>> model = nn.MLP((784, 10), seed=0)
    >>> explain.saliency(model, np.ones((1, 1, 28, 28), np.float32)).maps.max()
    np.float32(1.0)
    """
    return Explainer(model, "saliency", None, ctx)(samples, classes)


def grad_cam_plus_plus(
    model: Module, samples: Any, classes: Any = None, layer: str | None = None, ctx: Any = None
) -> Explanation:
    """The Grad-CAM++ of images, see `Explainer`, of which one is made for this call.

    model, samples, classes, layer, ctx: as there. ShapeError and GraphError as there.

    >>> images = np.ones((1, 1, 28, 28), np.float32)
    >>> explain.grad_cam_plus_plus(nn.LeNet5(seed=0), images).maps.shape
    (1, 28, 28)
    """
    return Explainer(model, "grad_cam++", layer, ctx)(samples, classes)


def integrated_gradients(
    model: Module, samples: Any, classes: Any = None, ctx: Any = None, *, steps: int = 32
) -> Explanation:
    """The integrated gradients of images, see `Explainer`, of which one is made for this call.

    model, samples, classes, ctx, steps: as there. ShapeError and GraphError as there.

    >>> model = nn.MLP((784, 10), seed=0)
    >>> explain.integrated_gradients(model, np.ones((1, 1, 28, 28), np.float32)).maps.max()
    np.float32(1.0)
    """
    return Explainer(model, "integrated_gradients", None, ctx, steps=steps)(samples, classes)


def occlusion(
    model: Module,
    samples: Any,
    classes: Any = None,
    ctx: Any = None,
    *,
    window: tuple[int, int] | None = None,
) -> Explanation:
    """The occlusion of images, see `Explainer`, of which one is made for this call.

    model, samples, classes, ctx, window: as there. ShapeError and GraphError as there.

    >>> images = np.ones((1, 1, 28, 28), np.float32)
    >>> explain.occlusion(nn.LeNet5(seed=0), images, window=(7, 7)).maps.shape
    (1, 28, 28)
    """
    return Explainer(model, "occlusion", None, ctx, window=window)(samples, classes)

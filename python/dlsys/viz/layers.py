"""The activations of a model's layers for one image."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ..autodiff import Executor, Node, Variable
from ..errors import DataError
from ..ops.leaf import home_of
from .figure import INK, new_figure
from .images import draw_activations, draw_input
from .samples import is_set, labeled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def layer_activations(model: Any, image: Any, limit: int = 32, layers: int = 12) -> Figure:
    """The output of each layer of a model (an `nn.Module`) for one image without batch axis: an
    array; a file, which is made to the size of those that the model was trained on; or the first
    sample of a Loader or a Dataset.

    Shown are the image, where it is one, and the first `layers` layers that have no children, with
    up to `limit` planes each. The model is run in evaluation mode where its Parameters live, and
    keeps its mode.
    """
    if isinstance(image, (str, os.PathLike)):
        image = _read(model, image)
    elif is_set(image):
        image = labeled("layer_activations", image).samples[0]
    values = list(layer_values(model, image).items())
    drawn = values[:layers]
    figure = new_figure(6.6, 4)
    array = np.asarray(image)
    seen = array.ndim == 3 and array.shape[0] in (1, 3)
    grid = figure.add_gridspec(seen + len(drawn), 1)
    heights = [draw_input(figure, grid[0], array)] if seen else []
    for k, (name, value) in enumerate(drawn, seen):
        heights.append(draw_activations(figure, grid[k], value, limit, name))
    if len(values) > layers:
        figure.supxlabel(f"layers that follow: {len(values) - layers}", color=INK, fontsize=9)
        heights[-1] += 0.2
    grid.set_height_ratios(heights)
    figure.set_size_inches(6.6, sum(heights) + 0.2)
    return figure


def layer_values(model: Any, image: Any) -> dict[str, np.ndarray]:
    """The outputs of a model's innermost layers for one image, in the order of use, without batch
    axis. The image is normalized as those that the model was trained on. Layers that leave the
    values as they are, such as dropout, are left out.
    """
    array = np.asarray(prepared(model, np.asarray(image)[None])[0], np.float32)
    x = Variable("image", shape=(1, *array.shape), dtype=np.float32)
    with model.in_mode(training=False):
        calls = model.calls(x)
    inner = [call for call in calls if not list(call.module.children())]
    names = [f"{call.name or 'model'} {type(call.module).__name__}" for call in inner]
    outputs: list[Node] = [call.output for call in inner]
    run = Executor(outputs, home_of(model)).run({x: array[None]}, convert_to_numpy_ret_vals=True)
    found, before = {}, array
    for name, (value,) in zip(names, run):
        if not np.array_equal(value.reshape(-1), before.reshape(-1)):
            found[name] = value
        before = value
    return found


def _read(model: Any, path: Any) -> np.ndarray:
    if getattr(model, "trained_on", None) is None:
        raise DataError(f"{path}: nobody noted the size of the images that this model takes")
    return np.asarray(model.trained_on.images_in(path)[0])


def prepared(model: Any, samples: np.ndarray) -> np.ndarray:
    """Samples (n, …) as a model takes them: normalized as what it was trained on."""
    trained_on = getattr(model, "trained_on", None)
    return samples if trained_on is None else trained_on.prepared(samples)

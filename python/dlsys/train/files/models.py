"""Models in files: their weights, and how they are built, as plain data.

A checkpoint's header may have a `model`, its recipe: {"class": …, "arguments": […], "options": {…}}
with numbers, texts, lists, further recipes, and {"function": "functional.relu"}. Classes are looked
up in `dlsys.nn` alone and functions among those of dlsys, so that a file can name no other code.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ... import autodiff, functional, init, nn
from ...dtypes import bfloat16
from ...errors import DataError, DlsysError, quoted
from ...nn import Module
from . import checkpoint
from .schema import anything, check, fields, items, maybe, named, text

_DRAWN = ("rng", "seed", "initializer")  # options that only say which weights a layer begins with
_FUNCTIONS = {"functional": functional, "autodiff": autodiff, "init": init}
_SPARE = 1 << 20  # elements that a model may draw beyond those that its file has
_PATH = re.compile(r"models\.[a-z]\w*\.[A-Z]\w*|[A-Z]\w*")
_RECIPE = fields(**{"class": text, "arguments": maybe(items(anything)), "options": named(anything)})


def save(
    path: str | Path,
    model: Module | Mapping[str, np.ndarray],
    header: Mapping[str, Any] | None = None,
    narrow: Container[str] = (),
) -> None:
    """Writes a model: its state, how it is built, and the description of the data that it was
    trained on, for `load_model`. Arrays and a header in its place are written as
    `checkpoint.save` does. A file of that name stays as it is until the new one is complete.

    narrow: names of float32 arrays that are stored as bfloat16, whose values they have. DataError
    when it cannot be written.

    >>> train.save("model.safetensors", nn.MLP((2, 8, 3), seed=0))
    >>> train.load_model("model.safetensors")(dl.zeros(1, 2)).shape
    (1, 3)
    """
    if not isinstance(model, Module):
        checkpoint.save(path, model, header or {}, narrow)
        return
    state = {f"model.{name}": parameter for name, parameter in model.named_state()}
    about = model.trained_on and model.trained_on.as_dict()
    checkpoint.save(
        path,
        {name: parameter.asnumpy() for name, parameter in state.items()},
        {**(header or {}), "model": recipe_of(model), "trained_on": about},
        {name for name, parameter in state.items() if parameter.dtype is bfloat16},
    )


def load_model(path: str | Path, model: type[Module] | Module | None = None) -> Module:
    """The model of a file that `save`, or the Checkpoint of a run, wrote; of a folder the last one.

    model: the class of a model of one's own, which is called with the arguments that the saved one
    was made with, or a model that takes the weights over. Models of layers of `dlsys.nn`, and the
    ready ones in `dlsys.nn.models`, need none. The model is on the host, in training mode, and has
    `trained_on`, by which `predict` normalizes.

    DataError for a file that is none, or whose model cannot be built from what it says, or is far
    larger than the weights in it: no memory is taken for such a one.

    >>> train.save("model.safetensors", nn.Sequential(nn.Linear(2, 3), nn.Tanh()))
    >>> train.load_model("model.safetensors")
    Sequential(
      0: Linear(2, 3)
      1: Tanh()
    )
    """
    saved = checkpoint.load(path)
    state = saved.part("model")
    if not isinstance(model, Module):
        # Tied weights are drawn before they are tied, so that each is drawn twice.
        with init.at_most(_SPARE + 2 * sum(array.size for array in state.values())):
            model = _built(str(path), saved.header.get("model"), model)
    model.load_state_dict(state)
    return model


def recipe_of(model: Module) -> dict[str, Any]:
    """The recipe of a model. `arguments` is None where one of them is no plain data."""
    args, options = model.made_with
    kept = {name: value for name, value in options.items() if name not in _DRAWN}
    if type(model) is nn.Sequential:
        args = tuple(model)
    made: dict[str, Any] = {"class": _class_name(type(model)), "arguments": None, "options": {}}
    try:
        plain = {name: _plain(value) for name, value in kept.items()}
        return made | {"arguments": [_plain(value) for value in args], "options": plain}
    except TypeError:
        return made


# ---- to plain data ----
def _class_name(kind: type[Module]) -> str:
    if getattr(nn, kind.__name__, None) is kind:
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("dlsys.nn.")


def _plain(value: Any) -> Any:
    """TypeError for what is no plain data."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Module):
        recipe = recipe_of(value)
        if recipe["arguments"] is None or not _PATH.fullmatch(recipe["class"]):
            raise TypeError
        return recipe
    name = getattr(value, "__name__", "")
    for prefix, module in _FUNCTIONS.items():
        if name and getattr(module, name, None) is value:
            return {"function": f"{prefix}.{name}"}
    raise TypeError


# ---- from plain data ----
def _built(what: str, recipe: Any, kind: type[Module] | None) -> Module:
    if recipe is None:
        raise DataError(
            f"{what} does not say how its model is built: load_model(path, model) takes a model "
            "for its weights"
        )
    check(what, recipe, _RECIPE)
    name = recipe["class"]
    if kind is None and not _PATH.fullmatch(name):
        raise DataError(
            f"{what} is of a model of the class {quoted(name)}, which is no part of dlsys: pass "
            "the class or a model, load_model(path, MyModel)"
        )
    if recipe["arguments"] is None:
        raise DataError(
            f"{what}: {quoted(name)} was made with arguments that are no plain data: pass a model "
            "that takes the weights over, load_model(path, model)"
        )
    kind = kind or _class_of(what, name)
    args = [_value(what, value) for value in recipe["arguments"]]
    options = {name: _value(what, value) for name, value in recipe["options"].items()}
    try:
        return kind(*args, **options)
    except (TypeError, DlsysError, MemoryError) as error:
        raise DataError(f"{what}: {kind.__name__} cannot be built as it says: {error}") from error


def _class_of(what: str, name: str) -> type[Module]:
    module, _, own = name.rpartition(".")
    try:
        found = getattr(import_module(f"dlsys.nn.{module}") if module else nn, own)
    except (ImportError, AttributeError):
        found = None
    if not (isinstance(found, type) and issubclass(found, Module)):
        raise DataError(f"{what} names a layer that this dlsys does not have: {quoted(name)}")
    return found


def _value(what: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value(what, item) for item in value)
    if not isinstance(value, dict):
        return value
    if "class" in value:
        return _built(what, value, None)
    prefix, _, name = str(value.get("function")).partition(".")
    found = getattr(_FUNCTIONS.get(prefix), name, None)
    if name.startswith("_") or not callable(found):
        raise DataError(f"{what} names a function that this dlsys does not have: {quoted(value)}")
    return found

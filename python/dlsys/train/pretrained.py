"""Weights of GPT-2 from the files in which others publish them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DataError, how_to_install
from ..files import opened
from ..nn.models.gpt import GPT, gpt2_config
from . import safetensors, schema

_FILES = ("model.safetensors", "pytorch_model.bin")  # in a folder, the first of them that is there


def load_gpt2(path: str | Path, heads: int | None = None) -> GPT:
    """The model of a GPT-2 checkpoint: a safetensors file, a PyTorch state file, which needs
    PyTorch, or a folder with one of them and perhaps a `config.json`.

    heads: how many a layer has, by default as `config.json` says, else features / 64, as of every
    public GPT-2. The sizes are those of the arrays; the model is on the host, in training mode,
    without dropout. DataError for what is no GPT-2 checkpoint, and where PyTorch is missing.
    """
    path = Path(path)
    if path.is_dir():
        heads = heads or _heads_in(path / "config.json")
        found = [path / name for name in _FILES if (path / name).exists()]
        if not found:
            raise DataError(f"{path} has no {' and no '.join(_FILES)}")
        path = found[0]
    values = _values(path)
    model = GPT(gpt2_config(values, heads), seed=0)
    model.load_gpt2(values)
    return model


def _heads_in(path: Path) -> int | None:
    """The heads that a configuration names, None where there is no such file."""
    if not path.exists():
        return None
    try:
        with opened(path) as file:
            found = json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON file: {error}") from None
    schema.check(str(path), found, schema.fields(n_head=schema.integer(1)))
    return found["n_head"]


def _values(path: Path) -> Mapping[str, Any]:
    if path.suffix == ".safetensors":
        return safetensors.read(path).tensors
    try:
        import torch
    except ImportError:
        raise DataError(
            f"{path}: a PyTorch state file needs PyTorch ({how_to_install('torch')}); a "
            "safetensors file needs nothing more"
        ) from None
    try:
        with opened(path) as file:
            values = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(f"{path} is no PyTorch state file: {error}") from None
    if not isinstance(values, Mapping):
        raise DataError(f"{path} has no weights by name, but a {type(values).__name__}")
    return {name: value.float().numpy() for name, value in values.items()}

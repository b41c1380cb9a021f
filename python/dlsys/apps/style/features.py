"""Networks whose layers say what a picture shows and how it is painted: EfficientNet-Lite0, and VGG
from a file that the user has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ... import functional as F
from ... import nn, train
from ...autodiff import Node
from ...errors import DataError
from ...runtime.device import Context
from ...train import safetensors

Array = np.ndarray[Any, Any]

EFFICIENTNET = "efficientnet"
# The first layers of blocks, which are wide and behind a ReLU6: what blocks give out is neither.
_LITE_STYLE = (
    "stem", "blocks.1.expand", "blocks.2.expand", "blocks.4.expand", "blocks.7.expand",
    "blocks.10.expand",
)  # fmt: skip
_LITE_CONTENT = "blocks.7.expand"
_LITE_LAST = 11  # blocks that are computed
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as torchvision's VGG
# Convolutions of torchvision's VGG between poolings.
_VGG = {13: (2, 2, 3, 3, 3), 16: (2, 2, 4, 4, 4)}
_VGG_NAME = re.compile(r"features\.(\d+)\.(weight|bias)")


class Features:
    """A frozen network and the layers that losses compare.

    model: with the layers in its `activations`. mean, std: by which pixels in [0, 1] are
    normalized, a number a channel. content: the name of the layer whose values are compared.
    style: those whose Gram matrices are.
    """

    def __init__(
        self,
        model: nn.Module,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        content: str,
        style: tuple[str, ...],
    ) -> None:
        self.model, self.content, self.style = model.freeze(), content, style
        self._scale = 1 / np.asarray(std, np.float32).reshape(-1, 1, 1)
        self._shift = np.asarray(mean, np.float32).reshape(-1, 1, 1) * self._scale

    def to(self, ctx: Context | None) -> Features:
        """The same, with its weights on a device."""
        self.model.to(ctx)
        return self

    def of(self, x: Node) -> dict[str, Node]:
        """The layers' outputs by name, of x (N, 3, H, W) in [0, 1]."""
        with self.model.in_mode(False):
            found = self.model.activations(x * self._scale - self._shift)
        return {name: found[name] for name in {self.content, *self.style}}


def load(source: str) -> Features:
    """Features by name, "efficientnet", or those of VGG16 or VGG19 from a file with torchvision's
    names, a PyTorch state file or safetensors. DataError where there are none.
    """
    if source == EFFICIENTNET:
        model = train.load_efficientnet_lite()
        about = model.trained_on
        assert about is not None
        return Features(_LiteTrunk(model), about.mean, about.std, _LITE_CONTENT, _LITE_STYLE)
    path = Path(source)
    arrays = (
        safetensors.read(path).tensors
        if path.suffix == ".safetensors"
        else train.read_torch_file(path)
    )
    return vgg(source, arrays)


def vgg(what: str, arrays: Mapping[str, Array]) -> Features:
    """The features of a VGG state with torchvision's names, `features.0.weight` and so on, of any
    widths; what classifies is left out. DataError, naming `what`, for other arrays.
    """
    found: dict[int, dict[str, Array]] = {}
    for name, value in arrays.items():
        if match := _VGG_NAME.fullmatch(name):
            found.setdefault(int(match[1]), {})[match[2]] = np.asarray(value, np.float32)
    stages = _VGG.get(len(found))
    layers, relus = _vgg_layers(stages or ())
    wanted = [k for k, layer in enumerate(layers) if layer == "conv"]
    if stages is None or sorted(found) != wanted or any(len(part) < 2 for part in found.values()):
        raise DataError(
            f"{what} has no features of VGG16 or VGG19 with torchvision's names: expected "
            f"features.0.weight and so on of 13 or 16 convolutions, without batch normalization, "
            f"found {len(found)}"
        )
    model = nn.Sequential(*(_vgg_layer(what, name, found.get(k)) for k, name in enumerate(layers)))
    style = tuple(str(stage[0]) for stage in relus)
    content = str(relus[3][1])  # the second of the fourth stage, as Gatys et al. take
    return Features(model, _MEAN, _STD, content, style)


# ---- their parts ----
class _LiteTrunk(nn.Module):
    """The first blocks of EfficientNet-Lite0, with its names."""

    def __init__(self, model: nn.EfficientNetLite) -> None:
        self.stem, self.blocks = model.stem, model.blocks[:_LITE_LAST]

    def forward(self, x: Node) -> Node:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def _vgg_layers(stages: tuple[int, ...]) -> tuple[list[str], list[list[int]]]:
    """The kinds of VGG's layers up to the last ReLU, and the numbers of the ReLUs by stage."""
    layers: list[str] = []
    relus: list[list[int]] = []
    for count in stages:
        layers += ["pool"] if layers else []
        relus.append([])
        for _ in range(count):
            layers += ["conv", "relu"]
            relus[-1].append(len(layers) - 1)
    return layers, relus


def _vgg_layer(what: str, kind: str, arrays: Mapping[str, Array] | None) -> nn.Module:
    if arrays is None:
        return nn.ReLU() if kind == "relu" else nn.MaxPool2d(2)
    weight = arrays["weight"]
    if weight.ndim != 4 or weight.shape[2:] != (3, 3) or arrays["bias"].shape != weight.shape[:1]:
        raise DataError(f"{what} has a convolution {weight.shape}, where VGG's are 3 x 3")
    layer = nn.Conv2d(weight.shape[1], weight.shape[0], 3, padding=1, initializer=_drawn_nothing)
    layer.load_state_dict(arrays)
    return layer


def _drawn_nothing(shape: tuple[int, ...], rng: Any) -> Array:
    return np.zeros(shape, np.float32)


def gram(x: Node) -> Node:
    """The Gram matrices (N, C, C) of maps (N, C, H, W): products of channels, the mean over all
    positions, so that pictures of any size compare.
    """
    count, channels, height, width = x.shape
    rows = F.reshape(x, (count, channels, height * width))
    return F.matmul(rows, F.transpose(rows, (0, 2, 1))) / float(height * width)

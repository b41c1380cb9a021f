"""The losses of style transfer as functions of the graph (Gatys, Ecker and Bethge, 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import functional as F
from ...autodiff import Executor, Node, constant
from ...runtime.device import Context
from .features import Features, gram

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Weights:
    """How much the style and the total variation count beside the content, which counts 1."""

    style: float = 100.0
    variation: float = 10.0


class Losses:
    """Content, style and total variation of pictures against a style's picture.

    Content and style are relative: 0 where nothing differs, and 1 for features, or Gram matrices,
    of 0. So weights mean the same for networks whose features are large and small, which those of
    the papers do not. features: the network. painting: the style's picture (h, w, 3) in [0, 1].
    """

    def __init__(
        self, features: Features, painting: Array, weights: Weights, ctx: Context | None
    ) -> None:
        self._features, self._weights = features.to(ctx), weights
        found = features.of(constant(in_planes(painting)))
        values = Executor([gram(found[name]) for name in features.style], ctx=ctx).run({}, True)
        self._grams = dict(zip(features.style, values))

    def content_of(self, photo: Node) -> Node:
        """What the content loss compares, of photos (N, 3, H, W) in [0, 1]."""
        return self._features.of(photo)[self._features.content]

    def of(self, picture: Node, wanted: Node) -> tuple[Node, Node, Node]:
        """The content loss of pictures (N, 3, H, W) against `content_of` photos, the style loss,
        and the total variation: each a number.
        """
        found = self._features.of(picture)
        content = relative(found[self._features.content], wanted)
        parts = [relative(gram(found[name]), constant(g)) for name, g in self._grams.items()]
        return content, F.mean(F.stack(parts)), variation(picture)

    def total(self, picture: Node, wanted: Node) -> Node:
        """Their sum by the weights."""
        content, style, roughness = self.of(picture, wanted)
        return content + self._weights.style * style + self._weights.variation * roughness


def variation(x: Node) -> Node:
    """The total variation of x (N, C, H, W): the mean square of the differences of neighbors, down
    and across.
    """
    down, across = x[:, :, 1:] - x[:, :, :-1], x[:, :, :, 1:] - x[:, :, :, :-1]
    return F.mean(down * down) + F.mean(across * across)


def in_planes(picture: Array) -> Array:
    """A picture (h, w, 3) as a batch (1, 3, h, w) float32."""
    return np.ascontiguousarray(picture.transpose(2, 0, 1)[None], np.float32)


def relative(found: Node, wanted: Node) -> Node:
    """The squared error to what is wanted in parts of its square; the mean over all samples."""
    error = found - wanted
    return F.mean(error * error) / (F.mean(wanted * wanted) + 1e-12)

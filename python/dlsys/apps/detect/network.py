"""An anchor-free one-stage detector, its losses, and what its numbers mean.

After FCOS (Tian et al., 2019), less its centerness: each position of three feature maps says which
class of thing lies there, if any, and how far the four edges of its box are.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from ... import functional as F
from ... import nn
from ...autodiff import Node
from ...init import generator, normal
from ...ops.boxes import area

Array = np.ndarray[Any, Any]

STRIDES = (8, 16, 32)  # pixels of the image between two positions of a map
_GROUPS = 8  # of channels, by which a head normalizes; they divide a width
_RADIUS = 1.5  # strides around a box's center where positions find it
_REACH = 3.0  # strides: a longer distance to an edge is the next map's affair
_PRIOR = 0.02  # the first probability of each class, so that the many empty positions cost little
_ALPHA, _GAMMA = 0.5, 2.0  # of the focal loss; its paper's α = 0.25 learns slower here
_LARGEST = 5.0  # of the logarithm of a distance in strides, so that exp stays finite


class Detector(nn.Module):
    """Images (n, 3, size, size) to (n, positions, classes + 4): logits of the classes, then the
    logarithms of the distances to the left, upper, right and lower edge in strides. `positions`
    says where these lie. size: a multiple of 32. width: channels of the pyramid.
    """

    def __init__(self, classes: int, width: int = 48, seed: int = 0) -> None:
        rng = generator(seed)
        block = partial(_block, rng=rng)
        self.stem = nn.Sequential(block(3, 16, 2), block(16, 32, 2), block(32, 32))
        self.stages = [
            nn.Sequential(block(a, b, 2), block(b, b)) for a, b in ((32, 64), (64, 96), (96, 128))
        ]
        self.lateral = [nn.Conv2d(inputs, width, 1, rng=rng) for inputs in (64, 96, 128)]
        self.smooth = [block(width, width) for _ in STRIDES]
        self.class_tower = _tower(width, rng)
        self.box_tower = _tower(width, rng)
        small = partial(normal, deviation=0.01)
        self.class_head = nn.Conv2d(width, classes, 3, padding=1, initializer=small, rng=rng)
        self.box_head = nn.Conv2d(width, 4, 3, padding=1, initializer=small, rng=rng)
        prior = np.full(classes, -math.log((1 - _PRIOR) / _PRIOR), np.float32)
        for head, value in ((self.class_head, prior), (self.box_head, np.log([2.0] * 4))):
            assert head.bias is not None
            head.bias.set(value.astype(np.float32))
        self.outputs = classes + 4

    def forward(self, x: Node) -> Node:
        x = self.stem(x)
        maps = []
        for stage, lateral in zip(self.stages, self.lateral):
            x = stage(x)
            maps.append(lateral(x))
        for k in (1, 0):  # what a coarse map knows comes to the finer ones
            maps[k] = maps[k] + F.resize(maps[k + 1], scale=2)
        made = []
        for smooth, found in zip(self.smooth, maps):
            found = smooth(found)
            classes = self.class_head(self.class_tower(found))
            edges = self.box_head(self.box_tower(found))
            both = F.concatenate([classes, edges], axis=1)
            _, _, h, w = both.shape or (0,) * 4
            made.append(F.reshape(F.transpose(both, (0, 2, 3, 1)), (-1, h * w, self.outputs)))
        return F.concatenate(made, axis=1)


def _block(inputs: int, outputs: int, stride: int = 1, *, rng: Any) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False, rng=rng)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def _tower(width: int, rng: Any) -> nn.Module:
    """Layers that all maps share, whose statistics are an image's for that reason."""
    layers: list[nn.Module] = []
    for _ in range(2):
        layers.append(nn.Conv2d(width, width, 3, padding=1, bias=False, rng=rng))
        layers += [nn.GroupNorm(_GROUPS, width), nn.ReLU()]
    return nn.Sequential(*layers)


def distances(output: Node) -> Node:
    """The distances (n, positions, 4) in strides that a Detector's output tells."""
    return F.exp(F.clip(output[:, :, -4:], None, _LARGEST))


# ---- losses ----
def loss(output: Node, target: Node) -> Node:
    """The focal loss of all classes plus the GIoU loss of the boxes, both over the positions that
    have a thing. output: of a Detector. target: of `targets`, a batch of them.
    """
    classes = (target.shape or (0,))[-1] - 4
    wanted, edges = target[:, :, :classes], target[:, :, classes:]
    has_thing = F.sum(wanted, axis=2)
    count = F.maximum(F.sum(has_thing), 1.0)
    found = distances(output)
    focal = focal_loss(output[:, :, :classes], wanted)
    return (F.sum(focal) + F.sum(has_thing * giou_loss(found, edges))) / count


def focal_loss(logits: Node, wanted: Node) -> Node:
    """The focal loss of each element, -α_t (1 - p_t)² log p_t with α = 0.5: Lin et al. (2017).
    wanted: 1 or 0 for each logit.
    """
    p = F.sigmoid(logits)
    miss = wanted + p - 2.0 * wanted * p  # 1 - p_t
    alpha = (1 - _ALPHA) + (2 * _ALPHA - 1) * wanted
    error = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    return alpha * miss**_GAMMA * error


def giou_loss(found: Node, wanted: Node) -> Node:
    """1 - GIoU (Rezatofighi et al., 2019) of two boxes each, (…, 4) to (…), given as the positive
    distances of their left, upper, right and lower edges from a point in both.
    """
    width, height = (found[..., k] + found[..., k + 2] for k in (0, 1))
    wide, high = (wanted[..., k] + wanted[..., k + 2] for k in (0, 1))
    inner, outer = F.minimum(found, wanted), F.maximum(found, wanted)
    both = (inner[..., 0] + inner[..., 2]) * (inner[..., 1] + inner[..., 3])
    around = (outer[..., 0] + outer[..., 2]) * (outer[..., 1] + outer[..., 3])
    union = width * height + wide * high - both
    return 1.0 - both / union + (around - union) / around


# ---- positions ----
def positions(size: int) -> Array:
    """Where a Detector's positions lie in an image of size × size pixels: (positions, 3) float32
    of x, y and the stride, in the order of its output.
    """
    rows = []
    for stride in STRIDES:
        axis = (np.arange(size // stride) + 0.5) * stride
        y, x = np.meshgrid(axis, axis, indexing="ij")
        rows.append(np.stack([x.ravel(), y.ravel(), np.full(x.size, stride)], 1))
    return np.concatenate(rows).astype(np.float32)


def targets(places: Array, boxes: Array, labels: Array, classes: int) -> Array:
    """What a Detector should say of an image with these boxes (k, 4): (positions, classes + 4)
    float32, one-hot classes, all 0 where there is nothing, and distances in strides.

    A position has a thing if it lies in its box, near its center, on the map for its size; the
    smallest of several. A box that no position has so gets the one nearest to its center; one with
    no position within, which is below 8 pixels somewhere, gets none.
    """
    made = np.zeros((len(places), classes + 4), np.float32)
    made[:, classes:] = 1.0  # any distance, so that nothing is infinite where nothing counts
    if not len(boxes):
        return made
    at, stride = places[:, None, :2], places[:, 2]
    edges = np.concatenate([at - boxes[:, :2], boxes[:, 2:] - at], 2)  # (positions, k, 4)
    inside = edges.min(2) > 0
    centers = (boxes[:, :2] + boxes[:, 2:]) / 2
    distance = np.abs(at - centers).max(2)
    reach = edges.max(2) / stride[:, None]
    low = np.where(stride == STRIDES[0], 0, _REACH / 2)[:, None]
    high = np.where(stride == STRIDES[-1], np.inf, _REACH)[:, None]
    own = inside & (distance < _RADIUS * stride[:, None]) & (reach > low) & (reach <= high)
    for k in np.flatnonzero(~own.any(0)):
        apart = np.where(inside[:, k], distance[:, k], np.inf)
        if np.isfinite(apart).any():
            own[int(np.argmin(apart)), k] = True
    sizes = np.where(own, area(boxes), np.inf)
    chosen, rows = sizes.argmin(1), np.flatnonzero(own.any(1))
    made[rows, labels[chosen[rows]]] = 1
    made[rows, classes:] = edges[rows, chosen[rows]] / stride[rows, None]
    return made

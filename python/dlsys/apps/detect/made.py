"""A made set: digits and discs of textures on photographs, all of them from packages.

Things cover each other and come in all sizes. Digits, photographs and the parts of the textures
that are held out are never trained on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...data.formats.decode import require_pillow
from ...errors import DataError, how_to_install
from ..superres.photos import packaged_photos, split
from .scenes import Array, Scene, Scenes, pixels_of, scene

SIDE = 128
_TEXTURES = ("brick", "grass", "gravel")
NAMES = (*map(str, range(10)), *_TEXTURES)
_DIGITS = 1400  # of 1,797, that are trained on; the others are held out
_MOST, _LOW, _HIGH = 6, 20, 64  # things in an image, and pixels of their longer side
_CONTRAST = 70  # of 255: between a digit and the mean of what it lies on
_SEEN = 0.6  # of a thing that must not be covered
_EMPTY = 3  # discs of photographs in a varied scene, at most


def made(count: int, seed: int = 0, held: bool = False) -> Scenes:
    """`count` scenes of 128 × 128 pixels, a function of the arguments alone. held: of what is held
    out. DataError, with what to install, without scikit-learn, scikit-image or Pillow.
    """
    maker = Maker(held)
    numbers = np.random.SeedSequence((seed, held)).spawn(count)
    return Scenes([maker.scene(np.random.default_rng(number)) for number in numbers], NAMES)


class Maker:
    """What scenes are made of. held: of what is held out. varied: photographs turned, in other
    colors and light and with discs of photographs on them, which are nothing to be found: so that
    the few there are to train on do not look alike.
    """

    def __init__(self, held: bool, varied: bool = False) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise DataError(
                "the digits to find are those of scikit-learn, which is not installed: "
                f"{how_to_install('sklearn')}, or name --data of your own"
            ) from None
        self._pillow, self._varied = require_pillow(), varied
        digits = load_digits()
        part = slice(_DIGITS, None) if held else slice(_DIGITS)
        self._digits, self._labels = digits.images[part] / 16, digits.target[part]
        photos = packaged_photos()
        textures = {path.stem: pixels_of(path) for path in photos if path.stem in _TEXTURES}
        # The upper two thirds of a texture are trained on, the rest is held out.
        self._textures = []
        for name in _TEXTURES:
            edge = 2 * len(textures[name]) // 3
            self._textures.append(textures[name][edge:] if held else textures[name][:edge])
        groups = split([path for path in photos if path.stem not in _TEXTURES])
        self._photos = [pixels_of(path) for path in groups[held]]

    def scene(self, rng: np.random.Generator) -> Scene:
        """A scene of 128 × 128 pixels, a function of the generator's state."""
        image = self._background(rng)
        owner = np.full((SIDE, SIDE), -1)  # of each pixel: the last thing that covers it
        things: list[tuple[Any, int, Array]] = []
        for _ in range(rng.integers(1, _MOST + 1)):
            label, color, mask = self._thing(rng)
            h, w = mask.shape
            y, x = rng.integers(0, SIDE - h + 1), rng.integers(0, SIDE - w + 1)
            part = np.s_[y : y + h, x : x + w]
            if color is None:
                color = _ink_on(image[part].mean(), rng)
            covers = mask > 0.5
            hidden = [
                (owner[part][covers] == k).sum() + (whole & (owner != k)).sum()
                > (1 - _SEEN) * whole.sum()
                for k, (_, _, whole) in enumerate(things)
            ]
            if any(hidden):
                continue
            image[part] += mask[..., None] * (color - image[part])
            owner[part][covers] = len(things)
            drawn = np.zeros((SIDE, SIDE), bool)
            drawn[part] = covers
            rows, columns = np.flatnonzero(covers.any(1)), np.flatnonzero(covers.any(0))
            box = (x + columns[0], y + rows[0], x + columns[-1] + 1, y + rows[-1] + 1)
            things.append((box, label, drawn))
        pixels = np.rint(np.clip(image + rng.normal(0, 4, image.shape), 0, 255)).astype(np.uint8)
        return scene(pixels, [(*box, label) for box, label, _ in things])

    def _background(self, rng: np.random.Generator) -> Array:
        photo = self._photos[rng.integers(len(self._photos))]
        image = self._piece(photo, SIDE, SIDE, rng.uniform(1, 2), rng)
        if not self._varied:
            return image
        image = _relit(np.rot90(image, int(rng.integers(4))), rng)
        for _ in range(rng.integers(0, _EMPTY + 1)):
            side = int(rng.integers(_LOW, _HIGH + 1))
            photo = self._photos[rng.integers(len(self._photos))]
            pixels = _relit(self._piece(photo, side, side, rng.uniform(1, 2), rng), rng)
            y, x = rng.integers(0, SIDE - side + 1, 2)
            part = image[y : y + side, x : x + side]
            part += _disc(side)[..., None] * (pixels - part)
        return image

    def _piece(
        self, photo: Array, height: int, width: int, scale: float, rng: np.random.Generator
    ) -> Array:
        """A piece of a photo, reduced by the scale as far as the photo is large enough."""
        scale = min(scale, photo.shape[0] / height, photo.shape[1] / width)
        h, w = int(height * scale), int(width * scale)
        y, x = (rng.integers(0, n - m + 1) for n, m in zip(photo.shape, (h, w)))
        image = self._pillow.fromarray(photo[y : y + h, x : x + w])
        return np.asarray(image.resize((width, height)), np.float32)

    def _thing(self, rng: np.random.Generator) -> tuple[int, Any, Array]:
        """Its label, its pixels, None for ink, and how much it covers each of its rectangle."""
        side = int(np.exp(rng.uniform(np.log(_LOW), np.log(_HIGH))))
        if rng.random() < 0.3:
            k = int(rng.integers(len(_TEXTURES)))
            side = max(side, 24)  # below, a texture is a few gray pixels
            pixels = self._piece(self._textures[k], side, side, rng.uniform(1, 2), rng)
            return 10 + k, pixels * rng.uniform(0.7, 1.2), _disc(side)
        k = int(rng.integers(len(self._digits)))
        ink = self._digits[k]
        ink = ink[:, np.flatnonzero(ink.max(0) > 0.3)]
        height, width = side, max(6, round(side * ink.shape[1] / 8))
        small = self._pillow.fromarray((255 * ink).astype(np.uint8))
        mask = np.asarray(small.resize((width, height), self._pillow.Resampling.BICUBIC)) / 255
        return int(self._labels[k]), None, np.clip(2 * mask - 0.3, 0, 1).astype(np.float32)


def _disc(side: int) -> Array:
    """How much a disc covers each pixel of its square, (side, side) float32."""
    y, x = np.mgrid[:side, :side] + 0.5 - side / 2
    return np.clip(side / 2 - np.hypot(x, y), 0, 1).astype(np.float32)


def _relit(image: Array, rng: np.random.Generator) -> Array:
    """Pixels (h, w, 3) in another light, and half of the time in gray or other colors."""
    kind = rng.integers(4)
    if kind == 0:
        image = np.repeat(image.mean(axis=2, keepdims=True), 3, axis=2)
    elif kind == 1:
        image = image[..., rng.permutation(3)]
    mean = image.mean()
    light = np.clip(mean + rng.uniform(-50, 50), 20, 235)
    return np.clip((image - mean) * rng.uniform(0.5, 1.4) + light, 0, 255).astype(np.float32)


def _ink_on(mean: float, rng: np.random.Generator) -> Array:
    """A color that is much darker or brighter than that."""
    dark, bright = max(mean - _CONTRAST, 0), max(255 - mean - _CONTRAST, 0)
    color = rng.uniform(0, 1, 3)
    return color * dark if rng.random() * (dark + bright) < dark else 255 - color * bright

"""Augmentations of color and size against small cases worked out by hand, and against Pillow."""

from __future__ import annotations

import colorsys
import unittest
from typing import Any
from unittest import mock

import numpy as np

from dlsys.data import (
    CenterCrop,
    ColorJitter,
    Loader,
    RandomResizedCrop,
    Resize,
    SampleRng,
)
from dlsys.errors import DataError

PHOTOS = np.random.default_rng(0).integers(0, 256, (4, 3, 9, 13)).astype(np.uint8)


def drawn(step: Any, images: np.ndarray, value: float) -> np.ndarray:
    """The change when each number drawn is this one."""
    n = len(images)
    with mock.patch.object(SampleRng, "uniform", lambda self, low=0.0, high=1.0: np.full(n, value)):
        return step.change(images, SampleRng(0, 0, np.arange(n)))


class Colors(unittest.TestCase):
    def test_brightness_contrast_and_saturation(self) -> None:
        pixels = np.array([[[[200, 100]], [[100, 0]], [[0, 50]]]], np.uint8)
        brighter = drawn(ColorJitter(brightness=0.5), pixels, 1.5)
        self.assertEqual(brighter[0, :, 0].T.tolist(), [[255, 150, 0], [150, 0, 75]])
        # Grays 118.5 and 35.6, mean 77.05; halfway to it, and to the pixel's own gray.
        flatter = drawn(ColorJitter(contrast=0.5), pixels, 0.5)
        self.assertEqual(flatter[0, :, 0].T.tolist(), [[139, 89, 39], [89, 39, 64]])
        paler = drawn(ColorJitter(saturation=0.5), pixels, 0.5)
        self.assertEqual(paler[0, :, 0].T.tolist(), [[159, 109, 59], [68, 18, 43]])
        floats = drawn(ColorJitter(brightness=0.5), (pixels / 255).astype(np.float32), 1.5)
        np.testing.assert_allclose(floats, np.clip(pixels / 255 * 1.5, 0, 1), rtol=1e-6)

    def test_hue_is_that_of_the_standard_library(self) -> None:
        floats = (PHOTOS[:1] / 255).astype(np.float32)
        for turn in (-0.5, -0.1, 0.25, 0.5):
            made = drawn(ColorJitter(hue=0.5), floats, turn)
            for row, col in ((0, 0), (3, 7), (8, 12)):
                h, s, v = colorsys.rgb_to_hsv(*floats[0, :, row, col].tolist())
                wanted = colorsys.hsv_to_rgb((h + turn) % 1, s, v)
                np.testing.assert_allclose(made[0, :, row, col], wanted, atol=2e-6)
        gray = np.full((1, 3, 2, 2), 77, np.uint8)
        np.testing.assert_array_equal(drawn(ColorJitter(hue=0.5), gray, 0.3), gray)

    def test_against_pillow(self) -> None:
        try:
            from PIL import Image, ImageEnhance
        except ImportError:
            self.skipTest("Pillow is not installed")
        kinds = {"brightness": "Brightness", "contrast": "Contrast", "saturation": "Color"}
        for name, enhancer in kinds.items():
            for factor in (0.4, 1.7):
                made = drawn(ColorJitter(**{name: 0.9}), PHOTOS, factor)
                for image, found in zip(PHOTOS, made):
                    pillow = Image.fromarray(image.transpose(1, 2, 0))
                    wanted = np.asarray(getattr(ImageEnhance, enhancer)(pillow).enhance(factor))
                    # Pillow rounds the gray to a byte first, and cuts where we round.
                    error = np.abs(wanted.transpose(2, 0, 1).astype(int) - found)
                    self.assertLessEqual(error.max(), 2, name)

    def test_samples_change_by_themselves_and_one_channel_has_no_color(self) -> None:
        made = ColorJitter(0.4, 0.4, 0.4, 0.1).change(PHOTOS, SampleRng(0, 0, np.arange(4)))
        self.assertEqual((made.shape, made.dtype), (PHOTOS.shape, np.uint8))
        alone = ColorJitter(0.4, 0.4, 0.4, 0.1).change(PHOTOS[2:3], SampleRng(0, 0, [2]))
        np.testing.assert_array_equal(alone[0], made[2])
        gray = PHOTOS[:, :1]
        same = ColorJitter(saturation=0.5, hue=0.5).change(gray, SampleRng(0, 0, np.arange(4)))
        np.testing.assert_array_equal(same, gray)

    def test_refusals(self) -> None:
        for make in (
            lambda: ColorJitter(-1),
            lambda: ColorJitter(hue=0.6),
            lambda: Resize((0, 3)),
            lambda: RandomResizedCrop((3, 3), scale=(0.5, 1.5)),
            lambda: CenterCrop((10, 3)).change(PHOTOS, SampleRng(0, 0, np.arange(4))),
            lambda: ColorJitter(1).change(PHOTOS[:, :2], SampleRng(0, 0, np.arange(4))),
        ):
            with self.assertRaisesRegex(DataError, "expected|no such part"):
                make()


class Sizes(unittest.TestCase):
    def test_small_cases(self) -> None:
        row = np.array([[[[0, 100, 200, 100]]]], np.float32)
        rng = SampleRng(0, 0, [0])
        # Triangles of 2 pixels on each side: weights 3 3 1 0 of 7 and the mirror image.
        np.testing.assert_allclose(
            Resize((1, 2)).change(row, rng)[0, 0, 0], [500 / 7, 1000 / 7], rtol=1e-6
        )
        np.testing.assert_allclose(
            Resize((1, 8)).change(row, rng)[0, 0, 0], [0, 25, 75, 125, 175, 175, 125, 100]
        )
        self.assertEqual(CenterCrop((1, 2)).change(row, rng)[0, 0, 0].tolist(), [100, 200])

    def test_against_pillow(self) -> None:
        try:
            from PIL import Image
        except ImportError:
            self.skipTest("Pillow is not installed")
        for size in ((5, 6), (18, 30), (9, 4), (3, 20)):
            made = Resize(size).change(PHOTOS, SampleRng(0, 0, np.arange(4)))
            for image, found in zip(PHOTOS, made):
                pillow = Image.fromarray(image.transpose(1, 2, 0))
                wanted = np.asarray(pillow.resize(size[::-1], Image.Resampling.BILINEAR))
                # Pillow's weights have 22 bits: a half may be rounded the other way.
                error = np.abs(wanted.transpose(2, 0, 1).astype(int) - found)
                self.assertLessEqual(error.max(), 1)

    def test_random_resized_crops(self) -> None:
        whole = RandomResizedCrop((9, 13), scale=(1, 1), ratio=(13 / 9, 13 / 9))
        rng = SampleRng(0, 0, np.arange(4))
        np.testing.assert_array_equal(whole.change(PHOTOS, rng), PHOTOS)
        ramp = np.broadcast_to(np.arange(64, dtype=np.float32), (200, 1, 64, 64))
        step = RandomResizedCrop((8, 8), scale=(0.25, 0.25), ratio=(1, 1))
        made = step.change(ramp, SampleRng(0, 0, np.arange(200)))
        spans = made[:, 0, 0, -2] - made[:, 0, 0, 1]
        np.testing.assert_allclose(spans, 20, atol=1e-3)  # 5 of 8 new pixels, each 4 old ones wide
        lefts = made[:, 0, 0, 1] - 5.5
        self.assertTrue(-1e-3 <= lefts.min() < 4 and 28 < lefts.max() <= 32 + 1e-3)

    def test_batches_of_a_loader_have_the_new_size(self) -> None:
        loader = Loader((PHOTOS, np.arange(4)), 2, augment=[RandomResizedCrop((6, 6))])
        self.assertEqual(loader.inputs()[0].attrs["shape"], (None, 3, 6, 6))
        self.assertEqual(next(iter(loader))[0].shape, (2, 3, 6, 6))

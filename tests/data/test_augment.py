"""Augmentations: what each does to pixels, and that it is a function of seed, epoch and sample."""

from __future__ import annotations

import unittest

import numpy as np

from dlsys import data
from dlsys.data import Compose, Crop, Cutout, Flip, Mixup, Rotate, SampleRng, Scale, Shift
from dlsys.data.transforms.warp import warped
from dlsys.errors import DataError

STEPS = (
    Shift(2), Crop((20, 24)), Crop(padding=4, fill=9), Flip(), Flip(vertical=True), Cutout(7),
    Rotate(20), Scale(0.8, 1.3),
)  # fmt: skip


def images(n: int = 60, shape: tuple[int, ...] = (3, 28, 28), dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (n, *shape)).astype(dtype)


def draws(n: int, seed: int = 5, epoch: int = 3) -> SampleRng:
    return SampleRng(seed, epoch, np.arange(n))


class TestSampleRng(unittest.TestCase):
    def test_the_earlier_name_works_with_a_warning(self):
        with self.assertWarnsRegex(DeprecationWarning, "Draws is SampleRng now"):
            self.assertIs(data.Draws, SampleRng)

    def test_a_number_is_of_its_sample_wherever_the_sample_stands(self):
        whole, part = SampleRng(1, 2, np.arange(100)), SampleRng(1, 2, np.array([70, 3, 99]))
        for _ in range(6):  # more than the words of a block
            np.testing.assert_array_equal(whole.words()[[70, 3, 99]], part.words())

    def test_seeds_epochs_samples_and_turns_differ(self):
        made = [
            SampleRng(*given, np.arange(50)) for given in ((1, 2), (2, 2), (1, 3), (1 + 2**32, 2))
        ]
        words = np.stack([d.words() for d in made for _ in range(5)])
        self.assertEqual(len(np.unique(words)), words.size)

    def test_ranges(self):
        d = SampleRng(0, 0, np.arange(20_000))
        u, k = d.uniform(-2, 6), d.integers(-3, 3)
        self.assertTrue(-2 < u.min() < -1.9 and 5.9 < u.max() < 6)
        self.assertLess(abs(u.mean() - 2), 5 * 8 / 12**0.5 / 20_000**0.5)
        counts = np.bincount(k + 3, minlength=7)
        self.assertEqual(counts.size, 7)
        self.assertLess(((counts - 20_000 / 7) ** 2 / (20_000 / 7)).sum(), 25)  # chi-square of 6


class TestEach(unittest.TestCase):
    def test_repeatable_fresh_and_in_the_same_dtype(self):
        for dtype in (np.uint8, np.float32, np.float64):
            x = images(dtype=dtype)
            before = x.copy()
            for step in STEPS:
                with self.subTest(step=step, dtype=dtype):
                    y = step.change(x, draws(60))
                    self.assertEqual(y.dtype, x.dtype)
                    self.assertFalse(np.shares_memory(x, y))
                    np.testing.assert_array_equal(x, before)
                    np.testing.assert_array_equal(y, step.change(x, draws(60)))
                    self.assertFalse(np.array_equal(y, step.change(x, draws(60, epoch=4))))
                    some = np.array([40, 7])
                    np.testing.assert_array_equal(
                        y[some], step.change(x[some], SampleRng(5, 3, some))
                    )

    def test_a_shift_is_a_part_of_the_padded_image(self):
        x = images(400)
        y = Shift(2, fill=7).change(x, draws(400))
        padded = np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)), constant_values=7)
        offsets = set()
        for k in range(400):
            found = [
                (r, c)
                for r in range(5)
                for c in range(5)
                if np.array_equal(padded[k, :, r : r + 28, c : c + 28], y[k])
            ]
            self.assertEqual(len(found), 1)
            offsets |= set(found)
        self.assertEqual(len(offsets), 25)

    def test_a_crop_comes_from_every_place_and_no_other(self):
        x = np.arange(30, dtype=np.float32).reshape(1, 1, 5, 6).repeat(300, axis=0)
        y = Crop((4, 3)).change(x, draws(300))
        self.assertEqual(y.shape, (300, 1, 4, 3))
        self.assertEqual(set(y[:, 0, 0, 0]), {0, 1, 2, 3, 6, 7, 8, 9})
        np.testing.assert_array_equal(y - y[:, :, :1, :1], (x - x[:, :, :1, :1])[:, :, :4, :3])

    def test_flips(self):
        x = images(400)
        for step, flipped in ((Flip(), x[..., ::-1]), (Flip(vertical=True), x[:, :, ::-1])):
            y = step.change(x, draws(400))
            same, turned = ((y == z).all(axis=(1, 2, 3)) for z in (x, flipped))
            self.assertTrue((same ^ turned).all())
            self.assertTrue(150 < turned.sum() < 250)
        np.testing.assert_array_equal(Flip(probability=1).change(x, draws(400)), x[..., ::-1])
        np.testing.assert_array_equal(Flip(probability=0).change(x, draws(400)), x)

    def test_cutout_blanks_one_square_cut_at_the_border(self):
        x = images(500, (2, 9, 11))
        for size in (1, 4, 5):
            y = Cutout(size).change(x, draws(500))
            gone = y != x
            self.assertTrue((y[gone] == 0).all())
            self.assertTrue((gone[:, 0] == gone[:, 1]).all())
            rows, cols = gone[:, 0].any(axis=2), gone[:, 0].any(axis=1)
            np.testing.assert_array_equal(gone[:, 0], rows[:, :, None] & cols[:, None])
            for part in (rows, cols):
                self.assertEqual(part.sum(axis=1).max(), size)
                self.assertGreaterEqual(part.sum(axis=1).min(), (size + 1) // 2)
                self.assertTrue((np.abs(np.diff(part.astype(int), axis=1)).sum(axis=1) <= 2).all())
            self.assertTrue(rows.any(axis=0).all() and cols.any(axis=0).all())

    def test_warps_by_quarter_turns_and_by_nothing_are_exact(self):
        x = images(4, (2, 7, 7))
        for turns in range(4):
            cos, sin = ((1, 0), (0, 1), (-1, 0), (0, -1))[turns]
            matrix = np.array([[cos, sin], [-sin, cos]], float)[None].repeat(4, axis=0)
            np.testing.assert_array_equal(warped(x, matrix), np.rot90(x, turns, (2, 3)))

    def test_a_warp_interpolates_and_fills(self):
        ramp = np.arange(8, dtype=np.float32) * np.ones((1, 1, 8, 1), np.float32)
        y = warped(ramp, np.diag([1.0, 0.5])[None])
        np.testing.assert_allclose(y[0, 0, 3], np.arange(8) / 2 + 1.75, rtol=1e-6)
        far = warped(ramp + 1, np.diag([1.0, 3.0])[None], fill=-5)
        np.testing.assert_allclose(far[0, 0, 0], [-5, -5, -5, 3, 6, -5, -5, -5], rtol=1e-6)

    def test_a_rotation_turns_a_spot_by_its_angle(self):
        x = np.zeros((300, 1, 41, 41), np.float32)
        x[:, :, 18:23, 33:38] = 1  # 15 pixels right of the center
        y = Rotate(30).change(x, draws(300))[:, 0]
        at = np.arange(41) - 20
        mass = y.sum(axis=(1, 2))
        down, right = (y.sum(axis=2) @ at) / mass, (y.sum(axis=1) @ at) / mass
        np.testing.assert_allclose(np.hypot(down, right), 15, atol=0.05)
        angles = np.degrees(np.arctan2(down, right))
        self.assertTrue(-30.1 < angles.min() < -27 and 27 < angles.max() < 30.1)

    def test_a_scale_stretches_by_its_factor(self):
        x = np.zeros((300, 1, 41, 41), np.float32)
        x[:, :, 15:26, 15:26] = 1
        area = Scale(0.5, 2.0).change(x, draws(300)).sum(axis=(1, 2, 3))
        factors = np.sqrt(area / 121)
        self.assertTrue(0.45 < factors.min() < 0.53 and 1.9 < factors.max() < 2.05)

    def test_uint8_is_rounded(self):
        x = images(20)
        exact = Rotate(15).change(x.astype(np.float64), draws(20))
        np.testing.assert_allclose(Rotate(15).change(x, draws(20)), exact, atol=0.501)


class TestMixup(unittest.TestCase):
    def test_images_and_labels_are_mixed_alike(self):
        x, labels = images(50), np.arange(50) % 10
        mixed, weights = Mixup(10, alpha=0.7)(x, labels, draws(50))
        self.assertEqual((mixed.dtype, weights.dtype), (np.float32, np.float32))
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
        share = weights[np.arange(50), labels]
        self.assertGreater(np.ptp(share), 0.5)
        for k in range(50):
            wanted = share[k] * x[k] + (1 - share[k]) * x[(k + 1) % 50]
            np.testing.assert_allclose(mixed[k], wanted, rtol=1e-5)

    def test_weights_are_mixed_too(self):
        rows = np.random.default_rng(1).uniform(size=(8, 3)).astype(np.float32)
        _, weights = Mixup(3)(images(8), rows, draws(8))
        np.testing.assert_allclose(weights.sum(), rows.sum(), rtol=0.2)
        self.assertEqual(weights.shape, (8, 3))

    def test_shares_have_the_beta_distribution(self):
        u = (np.arange(200_000) + 0.5) / 200_000
        for alpha in (0.1, 0.2, 1.0, 2.0, 5.0):
            shares = Mixup(2, alpha).shares(u)
            self.assertTrue((np.diff(shares) >= 0).all())
            self.assertAlmostEqual(shares.mean(), 0.5, places=6)
            self.assertAlmostEqual(shares.var(), 1 / (4 * (2 * alpha + 1)), places=4)
        np.testing.assert_allclose(Mixup(2, 1.0).shares(u), u, atol=1e-6)
        np.testing.assert_allclose(Mixup(2, 2.0).shares(np.array([0.15625])), [0.25], atol=1e-4)

    def test_refusals(self):
        with self.assertRaisesRegex(DataError, "a label is 12"):
            Mixup(10)(images(2), np.array([3, 12]), draws(2))
        with self.assertRaisesRegex(DataError, "alpha > 0, got 10 and 0"):
            Mixup(10, alpha=0)


class TestCompose(unittest.TestCase):
    def test_flattened_and_planar_images_are_treated_like_others(self):
        x, labels = images(30, (1, 28, 28)), np.zeros(30, np.int64)
        steps = [Shift(2), Rotate(10), Cutout(4)]
        wanted = Compose(steps)(x, labels, draws(30)).images
        flat = Compose(steps, (1, 28, 28))(x.reshape(30, 784), labels, draws(30)).images
        planar = Compose(steps)(x[:, 0], labels, draws(30)).images
        np.testing.assert_array_equal(flat, wanted.reshape(30, 784))
        np.testing.assert_array_equal(planar, wanted[:, 0])
        self.assertFalse(np.array_equal(wanted, Compose(steps[::-1])(x, labels, draws(30)).images))

    def test_a_crop_of_flattened_images_is_flat(self):
        compose = Compose([Crop((20, 10))], (3, 28, 28))
        made = compose(images(4).reshape(4, -1), np.zeros(4, np.int64), draws(4))
        self.assertEqual(made.images.shape, (4, 600))

    def test_refusals(self):
        labels = np.zeros(4, np.int64)
        for compose, message in (
            (Compose([Shift(1)]), r"images of \(784,\) cannot be augmented .* give\s+shape="),
            (Compose([Shift(1)], (1, 27, 28)), r"shape \(1, 27, 28\) does not fit"),
            (Compose([Crop((29, 3))], (1, 28, 28)), r"there is no such part in images of \(1, 28"),
        ):
            with self.assertRaisesRegex(DataError, message):
                compose(images(4, (784,)), labels, draws(4))
        for make, message in (
            (lambda: Crop(padding=-1), "padding of 0 or more"),
            (lambda: Flip(probability=1.5), "probability from 0 to 1"),
            (lambda: Cutout(0), "at least one pixel"),
            (lambda: Scale(2, 1), "0 < low <= high"),
            (lambda: Compose(Shift(1)), r"augment is Shift\(.*expected a list such as"),
            (lambda: Compose([Shift(1), "flip"]), "expected a list such as"),
        ):
            with self.assertRaisesRegex(DataError, message):
                make()

"""Photos of digits: uneven light, shadows, faint ink, transparency, modes, orientation."""

from __future__ import annotations

import importlib.util
import tempfile
import unittest
from pathlib import Path

import numpy as np

from dlsys.apps.ink import ink_of
from dlsys.apps.pictures import normal_form, pictures_of, read_pictures
from dlsys.data import write_idx
from dlsys.errors import DataError
from support.devices import slow
from support.small_digits import digits, needs

HEIGHT, WIDTH = 150, 200
STROKES = {
    "4": [[(70, 30), (60, 85), (115, 85)], [(105, 30), (100, 125)]],
    "7": [[(60, 40), (130, 35), (90, 120)]],
    "0": [[(90, 30), (120, 50), (118, 95), (90, 120), (62, 95), (60, 50), (90, 30)]],
}
# Photos and the clean drawing correlate by 0.957 at least, where their centers are rounded to
# pixels beside each other. A 0 whose inside is taken for ink has 0.64, a 7 with half a bar 0.87.
ALIKE = 0.95


def alike(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of two images, of which one may be half a pixel beside the other."""
    means = (sum(np.roll(x.astype(float), (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1))
             for x in (a, b))  # fmt: skip
    return float(np.corrcoef(*(mean.ravel() for mean in means))[0, 1])


def strokes(name: str) -> np.ndarray:
    """Ink from 0 to 1, (150, 200)."""
    from PIL import Image, ImageDraw

    image = Image.new("L", (4 * WIDTH, 4 * HEIGHT))
    draw = ImageDraw.Draw(image)
    for line in STROKES[name]:
        draw.line([(4 * x, 4 * y) for x, y in line], fill=255, width=36, joint="curve")
    return np.asarray(image.reduce(4), np.float32) / 255


def lights() -> dict[str, np.ndarray]:
    """Illuminations by name, (150, 200), up to 1."""
    y, x = (axis / 200 for axis in np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32))
    return {
        "even and dim": np.full((HEIGHT, WIDTH), 0.3, np.float32),
        "a gradient": 0.25 + 0.7 * x,
        "a gradient across": 1 - 0.5 * x - 0.6 * y,
        "the edge of a shadow": np.where(x + 0.3 * y > 0.52, 1, 0.45),
        "a soft shadow": 0.4 + 0.6 / (1 + np.exp(30 * (y - 0.4))),
        "a lamp": 1 - 1.2 * ((x - 0.4) ** 2 + (y - 0.3) ** 2),
    }


def photo(ink: np.ndarray, light: np.ndarray, paper: float, pen: float, noise: float) -> np.ndarray:
    """Gray values of ink on a paper, which reflect these shares of the light."""
    values = 255 * light * (paper + (pen - paper) * ink)
    values += np.random.default_rng(0).normal(0, noise, ink.shape)
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


@needs("PIL", "images")
class Photos(unittest.TestCase):
    def check(self, pixels: np.ndarray, name: str) -> None:
        wanted = normal_form(photo(strokes(name), np.float32(1), 0, 1, 0), digits=True)
        got = normal_form(pixels, digits=True)
        found = alike(wanted, got)
        self.assertGreater(found, ALIKE)

    @slow
    def test_under_any_light(self) -> None:
        for name in STROKES:
            for what, light in lights().items():
                for paper, pen in ((0.85, 0.15), (0.1, 0.8)):
                    with self.subTest(digit=name, light=what, paper=paper):
                        self.check(photo(strokes(name), light, paper, pen, 3), name)

    def test_a_pencil(self) -> None:
        for name in STROKES:
            with self.subTest(digit=name):
                self.check(photo(strokes(name), lights()["a gradient"], 0.8, 0.55, 2), name)

    def test_dust_and_the_edge_of_the_table_are_no_digit(self) -> None:
        ink = strokes("7")
        ink[10:13, 180:183] = ink[140:142, 20:23] = 1
        ink[:, :12] = 1
        self.check(photo(ink, lights()["a gradient"], 0.85, 0.15, 3), "7")

    def test_a_large_one(self) -> None:
        pixels = photo(strokes("4"), lights()["a soft shadow"], 0.85, 0.15, 3)
        self.check(np.kron(pixels, np.ones((5, 5), np.uint8)), "4")

    def test_images_of_a_few_pixels(self) -> None:
        draws = np.random.default_rng(0)
        for shape in ((1, 1), (1, 50), (50, 1), (3, 3), (5, 7), (28, 27), (1000, 3)):
            with self.subTest(shape=shape), np.errstate(all="raise"):
                made = normal_form(draws.integers(0, 256, shape, np.uint8), digits=True)
                self.assertEqual((made.shape, made.dtype), ((28, 28), np.uint8))

    def test_paper_alone_has_no_ink(self) -> None:
        for what, light in lights().items():
            with self.subTest(light=what):
                pixels = photo(np.zeros_like(light), np.maximum(light, 0.5), 0.85, 0, 2)
                self.assertFalse(ink_of(pixels).any())
        self.assertFalse(ink_of(np.zeros((1, 1), np.uint8)).any())


@needs("PIL", "images")
class Files(unittest.TestCase):
    """Image files of all kinds show the same digit."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.ink = strokes("4")
        self.gray = photo(self.ink, np.float32(1), 1, 0, 0)
        self.wanted = normal_form(self.gray, digits=True)

    def check(self, image: object, name: str = "x.png", **given: object) -> None:
        path = self.folder / name
        image.save(path, **given)  # type: ignore[attr-defined]
        (got,) = read_pictures(path, digits=True)[:, 0]
        found = alike(self.wanted, got)
        self.assertGreater(found, ALIKE, (name, image))

    def test_modes(self) -> None:
        from PIL import Image

        gray = Image.fromarray(self.gray)
        for mode in ("L", "1", "P", "RGB", "CMYK", "LA", "RGBA"):
            name = "x.tif" if mode == "CMYK" else "x.png"
            with self.subTest(mode):
                self.check(gray.convert(mode), name)
        with self.subTest("I;16"):
            self.check(Image.fromarray(self.gray.astype(np.uint16) * 257))
        with self.subTest("JPEG"):
            self.check(gray, "x.jpg", quality=60)

    def test_ink_on_transparency(self) -> None:
        from PIL import Image

        opacity = np.rint(255 * self.ink).astype(np.uint8)
        for color in ((255, 255, 255), (0, 0, 0), (30, 60, 200), (128, 128, 128)):
            pixels = np.empty((HEIGHT, WIDTH, 4), np.uint8)
            pixels[..., :3], pixels[..., 3] = color, opacity
            for strength in (1, 0.3):
                with self.subTest(color=color, strength=strength):
                    pixels[..., 3] = np.rint(strength * opacity)
                    self.check(Image.fromarray(pixels))
        with self.subTest("strokes of two colors"):
            pixels[..., 3] = opacity
            pixels[:75, :, :3], pixels[75:, :, :3] = 255, 0
            self.check(Image.fromarray(pixels))
        with self.subTest("a palette"):
            palette = Image.new("P", (WIDTH, HEIGHT), 1)
            palette.putpalette([255, 255, 255, 255, 255, 255])
            palette.paste(0, mask=Image.fromarray((opacity > 127).astype(np.uint8) * 255))
            self.check(palette, transparency=1)

    def test_a_card_with_transparent_corners_keeps_its_paper(self) -> None:
        from PIL import Image

        for gray in (self.gray, 255 - self.gray):
            pixels = np.dstack([gray] * 3 + [np.full_like(gray, 255)])
            for rows, cols in ((slice(20), slice(20)), (slice(-20, None), slice(-20, None))):
                pixels[rows, cols] = 0
            self.check(Image.fromarray(pixels))

    def test_nothing_to_see(self) -> None:
        from PIL import Image

        Image.new("RGBA", (50, 40)).save(self.folder / "x.png")
        self.assertFalse(read_pictures(self.folder / "x.png", digits=True).any())

    def test_the_camera_was_turned(self) -> None:
        from PIL import Image

        for tag, turn in ((3, Image.Transpose.ROTATE_180), (6, Image.Transpose.ROTATE_90),
                          (8, Image.Transpose.ROTATE_270)):  # fmt: skip
            image = Image.fromarray(self.gray).transpose(turn)
            exif = image.getexif()
            exif[0x0112] = tag  # Exif 2.32, table 4: Orientation
            with self.subTest(tag=tag):
                self.check(image, "x.jpg", exif=exif, quality=95)

    def test_a_folder_stands_for_its_images(self) -> None:
        from PIL import Image

        image = Image.fromarray(self.gray)
        (self.folder / "b" / "c").mkdir(parents=True)
        for name in ("b/2.png", "a.jpg", "b/c/1.PNG"):
            image.save(self.folder / name)
        (self.folder / "b" / "broken.png").write_text("nothing")
        (self.folder / "b" / "notes.txt").write_text("nothing")
        write_idx(self.folder / "images", digits(3, 0)[0])
        found = list(pictures_of(self.folder, digits=True))
        names = [str(path.relative_to(self.folder)) for path, _ in found]
        self.assertEqual(names, ["a.jpg", "b/2.png", "b/broken.png", "b/c/1.PNG"])
        shapes = [getattr(images, "shape", None) for _, images in found]
        self.assertEqual(shapes, [(1, 1, 28, 28)] * 2 + [None] + [(1, 1, 28, 28)])
        self.assertRegex(str(found[2][1]), "broken.png: cannot be read as an image")
        ((_, error),) = pictures_of(self.folder / "none", digits=True)
        self.assertIsInstance(error, DataError)


class WithoutPillow(unittest.TestCase):
    @unittest.skipIf(importlib.util.find_spec("PIL") is None, "it is missing in fact")
    def test_it_is_named(self) -> None:
        import sys
        from unittest import mock

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "x.png"
            path.write_bytes(b"\x89PNG")
            with mock.patch.dict(sys.modules, {"PIL": None}):
                with self.assertRaisesRegex(DataError, "needs Pillow: pip install Pillow"):
                    read_pictures(path, digits=True)

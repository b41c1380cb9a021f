"""`dlsys explain`: photos, methods, classes by name, a sheet, faults."""

from __future__ import annotations

import contextlib
import io
import tempfile
import unittest
from pathlib import Path

import numpy as np

from dlsys import data, nn, train
from dlsys.apps import cli
from dlsys.apps.explain import explaining
from support.small_digits import needs


def dlsys(*words: object) -> tuple[int, str, str]:
    """The status of `dlsys explain …`, and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["explain", *map(str, words), "-c", "numpy"])
    return status, out.getvalue(), err.getvalue()


@needs("PIL", "images")
class Application(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        from PIL import Image

        cls.root = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, rng=0),
            nn.ReLU(),
            nn.GlobalAvgPool(),
            nn.Linear(4, 3, rng=1),
        )
        about = ((3, 32, 32), "uint8", (0.0,), (1.0,), ("red", "green", "blue"))
        model.trained_on = data.DataDescription(*about)
        cls.model = cls.root / "model.safetensors"
        train.save(cls.model, model)
        cls.photos = cls.root / "photos"
        cls.photos.mkdir()
        rng = np.random.default_rng(0)
        for k, shape in enumerate([(40, 60, 3), (50, 33)]):
            Image.fromarray(rng.integers(0, 256, shape).astype(np.uint8)).save(
                cls.photos / f"p{k}.png"
            )

    def test_a_picture_for_each_photo_and_method(self) -> None:
        from PIL import Image

        out = self.root / "out"
        words = ("--method", "grad_cam,occlusion", "--class", "blue", "-o", out)
        status, printed, err = dlsys(self.model, self.photos, *words)
        self.assertEqual((status, err), (0, ""))
        self.assertRegex(printed, r"p0.png  \w+ 0\.\d{3}  \w+ 0\.\d{3}  \w+ 0\.\d{3}")
        made = sorted(path.name for path in out.iterdir())
        self.assertEqual(made, ["p0_grad_cam.png", "p0_occlusion.png", "p1_grad_cam.png",
                                "p1_occlusion.png"])  # fmt: skip
        self.assertEqual(Image.open(out / made[0]).size, (224, 224))

    def test_a_sheet_of_all_methods(self) -> None:
        from PIL import Image

        sheet = self.root / "sheet.webp"
        broken = self.photos / "broken.png"
        broken.write_bytes(b"no photo")
        self.addCleanup(broken.unlink)
        words = ("--method", "all", "--sheet", sheet)
        status, printed, err = dlsys(self.model, self.photos, *words)
        self.assertEqual((status, err.count("\n")), (1, 1))  # the others are shown
        self.assertIn("broken.png: cannot be read as an image", err)
        self.assertIn("2 photos", printed)
        self.assertEqual(Image.open(sheet).size, (6 * 228 - 4, 14 + 2 * 242))

    def test_faults_are_one_sentence(self) -> None:
        photo = self.photos / "p0.png"
        for words, status, said in (
            ((self.model,), 2, "explain needs photos"),
            ((self.root / "none", photo), 1, "none"),
            ((self.model, photo, "--method", "lime"), 2, "'lime' is none of grad_cam"),
            ((self.model, photo, "--class", "pink"), 2, "'pink' is no class of the model"),
            ((self.model, photo, "--class", "3"), 2, "'3' is no class of the model"),
            ((self.model, photo, "--layer", "9", "-o", self.root / "x"), 1, "no layer '9'"),
            ((self.model, photo, "--sheet", "x.bmp"), 1, "the ending says no format"),
            ((self.model, self.root / "gone.png"), 1, "no such photo"),
        ):
            got, _, err = dlsys(*words)
            self.assertEqual(got, status, (words, err))
            self.assertIn(said, err)
            self.assertEqual(err.count("\n"), 1, err)

    def test_maps_by_pixel_are_drawn_so_that_they_can_be_seen(self) -> None:
        evidence = np.zeros((20, 20))
        evidence[0, :4] = (1.0, 0.2, 0.1, 0.1)
        self.assertGreater(explaining.drawable("saliency", evidence)[0, 3], 0.4)
        self.assertIs(explaining.drawable("grad_cam", evidence), evidence)


if __name__ == "__main__":
    unittest.main()

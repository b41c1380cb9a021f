"""`dlsys superres`: runs from photos to tables, tiles that leave no seam, PSNR and SSIM."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import shutil
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, train
from dlsys.apps import cli
from dlsys.apps.superres import photos, planes, quality
from dlsys.apps.superres.enlarging import Enlarger
from dlsys.apps.superres.patches import Pair, PatchLoader
from dlsys.apps.superres.training import Settings, load, loss_of
from dlsys.errors import DataError, DlsysError
from dlsys.train.files import safetensors
from support import sample
from support.devices import on_native_devices
from support.small_digits import needs

SMALL = "--steps 12 --every 6 --batch-size 2 --patch 36 --seed 3 -c numpy".split()


def dlsys(*words: object) -> tuple[int, str, str]:
    """The status of `dlsys superres …`, and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["superres", *map(str, words)])
    return status, out.getvalue(), err.getvalue()


def scene(seed: int, height: int = 110, width: int = 130) -> np.ndarray:
    """A made photograph (height, width, 3) uint8: stripes and edges of several directions."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    angles, waves = rng.uniform(0, np.pi, (3, 4)), rng.uniform(0.05, 0.6, (3, 4))
    planes = [
        sum(np.sin(w * (np.cos(a) * x + np.sin(a) * y)) for a, w in zip(*pair))
        for pair in zip(angles, waves)
    ]
    return np.clip(127 + 40 * np.stack(planes, -1) + 20 * (x > y)[..., None], 0, 255).astype(
        np.uint8
    )


def plane(seed: int, height: int, width: int) -> np.ndarray:
    """Random values (height, width) float32 in [0, 1]."""
    return np.random.default_rng(seed).random((height, width), np.float32)


@needs("PIL", "images")
class Application(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        from PIL import Image

        cls.root = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.photos = cls.root / "photos"
        cls.photos.mkdir()
        for k in range(4):
            Image.fromarray(scene(k)).save(cls.photos / f"p{k}.png")
        cls.folder, cls.other = cls.root / "espcn", cls.root / "srcnn"
        cls.made = dlsys("train", cls.folder, "--photos", cls.photos, *SMALL)
        words = ("--photos", cls.photos, "--network", "srcnn", *SMALL)
        cls.made_too = dlsys("train", cls.other, *words)

    def test_what_training_prints_and_writes(self) -> None:
        for status, out, err in (self.made, self.made_too):
            self.assertEqual((status, err), (0, ""))
            self.assertIn("3 photos to train on, 1 held out: p2", out)
            self.assertRegex(out, r"step 12/12  PSNR \d\d\.\d\d dB  held out \d\d\.\d\d dB  lr 2.0")
        found = json.loads((self.folder / "run.json").read_text())
        self.assertEqual((found["network"], found["scale"], found["steps"]), ("espcn", 2, 12))
        settings, model = load(self.other)
        self.assertIsInstance(model, nn.SRCNN)
        self.assertEqual(settings.photos, (str(self.photos),))

    def test_a_run_that_was_stopped_ends_with_the_same_bits(self) -> None:
        from dlsys.apps.superres.training import Lines

        class Stops(Lines):
            def on_step(self, run) -> None:
                super().on_step(run)
                if run.step == 8:
                    run.stop("here")

        again = self.root / "again"
        with mock.patch("dlsys.apps.superres.training.Lines", Stops):
            self.assertEqual(dlsys("train", again, "--photos", self.photos, *SMALL)[0], 0)
        status, out, err = dlsys("train", again, "--resume", "-c", "numpy")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("going on after 8 steps", out)
        a, b = (
            safetensors.read(folder / "last.safetensors").tensors for folder in (self.folder, again)
        )
        self.assertEqual(a.keys(), b.keys())
        for name, value in a.items():
            np.testing.assert_array_equal(value, b[name], err_msg=name)

    def test_the_table(self) -> None:
        from PIL import Image

        sheet, figures = self.root / "sheet.webp", self.root / "table.json"
        words = ("--json", figures, "--pictures", sheet, "-c", "numpy")
        status, out, err = dlsys("evaluate", self.folder, self.other, *words)
        self.assertEqual((status, err), (0, ""))
        self.assertRegex(out, r"\| scale \| photo \| bicubic +\| espcn +\| srcnn +\|")
        (held, mean) = json.loads(figures.read_text())
        self.assertEqual((held["photo"], mean["photo"]), ("p2", "mean"))
        self.assertEqual(held["figures"], mean["figures"])
        # The figure of bicubic enlarging, from the photo itself.
        large, small = planes.reduced(planes.read_photo(self.photos / "p2.png").luminance, 2)
        made = planes.in_8_bits(planes.enlarged(small, 2))
        wanted = quality.psnr(made[2:-2, 2:-2], large[2:-2, 2:-2])
        self.assertAlmostEqual(held["figures"]["bicubic"][0], wanted, places=9)
        self.assertEqual(Image.open(sheet).size, (4 * 196 + 192, 196 + 16))
        status, out, _ = dlsys("evaluate", self.folder, "--photos", self.photos, "-c", "numpy")
        self.assertEqual((status, out.count("| 2x ")), (0, 5))

    def test_photos_are_enlarged(self) -> None:
        from PIL import Image

        source, out = self.root / "small", self.root / "out"
        source.mkdir()
        clear = np.dstack([scene(9, 40, 31), np.full((40, 31), 128, np.uint8)])
        Image.fromarray(clear).save(source / "clear.png")
        Image.fromarray(scene(9, 17, 300)[..., 0]).save(source / "gray.jpg")
        (source / "broken.png").write_bytes(b"\x89PNG nothing")
        words = ("--tile", 16, "-o", out, "-c", "numpy")
        status, _, err = dlsys("run", self.folder, source / "none.png", source, *words)
        self.assertEqual((status, err.count("\n")), (1, 2))  # and the others are enlarged
        self.assertIn("none.png: there is no such photo", err)
        self.assertIn("broken.png: cannot be read as an image", err)
        found = Image.open(out / "clear_2x.png")
        self.assertEqual((found.mode, found.size), ("RGBA", (62, 80)))
        self.assertEqual(set(np.asarray(found)[..., 3].ravel()), {128})
        self.assertEqual(Image.open(out / "gray_2x.png").mode, "L")
        status, _, err = dlsys("run", self.folder, source / "gray.jpg", *words)
        self.assertEqual((status, "is there already" in err), (1, True))

    @needs("onnxruntime", "test")
    def test_the_onnx_file_computes_the_same(self) -> None:
        import onnxruntime

        x = plane(0, 21, 30)[None, None]
        for folder in (self.folder, self.other):
            path = self.root / f"{folder.name}.onnx"
            status, out, err = dlsys("export", folder, path)
            self.assertEqual((status, err), (0, ""))
            session = onnxruntime.InferenceSession(str(path))
            (found,) = session.run(None, {session.get_inputs()[0].name: x})
            wanted = train.predict(load(folder)[1], x)
            np.testing.assert_allclose(found, wanted, atol=1e-5)
            self.assertEqual(session.get_modelmeta().custom_metadata_map["scale"], "2")

    def test_faults_are_one_sentence(self) -> None:
        (self.root / "text.png").write_text("no photo")
        (self.root / "few").mkdir()
        again = ("--photos", self.photos)
        for words, status, said in (
            (("train", self.folder), 2, "go on with it"),
            (("train", self.folder, "--resume", "--scale", 3), 2, "has --scale 2, not 3"),
            (("train", self.root / "none", "--resume"), 1, "no run to go on with"),
            (("train", self.root / "new", self.photos), 2, "name photos as --photos"),
            (("train", self.root / "new", "--patch", 37, *again), 2, "2 must divide it"),
            (("train", self.root / "new", "--patch", 500, *again), 1, "use another --patch"),
            (("train", self.root / "new", "--photos", self.root / "few"), 1, "has no photos"),
            (("train", self.root / "new", "--photos", self.photos / "p0.png"), 1, "1 photos are"),
            (("run", self.root / "none", "x.png"), 1, "no run to use"),
            (("run", self.folder), 2, "run needs photos"),
            (("run", self.folder, self.root / "text.png"), 1, "cannot be read as an image"),
            (("run", self.folder, "/none.png"), 1, "no such photo"),
            (("evaluate", self.folder, self.folder), 2, "leave one out"),
            (("evaluate", self.folder, "--pictures", "x.bmp"), 1, "the ending says no format"),
            (("export", self.folder), 2, "needs the ONNX file"),
        ):
            got, _, err = dlsys(*words, "-c", "numpy")
            self.assertEqual(got, status, (words, err))
            self.assertIn(said, err)
            self.assertEqual(err.count("\n"), 1)
        self.assertFalse((self.root / "new" / "run.json").exists())

    def test_a_result_that_nobody_could_read_is_refused(self) -> None:
        with mock.patch("dlsys.apps.superres.enlarging.MAX_PIXELS", 100 * 100):
            status, _, err = dlsys("run", self.folder, self.photos / "p0.png", "-c", "numpy")
        self.assertEqual(status, 1)
        self.assertIn("it would have 260 x 220 pixels, more than the 10,000", err)

    def test_a_forged_run_is_refused(self) -> None:
        forged = self.root / "forged"
        shutil.copytree(self.folder, forged)
        found = json.loads((forged / "run.json").read_text())
        for change, said in (
            ({"scale": 7}, "at 7 times is none of"),
            ({"scale": 3}, "the state_dict does not fit"),
            ({"network": "x"}, "'x' at 2 times"),
            ({"photos": 3}, "photos is 3"),
        ):
            (forged / "run.json").write_text(json.dumps(found | change))
            with self.assertRaisesRegex(DlsysError, said):
                load(forged)


class Tiles:
    """Tiles give what the network gives of the padded plane at once."""

    ctx: object

    def test_no_seam(self) -> None:
        for network in ("espcn", "srcnn"):
            settings = Settings(network=network, scale=3, seed=1)
            model = settings.build_model()
            weight = model.rebuild.weight
            weight.set(weight.asnumpy() * 30)  # so that all pixels around a pixel count
            for shape in (*sample.rest([(20, 33)]), (5, 40), (1, 1)):
                small = plane(2, *shape) * np.float32(0.5)
                margin, f = model.margin, settings.factor
                padded = np.pad(settings.given(small), margin, mode="edge")[None, None]
                at_once = train.predict(model, padded, self.ctx)[0, 0]
                at_once = at_once[margin * f : -margin * f, margin * f : -margin * f]
                self.assertTrue(0 < at_once.mean() < 1)  # not all is clipped
                for tile in (1000, 8, 33):
                    tiled = Enlarger(settings, model, self.ctx, tile).plane(small)
                    np.testing.assert_allclose(tiled, np.clip(at_once, 0, 1), atol=2e-6)

    def test_the_margin_is_what_the_network_sees(self) -> None:
        for network in ("espcn", "srcnn"):
            settings = Settings(network=network, scale=2)
            model = settings.build_model()
            model.rebuild.weight.set(np.ones(model.rebuild.weight.shape, np.float32))
            x = ad.Parameter(np.zeros((1, 1, 31, 31), np.float32))
            f, middle = settings.factor, 15
            part = np.s_[:, :, f * middle : f * (middle + 1), f * middle : f * (middle + 1)]
            x.set(plane(0, 31, 31)[None, None])
            (grad,) = ad.gradients(model(x)[part].sum(), [x])
            (found,) = ad.Executor([grad], ctx=self.ctx).run({}, convert_to_numpy_ret_vals=True)
            sums = np.abs(found[0, 0]).sum(1)
            rows = np.flatnonzero(sums > 1e-5 * sums.max())  # more than rounding
            self.assertEqual((rows[0], rows[-1]), (middle - model.margin, middle + model.margin))


class NumpyTiles(Tiles, unittest.TestCase):
    ctx = None


CpuTiles, GpuTiles = on_native_devices(Tiles)


class Networks(unittest.TestCase):
    def test_they_begin_as_repeated_pixels_and_as_the_identity(self) -> None:
        x = plane(0, 9, 8)[None, None]
        for model, wanted in (
            (nn.ESPCN(2, seed=0), x.repeat(2, 2).repeat(2, 3)),
            (nn.SRCNN(seed=0), x),
        ):
            found = train.predict(model, x)
            self.assertLess(np.abs(found - wanted).max(), 0.1)

    def test_counts_of_parameters(self) -> None:
        # 9·9·64 + 64 + 64·32 + 32 + 5·5·32 + 1; 25·64 + 64 + 9·64·32 + 32 + (9·32 + 1)·r².
        self.assertEqual(nn.SRCNN().num_parameters(), 8129)
        for scale in (2, 3, 4):
            self.assertEqual(nn.ESPCN(scale).num_parameters(), 20128 + 289 * scale**2)

    def test_the_loss_leaves_the_margin_out(self) -> None:
        output, wanted = plane(1, 12, 12)[None, None], plane(2, 6, 6)[None, None]
        nodes = ad.Variable("output"), ad.Variable("wanted")
        loss = ad.Executor([loss_of(3)(*nodes)])
        (found,) = loss.run(dict(zip(nodes, (output, wanted))), convert_to_numpy_ret_vals=True)
        np.testing.assert_allclose(found, np.mean((output[..., 3:9, 3:9] - wanted) ** 2), rtol=1e-5)


class Patches(unittest.TestCase):
    def setUp(self) -> None:
        self.pairs = []
        for k, (h, w) in enumerate(((12, 15), (10, 10))):
            given = (1000 * k + np.arange(h * w, dtype=np.float32)).reshape(h, w)
            self.pairs.append(Pair(given, given.repeat(2, 0).repeat(2, 1)))
        self.loader = PatchLoader(self.pairs, 10, 3, 4, 5, seed=7)

    def test_given_and_wanted_are_of_one_position_and_direction(self) -> None:
        ways = set()
        for number in range(30):
            for given, wanted in zip(*self.loader.batch(number)):
                middle = given[0, 3:-3, 3:-3]
                np.testing.assert_array_equal(wanted[0], middle.repeat(2, 0).repeat(2, 1))
                across, down = given[0, 0, 1] - given[0, 0, 0], given[0, 1, 0] - given[0, 0, 0]
                ways.add((across, down))
        self.assertEqual(len([way for way in ways if 15 in np.abs(way)]), 8)

    def test_every_position_comes_alike(self) -> None:
        loader = PatchLoader(self.pairs, 10, 3, 1, 1)
        corners = [loader._patch(at, 0)[0][0, 0] for at in range(int(loader._ends[-1]))]
        first = [15 * row + column for row in range(3) for column in range(6)]
        self.assertEqual(corners, [*first, 1000])

    def test_a_batch_is_a_function_of_seed_and_number(self) -> None:
        epoch = [list(feed.values()) for feed in self.loader.epoch(1)]
        rest = [list(feed.values()) for feed in self.loader.epoch(1, 3)]
        np.testing.assert_array_equal(epoch[3][0], rest[0][0])
        np.testing.assert_array_equal(epoch[0][1], self.loader.batch(5)[1])
        other = PatchLoader(self.pairs, 10, 3, 4, 5, seed=8)
        self.assertFalse(np.array_equal(other.batch(0)[0], self.loader.batch(0)[0]))

    def test_photos_smaller_than_a_patch_are_refused(self) -> None:
        with self.assertRaisesRegex(DataError, "patches of 11 pixels are no part of .* 10 pixels"):
            PatchLoader(self.pairs, 11, 3, 4, 5)


class Quality(unittest.TestCase):
    def test_ssim_is_that_of_the_formula(self) -> None:
        x, y = plane(0, 14, 12).astype(float), plane(1, 14, 12).astype(float)
        line = np.exp(-(np.arange(-5, 6) ** 2) / 4.5)
        weights = np.outer(line, line) / line.sum() ** 2
        values = []
        for i in range(4):
            for j in range(2):
                a, b = x[i : i + 11, j : j + 11], y[i : i + 11, j : j + 11]
                ma, mb = (weights * a).sum(), (weights * b).sum()
                va, vb = (weights * (a - ma) ** 2).sum(), (weights * (b - mb) ** 2).sum()
                cov = (weights * (a - ma) * (b - mb)).sum()
                value = (2 * ma * mb + 1e-4) * (2 * cov + 9e-4)
                values.append(value / (ma**2 + mb**2 + 1e-4) / (va + vb + 9e-4))
        self.assertAlmostEqual(quality.ssim(x, y), np.mean(values), places=12)

    @needs("skimage", "photos")
    def test_both_are_those_of_scikit_image(self) -> None:
        from skimage import metrics

        for seed in range(3):
            x, y = plane(seed, 40, 51), plane(seed + 10, 40, 51)
            y = np.float32(0.9) * x + np.float32(0.1) * y
            wanted = metrics.peak_signal_noise_ratio(x, y, data_range=1)
            self.assertAlmostEqual(quality.psnr(y, x), wanted, places=5)  # theirs is of float32
            wanted = metrics.structural_similarity(
                x.astype(float), y.astype(float), data_range=1, gaussian_weights=True, sigma=1.5,
                use_sample_covariance=False,
            )  # fmt: skip
            self.assertAlmostEqual(quality.ssim(y, x), wanted, places=9)


@needs("PIL", "images")
class Planes(unittest.TestCase):
    def test_luminance_is_that_of_jpeg_and_colors_come_back(self) -> None:
        from PIL import Image

        image = Image.fromarray(scene(3))
        photo = planes._photo_of(image)
        wanted = np.asarray(image.convert("YCbCr"))[..., 0]
        self.assertLessEqual(np.abs(photo.luminance * 255 - wanted).max(), 1.05)  # which cuts off
        np.testing.assert_array_equal(planes.pixels(photo), np.asarray(image))

    def test_modes(self) -> None:
        from PIL import Image

        rgb = Image.fromarray(scene(4, 20, 24))
        clear = rgb.convert("L").copy()
        clear.info["transparency"] = 0
        for image, colors, alpha in (
            (rgb.convert("1"), False, False),
            (rgb.convert("L"), False, False),
            (rgb.convert("LA"), False, True),
            (rgb.convert("P"), True, False),
            (rgb.convert("CMYK"), True, False),
            (rgb.convert("RGBA"), True, True),
            (clear, True, True),
        ):
            photo = planes._photo_of(image)
            with self.subTest(image.mode):
                self.assertEqual((photo.colors is not None, photo.alpha is not None),
                                 (colors, alpha))  # fmt: skip
                self.assertEqual(photo.luminance.shape, (20, 24))

    def test_orientation(self) -> None:
        from PIL import Image

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "turned.jpg"
            image = Image.fromarray(scene(5, 20, 24))
            exif = image.getexif()
            exif[0x0112] = 6
            image.save(path, exif=exif)
            self.assertEqual(planes.read_photo(path).luminance.shape, (24, 20))
            photo = planes.read_photo(path)._replace(alpha=np.ones((24, 20), np.float32))
            with self.assertRaisesRegex(DataError, "JPEG has no transparency"):
                planes.write_photo(Path(folder) / "x.jpg", photo)

    def test_reduced_photos_divide(self) -> None:
        large, small = planes.reduced(plane(0, 23, 31), 4)
        self.assertEqual((large.shape, small.shape), ((20, 28), (5, 7)))
        np.testing.assert_allclose(small * 255, np.rint(small * 255), atol=1e-4)
        flat = np.full((8, 8), 0.4, np.float32)
        np.testing.assert_allclose(planes.enlarged(flat, 3), 0.4, atol=1e-6)


class Page(unittest.TestCase):
    def test_its_table_is_that_of_the_record(self) -> None:
        root = Path(__file__).resolve().parents[2]
        page = (root / "docs" / "superres.md").read_text().replace("*", "")
        record = json.loads((root / "benchmarks" / "results" / "superres.json").read_text())
        self.assertTrue(record["ok"])
        rows = [row for row in record["rows"] if row["scale"] == 2 or row["photo"] == "mean"]
        self.assertEqual(len(rows), 6 + 2)
        for row in rows:
            cells = [f"{psnr:.2f} / {ssim:.4f}" for psnr, ssim in row["figures"].values()]
            self.assertIn(f"| {row['photo']} | {' | '.join(cells)} |", page)


class Packaged(unittest.TestCase):
    @needs("sklearn", "photos")
    @needs("skimage", "photos")
    def test_the_fifteen_and_those_held_out(self) -> None:
        found = photos.packaged_photos()
        self.assertEqual(len(found), 15)
        trained_on, held = photos.split(found)
        self.assertEqual(
            [path.stem for path in held], ["camera", "coffee", "grass", "moon", "rocket"]
        )
        self.assertEqual(len(trained_on), 10)

    def test_a_package_that_is_missing_is_named(self) -> None:
        with mock.patch.object(importlib.util, "find_spec", lambda name: None):
            with self.assertRaisesRegex(DataError, "pip install scikit-image, or name --photos"):
                photos.packaged_photos()


if __name__ == "__main__":
    unittest.main()

"""`dlsys style`: painting, runs from photos to paintings, features of VGG files, losses."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, train
from dlsys.apps import cli
from dlsys.apps.style import applying, features, losses, painting
from dlsys.apps.style.pictures import read, write
from dlsys.apps.style.training import Patches, load, sizes
from dlsys.errors import DataError
from dlsys.train.files import safetensors
from support import torch_states
from support.devices import native_contexts
from support.small_digits import needs

SMALL = "--steps 4 --every 2 --batch-size 1 --patch 32 --width 4 --blocks 1 --seed 3 -c numpy"


def dlsys(*words: object) -> tuple[int, str, str]:
    """The status of `dlsys style …`, and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["style", *map(str, words)])
    return status, out.getvalue(), err.getvalue()


def picture(seed: int, height: int = 40, width: int = 48) -> np.ndarray:
    """A made photo (height, width, 3) float32: blocks of colors."""
    values = np.random.default_rng(seed).random((-(-height // 8), -(-width // 8), 3), np.float32)
    return values.repeat(8, 0).repeat(8, 1)[:height, :width]


def vgg_state(depth: int = 16, width: int = 4) -> dict[str, np.ndarray]:
    """The arrays of a VGG with torchvision's names, of few channels."""
    rng = np.random.default_rng(0)
    state, number, inputs = {}, 0, 3
    for count in {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}[depth]:
        for _ in range(count):
            scale = np.sqrt(2 / (9 * inputs))
            weight = scale * rng.normal(size=(width, inputs, 3, 3))
            state[f"features.{number}.weight"] = weight.astype(np.float32)
            state[f"features.{number}.bias"] = np.zeros(width, np.float32)
            number, inputs = number + 2, width
        number += 1
    return state | {"classifier.0.weight": np.zeros((2, 2), np.float32)}


@needs("PIL", "images")
class Application(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.root = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.photos = cls.root / "photos"
        cls.photos.mkdir()
        for k in range(3):
            write(cls.photos / f"p{k}.png", picture(k))
        cls.picture, cls.vgg = cls.root / "style.png", cls.root / "vgg.pth"
        write(cls.picture, picture(7) ** 3)
        torch_states.write(cls.vgg, vgg_state())
        cls.words = ("--style", cls.picture, "--photos", cls.photos, "--features", cls.vgg)
        cls.folder = cls.root / "run"
        cls.made = dlsys("train", cls.folder, *cls.words, *SMALL.split())

    def test_what_training_prints_and_writes(self) -> None:
        status, out, err = self.made
        self.assertEqual((status, err), (0, ""))
        self.assertIn("2 photos to train on, 1 held out", out)
        self.assertRegex(out, r"step 4/4  loss \d+\.\d{3}  held out \d+\.\d{3}  lr 2.0")
        found = json.loads((self.folder / "run.json").read_text())
        self.assertEqual((found["style"], found["features"]), (str(self.picture), str(self.vgg)))
        settings, model = load(self.folder)
        self.assertEqual((settings.width, model.num_parameters()), (4, 9651))

    def test_a_run_that_was_stopped_ends_with_the_same_bits(self) -> None:
        from dlsys.apps.style.training import Lines

        class Stops(Lines):
            def on_step(self, run) -> None:
                super().on_step(run)
                if run.step == 3:
                    run.stop("here")

        again = self.root / "again"
        with mock.patch("dlsys.apps.style.training.Lines", Stops):
            self.assertEqual(dlsys("train", again, *self.words, *SMALL.split())[0], 0)
        status, out, err = dlsys("train", again, "--resume", "-c", "numpy")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("going on after 3 steps", out)
        a, b = (
            safetensors.read(folder / "last.safetensors").tensors for folder in (self.folder, again)
        )
        for name, value in a.items():
            np.testing.assert_array_equal(value, b[name], err_msg=name)

    def test_painting_lowers_the_loss_by_each_method(self) -> None:
        for method in painting.METHODS:
            target = self.root / f"{method}.png"
            words = ("--features", self.vgg, "--method", method, "--steps", 6, "-o", target)
            status, out, err = dlsys(
                "paint", self.photos / "p0.png", self.picture, *words, "-c", "numpy"
            )
            self.assertEqual((status, err), (0, ""))
            found = [float(line.split("loss ")[1].split()[0]) for line in out.splitlines()
                     if line.startswith("step")]  # fmt: skip
            self.assertLess(found[-1], 0.8 * found[0], method)
            self.assertEqual(read(target).shape, (40, 48, 3))

    def test_photos_are_painted_and_measured(self) -> None:
        out, sheet, figures = (self.root / name for name in ("out", "sheet.webp", "losses.json"))
        status, _, err = dlsys("run", self.folder, self.photos, "-o", out, "-c", "numpy")
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(read(out / "p1_painted.png").shape, (40, 48, 3))
        words = ("--steps", 2, "--json", figures, "--pictures", sheet, "-c", "numpy")
        status, printed, err = dlsys("evaluate", self.folder, *words)
        self.assertEqual((status, err), (0, ""))
        self.assertRegex(printed, r"\| photo \| unchanged \| network \| L-BFGS, 2 steps \|")
        held, mean = json.loads(figures.read_text())
        self.assertEqual((held["photo"], mean["photo"]), ("p2", "mean"))
        self.assertEqual(held["unchanged"]["content"], 0)
        self.assertLess(held["L-BFGS, 2 steps"]["loss"], held["unchanged"]["loss"])
        self.assertEqual(read(sheet).shape, (40, 3 * 48 + 8, 3))

    @needs("onnxruntime", "test")
    def test_the_onnx_file_computes_the_same(self) -> None:
        import onnxruntime

        path = self.root / "net.onnx"
        status, _, err = dlsys("export", self.folder, path)
        self.assertEqual((status, err), (0, ""))
        session = onnxruntime.InferenceSession(str(path))
        x = np.random.default_rng(0).random((2, 3, 20, 28), np.float32)
        (found,) = session.run(None, {session.get_inputs()[0].name: x})
        # Measured: 7e-7.
        np.testing.assert_allclose(found, train.predict(load(self.folder)[1], x), atol=1e-5)

    def test_faults_are_one_sentence(self) -> None:
        photo = self.photos / "p0.png"
        state = vgg_state()
        del state["features.0.bias"]
        safetensors.write(self.root / "cut.safetensors", state, {})
        write(self.root / "tiny.png", picture(0, 8, 8))
        for words, status, said in (
            (("paint", photo), 2, "paint needs a photo and a picture"),
            (("paint", photo, photo, "-o", "x.bmp"), 1, "the ending says no format"),
            (("paint", photo, photo, "-o", photo), 1, "is there already"),
            (("paint", self.root / "tiny.png", photo), 1, "8 x 8 pixels are too few"),
            (("paint", photo, photo, "--features", self.root / "cut.safetensors"), 1,
             "no features of VGG16 or VGG19"),
            (("train", self.root / "new"), 2, "train needs a picture"),
            (("train", self.root / "new", photo, *self.words), 2, "one folder, of the run"),
            (("train", self.root / "new", *self.words, "--patch", 34), 2, "no multiple of 4"),
            (("train", self.root / "new", *self.words, "--patch", 64), 1, "a smaller --patch"),
            (("train", self.folder, *self.words), 2, "go on with it"),
            (("train", self.folder, "--resume", "--width", 5), 2, "has --width 4, not 5"),
            (("run", self.folder), 2, "run needs photos"),
            (("run", self.folder, self.root / "none.png"), 1, "no such photo"),
            (("evaluate", self.root / "none"), 1, "no run to use"),
            (("evaluate", self.folder, photo), 2, "one folder, of the run"),
            (("export", self.folder), 2, "needs the ONNX file"),
        ):  # fmt: skip
            got, _, err = dlsys(*words, "-c", "numpy")
            self.assertEqual(got, status, (words, err))
            self.assertIn(said, err)
            self.assertEqual(err.count("\n"), 1)


class Features(unittest.TestCase):
    def test_the_layers_of_vgg_are_those_of_torchvision(self) -> None:
        """relu1_1 to relu5_1, and relu4_2 for the content, by torchvision's numbers."""
        for depth, style, content in (
            (16, ("1", "6", "11", "18", "25"), "20"),
            (19, ("1", "6", "11", "20", "29"), "22"),
        ):
            found = features.vgg("vgg", vgg_state(depth))
            self.assertEqual((found.style, found.content), (style, content))

    def test_they_compute_what_the_arrays_say(self) -> None:
        state = vgg_state()
        x = np.random.default_rng(1).random((1, 3, 16, 16), np.float32)
        found = features.vgg("vgg", state).of(ad.constant(x))["1"]
        (values,) = ad.Executor([found]).run({}, True)
        mean, std = (
            np.array(v, np.float32).reshape(3, 1, 1)
            for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        )
        layer = nn.Conv2d(3, 4, 3, padding=1, rng=0)
        layer.load_state_dict(
            {"weight": state["features.0.weight"], "bias": state["features.0.bias"]}
        )
        wanted = np.maximum(train.predict(layer, (x - mean) / std), 0)
        np.testing.assert_allclose(values, wanted, atol=1e-5)

    def test_other_arrays_are_refused(self) -> None:
        state = vgg_state()
        state["features.2.weight"] = np.zeros((4, 4, 1, 1), np.float32)
        with self.assertRaisesRegex(DataError, "where VGG's are 3 x 3"):
            features.vgg("vgg", state)
        with self.assertRaisesRegex(DataError, "found 0"):
            features.vgg("vgg", {"layer1.weight": state["features.0.weight"]})


class Losses(unittest.TestCase):
    def test_they_are_their_formulas(self) -> None:
        rng = np.random.default_rng(2)
        x = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
        nodes = [features.gram(ad.constant(x)), losses.variation(ad.constant(x))]
        gram, variation = ad.Executor(nodes).run({}, True)
        np.testing.assert_allclose(gram, np.einsum("nchw,ndhw->ncd", x, x) / 20, atol=1e-5)
        wanted = np.mean(np.diff(x, axis=2) ** 2) + np.mean(np.diff(x, axis=3) ** 2)
        self.assertAlmostEqual(float(variation), float(wanted), places=5)

    def test_the_style_of_itself_is_0(self) -> None:
        painting_ = picture(3)
        given = ad.constant(losses.in_planes(painting_))
        found = losses.Losses(
            features.vgg("vgg", vgg_state()), painting_, losses.Weights(10.0, 0.0), None
        )
        parts = found.of(given, found.content_of(given))
        content, style, _ = (float(v) for v in ad.Executor(list(parts)).run({}, True))
        self.assertEqual(content, 0)
        self.assertLess(style, 1e-9)

    def test_devices_agree(self) -> None:
        x = np.random.default_rng(4).random((1, 3, 16, 20), np.float32)
        model = nn.StyleNet(width=4, blocks=1, seed=0)
        model.paint.conv.weight.set(100 * model.paint.conv.weight.asnumpy())
        wanted = train.predict(model, x)
        self.assertGreater(np.abs(wanted - x).max(), 0.1)
        framed = np.clip(_framed(model, x), 0, 1)
        for ctx in native_contexts():
            found = applying.Painter(model, ctx)(x[0].transpose(1, 2, 0))
            np.testing.assert_allclose(found, framed, atol=1e-4)


def _framed(model: nn.StyleNet, x: np.ndarray) -> np.ndarray:
    """What a Painter makes: the photo goes on mirrored up to 32 pixels a side."""
    behind = [(0, 0), (0, 0), *((0, 32 - n) for n in x.shape[2:])]
    made = train.predict(model, np.pad(x, behind, mode="reflect"))
    return made[0, :, : x.shape[2], : x.shape[3]].transpose(1, 2, 0)


class Batches(unittest.TestCase):
    def test_a_batch_is_a_function_of_its_number(self) -> None:
        photos = [picture(k) for k in range(2)]
        given = Patches(photos, 32, 3, 4, seed=1)
        a, b = given.batch(5), Patches(photos, 32, 3, 4, seed=1).batch(5)
        np.testing.assert_array_equal(a[0], b[0])
        self.assertEqual(a[0].shape, (3, 3, 32, 32))
        self.assertGreater(np.abs(a[0] - given.batch(6)[0]).max(), 0)

    def test_photos_come_in_several_sizes(self) -> None:
        """Each is smaller by the root of 2, as long as a patch is a part of it."""
        with tempfile.TemporaryDirectory() as name:
            path = Path(name, "photo.png")
            write(path, np.full((128, 200, 3), 0.5, np.float32))
            found = [photo.shape[:2] for photo in sizes(path, 48)]
        self.assertEqual(found, [(128, 200), (90, 141), (64, 100)])


if __name__ == "__main__":
    unittest.main()

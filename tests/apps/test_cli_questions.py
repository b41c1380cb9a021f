"""Questions to a trained network on the command line: evaluate and predict, of IDX files and
images.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import unittest
from pathlib import Path

import numpy as np

import support.small_digits as small
from dlsys.apps import cli
from dlsys.apps.pictures import normal_form, read_pictures
from dlsys.data import write_idx
from dlsys.train import load_model
from support.devices import native_contexts
from support.small_digits import ENDING, MLP, Folder, needs
from support.table.onnx_rows import MISSING, run_onnxruntime


class Questions(Folder):
    def setUp(self) -> None:
        super().setUp()
        self.run_folder = self.folder / "run"
        options = ("-c", "numpy", "-e", 4, "--optimizer", "adam", "--checkpoint", self.run_folder)
        self.trained = self.done(*MLP, *options)
        self.images, self.labels = small.digits(small.TEST, 1)
        self.idx = self.data / "t10k-images-idx3-ubyte"

    def ask(self, *arguments: object) -> str:
        done = small.run(*arguments)
        self.assertEqual((done.status, done.err), (0, ""))
        return done.out

    def test_evaluate_measures_what_training_did(self) -> None:
        ending = ENDING.search(self.trained)
        assert ending is not None
        self.assertGreater(float(ending[2]), 0.9)
        last = self.run_folder / "last.safetensors"
        for device in ["numpy", *(ctx.name for ctx in native_contexts())]:
            out = self.done("evaluate", last, "-c", device)
            self.assertTrue(out.endswith(ending[0]), out)
        labels = self.data / "t10k-labels-idx1-ubyte"
        out = self.ask("evaluate", last, self.idx, labels, "-c", "numpy")
        self.assertRegex(out, rf"(?m)^60 images  loss \d\.\d{{6}}  accuracy={ending[2]}$")

    def test_a_folder_is_asked_for_its_best(self) -> None:
        best = self.done("evaluate", self.run_folder / "best.safetensors", "-c", "numpy")
        self.assertEqual(self.done("evaluate", self.run_folder, "-c", "numpy"), best)

    def test_predict_shows_the_likeliest_classes(self) -> None:
        out = self.ask("predict", self.run_folder, self.idx, "-k", 10, "-c", "numpy")
        lines = out.splitlines()
        self.assertEqual(len(lines), small.TEST)
        right = 0
        for k, line in enumerate(lines):
            name, *shown = re.split(r"\s{2,}", line)
            self.assertEqual(name, f"{self.idx}[{k}]")
            classes, chances = zip(*(part.split() for part in shown))
            self.assertEqual(sorted(classes), list("0123456789"))
            numbers = [float(chance) for chance in chances]
            self.assertEqual(numbers, sorted(numbers, reverse=True))
            self.assertAlmostEqual(sum(numbers), 1, delta=1e-3)
            right += classes[0] == str(self.labels[k])
        self.assertGreater(right, 0.9 * small.TEST)
        out = self.ask("predict", self.run_folder, self.idx, "-c", "numpy")
        self.assertEqual(len(re.split(r"\s{2,}", out.splitlines()[0])), 4, "three by default")

    @needs("PIL", "images")
    @unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
    def test_export_writes_what_other_runtimes_run(self) -> None:
        file = self.folder / "net.onnx"
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.assertEqual(cli.main(["export", str(self.run_folder), str(file)]), 0)
        said = out.getvalue()
        self.assertRegex(said, r"(?m)^input +input: float \(batch, 1, 28, 28\)$")
        self.assertIn('"mean"', said)
        prepared = load_model(self.run_folder).trained_on.prepared(self.images)
        (logits,) = run_onnxruntime(file, {"input": prepared.reshape(-1, 1, 28, 28)})
        self.assertGreater(float(np.mean(logits.argmax(axis=1) == self.labels)), 0.9)
        where = ["--int8", "entropy", "--data-dir", str(self.data)]
        with contextlib.redirect_stdout(io.StringIO()), small.small_sets():
            self.assertEqual(cli.main(["export", str(self.run_folder), str(file), *where]), 0)
        (quantized,) = run_onnxruntime(file, {"input": prepared.reshape(-1, 1, 28, 28)})
        self.assertGreater(float(np.mean(quantized.argmax(axis=1) == logits.argmax(axis=1))), 0.9)
        self.assertGreater(float(np.abs(quantized - logits).max()), 0)

    def test_a_png_is_taken_for_what_the_idx_file_has(self) -> None:
        from PIL import Image

        names = [self.folder / f"{k}.png" for k in range(3)]
        for name, image in zip(names, self.images):
            Image.fromarray(image).save(name)
        shown = self.ask("predict", self.run_folder, *names, "-c", "numpy").splitlines()
        wanted = self.ask("predict", self.run_folder, self.idx, "-c", "numpy").splitlines()
        for name, got, line in zip(names, shown, wanted):
            self.assertTrue(got.startswith(f"{name}  "), got)
            self.assertEqual(got.split()[1:], line.split()[1:])

    def test_other_files_are_refused(self) -> None:
        def refused(pattern: str, *files: Path) -> None:
            command = "evaluate" if len(files) == 2 else "predict"
            arguments = (command, self.run_folder, *files, "-c", "numpy")
            self.refused(f"^error: .*{pattern}", *arguments, status=1)

        labels = self.data / "t10k-labels-idx1-ubyte"
        refused(r"uint8 \(60,\), expected images uint8 \(n, 28, 28\)", labels)
        refused("No such file", self.folder / "none.png")
        refused("labels from 0 to 9|integers", self.idx, self.idx)
        refused("one label an image", self.idx, self.data / "train-labels-idx1-ubyte")
        write_idx(self.folder / "far", np.full(small.TEST, 10, np.uint8))
        refused("expected labels from 0 to 9", self.idx, self.folder / "far")

    @needs("PIL", "images")
    def test_what_is_no_image_is_refused(self) -> None:
        text = self.folder / "text.png"
        text.write_text("no image")
        pattern = "cannot be read as an image"
        self.refused(pattern, "predict", self.run_folder, text, "-c", "numpy", status=1)


class Pictures(unittest.TestCase):
    def test_a_small_one_stays_as_it_is(self) -> None:
        image = small.digits(1, 0)[0][0]
        np.testing.assert_array_equal(normal_form(image, digits=True), image)
        np.testing.assert_array_equal(normal_form(255 - image, digits=True), image)

    @needs("PIL", "images")
    def test_a_digit_becomes_twenty_pixels_around_its_center_of_mass(self) -> None:
        paper = np.full((90, 200), 250, np.uint8)
        paper[15:75, 130:150] = 10  # a stroke, and a foot to its left
        paper[65:75, 110:130] = 10
        made = normal_form(paper, digits=True).astype(np.float64)
        rows, cols = (np.flatnonzero((made > 60).any(axis=axis)) for axis in (1, 0))
        self.assertLessEqual(abs(int(np.ptp(rows)) + 1 - 20), 1)
        self.assertLess(np.ptp(cols), np.ptp(rows))
        for axis, size in ((1, rows), (0, cols)):
            weights = made.sum(axis=axis)
            center = weights @ np.arange(28) / weights.sum()
            self.assertLess(abs(center - 13.5), 0.6, size)
        filled = normal_form(paper, digits=False)
        self.assertTrue((filled[0] > 60).any() and (filled[-1] > 60).any())

    def test_an_empty_one(self) -> None:
        self.assertFalse(normal_form(np.full((40, 50), 255, np.uint8), digits=True).any())

    @needs("PIL", "images")
    def test_what_is_transparent_is_paper(self) -> None:
        from PIL import Image

        pixels = np.zeros((40, 40, 4), np.uint8)
        pixels[10:30, 18:22, 3] = 255  # black ink
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ink.png"
            Image.fromarray(pixels).save(path)
            (image,) = read_pictures(path, digits=True)[:, 0]
        self.assertEqual(image[14, 13], 255)
        self.assertEqual(image[0, 0], 0)

    @needs("PIL", "images")
    def test_sixteen_bits_become_eight(self) -> None:
        from PIL import Image

        gray = np.arange(28 * 28, dtype=np.uint16).reshape(28, 28) * 50
        gray[0] = gray[-1] = gray[:, 0] = gray[:, -1] = 0  # a dark border
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "gray.png"
            Image.fromarray(gray).save(path)
            (image,) = read_pictures(path, digits=True)[:, 0]
        np.testing.assert_array_equal(image, gray >> 8)

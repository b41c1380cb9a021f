"""`dlsys cifar`: runs on made images and on folders in CIFAR-10's format, moved batches."""

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
from dlsys import nn
from dlsys.apps import cli
from dlsys.apps.cifar import batches, training
from dlsys.data.formats import cifar
from dlsys.errors import ShapeError
from dlsys.train.files import safetensors

SMALL = "--batch-size 20 --width 4 --lr 0.05 --precision fp32 --seed 3 -c cpu".split()


def dlsys(*words: object) -> tuple[int, str, str]:
    """The status of `dlsys cifar …`, and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["cifar", *map(str, words)])
    return status, out.getvalue(), err.getvalue()


class Application(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.root = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.folder = cls.root / "made"
        cls.made = dlsys("train", cls.folder, "--made", 80, "-e", 2, *SMALL)

    def test_what_training_prints_and_writes(self) -> None:
        status, out, err = self.made
        self.assertEqual((status, err), (0, ""))
        self.assertRegex(out, r"step 8/8  loss \d+\.\d{3}  held out \S+  accuracy 0\.\d{4}  \d+\.")
        self.assertRegex(out, r"test accuracy=0\.\d{4}  with mirror images 0\.\d{4}\n$")
        found = json.loads((self.folder / "run.json").read_text())
        self.assertEqual((found["made"], found["epochs"], found["width"]), (80, 2, 4))
        again = dlsys("evaluate", self.folder, "-c", "cpu")
        self.assertEqual((again[0], again[2]), (0, ""))
        self.assertTrue(out.endswith(again[1]), (out, again[1]))

    def test_a_run_that_was_stopped_ends_with_the_same_bits(self) -> None:
        class Stops(training.Lines):
            def on_step(self, run) -> None:
                super().on_step(run)
                if run.step == 5:
                    run.stop("here")

        again = self.root / "again"
        with mock.patch.object(training, "Lines", Stops):
            self.assertEqual(dlsys("train", again, "--made", 80, "-e", 2, *SMALL)[0], 0)
        status, out, err = dlsys("train", again, "--resume", "-c", "cpu")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("going on after 5 steps", out)
        a, b = (
            safetensors.read(folder / "last.safetensors").tensors for folder in (self.folder, again)
        )
        for name, value in a.items():
            np.testing.assert_array_equal(value, b[name], err_msg=name)

    def test_a_folder_in_the_format_of_cifar(self) -> None:
        """The binary version, as small as the rest of the program lets it be."""
        folder = self.root / "data" / cifar.FOLDER
        folder.mkdir(parents=True)
        rng = np.random.default_rng(0)
        for name in cifar.FILES:
            records = rng.integers(0, 256, (12, 3073)).astype(np.uint8)
            records[:, 0] %= 10
            (folder / name).write_bytes(records.tobytes())
        with mock.patch.multiple(cifar, N_RECORDS=12, N_TRAIN=50):
            status, out, err = dlsys(
                "train", self.root / "own", "--data-dir", self.root / "data", "-e", 2, *SMALL
            )
        self.assertEqual((status, err), (0, ""))
        self.assertIn("step 4/4", out)

    def test_faults_are_one_sentence(self) -> None:
        new = self.root / "new"
        for words, status, said in (
            (("train", self.folder, "--made", 80, *SMALL), 2, "go on with it"),
            (("train", new, "--made", 30, *SMALL), 2, "no two batches of 20"),
            (("train", new, "--made", 80, "--data-dir", new, *SMALL), 2, "leave one of them out"),
            (("train", self.folder, "--resume", "--width", 9, "-c", "cpu"), 2, "--width 4, not 9"),
            (("evaluate", new, "-c", "cpu"), 1, "no run to use"),
        ):
            got, _, err = dlsys(*words)
            self.assertEqual(got, status, (words, err))
            self.assertIn(said, err)
            self.assertEqual(err.count("\n"), 1)
        self.assertFalse((new / "run.json").exists())


class Moved(unittest.TestCase):
    def test_each_image_is_a_part_of_its_mirrored_surroundings(self) -> None:
        x = np.random.default_rng(0).random((40, 3, 8, 8), np.float32)
        source = ad.Generator(1)
        executor = ad.Executor([batches.moved(ad.constant(x), 2, source)])
        (found,) = executor.run({}, True)
        padded = np.pad(x, [(0, 0), (0, 0), (2, 2), (2, 2)], mode="reflect")
        seen = set()
        for k in range(40):
            fits = [
                (i, j, flip)
                for i in range(5)
                for j in range(5)
                for flip in (1, -1)
                if np.array_equal(found[k], padded[k, :, i : i + 8, j : j + 8][..., ::flip])
            ]
            self.assertEqual(len(fits), 1)
            seen.add(fits[0])
        self.assertGreater(len(seen), 20)
        self.assertEqual({flip for *_, flip in seen}, {1, -1})
        self.assertEqual({i for i, *_ in seen}, set(range(5)))

    def test_whitened_patches_are_uncorrelated(self) -> None:
        rng = np.random.default_rng(1)
        images = rng.normal(size=(300, 3, 16, 16)).astype(np.float32).cumsum(axis=2).cumsum(axis=3)
        images /= images.std()
        model = nn.ResNetCIFAR(width=4, seed=0)
        model.whiten(images)
        conv = model.patches(ad.constant(images))
        (planes,) = ad.Executor([conv]).run({}, True)
        inner = planes[:, :, 1:-1, 1:-1].transpose(1, 0, 2, 3).reshape(27, -1)
        covariance = np.cov(inner)
        large = np.diag(covariance) > 0.5  # the rest is as small as what is added to variances
        self.assertGreaterEqual(large.sum(), 9)
        np.testing.assert_allclose(
            covariance[np.ix_(large, large)], np.diag(np.diag(covariance)[large]), atol=0.1
        )
        self.assertNotIn("patches.weight", dict(model.named_parameters()))
        with self.assertRaisesRegex(ShapeError, "whiten: expected images"):
            model.whiten(images[:, :1])


if __name__ == "__main__":
    unittest.main()

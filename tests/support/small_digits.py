"""The command line on small sets: four IDX files of a few images, in place of MNIST's.

As a program, `python small_digits.py PAUSE ...` runs mnist_dlsys.py on them with a pause of so many
seconds after each step, for tests that end it from outside.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mnist_dlsys  # noqa: E402 (the program at the top, which finds the package)
from dlsys.data import write_idx  # noqa: E402
from dlsys.data.formats import mnist  # noqa: E402

TRAIN, VALIDATION, TEST = 200, 100, 60  # images
BATCHES = 10  # an epoch at --batch-size 20
MLP = ("-m", "mlp", "--hidden", "16", "--batch-size", "20")
ENDING = re.compile(r"validation set accuracy=(\d\.\d{6})\ntest set accuracy=(\d\.\d{6})\n\Z")


class Done(NamedTuple):
    """The files that a run of the command line left."""

    status: int
    out: str
    err: str


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 28, 28) uint8: a bright square in one of ten positions, under noise."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count, dtype=np.uint8) % 10
    images = rng.integers(0, 60, (count, 28, 28)).astype(np.uint8)
    for image, label in zip(images, labels):
        row, col = 3 + 12 * (label // 5), 2 + 5 * (label % 5)
        image[row : row + 9, col : col + 5] += 150
    return images, labels


def write(folder: Path) -> None:
    """Writes the four files of a small set."""
    parts = [*digits(TRAIN + VALIDATION, 0), *digits(TEST, 1)]
    for file, array in zip(mnist.MNIST.files, parts):
        write_idx(folder / file.name, array)


@contextlib.contextmanager
def small_sets() -> Iterator[None]:
    """In the block MNIST and Fashion-MNIST are sets of that size, with any content."""
    counts = (TRAIN + VALIDATION, TEST)
    shapes = [shape for n in counts for shape in ((n, 28, 28), (n,))]
    files = tuple(mnist.IdxFile(known.name, n) for known, n in zip(mnist.MNIST.files, shapes))
    with (
        mock.patch.object(mnist, "N_TRAIN", TRAIN),
        mock.patch.object(mnist, "MNIST", mnist.MNIST._replace(files=files)),
        mock.patch.object(mnist, "FASHION_MNIST", mnist.FASHION_MNIST._replace(files=files)),
    ):
        yield


def run(*arguments: object) -> Done:
    """Runs the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with small_sets(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = mnist_dlsys.main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = int(end.code or 0)
    return Done(status, out.getvalue(), err.getvalue())


def needs(module: str, extra: str) -> Any:
    """Skips a test where an optional library is missing."""
    missing = importlib.util.find_spec(module) is None
    return unittest.skipIf(missing, f"no {module}: pip install '.[{extra}]'")


class Folder(unittest.TestCase):
    """A folder of its own, with a small data set in data/."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.data = self.folder / "data"
        self.data.mkdir()
        write(self.data)

    def done(self, *arguments: object) -> str:
        """The output of a run that ends well."""
        done = run(*arguments, "--data-dir", self.data)
        self.assertEqual((done.status, done.err), (0, ""))
        return done.out

    def refused(self, pattern: str, *arguments: object, status: int = 2) -> None:
        done = run(*arguments)
        self.assertEqual(done.status, status, done)
        self.assertRegex(done.err, pattern)


def main() -> int:
    """See the head of this file."""
    from dlsys.apps.mnist import Lines

    pause, told = float(sys.argv[1]), Lines.on_step

    def on_step(self: Lines, run: object) -> None:
        told(self, run)  # type: ignore[arg-type]
        time.sleep(pause)

    with small_sets(), mock.patch.object(Lines, "on_step", on_step):
        return mnist_dlsys.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())

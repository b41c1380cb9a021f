"""The command line on small sets: four IDX files of a few images, in place of MNIST's.

As a program, `python small_digits.py PAUSE ...` runs mnist_dlsys.py on them with a pause of so many
seconds after each step, for tests that end it from outside.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import mnist_dlsys  # noqa: E402 (the program at the top, which finds the package)
from dlsys.data import mnist, write_idx  # noqa: E402

TRAIN, VALIDATION, TEST = 200, 100, 60  # images
BATCHES = 10  # an epoch at --batch-size 20


class Done(NamedTuple):
    """What a run of the command line left."""

    status: int
    out: str
    err: str


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 28, 28) uint8: a bright square in one of ten places, under noise."""
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

"""The assignment's networks and how it trains them: slices of the training set in their order,
plain gradient descent, no host work but the calls. Its output is what it always was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import autodiff as ad
from .. import functional as F
from .. import ndarray, optim, profile
from ..data import Mnist, Split, load_fashion_mnist, load_mnist
from ..errors import DivergedError
from .networks import dense, initial_values
from .setup import Setup


class Training:
    """A model with its training step, its evaluation and the data, on one device."""

    def __init__(self, setup: Setup, mnist: Mnist, ctx: ndarray.Context | None) -> None:
        self.size, self.epochs, self.mnist = setup.batch_size, setup.epochs, mnist
        self.lr = setup.lr
        self.images = ad.Variable("images", shape=(None, 784), dtype=np.float32)
        self.labels = ad.Variable("labels", shape=(None,), dtype=np.int64)
        values = zip("Wb", initial_values(setup.model, setup.seed))
        matrices, biases = (
            [ad.Parameter(value, f"{letter}{k}") for k, value in enumerate(arrays, 1)]
            for letter, arrays in values
        )
        logits = dense(matrices, biases)(self.images)
        loss = F.cross_entropy(logits, self.labels)
        update = optim.SGD(setup.lr).minimize(loss, [*matrices, *biases])
        self.step = ad.Executor([loss, update], ctx, setup.precision)
        self.evaluation = ad.Executor([logits], ctx, setup.precision)
        self._upload: Callable[[np.ndarray], Any] = lambda x: x
        if ctx is not None and self.step.target.streams:
            self._upload = partial(ndarray.array, ctx=ctx)

    def batches(self) -> list[tuple[Any, Any]]:
        """The training set in slices, copied to the GPU."""
        images, labels = self.mnist.train
        slices = [slice(k, k + self.size) for k in range(0, len(labels), self.size)]
        return [(self._upload(images[rows]), self._upload(labels[rows])) for rows in slices]

    def measured(self, split: Split) -> tuple[float, float]:
        """The share of a split that the model gets right, and the mean loss."""
        right, total = 0, 0.0
        for k in range(0, len(split.labels), self.size):
            x, y = split.images[k : k + self.size], split.labels[k : k + self.size]
            logits = self.evaluation.run({self.images: x}, convert_to_numpy_ret_vals=True)[0]
            right += int((logits.argmax(axis=1) == y).sum())
            total += _loss(logits.astype(np.float64), y)
        return right / len(split.labels), total / len(split.labels)


def _loss(logits: np.ndarray, labels: np.ndarray) -> float:
    """The cross-entropies of rows, summed."""
    with np.errstate(invalid="ignore"):  # of logits that are infinite
        shifted = logits - logits.max(axis=1, keepdims=True)
        chosen = shifted[np.arange(len(labels)), labels]
        return float((np.log(np.exp(shifted).sum(axis=1)) - chosen).sum())


def train(training: Training, print_loss: bool) -> None:
    """Runs the epochs, with a bar on a terminal and a line an epoch, where it is asked for with the
    last batch's loss and the validation accuracy. Ctrl-C raises KeyboardInterrupt with what was
    done.
    """
    from tqdm import tqdm

    batches, epochs = training.batches(), training.epochs
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        done = 0
        title = f"epoch {epoch}/{epochs}"
        with tqdm(total=len(batches), desc=title, leave=False, disable=None, unit="batch") as bar:
            try:
                for x, y in batches:
                    loss = training.step.run({training.images: x, training.labels: y})[0]
                    done += 1
                    bar.update()
                value = float(loss)
            except KeyboardInterrupt:
                what = f"{epoch - 1} epochs and {done} of {len(batches)} batches"
                raise KeyboardInterrupt(what) from None
        rate = len(training.mnist.train.labels) / (time.perf_counter() - start)
        figures = ""
        if print_loss:
            accuracy = training.measured(training.mnist.validation)[0]
            figures = f"  loss {value:.6f}  val_accuracy {accuracy:.6f}"
        print(f"{title}{figures}  {rate:,.0f} images/s", flush=True)
        if not math.isfinite(value):
            raise DivergedError(
                f"the loss was {value:g} at the end of epoch {epoch}: use a smaller --lr than "
                f"{training.lr:g}"
            )


def run(
    setups: Sequence[Setup],
    data_dir: str | None,
    ctx: ndarray.Context | None,
    print_loss: bool,
    profiled: bool,
) -> None:
    """Trains models on one data set, one after the other, and prints their accuracies."""
    load = {"mnist": load_mnist, "fashion": load_fashion_mnist}[setups[0].dataset]
    mnist = load(data_dir)
    for setup in setups:
        _run_one(setup, mnist, ctx, print_loss, profiled)


def _run_one(
    setup: Setup, mnist: Mnist, ctx: ndarray.Context | None, print_loss: bool, profiled: bool
) -> None:
    training = Training(setup, mnist, ctx)
    print(f"training {setup.model} on {ctx or 'numpy'}", flush=True)
    if profiled:
        training.step.recorder = profile.Profile()
    train(training, print_loss)
    if profiled:
        print(training.step.recorder)
        if ctx is not None:
            for counter, amount in profile.counters(ctx).memory._asdict().items():
                print(f"{counter} {amount:,}")
    accuracy, loss = training.measured(mnist.validation)
    print(f"validation set accuracy={accuracy:f}")
    print(f"test set accuracy={training.measured(mnist.test)[0]:f}", flush=True)
    setup.check_loss(loss)

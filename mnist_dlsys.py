"""Trains networks on MNIST: python mnist_dlsys.py -m mlp -c auto -e 10 -l"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # from a checkout, installed or not
    sys.path.insert(0, str(Path(__file__).resolve().parent / "python"))

import numpy as np
from tqdm import tqdm

import dlsys
from dlsys import autodiff as ad
from dlsys import ndarray, optim, profile
from dlsys.data import Mnist, Split, load_mnist
from dlsys.errors import DlsysError
from dlsys.runtime import device

Network = Callable[[ad.Node, bool], ad.Node]  # (images (n, 784), training) -> logits (n, 10)


class Recipe(NamedTuple):
    """How a model is trained unless the command line says otherwise."""

    batch_size: int
    momentum: float
    lr: float | None  # of the mean loss; None is the assignment's, batch size / 1000
    one_cycle: bool  # the rate rises to `lr` and falls to 0; the images are shuffled each epoch


class Parameters:
    """Draws a model's Parameters from one seed and keeps them in order."""

    def __init__(self, seed: int) -> None:
        self.all: list[ad.Parameter] = []
        self._random = np.random.RandomState(seed)

    def normal(self, name: str, shape: tuple[int, ...], scale: float) -> ad.Parameter:
        """From N(0, scale²)."""
        value = self._random.normal(scale=scale, size=shape).astype(np.float32)
        self.all.append(ad.Parameter(value, name))
        return self.all[-1]

    def full(self, name: str, size: int, value: float) -> ad.Parameter:
        """One number everywhere."""
        self.all.append(ad.Parameter(np.full(size, value, np.float32), name))
        return self.all[-1]

    def he(self, name: str, shape: tuple[int, ...]) -> ad.Parameter:
        """He's normal initialisation of a filter (O, C, kH, kW) or a matrix (inputs, outputs)."""
        inputs = math.prod(shape[1:]) if len(shape) == 4 else shape[0]
        return self.normal(name, shape, math.sqrt(2 / inputs))


def dense(sizes: Sequence[int], scale: float, made: Parameters) -> Network:
    """The assignment's networks: products with biases, ReLU between them."""
    shapes = list(zip(sizes[:-1], sizes[1:]))
    weights = [made.normal(f"W{k}", shape, scale) for k, shape in enumerate(shapes, 1)]
    biases = [made.normal(f"b{k}", (n,), scale) for k, n in enumerate(sizes[1:], 1)]

    def network(images: ad.Node, training: bool) -> ad.Node:
        hidden = images
        for k, (w, b) in enumerate(zip(weights, biases), 1):
            hidden = ad.matmul_op(hidden, w) + b
            if k < len(weights):
                hidden = ad.relu_op(hidden)
        return hidden

    return network


def lenet(made: Parameters) -> Network:
    """LeNet-5 with ReLU and max-pooling."""
    filters = [made.he("C1", (6, 1, 5, 5)), made.he("C2", (16, 6, 5, 5))]
    planes = [made.full("c1", 6, 0.0), made.full("c2", 16, 0.0)]
    sizes = (400, 120, 84, 10)
    weights = [made.he(f"W{k}", shape) for k, shape in enumerate(zip(sizes, sizes[1:]), 1)]
    biases = [made.full(f"b{k}", size, 0.0) for k, size in enumerate(sizes[1:], 1)]

    def network(images: ad.Node, training: bool) -> ad.Node:
        x = ad.reshape_op(images, (-1, 1, 28, 28))
        for f, b, padding in zip(filters, planes, (2, 0)):
            x = ad.max_pool2d(ad.relu_op(ad.conv2d(x, f, b, padding=padding)), 2)
        x = ad.flatten_op(x)
        for k, (w, b) in enumerate(zip(weights, biases), 1):
            x = ad.matmul_op(x, w) + b
            if k < len(weights):
                x = ad.relu_op(x)
        return x

    return network


class Normalized:
    """A 3×3 convolution without bias, then batch normalization with running statistics."""

    def __init__(self, name: str, inputs: int, outputs: int, made: Parameters) -> None:
        self.filter = made.he(f"{name}.filter", (outputs, inputs, 3, 3))
        self.scale = made.full(f"{name}.scale", outputs, 1.0)
        self.bias = made.full(f"{name}.bias", outputs, 0.0)
        self.mean = ad.Parameter(np.zeros(outputs, np.float32), f"{name}.mean", trainable=False)
        self.variance = ad.Parameter(
            np.ones(outputs, np.float32), f"{name}.variance", trainable=False
        )

    def __call__(self, x: ad.Node, training: bool) -> ad.Node:
        y = ad.conv2d(x, self.filter, padding=1)
        return ad.batch_normalization(
            y, self.scale, self.bias, self.mean, self.variance, training=training
        )


def residual(made: Parameters) -> Network:
    """32 planes, 64 and a residual block at half the size, 128 and another at a quarter."""
    stages = [(32, []), (64, ["b1", "b2"]), (128, ["b3", "b4"])]
    layers, inputs = [], 1
    for k, (planes, block) in enumerate(stages, 1):
        first = Normalized(f"stage{k}", inputs, planes, made)
        layers.append((first, [Normalized(name, planes, planes, made) for name in block]))
        inputs = planes
    weight, bias = made.he("W", (128, 10)), made.full("b", 10, 0.0)

    def network(images: ad.Node, training: bool) -> ad.Node:
        x = ad.reshape_op(images, (-1, 1, 28, 28))
        for k, (first, block) in enumerate(layers):
            x = ad.relu_op(first(x if k == 0 else ad.max_pool2d(x, 2), training))
            if block:
                inner = block[1](ad.relu_op(block[0](x, training)), training)
                x = ad.relu_op(x + inner)
        return ad.matmul_op(ad.global_max_pool2d(x), weight) + bias

    return network


ASSIGNMENT = Recipe(batch_size=1000, momentum=0.0, lr=None, one_cycle=False)
MODELS: dict[str, tuple[Callable[[Parameters], Network], Recipe]] = {
    "logreg": (partial(dense, (784, 10), 0.0), ASSIGNMENT),
    "mlp": (partial(dense, (784, 256, 100, 10), 0.1), ASSIGNMENT),
    "cnn": (lenet, Recipe(batch_size=100, momentum=0.9, lr=0.05, one_cycle=True)),
    "resnet": (residual, Recipe(batch_size=100, momentum=0.9, lr=0.1, one_cycle=True)),
}
ALL = ("logreg", "mlp")  # the assignment's, in seconds on any device


class Training:
    """A model with its training step, its evaluation and the data, on one device."""

    def __init__(self, name: str, mnist: Mnist, ctx: ndarray.Context | None, options: Any) -> None:
        build, self.recipe = MODELS[name]
        self.size = options.batch_size or self.recipe.batch_size
        self.lr = next(
            rate for rate in (options.lr, self.recipe.lr, self.size / 1000) if rate is not None
        )
        self.images = ad.Variable("images", shape=(None, 784), dtype=np.float32)
        self.labels = ad.Variable("labels", shape=(None,), dtype=np.int64)
        parameters = Parameters(options.seed)
        network = build(parameters)
        loss = ad.softmax_cross_entropy(network(self.images, True), self.labels)
        self.optimizer = optim.SGD(self.lr, momentum=self.recipe.momentum)
        update = self.optimizer.minimize(loss, parameters.all)
        self.step = ad.Executor([loss, update], ctx=ctx)
        self.evaluation = ad.Executor([network(self.images, False)], ctx=ctx)
        self.mnist = mnist
        self.epochs = options.epochs
        self.steps = 0
        self._random = np.random.RandomState(options.seed)
        self._upload: Callable[[np.ndarray], Any] = lambda x: x
        if ctx is not None and ndarray.is_gpu_ctx(ctx):
            self._upload = partial(ndarray.array, ctx=ctx)
        self._batches: list[tuple[Any, Any]] = []

    def batches(self) -> list[tuple[Any, Any]] | Iterator[tuple[Any, Any]]:
        """The training set in slices; what stays in order is copied to the GPU once."""
        images, labels = self.mnist.train
        starts = range(0, len(labels), self.size)
        if self.recipe.one_cycle:
            order = self._random.permutation(len(labels))
            chosen = (order[k : k + self.size] for k in starts)
            return ((images[rows], labels[rows]) for rows in chosen)
        if not self._batches:
            slices = [slice(k, k + self.size) for k in starts]
            self._batches = [
                (self._upload(images[rows]), self._upload(labels[rows])) for rows in slices
            ]
        return self._batches

    def count(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.mnist.train.labels) // self.size)

    def train(self, x: Any, y: Any) -> Any:
        """One step; returns the loss, which the device may still be computing."""
        if self.recipe.one_cycle:
            progress = self.steps / (self.epochs * self.count())
            self.optimizer.lr.set(np.float32(self.lr * min(progress / 0.3, (1 - progress) / 0.7)))
        self.steps += 1
        return self.step.run({self.images: x, self.labels: y})[0]

    def accuracy(self, split: Split) -> float:
        """The share of a split that the model gets right."""
        right = 0
        for k in range(0, len(split.labels), self.size):
            x, y = split.images[k : k + self.size], split.labels[k : k + self.size]
            logits = self.evaluation.run({self.images: x}, convert_to_numpy_ret_vals=True)[0]
            right += int((logits.argmax(axis=1) == y).sum())
        return right / len(split.labels)


def train(training: Training, print_loss: bool) -> None:
    """Runs the epochs, with a bar on a terminal and a line an epoch elsewhere."""
    epochs, count = training.epochs, training.count()
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        done = 0
        title = f"epoch {epoch}/{epochs}"
        with tqdm(total=count, desc=title, leave=False, disable=None, unit="batch") as bar:
            try:
                for x, y in training.batches():
                    loss = training.train(x, y)
                    done += 1
                    bar.update()
                value = float(loss)
            except KeyboardInterrupt:
                what = f"{epoch - 1} epochs and {done} of {count} batches"
                raise KeyboardInterrupt(what) from None
        rate = len(training.mnist.train.labels) / (time.perf_counter() - start)
        shown = f"  loss {value:.6f}" if print_loss else ""
        print(f"{title}{shown}  {rate:,.0f} images/s", flush=True)


def run(name: str, mnist: Mnist, ctx: ndarray.Context | None, options: argparse.Namespace) -> None:
    """Trains one model and prints its accuracies."""
    training = Training(name, mnist, ctx, options)
    print(f"training {name} on {ctx or 'numpy'}", flush=True)
    if options.profile:
        training.step.recorder = profile.Profile()
    train(training, options.loss)
    if options.profile:
        print(training.step.recorder)
        if ctx is not None:
            for counter, amount in device.memory_stats(ctx)._asdict().items():
                print(f"{counter} {amount:,}")
    print(f"validation set accuracy={training.accuracy(mnist.validation):f}")
    print(f"test set accuracy={training.accuracy(mnist.test):f}", flush=True)


def choose_device(name: str) -> ndarray.Context | None:
    """The device asked for, or the best one that is there, with the reasons against better ones."""
    if name != "auto":
        return {"numpy": None, "cpu": ndarray.cpu(0), "gpu": ndarray.gpu(0)}[name]
    ctx, reasons = device.best_context()
    for reason in reasons:
        print(f"not used: {reason}")
    return ctx


def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a network on MNIST.")
    parser.add_argument(
        "-m",
        "--model",
        choices=[*MODELS, "all"],
        default="all",
        help="cnn is LeNet-5, resnet a small residual network; all is logreg and mlp",
    )
    parser.add_argument(
        "-c",
        "--executor-context",
        dest="device",
        choices=["auto", "numpy", "cpu", "gpu"],
        default="auto",
        help="auto takes the GPU, else the native CPU device, else numpy",
    )
    parser.add_argument("-e", "--num-epochs", dest="epochs", type=positive, default=10)
    parser.add_argument("-l", "--print-loss-val-each-epoch", dest="loss", action="store_true")
    parser.add_argument(
        "--batch-size", type=positive, default=None, help="default: 1000; 100 for cnn and resnet"
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=None,
        help="of the mean loss; default: batch size / 1000, the peak of a cycle for cnn and resnet",
    )
    parser.add_argument("--seed", type=int, default=123, help="of the initial weights")
    parser.add_argument("--data-dir", default=None, help="folder of MNIST's four IDX files")
    parser.add_argument("--profile", action="store_true", help="print the time of each operator")
    parser.add_argument("--version", action="version", version=f"dlsys {dlsys.__version__}")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, 1 for an error that was explained, 130 after Ctrl-C."""
    options = parse(arguments)
    try:
        ctx = choose_device(options.device)
        mnist = load_mnist(options.data_dir)
        for name in ALL if options.model == "all" else [options.model]:
            run(name, mnist, ctx, options)
    except KeyboardInterrupt as interrupt:
        print(f"interrupted; done: {interrupt or 'nothing trained yet'}", file=sys.stderr)
        return 130
    except (DlsysError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

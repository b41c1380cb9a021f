"""Trains the assignment's networks on MNIST: python mnist_dlsys.py -m mlp -c auto -e 10 -l"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

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

MODELS = {"logreg": (784, 10), "mlp": (784, 256, 100, 10)}


class Model(NamedTuple):
    """A network as graph nodes: what is fed, what comes out, what is trained."""

    images: ad.Node
    labels: ad.Node
    logits: ad.Node
    loss: ad.Node
    parameters: list[ad.Parameter]


def build(name: str, seed: int) -> Model:
    """The assignment's logistic regression (from zeros) or multilayer perceptron (from N(0,
    0.1²)).
    """
    sizes = MODELS[name]
    random = np.random.RandomState(seed)
    scale = 0.0 if len(sizes) == 2 else 0.1
    shapes = list(zip(sizes[:-1], sizes[1:]))
    weights = [random.normal(scale=scale, size=shape).astype(np.float32) for shape in shapes]
    biases = [random.normal(scale=scale, size=n).astype(np.float32) for n in sizes[1:]]
    images = ad.Variable("images", shape=(None, 784), dtype=np.float32)
    labels = ad.Variable("labels", shape=(None,), dtype=np.int64)
    parameters, hidden = [], images
    for k, (weight, bias) in enumerate(zip(weights, biases), 1):
        w, b = ad.Parameter(weight, f"W{k}"), ad.Parameter(bias, f"b{k}")
        parameters += [w, b]
        hidden = ad.matmul_op(hidden, w) + b
        if k < len(weights):
            hidden = ad.relu_op(hidden)
    return Model(images, labels, hidden, ad.softmax_cross_entropy(hidden, labels), parameters)


def batches(split: Split, size: int, ctx: ndarray.Context | None) -> list[tuple]:
    """The split in slices of `size`; on a GPU they are copied there once."""
    starts = range(0, len(split.labels), size)
    pairs = [(split.images[k : k + size], split.labels[k : k + size]) for k in starts]
    if ctx is not None and ndarray.is_gpu_ctx(ctx):
        return [(ndarray.array(x, ctx), ndarray.array(y, ctx)) for x, y in pairs]
    return pairs


def accuracy(model: Model, executor: ad.Executor, split: Split, size: int) -> float:
    """The share of a split that the model gets right."""
    right = 0
    for x, y in batches(split, size, None):
        logits = executor.run({model.images: x}, convert_to_numpy_ret_vals=True)[0]
        right += int((logits.argmax(axis=1) == y).sum())
    return right / len(split.labels)


def train(model: Model, step: ad.Executor, data: list[tuple], options: argparse.Namespace) -> None:
    """Runs the epochs, with a bar on a terminal and a line an epoch elsewhere."""
    count = sum(x.shape[0] for x, _ in data)
    for epoch in range(1, options.epochs + 1):
        start = time.perf_counter()
        bar = tqdm(data, f"epoch {epoch}/{options.epochs}", leave=False, disable=None, unit="batch")
        done = 0
        try:
            for x, y in bar:
                loss = step.run({model.images: x, model.labels: y})[0]
                done += 1
            value = float(loss)
        except KeyboardInterrupt:
            bar.close()
            raise KeyboardInterrupt(
                f"{epoch - 1} epochs and {done} of {len(data)} batches"
            ) from None
        rate = count / (time.perf_counter() - start)
        shown = f"  loss {value:.6f}" if options.loss else ""
        print(f"epoch {epoch}/{options.epochs}{shown}  {rate:,.0f} images/s", flush=True)


def run(name: str, mnist: Mnist, ctx: ndarray.Context | None, options: argparse.Namespace) -> None:
    """Trains one model and prints its accuracies."""
    model = build(name, options.seed)
    print(f"training {name} {'-'.join(map(str, MODELS[name]))} on {ctx or 'numpy'}", flush=True)
    size = options.batch_size
    lr = size / 1000 if options.lr is None else options.lr
    update = optim.SGD(lr).minimize(model.loss, model.parameters)
    step = ad.Executor([model.loss, update], ctx=ctx)
    if options.profile:
        step.recorder = profile.Profile()
    train(model, step, batches(mnist.train, size, ctx), options)
    if options.profile:
        print(step.recorder)
        if ctx is not None:
            for counter, amount in device.memory_stats(ctx)._asdict().items():
                print(f"{counter} {amount:,}")
    evaluate = ad.Executor([model.logits], ctx=ctx)
    print(f"validation set accuracy={accuracy(model, evaluate, mnist.validation, size):f}")
    print(f"test set accuracy={accuracy(model, evaluate, mnist.test, size):f}", flush=True)


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
    parser = argparse.ArgumentParser(description="Train logistic regression or an MLP on MNIST.")
    parser.add_argument("-m", "--model", choices=[*MODELS, "all"], default="all")
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
    parser.add_argument("--batch-size", type=positive, default=1000)
    parser.add_argument(
        "--lr", type=float, default=None, help="of the mean loss; default: batch size / 1000"
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
        for name in MODELS if options.model == "all" else [options.model]:
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

"""The networks that are measured, of dlsys; torch_networks.py has those of PyTorch: the same
weights, data and loss.

A training step is forward, backward and the update by plain SGD, in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shared.workloads import Work

SIZES = {"logreg": (784, 10), "mlp": (784, 256, 100, 10)}  # of dense networks
LENET, GPT = "lenet", "gpt"
MODELS = (LENET, "residual", "resnet18", GPT)  # of dlsys.nn, by `built`
SEED = 123
CLASSES = 10
LEARNING_RATE = 1e-3
# Of the GPT: the characters, positions, layers, heads and features of docs/gpt.md's run on a CPU.
CHARACTERS, CONTEXT, LAYERS, HEADS, FEATURES = 219, 64, 4, 4, 128

Weights = list[tuple[np.ndarray, np.ndarray]]


def initial(network: str) -> Weights:
    """Matrices (inputs, outputs) and biases from a fixed seed."""
    rng = np.random.default_rng(SEED)
    sizes = SIZES[network]
    return [
        (
            rng.normal(0, 0.1, (rows, columns)).astype(np.float32),
            rng.normal(0, 0.1, columns).astype(np.float32),
        )
        for rows, columns in zip(sizes, sizes[1:])
    ]


def batch(size: int, network: str = LENET) -> tuple[np.ndarray, np.ndarray]:
    """Images, (size, 784) or resnet18's (size, 3, 64, 64), and class numbers (size,): random. Of
    the GPT tokens (size, CONTEXT), and what follows each.
    """
    rng = np.random.default_rng(7)
    if network == GPT:
        text = rng.integers(0, CHARACTERS, (size, CONTEXT + 1))
        return text[:, :-1].copy(), text[:, 1:].copy()
    shape = (size, 3, 64, 64) if network == "resnet18" else (size, 784)
    images = rng.random(shape, dtype=np.float32)
    return images, rng.integers(0, CLASSES, size)


class Ours:
    """A training step of dlsys. Feeds are numpy arrays, or NDArrays with `on_device`."""

    def __init__(self, network: str, size: int, ctx: Any, on_device: bool = False) -> None:
        from dlsys import autodiff as ad
        from dlsys import ndarray, optim

        loss, parameters, feeds = graph(network, size)
        train = optim.SGD(LEARNING_RATE).minimize(loss, parameters)
        self.executor = ad.Executor([loss, train], ctx=ctx)
        if on_device:
            feeds = {node: ndarray.array(value, ctx) for node, value in feeds.items()}
        self.feeds = feeds

    def step(self) -> Any:
        """One step; returns the loss."""
        return self.executor.run(self.feeds)[0]


def graph(network: str, size: int) -> tuple[Any, list[Any], dict[Any, Any]]:
    """The loss of a network, its parameters, and a batch as feeds."""
    from dlsys import autodiff as ad
    from dlsys import functional as F

    images, classes = batch(size, network)
    x, y_ = ad.Variable("x"), ad.Variable("y_", dtype=np.int64)
    if network == GPT:
        x = ad.Variable("x", images.shape, images.dtype)
        y_ = ad.Variable("y_", classes.shape, classes.dtype)
    if network in MODELS:
        model = built(network)
        logits, parameters = model(x), model.parameters()
    else:
        logits, parameters = _dense(x, network)
    if network == GPT:
        return F.cross_entropy(logits, y_), parameters, {x: images, y_: classes}
    return ad.softmax_cross_entropy(logits, y_), parameters, {x: images, y_: classes}


def _dense(x: Any, network: str) -> tuple[Any, list[Any]]:
    """Logits and parameters."""
    from dlsys import autodiff as ad

    hidden, parameters = x, []
    weights = initial(network)
    for k, (matrix, bias) in enumerate(weights):
        w, b = ad.Parameter(matrix, name=f"w{k}"), ad.Parameter(bias, name=f"b{k}")
        parameters += [w, b]
        hidden = ad.matmul_op(hidden, w) + b
        if k + 1 < len(weights):
            hidden = ad.relu_op(hidden)
    return hidden, parameters


def built(network: str) -> Any:
    """A network of `dlsys.nn`."""
    from dlsys import nn

    if network == "resnet18":
        return nn.ResNet18(CLASSES, seed=SEED)
    if network == GPT:
        sizes = nn.GPTConfig(CHARACTERS, CONTEXT, LAYERS, HEADS, FEATURES)
        return nn.GPT(sizes, seed=SEED)
    return {LENET: nn.LeNet5, "residual": nn.ResNetMNIST}[network](seed=SEED)


def model(work: Work, seed: int | None = None) -> Any:
    """The dlsys network of one of the race's works, its weights drawn by the seed, if any."""
    from dlsys import nn

    if work.kind == "residual":
        return nn.ResNetMNIST(seed=seed)
    if work.kind == "dense":
        sizes = list(work.sizes)
        return nn.MLP(sizes, seed=seed) if len(sizes) > 2 else nn.LogisticRegression(*sizes)
    rng = None if seed is None else np.random.default_rng(seed)
    first, second = work.sizes
    return nn.Sequential(
        *(nn.Reshape(1, 28, 28), nn.Conv2d(1, first, 5, padding=2, rng=rng), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Conv2d(first, second, 5, rng=rng), nn.ReLU(), nn.MaxPool2d(2)),
        nn.MLP([25 * second, 120, 84, CLASSES], seed=rng),
    )

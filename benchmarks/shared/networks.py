"""The networks that are measured, for dlsys and for PyTorch: the same weights, data and loss.

A training step is forward, backward and the update by plain SGD, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shared.workloads import Work

SIZES = {"logreg": (784, 10), "mlp": (784, 256, 100, 10)}  # of dense networks
LENET = "lenet"
CLASSES = 10
LEARNING_RATE = 1e-3

Weights = list[tuple[np.ndarray, np.ndarray]]


def initial(network: str) -> Weights:
    """Matrices (inputs, outputs) and biases from a fixed seed."""
    rng = np.random.default_rng(123)
    sizes = SIZES[network]
    return [
        (
            rng.normal(0, 0.1, (rows, columns)).astype(np.float32),
            rng.normal(0, 0.1, columns).astype(np.float32),
        )
        for rows, columns in zip(sizes, sizes[1:])
    ]


def batch(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (size, 784) and class numbers (size,) of random data."""
    rng = np.random.default_rng(7)
    images = rng.random((size, 784), dtype=np.float32)
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

    x, y_ = ad.Variable("x"), ad.Variable("y_", dtype=np.int64)
    logits, parameters = _lenet(x) if network == LENET else _dense(x, network)
    images, classes = batch(size)
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


def _lenet(x: Any) -> tuple[Any, list[Any]]:
    from dlsys import nn

    model = nn.LeNet5(seed=123)
    return model(x), model.parameters()


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


def theirs(
    network: str, size: int, device: str, channels_last: bool = False, **optimizer: Any
) -> Callable[[], Any]:
    """A training step of PyTorch, eager, as a function that returns the loss."""
    import torch
    from torch.nn import functional

    model = (_their_lenet if network == LENET else _their_dense)(network).to(device)
    images, classes = batch(size)
    x, y = torch.from_numpy(images).to(device), torch.from_numpy(classes).to(device)
    if network == LENET:
        x = x.reshape(size, 1, 28, 28)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, **optimizer)

    def step() -> Any:
        sgd.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        sgd.step()
        return loss.detach()

    return step


def _their_dense(network: str) -> Any:
    """Matrices are stored (outputs, inputs), as `torch.nn.Linear` does."""
    import torch

    layers: list[torch.nn.Module] = []
    for matrix, bias in initial(network):
        linear = torch.nn.Linear(*matrix.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(matrix.T))
            linear.bias.copy_(torch.from_numpy(bias))
        layers += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def _their_lenet(network: str) -> Any:
    import torch
    from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU

    from dlsys import nn

    model = torch.nn.Sequential(
        *(Conv2d(1, 6, 5, padding=2), ReLU(), MaxPool2d(2)),
        *(Conv2d(6, 16, 5), ReLU(), MaxPool2d(2), Flatten()),
        *(Linear(400, 120), ReLU(), Linear(120, 84), ReLU(), Linear(84, CLASSES)),
    )
    ours = nn.LeNet5(seed=123).state_dict().values()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), ours, strict=True):
            parameter.copy_(torch.from_numpy(value))
    return model

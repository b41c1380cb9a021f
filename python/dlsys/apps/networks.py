"""The assignment's two networks on digits, logreg and mlp: sizes, initial values, graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .. import autodiff as ad

SIZES = {"logreg": (784, 10), "mlp": (784, 256, 100, 10)}
_SCALES = {"logreg": 0.0, "mlp": 0.1}

Network = Callable[[ad.Node], ad.Node]  # images (n, 784) -> logits (n, 10)
Arrays = list[np.ndarray]


def initial_values(name: str, seed: int) -> tuple[Arrays, Arrays]:
    """Matrices (inputs, outputs) and biases of a model, float32 of N(0, 0.1²); logreg's are 0."""
    random, scale, sizes = np.random.RandomState(seed), _SCALES[name], SIZES[name]

    def normal(shape: tuple[int, ...]) -> np.ndarray:
        return random.normal(scale=scale, size=shape).astype(np.float32)

    matrices = [normal(shape) for shape in zip(sizes[:-1], sizes[1:])]
    return matrices, [normal((size,)) for size in sizes[1:]]


def dense(matrices: Sequence[ad.Node], biases: Sequence[ad.Node]) -> Network:
    """Products with biases, ReLU between them."""

    def network(images: ad.Node) -> ad.Node:
        hidden = images
        for k, (w, b) in enumerate(zip(matrices, biases), 1):
            hidden = ad.matmul_op(hidden, w) + b
            if k < len(matrices):
                hidden = ad.relu_op(hidden)
        return hidden

    return network

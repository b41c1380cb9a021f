"""Trains the MLP for a number of steps on the GPU, on random data: python tests/gpu/train.py STEPS

Two batch sizes by turns and host feeds, so that plans, staging and fetches all take part.
"""

from __future__ import annotations

import sys

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray, optim


def main(steps: int) -> None:
    """Prints the last loss."""
    rng = np.random.default_rng(0)
    sizes = (784, 256, 100, 10)
    x, y_ = ad.Variable("x"), ad.Variable("y_", dtype=np.int64)
    hidden, parameters = x, []
    for k, shape in enumerate(zip(sizes, sizes[1:])):
        w = ad.Parameter(rng.normal(0, 0.1, shape).astype(np.float32), name=f"w{k}")
        b = ad.Parameter(np.zeros(shape[1], np.float32), name=f"b{k}")
        parameters += [w, b]
        hidden = ad.matmul_op(hidden if k == 0 else ad.relu_op(hidden), w) + b
    loss = ad.softmax_cross_entropy(hidden, y_)
    train = optim.SGD(0.1, momentum=0.9).minimize(loss, parameters)
    executor = ad.Executor([loss, train], ctx=ndarray.gpu(0))
    for step in range(steps):
        rows = (100, 37)[step % 2]
        feeds = {x: rng.random((rows, 784), np.float32), y_: rng.integers(0, 10, rows)}
        value = float(executor.run(feeds)[0])
    print(f"loss {value:.6f}")


if __name__ == "__main__":
    main(int(sys.argv[1]))

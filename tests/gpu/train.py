"""Trains the MLP for a number of steps on the GPU, on random data.

    python tests/gpu/train.py STEPS [host|device|many]

host: two batch sizes by turns and host feeds, so that plans, staging and fetches all take part, and
the loss is read at each step. device: feeds that lie on the GPU, nothing is read before the end.
many: the same, queued by one `run_many`.
"""

from __future__ import annotations

import sys

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray, optim


def main(steps: int, feeds: str = "host") -> None:
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
    batches = [(rng.random((n, 784), np.float32), rng.integers(0, 10, n)) for n in (100, 37)]
    if feeds == "host":
        for step in range(steps):
            images, labels = batches[step % 2]
            value = float(executor.run({x: images, y_: labels})[0])
    else:
        fed = {node: ndarray.array(part, ndarray.gpu(0)) for node, part in zip((x, y_), batches[0])}
        if feeds == "many":
            executor.run_many(steps, fed)
        for _ in range(steps if feeds == "device" else 1):
            last = executor.run(fed)[0]
        value = float(last)
    print(f"loss {value:.6f}")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

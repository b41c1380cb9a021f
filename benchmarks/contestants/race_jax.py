"""JAX in the race: jit with feeds on the device, and a whole epoch in one jit, scanning over data
that lies there. Dense networks and LeNet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from shared import workloads
from shared.workloads import PRECISIONS, RATE, SAMPLES, Work

Weights = list[Any]


def initial(work: Work) -> Weights:
    rng = np.random.default_rng(0)
    sizes = work.sizes
    shapes: list[tuple[int, ...]] = []
    if work.kind == "lenet":
        first, second = sizes
        shapes += [(first, 1, 5, 5), (first,), (second, first, 5, 5), (second,)]
        sizes = (25 * second, 120, 84, 10)
    for inputs, outputs in zip(sizes, sizes[1:]):
        shapes += [(inputs, outputs), (outputs,)]
    return [jnp.asarray(rng.normal(size=shape) * 0.1, jnp.float32) for shape in shapes]


def pooled(x: Any, kernel: Any, bias: Any, padding: Any) -> Any:
    x = lax.conv_general_dilated(x, kernel, (1, 1), padding) + bias[None, :, None, None]
    window = (1, 1, 2, 2)
    return lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, window, window, "VALID")


def loss_of(work: Work) -> Callable[[Weights, Any, Any], Any]:
    def loss(weights: Weights, x: Any, y: Any) -> Any:
        if work.kind == "lenet":
            x = pooled(x.reshape(-1, 1, 28, 28), *weights[:2], ((2, 2), (2, 2)))
            x = pooled(x, *weights[2:4], "VALID").reshape(x.shape[0], -1)
            weights = weights[4:]
        for k in range(0, len(weights), 2):
            x = x @ weights[k] + weights[k + 1]
            x = jax.nn.relu(x) if k + 2 < len(weights) else x
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1))

    return loss


def update(weights: Weights, grads: Weights) -> Weights:
    return [w - RATE * g for w, g in zip(weights, grads)]


def jit(work: Work, precision: str, rounds: int, images: Any, labels: Any) -> None:
    """Single steps with feeds on the device."""
    loss = loss_of(work)
    one = jax.jit(lambda w, x, y: update(w, jax.grad(loss)(w, x, y)), donate_argnums=0)
    x = jnp.asarray(images[: work.batch], jnp.float32) / 255
    state = [initial(work)]

    def queue(n: int) -> None:
        for _ in range(n):
            state[0] = one(state[0], x, labels[: work.batch])

    start = time.perf_counter()
    queue(1)
    jax.block_until_ready(state[0])
    first = time.perf_counter() - start
    ms, steps = workloads.queued_ms(queue, lambda: jax.block_until_ready(state[0]), rounds)
    workloads.tell(work, precision, "jit", ms=ms, steps=steps, first_s=round(first, 3))


def scan(work: Work, precision: str, rounds: int, images: Any, labels: Any) -> None:
    """Whole epochs in one call, in a fresh order each."""
    loss, count = loss_of(work), SAMPLES // work.batch

    def epoch(weights: Weights, key: Any) -> Weights:
        order = jax.random.permutation(key, SAMPLES)[: count * work.batch]

        def one(weights: Weights, rows: Any) -> tuple[Weights, Any]:
            x = images[rows].astype(jnp.float32) * (1 / 255.0)
            value, grads = jax.value_and_grad(loss)(weights, x, labels[rows])
            return update(weights, grads), value

        return lax.scan(one, weights, order.reshape(count, work.batch))[0]

    run = jax.jit(epoch, donate_argnums=0)
    state = [initial(work)]
    key = jax.random.key(0)

    def queue(n: int) -> None:
        for _ in range(math.ceil(n / count)):
            state[0] = run(state[0], key)

    start = time.perf_counter()
    queue(1)
    jax.block_until_ready(state[0])
    first = time.perf_counter() - start
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        queue(1)
        jax.block_until_ready(state[0])
        times.append((time.perf_counter() - start) * 1e3 / count)
    ms = workloads.measure.summary(times)
    workloads.tell(work, precision, "scan", ms=ms, steps=count, first_s=round(first, 3))


def main() -> None:
    options = workloads.arguments(__doc__)
    modes = options.modes.split(",") if options.modes else ["jit", "scan"]
    images, labels = (jnp.asarray(part) for part in workloads.data())
    for precision in PRECISIONS:
        with jax.default_matmul_precision("highest" if precision == "fp32" else "default"):
            for work in workloads.chosen(options):
                for mode, measured in (("jit", jit), ("scan", scan)):
                    if mode in modes and work.kind != "residual":
                        measured(work, precision, options.rounds, images, labels)

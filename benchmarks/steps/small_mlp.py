"""Training steps of the multilayer perceptrons of tiny-cuda-nn's benchmarks and of its README.

    python benchmarks small_mlp [--precisions tf32,bf16] [--rounds 7]

Batches lie on the device; a time is wall time a step over many that are queued together and waited
for once. Leaves results/small_mlp.json, of which `python benchmarks table` makes a table.
tiny-cuda-nn itself is not run: docs/performance.md has what is published of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shared import measure, workloads

PRECISIONS = ("fp32", "tf32", "bf16")


class Network(NamedTuple):
    """A perceptron with ReLU between its layers, and its batch.

    Attributes:
        sizes: the widths, input and output included.
        classes: True where the loss is cross-entropy, else the mean of squares.
        rule: of the update, `SGD` or `Adam`.
    """

    sizes: tuple[int, ...]
    batch: int
    classes: bool
    rule: str

    @property
    def name(self) -> str:
        """Such as `784-128-128-16, batch 1000`."""
        return f"{'-'.join(map(str, self.sizes))}, batch {self.batch:,}, {self.rule}"

    @property
    def operations(self) -> int:
        """Multiplications and additions of a step's products: forward, and both gradients of each
        layer but that of the first one's input.
        """
        layers = [m * n for m, n in zip(self.sizes, self.sizes[1:])]
        return 2 * self.batch * (3 * sum(layers) - layers[0])


NETWORKS = (
    Network((784, 128, 128, 16), 1000, True, "SGD"),
    Network((784, 128, 128, 16), 1 << 14, True, "SGD"),
    # The network of mlp_learning_an_image behind its encoding, which gives 16 levels of 2 features.
    Network((32, 64, 64, 3), 1 << 18, False, "Adam"),
    # Of data/config_oneblob.json, which the figure of its README has at batches from 2^14 on.
    Network((128, *[128] * 5, 3), 1 << 14, False, "Adam"),
    Network((128, *[128] * 5, 3), 1 << 18, False, "Adam"),
)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--precisions", default="tf32,bf16")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    precisions = measure.choices(parser, "--precisions", options.precisions, PRECISIONS)
    works = []
    for network in NETWORKS:
        for precision in precisions:
            step, wait = training(network, precision)
            ms, steps = workloads.queued_ms(_times(step), wait, options.rounds)
            tflops = network.operations / ms["median"] / 1e9
            work: dict[str, Any] = dict(network=network.name, precision=precision, ms=ms)
            work |= dict(steps=steps, operations=network.operations, tflops=round(tflops, 2))
            works.append(work)
            print(f"{network.name}, {precision}: {ms['median']:.4f} ms, {tflops:.1f} TFLOP/s")
    measure.save("small_mlp", options, {"works": works})


def training(network: Network, precision: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """A training step on one batch that lies on the GPU, and what waits for all steps."""
    from dlsys import autodiff as ad
    from dlsys import functional as F
    from dlsys import ndarray, nn, optim
    from dlsys.runtime.device import gpu, synchronize

    rng = np.random.default_rng(0)
    layers: list[nn.Module] = []
    for m, n in zip(network.sizes, network.sizes[1:]):
        layers += [nn.Linear(m, n, rng=rng), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    shape = network.batch, network.sizes[-1]
    x = ad.Variable("x", (network.batch, network.sizes[0]), dtype=np.float32)
    values = {x: rng.random(x.attrs["shape"], np.float32)}
    if network.classes:
        y = ad.Variable("y", shape[:1], dtype=np.int64)
        values[y] = rng.integers(0, shape[1], shape[0])
        loss = F.cross_entropy(model(x), y)
    else:
        y = ad.Variable("y", shape, dtype=np.float32)
        values[y] = rng.random(shape, np.float32)
        loss = F.mse_loss(model(x), y)
    update = getattr(optim, network.rule)(1e-3).minimize(loss, model.parameters())
    executor = ad.Executor([loss, update], gpu(0), precision=precision)
    feeds = {node: ndarray.array(value, gpu(0)) for node, value in values.items()}
    return (lambda: executor.run(feeds)), (lambda: synchronize(gpu(0)))


def _times(step: Callable[[], object]) -> Callable[[int], None]:
    def queue(n: int) -> None:
        for _ in range(n):
            step()

    return queue

"""Trains small networks from several seeds in float32 and in bf16, and compares what they reach.

    python benchmarks precision --out FOLDER [--networks mlp,lenet] [--seeds 5] [--device cpu]

Both begin with the same weights and see the same batches. Of each network it gives the mean over
the seeds of the validation loss and its standard deviation, and the difference of the means beside
its standard error. Writes precision.json. The exit status is 0 where every difference is within
three standard errors, or 2 % of the loss.
"""

from __future__ import annotations

import importlib
import inspect
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dlsys import nn, optim, train
from dlsys.data import Loader
from dlsys.data.formats.mnist import load_mnist
from dlsys.eager.device import context_of
from shared import measure

Arrays = tuple[np.ndarray, np.ndarray]
TEXT = ("textwrap", "string", "heapq", "bisect", "statistics", "fractions")  # of the library
LENGTH, FEATURES = 32, 48


class Network(NamedTuple):
    """A model for a seed, its samples to train on and to validate on, and its epochs and rate."""

    model: Callable[[int], nn.Module]
    samples: Callable[[], tuple[Arrays, Arrays]]
    epochs: int
    rate: float
    batch_size: int = 64


def digits() -> tuple[Arrays, Arrays]:
    """8,192 digits of MNIST, and 2,048 to validate on."""
    images, labels = load_mnist().train
    x = images[:10240].reshape(-1, 1, 28, 28).astype(np.float32)
    y = labels[:10240].astype(np.int64)
    return (x[:8192], y[:8192]), (x[8192:], y[8192:])


def textures() -> tuple[Arrays, Arrays]:
    """3 × 32 × 32 images of ten classes: a grating of the class's frequency, direction and color,
    shifted at random, under noise. 2,048 and 1,024 of them.
    """
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 3072)
    row, column = np.mgrid[:32, :32] / 32
    angle, frequency = y * np.pi / 10, 2.0 + y % 3
    colors = rng.uniform(-1, 1, (10, 3))[y][:, :, None, None]
    turned = np.cos(angle)[:, None, None] * row + np.sin(angle)[:, None, None] * column
    phase = rng.uniform(0, 2 * np.pi, (3072, 1, 1))
    wave = np.sin(2 * np.pi * frequency[:, None, None] * turned + phase)[:, None]
    x = (wave * colors + rng.normal(0, 1.0, (3072, 3, 32, 32))).astype(np.float32)
    return (x[:2048], y[:2048]), (x[2048:], y[2048:])


def characters() -> tuple[Arrays, Arrays]:
    """Windows of the source of some of Python's modules, each with the characters that follow."""
    text = "".join(inspect.getsource(importlib.import_module(name)) for name in TEXT)
    codes = np.minimum(np.frombuffer(text.encode("ascii", "replace"), np.uint8), 127).astype(int)
    starts = np.arange(0, len(codes) - LENGTH - 1, LENGTH)
    windows = codes[starts[:, None] + np.arange(LENGTH + 1)]
    windows = np.random.default_rng(0).permutation(windows)
    train_on, rest = windows[:2048], windows[2048:2560]
    return (train_on[:, :-1], train_on[:, 1:]), (rest[:, :-1], rest[:, 1:])


class Residual(nn.Module):
    """A small residual network with batch normalization over 3 × 32 × 32."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        block = lambda a, b: nn.Sequential(  # noqa: E731
            nn.Conv2d(a, b, 3, padding=1, bias=False, rng=rng), nn.BatchNorm2d(b), nn.ReLU()
        )
        self.first, self.second, self.third = block(3, 16), block(16, 16), block(16, 16)
        self.pool = nn.AvgPool2d(4)
        self.last = nn.Linear(16 * 8 * 8, 10, rng=rng)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        x = x + self.third(self.second(x))
        return self.last(self.pool(x).reshape((-1, 16 * 8 * 8)))


class Transformer(nn.Module):
    """Two causal layers over characters."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.embedding = nn.Embedding(128, FEATURES, rng=rng)
        self.first, self.second = (
            nn.TransformerEncoderLayer(
                FEATURES, 4, 4 * FEATURES, 0.0, "gelu", batch_first=True, norm_first=True, rng=rng
            )
            for _ in range(2)
        )
        self.position = nn.LearnedPositions(LENGTH, FEATURES, rng=rng)
        self.norm, self.last = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 128, rng=rng)

    def forward(self, x: Any) -> Any:
        x = self.position(self.embedding(x))
        x = self.second(self.first(x, causal=True), causal=True)
        return self.last(self.norm(x))


NETWORKS = {
    "mlp": Network(lambda seed: _flat(nn.MLP((784, 128, 10), seed=seed)), digits, 3, 2e-3),
    "lenet": Network(lambda seed: nn.LeNet5(seed=seed), digits, 1, 2e-3),
    "residual": Network(Residual, textures, 4, 2e-3),
    "transformer": Network(Transformer, characters, 2, 3e-3, 32),
}


def _flat(model: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), model)


def reached(network: Network, samples: Any, seed: int, precision: str, device: str) -> float:
    """The validation loss after the last epoch."""
    training = Loader(samples[0], network.batch_size, shuffle=True, seed=seed)
    validation = Loader(samples[1], network.batch_size)
    history = train.fit(
        network.model(seed), training, optim.Adam(network.rate), epochs=network.epochs,
        ctx=context_of(device), validation=validation, metrics=(), quiet=True,
        precision=precision,
    )  # fmt: skip
    return float(history.epochs[-1]["val_loss"])


def compare(name: str, seeds: int, device: str) -> dict[str, Any]:
    """A network's losses in both, and whether their means agree."""
    network, start = NETWORKS[name], time.monotonic()
    samples = network.samples()
    losses = {
        precision: [reached(network, samples, seed, precision, device) for seed in range(seeds)]
        for precision in ("fp32", "bf16")
    }
    mean = {word: statistics.fmean(found) for word, found in losses.items()}
    spread = {word: statistics.stdev(found) for word, found in losses.items()}
    difference = mean["bf16"] - mean["fp32"]
    error = ((spread["fp32"] ** 2 + spread["bf16"] ** 2) / seeds) ** 0.5
    ok = abs(difference) <= max(3 * error, 0.02 * mean["fp32"])
    found = {
        "losses": {word: [round(x, 5) for x in values] for word, values in losses.items()},
        "mean": mean, "deviation": spread, "difference": difference, "standard_error": error,
        "epochs": network.epochs, "seconds": round(time.monotonic() - start, 1), "ok": ok,
    }  # fmt: skip
    print(
        f"{name:<12} fp32 {mean['fp32']:.4f} ± {spread['fp32']:.4f}  bf16 {mean['bf16']:.4f} ± "
        f"{spread['bf16']:.4f}  difference {difference:+.4f} ± {error:.4f}"
        f"{'' if ok else '  APART'}",
        flush=True,
    )
    return json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 5))


def main() -> int:
    """Returns 0 where bf16 reaches what float32 does."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=["numpy", "cpu", "gpu"], default="cpu")
    parser.add_argument("--networks", default=",".join(NETWORKS), help=", ".join(NETWORKS))
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    names = options.networks.split(",")
    unknown = [name for name in names if name not in NETWORKS]
    if unknown or options.seeds < 2:
        parser.error(f"expected networks of {', '.join(NETWORKS)} and two seeds at least")
    found = {name: compare(name, options.seeds, options.device) for name in names}
    ok = all(one["ok"] for one in found.values())
    measure.save("precision", options, {"device": options.device, "ok": ok, "networks": found})
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())

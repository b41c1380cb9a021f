"""The rungs of convolution on the CPU device and in numpy, beside PyTorch's: time, rate, error.

    python benchmarks conv_cpu [--shapes NAME ...] [--rounds N]

Each rung runs in every direction on shapes of networks. Rungs take turns, and the least time of all
rounds counts. Rates are of a direct convolution's operations, whatever a rung does. Errors are
relative to the largest exact result, which numpy finds in float64. numpy's rungs run where a call
takes less than a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from shared import measure


class Shape(NamedTuple):
    """A convolution of square images by square filters, padded to keep their extent at stride 1."""

    batch: int
    channels: int
    filters: int
    extent: int
    size: int = 3
    stride: int = 1
    groups: int = 1


SHAPES = {  # layers, by where they stand
    "residual 14": Shape(64, 64, 64, 14),
    "residual 7": Shape(64, 128, 128, 7),
    "resnet18 stem": Shape(16, 3, 64, 64, 7, 2),
    "resnet18 16": Shape(16, 64, 64, 16),
    "resnet18 8": Shape(16, 128, 128, 8),
    "resnet18 4": Shape(16, 256, 256, 4),
    "resnet18 2": Shape(16, 512, 512, 2),
    "resnet18 down": Shape(16, 64, 128, 16, 3, 2),
    "pointwise": Shape(16, 256, 64, 14, 1),
    "depthwise": Shape(16, 128, 128, 28, 3, 1, 128),
    "lenet": Shape(128, 6, 16, 14, 5),
    "large filters": Shape(4, 8, 8, 64, 31),
}
DIRECTIONS = ("forward", "data", "filter")
LONGEST = 1.0  # seconds of a call of numpy's
Call = Callable[[], Any]


class Layer:
    """Operands, exact results, and the calls of each contestant by direction."""

    def __init__(self, shape: Shape) -> None:
        from dlsys.ops.conv.algorithms import ALGORITHMS
        from dlsys.ops.conv.geometry import Windows

        s, pad = shape, shape.size // 2
        out = (s.extent + 2 * pad - s.size) // s.stride + 1
        pairs = [(n, n) for n in (s.extent, s.size, s.stride, 1, pad, pad, out)]
        self.shape, self.windows = shape, Windows(*pairs)
        rng = np.random.default_rng(0)
        self.operands = [
            rng.standard_normal(extents, np.float32)
            for extents in (
                (s.batch, s.channels, s.extent, s.extent),
                (s.filters, s.channels // s.groups, s.size, s.size),
                (s.batch, s.filters, out, out),
            )
        ]
        per_position = s.channels // s.groups * s.size**2
        self.operations = 2 * s.batch * s.filters * out * out * per_position
        self.exact = self._numpy(ALGORITHMS["implicit"], np.float64)

    def numpy(self, rung: str) -> dict[str, Call]:
        """A rung of numpy's."""
        from dlsys.ops.conv.algorithms import ALGORITHMS

        algorithm = ALGORITHMS[rung]
        return self._calls(algorithm, np.float32) if algorithm.fits(self.windows) else {}

    def _numpy(self, algorithm: Any, dtype: Any) -> list[np.ndarray]:
        return [call() for call in self._calls(algorithm, dtype).values()]

    def _calls(self, algorithm: Any, dtype: Any) -> dict[str, Call]:
        s, windows = self.shape, self.windows
        x, f, dy = (a.astype(dtype) for a in self.operands)
        images, gradients = (a.reshape(s.batch, s.groups, -1, *a.shape[2:]) for a in (x, dy))
        filters = f.reshape(s.groups, -1, *f.shape[1:])
        y, dx, df = map(np.empty_like, (gradients, images, filters))

        def made(result: np.ndarray, like: np.ndarray, call: Call) -> Call:
            return lambda: (call(), result.reshape(like.shape))[1]

        return {
            "forward": made(y, dy, lambda: algorithm.forward(windows, images, filters, y)),
            "data": made(dx, x, lambda: algorithm.data(windows, filters, gradients, dx)),
            "filter": made(df, f, lambda: algorithm.filter(windows, images, gradients, df)),
        }

    def native(self, number: int) -> tuple[dict[str, Call], dict[str, int]]:
        """An algorithm of the CPU device, and the workspace of each direction in bytes."""
        from dlsys.ndarray import array, empty, launch
        from dlsys.runtime.device import cpu
        from dlsys.runtime.library import load

        ctx = cpu(0)
        x, f, dy = (array(a, ctx) for a in self.operands)
        how = self.windows.argument, self.shape.groups, number, 0
        given = {
            "forward": ("conv2d", x, f, empty(dy.shape, ctx)),
            "data": ("conv2d_data_gradient", f, dy, empty(x.shape, ctx)),
            "filter": ("conv2d_filter_gradient", x, dy, empty(f.shape, ctx)),
        }

        def made(kernel: str, *arrays: Any) -> Call:
            return lambda: (launch(kernel, ctx, *arrays, *how), arrays[2])[1]

        nbytes = {
            name: load().workspace("cpu", kernel, *arrays, *how)
            for name, (kernel, *arrays) in given.items()
        }
        return {name: made(*arguments) for name, arguments in given.items()}, nbytes

    def torch(self) -> dict[str, Call]:
        """PyTorch's, in its own layout."""
        import torch

        s = self.shape
        x, f, dy = map(torch.from_numpy, self.operands)
        options = [s.stride] * 2, [s.size // 2] * 2, [1, 1], False, [0, 0], s.groups

        def gradient(which: int) -> Call:
            mask = [which == 0, which == 1, False]
            call = torch.ops.aten.convolution_backward
            return lambda: call(dy, x, f, None, *options, mask)[which]

        return {
            "forward": lambda: torch.ops.aten.convolution(x, f, None, *options),
            "data": gradient(0),
            "filter": gradient(1),
        }


def contestants(layer: Layer) -> dict[str, tuple[dict[str, Call], dict[str, int]]]:
    """The calls and workspaces of all that can compute a layer."""
    from dlsys.errors import NotApplicableError
    from dlsys.runtime.library import load

    found: dict[str, tuple[dict[str, Call], dict[str, int]]] = {}
    for number, name in enumerate(("auto", *load().algorithms("cpu", "conv2d"))):
        try:
            found[f"cpu {name}"] = layer.native(number)
        except NotApplicableError:
            continue
    for name in ("naive", "fft", "winograd", "implicit"):
        found[f"numpy {name}"] = layer.numpy(name), {}
    if find_spec("torch") is not None:
        found["torch"] = layer.torch(), {}
    return found


def measured(layer: Layer, rounds: int) -> list[dict[str, Any]]:
    """A row for each contestant and direction."""
    rows: list[dict[str, Any]] = []
    running: list[tuple[dict[str, Any], Call]] = []
    for name, (calls, nbytes) in contestants(layer).items():
        for direction, exact in zip(DIRECTIONS, layer.exact):
            if direction not in calls:
                continue
            seconds, result = _timed(calls[direction])
            error = np.abs(_host(result) - exact) / np.abs(exact).max()
            row = {
                "rung": name,
                "direction": direction,
                "ms": seconds * 1e3,
                "largest_error": float(error.max()),
                "mean_error": float(error.mean()),
                "workspace_nbytes": nbytes.get(direction, 0),
            }
            rows.append(row)
            if seconds < LONGEST:
                running.append((row, calls[direction]))
    for _ in range(rounds):
        for row, call in running:
            row["ms"] = min(row["ms"], _timed(call)[0] * 1e3)
    for row in rows:
        row["gflops"] = layer.operations / row["ms"] / 1e6
    return rows


def _timed(call: Call) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def _host(result: Any) -> np.ndarray:
    return result.asnumpy() if hasattr(result, "asnumpy") else np.asarray(result)


def main() -> None:
    """Measures, prints and writes results/conv_cpu.json."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    layers = {}
    for name in options.shapes:
        rows = measured(Layer(SHAPES[name]), options.rounds)
        layers[name] = {"shape": SHAPES[name]._asdict(), "rungs": rows}
        print(f"\n{name}: {SHAPES[name]}")
        for row in rows:
            print(
                f"  {row['rung']:<18} {row['direction']:<8} {row['ms']:9.3f} ms "
                f"{row['gflops']:8.1f} GFLOP/s, error {row['largest_error']:.1e} "
                f"(mean {row['mean_error']:.1e}), {row['workspace_nbytes']:,} bytes"
            )
    print(measure.save("conv_cpu", options, {"layers": layers}))

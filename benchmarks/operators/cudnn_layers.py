"""Activations, pooling and batch normalization by the own kernels and by cuDNN's, in turns: time,
share of the memory's bandwidth, error.

    python benchmarks cudnn_layers [--dtypes float32,bfloat16] [--only PART ...] [--rounds N]

Leaves results/cudnn_layers.json, of which `python benchmarks table` makes the table of
docs/learn/3-layers.md. Each side is a captured graph, replayed many times; its results stay on the
device. The gradient of an activation is measured alone, on an output that is there already; that of
the others is what forward and gradient take together, less forward, since each side keeps something
else for it. Images are NCHW, as cuDNN is given them. The bandwidth counts what has to move once,
of forward x and y, of a gradient dy and dx, and x where it depends on x; the largest error is
relative to the largest value, against float64 on numpy, over images fewer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shared import measure

PEAK_BYTES = 4.28e12  # read and written a second by an H200, measured
IMAGES = 4  # of which errors are taken
REPLAY_MS = 8.0  # of one measurement
SIDES = {"own": "auto", "cudnn": "cudnn"}


class Work(NamedTuple):
    """A layer over images x (n, c, size, size)."""

    layer: str
    shape: tuple[int, int, int, int]
    window: int = 0
    stride: int = 0
    padding: int = 0

    @property
    def name(self) -> str:
        """As it stands in the table."""
        n, c, size, _ = self.shape
        windows = f", {self.window}² by {self.stride}" if self.window else ""
        return f"{self.layer} of {n} x {c} x {size}²{windows}"

    def node(self, x: Any, affine: Any, algo: str) -> Any:
        """y of x."""
        from dlsys import functional as F

        windows = self.window, self.stride, self.padding
        if self.layer == "max pool":
            return F.max_pool2d(x, *windows, algo=algo)
        if self.layer == "mean pool":
            return F.avg_pool2d(x, *windows, algo=algo)
        if self.layer == "batch norm":
            scale, bias = affine
            return F.batch_norm(x, weight=scale, bias=bias, training=True, algo=algo)
        if self.layer == "batch norm, inference":
            scale, bias = affine
            return F.batch_norm(x, bias, scale, scale, bias, algo=algo)
        return getattr(F, self.layer)(x, algo=algo)

    @property
    def is_activation(self) -> bool:
        """True where the gradient is one of the output alone."""
        return self.layer in ("relu", "sigmoid", "tanh")

    def nbytes(self, direction: str, itemsize: int) -> int:
        """What has to move once."""
        n, c, size, _ = self.shape
        out = (size + 2 * self.padding - self.window) // self.stride + 1 if self.window else size
        x, y = n * c * size * size, n * c * out * out
        gradient_reads = x if self.is_activation or self.layer == "batch norm" else 0
        return itemsize * (x + y + (gradient_reads if direction == "gradient" else 0))


WORKS = [
    Work("relu", (128, 64, 112, 112)),
    Work("relu", (128, 256, 56, 56)),
    Work("relu", (1000, 6, 28, 28)),
    Work("sigmoid", (128, 256, 56, 56)),
    Work("tanh", (128, 256, 56, 56)),
    Work("tanh", (1000, 6, 28, 28)),
    Work("max pool", (128, 64, 112, 112), 3, 2, 1),
    Work("max pool", (1000, 6, 28, 28), 2, 2),
    Work("max pool", (1000, 16, 10, 10), 2, 2),
    Work("mean pool", (128, 2048, 7, 7), 7, 7),
    Work("mean pool", (128, 256, 56, 56), 2, 2),
    Work("mean pool", (1000, 6, 28, 28), 2, 2),
    Work("batch norm", (128, 64, 112, 112)),
    Work("batch norm", (128, 256, 56, 56)),
    Work("batch norm", (128, 512, 28, 28)),
    Work("batch norm", (128, 2048, 7, 7)),
    Work("batch norm, inference", (128, 256, 56, 56)),
]


Arrays = dict[str, Any]


def inputs(work: Work, images: int, dtype: Any) -> Arrays:
    """Variables x and dy, and Parameters scale and bias a channel, which inference takes as
    variance and mean too.
    """
    from dlsys import autodiff as ad

    shape = (images, *work.shape[1:])
    wide = np.float64 if dtype == np.float64 else np.float32
    channels = np.linspace(0.5, 1.5, shape[1]), np.linspace(-1, 1, shape[1])
    named = zip(channels, ("scale", "bias"))
    affine = [ad.Parameter(value.astype(wide), name) for value, name in named]
    x = ad.Variable("x", shape, dtype=dtype)
    dy = ad.Variable("dy", work.node(x, affine, "auto").shape, dtype=dtype)
    return {"x": x, "dy": dy, "affine": affine}


def nodes(work: Work, given: Arrays, algo: str) -> dict[str, list[Any]]:
    """What a run computes: forward, and with the gradients or, of an activation, those alone."""
    from dlsys import autodiff as ad
    from dlsys.ops import elementwise

    x, dy, affine = given["x"], given["dy"], given["affine"]
    y = work.node(x, affine, algo)
    if work.is_activation:  # x stands for an output that is there
        back = getattr(elementwise, f"{work.layer}_gradient_op")(x, dy, algo=algo)
        return {"forward": [y], "gradient": [back]}
    if work.layer == "batch norm, inference":
        return {"forward": [y]}
    wanted = [x, *(affine if work.layer == "batch norm" else ())]
    return {"forward": [y], "both": [y, *ad.gradients(y, wanted, dy)]}


def feeds(executor: Any, given: Arrays, values: Arrays) -> dict[Any, Any]:
    """What an executor is fed: those of x and dy that it reads."""
    return {given[k]: values[k] for k in ("x", "dy") if given[k] in set(executor.topo_order)}


def calls(work: Work, dtype: Any, ctx: Any) -> dict[tuple[str, str], Callable[[int], None]]:
    """For each side and direction what replays it so many times."""
    from dlsys import autodiff as ad
    from dlsys import functional as F
    from dlsys.ops.optim.assign import group_op

    given = inputs(work, work.shape[0], dtype)
    drawn = [F.astype(F.random_normal(given[k].shape), dtype) for k in ("x", "dy")]
    values = dict(zip(("x", "dy"), ad.Executor(drawn, ctx).run()))
    found = {}
    for side, algo in SIDES.items():
        for direction, fetches in nodes(work, given, algo).items():
            executor = ad.Executor([group_op(*fetches)], ctx)
            fed = feeds(executor, given, values)
            found[side, direction] = partial(executor.run_many, feed_dict=fed)
    return found


def timed(of: dict[tuple[str, str], Callable[[int], None]], rounds: int, ctx: Any) -> Any:
    """The median microseconds of each in turns."""
    from dlsys.runtime.device import synchronize

    def us(call: Callable[[int], None], n: int) -> float:
        start = time.perf_counter()
        call(n)
        synchronize(ctx)
        return 1e6 * (time.perf_counter() - start) / n

    counts = {}
    for key, call in of.items():
        us(call, 3)
        counts[key] = int(np.clip(1e3 * REPLAY_MS / us(call, 5), 5, 1000))
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in of}
    for k in range(rounds):
        for key in (*of,) if k % 2 else (*of,)[::-1]:
            taken[key].append(us(of[key], counts[key]))
    return {key: float(np.median(several)) for key, several in taken.items()}


def errors(work: Work, dtype: Any, ctx: Any) -> dict[tuple[str, str], float]:
    """The largest error of each side and direction, relative to the largest value."""
    from dlsys import autodiff as ad
    from dlsys.dtypes import is_narrow, rounded

    images = min(IMAGES, work.shape[0])
    own, exact = (inputs(work, images, kind) for kind in (dtype, np.float64))
    rng = np.random.default_rng(0)
    values = {}
    for k in ("x", "dy"):
        drawn = rng.standard_normal(own[k].shape).astype(np.float32)
        values[k] = rounded(drawn, dtype) if is_narrow(dtype) else drawn
    wide = {k: value.astype(np.float64) for k, value in values.items()}
    wanted, found = {}, {}
    for key, fetches in nodes(work, exact, "auto").items():
        executor = ad.Executor(fetches)
        wanted[key] = executor.run(feeds(executor, exact, wide))
    for side, algo in SIDES.items():
        for key, fetches in nodes(work, own, algo).items():
            executor = ad.Executor(fetches, ctx)
            got = executor.run(feeds(executor, own, values), convert_to_numpy_ret_vals=True)
            pairs = [*zip(got, wanted[key])][key == "both" :]
            direction = "gradient" if key == "both" else key
            found[side, direction] = max(
                float(np.abs(a.astype(np.float64) - b).max() / np.abs(b).max()) for a, b in pairs
            )
    return found


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[], help="parts of works' names")
    options = parser.parse_args()
    from dlsys.dtypes import as_dtype
    from dlsys.runtime.device import device_name, gpu
    from dlsys.runtime.library import load
    from dlsys.settings import settings

    ctx, results = gpu(0), []
    settings.streams = 1  # a difference of two times has no other kernels beside it
    for name, work in itertools.product(options.dtypes.split(","), WORKS):
        if options.only and not any(part in work.name for part in options.only):
            continue
        for row in rows(work, as_dtype(name), options.rounds, ctx):
            results.append(row)
            print(_line(row), flush=True)
    if not options.only:
        number = load().algorithms("cuda", "conv2d").index("cudnn") + 1
        library = load().algorithm_source("cuda", "conv2d", number)
        found = {"device": device_name(ctx), "cudnn": library, "works": results}
        print(measure.save("cudnn_layers", options, found))
    return 0


def rows(work: Work, dtype: Any, rounds: int, ctx: Any) -> Iterator[dict[str, Any]]:
    """The figures of a work, a row a direction."""
    us, error = timed(calls(work, dtype, ctx), rounds, ctx), errors(work, dtype, ctx)
    for direction in ("forward", "gradient"):
        if ("own", direction) not in error:
            continue
        nbytes = work.nbytes(direction, dtype.itemsize)
        row = dict(work=work.name, dtype=str(dtype), direction=direction, nbytes=nbytes)
        for side in SIDES:
            took = us.get((side, direction))
            if took is None:
                took = us[side, "both"] - us[side, "forward"]
            row[side] = {
                "us": round(took, 2),
                "of_bandwidth": round(nbytes / took * 1e6 / PEAK_BYTES, 3),
                "error": float(f"{error[side, direction]:.2g}"),
            }
        yield row


def _line(row: dict[str, Any]) -> str:
    told = []
    for side in SIDES:
        us, share, error = row[side].values()
        told.append(f"{side} {us:8.1f} us {share:5.0%} {error:.1e}")
    return f"{row['work']:42} {row['dtype']:8} {row['direction']:8} {'; '.join(told)}"

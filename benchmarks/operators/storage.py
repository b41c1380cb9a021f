"""Floats stored in 16 bits against float32 on a native device: the same operators, half the bytes.

    python benchmarks storage [--device cpu] [--seconds S]

Kernels compute in float32 whatever lies in memory. So what memory bandwidth limits takes half the
time in 16 bits, and what arithmetic limits takes as long, with the conversions on top.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shared import measure

ELEMENTS = 1 << 24  # of an array: beyond the caches
STORAGES = ("float32", "bfloat16", "float16")


def works() -> dict[str, Callable[..., Any]]:
    """Expressions of two arrays, by name."""
    from dlsys import autodiff as ad

    def through_float32(x: Any, y: Any) -> Any:
        wide = ad.relu_op(ad.cast_op(x, "float32")) + ad.cast_op(y, "float32")
        return ad.cast_op(wide, x.spec.dtype)

    return {
        "add": ad.add_op,
        "relu": lambda x, y: ad.relu_op(x),
        "exp": lambda x, y: ad.exp_op(x),
        "x * y + x, one program": lambda x, y: x * y + x,
        "cast, relu, add, cast": through_float32,
    }


def step(make: Callable[..., Any], storage: str, ctx: Any) -> Callable[[], Any]:
    """A run of an expression over arrays of a storage type, which is done when it returns."""
    from dlsys import autodiff as ad
    from dlsys import ndarray
    from dlsys.dtypes import as_dtype
    from dlsys.runtime.device import synchronize

    values = np.random.default_rng(0).uniform(-1, 1, ELEMENTS).astype(np.float32)
    nodes = [ad.Variable(name, (ELEMENTS,), as_dtype(storage)) for name in "xy"]
    executor = ad.Executor([make(*nodes)], ctx)
    array = ndarray.array(values, ctx, as_dtype(storage))
    used = set(executor.topo_order)
    feeds = {node: array for node in nodes if node in used}

    def run() -> None:
        executor.run(feeds)
        synchronize(ctx)

    return run


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each time, about")
    options = parser.parse_args()
    from dlsys.runtime import device

    ctx = getattr(device, options.device)(0)
    results: dict[str, Any] = {}
    for name, make in works().items():
        found = {}
        for storage in STORAGES:
            run = step(make, storage, ctx)
            run()
            times = measure.step_ms(run, options.seconds)
            found[storage] = {"min": round(min(times), 5), **measure.summary(times)}
        shares = [f"{s} {found[s]['min'] / found['float32']['min']:.2f} x" for s in STORAGES[1:]]
        print(
            f"{name:24} float32 {found['float32']['min']:8.3f} ms, {', '.join(shares)}", flush=True
        )
        results[name] = found
    print(measure.save("storage", options, {"elements": ELEMENTS, "works": results}))
    return 0

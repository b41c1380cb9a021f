"""On a GPU: all that docs/performance.md shows of one, measured and written there.

    python benchmarks gpu [--only race,kernels,products,bandwidth,to99] [--drawn 6]

The parts: whole training steps against PyTorch and JAX (race.py); those steps kernel by kernel
beside their floors; a large product; kernels bound by memory; MNIST to 99 % (to99.py). Leaves
results/gpu.json, the tables and the picture.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from shared import measure
from steps import race

PRODUCT = 4096
PARTS = ("race", "kernels", "products", "bandwidth", "to99")

Call = Callable[[], Any]


def take_turns(contestants: dict[str, Call], inner: int, rounds: int) -> dict[str, measure.Summary]:
    """Milliseconds a call of each contestant: `inner` calls and one wait a turn."""
    wait = _waiter()
    for call in contestants.values():
        for _ in range(max(3, inner // 4)):
            call()
        wait()
    ms: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            start = time.perf_counter()
            for _ in range(inner):
                call()
            wait()
            ms[name].append((time.perf_counter() - start) * 1e3 / inner)
    return {name: measure.summary(times) for name, times in ms.items()}


def _waiter() -> Call:
    from dlsys.runtime.device import gpu, synchronize

    ours = gpu(0)
    torch = _torch()

    def wait() -> None:
        synchronize(ours)
        if torch:
            torch.cuda.synchronize()

    return wait


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def products() -> dict[str, Any]:
    """A square product by the own kernel, by cuBLAS, and by PyTorch."""
    import numpy as np

    from dlsys import ndarray
    from dlsys.errors import DeviceError
    from dlsys.runtime.device import gpu

    ctx, n = gpu(0), PRODUCT
    rng = np.random.default_rng(0)
    hosts = [rng.standard_normal((n, n), np.float32) for _ in range(2)]
    a, b = (ndarray.array(host, ctx) for host in hosts)
    out = ndarray.empty((n, n), ctx)
    contestants: dict[str, Call] = {
        kernel: functools.partial(ndarray.launch, kernel, ctx, a, 0, b, 0, out)
        for kernel in ("matmul_own", "matmul_cublas")
    }
    try:
        contestants["matmul_cublas"]()
    except DeviceError as error:
        print(error, file=sys.stderr)
        del contestants["matmul_cublas"]
    torch = _torch()
    if torch:
        ta, tb = (torch.from_numpy(host).cuda() for host in hosts)
        tc = torch.empty_like(ta)
        contestants["torch"] = lambda: torch.mm(ta, tb, out=tc)
    ms = take_turns(contestants, inner=5, rounds=15)
    tflops = {name: round(2 * n**3 / each["median"] * 1e-9, 2) for name, each in ms.items()}
    return {"n": n, "ms": ms, "tflops": tflops}


def bandwidth() -> dict[str, Any]:
    """Bytes read and written a second at sizes far beyond the caches, beside a plain copy."""
    import numpy as np

    from dlsys import ndarray
    from dlsys.runtime.device import gpu

    ctx, rows, columns = gpu(0), 2**18, 1024
    host = np.random.default_rng(0).random((rows, columns), np.float32)
    a, b, out = ndarray.array(host, ctx), ndarray.array(host, ctx), ndarray.empty(host.shape, ctx)
    line, total = ndarray.empty((columns,), ctx), ndarray.empty((), ctx)
    column = ndarray.empty((rows,), ctx)
    size = a.nbytes

    def copy() -> None:
        out[:] = a

    cases: dict[str, tuple[Call, int]] = {
        "copy": (copy, 2 * size),
        "add": (lambda: ndarray.launch("add", ctx, a, b, out), 3 * size),
        "relu": (lambda: ndarray.launch("relu", ctx, a, out), 2 * size),
        "sum, all": (lambda: ndarray.launch("reduce_sum", ctx, a, 3, 1.0, total), size),
        "sum, rows": (lambda: ndarray.launch("reduce_sum", ctx, a, 1, 1.0, line), size),
        "sum, columns": (lambda: ndarray.launch("reduce_sum", ctx, a, 2, 1.0, column), size),
        "softmax": (lambda: ndarray.launch("softmax", ctx, a, out), 2 * size),
    }
    ms = take_turns({name: call for name, (call, _) in cases.items()}, inner=5, rounds=15)
    tbps = {name: nbytes / ms[name]["median"] * 1e-9 for name, (_, nbytes) in cases.items()}
    return {
        "shape": [rows, columns],
        "ms": ms,
        "tbps": {name: round(value, 3) for name, value in tbps.items()},
        "of_copy": {name: round(value / tbps["copy"], 3) for name, value in tbps.items()},
    }


def kernels() -> dict[str, Any]:
    """The race's training steps, kernel by kernel (kernels.py)."""
    from steps import kernels as module

    return module.measured()


def to99() -> dict[str, Any]:
    """MNIST to 99 % (to99.py)."""
    from steps import to99 as module

    return module.measured()


def run_part(name: str, options: argparse.Namespace, keep: Callable[[Any], object]) -> Any:
    """The results of one part; `keep` may get some of them before."""
    if name == "race":
        return race.race(options, keep)
    return {"kernels": kernels, "products": products, "bandwidth": bandwidth, "to99": to99}[name]()


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    race.add_options(parser)
    options = parser.parse_args()
    from dlsys.runtime.device import gpu, unavailable
    from dlsys.settings import settings

    settings.tune = (
        "off"  # the heuristic, whatever this machine's user has measured; the race asks anew
    )
    reason = unavailable(gpu(0))
    if reason is not None:
        print(f"no GPU benchmark here: {reason}", file=sys.stderr)
        return 1
    results: dict[str, Any] = {}
    failed = 0

    def keep(name: str, found: Any) -> None:  # after each part: a time limit may come
        results[name] = found
        measure.save("gpu", options, results)

    for name in options.only.split(","):
        start = time.monotonic()
        try:
            keep(name, run_part(name, options, functools.partial(keep, name)))
        except Exception as error:  # the other parts are still worth their time
            traceback.print_exc()
            keep(name, {"error": repr(error)})
            failed = 1
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    command = measure.program("table", "--results", str(options.out))
    return subprocess.run(command).returncode or failed

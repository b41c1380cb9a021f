"""On a GPU: training steps against PyTorch, a large product, and kernels bound by memory.

    python benchmarks/gpu.py [--only steps,operators,products,bandwidth]

Everything is true float32. Feeds are on the device. A time is wall time over many calls that are
queued together and waited for once, as in a training loop that reads the loss now and then. The
contestants of a table take turns in one process.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import measure
from networks import SIZES, Ours, theirs

BATCH = 1000
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
PRODUCT = 4096

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


def host_us(step: Call, inner: int = 20) -> measure.Summary:
    """Microseconds that a call keeps the host, the device's work not waited for."""
    wait = _waiter()
    times = []
    for _ in range(25):
        wait()
        start = time.perf_counter()
        for _ in range(inner):
            step()
        times.append((time.perf_counter() - start) * 1e6 / inner)
    wait()
    return measure.summary(times, 2)


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


def captured(network: str, optimizer: dict[str, Any]) -> Call:
    """PyTorch's whole step as a CUDA graph, captured by hand."""
    import torch

    step = theirs(network, BATCH, "cuda", **optimizer)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(keep: Call = step) -> None:  # the step owns what the graph reads
        graph.replay()

    return replay


def steps() -> dict[str, Any]:
    """A training step of each network; allocations are counted while it is timed."""
    from dlsys.runtime.device import gpu, memory_stats

    results = {}
    for network in SIZES:
        ours = Ours(network, BATCH, gpu(0), on_device=True)
        first = float(ours.step())
        contestants: dict[str, Call] = {"dlsys": ours.step}
        if _torch():
            for name, optimizer in OPTIMIZERS.items():
                eager = theirs(network, BATCH, "cuda", **optimizer)
                loss = float(eager())
                if abs(loss - first) > 1e-4:
                    raise RuntimeError(f"{network}: losses differ: {first} and torch's {loss}")
                contestants[f"torch {name}"] = eager
                contestants[f"torch graph {name}"] = captured(network, optimizer)
        for _ in range(5):
            ours.step()
        before = memory_stats(gpu(0)).device_allocations
        ms = take_turns(contestants, inner=50, rounds=25)
        allocated = memory_stats(gpu(0)).device_allocations - before
        result: dict[str, Any] = {
            "ms": ms,
            "host_us": host_us(ours.step),
            "device_allocations_while_timed": allocated,
        }
        for kind in ("eager", "graph"):
            rivals = [n for n in ms if n != "dlsys" and ("graph" in n) == (kind == "graph")]
            if rivals:
                best = min(rivals, key=lambda name: ms[name]["median"])
                ratio = round(ms["dlsys"]["median"] / ms[best]["median"], 3)
                result[f"torch_{kind}"] = {"best": best, "ratio": ratio}
        results[network] = result
    return results


class StepTimes:
    """An executor's recorder: the device's milliseconds of every step of the plan."""

    def __init__(self) -> None:
        self.plan: Any = None
        self.runs: list[list[float]] = []

    def add(self, plan: Any, ms: list[float]) -> None:
        """One run."""
        self.plan = plan
        self.runs.append(ms)


def operators() -> dict[str, Any]:
    """The MLP's training step, kernel by kernel, each between two events."""
    from dlsys.executor.observe import flops, traffic
    from dlsys.runtime.device import gpu

    ours = Ours("mlp", BATCH, gpu(0), on_device=True)
    for _ in range(5):
        ours.step()
    times = StepTimes()
    ours.executor.recorder = times
    for _ in range(60):
        ours.step()
    rows = []
    for k, step in enumerate(times.plan.steps):
        ms = statistics.median(run[k] for run in times.runs)
        rows.append(
            {
                "operator": step.node.op.name,
                "inputs": [list(value.spec.shape) for value in step.inputs],
                "us": round(ms * 1e3, 3),
                "gbps": round(traffic(step) / ms * 1e-6, 1) if ms else None,
                "gflops": round(flops(step) / ms * 1e-6, 1) if ms else None,
            }
        )
    return {"network": "mlp", "runs": len(times.runs), "steps": rows}


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


PARTS = {"steps": steps, "operators": operators, "products": products, "bandwidth": bandwidth}


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    options = parser.parse_args()
    from dlsys.runtime.device import gpu, unavailable

    reason = unavailable(gpu(0))
    if reason is not None:
        print(f"no GPU benchmark here: {reason}", file=sys.stderr)
        return 1
    results: dict[str, Any] = {"batch": BATCH}
    failed = 0
    for name in options.only.split(","):
        try:
            results[name] = PARTS[name]()
        except Exception as error:  # the other parts are still worth their time
            traceback.print_exc()
            results[name] = {"error": repr(error)}
            failed = 1
        path = measure.save("gpu", options, results)  # after each part: a time limit may come
    print(path)
    return failed


if __name__ == "__main__":
    sys.exit(main())

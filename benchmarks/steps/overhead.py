"""The costs of dlsys besides arithmetic: import, planning, and each run.

    python benchmarks overhead

- import: `dlsys.autodiff` after numpy, each time in a fresh process.
- native run: `Executor.run` of the MLP's training step at batch 1 on the CPU device, minus the bare
  library call that runs the same program.
- numpy run: the same step on numpy, minus the bare numpy calls with the same arrays; and a chain of
  additions of one number, minus as many bare `np.add`.
- planning: building, differentiating and planning, for the MLP and for chains of 100,000 nodes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared import measure
from shared.networks import SIZES, Ours

TARGETS = {
    "import_ms": 50.0,
    "native_run_us": 15.0,
    "numpy_us_a_node": 3.0,
    "chain_seconds": 10.0,
}
CHAIN = 100_000


def import_ms() -> measure.Summary:
    """Milliseconds of importing dlsys.autodiff where numpy is imported already."""
    with tempfile.TemporaryDirectory() as folder:
        times = [one_import_ms(measure.ROOT / "python", folder) for _ in range(41)]
    return measure.summary(times[1:], 2)  # the first one compiles


def one_import_ms(package: Path, compiled: str) -> float:
    """Measurements of one fresh process with the dlsys in the folder `package`.

    From compiled files, as after an installation, whatever the environment says of them; they lie
    in the folder `compiled`, where the first import puts them.
    """
    program = (
        "import sys, time, numpy; sys.path.insert(0, sys.argv[1]); start = time.perf_counter(); "
        "import dlsys.autodiff; print((time.perf_counter() - start) * 1e3)"
    )
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", program, str(package)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def difference_us(whole: Callable[[], Any], part: Callable[[], Any]) -> dict[str, Any]:
    """Microseconds of `whole`, of `part`, and between them; medians of blocks that alternate."""
    times: dict[str, list[float]] = {"whole": [], "part": [], "overhead": []}
    for _ in range(60):
        blocks = []
        for call in (whole, part):
            block = []
            for _ in range(200):
                start = time.perf_counter()
                call()
                block.append((time.perf_counter() - start) * 1e6)
            blocks.append(statistics.median(block))
        times["whole"].append(blocks[0])
        times["part"].append(blocks[1])
        times["overhead"].append(blocks[0] - blocks[1])
    return {name: measure.summary(samples[5:], 3) for name, samples in times.items()}


def native_run() -> dict[str, Any]:
    """The MLP at batch 1 on the CPU device."""
    from dlsys.ndarray import cpu

    ours = Ours("mlp", 1, cpu(0))
    ours.step()
    program = _runner(ours.executor)
    (segment,) = program.segments
    return {
        **difference_us(ours.step, lambda: segment.run(0)),
        "steps": len(program.plan.steps),
    }


def numpy_run() -> dict[str, Any]:
    """The MLP at batch 1 on numpy, against its operators' numpy functions called alone."""
    import numpy as np

    ours = Ours("mlp", 1, None)
    ours.step()
    runner = _runner(ours.executor)
    calls = [(call, list(arguments)) for call, arguments in runner._steps]

    def bare() -> None:
        for call, arguments in calls:
            call(*arguments)

    with np.errstate(all="ignore"):
        result = {**difference_us(ours.step, bare), "steps": len(calls)}
    result["us_a_node"] = round(result["overhead"]["median"] / len(calls), 3)
    return result


def numpy_chain() -> dict[str, Any]:
    """A thousand additions of one number, against np.add on the same sizes."""
    import numpy as np

    from dlsys import autodiff as ad

    length = 1000
    x = node = ad.Variable("x")
    y = ad.Variable("y")
    for _ in range(length):
        node = ad.add_op(node, y)
    executor = ad.Executor([node])
    one = np.ones(1, np.float32)
    feeds = {x: one, y: one}
    out = np.empty(1, np.float32)

    def bare() -> None:
        for _ in range(length):
            np.add(out, one, out=out)

    out.fill(0)
    executor.run(feeds)
    result = {**difference_us(lambda: executor.run(feeds), bare), "steps": length}
    result["us_a_node"] = round(result["overhead"]["median"] / length, 3)
    return result


def planning() -> dict[str, Any]:
    """Milliseconds from nothing to a plan for the MLP."""
    build, plan = [], []
    for _ in range(20):
        start = time.perf_counter()
        ours = Ours("mlp", 1000, None)
        built = time.perf_counter()
        ours.executor.plan({node: value.shape for node, value in ours.feeds.items()})
        build.append((built - start) * 1e3)
        plan.append((time.perf_counter() - built) * 1e3)
    return {
        "network": SIZES["mlp"],
        "build_and_differentiate_ms": measure.summary(build, 3),
        "plan_ms": measure.summary(plan, 3),
    }


def chain(link: str) -> dict[str, Any]:
    """Seconds for 100,000 chained nodes and their gradient: `relu`, or products, which add more."""
    import numpy as np

    from dlsys import autodiff as ad

    start = time.perf_counter()
    x = node = ad.Variable("x")
    for _ in range(CHAIN):
        node = node * x if link == "mul" else ad.relu_op(node)
    (gradient,) = ad.gradients(node, [x])
    built = time.perf_counter()
    executor = ad.Executor([node, gradient])
    executor.plan({x: (1,)})
    planned = time.perf_counter()
    value, dx = executor.run({x: np.ones(1)})
    ran = time.perf_counter()
    assert value[0] == 1 and dx[0] == (CHAIN + 1 if link == "mul" else 1)
    return {
        "nodes": CHAIN,
        "nodes_with_gradient": len(executor.topo_order),
        "build_and_differentiate": round(built - start, 2),
        "plan": round(planned - built, 2),
        "build_differentiate_plan": round(planned - start, 2),
        "plan_and_run": round(ran - planned, 2),
    }


def _runner(executor: Any) -> Any:
    """The steps that an executor runs for the feeds it has seen."""
    ((runner, *_),) = executor._runners.values()
    return runner


def main() -> None:
    parser = measure.arguments(__doc__)
    options = parser.parse_args()
    from dlsys.ndarray import cpu
    from dlsys.runtime.device import unavailable

    results: dict[str, Any] = {"targets": TARGETS, "import_ms": import_ms()}
    reason = unavailable(cpu(0))
    results["native_run"] = {"not_run": reason} if reason else native_run()
    results["numpy_run"] = numpy_run()
    results["numpy_chain"] = numpy_chain()
    results["planning"] = planning()
    results["chain_seconds"] = {link: chain(link) for link in ("relu", "mul")}
    for name, result in results.items():
        print(f"{name}: {result}")
    print(measure.save("overhead", options, results))

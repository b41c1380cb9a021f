"""Tensors: what recording costs, and eager training loops beside PyTorch's.

    python benchmarks eager [--rounds N] [--seconds S] [--devices numpy cpu gpu]

- recording: microseconds of a call that is recorded, of a layer, and of finding the program of a
  tape that is known and running it, on numpy with arrays of one element. The least of many repeats,
  since other programs only ever add to it.
- loops: milliseconds a training step of the MLP and of LeNet-5, batches on the device, the loss
  read every hundred steps: eager, with `jit`, and a graph's `Executor.run`, on each device that is
  there, against PyTorch eager on the same device, and hand-captured where that is a GPU.

Contestants live in processes of their own that take turns (see cpu.py); ratios are of one round.
"""

from __future__ import annotations

import functools
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import numpy as np

from shared import measure, turns, workloads
from shared.networks import model
from shared.workloads import RATE, Work

WORKS = ("mlp", "lenet-128")
DEVICES = ("numpy", "cpu", "gpu")
OURS = ("eager", "jit", "graph")
TARGETS = {"recorded_call_us": 1.5, "found_program_us": 5.0}
BATCHES = 8  # on the device
LOOK = 100  # steps between looks at the loss

Loop = Callable[[], float]  # LOOK steps; the last loss


# ---- recording ----
def least_us(call: Callable[[], Any], count: int, between: Callable[[], Any]) -> float:
    """Microseconds of a call, the least of many repeats of `count`; `between` is not timed."""
    best = float("inf")
    for _ in range(300):
        between()
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) * 1e6 / count)
    return round(best, 3)


def recording() -> dict[str, float]:
    """Microseconds of the parts of recording."""
    import dlsys as dl
    from dlsys import functional as F
    from dlsys import nn

    x, y = dl.ones((1,), device="numpy"), dl.ones((1,), device="numpy")
    row = dl.ones((1, 1), device="numpy")
    linear, relu = nn.Linear(1, 1), nn.ReLU()
    engine = x.engine

    def run() -> None:
        (x + y).numpy()

    def looked() -> Any:
        return (x + y).numpy()

    gc.disable()
    found = {
        "operator_us": least_us(lambda: x + y, 100, run),
        "number_us": least_us(lambda: x * 2.0, 100, run),
        "function_us": least_us(lambda: F.relu(x), 100, run),
        "layer_us": least_us(lambda: relu(x), 100, run),
        "linear_us": least_us(lambda: linear(row), 100, run),
        "look_us": least_us(looked, 100, run),
    }
    made = looked_program(engine, x, y)
    found["program_us"] = least_us(made, 100, run)
    gc.enable()
    found["call_us"] = max(found["operator_us"], found["number_us"], found["function_us"])
    found["find_us"] = round(found["look_us"] - found["operator_us"] - found["program_us"], 3)
    return found


def looked_program(engine: Any, x: Any, y: Any) -> Callable[[], Any]:
    """The run of the program of `x + y` alone."""
    made = x + y
    tape = made._tape
    program = engine._program(tape, (made._out.index,))
    feeds = {node: tape.leaves[k].value for node, k in program.feeds}
    made.numpy()
    return lambda: program.run(feeds)


# ---- loops ----
def batches(work: Work) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images (batch, 784) and class numbers."""
    rng = np.random.default_rng(7)
    shape = (work.batch, 784)
    return [
        (rng.random(shape, dtype=np.float32), rng.integers(0, workloads.CLASSES, work.batch))
        for _ in range(BATCHES)
    ]


def eager(work: Work, device: str, compiled: bool = False) -> Loop:
    """A loop of Tensors, its step as it stands or under `jit`."""
    import dlsys as dl
    from dlsys import functional as F
    from dlsys import optim

    network = model(work, seed=123)
    optimizer = optim.SGD(RATE, params=network.parameters())
    turn = cycle([(dl.tensor(x, device), dl.tensor(y, device)) for x, y in batches(work)])

    def step(x: Any, y: Any) -> Any:
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    one = dl.jit(step) if compiled else step

    def loop() -> float:
        for _ in range(LOOK):
            loss = one(*next(turn))
        return loss.item()

    return loop


def graph(work: Work, device: str) -> Loop:
    """A loop of `Executor.run` with feeds on the device."""
    from dlsys import autodiff as ad
    from dlsys import ndarray, optim
    from dlsys.eager.device import context_of

    ctx = context_of(device)
    network = model(work, seed=123)
    x_, y_ = ad.Variable("x", shape=(None, 784)), ad.Variable("y", shape=(None,), dtype=np.int64)
    loss = ad.softmax_cross_entropy(network(x_), y_)
    executor = ad.Executor([loss, optim.SGD(RATE).minimize(loss, network.parameters())], ctx=ctx)

    def held(value: np.ndarray) -> Any:
        return value if ctx is None else ndarray.array(value, ctx)

    turn = cycle([{x_: held(x), y_: held(y)} for x, y in batches(work)])

    def loop() -> float:
        for _ in range(LOOK):
            value = executor.run(next(turn))[0]
        return float(value if ctx is None else value.asnumpy())

    return loop


def torch_loop(work: Work, device: str, options: dict[str, bool], captured: bool = False) -> Loop:
    """PyTorch's loop, eager or its whole step captured as a CUDA graph."""
    import torch
    from torch.nn import functional

    from contestants import race_torch

    where = "cuda" if device == "gpu" else "cpu"
    torch.set_num_threads(os.cpu_count() or 1)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    network = race_torch.model(work).to(where)
    sgd = torch.optim.SGD(network.parameters(), lr=RATE, **options)
    shape = (-1, 784) if work.kind == "dense" else (-1, 1, 28, 28)
    there = [
        (torch.from_numpy(x).reshape(shape).to(where), torch.from_numpy(y).to(where))
        for x, y in batches(work)
    ]
    fed = tuple(value.clone() for value in there[0])

    def step(x: Any, y: Any) -> Any:
        sgd.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(network(x), y)
        loss.backward()
        sgd.step()
        return loss.detach()

    one = step
    if captured:
        lost: list[Any] = []
        replay = race_torch.captured(lambda: lost.append(step(*fed)))

        def one(x: Any, y: Any) -> Any:
            fed[0].copy_(x)
            fed[1].copy_(y)
            replay()
            return lost[-1]

    turn = cycle(there)

    def loop() -> float:
        for _ in range(LOOK):
            loss = one(*next(turn))
        return loss.item()

    return loop


LOOPS: dict[str, Callable[[Work, str], Loop]] = {
    "eager": eager,
    "jit": functools.partial(eager, compiled=True),
    "graph": graph,
    "torch foreach": functools.partial(torch_loop, options={"foreach": True}),
    "torch fused": functools.partial(torch_loop, options={"fused": True}),
    "torch captured": functools.partial(torch_loop, options={"fused": True}, captured=True),
}


def contestant(work: str, device: str, system: str) -> None:
    """The other end: warms up, then runs for as long as each line says."""
    named = {each.name: each for each in workloads.NAMED}
    loop = LOOPS[system](named[work], device)
    loop()

    def sample(seconds: float) -> list[float]:
        return [ms / LOOK for ms in measure.step_ms(loop, seconds)]

    torch = sys.modules.get("torch")
    turns.serve(lambda _: sample, version=torch.__version__ if torch else None)


def systems(device: str) -> list[str]:
    """The contestants of a device."""
    theirs = []
    if find_spec("torch") is None:
        print("no PyTorch here, so no ratios: pip install torch", file=sys.stderr)
    elif device != "gpu":
        theirs = ["torch foreach", "torch fused"]
    else:
        import torch

        if torch.cuda.is_available():
            theirs = ["torch foreach", "torch fused", "torch captured"]
        else:
            print("this PyTorch has no CUDA, so no ratios on the GPU", file=sys.stderr)
    return [*OURS, *theirs]


def compare(work: str, device: str, options: Any) -> dict[str, Any]:
    """Milliseconds a step of each contestant, and ours over the fastest PyTorch eager's."""
    command = measure.program("eager", "--contestant", work, device)
    contestants = {
        system: turns.Contestant([*command, system], patience=options.patience)
        for system in systems(device)
    }
    ms: dict[str, list[float]] = {system: [] for system in contestants}
    for _ in range(options.rounds):
        for system, each in contestants.items():
            ms[system].append(each.turn(options.seconds))
    for each in contestants.values():
        each.close()
    result: dict[str, Any] = {
        "work": work,
        "device": device,
        "ms": {system: measure.summary(times) for system, times in ms.items()},
        "disturbed_turns": {system: each.disturbed for system, each in contestants.items()},
    }
    rivals = [system for system in ("torch foreach", "torch fused") if system in ms]
    if rivals:
        best = min(rivals, key=lambda system: statistics.median(ms[system]))
        result["rival"], result["rival_version"] = best, contestants[best].ready["version"]
        result["ratio"] = {
            system: measure.summary([a / b for a, b in zip(ms[system], ms[best])], 3)
            for system in ms
            if system != best
        }
    return result


def show(result: dict[str, Any]) -> None:
    """Prints a result."""
    for system, ms in result["ms"].items():
        ratio = result.get("ratio", {}).get(system)
        told = f"  {ratio['median']:.2f} x {result['rival']}" if ratio else ""
        name = f"{result['work']:10} {result['device']:6} {system:15}"
        print(f"{name} {ms['median']:8.4f} ms{told}", flush=True)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.3, help="of one turn")
    parser.add_argument("--patience", type=int, default=turns.PATIENCE, help="disturbed turns")
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--contestant", nargs=3, metavar=("WORK", "DEVICE", "SYSTEM"))
    options = parser.parse_args()
    if options.contestant:
        contestant(*options.contestant)
        return
    from dlsys.eager.device import context_of
    from dlsys.runtime.device import unavailable

    results: dict[str, Any] = {"targets": TARGETS, "look": LOOK, "recording": recording()}
    print(results["recording"], flush=True)
    results["loops"] = []
    for device in options.devices:
        reason = None if device == "numpy" else unavailable(context_of(device))
        if reason is not None:
            print(f"{device} is left out: {reason}", file=sys.stderr)
            continue
        for work in options.works:
            results["loops"].append(compare(work, device, options))
            show(results["loops"][-1])
    print(measure.save("eager", options, results))

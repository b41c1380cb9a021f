"""Training steps on the CPU: dlsys on numpy and on its native device against PyTorch eager.

    python benchmarks cpu [--rounds N] [--seconds S]

Each contestant lives in a process of its own, so that thread pools do not meet: a pool that still
spins from its last step would slow the next contestant down. The processes take turns, one runs
while the others sleep, and a ratio is taken within each round, so that a slower minute of the
machine hits both sides. A turn in which other programs took more than a tenth of a core is taken
again. PyTorch runs with every implementation of its SGD, and convolutions in both of its layouts
too; the fastest one counts.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from typing import Any

from shared import measure, turns
from shared.networks import GPT, LENET, MODELS, Ours

CASES = {  # a network and its batch
    "logreg": ("logreg", 1000),
    "mlp": ("mlp", 1000),
    "lenet-128": (LENET, 128),
    "lenet-1000": (LENET, 1000),
    "residual-64": ("residual", 64),
    "resnet18-16": ("resnet18", 16),  # at 64 x 64
    "gpt-12": (GPT, 12),  # 4 layers of 128 features, sequences of 64 characters
}
SLOW_ON_NUMPY = ("residual-64", "resnet18-16", "gpt-12")
IMAGES = [network for network in MODELS if network != GPT]  # with planes of channels
OURS = ("numpy", "native")
THEIRS = {
    "torch for-loop": {"foreach": False},
    "torch foreach": {"foreach": True},
    "torch fused": {"fused": True},
    "torch channels-last": {"foreach": True, "channels_last": True},
}
TARGETS = {
    ("mlp", "numpy"): 1.0,
    ("logreg", "numpy"): 0.8,
    ("lenet-128", "numpy"): 0.6,
    ("lenet-1000", "numpy"): 0.5,
    ("lenet-128", "native"): 0.2,
    ("lenet-1000", "native"): 0.18,
    ("residual-64", "native"): 0.9,
    ("resnet18-16", "native"): 1.0,
    ("gpt-12", "native"): 1.0,
}


def contestant(case: str, system: str) -> None:
    """The other end: warms up, says its first loss, then runs for as long as each line says."""
    network, batch = CASES[case]
    if system in OURS:
        from dlsys import ndarray

        ours = Ours(network, batch, ndarray.cpu(0) if system == "native" else None)
        step, version = ours.step, None
    else:
        import torch

        from shared.torch_networks import theirs

        torch.set_num_threads(cores())
        step = theirs(network, batch, "cpu", **THEIRS[system])
        version = torch.__version__
    loss = float(step())
    measure.step_ms(step, 0.5)
    sample = functools.partial(measure.step_ms, step)
    turns.serve(lambda _: sample, loss=loss, version=version)


def cores() -> int:
    """The cores that this process may use, which `taskset` may make fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compare(case: str, systems: list[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Milliseconds a step of each system, and ours over theirs."""
    if CASES[case][0] not in IMAGES:
        systems = [system for system in systems if system != "torch channels-last"]
    if case in SLOW_ON_NUMPY:
        systems = [system for system in systems if system != "numpy"]
    command = measure.program("cpu", "--contestant", case)
    contestants = {system: turns.Contestant([*command, system]) for system in systems}
    losses = [each.ready["loss"] for each in contestants.values()]
    if max(losses) - min(losses) > 1e-4 * max(losses):
        raise SystemExit(f"{case}: the systems do not compute the same loss: {losses}")
    ms: dict[str, list[float]] = {system: [] for system in systems}
    for _ in range(rounds):
        for system, each in contestants.items():
            ms[system].append(each.turn(seconds))
    for each in contestants.values():
        each.close()
    disturbed = {system: each.disturbed for system, each in contestants.items()}
    result: dict[str, Any] = {
        "batch": CASES[case][1],
        "ms": {system: measure.summary(times) for system, times in ms.items()},
        "disturbed_turns": disturbed,
    }
    rivals = [system for system in systems if system in THEIRS]
    if rivals:
        best = min(rivals, key=lambda system: statistics.median(ms[system]))
        result["rival"] = best
        result["rival_version"] = contestants[best].ready["version"]
        result["ratio"] = {
            system: measure.summary([a / b for a, b in zip(ms[system], ms[best])], 3)
            for system in systems
            if system in OURS
        }
    return result


def available_systems() -> list[str]:
    """The systems that can run here; prints which cannot."""
    from importlib.util import find_spec

    from dlsys import ndarray
    from dlsys.runtime.device import unavailable

    systems = ["numpy"]
    reason = unavailable(ndarray.cpu(0))
    if reason is None:
        systems.append("native")
    else:
        print(f"no native device: {reason}", file=sys.stderr)
    if find_spec("torch") is None:
        print("no PyTorch here, so no ratios: pip install torch", file=sys.stderr)
        return systems
    return systems + list(THEIRS)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.15, help="of one turn")
    parser.add_argument("--contestant", nargs=2, metavar=("CASE", "SYSTEM"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    if options.contestant:
        contestant(*options.contestant)
        return
    systems = available_systems()
    results = {}
    for case in options.cases:
        results[case] = compare(case, systems, options.rounds, options.seconds)
        _show(case, results[case])
    print(measure.save("cpu", options, {"networks": results}))


def _show(case: str, result: dict[str, Any]) -> None:
    for system, ms in result["ms"].items():
        ratio = result.get("ratio", {}).get(system)
        text = f"{case:10} {system:19} {ms['median']:8.3f} ms"
        if ratio:
            text += f"  {ratio['median']:.2f} x {result['rival']}"
            text += f" ({ratio['q1']:.2f} to {ratio['q3']:.2f})"
            target = TARGETS.get((case, system))
            text += f", target {target:.2f} x" if target else ""
        print(text)

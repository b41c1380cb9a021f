"""The rungs of attention beside PyTorch's, forward and with gradients: times and rates.

    python benchmarks attention [--device cpu|gpu] [--precisions fp32,tf32,bf16] [--shapes 0,3]
                                [--rounds N]

Leaves results/attention.json, of the CPU attention_cpu.json, after each shape. Works of an earlier
record of the same machine and versions stay in it unless they are measured anew, so that a record
can be made in parts; each work names its command and commit. Each contestant lives in a process of
its own, and they take turns (shared/turns.py); a ratio is taken within each round. PyTorch runs
`scaled_dot_product_attention` as it chooses itself, on a GPU by cuDNN too. A rate counts the
products of each query with the keys that it sees: two forward, seven with gradients, where backward
computes the scores anew. On a GPU results stay in the graph, as in a network, and are not fetched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from shared import measure, turns

# Batch, heads, kv heads, tokens, head size, causal.
CPU_SHAPES = [
    (4, 12, 12, 1024, 64, True), (1, 12, 12, 1024, 64, True), (8, 4, 4, 128, 32, True),
    (2, 8, 8, 512, 64, False), (1, 4, 4, 2048, 128, True), (2, 8, 2, 512, 64, True),
]  # fmt: skip
GPU_SHAPES = [
    (16, 12, 12, 1024, 64, True), (4, 12, 12, 4096, 64, True), (16, 8, 8, 1024, 128, True),
    (4, 8, 8, 4096, 128, True), (1, 8, 8, 16384, 128, True), (16, 8, 2, 1024, 128, True),
]  # fmt: skip
OURS = {"cpu": ("naive", "tiled", "auto"), "gpu": ("naive", "tiled", "flash", "auto")}
THEIRS = {"cpu": ("torch",), "gpu": ("torch", "cudnn")}  # by the choice of PyTorch, and by cuDNN
QUEUED, WARM = {"cpu": 1, "gpu": 10}, {"cpu": 0.2, "gpu": 0.05}  # steps, and seconds
# Disturbed turns that are repeated: where a GPU computes, other processes on the host's cores take
# little from a turn, and on a host with several GPUs they never end.
PATIENCE = {"cpu": turns.PATIENCE, "gpu": 3}
PRECISIONS = ("fp32", "tf32", "bf16")
ONLY = {"flash": ("tf32", "bf16"), "cudnn": ("bf16",)}  # what contestants compute
Shape = tuple[int, int, int, int, int, bool]


def arrays(shape: Shape) -> list[np.ndarray]:
    """q, k, v and dy, uniform with variance 1."""
    batch, heads, kv_heads, tokens, size, _ = shape
    rng = np.random.default_rng(0)
    return [
        (rng.random((batch, n, tokens, size), np.float32) - np.float32(0.5)) * np.float32(12**0.5)
        for n in (heads, kv_heads, kv_heads, heads)
    ]


def flop(shape: Shape, direction: str) -> float:
    """Of forward, or of forward and backward."""
    batch, heads, _, tokens, size, causal = shape
    pairs = tokens * (tokens + 1) / 2 if causal else tokens**2
    return 2.0 * batch * heads * pairs * size * (2 if direction == "forward" else 7)


# ---- contestants ----


def ours(
    device: str, shape: Shape, precision: str, rung: str, direction: str
) -> Callable[[], None]:
    """So many steps as are queued at a time."""
    from dlsys import autodiff as ad
    from dlsys import functional as F
    from dlsys.ops.optim.assign import group_op
    from dlsys.runtime.device import cpu, gpu, synchronize

    ctx = {"cpu": cpu, "gpu": gpu}[device](0)
    dtype = "bfloat16" if precision == "bf16" else None
    named = zip(("q", "k", "v", "dy"), arrays(shape))
    q, k, v, dy = (ad.Parameter(x, name, dtype=dtype) for name, x in named)
    y = F.scaled_dot_product_attention(q, k, v, causal=shape[-1], algo=rung)
    fetches = [y] if direction == "forward" else [y, *ad.gradients(y, [q, k, v], dy)]
    if device == "gpu":  # a captured graph copies what is fetched
        fetches = [group_op(*fetches)]
    executor = ad.Executor(fetches, ctx, "tf32" if precision == "tf32" else "fp32")

    def steps() -> None:
        for _ in range(QUEUED[device]):
            executor.run({})
        synchronize(ctx)

    return steps


def theirs(
    device: str, system: str, shape: Shape, precision: str, direction: str
) -> Callable[[], None]:
    """The same of PyTorch."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(os.cpu_count() or 1)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    on = "cuda" if device == "gpu" else "cpu"
    q, k, v, dy = (torch.tensor(x, dtype=dtype, device=on) for x in arrays(shape))
    for x in (q, k, v):
        x.requires_grad_(direction != "forward")

    grouped = shape[1] != shape[2]
    chosen = contextlib.nullcontext if system == "torch" else sdpa_kernel

    def steps() -> None:
        for _ in range(QUEUED[device]):
            with chosen(SDPBackend.CUDNN_ATTENTION):
                y = scaled_dot_product_attention(q, k, v, is_causal=shape[-1], enable_gqa=grouped)
            if direction != "forward":
                torch.autograd.grad(y, (q, k, v), dy)
        if device == "gpu":
            torch.cuda.synchronize()

    return steps


def contestant(device: str, system: str) -> None:
    """The other end: sets up what a line names when it is first named, and runs it."""
    made: dict[str, Callable[[float], list[float]]] = {}

    def sampler(work: str) -> Callable[[float], list[float]]:
        if work not in made:
            made.clear()  # one at a time, for memory
            number, precision, direction = work.split()
            shape = shapes(device)[int(number)]
            if system in THEIRS[device]:
                steps = theirs(device, system, shape, precision, direction)
            else:
                steps = ours(device, shape, precision, system, direction)
            measure.step_ms(steps, WARM[device])

            def sample(seconds: float) -> list[float]:
                return [ms / QUEUED[device] for ms in measure.step_ms(steps, seconds)]

            made[work] = sample
        return made[work]

    version = __import__("torch").__version__ if system in THEIRS[device] else ""
    turns.serve(sampler, version=version)


def shapes(device: str) -> list[Shape]:
    return GPU_SHAPES if device == "gpu" else CPU_SHAPES


# ---- the comparison ----


def identity(work: dict[str, Any]) -> tuple[Any, ...]:
    return (*work["shape"], work["precision"])


def order(device: str, work: dict[str, Any]) -> tuple[int, int]:
    return shapes(device).index(tuple(work["shape"])), PRECISIONS.index(work["precision"])


def compare(
    contestants: dict[str, turns.Contestant], device: str, number: int, precision: str,
    direction: str, rounds: int, seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds, TFLOP/s, and the share of PyTorch's rate, of each system."""
    work = f"{number} {precision} {direction}"
    ms: dict[str, list[float]] = {system: [] for system in contestants}
    for _ in range(rounds):
        for system, each in contestants.items():
            ms[system].append(each.turn(seconds, work))
    rate = flop(shapes(device)[number], direction) / 1e9
    found = {}
    for system, times in ms.items():
        row: dict[str, Any] = {"ms": measure.summary(times)}
        row["tflops"] = rate / row["ms"]["median"]
        if "torch" in ms:
            row["of_torch"] = measure.summary([a / b for a, b in zip(ms["torch"], times)], 3)
        found[system] = row
        share = f"{row['of_torch']['median']:5.2f} x PyTorch" if "torch" in ms else ""
        median, tflops = row["ms"]["median"], row["tflops"]
        print(
            f"  {direction:8} {system:6} {median:9.3f} ms {tflops:8.4f} TFLOP/s {share}", flush=True
        )
    return found


def main() -> None:
    from dlsys.runtime.device import best_context

    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=["gpu", "cpu"], help="the best one there is")
    parser.add_argument("--precisions", help="fp32,tf32,bf16 on a GPU, fp32 elsewhere")
    parser.add_argument("--shapes", help="their numbers in the list, all by default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.15, help="of one turn")
    parser.add_argument("--contestant", nargs=2, metavar=("DEVICE", "SYSTEM"))
    options = parser.parse_args()
    if options.contestant:
        return contestant(*options.contestant)
    ctx = best_context()[0]
    device = options.device or (ctx.name if ctx is not None else "cpu")
    precisions = options.precisions or ("fp32,tf32,bf16" if device == "gpu" else "fp32")
    systems = [*OURS[device], *(THEIRS[device] if find_spec("torch") else ())]
    command = measure.program("attention", "--contestant", device)
    contestants = {
        system: turns.Contestant([*command, system], patience=PATIENCE[device])
        for system in systems
    }
    name = "attention" if device == "gpu" else "attention_cpu"
    ready = contestants["torch"].ready if "torch" in contestants else {}
    results = {"works": [], "torch": ready.get("version"), "disturbed_turns": {}}
    known = measure.earlier_works(options.out / f"{name}.json", torch=results["torch"])
    works = {identity(work): work for work in known}
    numbers = [int(x) for x in options.shapes.split(",")] if options.shapes else None
    for number, shape in enumerate(shapes(device)):
        for precision in precisions.split(",") if numbers is None or number in numbers else ():
            print(f"{shape} {precision}", flush=True)
            fit = {  # a contestant of some precisions sits out the others
                system: each
                for system, each in contestants.items()
                if precision in ONLY.get(system, precision)
            }
            times = {
                direction: compare(
                    fit, device, number, precision, direction, options.rounds,
                    options.seconds,
                )
                for direction in ("forward", "both")
            }  # fmt: skip
            work = {"shape": list(shape), "precision": precision, **measure.origin(options)}
            works[identity(work)] = {**work, "times": times}
            results["works"] = sorted(works.values(), key=lambda w: order(device, w))
            results["disturbed_turns"] = {k: each.disturbed for k, each in contestants.items()}
            measure.save(name, options, results)
    for each in contestants.values():
        each.close()
    print(options.out / f"{name}.json")

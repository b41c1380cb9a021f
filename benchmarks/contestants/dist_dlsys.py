"""dlsys's side of dist.py, one rank of it: `dist_dlsys mlp,gpt2 5`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from contestants import large_dlsys
from dlsys import autodiff as ad
from dlsys import dist, ndarray, optim
from dlsys.runtime.device import gpu, synchronize
from shared import cupti
from shared.networks import model
from shared.workloads import NAMED, RATE
from steps import overlap

KIB = (64, 256, 1024, 4096, 16 << 10, 100 << 10, 500 << 10)
CHAINED = 8, 24  # sums of one run, whose times are compared: enough for the host to be ahead
WARM_RUNS = 5
TRACED = 20  # steps
ROUND_S = 0.15  # seconds of queued steps


def main() -> None:
    works, rounds = sys.argv[1].split(","), int(sys.argv[2])
    world = dist.init()
    for work in works:
        if work == "allreduce":
            bandwidths(world, rounds)
        elif not work.startswith("trace-"):
            step(world, work, rounds)
        elif world.size > 1:
            trace(world, work.removeprefix("trace-"))


def tell(world: dist.Group, **found: Any) -> None:
    if world.rank == 0:
        print(json.dumps({"side": "dlsys", "gpus": world.size, **found}), flush=True)


def timed(world: dist.Group, queue: Callable[[int], Any], rounds: int) -> float:
    """Milliseconds of one of n queued runs, the median of rounds that all ranks begin together."""
    return timed_in_turn(world, [queue], rounds)[0]


def timed_in_turn(
    world: dist.Group, queues: Sequence[Callable[[int], Any]], rounds: int
) -> list[float]:
    """The same of several, whose rounds alternate."""
    ctx = gpu(world.local_rank)

    def seconds(queue: Callable[[int], Any], n: int) -> float:
        world.barrier()
        synchronize(ctx)
        start = time.perf_counter()
        queue(n)
        synchronize(ctx)
        return time.perf_counter() - start

    counts = []
    for queue in queues:
        seconds(queue, WARM_RUNS)
        each = float(world.all_reduce(np.array([seconds(queue, WARM_RUNS)]), "max")[0]) / WARM_RUNS
        counts.append(max(10, min(2000, int(ROUND_S / each))))
    found = [[seconds(queue, n) / n for queue, n in zip(queues, counts)] for _ in range(rounds)]
    return [statistics.median(column) * 1e3 for column in zip(*found)]


def bandwidths(world: dist.Group, rounds: int) -> None:
    """The bus bandwidth of sums of one float32 array, as NCCL's tests count it: what each of some
    sums in a row adds to a run of one graph.
    """
    if world.size == 1:
        return
    ctx = gpu(world.local_rank)
    for kib in KIB:
        x = ad.Variable("x", (kib << 8,))
        feed = {x: ndarray.array(np.zeros(kib << 8, np.float32), ctx)}
        ms = []
        for count in CHAINED:
            y = x + 1
            for _ in range(count):
                y = dist.all_reduce_op(y, group=world)
            executor = ad.Executor([y + 1], ctx, group=world)
            ms.append(timed(world, queue_of(executor, feed), rounds))
        each = (ms[1] - ms[0]) / (CHAINED[1] - CHAINED[0])
        moved = (kib << 10) * 2 * (world.size - 1) / world.size
        tell(
            world, work=f"allreduce-{kib}KiB", ms=round(each, 5),
            busbw_gbs=round(moved / each / 1e6, 1),
        )  # fmt: skip


def step(world: dist.Group, work: str, rounds: int) -> None:
    """A training step of one of the works. Of several ranks in turn with that of each for itself,
    all at the same time and one after the other, of which the slowest is told: GPUs differ by some
    percent, and so does one beside a busy neighbor; a step of all takes as long as that of the
    slowest at least.
    """
    executor, feeds = made(world, work)
    queues = [queue_of(executor, feeds)]
    if world.size > 1:
        alone = queue_of(*made(world, work, together=False))
        queues.append(alone)
        queues += [alone if rank == world.rank else waited for rank in range(world.size)]
    for queue in queues:
        queue(1)
    ms, *others = timed_in_turn(world, queues, rounds)
    slowest = [round(float(world.all_reduce(found, "max")), 4) for found in others]
    by_itself = {"alone_ms": slowest[0], "alone_in_turn_ms": slowest[1:]} if slowest else {}
    (plan,) = executor.report().plans
    tell(
        world, work=work, precision=executor.precision, ms=round(ms, 4), **by_itself,
        exchanged=[exchange.nbytes for exchange in plan.exchanged],
        exchanges=[exchange.name for exchange in plan.exchanged], launches=plan.launches,
    )  # fmt: skip


def made(
    world: dist.Group, work: str, together: bool = True
) -> tuple[ad.Executor, dict[ad.Node, Any]]:
    """The executor of a work's training step, of all ranks or of each for itself, and its feeds."""
    ctx = gpu(world.local_rank)
    rng = np.random.default_rng(world.rank)
    if work in ("gpt2", "resnet50"):
        makers = {"gpt2": large_dlsys.gpt2, "resnet50": large_dlsys.resnet50}
        precision = "bf16"
        loss, update, values = makers[work](rng)
    else:
        precision = "fp32"
        loss, update, values = small(work, rng)
    group = world if world.size > 1 and together else None
    executor = ad.Executor([loss, update], ctx, precision, group=group)
    return executor, {node: ndarray.array(value, ctx) for node, value in values.items()}


def queue_of(executor: ad.Executor, feeds: dict[ad.Node, Any]) -> Callable[[int], None]:
    """A function that queues n runs."""

    def queue(n: int) -> None:
        for _ in range(n):
            executor.run(feeds)

    return queue


def waited(n: int) -> None:
    """What a rank does in the turn of another one."""


def trace(world: dist.Group, work: str) -> None:
    """How much of the communication's time lies beside other kernels, and what calls of CUDA's
    runtime and driver all threads of the host make from the first to the last launch in steady
    state, both of rank 0. The step is captured under the profiler. Sums that an update makes within
    its kernel have no time of their own.
    """
    ctx = gpu(world.local_rank)
    with cupti.Trace() as traced:
        executor, feeds = made(world, work)
        queue = queue_of(executor, feeds)
        for _ in range(2):
            queue(TRACED)
            synchronize(ctx)
            time.sleep(overlap.PAUSE_S)
        queue(TRACED)
        synchronize(ctx)
    last = overlap.after_pause(traced.activities)
    talk = [each for each in last if each.name.startswith("nccl")]
    others = [each for each in last if not each.name.startswith(("nccl", *overlap.NOT_KERNELS))]
    talking, computing = overlap.merged(talk), overlap.merged(others)
    steady = overlap.after_pause(traced.calls)
    launches = [k for k, each in enumerate(steady) if each.name == "cudaGraphLaunch"]
    steady = steady[launches[0] : launches[-1] + 1]
    beside = overlap.length(overlap.common(talking, computing))
    tell(
        world, work=f"trace-{work}", steps=TRACED, kernels=len(others), collectives=len(talk),
        copies=sum(each.name.startswith("Mem") for each in last),
        communication_us=round(overlap.length(talking) / TRACED, 1),
        kernels_us=round(overlap.length(computing) / TRACED, 1),
        beside_us=round(beside / TRACED, 1),
        share=round(beside / max(overlap.length(talking), 1e-9), 4),
        calls=dict(Counter(each.name for each in steady)),
    )  # fmt: skip


def small(work: str, rng: np.random.Generator) -> tuple[ad.Node, ad.Node, dict[ad.Node, Any]]:
    """Loss, update and feeds of a network of the race."""
    (named,) = (each for each in NAMED if each.name == work)
    network = model(named)
    images = ad.Variable("images", (None, 784), dtype=np.float32)
    labels = ad.Variable("labels", (None,), dtype=np.int64)
    loss = ad.softmax_cross_entropy(network(images), labels)
    update = optim.SGD(RATE).minimize(loss, network.parameters())
    values = rng.random((named.batch, 784), np.float32), rng.integers(0, 10, named.batch)
    return loss, update, dict(zip((images, labels), values))

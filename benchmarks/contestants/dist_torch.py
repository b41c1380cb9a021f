"""PyTorch's side of dist.py, one rank of it: DistributedDataParallel of compiled models."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from contestants import large_torch, race_torch
from shared.workloads import NAMED, RATE

KIB = (64, 256, 1024, 4096, 16 << 10, 100 << 10, 500 << 10)
WARM_RUNS = 6
ROUND_S = 0.15  # seconds of queued steps


def main() -> None:
    works, rounds = sys.argv[1].split(","), int(sys.argv[2])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for work in works:
        if work == "allreduce":
            bandwidths(rounds)
        else:
            train(work, rounds)
    distributed.destroy_process_group()


def tell(**found: Any) -> None:
    if distributed.get_rank() == 0:
        side = f"PyTorch {torch.__version__}"
        print(json.dumps({"side": side, "gpus": distributed.get_world_size(), **found}), flush=True)


def timed(step: Callable[[], Any], rounds: int) -> float:
    """Milliseconds of one of n queued steps, the median of rounds that all ranks begin together."""

    def seconds(n: int) -> float:
        distributed.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(WARM_RUNS)
    each = torch.tensor(seconds(WARM_RUNS) / WARM_RUNS, device="cuda")
    distributed.all_reduce(each, distributed.ReduceOp.MAX)
    n = max(10, min(2000, int(ROUND_S / each.item())))
    return statistics.median(seconds(n) for _ in range(rounds)) / n * 1e3


def bandwidths(rounds: int) -> None:
    size = distributed.get_world_size()
    for kib in KIB if size > 1 else ():
        x = torch.zeros(kib << 8, device="cuda")
        ms = timed(lambda x=x: distributed.all_reduce(x), rounds)
        moved = (kib << 10) * 2 * (size - 1) / size
        tell(work=f"allreduce-{kib}KiB", ms=round(ms, 4), busbw_gbs=round(moved / ms / 1e6, 1))


def train(work: str, rounds: int) -> None:
    large = work in ("gpt2", "resnet50")
    if large:
        model, optimizer, x, classes = large_torch.work_of(work)
    else:
        (named,) = (each for each in NAMED if each.name == work)
        model = race_torch.model(named).cuda()
        shape = (1, 28, 28) if named.kind == "lenet" else (784,)
        x = torch.rand(named.batch, *shape, device="cuda")
        classes = torch.randint(0, 10, (named.batch,), device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), RATE, fused=True)
    device = torch.cuda.current_device()
    alone = distributed.get_world_size() == 1
    wrapped: Any = torch.compile(model)
    if not alone:
        wrapped = DistributedDataParallel(wrapped, [device], gradient_as_bucket_view=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=large):
            loss = functional.cross_entropy(wrapped(x), classes)
        loss.backward()
        optimizer.step()

    with contextlib.suppress(KeyboardInterrupt):
        ms = timed(step, rounds)
        tell(work=work, precision="bf16" if large else "fp32", ms=round(ms, 4))

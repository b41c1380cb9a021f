"""PyTorch's side of dist.py, one rank of it: DistributedDataParallel of compiled models, and the
whole step of these captured as a CUDA graph. `dist_torch WORKS 0` only compiles.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from contestants import large_torch, race_torch
from shared.workloads import NAMED, RATE

KIB = (64, 256, 1024, 4096, 16 << 10, 100 << 10, 500 << 10)
WARM_RUNS = 6
STEPS_BEFORE_CAPTURE = 11
ROUND_S = 0.15  # seconds of queued steps


def main() -> None:
    works, rounds = sys.argv[1].split(","), int(sys.argv[2])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # NCCL's watchdog would query events of a capture.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
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
    for kib in KIB if size > 1 and rounds else ():
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
    start = time.perf_counter()
    stream = torch.cuda.Stream()  # in which DistributedDataParallel is made, so as to be captured
    wrapped: Any = torch.compile(model)
    if distributed.get_world_size() > 1:
        with torch.cuda.stream(stream):
            device = torch.cuda.current_device()
            wrapped = DistributedDataParallel(wrapped, [device], gradient_as_bucket_view=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=large):
            loss = functional.cross_entropy(wrapped(x), classes)
        loss.backward()
        optimizer.step()

    attention = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if work == "gpt2" else nullcontext()
    with attention:
        step()
        torch.cuda.synchronize()
        first_s = round(time.perf_counter() - start, 1)
        if not rounds:
            return
        precision = "bf16" if large else "fp32"
        found = {"work": work, "precision": precision, "first_s": first_s}
        tell(**found, way="compiled", ms=round(timed(step, rounds), 4))
        try:
            replay = captured(step, stream)
        except RuntimeError as error:
            print(f"{work}: not captured: {error}", file=sys.stderr, flush=True)
        else:
            tell(**found, way="compiled and captured", ms=round(timed(replay, rounds), 4))


def captured(step: Callable[[], Any], stream: torch.cuda.Stream) -> Callable[[], Any]:
    """The step as a CUDA graph, behind as many steps in its stream as DistributedDataParallel asks
    for.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(STEPS_BEFORE_CAPTURE):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph.replay

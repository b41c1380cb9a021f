"""PyTorch in the race: eager, torch.compile, and the whole step of either hand-captured as a CUDA
graph.

Feeds are on the device; fused SGD, its fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from shared import workloads
from shared.workloads import CLASSES, RATE, Work

MODES = ("eager", "graph", "compile", "compiled graph")  # what takes long comes last


class Block(nn.Module):
    """Two normalized 3×3 convolutions beside the identity."""

    def __init__(self, planes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*normalized(planes, planes), *normalized(planes, planes)[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.body(x))


def normalized(inputs: int, outputs: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def dense(sizes: tuple[int, ...]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def model(work: Work) -> nn.Module:
    """The network of a work."""
    if work.kind == "dense":
        return nn.Sequential(*dense(work.sizes))
    if work.kind == "lenet":
        first, second = work.sizes
        return nn.Sequential(
            *(nn.Conv2d(1, first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *dense((25 * second, 120, 84, CLASSES)),
        )
    return nn.Sequential(
        *(*normalized(1, 32), nn.MaxPool2d(2), *normalized(32, 64), Block(64), nn.MaxPool2d(2)),
        *(*normalized(64, 128), Block(128), nn.AdaptiveMaxPool2d(1), nn.Flatten()),
        nn.Linear(128, CLASSES),
    )


def feeds(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (work.batch, 784) if work.kind == "dense" else (work.batch, 1, 28, 28)
    return torch.rand(shape, device="cuda"), torch.randint(0, CLASSES, (work.batch,), device="cuda")


def step(work: Work, precision: str, compiled: bool) -> Callable[[], object]:
    """A training step, as a function; at bf16 by autocast, with channels last."""
    narrow = precision == "bf16"
    layout = torch.channels_last if narrow and work.kind != "dense" else torch.contiguous_format
    network = model(work).cuda().to(memory_format=layout)
    x, y = feeds(work)
    x = x.contiguous(memory_format=layout)
    sgd = torch.optim.SGD(network.parameters(), lr=RATE, fused=True)
    forward = torch.compile(network) if compiled else network

    def one() -> object:
        sgd.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=narrow, cache_enabled=False):
            loss = functional.cross_entropy(forward(x), y)
        loss.backward()
        sgd.step()
        return loss.detach()

    return one


def captured(one: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            one()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one()

    def replay(keep: Callable[[], object] = one) -> None:  # it owns what the graph reads
        graph.replay()

    return replay


def measured(work: Work, precision: str, mode: str, rounds: int) -> None:
    """One line of results."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    one = step(work, precision, compiled=mode.startswith("compile"))
    if mode.endswith("graph"):
        one = captured(one)
    one()
    torch.cuda.synchronize()
    first = time.perf_counter() - start

    def queue(n: int) -> None:
        for _ in range(n):
            one()

    ms, steps = workloads.queued_ms(queue, torch.cuda.synchronize, rounds)
    peak = torch.cuda.max_memory_allocated()
    workloads.tell(
        work, precision, mode, ms=ms, steps=steps, first_s=round(first, 3), peak_nbytes=peak
    )


def main() -> None:
    options = workloads.arguments(__doc__)
    torch.backends.cudnn.benchmark = True
    for mode in options.modes.split(",") if options.modes else MODES:
        for work in workloads.chosen(options):
            for precision in work.precisions:
                torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
                torch.backends.cudnn.allow_tf32 = precision != "fp32"
                measured(work, precision, mode, options.rounds)

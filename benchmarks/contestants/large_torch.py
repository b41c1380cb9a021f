"""PyTorch's side of large.py at its best: compiled, captured, attention by cuDNN, TF32 allowed."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared.torch_networks import Gpt

VOCABULARY, CONTEXT, SEQUENCES, FEATURES, HEADS, LAYERS = 50304, 1024, 16, 768, 12, 12
IMAGES, SIDE, CLASSES = 128, 224, 1000


def work_of(name: str) -> tuple[nn.Module, Any, torch.Tensor, torch.Tensor]:
    """Model, optimizer, input and classes."""
    if name == "gpt2":
        model: nn.Module = Gpt(VOCABULARY, CONTEXT, LAYERS, HEADS, FEATURES).cuda()
        shape = SEQUENCES, CONTEXT
        tokens = torch.randint(0, VOCABULARY, shape, device="cuda")
        adamw = torch.optim.AdamW(model.parameters(), 1e-4, fused=True, capturable=True)
        return model, adamw, tokens, torch.randint(0, VOCABULARY, shape, device="cuda").flatten()
    import torchvision

    torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    images = torch.rand(IMAGES, 3, SIDE, SIDE, device="cuda")
    sgd = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, fused=True)
    labels = torch.randint(0, CLASSES, (IMAGES,), device="cuda")
    return model, sgd, images.to(memory_format=torch.channels_last), labels


def main() -> None:
    work, precision, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model, optimizer, x, classes = work_of(work)
    start = time.perf_counter()
    compiled = torch.compile(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(compiled(x), classes)
        loss.backward()
        optimizer.step()

    best = precision == "bf16" and work == "gpt2"
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if best else contextlib.nullcontext():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
            torch.cuda.synchronize()
            first_s = time.perf_counter() - start
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        with torch.cuda.graph(graph):
            step()
    ms = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        ms.append((time.perf_counter() - start) * 100)
    found = {
        "side": f"PyTorch {torch.__version__}, compiled and captured",
        "work": work,
        "precision": precision,
        "ms": round(statistics.median(ms[1:]), 4),
        "first_s": round(first_s, 2),
        "peak_mib": torch.cuda.max_memory_allocated() >> 20,
    }
    print(json.dumps(found), flush=True)

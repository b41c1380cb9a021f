"""dlsys's side of large.py: one work in one precision, `large_dlsys gpt2 bf16 5`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, optim, profile
from dlsys.runtime.device import gpu, memory_stats, reset_peak, synchronize

GPU = gpu(0)
VOCABULARY, CONTEXT, SEQUENCES = 50304, 1024, 16
IMAGES, SIDE, CLASSES = 128, 224, 1000


def gpt2(rng: np.random.Generator) -> tuple[ad.Node, ad.Node, dict[ad.Node, np.ndarray]]:
    """Loss, update and feeds of GPT-2 124M, without dropout."""
    model = nn.GPT(
        nn.GPTConfig(vocabulary=VOCABULARY, context=CONTEXT, layers=12, heads=12, features=768),
        seed=0,
    )
    tokens = ad.Variable("tokens", (SEQUENCES, CONTEXT), dtype=np.int64)
    targets = ad.Variable("targets", (SEQUENCES, CONTEXT), dtype=np.int64)
    loss = F.cross_entropy(model(tokens), targets)
    update = optim.AdamW(1e-4).minimize(loss, model.parameters())
    drawn = (rng.integers(0, VOCABULARY, (SEQUENCES, CONTEXT)) for _ in range(2))
    return loss, update, dict(zip((tokens, targets), drawn))


def resnet50(rng: np.random.Generator) -> tuple[ad.Node, ad.Node, dict[ad.Node, np.ndarray]]:
    """Loss, update and feeds of ResNet-50."""
    model = nn.ResNet50(CLASSES, seed=0)
    images = ad.Variable("images", (IMAGES, 3, SIDE, SIDE), dtype=np.float32)
    labels = ad.Variable("labels", (IMAGES,), dtype=np.int64)
    loss = F.cross_entropy(model(images), labels)
    update = optim.SGD(1e-3, momentum=0.9).minimize(loss, model.parameters())
    values = rng.random((IMAGES, 3, SIDE, SIDE), np.float32), rng.integers(0, CLASSES, IMAGES)
    return loss, update, dict(zip((images, labels), values))


def main() -> None:
    work, precision, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    loss, update, values = {"gpt2": gpt2, "resnet50": resnet50}[work](np.random.default_rng(0))
    from dlsys import ndarray

    start = time.perf_counter()
    executor = ad.Executor([loss, update], ctx=GPU, precision=precision)
    feeds = {node: ndarray.array(value, GPU) for node, value in values.items()}
    first = executor.run(feeds)[0].asnumpy()
    executor.run(feeds)
    synchronize(GPU)
    first_s = time.perf_counter() - start
    reset_peak(GPU)
    ms = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(10):
            executor.run(feeds)
        synchronize(GPU)
        ms.append((time.perf_counter() - start) * 100)
    found: dict[str, Any] = {
        "side": "dlsys",
        "work": work,
        "precision": precision,
        "ms": round(statistics.median(ms[1:]), 4),
        "first_s": round(first_s, 2),
        "peak_mib": memory_stats(GPU).peak_in_use_nbytes >> 20,
        "loss": float(first),
        "choices": sum(map(bool, executor.algorithms().values())),
    }
    executor.recorder = profile.Profile()
    for _ in range(3):
        executor.run(feeds)
    runs = executor.recorder.runs
    found["kernels"] = [
        {
            "operator": row.name,
            "calls": row.calls // runs,
            "ms": round(row.ms / runs, 4),
            "gb_per_s": round(row.gigabytes_per_second),
            "tflops": round(row.gigaflops / 1e3, 1),
        }
        for row in executor.recorder.rows()
    ]
    print(json.dumps(found), flush=True)

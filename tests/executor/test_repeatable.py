"""The same seed gives the same bits: again, with any number of CPU threads, beside other work."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import unittest
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import dlsys
from dlsys import nn, optim, train
from dlsys.data import Loader, Rotate, Shift
from dlsys.runtime.device import Context, cpu, gpu
from support.devices import each_context, require, slow

torch: Any = import_module("torch") if find_spec("torch") else None


def trained(ctx: Context | None, seed: int = 7, augmented: bool = True) -> str:
    """A digest of a network's state after a training with everything that draws: order, dropout,
    augmentation, initial weights.
    """
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (150, 1, 20, 20), np.uint8)
    labels = images.reshape(150, -1).astype(int).sum(1) % 3
    augment = [Shift(1), Rotate(10)] if augmented else []
    data = Loader((images, labels), 50, shuffle=True, seed=seed, augment=augment, workers=2)
    draws = np.random.default_rng(seed)
    model = nn.Sequential(
        *(nn.Conv2d(1, 5, 3, rng=draws), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(5, 7, 3, padding=1, rng=draws), nn.BatchNorm2d(7), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.3, rng=seed), nn.Linear(567, 133, rng=draws), nn.Tanh()),
        nn.Linear(133, 3, rng=draws),
    )
    optimizer = optim.AdamW(optim.OneCycle(0.01, 3 * len(data)))
    train.fit(model, data, optimizer, epochs=3, ctx=ctx, quiet=True)
    digest = hashlib.sha256()
    for name, value in sorted({**model.state_dict(), **optimizer.state_dict()}.items()):
        digest.update(name.encode() + np.asarray(value).tobytes())
    return digest.hexdigest()


def trained_with(threads: int) -> str:
    """The same in a process of its own, with so many threads of the CPU device."""
    program = "from executor import test_repeatable as t; print(t.trained(t.cpu(0)))"
    folders = [str(Path(__file__).parents[1]), str(Path(dlsys.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "DLSYS_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout.split()[-1]


class Repeatable(unittest.TestCase):
    def test_a_seed_gives_the_same_bits_and_another_one_others(self) -> None:
        for ctx in each_context():
            with self.subTest(ctx=ctx):
                first = trained(ctx)
                self.assertEqual(trained(ctx), first)
                self.assertNotEqual(trained(ctx, seed=8), first)

    @slow
    @require(cpu(0))
    def test_any_number_of_threads_gives_the_same_bits(self) -> None:
        self.assertEqual({trained_with(threads) for threads in (1, 2, 5)}, {trained(cpu(0))})


@require(gpu(0))
@unittest.skipUnless(torch and torch.cuda.is_available(), "not here: PyTorch with CUDA")
class BesidePyTorch(unittest.TestCase):
    """Several trainings of both in one process, at the same time."""

    def test_neither_disturbs_the_other(self) -> None:
        alone = trained(gpu(0), augmented=False), self.by_torch()
        found: dict[int, Any] = {}

        def work(k: int) -> None:
            found[k] = self.by_torch() if k % 2 else trained(gpu(0), augmented=False)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, {k: alone[k % 2] for k in range(4)})

    def by_torch(self) -> list[float]:
        """Losses of a training on a stream of its own."""
        with torch.cuda.stream(torch.cuda.Stream()):
            draws = torch.Generator().manual_seed(3)
            x = torch.randn((64, 20), generator=draws).cuda()
            weights = [torch.randn(shape, generator=draws).cuda() for shape in ((20, 50), (50, 4))]
            for w in weights:
                w.requires_grad_()
            losses = []
            for _ in range(60):
                loss = (torch.tanh(x @ weights[0]) @ weights[1]).square().mean()
                grads = torch.autograd.grad(loss, weights)
                with torch.no_grad():
                    for w, dw in zip(weights, grads):
                        w -= 0.01 * dw
                losses.append(loss.item())
        return losses

"""A network with convolutions trains alike by every rung of the ladder, on every device."""

from __future__ import annotations

import unittest
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.errors import DeviceError
from dlsys.rungs import CONV, rungs_among
from dlsys.runtime.device import Context, cpu, gpu, unavailable
from dlsys.runtime.library import load
from dlsys.settings import settings

STEPS = 6


def rungs_on(ctx: Context | None) -> list[str]:
    """Those that can be used for any convolution of 3 x 3."""
    if ctx is None:
        return [*CONV.numpy, *CONV.variants]
    names = load().algorithms(ctx.kernel_device, "conv2d")
    found = []
    for rung in rungs_among(names):
        try:
            load().algorithm_source(ctx.kernel_device, "conv2d", names.index(rung) + 1)
        except DeviceError:
            continue  # its library is not here
        found.append(rung)
    return [*(rung for rung in found if rung != "depthwise"), *CONV.variants]


def losses(ctx: Context | None, rung: str) -> list[float]:
    """Those of a small network's first steps."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((8, 2, 10, 10)).astype(np.float32)
    labels = np.arange(8) % 4
    x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
    layers = [nn.Conv2d(2, 6, 3, padding=1, rng=rng), nn.ReLU(), nn.Conv2d(6, 8, 3, rng=rng)]
    last = nn.Linear(512, 4, rng=rng)
    model = nn.Sequential(*layers, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), last)
    with mock.patch.object(settings, "conv", rung):
        loss = ad.softmax_cross_entropy(model(x), y)
        update = optim.SGD(0.05).minimize(loss, model.parameters())
        executor = ad.Executor([loss, update], ctx)
        feeds = {x: images, y: labels}
        return [float(executor.run(feeds, True)[0]) for _ in range(STEPS)]


def depthwise_losses(ctx: Context | None, rung: str) -> list[float]:
    """Those of a network whose one convolution has a channel a group."""
    rng = np.random.default_rng(1)
    images = rng.standard_normal((8, 4, 9, 8)).astype(np.float32)
    x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
    f = ad.Parameter(rng.standard_normal((4, 1, 3, 3)).astype(np.float32), "f")
    last = nn.Linear(4 * 9 * 8, 4, rng=rng)
    hidden = ad.relu_op(ad.conv2d(x, f, padding=1, groups=4, algo=rung))
    loss = ad.softmax_cross_entropy(nn.Sequential(nn.Flatten(), last)(hidden), y)
    update = optim.SGD(0.05).minimize(loss, [f, *last.parameters()])
    executor = ad.Executor([loss, update], ctx)
    feeds = {x: images, y: np.arange(8) % 4}
    return [float(executor.run(feeds, True)[0]) for _ in range(STEPS)]


class Rungs(unittest.TestCase):
    def test_every_rung_trains_alike(self) -> None:
        for ctx in (None, cpu(0), gpu(0)):
            if ctx is not None and unavailable(ctx):
                continue
            wanted = losses(ctx, "naive")
            self.assertLess(wanted[-1], 0.5 * wanted[0])
            for rung in ("auto", *rungs_on(ctx)):
                with self.subTest(ctx=ctx, rung=rung):
                    np.testing.assert_allclose(losses(ctx, rung), wanted, rtol=2e-4)

    def test_a_channel_a_group(self) -> None:
        wanted = depthwise_losses(None, "naive")
        self.assertLess(wanted[-1], 0.5 * wanted[0])
        for ctx in (cpu(0), gpu(0)):
            if unavailable(ctx):
                continue
            for rung in ("depthwise", "naive", "implicit", "auto"):
                with self.subTest(ctx=ctx, rung=rung):
                    np.testing.assert_allclose(depthwise_losses(ctx, rung), wanted, rtol=2e-4)


if __name__ == "__main__":
    unittest.main()

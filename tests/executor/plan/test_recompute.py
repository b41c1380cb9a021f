"""Recomputation within a byte budget: the same bits, less memory, errors that say how little."""

from __future__ import annotations

import itertools
import unittest
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.errors import GraphError, OutOfMemoryError
from dlsys.executor.recompute import byte_count
from dlsys.fusion import FUSIONS
from dlsys.ops.random.sampling import seed
from dlsys.runtime.device import cpu, gpu, unavailable
from dlsys.settings import settings

# Without that of small layers' products with the update of many weights, which reads activations of
# all of them at once.
KEPT = [one for one in FUSIONS if one.name != "weight_update"]
DEVICES = [ctx for ctx in (None, cpu(0), gpu(0)) if ctx is None or not unavailable(ctx)]


def deep_mlp() -> tuple[Any, Any, Any]:
    """Twenty layers of one width, of which each is a cut."""
    layers: list[Any] = []
    for k in range(20):
        layers += [nn.Linear(24, 24, rng=np.random.default_rng(k)), nn.Tanh()]
    model = nn.Sequential(
        *layers, nn.Dropout(0.3, rng=np.random.default_rng(1)), nn.Linear(24, 5, rng=9)
    )
    rng = np.random.default_rng(0)
    return model, rng.normal(size=(64, 24)).astype(np.float32), rng.integers(0, 5, 64)


def gpt() -> tuple[Any, Any, Any]:
    """Blocks with dropout in attention and on the residual stream."""
    model = nn.GPT(vocabulary=19, context=16, layers=4, heads=2, features=32, dropout=0.2, seed=0)
    tokens = np.random.default_rng(0).integers(0, 19, (4, 17))
    return model, tokens[:, :-1], tokens[:, 1:]


def conv_net() -> tuple[Any, Any, Any]:
    """Batch normalization, whose statistics advance once a step, and dropout."""
    layers: list[Any] = []
    for k in range(6):
        conv = nn.Conv2d(2 if k == 0 else 8, 8, 3, padding=1, rng=np.random.default_rng(k))
        layers += [conv, nn.BatchNorm2d(8), nn.ReLU()]
    drop = nn.Dropout(0.3, rng=np.random.default_rng(9))
    model = nn.Sequential(*layers, drop, nn.Flatten(), nn.Linear(8 * 64, 4, rng=9))
    rng = np.random.default_rng(0)
    return model, rng.normal(size=(6, 2, 8, 8)).astype(np.float32), rng.integers(0, 4, 6)


def trained(make: Any, ctx: Any, memory: Any, gradients: bool = False) -> tuple[list, Any]:
    """The losses of three steps and the state after them, or the loss and all gradients; and the
    executor.
    """
    seed(0)
    model, inputs, labels = make()
    if ctx is not None:
        model.to(ctx)
    x, y = ad.Variable("x", inputs.shape, inputs.dtype), ad.Variable("y", labels.shape, np.int64)
    with model.in_mode(training=True):
        loss = F.cross_entropy(model(x), y)
    parameters = model.parameters()
    options: dict[str, Any] = dict(ctx=ctx, memory=memory, fusions=KEPT)
    if gradients:
        step = ad.Executor([loss, *ad.gradients(loss, parameters)], **options)
        return step.run({x: inputs, y: labels}, convert_to_numpy_ret_vals=True), step
    train = optim.Adam(0.01).minimize(loss, parameters)
    step = ad.Executor([loss, train], **options)
    losses = [step.run({x: inputs, y: labels}, convert_to_numpy_ret_vals=True)[0] for _ in range(3)]
    return losses + [value for _, value in sorted(model.state_dict().items())], step


class Recompute(unittest.TestCase):
    def check(self, make: Any, share: float) -> None:
        """Equal bits within a share of the arena that is taken without a budget, and no plan within
        a hundredth.
        """
        for ctx, gradients in itertools.product(DEVICES, (False, True)):
            # One stream: for several, such small buffers live longer than they are needed.
            streams = mock.patch.object(settings, "streams", 1)
            with self.subTest(ctx=ctx, gradients=gradients), streams:
                wanted, free = trained(make, ctx, None, gradients)
                whole = free.report().plans[0].arena_nbytes
                got, bound = trained(make, ctx, int(whole * share), gradients)
                report = bound.report().plans[0]
                self.assertLessEqual(report.arena_nbytes, whole * share)
                self.assertGreater(report.recomputed.steps, 0)
                self.assertIn("steps run again in backward", str(bound.report()))
                for k, (a, b) in enumerate(zip(wanted, got, strict=True)):
                    np.testing.assert_array_equal(a, b, err_msg=str(k))
                with self.assertRaisesRegex(OutOfMemoryError, "without recomputation and at least"):
                    trained(make, ctx, whole // 100, gradients)

    def test_a_deep_mlp(self) -> None:
        self.check(deep_mlp, 0.7)

    def test_a_gpt(self) -> None:
        self.check(gpt, 0.8)

    def test_a_convolutional_network(self) -> None:
        self.check(conv_net, 0.9)  # the least on a CPU is 0.84: scratch of convolutions

    def test_the_least_of_the_error_is_enough(self) -> None:
        with self.assertRaises(OutOfMemoryError) as refused:
            trained(deep_mlp, None, 1000)
        least = int(str(refused.exception).split("at least ")[1].split()[0].replace(",", ""))
        _, step = trained(deep_mlp, None, least)
        self.assertEqual(step.report().plans[0].arena_nbytes, least)

    def test_less_memory_takes_more_operations(self) -> None:
        _, free = trained(gpt, None, None)
        whole = free.report().plans[0].arena_nbytes
        flops = [0]
        for share in (0.95, 0.85, 0.75):
            _, bound = trained(gpt, None, int(whole * share))
            flops.append(bound.report().plans[0].recomputed.flops)
        self.assertEqual(flops, sorted(flops))
        self.assertLess(flops[1], flops[-1])

    def test_where_everything_fits_nothing_runs_twice(self) -> None:
        _, step = trained(deep_mlp, None, "1 GiB")
        self.assertIsNone(step.report().plans[0].recomputed)

    def test_numbers_of_bytes(self) -> None:
        for text, wanted in (("12 GiB", 12 << 30), ("1.5KiB", 1536), ("2 MB", 2_000_000), (77, 77)):
            self.assertEqual(byte_count(text), wanted)
        for wrong in ("12 gigs", -1, 0, "", True, "1e9"):
            with self.assertRaisesRegex(GraphError, 'a text such as "12 GiB"'):
                byte_count(wrong)


if __name__ == "__main__":
    unittest.main()

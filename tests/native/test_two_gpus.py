"""Two GPUs of one process: each works as if alone, and arrays pass from one to the other."""

from __future__ import annotations

import ctypes
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import gpu_op, ndarray, nn, optim
from dlsys.data import Dataset, DeviceLoader
from dlsys.errors import GraphError, ShapeError
from dlsys.executor.tune import autotune as tune
from dlsys.runtime.device import Context, gpu, memory_stats
from dlsys.settings import settings
from support.devices import EMULATED, not_emulated, slow, two_gpus

BOTH = (gpu(0), gpu(1))
BATCH = 8 if EMULATED else 24


def pictures(count: int = 72) -> Dataset:
    """Random images of one plane of 12 x 12, in ten classes."""
    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (count, 1, 12, 12), dtype=np.uint8)
    return Dataset(images, rng.integers(0, 10, count))


def network() -> nn.Module:
    """Convolution, batch norm, pooling and products, always with the same weights."""
    rng = np.random.default_rng(5)
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1, rng=rng),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(180, 70, rng=rng),
        nn.ReLU(),
        nn.Linear(70, 10, rng=rng),
    )


class Training:
    """Steps on batches drawn from data on a GPU."""

    def __init__(self, ctx: Context, precision: str) -> None:
        model = network()
        loader = DeviceLoader(pictures(), BATCH, shuffle=True, normalize=(0.5, 0.3))
        images, labels = loader.inputs()
        loss = ad.softmax_cross_entropy(model(images), labels)
        update = optim.SGD(0.05, momentum=0.9).minimize(loss, model.parameters())
        self.executor = ad.Executor([loss, update], ctx=ctx, precision=precision)
        self.state = [parameter for _, parameter in model.named_state()]
        self.losses: list[Any] = []

    def go(self) -> None:
        """Four single runs and five in a queue."""
        self.losses += [self.executor.run()[0] for _ in range(4)]
        self.losses.append(self.executor.run_many(5)[0])

    def values(self) -> list[np.ndarray]:
        """The losses, then all parameters and running numbers."""
        return [loss.asnumpy() for loss in self.losses] + [p.asnumpy() for p in self.state]


@two_gpus
class TwoGpus(unittest.TestCase):
    def assert_same(self, found: Training, wanted: Training) -> None:
        for one, other in zip(found.values(), wanted.values(), strict=True):
            np.testing.assert_array_equal(one, other)

    @slow
    def test_by_turns(self) -> None:
        for precision in ("fp32", "tf32"):
            with self.subTest(precision):
                alone = Training(gpu(0), precision)
                alone.go()
                alone.go()
                pair = [Training(ctx, precision) for ctx in BOTH]
                for _ in range(2):
                    for each in pair:
                        each.go()
                for each in pair:
                    self.assert_same(each, alone)
                    (plan,) = each.executor.report().plans
                    self.assertEqual({segment.kind for segment in plan.segments}, {"captured"})

    def test_at_once(self) -> None:
        alone = Training(gpu(0), "fp32")
        several = [Training(BOTH[k % 2], "fp32") for k in range(4)]
        threads = [threading.Thread(target=each.go) for each in several]
        for thread in threads:
            thread.start()
        alone.go()
        for thread in threads:
            thread.join()
        for each in several:
            self.assert_same(each, alone)

    def test_arrays_pass_between_them(self) -> None:
        for shape in ((7,), (300, 1000)):
            x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
            for here, there in (BOTH, BOTH[::-1]):
                source = ndarray.array(x, here)
                copy, cast = ndarray.empty(shape, there), ndarray.empty(shape, there, np.float64)
                source.copyto(copy)
                source.copyto(cast)
                np.testing.assert_array_equal(copy.asnumpy(), x)
                np.testing.assert_array_equal(cast.asnumpy(), x)

    def test_what_the_other_computed_is_fed(self) -> None:
        x = ad.Variable("x")
        twice, once = (ad.Executor([x * 2.0 + 1.0], ctx=ctx) for ctx in BOTH)
        for k in range(5):
            value = np.full((40, 50), k, np.float32)
            (first,) = twice.run({x: value})
            (second,) = once.run({x: first})
            (third,) = twice.run({x: second})
            self.assertEqual((second.ctx, third.ctx), BOTH[::-1])
            np.testing.assert_array_equal(third.asnumpy(), value * 8 + 7)

    def test_a_parameter_moves(self) -> None:
        p, x = ad.Parameter(np.arange(6, dtype=np.float32), "p"), ad.Variable("x")
        first, second = (ad.Executor([x + p], ctx=ctx) for ctx in BOTH)
        feeds = {x: np.ones(6, np.float32)}
        first.run(feeds)
        with self.assertRaisesRegex(GraphError, r"p .*gpu\(0\).*gpu\(1\)"):
            second.run(feeds)
        p.to(gpu(1))
        np.testing.assert_array_equal(second.run(feeds)[0].asnumpy(), np.arange(6) + 1)

    def test_a_kernel_takes_arrays_of_one(self) -> None:
        a, b = (ndarray.array(np.ones((2, 2), np.float32), ctx) for ctx in BOTH)
        with self.assertRaisesRegex(ShapeError, r"on two devices: gpu\(0\) and gpu\(1\)"):
            gpu_op.matrix_elementwise_add(a, b, a)

    def test_memory_is_counted_apart(self) -> None:
        before = [memory_stats(ctx).in_use_nbytes for ctx in BOTH]
        array = ndarray.empty((1 << 20,), gpu(1))
        after = [memory_stats(ctx).in_use_nbytes for ctx in BOTH]
        self.assertEqual([b - a for a, b in zip(before, after)], [0, array.nbytes])

    def test_choices_are_measured_there(self) -> None:
        a, b = np.random.default_rng(1).integers(-3, 4, (2, 96, 96)).astype(np.float32)
        x, y = ad.Variable("x"), ad.Variable("y")
        with tempfile.TemporaryDirectory() as folder:
            cache = str(Path(folder) / "tuning.json")
            patches = mock.patch.multiple(settings, tune="full", tune_cache=cache)
            with patches, mock.patch.object(tune, "_measured", wraps=tune._measured) as measured:
                executor = ad.Executor([ad.matmul_op(x, y)], ctx=gpu(1))
                for _ in range(3):
                    (product,) = executor.run({x: a, y: b})
                self.assertEqual(measured.call_args.args[1], gpu(1))
        np.testing.assert_array_equal(product.asnumpy(), a @ b)

    @not_emulated
    def test_the_current_gpu_is_as_it_was(self) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        found: list[int] = []

        def work() -> None:
            context, device = ctypes.c_void_p(), ctypes.c_int(-1)
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
            driver.cuCtxSetCurrent(context)
            training = Training(gpu(1), "tf32")
            training.go()
            training.values()
            driver.cuCtxGetDevice(ctypes.byref(device))
            driver.cuDevicePrimaryCtxRelease(0)
            found.append(device.value)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self.assertEqual(found, [0])

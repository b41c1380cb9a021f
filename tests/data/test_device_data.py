"""Data on the device: orders that are permutations, equal bits everywhere, and DeviceLoader."""

from __future__ import annotations

import math
import unittest
from collections import Counter

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray, optim
from dlsys.data import Dataset, DeviceLoader, Loader, Normalization
from dlsys.errors import DataError, OutOfRangeError
from dlsys.ops.random.device_batch import epoch_order, ordered
from support.devices import require

COUNTS = (1, 2, 7, 937, 50_000)


def pictures(n: int, shape: tuple[int, ...] = (3, 6, 4)) -> Dataset:
    rng = np.random.default_rng(n)
    return Dataset(rng.integers(0, 256, (n, *shape)).astype(np.uint8), np.arange(n))


def chi_square(counts: np.ndarray) -> float:
    """Standard deviations from what equal chances would give."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


class TestOrders(unittest.TestCase):
    def test_every_sample_once_an_epoch(self):
        for count in (*COUNTS, 63, 64, 65, 100, 1024):
            for seed, epoch in ((0, 0), (1, 5), (2**63, 2**33)):
                order = epoch_order(count, seed, epoch)
                self.assertEqual(order.dtype, np.int64)
                np.testing.assert_array_equal(np.sort(order), np.arange(count))

    def test_seeds_and_epochs_have_orders_of_their_own(self):
        keys = [(0, 0), (0, 1), (0, 2), (1, 0), (2**32, 0), (0, 2**32)]
        orders = [epoch_order(937, seed, epoch) for seed, epoch in keys]
        for k, one in enumerate(orders):
            for other in orders[:k]:
                self.assertLess((one == other).sum(), 12)  # one is expected

    def test_all_orders_of_few_samples_are_equally_likely(self):
        epochs = 24_000
        for count in (2, 3, 4):
            stream = ordered(np.arange(epochs * count, dtype=np.uint64), count, 9)
            seen = Counter(map(tuple, stream.reshape(epochs, count)))
            self.assertEqual(len(seen), math.factorial(count))
            self.assertLess(abs(chi_square(np.array(list(seen.values())))), 5)

    def test_an_order_looks_drawn(self):
        """Each place has each sample as often; neighbors are at all distances; also a row of the
        square apart, where a network with too few rounds shows.
        """
        for count, epochs in ((37, 8000), (100, 8000)):
            stream = ordered(np.arange(epochs * count, dtype=np.uint64), count, 3)
            orders = stream.reshape(epochs, count)
            for place in (0, 1, count // 2, count - 1):
                counts = np.bincount(orders[:, place], minlength=count)
                self.assertLess(abs(chi_square(counts)), 5)
            for apart in (1, 2, math.isqrt(count - 1) + 1, count - 1):
                steps = (orders[:, apart] - orders[:, 0]) % count
                counts = np.bincount(steps, minlength=count)
                self.assertEqual(counts[0], 0)
                self.assertLess(abs(chi_square(counts[1:])), 5)

    def test_a_large_order_has_no_trend(self):
        order = epoch_order(50_000, 1, 0).astype(np.float64)
        for a, b in (
            (order, np.arange(50_000)),
            (order[1:], order[:-1]),
            (order[224:], order[:-224]),
        ):
            self.assertLess(abs(np.corrcoef(a, b)[0, 1]), 5 / 50_000**0.5)
        fixed = (order == np.arange(50_000)).sum()
        self.assertLess(fixed, 8)  # one is expected


class OnDevice:
    """The tests of every device, `ctx`."""

    ctx = None

    def test_the_stream_has_the_bits_of_numpy(self):
        for count in COUNTS:
            for size in (1, 33, 1000):
                step = ad.Parameter(np.int64(0), "step", trainable=False)
                executor = ad.Executor([
                    ad.shuffled_index_op(step, count=count, batch=size, seed=7),
                    ad.shuffled_index_op(step, count=count, batch=size, shuffle=False),
                ], self.ctx)  # fmt: skip
                for at in (0, 1, 57, 2**35):
                    step.set(np.int64(at))
                    made, plain = executor.run({}, True)
                    positions = np.arange(size, dtype=np.uint64) + np.uint64(at * size)
                    np.testing.assert_array_equal(made, ordered(positions, count, 7))
                    np.testing.assert_array_equal(plain, positions % np.uint64(count))

    def test_an_epoch_in_batches_has_every_sample_once(self):
        step = ad.Parameter(np.int64(0), "step", trainable=False)
        index = ad.shuffled_index_op(step, count=937, batch=100, seed=1)
        executor = ad.Executor([index], self.ctx)
        stream = []
        for at in range(19):  # two epochs and a bit
            step.set(np.int64(at))
            stream.append(executor.run({}, True)[0])
        whole = np.concatenate(stream)
        for epoch in (whole[:937], whole[937 : 2 * 937]):
            np.testing.assert_array_equal(np.sort(epoch), np.arange(937))
        self.assertFalse(np.array_equal(whole[:937], whole[937 : 2 * 937]))

    def test_batches_have_the_bits_of_numpy_and_of_the_host(self):
        rng = np.random.default_rng(5)
        floats = Dataset(rng.normal(size=(50, 3, 5, 3)).astype(np.float32), np.arange(50))
        weights = rng.uniform(size=(40, 3)).astype(np.float32)
        odd = Dataset(rng.integers(0, 256, (40, 7)).astype(np.uint8), weights)
        for dataset in (pictures(100), pictures(60, (784,)), floats, odd):
            loader = DeviceLoader(
                dataset, 20, shuffle=True, seed=4, normalize=Normalization.of(dataset)
            )
            executor = ad.Executor([*loader.inputs(), loader.advance], self.ctx)
            host = Loader(
                dataset, 20, shuffle=True, seed=4, normalize=loader.normalization, drop_last=True
            )
            for number in (0, 3) if len(dataset) % 20 == 0 else (0,):
                made = [executor.run(feed, True)[:2] for feed in loader.epoch(number)]
                for source in (loader, host):
                    for batch, wanted in zip(made, source.batches(number), strict=True):
                        for array, other in zip(batch, wanted):
                            self.assertEqual(array.dtype, other.dtype)
                            self.assertEqual(array.tobytes(), other.tobytes())

    def test_take_batch_takes_any_samples(self):
        samples = np.random.default_rng(6).integers(0, 256, (30, 5, 4)).astype(np.uint8)
        index = ad.Variable("index", dtype=np.int64)
        node = ad.take_batch_op(
            ad.constant(samples), index, ad.constant(np.float32(0.5)), ad.constant(np.float32(-1))
        )
        executor = ad.Executor([node], self.ctx)
        chosen = np.array([[29, 0], [3, 3]])
        made = executor.run({index: chosen}, True)[0]
        np.testing.assert_array_equal(made, samples[chosen] * np.float32(0.5) - 1)
        for wrong in (30, -1):
            with self.assertRaisesRegex(
                OutOfRangeError, f"index {wrong} at position 1 is out of range"
            ):
                executor.run({index: np.array([2, wrong])}, True)

    def test_training_advances_and_evaluation_does_not(self):
        loader = DeviceLoader(pictures(30, (4,)), 10, shuffle=True)
        images, labels = loader.inputs()
        w = ad.Parameter(np.zeros((4, 30), np.float32), "w")
        loss = ad.softmax_cross_entropy(ad.matmul_op(images, w), labels)
        train = ad.Executor([labels, optim.SGD(0.0).minimize(loss, [w])], self.ctx)
        look = ad.Executor([labels], self.ctx)
        walk = ad.Executor([labels, loader.advance], self.ctx)
        stream = np.concatenate([b.labels for number in (0, 1) for b in loader.batches(number)])
        for k in range(6):
            for _ in range(2):
                np.testing.assert_array_equal(look.run({}, True)[0], stream[10 * k : 10 * k + 10])
            executor = train if k % 2 else walk
            np.testing.assert_array_equal(executor.run({}, True)[0], stream[10 * k : 10 * k + 10])
        self.assertEqual(dict(loader.named_state())["step"].asnumpy(), 6)

    def test_a_step_takes_its_batch_with_one_kernel_and_advances_with_another(self):
        kernels = []
        for loader in (DeviceLoader(pictures(64, (8,)), 16), Loader(pictures(64, (8,)), 16)):
            w = ad.Parameter(np.zeros((8, 64), np.float32), "w")
            images, labels = loader.inputs()
            loss = ad.softmax_cross_entropy(ad.matmul_op(images, w), labels)
            executor = ad.Executor([optim.SGD(0.1).minimize(loss, [w])], self.ctx)
            fed = {images: (16, 8), labels: (16,)} if isinstance(loader, Loader) else {}
            steps = executor.plan(fed).steps
            kernels.append(Counter(step.node.op.kernel for step in steps))
        more = kernels[0] - kernels[1]
        self.assertEqual(more.pop("shuffled_batch"), 1)
        self.assertLessEqual(more, Counter(["advance_step"]))  # or with the optimizer's own
        self.assertFalse(kernels[1] - kernels[0])

    def test_training_is_that_of_fed_batches(self):
        dataset = pictures(96, (8,))
        settings = dict(shuffle=True, seed=2, normalize=(0.5, 0.25))
        resident, fed = DeviceLoader(dataset, 24, **settings), Loader(dataset, 24, **settings)
        found = []
        for loader in (resident, fed):
            w = ad.Parameter(np.zeros((8, 96), np.float32), "w")
            images, labels = loader.inputs()
            loss = ad.softmax_cross_entropy(ad.matmul_op(images, w), labels)
            step = ad.Executor([optim.SGD(0.1).minimize(loss, [w])], self.ctx)
            for number in range(3):
                for feeds in loader.epoch(number):
                    step.run(feeds)
            found.append(w.asnumpy())
        self.assertTrue(found[0].any())
        self.assertEqual(found[0].tobytes(), found[1].tobytes())

    def test_a_start_in_the_middle(self):
        loader = DeviceLoader(pictures(50), 8, shuffle=True, seed=1)
        executor = ad.Executor([loader.inputs()[1], loader.advance], self.ctx)
        whole = [executor.run(f, True)[0] for n in range(3) for f in loader.epoch(n)]
        self.assertEqual(len(whole), 3 * len(loader))
        rest = [executor.run(f, True)[0] for f in loader.epoch(1, start=4)]
        np.testing.assert_array_equal(rest, whole[10:12])
        loader.seek(7)
        np.testing.assert_array_equal(executor.run({}, True)[0], whole[7])
        fresh = DeviceLoader(pictures(50), 8, shuffle=True, seed=1)
        dict(fresh.named_state())["step"].set(loader.step.asnumpy())
        again = ad.Executor([fresh.inputs()[1]], self.ctx)
        np.testing.assert_array_equal(again.run({}, True)[0], whole[8])

    def test_what_does_not_fill_a_batch_opens_the_next_epoch(self):
        loader = DeviceLoader(pictures(50), 8, shuffle=True)
        self.assertEqual((len(loader), loader.samples), (6, 48))
        executor = ad.Executor([loader.inputs()[1], loader.advance], self.ctx)
        stream = np.concatenate([executor.run({}, True)[0] for _ in range(25)])
        for first in range(0, 200, 50):
            np.testing.assert_array_equal(np.sort(stream[first : first + 50]), np.arange(50))
        small = DeviceLoader(pictures(3), 8)
        self.assertEqual((len(small), small.samples), (1, 8))
        labels = ad.Executor([small.inputs()[1]], self.ctx).run({}, True)[0]
        np.testing.assert_array_equal(labels, [0, 1, 2, 0, 1, 2, 0, 1])


class NumpyDeviceData(OnDevice, unittest.TestCase):
    def test_refusals(self):
        with self.assertRaisesRegex(DataError, "batch_size >= 1, got 0"):
            DeviceLoader(pictures(3), 0)
        with self.assertRaisesRegex(DataError, "do not fit images of"):
            DeviceLoader(pictures(3), 1, normalize=((0.0,) * 5, (1.0,) * 5))


@require(ndarray.cpu(0))
class CpuDeviceData(OnDevice, unittest.TestCase):
    ctx = ndarray.cpu(0)


@require(ndarray.gpu(0))
class GpuDeviceData(OnDevice, unittest.TestCase):
    ctx = ndarray.gpu(0)

"""Batches of the host, copied to a GPU ahead of their steps on a stream of their own."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim, train
from dlsys.data import Loader
from dlsys.data.prefetch import on_device
from dlsys.ndarray import NDArray, gpu
from dlsys.runtime.device import SideStream, memory_stats, stream
from support.devices import require


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("dlsys.data")}


@require(gpu(0))
class GpuAhead(unittest.TestCase):
    def setUp(self) -> None:
        rng = np.random.default_rng(3)
        self.images = rng.random((50, 12), np.float32)
        self.labels = rng.integers(0, 4, 50)
        self.before = threads()

    def loader(self, **options: Any) -> Loader:
        return Loader((self.images, self.labels), 8, **options)

    def test_each_batch_is_there_in_turn(self) -> None:
        loader = self.loader(shuffle=True)
        wanted = list(loader.epoch(1))
        for feed, host in zip(on_device(loader.epoch(1), gpu(0)), wanted, strict=True):
            for node, value in host.items():
                self.assertIsInstance(feed[node], NDArray)
                self.assertNotEqual(feed[node].block.home, stream(gpu(0)))
                np.testing.assert_array_equal(feed[node].asnumpy(), value)
        self.assertEqual(threads(), self.before)

    def test_batches_take_turns_between_streams(self) -> None:
        homes = []
        for feed in on_device(self.loader().epoch(0), gpu(0)):
            images, labels = feed.values()
            self.assertEqual(images.block.home, labels.block.home)
            homes.append(images.block.home)
        turns = len(set(homes))
        self.assertGreater(turns, 2)
        for k in range(len(homes) - turns + 1):
            self.assertEqual(len(set(homes[k : k + turns])), turns)

    def test_memory_is_taken_once(self) -> None:
        x = ad.Variable("x", dtype=np.float32)
        for epoch in range(6):
            for feed in on_device(({x: self.images} for _ in range(40)), gpu(0)):
                feed[x].block.use(stream(gpu(0)))
            del feed
            if epoch == 0:
                before = memory_stats(gpu(0)).device_allocations
        self.assertEqual(memory_stats(gpu(0)).device_allocations, before)

    def test_large_batches_that_several_threads_copy(self) -> None:
        x = ad.Variable("x", dtype=np.int32)
        sizes = [40 * 2**20 // 4 + 1, 3, 2**19 // 4, 5 * 2**20 // 4]  # of numbers: pieces, slots
        wanted = [np.arange(k, k + size, dtype=np.int32) for k, size in enumerate(sizes * 2)]
        feeds = ({x: values} for values in wanted)
        for feed, values in zip(on_device(feeds, gpu(0)), wanted, strict=True):
            np.testing.assert_array_equal(feed[x].asnumpy(), values)

    def test_work_beside_goes_to_a_stream_of_its_own(self) -> None:
        own, side = stream(gpu(0)), SideStream(gpu(0))
        with side:
            self.assertNotEqual(stream(gpu(0)), own)
            with SideStream(gpu(0)):
                inner = stream(gpu(0))
            self.assertNotIn(inner, (own, stream(gpu(0))))
        self.assertEqual(stream(gpu(0)), own)

    def test_what_is_left_early_ends_its_thread(self) -> None:
        feeds = on_device(self.loader().epoch(0), gpu(0))
        next(feeds)
        self.assertGreater(len(threads()), len(self.before))
        feeds.close()
        self.assertEqual(threads(), self.before)

    def test_an_error_comes_where_its_batch_would(self) -> None:
        def broken() -> Iterator[dict]:
            yield {}
            yield {}
            raise OSError("the disk is gone")

        feeds = on_device(broken(), gpu(0))
        self.assertEqual([next(feeds), next(feeds)], [{}, {}])
        with self.assertRaisesRegex(OSError, "the disk is gone"):
            next(feeds)
        self.assertEqual(threads(), self.before)

    def test_training_has_the_bits_of_feeds_from_the_host(self) -> None:
        ends, copied = [], []

        def watched(feeds: Any, ctx: Any) -> Any:
            copied.append(ctx)
            return on_device(feeds, ctx)

        for way in (watched, lambda feeds, ctx: feeds):
            loader, model = self.loader(shuffle=True, workers=2), nn.MLP([12, 16, 4], seed=1)
            with mock.patch("dlsys.train.evaluation.on_device", way):
                train.fit(
                    model, loader, optim.SGD(0.1, momentum=0.9), epochs=4, ctx=gpu(0), quiet=True
                )
            ends.append(model.state_dict())
        self.assertEqual(copied, [gpu(0)] * 4)
        for name, value in ends[0].items():
            np.testing.assert_array_equal(value, ends[1][name], name)

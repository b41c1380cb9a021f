"""Kernels of the CPU that find no working memory: the run has not happened, and says why.

What kernels once needed they keep, so that these tests need a process in which nothing ran before.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import dlsys
from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.errors import OutOfMemoryError
from dlsys.graph.node import Node
from dlsys.ndarray import cpu
from dlsys.profile import Profile
from dlsys.runtime.library import load
from dlsys.settings import settings
from support.devices import require


def held() -> int:
    """The bytes of working memory that all threads have."""
    count = ctypes.c_int64()
    load().check(load().cdll.DLCpuGetScratch(ctypes.byref(count)))
    return count.value


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """No more working memory than that."""
    load().check(load().cdll.DLCpuSetScratchLimit(nbytes))
    try:
        yield
    finally:
        load().check(load().cdll.DLCpuSetScratchLimit(-1))


@contextmanager
def threads(count: int) -> Iterator[None]:
    load().check(load().cdll.DLCpuSetThreads(count))
    try:
        yield
    finally:
        load().check(load().cdll.DLCpuSetThreads(settings.threads))


class Network:
    """A convolutional network with batch norm and its training step; each one is larger than all
    before, so that it needs more working memory.
    """

    size = 12

    def __init__(self, width: int = 8) -> None:
        Network.size += 2
        side, rng = Network.size, np.random.default_rng(0)
        model = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, rng=rng), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Dropout(0.2, rng=rng), nn.Conv2d(width, 8, 5, padding=2, rng=rng),
            nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(2 * side * side, 10, rng=rng),
        )  # fmt: skip
        self.x, self.y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
        self.optimizer = optim.Adam(0.01)
        loss = ad.softmax_cross_entropy(model(self.x), self.y)
        train = self.optimizer.minimize(loss, model.parameters())
        self.states = [state for _, state in model.named_state()]
        self.states += [state for _, state in self.optimizer.named_state()]
        self.executor = ad.Executor([loss, train], cpu(0))
        images = np.random.default_rng(1).normal(size=(8, 3, side, side)).astype(np.float32)
        self.feeds: dict[Node, Any] = {self.x: images, self.y: np.arange(8)}

    def values(self) -> list[bytes]:
        """The bits of all that a run may change; a rate is a float64 until it is on a device."""
        arrays = [state.asnumpy() for state in self.states]
        return [x.astype(np.float32 if x.dtype.kind == "f" else x.dtype).tobytes() for x in arrays]


class Cases:
    def check_refused_while_little_is_left(self, network: Network) -> int:
        """Gives a run ever more working memory until it fits; returns how often it did not."""
        refused, left, before = 0, 0, network.values()
        while True:
            try:
                with limited(held() + left):
                    network.executor.run(network.feeds)
            except OutOfMemoryError as error:
                self.assertRegex(str(error), r"out of memory on cpu\(0\): requested \d+ bytes for")
                self.assertEqual(network.values(), before)
                refused, left = refused + 1, left + 4096
            else:
                self.assertNotEqual(network.values(), before)
                return refused

    def test_a_first_run_that_fails_changes_nothing(self) -> None:
        network, other = Network(), Network(width=24)
        for watched in (network, other):
            if watched is other:
                watched.executor.recorder = Profile()
            self.assertGreater(self.check_refused_while_little_is_left(watched), 3)
        Network.size = 12
        with threads(1):  # the numbers are those of a run that nothing befell
            self.assertEqual(self.after_one_run(Network()), network.values())

    def after_one_run(self, network: Network) -> list[bytes]:
        network.executor.run(network.feeds)
        return network.values()

    def test_a_later_run_fails_before_its_first_step_or_not_at_all(self) -> None:
        for count in (1, 2, 4):
            with self.subTest(threads=count), threads(count):
                network = Network()
                network.executor.run(network.feeds)
                self.check_refused_while_little_is_left(network)
                before = held()
                with limited(before):
                    for _ in range(20):
                        network.executor.run(network.feeds)
                self.assertEqual(held(), before)

    def test_workers_that_join_in_late_find_their_memory(self) -> None:
        with threads(48):  # some of which come to no task of the first run
            network = Network(width=12)
            network.executor.run(network.feeds)
            first = held()
            network.executor.run(network.feeds)
            self.assertGreater(held(), first)
            with limited(held()):
                for _ in range(30):
                    network.executor.run(network.feeds)

    def test_more_threads_have_what_one_has_needed(self) -> None:
        network = Network()
        with threads(1):
            for _ in range(2):
                network.executor.run(network.feeds)
        before = held()
        with self.assertRaises(OutOfMemoryError), limited(before):
            with threads(64):
                pass
        with threads(3), limited(held()):
            network.executor.run(network.feeds)

    def test_a_step_that_is_refused_leaves_other_programs_running(self) -> None:
        small, large = Network(), Network(width=40)
        for _ in range(2):
            small.executor.run(small.feeds)
        with limited(held()):
            for _ in range(2):
                with self.assertRaises(OutOfMemoryError):
                    large.executor.run(large.feeds)
                small.executor.run(small.feeds)

    def test_one_kernel(self) -> None:
        side = 700
        x = np.ones((side, side), np.float32)
        a = ad.Variable("a")
        with limited(held()), self.assertRaisesRegex(OutOfMemoryError, "node: matmul"):
            ad.Executor([ad.matmul_op(a, a)], cpu(0)).run({a: x})


def in_a_process_of_its_own(name: str) -> Callable[[unittest.TestCase], None]:
    def test(self: unittest.TestCase) -> None:
        paths = [str(Path(dlsys.__file__).parents[1]), str(Path(__file__).parents[1])]
        done = subprocess.run(
            [sys.executable, __file__, f"CpuMemory.{name}"],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Ran 1 test", done.stderr)

    return test


@require(cpu(0))
class CpuMemory(unittest.TestCase):
    """Each of the cases."""


for name in [name for name in vars(Cases) if name.startswith("test_")]:
    setattr(CpuMemory, name, in_a_process_of_its_own(name))

if __name__ == "__main__":
    CpuMemory = type("CpuMemory", (Cases, unittest.TestCase), {})  # type: ignore[misc]
    unittest.main()

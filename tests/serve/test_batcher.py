"""The dynamic batcher: who waits together runs together, and everybody gets the own answer."""

from __future__ import annotations

import asyncio
import threading
import time
import unittest
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from dlsys.errors import DlsysError
from dlsys.serve.faults import OverloadedError
from dlsys.serve.metrics import Counts
from dlsys.serve.models.batcher import HANDOVER, Batcher


class Slow:
    """A run that doubles its input, notes its batches, and waits for `go` where it has to."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.batches: list[int] = []
        self.threads: set[int] = set()
        self.seconds = seconds
        self.go = threading.Event()
        self.go.set()

    def __call__(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        self.go.wait(10)
        self.batches.append(len(inputs[0]))
        self.threads.add(threading.get_ident())
        time.sleep(self.seconds)
        if (inputs[0] < 0).any():
            raise DlsysError("negative")
        return [2 * inputs[0]]


def batcher(run: Any, largest: int = 8, waiting: int = 10_000, **options: Any) -> Batcher:
    return Batcher(run, largest, waiting, Counts(), **options)


def in_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(_awaited(work), 30))


async def _awaited(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


async def ask(queue: Batcher, values: np.ndarray) -> np.ndarray:
    return (await queue.submit([values]).future)[0]


class Answers(unittest.TestCase):
    def check(self, run: Slow, largest: int, **options: Any) -> None:
        """1,000 requests of 1 to 3 samples, 100 clients at once, each with numbers of its own."""

        async def client(queue: Batcher, k: int) -> None:
            rng = np.random.default_rng(k)
            for turn in range(10):
                size = int(rng.integers(1, 4))
                values = np.full((size, 2), 1000 * k + turn, np.int64) + np.arange(size)[:, None]
                np.testing.assert_array_equal(await ask(queue, values), 2 * values)
                if rng.random() < 0.3:
                    await asyncio.sleep(0)

        async def work() -> None:
            queue = batcher(run, largest, **options)
            await asyncio.gather(*(client(queue, k) for k in range(100)))
            await queue.close()

        in_loop(work)

    def test_everybody_gets_the_own_one(self) -> None:
        for seconds in (0.0, 1.5 * HANDOVER):
            run = Slow(seconds)
            self.check(run, 64)
            self.assertLess(len(run.batches), 500)
            self.assertLessEqual(max(run.batches), 64)

    def test_without_batching(self) -> None:
        run = Slow()
        self.check(run, 1)
        self.assertEqual(len(run.batches), 1000)

    def test_a_quick_run_is_on_the_loop_and_a_slow_one_in_a_thread(self) -> None:
        quick, slow, bound = Slow(), Slow(2 * HANDOVER), Slow()
        self.check(quick, 8)
        self.check(slow, 64)
        self.check(bound, 64, threads=True)
        here = threading.get_ident()
        self.assertIn(here, quick.threads)
        self.assertNotIn(here, slow.threads | bound.threads)
        self.assertEqual(len(bound.threads), 1)


class Batches(unittest.TestCase):
    def test_those_that_wait_run_together(self) -> None:
        run = Slow()

        async def work() -> None:
            queue = batcher(run, threads=True)
            run.go.clear()
            first = asyncio.ensure_future(ask(queue, np.ones((1, 2))))
            await asyncio.sleep(0.05)  # it runs
            others = [asyncio.ensure_future(ask(queue, np.ones((2, 2)))) for _ in range(5)]
            await asyncio.sleep(0)
            run.go.set()
            await asyncio.gather(first, *others)

        in_loop(work)
        self.assertEqual(run.batches, [1, 8, 2])

    def test_those_that_come_a_turn_of_the_loop_apart_run_together(self) -> None:
        run = Slow()

        async def asked(queue: Batcher, turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            values = np.full((1, 2), turns)
            np.testing.assert_array_equal(await ask(queue, values), 2 * values)

        async def work() -> None:
            queue = batcher(run, largest=4)
            await asyncio.gather(*(asked(queue, turns) for turns in range(4)))
            self.assertEqual(run.batches, [4])
            # A turn that brings none ends the wait, and so does a full batch.
            await asyncio.gather(asked(queue, 0), asked(queue, 9))
            self.assertEqual(run.batches, [4, 1, 1])
            await asyncio.gather(*(asked(queue, turns) for turns in range(6)))
            self.assertEqual((run.batches[3], sum(run.batches[3:])), (4, 6))
            await queue.close()

        in_loop(work)

    def test_other_shapes_do_not(self) -> None:
        run = Slow()

        async def work() -> None:
            queue = batcher(run)
            sizes = (2, 2, 3, 2)
            await asyncio.gather(*(ask(queue, np.ones((1, size))) for size in sizes))

        in_loop(work)
        self.assertEqual(run.batches, [2, 1, 1])

    def test_one_larger_than_a_batch_runs_alone(self) -> None:
        run = Slow()

        async def work() -> None:
            queue = batcher(run, 4)
            await asyncio.gather(*(ask(queue, np.ones((size, 1))) for size in (1, 9, 1)))

        in_loop(work)
        self.assertEqual(run.batches, [1, 9, 1])


class Faults(unittest.TestCase):
    def test_only_the_request_at_fault_fails(self) -> None:
        async def work() -> list[Any]:
            queue = batcher(Slow())
            asked = [ask(queue, np.full((1, 1), value)) for value in (1, -1, 2)]
            return await asyncio.gather(*asked, return_exceptions=True)

        first, second, third = in_loop(work)
        self.assertEqual((first, third), (2, 4))
        self.assertIsInstance(second, DlsysError)

    def test_outputs_without_a_row_a_sample_are_nobodys(self) -> None:
        def run(inputs: list[np.ndarray]) -> list[np.ndarray]:
            return [inputs[0].sum(axis=0, keepdims=True)]

        async def work() -> list[Any]:
            queue = batcher(run)
            asked = [ask(queue, np.full((1, 1), value)) for value in (1, 10)]
            return await asyncio.gather(*asked)

        self.assertEqual([int(x[0, 0]) for x in in_loop(work)], [1, 10])

    def test_a_full_queue_says_when_to_come_again(self) -> None:
        run = Slow()

        async def work() -> None:
            queue = batcher(run, 1, waiting=3, threads=True)
            run.go.clear()
            asked = [asyncio.ensure_future(ask(queue, np.ones((1, 1)))) for _ in range(1)]
            await asyncio.sleep(0.05)
            asked += [asyncio.ensure_future(ask(queue, np.ones((1, 1)))) for _ in range(3)]
            await asyncio.sleep(0)
            with self.assertRaisesRegex(OverloadedError, "3 requests wait") as caught:
                queue.submit([np.ones((1, 1))])
            self.assertGreaterEqual(caught.exception.retry_after, 1)
            run.go.set()
            await asyncio.gather(*asked)
            await ask(queue, np.ones((1, 1)))

        in_loop(work)
        self.assertEqual(run.batches, [1] * 5)

    def test_who_has_gone_does_not_run(self) -> None:
        run = Slow()

        async def work() -> None:
            queue = batcher(run, 1, threads=True)
            run.go.clear()
            first = asyncio.ensure_future(ask(queue, np.ones((1, 1))))
            await asyncio.sleep(0.05)
            gone = queue.submit([np.ones((1, 1))])
            last = asyncio.ensure_future(ask(queue, np.full((1, 1), 7)))
            await asyncio.sleep(0)
            queue.withdraw(gone)
            run.go.set()
            await first
            self.assertEqual(await last, 14)

        in_loop(work)
        self.assertEqual(run.batches, [1, 1])

    def test_closing_waits_for_all(self) -> None:
        async def work() -> None:
            queue = batcher(Slow(0.01), 1)
            asked = [asyncio.ensure_future(ask(queue, np.ones((1, 1)))) for _ in range(5)]
            await asyncio.sleep(0)
            await queue.close()
            self.assertTrue(all(each.done() for each in asked))

        in_loop(work)


if __name__ == "__main__":
    unittest.main()

"""What kernels of a GPU find out of range and cannot refuse: who is told, when, and once."""

from __future__ import annotations

import contextlib
import gc
import io
import threading
import unittest
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import gpu_op, ndarray, optim
from dlsys.errors import OutOfRangeError
from dlsys.ndarray import NDArray
from dlsys.profile import Profile
from dlsys.runtime.device import gpu, synchronize
from dlsys.settings import settings
from support.devices import require, two_gpus

INDEX = ad.Variable("index", dtype=np.int64)
GOOD, BAD = np.array([0, 2]), np.array([0, 7])
TOLD = r"^gather: index 7 at position 1 is out of range: there are 5, counted from 0 \[.*faults"


def lookup(ctx: ndarray.Context) -> ad.Executor:
    """A plan whose value has the shape (2,)."""
    table = ad.constant(np.arange(5, dtype=np.float32))
    return ad.Executor([ad.gather_op(table, INDEX)], ctx)


@require(gpu(0))
class GpuFaults(unittest.TestCase):
    ctx = gpu(0)

    def setUp(self) -> None:
        synchronize(self.ctx)  # no test before this one has left anything

    def left(self) -> NDArray:
        """What a run has made that left a fault to be told."""
        return lookup(self.ctx).run({INDEX: BAD})[0]

    def test_every_wait_tells_once(self) -> None:
        other = ndarray.array(np.ones((), np.float32), self.ctx)
        waits = {
            "asnumpy": lambda made: made.asnumpy(),
            "copyto": lambda made: made.copyto(np.empty(2, np.float32)),
            "to the CPU": lambda made: ndarray.array(made, ndarray.cpu(0)),
            "numpy": np.asarray,
            "float of another": lambda made: float(other),
            "synchronize": lambda made: synchronize(self.ctx),
        }
        for name, wait in waits.items():
            with self.subTest(name):
                made = self.left()
                with self.assertRaisesRegex(OutOfRangeError, TOLD):
                    wait(made)
                wait(made)
                np.testing.assert_array_equal(made.asnumpy(), [0, np.nan])

    def test_runs_and_replays_between_two_waits_tell_of_one(self) -> None:
        executor = lookup(self.ctx)
        for _ in range(3):  # launched one by one, captured, replayed
            executor.run({INDEX: BAD})
            executor.run({INDEX: GOOD})
            executor.run_many(40, {INDEX: BAD})
            with self.assertRaisesRegex(OutOfRangeError, TOLD):
                synchronize(self.ctx)
            synchronize(self.ctx)
            np.testing.assert_array_equal(executor.run({INDEX: GOOD}, True)[0], [0, 2])

    def test_a_thread_that_reads_what_another_queued(self) -> None:
        made: list[NDArray] = []
        thread = threading.Thread(target=lambda: made.append(self.left()))
        thread.start()
        thread.join()
        with self.assertRaisesRegex(OutOfRangeError, TOLD):
            made[0].asnumpy()

    def test_threads_that_fail_at_once(self) -> None:
        """Each of them goes on, and every error is one of theirs."""
        told, odd = [], []

        def work() -> None:
            executor = lookup(self.ctx)
            for k in range(10):
                try:
                    executor.run({INDEX: BAD if k % 2 else GOOD}, True)
                except OutOfRangeError as error:
                    told.append(str(error))
                except Exception as error:
                    odd.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with contextlib.suppress(OutOfRangeError):
            synchronize(self.ctx)
        self.assertEqual(odd, [])
        self.assertTrue(1 <= len(told) <= 20)
        for text in told:
            self.assertRegex(text, TOLD)
        np.testing.assert_array_equal(lookup(self.ctx).run({INDEX: GOOD}, True)[0], [0, 2])

    @two_gpus
    def test_each_gpu_by_itself(self) -> None:
        executor = lookup(gpu(1))
        made = executor.run({INDEX: BAD})[0]
        synchronize(self.ctx)
        with self.assertRaisesRegex(OutOfRangeError, TOLD):
            made.asnumpy()
        made = executor.run({INDEX: BAD})[0]
        with self.assertRaisesRegex(OutOfRangeError, TOLD):
            ndarray.array(made, self.ctx)  # a copy between GPUs waits for both

    def test_a_plain_call_has_no_line(self) -> None:
        table = ndarray.array(np.ones((5, 3), np.float32), self.ctx)
        index = ndarray.array(np.array([9], np.int32), self.ctx)
        rows = ndarray.empty((1, 3), self.ctx)
        ndarray.launch("gather", self.ctx, table, index, 0, rows)
        with self.assertRaisesRegex(OutOfRangeError, "index 9 at position 0 .* counted from 0$"):
            rows.asnumpy()

    def test_who_has_nobody_to_tell_leaves_it(self) -> None:
        shared = ndarray.from_dlpack(ndarray.array(np.ones(3, np.float32), self.ctx))
        gpu_op.matrix_elementwise_add_by_const(shared, 1.0, shared)
        made = self.left()
        del shared  # which waits for the work on what it gives back
        gc.collect()
        with self.assertRaisesRegex(OutOfRangeError, TOLD):
            made.asnumpy()

    def test_a_fault_outlives_its_executor(self) -> None:
        self.left()
        gc.collect()
        with self.assertRaisesRegex(OutOfRangeError, TOLD):
            synchronize(self.ctx)

    def step(self) -> tuple[ad.Executor, ad.Parameter]:
        """A training step that takes gradients of rows of a table."""
        w = ad.Parameter(np.ones((5, 3), np.float32), "w")
        loss = ad.sum_op(ad.embedding_op(w, INDEX))
        return ad.Executor([loss, optim.SGD(0.5).minimize(loss, [w])], self.ctx), w

    def test_runs_that_are_watched_change_nothing(self) -> None:
        """They wait for each step, or for all of them, before they return."""

        def debugged(executor: ad.Executor) -> None:
            with mock.patch.object(settings, "debug", 2), contextlib.redirect_stdout(io.StringIO()):
                executor.run({INDEX: BAD})

        def profiled(executor: ad.Executor) -> None:
            executor.recorder = Profile()
            executor.run({INDEX: BAD})

        for run in (debugged, profiled):
            with self.subTest(run.__name__):
                executor, w = self.step()
                executor.run({INDEX: GOOD})
                before = w.asnumpy()
                for _ in range(2):
                    with self.assertRaisesRegex(OutOfRangeError, "index 7 at position 1"):
                        run(executor)
                    np.testing.assert_array_equal(w.asnumpy(), before)

    def test_the_next_step_trains(self) -> None:
        executor, w = self.step()
        for _ in range(3):
            w.set(np.ones((5, 3), np.float32))
            executor.run({INDEX: BAD})
            with self.assertRaisesRegex(OutOfRangeError, "index 7 at position 1"):
                w.asnumpy()
            w.set(np.ones((5, 3), np.float32))
            executor.run({INDEX: GOOD})
            wanted = np.ones((5, 3), np.float32)
            wanted[GOOD] = 0.5
            np.testing.assert_array_equal(w.asnumpy(), wanted)

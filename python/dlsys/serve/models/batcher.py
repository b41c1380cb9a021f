"""Dynamic batching: requests that wait together run together.

A request that finds the model idle runs at once, without a delay to wait for others; those that
come while it runs are the next batch. Everything here but `run` happens on the event loop, so that
no lock is needed, and each answer is cut from the batch by the position of its request.

A run whose last ones took less than waking a thread does (HANDOVER) runs on the event loop itself,
any other in the model's thread; two never run at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ...errors import DlsysError
from ..faults import OverloadedError
from ..metrics import Counts

Arrays = Sequence[np.ndarray]
Run = Callable[[list[np.ndarray]], list[np.ndarray]]

HANDOVER = 1e-3  # seconds; a batch that takes longer would keep the loop from others' requests
_RECENT = 0.2  # the weight of the last run in the mean of recent ones


class Waiting:
    """A request in the queue: its arrays, and the future of its outputs."""

    __slots__ = ("inputs", "size", "key", "future", "arrived", "started", "ended", "batch")

    def __init__(self, inputs: Arrays, future: asyncio.Future[list[np.ndarray]]) -> None:
        self.inputs, self.future = inputs, future
        self.size = len(inputs[0]) if inputs[0].ndim else 1
        self.key = [x.shape[1:] for x in inputs]
        self.arrived = self.started = self.ended = time.perf_counter()
        self.batch = 0  # samples that ran together with it


class Batcher:
    """The queue of one program.

    run: the outputs of arrays, samples along axis 0. largest: samples of a batch; 1 runs each
    request alone, whatever it has. waiting: requests that may wait. threads: whether `run` must
    stay in the model's thread. A request that is withdrawn while it waits never runs.
    """

    def __init__(
        self, run: Run, largest: int, waiting: int, counts: Counts, threads: bool = False
    ) -> None:
        self._run, self._largest, self._most = run, largest, waiting
        self._counts, self._threads = counts, threads
        self._queue: deque[Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dlsys-model")
        self._seconds = math.inf  # of a recent run
        self._scheduled = False  # whether a batch runs, or will in this turn of the loop
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, inputs: Arrays) -> Waiting:
        """Puts a request into the queue; its `future` gets the outputs. OverloadedError where the
        queue is full, with the seconds after which there should be room.
        """
        if len(self._queue) >= self._most:
            seconds = 0.0 if math.isinf(self._seconds) else self._seconds
            batches = len(self._queue) / self._largest
            raise OverloadedError(
                f"{len(self._queue):,} requests wait for this model already: try again later",
                max(1, math.ceil(batches * seconds)),
            )
        loop = asyncio.get_running_loop()
        waiting = Waiting(inputs, loop.create_future())
        self._queue.append(waiting)
        self._counts.pending = len(self._queue)
        if not self._scheduled:
            self._scheduled = True
            self._idle.clear()
            loop.call_soon(self._next)  # behind the requests that have arrived with this one
        return waiting

    def withdraw(self, waiting: Waiting) -> None:
        """Takes a request out of the queue; one that runs already is answered to nobody."""
        waiting.future.cancel()
        if waiting in self._queue:
            self._queue.remove(waiting)
            self._counts.pending = len(self._queue)

    async def close(self) -> None:
        """Waits until all that is in the queue has run. The thread ends with the batcher."""
        await self._idle.wait()

    # ---- a batch ----
    def _next(self) -> None:
        """Starts the next batch, if anybody still waits."""
        batch = self._take()
        self._counts.pending = len(self._queue)
        if not batch:
            self._scheduled = False
            self._idle.set()
        elif self._seconds < HANDOVER and not self._threads:
            self._answer(batch, self._outputs(batch))
        else:
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._thread, self._outputs, batch)
            running.add_done_callback(lambda done: self._answer(batch, done.result()))

    def _take(self) -> list[Waiting]:
        """The requests that run together: in their order, and of samples of one shape."""
        batch: list[Waiting] = []
        size = 0
        while self._queue:
            first = self._queue[0]
            if batch and (size + first.size > self._largest or first.key != batch[0].key):
                break
            batch.append(self._queue.popleft())
            size += first.size
        return batch

    def _outputs(self, batch: list[Waiting]) -> list[list[np.ndarray] | Exception]:
        """The outputs of each request, or what it failed for."""
        started = time.perf_counter()
        samples = sum(each.size for each in batch)
        found: list[list[np.ndarray] | Exception]
        try:
            if len(batch) == 1:
                found = [self._run(list(batch[0].inputs))]
            else:
                joined = [np.concatenate(arrays) for arrays in zip(*(x.inputs for x in batch))]
                found = [*_cut(self._run(joined), [each.size for each in batch])]
        except Exception as error:
            found = [error] if len(batch) == 1 else [self._alone(each) for each in batch]
        ended = time.perf_counter()
        for each in batch:
            each.started, each.ended, each.batch = started, ended, samples
        return found

    def _alone(self, waiting: Waiting) -> list[np.ndarray] | Exception:
        """The outputs of a request whose batch failed: only what is at fault shall fail."""
        try:
            return self._run(list(waiting.inputs))
        except Exception as error:
            return error

    def _answer(self, batch: list[Waiting], found: list[list[np.ndarray] | Exception]) -> None:
        """Gives each request its outputs, and starts the next batch in the next turn of the loop,
        when the requests that have come meanwhile are read.
        """
        first = batch[0]
        seconds = first.ended - first.started
        recent = seconds if math.isinf(self._seconds) else self._seconds
        self._seconds = (1 - _RECENT) * recent + _RECENT * seconds
        self._counts.executions += 1
        for each, outputs in zip(batch, found):
            if each.future.done():
                continue
            if isinstance(outputs, Exception):
                each.future.set_exception(outputs)
            else:
                each.future.set_result(outputs)
        asyncio.get_running_loop().call_soon(self._next)


def _cut(outputs: list[np.ndarray], sizes: list[int]) -> Any:
    """The outputs of each request, by the samples that each has. DlsysError where the outputs are
    not those of the batch's samples.
    """
    if any(len(y) != sum(sizes) for y in outputs):
        raise DlsysError("the model's outputs do not have a row for each sample of a batch")
    start = 0
    for size in sizes:
        yield [y[start : start + size] for y in outputs]
        start += size

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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ...errors import DlsysError
from ..faults import OverloadedError
from ..metrics import Counts

Arrays = Sequence[np.ndarray]
Run = Callable[[list[np.ndarray]], list[np.ndarray]]
Key = tuple[tuple[int, ...], ...]

HANDOVER = 1e-3  # seconds; a batch that takes longer would keep the loop from others' requests
_RECENT = 0.2  # the weight of the last run in the mean of recent ones


def batched(inputs: Arrays) -> tuple[int, Key]:
    """The samples of arrays, and the key that those which can be joined have in common."""
    return len(inputs[0]) if inputs[0].ndim else 1, tuple([x.shape[1:] for x in inputs])


class Ran(NamedTuple):
    """A batch that ran: when it started and ended, by `time.perf_counter`, and its samples."""

    started: float
    ended: float
    samples: int


class Waiting:
    """A request in the queue; a subclass says what becomes of its outputs.

    `inputs` are arrays with `size` samples along axis 0; requests whose `key` is equal may run
    together. `arrived` is when it was made, `ran` its batch once that has run.
    """

    __slots__ = ("inputs", "size", "key", "arrived", "ran")
    inputs: Arrays
    size: int
    key: Key
    arrived: float
    ran: Ran | None

    def answer(self, outputs: list[np.ndarray]) -> None:
        """Takes its outputs, on the event loop."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """Takes what it failed for instead."""
        raise NotImplementedError


class Awaited(Waiting):
    """A request whose outputs are the result of a future."""

    __slots__ = ("future",)

    def __init__(self, inputs: Arrays, future: asyncio.Future[list[np.ndarray]]) -> None:
        self.inputs, (self.size, self.key) = inputs, batched(inputs)
        self.arrived, self.ran = perf_counter(), None
        self.future = future

    def answer(self, outputs: list[np.ndarray]) -> None:
        if not self.future.done():
            self.future.set_result(outputs)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


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
        self._seen = 0  # requests that waited in the last turn of the loop
        self._scheduled = False  # whether a batch runs, or will in this turn of the loop
        self._closed: asyncio.Future[None] | None = None  # where somebody waits for the end

    def submit(self, inputs: Arrays) -> Awaited:
        """Puts a request into the queue; its `future` gets the outputs. OverloadedError where the
        queue is full, with the seconds after which there should be room.
        """
        waiting = Awaited(inputs, asyncio.get_running_loop().create_future())
        self.put(waiting, asyncio.get_running_loop())
        return waiting

    @property
    def full(self) -> bool:
        """Whether no more requests may wait."""
        return len(self._queue) >= self._most

    def put(self, waiting: Waiting, loop: asyncio.AbstractEventLoop, alone: bool = False) -> None:
        """Puts a request into the queue, as `submit`, from the loop that answers it. alone: whether
        nobody can have asked with it, so that it need not wait for the end of the loop's turn.
        """
        if len(self._queue) >= self._most:
            self._refuse()
        self._queue.append(waiting)
        self._counts.pending += 1
        if not self._scheduled:
            self._scheduled = True
            if alone:
                self._next(loop)
            else:
                loop.call_soon(self._gather, loop)  # behind those that have arrived with this one

    def _refuse(self) -> None:
        seconds = 0.0 if math.isinf(self._seconds) else self._seconds
        batches = len(self._queue) / self._largest
        raise OverloadedError(
            f"{len(self._queue):,} requests wait for this model already: try again later",
            max(1, math.ceil(batches * seconds)),
        )

    def withdraw(self, waiting: Waiting) -> None:
        """Takes a request out of the queue; one that runs already is answered all the same."""
        if waiting in self._queue:
            self._queue.remove(waiting)
            self._counts.pending -= 1

    async def close(self) -> None:
        """Waits until all that is in the queue has run. The thread ends with the batcher."""
        if self._scheduled:
            self._closed = self._closed or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._closed)

    # ---- a batch ----
    def _gather(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the next batch in the first turn of the loop that has brought no request more, so
        that clients who ask at about the same time share one.
        """
        if self._seen < len(self._queue) < self._largest:
            self._seen = len(self._queue)
            loop.call_soon(self._gather, loop)
        else:
            self._seen = 0
            self._next(loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the next batch, if anybody still waits."""
        batch = self._take()
        if not batch:
            self._rest()
        elif self._seconds < HANDOVER and not self._threads:
            self._answer(batch, self._outputs(batch), loop)
        else:
            running = loop.run_in_executor(self._thread, self._outputs, batch)
            running.add_done_callback(lambda done: self._answer(batch, done.result(), loop))

    def _rest(self) -> None:
        """Nobody waits."""
        self._scheduled = False
        if self._closed is not None:
            self._closed.set_result(None)
            self._closed = None

    def _take(self) -> list[Waiting]:
        """The requests that run together: in their order, and of samples of one shape."""
        queue = self._queue
        if not queue:
            return []
        first = queue.popleft()
        batch, size, key = [first], first.size, first.key
        while queue:
            each = queue[0]
            size += each.size
            if size > self._largest or each.key != key:
                break
            batch.append(queue.popleft())
        self._counts.pending -= len(batch)
        return batch

    def _outputs(self, batch: list[Waiting]) -> list[list[np.ndarray] | Exception]:
        """The outputs of each request, or what it failed for."""
        started = perf_counter()
        found: list[list[np.ndarray] | Exception]
        try:
            if len(batch) == 1:
                found = [self._run([*batch[0].inputs])]
            else:
                joined = [np.concatenate(arrays) for arrays in zip(*[x.inputs for x in batch])]
                found = _cut(self._run(joined), [each.size for each in batch])
        except Exception as error:
            found = [error] if len(batch) == 1 else [self._alone(each) for each in batch]
        ran = Ran(started, perf_counter(), sum([each.size for each in batch]))
        for each in batch:
            each.ran = ran
        return found

    def _alone(self, waiting: Waiting) -> list[np.ndarray] | Exception:
        """The outputs of a request whose batch failed: only what is at fault shall fail."""
        try:
            return self._run([*waiting.inputs])
        except Exception as error:
            return error

    def _answer(
        self,
        batch: list[Waiting],
        found: list[list[np.ndarray] | Exception],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Gives each request its outputs, and starts the next batch in the next turn of the loop,
        when the requests that have come meanwhile are read.
        """
        ran = batch[0].ran
        assert ran is not None, "the batch ran"
        self._count(ran)
        for each, outputs in zip(batch, found):
            try:
                if isinstance(outputs, Exception):
                    each.fail(outputs)
                else:
                    each.answer(outputs)
            except Exception as error:  # a fault of ours, which must not cost others their answers
                loop.call_exception_handler({"message": "an answer failed", "exception": error})
        if self._queue:
            loop.call_soon(self._gather, loop)
        else:
            self._rest()

    def _count(self, ran: Ran) -> None:
        seconds = ran.ended - ran.started
        recent = seconds if math.isinf(self._seconds) else self._seconds
        self._seconds = (1 - _RECENT) * recent + _RECENT * seconds
        self._counts.executions += 1


def _cut(outputs: list[np.ndarray], sizes: list[int]) -> Any:
    """The outputs of each request, by the samples that each has. DlsysError where the outputs are
    not those of the batch's samples.
    """
    total = sum(sizes)
    if any([len(y) != total for y in outputs]):
        raise DlsysError("the model's outputs do not have a row for each sample of a batch")
    found, start = [], 0
    for size in sizes:
        found.append([y[start : start + size] for y in outputs])
        start += size
    return found

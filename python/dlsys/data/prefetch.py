"""Work done ahead by threads and handed over in order; batches on a GPU ahead of their steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import cycle
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from ..graph.node import Node
from ..ndarray import array
from ..runtime.device import Context, SideStream
from ..runtime.library import DTYPE_CODES

Task = TypeVar("Task")
Result = TypeVar("Result")

_AHEAD = 3  # batches that may be on the GPU before they are asked for
_COPIERS = 3  # threads: a GPU takes in more than one reads from memory
_END = object()


def ordered_map(
    make: Callable[[Task], Result], tasks: Iterable[Task], workers: int, ahead: int
) -> Generator[Result, None, None]:
    """make(task) for each task, in order, made by `workers` threads up to `ahead` tasks early.

    The threads take the tasks too, one at a time. An exception of `make` or of the tasks is raised
    where its result would have come. The threads end when the results do, or when the iterator is
    closed or forgotten, after the task that each is at.
    """
    waiting, taking = iter(tasks), threading.Lock()
    results: SimpleQueue[Future[Any]] = SimpleQueue()  # in the order of their tasks

    def work() -> None:
        result: Future[Any] = Future()
        try:
            with taking:
                results.put(result)
                task: Any = next(waiting, _END)
            result.set_result(_END if task is _END else make(task))
        except BaseException as error:
            result.set_exception(error)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="dlsys.data")
    try:
        for _ in range(ahead):
            pool.submit(work)
        while (result := results.get().result()) is not _END:
            pool.submit(work)
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def on_device(
    feeds: Iterable[dict[Node, Any]], ctx: Context
) -> Generator[dict[Node, Any], None, None]:
    """The feeds of each batch as arrays on a GPU, copied up to three batches early.

    Threads take the batches and copy them on streams of their own, through pinned memory, while
    steps run on the caller's; each run waits for its batch alone on the GPU, not on the host.
    """
    # Waiting for a stream waits for all of its work. Round-robin gives a stream a batch when the
    # run of its previous one is queued and that memory is free: no run waits for a later batch,
    # and no batch for a run but the one whose memory it takes.
    streams = cycle([SideStream(ctx) for _ in range(_AHEAD + 2)])

    def copied(task: tuple[SideStream, dict[Node, Any]]) -> dict[Node, Any]:
        side, feed = task
        with side:
            return {node: _copied(value, ctx) for node, value in feed.items()}

    with closing(ordered_map(copied, zip(streams, feeds), _COPIERS, _AHEAD)) as batches:
        yield from batches


def _copied(value: Any, ctx: Context) -> Any:
    """An array on the GPU; what is none, or of a dtype that is not, goes the executor's own way."""
    known = isinstance(value, np.ndarray) and value.dtype in DTYPE_CODES
    return array(value, ctx, value.dtype) if known else value

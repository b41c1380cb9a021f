"""Work done ahead by threads and handed over in order; batches on a GPU ahead of their steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice, repeat
from typing import Any, TypeVar

import numpy as np

from ..graph.node import Node
from ..ndarray import array
from ..runtime.device import Context
from ..runtime.library import DTYPE_CODES

Task = TypeVar("Task")
Result = TypeVar("Result")


def ordered_map(
    make: Callable[[Task], Result], tasks: Iterable[Task], workers: int, ahead: int
) -> Generator[Result, None, None]:
    """make(task) for each task, in order, made by `workers` threads up to `ahead` tasks early.

    An exception of `make` is raised where its result would have come. The threads end when the
    results do, or when the iterator is closed or forgotten, after the task that each is at.
    """
    waiting = iter(tasks)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="dlsys.data")
    try:
        queue: deque[Future[Result]] = deque(
            pool.submit(make, task) for task in islice(waiting, ahead)
        )
        while queue:
            result = queue.popleft().result()
            queue.extend(pool.submit(make, task) for task in islice(waiting, 1))
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def on_device(
    feeds: Iterable[dict[Node, Any]], ctx: Context
) -> Generator[dict[Node, Any], None, None]:
    """The feeds of each batch as arrays on a GPU, copied up to two batches early.

    A thread takes the batches and copies them on a stream of its own, through pinned memory, while
    steps run on the caller's; each run waits for its batch alone on the GPU, not on the host.
    """
    waiting = iter(feeds)

    def copied(_: None) -> dict[Node, Any] | None:
        feed = next(waiting, None)
        return feed and {node: _copied(value, ctx) for node, value in feed.items()}

    with closing(ordered_map(copied, repeat(None), workers=1, ahead=2)) as batches:
        for feed in batches:
            if feed is None:
                return
            yield feed


def _copied(value: Any, ctx: Context) -> Any:
    """An array on the GPU; what is none, or of a dtype that is not, goes the executor's own way."""
    known = isinstance(value, np.ndarray) and value.dtype in DTYPE_CODES
    return array(value, ctx, value.dtype) if known else value

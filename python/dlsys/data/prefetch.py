"""Work done ahead by threads, handed over in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def ordered_map(
    make: Callable[[Task], Result], tasks: Iterable[Task], workers: int, ahead: int
) -> Iterator[Result]:
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

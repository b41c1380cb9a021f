"""Counts of what kernels ask the allocator for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from dlsys.executor.run.tables import Segment
from dlsys.runtime.device import Context, memory_stats


@contextmanager
def requests_of_kernels(ctx: Context) -> Iterator[list[int]]:
    """How often each stretch of kernels that a program runs meanwhile, one by one and not as a
    graph, asks the allocator of `ctx`.
    """
    run, requests = Segment.run, []

    def counted(segment: Segment, on: int) -> None:
        before = memory_stats(ctx).requests
        run(segment, on)
        requests.append(memory_stats(ctx).requests - before)

    with mock.patch.object(Segment, "run", counted):
        yield requests

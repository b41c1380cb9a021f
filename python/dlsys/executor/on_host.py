"""Runs between arrays of the host, by the shortest way that a device has: what a prediction takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..graph.node import Node
from ..settings import settings
from .capture.program import CapturingProgram
from .executor import Executor


def run_on_host(executor: Executor, feeds: Mapping[Node, np.ndarray]) -> list[Any]:
    """`executor.run(feeds, convert_to_numpy_ret_vals=True)`, on a GPU from the second run on by one
    launch that reads and writes pinned memory.

    feeds: arrays of numpy for every Variable that the graph uses. Raises as `Executor.run` does.
    """
    made = _direct(executor, feeds)
    return executor.run(feeds, convert_to_numpy_ret_vals=True) if made is None else made


def _direct(executor: Executor, feeds: Mapping[Node, np.ndarray]) -> list[np.ndarray] | None:
    """The fetches, where a plan for these feeds is bound and may run so; else None."""
    watched = settings.debug >= 2 or settings.debug_nan or executor.recorder is not None
    if watched or executor._changes != Node.changes or executor._running.locked():
        return None
    arrays = [feeds[node] for node in executor._feeds.nodes]
    found = executor._runners.get(tuple([(x.shape, x.dtype) for x in arrays]))
    if found is None or found[2] is not None or not isinstance(found[0], CapturingProgram):
        return None
    with executor._running:
        return found[0].run_on_host(arrays)

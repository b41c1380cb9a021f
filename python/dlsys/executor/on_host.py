"""Runs between arrays of the host, by the shortest way that a device has, for predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph.node import Node
from ..settings import settings
from .capture.program import CapturingProgram
from .executor import Executor


def run_on_host(executor: Executor, arrays: Sequence[np.ndarray]) -> list[Any]:
    """`executor.run(feeds, convert_to_numpy_ret_vals=True)`, on a GPU from the second run on by one
    launch that reads and writes pinned memory.

    arrays: of numpy, for the Variables that the graph uses in topological order. Raises as
    `Executor.run` does.
    """
    watched = settings.debug >= 2 or settings.debug_nan or executor.recorder is not None
    if not watched and executor._changes == Node.changes and not executor._running.locked():
        found = executor._runners.get(tuple([(x.shape, x.dtype) for x in arrays]))
        if found is not None and found[2] is None and type(found[0]) is CapturingProgram:
            with executor._running:
                made = found[0].run_on_host(arrays)
            if made is not None:
                return made
    feeds = dict(zip(executor._feeds.nodes, arrays))
    return executor.run(feeds, convert_to_numpy_ret_vals=True)

"""Threads of operators in numpy: parts of a batch side by side, each with a BLAS of one thread.

BLAS shares out one product at a time, and what stands between products runs on one core. Where an
operator has parts that do not depend on each other, threads that take whole parts keep all cores at
work. There are as many as BLAS would have, so whoever limits that limits these.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..system import at_fork

MOST_THREADS = 8  # beyond, they wait for the interpreter's lock

Item = TypeVar("Item")
State = TypeVar("State")
Result = TypeVar("Result")


class Blas(NamedTuple):
    """The functions of numpy's BLAS that tell and set the number of its threads."""

    threads: Callable[[], int]
    set_threads: Callable[[int], Any]


@lru_cache(maxsize=1)
def blas() -> Blas | None:
    """numpy's BLAS; None for one that is no OpenBLAS, whose threads stay its own business."""
    modules = (sys.modules.get(f"numpy.{core}._multiarray_umath") for core in ("_core", "core"))
    files = [file for file in (getattr(m, "__file__", None) for m in modules) if file]
    compiled = [file for file in files if not file.endswith(".py")]  # numpy 1 has core, 2 _core
    try:
        library = ctypes.CDLL(compiled[0])  # looks among what it is linked with
    except (IndexError, OSError):
        return None
    for name in ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}"):
        if hasattr(library, name.format("set_num_threads")):
            functions = (name.format(f"{verb}_num_threads") for verb in ("get", "set"))
            return Blas(*(getattr(library, function) for function in functions))
    return None


def thread_count() -> int:
    """The threads that `share` has use for."""
    found = blas()
    if found is None:
        return 1
    return min(max(_before if _sharing else found.threads(), 1), MOST_THREADS)


@contextmanager
def quiet(shares: bool) -> Iterator[None]:
    """Runs steps of a plan in numpy without its warnings. If any has an operator that `shares` its
    work, BLAS has one thread in all of them: its own threads wait for more work in a loop, long
    after a product, on the cores that `share` needs.
    """
    alone = shares and thread_count() > 1
    with np.errstate(all="ignore"), _one_blas_thread() if alone else nullcontext():
        yield


def share(
    work: Callable[[Item, State], Result], items: Sequence[Item], states: Sequence[State]
) -> list[Result]:
    """work(item, state) for all items, in their order, in as many threads as there are states at
    most. A state belongs to one thread.

    Raises what work raises, after all threads have ended.
    """
    count = min(thread_count(), len(items), len(states))
    if count <= 1:
        return [work(item, states[0]) for item in items]

    def part(first: int) -> list[Result]:
        with np.errstate(all="ignore"):  # each thread has its own
            return [work(item, states[first]) for item in items[first::count]]

    with _one_blas_thread():
        others = [_workers().submit(part, first) for first in range(1, count)]
        try:
            parts = [part(0)]
        finally:
            wait(others)
    parts += [other.result() for other in others]
    return [parts[k % count][k // count] for k in range(len(items))]


# ---- one BLAS thread, while anybody shares ----


_lock = threading.Lock()
_sharing = 0  # calls of `share` that run, of several executors
_before = 1  # the threads of BLAS before the first of them


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    global _sharing, _before
    found = blas()
    assert found is not None  # without it there is one thread
    with _lock:
        if _sharing == 0:
            _before = found.threads()
            found.set_threads(1)
        _sharing += 1
    try:
        yield
    finally:
        with _lock:
            _sharing -= 1
            if _sharing == 0:
                found.set_threads(_before)


@lru_cache(maxsize=1)
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="dlsys-numpy")


def _after_fork() -> None:
    """A child has none of the threads, and nobody shares in it."""
    global _lock, _sharing
    _workers.cache_clear()
    _lock = threading.Lock()
    if _sharing and (found := blas()) is not None:
        found.set_threads(_before)
    _sharing = 0


at_fork(after_in_child=_after_fork)

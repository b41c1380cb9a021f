"""What a sample of the tests leaves out: `tests/run.py --sample`, as `make test` and continuous
integration run it; `make test-full` runs all.

A test that goes through a long list of cases takes them as `sample.of(cases, count)`: some of them,
the same in every run, from the first to the last. A test of minutes whose parts others check is
`left_to_full`, and counts as skipped. The runner ends with the number of cases that were left out.
"""

from __future__ import annotations

import os
import unittest
from collections.abc import Iterable
from typing import Any, TypeVar

VARIABLE = "DLSYS_TEST_SAMPLE"
SAMPLED = os.environ.get(VARIABLE) == "1"  # as `run.py --sample` sets it

T = TypeVar("T")
left_out = 0  # cases, in this process


def of(cases: Iterable[T], count: int) -> list[T]:
    """All of the cases, or `count` of them, at least two, evenly spaced with the first and the last
    one.
    """
    every = list(cases)
    if not SAMPLED or len(every) <= count:
        return every
    global left_out
    left_out += len(every) - count
    return [every[round(k * (len(every) - 1) / (count - 1))] for k in range(count)]


def rest(cases: Iterable[T]) -> list[T]:
    """All of the cases, or in a sample none: others before them show what they do."""
    every = list(cases)
    if not SAMPLED:
        return every
    global left_out
    left_out += len(every)
    return []


def count(full: int, fewer: int) -> int:
    """How often a test repeats what it does, or how large its longest case is."""
    global left_out
    left_out += SAMPLED
    return fewer if SAMPLED else full


def left_to_full(why: str) -> Any:
    """Decorates a test whose parts are checked elsewhere too, as `why` says, or seldom fail."""
    return unittest.skipIf(SAMPLED, f"not here: left to make test-full: {why}")

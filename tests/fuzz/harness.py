"""What all generators share: hypothesis draws a case and shrinks what fails; a worker runs batches
of cases, each of which a seed and a number draw again.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# What it would keep beside the tests.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", f"{tempfile.gettempdir()}/hypothesis")

import hypothesis  # noqa: E402
from hypothesis import HealthCheck, Phase  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

_BLOB = re.compile(r"reproduce_failure\('([^']+)', b'([^']+)'\)")
_HEARTBEAT = 1.0  # seconds between two lines of a worker


class Finding(AssertionError):
    """What did not hold. `kind` is short and the same for the same fault, so that a fault that is
    met again is counted and not told again.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Slow(Finding):
    """A case that took too long: it is told as it is, since shrinking would take as long again and
    again.
    """


class Unjudged(Exception):
    """A case that says nothing: the oracle has no answer to it."""


class Source:
    """Random choices, each of which hypothesis can make smaller."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._rng: np.random.Generator | None = None

    @property
    def rng(self) -> np.random.Generator:
        """For bulk values, which are not worth shrinking one by one."""
        if self._rng is None:
            self._rng = np.random.default_rng(self.number(0, 2**32 - 1))
        return self._rng

    def number(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return self._data.draw(_integers(low, high))

    def flag(self) -> bool:
        """Either, as often."""
        return self.number(0, 1) == 1

    def rarely(self, often: int) -> bool:
        """True once in so many."""
        return self.number(0, often - 1) == often - 1

    def one(self, *options: Any) -> Any:
        """One of the options; the first is the simplest."""
        return options[self.number(0, len(options) - 1)]

    def data(self, most: int) -> bytes:
        """Some bytes."""
        return self._data.draw(_binary(most))

    def text(self, most: int) -> str:
        """Some characters, odd ones among them."""
        return self._data.draw(_text(most))

    def real(self) -> float:
        """Any float, NaN and infinities among them."""
        return self._data.draw(_FLOATS)


@functools.cache
def _integers(low: int, high: int) -> Any:
    return st.integers(low, high)


@functools.cache
def _binary(most: int) -> Any:
    return st.binary(max_size=most)


@functools.cache
def _text(most: int) -> Any:
    return st.text(max_size=most)


_FLOATS = st.floats()
# What tries a case: it returns how many it was, should it be several. Finding, or Unjudged.
Trial = Callable[[Source], int | None]


@dataclass
class Tally:
    """How many cases were tried, held and could not be judged, and what did not hold."""

    tried: int = 0
    held: int = 0
    unjudged: int = 0
    kinds: dict[str, int] = field(default_factory=dict)  # of cases, by which kind occurs in them
    findings: list[dict[str, str]] = field(default_factory=list)

    def add(self, other: dict[str, Any]) -> None:
        """Adds what a batch counted."""
        self.tried += other["tried"]
        self.held += other["held"]
        self.unjudged += other["unjudged"]
        for kind, count in other["kinds"].items():
            self.kinds[kind] = self.kinds.get(kind, 0) + count
        known = {finding["kind"] for finding in self.findings}
        self.findings += [f for f in other["findings"] if f["kind"] not in known]


class Batch:
    """Cases that one seed draws, up to the first new finding, which hypothesis then shrinks."""

    def __init__(
        self, trial: Trial, seed: int, count: int, known: set[str] | None = None,
        until: float = float("inf"), beat: Callable[[], None] = lambda: None, verbose: bool = False,
    ) -> None:  # fmt: skip
        self.trial, self.seed, self.count, self.until = trial, seed, count, until
        self.known = set(known or ())
        self.tally = Tally()
        self._beat, self._verbose = beat, verbose
        self._over = False
        self._failed: Finding | None = None  # what follows a failure is shrinking

    def run(self, replay: str | None = None) -> Tally:
        """Runs the cases, or the one that `replay` (of a finding) stands for."""
        test: Any = hypothesis.given(st.data())(self._one)
        test = hypothesis.seed(self.seed)(test)
        if replay is not None:
            version, blob = replay.split(":", 1)
            test = hypothesis.reproduce_failure(version, blob.encode())(test)
        settings = hypothesis.settings(
            max_examples=self.count, database=None, deadline=None, print_blob=True,
            phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )  # fmt: skip
        try:
            settings(test)()
        except Finding as found:
            self._keep(found)
        except BaseException:  # at the end of the time, or the case failed once and then held
            if self._failed is not None:
                self._keep(self._failed)
            elif not self._over:
                raise
        return self.tally

    def _one(self, data: Any) -> None:
        if time.monotonic() > self.until and self._failed is None:
            self._over = True
            raise KeyboardInterrupt
        self._beat()
        first = self._failed is None  # what follows a failure is shrinking
        try:
            cases = self.trial(Source(data)) or 1
        except Unjudged:
            self._count("unjudged", int(first))
        except Finding as found:
            if self._verbose:
                print(f"  {found}", file=sys.stderr)
            if first:
                self.tally.tried += 1
                self.tally.kinds[found.kind] = self.tally.kinds.get(found.kind, 0) + 1
            if found.kind in self.known:
                return
            self._failed = self._failed or found
            if isinstance(found, Slow):
                raise KeyboardInterrupt from None
            raise
        else:
            self._count("held", cases * first)

    def _count(self, what: str, cases: int) -> None:
        """A case counts when it has ended: hypothesis gives some up while they are drawn."""
        self.tally.tried += cases
        setattr(self.tally, what, getattr(self.tally, what) + cases)

    def _keep(self, found: Finding) -> None:
        blob = _BLOB.search("\n".join(getattr(found, "__notes__", [])))
        replay = f"{blob[1]}:{blob[2]}" if blob else ""
        self.tally.findings.append({"kind": found.kind, "text": str(found), "replay": replay})


def seed_of(seed: int, *numbers: Any) -> int:
    """The seed of a part of a campaign."""
    return zlib.crc32(repr((seed, *numbers)).encode())


def work(
    trial: Trial, name: str, seed: int, worker: int, size: int, seconds: float, cases: int,
    first: int = 0, verbose: bool = False,
) -> None:  # fmt: skip
    """Runs batches until the time or the number of cases is reached, and prints a JSON line at the
    start, during and at the end of each.
    """
    until = time.monotonic() + seconds
    known: set[str] = set()
    beat = _Heart().beat
    number = first
    while cases > 0 and time.monotonic() < until:
        tell(batch=number)
        part = Batch(trial, seed_of(seed, name, worker, number), min(size, cases), known, until,
                     beat, verbose)  # fmt: skip
        tally = part.run()
        known |= {finding["kind"] for finding in tally.findings}
        cases -= max(tally.tried, 1)
        tell(batch=number, tally=vars(tally))
        number += 1


class _Heart:
    """Tells the parent that cases go on."""

    def __init__(self) -> None:
        self._next = 0.0

    def beat(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _HEARTBEAT
            tell(alive=True)


def tell(**what: Any) -> None:
    """A line for the parent, on the standard output that a worker began with."""
    _OUTPUT.write(json.dumps(what) + "\n")
    _OUTPUT.flush()


_OUTPUT = sys.stdout

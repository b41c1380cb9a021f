"""Runs every test and ends with one line: `N passed, N failed, N skipped`.

    python tests/run.py [-j N] [-k PART ...] [NAME ...]

A NAME is a module, a class or a test, such as `test_operators.NumpyOperators`; without one all
tests run. `-k` keeps those whose names contain a PART, or match it where it has a `*`. `-j N` deals
the tests to N processes, which share the cores. Every test is a method of a `unittest.TestCase`, so
that `nose2` and `pytest` run them too.

Errors and unexpected successes count as failed, and so does a run without a single test, or a
process that broke down. Reasons for skipping are printed with their counts. Under
DLSYS_REQUIRE_GPU=1 a skipped test is a failure, unless its reason begins with `not here:`, which is
about a program beside the GPU.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import faulthandler
import itertools
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

FOLDER = Path(__file__).resolve().parent
DEALT = 25  # tests of one class that a process gets at a time
WORKER = "--worker"


class Tally:
    """The worst outcome of each test, by its id; a subtest counts towards its test."""

    RANK = ("passed", "skipped", "failed")

    def __init__(self, *, skips_fail: bool) -> None:
        self.skips_fail = skips_fail
        self.outcomes: dict[str, str] = {}
        self.reasons: collections.Counter[str] = collections.Counter()

    def note(self, test: str, outcome: str, reason: str | None = None) -> None:
        if outcome == "skipped":
            reason = reason or "no reason given"
            self.reasons[reason] += 1
            if self.skips_fail and not reason.startswith("not here:"):
                outcome = "failed"
        worst = max(outcome, self.outcomes.get(test, "passed"), key=self.RANK.index)
        self.outcomes[test] = worst

    def report(self) -> int:
        """Prints skips and counts; returns the exit status."""
        count = collections.Counter(self.outcomes.values())
        if self.reasons:
            why = ", which DLSYS_REQUIRE_GPU=1 counts as failed" if self.skips_fail else ""
            print(f"\n{self.reasons.total()} tests or classes of tests SKIPPED{why}:")
            for reason, times in self.reasons.most_common():
                print(f"  {times:5d} x {reason}")
        if not self.outcomes:
            print("\nno test was found")
        print(f"\n{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
        return 1 if count["failed"] or not self.outcomes else 0


class Result(unittest.TextTestResult):
    """Keeps what `Tally.note` wants to know, in `notes`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes: list[tuple[str, str, str | None]] = []

    def addSuccess(self, test):
        super().addSuccess(test)
        self.notes.append((test.id(), "passed", None))

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.notes.append((test.id(), "failed", None))

    def addError(self, test, err):
        super().addError(test, err)
        self.notes.append((test.id(), "failed", None))

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        self.notes.append((test.id(), "failed" if err else "passed", None))

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        test = getattr(test, "test_case", test)
        self.notes.append((test.id(), "skipped", reason))

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)
        self.notes.append((test.id(), "passed", None))

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.notes.append((test.id(), "failed", None))


def run_here(suite: unittest.TestSuite) -> list[tuple[str, str, str | None]]:
    """Runs the tests in this process and returns the notes of each."""
    result = unittest.TextTestRunner(resultclass=Result).run(suite)
    return result.notes  # type: ignore[attr-defined]


# ---- several processes ----


def each_test(suite: Iterable) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from each_test(test)
        else:
            yield test


def portions(suite: unittest.TestSuite) -> list[list[str]]:
    """The names of the tests, a class or a part of a large one at a time, the largest first."""
    dealt = []
    for kind, tests in itertools.groupby(each_test(suite), type):
        # A module that cannot be imported is one failing test, whose method has the module's name.
        broken = kind.__module__ == "unittest.loader"
        names = [test._testMethodName if broken else test.id() for test in tests]
        dealt += [names[k : k + DEALT] for k in range(0, len(names), DEALT)]
    return sorted(dealt, key=len, reverse=True)


def work() -> int:
    """A worker: runs the tests that each line of its input names and answers with their notes."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what tests print goes to the log
        for line in sys.stdin:
            suite = unittest.defaultTestLoader.loadTestsFromNames(json.loads(line))
            print(json.dumps(run_here(suite)), file=answers, flush=True)
    return 0


class Worker:
    """A process that runs tests. What it prints is shown where a test failed or it broke down."""

    def __init__(self) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()
        command = [sys.executable, __file__, WORKER]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log)

    def run(self, names: Sequence[str]) -> list[tuple[str, str, str | None]] | None:
        """The notes of these tests; None where the process did not live to give them."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._log.seek(0)  # both processes write at this one position
        self._log.truncate()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(names).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        return json.loads(answer) if answer else None

    def log(self) -> str:
        """What was printed since the last tests were handed over."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def stop(self) -> int:
        """Ends the process and returns its status."""
        with self._process as process:
            process.kill()
        self._log.close()
        return process.returncode


def run_dealt(suite: unittest.TestSuite, processes: int, tally: Tally) -> None:
    """Deals the tests to several processes; one that breaks down is replaced."""
    # Pools of threads that spin beside each other slow all of them down.
    threads = max(1, (os.cpu_count() or 1) // processes)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(threads))
    left: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for names in portions(suite):
        left.put(names)
    talking = threading.Lock()

    def deal() -> None:
        worker = Worker()
        try:
            while True:
                names = left.get_nowait()
                notes = worker.run(names)
                log = worker.log()
                if notes is None:
                    status = worker.stop()
                    log += f"\na process of tests ended with status {status}: {' '.join(names)}\n"
                    notes = [(name, "failed", None) for name in names]
                    worker = Worker()
                with talking:
                    for note in notes:
                        tally.note(*note)
                    failed = any(outcome == "failed" for _, outcome, _ in notes)
                    sys.stderr.write(f"\n{log}" if failed else ".")
                    sys.stderr.flush()
        except queue.Empty:
            pass
        finally:
            worker.stop()

    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        for hand in [pool.submit(deal) for _ in range(processes)]:
            hand.result()


def located(name: str) -> str:
    """The full name of a module, class or test that is given without its folder."""
    found = sorted(FOLDER.glob(f"*/{name.partition('.')[0]}.py"))
    return f"{found[0].parent.name}.{name}" if found else name


def main(arguments: list[str]) -> int:
    faulthandler.enable()
    # Tests press Ctrl-C, which a shell has its background jobs ignore.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "python")]
    if arguments == [WORKER]:
        return work()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="so many processes")
    parser.add_argument("-k", action="append", metavar="PART", help="tests with it in their names")
    options = parser.parse_args(arguments)
    # All processes draw their cases from one seed, which a failure names.
    seed = os.environ.get("DLSYS_TEST_SEED") or str(random.SystemRandom().randrange(2**32))
    os.environ["DLSYS_TEST_SEED"] = seed
    loader = unittest.defaultTestLoader
    if options.k:
        loader.testNamePatterns = [part if "*" in part else f"*{part}*" for part in options.k]
    if options.names:
        suite = loader.loadTestsFromNames([located(name) for name in options.names])
    else:
        suite = loader.discover(str(FOLDER), top_level_dir=str(FOLDER))
    tally = Tally(skips_fail=os.environ.get("DLSYS_REQUIRE_GPU") == "1")
    if options.j > 1:
        run_dealt(suite, options.j, tally)
    else:
        for note in run_here(suite):
            tally.note(*note)
    sys.stderr.flush()
    return tally.report()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

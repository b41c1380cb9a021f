"""Runs every test and ends with one line: `N passed, N failed, N skipped`.

    python tests/run.py [-j N] [-k PART ...] [--needs DEVICE] [--table] [--drawn] [--quick]
                        [--sample] [--list] [--slowest N] [NAME ...]

A NAME is a module, a class or a test, such as `test_operators.NumpyOperators`; without one all
tests run. `-k` keeps those whose names contain a PART, or match it where it has a `*`. The further
options keep tests by what is noted in the code: `--needs gpu` those that `devices.require` or its
like marks as needing a GPU and those that take every native device, `--table` those that a row of
the operator table becomes, `--drawn` those of modules that draw their cases (seeds.py), `--quick`
those of the library that are not marked `devices.slow`, and of each row of the table its small
cases: applications, the service, pictures and measurements, which stand on the library, are left
out. `--sample` has tests go through some of their cases alone (sample.py), as `--quick` does too.

`-j N` deals the tests to N processes, which share the cores; slow ones go first, so that all end
together. `--list` prints the names of the tests and runs none, `--slowest N` ends with the CPU
times of the slowest. Every test is a method of a `unittest.TestCase`, so that `nose2` and `pytest`
run them too.

Errors and unexpected successes count as failed, and so does a run without a single test, a process
that broke down or leaks memory of the library (leaks.py), and a test that is skipped for want of a
GPU but not noted as needing one, since the emulated GPU would never see it. Reasons for skipping
are printed with their counts. Under DLSYS_REQUIRE_GPU=1 a skipped test is a failure, unless its
reason begins with `not here:`, which is about a program beside the GPU.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import faulthandler
import gc
import inspect
import itertools
import json
import os
import queue
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
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "python")]

from support import leaks, sample, seeds  # noqa: E402

UPON = {"apps", "measurements", "serve", "viz"}  # folders of tests of what stands on the library
DEALT = 25  # tests of one class that a process gets at a time; a slow one goes alone
WORKER = "--worker"
PATIENCE = 60  # seconds for a process to end once it has no more tests

Note = tuple[str, str, "str | None"]  # of a test: its id, its outcome, why it was skipped
# Of some tests, with the CPU seconds of each, and how many cases a sample left out.
Notes = tuple[list[Note], dict[str, float], int]


class Tally:
    """The worst outcome of each test, by its id; a subtest counts towards its test."""

    RANK = ("passed", "skipped", "failed")

    def __init__(self, *, skips_fail: bool) -> None:
        self.skips_fail = skips_fail
        self.outcomes: dict[str, str] = {}
        self.reasons: collections.Counter[str] = collections.Counter()
        self.seconds: dict[str, float] = {}
        self.left_out = 0

    def note(self, test: str, outcome: str, reason: str | None = None) -> None:
        if outcome == "skipped":
            reason = reason or "no reason given"
            self.reasons[reason] += 1
            if self.skips_fail and not reason.startswith("not here:"):
                outcome = "failed"
        worst = max(outcome, self.outcomes.get(test, "passed"), key=self.RANK.index)
        self.outcomes[test] = worst

    def add(self, notes: Notes) -> None:
        for note in notes[0]:
            self.note(*note)
        self.seconds.update(notes[1])
        self.left_out += notes[2]

    def report(self, slowest: int = 0) -> int:
        """Prints times, skips and counts; returns the exit status."""
        count = collections.Counter(self.outcomes.values())
        for test in sorted(self.seconds, key=lambda test: -self.seconds[test])[:slowest]:
            print(f"{self.seconds[test]:8.2f} s  {test}")
        if self.reasons:
            why = ", which DLSYS_REQUIRE_GPU=1 counts as failed" if self.skips_fail else ""
            print(f"\n{self.reasons.total()} tests or classes of tests SKIPPED{why}:")
            for reason, times in self.reasons.most_common():
                print(f"  {times:5d} x {reason}")
        if self.left_out:
            print(f"\n{self.left_out} cases of tests left out of the sample: make test-full")
        if not self.outcomes:
            print("\nno test was found")
        if count["failed"]:
            print(f"\nthe same draws again: {seeds.VARIABLE}={seeds.SEED}")
        print(f"\n{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
        return 1 if count["failed"] or not self.outcomes else 0


def used() -> float:
    """Seconds of all cores that this process and those that it waited for have used: unlike those
    on the wall, they are the same on a machine that others use too.
    """
    return sum(os.times()[:4])


class Result(unittest.TextTestResult):
    """Keeps what `Tally.note` wants to know, in `notes`, and the CPU time of each test."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes: list[Note] = []
        self.seconds: dict[str, float] = {}
        self._began = 0.0

    def startTest(self, test):
        super().startTest(test)
        self._began = used()

    def stopTest(self, test):
        super().stopTest(test)
        self.seconds[test.id()] = used() - self._began

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
        devices = sys.modules.get("support.devices")
        said = needs(test, "gpu") or needs(test, "cpu")  # one reason where there is no library
        if devices and reason == devices.gpu_skip_reason() and not said:
            self.stream.write(f"{test.id()}: it needs a GPU and does not say so: devices.require\n")
            self.notes.append((test.id(), "failed", None))

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)
        self.notes.append((test.id(), "passed", None))

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.notes.append((test.id(), "failed", None))


def run_here(suite: unittest.TestSuite) -> Notes:
    """Runs the tests in this process and returns the notes of each."""
    before = sample.left_out
    result: Any = unittest.TextTestRunner(resultclass=Result).run(suite)
    return result.notes, result.seconds, sample.left_out - before


# ---- what the code of a test says of it ----


def each_test(suite: Iterable) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from each_test(test)
        else:
            yield test


def method_of(test: unittest.TestCase) -> Any:
    """The method that the test runs; None of what stands for a class that could not be set up."""
    return getattr(test, getattr(test, "_testMethodName", ""), None)


def noted(test: unittest.TestCase, name: str, default: Any = None) -> Any:
    """What a decorator wrote on the method, or else on the class or one that it inherits from."""
    method = method_of(test)
    return getattr(method, name, getattr(test, name, default))


def needs(test: unittest.TestCase, device: str) -> bool:
    """Whether the test says that it needs the device, or takes all that are there."""
    method = method_of(test)
    of_both = (getattr(owner, "needs_devices", ()) for owner in (method, type(test)))
    if any(device in names for names in of_both):
        return True
    code = getattr(inspect.unwrap(method), "__code__", None) if method else None
    return code is not None and not {"native_contexts", "each_context"}.isdisjoint(code.co_names)


def draws(test: unittest.TestCase) -> bool:
    """Whether the module of the test takes its cases from the seed."""
    return hasattr(sys.modules[type(test).__module__], "SEED")


def chosen(suite: unittest.TestSuite, options: argparse.Namespace) -> unittest.TestSuite:
    """Those of the tests that the options keep; one that cannot be imported is always kept."""

    def keeps(test: unittest.TestCase) -> bool:
        return type(test).__module__ == "unittest.loader" or (
            (not options.needs or needs(test, options.needs))
            and (not options.table or noted(test, "row") is not None)
            and (not options.drawn or draws(test))
            and (not options.quick or not (slow(test) or room(test) in UPON))
        )

    return unittest.TestSuite(filter(keeps, each_test(suite)))


def room(test: unittest.TestCase) -> str:
    """The folder of `tests/` that its module is in."""
    return type(test).__module__.split(".")[0]


def slow(test: unittest.TestCase) -> bool:
    return noted(test, "slow", False)


def shares(test: unittest.TestCase) -> bool:
    return getattr(test, "together", False)


# ---- several processes ----


def portions(suite: unittest.TestSuite) -> list[list[str]]:
    """The names of the tests: slow ones alone and first, and classes whose tests share what is dear
    to make; then a class or a part of a large one at a time, the largest first.
    """
    alone, dealt = [], []
    for kind, tests in itertools.groupby(each_test(suite), type):
        # A module that cannot be imported is one failing test, whose method has the module's name.
        broken = kind.__module__ == "unittest.loader"
        names = []
        for test in tests:
            name = test._testMethodName if broken else test.id()
            if slow(test) and not shares(test):
                alone.append([name])
            else:
                names.append(name)
        if names and shares(test):
            alone.append(names)
        else:
            dealt += [names[k : k + DEALT] for k in range(0, len(names), DEALT)]
    return alone + sorted(dealt, key=len, reverse=True)


def work() -> int:
    """A worker: runs the tests that each line of its input names and answers with their notes."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what tests print goes to the log
        for line in sys.stdin:
            suite = unittest.defaultTestLoader.loadTestsFromNames(json.loads(line))
            # The tests' collections need not go through all modules and what other tests have kept.
            gc.collect()
            gc.freeze()
            print(json.dumps(run_here(suite)), file=answers, flush=True)
    gc.unfreeze()
    return leaks.report()


class Worker:
    """A process that runs tests. What it prints is shown where a test failed or it broke down."""

    def __init__(self) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()
        command = [sys.executable, __file__, WORKER]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log)

    def run(self, names: Sequence[str]) -> Notes | None:
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

    def end(self) -> int:
        """Has the process end by itself, or kills it, and returns its status."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        return self.stop()

    def stop(self) -> int:
        """Kills the process and returns its status."""
        with self._process as process:
            process.kill()
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

    def report(notes: Notes, log: str) -> None:
        with talking:
            tally.add(notes)
            failed = any(outcome == "failed" for _, outcome, _ in notes[0])
            sys.stderr.write(f"\n{log}" if failed else ".")
            sys.stderr.flush()

    def deal(number: int) -> None:
        worker = Worker()
        try:
            while True:
                names = left.get_nowait()
                notes = worker.run(names)
                status = worker.end() if notes is None else 0
                log = worker.log()
                if notes is None:
                    log += f"\na process of tests ended with status {status}: {' '.join(names)}\n"
                    notes = [(name, "failed", None) for name in names], {}, 0
                    worker = Worker()
                report(notes, log)
        except queue.Empty:
            if worker.end():
                report(([(f"the end of process {number}", "failed", None)], {}, 0), worker.log())
        finally:
            worker.stop()

    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        for hand in [pool.submit(deal, number) for number in range(processes)]:
            hand.result()


def located(name: str) -> str:
    """The full name of a module, class or test that is given without its folder."""
    first = name.partition(".")[0]
    found = [] if (FOLDER / first).is_dir() else sorted(FOLDER.glob(f"*/**/{first}.py"))
    return ".".join((*found[0].relative_to(FOLDER).parent.parts, name)) if found else name


def main(arguments: list[str]) -> int:
    faulthandler.enable()
    # Tests press Ctrl-C, which a shell has its background jobs ignore.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments == [WORKER]:
        return work()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="so many processes")
    parser.add_argument("-k", action="append", metavar="PART", help="tests with it in their names")
    parser.add_argument("--needs", choices=("cpu", "gpu"), help="tests that need such a device")
    parser.add_argument("--table", action="store_true", help="tests of the operator table")
    parser.add_argument("--drawn", action="store_true", help="tests that draw their cases")
    parser.add_argument(
        "--quick", action="store_true", help="the library: no slow test, no large case"
    )
    parser.add_argument("--sample", action="store_true", help="some cases of the longest tests")
    parser.add_argument("--list", action="store_true", help="print the names of the tests alone")
    parser.add_argument(
        "--slowest", type=int, default=0, metavar="N", help="so many with CPU times"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        os.environ["DLSYS_TEST_QUICK"] = "1"  # test_operators.py reads it, in each process
    if options.sample or options.quick:
        os.environ[sample.VARIABLE] = "1"
        sample.SAMPLED = True
    loader = unittest.defaultTestLoader
    if options.k:
        loader.testNamePatterns = [part if "*" in part else f"*{part}*" for part in options.k]
    if options.names:
        suite = loader.loadTestsFromNames([located(name) for name in options.names])
    else:
        suite = loader.discover(str(FOLDER), top_level_dir=str(FOLDER))
    suite = chosen(suite, options)
    if options.list:
        print(*(test.id() for test in suite), sep="\n")
        return 0
    tally = Tally(skips_fail=os.environ.get("DLSYS_REQUIRE_GPU") == "1")
    if options.j > 1:
        run_dealt(suite, options.j, tally)
    else:
        tally.add(run_here(suite))
        if leaks.report():
            tally.note("the end of the process", "failed")
    sys.stderr.flush()
    return tally.report(options.slowest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

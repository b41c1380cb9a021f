"""Runs every test and ends with one line: `N passed, N failed, N skipped`.

    python tests/run.py [options of nose2, or of unittest where nose2 is not installed]
    python tests/run.py -k PART [-k PART ...]      tests whose names have one of the parts

Errors and unexpected successes count as failed, and so does a run without a single test. Reasons
for skipping are printed with their counts. Under DLSYS_REQUIRE_GPU=1 a skipped test is a failure,
unless its reason begins with `not here:`, which is about a program beside the GPU.
"""

from __future__ import annotations

import collections
import faulthandler
import importlib.util
import os
import signal
import sys
import unittest
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


class Tally:
    """The worst outcome of each test, by its id; a subtest counts towards its test."""

    RANK = ("passed", "skipped", "failed")

    def __init__(self, *, skips_fail: bool) -> None:
        self.skips_fail = skips_fail
        self.outcomes: dict[str, str] = {}
        self.reasons: collections.Counter[str] = collections.Counter()

    def note(self, test: Any, outcome: str, reason: str | None = None) -> None:
        test = getattr(test, "test_case", test)
        if outcome == "skipped":
            reason = reason or "no reason given"
            self.reasons[reason] += 1
            if self.skips_fail and not reason.startswith("not here:"):
                outcome = "failed"
        worst = max(outcome, self.outcomes.get(test.id(), "passed"), key=self.RANK.index)
        self.outcomes[test.id()] = worst

    def testOutcome(self, event: Any) -> None:
        """nose2's hook."""
        failed = {
            "error": True,
            "failed": not event.expected,
            "passed": not event.expected,
            "subtest": event.exc_info is not None,
        }
        if event.outcome == "skipped":
            self.note(event.test, "skipped", event.reason)
        else:
            self.note(event.test, "failed" if failed[event.outcome] else "passed")

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


def run_with_nose2(tally: Tally, arguments: list[str]) -> None:
    from nose2.main import PluggableTestProgram

    argv = ["nose2", "-s", str(FOLDER), "-t", str(FOLDER), *arguments]
    PluggableTestProgram(argv=argv, module=None, exit=False, extraHooks=[("testOutcome", tally)])


def run_with_unittest(tally: Tally, arguments: list[str]) -> None:
    class Result(unittest.TextTestResult):
        def addSuccess(self, test):
            super().addSuccess(test)
            tally.note(test, "passed")

        def addFailure(self, test, err):
            super().addFailure(test, err)
            tally.note(test, "failed")

        def addError(self, test, err):
            super().addError(test, err)
            tally.note(test, "failed")

        def addSubTest(self, test, subtest, err):
            super().addSubTest(test, subtest, err)
            tally.note(test, "failed" if err else "passed")

        def addSkip(self, test, reason):
            super().addSkip(test, reason)
            tally.note(test, "skipped", reason)

        def addExpectedFailure(self, test, err):
            super().addExpectedFailure(test, err)
            tally.note(test, "passed")

        def addUnexpectedSuccess(self, test):
            super().addUnexpectedSuccess(test)
            tally.note(test, "failed")

    if not arguments or arguments[0] == "-k":
        arguments = ["discover", "-s", str(FOLDER), "-t", str(FOLDER), *arguments]
    argv = ["unittest", *arguments]
    runner = unittest.TextTestRunner(resultclass=Result)
    unittest.main(module=None, argv=argv, testRunner=runner, exit=False)


def main(arguments: list[str]) -> int:
    faulthandler.enable()
    # Tests press Ctrl-C, which a shell has its background jobs ignore.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "python")]
    tally = Tally(skips_fail=os.environ.get("DLSYS_REQUIRE_GPU") == "1")
    if "-k" in arguments or not importlib.util.find_spec("nose2"):
        run_with_unittest(tally, arguments)
    else:
        run_with_nose2(tally, arguments)
    sys.stderr.flush()
    return tally.report()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

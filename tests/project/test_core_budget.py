"""The core's budget: the lines that somebody reads to understand how a graph is run."""

from __future__ import annotations

import re
import unittest
from pathlib import Path

import dlsys

PACKAGE = Path(dlsys.__file__).parent
README = PACKAGE.parents[1] / "README.md"
TOUR = PACKAGE.parents[1] / "docs" / "tour.md"

# The rule: every file of these places, with docstrings and blank lines. The rooms capture/, tune/
# and debug/ of executor/ stand beside the core, as fusion/ does: each may be removed, and graphs
# run as before, only slower or unseen. executor/autocast.py and executor/recompute.py are policies
# that an executor may have. arguments/ stands beside it too: a node takes what it is given, and the
# checks of a call are what operators, layers and functions declare.
CORE = (
    "graph/*.py",
    "passes/*.py",
    "executor/executor.py",
    "executor/backend.py",
    "executor/plan/*.py",
    "executor/run/*.py",
)
# What the core may import of the rooms beside it, by importer: the seams.
SEAMS = {
    "executor.py": {"debug", "tune", "fusion"},
    "backend.py": {"capture"},
}
BUDGET = 3500


def core() -> dict[str, int]:
    """The lines of each file of the core."""
    found = {}
    for pattern in CORE:
        for path in sorted(PACKAGE.glob(pattern)):
            name = str(path.relative_to(PACKAGE))
            found[name] = len(path.read_text().splitlines())
    return found


class CoreBudget(unittest.TestCase):
    def test_the_core_keeps_its_budget(self) -> None:
        lines = core()
        total = sum(lines.values())
        print(f"the core has {total:,} lines in {len(lines)} files, of {BUDGET:,}")
        self.assertGreater(len(lines), 20)
        largest = sorted(lines.items(), key=lambda item: -item[1])[:5]
        self.assertLessEqual(total, BUDGET, f"the largest files: {largest}")

    def test_the_readme_and_the_tour_tell_the_number(self) -> None:
        for page in (README, TOUR):
            told = re.search(r"core, about ([\d,]+) lines", page.read_text())
            assert told is not None, f"{page.name} says how long the core is"
            self.assertEqual(int(told[1].replace(",", "")), round(sum(core().values()), -2))

    def test_the_tour_names_the_places(self) -> None:
        text = TOUR.read_text()
        for place in CORE:
            self.assertIn(f"`{place.removesuffix('*.py')}`", text)

    def test_the_core_reads_alone(self) -> None:
        """Fusion, capture, tuning and debugging are imported at seams alone, arguments nowhere."""
        rooms = re.compile(
            r"^\s*from \.+(?:executor\.)?(capture|tune|debug|fusion|arguments)\b", re.MULTILINE
        )
        for name in core():
            found = set(rooms.findall((PACKAGE / name).read_text()))
            allowed = SEAMS.get(Path(name).name, set()) if "/run/" not in name else set()
            if name.startswith("passes/"):
                allowed = {"fusion"}  # a pipeline names the fusions
            self.assertLessEqual(found, allowed, name)

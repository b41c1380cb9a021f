"""What benchmarks/operators/operators.py times: every row of the operators' table, or why not."""

from __future__ import annotations

import json
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from operators.operator_works import WITHIN, WITHOUT, works
from support.table.samples import SAMPLES
from tables import operators as operators_table
from tables.gpu import Results


def record() -> dict[str, Any]:
    ms = {"cpu": 3, "numpy": 8, "torch": 2}
    times = {name: {"min": each, "median": each} for name, each in ms.items()}
    machine = {"cpu": "C", "cores": 2, "python": "3", "numpy": "2"}
    return {
        "threads": 1, "works": {"sin": {"forward": times, "with gradients": times},
                                "sign": {"forward": times}},
        "machine": machine, "date": "today", "commit": "abc", "command": "python operators.py",
    }  # fmt: skip


class Works(unittest.TestCase):
    def test_every_row_is_timed_or_says_why_not(self) -> None:
        timed = {work.row for work in works()}
        told = [timed, set(WITHIN), set(WITHOUT)]
        rows = {sample.name for sample in SAMPLES}
        self.assertEqual(rows - set.union(*told), set(), "add it to operators/operator_works.py")
        self.assertEqual(set.union(*told) - rows, set(), "no such row")
        self.assertEqual(sum(map(len, told)), len(set.union(*told)), "a row is told of twice")
        self.assertEqual(set(WITHIN.values()) - timed, set(), "it is not timed")

    def test_works_have_names_of_their_own(self) -> None:
        names = [work.name for work in works()]
        self.assertEqual(len(set(names)), len(names))


class Tables(unittest.TestCase):
    def test_the_table_has_a_line_an_operator(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "operators.json").write_text(json.dumps(record()))
            table = operators_table.table(Results(Path(folder)))
        self.assertIn("| sin | 2.000 | 1.50 | 4.00 | 2.000 | 1.50 | 4.00 |", table)
        self.assertIn("| sign | 2.000 | 1.50 | 4.00 |  |  |  |", table)
        self.assertIn("0 of 3 times of the CPU device are beyond 2 times PyTorch's", table)

    def test_the_picture_has_a_dot_a_time(self) -> None:
        root = ElementTree.fromstring(operators_table.picture(record()))
        dots = list(root.iter("{http://www.w3.org/2000/svg}circle"))
        self.assertEqual(len(dots), 4 + 6)  # the legend's, and two of each time

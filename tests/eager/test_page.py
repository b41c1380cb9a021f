"""The examples of docs/tensors.md run, one after the other."""

from __future__ import annotations

import contextlib
import io
import re
import unittest
from pathlib import Path

from dlsys import init

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tensors.md"


class Page(unittest.TestCase):
    def test_its_examples_run(self):
        examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
        self.assertGreater(len(examples), 3)
        scope: dict = {}
        init.seed(0)  # of some draws no unit of the hidden layer is ever positive
        with contextlib.redirect_stdout(io.StringIO()) as told:
            for example in examples:
                exec(compile(example, "tensors.md", "exec"), scope)
        printed = told.getvalue().splitlines()
        self.assertTrue(printed[0].startswith("5.462"), printed)
        self.assertEqual(printed[-1], "[ 6. 12.]")
        self.assertLess(scope["loss"].item(), 0.7)

"""The program of docs/data.md learns what it says, and its file comes back as a model."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

from support.small_runs import InFolder

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


class DataPage(InFolder):
    def test_the_program(self) -> None:
        (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        before, names = Path.cwd(), {}
        self.addCleanup(os.chdir, before)
        os.chdir(self.folder)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(program, names)
        lines = printed.getvalue().splitlines()
        self.assertEqual(lines[-2:], ["(4, 2) (4, 1)"] * 2)
        self.assertRegex(lines[59], "^epoch 60/60  loss .* val_loss ")
        self.assertNotIn("accuracy", lines[59])
        self.assertLess(names["worst"], 0.3)

    def test_a_quiet_run_prints_nothing(self) -> None:
        for quiet, lines in ((True, 0), (False, 2)):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                self.fit(epochs=2, quiet=quiet)
            self.assertEqual(len(printed.getvalue().splitlines()), lines)

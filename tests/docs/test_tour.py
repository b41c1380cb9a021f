"""docs/tour.md shows what its code prints; `python tests/docs/test_tour.py --write` puts it
there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from dlsys.ndarray import cpu
from support.devices import require

ROOT = Path(__file__).resolve().parents[2]
TOUR = ROOT / "docs" / "tour.md"
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.S)
BETWEEN = "\n==== the next block ====\n"


def printed(page: str) -> list[str]:
    """What each block of code on the page prints, all run by one fresh Python."""
    program = []
    for block in BLOCK.finditer(page):
        line = page.count("\n", 0, block.start(1))
        code = "\n" * line + block[1]
        program.append(f"exec(compile({code!r}, 'tour.md', 'exec'))")
        program.append(f"print({BETWEEN!r}, end='')")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tour.py"
        path.write_text("\n".join(program))
        done = subprocess.run(
            [sys.executable, str(path)],
            env={"PYTHONPATH": str(ROOT / "python"), "DLSYS_TUNE": "off", "DLSYS_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.split(BETWEEN)[:-1]


def with_output(page: str) -> str:
    """The page with what its code prints."""
    outputs = iter(printed(page))

    def fill(block: re.Match[str]) -> str:
        output = next(outputs)
        shown = "" if block[2] is None else f"\n\n```text\n{output}```"
        return f"```python\n{block[1]}```{shown}"

    return BLOCK.sub(fill, page)


@require(cpu(0))
class Tour(unittest.TestCase):
    def test_shows_what_its_code_prints(self) -> None:
        page = TOUR.read_text(encoding="utf-8")
        self.maxDiff = None
        self.assertMultiLineEqual(with_output(page), page)

    def test_every_output_is_shown(self) -> None:
        """A block that prints something has its output behind it."""
        page = TOUR.read_text(encoding="utf-8")
        for block, output in zip(BLOCK.finditer(page), printed(page)):
            self.assertEqual(bool(output), block[2] is not None, block[1])


class Quotes(unittest.TestCase):
    def test_quoted_lines_and_files_exist(self) -> None:
        page = TOUR.read_text(encoding="utf-8")
        for path, line in re.findall(r"^(src/\S+) +(\S.*)$", page, re.M):
            self.assertIn(line, (ROOT / path).read_text(encoding="utf-8"))
        files = re.findall(r"`((?:\w+/)+\w+\.\w+)`", page)
        self.assertGreater(len(files), 20)
        for name in files:
            self.assertTrue(
                any((ROOT / top / name).is_file() for top in ("", "python/dlsys")), name
            )


if __name__ == "__main__" and "--write" in sys.argv:
    TOUR.write_text(with_output(TOUR.read_text(encoding="utf-8")), encoding="utf-8")

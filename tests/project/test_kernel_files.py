"""A kernel file begins with what it computes, how, and what limits it; comments name real files."""

from __future__ import annotations

import re
import unittest
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"
FILES = {path: path.read_text() for path in sorted(SRC.rglob("*.[ch]*")) if path.is_file()}
KERNELS = [
    p
    for p in FILES
    if re.match(r"(cpu|cuda)/(?!runtime/|instructions/)", p.relative_to(SRC).as_posix())
]


def header(text: str) -> list[str]:
    """The comment lines at the top."""
    return re.match(r"(//.*\n)*", text)[0].splitlines()  # type: ignore[index]


class KernelFiles(unittest.TestCase):
    def test_each_begins_with_a_header_of_three_lines_or_more(self) -> None:
        self.assertGreater(len(KERNELS), 100)
        for path in KERNELS:
            with self.subTest(path=path.relative_to(SRC)):
                self.assertIn(len(header(FILES[path])), range(3, 18))

    def test_each_file_of_kernels_says_what_limits_it_or_which_file_does(self) -> None:
        for path in KERNELS:
            if "DLSYS_KERNEL" in FILES[path] or "__global__" in FILES[path]:
                with self.subTest(path=path.relative_to(SRC)):
                    text = " ".join(header(FILES[path]))
                    self.assertRegex(text, r"\b[Ll]imit(s|ed)?\b|-bound|\w+\.(cc|cuh?|h)\b")

    def test_comments_name_files_that_exist(self) -> None:
        names = {path.name for path in FILES}
        for path, text in FILES.items():
            for comment in re.findall(r"//(.*)", text):
                for name in re.findall(r"\b\w+\.(?:cc|cuh?)\b", comment):
                    with self.subTest(path=path.relative_to(SRC)):
                        self.assertIn(name, names)


if __name__ == "__main__":
    unittest.main()

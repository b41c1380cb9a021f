"""Every term of docs/glossary.md is in the file that it names, and appears once."""

from __future__ import annotations

import re
import unittest
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?!term \|)(.+?) \| (.+?) \| `(.+?)`(?: as `(.+?)`)? \|$", TEXT, re.M)


class Glossary(unittest.TestCase):
    def test_every_line_of_its_tables_is_read(self) -> None:
        lines = [line for line in TEXT.splitlines() if line.startswith("| ")]
        titles = [line for line in lines if line == "| term | meaning | where |"]
        self.assertEqual(len(ROWS), len(lines) - len(titles))
        self.assertGreater(len(ROWS), 50)

    def test_each_term_is_in_the_file_it_names(self) -> None:
        for term, _, file, word in ROWS:
            with self.subTest(term=term, file=file):
                source = (ROOT / file).read_text(encoding="utf-8")
                self.assertIn((word or term).lower(), source.lower())

    def test_a_term_is_one_sentence_and_there_once(self) -> None:
        self.assertEqual([term for term, n in Counter(row[0] for row in ROWS).items() if n > 1], [])
        for term, meaning, *_ in ROWS:
            with self.subTest(term=term):
                self.assertRegex(meaning, r"^[^.]+(\.\d[^.]*)*\.$")

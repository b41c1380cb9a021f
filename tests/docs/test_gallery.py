"""The gallery: its commands are those that make its pictures, which are there and small."""

from __future__ import annotations

import re
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
sys.path.insert(0, str(SITE))

import gallery  # noqa: E402

PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
_LARGEST = 150_000  # bytes of a picture


class Gallery(unittest.TestCase):
    def test_the_page_has_the_commands_that_are_run(self) -> None:
        blocks = re.findall(r"```\n(.*?)```\n\n!\[.*?\]\(gallery/(\w+)\.webp\)", PAGE, re.S)
        shown = {name: tuple(text.strip().splitlines()) for text, name in blocks}
        run = {work.name: tuple(f"dlsys {c}" for c in work.commands) for work in gallery.WORKS}
        self.assertEqual(shown, run)

    def test_its_pictures_are_there_and_small(self) -> None:
        found = {path.stem: path for path in gallery.PICTURES.glob("*")}
        self.assertEqual(set(found), {work.name for work in gallery.WORKS})
        for path in found.values():
            content = path.read_bytes()
            self.assertEqual((content[:4], content[8:12]), (b"RIFF", b"WEBP"), path)
            self.assertLess(len(content), _LARGEST, path)

    def test_a_command_that_fails_ends_it(self) -> None:
        work = gallery.Work("none", ("explain runs/none photos/none.png",), "none.png")
        with tempfile.TemporaryDirectory() as name:
            with mock.patch.object(gallery, "PICTURES", Path(name)):
                with mock.patch.object(gallery, "_give"):
                    with self.assertRaisesRegex(SystemExit, "dlsys explain runs/none"):
                        gallery.make(work, "numpy")
            self.assertEqual(list(Path(name).iterdir()), [])


if __name__ == "__main__":
    unittest.main()

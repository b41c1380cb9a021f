"""Settings: what is no value is refused, and a former name of a variable is read, with a warning,
for one release.
"""

from __future__ import annotations

import os
import re
import unittest
import warnings
from pathlib import Path
from unittest import mock

from dlsys.errors import SettingError
from dlsys.settings import _FORMER_NAMES, Settings

SRC = Path(__file__).resolve().parents[2] / "src"


class Reading(unittest.TestCase):
    def settings(self, **environment: str) -> tuple[Settings, list[str]]:
        """The settings under these variables, and the warnings that reading them gave."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("DLSYS_")}
        with (
            mock.patch.dict(os.environ, kept | environment, clear=True),
            warnings.catch_warnings(record=True) as seen,
        ):
            warnings.simplefilter("always")
            return Settings(), [str(warning.message) for warning in seen]


class Values(Reading):
    def test_what_is_no_value_is_refused(self) -> None:
        for name, value, told in (
            ("DLSYS_GEMM", "tilled", "expected auto, naive, tiled, "),
            ("DLSYS_CONV", "winograd 3x3", "expected auto, .*winograd 2x2, winograd 4x4"),
            ("DLSYS_CONV_WORKSPACE", "-1", "expected an integer from 0 to 1048576"),
            ("DLSYS_CONV_WORKSPACE", "1 GiB", "expected an integer from 0 to 1048576"),
            ("DLSYS_STREAMS", "many", "expected an integer from 0 to 1024"),
        ):
            with self.subTest(name), self.assertRaisesRegex(SettingError, f"{name}.*{told}"):
                self.settings(**{name: value})

    def test_the_usual_workspace_is_that_of_the_native_library(self) -> None:
        text = (SRC / "cuda" / "conv" / "conv.cu").read_text()
        (mib,) = re.findall(r"kUsualMib = (\d+);", text)
        self.assertEqual(self.settings()[0].conv_workspace, int(mib))


class FormerNames(Reading):
    def test_the_former_name_is_read_and_warns_once(self) -> None:
        found, seen = self.settings(DLSYS_LANES="2")
        self.assertEqual(found.streams, 2)
        self.assertEqual(len(seen), 1)
        self.assertRegex(seen[0], "DLSYS_LANES is called DLSYS_STREAMS now")

    def test_the_new_name_wins_silently(self) -> None:
        found, seen = self.settings(DLSYS_LANES="2", DLSYS_STREAMS="3")
        self.assertEqual((found.streams, seen), (3, []))

    def test_nothing_is_said_of_names_that_nobody_set(self) -> None:
        found, seen = self.settings()
        self.assertEqual((found.streams, seen), (4, []))

    def test_former_names_are_of_settings_that_are_documented(self) -> None:
        import dlsys.settings

        for name, former in _FORMER_NAMES.items():
            self.assertIn(f"\n{name} ", dlsys.settings.__doc__)
            self.assertNotIn(former, dlsys.settings.__doc__)

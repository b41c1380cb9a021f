"""Settings: a former name of a variable is read, with a warning, for one release."""

from __future__ import annotations

import os
import unittest
import warnings
from unittest import mock

from dlsys.settings import _FORMER_NAMES, Settings


class FormerNames(unittest.TestCase):
    def settings(self, **environment: str) -> tuple[Settings, list[str]]:
        """The settings under these variables, and the warnings that reading them gave."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("DLSYS_")}
        with (
            mock.patch.dict(os.environ, kept | environment, clear=True),
            warnings.catch_warnings(record=True) as seen,
        ):
            warnings.simplefilter("always")
            return Settings(), [str(warning.message) for warning in seen]

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

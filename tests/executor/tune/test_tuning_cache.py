"""The file in which measurements of kernels are kept, and its settings."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from unittest import mock

import dlsys
from dlsys.runtime.tuning_cache import Measurement, TuningCache, default_path
from dlsys.settings import settings

PACKAGE = Path(dlsys.__file__).parent.parent
ADDER = """
import sys
from pathlib import Path
from dlsys.runtime.tuning_cache import TuningCache, Measurement
path, name, count = sys.argv[1:]
for k in range(int(count)):
    TuningCache(Path(path)).add("chip", {f"{name} {k}": Measurement("fast", "", 1.0, 2.0)})
    print(k, flush=True)
"""
SOME = Measurement("fast", "cuDNN 9.0.0", 1.5, 2.0)


class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "of dlsys" / "tuning.json"

    def adder(self, name: str, count: int) -> subprocess.Popen:
        """A process that adds measurements one by one and says when each is in."""
        return subprocess.Popen(
            [sys.executable, "-c", ADDER, str(self.path), name, str(count)],
            env={**os.environ, "PYTHONPATH": str(PACKAGE)},
            stdout=subprocess.PIPE,
            text=True,
        )

    def keys(self) -> set[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return set(TuningCache(self.path).measurements("chip"))


class File(InFolder):
    def test_what_is_added_is_there_for_all(self) -> None:
        ours, others = TuningCache(self.path), TuningCache(self.path)
        self.assertEqual(ours.measurements("chip"), {})
        ours.add("chip", {"a": SOME})
        self.assertEqual(others.measurements("chip"), {"a": SOME})
        others.add("chip", {"b": SOME._replace(algorithm="")})
        others.add("other chip", {"a": SOME})
        self.assertEqual(set(ours.measurements("chip")), {"a", "b"})
        self.assertEqual(ours.measurements("other chip"), {"a": SOME})

    def test_processes_at_once_lose_nothing(self) -> None:
        adders = [self.adder(name, 40) for name in ("x", "y")]
        for adder in adders:
            adder.communicate(timeout=60)
            self.assertEqual(adder.returncode, 0)
        self.assertEqual(self.keys(), {f"{name} {k}" for name in "xy" for k in range(40)})

    def test_killed_in_the_middle(self) -> None:
        """What was in stays, the file is contents at any moment and can be written."""
        many = {f"before {k}": SOME for k in range(2000)}  # so that writing takes a while
        TuningCache(self.path).add("chip", many)
        for seen in (1, 7, 12):
            with self.adder(f"after {seen}", 100_000) as adder:
                assert adder.stdout is not None
                for _ in range(seen):
                    adder.stdout.readline()
                for _ in range(20):  # while others go in
                    self.assertLess(len(many), len(self.keys()))
                adder.send_signal(signal.SIGKILL)
            self.assertLessEqual({f"after {seen} {k}" for k in range(seen)}, self.keys())
            TuningCache(self.path).add("chip", {f"then {seen}": SOME})
            self.assertIn(f"then {seen}", self.keys())

    def test_what_is_no_such_file_is_told_and_replaced(self) -> None:
        good = {"format": "dlsys tuning cache", "version": 1}
        self.path.parent.mkdir()
        for content, reason in [
            (b"", "no JSON"),
            (b'{"format": "dlsys kernel cho', "no JSON"),
            (b"\xff\x00", "no JSON"),
            (b"[" * 100_000, "no JSON"),
            (b"[1]", "does not say"),
            (b'{"a": 1}', "does not say"),
            (json.dumps(good | {"version": 2}).encode(), "version 2, expected 1"),
            (json.dumps(good).encode(), "another layout"),
            (
                json.dumps(good | {"measurements": {"chip": {"a": {"us": 1}}}}).encode(),
                "another layout",
            ),
        ]:
            with self.subTest(content=content[:40]):
                self.path.write_bytes(content)
                file = TuningCache(self.path)
                with self.assertWarnsRegex(RuntimeWarning, f"is not used.*{reason}"):
                    self.assertEqual(file.measurements("chip"), {})
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # it is told once
                    self.assertEqual(file.measurements("chip"), {})
                    file.add("chip", {"a": SOME})
                self.assertEqual(self.keys(), {"a"})

    def test_what_is_no_file_stays(self) -> None:
        """As /dev/null has to, which root could replace."""
        self.path.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as there:
            there.bind(str(self.path))
            file = TuningCache(self.path)
            with self.assertWarnsRegex(RuntimeWarning, "is not used: it is there and is no file"):
                self.assertEqual(file.measurements("chip"), {})
            with self.assertWarnsRegex(RuntimeWarning, "cannot be kept in .*is no file"):
                file.add("chip", {"a": SOME})
            self.assertEqual(file.measurements("chip"), {"a": SOME})
            self.assertTrue(self.path.is_socket())
        self.assertEqual(list(self.path.parent.iterdir()), [self.path])

    def test_a_folder_that_cannot_be_written(self) -> None:
        """Measurements hold in this process, and it is told once."""
        self.path.parent.write_text("a file where a folder should be")
        file = TuningCache(self.path)
        with self.assertWarnsRegex(RuntimeWarning, "cannot be kept in"):
            file.add("chip", {"a": SOME})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            file.add("chip", {"b": SOME})
        self.assertEqual(set(file.measurements("chip")), {"a", "b"})

    @unittest.skipIf(os.geteuid() == 0, "not here: a user whom permissions hold back")
    def test_a_folder_that_may_not_be_written(self) -> None:
        self.path.parent.mkdir(mode=0o500)
        with self.assertWarnsRegex(RuntimeWarning, "Permission denied"):
            TuningCache(self.path).add("chip", {"a": SOME})

    def test_where_it_is(self) -> None:
        with mock.patch.object(settings, "tune_cache", None):
            with mock.patch.dict(os.environ, XDG_CACHE_HOME="/caches"):
                self.assertEqual(default_path(), "/caches/dlsys/tuning.json")
            with mock.patch.dict(os.environ, XDG_CACHE_HOME="", HOME="/home/me"):
                self.assertEqual(default_path(), "/home/me/.cache/dlsys/tuning.json")
        with mock.patch.object(settings, "tune_cache", "/elsewhere/a.json"):
            self.assertEqual(default_path(), "/elsewhere/a.json")


class Settings(unittest.TestCase):
    def test_another_mode_is_refused(self) -> None:
        done = subprocess.run(
            [sys.executable, "-c", "import dlsys.settings"],
            env={"PYTHONPATH": str(PACKAGE), "DLSYS_TUNE": "fast"},
            capture_output=True,
            text=True,
        )
        self.assertIn("DLSYS_TUNE=fast: expected cached, off, full", done.stderr)

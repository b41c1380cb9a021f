"""tests/run.py counts every outcome, also that of a process that breaks down, and finds tests by
what their code says of them.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from support import leaks, sample, seeds
from support.devices import slow

DOOMED = """
import os, unittest

class Mixed(unittest.TestCase):
    def test_fails(self): print("seen"); self.fail("no")
    def test_passes(self): pass
    @unittest.skip("a reason")
    def test_skipped(self): pass

class Dies(unittest.TestCase):
    def test_dies(self): os._exit(7)

class Lives(unittest.TestCase):
    def test_subtests(self):
        for k in range(2):
            with self.subTest(k=k):
                self.assertEqual(k, 0)
"""

MARKED = """
import unittest
from support import sample
from support.devices import EMULATED, gpu_skip_reason, native_contexts, require, slow
from dlsys.runtime.device import cpu, gpu
from support.seeds import SEED

class Base:
    ctx = None
    def test_short(self): pass
    @slow
    def test_long(self): pass

class OnNothing(Base, unittest.TestCase): pass

@require(gpu(0))
class OfAnyName(Base, unittest.TestCase): pass

class Methods(unittest.TestCase):
    @require(gpu(0))
    def test_alone(self): pass
    @require(cpu(0))
    def test_of_the_cpu(self): pass
    def test_every_device(self):
        for ctx in native_contexts(): pass

class Silent(unittest.TestCase):
    def test_skips(self):
        if gpu_skip_reason():
            self.skipTest(gpu_skip_reason())

class SkippedAsAClass(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise unittest.SkipTest("a reason of its own")
    def test_never(self): pass

class Row(unittest.TestCase):
    def test_of_a_row(self):
        for k in sample.of(range(10), 3):
            with self.subTest(k=k): self.assertIn(k, sample.of(range(10), 10))
    def test_beside_them(self): pass
    test_of_a_row.row = object()
"""
LEAK = """
=================================================================
==7==ERROR: LeakSanitizer: detected memory leaks

Direct leak of 640 byte(s) in 1 object(s) allocated from:
    #0 0x7f in malloc
    #1 0x55 in PyMem_RawMalloc (/usr/bin/python3+0x1)

Indirect leak of 8 byte(s) in 1 object(s) allocated from:
    #0 0x7f in operator new(unsigned long)
    #1 0x7e in DLProgramCreate (/somewhere/libdlsys.so+0x2)

Direct leak of 72 byte(s) in 1 object(s) allocated from:
    #0 0x7f in operator new(unsigned long) ../../../../src/libsanitizer/asan/asan_new_delete.cpp:95
    #1 0x7e in DLProgramCreate src/program.cc:125

Direct leak of 72 byte(s) in 1 object(s) allocated from:
    #0 0x7f in operator new(unsigned long) ../../../../src/libsanitizer/asan/asan_new_delete.cpp:95
    #1 0x7e in PyType_New Objects/typeobject.c:12

SUMMARY: AddressSanitizer: 648 byte(s) leaked in 2 allocation(s).
"""


class Runner(unittest.TestCase):
    def check(self, processes: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "doomed.py").write_text(DOOMED)
            names = ["doomed"] if processes != "1" else ["doomed.Mixed", "doomed.Lives"]
            done = subprocess.run(
                [sys.executable, Path(__file__).parents[1] / "run.py", "-j", processes, *names],
                env={**os.environ, "PYTHONPATH": folder, "DLSYS_REQUIRE_GPU": "0"},
                capture_output=True,
                text=True,
            )
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("1 x a reason", done.stdout)
        self.assertIn("AssertionError: no", done.stderr)
        self.last = done.stdout.splitlines()[-1]
        return done.stderr

    def test_one_process(self) -> None:
        self.check("1")
        self.assertEqual(self.last, "1 passed, 2 failed, 1 skipped")

    def test_a_process_that_dies_fails_its_tests_alone(self) -> None:
        said = self.check("2")
        self.assertEqual(self.last, "1 passed, 3 failed, 1 skipped")
        self.assertIn("ended with status 7: doomed.Dies.test_dies", said)
        self.assertIn("seen", said)


@slow
class Marks(unittest.TestCase):
    def ran(self, *options: str) -> subprocess.CompletedProcess:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "marked.py").write_text(MARKED)
            return subprocess.run(
                [sys.executable, Path(__file__).parents[1] / "run.py", *options, "marked"],
                env={
                    **os.environ, "PYTHONPATH": folder, "DLSYS_REQUIRE_GPU": "0",
                    "DLSYS_LIBRARY": "/nowhere/libdlsys.so", sample.VARIABLE: "",
                },
                capture_output=True,
                text=True,
            )  # fmt: skip

    def listed(self, *options: str) -> set[str]:
        return {
            line.removeprefix("marked.") for line in self.ran("--list", *options).stdout.split()
        }

    def test_what_needs_a_gpu_is_found_whatever_its_name(self) -> None:
        found = {"OfAnyName.test_short", "OfAnyName.test_long"}
        found |= {"Methods.test_alone", "Methods.test_every_device"}
        self.assertEqual(self.listed("--needs", "gpu"), found)
        found = {"Methods.test_of_the_cpu", "Methods.test_every_device"}
        self.assertEqual(self.listed("--needs", "cpu"), found)

    def test_a_silent_need_of_a_gpu_fails(self) -> None:
        for processes in "12":
            done = self.ran("-j", processes)
            self.assertEqual(done.returncode, 1)
            self.assertIn("Silent.test_skips: it needs a GPU and does not say so", done.stderr)
            self.assertEqual(done.stdout.splitlines()[-1], "5 passed, 1 failed, 5 skipped")

    def test_slow_ones_are_left_out(self) -> None:
        quick = self.listed("--quick")
        self.assertTrue({"OnNothing.test_short", "Row.test_of_a_row"} < quick)
        self.assertFalse({"OnNothing.test_long", "OfAnyName.test_long"} & quick)
        self.assertEqual(self.listed("--table"), {"Row.test_of_a_row"})

    def test_a_sample_says_what_it_leaves_out(self) -> None:
        for processes in "12":
            done = self.ran("-j", processes, "-k", "Row", "--sample")
            self.assertIn(
                "\n7 cases of tests left out of the sample: make test-full\n", done.stdout
            )
            self.assertEqual(done.stdout.splitlines()[-1], "2 passed, 0 failed, 0 skipped")
            self.assertNotIn("left out", self.ran("-j", processes, "-k", "Row").stdout)

    def test_modules_that_draw(self) -> None:
        self.assertEqual(self.listed("--drawn"), self.listed())
        self.assertGreater(len(self.listed()), 8)


class Seeds(unittest.TestCase):
    def test_fixed_given_or_drawn(self) -> None:
        self.assertEqual((seeds.read(""), seeds.read("7")), (seeds.FIXED, 7))
        self.assertNotEqual(len({seeds.read("drawn") for _ in range(9)}), 1)
        for wrong in ("x", "-1", "²", str(2**32)):
            with self.assertRaisesRegex(ValueError, "DLSYS_TEST_SEED=.* below"):
                seeds.read(wrong)

    def test_nothing_else_reads_it(self) -> None:
        readers = [
            path.name
            for path in Path(__file__).parents[1].rglob("*.py")
            if "environ" in (text := path.read_text()) and f'"{seeds.VARIABLE}"' in text
        ]
        self.assertEqual(readers, ["seeds.py"])


class Samples(unittest.TestCase):
    """Some of the cases, evenly spaced, with the first and the last."""

    def test_only_where_it_is_asked_for(self) -> None:
        with mock.patch.multiple(sample, SAMPLED=False, left_out=0):
            self.assertEqual(sample.of("abcde", 2), list("abcde"))
            self.assertEqual((sample.rest("ab"), sample.count(9, 3)), (["a", "b"], 9))
            self.assertEqual(sample.left_out, 0)
        with mock.patch.multiple(sample, SAMPLED=True, left_out=0):
            self.assertEqual(sample.of(range(11), 3), [0, 5, 10])
            self.assertEqual(sample.of(range(3), 3), [0, 1, 2])
            self.assertEqual((sample.rest("ab"), sample.count(9, 3)), ([], 3))
            self.assertEqual(sample.left_out, 8 + 2 + 1)


class Leaks(unittest.TestCase):
    def test_those_of_the_library_count(self) -> None:
        found = [text.split(" byte")[0] for text in leaks.of_library(LEAK)]
        self.assertEqual(found, ["Indirect leak of 8", "Direct leak of 72"])


class Names(unittest.TestCase):
    def test_a_folder_is_left_out_or_named(self) -> None:
        """Also of rooms in folders; tests/fuzz has a file with the name of a folder."""
        runner = runpy.run_path(str(Path(__file__).resolve().parents[1] / "run.py"))
        for name in ("fusion.conv.test_conv_pool.Pass", "training.test_fit", "no_such_module.Fit"):
            self.assertEqual(runner["located"](name), name)
        self.assertEqual(
            runner["located"]("test_conv_pool.Pass"), "fusion.conv.test_conv_pool.Pass"
        )


class Packages(unittest.TestCase):
    def test_those_of_tests_and_benchmarks_have_names_of_their_own(self) -> None:
        """A process that has both on its path would find the modules of one in the other."""
        root = Path(__file__).resolve().parents[2]
        names = [
            {path.parent.name for path in (root / folder).glob("*/__init__.py")}
            for folder in ("tests", "benchmarks")
        ]
        self.assertTrue(all(names))
        self.assertEqual(names[0] & names[1], set())

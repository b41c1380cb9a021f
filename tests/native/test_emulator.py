"""The emulated GPU shows faults of kernels that a real one may hide."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

from support.devices import slow

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "emulator"
FAULTS = ROOT / "tests" / "gpu" / "emulator_faults.cc"
COMPILER = shutil.which("g++") or shutil.which("clang++")


@slow
@unittest.skipIf(COMPILER is None, "no C++ compiler here")
@unittest.skipIf(platform.machine() != "x86_64", "the emulator is for x86-64")
class Emulator(unittest.TestCase):
    def test_faults_of_kernels_show(self) -> None:
        includes = [f"-I{SOURCES}", f"-I{ROOT / 'src'}"]
        of_cuda = [
            ROOT / "src" / name
            for name in ("cuda/runtime/stream_order.cu", "cuda/runtime/context.cu")
        ]
        sources = [
            FAULTS,
            *SOURCES.glob("*.cc"),
            *of_cuda,
            ROOT / "src" / "runtime" / "registry.cc",
        ]
        with tempfile.TemporaryDirectory() as folder:
            program = str(Path(folder) / "faults")
            command = [str(COMPILER), "-std=c++17", "-O0", "-pthread", *includes, "-x", "c++"]
            subprocess.run([*command, *map(str, sources), "-o", program], check=True, timeout=200)
            done = subprocess.run([program], capture_output=True, text=True, timeout=60)
        lines = done.stdout.splitlines()
        self.assertEqual(len(lines), 29, done)
        for line in lines:
            with self.subTest(line):
                self.assertTrue(line.endswith(": yes"), line)
        self.assertRegex(
            done.stderr, "^emulated GPU: 128 of 128 threads of block 0 wait for others"
        )
        self.assertEqual(done.returncode, 0, done)

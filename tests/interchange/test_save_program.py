"""Saved programs: a C program without Python gives the same bits, and refuses damaged files."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path
from typing import Any

import numpy as np

import dlsys as dl
from dlsys import data, nn
from dlsys import functional as F
from dlsys.errors import GraphError, ShapeError
from dlsys.runtime.library import library_path
from support.devices import native_contexts

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "examples/deploy/run_program.c"
RNG = np.random.default_rng(0)


class TwoInputs(nn.Module):
    """Two inputs of two dtypes, two outputs, one of which is an input unchanged."""

    def __init__(self) -> None:
        self.embedding = nn.Embedding(7, 5)

    def forward(self, indices: Any, x: Any) -> Any:
        return F.softmax(self.embedding(indices) * x, axis=-1), x


@unittest.skipIf(shutil.which("cc") is None, "no C compiler here (cc)")
@unittest.skipIf(not native_contexts(), "the native library is not built")
class SavedPrograms(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.command = cls.folder / "run"
        library = Path(library_path()).resolve()
        flags = ["-std=c99", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror"]
        link = [str(library), f"-Wl,-rpath,{library.parent}", "-o", str(cls.command)]
        compiled = ["cc", *flags, f"-I{ROOT / 'src/include'}", str(SOURCE), *link]
        subprocess.run(compiled, check=True)

    def run_program(self, *arguments: Any) -> subprocess.CompletedProcess[str]:
        words = [str(self.command), *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, timeout=120)

    def check(self, ctx: Any, model: nn.Module, *inputs: np.ndarray) -> None:
        program = dl.infer(model, ctx=ctx)
        wanted = program(*inputs)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        program.save_program(self.folder / "saved", *inputs)
        read = [self.folder / f"x{k}" for k in range(len(inputs))]
        written = [self.folder / f"y{k}" for k in range(len(wanted))]
        for path, x in zip(read, inputs):
            x.tofile(path)
        done = self.run_program(self.folder / "saved", *read, *written)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for path, y in zip(written, wanted):
            np.testing.assert_array_equal(np.fromfile(path, y.dtype).reshape(y.shape), y)

    def test_a_convolutional_network(self) -> None:
        for ctx in native_contexts():
            self.check(ctx, nn.LeNet5(seed=0), RNG.standard_normal((3, 1, 28, 28)).astype("f"))

    def test_a_transformer(self) -> None:
        tokens = RNG.integers(0, 11, (2, 8))
        for ctx in native_contexts():
            self.check(ctx, nn.GPT(nn.GPTConfig(11, 8, 1, 2, 16), seed=0), tokens)

    def test_a_quantized_network(self) -> None:
        loader = data.Loader((RNG.random((64, 1, 28, 28), np.float32), np.zeros(64)), 32)
        quantized = dl.quantize(nn.LeNet5(seed=0), loader)
        x = RNG.random((2, 1, 28, 28), np.float32)
        self.check("cpu", quantized, x)

    def test_several_inputs_and_outputs(self) -> None:
        x = RNG.standard_normal((4, 5)).astype("f")
        for ctx in native_contexts():
            self.check(ctx, TwoInputs(), RNG.integers(0, 7, 4), x)

    def test_many_runs(self) -> None:
        x = np.ones((1, 4), np.float32)
        x.tofile(self.folder / "x")
        for ctx in native_contexts():
            dl.infer(nn.MLP((4, 3), seed=0), ctx=ctx).save_program(self.folder / "mlp", x)
            files = self.folder / "x", self.folder / "y"
            self.assertRegex(self.run_program(self.folder / "mlp", *files, 3).stdout, " us a run")

    def test_damaged_files_are_refused(self) -> None:
        x = np.ones((1, 4), np.float32)
        x.tofile(self.folder / "x")
        (self.folder / "short").write_bytes(b"12")
        saved, files = self.folder / "damaged", (self.folder / "x", self.folder / "y")
        dl.infer(nn.MLP((4, 3), seed=0), ctx="cpu").save_program(saved, x)
        plan, weights = (saved / "plan.txt").read_text(), (saved / "weights.bin").read_bytes()
        words = plan.split(" ")
        damaged = [" ".join(words[:k]) for k in range(0, len(words), 5)]
        damaged += [" ".join([*words[:k], "-7", *words[k + 1 :]]) for k in range(0, len(words), 5)]
        damaged += [plan.replace("matmul", "mutmal"), "dlsys-program 2 0 1\n"]
        for text in damaged:
            (saved / "plan.txt").write_text(text)
            done = self.run_program(saved, *files)
            if done.returncode:  # a number may be of no account, such as a flag
                self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), text)
            else:
                self.assertIn("-7", text)
        (saved / "plan.txt").write_text(plan)
        self.assertIn("not 16 bytes", self.run_program(saved, self.folder / "short", "y").stderr)
        self.assertIn("cannot be opened", self.run_program(saved, "/nowhere", "y").stderr)
        self.assertIn("1 inputs and 1 outputs", self.run_program(saved).stderr)
        (saved / "weights.bin").write_bytes(weights[:-1])
        self.assertIn("weights.bin: not", self.run_program(saved, *files).stderr)

    def test_what_cannot_be_saved(self) -> None:
        x = np.ones((2, 4), np.float32)
        with self.assertRaisesRegex(GraphError, "say where, such as ctx='cpu'"):
            dl.infer(nn.MLP((4, 3), seed=0)).save_program(self.folder / "none", x)
        with self.assertRaisesRegex(GraphError, "runs in Python"):
            dl.infer(OnHost(), ctx="cpu").save_program(self.folder / "none", x)
        with self.assertRaisesRegex(ShapeError, "as many samples"):
            dl.infer(TwoInputs(), ctx="cpu").save_program(self.folder / "none", x[0], x)
        self.assertFalse((self.folder / "none").exists())


class OnHost(nn.Module):
    def forward(self, x: Any) -> Any:
        return F.astype(x, np.int64) @ F.astype(x.T, np.int64)


if __name__ == "__main__":
    unittest.main()

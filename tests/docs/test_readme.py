"""The README's examples run, and what it and docs/adding.md name is there."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import unittest
from pathlib import Path

import numpy as np

from dlsys import autodiff as ad
from support import sample
from support.devices import each_context, not_emulated

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
ADDING = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.S)


class Readme(unittest.TestCase):
    def test_the_ten_lines_learn(self):
        with contextlib.redirect_stdout(io.StringIO()) as told:
            exec(EXAMPLES[0], {})
        loss, accuracy = map(float, re.findall(r"[\d.]+", told.getvalue()))
        self.assertLess(loss, 0.2)
        self.assertGreater(accuracy, 0.9)

    @not_emulated
    def test_the_graph_learns_on_every_device(self):
        for ctx in each_context():
            with self.subTest(ctx=ctx):
                scope: dict = {"ctx": ctx}
                exec(EXAMPLES[1].replace("ctx=None", "ctx=ctx"), scope)
                self.assertLess(float(scope["loss_value"]), 0.2)

    @not_emulated
    def test_a_network_from_data_to_checkpoint(self):
        example = EXAMPLES[2].replace("ndarray.best()", "CTX", 1).replace("runs/lenet", "FOLDER")
        for name, count in (("train", sample.count(600, 300)), ("validation", 100), ("test", 100)):
            example = example.replace(f"sets.{name},", f"sets.{name}.subset(slice({count})),")
        for ctx in each_context():
            with self.subTest(ctx=ctx), tempfile.TemporaryDirectory() as folder:
                scope: dict = {"CTX": ctx}
                with contextlib.redirect_stdout(io.StringIO()) as told:
                    exec(example.replace("FOLDER", folder), scope)
                losses = [epoch["loss"] for epoch in scope["history"].epochs]
                self.assertEqual(len(losses), 3)
                self.assertLess(losses[-1], losses[0])
                self.assertIn("accuracy", told.getvalue())
                kept = sorted(path.name for path in Path(folder).iterdir())
                self.assertEqual(kept, ["best.safetensors", "last.safetensors"])

    def test_the_operator_in_python(self):
        scope: dict = {}
        exec(EXAMPLES[3], scope)
        x = ad.Variable("x")
        y = scope["square_op"](x)
        (dx,) = ad.gradients(y, [x])
        value = np.array([1.0, -2.0, 3.5], np.float32)
        for ctx in each_context():
            with self.subTest(ctx=ctx):
                results = ad.Executor([y, dx], ctx=ctx).run({x: value}, True)
                np.testing.assert_allclose(results[0], value**2)
                np.testing.assert_allclose(results[1], 2 * value)

    def test_lines_quoted_in_the_page_on_additions_are_in_the_sources(self):
        quoted = re.findall(r"^\| `((?:src|python)/\S+)` \| `(\S.*?)`", ADDING, re.M)
        self.assertEqual(len(quoted), 2)
        for file, line in quoted:
            source = " ".join((ROOT / file).read_text(encoding="utf-8").split())
            source = source.replace("( ", "(").replace(" )", ")")
            self.assertIn(" ".join(line.split()), source, file)

    def test_files_that_are_named_exist(self):
        links = re.findall(r"\]\(([^)#]+)\)", TEXT)
        rooms = "src|tests|benchmarks|data|python"
        named = re.findall(rf"`((?:{rooms})/[\w./]*)`(?!, new)", TEXT + ADDING)
        table = TEXT[TEXT.index("## Operators") : TEXT.index("## The command line")]
        rows = re.findall(r"^\|.*\| ((?:`[\w/]+(?:\.py|/)` ?)+)\|$", table, re.M)
        operators = [name for row in rows for name in re.findall(r"`(\S+)`", row)]
        self.assertGreater(len(operators), 12)
        for path in [*links, *named, *(f"python/dlsys/ops/{name}" for name in operators)]:
            self.assertTrue((ROOT / path).exists(), path)

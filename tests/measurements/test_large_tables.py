"""Tables and picture of large training steps: order, floors, and what an earlier call left."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from shared import measure
from steps import large as benchmark
from tables import large


def step(work: str, precision: str, side: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"work": work, "precision": precision, "side": side, "ms": ms, "peak_mib": 1024,
            "first_s": 1.0, **more}  # fmt: skip


def kernel(operator: str, ms: float, gb_per_s: int, tflops: float) -> dict[str, Any]:
    return {"operator": operator, "calls": 2, "ms": ms, "gb_per_s": gb_per_s, "tflops": tflops}


KERNELS = [kernel("matmul", 4.0, 1000, 494.7), kernel("copy", 2.0, 2140, 0.1),
           kernel("tiny", 0.01, 1, 0.1)]  # fmt: skip
STEPS = [
    step("resnet50", "tf32", "dlsys", 30.0, kernels=KERNELS),
    step("gpt2", "bf16", "PyTorch", 36.0),
    step("gpt2", "bf16", "dlsys", 28.0, kernels=KERNELS, kernels_commit="abc"),
    step("resnet50", "bf16", "dlsys", 16.0),
    step("resnet50", "bf16", "PyTorch", 19.0),
]


class Tables(unittest.TestCase):
    def setUp(self) -> None:
        self.record = {"steps": STEPS, "machine": {"gpu": "NVIDIA H200 (9.0)"}}
        self.results = mock.Mock(read=lambda name: self.record)

    def test_ours_before_theirs_in_the_order_of_works(self) -> None:
        with mock.patch.object(large, "source", lambda record: "a source"):
            lines = large.steps(self.results).splitlines()[2:7]
        self.assertEqual([line.split("|")[2].strip() for line in lines],
                         ["28.0", "36.0", "16.0", "19.0", "30.0"])  # fmt: skip
        said = large.sentence(self.results)
        self.assertIn("28.0 ms a step, PyTorch compiled and captured 36.0", said)
        self.assertIn("16.0 ms a step, PyTorch compiled and captured 19.0", said)

    def test_measured_algorithms_stand_behind_the_heuristics(self) -> None:
        sides = ["PyTorch 2.11", "dlsys tuned before", "dlsys", "dlsys tuned"]
        self.record["steps"] = [step("gpt2", "bf16", side, 1.0) for side in sides]
        with mock.patch.object(large, "source", lambda record: "a source"):
            lines = large.steps(self.results).splitlines()[2:6]
        found = [line.split("|")[1].partition(": ")[2].strip() for line in lines]
        self.assertEqual(found, ["dlsys", "dlsys tuned", "dlsys tuned before", "PyTorch 2.11"])

    def test_floors_and_earlier_commits(self) -> None:
        text = large.kernels(self.results)
        self.assertIn("bf16, of commit abc:", text)
        bf16, tf32 = text.split("ResNet-50")
        self.assertIn("| `matmul` | 2 | 4.00 | 2.00 | 1000 | 494.7 |", bf16)
        self.assertIn("| `matmul` | 2 | 4.00 | 4.00 | 1000 | 494.7 |", tf32)
        self.assertIn("| `copy` | 2 | 2.00 | 1.00 | 2140 | 0.1 |", text)
        self.assertNotIn("tiny", text)

    def test_the_picture(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "large.svg"
            self.assertEqual(large.draw(self.results, path), str(path))
            drawn = path.read_text()
            self.assertEqual(drawn.count("matmul (2)"), 2)
            self.assertEqual(drawn.count("<rect"), 8)
            missing = mock.Mock(read=mock.Mock(side_effect=FileNotFoundError("large.json")))
            self.assertIn("left as it is", large.draw(missing, path))
            self.assertEqual(path.read_text(), drawn)


class Record(unittest.TestCase):
    def run_it(self, folder: Path, lines: list[dict[str, Any]], *options: str) -> Any:
        """The status of a call whose sides print these lines, and the record after it."""
        argv = ["large", "--out", str(folder), "--commit", "0123", "--works", "gpt2", *options]
        with (
            mock.patch.object(sys, "argv", argv),
            mock.patch.object(measure, "machine", return_value={"gpu": "NVIDIA H200"}),
            mock.patch.object(benchmark, "sides", return_value=lines),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            status = benchmark.main()
        return status, json.loads((folder / "large.json").read_text())["steps"]

    def test_a_side_that_fails_leaves_what_was_there(self) -> None:
        ours, theirs = step("gpt2", "bf16", "dlsys", 28.0), step("gpt2", "bf16", "PyTorch", 36.0)
        with tempfile.TemporaryDirectory() as folder:
            status, steps = self.run_it(Path(folder), [ours, theirs], "--precisions", "bf16")
            self.assertEqual((status, len(steps)), (0, 2))
            again = [{**ours, "ms": 27.0}, {"error": "large_torch ended with status 1"}]
            status, steps = self.run_it(Path(folder), again, "--precisions", "bf16")
            self.assertEqual(status, 1)
            self.assertEqual({x["side"]: x["ms"] for x in steps}, {"dlsys": 27.0, "PyTorch": 36.0})


if __name__ == "__main__":
    unittest.main()

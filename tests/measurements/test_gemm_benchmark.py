"""A record of benchmarks/operators/gemm.py made in parts is that of one call."""

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

from operators import gemm

CHIP = "NVIDIA H200"


def rungs(ctx: Any, shape: Any, precisions: list[str], variants: str) -> list[dict[str, Any]]:
    """Made-up figures: a library twice as fast at tf32."""
    rate = {"fp32": 50.0, "3xtf32": 100.0, "tf32": 200.0}
    return [
        {"algorithm": name, "precision": one, "tflops": rate[one]}
        for one in precisions
        for name in ("tensor", "cublas")
        if (name, one) != ("cublas", "3xtf32")
    ]


class Record(unittest.TestCase):
    def measured(self, folder: str, *options: str, machine: str = CHIP) -> tuple[Any, int]:
        """The record after a call, and how many shapes it measured."""
        argv = ["gemm", "--device", "gpu", "--out", folder, "--commit", "0123", *options]
        with (
            mock.patch.object(sys, "argv", argv),
            mock.patch("dlsys.runtime.device.device_name", return_value=machine),
            mock.patch.object(gemm, "_rungs", side_effect=rungs) as calls,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            gemm.main()
        return json.loads((Path(folder) / "gemm.json").read_text()), calls.call_count

    def test_parts_make_a_whole(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.measured(folder, "--shapes", "transposed", "--precisions", "3xtf32")
            self.measured(folder, "--shapes", "squares", "--precisions", "tf32,fp32")
            record, count = self.measured(
                folder, "--missing", "--shapes", "squares,transposed", "--precisions", "fp32,3xtf32"
            )
        squares, transposed = len(gemm.SHAPES["squares"]), len(gemm.SHAPES["transposed"])
        self.assertEqual(count, squares + transposed)
        kinds = [work["kind"] for work in record["works"]]
        self.assertEqual(kinds, ["squares"] * squares + ["transposed"] * transposed)
        shares = [
            (row["algorithm"], row["precision"], row["of_cublas"])
            for row in record["works"][0]["rungs"]
        ]
        expected = [("tensor", "fp32", 1.0), ("cublas", "fp32", 1.0), ("tensor", "3xtf32", 2.0)]
        self.assertEqual(shares, [*expected, ("tensor", "tf32", 1.0), ("cublas", "tf32", 1.0)])
        late = record["works"][-1]  # at 3xtf32 by the first call, at fp32 by the last one
        commands = {one: origin["command"] for one, origin in late["measured"].items()}
        self.assertNotIn("--missing", commands["3xtf32"])
        self.assertIn("--missing", commands["fp32"])
        self.assertEqual(late["rungs"][-1]["of_cublas"], 2.0)

    def test_what_is_there_is_not_measured_again(self) -> None:
        asked = ("--missing", "--shapes", "transposed", "--precisions", "fp32")
        with tempfile.TemporaryDirectory() as folder:
            self.assertGreater(self.measured(folder, *asked)[1], 0)
            self.assertEqual(self.measured(folder, *asked)[1], 0)
            self.assertGreater(self.measured(folder, *asked, machine="another")[1], 0)

    def test_kinds_take_turns(self) -> None:
        """So that a call which runs out of time has measured some shapes of each."""
        told = io.StringIO()
        argv = ["gemm", "--device", "gpu", "--shapes", "squares,skinny", "--precisions", "fp32"]
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(sys, "argv", [*argv, "--out", folder, "--commit", "0123"]),
            mock.patch("dlsys.runtime.device.device_name", return_value=CHIP),
            mock.patch.object(gemm, "_rungs", side_effect=rungs),
            contextlib.redirect_stdout(told),
        ):
            gemm.main()
        measured = told.getvalue().split("\n\n")
        self.assertIn("512 x 512 x 512", measured[0])
        self.assertIn("784 x 128 x 60000 TN", measured[1])
        self.assertIn("1024 x 1024 x 1024", measured[2])
        self.assertIn("1 x 4096 x 4096", measured[-1])

    def test_no_time_is_left(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.measured(folder, "--shapes", "transposed", "--precisions", "fp32")
            asked = ("--shapes", "squares", "--precisions", "fp32", "--seconds", "-1")
            record, count = self.measured(folder, *asked)
        self.assertEqual(count, 0)
        self.assertEqual({work["kind"] for work in record["works"]}, {"transposed"})


if __name__ == "__main__":
    unittest.main()

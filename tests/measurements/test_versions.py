"""The benchmarks that hold one version of dlsys against another: the same bits, the same speed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from shared import measure
from support.devices import slow
from versions import before_after

PACKAGE = str(measure.ROOT / "python")


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = measure.program(program, *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@slow
class Bits(unittest.TestCase):
    def test_runs_agree_and_another_bit_is_named(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            first, second = f"{folder}/first.json", f"{folder}/second.json"
            for path in (first, second):
                done = run("bits", "--only", "tour", "--devices", "numpy,cpu", "--out", path)
                self.assertEqual(done.returncode, 0, done.stderr)
            same = run("bits", "--compare", first, second)
            self.assertEqual(same.returncode, 0, same.stdout + same.stderr)
            record = json.loads(Path(second).read_text())
            self.assertIn("parameter w", record["bits"]["tour"]["numpy"])
            record["bits"]["tour"]["numpy"]["parameter w"] = "0"
            del record["bits"]["tour, second order"]
            Path(second).write_text(json.dumps(record))
            other = run("bits", "--compare", first, second)
            self.assertEqual(other.returncode, 1, other.stderr)
            self.assertIn("tour | numpy | parameter w: other bits", other.stdout)
            self.assertIn("tour, second order | numpy | loss 0: only in", other.stdout)

    def test_kept_arrays_say_how_far_apart(self) -> None:
        import numpy as np

        with tempfile.TemporaryDirectory() as folder:
            for name, value in (("first", 2.0), ("second", 2.5)):
                path = Path(folder) / f"{name}.json"
                record = {"bits": {"a": {"numpy": {"loss 0": name}}}}
                path.write_text(
                    json.dumps({**record, "machine": 0, "environment": 0, "left_out": 0})
                )
                arrays = {"a | numpy | loss 0": np.array([4.0, value], np.float32)}
                np.savez(path.with_suffix(".npz"), **arrays)
            done = run("bits", "--compare", f"{folder}/first.json", f"{folder}/second.json")
        self.assertIn("apart by 1.2e-01 of the largest, 50.0% of the elements", done.stdout)


@slow
class BeforeAfter(unittest.TestCase):
    def test_a_package_beside_itself(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            done = run(
                *("before_after", "--before", PACKAGE, "--after", PACKAGE, "--out", folder),
                *("--only", "numpy,import", "--rows", "the host", "--rounds", "2", "--pairs", "1"),
                *("--seconds", "0.01", "--patience", "0"),
            )
            self.assertIn(done.returncode, (0, 1), done.stderr)
            rows = json.loads((Path(folder) / "before_after.json").read_text())["rows"]
        self.assertEqual(list(rows), ["numpy: mlp-1, the host", "import"])
        self.assertEqual(rows["numpy: mlp-1, the host"]["after"]["n"], 2)

    def test_worse_is_what_both_ratios_show(self) -> None:
        for after, verdict in (
            ([1.0, 1.0, 1.0], ""),
            ([1.1, 1.1, 1.1], "WORSE"),
            ([1.0, 1.1, 1.1], "unclear"),
        ):
            with self.subTest(after=after):
                judged = before_after.judged({"before": [1.0, 1.0, 1.0], "after": after})
                self.assertEqual(judged["verdict"], verdict)

"""benchmarks/operators/conv.py on small convolutions, and the tables and the picture made of it."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any
from unittest import mock

from dlsys.learn.conv import CHANNELS_LAST
from dlsys.runtime.device import cpu
from support.devices import require

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from operators import conv
from tables import conv_ladder
from tables.gpu import Results

SHAPES = {"small": [(2, 3, 6, 4, 3, 1, 1), (2, 4, 5, 4, 1, 2)]}
DRAWN = [9, 3, 6, 4, 3, 1, 1, 1], "forward"  # at any batch


@require(cpu(0))
class Benchmark(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        for patch in (
            mock.patch.object(conv, "SHAPES", SHAPES),
            mock.patch.object(conv_ladder, "DRAWN", DRAWN),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def run_it(self, *options: str) -> str:
        """What the benchmark prints."""
        arguments = ["conv", "--device", "cpu", "--nets", "small", "--out", str(self.folder)]
        with mock.patch("sys.argv", [*arguments, *options]):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                conv.main()
        return printed.getvalue()

    def test_rungs_are_measured_and_shown(self) -> None:
        told = self.run_it()
        self.assertRegex(told, r"small forward fp32: auto takes \d+\.\d\d of the fastest")
        results = Results(self.folder)
        works = results.read("conv_cpu")["works"]
        self.assertEqual(len(works), 2 * 3)
        names = [row["algorithm"] for row in works[0]["rungs"]]
        self.assertLessEqual({"implicit", "numpy implicit", "numpy winograd"}, set(names))
        table = conv_ladder.table(results)
        self.assertRegex(
            table.splitlines()[0], r"\| auto, CPU \| naive, CPU \|.* winograd 2x2, CPU"
        )
        self.assertIn("small: 2 x 4 x 5², 4 filters 1² stride 2, data, fp32", table)
        self.assertEqual(table.count("\n| small"), 6)
        drawn = conv_ladder.drawn(results)
        self.assertEqual(drawn.count("\n| "), len(works[0]["rungs"]) + 1)
        self.assertIn("| implicit fp32, CPU |", drawn)
        self.assertRegex(conv_ladder.errors(results), r"\| naive fp32, CPU \| [\d.]+ \| [\d.]+ \|")
        path = self.folder / "conv.svg"
        conv_ladder.draw(results, path)
        shapes = [each.tag.rpartition("}")[2] for each in ElementTree.fromstring(path.read_text())]
        self.assertEqual(shapes.count("rect"), len(works[0]["rungs"]))

    def test_variants_are_told_and_leave_no_record(self) -> None:
        self.assertIn("winograd 4x4", self.run_it("--variants", "--batch", "1"))
        self.assertEqual(list(self.folder.iterdir()), [])
        with self.assertRaises(FileNotFoundError):
            conv_ladder.table(Results(self.folder))
        told = conv_ladder.draw(Results(self.folder), self.folder / "conv.svg")
        self.assertIn("left as it is", told)

    def test_parts_make_a_whole(self) -> None:
        self.assertEqual(self.run_it("--missing").count("small: "), 6)
        works = Results(self.folder).read("conv_cpu")["works"]
        self.assertNotIn("small: ", self.run_it("--missing"))
        self.assertEqual(Results(self.folder).read("conv_cpu")["works"], works)
        more = {**SHAPES, "other": [(1, 2, 4, 2, 1)]}
        with mock.patch.object(conv, "SHAPES", more):
            self.run_it("--nets", "other")
        found = Results(self.folder).read("conv_cpu")["works"]
        self.assertEqual(found[: len(works)], works)
        self.assertEqual({work["net"] for work in found[len(works) :]}, {"other"})
        self.assertEqual(set(found[-1]["measured"]), {"fp32"})

    def test_sums_are_those_of_what_a_network_computes(self) -> None:
        def work(direction: str, c: int, **ms: float) -> dict[str, Any]:
            rows = [
                {"algorithm": name.replace("last_", CHANNELS_LAST), "precision": "tf32", "ms": each}
                for name, each in ms.items()
            ]
            shape = [2, c, 7, 8, 3, 1, 1, 1]
            return {"net": "small", "shape": shape, "direction": direction, "rungs": rows}

        sums = conv.sums_of(
            [
                work("forward", 3, auto=3.0, implicit=2.0, cudnn=2.5, last_implicit=1.0),
                work(
                    "forward",
                    64,
                    auto=4.0,
                    implicit=5.0,
                    cudnn=4.0,
                    last_auto=3.0,
                    last_cudnn=2.0,
                    last_implicit=2.5,
                ),
                work("data", 3, auto=100.0, implicit=1.0, cudnn=1.0),
                work("data", 64, auto=2.0, implicit=2.0),
            ]
        )
        forward = sums["small", "forward", "tf32"]
        self.assertEqual(forward[:5], (2, 7.0, 6.0, 7.0, 6.5))
        self.assertEqual(forward.worst[0], 1.5)
        self.assertIn("3 x 7", forward.worst[1])
        self.assertEqual(sums["small", "data", "tf32"][:5], (1, 2.0, 2.0, 2.0, None))
        last = sums["small", "forward", "tf32, channels last"]
        self.assertEqual(last[:5], (1, 3.0, 2.0, 2.5, 2.0))

    def test_names_that_are_none(self) -> None:
        for option in ("--nets", "--precisions"):
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as told:
                self.run_it(option, "nope")
            self.assertIn(f"argument {option}: invalid choice: 'nope'", told.getvalue())

    def test_what_is_left_out_is_told(self) -> None:
        self.assertEqual(self.run_it("--seconds", "-1").count("left out for want of time"), 6)


if __name__ == "__main__":
    unittest.main()

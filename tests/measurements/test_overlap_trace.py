"""What benchmarks/steps/overlap.py reads from a trace, and the table and picture made of it."""

from __future__ import annotations

import json
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from steps import overlap
from steps.overlap import Activity
from tables import overlap as overlap_table
from tables.gpu import Results

STEP, KERNEL, COPY = 100.0, 40.0, 20.0  # microseconds


def steps(count: int, start: float, copy_at: float) -> list[Activity]:
    """Steps of two kernels that overlap by 5; each has a copy `copy_at` behind its beginning."""
    found = []
    for begin in (start + k * STEP for k in range(count)):
        found += [
            Activity("sgd", begin + KERNEL - 5, begin + 2 * KERNEL - 5),
            Activity("conv", begin, begin + KERNEL),
            Activity("Memcpy HtoD (Pinned -> Device)", begin + copy_at, begin + copy_at + COPY),
            Activity("Memset (Device)", begin + 90, begin + 91),
        ]
    return sorted(found, key=lambda each: each.start)


class Trace(unittest.TestCase):
    def test_only_what_is_behind_the_pause_counts(self) -> None:
        before = steps(3, 5e6, 0)
        behind = steps(overlap.TRACED, before[-1].end + overlap.PAUSE_S * 1e6, 0)
        found = overlap.after_pause(before + behind)
        self.assertEqual(len(found), len(behind))
        self.assertEqual(found[0].start, 0)

    def test_how_much_of_the_copies_lies_beside_kernels(self) -> None:
        for copy_at, share in ((0, 1), (30, 1), (65, 0.5), (76, 0), (90, 0.5)):
            with self.subTest(copy_at=copy_at):
                found = overlap.overlap(steps(1000, 0, copy_at))
                self.assertAlmostEqual(found["share"], share, delta=0.001)
                self.assertAlmostEqual(found["kernel_us"], 1000 * 75)

    def test_copies_at_the_same_time_count_once(self) -> None:
        copies = [Activity("Memcpy HtoD", start, start + 10) for start in (0, 5, 30)]
        self.assertEqual(overlap.merged(copies), [(0, 15), (30, 40)])
        found = overlap.overlap([*copies, Activity("conv", 10, 35)])
        self.assertEqual((found["copy_us"], found["beside_us"]), (25, 10))

    def test_a_trace_that_shows_no_kernels_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "1 copies and 0 kernels"):
            overlap.overlap([Activity("Memcpy HtoD", 0, 1), Activity("Stream Wait Event", 0, 1)])

    def test_the_steps_of_a_timeline(self) -> None:
        found = overlap.timeline(steps(overlap.TRACED, 0, 70))
        self.assertEqual(found["begins"], [k * STEP for k in range(overlap.SHOWN + 1)])
        self.assertEqual(found["copies"][0], [70, 90])
        self.assertEqual(len(found["copies"]), overlap.SHOWN)
        self.assertEqual(found["kernels"][:2], [[0, 40], [35, 75]])
        self.assertEqual(len(found["kernels"]), 2 * overlap.SHOWN)


class Shown(unittest.TestCase):
    def setUp(self) -> None:
        activities = steps(overlap.TRACED, 0, 70)
        times = {way: {"median": 0.2, "n": 9} for way in ("device", "ahead", "fed")}
        plain = {"work": "lenet-1000", "images": "uint8", "nbytes": 792_000, "ms": times}
        shown = {"trace": overlap.overlap(activities), "timeline": overlap.timeline(activities)}
        self.works: list[dict[str, Any]] = [plain, {**plain, **shown, "images": "float32"}]
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def results(self) -> Results:
        record = {"works": self.works, "date": "today", "commit": "c", "command": "overlap"}
        machine = {"gpu": "a GPU", "python": "3.12"}
        (self.folder / "overlap.json").write_text(json.dumps({**record, "machine": machine}))
        return Results(self.folder)

    def test_the_table(self) -> None:
        text = overlap_table.table(self.results())
        self.assertIn(
            "| LeNet-5, batch 1000, uint8 images | 0.79 | 0.200 | 0.200 | 0.200 |  |", text
        )
        self.assertRegex(text, r"float32 images .* \| 25% \|")
        self.assertIn("(overlap.svg)", text)

    def test_the_picture(self) -> None:
        path = self.folder / "overlap.svg"
        overlap_table.draw(self.results(), path)
        found = ElementTree.fromstring(path.read_text())
        shapes = [each.tag.rpartition("}")[2] for each in found]
        self.assertEqual(shapes.count("rect"), 3 * overlap.SHOWN)
        self.assertEqual(shapes.count("line"), overlap.SHOWN + 1)

    def test_without_results_nothing_is_said(self) -> None:
        path = self.folder / "overlap.svg"
        self.assertIn("left as it is", overlap_table.draw(Results(self.folder), path))
        with self.assertRaises(FileNotFoundError):
            overlap_table.table(Results(self.folder))
        self.works = self.works[:1]
        self.assertIn("nothing was traced", overlap_table.draw(self.results(), path))
        self.assertFalse(path.exists())

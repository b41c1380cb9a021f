"""The cost model of several GPUs (benchmarks/tables/scale.py)."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from tables import scale
from tables.scale import Link, efficiency

MIB = 1 << 20


class Model(unittest.TestCase):
    link = Link((MIB, 20e-6 + MIB / 300e9), (500 * MIB, 20e-6 + 500 * MIB / 300e9))

    def test_the_fit_gives_what_was_measured(self) -> None:
        self.assertAlmostEqual(self.link.bandwidth / 1e9, 300, places=6)
        self.assertAlmostEqual(self.link.latency * 1e6, 20, places=6)
        self.assertAlmostEqual(self.link.seconds(MIB, 2), 20e-6 + MIB / 300e9)

    def test_sums_hide_beside_backward_between_hosts_but_for_the_largest(self) -> None:
        largest = self.link.seconds(25 * MIB, 16)
        buckets = [25 * MIB] * 4 + [MIB]
        self.assertAlmostEqual(efficiency(self.link, 0.03, buckets, 16), 0.03 / (0.03 + largest))
        both = self.link.seconds(MIB, 2) + self.link.seconds(25 * MIB, 2)
        self.assertAlmostEqual(
            efficiency(self.link, 0.03, [25 * MIB, MIB], 2), 0.03 / (0.03 + both)
        )

    def test_a_network_is_slower(self) -> None:
        buckets = [25 * MIB] * 20
        found = [efficiency(self.link, 0.004, buckets, n) for n in (2, 8, 64, 1024)]
        self.assertEqual(found, sorted(found, reverse=True))


class Tables(unittest.TestCase):
    def made(self, table: Any, steps: list[dict[str, Any]]) -> str:
        record = {"steps": steps}
        with mock.patch.object(scale, "source", lambda record: "a source"):
            found: str = table(mock.Mock(read=lambda name: record))
        return found

    def test_the_quickest_of_several_ways_counts(self) -> None:
        def step(side: str, gpus: int, ms: float) -> dict[str, Any]:
            return {"side": side, "work": "mlp", "gpus": gpus, "ms": ms}

        rows = [step("dlsys", 1, 0.05), step("dlsys", 2, 0.06), step("PyTorch", 1, 0.1)]
        found = self.made(scale.steps, [*rows, step("PyTorch", 2, 0.125), step("PyTorch", 2, 2.0)])
        line = next(line for line in found.splitlines() if "MLP" in line)
        self.assertTrue(line.endswith("| 0.050 | 0.060 | 83.3% | 0.100 | 0.125 | 80.0% |"), line)

    def test_a_sum_within_an_update_has_no_time(self) -> None:
        traced = {"side": "dlsys", "work": "trace-mlp", "gpus": 2, "steps": 20, "collectives": 0}
        traced |= {"communication_us": 0.0, "kernels_us": 62.0, "share": 0.0}
        found = self.made(scale.traces, [traced])
        self.assertIn("| 0 | in the update | 62.0 |  |", found)


if __name__ == "__main__":
    unittest.main()

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
LARGE, SMALL = (25 * MIB, "all_reduce"), (MIB, "all_reduce")


class Model(unittest.TestCase):
    link = Link((MIB, 20e-6 + MIB / 300e9), (500 * MIB, 20e-6 + 500 * MIB / 300e9))

    def test_the_fit_gives_what_was_measured(self) -> None:
        self.assertAlmostEqual(self.link.bandwidth / 1e9, 300, places=6)
        self.assertAlmostEqual(self.link.latency * 1e6, 20, places=6)
        self.assertAlmostEqual(self.link.seconds(MIB, 2), 20e-6 + MIB / 300e9)

    def test_sums_hide_beside_backward_between_hosts_but_for_the_largest(self) -> None:
        largest = self.link.seconds(25 * MIB, 16)
        buckets = [LARGE] * 4 + [SMALL]
        self.assertAlmostEqual(efficiency(self.link, 0.03, buckets, 16), 0.03 / (0.03 + largest))
        both = self.link.seconds(MIB, 2) + self.link.seconds(25 * MIB, 2)
        self.assertAlmostEqual(efficiency(self.link, 0.03, [LARGE, SMALL], 2), 0.03 / (0.03 + both))

    def test_two_ranks_sum_for_nothing_in_an_update_and_more_by_shares(self) -> None:
        for ranks, seconds in ((2, 20e-6), (4, 40e-6 + 0.75 * 100 * MIB / 300e9)):
            found = efficiency(self.link, 0.03, [(100 * MIB, "all_reduce_adam_update")], ranks)
            self.assertAlmostEqual(found, 0.03 / (0.03 + seconds))

    def test_a_network_is_slower(self) -> None:
        buckets = [LARGE] * 20
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

        together = step("dlsys", 2, 0.06) | {"alone_ms": 0.057, "alone_in_turn_ms": [0.052, 0.054]}
        rows = [step("dlsys", 1, 0.05), together, step("PyTorch", 1, 0.1)]
        found = self.made(scale.steps, [*rows, step("PyTorch", 2, 0.125), step("PyTorch", 2, 2.0)])
        line = next(line for line in found.splitlines() if "MLP" in line)
        self.assertTrue(
            line.endswith("| 0.050 | 0.060 | 83.3% | 95.0%, 90.0% | 0.100 | 0.125 | 80.0% |"), line
        )

    def test_a_sum_within_an_update_has_no_time(self) -> None:
        traced = {"side": "dlsys", "work": "trace-mlp", "gpus": 2, "steps": 20, "collectives": 0}
        traced |= {"communication_us": 0.0, "kernels_us": 62.0, "share": 0.0}
        found = self.made(scale.traces, [traced])
        self.assertIn("| 0 | in the update | 62.0 |  |", found)


if __name__ == "__main__":
    unittest.main()

"""The cost model of several GPUs (benchmarks/tables/scale.py)."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
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


if __name__ == "__main__":
    unittest.main()

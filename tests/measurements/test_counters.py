"""benchmarks/operators/counters.py: what the profiler printed becomes a record and a table."""

from __future__ import annotations

import csv
import io
import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from operators import counters
from tables import counters as tables


def kernel(number: int, name: str, ns: str, **metrics: str) -> dict[str, str]:
    """A row of the profiler's CSV; what it does not have is n/a."""
    row = {"ID": str(number), "Kernel Name": name, counters.TIME: ns}
    values = {counters.SHARES.get(k, counters.STALL.format(k)): v for k, v in metrics.items()}
    return {**row, **{key: values.get(key, "n/a") for key in counters.METRICS[1:]}}


KERNELS = [
    kernel(0, "void dlsys::FillKernel<float>(float, T1 *, long)", "10"),
    kernel(1, "dlsys::<unnamed>::NaiveGemmKernel(Gemm)", "1,200,000", l1="98.5", issue="30.1",
           mio_throttle="12.25"),
    kernel(2, "void dlsys::FillKernel<float>(float, T1 *, long)", "10"),
    kernel(3, "dlsys::ZeroKernel(unsigned *, int)", "1,000"),
    kernel(4, "void dlsys::GemmKernel<Tiles<128>>(Params)", "3,000", tensor="88", gmma="9.5",
           wait="1"),
]  # fmt: skip


class Rows(unittest.TestCase):
    def printed(self) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(KERNELS[0]), quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerow(dict.fromkeys(KERNELS[0], ""))  # units
        writer.writerows(KERNELS)
        return f"==PROF== Connected\nrung naive fp32\nrung hopper tf32\n{text.getvalue()}"

    def test_the_longest_kernel_of_each_rung_is_told(self) -> None:
        names = [("naive", "fp32"), ("hopper", "tf32")]
        naive, hopper = counters.told(counters.table_of(self.printed()), names)
        self.assertEqual(
            (naive["kernel"], naive["kernels"], naive["l1"]), ("NaiveGemmKernel", 1, 98.5)
        )
        self.assertEqual((naive["stall"], naive["stall_cycles"]), ("mio_throttle", 12.25))
        self.assertEqual((hopper["kernels"], hopper["share"], hopper["tensor"]), (2, 0.75, 88.0))
        self.assertEqual((hopper["stall"], hopper["dram"]), ("gmma", 0.0))

    def test_the_table(self) -> None:
        names = [("naive", "fp32"), ("hopper", "tf32")]
        rungs = list(counters.told(KERNELS, names))
        record = {"works": [{"ladder": "gemm", "rungs": rungs}, {"ladder": "conv", "rungs": []}]}
        with mock.patch.object(tables, "source", lambda record: "a source"):
            made = tables.gemm(mock.Mock(read=lambda name: record))
        self.assertIn(
            "| naive fp32 | 30% | 0% | 0% | 98% | 0% | 0% | the queue of shared loads, 12.2 |", made
        )
        self.assertIn("| hopper tf32 (`GemmKernel`, 75% of 2 kernels) |", made)

    def test_every_reason_has_words(self) -> None:
        self.assertEqual(set(tables.REASONS), set(counters.STALLS))

    def test_another_count_of_rungs_is_an_error(self) -> None:
        with self.assertRaises(ValueError):
            list(counters.told(KERNELS, [("naive", "fp32")]))


if __name__ == "__main__":
    unittest.main()

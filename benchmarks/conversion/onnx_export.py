"""Runs every case of every row of the operator table as an ONNX file elsewhere.

    python benchmarks onnx_export --out FOLDER [--only PART]

Each runs in ONNX Runtime, by the oldest, the default and the newest version of ONNX's operators,
and in the evaluator of the package onnx; once more with a free batch, in ONNX Runtime with the
row's own, 1 and two others. All are held to the row's bound, and those of a free batch to what is
computed here. Writes onnx_export.json; the exit status is 1 where something is wrong.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from dlsys.errors import DlsysError, ShapeError
from shared import measure

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from support.table.onnx_rows import DEFECTS, LESS_EXACT, RowFile, refused, small_cases  # noqa: E402
from support.table.rows import Case, Sample  # noqa: E402
from support.table.samples import SAMPLES  # noqa: E402

OPSETS = (17, 21, onnx.defs.onnx_opset_version())


class Proof:
    """Counts of what was run, and what was wrong."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def row(self, sample: Sample) -> None:
        """Runs all cases of a row."""
        cases = small_cases(sample)
        if refused(sample):
            self.counts["rows without a form, refused with a reason"] += 1
            return
        self.counts["rows with a form"] += 1
        for case in cases:
            for opset in OPSETS:
                self.case(sample, case, f"onnxruntime, operators {opset}", opset)
            if ("reference", sample.name) not in DEFECTS:
                self.case(sample, case, "reference", 21)
            self.free(sample, case)

    def case(self, sample: Sample, case: Case, how: str, opset: int) -> None:
        """Runs one case."""
        try:
            with RowFile(sample, case, opset) as file:
                file.run(how.partition(",")[0])
            self.counts[how] += 1
        except Exception as error:  # whatever a runtime raises is a finding
            self.wrong.append(f"{how}: {sample.name} {case.shapes} {case.attrs}: {error}")

    def free(self, sample: Sample, case: Case) -> None:
        """Runs one case with a free batch, where the row's operator takes one."""
        if not case.shapes or not case.shapes[0] or case.shapes[0][0] < 2 or sample.states:
            return
        try:
            file = RowFile(sample, case, free=True)
        except DlsysError as error:
            kind = "a shape that declares its batch" if isinstance(error, ShapeError) else "refused"
            self.counts[f"free batch: {kind}"] += 1
            return
        own = case.shapes[0][0]
        with file:
            counts = (own, own + 1, 2 * own)
            if sample.name != "squeeze" or "axis" in case.attrs:  # a free extent is no 1
                counts += (1,)
            for count in counts:
                arrays = file.arrays if count == own else file.with_batch(count)
                try:
                    expected = file.here(arrays)
                except DlsysError:  # the operator does not take this batch either
                    self.counts["free batch: another batch refused here too"] += 1
                    continue
                try:
                    file.agrees(arrays, expected)
                    self.counts["free batch: runs in onnxruntime"] += 1
                except Exception as error:
                    self.wrong.append(f"batch {count}: {sample.name} {case.shapes} {case.attrs}: "
                                      f"{error}")  # fmt: skip


def main() -> int:
    """Runs everything and writes the record."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--only", default="", help="a part of the names of rows")
    options = parser.parse_args()
    proof, began = Proof(), time.monotonic()
    with np.errstate(all="ignore"):
        for sample in SAMPLES:
            if options.only in sample.name:
                proof.row(sample)
    for line in proof.wrong:
        print(line)
    results = {
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "seconds": round(time.monotonic() - began, 1),
        "counts": dict(sorted(proof.counts.items())),
        "less_exact": {f"{a}, {b}": f"{x} x: {why}" for (a, b), (x, why) in LESS_EXACT.items()},
        "left_out": {f"{a}, {b}": why for (a, b), why in DEFECTS.items()},
        "wrong": proof.wrong,
    }
    print(json.dumps(results["counts"], indent=1))
    if not options.only:
        measure.save("onnx_export", options, results)
    return 1 if proof.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

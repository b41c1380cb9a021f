"""Every row of the operator table as an ONNX file, in ONNX Runtime and the reference evaluator.

A few cases of each; `make onnx` runs all of them, in several versions of ONNX's operators and with
a free batch.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

from dlsys.errors import GraphError
from dlsys.onnx.exporter.registry import NO_RULE
from support.table.onnx_rows import DEFECTS, MISSING, RUNTIMES, RowFile, refused, small_cases
from support.table.rows import Case, Sample
from support.table.samples import SAMPLES


@unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
class ExportedRows(unittest.TestCase):
    """A test method a row, made below."""

    def check(self, sample: Sample) -> None:
        cases = small_cases(sample)[-2:]
        if refused(sample):
            with self.assertRaisesRegex(GraphError, r"this graph has no ONNX form: .+ \(.+\)"):
                RowFile(sample, sample.cases[0])
            return
        self.assertTrue(cases)
        for runtime, case in zip(RUNTIMES, cases[::-1] if len(cases) > 1 else cases * 2):
            if (runtime, sample.name) in DEFECTS:
                continue
            with self.subTest(runtime=runtime, shapes=case.shapes, attrs=case.attrs):
                with written(sample, case) as file:
                    file.run(runtime)


def written(sample: Sample, case: Case) -> RowFile:
    """The file of a case; the test is skipped where an operator has no rule yet."""
    try:
        return RowFile(sample, case)
    except GraphError as error:
        if NO_RULE not in str(error):
            raise
        raise unittest.SkipTest(f"not exported: {sample.name}, {NO_RULE}") from None


def _checks(sample: Sample) -> Callable[[Any], None]:
    return lambda self: self.check(sample)


for _sample in SAMPLES:
    setattr(ExportedRows, f"test_{_sample.name}", _checks(_sample))


if __name__ == "__main__":
    unittest.main()

"""Shipped models on their way to another machine: benchmarks/conversion/onnx_models.py."""

from __future__ import annotations

import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

from support.table.onnx_rows import MISSING

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import dlsys as dl
from conversion import onnx_models
from dlsys import nn
from dlsys.dtypes import bfloat16, rounded


@unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
class ShippedModels(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.path = self.folder / "model.onnx"
        dl.onnx.export(nn.MLP((6, 5, 3), seed=0), self.path, inputs=(None, 6))
        self.x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)

    def saved(self, rounds: bool) -> onnx_models.Saved:
        """A saved model with one example, as another machine finds it."""
        kept = onnx_models.Saved(self.folder / "saved", "package/model.onnx")
        kept.take_model(self.path, rounds)
        (y,) = dl.onnx.load(kept.model).run({"input": self.x})
        exact = onnx_models.in_float64(kept.model).run({"input": self.x.astype(np.float64)})
        kept.add(0, onnx_models.Example({"input": self.x}, [y], exact, 0.5))
        kept.write()
        found = onnx_models.Saved(self.folder / "saved", "package/model.onnx")
        self.assertEqual(found.load(), rounds)
        return found

    def test_an_example_comes_back(self) -> None:
        found = self.saved(False)
        self.assertEqual(found.model.read_bytes(), self.path.read_bytes())
        feeds, (y,), (exact,), spread = found.read(0)
        np.testing.assert_array_equal(feeds["input"], self.x)
        np.testing.assert_array_equal(y, dl.onnx.load(self.path).run(feeds)[0])
        wide = onnx_models.in_float64(self.path).run({"input": self.x.astype(np.float64)})[0]
        self.assertEqual(wide.dtype, np.float64)
        # The difference is kept in float32: 1.1e-14 was measured.
        np.testing.assert_allclose(exact, wide, rtol=0, atol=1e-13)
        self.assertGreater(np.abs(y - wide).max(), 1e-9)
        self.assertEqual(spread, 0.5)

    def test_weights_are_rounded_to_bfloat16(self) -> None:
        found = self.saved(True)
        before, after = (dict(dl.onnx.load(p).named_state()) for p in (self.path, found.model))
        self.assertEqual([*before], [*after])
        for name, weights in before.items():
            values = rounded(weights.asnumpy(), bfloat16)
            np.testing.assert_array_equal(after[name].asnumpy(), values, err_msg=name)
        self.assertTrue(any(np.any(w.asnumpy() != after[k].asnumpy()) for k, w in before.items()))
        _, (y,), _, _ = found.read(0)
        self.assertGreater(
            np.abs(y - dl.onnx.load(self.path).run({"input": self.x})[0]).max(), 1e-5
        )


if __name__ == "__main__":
    unittest.main()

"""Engines of TensorRT-RTX, which are built where its package is installed, what is made of files
for it, and pictures of files.
"""

from __future__ import annotations

import importlib.util
import tempfile
import unittest
from pathlib import Path

import numpy as np

import dlsys as dl
from dlsys import data, nn
from dlsys.errors import DataError, DlsysError
from support.table.onnx_rows import MISSING

SHAPE = (None, 1, 28, 28)


def quantized(symmetric: bool) -> dl.nn.Module:
    images = np.random.default_rng(0).random((16, 1, 28, 28), np.float32)
    loader = data.Loader((images, np.zeros(16)), 8)
    return dl.quantize(nn.LeNet5(seed=0), loader, symmetric=symmetric)


class _InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file, self.out = Path(folder.name) / "m.onnx", Path(folder.name) / "m.engine"


@unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
class Engines(_InFolder):
    def test_biases_become_floats(self) -> None:
        import onnxruntime

        from dlsys.onnx.engine import with_float_biases

        dl.onnx.export(quantized(True), self.file, inputs=SHAPE)
        x = np.random.default_rng(1).random((3, 1, 28, 28), np.float32)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        made = [
            onnxruntime.InferenceSession(given, options).run(None, {"input": x})[0]
            for given in (self.file.read_bytes(), with_float_biases(self.file))
        ]
        np.testing.assert_allclose(made[1], made[0], atol=0.02 * np.abs(made[0]).max())
        self.assertNotIn(b"int32", with_float_biases(self.file))

    def test_zero_points_are_refused(self) -> None:
        from dlsys.onnx.engine import with_float_biases

        dl.onnx.export(quantized(False), self.file, inputs=SHAPE)
        with self.assertRaisesRegex(DataError, "symmetric=True"):
            with_float_biases(self.file)

    def test_packages_are_two(self) -> None:
        with self.assertRaisesRegex(DlsysError, "expected tensorrt_rtx or tensorrt"):
            dl.onnx.build_engine(self.file, self.out, package="other")

    def test_a_missing_package_is_named(self) -> None:
        if importlib.util.find_spec("tensorrt"):
            self.skipTest("tensorrt is installed")
        with self.assertRaisesRegex(DlsysError, "pip install tensorrt"):
            dl.onnx.build_engine(self.file, self.out, package="tensorrt")


@unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
@unittest.skipUnless(importlib.util.find_spec("tensorrt_rtx"), "tensorrt-rtx is not installed")
class Built(_InFolder):
    """Engines for GPUs that are not here."""

    def test_floats_with_a_free_batch(self) -> None:
        dl.onnx.export(nn.LeNet5(seed=0), self.file, inputs=SHAPE)
        made = dl.onnx.build_engine(
            self.file, self.out, targets=("sm_89", "sm_120"), extents={"batch": (1, 4, 64)}
        )
        self.assertEqual((made.targets, made.quantized), (("sm_89", "sm_120"), 0))
        self.assertEqual(made.nbytes, self.out.stat().st_size)
        weights = sum(p.asnumpy().nbytes for p in nn.LeNet5(seed=0).parameters())
        self.assertGreater(made.nbytes, weights)

    def test_integers(self) -> None:
        dl.onnx.export(quantized(True), self.file, inputs=SHAPE)
        self.assertGreater(dl.onnx.build_engine(self.file, self.out).quantized, 3)

    def test_unknown_targets_and_extents(self) -> None:
        dl.onnx.export(nn.MLP((4, 3), seed=0), self.file, inputs=("length", 4))
        with self.assertRaisesRegex(DlsysError, "not for sm_90"):
            dl.onnx.build_engine(self.file, self.out, targets=("sm_90",))
        with self.assertRaisesRegex(DataError, "free extent 'length'"):
            dl.onnx.build_engine(self.file, self.out)
        self.assertFalse(self.out.exists())


class Pictures(unittest.TestCase):
    @unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
    def test_a_file_is_drawn_with_its_shapes(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "m.onnx"
            dl.onnx.export(nn.LeNet5(seed=0), file, inputs=SHAPE)
            drawn, pieces = dl.onnx.picture(file), dl.onnx.picture(file, limit=3)
        for text in ("Conv", "MaxPool", "Gemm", "(batch, 6, 28, 28)", "6·1·5·5", "input"):
            self.assertIn(text, drawn)
        self.assertIn("13 nodes, drawn as 4 pieces of up to 4 nodes", pieces)


if __name__ == "__main__":
    unittest.main()

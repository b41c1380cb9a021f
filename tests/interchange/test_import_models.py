"""Models that packages ship, on inputs as their users have them, against ONNX Runtime on numpy and
the native devices, and one step of their training.

They are test extras that nobody needs, see support/shipped_models.py. A package that is not here is
a skipped test that says so. `python benchmarks onnx_models` takes 20 inputs of each.
"""

from __future__ import annotations

import unittest
from pathlib import Path

import numpy as np

from support.devices import each_context
from support.shipped_models import MODELS, located, tuned
from support.table.onnx_rows import MISSING

# Rounding to 8 bits, whose steps the last bits of a sigmoid decide: ONNX Runtime differs from
# itself by up to 0.054 where its input changes by a part in 10^7.
QUANTIZED = {"ddddocr/common_old.onnx": 0.1}


@unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
class ShippedModels(unittest.TestCase):
    """Two test methods a model, made below."""

    def path(self, name: str) -> Path:
        path = located(name)
        if path is None:
            self.skipTest(f"{name} is not installed")
        return path

    def check(self, name: str) -> None:
        import onnxruntime

        from dlsys.onnx.importer import load

        path = self.path(name)
        onnxruntime.set_default_logger_severity(4)
        session, model = onnxruntime.InferenceSession(str(path)), load(path)
        bound = QUANTIZED.get(name, 1e-4)
        for k in range(2):
            feeds = MODELS[name].inputs(k)
            wanted = session.run(None, feeds)
            for ctx in each_context():
                for y, z in zip(model.run(feeds, ctx), wanted, strict=True):
                    # Its sigmoid is a multiple of 2^-25 near 0: measured up to 7.5e-8 from ours.
                    np.testing.assert_allclose(
                        y, z, rtol=bound, atol=max(bound * np.abs(z).max(), 2e-7)
                    )

    def check_step(self, name: str) -> None:
        step = tuned(self.path(name), MODELS[name], None)
        self.assertGreater(step.trained, 0)
        # Differences of float32 losses: measured within 3 %.
        self.assertAlmostEqual(step.ratio, 1, delta=0.08)
        self.assertGreater(step.fall, 0)


for _name in MODELS:
    _label = _name.replace("/", "_").replace("-", "_").replace(".", "_")
    setattr(ShippedModels, f"test_{_label}", lambda self, name=_name: self.check(name))
    # The others are of the same kinds of layers and take seconds.
    if Path(_name).stem in ("rnet", "silero_vad", "model"):
        setattr(
            ShippedModels, f"test_step_{_label}", lambda self, name=_name: self.check_step(name)
        )


if __name__ == "__main__":
    unittest.main()

"""Quantized models: numpy and the CPU give the same bits, ONNX Runtime the same within a step, and
files that onnxruntime.quantization makes are computed in integers.
"""

from __future__ import annotations

import logging
import tempfile
import unittest
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import data, nn
from dlsys.errors import DataError, GraphError
from dlsys.inference import calibrate
from dlsys.ndarray import gpu
from dlsys.runtime.target import target_of
from support import devices
from support.devices import native_contexts

try:
    import onnxruntime
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )
except ImportError as missing:
    MISSING = str(missing)
else:
    MISSING = ""

RNG = np.random.default_rng(3)
IMAGES = RNG.normal(size=(24, 3, 11, 10)).astype(np.float32)
LOADER = data.Loader((IMAGES, np.zeros(24, np.int64)), 8)


class Small(nn.Module):
    """Two convolutions, a residual sum, a pooling and two linear layers."""

    def __init__(self) -> None:
        self.first = nn.Conv2d(3, 10, 3, padding=1, rng=1)
        self.norm = nn.BatchNorm2d(10)
        self.second = nn.Conv2d(10, 10, 3, padding=1, rng=2)
        self.hidden = nn.Linear(250, 21, rng=3)
        self.out = nn.Linear(21, 4, rng=4)

    def forward(self, x: Any) -> Any:
        x = dl.functional.relu(self.norm(self.first(x)))
        x = dl.functional.relu(self.second(x) + x)
        x = dl.functional.flatten(dl.functional.max_pool2d(x, 2), 1)
        return self.out(dl.functional.relu(self.hidden(x)))


MODEL = Small()


def integer_contexts() -> list[Any]:
    """The native devices that have the kernels."""
    return [c for c in native_contexts() if target_of(c).has("quantized_conv2d")]


def operators(program: Any, x: np.ndarray) -> list[str]:
    """The names of the steps of an inference program."""
    (entry,) = program._executors.values()
    steps = entry.executor.plan({entry._inputs[0]: x.shape}).steps
    return [step.node.op.name for step in steps]


class Quantize(unittest.TestCase):
    def test_every_method_is_close_and_all_layers_compute_with_integers(self) -> None:
        exact = dl.infer(MODEL)(IMAGES)
        for method in calibrate.METHODS:
            with self.subTest(method):
                program = dl.infer(dl.quantize(MODEL, LOADER, method=method))
                error = np.abs(program(IMAGES) - exact).max() / np.abs(exact).max()
                self.assertLess(error, 0.1)  # worst: 0.05, entropy
                self.assertGreater(error, 0)
                names = operators(program, IMAGES)
                self.assertEqual(names.count("quantized_conv2d"), 2)
                self.assertEqual(names.count("quantized_matmul"), 2)
                self.assertLessEqual({"quantized_add", "quantized_max_pool2d"}, {*names})
                self.assertFalse({"conv2d_bias", "dequantize", "add", "matmul"} & {*names})

    def test_native_devices_give_the_bits_of_numpy(self) -> None:
        quantized = dl.quantize(MODEL, LOADER)
        wanted = dl.infer(quantized)(IMAGES)
        for ctx in integer_contexts():
            with self.subTest(ctx=str(ctx)):
                np.testing.assert_array_equal(dl.infer(quantized, ctx=ctx)(IMAGES), wanted)

    @devices.require(gpu(0))
    def test_a_gpu_fuses_what_stands_around_the_products(self) -> None:
        quantized = dl.quantize(MODEL, LOADER)
        program, x = dl.infer(quantized, ctx="gpu"), IMAGES[:2]
        for _ in range(3):  # by steps, and as a captured graph
            np.testing.assert_array_equal(program(x), dl.infer(quantized)(x))
        names = ["quantized_conv2d_fused"] * 2 + ["quantized_max_pool2d", "quantized_matmul_chain"]
        self.assertEqual(operators(program, x), names)

    def test_devices_without_the_kernels_compute_in_floats(self) -> None:
        quantized = dl.quantize(MODEL, LOADER)
        wanted = dl.infer(quantized)(IMAGES)
        for ctx in native_contexts():
            with self.subTest(ctx=str(ctx)):
                got = dl.infer(quantized, ctx=ctx)(IMAGES)
                self.assertLess(np.abs(got - wanted).max() / np.abs(wanted).max(), 0.03)

    def test_tensors_and_graphs_without_the_fusion_agree_within_steps(self) -> None:
        quantized = dl.quantize(MODEL, LOADER)
        wanted = dl.infer(quantized)(IMAGES)
        got = quantized(dl.tensor(IMAGES)).numpy()
        self.assertLess(np.abs(got - wanted).max() / np.abs(wanted).max(), 0.03)  # worst: 0.01

    def test_the_model_that_was_quantized_stays(self) -> None:
        before = {k: v.copy() for k, v in MODEL.state_dict().items()}
        dl.quantize(MODEL, LOADER)
        for name, value in MODEL.state_dict().items():
            np.testing.assert_array_equal(value, before[name])

    def test_refusals(self) -> None:
        quantize = partial(dl.quantize, MODEL, LOADER)
        for message, kind, call in (
            ("method must be one of minmax", GraphError, lambda: quantize(method="best")),
            ("percentile must be above 50", GraphError, lambda: quantize(percentile=40)),
            ("expected a Loader", DataError, lambda: dl.quantize(MODEL, IMAGES)),
            ("no convolution and no linear", GraphError, lambda: dl.quantize(nn.ReLU(), LOADER)),
        ):  # fmt: skip
            with self.subTest(message), self.assertRaisesRegex(kind, message):
                call()
        bad = data.Loader((np.full((4, 3, 11, 10), np.nan, np.float32), np.zeros(4)), 2)
        with self.assertRaisesRegex(DataError, "NaN or infinity"):
            dl.quantize(MODEL, bad)

    def test_a_bias_that_int32_cannot_hold_saturates(self) -> None:
        model = nn.Linear(3, 2, rng=0)
        model.bias.set(np.array([1e12, 0], np.float32))
        tiny = data.Loader((np.full((4, 3), 1e-3, np.float32), np.zeros(4)), 2)
        made = dl.infer(dl.quantize(model, tiny))(np.zeros((1, 3), np.float32))
        self.assertTrue(np.isfinite(made).all())


class Ranges(unittest.TestCase):
    """Calibration, against plain formulas."""

    x = np.random.default_rng(5).normal(size=20_000).astype(np.float32)

    def ranges(self, method: str, percentile: float = 99.0) -> tuple[float, float]:
        halves = lambda: ([x] for x in np.split(self.x, 2))  # noqa: E731
        return calibrate.METHODS[method](halves, percentile)[0]

    def test_minmax(self) -> None:
        self.assertEqual(self.ranges("minmax"), (self.x.min(), self.x.max()))

    def test_percentile(self) -> None:
        wanted = np.quantile(self.x, [0.005, 0.995])
        np.testing.assert_allclose(self.ranges("percentile"), wanted, atol=0.02)

    def test_entropy_cuts_a_long_tail(self) -> None:
        tail = np.append(self.x, np.float32([40.0, -35.0]))
        low, high = calibrate.by_entropy(lambda: [[tail]], 0)[0]
        self.assertLess(high, 12)
        self.assertGreater(high, 2.5)
        self.assertAlmostEqual(low, -high)


@unittest.skipIf(MISSING, MISSING)
class OnnxRuntime(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        logging.disable(logging.WARNING)  # of advice about other processors
        self.addCleanup(logging.disable, logging.NOTSET)

    def run_there(self, path: Path) -> np.ndarray:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return session.run(None, {"input": IMAGES})[0]

    def test_an_exported_model_gives_the_same_within_one_step(self) -> None:
        """The largest output is some 60 steps of the last layer's input away from 0."""
        quantized = dl.quantize(MODEL, LOADER)
        path = self.folder / "small.onnx"
        dl.onnx.export(quantized, path, inputs=(None, 3, 11, 10))
        wanted = dl.infer(quantized)(IMAGES)
        step = np.abs(wanted).max() / 60
        self.assertLess(np.abs(self.run_there(path) - wanted).max(), step)  # worst: 0
        np.testing.assert_array_equal(dl.infer(dl.onnx.load(path))(IMAGES), wanted)

    def test_files_of_its_quantization_run_in_integers(self) -> None:
        class Reader(CalibrationDataReader):
            def __init__(self) -> None:
                self.left = [{"input": IMAGES[:12]}, {"input": IMAGES[12:]}]

            def get_next(self) -> Any:
                return self.left.pop() if self.left else None

        source, path = self.folder / "float.onnx", self.folder / "int8.onnx"
        model = Small()
        model.norm = lambda x: x  # which it would quantize as a layer of its own
        dl.onnx.export(model, source, inputs=(None, 3, 11, 10))
        for form in (QuantFormat.QDQ, QuantFormat.QOperator):
            for kind in (QuantType.QUInt8, QuantType.QInt8):
                with self.subTest(form=form, kind=kind):
                    quantize_static(
                        source, path, Reader(), quant_format=form, activation_type=kind,
                        weight_type=QuantType.QInt8, per_channel=True,
                    )  # fmt: skip
                    wanted, model_here = self.run_there(path), dl.onnx.load(path)
                    for ctx in (None, *integer_contexts()):
                        (got,) = model_here.run({"input": IMAGES}, ctx)
                        error = np.abs(got - wanted).max()
                        self.assertLessEqual(error, np.abs(wanted).max() / 60)  # worst: 0
                    program = dl.infer(model_here)
                    program(IMAGES)
                    self.assertGreaterEqual(
                        {*operators(program, IMAGES)},
                        {"quantized_conv2d", "quantized_matmul", "quantized_max_pool2d"},
                    )


class Graphs(unittest.TestCase):
    """What the fusion leaves alone."""

    def run_both(self, y: ad.Node, x: ad.Node, value: np.ndarray) -> np.ndarray:
        (got,) = ad.Executor([y]).run({x: value})
        return got

    def test_weights_around_another_number_stay_floats(self) -> None:
        x = ad.Variable("x", (2, 4), np.float32)
        one, zero = ad.constant(np.float32(0.1)), ad.constant(np.uint8(5))
        h = ad.dequantize_op(ad.quantize_op(x, one, zero), one, zero)
        w = ad.constant(RNG.integers(-9, 9, (4, 3)).astype(np.int8))
        shifted = ad.dequantize_op(w, ad.constant(np.float32(1)), ad.constant(np.int8(3)))
        y = ad.matmul_op(h, shifted)
        value = RNG.normal(size=(2, 4)).astype(np.float32)
        units = np.clip(np.rint(value / np.float32(0.1)) + 5, 0, 255) - 5
        wanted = units * 0.1 @ (w.attrs["value"].astype(float) - 3)
        np.testing.assert_allclose(self.run_both(y, x, value), wanted, rtol=1e-5, atol=1e-5)

    def test_a_quantized_value_that_is_fetched_has_its_own_layout(self) -> None:
        quantized = dl.quantize(MODEL, LOADER)
        x = ad.Variable("input", (None, 3, 11, 10), np.float32)
        y = quantized(x)
        seen = [n for n in ad.find_topo_sort([y]) if n.op is ad.quantize_op and len(n.shape) == 4]
        got = ad.Executor([y, *seen]).run({x: IMAGES})
        for node, value in zip(seen, got[1:]):
            self.assertEqual(value.shape[1:], node.shape[1:])
            self.assertEqual(value.dtype, np.uint8)


if __name__ == "__main__":
    unittest.main()

"""ONNX's NonMaxSuppression: its own tests on every device, random boxes beside ONNX Runtime."""

from __future__ import annotations

import importlib
import unittest
import warnings
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np

from dlsys.errors import DataError
from support.devices import on_native_devices

if find_spec("onnx"):
    from onnx import TensorProto, helper, numpy_helper
    from onnx.backend.test.case import node

    from dlsys import autodiff as ad
    from dlsys.onnx.importer import ImportedModel
    from dlsys.onnx.importer.registry import RULES

Feeds = dict[str, np.ndarray]
CASES = 10  # of the package onnx 1.23


def model(feeds: Feeds, constants: Feeds, center: bool) -> Any:
    """NonMaxSuppression of feeds and constants, the inputs of the operator in this order."""
    kinds = {np.dtype(np.int64): TensorProto.INT64, np.dtype(np.float32): TensorProto.FLOAT}
    graph = helper.make_graph(
        [helper.make_node("NonMaxSuppression", [*feeds, *constants], ["rows"],
                          center_point_box=int(center))],
        "boxes",
        [helper.make_tensor_value_info(n, kinds[x.dtype], [None] * x.ndim)
         for n, x in feeds.items()],
        [helper.make_tensor_value_info("rows", TensorProto.INT64, [None, 3])],
        [numpy_helper.from_array(x, n) for n, x in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)


def drawn(rng: np.random.Generator) -> tuple[Feeds, Feeds]:
    """Boxes, of which many are equal, with scores, of which many are, and settings."""
    images, classes, count = (int(rng.integers(1, most)) for most in (4, 5, 200))
    low, side = rng.uniform(0, 30, (2, images, count, 2))
    boxes = np.concatenate([low, low + side * rng.choice([-1, 1], side.shape)], -1)
    scores = rng.random((images, classes, count))
    if rng.random() < 0.5:
        boxes, scores = boxes.round(), scores.round(1)
    feeds = {"boxes": boxes.astype(np.float32), "scores": scores.astype(np.float32)}
    settings = {
        "most": np.array([rng.integers(0, 60)]),
        "overlap": np.array([rng.random()], np.float32),
        "least": np.array([rng.random() / 2], np.float32),
    }
    return feeds, dict(list(settings.items())[: int(rng.integers(1, 4))])


@unittest.skipUnless(find_spec("onnx"), "not here: onnx")
class NonMaxSuppression:
    """None of them is computed by the rule for numpy arrays, but by the operator on the device."""

    ctx: Any = None

    def setUp(self) -> None:
        name = ("", "NonMaxSuppression")
        rule = RULES[name]._replace(host=lambda *_: self.fail("computed by the host's rule"))
        self.enterContext(mock.patch.dict(RULES, {name: rule}))

    def test_those_of_the_package(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the package's own formulas
            # This fills in the list with the cases of one operator; those of all take seconds.
            importlib.import_module(f"{node.__name__}.nonmaxsuppression")
        cases = [c for c in node._NodeTestCases if "_nonmaxsuppression_" in c.name]
        self.assertGreaterEqual(len(cases), CASES)
        for case in cases:
            for inputs, (wanted,) in case.data_sets:
                with self.subTest(case.name):
                    names = [value.name for value in case.model.graph.input]
                    feeds = dict(zip(names, map(np.asarray, inputs)))
                    (got,) = ImportedModel(case.model).run(feeds, self.ctx)
                    np.testing.assert_array_equal(got, wanted)
                    self.assertEqual(got.dtype, np.int64)

    @unittest.skipUnless(find_spec("onnxruntime"), "not here: onnxruntime")
    def test_those_of_onnx_runtime(self) -> None:
        import onnxruntime

        rng = np.random.default_rng(1)
        for turn in range(20):
            feeds, constants = drawn(rng)
            proto = model(feeds, constants, center=bool(turn % 2))
            session = onnxruntime.InferenceSession(
                proto.SerializeToString(), providers=["CPUExecutionProvider"]
            )
            (wanted,) = session.run(None, feeds)
            (got,) = ImportedModel(proto).run(feeds, self.ctx)
            np.testing.assert_array_equal(got, wanted, f"turn {turn}")

    def test_nodes_have_no_shape_that_values_decide(self) -> None:
        feeds, constants = drawn(np.random.default_rng(2))
        inputs = [ad.Variable(n, x.shape, x.dtype) for n, x in feeds.items()]
        with self.assertRaisesRegex(DataError, "the shape of its result depends on values"):
            ImportedModel(model(feeds, constants, False))(*inputs)


class NumpyNonMaxSuppression(NonMaxSuppression, unittest.TestCase):
    pass


CpuNonMaxSuppression, GpuNonMaxSuppression = on_native_devices(NonMaxSuppression)


if __name__ == "__main__":
    unittest.main()

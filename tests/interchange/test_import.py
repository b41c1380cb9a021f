"""ONNX files as Modules: the package's own tests that are files, training, values that are looked
at, and files that lie. `make onnx` runs the 1,884 tests of single operators.
"""

from __future__ import annotations

import random
import tempfile
import unittest
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import optim
from dlsys.errors import DataError, DlsysError
from support.devices import each_context
from support.table.onnx_rows import MISSING

if not MISSING:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from dlsys.onnx.importer import ImportedModel, load
    from dlsys.onnx.importer.table import markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "onnx-operators.md"


def model(nodes: list[Any], inputs: dict[str, Any], outputs: list[str],
          weights: dict[str, np.ndarray] | None = None, opset: int = 21) -> Any:  # fmt: skip
    """A ModelProto: inputs by name with a shape, of float32."""
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [onnx.ValueInfoProto(name=n) for n in outputs],
        [numpy_helper.from_array(w, n) for n, w in (weights or {}).items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def network() -> Any:
    """Two layers with a convolution, normalization and a pool."""
    draw = np.random.default_rng(0)
    weights = {
        "w": draw.standard_normal((4, 1, 3, 3)).astype(np.float32),
        "scale": np.ones(4, np.float32), "bias": np.zeros(4, np.float32),
        "mean": np.full(4, 0.1, np.float32), "var": np.full(4, 2.0, np.float32),
        "v": draw.standard_normal((16, 3)).astype(np.float32),
        "shape": np.array([0, -1]),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["a", "scale", "bias", "mean", "var"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MaxPool", ["c"], ["d"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Reshape", ["d", "shape"], ["e"]),
        helper.make_node("MatMul", ["e", "v"], ["y"]),
    ]
    return model(nodes, {"x": ["n", 1, 4, 4]}, ["y"], weights)


X = np.random.default_rng(1).standard_normal((2, 1, 4, 4)).astype(np.float32)


@unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
class Import(unittest.TestCase):
    def expected(self, proto: Any, feeds: dict[str, np.ndarray]) -> list[Any]:
        import onnxruntime

        return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)

    def test_every_device_computes_what_onnx_runtime_does(self) -> None:
        (wanted,) = self.expected(network(), {"x": X})
        for ctx in each_context():
            (got,) = ImportedModel(network()).run({"x": X}, ctx)
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)

    def test_nodes_and_tensors_compute_the_same(self) -> None:
        read = ImportedModel(network())
        x = ad.Variable("x", (2, 1, 4, 4), np.float32)
        (of_nodes,) = ad.Executor([read(x)]).run({x: X}, True)
        np.testing.assert_allclose(of_nodes, read(dl.tensor(X, device="numpy")).numpy(), rtol=1e-5)

    def test_weights_are_parameters_that_train(self) -> None:
        read = ImportedModel(network())
        self.assertEqual([v.name for v in read.inputs], ["x"])
        self.assertEqual({n for n, _ in read.named_buffers()}, {"weights.mean", "weights.var"})
        optimizer, losses = optim.SGD(0.05, params=read.parameters()), []
        for _ in range(3):
            y = read(dl.tensor(X, device="numpy"))
            loss = (y * y).mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        self.assertLess(losses[2], losses[0])

    def test_values_that_decide_shapes_are_looked_at(self) -> None:
        proto = model([helper.make_node("NonZero", ["x"], ["y"])], {"x": [None]}, ["y"])
        x = np.array([0.0, 2.0, 3.0], np.float32)
        np.testing.assert_array_equal(ImportedModel(proto).run({"x": x})[0], [[1, 2]])
        with self.assertRaisesRegex(
            DataError, "NonZero: the shape of its result depends on values"
        ):
            ImportedModel(proto)(ad.Variable("x", (3,), np.float32))

    def test_host_operators_are_steps_of_graphs(self) -> None:
        nodes = [helper.make_node("LpPool", ["x"], ["a"], kernel_shape=[2, 2]),
                 helper.make_node("Relu", ["a"], ["y"])]  # fmt: skip
        proto = model(nodes, {"x": [2, 1, 4, 4]}, ["y"])
        (wanted,) = self.expected(proto, {"x": X})
        for ctx in each_context():
            x = ad.Variable("x", (2, 1, 4, 4), np.float32)
            (got,) = ad.Executor([ImportedModel(proto)(x)], ctx).run({x: X}, True)
            np.testing.assert_allclose(got, wanted, rtol=1e-5)

    def test_loops_and_branches_follow_values(self) -> None:
        """Adds x to itself until the sum exceeds 10: the condition is computed from a feed."""
        body = helper.make_graph(
            [helper.make_node("Add", ["s", "x"], ["t"]),
             helper.make_node("ReduceSum", ["t"], ["total"], keepdims=0),
             helper.make_node("Less", ["total", "ten"], ["go"]),
             helper.make_node("Identity", ["t"], ["seen"])],
            "body",
            [onnx.ValueInfoProto(name=n) for n in ("k", "on", "s")],
            [onnx.ValueInfoProto(name=n) for n in ("go", "t", "seen")],
        )  # fmt: skip
        loop = helper.make_node("Loop", ["", "", "x"], ["y", "all"], body=body)
        proto = model([loop], {"x": [2]}, ["y", "all"], {"ten": np.array(10.0, np.float32)})
        last, every = ImportedModel(proto).run({"x": np.array([1.0, 2.0], np.float32)})
        np.testing.assert_array_equal(last, [4.0, 8.0])
        self.assertEqual(every.shape, (3, 2))
        with self.assertRaisesRegex(DataError, "only a feed decides"):
            ImportedModel(proto)(ad.Variable("x", (2,), np.float32))

    def test_files_of_the_package(self) -> None:
        """Its models of PyTorch's layers and operators, with their data."""
        root = Path(onnx.__file__).parent / "backend" / "test" / "data"
        folders = sorted(root.glob("pytorch-operator/*")) + sorted(root.glob("pytorch-converted/*"))
        self.assertEqual(len(folders), 117)
        for folder in folders:
            with self.subTest(folder.name), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read = load(folder / "model.onnx")
                names = [v.name for v in read.graph.input]
                data = folder / "test_data_set_0"
                feeds = {n: self.array(data / f"input_{k}.pb") for k, n in enumerate(names)
                         if (data / f"input_{k}.pb").exists()}  # fmt: skip
                got = read.run(feeds)
                for k, y in enumerate(got):
                    wanted = self.array(data / f"output_{k}.pb")
                    np.testing.assert_allclose(y, wanted, rtol=1e-3, atol=1e-6)

    def array(self, path: Path) -> np.ndarray:
        return numpy_helper.to_array(TensorProto.FromString(path.read_bytes()))

    def test_the_page_is_that_of_the_code(self) -> None:
        if onnx.__version__ not in PAGE.read_text():
            self.skipTest(f"docs/onnx-operators.md is of another version than {onnx.__version__}")
        self.assertEqual(PAGE.read_text(), markdown())


@unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
class Untrusted(unittest.TestCase):
    def refused(self, proto: Any, pattern: str, **feeds: np.ndarray) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            path.write_bytes(proto.SerializeToString() if hasattr(proto, "graph") else proto)
            with self.assertRaisesRegex(DataError, pattern):
                load(path).run(feeds)

    def test_external_data_stays_in_the_folder(self) -> None:
        for name in ("../secret", "/etc/hostname", "missing"):
            proto = network()
            tensor = proto.graph.initializer[0]
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=name)
            self.refused(proto, "is no file inside the folder of the model", x=X)

    def test_what_no_model_asks_for(self) -> None:
        self.refused(b"no model", "no ONNX model")
        shape = np.array([1 << 20, 1 << 20, 1 << 20])
        node = helper.make_node("ConstantOfShape", ["s"], ["y"])
        self.refused(model([node], {}, ["y"], {"s": shape}), "is too large or negative")
        node = helper.make_node("Unheard", ["x"], ["y"])
        self.refused(model([node], {"x": [1]}, ["y"]), "unknown operator", x=X)
        self.refused(network(), "input 'x' is not given")

    def test_damaged_files_end_in_one_sentence(self) -> None:
        survived = mutated(network().SerializeToString(), {"x": X}, 300, seed=0)
        self.assertLess(survived, 300)


def mutated(data: bytes, feeds: dict[str, np.ndarray], count: int, seed: int) -> int:
    """Loads and runs copies of a file with bytes changed, inserted or cut out; returns how many
    still run. Anything but a DlsysError of one line is raised.
    """
    draw, survived = random.Random(seed), 0
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(changed))
            how = draw.randrange(3)
            if how == 0:
                changed[at] = draw.randrange(256)
            elif how == 1:
                changed[at:at] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 8)))
            else:
                del changed[at : at + draw.randint(1, 8)]
        try:
            proto = onnx.ModelProto.FromString(bytes(changed))
        except Exception:
            continue  # `load` says so: no ONNX model
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ImportedModel(proto).run(feeds)
            survived += 1
        except DlsysError as error:
            if "\n" in str(error):
                raise
    return survived


if __name__ == "__main__":
    unittest.main()

"""Graphs and models as ONNX files, run by ONNX Runtime and by the evaluator of the package onnx."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import tempfile
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, optim, train
from dlsys.data import DataDescription
from dlsys.errors import DataError, DlsysError, GraphError, ShapeError
from dlsys.graph.node import Node, Op
from dlsys.onnx.exporter.extents import Expression, assignments, expression
from support.devices import slow
from support.graphs import evaluate, variable
from support.table.onnx_rows import MISSING, run_onnxruntime, run_reference

FLOAT32 = np.dtype(np.float32)
# The ready models, and layers that they lack, with the shapes of their inputs.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple]] = {
    "Perceptron": (lambda: nn.models.perceptron.Perceptron(5), (None, 5)),
    "LogisticRegression": (lambda: nn.LogisticRegression(12, 3), (None, 3, 4)),
    "MLP": (lambda: nn.MLP((12, 16, 8, 3), dropout=0.3, seed=0), (None, 12)),
    "LeNet5": (lambda: nn.LeNet5(seed=0), (None, 1, 28, 28)),
    "ResNetMNIST": (lambda: nn.ResNetMNIST(seed=0), (None, 1, 28, 28)),
    "RNN": (lambda: nn.RNN(4, 6, num_layers=2, bidirectional=True), (5, "batch", 4)),
    "LSTM": (lambda: nn.LSTM(4, 6, batch_first=True), ("batch", 5, 4)),
    "GRU": (lambda: nn.GRU(4, 6), (5, "batch", 4)),
    "TransformerBlock": (lambda: nn.TransformerBlock(8, 2), (None, 5, 8)),
    "RMSNorm": (lambda: nn.RMSNorm(8), (None, 5, 8)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (None, 4, 3, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1), (None, 3, "height", "width")),
}
LARGE: dict[str, tuple[Callable[[], nn.Module], tuple]] = {
    "ResNet18": (lambda: nn.ResNet18(classes=10, seed=0), (None, 3, "height", "width")),
    "ResNet50": (lambda: nn.ResNet50(classes=10, seed=0), (None, 3, 32, 32)),
}


@unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.path = self.folder / "model.onnx"

    def read(self) -> Any:
        """The ModelProto of the file."""
        return importlib.import_module("onnx").load(str(self.path))

    def operators(self) -> list[str]:
        """The ONNX operators of the file."""
        return [node.op_type for node in self.read().graph.node]

    def shapes(self) -> dict[str, list[Any]]:
        """The shapes of inputs and outputs."""
        graph = self.read().graph
        return {
            port.name: [d.dim_param or d.dim_value for d in port.type.tensor_type.shape.dim]
            for port in (*graph.input, *graph.output)
        }


def input_of(shape: Sequence[Any], batch: int) -> np.ndarray:
    """Numbers of a shape whose free extents are `batch` in front or called so, else odd ones."""
    extents = [
        batch if n is None or n == "batch" else 29 + 2 * batch + k if isinstance(n, str) else n
        for k, n in enumerate(shape)
    ]
    return np.random.default_rng(batch).standard_normal(extents).astype(np.float32)


class Models(InFolder):
    """Models in inference form give what they give here, for a batch of 1 and others."""

    def compare(self, model: nn.Module, shape: tuple, runs: Sequence[Callable], **how: Any) -> None:
        randomize_statistics(model)
        dl.onnx.export(model, self.path, inputs=shape, **how)
        with model.in_mode(False):
            for batch in (1, 3):
                x = input_of(shape, batch)
                wanted = flat(model(dl.tensor(x)))
                for run in runs:
                    got = run(self.path, {"input": x})
                    self.assertEqual(len(got), len(wanted))
                    for a, b in zip(got, wanted):
                        self.assertEqual(a.dtype, FLOAT32)
                        scale = float(np.abs(b).max())
                        # Sums in another order: 2e-6 of the largest logit was measured.
                        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(scale, 1))

    def test_ready_models_and_layers(self) -> None:
        for name, (make, shape) in MODELS.items():
            with self.subTest(model=name):
                self.compare(make(), shape, [run_onnxruntime, run_reference])

    def test_oldest_and_newest_operators(self) -> None:
        newest = importlib.import_module("onnx").defs.onnx_opset_version()
        for opset in (17, newest):
            for name in ("ResNetMNIST", "TransformerBlock", "RMSNorm", "GroupNorm"):
                make, shape = MODELS[name]
                with self.subTest(model=name, opset=opset):
                    self.compare(make(), shape, [run_onnxruntime], opset=opset)
                    self.assertEqual(self.read().opset_import[0].version, opset)

    @slow
    def test_large_models(self) -> None:
        for name, (make, shape) in LARGE.items():
            with self.subTest(model=name):
                self.compare(make(), shape, [run_onnxruntime])

    def test_the_file_names_parameters_and_free_extents(self) -> None:
        dl.onnx.export(nn.LeNet5(seed=0), self.path, inputs=(None, 1, 28, 28))
        model = self.read()
        names = [tensor.name for tensor in model.graph.initializer]
        self.assertLessEqual({"conv1.weight", "conv1.bias", "fc3.weight", "fc3.bias"}, set(names))
        self.assertEqual(self.shapes(), {"input": ["batch", 1, 28, 28], "output": ["batch", 10]})
        self.assertEqual(model.ir_version, 10)
        kinds = ["Conv", "Relu", "MaxPool", "Conv", "Relu", "MaxPool", "Reshape"]
        self.assertEqual(self.operators(), [*kinds, "Gemm", "Relu", "Gemm", "Relu", "Gemm"])

    def test_several_inputs_and_outputs(self) -> None:
        class Two(nn.Module):
            def forward(self, a: Node, b: Node) -> dict[str, Node]:
                return {"sum": a + b, "rows": F.sum(a, axis=1)}

        inputs = {"a": np.zeros((2, 3), np.float32), "b": (("batch", 3), "float32")}
        dl.onnx.export(Two(), self.path, inputs)
        self.assertEqual(self.shapes()["sum"], ["batch", 3])
        self.assertEqual(self.shapes()["rows"], ["batch"])
        a = np.ones((4, 3), np.float32)
        np.testing.assert_array_equal(run_onnxruntime(self.path, {"a": a, "b": a})[0], a + a)

    def test_a_fixed_batch(self) -> None:
        dl.onnx.export(nn.MLP((4, 3)), self.path, inputs=(2, 4), dynamic_batch=False)
        self.assertEqual(self.shapes(), {"input": [2, 4], "output": [2, 3]})

    def test_a_function_and_tokens(self) -> None:
        table = nn.Embedding(7, 4)
        dl.onnx.export(lambda x: F.mean(table(x), axis=1), self.path, ((None, "length"), "int64"))
        x = np.array([[0, 3, 6]])
        wanted = table(dl.tensor(x)).numpy().mean(axis=1)
        np.testing.assert_allclose(run_onnxruntime(self.path, {"input": x})[0], wanted, rtol=1e-6)

    def test_a_model_that_was_trained_with_tensors_and_saved(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        x = dl.tensor(np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32))
        step = optim.Adam(0.01, params=model.parameters())
        for _ in range(3):
            F.mean(model(x) ** 2).backward()
            step.step()
            step.zero_grad()
        model.trained_on = DataDescription((4,), "float32", (0.5,), (2.0,), ("a", "b", "c"))
        train.save(self.folder / "model.safetensors", model)
        loaded = train.load_model(self.folder / "model.safetensors")
        dl.onnx.export(loaded, self.path)
        wanted = model.eval()(x).numpy()
        got = run_onnxruntime(self.path, {"input": x.numpy()})[0]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
        props = {one.key: one.value for one in self.read().metadata_props}
        self.assertEqual(json.loads(props["labels"]), ["a", "b", "c"])
        self.assertEqual(json.loads(props["normalization"]), {"mean": [0.5], "std": [2.0]})
        self.assertEqual(props["dlsys_version"], dl.__version__)
        self.assertTrue(loaded.training, "export leaves the mode as it was")


def randomize_statistics(model: nn.Module) -> None:
    """Running statistics as after training, other than they begin."""
    rng = np.random.default_rng(1)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.set(rng.uniform(0.5, 1.5, buffer.shape).astype(np.float32))


def flat(made: Any) -> list[np.ndarray]:
    """The arrays of a Tensor, or of tuples of them."""
    if isinstance(made, (tuple, list)):
        return [array for one in made for array in flat(one)]
    return [made.numpy()]


class Graphs(InFolder):
    """Nodes, inference form and losses."""

    def test_a_training_graph_takes_inference_form(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        x, labels = ad.Variable("x", (None, 4)), ad.Variable("labels", (None,), np.int64)
        logits = model(x)
        loss = F.cross_entropy(logits, labels)
        train_step = optim.SGD(0.1).minimize(loss, model.parameters())
        rng = np.random.default_rng(0)
        feeds = {x: rng.standard_normal((6, 4)).astype(np.float32), labels: np.arange(6) % 3}
        ad.Executor([loss, train_step]).run(feeds)
        dl.onnx.export({"logits": logits, "loss": loss}, self.path)
        self.assertIn("BatchNormalization", self.operators())
        got = run_onnxruntime(self.path, {n.name: value for n, value in feeds.items()})
        logits = model.eval()(x)
        wanted = evaluate([logits, F.cross_entropy(logits, labels)], feeds)
        for a, b in zip(got, wanted):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    def test_the_graph_as_it_trains(self) -> None:
        x = ad.Variable("x", (None, 3))
        norm = nn.BatchNorm1d(3)
        dl.onnx.export([norm(x)], self.path, training=True)
        value = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
        got = run_onnxruntime(self.path, {"x": value})[0]
        np.testing.assert_allclose(got, evaluate([norm(x)], {x: value})[0], rtol=1e-5, atol=1e-6)

    def test_gradients_are_a_graph_too(self) -> None:
        w = ad.Parameter(np.linspace(-1, 1, 54, dtype=np.float32).reshape(2, 3, 3, 3), "w")
        x = ad.Variable("x", (None, 3, 7, 7), np.float32)
        pooled = F.max_pool2d(F.gelu(F.conv2d(x, w, padding=1)), 3, stride=2)
        nodes = [pooled, *ad.gradients(F.sum(pooled * pooled), [w, x])]
        dl.onnx.export(nodes, self.path)
        value = input_of((None, 3, 7, 7), 4)
        wanted = evaluate(nodes, {x: value})
        for got, expected in zip(run_onnxruntime(self.path, {"x": value}), wanted):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)

    def test_outputs_that_are_inputs_constants_or_twice_the_same(self) -> None:
        x = variable("x", 2)
        y = x + 1
        dl.onnx.export([x, y, y, ad.constant([1.0, 2.0])], self.path)
        value = np.array([3, 4], np.float32)
        got = run_onnxruntime(self.path, {"x": value})
        for a, b in zip(got, (value, value + 1, value + 1, [1, 2])):
            np.testing.assert_array_equal(a, b)

    def test_names_that_meet(self) -> None:
        output = ad.Parameter(np.array([2.0]), "output", dtype="float32")
        x, again = variable("x", 2), ad.Parameter(np.array([1.0, 3.0]), "x")
        dl.onnx.export(x * output + again, self.path)
        names = sorted(tensor.name for tensor in self.read().graph.initializer)
        self.assertEqual(names, ["output_1", "x_1"])
        got = run_onnxruntime(self.path, {"x": np.array([4, 5], np.float32)})[0]
        np.testing.assert_array_equal(got, [9, 13])
        with self.assertRaisesRegex(GraphError, "two Variables are called x"):
            dl.onnx.export(x + variable("x", 2), self.path)

    def test_all_operators_without_a_form_are_listed(self) -> None:
        class OwnOp(Op):
            def infer_shape(self, node: Node, input_shapes: Any) -> Any:
                return input_shapes[0]

        p = ad.Parameter(np.zeros(3, np.float32), "p")
        own = OwnOp()(ad.random_uniform((3,)) + p)
        message = r"no ONNX form: random_uniform \(its numbers .+\) \[.+\]; own \(there is no rule"
        with self.assertRaisesRegex(GraphError, message):
            dl.onnx.export([own], self.path)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_bfloat16_and_float16_parameters(self) -> None:
        for dtype, kind in (("bfloat16", FLOAT32), ("float16", np.float16)):
            w = ad.Parameter(np.array([[0.5, 2.0], [-1.0, 3.0]]), "w", dtype=dtype)
            x = ad.Variable("x", (None, 2), dtype)
            dl.onnx.export([F.relu(x @ w)], self.path)
            value = np.array([[1, 2], [3, -4]]).astype(kind)
            got = run_onnxruntime(self.path, {"x": value})[0]
            np.testing.assert_array_equal(got, np.maximum(value @ w.asnumpy().astype(kind), 0))


class FreeExtents(InFolder):
    """Extents that a run decides."""

    def check(self, build: Callable[[Node], Node], shape: tuple, *runs: tuple[int, ...]) -> None:
        x = ad.Variable("x", tuple(None if isinstance(n, str) else n for n in shape), np.float32)
        node = build(x)
        dl.onnx.export(node, self.path, {"x": shape})
        for extents in runs:
            value = np.random.default_rng(0).standard_normal(extents).astype(np.float32)
            wanted = evaluate([node], {x: value})[0]
            got = run_onnxruntime(self.path, {"x": value})[0]
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)

    def test_shapes_that_follow_from_them(self) -> None:
        runs = (1, 6), (5, 6), (8, 6)
        self.check(lambda x: x[:, 1:4], ("batch", 6), *runs)
        self.check(lambda x: F.reshape(x, (-1, 3)), ("batch", 6), *runs)
        self.check(lambda x: F.flatten(x, 0), ("batch", 6), *runs)
        self.check(lambda x: x - F.mean(x, axis=0), ("batch", 6), *runs)
        self.check(lambda x: F.pad(x, ((1, 2), (0, 0))), ("batch", 6), *runs)
        self.check(lambda x: F.stack([x, x], axis=1), ("batch", 6), *runs)
        self.check(lambda x: x @ F.transpose(x), ("rows", 6), *runs)
        self.check(lambda x: F.sort(x, axis=0)[0], ("batch", 6), *runs)
        self.check(lambda x: F.zeros_like(x) + F.ones_like(x[:, :1]), ("batch", 6), *runs)

    def test_two_of_them(self) -> None:
        runs = (1, 4, 3), (3, 7, 3)
        self.check(lambda x: F.reshape(x, (-1,)), ("a", "b", 3), *runs)
        self.check(lambda x: F.transpose(F.flatten(x, 1)), ("a", "b", 3), *runs)

    def test_windows_over_images_of_any_remainder(self) -> None:
        images = [(1, 2, 9 + k, 10 + k) for k in range(5)]
        for pool in (
            lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
            lambda x: F.avg_pool2d(x, 3, stride=2, padding=1),
            lambda x: F.avg_pool2d(x, 2, count_include_pad=False),
            F.global_max_pool2d,
        ):
            self.check(pool, ("n", 2, "h", "w"), *images)

    def test_what_no_shape_tells_is_refused(self) -> None:
        x = ad.Variable("x", (None, 2, None, None), np.float32)
        pooled = F.max_pool2d(x, 2, ceil_mode=True)
        with self.assertRaisesRegex(GraphError, r"max_pool2d: .*free extents \(batch, x_2, x_3\)"):
            dl.onnx.export(pooled, self.path)
        dl.onnx.export(pooled, self.path, {"x": (None, 2, 5, 7)})

    def test_expressions(self) -> None:
        given = assignments(["a", "b"])
        cases = {
            "a": lambda a, b: a, "3*a": lambda a, b: 3 * a, "a*b": lambda a, b: a * b,
            "2*a+5": lambda a, b: 2 * a + 5, "7*a*a": lambda a, b: 7 * a * a,
            "b-1": lambda a, b: b - 1,
        }  # fmt: skip
        for text, formula in cases.items():
            values = [formula(numbers["a"], numbers["b"]) for numbers in given]
            self.assertEqual(str(expression(values, given)), text)
        self.assertIsNone(expression([(n["a"] + 1) // 2 for n in given], given))
        self.assertIsInstance(expression([n["a"] for n in given], given), Expression)


class Files(InFolder):
    """What is written, and what happens when it cannot be."""

    def test_large_weights_go_to_a_file_beside(self) -> None:
        model = nn.MLP((64, 128, 3), seed=0)
        dl.onnx.export(model, self.path, (None, 64), external_data_above=10_000)
        self.assertEqual({p.name for p in self.folder.iterdir()}, {"model.onnx", "model.onnx.data"})
        self.assertLess(self.path.stat().st_size, 4000)
        x = input_of((None, 64), 2)
        wanted = model.eval()(dl.tensor(x)).numpy()
        got = run_onnxruntime(self.path, {"input": x})[0]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
        importlib.import_module("onnx.checker").check_model(str(self.path), full_check=True)

    def test_a_failure_leaves_what_was_there(self) -> None:
        self.path.write_bytes(b"before")
        with mock.patch("os.replace", side_effect=OSError(28, "full")):
            with self.assertRaises(OSError):
                dl.onnx.export(nn.MLP((4, 3)), self.path, (None, 4))
        self.assertEqual(self.path.read_bytes(), b"before")
        self.assertEqual([p.name for p in self.folder.iterdir()], ["model.onnx"])
        with self.assertRaisesRegex(DataError, "is a folder"):
            dl.onnx.export(nn.MLP((4, 3)), self.folder, (None, 4))

    def test_what_is_refused(self) -> None:
        mlp, x = nn.MLP((4, 3)), ad.Variable("x")
        refusals: list[tuple[str, type, Callable[[], None]]] = [
            (r"opset is 16, expected 17 to \d+", GraphError,
             lambda: dl.onnx.export(mlp, self.path, (None, 4), opset=16)),
            ("needs the shapes of its inputs", ShapeError,
             lambda: dl.onnx.export(mlp, self.path)),
            ("input is 'wide', expected a shape", ShapeError,
             lambda: dl.onnx.export(mlp, self.path, "wide")),
            ("x declares no shape; give it one", ShapeError,
             lambda: dl.onnx.export([x + 1], self.path)),
            ("y is no Variable of the graph; there are x", ShapeError,
             lambda: dl.onnx.export([x + 1], self.path, {"y": (1,), "x": (2,)})),
            ("expected a Module, a function or nodes, got 3", GraphError,
             lambda: dl.onnx.export(3, self.path)),  # type: ignore[arg-type]
            ("expected 1 names of outputs, all different", GraphError,
             lambda: dl.onnx.export(mlp, self.path, (None, 4), outputs=["a", "b"])),
            ("gives float, expected nodes", GraphError,
             lambda: dl.onnx.export(lambda x: [1.0], self.path, (None, 4))),
        ]  # fmt: skip
        for message, kind, call in refusals:
            with self.subTest(message), self.assertRaisesRegex(kind, message):
                call()
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_commands(self) -> None:
        program = importlib.import_module("dlsys.onnx.__main__")
        train.save(self.folder / "model.safetensors", nn.MLP((4, 3), seed=0))
        given = ["convert", str(self.folder / "model.safetensors"), str(self.path)]
        said, failed = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(failed):
            self.assertEqual(program.main([*given, "--shape", "?,4"]), 0)
            self.assertEqual(program.main(["check", str(self.path)]), 0)
            self.assertEqual(program.main(given), 1)
            self.assertEqual(program.main(["check", given[1]]), 1)
        self.assertIn("input          input: float (batch, 4)\n", said.getvalue())
        self.assertEqual(len(failed.getvalue().splitlines()), 2, failed.getvalue())
        self.assertIn("is no valid ONNX model", failed.getvalue())


class Table(unittest.TestCase):
    def test_every_operator_has_a_form_or_a_reason(self) -> None:
        rows = {row.operator: row for row in dl.onnx.exportable()}
        self.assertEqual(rows["conv2d"].targets, "Conv")
        self.assertIn("updates state", rows["adam_update"].reason)
        self.assertTrue(all(row.targets == "" for row in rows.values() if row.reason))
        self.assertGreater(sum(not row.reason for row in rows.values()), 170)

    def test_the_docs_have_the_table(self) -> None:
        text = (Path(dl.__file__).parents[2] / "docs" / "onnx.md").read_text(encoding="utf-8")
        shown = text.partition("exportable -->\n\n")[2].partition("\n<!-- end")[0]
        made = importlib.import_module("dlsys.onnx.exporter.table").markdown()
        self.assertEqual(shown, made, "run python -m dlsys.onnx exportable --write docs/onnx.md")

    def test_the_package_is_named_where_it_is_missing(self) -> None:
        with mock.patch.dict(sys.modules, {"onnx": None}):
            with self.assertRaisesRegex(DlsysError, "need the package onnx: pip install onnx"):
                dl.onnx.export(nn.MLP((4, 3)), "never.onnx", (None, 4))


if __name__ == "__main__":
    unittest.main()

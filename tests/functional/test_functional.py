"""Functions of dlsys.functional build what their rows say, and say themselves how they are used."""

from __future__ import annotations

import inspect
import pydoc
import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn
from dlsys.errors import GraphError, ShapeError, SignatureError
from dlsys.functional.methods import METHODS, PROPERTIES
from dlsys.graph.node import Node
from dlsys.methods import ArrayMethods
from functional.test_vocabulary import VOCABULARY
from support.functional import ARRAYS, NODES, ROWS, X, Y


def built(node: Node) -> Any:
    """What a node is made of: operators, attributes, and sources by name."""
    if node.op.leaf in ("feed", "state"):
        return node.name
    attrs = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in node.attrs.items()}
    return node.op, attrs, tuple(map(built, node.inputs))


def value(node: Node) -> np.ndarray:
    """The value of a node over the arrays of the rows, on numpy."""
    feeds = {x: ARRAYS[name] for name, x in NODES.items()}
    used = set(ad.find_topo_sort([node]))
    return ad.Executor([node]).run({x: feeds[x] for x in feeds.keys() & used})[0]


class Functional(unittest.TestCase):
    def test_each_builds_what_its_row_says(self) -> None:
        for name, rows in ROWS.items():
            for k, (call, expected) in enumerate(rows):
                with self.subTest(name=name, row=k):
                    self.assertEqual(built(call()), built(expected()))

    def test_each_has_a_row(self) -> None:
        composed = {"adaptive_avg_pool2d", "adaptive_max_pool2d"}  # by values, below
        self.assertEqual(VOCABULARY.keys() - ROWS.keys(), composed)

    def test_each_is_documented_with_an_example_of_it(self) -> None:
        """Examples run in test_reference.py."""
        for name, function in VOCABULARY.items():
            with self.subTest(name=name):
                self.assertRegex(function.__doc__ or "", rf"\n\n +>>> (.*\n +>>> )*.*F\.{name}\(")

    def test_each_parameter_and_result_has_a_type(self) -> None:
        for name, function in VOCABULARY.items():
            with self.subTest(name=name):
                signature = inspect.signature(function)
                self.assertIsNot(signature.return_annotation, inspect.Signature.empty)
                for parameter in signature.parameters.values():
                    self.assertIsNot(parameter.annotation, inspect.Parameter.empty)

    def test_help_shows_the_own_signature(self) -> None:
        text = pydoc.plain(pydoc.render_doc(F.softmax))
        self.assertIn("softmax(x: 'Array', axis: 'int' = -1) -> 'Array'", text)
        self.assertIn("over one axis", text)

    def test_arrays_lists_and_numbers_become_constants(self) -> None:
        x = ARRAYS["x"]
        for node in (F.relu(x), F.relu(x.tolist())):
            np.testing.assert_array_equal(value(node), np.maximum(x, 0))
            self.assertEqual(node.dtype, np.float32)
        np.testing.assert_array_equal(value(F.add(x, X)), 2 * x)
        np.testing.assert_array_equal(value(F.add(x, 1)), x + 1)
        np.testing.assert_array_equal(value(F.maximum(0, X)), np.maximum(x, 0))
        np.testing.assert_array_equal(value(F.where([[True], [False]], X, -X)), x * [[1], [-1]])
        self.assertEqual(value(F.add(2, 3)), 5)
        self.assertEqual(F.relu(x.astype(np.float64)).dtype, np.float64)
        with self.assertRaisesRegex(SignatureError, "value must be a number or an array"):
            F.relu("x")

    def test_adaptive_pooling(self) -> None:
        images = ARRAYS["images"]
        for size in ((3, 2), 4, (6, 4), 1):
            rows, columns = (size, size) if isinstance(size, int) else size
            for pool, reduce in ((F.adaptive_avg_pool2d, np.mean), (F.adaptive_max_pool2d, np.max)):
                parts = [
                    [
                        reduce(
                            images[
                                :, :,
                                i * 6 // rows : -(-(i + 1) * 6 // rows),
                                j * 4 // columns : -(-(j + 1) * 4 // columns),
                            ],
                            axis=(2, 3),
                        )
                        for j in range(columns)
                    ]
                    for i in range(rows)
                ]  # fmt: skip
                expected = np.array(parts).transpose(2, 3, 0, 1)
                np.testing.assert_allclose(value(pool(NODES["images"], size)), expected, rtol=1e-5)

    def test_stop_gradient(self) -> None:
        for held in (F.stop_gradient(X), X.detach()):
            gradient = ad.gradients(F.sum(held * X), [X])[0]
            np.testing.assert_array_equal(value(gradient), ARRAYS["x"])
            np.testing.assert_array_equal(value(held), ARRAYS["x"])

    def test_dropout_is_told_how_much_becomes_zero(self) -> None:
        ones = ad.constant(np.ones((100, 100), np.float32))
        for node in (F.dropout(ones, 0.2), ad.dropout(ones, 0.2), nn.Dropout(0.2, rng=0)(ones)):
            found = value(node)
            self.assertAlmostEqual(float((found == 0).mean()), 0.2, delta=0.02)

    def test_what_does_not_fit_is_refused(self) -> None:
        free, unknown = ad.Variable("free", (None, 3)), ad.Variable("unknown")
        for make, error, message in (
            (lambda: F.gelu(X, "erf"), GraphError, "gelu: approximate must be none or tanh"),
            (lambda: F.softmax(X, axis=2), ShapeError, r"softmax: axes \(2,\) do not fit"),
            (lambda: F.layer_norm(X, 4, np.ones(3)), ShapeError, "not the normalized shape"),
            (lambda: F.group_norm(unknown, 1), GraphError, "group_norm: the number of channels"),
            (lambda: F.roll(free, 1, 0), GraphError, r"roll: axis 0 of free \(None, 3\)"),
            (lambda: F.roll(X, 1, 2), GraphError, r"roll: x \(2, 3\) has no axis 2"),
            (lambda: F.flip(unknown, 0), GraphError, "flip: the number of dimensions of unknown"),
            (lambda: F.swapaxes(X, 0, 5), GraphError, "swapaxes: .* has no axis 5"),
            (lambda: F.adaptive_avg_pool2d(X, 1), GraphError, "adaptive_avg_pool2d: expected"),
            (
                lambda: F.adaptive_max_pool2d(NODES["images"], 9),
                GraphError,
                "adaptive_max_pool2d: 9 windows along axis 2",
            ),
        ):
            with self.subTest(message=message), self.assertRaisesRegex(error, message) as caught:
                make()
            self.assertIn("test_functional.py", str(caught.exception))


class Methods(unittest.TestCase):
    def test_what_is_declared_is_there(self) -> None:
        declared = set(ArrayMethods.__annotations__)
        self.assertEqual(declared, METHODS.keys() | PROPERTIES.keys())
        self.assertEqual({name for name in declared if not hasattr(Node, name)}, set())

    def test_they_build_what_the_functions_build(self) -> None:
        arguments: dict[str, tuple[Any, ...]] = {
            "astype": ("int64",), "broadcast_to": ((2, 3),), "expand_dims": (0,), "tile": (2,),
            "roll": (1, 0), "split": (1,), "swapaxes": (0, 1), "topk": (2,),
            "masked_fill": (Y, 0), "take_along_axis": (ad.argmax_op(X, 1, True),),
        }  # fmt: skip
        for name in METHODS.keys() & VOCABULARY.keys() - {"reshape", "transpose"}:
            rest = arguments.get(name, ())
            with self.subTest(name=name):
                method, function = getattr(X, name)(*rest), VOCABULARY[name](X, *rest)
                if not isinstance(method, Node):
                    method, function = method[0], function[0]
                self.assertEqual(built(method), built(function))

    def test_shape_and_the_like(self) -> None:
        self.assertEqual((X.shape, X.dtype, X.ndim, X.size), ((2, 3), np.float32, 2, 6))
        unknown = ad.Variable("unknown")
        found = unknown.shape, unknown.dtype, unknown.ndim, unknown.size
        self.assertEqual(found, (None, None, None, None))
        parameter = ad.Parameter(np.zeros((4, 5), np.float32))
        self.assertEqual((parameter.shape, parameter.ndim, parameter.size), ((4, 5), 2, 20))
        self.assertIsNone(ad.max_pool_op(NODES["images"]).shape)

    def test_reshape_and_transpose_take_both_forms(self) -> None:
        for node, shape in (
            (X.reshape(3, 2), (3, 2)), (X.reshape((6,)), (6,)), (X.reshape([6, 1]), (6, 1)),
            (X.reshape(-1), (6,)), (X.T, (3, 2)), (X.transpose(), (3, 2)),
            (X.transpose(1, 0), (3, 2)), (X.transpose((0, 1)), (2, 3)),
            (X.unsqueeze(0), (1, 2, 3)), (Y.flatten(), (6,)),
        ):  # fmt: skip
            self.assertEqual(node.shape, shape)


if __name__ == "__main__":
    unittest.main()

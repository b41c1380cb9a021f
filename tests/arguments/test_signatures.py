"""Signatures: every operator that ships declares one, and what does not fit is refused."""

from __future__ import annotations

import inspect
import pydoc
import sys
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import init, nn
from dlsys.arguments import kinds
from dlsys.arguments.signature import Signature
from dlsys.errors import DlsysError, GraphError, ShapeError, SignatureError
from dlsys.fusion.shared import body as fused
from dlsys.fusion.shared.conv_pool_operators import Geometry
from dlsys.graph.node import output_op
from dlsys.ops.conv.geometry import IntPair, Windows
from dlsys.ops.indexing import Key
from dlsys.ops.loss.rows import Numbers
from support.table.operators import modules_of_operators

# Values that no kind of attribute takes, or none of that kind.
NEVER = (object(), lambda: 0, 1j)
WRONG: dict[type, tuple[Any, ...]] = {
    kinds.Int: (1.5, "3", True, np.float32(2), (1,), np.ones(2, int)),
    kinds.Number: ("1", [1.0], np.ones(2), np.nan),
    kinds.Bool: ("yes", 2, 0.5, np.ones(2)),
    kinds.Axes: ("0", 1.5, True, (0, "1"), (0.0,)),
    kinds.Shape: (6, "ab", (1.5, 2), ("a",), (-2,), True),
    kinds.Ints: (6, "ab", (1.5,), (True,)),
    Numbers: (6, "ab", ("a",), [[1.0]]),
    IntPair: (1.5, "a", (1, 2, 3), (1, 1.5), True, -1),
    kinds.DType: ("foo", "complex64", object, 7),
    kinds.OneOf: ("no such word", 3, True),
    kinds.Instance: (0.5,),
}


def operators() -> dict[str, ad.Op]:
    """Every operator that a public name or a module of operators holds, by where it was found; the
    graph's own, which makes `node[0]`, is called by no one.
    """
    found: dict[int, tuple[str, ad.Op]] = {}

    def look(value: Any, path: str) -> None:
        if isinstance(value, ad.Op) and value is not output_op:
            found.setdefault(id(value), (path, value))
        elif isinstance(value, dict):
            for key, item in value.items():
                look(item, f"{path}[{key!r}]")
        elif isinstance(value, (tuple, list)):
            for k, item in enumerate(value):
                look(item, f"{path}[{k}]")

    for module in modules_of_operators():
        held = vars(module)
        for name, value in held.items():
            look(value, f"{module.__name__}.{name}")
    for name, value in vars(ad).items():
        look(value, name)
    return dict(sorted(found.values()))


def functions() -> dict[str, Callable]:
    """Every public function that builds nodes and declares what it takes."""
    known = {name: value for name, value in vars(ad).items() if inspect.isfunction(value)}
    return {name: value for name, value in known.items() if hasattr(value, "__wrapped__")}


def wrong_values(kind: kinds.Kind) -> Iterator[Any]:
    """Values that an attribute of this kind must refuse."""
    values = list(NEVER)
    for known, more in WRONG.items():
        if type(kind) is known:
            values += more
    if isinstance(kind, kinds.Number) and kind.nan:
        values = [value for value in values if value is not np.nan]
    if kind.default is not None and not isinstance(kind, Key):
        values.append(None)
    return iter(values)


def example(kind: kinds.Kind, inputs: int = 2) -> Any:
    """A value that fits, for attributes of fused operators; a body has so many inputs."""
    if isinstance(kind, kinds.OneOf):
        return kind.words[0]
    if isinstance(kind, kinds.Bool):
        return True
    if isinstance(kind, kinds.Int):
        return 1
    if isinstance(kind, kinds.Number):
        return 1.0
    assert isinstance(kind, kinds.Instance)
    if kind.classes == (fused.Body,):
        given = tuple(ad.Variable(f"x{k}") for k in range(inputs))
        return fused.Body(given, (ad.constant(0) + 1,))
    if kind.classes == (Windows,):
        return Windows(*[(1, 1)] * len(Windows._fields))
    if kind.classes == (Geometry,):
        return Geometry(1, 1, *[(1, 1)] * (len(Geometry._fields) - 2))
    return ad.Variable("output") if kind.classes == (ad.Node,) else ()


class Refused(unittest.TestCase):
    def refused(self, name: str, call: Callable[[], Any], error: type = SignatureError) -> str:
        """The text of the refusal, which names the operator and the line of `call`."""
        with self.assertRaises(error) as caught:
            call()
        text = str(caught.exception)
        line = f" [test_signatures.py:{call.__code__.co_firstlineno}]"
        self.assertTrue(text.startswith(f"{name}: ") and text.endswith(line), (text, line))
        return text


class EveryOperator(Refused):
    def test_enough_are_found(self) -> None:
        found = operators()
        self.assertGreater(len(found), 200)
        public = {name for name, value in vars(ad).items() if isinstance(value, ad.Op)}
        self.assertLessEqual(
            {id(getattr(ad, name)) for name in public}, set(map(id, found.values()))
        )

    def test_each_declares_what_it_takes(self) -> None:
        for path, op in operators().items():
            with self.subTest(path):
                self.assertIsInstance(op.signature, Signature)

    def test_one_input_more_and_one_fewer(self) -> None:
        x = [ad.Variable(f"x{k}") for k in range(20)]
        for path, op in operators().items():
            if op.signature.variadic:  # type: ignore[union-attr]
                continue
            known = [op.signature._kinds[key] for key in op.signature.inputs]  # type: ignore[union-attr]
            least = sum(kind.default is kinds.REQUIRED for kind in known)
            with self.subTest(path):
                if op.leaf or op.constant_fill:
                    self.refused(op.name, lambda op=op: op(*x))
                    continue
                text = self.refused(op.name, lambda: op(*x[: len(known) + 1]))  # noqa: B023
                self.assertIn(f"got {len(known) + 1}", text)
                text = self.refused(op.name, lambda: op(*x[: least - 1]))  # noqa: B023
                self.assertIn(f"got {least - 1}", text)

    def test_inputs_of_a_body(self) -> None:
        x = [ad.Variable(f"x{k}") for k in range(3)]
        for path, op in operators().items():
            attributes = op.signature.attributes  # type: ignore[union-attr]
            if not op.signature.variadic or "body" not in attributes:  # type: ignore[union-attr]
                continue
            attrs = {key: example(kind) for key, kind in attributes.items()}
            for count in (1, 3):
                with self.subTest(path, count=count):
                    call = lambda: op(*x[:count], **attrs)  # noqa: B023, E731
                    text = self.refused(op.name, call, GraphError)
                    self.assertIn(f"takes 2 inputs, got {count}", text)

    def test_an_unknown_keyword(self) -> None:
        for path, op in operators().items():
            x = [ad.Variable(key) for key in op.signature.inputs]  # type: ignore[union-attr]
            with self.subTest(path):
                text = self.refused(op.name, lambda: op(*x, no_such=1))  # noqa: B023
                self.assertIn("unexpected attribute 'no_such'", text)
                self.assertIn(f"; {op.name}(", text)

    def test_what_is_no_node(self) -> None:
        for path, op in operators().items():
            names = op.signature.inputs  # type: ignore[union-attr]
            for bad in range(len(names)):
                x: list[Any] = [ad.Variable(key) for key in names]
                x[bad] = "text"
                with self.subTest(path, bad=names[bad]):
                    self.refused(op.name, lambda: op(*x, **self.required(op)))  # noqa: B023

    def required(self, op: ad.Op) -> dict[str, Any]:
        """Attributes that must be given, of values that fit."""
        made = {}
        for key, kind in op.signature.attributes.items():  # type: ignore[union-attr]
            if kind.default is kinds.REQUIRED:
                made[key] = self.fitting(kind, len(op.signature.inputs))  # type: ignore[union-attr]
        return made

    def fitting(self, kind: kinds.Kind, inputs: int) -> Any:
        for value in (1, True, (1,), (1, 1), "float32", 1.0, (1.0,), ("a",), "a", None):
            try:
                kind.take(value)
                return value
            except (TypeError, ValueError):
                pass
        return example(kind, inputs)

    def test_wrong_values_of_every_attribute(self) -> None:
        tried = 0
        for path, op in operators().items():
            x = [ad.Variable(key) for key in op.signature.inputs]  # type: ignore[union-attr]
            for key, kind in op.signature.attributes.items():  # type: ignore[union-attr]
                for value in wrong_values(kind):
                    with self.subTest(path, attribute=key, value=value):
                        self.refused(op.name, lambda: op(*x, **{key: value}))  # noqa: B023
                        tried += 1
        self.assertGreater(tried, 1000)

    def test_the_name_is_a_string(self) -> None:
        for path, op in operators().items():
            x = [ad.Variable(key) for key in op.signature.inputs]  # type: ignore[union-attr]
            with self.subTest(path):
                text = self.refused(op.name, lambda: op(*x, **self.required(op), name=3))  # noqa: B023
                self.assertIn("name must be a string or None, got 3", text)

    def test_python_shows_it(self) -> None:
        for path, op in operators().items():
            with self.subTest(path):
                shown = inspect.signature(op)
                declared: Any = op.signature
                wanted = {*declared.inputs, *declared.attributes, "name"} | {declared.variadic}
                self.assertEqual(set(shown.parameters), wanted - {""})
                page = pydoc.plain(pydoc.render_doc(op))
                # Python 3.13 spreads long signatures over several lines.
                self.assertIn(f"{op.name}{shown}".replace(" ", ""), "".join(page.split()))
                for key, kind in declared.attributes.items():
                    self.assertIn(f"    {key}: {kind.expected}", page)

    def test_public_operators_say_what_they_do(self) -> None:
        """Operators of one class have docstrings of their own."""
        seen: dict[Any, str] = {}
        for name, op in vars(ad).items():
            if isinstance(op, ad.Op):
                with self.subTest(name):
                    text = op.__doc__ or ""
                    self.assertGreater(len(text), 3)
                    key = text, tuple(op.signature.inputs)  # type: ignore[union-attr]
                    self.assertIs(getattr(ad, seen.setdefault(key, name)), op)


class EveryFunction(Refused):
    def test_enough_are_found(self) -> None:
        self.assertGreater(len(functions()), 45)

    def test_refusals(self) -> None:
        for name, function in functions().items():
            called = function.__name__.removesuffix("_op")
            parameters = inspect.signature(function).parameters
            for key in parameters:
                for value in NEVER:
                    with self.subTest(name, parameter=key, value=value):
                        self.refused(called, lambda: function(**{key: value}))  # noqa: B023
            with self.subTest(name):
                text = self.refused(called, lambda: function(no_such=1))  # noqa: B023
                self.assertIn("unexpected attribute 'no_such'", text)
                self.refused(called, lambda: function(*[ad.Variable("x")] * 20))  # noqa: B023
                if any(p.default is p.empty for p in parameters.values()):
                    self.refused(called, lambda: function())  # noqa: B023


class Items(Refused):
    """One by one what was seen to pass, to be cut silently or to raise Python's own errors."""

    def setUp(self) -> None:
        self.x, self.y = ad.Variable("x"), ad.Variable("y")

    def test_inputs(self) -> None:
        x, y = self.x, self.y
        for call, text in (
            (lambda: ad.add_op(x, x, x), r"add: takes 2 inputs \(a, b\), got 3"),
            (lambda: ad.copy_op(x, y), r"copy: takes 1 input \(x\), got 2"),
            (lambda: ad.pow_op(x), r"pow: takes 2 inputs \(a, b\), got 1"),
            (lambda: ad.sum_op(x, y), r"sum: takes 1 input \(x\), got 2"),
            (lambda: ad.sum_op(x, 0, True, "n", "float32", 6), "sum: takes 5 arguments, got 6"),
            (lambda: ad.add_op(x, a=y), "add: a is given twice"),
            (lambda: ad.concat(x), "concat: nodes must be a sequence of nodes, got the node x"),
            (lambda: ad.where_op(True, 9, x), "where: condition is the Python bool True; compare"),
        ):
            self.assertRegex(self.refused(text.split(":")[0], call), text)

    def test_keywords(self) -> None:
        x = self.x
        for call, text in (
            (lambda: ad.oneslike_op(x, dtype="int32"), "ones_like: unexpected attribute 'dtype'"),
            (lambda: ad.sqrt_op(x, eps=1), r"sqrt: unexpected attribute 'eps'; sqrt\(x\) \["),
            (lambda: ad.relu_op(x, foo=3), "relu: unexpected attribute 'foo'"),
            (lambda: ad.add_op(x, x, alpha=2), "add: unexpected attribute 'alpha'"),
            (lambda: ad.max_op(x, axs=1), "max: unexpected attribute 'axs' .did you mean 'axis'"),
            (lambda: ad.cast_op(x), r"cast: attribute 'dtype' is missing; cast\(x, dtype\)"),
            (lambda: ad.sum_op(x, axis=1, axes=1), "sum: axis is given twice"),
            (lambda: ad.sum_op(x, axes=1, axis=1), "sum: axis is given twice"),
            (lambda: ad.conv2d(x, x, strides=2), "conv2d: unexpected attribute 'strides'"),
        ):
            self.assertRegex(self.refused(text.split(":")[0], call), text)

    def test_values(self) -> None:
        x = self.x
        pair = "must be one or two positive integers, got"
        for call, text in (
            (lambda: ad.sum_op(x, "0"), "sum: axis must be an integer or a tuple .*, got '0'"),
            (lambda: ad.reshape_op(x, 6), "reshape: shape must be a tuple of extents .* got 6"),
            (lambda: ad.conv2d(x, x, stride=1.5), f"conv2d: stride {pair} 1.5"),
            (lambda: ad.conv2d(x, x, stride=True), f"conv2d: stride {pair} True"),
            (lambda: ad.max_pool2d(x, (2, 2.5)), rf"max_pool2d: window {pair} \(2, 2.5\)"),
            (lambda: ad.avg_pool2d(x, "2"), f"avg_pool2d: window {pair} '2'"),
            (lambda: ad.conv1d(x, x, padding=(1.0, 1)), "conv1d: padding must be .* negative, got"),
            (lambda: ad.flatten_op(x, 1.9), "flatten: axis must be an integer, got 1.9"),
            (lambda: ad.cumsum_op(x, 0.7), "cumsum: axis must be an integer, got 0.7"),
            (lambda: ad.gather_op(x, x, "0"), "gather: axis must be an integer, got '0'"),
            (lambda: ad.one_hot_op(x, 3.5), "one_hot: depth must be an integer .* got 3.5"),
            (lambda: ad.matmul_op(x, x, "no"), "matmul: trans_A must be True or False, got 'no'"),
            (lambda: ad.cast_op(x, None), "cast: dtype must be a dtype of numbers .* got None"),
            (lambda: ad.cast_op(x, "S4"), "cast: dtype must be a dtype of numbers .* got 'S4'"),
            (lambda: ad.clip_op(x, np.nan, 1), "clip: low must be a number, got nan"),
            (lambda: ad.add_byconst_op(x, 1j), "add_const: const must be a number, got 1j"),
            (lambda: x + "a", "constant: value must be a number or an array of numbers, got 'a'"),
            (lambda: ad.tile(x, 2.5), "tile: reps must be .* got 2.5"),
            (lambda: ad.split(x, 2.0), "split: sections must be .* got 2.0"),
            (lambda: ad.pad_op(x, 1), "pad: paddings must be a pair .* got 1"),
            (lambda: ad.pad_op(x, [1.5]), r"pad: paddings must be a pair .* got \[1.5\]"),
            (lambda: ad.resize(x, scale=np.inf), "resize: scale must be .* finite .* got inf"),
            (lambda: ad.stack([x, 3]), "stack: nodes must be a sequence of nodes, got"),
            (lambda: ad.dropout(x, np.nan), "dropout: p must be a probability .* nan"),
            (lambda: ad.random_normal((2.5,)), "random_normal: shape must be .* got .2.5,."),
            (lambda: ad.random_uniform((2,), high=np.inf), "random_uniform: high must be a finite"),
            (lambda: ad.seed(0.5), "seed: value must be an integer, got 0.5"),
            (lambda: ad.Generator("1"), "Generator: seed must be an integer, got '1'"),
            (lambda: ad.huber_loss(x, x, "a"), "huber_loss: delta must be a number above 0"),
            (lambda: ad.mean_squared_error(x, "a"), "mean_squared_error: target must be a node"),
            (lambda: ad.hinge_loss(x, x, "max"), "hinge_loss: reduction must be mean, sum or none"),
            (lambda: ad.var_op(x, ddof=0.5), "var: ddof must be an integer, got 0.5"),
            (lambda: ad.Variable("v", (2.5,)), "Variable: shape must be a tuple of extents"),
            (lambda: ad.Variable("v", dtype="foo"), "Variable: dtype must be a dtype of numbers"),
            (lambda: ad.Parameter("a"), "Parameter: value must be a number or an array of numbers"),
            (lambda: ad.constant([[1], [1, 2]]), "constant: value must be a number or an array"),
        ):
            self.assertRegex(self.refused(text.split(":")[0], call), text)

    def test_what_no_dtype_holds(self) -> None:
        for call, text in (
            (lambda: ad.constant(300, dtype="uint8"), "constant: uint8 cannot hold 300"),
            (lambda: ad.Parameter(300, dtype="uint8"), "Parameter: uint8 cannot hold 300"),
            (lambda: ad.full_op((2,), 1.5, "int64"), "full: no int64 is 1.5"),
            (lambda: ad.full_op((2,), np.nan, "int64"), "full: int64 cannot hold nan"),
            (lambda: ad.sum_node_list([]), "sum_node_list: expected at least one node"),
            (lambda: ad.einsum(3, self.x), "einsum: expected letters, .* got 3"),
        ):
            self.assertRegex(self.refused(text.split(":")[0], call, GraphError), text)

    def test_what_fits(self) -> None:
        x, y = self.x, self.y
        self.assertEqual(ad.reduce_sum_op(x, axes=(0, 1)).attrs["axis"], (0, 1))
        self.assertEqual(ad.reduce_mean_op(x, axes=np.int64(1)).attrs["axis"], 1)
        self.assertIs(type(ad.sum_op(x, np.int64(1)).attrs["axis"]), int)
        self.assertEqual(ad.reshape_op(x, np.array([2, -1])).attrs["shape"], (2, -1))
        self.assertEqual(ad.matmul_op(A=x, B=y, trans_B=1).attrs["trans_B"], True)
        self.assertEqual(ad.cast_op(x, np.float64, "named").name, "named")
        self.assertEqual(ad.add_byconst_op(x, np.float32(0.5)).attrs["const"], 0.5)
        pooled = ad.max_pool_op(x, window=np.int32(2))
        self.assertEqual((pooled.attrs["window"], pooled.attrs["stride"]), ((2, 2), (2, 2)))
        self.assertEqual(repr(ad.sum_op(x, 0, name="s")), "s = sum(x, axis=0, keepdims=False)")

    def test_errors_are_of_both_classes(self) -> None:
        for error in (GraphError, ShapeError, DlsysError, ValueError):
            self.assertTrue(issubclass(SignatureError, error))


class Square(ad.Op):
    """x²."""

    def infer_shape(self, node, input_shapes):
        return input_shapes[0]


class Assigned(ad.Op):
    """An operator as the assignment has them, which makes its node itself."""

    def __call__(self, node_A, const_val):
        new_node = ad.Op.__call__(self)
        new_node.inputs = [node_A]
        new_node.const_attr = const_val
        return new_node


class OwnOperators(Refused):
    def test_one_without_a_signature_takes_what_it_is_given(self) -> None:
        x = ad.Variable("x")
        node = Square()(x, x, power=2, name="y")
        self.assertEqual((node.inputs, node.attrs, node.name), ([x, x], {"power": 2}, "y"))
        node = Assigned()(x, 3)
        self.assertEqual((node.inputs, node.const_attr), ([x], 3))
        self.assertIn("x²", pydoc.plain(pydoc.render_doc(Square())))
        self.assertEqual(list(inspect.signature(Square()).parameters), ["inputs", "attrs"])
        self.assertEqual(list(inspect.signature(Assigned()).parameters), ["node_A", "const_val"])

    def test_one_with_a_signature(self) -> None:
        class Scaled(Square):
            name = "scaled"
            signature = Signature("x", factor=kinds.Number(2.0, low=0))

        scaled, x = Scaled(), ad.Variable("x")
        self.assertEqual(scaled(x, 3).attrs, {"factor": 3})
        text = self.refused("scaled", lambda: scaled(x, factor=-1))
        self.assertIn("factor must be a number that is not negative, got -1", text)

    def test_an_operator_as_an_attribute(self) -> None:
        class Layer:
            activation = ad.relu_op

        self.assertIs(Layer.activation, ad.relu_op)
        self.assertIs(Layer().activation, ad.relu_op)
        layer, x = Layer(), ad.Variable("x")
        self.assertEqual(layer.activation(x).inputs, [x])
        layer.activation = ad.tanh_op
        self.assertIs(layer.activation, ad.tanh_op)
        self.assertTrue(inspect.signature(type(ad.relu_op)))
        self.assertEqual(type(ad.relu_op).__name__, "Elementwise")


class Layers(Refused):
    """Layers and initializers, called with what makes no sense."""

    def test_initializers(self) -> None:
        for name in init.__dict__:
            function = getattr(init, name)
            if not hasattr(function, "__wrapped__"):
                continue
            for key in inspect.signature(function).parameters:
                with self.subTest(name, parameter=key):
                    called = f"init.{name}"
                    self.refused(called, lambda: function(**{key: object()}))  # noqa: B023

    def test_layers(self) -> None:
        found = [
            c
            for c in vars(nn).values()
            if inspect.isclass(c) and hasattr(c.__init__, "__wrapped__")
        ]
        self.assertGreater(len(found), 15)
        for layer in found:
            for key in inspect.signature(layer).parameters:
                with self.subTest(layer.__name__, parameter=key):
                    self.refused(layer.__name__, lambda: layer(**{key: object()}))  # noqa: B023


class Reprs(unittest.TestCase):
    def test_operators_tell_themselves_in_a_line(self) -> None:
        for op in (ad.neg_op, ad.leaky_relu_op, ad.max_op, ad.matmul_op, ad.softmax_op):
            self.assertNotIn("\n", repr(op))


if __name__ == "__main__":
    sys.exit(unittest.main())

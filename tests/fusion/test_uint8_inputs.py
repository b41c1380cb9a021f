"""Batches that stay bytes until the products that read them: where the pass makes them. What they
compute on a GPU is in test_uint8_inputs_gpu.py.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.fusion.shared.update_operators import FusedUpdate
from dlsys.graph.node import Node
from fusion.test_weight_update import FLOAT32, fused, parameter, updates
from support.fusion import GPU
from support.fusion import fused as run_fusions
from support.graphs import operators, variable


def kept(*fetches: Node) -> list[Node]:
    return run_fusions(fused(*fetches), "uint8_inputs", target=GPU)


def as_it_is(*fetches: Node) -> list[Node]:
    return list(fetches)


class Pixels:
    """The next batch of 20 samples, bytes below 8 that count as quarters: their products with small
    integers are exact in every order and precision. `x` are the samples, `flat` as rows.
    """

    def __init__(self, *shape: int, batch: int = 9, **options: Any) -> None:
        rng = np.random.default_rng(len(shape))
        samples = rng.integers(0, 8, (20, *shape)).astype(options.get("dtype", np.uint8))
        classes = rng.integers(0, 5, 20)
        self.step = ad.Parameter(np.int64(0), "at", trainable=False)
        scale, shift = options.get("scale", FLOAT32(0.25)), options.get("shift", FLOAT32(0))
        self.batch = ad.shuffled_batch_op(
            ad.Parameter(samples, "samples", trainable=False),
            ad.Parameter(classes, "classes", trainable=False),
            self.step,
            *(x if isinstance(x, Node) else ad.constant(x) for x in (scale, shift)),
            batch=batch,
            seed=1,
            name="batch",
        )
        self.x, self.labels = self.batch[0], self.batch[1]
        self.flat = ad.reshape_op(self.x, (batch, int(np.prod(shape))))
        self.advance = ad.advance_step_op(self.step)


class Layer:
    """A layer over a batch, y = f(x op(w) + b), and steps of w and b by the gradients of Σ c y,
    where c is made of small integers.
    """

    def __init__(
        self,
        x: Node,
        columns: int = 5,
        *,
        transposed: bool = False,
        bias: bool = True,
        activation: Callable[[Node], Node] | None = ad.relu_op,
        seed: int = 0,
    ) -> None:
        rows, depth = x.spec.shape
        shape = (columns, depth) if transposed else (depth, columns)
        self.parameters = [parameter(*shape, name=f"w{seed}", seed=seed)]
        if bias:
            self.parameters.append(parameter(columns, name=f"b{seed}", seed=seed))
        y = ad.linear_op(x, *self.parameters, trans_B=transposed)
        self.y = activation(y) if activation else y
        c = np.random.default_rng(seed + 1).integers(-3, 4, (rows, columns)).astype(FLOAT32)
        self.loss = ad.sum_op(ad.constant(c) * self.y)

    def steps(self, lr: Node) -> list[Node]:
        gradients = ad.gradients(self.loss, self.parameters)
        return [ad.sgd_update_op(p, g, lr) for p, g in zip(self.parameters, gradients)]


def trained(*layers: Layer) -> Node:
    """One update of all parameters, at a rate of 1/2."""
    lr = ad.constant(FLOAT32(0.5), "lr")
    return ad.group_op(*(node for layer in layers for node in layer.steps(lr)))


class Rewrites(unittest.TestCase):
    """That they happen, and only where they may."""

    def assert_becomes(self, fetches: Sequence[Node], *products: str) -> list[Node]:
        """The products read bytes, and nothing else changes."""
        before = operators(fused(*fetches))
        found = kept(*fetches)
        left = [name for name in before if name != "shuffled_batch"]
        for name in products:
            old = name.replace("_u8", "")
            left.remove(old if old in left else "matmul_map")
        self.assertEqual(operators(found), sorted([*left, "shuffled_rows", *products]))
        return found

    def assert_left(self, *fetches: Node) -> None:
        """Nothing happens."""
        before = operators(fused(*fetches))
        self.assertIn("shuffled_batch", before)
        self.assertEqual(operators(kept(*fetches)), before)

    def assert_reads_uint8(self, node: Node, uint8: tuple[str, ...]) -> None:
        """An update reads uint8 for those operands, and floats for all others."""
        op = node.op
        assert isinstance(op, FusedUpdate)
        self.assertEqual(op.uint8, uint8)
        for k, x in enumerate(node.inputs):
            operand = op.operand(k)
            if operand is not None:
                product, word = operand
                wanted = np.uint8 if op.uint8[product] == word else FLOAT32
                self.assertEqual(x.spec.dtype, wanted)

    def test_layers_of_all_forms(self) -> None:
        for transposed in (False, True):
            for bias in (False, True):
                for activation in (None, ad.relu_op, ad.tanh_op):
                    for shape in ((16,), (1, 4, 4)):
                        layer = Layer(
                            Pixels(*shape).flat,
                            transposed=transposed,
                            bias=bias,
                            activation=activation,
                        )
                        with self.subTest(layer.y.name, transposed=transposed, shape=shape):
                            product = "matmul_u8_bias" if bias else "matmul_u8"
                            found = self.assert_becomes([layer.y, trained(layer)], product)
                            [node] = updates(found)
                            self.assert_reads_uint8(node, ("B" if transposed else "A",))
                            name = activation.name if activation else ""
                            self.assertEqual(found[0].attrs["activation"], name)

    def test_a_network(self) -> None:
        """Whose last layer, which reads no bytes, is updated with the first."""
        for optimizer in (optim.SGD(0.1, momentum=0.5), optim.Adam(0.1)):
            pixels, model = Pixels(1, 28, 28), nn.MLP((784, 64, 5), seed=0)
            loss = ad.softmax_cross_entropy(model(pixels.x), pixels.labels)
            train = optimizer.minimize(loss, model.parameters())
            [node] = updates(self.assert_becomes([loss, train], "matmul_u8_bias"))
            self.assert_reads_uint8(node, ("B", ""))

    def test_what_is_one_scale_and_no_shift(self) -> None:
        one, zero = np.ones(1, FLOAT32), np.zeros(1, FLOAT32)
        for options in (
            {"scale": one, "shift": zero},
            {"scale": variable("scale")},
            {"scale": ad.Parameter(FLOAT32(0.25), "scale"), "shift": FLOAT32(-0.0)},
            {"scale": ad.exp_op(variable("scale"))},
        ):
            self.assert_becomes([Layer(Pixels(2, 8, **options).flat).y], "matmul_u8_bias")

    def test_a_batch_of_two_readers(self) -> None:
        """In two shapes, and one of them twice."""
        pixels = Pixels(2, 8)
        rows = ad.reshape_op(pixels.x, (18, 8))
        layers = [
            Layer(pixels.flat, transposed=True),
            Layer(rows, 3, seed=1),
            Layer(rows, 4, bias=False, activation=None, seed=2),
        ]
        products = ["matmul_u8_bias", "matmul_u8_bias", "matmul_u8"]
        found = self.assert_becomes([trained(*layers), *(x.y for x in layers)], *products)
        [node] = updates(found)
        self.assert_reads_uint8(node, ("B", "A", "A"))

    def test_two_batches(self) -> None:
        """An update has bytes of one batch, so that the other stays floats where it reads both."""
        for updates_of in (1, 2):
            layers = [Layer(Pixels(16).flat), Layer(Pixels(7).flat, seed=1)]
            groups = [layers] if updates_of == 1 else [[layer] for layer in layers]
            found = operators(kept(*(trained(*group) for group in groups)))
            for name in ("shuffled_rows", "matmul_u8_bias"):
                self.assertEqual(found.count(name), updates_of)
            for name in ("shuffled_batch", "matmul_bias"):
                self.assertEqual(found.count(name), 2 - updates_of)

    def test_products_without_training(self) -> None:
        pixels = Pixels(16)
        self.assert_becomes([Layer(pixels.flat).y, pixels.labels], "matmul_u8_bias")
        self.assert_becomes([ad.matmul_op(pixels.x, parameter(16, 3))], "matmul_u8")

    def test_batches_that_are_more_than_scaled(self) -> None:
        two, none = np.full(2, 0.25, FLOAT32), np.zeros(2, FLOAT32)
        for options in (
            {"shift": FLOAT32(1e-30)},
            {"shift": FLOAT32(np.nan)},
            {"scale": two, "shift": none},
            {"shift": variable("shift")},
            {"shift": ad.Parameter(FLOAT32(0), "shift")},
            {"shift": ad.exp_op(variable("shift"))},
            {"dtype": FLOAT32},
        ):
            with self.subTest(**options):
                layer = Layer(Pixels(2, 8, **options).flat)
                self.assert_left(layer.y, trained(layer))

    def test_batches_that_others_read(self) -> None:
        for read in (
            lambda pixels: pixels.x,
            lambda pixels: pixels.flat,
            lambda pixels: ad.reshape_op(pixels.x, (-1,)),
            lambda pixels: ad.sum_op(pixels.x),
            lambda pixels: ad.exp_op(pixels.flat),
            lambda pixels: pixels.flat[2:4],
            lambda pixels: ad.matmul_op(pixels.flat[2:4], parameter(16, 3)),
            lambda pixels: ad.conv2d(pixels.x, parameter(3, 1, 3, 3)),
            lambda pixels: ad.matmul_op(pixels.flat, parameter(9, 3), True),
            lambda pixels: ad.matmul_op(parameter(3, 9), pixels.flat),
            lambda pixels: ad.matmul_op(pixels.flat, pixels.flat, False, True),
        ):
            pixels = Pixels(1, 4, 4)
            layer = Layer(pixels.flat)
            self.assert_left(read(pixels), layer.y, trained(layer))
            self.assert_left(read(pixels))

    def test_a_head_reads_floats(self) -> None:
        pixels, model = Pixels(1, 4, 4), nn.MLP((16, 6, 5), seed=0)
        loss = ad.softmax_cross_entropy(model(pixels.x), pixels.labels)
        train = optim.SGD(0.1).minimize(loss, model.parameters())
        self.assertIn("fused_sparse_mlp_head", operators(fused(loss, train)))
        self.assert_left(loss, train)

    def test_updates_that_read_floats(self) -> None:
        """By sums of the bytes; bytes for both factors; more than one batch of bytes."""
        lr, c = ad.constant(FLOAT32(0.5)), variable("c", 9, 5)
        for of in ("sums", "square", "other"):
            with self.subTest(of):
                x = Pixels(16).x
                other = x if of == "square" else Pixels(5).x if of == "other" else c
                w, b = parameter(16, other.spec.shape[1]), parameter(16, name="b")
                steps = [ad.sgd_update_op(w, ad.matmul_op(x, other, trans_A=True), lr)]
                if of == "sums":
                    steps.append(ad.sgd_update_op(b, ad.sum_op(x, axis=0), lr))
                [node] = updates(fused(*steps))
                self.assertEqual(node.attrs["sums"], ("A" if of == "sums" else "",))
                found = kept(*steps)
                rows = operators(found).count("shuffled_rows")
                self.assertEqual(rows, int(of == "other"))  # the first batch alone
                self.assertEqual(operators(found).count("shuffled_batch"), 1)

    def test_a_batch_that_nobody_reads(self) -> None:
        self.assert_left(Pixels(16).labels)

    def test_names_numbers_and_specs_stay(self) -> None:
        pixels = Pixels(1, 4, 4)
        layer = Layer(pixels.flat)
        fetches = [layer.y, pixels.labels, *layer.steps(ad.constant(FLOAT32(0.5)))]
        before = fused(*fetches)
        [update] = updates(before)
        after = run_fusions(before, "uint8_inputs", target=GPU)
        [made] = updates(after)
        for old, new in zip([*before, update], [*after, made], strict=True):
            self.assertIsNot(new, old)
            for name in ("name", "number", "spec"):
                self.assertEqual(getattr(new, name), getattr(old, name))
            self.assertIs(new.origin, old.origin)
        body = after[0].attrs["body"].inputs
        for x, known in zip(after[0].inputs, body, strict=True):
            self.assertEqual((x.spec.shape, x.spec.dtype), (known.spec.shape, known.spec.dtype))
        self.assertEqual((after[0].where, made.where), (before[0].where, update.where))
        rows = after[1].inputs[0]
        self.assertEqual((rows.op.name, rows.name), ("shuffled_rows", "batch"))
        self.assertIs(rows.origin, pixels.batch)
        self.assertEqual(rows.spec[0].dtype, np.uint8)
        self.assertIn("scaled(", ad.text(after))

    def test_the_users_graph_is_left_alone(self) -> None:
        layer = Layer(Pixels(16).flat)
        fetches = [layer.y, trained(layer)]
        before = ad.text(fetches)
        kept(*fetches)
        self.assertEqual(ad.text(fetches), before)

    def test_the_numpy_form_is_that_of_floats(self) -> None:
        for transposed in (False, True):
            found = []
            for passes in (as_it_is, fused, kept):
                pixels = Pixels(1, 4, 4)
                layers = [Layer(pixels.flat, transposed=transposed)]
                layers.append(Layer(ad.reshape_op(pixels.x, (36, 4)), bias=False, seed=1))
                fetches = [x.y for x in layers] + [trained(*layers), pixels.advance]
                executor = ad.Executor(passes(*fetches))
                values = [executor.run({}, True) for _ in range(3)]
                states = [p.asnumpy() for layer in layers for p in layer.parameters]
                found.append([*states, *(y for run in values for y in run if y is not None)])
            for wanted, *others in zip(*found, strict=True):
                for got in others:
                    np.testing.assert_array_equal(got, wanted)

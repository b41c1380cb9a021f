"""Modules: names, modes, texts and first weights; test_nn_state.py has their state, test_layers.py
what layers compute.
"""

from __future__ import annotations

import math
import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import init, nn, optim
from dlsys.errors import GraphError, ShapeError


class Block(nn.Module):
    """A layer with state of its own, children in a list and a dict, and what is no state."""

    def __init__(self) -> None:
        self.scale = ad.Parameter(np.ones(3, np.float32), "scale")
        self.count = ad.Parameter(np.int64(0), "count", trainable=False)
        self.layers = [nn.Linear(3, 3, rng=0), nn.Tanh()]
        self.heads = {"a": nn.Linear(3, 2, rng=1)}
        self.note = "no state"

    def forward(self, x: ad.Node) -> ad.Node:
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](x * self.scale)


class Outer(nn.Module):
    def __init__(self) -> None:
        self.block = Block()
        self.again = self.block
        self.tied = self.block.scale
        self.none = None

    def forward(self, x: ad.Node) -> ad.Node:
        return self.again(x)


class Two(nn.Module):
    """Two outputs, a list of nodes as an argument, and one by keyword."""

    def __init__(self) -> None:
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 4)

    def forward(self, xs: list[ad.Node], scale: Any = 1) -> tuple[ad.Node, ad.Node]:
        return self.left(xs[0]) * scale, self.right(xs[1])


class OfTwo(nn.Module):
    def __init__(self) -> None:
        self.two = Two()

    def forward(self, x: ad.Node) -> ad.Node:
        a, b = self.two([x, x], scale=ad.sum_op(x))
        return ad.sum_op(a) + ad.sum_op(b)


NAMES = [
    "tied", "block.scale", "block.count", "block.layers.0.weight", "block.layers.0.bias",
    "block.heads.a.weight", "block.heads.a.bias",
]  # fmt: skip


class Naming(unittest.TestCase):
    def test_state_is_named_by_path_and_once(self) -> None:
        block = Block()
        self.assertEqual([f"block.{name}" for name, _ in block.named_state()], NAMES[1:])
        outer = Outer()
        names = [name for name, _ in outer.named_state()]
        self.assertEqual(names, [NAMES[0], *NAMES[2:]])  # block.scale is tied
        self.assertIs(dict(outer.named_state())["tied"], outer.block.scale)

    def test_containers_in_containers_are_searched(self) -> None:
        model = nn.Module()
        model.blocks = [[nn.Linear(2, 2), nn.ReLU()], {"a": (nn.Linear(2, 2, bias=False),)}]
        names = [name for name, _ in model.named_state()]
        self.assertEqual(names, ["blocks.0.0.weight", "blocks.0.0.bias", "blocks.1.a.0.weight"])
        self.assertFalse(model.eval().blocks[1]["a"][0].training)

    def test_parameters_and_buffers_are_told_apart(self) -> None:
        block = Block()
        self.assertEqual([name for name, _ in block.named_buffers()], ["count"])
        self.assertEqual(block.buffers(), [block.count])
        self.assertEqual(block.parameters(), [p for _, p in block.named_parameters()])
        self.assertNotIn(block.count, set(block.parameters()))
        self.assertEqual(len(block.parameters()), 5)

    def test_modules_are_listed_parents_first_in_order(self) -> None:
        found = [name for name, _ in Outer().named_modules()]
        self.assertEqual(found, ["", "block", "block.layers.0", "block.layers.1", "block.heads.a"])

    def test_a_cycle_of_modules_ends(self) -> None:
        block = Block()
        block.parent = block
        self.assertEqual(len(list(block.named_modules())), 4)
        self.assertEqual(repr(block).splitlines()[-2], "  parent: ...")

    def test_calling_names_the_nodes(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2), nn.Dropout()))
        x = ad.Variable("x")
        model[1](x)  # alone, it knows no better names
        self.assertEqual(model[1][0].weight.name, "0.weight")
        model(x)
        expected = {name: state.name for name, state in model.named_state()}
        self.assertEqual(list(expected), list(expected.values()))
        model[1](x)
        self.assertEqual(model.parameters()[2].name, "1.0.weight")

    def test_state_that_comes_later_is_named_too(self) -> None:
        class Grown(nn.Module):
            def __init__(self) -> None:
                self.layers = []
                self.parts = {"size": 3}

            def forward(self, x: ad.Node) -> ad.Node:
                for layer in self.layers:
                    x = layer(x)
                return x

        x, grown = ad.Variable("x", (None, 3)), Grown()
        for k in range(2):
            grown(x)
            grown.layers.append(nn.Linear(3, 3))  # after it was made: seen without an attribute set
            first = grown.layers[k]
            grown(x)
            self.assertEqual(first.weight.name, f"layers.{k}.weight")
        outer = nn.Sequential(grown)
        outer(x)
        outer(x)
        self.assertEqual(first.weight.name, "0.layers.1.weight")
        outer[0] = nn.Sequential(nn.Linear(3, 3))
        outer(x)
        self.assertEqual([state.name for state in outer.parameters()], ["0.0.weight", "0.0.bias"])

    def test_later_attributes_count(self) -> None:
        block = Block()
        block.layers.append(nn.Linear(3, 3))
        block.extra = nn.Conv2d(1, 2, 3)
        names = [name for name, _ in block.named_state()]
        self.assertIn("layers.2.weight", names)
        self.assertEqual(names[-2:], ["extra.weight", "extra.bias"])

    def test_a_module_without_forward_says_so(self) -> None:
        class Empty(nn.Module):
            pass

        with self.assertRaisesRegex(GraphError, r"Empty builds no graph.*forward\(self, x\)"):
            Empty()(ad.Variable("x"))


class Modes(unittest.TestCase):
    def test_modes_reach_every_module(self) -> None:
        model = Outer()
        self.assertTrue(all(module.training for _, module in model.named_modules()))
        self.assertIs(model.eval(), model)
        self.assertFalse(any(module.training for _, module in model.named_modules()))
        self.assertIs(model.train(), model)
        self.assertTrue(all(module.training for _, module in model.named_modules()))
        self.assertNotIn("training", vars(Outer()))  # one model's mode is its own

    def test_a_graph_keeps_the_mode_it_was_built_in(self) -> None:
        x = ad.Variable("x")
        model = nn.Sequential(nn.BatchNorm2d(2), nn.Dropout(0.5, rng=0))
        training, inference = model(x), model.eval()(x)
        effects = [optim.effects_of(node) for node in (training, inference)]
        self.assertEqual([len(found) for found in effects], [2, 0])
        values = np.random.default_rng(0).standard_normal((4, 2, 3, 3)).astype(np.float32)
        before = ad.Executor([training]).run({x: values})[0]
        model.eval()
        np.testing.assert_array_equal(ad.Executor([training]).run({x: values})[0], before)
        np.testing.assert_allclose(
            ad.Executor([inference]).run({x: values})[0], values / np.sqrt(1 + 1e-5), rtol=1e-6
        )


class Containers(unittest.TestCase):
    def test_part_of_a_sequence_is_a_sequence_of_the_same_layers(self) -> None:
        model = nn.MLP((4, 3, 2), seed=0)
        body = model[:-1]
        self.assertEqual([type(layer) for layer in body], [nn.Flatten, nn.Linear, nn.ReLU])
        self.assertIs(body[1], model[1])
        self.assertEqual([name for name, _ in body.named_state()], ["1.weight", "1.bias"])

    def test_a_layer_is_replaced(self) -> None:
        model = nn.MLP((4, 3, 2), seed=0)
        model[-1] = head = nn.Linear(3, 7)
        self.assertEqual((len(model), model[3]), (4, head))
        self.assertEqual(model.summary((1, 4)).rows[0].shape, (1, 7))
        for index, layer, error in ((4, head, IndexError), (slice(2), head, TypeError)):
            with self.assertRaises(error):
                model[index] = layer
        with self.assertRaisesRegex(GraphError, "layer 0 is 3"):
            model[0] = 3


class Texts(unittest.TestCase):
    def test_repr(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.Residual(nn.Sequential(nn.ReLU()), nn.Linear(2, 2)),
            ad.relu_op,
            nn.LeakyReLU(0.2),
        )
        self.assertEqual(
            repr(model),
            "Sequential(\n"
            "  0: Conv2d(3, 8, (3, 3), stride=2, padding=1, bias=False)\n"
            "  1: Residual(\n"
            "    body: Sequential(\n"
            "      0: ReLU()\n"
            "    )\n"
            "    shortcut: Linear(2, 2)\n"
            "  )\n"
            "  3: LeakyReLU(0.2)\n"
            ")",
        )

    def test_options_of_layers(self) -> None:
        for layer, text in (
            (nn.Linear(4, 2, bias=False), "Linear(4, 2, bias=False)"),
            (nn.Conv2d(4, 8, (1, 3), groups=2), "Conv2d(4, 8, (1, 3), groups=2)"),
            (
                nn.ConvTranspose2d(4, 8, 2, 2, output_padding=1),
                "ConvTranspose2d(4, 8, (2, 2), stride=2, output_padding=1)",
            ),
            (nn.Embedding(9, 4), "Embedding(9, 4)"),
            (nn.BatchNorm2d(3, eps=0.1, momentum=0.5), "BatchNorm2d(3, eps=0.1, momentum=0.5)"),
            (nn.LayerNorm((2, 3)), "LayerNorm((2, 3))"),
            (nn.Dropout(0.25), "Dropout(0.25)"),
            (nn.MaxPool2d(3, 2, 1), "MaxPool2d(3, stride=2, padding=1)"),
            (nn.AvgPool2d(2, count_include_pad=False), "AvgPool2d(2, count_include_pad=False)"),
            (nn.Flatten(2), "Flatten(2)"),
            (nn.Reshape(1, 28, 28), "Reshape(1, 28, 28)"),
            (nn.GELU(approximate=True), "GELU(approximate=True)"),
            (nn.ELU(), "ELU(1.0)"),
        ):
            self.assertEqual(repr(layer), text)

    def test_summary(self) -> None:
        body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Residual(body), nn.Dropout(0.5),
            nn.Flatten(), nn.Linear(4 * 4 * 5, 3),
        ).eval()  # fmt: skip
        found = model.summary((None, 2, 6, 7))
        rows = {row.name: row[1:] for row in found.rows}
        plane = 4 * 5
        conv, inner, head = 2 * 4 * plane * 18, 2 * 4 * plane * 36, 2 * 80 * 3 + 3
        self.assertEqual(rows["0"], ("Conv2d", (1, 4, 4, 5), 72, conv))
        self.assertEqual(rows["2.body.0"], ("Conv2d", (1, 4, 4, 5), 148, inner))
        self.assertEqual(rows["2.body.1"], ("ReLU", (1, 4, 4, 5), 0, 80))
        self.assertEqual(rows["2"], ("Residual", (1, 4, 4, 5), 148, inner + 80 + 80))
        self.assertEqual(rows["3"], ("Dropout", (1, 4, 4, 5), 0, 0))
        self.assertEqual(rows["4"], ("Flatten", (1, 80), 0, 0))
        self.assertEqual(rows["5"], ("Linear", (1, 3), 243, head))
        normal = rows["1"][-1]
        self.assertGreater(normal, 0)
        self.assertEqual(found.operations, conv + normal + inner + 160 + head)
        self.assertEqual((found.parameters, found.buffers), (72 + 8 + 148 + 243, 8 + 3))
        self.assertEqual(found.nbytes, 4 * (471 + 8) + 2 * 8 + 8)  # dropout's key and step
        self.assertEqual(list(rows), ["", "0", "1", "2", "2.body", "2.body.0", "2.body.1", *"345"])

    def test_summary_counts_a_layer_that_is_used_twice_once(self) -> None:
        layer = nn.Linear(3, 3)
        found = nn.Sequential(layer, nn.Tanh(), layer).summary((5, 3))
        used = [row for row in found.rows if row.kind == "Linear"]
        self.assertEqual([row.parameters for row in used], [12, 0])
        self.assertEqual([row.operations for row in used], [105, 105])
        self.assertEqual((found.parameters, found.operations), (12, 225))

    def test_summary_of_integers_and_its_text(self) -> None:
        model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2))
        lines = str(model.summary((7, 3), np.int64)).splitlines()
        self.assertEqual(len({len(line) for line in lines[:-1]}), 1, "columns are aligned")
        self.assertEqual(lines[3].split(), ["0", "Embedding", "(7,", "3,", "4)", "40", "84"])
        self.assertIn("66 parameters and 0 elements in buffers, 264 bytes; 434", lines[-1])

    def test_summary_of_layers_with_several_inputs_and_outputs(self) -> None:
        rows = {row.name: row for row in OfTwo().summary((5, 3)).rows}
        self.assertEqual(rows["two"].shape, ((5, 2), (5, 4)))
        self.assertEqual(rows["two"].parameters, 8 + 16)
        inner = rows["two.left"].operations + rows["two.right"].operations
        self.assertEqual(rows["two"].operations, inner + 5 * 2)  # not the sum that is its argument
        self.assertEqual(rows[""].shape, ())

    def test_summary_refuses_what_does_not_fit(self) -> None:
        with self.assertRaisesRegex(ShapeError, "inner dimensions differ"):
            nn.Sequential(nn.Linear(3, 2)).summary((1, 4))

    def test_calls_name_what_each_layer_made(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2, rng=0), nn.Sequential(nn.Tanh(), nn.Sigmoid()))
        x = ad.Variable("x")
        calls = model.calls(x)
        self.assertEqual([call.name for call in calls], ["", "0", "1", "1.0", "1.1"])
        whole, linear, inner, tanh, sigmoid = calls
        self.assertIs(whole.output, sigmoid.output)
        self.assertEqual((tanh.inputs, inner.inputs), ((linear.output,), (linear.output,)))
        self.assertIs(tanh.module, model[1][0])
        values = np.ones((1, 3), np.float32)
        a, b = ad.Executor([linear.output, tanh.output]).run({x: values})
        np.testing.assert_allclose(np.tanh(a), b, rtol=1e-6)


class Weights(unittest.TestCase):
    def test_the_same_seed_draws_the_same_weights(self) -> None:
        for make in (
            lambda rng: nn.Linear(5, 4, rng=rng),
            lambda rng: nn.Conv2d(4, 6, 3, groups=2, rng=rng),
            lambda rng: nn.ConvTranspose2d(4, 6, 3, groups=2, rng=rng),
            lambda rng: nn.Embedding(5, 4, rng=rng),
        ):
            first, same, other = (make(rng).weight.asnumpy() for rng in (3, 3, 4))
            np.testing.assert_array_equal(first, same)
            self.assertTrue((first != other).any())
            self.assertEqual(first.dtype, np.float32)

    def test_an_initializer_is_used(self) -> None:
        weight = nn.Linear(3, 2, initializer=init.ones).weight
        np.testing.assert_array_equal(weight.asnumpy(), np.ones((2, 3)))

    def test_an_initializer_may_compute_in_float64_but_not_in_another_shape(self) -> None:
        def make(shape: tuple, rng: np.random.Generator) -> np.ndarray:
            return rng.normal(size=shape)

        def wrong(shape: tuple, rng: np.random.Generator) -> np.ndarray:
            return np.zeros(shape[::-1])

        for build in (
            lambda f: nn.Linear(3, 2, initializer=f),
            lambda f: nn.Conv2d(3, 2, (1, 2), initializer=f),
            lambda f: nn.ConvTranspose2d(3, 2, (1, 2), initializer=f),
            lambda f: nn.Embedding(3, 2, initializer=f),
        ):
            self.assertEqual(build(make).weight.dtype, np.float32)
            with self.assertRaisesRegex(ShapeError, r"\w+: the initializer made \(.*expected \("):
                build(wrong)

    def test_defaults_keep_the_deviation(self) -> None:
        for layer, fan in (
            (nn.Linear(500, 400, rng=0), 500),
            (nn.Conv2d(64, 96, 3, groups=2, rng=0), 32 * 9),
            (nn.ConvTranspose2d(96, 64, 3, groups=2, rng=0), 48 * 9),
        ):
            values = layer.weight.asnumpy()
            self.assertAlmostEqual(values.std() * math.sqrt(fan / 2), 1, delta=0.02)
            np.testing.assert_array_equal(layer.bias.asnumpy(), 0)

    def test_transposed_filters_are_drawn_by_output(self) -> None:
        """Whatever (outputs, inputs/groups, …) draws for an output ends at that output."""

        def numbered(shape: tuple, rng: Any) -> np.ndarray:
            return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

        layer = nn.ConvTranspose2d(4, 6, 1, groups=2, initializer=numbered)
        drawn = numbered((6, 2), None)
        weight = layer.weight.asnumpy()
        self.assertEqual(weight.shape, (4, 3, 1, 1))
        for i in range(4):
            for o in range(3):
                self.assertEqual(weight[i, o, 0, 0], drawn[o + 3 * (i // 2), i % 2])

    def test_wrong_arguments_are_refused(self) -> None:
        for make, words in (
            (lambda: nn.Linear(0, 3), "Linear: inputs must be a positive integer, got 0"),
            (lambda: nn.Linear(3, 2.5), "outputs must be a positive integer, got 2.5"),
            (lambda: nn.Conv2d(3, 4, 3, groups=2), "2 groups do not divide 3 inputs and 4 outputs"),
            (
                lambda: nn.Conv2d(3, 4, (3, 0)),
                "window must be one or two positive integers, got (3, 0)",
            ),
            (lambda: nn.Conv2d(3, 4, (3, 3, 3)), "integers, got (3, 3, 3)"),
            (
                lambda: nn.LayerNorm((3, -1)),
                "LayerNorm: shape must be a positive integer or a tuple of them, got (3, -1)",
            ),
            (lambda: nn.ConvTranspose2d(4, 3, 3, groups=2), "2 groups do not divide"),
            (lambda: nn.Embedding(3, -1), "features must be a positive integer, got -1"),
            (lambda: nn.BatchNorm2d(0), "channels must be a positive integer, got 0"),
            (lambda: nn.Dropout(1.0), "probability from 0 to below 1, got 1.0 ["),
            (lambda: nn.Sequential(nn.ReLU(), 3), "layer 1 is 3"),
        ):
            with self.assertRaises(GraphError) as caught:
                make()
            self.assertIn(words, str(caught.exception))

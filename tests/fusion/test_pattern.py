"""Patterns of subgraphs: what they match, and the names that they give."""

from __future__ import annotations

import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys.fusion.shared.body import Fused, close
from dlsys.fusion.shared.rewrite import Graph, Pattern
from dlsys.graph.node import Node
from dlsys.ops.elementwise import add_op, mul_op, relu_op
from dlsys.ops.indexing import window_op
from dlsys.ops.movement import reshape_op
from support.graphs import variable


class Patterns(unittest.TestCase):
    def setUp(self) -> None:
        self.x, self.y = variable("x", 2, 3), variable("y", 2, 3)
        self.product = self.x * self.y
        self.total = self.product + self.x
        self.top = ad.relu_op(self.total)

    def match(self, pattern: Pattern, *fetches: Node, **known: Node) -> dict[str, str] | None:
        """The names that the pattern finds from the first fetch, and the nodes' own."""
        found = pattern.match(Graph(fetches), fetches[0], **known)
        return None if found is None else {key: node.name for key, node in found.items()}

    def test_names_of_nodes_and_inputs(self) -> None:
        inner = Pattern(mul_op, "a", "b", name="product")
        pattern = Pattern(relu_op, Pattern("add", inner, None))
        names = {"a": "x", "b": "y", "product": self.product.name}
        self.assertEqual(self.match(pattern, self.top), names)
        self.assertEqual(self.match(Pattern((mul_op, relu_op)), self.top), {})  # any inputs
        self.assertIsNone(self.match(Pattern(relu_op, inner), self.top))
        self.assertIsNone(self.match(Pattern(relu_op, "a", "b"), self.top))  # it has one input

    def test_a_name_means_one_node(self) -> None:
        twice = Pattern(add_op, Pattern(mul_op, "a", "b"), "a")
        self.assertEqual(self.match(twice, self.total), {"a": "x", "b": "y"})
        self.assertIsNone(self.match(Pattern(add_op, Pattern(mul_op, "b", "a"), "a"), self.total))
        self.assertIsNotNone(self.match(twice, self.total, b=self.y))
        self.assertIsNone(self.match(twice, self.total, b=self.x))

    def test_either_order(self) -> None:
        inner = Pattern(mul_op, "a", "b", commutes=True)
        pattern = Pattern(add_op, "b", inner, commutes=True)
        self.assertEqual(self.match(pattern, self.total), {"a": "y", "b": "x"})
        self.assertIsNone(self.match(Pattern(add_op, "b", inner), self.total))

    def test_the_first_of_several_that_matches(self) -> None:
        inner = Pattern(mul_op, name="found")
        pattern = Pattern(relu_op, Pattern(mul_op, name="found") | Pattern(add_op, inner, None))
        self.assertEqual(self.match(pattern, self.top), {"found": self.product.name})
        self.assertIsNone(self.match(Pattern(relu_op, inner), self.top))

    def test_who_else_reads_it(self) -> None:
        for options in ({"alone": True}, {"hidden": True}):
            pattern = Pattern(relu_op, Pattern(add_op, **options))
            self.assertIsNotNone(self.match(pattern, self.top))
            self.assertIsNone(self.match(pattern, self.top, self.total))
            read = self.match(pattern, self.top, self.total * 2)
            self.assertEqual(read is None, "alone" in options)

    def test_readers_through_views(self) -> None:
        flat = reshape_op(self.x, (6,))
        read, plain = ad.exp_op(flat), ad.exp_op(self.x)
        graph = Graph([read, plain, flat])
        found = [(reader.name, view.name) for reader, view in graph.readers(self.x)]
        wanted = [(read, flat), (flat, flat), (plain, self.x)]
        self.assertCountEqual(found, [(reader.name, view.name) for reader, view in wanted])


class Bodies(unittest.TestCase):
    def test_a_view_begins_at_its_offset(self) -> None:
        x = variable("x", 4, 3)
        part = ad.relu_op(window_op(x, 6, (2, 3)))
        node = Fused("relu of a window")(x, body=close([x], [part]))
        values = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
        (got,) = ad.Executor([node]).run({x: values})
        np.testing.assert_array_equal(got, np.maximum(values[2:], 0))

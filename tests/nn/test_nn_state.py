"""Modules' state: saved, loaded, copied."""

from __future__ import annotations

import copy
import pickle
import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.errors import DataError
from support.devices import each_context


class Tied(nn.Module):
    """A layer in two places and its weight in a third, in a module that knows its parent."""

    def __init__(self) -> None:
        self.layer = self.again = nn.Linear(3, 3, rng=0)
        self.tied = self.layer.weight
        self.parent = self


class State(unittest.TestCase):
    def setUp(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 3, rng=0), nn.BatchNorm2d(3))
        self.state = self.model.state_dict()

    def other(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3, rng=1), nn.BatchNorm2d(3))

    def test_round_trip(self) -> None:
        self.state["1.running_mean"] += 2
        model = self.other()
        self.assertEqual(model.load_state_dict(self.state), ([], []))
        for name, value in model.state_dict().items():
            np.testing.assert_array_equal(value, self.state[name])
            self.assertEqual(value.dtype, self.state[name].dtype)

    def test_a_state_dict_is_a_copy(self) -> None:
        kept = self.state["0.weight"].copy()
        self.state["0.weight"] += 1
        np.testing.assert_array_equal(self.model.state_dict()["0.weight"], kept)
        self.model.load_state_dict(self.state)
        self.state["0.weight"] += 1
        np.testing.assert_array_equal(self.model.state_dict()["0.weight"], kept + 1)

    def refused(self, state: dict, strict: bool, *words: str) -> None:
        model = self.other()
        before = model.state_dict()
        with self.assertRaises(DataError) as caught:
            model.load_state_dict(state, strict)
        for word in (*words, "nothing was loaded"):
            self.assertIn(word, str(caught.exception))
        for name, value in model.state_dict().items():
            np.testing.assert_array_equal(value, before[name])

    def test_what_does_not_fit_is_named_and_changes_nothing(self) -> None:
        del self.state["1.weight"]
        self.state["more"] = np.zeros(2)
        self.state["0.bias"] = np.zeros((1, 3), np.float32)
        words = "0.bias is float32 (1, 3), expected float32 (3,)"
        self.refused(self.state, True, "missing: 1.weight", "unexpected: more", words)
        self.refused(self.state, False, words)
        for wrong in (np.zeros(3, complex), np.array(["a", "b", "c"]), [None] * 3):
            self.refused({**self.state, "0.bias": wrong}, False, "mismatched: 0.bias is")

    def test_without_strict_the_rest_is_loaded(self) -> None:
        del self.state["1.weight"]
        self.state["more"] = np.zeros(2)
        model = self.other()
        found = model.load_state_dict(self.state, strict=False)
        self.assertEqual((found.missing, found.unexpected), (["1.weight"], ["more"]))
        np.testing.assert_array_equal(model.state_dict()["0.weight"], self.state["0.weight"])

    def test_tied_state_is_loaded_by_any_of_its_names(self) -> None:
        model = Tied()
        state = {name: value + 1 for name, value in model.state_dict().items()}
        self.assertEqual(list(state), ["tied", "layer.bias"])
        saved = {"again.bias": np.zeros(3), "layer.weight": np.zeros((3, 3)), **state}
        self.assertEqual(model.load_state_dict(saved), ([], []))
        for name, value in model.state_dict().items():  # the first name counts
            np.testing.assert_array_equal(value, state[name])
        tied = state.pop("tied")
        self.assertEqual(model.load_state_dict({**state, "again.weight": tied + 1}), ([], []))
        np.testing.assert_array_equal(model.layer.weight.asnumpy(), tied + 1)
        with self.assertRaisesRegex(DataError, "missing: tied$"):
            model.load_state_dict(state)

    def test_pytorchs_batch_counter_is_passed_over(self) -> None:
        self.state["1.num_batches_tracked"] = np.int64(3)
        self.assertEqual(self.other().load_state_dict(self.state), ([], []))

    def test_float64_values_are_rounded(self) -> None:
        model = self.other()
        model.load_state_dict({name: value.astype(float) for name, value in self.state.items()})
        self.assertEqual(model.state_dict()["0.weight"].dtype, np.float32)


class Copies(unittest.TestCase):
    """A copy computes what the original does and shares nothing with it."""

    def check(self, copied: Any) -> None:
        values = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
        for ctx in each_context():
            x = ad.Variable("x")
            model = nn.Sequential(nn.Linear(3, 4, rng=0), nn.BatchNorm2d(4), nn.Dropout(0.5, rng=0))
            for used in (False, True):
                with self.subTest(ctx=ctx, used=used):
                    other = copied(model)
                    nodes = [model(x), other(x)]
                    for a, b in zip(model.parameters(), other.parameters(), strict=True):
                        self.assertEqual((a.name, a.dtype), (b.name, b.dtype))
                        self.assertNotEqual(a.number, b.number)
                    update = optim.SGD(1.0).minimize(ad.sum_op(nodes[1]), other.parameters())
                    executor = ad.Executor([*nodes, update], ctx)
                    before = model.state_dict()
                    mine, copys, _ = executor.run({x: values}, convert_to_numpy_ret_vals=True)
                    np.testing.assert_allclose(copys, mine, rtol=1e-5, atol=1e-6)
                    self.assertTrue((other[0].bias.asnumpy() != before["0.bias"]).any())
                    self.assertEqual(int(other[2].step.asnumpy()), 1)
                    for name, value in model.state_dict().items():
                        np.testing.assert_array_equal(value, before[name])

    def test_by_copy(self) -> None:
        self.check(copy.deepcopy)

    def test_by_pickle(self) -> None:
        self.check(lambda model: pickle.loads(pickle.dumps(model)))

    def test_what_was_declared_and_frozen_stays_so(self) -> None:
        for kind, trainable in ((None, False), (np.float64, True)):
            value = ad.Parameter(np.ones(2), "w", dtype=kind, trainable=trainable)
            made = copy.deepcopy(value)
            self.assertEqual((made.dtype, made.declared), (value.dtype, value.declared))
            self.assertEqual((made.name, made.trainable), ("w", trainable))

"""What one does with modules besides calling them: hooks, activations, freezing, tying, counting,
changing a Sequential, and weights to and from PyTorch.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import unittest
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import data, nn, optim, train
from dlsys import functional as F
from dlsys.dtypes import bfloat16
from dlsys.errors import DataError, DeviceError, GraphError
from support import small_runs as small
from support.devices import needs_torch

torch: Any = import_module("torch") if find_spec("torch") else None
X = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3, rng=0), nn.Tanh(), nn.Linear(3, 2, rng=1))


def run(*nodes: Any, feeds: Any) -> list[np.ndarray]:
    return ad.Executor(list(nodes)).run(feeds, True)


class Hooks(unittest.TestCase):
    def test_a_hook_sees_inputs_and_outputs_until_it_is_removed(self) -> None:
        model, seen = mlp(), []
        handle = model[1].register_forward_hook(lambda *call: seen.append(call))
        x = ad.Variable("x")
        y = model(x)
        ((module, inputs, output),) = seen
        self.assertIs(module, model[1])
        hidden, before, made = run(output, inputs[0], y, feeds={x: X})
        np.testing.assert_allclose(hidden, np.tanh(before), rtol=1e-6)
        self.assertEqual(made.shape, (5, 2))
        handle.remove()
        handle.remove()
        model(x)
        self.assertEqual(len(seen), 1)

    def test_what_a_hook_returns_takes_the_outputs_place(self) -> None:
        model, x = mlp(), ad.Variable("x")
        with model[1].register_forward_hook(lambda module, inputs, output: output * 0.0):
            changed = model(x)
        found, plain = run(changed, model(x), feeds={x: X})
        np.testing.assert_array_equal(found, np.zeros((5, 2)) + model[2].bias.asnumpy())
        self.assertTrue(plain.any())

    def test_hooks_of_one_module_do_not_mix(self) -> None:
        model, seen = mlp(), []
        for k in range(3):
            model.register_forward_hook(lambda *_, k=k: seen.append(k))
        model(ad.Variable("x"))
        self.assertEqual(seen, [0, 1, 2])
        self.assertEqual(nn.Tanh()._hooks, {})

    def test_tensors_are_seen_each_time(self) -> None:
        model, seen = mlp(), []
        model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.numpy()))
        for _ in range(2):
            model(dl.tensor(X, device="numpy"))
        expected = X @ model[0].weight.asnumpy().T
        self.assertEqual(len(seen), 2)
        np.testing.assert_allclose(seen[1], expected, rtol=1e-5, atol=1e-6)

    def test_only_functions_are_hooks(self) -> None:
        with self.assertRaisesRegex(GraphError, "register_forward_hook: 3 is no function"):
            mlp().register_forward_hook(3)  # type: ignore[arg-type]

    def test_activations(self) -> None:
        tanh = nn.Tanh()
        model, x = nn.Sequential(nn.Linear(4, 3, rng=0), tanh, tanh), ad.Variable("x")
        found = model.activations(x)
        self.assertEqual(list(found), ["", "0", "1", "1#2"])
        top, first, once, twice = run(*found.values(), feeds={x: X})
        np.testing.assert_array_equal(top, twice)
        np.testing.assert_allclose(twice, np.tanh(np.tanh(first)), rtol=1e-5)
        np.testing.assert_allclose(once, np.tanh(first), rtol=1e-6)
        eager = model.activations(dl.tensor(X, device="numpy"))
        np.testing.assert_allclose(eager["1"].numpy(), once, rtol=1e-6)


class Freezing(unittest.TestCase):
    def test_training_leaves_what_is_frozen(self) -> None:
        model, x = nn.Sequential(nn.Linear(4, 3, rng=0), nn.BatchNorm1d(3)), ad.Variable("x")
        model[0].freeze()
        self.assertEqual([name for name, _ in model.named_parameters()], ["1.weight", "1.bias"])
        before = model.state_dict()
        loss = ad.sum_op(F.tanh(model(x)))
        update = optim.SGD(lr=0.5).minimize(loss, model.parameters())
        ad.Executor([loss, update]).run({x: X})
        after = model.state_dict()
        np.testing.assert_array_equal(after["0.weight"], before["0.weight"])
        self.assertTrue((after["1.bias"] != before["1.bias"]).all())
        with self.assertRaisesRegex(GraphError, "not trainable"):
            optim.SGD(lr=0.5).minimize(loss, [model[0].weight])
        self.assertEqual(
            (model.num_parameters(), model.num_parameters(trainable_only=True)), (21, 6)
        )
        model.unfreeze()
        self.assertEqual(len(model.parameters()), 4)
        self.assertEqual([name.split(".")[1] for name, _ in model.named_buffers()],
                         ["running_mean", "running_var"])  # fmt: skip

    def test_a_part_is_unfrozen_and_a_copy_remembers(self) -> None:
        model = mlp().freeze()
        self.assertEqual(model.parameters(), [])
        other = copy.deepcopy(model)
        other[2].unfreeze()
        self.assertEqual([name for name, _ in other.named_parameters()], ["2.weight", "2.bias"])
        self.assertEqual(model.parameters(), [])

    def test_tensors(self) -> None:
        model = mlp()
        for frozen, trained in ((False, 4), (True, 2), (False, 4)):
            for parameter in model.unfreeze()[:1].parameters() + model[2:].parameters():
                parameter.grad = None
            if frozen:
                model[0].freeze()
            model(dl.tensor(X, device="numpy")).sum().backward()
            graded = [p for _, p in model.named_state() if p.grad is not None]
            self.assertEqual(len(graded), trained)


class Tools(unittest.TestCase):
    def test_apply_takes_children_first(self) -> None:
        model, order = nn.Sequential(mlp(), nn.ReLU()), []
        names = {module: name for name, module in model.named_modules()}
        self.assertIs(model.apply(lambda module: order.append(names[module])), model)
        self.assertEqual(order, ["0.0", "0.1", "0.2", "0", "1", ""])

    def test_apply_sets_weights_by_kind(self) -> None:
        def zero(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                module.weight.set(np.zeros(module.weight.shape, np.float32))

        state = mlp().apply(zero).state_dict()
        self.assertFalse(state["0.weight"].any() or state["2.weight"].any())

    def test_sequential(self) -> None:
        a, b, c, d = nn.Tanh(), nn.ReLU(), nn.Sigmoid(), nn.GELU()
        model = nn.Sequential(a).append(b).extend([c])
        self.assertEqual(list(model.insert(1, d)), [a, d, b, c])
        self.assertEqual(len(model), 4)
        self.assertIs(model[-1], c)
        self.assertEqual(list(model[:3]), [a, d, b])
        self.assertEqual(list(model[::-2]), [c, d])
        del model[1], model[-1]
        self.assertEqual(list(model), [a, b])
        model[-1] = d
        self.assertEqual(list(model), [a, d])
        self.assertEqual([name for name, _ in model.children()], ["0", "1"])
        for change in (lambda: model.append(3), lambda: model.insert(0, None)):
            with self.assertRaisesRegex(GraphError, "expected a Module or a function"):
                change()
        self.assertEqual(list(model), [a, d])
        with self.assertRaises(IndexError):
            model[2] = a

    def test_devices_have_names(self) -> None:
        model, labels = mlp().to("numpy"), np.zeros(5, np.int64)
        batches = data.Loader((X, labels), 5)
        train.fit(model, batches, optim.SGD(0.1), ctx="numpy", quiet=True)
        expected = train.evaluate(model, batches, ctx="numpy")
        self.assertEqual(train.evaluate(model, batches), expected)
        self.assertEqual(train.predict(model, X, ctx="numpy").shape, (5, 2))
        self.assertIsNone(ad.Executor([ad.Variable("x")], "numpy").ctx)
        model.to("gpu:1")
        with self.assertRaisesRegex(GraphError, r"model\.to\(None\)"):
            model(dl.tensor(X, "numpy")).numpy()
        for call in (model.to, lambda name: train.predict(model, X, name)):
            with self.assertRaisesRegex(DeviceError, 'device is \'tpu\', expected "numpy", "cpu"'):
                call("tpu")

    def test_slices_share_their_layers(self) -> None:
        model = mlp()
        self.assertIs(model[:1][0].weight, model[0].weight)


class Tied(nn.Module):
    """A model whose head multiplies by the table of its embedding."""

    def __init__(self) -> None:
        self.embedding = nn.Embedding(6, 3, rng=0)
        self.head = nn.Linear(3, 6, bias=False, rng=1)
        self.head.weight = self.embedding.weight

    def forward(self, x: Any) -> Any:
        return self.head(F.tanh(self.embedding(x)))


class Tying(unittest.TestCase):
    def test_one_parameter_in_two_modules(self) -> None:
        model, x = Tied(), ad.Variable("x", dtype=np.int64)
        self.assertEqual(list(model.state_dict()), ["embedding.weight"])
        self.assertEqual(model.num_parameters(), 18)
        labels, tokens = np.array([1, 2, 3]), np.array([0, 1, 2])
        w = model.embedding.weight.asnumpy().astype(np.float64)
        loss = F.cross_entropy(model(x), ad.constant(labels))
        update = optim.SGD(lr=0.5).minimize(loss, model.parameters())
        ad.Executor([loss, update]).run({x: tokens})
        h = np.tanh(w[tokens])
        p = np.exp(h @ w.T)
        p = (p / p.sum(1, keepdims=True) - np.eye(6)[labels]) / 3
        expected = p.T @ h  # as the head's weight, and as the table
        np.add.at(expected, tokens, p @ w * (1 - h**2))
        np.testing.assert_allclose(model.head.weight.asnumpy(), w - 0.5 * expected, rtol=1e-4)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tied.safetensors"
            train.save(path, model.state_dict(), {})
            other = Tied()
            other.load_state_dict(train.load(path).tensors)
        again = copy.deepcopy(other)
        self.assertIs(again.head.weight, again.embedding.weight)
        self.assertIs(other.head.weight, other.embedding.weight)
        np.testing.assert_array_equal(other.head.weight.asnumpy(), model.head.weight.asnumpy())

    def test_a_run_with_tied_and_frozen_layers_resumes(self) -> None:
        def network() -> nn.Sequential:
            rng = np.random.default_rng(3)
            made = nn.Sequential(*[nn.Linear(4, 4, rng=rng) for _ in range(3)], nn.Linear(4, 3))
            made[2].weight = made[0].weight
            made[1].freeze()
            return made

        with tempfile.TemporaryDirectory() as folder:
            whole, part, other = network(), network(), network()
            part.load_state_dict(whole.state_dict())
            other.load_state_dict(whole.state_dict())
            kept = whole.state_dict()["1.weight"]
            train.fit(whole, small.loader(), small.sgd(), epochs=2, quiet=True)
            train.fit(
                part, small.loader(), small.sgd(), epochs=1, callbacks=[train.Checkpoint(folder)]
            )
            train.fit(other, small.loader(), small.sgd(), epochs=2, resume=folder, quiet=True)
        for name, value in whole.state_dict().items():
            np.testing.assert_array_equal(other.state_dict()[name], value, name)
        self.assertIs(other[2].weight, other[0].weight)
        np.testing.assert_array_equal(whole.state_dict()["1.weight"], kept)

    @needs_torch
    def test_pytorch_has_both_names(self) -> None:
        made = nn.to_torch_state_dict(Tied())
        self.assertEqual(list(made), ["embedding.weight", "head.weight"])
        self.assertEqual(nn.load_torch_state_dict(Tied(), made), ([], []))


class Interop(unittest.TestCase):
    def pair(self) -> tuple[Any, Any]:
        """A model of ours and PyTorch's of the same structure, with Dropout and norms."""
        there = torch.nn
        ours = nn.Sequential(
            nn.Conv2d(1, 4, 3, rng=0), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3),
            nn.Flatten(), nn.Linear(64, 8, rng=1), nn.Dropout(0.1), F.relu, nn.LayerNorm(8),
        )  # fmt: skip
        theirs = there.Sequential(
            there.Conv2d(1, 4, 3), there.BatchNorm2d(4), there.ReLU(), there.Dropout(0.3),
            there.Flatten(), there.Linear(64, 8), there.Dropout(0.1), there.ReLU(),
            there.LayerNorm(8),
        )  # fmt: skip
        return ours, theirs

    def alike(self, ours: Any, theirs: Any) -> None:
        x, fed = ad.Variable("x"), X.reshape(-1, 1, 2, 2).repeat(3, 2).repeat(3, 3)
        (found,) = run(ours.eval()(x), feeds={x: fed})
        expected = theirs.eval()(torch.tensor(fed)).detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

    @needs_torch
    def test_both_ways_strictly(self) -> None:
        ours, theirs = self.pair()
        with torch.no_grad():
            theirs(torch.randn(8, 1, 6, 6))  # running statistics of its own
        self.assertEqual(nn.load_torch_state_dict(ours, theirs), ([], []))
        self.alike(ours, theirs)
        _, other = self.pair()
        made = nn.to_torch_state_dict(ours)
        self.assertEqual(list(made), list(other.state_dict()))
        other.load_state_dict(made, strict=True)
        self.alike(ours, other)

    @needs_torch
    def test_an_error_says_how_pytorchs_weights_are_loaded(self) -> None:
        theirs = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5))
        ours = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
        with self.assertRaisesRegex(DataError, "call nn.load_torch_state_dict"):
            ours.load_state_dict(theirs.state_dict())
        with self.assertRaisesRegex(DataError, "missing: 0.bias, 1.key, 1.step$"):
            ours.load_state_dict({"0.weight": np.zeros((2, 4))})

    @needs_torch
    def test_state_of_dropout_stays(self) -> None:
        ours, theirs = self.pair()
        before = ours.state_dict()["3.key"]
        nn.load_torch_state_dict(ours, theirs.state_dict())
        np.testing.assert_array_equal(ours.state_dict()["3.key"], before)

    @needs_torch
    def test_strictness(self) -> None:
        ours, theirs = self.pair()
        state = theirs.state_dict()
        state["more"] = state.pop("0.weight")
        with self.assertRaisesRegex(DataError, "missing: 0.weight; unexpected: more"):
            nn.load_torch_state_dict(ours, state)
        found = nn.load_torch_state_dict(ours, state, strict=False)
        self.assertEqual(found, (["0.weight"], ["more"]))
        with self.assertRaisesRegex(DataError, "load_torch_state_dict: got int"):
            nn.load_torch_state_dict(ours, 3)

    @needs_torch
    def test_bfloat16(self) -> None:
        ours, theirs = nn.Linear(4, 3), torch.nn.Linear(4, 3).bfloat16()
        nn.load_torch_state_dict(ours, theirs)
        np.testing.assert_array_equal(ours.weight.asnumpy(), theirs.weight.detach().float().numpy())
        ours.weight = ad.Parameter(ours.weight.asnumpy(), "weight", dtype=bfloat16)
        made = nn.to_torch_state_dict(ours)["weight"]
        self.assertEqual(made.dtype, torch.bfloat16)
        self.assertTrue(torch.equal(made, theirs.weight.detach()))

    @needs_torch
    def test_layers_of_layers_have_pytorchs_names(self) -> None:
        there = torch.nn
        for ours, theirs in (
            (nn.LSTM(3, 4, 2, bidirectional=True, dropout=0.1),
             there.LSTM(3, 4, 2, bidirectional=True, dropout=0.1)),
            (nn.TransformerEncoderLayer(4, 2, 8), there.TransformerEncoderLayer(4, 2, 8)),
        ):  # fmt: skip
            theirs.load_state_dict(nn.to_torch_state_dict(ours), strict=True)
            self.assertEqual(set(nn.to_torch_state_dict(ours)), set(theirs.state_dict()))

    def test_without_pytorch(self) -> None:
        with mock.patch.dict(sys.modules, {"torch": None}):
            with self.assertRaisesRegex(DataError, "PyTorch is not installed: pip install torch"):
                nn.to_torch_state_dict(mlp())

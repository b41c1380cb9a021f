"""Recurrent layers, attention and positions against formulas of numpy, their gradients against
finite differences, their errors, and a model of each that learns, on every device.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.errors import GraphError, ShapeError
from dlsys.nn import attention, recurrent
from support.devices import on_native_devices
from support.gradcheck import check_gradients

GATES = {"tanh": 1, "relu": 1, "lstm": 4, "gru": 3}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def step(kind: str, x: np.ndarray, state: list[np.ndarray], weights: Any) -> list[np.ndarray]:
    """One step by the formulas, gate by gate."""
    w, u, b, a = weights
    size = u.shape[1]
    rows = [slice(k * size, (k + 1) * size) for k in range(GATES[kind])]
    given = [x @ w[r].T + b[r] for r in rows]
    own = [state[0] @ u[r].T + a[r] for r in rows]
    if kind == "gru":
        r, z = (sigmoid(m + n) for m, n in zip(given[:2], own[:2]))
        return [(1 - z) * np.tanh(given[2] + r * own[2]) + z * state[0]]
    sums = [m + n for m, n in zip(given, own)]
    if kind == "lstm":
        c = sigmoid(sums[1]) * state[1] + sigmoid(sums[0]) * np.tanh(sums[2])
        return [sigmoid(sums[3]) * np.tanh(c), c]
    return [np.tanh(sums[0]) if kind == "tanh" else np.maximum(sums[0], 0)]


def sequence(kind: str, x: np.ndarray, state: Any, weights: Any, backward: bool) -> np.ndarray:
    """The outputs and the final states in one array of rows."""
    outputs, state = [], list(state)
    for part in x[::-1] if backward else x:
        state = step(kind, part, state, weights)
        outputs.append(state[0])
    return np.stack([*(outputs[::-1] if backward else outputs), *state])


def attend(q: np.ndarray, k: np.ndarray, mask: np.ndarray) -> np.ndarray:
    scores = np.einsum("nhld,nhsd->nhls", q, k) / np.sqrt(q.shape[-1])
    e = np.where(mask, 0, np.exp(scores))
    return e / e.sum(-1, keepdims=True)


class Formulas(unittest.TestCase):
    """In float64 on numpy; test_layers_torch.py compares devices."""

    def setUp(self) -> None:
        self.rng = np.random.default_rng(0)

    def check(
        self, ours: Callable[..., Any], formula: Callable[..., np.ndarray], arrays: Sequence[Any]
    ) -> None:
        """The value, and the gradients of a weighted sum of it."""
        nodes = [ad.Variable("x", shape=a.shape, dtype=np.float64) for a in arrays]
        y = ours(*nodes)
        expected = formula(*arrays)
        weights = self.rng.standard_normal(expected.shape)
        gradients = ad.gradients(ad.sum_op(y * ad.constant(weights)), nodes)
        found = ad.Executor([y, *gradients]).run(dict(zip(nodes, arrays)), True)
        np.testing.assert_allclose(found[0], expected, rtol=1e-11, atol=1e-12)
        check_gradients(
            lambda point: float((formula(*point) * weights).sum()), found[1:], arrays, self.rng,
            magnitude=float(np.abs(expected * weights).sum()),
        )  # fmt: skip

    def test_recurrences(self) -> None:
        for kind, gates in GATES.items():
            for backward in (False, True):
                with self.subTest(kind=kind, backward=backward):
                    shapes = [(3, 2, 4), (gates * 3, 4), (gates * 3, 3), (gates * 3,), (gates * 3,)]
                    shapes += [(2, 3)] * (2 if kind == "lstm" else 1)
                    arrays = [self.rng.standard_normal(shape) for shape in shapes]
                    if kind == "relu":  # smooth around the point: no sum is near 0
                        arrays = [np.abs(a) + 0.5 for a in arrays]
                    self.check(
                        lambda x, w, u, b, a, *state: self.joined(
                            recurrent.sequence(kind, x, state, (w, u, b, a), backward)  # noqa: B023
                        ),
                        lambda x, w, u, b, a, *state: sequence(
                            kind, x, state, (w, u, b, a), backward  # noqa: B023
                        ),
                        arrays,
                    )  # fmt: skip

    def joined(self, parts: Any) -> Any:
        """The outputs and the final states in one array of rows."""
        y, *state = parts
        return F.concatenate([y, *[F.expand_dims(s, 0) for s in state]])

    def test_attention(self) -> None:
        q, k = self.rng.standard_normal((2, 3, 4, 5)), self.rng.standard_normal((2, 3, 4, 5))
        padding = np.array([[False, False, True, False], [False, True, False, False]])
        mask = np.zeros((4, 4), bool)
        mask[2, 0] = True
        later = np.triu(np.ones((4, 4), bool), 1)
        for given, hidden in (
            (dict(), np.zeros((1, 1, 4, 4), bool)),
            (dict(causal=True), later[None, None]),
            (dict(padding=padding), padding[:, None, None]),
            (dict(mask=mask, padding=padding), mask | padding[:, None, None]),
        ):
            self.check(
                lambda q, k: attention.attention_weights(q, k, **given),  # noqa: B023
                lambda q, k: attend(q, k, hidden),  # noqa: B023
                [q, k],
            )

    def test_multihead_attention_without_weights(self) -> None:
        """By the operator of attention, with every mix of masks as with weights."""
        layer = nn.MultiheadAttention(6, 2, batch_first=True, rng=0)
        x = ad.constant(self.rng.standard_normal((2, 4, 6)).astype(np.float32))
        hides = np.array([[False, False, True, False], [False, True, False, False]])
        masks = (np.triu(np.ones((4, 4), bool), 2), self.rng.standard_normal((4, 4, 4)))
        paddings = (hides, np.where(hides, -3.0, 0.5).astype(np.float32))
        for mask in (None, masks[0], masks[1].astype(np.float32)):
            for padding in (None, *paddings):
                given = dict(attn_mask=mask, key_padding_mask=padding)
                given = {key: value for key, value in given.items() if value is not None}
                wanted, _ = layer(x, **given, need_weights=True)
                for key, op in ((x, "packed_attention"), (ad.copy_op(x), "attention")):
                    y = layer(x, key, **given)
                    self.assertIn(op, {node.op.name for node in ad.find_topo_sort([y])})
                    found = ad.Executor([y, wanted]).run({}, True)
                    with self.subTest(op=op, masks=[(k, v.dtype) for k, v in given.items()]):
                        np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


class Learned:
    ctx: Any = None

    def setUp(self) -> None:
        self.rng = np.random.default_rng(0)

    def losses(self, logits: Any, feeds: Any, labels: np.ndarray, parameters: Any) -> list[float]:
        y = ad.Variable("y", dtype=np.int64)
        loss = F.cross_entropy(logits, y)
        update = optim.Adam(lr=0.02).minimize(loss, parameters)
        training = ad.Executor([loss, update], self.ctx)
        return [float(training.run({**feeds, y: labels}, True)[0]) for _ in range(30)]

    def test_an_lstm_remembers_the_first_token(self) -> None:
        tokens = self.rng.integers(0, 4, (24, 6))
        model = nn.Embedding(4, 8, rng=0), nn.LSTM(8, 16, 2, True, True, 0.1, rng=1)
        head = nn.Linear(16, 4, rng=2)
        x = ad.Variable("x", shape=(None, 6), dtype=np.int64)
        _, (h, _) = model[1](model[0](x))
        parameters = [p for layer in (*model, head) for p in layer.parameters()]
        losses = self.losses(head(h[-1]), {x: tokens}, tokens[:, 0], parameters)
        self.assertLess(losses[-1], 0.5 * losses[0])

    def test_a_transformer_copies_the_token_before(self) -> None:
        tokens = self.rng.integers(0, 4, (16, 6))
        model = nn.Sequential(
            nn.Embedding(4, 16, rng=0), nn.LearnedPositions(6, 16, rng=1),
            nn.TransformerBlock(16, 2, dropout=0.05, causal=True, rng=2), nn.Linear(16, 4, rng=3),
        )  # fmt: skip
        x = ad.Variable("x", shape=(None, 6), dtype=np.int64)
        logits = F.reshape(model(x)[:, 1:], (-1, 4))
        losses = self.losses(logits, {x: tokens}, tokens[:, :-1].ravel(), model.parameters())
        self.assertLess(losses[-1], 0.5 * losses[0])

    def test_positions(self) -> None:
        x = self.rng.standard_normal((2, 5, 7)).astype(np.float32)
        node = ad.Variable("x", shape=(None, 5, 7))
        learned, waves = nn.LearnedPositions(9, 7, rng=0), nn.SinusoidalPositions()
        found = ad.Executor([learned(node), waves(node)], self.ctx).run({node: x}, True)
        np.testing.assert_allclose(found[0], x + learned.weight.asnumpy()[:5], rtol=1e-6)
        expected = x.astype(np.float64)
        for position in range(5):
            for k in range(7):
                angle = position / 10_000 ** ((k - k % 2) / 7)
                expected[:, position, k] += np.cos(angle) if k % 2 else np.sin(angle)
        np.testing.assert_allclose(found[1], expected, rtol=1e-5, atol=1e-6)

    def test_dropout_stands_between_layers_only(self) -> None:
        x = self.rng.standard_normal((4, 3, 5)).astype(np.float32)
        node = ad.Variable("x", shape=x.shape)
        one, two = nn.GRU(5, 6, 1, dropout=0.9, rng=0), nn.GRU(5, 6, 2, dropout=0.9, rng=0)
        self.assertEqual([name for name, _ in two.named_buffers()],
                         ["dropouts.0.key", "dropouts.0.step"])  # fmt: skip
        self.assertEqual(one.buffers(), [])
        trained, plain = two(node)[0], two.eval()(node)[0]
        a, b = ad.Executor([trained, plain], self.ctx).run({node: x}, True)
        self.assertFalse(np.allclose(a, b))


class NumpyLearned(Learned, unittest.TestCase):
    ctx = None


CpuLearned, GpuLearned = on_native_devices(Learned)


class Eager(unittest.TestCase):
    """With Tensors, whose gradients are those of graphs."""

    def test_tensors(self) -> None:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((2, 4, 6)).astype(np.float32)
        padding = np.array([[False, False, False, True], [False, False, True, True]])
        for layer, named in (
            (nn.LSTM(6, 5, 2, bidirectional=True, batch_first=True, rng=0), {}),
            (nn.GRUCell(6, 5, rng=0), {}),
            (nn.MultiheadAttention(6, 2, batch_first=True, rng=0),
             {"key_padding_mask": padding, "causal": True}),
            (nn.TransformerBlock(6, 2, causal=True, rng=0), {}),
            (nn.LearnedPositions(5, 6, rng=0), {}),
            (nn.SinusoidalPositions(), {}),
            (nn.Conv1d(4, 3, 3, rng=0), {}),
            (nn.Unflatten(2, (2, 3)), {}),
            (nn.GroupNorm(2, 4), {}),
        ):  # fmt: skip
            with self.subTest(layer=type(layer).__name__):
                fed = x[0] if isinstance(layer, nn.GRUCell) else x
                tensor = dl.tensor(fed, device="numpy", requires_grad=True)
                made = layer(tensor, **named)
                made = made[0] if isinstance(made, tuple) else made
                (made * made).sum().backward()
                node = ad.Variable("x", shape=fed.shape)
                y = layer(node, **named)
                y = y[0] if isinstance(y, tuple) else y
                gradients = ad.gradients(ad.sum_op(y * y), [node, *layer.parameters()])
                expected = ad.Executor([y, *gradients]).run({node: fed}, True)
                found = [made, tensor.grad, *[p.grad for p in layer.parameters()]]
                for a, b in zip(found, expected):
                    np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5)


class Refused(unittest.TestCase):
    def test_what_does_not_fit(self) -> None:
        free, line = ad.Variable("x", shape=(None, None, 6)), ad.Variable("x", shape=(3, 6))
        unknown, x = ad.Variable("x"), ad.Variable("x", shape=(None, 4, 6))
        mask = ad.Variable("mask", shape=(None, 4))
        self_attention = nn.MultiheadAttention(6, 2, batch_first=True)
        for call, error, words in (
            (lambda: nn.LSTM(0, 3), GraphError, "LSTM: inputs must be a positive integer"),
            (lambda: nn.RNN(2, 3, nonlinearity="gelu"), GraphError, "RNN: nonlinearity"),
            (lambda: nn.GRU(2, 3, dropout=1.0), GraphError, "GRU: dropout"),
            (lambda: nn.LSTM(6, 3)(free), GraphError, "LSTM: the number of steps is not known"),
            (lambda: nn.LSTM(6, 3)(unknown), GraphError, "LSTM: the shape of its input"),
            (lambda: nn.GRU(6, 3)(line), ShapeError, "GRU: expected an input .steps, batch"),
            (lambda: nn.LSTM(6, 3, batch_first=True)(x, x), GraphError, "expected the pair .h, c."),
            (lambda: nn.MultiheadAttention(6, 4), GraphError, "4 heads do not divide 6 features"),
            (lambda: self_attention(free), GraphError, "number of positions is not known"),
            (lambda: self_attention(line), ShapeError, "expected an input .batch, positions"),
            (lambda: self_attention(x, key_padding_mask=mask), GraphError, "mask .* declare it"),
            (lambda: self_attention(x, key_padding_mask=np.ones((2, 4), int)), GraphError,
             "is int64, expected bool"),
            (lambda: nn.LearnedPositions(3, 6)(x), GraphError, "4 positions and weight 3 rows"),
            (lambda: nn.SinusoidalPositions()(free), GraphError, "number of positions"),
            (lambda: nn.GroupNorm(4, 6), GraphError, "GroupNorm: 4 groups do not divide 6"),
            (lambda: nn.Upsample(), GraphError, "Upsample: expected either size or scale"),
            (lambda: nn.Unflatten(1, (3, 2))(x), ShapeError, "do not make up an axis of 4"),
            (lambda: nn.Unflatten(3, (3, 2))(x), ShapeError, "has no axis 3"),
            (lambda: nn.Unflatten(1, (2, -1))(free), GraphError, "all axes but one"),
            (lambda: nn.Conv1d(4, 3, 2, padding=(1, 2, 3)), GraphError, "Conv1d: padding must be"),
            (lambda: nn.Embedding(4, 3, padding_idx=4), GraphError, "padding_idx below 4"),
        ):  # fmt: skip
            with self.subTest(words=words), self.assertRaisesRegex(error, words):
                call()

"""Layers against PyTorch's of the same weights: values, and the gradients of inputs and parameters.

Weights go over by name, strictly; PyTorch computes in float64. Every row is skipped without it.
"""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn
from support.devices import needs_torch, on_native_devices

torch: Any = import_module("torch") if find_spec("torch") else None
there: Any = torch and torch.nn

SHUT = np.array(
    [[False, False, True, True], [False, False, False, True], [True, False, False, False]]
)
CAUSAL = np.triu(np.ones((5, 5), bool), 1)


def flat(value: Any) -> list[Any]:
    """The outputs of a layer in one list."""
    if isinstance(value, (list, tuple)):
        return [one for item in value for one in flat(item)]
    return [value]


class Packed(there.Module if torch else object):  # type: ignore[misc]
    """A recurrent layer of PyTorch over sequences of several lengths, padded."""

    def __init__(self, layer: Any, batch_first: bool) -> None:
        super().__init__()
        self.layer, self.batch_first = layer, batch_first

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return self.layer.state_dict()

    def forward(self, x: Any, lengths: Any) -> Any:
        tools, first = there.utils.rnn, self.batch_first
        packed = tools.pack_padded_sequence(x, lengths, first, enforce_sorted=False)
        y, state = self.layer(packed)
        return tools.pad_packed_sequence(y, first)[0], state


class AgainstTorch:
    ctx: Any = None
    # Of the largest magnitude, or of 1 where that is less. Measured: 9e-7 on numpy and the CPU,
    # 6e-7 on the emulated GPU.
    tolerance = 5e-6

    def setUp(self) -> None:
        self.rng = np.random.default_rng(0)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def compare(
        self, ours: Any, theirs: Any, *inputs: Any, named: dict[str, Any] | None = None,
        their_named: dict[str, Any] | None = None, batch: int | None = None,
    ) -> None:  # fmt: skip
        """Compares both on inputs, arrays or tuples of them; `named` masks are constants of ours.
        batch: the axis of the first input whose extent is not declared.
        """
        with self.subTest(layer=repr(ours), shapes=[np.shape(x) for x in flat(inputs)]):
            for parameter in theirs.parameters():  # such as a norm's weights of 1, biases of 0
                torch.nn.init.normal_(parameter, 0.1, 0.5)
            theirs.zero_grad()
            nn.load_torch_state_dict(ours, theirs)
            wanted = self.theirs(
                theirs.double(), inputs, named if their_named is None else their_named
            )
            found = self.ours(ours, inputs, named, batch)
            self.assertEqual(len(found), len(wanted))
            for k, (a, b) in enumerate(zip(found, wanted)):
                self.assertEqual(a.shape, b.shape)
                scale = max(1.0, float(np.abs(b).max(initial=0)))
                np.testing.assert_allclose(
                    a, b, rtol=0, atol=self.tolerance * scale, err_msg=f"result {k}"
                )

    def theirs(self, layer: Any, inputs: Sequence[Any], named: Any) -> list[np.ndarray]:
        """Outputs, then gradients of inputs and of parameters in the order of their names."""
        leaves: list[Any] = []

        def tensor(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(tensor, x))
            if isinstance(x, np.ndarray):
                x = torch.tensor(x.astype(np.float64) if x.dtype.kind == "f" else x)
            return x

        def leaf(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(leaf, x))
            made = tensor(x)
            if made.is_floating_point():
                leaves.append(made.requires_grad_())
            return made

        outputs = flat(
            layer(*map(leaf, inputs), **{k: tensor(v) for k, v in (named or {}).items()})
        )
        outputs = [y for y in outputs if y is not None]
        self.weights = [self.normal(*y.shape) for y in outputs]  # outputs are summed to a loss by
        sum((y * tensor(w)).sum() for y, w in zip(outputs, self.weights)).backward()
        parameters = dict(layer.named_parameters())
        grads = [x.grad for x in leaves] + [parameters[name].grad for name in sorted(parameters)]
        return [x.detach().numpy() for x in [*outputs, *grads]]

    def ours(
        self, layer: Any, inputs: Sequence[Any], named: Any, batch: int | None
    ) -> list[np.ndarray]:
        """The same by our layer, of the loss with the same weights."""
        feeds: dict[Any, np.ndarray] = {}

        def variable(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(variable, x))
            shape: list[Any] = list(x.shape)
            if batch is not None and not feeds:
                shape[batch] = None
            node = ad.Variable("x", shape=shape, dtype=x.dtype)
            feeds[node] = x
            return node

        given = [*map(variable, inputs)]
        outputs = flat(layer(*given, **(named or {})))
        terms = [ad.sum_op(y * ad.constant(w)) for y, w in zip(outputs, self.weights)]
        floats = [node for node, x in feeds.items() if x.dtype.kind == "f"]
        parameters = [state for _, state in sorted(layer.named_parameters())]
        gradients = ad.gradients(ad.sum_node_list(terms), [*floats, *parameters])
        return ad.Executor([*outputs, *gradients], self.ctx).run(feeds, True)

    # ---- recurrent ----
    def test_recurrent_layers(self) -> None:
        x, first = self.normal(5, 3, 4), self.normal(2, 3, 6)
        for kind, options in (
            ("RNN", {}), ("RNN", {"nonlinearity": "relu", "bias": False}), ("GRU", {}),
            ("GRU", {"bidirectional": True, "num_layers": 2}), ("LSTM", {}),
            ("LSTM", {"bidirectional": True, "num_layers": 2, "batch_first": True}),
            ("LSTM", {"bias": False}), ("RNN", {"bidirectional": True, "batch_first": True}),
        ):  # fmt: skip
            ours, theirs = getattr(nn, kind)(4, 6, **options), getattr(there, kind)(4, 6, **options)
            self.compare(ours, theirs, x, batch=0 if options.get("batch_first") else 1)
        for kind in ("RNN", "GRU", "LSTM"):
            ours, theirs = getattr(nn, kind)(4, 6, 2), getattr(there, kind)(4, 6, 2)
            state = (first, self.normal(2, 3, 6)) if kind == "LSTM" else first
            self.compare(ours, theirs, x, state)
            self.compare(ours, theirs, x[:1])

    def test_lengths_are_those_of_packed_sequences(self) -> None:
        lengths = np.array([2, 5, 4])
        for kind in ("RNN", "GRU", "LSTM"):
            options = dict(num_layers=2, bidirectional=True, batch_first=kind == "GRU")
            x = self.normal(*((3, 5, 4) if kind == "GRU" else (5, 3, 4)))
            ours, theirs = getattr(nn, kind)(4, 6, **options), getattr(there, kind)(4, 6, **options)
            self.compare(
                ours, Packed(theirs, options["batch_first"]), x, named={"lengths": lengths}
            )

    def test_cells(self) -> None:
        x, h, c = self.normal(3, 4), self.normal(3, 6), self.normal(3, 6)
        for kind, state in (("RNNCell", h), ("GRUCell", h), ("LSTMCell", (h, c))):
            for bias in (True, False):
                ours, theirs = getattr(nn, kind)(4, 6, bias), getattr(there, kind)(4, 6, bias)
                self.compare(ours, theirs, x, state)
                self.compare(ours, theirs, x)
        self.compare(
            nn.RNNCell(4, 6, nonlinearity="relu"), there.RNNCell(4, 6, nonlinearity="relu"), x, h
        )

    # ---- attention ----
    def attention(self, *inputs: np.ndarray, named: dict[str, Any], **options: Any) -> None:
        ours = nn.MultiheadAttention(8, 2, **options)
        theirs = there.MultiheadAttention(8, 2, **options)
        their_named = {name: value for name, value in named.items() if name != "causal"}
        if named.get("causal"):
            their_named["attn_mask"] = CAUSAL
        their_named |= {"average_attn_weights": False}
        batch = 0 if options.get("batch_first") else 1
        self.compare(ours, theirs, *inputs, named=named | {"need_weights": True},
                     their_named=their_named, batch=batch)  # fmt: skip

    def test_attention(self) -> None:
        q, k, v = self.normal(5, 3, 8), self.normal(4, 3, 8), self.normal(4, 3, 8)
        self.attention(q, k, v, named={})
        self.attention(q, k, v, named={"key_padding_mask": SHUT}, bias=False)
        self.attention(q, k, v, named={"attn_mask": self.normal(5, 4)})
        self.attention(q, k, v, named={"attn_mask": self.normal(6, 5, 4)})
        self.attention(
            q,
            k,
            v,
            named={"attn_mask": CAUSAL[:, :4], "key_padding_mask": SHUT[:2].repeat(2, 0)[:3]},
        )
        self.attention(q, q, q, named={"causal": True})
        first = [x.swapaxes(0, 1).copy() for x in (q, k, v)]
        self.attention(*first, named={"key_padding_mask": SHUT}, batch_first=True)
        self.attention(q, self.normal(4, 3, 5), self.normal(4, 3, 7), named={}, kdim=5, vdim=7)

    def test_transformer_layers(self) -> None:
        x = self.normal(3, 5, 8)
        padding = np.array([[False] * 5, [False] * 3 + [True] * 2, [True] + [False] * 4])
        for options in (
            {}, {"norm_first": True}, {"activation": "gelu", "batch_first": True},
            {"norm_first": True, "activation": "gelu", "batch_first": True},
        ):  # fmt: skip
            given = dict(dropout=0.0, **options)
            x = x if options.get("batch_first") else x.swapaxes(0, 1).copy()
            ours = nn.TransformerEncoderLayer(8, 2, 16, **given)
            theirs = there.TransformerEncoderLayer(8, 2, 16, **given)
            x = self.normal(*((3, 5, 8) if options.get("batch_first") else (5, 3, 8)))
            batch = 0 if options.get("batch_first") else 1
            self.compare(ours, theirs, x, batch=batch)
            self.compare(
                ours, theirs, x, batch=batch,
                named={"causal": True, "key_padding_mask": padding & (np.arange(5) > 0)},
                their_named={"src_mask": CAUSAL,
                             "src_key_padding_mask": padding & (np.arange(5) > 0)},
            )  # fmt: skip

    def test_a_block_is_a_layer_with_other_options(self) -> None:
        theirs = there.TransformerEncoderLayer(
            8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.compare(nn.TransformerBlock(8, 2), theirs, self.normal(3, 5, 8))
        self.compare(
            nn.TransformerBlock(8, 2, causal=True), theirs, self.normal(3, 5, 8),
            their_named={"src_mask": CAUSAL},
        )  # fmt: skip

    # ---- norms ----
    def test_norms(self) -> None:
        plane, line, rows = self.normal(4, 6, 3, 5), self.normal(4, 6, 7), self.normal(5, 6)
        for ours, theirs, x in (
            (nn.BatchNorm1d(6), there.BatchNorm1d(6), rows),
            (nn.BatchNorm1d(6), there.BatchNorm1d(6), line),
            (nn.BatchNorm1d(6).eval(), there.BatchNorm1d(6).eval(), rows),
            (nn.GroupNorm(3, 6), there.GroupNorm(3, 6), plane),
            (nn.GroupNorm(2, 6, 1e-3), there.GroupNorm(2, 6, 1e-3), line),
            (nn.GroupNorm(1, 6, affine=False), there.GroupNorm(1, 6, affine=False), plane),
            (nn.InstanceNorm2d(6), there.InstanceNorm2d(6), plane),
            (nn.InstanceNorm2d(6, affine=True), there.InstanceNorm2d(6, affine=True), plane),
            (nn.InstanceNorm1d(6), there.InstanceNorm1d(6), line),
            (nn.InstanceNorm1d(6, affine=True), there.InstanceNorm1d(6, affine=True), line),
            (nn.RMSNorm(6), there.RMSNorm(6, eps=1e-5), rows),
            (nn.RMSNorm((3, 5), 0.1), there.RMSNorm((3, 5), 0.1), plane),
        ):  # fmt: skip
            self.compare(ours, theirs, x, batch=0)

    # ---- sequences and images ----
    def test_sequences(self) -> None:
        x = self.normal(2, 4, 11)
        for args in (
            (4, 6, 3), (4, 6, 3, 2, 1), (4, 6, 2, 1, 0, 3, 2), (4, 6, 3, 1, "same"),
            (4, 2, 1, 1, 0, 1, 1, False),
        ):  # fmt: skip
            self.compare(nn.Conv1d(*args), there.Conv1d(*args), x, batch=0)
        for args in ((2,), (3, 2), (3, 2, 1), (3, 2, 1, True)):
            self.compare(
                nn.MaxPool1d(*args), there.MaxPool1d(*args[:3], ceil_mode=len(args) > 3), x
            )
            self.compare(nn.AvgPool1d(*args), there.AvgPool1d(*args), x, batch=0)

    def test_images(self) -> None:
        x = self.normal(2, 8, 4, 6)
        for ours, theirs in (
            (nn.Upsample(scale=2), there.Upsample(scale_factor=2)),
            (nn.Upsample((5, 9)), there.Upsample((5, 9), mode="nearest-exact")),
            (nn.Upsample(scale=3, mode="bilinear"),
             there.Upsample(scale_factor=3, mode="bilinear")),
            (nn.Upsample(7, mode="bilinear", align_corners=True),
             there.Upsample(7, mode="bilinear", align_corners=True)),
            (nn.PixelShuffle(2), there.PixelShuffle(2)),
            (nn.PixelUnshuffle(2), there.PixelUnshuffle(2)),
            (nn.Identity(), there.Identity()),
            (nn.Unflatten(1, (2, -1)), there.Unflatten(1, (2, -1))),
            (nn.Unflatten(-1, (3, 2)), there.Unflatten(-1, (3, 2))),
        ):  # fmt: skip
            self.compare(ours, theirs, x, batch=0)

    def test_embedding(self) -> None:
        tokens = np.array([[1, 5, 2], [0, 2, 2]])
        for padding in (None, 2):
            ours, theirs = nn.Embedding(6, 3, padding), there.Embedding(6, 3, padding)
            self.compare(ours, theirs, tokens)


@needs_torch
class NumpyLayers(AgainstTorch, unittest.TestCase):
    ctx = None


CpuAgainstTorch, GpuAgainstTorch = map(needs_torch, on_native_devices(AgainstTorch))

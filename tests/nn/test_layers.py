"""Every layer against a formula of its own, on every device; dropout's masks; a deep model that
learns.
"""

from __future__ import annotations

import math
import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.errors import GraphError
from dlsys.runtime.device import Context
from support.devices import on_native_devices


class Layers:
    ctx: Context | None = None

    def setUp(self) -> None:
        self.rng = np.random.default_rng(0)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def run_layer(self, layer: Any, x: np.ndarray) -> np.ndarray:
        node = ad.Variable("x", dtype=x.dtype)
        return ad.Executor([layer(node)], self.ctx).run({node: x}, True)[0]

    def check(self, layer: Any, x: np.ndarray, expected: np.ndarray) -> None:
        with self.subTest(layer=repr(layer)):
            found = self.run_layer(layer, x)
            self.assertEqual(found.shape, expected.shape)
            scale = np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6 * scale)

    def test_linear(self) -> None:
        for shape in ((5, 4), (2, 3, 4)):
            for bias in (True, False):
                layer, x = nn.Linear(4, 3, bias, rng=1), self.normal(*shape)
                expected = np.einsum("...i,oi->...o", x, layer.weight.asnumpy())
                if bias:
                    layer.bias.set(self.normal(3))
                    expected = expected + layer.bias.asnumpy()
                self.check(layer, x, expected)

    def test_conv2d(self) -> None:
        layer, x = nn.Conv2d(4, 6, (2, 3), 2, (1, 0), groups=2, rng=1), self.normal(2, 4, 5, 7)
        layer.bias.set(self.normal(6))
        w, padded = layer.weight.asnumpy(), np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)))
        expected = np.empty((2, 6, 3, 3))
        for o in range(6):
            part = padded[:, 2 * (o // 3) : 2 * (o // 3) + 2]
            for i in range(3):
                for j in range(3):
                    seen = part[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 3]
                    expected[:, o, i, j] = (seen * w[o]).sum((1, 2, 3)) + layer.bias.asnumpy()[o]
        self.check(layer, x, expected)

    def test_conv_transpose2d(self) -> None:
        layer = nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2, rng=1)
        layer.bias.set(self.normal(6))
        x, w = self.normal(2, 4, 3, 4), layer.weight.asnumpy()
        spread = np.zeros((2, 6, 3 * 2 + 2, 4 * 2 + 2))
        for c in range(4):
            outputs = slice(3 * (c // 2), 3 * (c // 2) + 3)
            for i in range(3):
                for j in range(4):
                    at = spread[:, outputs, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
                    at += x[:, c, i, j][:, None, None, None] * w[c]
        expected = spread[:, :, 1:7, 1:9] + layer.bias.asnumpy()[:, None, None]
        self.check(layer, x, expected)

    def test_embedding(self) -> None:
        layer = nn.Embedding(6, 3, rng=1)
        numbers = np.array([[1, 5], [0, 1]], np.int64)
        self.check(layer, numbers, layer.weight.asnumpy()[numbers])

    def test_mixture_of_experts(self) -> None:
        """As a loop over rows, of which some experts get many and one none."""
        layer, x = nn.MixtureOfExperts(6, 10, 5, rng=1), self.normal(40, 6)
        gate = layer.gate.weight.asnumpy().copy()
        gate[3] = -gate[2]
        gate[2] = 2 * gate[0]  # less likely than expert 0 or as unlikely as it
        gate[4] = 1.5 * gate[0]
        layer.gate.weight.set(gate)
        up, down = layer.up.asnumpy(), layer.down.asnumpy()
        weights = np.exp(x @ gate.T)
        chosen, likeliest = weights.argmax(1), weights.max(1) / weights.sum(1)
        self.assertIn(0, np.bincount(chosen, minlength=5))
        expected = [
            p * (down[k] @ np.maximum(up[k] @ row, 0)) for k, p, row in zip(chosen, likeliest, x)
        ]
        self.check(layer, x, np.array(expected))

    def test_experts_learn_what_one_layer_cannot(self) -> None:
        """Rows of four kinds, each turned by a matrix of its own."""
        kinds = np.arange(64) % 4
        turns = np.linalg.qr(self.rng.standard_normal((4, 8, 8)))[0].astype(np.float32)
        rows = self.normal(64, 8) + 4 * np.eye(4, 8, dtype=np.float32)[kinds]
        wanted = np.einsum("mk,mkn->mn", rows, turns[kinds])
        model = nn.MixtureOfExperts(8, 32, 4, rng=0)
        x, y = ad.Variable("x"), ad.Variable("y")
        loss = ad.mean_squared_error(model(x), y)
        update = optim.Adam(lr=0.01).minimize(loss, model.parameters())
        step = ad.Executor([loss, update], self.ctx)
        before = model.state_dict()
        losses = [float(step.run({x: rows, y: wanted}, True)[0]) for _ in range(60)]
        self.assertLess(losses[-1], 0.1 * losses[0])
        for name, value in model.state_dict().items():
            self.assertTrue((value != before[name]).any(), name)

    def test_shapes(self) -> None:
        x = self.normal(2, 3, 4, 5)
        self.check(nn.Flatten(), x, x.reshape(2, 60))
        self.check(nn.Flatten(2), x, x.reshape(2, 3, 20))
        self.check(nn.Reshape(5, 12), x, x.reshape(2, 5, 12))

    def test_pooling(self) -> None:
        x = self.normal(2, 3, 4, 6)
        windows = x.reshape(2, 3, 2, 2, 3, 2)
        self.check(nn.MaxPool2d(2), x, windows.max((3, 5)))
        self.check(nn.AvgPool2d(2), x, windows.mean((3, 5)))
        self.check(nn.MaxPool2d((4, 1), 1), x, x.max(2, keepdims=True))
        corners = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        summed = sum(corners[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1))
        counts = sum(np.pad(np.ones((4, 6)), 1)[i::2, j::2] for i in (0, 1) for j in (0, 1))
        self.check(nn.AvgPool2d(2, padding=1), x, summed / 4)
        self.check(nn.AvgPool2d(2, padding=1, count_include_pad=False), x, summed / counts)
        self.check(nn.GlobalAvgPool(), x, x.mean((2, 3)))
        self.check(nn.GlobalMaxPool(keepdims=True), x, x.max((2, 3), keepdims=True))

    def test_activations(self) -> None:
        x = 3 * self.normal(4, 50)
        sigmoid, e = 1 / (1 + np.exp(-x)), np.exp(x)
        hard = np.clip(x + 3, 0, 6) / 6
        phi = np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)))(x.astype(float))
        tanh_phi = 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        for layer, expected in (
            (nn.ReLU(), np.maximum(x, 0)),
            (nn.ReLU6(), np.clip(x, 0, 6)),
            (nn.LeakyReLU(0.2), np.where(x > 0, x, 0.2 * x)),
            (nn.ELU(0.7), np.where(x > 0, x, 0.7 * np.expm1(x))),
            (nn.GELU(), x * phi),
            (nn.GELU(approximate=True), x * tanh_phi),
            (nn.SiLU(), x * sigmoid),
            (nn.Softplus(), np.log1p(e)),
            (nn.HardSigmoid(), hard),
            (nn.HardSwish(), x * hard),
            (nn.Sigmoid(), sigmoid),
            (nn.Tanh(), np.tanh(x)),
            (nn.Softmax(), e / e.sum(-1, keepdims=True)),
            (nn.LogSoftmax(), x - np.log(e.sum(-1, keepdims=True))),
            (nn.Softmax(axis=0), e / e.sum(0, keepdims=True)),
            (nn.LogSoftmax(axis=0), x - np.log(e.sum(0, keepdims=True))),
        ):
            self.check(layer, x, expected)

    def test_containers(self) -> None:
        x = self.normal(3, 4)
        self.check(nn.Sequential(nn.Tanh(), ad.relu_op), x, np.maximum(np.tanh(x), 0))
        self.check(nn.Residual(nn.Tanh()), x, x + np.tanh(x))
        self.check(nn.Residual(nn.Tanh(), nn.ReLU()), x, np.maximum(x, 0) + np.tanh(x))
        self.check(nn.Sequential(), x, x)

    def test_layer_norm(self) -> None:
        for shape in (5, (4, 5)):
            layer, x = nn.LayerNorm(shape, eps=0.1), 3 * self.normal(3, 4, 5) + 1
            layer.weight.set(self.normal(*layer.weight.shape))
            layer.bias.set(self.normal(*layer.weight.shape))
            axes = tuple(range(-len(layer.weight.shape), 0))
            centered = x - x.mean(axes, keepdims=True)
            scaled = centered / np.sqrt(x.var(axes, keepdims=True) + 0.1)
            self.check(layer, x, scaled * layer.weight.asnumpy() + layer.bias.asnumpy())

    def test_batch_norm(self) -> None:
        layer, x = nn.BatchNorm2d(3, eps=0.1, momentum=0.2), 3 * self.normal(4, 3, 2, 5) + 1
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
        node = ad.Variable("x")
        y = layer(node)
        update = optim.SGD(lr=0.0).minimize(ad.sum_op(y), layer.parameters())
        found, _ = ad.Executor([y, update], self.ctx).run({node: x}, True)
        column = (slice(None), None, None)
        expected = (x - mean[column]) / np.sqrt(variance + 0.1)[column]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        running = 0.2 * mean, 0.8 + 0.2 * variance * 40 / 39  # of a sample: over n - 1
        np.testing.assert_allclose(layer.running_mean.asnumpy(), running[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(layer.running_var.asnumpy(), running[1], rtol=1e-5)
        kept = layer.state_dict()
        expected = (x - running[0][column]) / np.sqrt(running[1] + 0.1)[column]
        self.check(layer.eval(), x, expected)
        for name, value in layer.state_dict().items():
            np.testing.assert_array_equal(value, kept[name], name)

    def test_batch_norm_twice_in_a_training_graph_is_refused(self) -> None:
        layer, x = nn.BatchNorm2d(3), ad.Variable("x")
        twice = ad.sum_op(layer(layer(x)))
        with self.assertRaisesRegex(GraphError, "running_mean"):
            update = optim.SGD(lr=0.1).minimize(twice, layer.parameters())
            ad.Executor([update], self.ctx).run({x: self.normal(2, 3, 4, 4)})

    # ---- dropout ----
    def masks(self, layer: Any, steps: int) -> list[np.ndarray]:
        """The ones that dropout keeps in consecutive training steps of a graph made now."""
        x, w = ad.Variable("x"), ad.Parameter(np.ones((), np.float32))
        y = layer(x * w)
        update = optim.SGD(lr=0.0).minimize(ad.sum_op(y), [w])
        step = ad.Executor([y, update], self.ctx)
        return [step.run({x: np.ones((40, 50), np.float32)}, True)[0] for _ in range(steps)]

    def test_dropout_scales_what_it_keeps(self) -> None:
        (y,) = self.masks(nn.Dropout(0.2, rng=0), 1)
        self.assertEqual(set(np.unique(y)), {np.float32(0), np.float32(1.25)})
        self.assertAlmostEqual((y > 0).mean(), 0.8, delta=0.05)
        x = self.normal(3, 4)
        self.check(nn.Dropout(0.0), x, x)
        self.check(nn.Dropout(0.9).eval(), x, x)

    def test_steps_differ_and_layers_differ(self) -> None:
        rng = np.random.default_rng(0)
        drawn = [*self.masks(nn.Dropout(rng=rng), 3), *self.masks(nn.Dropout(rng=rng), 1)]
        for k, a in enumerate(drawn):
            for b in drawn[:k]:
                self.assertAlmostEqual((a == b).mean(), 0.5, delta=0.1)

    def test_graphs_built_twice_draw_alike(self) -> None:
        layer, x = nn.Dropout(rng=0), np.ones((20, 20), np.float32)
        np.testing.assert_array_equal(self.run_layer(layer, x), self.run_layer(layer, x))

    def test_models_of_one_seed_draw_alike_on_every_device(self) -> None:
        found = self.masks(nn.Dropout(rng=3), 2)
        reference = Layers.masks(NumpyLayers(), nn.Dropout(rng=3), 2)
        np.testing.assert_array_equal(found, reference)

    def test_a_loaded_state_goes_on_where_it_was(self) -> None:
        first = nn.Dropout(rng=0)
        expected = self.masks(first, 4)
        stopped = nn.Dropout(rng=0)
        self.masks(stopped, 2)
        state = stopped.state_dict()
        self.assertEqual(state["step"], 2)
        resumed = nn.Dropout(rng=9)
        resumed.load_state_dict(state)
        np.testing.assert_array_equal(self.masks(resumed, 2), expected[2:])

    # ---- training ----
    def test_every_parameter_of_a_deep_model_learns(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, rng=0), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Residual(nn.Conv2d(4, 4, 3, padding=1, rng=1)), nn.MaxPool2d(2),
            nn.ConvTranspose2d(4, 3, 2, 2, rng=2), nn.GELU(), nn.Flatten(),
            nn.Linear(108, 16, rng=3), nn.LayerNorm(16), nn.Dropout(0.1, rng=4), nn.Tanh(),
            nn.Linear(16, 3, rng=5),
        )  # fmt: skip
        x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
        loss = ad.softmax_cross_entropy(model(x), y)
        update = optim.SGD(lr=0.1, momentum=0.9).minimize(loss, model.parameters())
        step = ad.Executor([loss, update], self.ctx)
        labels = np.arange(24) % 3
        images = self.normal(24, 1, 6, 6) + labels.astype(np.float32)[:, None, None, None]
        feeds = {x: images, y: labels}
        before = model.state_dict()
        losses = [float(step.run(feeds, True)[0]) for _ in range(20)]
        self.assertLess(losses[-1], 0.3 * losses[0])
        for name, value in model.state_dict().items():
            if not name.endswith("key"):
                self.assertTrue((value != before[name]).any(), name)
        logits = self.run_layer(model.eval(), images)
        self.assertGreater((logits.argmax(1) == labels).mean(), 0.9)
        model.to(None)
        np.testing.assert_allclose(
            NumpyLayers().run_layer(model, images), logits, rtol=1e-3, atol=1e-4
        )


class NumpyLayers(Layers, unittest.TestCase):
    ctx = None


CpuLayers, GpuLayers = on_native_devices(Layers)

"""The ready models: what they are made of, that they learn, what the perceptron can and cannot."""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.errors import GraphError, ShapeError
from dlsys.runtime.device import Context, gpu
from support.devices import EMULATED, on_native_devices


def separable(rng: np.random.Generator, count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Points in the plane on both sides of a random line, none nearer than 0.1."""
    angle, offset = rng.uniform(0, 2 * np.pi), rng.uniform(-0.5, 0.5)
    points = rng.uniform(-2, 2, (4 * count, 2)).astype(np.float32)
    distances = points @ np.array([np.cos(angle), np.sin(angle)]) + offset
    kept = np.flatnonzero(np.abs(distances) > 0.1)[:count]
    return points[kept], (distances[kept] > 0).astype(np.int64)


def block_names(convolutions: int, downsample: bool) -> list[str]:
    """The names of a torchvision block's state."""
    norm = ("weight", "bias", "running_mean", "running_var")
    found = []
    for k in range(1, convolutions + 1):
        found += [f"conv{k}.weight", *(f"bn{k}.{name}" for name in norm)]
    if downsample:
        found += ["downsample.0.weight", *(f"downsample.1.{name}" for name in norm)]
    return found


class Architectures(unittest.TestCase):
    def test_counts_of_parameters(self) -> None:
        for model, count in (
            (nn.Perceptron(), 3),
            (nn.LogisticRegression(784, 10), 7850),
            (nn.MLP((784, 256, 10)), 203_530),
            (nn.LeNet5(), 61_706),
            (nn.ResNetMNIST(), 463_594),
            (nn.ResNet18(), 11_689_512),
            (nn.ResNet50(), 25_557_032),
        ):
            self.assertEqual(sum(w.asnumpy().size for w in model.parameters()), count, model)

    def test_names_of_the_resnets_are_torchvisions(self) -> None:
        for model, depths, convolutions in (
            (nn.ResNet18(10), (2, 2, 2, 2), 2),
            (nn.ResNet50(10), (3, 4, 6, 3), 3),
        ):
            expected = ["conv1.weight", *(name for name in block_names(1, False) if "bn" in name)]
            for stage, depth in enumerate(depths, 1):
                for k in range(depth):
                    changes = k == 0 and (stage > 1 or convolutions == 3)
                    names = block_names(convolutions, changes)
                    expected += [f"layer{stage}.{k}.{name}" for name in names]
            expected += ["fc.weight", "fc.bias"]
            self.assertEqual(sorted(model.state_dict()), sorted(expected))

    def test_sizes_of_the_resnets(self) -> None:
        for model, operations in ((nn.ResNet18(), 3.6e9), (nn.ResNet50(), 8.2e9)):
            found = model.summary((1, 3, 224, 224))
            planes = {row.name: row.shape for row in found.rows}
            width = planes["layer1"][1]
            for k, extent in enumerate((56, 28, 14, 7)):
                shape = (1, width * 2**k, extent, extent)
                self.assertEqual(planes[f"layer{k + 1}"], shape)
            self.assertEqual(planes[""], (1, 1000))
            self.assertAlmostEqual(found.operations / operations, 1, delta=0.03)

    def test_resnets_take_other_channels_and_classes(self) -> None:
        found = nn.ResNet18(7, channels=1).summary((2, 1, 40, 40))
        self.assertEqual(found.rows[0].shape, (2, 7))

    def test_mlp(self) -> None:
        model = nn.MLP((8, 6, 5, 3), activation=nn.Tanh, dropout=0.5)
        kinds = [type(layer).__name__ for layer in model]
        self.assertEqual(kinds, ["Flatten", *["Linear", "Tanh", "Dropout"] * 2, "Linear"])
        self.assertEqual(len(nn.MLP((8, 3))), 2)
        with self.assertRaisesRegex(GraphError, "at least two sizes"):
            nn.MLP((8,))

    def test_seeds(self) -> None:
        for make in (
            lambda seed: nn.MLP((20, 10, 5), dropout=0.1, seed=seed),
            lambda seed: nn.LeNet5(seed=seed),
            lambda seed: nn.ResNetMNIST(seed=seed),
            lambda seed: nn.ResNet18(10, seed=seed),
        ):
            first, same, other = (make(seed).state_dict() for seed in (1, 1, 2))
            for name, value in first.items():
                np.testing.assert_array_equal(value, same[name])
                if value.ndim > 1:
                    self.assertTrue((value != other[name]).any(), name)

    def test_layers_of_a_model_draw_different_numbers(self) -> None:
        first, second = (nn.MLP((6, 6, 6, 6), seed=0)[k].weight.asnumpy() for k in (1, 3))
        self.assertTrue((first != second).all())


class Boundary(unittest.TestCase):
    def perceptron(self, *numbers: float) -> nn.Perceptron:
        model = nn.Perceptron()
        model.linear.weight.set(np.array([numbers[:2]], np.float32))
        model.linear.bias.set(np.array(numbers[2:], np.float32))
        return model

    def test_its_ends_are_on_the_line_and_on_the_box(self) -> None:
        low, high = np.array([-1, -2]), np.array([3, 1])
        for numbers in ((1, 2, 0.5), (-3, 0.1, 2), (1, 0, -2), (0, -2, 1), (2, 2, 4)):
            with self.subTest(line=numbers):
                ends = self.perceptron(*numbers).boundary(low, high)
                self.assertEqual(ends.shape, (2, 2))
                np.testing.assert_allclose(ends @ numbers[:2] + numbers[2], 0, atol=1e-6)
                self.assertTrue((ends >= low - 1e-6).all() and (ends <= high + 1e-6).all())
                for end in ends:
                    self.assertLess(np.abs([end - low, end - high]).min(), 1e-6)
                self.assertGreater(np.abs(ends[0] - ends[1]).max(), 0.5)

    def test_it_may_miss_the_box_or_not_be(self) -> None:
        for numbers in ((1, 1, 9), (1, 0, 5), (0, 1, -5), (0, 0, 1)):
            self.assertIsNone(self.perceptron(*numbers).boundary(-1, 1), numbers)
        with self.assertRaisesRegex(GraphError, "needs 2 inputs, the perceptron has 3"):
            nn.Perceptron(3).boundary(-1, 1)

    def test_prediction_and_separation(self) -> None:
        model = self.perceptron(1, -1, 0.5)
        points = np.array([[0, 0], [0, 1], [2, 1]], np.float32)
        labels = model.predict(points)
        self.assertEqual((labels.tolist(), labels.dtype), ([1, 0, 1], np.int64))
        self.assertTrue(model.separates(points, [1, 0, 1]))
        self.assertFalse(model.separates(points, [1, 1, 1]))
        normal, offset = model.line()
        self.assertEqual((normal.tolist(), offset), ([1, -1], 0.5))
        with self.assertRaisesRegex(ShapeError, r"expected points \(N, 2\), got \(2,\)"):
            model.predict([0, 1])


class Learning:
    ctx: Context | None = None

    def step(self, model: Any, loss: Any, x: ad.Node, lr: float, momentum: float = 0.0) -> Any:
        """A function of images and labels that makes a step and returns the loss."""
        y = ad.Variable("y", shape=(None,), dtype=np.int64)
        value = loss(model(x), y)
        update = optim.SGD(lr=lr, momentum=momentum).minimize(value, model.parameters())
        executor = ad.Executor([value, update], self.ctx)
        return lambda images, labels: float(executor.run({x: images, y: labels}, True)[0])

    def test_a_perceptron_separates_what_a_line_separates(self) -> None:
        for seed in range(3):
            points, labels = separable(np.random.default_rng(seed))
            model = nn.Perceptron()
            self.assertFalse(model.separates(points, labels))
            x = ad.Variable("x", shape=(None, 2), dtype=np.float32)
            step = self.step(model, model.loss, x, lr=0.5)
            steps = 0
            while not model.separates(points, labels):
                step(points, labels)
                steps += 1
                self.assertLess(steps, 1000, f"seed {seed}")
            self.assertEqual(step(points, labels), 0)
            ends = model.boundary(points.min(0), points.max(0))
            self.assertIsNotNone(ends)

    def test_a_perceptron_cannot_separate_what_no_line_does(self) -> None:
        points = np.array([[0, 0], [1, 1], [0, 1], [1, 0]], np.float32)
        labels = np.array([0, 0, 1, 1])
        model = nn.Perceptron()
        step = self.step(model, model.loss, ad.Variable("x", dtype=np.float32), lr=0.5)
        for _ in range(200):
            step(points, labels)
            self.assertFalse(model.separates(points, labels))

    def test_the_perceptrons_step_is_its_rule(self) -> None:
        rng = np.random.default_rng(0)
        points, labels = rng.standard_normal((20, 2)).astype(np.float32), rng.integers(0, 2, 20)
        model = nn.Perceptron()
        step = self.step(model, model.loss, ad.Variable("x", dtype=np.float32), lr=0.25)
        w, b, t = np.zeros(2), 0.0, 2 * labels - 1
        for _ in range(3):  # at first every score is 0, and wrong
            margins = t * (points @ w + b)
            wrong = margins <= 0
            loss = step(points, labels)
            self.assertAlmostEqual(loss, -margins[wrong].sum() / 20, places=5)
            w += 0.25 * (t[wrong, None] * points[wrong]).sum(0) / 20
            b += 0.25 * t[wrong].sum() / 20
            np.testing.assert_allclose(model.line()[0], w, rtol=1e-4, atol=1e-6)
            self.assertAlmostEqual(model.line()[1], b, places=5)

    def test_logistic_regression_reaches_the_maximum_of_likelihood(self) -> None:
        """There Σ (softmax - one-hot) · x is 0, and labels have the mean of the predictions."""
        if EMULATED and self.ctx is gpu(0):
            self.skipTest("not here: an emulated GPU, where 200 steps say no more than 20")
        rng = np.random.default_rng(0)
        x = ad.Variable("x", shape=(None, 2, 2), dtype=np.float32)
        images, labels = rng.standard_normal((90, 2, 2)).astype(np.float32), np.arange(90) % 3
        model = nn.LogisticRegression(4, 3)
        step = self.step(model, ad.softmax_cross_entropy, x, lr=2.0)
        self.assertAlmostEqual(step(images, labels), np.log(3), places=5)
        for _ in range(200):
            step(images, labels)
        logits = ad.Executor([model(x)], self.ctx).run({x: images}, True)[0]
        e = np.exp(logits - logits.max(1, keepdims=True))
        wrong = e / e.sum(1, keepdims=True) - np.eye(3)[labels]
        np.testing.assert_allclose(wrong.T @ images.reshape(90, 4) / 90, 0, atol=1e-4)
        np.testing.assert_allclose(wrong.mean(0), 0, atol=1e-4)

    def test_networks_learn_by_heart(self) -> None:
        rng = np.random.default_rng(0)
        images = rng.standard_normal((6, 784)).astype(np.float32)
        labels = np.arange(6)
        for model, lr, steps in (
            (nn.MLP((784, 64, 10), dropout=0.2, seed=0), 0.1, 20),
            (nn.LeNet5(seed=0), 0.02, 20),
            (nn.ResNetMNIST(seed=0), 0.02, 6),
        )[: 2 if EMULATED and self.ctx is gpu(0) else 3]:
            with self.subTest(model=type(model).__name__):
                x = ad.Variable("x", shape=(None, 784), dtype=np.float32)
                step = self.step(model, ad.softmax_cross_entropy, x, lr, momentum=0.9)
                losses = [step(images, labels) for _ in range(steps)]
                self.assertLess(losses[-1], 0.3 * losses[0])

    def test_digits_may_come_in_any_shape(self) -> None:
        flat = np.random.default_rng(0).standard_normal((2, 784)).astype(np.float32)
        for model in (nn.MLP((784, 10)), nn.LeNet5(), nn.ResNetMNIST()):
            found = []
            for shape in ((784,), (28, 28), (1, 28, 28)):
                x = ad.Variable("x", shape=(None, *shape), dtype=np.float32)
                logits = ad.Executor([model.eval()(x)], self.ctx)
                found.append(logits.run({x: flat.reshape(2, *shape)}, True)[0])
            self.assertEqual(found[0].shape, (2, 10))
            np.testing.assert_array_equal(found[0], found[1])
            np.testing.assert_array_equal(found[0], found[2])


class NumpyLearning(Learning, unittest.TestCase):
    ctx = None


CpuLearning, GpuLearning = on_native_devices(Learning)

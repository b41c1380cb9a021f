"""dlsys.micrograd: the program that it is for, on each device, beside the same in numpy."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

from dlsys.eager.device import engine_of
from dlsys.errors import DataError, DeviceError, GraphError, ShapeError
from dlsys.micrograd import MLP, Operations, Tensor
from dlsys.micrograd.mlp import MLP as MLP_of_its_file
from dlsys.ndarray import cpu, gpu
from dlsys.runtime.device import unavailable
from support.devices import require

RATE = 0.01


def samples():
    rng = np.random.default_rng(0)
    return rng.choice([-1.0, 1.0], (12, 7)), rng.choice([-1.0, 1.0], (12, 1))


def trained(device, steps):
    """The losses and the model of the page's loop, and how many programs each step left planned."""
    model, (xs, ys) = MLP(7, [6, 1], seed=3), samples()
    xs_batch, ys_batch = Tensor(xs.tolist()).T, Tensor(ys.tolist()).T
    model.to(device)
    xs_batch.to(device)
    ys_batch.to(device)
    losses, planned = [], []
    for _ in range(steps):
        ypred = model(xs_batch)
        diff = ypred - ys_batch
        loss = (diff**2).sum()
        for p in model.parameters():
            p.grad.data, _ = Operations(p.device).zeros_matrix_like(shape=p.shape)
        loss.backward()
        for p in model.parameters():
            p.data, _ = Operations(p.device).matrix_add(
                Operations(p.device).matrix_scalar_mul(-RATE, p.grad.data, shape=p.shape),
                p.data,
                shape=p.shape,
            )
        losses.append(loss)
        planned.append(len(engine_of(device)._programs))
    for loss in losses:
        loss.to("numpy")
    return [loss.data[0][0] for loss in losses], model, planned


def by_hand(steps):
    """The same losses in numpy."""
    (w1, b1, w2, b2), (xs, ys) = (
        [np.array(p.data) for p in MLP(7, [6, 1], seed=3).parameters()],
        samples(),
    )
    losses = []
    for _ in range(steps):
        h = np.tanh(w1 @ xs.T + b1)
        y = np.tanh(w2 @ h + b2)
        losses.append(((y - ys.T) ** 2).sum())
        dz = 2 * (y - ys.T) * (1 - y**2)
        dh = w2.T @ dz * (1 - h**2)
        w2, b2 = w2 - RATE * dz @ h.T, b2 - RATE * dz.sum(1, keepdims=True)
        w1, b1 = w1 - RATE * dh @ xs, b1 - RATE * dh.sum(1, keepdims=True)
    return losses


class Micrograd:
    device = "numpy"

    def test_the_loop_of_the_page(self):
        losses, _, planned = trained(self.device, 8)
        np.testing.assert_allclose(losses, by_hand(8), rtol=1e-5)
        self.assertEqual(planned[3:], planned[3:4] * 5)

    def test_each_step_is_one_run(self):
        engine, runs = engine_of(self.device), []
        run = engine.run
        engine.run = lambda tape, *args: runs.append(tape.states) or run(tape, *args)
        try:
            trained(self.device, 2)
            before = len(runs)
            trained(self.device, 8)
            more = len(runs) - before
        finally:
            del engine.run
        self.assertLessEqual(more - before, 6)

    def test_operators(self):
        a, b = np.array([[1.0, 2.0], [3.0, 5.0]]), np.array([[2.0, 4.0], [8.0, 1.0]])
        x, y = Tensor(a, self.device), Tensor(b, self.device)
        for made, expected in (
            (x + y, a + b),
            (1 - x, 1 - a),
            (x * y, a * b),
            (x @ y, a @ b),
            (x.T, a.T),
            (x / y, a / b),
            (2 / x, 2 / a),
            (-(x**2), -(a**2)),
            (x.mean(), [[a.mean()]]),
            ((-x).relu(), np.zeros((2, 2))),
            (x.exp().log(), a),
        ):
            np.testing.assert_allclose(made.data, expected, rtol=1e-5)
        self.assertEqual((x + y).data, (a + b).tolist())

    def test_gradients_add_up(self):
        x = Tensor([[2.0, 3.0]], self.device)
        self.assertEqual(x.grad.data, [[0.0, 0.0]])
        (x * x).sum().backward()
        (x * 1.0).sum().backward()
        self.assertEqual(x.grad.data, [[5.0, 7.0]])

    def test_operations(self):
        ops, a = Operations(self.device), [[1.0, 2.0, 3.0]]
        self.assertEqual(ops.ones_matrix_like(shape=(1, 2)), ([[1.0, 1.0]], (1, 2)))
        self.assertEqual(ops.zeros_matrix_like(a), ([[0.0, 0.0, 0.0]], (1, 3)))
        self.assertEqual(ops.matrix_subtract(a, a)[0], [[0.0, 0.0, 0.0]])
        self.assertEqual(ops.matrix_elementwise_mul(a, a)[0], [[1.0, 4.0, 9.0]])
        self.assertEqual(ops.matrix_scalar_add(1, a)[0], [[2.0, 3.0, 4.0]])
        self.assertEqual(
            ops.matrix_multiply(a, ops.matrix_transpose(a), (1, 3)), ([[14.0]], (1, 1))
        )
        self.assertEqual(ops.matrix_sum(ops.matrix_relu(ops.matrix_scalar_mul(-1, a)))[0], [[0.0]])
        np.testing.assert_allclose(ops.matrix_power(a, 3)[0], [[1, 8, 27]], rtol=1e-6)
        np.testing.assert_allclose(ops.matrix_tanh(a)[0], np.tanh(a), rtol=1e-6)
        with self.assertRaisesRegex(ShapeError, r"expected shape \(1, 3\), got shape \(1, 2\)"):
            ops.matrix_add(a, [[1.0, 2.0]])


class Numpy(Micrograd, unittest.TestCase):
    def test_copies_and_files(self):
        model = MLP_of_its_file(2, [3, 1], seed=1)
        other = model.copy()
        before = other.layers[0].weight.data.tolist()
        model.layers[0].weight.data = [[0.0, 0.0]] * 3
        self.assertEqual(other.layers[0].weight.data, before)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "weights"
            other.save(path)
            self.assertEqual(model.load(path).layers[0].weight.data, before)
            with self.assertRaisesRegex(DataError, "expected"):
                MLP(2, [4]).load(path)

    def test_the_cpu_is_numpy_without_a_native_library(self):
        with mock.patch("dlsys.micrograd.tensor._has_native", lambda: False):
            x = Tensor([[1.0]])
            self.assertEqual((x.device, x.to("cpu").device), ("numpy", "numpy"))
            self.assertEqual(Operations("cpu").device, "numpy")

    def test_errors(self):
        with self.assertRaisesRegex(GraphError, r"loss of shape \(1, 1\), got \(1, 2\)"):
            Tensor([[1.0, 2.0]]).backward()
        with self.assertRaises(ShapeError):
            Tensor([[1.0]]).data = [[1.0, 2.0]]
        if unavailable(gpu(0)) is not None:
            with self.assertRaises(DeviceError):
                MLP(2, [1]).to("cuda")


@require(cpu(0))
class Cpu(Micrograd, unittest.TestCase):
    device = "cpu"


@require(gpu(0))
class Gpu(Micrograd, unittest.TestCase):
    device = "cuda"

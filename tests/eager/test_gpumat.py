"""dlsys.gpumat: the program that it is for, its operations, and its layers against numpy."""

from __future__ import annotations

import unittest

import numpy as np

import dlsys as dl
from dlsys import gpumat
from dlsys.errors import ShapeError
from dlsys.gpumat import PyGpuMatrix
from dlsys.ndarray import cpu, gpu
from support.devices import require


def made(values, device):
    values = np.asarray(values, np.float32)
    return PyGpuMatrix(values, *values.shape, device=device)


class Matrices:
    device = "numpy"

    def test_the_program_of_the_page(self):
        M, N, K = 50, 40, 30
        k = np.ones((M, N), np.float32)
        A = PyGpuMatrix(np.ones((M, K), np.float32), M, K, device=self.device)
        B = PyGpuMatrix(np.ones((K, N), np.float32), K, N, device=self.device)
        C = PyGpuMatrix(k, M, N, device=self.device)
        A.mul(M, N, K, B, C)
        np.testing.assert_array_equal(k, 1)  # the array changes when it is told to
        C.loadFromDevice()
        np.testing.assert_array_equal(k, K)

    def test_operations(self):
        a, b = np.arange(6.0).reshape(2, 3), np.arange(6.0)[::-1].reshape(2, 3)
        A, B = made(a, self.device), made(b, self.device)
        for expected, name, args in (
            (a + b, "add", (2, 3, B)),
            (a - b, "subtract", (2, 3, B)),
            (a * b, "product", (2, 3, B)),
            (a * 2.5, "scale", (2, 3, 2.5)),
            (a.T, "transpose", (2, 3)),
        ):
            with self.subTest(name):
                C = made(np.zeros(expected.shape), self.device)
                getattr(A, name)(*args, C)
                C.loadFromDevice()
                np.testing.assert_array_equal(C.array, expected)
        A.add(2, 3, B, A)  # a result may replace an operand
        A.loadFromDevice()
        np.testing.assert_array_equal(A.array, a + b)

    def test_fills_and_loads(self):
        dl.manual_seed(0)
        A = made(np.zeros((40, 50)), self.device)
        A.random(-2, 3)
        A.loadFromDevice()
        self.assertTrue(-2 <= A.array.min() < -1.5 and 2.5 < A.array.max() < 3)
        A.fill(7)
        A.loadFromDevice()
        self.assertTrue((A.array == 7).all())
        A.array[:] = 5
        A.loadToDevice()
        self.assertTrue((A.tensor.numpy() == 5).all())

    def test_a_layer_learns(self):
        dl.manual_seed(1)
        x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
        y = x @ np.array([[1.0], [-2.0], [0.5]], np.float32)
        layers = [
            gpumat.Linear(3, 16, self.device),
            gpumat.ReLU(),
            gpumat.Linear(16, 1, self.device),
        ]
        x, y, mse, losses = dl.tensor(x, self.device), dl.tensor(y, self.device), gpumat.MSE(), []
        for _ in range(60):
            out = x
            for layer in layers:
                out = layer.forward(out)
            losses.append(float(mse.forward(out, y)))
            gradient = mse.backward()
            for layer in reversed(layers):
                gradient = layer.backward(gradient)
                layer.update(0.1)
        self.assertLess(losses[-1], 0.05 * losses[0])

    def test_convolution_and_pooling(self):
        x = np.arange(32, dtype=np.float32).reshape(1, 2, 4, 4)
        conv = gpumat.Conv2d(2, 1, 3, padding=1, device=self.device)
        y = conv.forward(dl.tensor(x, self.device))
        self.assertEqual(y.shape, (1, 1, 4, 4))
        conv.backward(np.ones(y.shape, np.float32))
        weight, bias = conv.weights
        self.assertEqual(bias.grad.tolist(), [16.0])
        np.testing.assert_allclose(weight.grad.numpy()[0, :, 1, 1], x.sum((0, 2, 3)))
        pooled, mean = gpumat.MaxPool2d(2), gpumat.AvgPool2d(2)
        self.assertEqual(
            pooled.forward(dl.tensor(x, self.device))[0, 0].tolist(), [[5, 7], [13, 15]]
        )
        dx = pooled.backward(np.ones((1, 2, 2, 2), np.float32))
        self.assertEqual(dx[0, 0].tolist()[1], [0, 1, 0, 1])
        self.assertEqual(mean.forward(dl.tensor(x, self.device))[0, 0, 0, 0].item(), 2.5)
        self.assertTrue((mean.backward(np.ones((1, 2, 2, 2), np.float32)).numpy() == 0.25).all())

    def test_layers_and_losses_tell_what_they_are(self):
        layers = [gpumat.Linear(3, 2), gpumat.Conv2d(1, 4, 3), gpumat.MaxPool2d(2), gpumat.ReLU()]
        self.assertEqual(
            [repr(item) for item in (*layers, gpumat.MSE())],
            [
                "Linear((2, 3), (2,))",
                "Conv2d((4, 1, 3, 3), (4,))",
                "MaxPool2d(2, None)",
                "ReLU()",
                "MSE()",
            ],
        )

    def test_losses(self):
        p, t = made([[1, 2, 4, 0]], self.device), made([[0, 2, 1, 1]], self.device)
        for loss, value, gradient in (
            (gpumat.MSE(), 11 / 4, [[0.5, 0, 1.5, -0.5]]),
            (gpumat.MAE(), 5 / 4, [[0.25, 0, 0.25, -0.25]]),
        ):
            self.assertEqual(loss.forward(p, t).item(), value)
            self.assertEqual(loss.backward().tolist(), gradient)


class Numpy(Matrices, unittest.TestCase):
    def test_what_does_not_fit_is_one_sentence(self):
        A, B, C = (made(np.ones(shape), "numpy") for shape in ((2, 3), (4, 5), (2, 5)))
        with self.assertRaisesRegex(ShapeError, "^mul: B is 4 × 5, expected 3 × 5 "):
            A.mul(2, 5, 3, B, C)
        with self.assertRaisesRegex(ShapeError, "^add: C is 2 × 5, expected 2 × 3 "):
            A.add(2, 3, A, C)
        with self.assertRaisesRegex(ShapeError, "needs 6 elements, and the array has 4"):
            PyGpuMatrix(np.ones((2, 2), np.float32), 2, 3)
        with self.assertRaisesRegex(ShapeError, "expected a float32 numpy array, got float64"):
            PyGpuMatrix(np.ones((2, 2)), 2, 2)


@require(cpu(0))
class Cpu(Matrices, unittest.TestCase):
    device = "cpu"


@require(gpu(0))
class Gpu(Matrices, unittest.TestCase):
    device = "gpu"

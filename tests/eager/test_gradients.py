"""Gradients of Tensors: backward, history, no_grad, grad of grad."""

from __future__ import annotations

import unittest

import numpy as np

import dlsys as dl
from dlsys import functional as F
from dlsys import nn
from dlsys.errors import GraphError, ShapeError
from dlsys.ndarray import cpu, gpu
from support.devices import require


class Gradients:
    device = "numpy"

    def leaf(self, data):
        return dl.tensor(data, self.device, requires_grad=True)

    def assert_is(self, tensor, values):
        np.testing.assert_allclose(tensor.numpy(), values, rtol=1e-5)

    def test_backward_leaves_the_gradient(self):
        x, y = self.leaf([1.0, 2.0, 3.0]), self.leaf([4.0, 5.0, 6.0])
        (x * y + x).sum().backward()
        self.assert_is(x.grad, [5, 6, 7])
        self.assert_is(y.grad, [1, 2, 3])

    def test_gradients_add_up(self):
        x = self.leaf([1.0, 2.0])
        for k in range(3):
            (x * x).sum().backward()
            self.assert_is(x.grad, np.float32([2, 4]) * (k + 1))
        x.grad = None
        (x * 3).sum().backward()
        self.assert_is(x.grad, [3, 3])

    def test_a_gradient_may_be_given(self):
        x = self.leaf([1.0, 2.0])
        y = x * x
        with self.assertRaisesRegex(GraphError, r"shape \(2,\) needs the gradient"):
            y.backward()
        with self.assertRaisesRegex(ShapeError, r"has shape \(3,\), expected \(2,\)"):
            y.backward(dl.ones(3, device=self.device))
        y.backward(dl.tensor([1.0, 10.0], self.device))
        self.assert_is(x.grad, [2, 40])

    def test_a_history_is_there_once_unless_it_is_retained(self):
        x = self.leaf([1.0, 2.0])
        y = (x * x).sum()
        y.backward(retain_graph=True)
        y.backward()
        self.assert_is(x.grad, [4, 8])
        with self.assertRaisesRegex(GraphError, "taken already; pass retain_graph=True"):
            y.backward()
        with self.assertRaisesRegex(GraphError, "nothing that it was computed from requires one"):
            dl.ones(1, device=self.device).backward()

    def test_looking_at_values_changes_no_gradient(self):
        x = self.leaf([1.0, 2.0])
        y = x * x
        y.numpy()
        z = (y * x).sum()
        self.assertEqual(z.item(), 9.0)
        z.backward()
        self.assert_is(x.grad, [3, 12])

    def test_a_value_of_one_tape_goes_into_another(self):
        x = self.leaf([1.0, 2.0])
        y = x * x
        y.numpy()  # the tape ends here
        a = (y * 2).sum()
        a.backward()
        self.assert_is(x.grad, [4, 8])

    def test_what_changed_since_has_no_gradient(self):
        layer = nn.Linear(2, 1, rng=0)
        x = dl.tensor([[1.0, 2.0]], self.device)
        y = layer(x) * layer(x)
        y.numpy()
        layer.weight.set(np.zeros((1, 2), np.float32))
        with self.assertRaisesRegex(GraphError, "weight was changed since"):
            y.sum().backward()
        w = self.leaf([1.0])
        z = w * w
        z.numpy()
        with dl.no_grad():
            w += 1
        with self.assertRaisesRegex(GraphError, "changed in place since"):
            z.backward()

    def test_no_grad_and_detach(self):
        x = self.leaf([1.0, 2.0])
        with dl.no_grad():
            y = x * x
            with dl.enable_grad():
                z = x * 3
        self.assertFalse(y.requires_grad)
        self.assertTrue(z.requires_grad)
        ((x * x).detach() * x + y * x).sum().backward()
        self.assert_is(x.grad, [2, 8])

        @dl.no_grad()
        def f(t):
            return t * 2

        self.assertFalse(f(x).requires_grad)

    def test_leaves_change_in_place_without_gradients_only(self):
        w = self.leaf([1.0, 2.0])
        with self.assertRaisesRegex(GraphError, "only inside no_grad"):
            w += 1
        for _ in range(3):
            loss = (w * w).sum()
            loss.backward()
            with dl.no_grad():
                w -= 0.25 * w.grad
            w.grad = None
        self.assertTrue(w.requires_grad and w.is_leaf)
        self.assert_is(w, [0.125, 0.25])

    def test_gradients_go_through_indexing_and_assignment(self):
        x = self.leaf(np.arange(6, dtype=np.float32).reshape(2, 3))
        (x[:, 1] * 2 + x[1, ::2].sum() + x[[0, 0, 1], [2, 2, 0]].sum()).sum().backward()
        self.assert_is(x.grad, [[0, 2, 4], [4, 2, 2]])
        y = self.leaf([1.0, 2.0, 3.0])
        z = y * 1
        z[1] = z[0] * 5
        z[y > 2] = 7.0
        (z * dl.tensor([1.0, 10.0, 100.0], self.device)).sum().backward()
        self.assert_is(y.grad, [51, 0, 0])

    def test_gradients_through_views_changed_in_place(self):
        x = self.leaf([[1.0, 2.0], [3.0, 4.0]])
        y = x * 1
        y.T[0] *= 3
        (y * y).sum().backward()
        self.assert_is(x.grad, [[18, 4], [54, 8]])

    def test_grad_has_a_gradient(self):
        def f(t):
            return (t**3).sum()

        x = dl.tensor([1.0, 2.0], self.device)
        self.assert_is(dl.grad(f)(x), [3, 12])
        self.assert_is(dl.grad(lambda t: dl.grad(f)(t).sum())(x), [6, 12])
        value, both = dl.value_and_grad(lambda a, b: (a * b).sum(), (0, 1))(x, x + 1)
        self.assertEqual(value.item(), 8.0)
        self.assert_is(both[0], [2, 3])
        self.assert_is(both[1], [1, 2])
        with self.assertRaisesRegex(GraphError, "argument 0 is float, expected a Tensor"):
            dl.grad(f)(1.0)
        with self.assertRaisesRegex(GraphError, r"returned a Tensor of float32 \(2,\)"):
            dl.grad(lambda t: t * 2)(x)

    def test_a_penalty_on_a_gradient_reaches_the_weights(self):
        layer = nn.Linear(3, 1, bias=False, rng=0)
        layer.weight.set(np.float32([[1, 2, 3]]))
        x = dl.ones(4, 3, device=self.device)
        gradients = dl.grad(lambda t: (layer(t) ** 2).sum())(x)  # 2 (x·w) w = 12 w
        (gradients**2).sum().backward()
        w = np.float32([1, 2, 3])
        # d/dw of 4 · |2 (1·w) w|² = 16 (s² w·w), s = Σ w
        s, n = w.sum(), (w**2).sum()
        wanted = 16 * (2 * s * n * np.ones(3) + s**2 * 2 * w)
        self.assert_is(layer.weight.grad, [wanted])

    def test_gradients_of_parameters_alone(self):
        p = dl.Parameter(np.float32([1, 2]), "p")
        x = dl.tensor([3.0, 4.0], self.device)
        ((p * x) + (x * p * p)).sum().backward()
        self.assert_is(p.grad, [9, 20])

    def test_expressions_of_parameters_alone(self):
        p = dl.Parameter(np.float32([1, 2]), "p")
        p.to(None if self.device == "numpy" else dl.zeros(1, device=self.device).engine.ctx)
        penalty = (p.tensor() ** 2).sum()
        self.assertEqual(penalty.item(), 5.0)
        penalty.backward()
        self.assert_is(p.grad, [2, 4])
        with self.assertRaisesRegex(GraphError, r"w.tensor\(\) for an expression of Parameters"):
            (dl.ones(2, device=self.device) + p * p)

    def test_dropout_drops_the_same_elements_in_its_gradient(self):
        dl.manual_seed(0)
        x = self.leaf(np.ones(200, np.float32))
        y = F.dropout(x, 0.5)
        seen = y.numpy()  # computed here, and again for the gradient
        y.sum().backward()
        self.assert_is(x.grad, seen)
        self.assertNotEqual(F.dropout(x, 0.5).tolist(), seen.tolist())

    def test_statistics_move_once_for_each_call(self):
        layer = nn.BatchNorm2d(1, momentum=0.5)
        x = dl.tensor(np.float32([[2], [4]]), self.device)
        y = layer(x)
        y.numpy()
        np.testing.assert_allclose(layer.running_mean.asnumpy(), [1.5])
        (y * y).sum().backward()
        layer.weight.grad.numpy()
        np.testing.assert_allclose(layer.running_mean.asnumpy(), [1.5])
        layer(x)
        layer(x)
        np.testing.assert_allclose(layer.running_mean.asnumpy(), [2.625])


class NumpyGradients(Gradients, unittest.TestCase):
    pass


@require(cpu(0))
class CpuGradients(Gradients, unittest.TestCase):
    device = "cpu"


@require(gpu(0))
class GpuGradients(Gradients, unittest.TestCase):
    device = "gpu"

"""Histories of Tensors: what has one, what detach and no_grad cut off, changes in place."""

from __future__ import annotations

import unittest

import numpy as np

import dlsys as dl
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.errors import GraphError
from dlsys.ndarray import cpu
from dlsys.runtime.device import memory_stats
from support.devices import require


class Histories(unittest.TestCase):
    device = "numpy"

    def tensor(self, data, requires_grad=False):
        return dl.tensor(data, self.device, requires_grad=requires_grad)

    def test_what_is_detached_needs_no_gradient(self):
        x = self.tensor([1.0, 2.0], True)
        self.assertFalse(x.detach().requires_grad)
        (x.detach() * x).sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), [1, 2])

    def test_what_no_grad_read_gets_no_gradient(self):
        x, y = self.tensor([1.0], True), self.tensor([2.0], True)
        with dl.no_grad():
            z = x * y
        (z * x).sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), [2])
        self.assertIsNone(y.grad)

    def test_a_step_of_another_network_leaves_a_history_usable(self):
        a, b = nn.Linear(2, 1, rng=0), nn.Linear(1, 1, rng=1)
        step = optim.SGD(0.1, params=b.parameters())
        hidden = a(self.tensor([[1.0, 2.0]]))
        b(hidden.detach()).sum().backward()
        self.assertIsNone(a.weight.grad)
        step.step()
        step.zero_grad()
        b(hidden).sum().backward()
        wanted = np.array([[1.0, 2.0]]) * float(b.weight.asnumpy().item())
        np.testing.assert_allclose(a.weight.grad.numpy().reshape(1, 2), wanted, rtol=1e-6)

    def test_a_constant_that_was_changed_counts_as_it_was(self):
        x, y = self.tensor([2.0], True), self.tensor([3.0])
        z = x * y
        z.item()
        y += 1
        z.sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), [3])

    def test_what_a_gradient_came_into_is_no_leaf(self):
        x, y = self.tensor([1.0], True), self.tensor([2.0])
        y -= x
        y.item()
        (y * 2).sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), [-2])
        self.assertIsNone(y.grad)

    def test_a_view_follows_its_base_into_a_history(self):
        x, y = self.tensor([[1.0, 2.0]], True), self.tensor([[3.0, 4.0]])
        view = y.T
        y *= x
        self.assertTrue(view.requires_grad)
        with dl.no_grad():
            view * 2
        self.assertTrue(view.requires_grad)
        view.sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), [[3, 4]])

    def test_a_view_of_what_changed_still_has_a_shape(self):
        x = self.tensor([1.0, 2.0])
        view = x[1:]
        x += 1
        self.assertEqual((view.shape, view.dtype), ((1,), np.float32))
        np.testing.assert_array_equal(view.numpy(), [3])

    def test_a_gradient_does_not_come_into_a_base_through_detach(self):
        x, y = self.tensor([1.0]), self.tensor([2.0], True)
        with self.assertRaisesRegex(GraphError, r"through detach\(\)"):
            x.detach().__imul__(y)
        z = y * 2
        with self.assertRaisesRegex(GraphError, r"through detach\(\)"):
            z.detach().__imul__(3)
        z.sum().backward()
        np.testing.assert_array_equal(y.grad.numpy(), [2])

    def test_indices_count_from_the_end(self):
        x = self.tensor([1.0, 2.0, 3.0])
        np.testing.assert_array_equal(x[self.tensor([-1, 0])].numpy(), [3, 1])
        x[np.array([False] * 3)] = self.tensor(np.zeros(0, np.float32))
        np.testing.assert_array_equal(x.numpy(), [1, 2, 3])

    def test_rows_that_change_each_time_need_few_programs(self):
        x = self.tensor(np.arange(60, dtype=np.float32).reshape(20, 3), True)
        engine, wanted = x.engine, np.zeros((20, 3))
        before = len(engine._programs)
        for k in range(18):
            (x[k] * 2).sum().backward()
            (x[k : k + 2] * 3).sum().backward()
            wanted[k] += 2
            wanted[k : k + 2] += 3
            x.grad.numpy()
            np.testing.assert_array_equal(x[k].numpy(), np.arange(60).reshape(20, 3)[k])
        np.testing.assert_array_equal(x.grad.numpy(), wanted)
        self.assertLess(len(engine._programs) - before, 20)

    def test_the_tape_goes_on_after_an_index_out_of_range(self):
        x = self.tensor([1.0, 2.0, 3.0])
        y = x[self.tensor([5])] * 2
        with self.assertRaisesRegex(Exception, "out of range.*test_histories.py"):
            y.numpy()
        np.testing.assert_array_equal((x * 2).numpy(), [2, 4, 6])
        with self.assertRaisesRegex(GraphError, "failed"):
            y.numpy()


@require(cpu(0))
class HistoriesOnTheCpu(Histories):
    device = "cpu"

    def test_memory_stays_the_same(self):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        step = optim.Adam(1e-2, params=model.parameters())
        x, y = self.tensor(np.ones((4, 8), np.float32)), self.tensor(np.zeros(4, np.int64))
        used = []
        for k in range(2000):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.step()
            step.zero_grad()
            if k % 100 == 50:
                loss.item()
                used.append(memory_stats(cpu(0)).in_use_nbytes)
        self.assertEqual(set(used[2:]), {used[2]})

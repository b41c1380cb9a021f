"""Tensors in several threads: each has a tape, a mode and a precision of its own, and may use what
another one made.
"""

from __future__ import annotations

import threading
import unittest
from unittest import mock

import numpy as np

import dlsys as dl
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.eager.device import engine_of
from dlsys.ndarray import cpu, gpu
from dlsys.ops.leaf import flush, unflushed
from support.devices import require

THREADS = 4


def together(*functions):
    """What functions return that begin at the same time, each in a thread of its own."""
    made, start = {}, threading.Barrier(len(functions))

    def call(k):
        start.wait()
        try:
            made[k] = functions[k]()
        except BaseException as error:
            made[k] = error

    threads = [threading.Thread(target=call, args=(k,)) for k in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "threads wait for each other"
    for value in made.values():
        if isinstance(value, BaseException):
            raise value
    return [made[k] for k in range(len(functions))]


class Threads:
    device = "numpy"

    def tensor(self, data, requires_grad=False):
        return dl.tensor(data, self.device, requires_grad=requires_grad)

    def test_a_tensor_is_computed_once_for_all_who_look(self):
        x = self.tensor(np.full((20, 20), 0.05, np.float32))
        for _ in range(10):
            y = self.tensor(np.eye(20, dtype=np.float32))
            for _ in range(5):
                y = y @ x
            seen = together(*[lambda y=y: (y + 1).sum().item()] * THREADS)
            self.assertEqual(len(set(seen)), 1)
            self.assertAlmostEqual(seen[0], 420, delta=1e-2)

    def test_an_operation_is_recorded_in_the_thread_that_calls_it(self):
        x = self.tensor([1.0, 2.0])
        engine = engine_of(self.device)
        before = engine.tape.state

        def use():
            y = x * 2
            self.assertIs(y.engine, engine_of(self.device))
            self.assertIsNot(y.engine, engine)
            return y

        (y,) = together(use)
        self.assertIs(engine.tape.state, before)
        self.assertEqual((y + x).tolist(), [3, 6])  # not computed in the thread that made it

    def test_threads_record_on_shared_tensors_beside_each_other(self):
        x, w = self.tensor([[1.0, 2.0]]), self.tensor([[3.0], [4.0]])

        def use(k):
            total = self.tensor([[0.0]])
            for n in range(100):
                total = total + (x * k) @ w
                if n % 7 == 0:
                    total.item()
            return total.item()

        seen = together(*[lambda k=k: use(k) for k in range(THREADS)])
        self.assertEqual(seen, [1100 * k for k in range(THREADS)])

    def test_threads_look_at_what_another_goes_on_recording(self):
        made, done = [self.tensor([0.0])], threading.Event()

        def record():
            for n in range(300):
                made.append(made[-1] + 1)
                if n % 50 == 49:
                    made[-1].item()
            done.set()

        def look():
            while not done.is_set():
                n = len(made) - 1
                self.assertEqual((made[n] * 2).item(), 2 * n)

        together(record, look, look)
        self.assertEqual([x.item() for x in made], list(range(301)))

    def test_threads_that_use_each_others_tensors_do_not_wait_for_ever(self):
        boxes = [[self.tensor([1.0])], [self.tensor([1.0])]]

        def use(mine, other):
            for _ in range(100):
                mine[0] = (other[0] + mine[0]) * 0.5
            return mine[0].item()

        self.assertEqual(together(lambda: use(*boxes), lambda: use(*boxes[::-1])), [1, 1])

    def test_gradients_reach_leaves_of_another_thread(self):
        x = self.tensor([1.0, 2.0], True)
        y = x * 3

        def use():
            (y * y).sum().backward()
            (x * x).sum().backward()

        together(use)
        np.testing.assert_array_equal(x.grad.numpy(), [20, 40])  # 18 x + 2 x
        y.sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), [23, 43])

    def test_each_thread_has_its_mode(self):
        x = self.tensor([1.0], True)
        with dl.no_grad():
            self.assertEqual(together(lambda: (x * 2).requires_grad), [True])
            self.assertFalse((x * 2).requires_grad)

        def without():
            with dl.no_grad():
                inside.wait()
                made = (x * 2).requires_grad
                inside.wait()
                return made

        def beside():
            inside.wait()
            made = (x * 2).requires_grad
            inside.wait()
            return made

        inside = threading.Barrier(2)
        self.assertEqual(together(without, beside), [False, True])

    def test_a_thread_that_begins_is_not_taken_for_one_that_ended(self):
        ((engine, number),) = together(lambda: (engine_of(self.device), threading.get_ident()))
        with mock.patch("dlsys.eager.engine.get_ident", return_value=number):  # given again
            self.assertFalse(engine.own)

    def test_nothing_waits_for_a_thread_that_ended(self):
        w = dl.Parameter(np.ones(3, np.float32), "w")
        made = []
        thread = threading.Thread(target=lambda: made.append(self.tensor(2.0) * w))
        thread.start()
        thread.join()
        flush()
        self.assertNotIn(made[0].engine, unflushed)
        w.set(np.zeros(3, np.float32))
        self.assertEqual(made[0].tolist(), [2, 2, 2])

    def test_each_thread_has_its_precision(self):
        def other():
            dl.set_precision("tf32", self.device)
            return engine_of(self.device).precision

        self.assertEqual(together(other), ["tf32"])
        self.assertEqual(engine_of(self.device).precision, "fp32")

    def test_all_threads_draw_from_one_seed(self):
        def draw():
            return [tuple(dl.rand(3, device=self.device).tolist()) for _ in range(10)]

        dl.manual_seed(5)
        expected = [draw() for _ in range(THREADS)]
        dl.manual_seed(5)
        drawn = together(*[draw] * THREADS)
        self.assertEqual({x for part in drawn for x in part}, {x for p in expected for x in p})
        dl.manual_seed(5)
        self.assertEqual(together(draw), expected[:1])

    def test_what_a_thread_changes_in_place_is_seen_by_others(self):
        x = self.tensor([1.0, 2.0])
        view = x[0:1]

        def change():
            x[0] = 5.0
            return x.tolist()

        self.assertEqual(together(change), [[5, 2]])
        self.assertEqual((x.tolist(), view.tolist(), (x * 2).tolist()), ([5, 2], [5], [10, 4]))

    def test_a_model_is_trained_in_one_thread_on_data_of_another(self):
        x, y = self.tensor(np.ones((4, 3), np.float32)), self.tensor([0, 1, 0, 1])

        def train():
            net = nn.Linear(3, 2, rng=0)
            step = optim.SGD(0.1, params=net.parameters())
            for _ in range(3):
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                step.step()
                step.zero_grad()
            return net.weight.asnumpy().tolist()

        expected = train()
        self.assertEqual(together(*[train] * THREADS), [expected] * THREADS)

    def test_a_function_of_jit_is_called_in_several_threads(self):
        function, x = dl.jit(lambda x: (x * x).sum()), self.tensor([1.0, 2.0])
        calls = [lambda: [function(x).item() for _ in range(20)]] * THREADS
        self.assertEqual(together(*calls), [[5.0] * 20] * THREADS)


class NumpyThreads(Threads, unittest.TestCase):
    pass


@require(cpu(0))
class CpuThreads(Threads, unittest.TestCase):
    device = "cpu"


@require(gpu(0))
class GpuThreads(Threads, unittest.TestCase):
    device = "gpu"

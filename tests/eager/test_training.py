"""Training loops of Tensors and functions that `jit` made: the steps of graphs, bit by bit."""

from __future__ import annotations

import gc
import threading
import unittest
import weakref

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.eager.device import engine_of
from dlsys.errors import GraphError
from dlsys.ndarray import cpu, gpu
from support.devices import require

STEPS = 4


def model():
    return nn.Sequential(
        nn.Linear(6, 8, rng=1), nn.ReLU(), nn.BatchNorm2d(8),
        nn.Linear(8, 5, rng=3), nn.BatchNorm2d(5), nn.Linear(5, 3, rng=2),
    )  # fmt: skip


def data():
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((STEPS, 5, 6)).astype(np.float32)
    return xs, rng.integers(0, 3, (STEPS, 5))


def by_graph(make, ctx):
    """Losses and state of a training as a graph."""
    net, (xs, ys) = model(), data()
    x, y = ad.Variable("x", dtype=np.float32), ad.Variable("y", dtype=np.int64)
    loss = F.cross_entropy(net(x), y)
    step = ad.Executor([loss, make().minimize(loss, net.parameters())], ctx)
    losses = [float(step.run({x: a, y: b})[0]) for a, b in zip(xs, ys)]
    return losses, net.state_dict()


class Training:
    device = "numpy"
    ctx = None

    def tensors(self):
        return [[dl.tensor(part, self.device) for part in parts] for parts in zip(*data())]

    def assert_same(self, losses, net, make):
        expected, state = by_graph(make, self.ctx)
        np.testing.assert_array_equal(losses, expected)
        for name, value in net.state_dict().items():
            np.testing.assert_array_equal(value, state[name], name)

    def test_a_loop_makes_the_steps_of_a_graph(self):
        for make in (
            lambda **o: optim.SGD(0.1, 0.9, **o),
            lambda **o: optim.AdamW(0.01, clip_norm=0.5, **o),
            lambda **o: optim.Adam(optim.Cosine(0.1, 10), ema=0.9, **o),
        ):
            for order in ("after", "before"):
                net = model()
                optimizer, losses = make(params=net.parameters()), []
                for x, y in self.tensors():
                    loss = F.cross_entropy(net(x), y)
                    if order == "before":
                        optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    if order == "after":
                        optimizer.zero_grad()
                    losses.append(loss)
                self.assert_same([loss.item() for loss in losses], net, make)

    def test_gradients_are_there_between_step_and_zero_grad(self):
        net = model()
        optimizer = optim.SGD(0.1, params=net.parameters())
        (x, y), *_ = self.tensors()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        grad = net.parameters()[0].grad.numpy()
        self.assertGreater(np.abs(grad).max(), 0)
        optimizer.zero_grad()
        self.assertIsNone(net.parameters()[0].grad)

    def test_gradients_may_be_edited(self):
        net = nn.Linear(2, 1, bias=False, rng=0)
        net.weight.set(np.zeros((1, 2), np.float32))
        optimizer = optim.SGD(0.1, params=net.parameters())
        x = dl.tensor([[1.0, 2.0]], self.device)
        net(x).sum().backward()
        net.weight.grad = net.weight.grad * 10
        optimizer.step()
        np.testing.assert_allclose(net.weight.asnumpy(), [[-1, -2]])
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.apply_gradients([(net.weight.grad.clip(0.0, 1.0), net.weight)])
        np.testing.assert_allclose(net.weight.asnumpy(), [[-1.1, -2.1]], rtol=1e-6)

    def test_gradients_of_several_losses_add_up(self):
        net = nn.Linear(2, 1, bias=False, rng=0)
        optimizer = optim.SGD(0.5, params=net.parameters())
        before = net.weight.asnumpy()
        x = dl.tensor([[1.0, 2.0]], self.device)
        net(x).sum().backward()
        (net(x) * 3).sum().backward()
        optimizer.step()
        np.testing.assert_allclose(net.weight.asnumpy(), before - [[2, 4]], rtol=1e-6)

    def test_a_step_plans_once(self):
        net = model()
        optimizer = optim.SGD(0.1, params=net.parameters())
        batches = self.tensors()
        made = []
        for x, y in [*batches, *batches]:
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            made.append(len(engine_of(self.device)._programs))
        self.assertEqual(made[0], made[-1])

    def test_a_model_that_is_dropped_is_freed(self):
        net = model()
        optimizer = optim.SGD(0.1, params=net.parameters())
        for x, y in self.tensors():
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        dead = weakref.ref(net.parameters()[0])
        del net, optimizer, x, y
        gc.collect()
        self.assertIsNone(dead())

    def test_an_optimizer_without_parameters_says_what_it_needs(self):
        with self.assertRaisesRegex(GraphError, r"SGD.step: .* params=model.parameters\(\)"):
            optim.SGD(0.1).step()
        net = model()
        optimizer = optim.SGD(0.1, params=net.parameters())
        with self.assertRaisesRegex(GraphError, "no Parameter has a gradient"):
            optimizer.step()

    def test_graphs_see_what_tensors_did(self):
        net = nn.Linear(2, 1, bias=False, rng=0)
        net.weight.set(np.ones((1, 2), np.float32))
        optimizer = optim.SGD(1.0, params=net.parameters())
        net(dl.tensor([[1.0, 2.0]], self.device)).sum().backward()
        optimizer.step()  # waits until somebody reads
        x = ad.Variable("x")
        executor = ad.Executor([net(x)], self.ctx)
        value = executor.run({x: np.ones((1, 2), np.float32)}, convert_to_numpy_ret_vals=True)[0]
        self.assertEqual(value.item(), -1.0)
        y = net(dl.tensor([[1.0, 1.0]], self.device))
        net.weight.set(np.zeros((1, 2), np.float32))
        self.assertEqual(y.item(), -1.0)  # computed before the change

    def test_a_step_of_another_thread_is_there_when_it_is_read(self):
        net = nn.Linear(2, 1, bias=False, rng=0)
        before = net.weight.asnumpy()

        def train():
            optimizer = optim.SGD(1.0, params=net.parameters())
            net(dl.tensor([[1.0, 2.0]], self.device)).sum().backward()
            optimizer.step()  # waits in its thread, which ends

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        np.testing.assert_allclose(net.weight.asnumpy(), before - [[1, 2]], rtol=1e-6)

    def test_threads_train_beside_each_other(self):
        made = {}

        def train(k):
            net = model()
            optimizer, losses = optim.SGD(0.1, 0.9, params=net.parameters()), []
            for x, y in self.tensors():
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                net.state_dict()  # flushes pending work, in this thread and in others
            made[k] = losses

        threads = [threading.Thread(target=train, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected, _ = by_graph(lambda **o: optim.SGD(0.1, 0.9, **o), self.ctx)
        self.assertEqual([made[k] for k in range(4)], [expected] * 4)

    # ---- jit ----
    def test_a_step_by_jit_makes_the_steps_of_a_graph(self):
        net = model()
        optimizer = optim.SGD(0.1, 0.9, params=net.parameters())

        @dl.jit
        def step(x, y):
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = [step(x, y).item() for x, y in self.tensors()]
        self.assertEqual(len(step.signatures), 1)
        self.assert_same(losses, net, lambda: optim.SGD(0.1, 0.9))

    def test_two_steps_in_one_function(self):
        a, b = nn.Linear(2, 1, rng=0), nn.Linear(1, 1, rng=1)
        steps = [optim.SGD(0.1, params=m.parameters()) for m in (a, b)]

        def both(x):
            hidden = a(x)
            first = (b(hidden.detach()) ** 2).sum()
            first.backward()
            steps[1].step()
            steps[1].zero_grad()
            second = (b(hidden) - 1).sum()
            second.backward()
            steps[0].step()
            for s in steps:
                s.zero_grad()
            return first, {"second": second}

        x = dl.tensor([[1.0, 2.0]], self.device)
        states = [m.state_dict() for m in (a, b)]
        plain = [both(x) for _ in range(3)]
        ends = [m.state_dict() for m in (a, b)]
        for m, state in zip((a, b), states):
            m.load_state_dict(state)
        compiled = dl.jit(both)
        made = [compiled(x) for _ in range(3)]
        for (f, s), (g, t) in zip(plain, made):
            self.assertEqual((f.item(), s["second"].item()), (g.item(), t["second"].item()))
        for m, state in zip((a, b), ends):
            for name, value in m.state_dict().items():
                np.testing.assert_array_equal(value, state[name])

    def test_gradients_pass_through_a_function(self):
        net = nn.Linear(2, 2, rng=0)
        forward = dl.jit(lambda x: net(x).relu())
        for _ in range(2):
            x = dl.tensor([[1.0, -2.0]], self.device, requires_grad=True)
            forward(x).sum().backward()
            got, weight = x.grad.numpy(), net.weight.grad.numpy()
            net.weight.grad = net.bias.grad = None
            y = dl.tensor([[1.0, -2.0]], self.device, requires_grad=True)
            net(y).relu().sum().backward()
            np.testing.assert_array_equal(got, y.grad.numpy())
            np.testing.assert_array_equal(weight, net.weight.grad.numpy())
            net.weight.grad = net.bias.grad = None

    def test_another_form_is_recorded_anew(self):
        f = dl.jit(lambda x, k: x * k if x.shape[0] > 1 else x)
        a, b = dl.ones(1, device=self.device), dl.ones(2, device=self.device)
        self.assertEqual(f(a, 3).tolist(), [1])
        self.assertEqual(f(b, 3).tolist(), [3, 3])
        self.assertEqual(f(b, 4).tolist(), [4, 4])
        self.assertEqual(f(b * 2, 4).tolist(), [8, 8])
        self.assertEqual(len(f.signatures), 3)

    def test_a_look_inside_is_refused(self):
        x = dl.ones(2, device=self.device)
        for look in (
            lambda t: t if t.sum() > 1 else -t, lambda t: t * t.sum().item(),
            lambda t: t + float(t[0]), lambda t: dl.tensor((t * 2).numpy(), self.device),
        ):  # fmt: skip
            f = dl.jit(look)
            for _ in range(2):
                with self.assertRaisesRegex(GraphError, "jit: .* looks at a value.*test_training"):
                    f(x)
        self.assertEqual((x + 1).tolist(), [2, 2])
        kept = []
        g = dl.jit(lambda t: kept.append(t * 2) or t + 1)
        self.assertEqual(g(x).tolist(), [2, 2])
        with self.assertRaisesRegex(GraphError, "which did not return it"):
            kept[0].numpy()

    def test_a_function_reads_and_changes_what_it_finds_outside(self):
        total = dl.zeros(2, device=self.device)

        @dl.jit
        def add(x):
            total.__iadd__(x)
            return total * 2

        x = dl.tensor([1.0, 2.0], self.device)
        self.assertEqual([add(x).tolist() for _ in range(2)], [[2, 4], [4, 8]])
        self.assertEqual(total.tolist(), [2, 4])
        total[0] = 100.0
        self.assertEqual(add(x).tolist(), [202, 12])

    def test_gradients_that_stay_are_left_by_each_call(self):
        net = nn.Linear(2, 1, bias=False, rng=0)

        @dl.jit
        def f(x):
            net.zero_grad()
            net(x).sum().backward()

        for k in (1.0, 2.0, 3.0):
            f(dl.tensor([[k, 2 * k]], self.device))
            self.assertEqual(net.weight.grad.tolist(), [[k, 2 * k]])

    def test_dropout_draws_anew_at_each_call(self):
        f = dl.jit(lambda x: F.dropout(x, 0.5))
        x = dl.ones(100, device=self.device)
        first, second = f(x).tolist(), f(x).tolist()
        self.assertNotEqual(first, second)
        self.assertEqual(set(first), {0.0, 2.0})

    def test_a_function_knows_what_was_frozen_since(self):
        net = nn.Linear(2, 1, rng=0)
        optimizer = optim.SGD(0.1, params=net.parameters())

        @dl.jit
        def step(x):
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        x = dl.tensor([[1.0, 2.0]], self.device)
        step(x)
        before = net.state_dict()
        net.weight.trainable = False
        step(x)
        after = net.state_dict()
        np.testing.assert_array_equal(after["weight"], before["weight"])
        self.assertNotEqual(after["bias"], before["bias"])

    def test_precision_is_of_the_programs_that_follow(self):
        x = dl.ones(4, 4, device=self.device)
        engine = engine_of(self.device)
        try:
            dl.set_precision("tf32", self.device)
            self.assertEqual((x @ x).tolist(), [[4.0] * 4] * 4)
            self.assertEqual(engine.precision, "tf32")
            with self.assertRaisesRegex(GraphError, "fp16"):
                dl.set_precision("fp16", self.device)
        finally:
            dl.set_precision("fp32", self.device)

    def test_a_module_in_another_mode_is_recorded_anew(self):
        layer = nn.Dropout(0.5)
        f = dl.jit(lambda x: layer(x))
        x = dl.ones(50, device=self.device)
        self.assertIn(0.0, f(x).tolist())
        layer.eval()
        self.assertEqual(f(x).tolist(), [1.0] * 50)


class NumpyTraining(Training, unittest.TestCase):
    pass


@require(cpu(0))
class CpuTraining(Training, unittest.TestCase):
    device, ctx = "cpu", cpu(0)


@require(gpu(0))
class GpuTraining(Training, unittest.TestCase):
    device, ctx = "gpu", gpu(0)

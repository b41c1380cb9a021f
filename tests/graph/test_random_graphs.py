"""Random graphs of real operators with updates, against their evaluation in plain numpy."""

from __future__ import annotations

import random
import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys.runtime.device import cpu, gpu
from support.devices import require
from support.graphs import double_op

ELEMENTWISE = [
    (ad.add_op, np.add),
    (ad.sub_op, np.subtract),
    (ad.mul_op, np.multiply),
    (ad.relu_gradient_op, lambda x, dy: np.where(x > 0, dy, 0)),
]
UNARY = [
    (ad.relu_op, lambda x: np.maximum(x, 0)),
    (ad.tanh_op, np.tanh),
    (ad.sigmoid_op, lambda x: 0.5 + 0.5 * np.tanh(x / 2)),
    (ad.neg_op, np.negative),
    (lambda x: x * 0.5, lambda x: x * 0.5),
    (lambda x: 1 - x, lambda x: 1 - x),
    (ad.softmax_op, lambda x: ad.softmax_func(x)),
    (double_op, lambda x: 2 * x),
    (lambda x: ad.transpose_op(x), np.transpose),
    (lambda x: ad.reshape_op(x, (-1, 2)), lambda x: x.reshape(-1, 2)),
    (lambda x: ad.reshape_op(x, (4, 6)), lambda x: x.reshape(4, 6)),
    (lambda x: x * 1 + 0, lambda x: x),
    (ad.oneslike_op, np.ones_like),
    (lambda x: x - ad.mean_op(x, axis=0), lambda x: x - x.mean(0)),
    (lambda x: x * ad.sum_op(x, axis=1, keepdims=True), lambda x: x * x.sum(1, keepdims=True)),
]


def check_random_graph(ctx, seed):
    """A graph of 24 elements everywhere, with updates, against its evaluation in numpy."""
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    states = [ad.Parameter(numbers.standard_normal((4, 6)).astype(np.float32)) for _ in range(4)]
    feeds = {
        ad.Variable(f"x{k}"): numbers.standard_normal((4, 6)).astype(np.float32) for k in range(3)
    }
    pairs = [(node, value) for node, value in feeds.items()]
    pairs += [(p, p.asnumpy()) for p in states]
    rng.shuffle(pairs)
    after = [p.asnumpy() for p in states]
    free = list(range(len(states)))
    for _ in range(40):
        node, value = rng.choice(pairs[-12:])
        other, second = rng.choice(pairs)
        kind = rng.random()
        if kind < 0.5:
            op, formula = rng.choice(UNARY)
            node, value = op(node), formula(value)
        elif kind < 0.85 or not free:
            if value.shape != second.shape:
                other, second = ad.reshape_op(other, value.shape), second.reshape(value.shape)
            op, formula = rng.choice(ELEMENTWISE)
            node, value = op(node, other), formula(value, second)
        else:
            k = free.pop()
            value = value.reshape(4, 6)
            node = ad.assign_op(states[k], ad.reshape_op(node, (4, 6)))
            after[k] = value
        pairs.append((node, np.asarray(value, np.float32)))
    fetches = rng.sample(pairs, 8) + pairs[-1:]
    updates = [node for node, _ in pairs if node.op is ad.assign_op]
    used = set(ad.find_topo_sort([node for node, _ in fetches] + updates))
    fed = {node: value for node, value in feeds.items() if node in used}
    executor = ad.Executor([*(node for node, _ in fetches), *updates], ctx)
    values = executor.run(fed, convert_to_numpy_ret_vals=True)
    for (node, wanted), value in zip(fetches, values):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-4, err_msg=repr(node))
    for p, wanted in zip(states, after):
        np.testing.assert_allclose(p.asnumpy(), wanted, rtol=1e-4, atol=1e-4)


class RandomGraphs(unittest.TestCase):
    def check(self, ctx):
        for seed in range(60):
            with self.subTest(seed=seed):
                check_random_graph(ctx, seed)

    def test_numpy(self):
        self.check(None)

    @require(cpu(0))
    def test_cpu(self):
        self.check(cpu(0))

    @require(gpu(0))
    def test_gpu(self):
        self.check(gpu(0))

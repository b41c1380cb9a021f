"""One node for all updates of a kind: which join, in what order, and that results stay."""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import optim
from dlsys.errors import GraphError
from dlsys.graph.node import Node, find_topo_sort
from dlsys.runtime.device import Context
from support.devices import native_contexts, on_native_devices
from support.fusion import fused, require_fusion, without
from support.graphs import Training, evaluate, here

MANY = 1900  # more than the parameters of one launch have room for


def parameters(*shapes: tuple[int, ...], name: str = "p") -> list[ad.Parameter]:
    rng = np.random.default_rng(3)
    return [
        ad.Parameter(rng.uniform(-1, 1, shape).astype(np.float32), f"{name}{k}")
        for k, shape in enumerate(shapes)
    ]


def writers(fetches: list[Node]) -> list[Node]:
    return [node for node in find_topo_sort(fetches) if node.op.writes]


class Pass(unittest.TestCase):
    """The rewrite of graphs, with no device."""

    def setUp(self) -> None:
        self.p, self.q, self.r = parameters((2,), (3, 1), ())
        self.lr = ad.Parameter(np.float32(0.5), "lr")

    def update(self, p: Node, g: Node | None = None, **attrs: Any) -> Node:
        return ad.sgd_update_op(p, ad.oneslike_op(p) if g is None else g, self.lr, **attrs)

    def grouped(self, *nodes: Node) -> list[Node]:
        return writers(fused([ad.group_op(*nodes)], "multi_tensor"))

    def test_updates_of_one_rule_become_one(self) -> None:
        [node] = self.grouped(*map(self.update, (self.p, self.q, self.r)))
        self.assertEqual(node.name, "sgd_update of 3")
        self.assertEqual(node.inputs[:3], [self.p, self.q, self.r])
        self.assertEqual(node.op.writes, (0, 1, 2))
        self.assertEqual([s.shape for s in node.spec], [(2,), (3, 1), ()])  # type: ignore[union-attr]

    def test_slots_follow_the_parameters(self) -> None:
        v, w = parameters((2,), (3, 1), name="v")
        make = lambda p, v: ad.sgd_momentum_update_op(p, v, p * 2, self.lr, momentum=0.5)  # noqa: E731
        [node] = self.grouped(make(self.p, v), make(self.q, w))
        self.assertEqual(node.inputs[:4], [self.p, self.q, v, w])

    def test_what_differs_stays_apart(self) -> None:
        other = ad.Parameter(np.float32(0.5), "other")
        nodes = self.grouped(
            self.update(self.p),
            self.update(self.q, l2=0.5),
            ad.sgd_update_op(self.r, self.r, other),
        )
        self.assertEqual(len(nodes), 3)
        double = ad.Parameter(np.zeros(2), "double", dtype=np.float64)
        self.assertEqual(len(self.grouped(self.update(self.p), self.update(double))), 2)

    def test_one_that_needs_the_result_of_another_stays_apart(self) -> None:
        first = self.update(self.p)
        second = self.update(self.q, ad.broadcast_to_op(ad.sum_op(first), (3, 1)))
        third = self.update(self.r)
        nodes = self.grouped(first, second, third)
        self.assertEqual([node.op.outputs for node in nodes], [2, 1])

    def test_two_kinds_that_need_each_other_make_no_circle(self) -> None:
        a, b = parameters((2,), (3, 1), name="average")

        def average(target: Node, value: Node) -> Node:
            return ad.average_update_op(target, value, step=self.step, keep=0.5)

        self.step = ad.Parameter(np.int64(0), "step")
        of_p = average(a, self.update(self.p))
        early = average(b, self.q * 1)
        of_early = self.update(self.r, ad.sum_op(early))
        nodes = self.grouped(of_p, of_early)  # a circle would be refused by the sort
        self.assertEqual(len(nodes), 4)

    def test_two_updates_of_one_parameter_are_left_to_be_refused_by_name(self) -> None:
        first, line = ad.sgd_update_op(self.p, self.p * 2, self.lr), here()
        second, other = ad.sgd_update_op(self.p, self.p, self.lr), here()
        with self.assertRaises(GraphError) as caught:
            for ctx in native_contexts()[:1] or [None]:
                evaluate([ad.group_op(first, second, self.update(self.q))], ctx=ctx)
        for part in ("p0 is updated twice", line, other):
            self.assertIn(part, str(caught.exception))

    def test_counters_advance_together(self) -> None:
        steps = [ad.Parameter(np.int64(k), f"step{k}") for k in range(4)]
        count = ad.Parameter(np.int64(1), "count")
        nodes = [ad.advance_step_op(step) for step in steps[:2]]
        nodes += [ad.advance_step_op(step, count=count, every=2) for step in steps[2:]]
        self.assertEqual([node.op.outputs for node in self.grouped(*nodes)], [2, 2])

    def test_a_graph_without_updates_is_left_alone(self) -> None:
        fetches = [self.p * 2, self.q + 1]
        self.assertEqual(fused(fetches, "multi_tensor"), fetches)


class Grouped:
    """Training on one native device, where the pass runs."""

    ctx: Context

    def steps(self, executor: ad.Executor, feeds: dict) -> list[str]:
        plan = executor.plan(feeds)  # on a GPU an update may make its gradients too
        names = [step.node.name for step in plan.steps if step.node.op.writes]
        return [name.removeprefix("matmul_") for name in names]

    @require_fusion("multi_tensor")
    def test_a_training_step_updates_once(self) -> None:
        net = Training((6, 5, 4), momentum=0.9)
        executor = ad.Executor([net.loss, net.train], self.ctx)
        names = self.steps(executor, net.shapes(3))
        self.assertIn("sgd_momentum_update of 4", names)
        self.assertEqual(len(names), 2)  # and the step

    @require_fusion("multi_tensor")
    def test_with_everything_it_is_one_node_a_kind(self) -> None:
        net = Training((6, 5, 4))
        adam = optim.Adam(optim.Cosine(0.1, 9), accumulate=2, ema=0.9, clip_norm=1.0)
        executor = ad.Executor([adam.minimize(net.loss, net.parameters)], self.ctx)
        kinds = [name.split(" of ") for name in self.steps(executor, net.shapes(3))]
        wanted = [
            ["accumulate_update", "4"], ["adam_update", "4"], ["average_update", "4"],
            ["advance_step", "2"],
        ]  # fmt: skip
        self.assertEqual(len(kinds), 5)  # the counter of runs advances in every run
        for kind in wanted:
            self.assertIn(kind, kinds)

    def test_the_same_bits_as_one_by_one(self) -> None:
        def trained() -> list[np.ndarray]:
            net = Training((6, 5, 4), seed=4)
            adam = optim.Adam(0.1, accumulate=2, ema=0.9, clip_norm=0.5, weight_decay=0.1)
            train = adam.minimize(net.loss, net.parameters)
            executor = ad.Executor([train], self.ctx)
            for k in range(6):
                executor.run(net.batch(7, seed=k))
            return [*net.values(), *adam.state_dict().values()]

        together = trained()
        with without("multi_tensor"):
            alone = trained()
        for ours, theirs in zip(together, alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)

    def test_results_can_be_fetched_and_read(self) -> None:
        p, q = parameters((2,), (3, 1))
        lr = ad.Parameter(np.float32(0.5), "lr")
        first = ad.sgd_update_op(p, ad.oneslike_op(p), lr)
        second = ad.sgd_update_op(q, ad.oneslike_op(q), lr)
        before = [p.asnumpy(), q.asnumpy()]
        executor = ad.Executor([q, second, first, second * 2, p], self.ctx)
        got = executor.run(convert_to_numpy_ret_vals=True)
        new = [before[0] - np.float32(0.5), before[1] - np.float32(0.5)]
        for value, wanted in zip(got, (before[1], new[1], new[0], 2 * new[1], before[0])):
            np.testing.assert_array_equal(value, wanted)
        np.testing.assert_array_equal(p.asnumpy(), new[0])
        got[2][:] = 7  # a fetched result is no alias
        np.testing.assert_array_equal(p.asnumpy(), new[0])

    def test_a_gradient_that_is_another_parameter_is_the_old_one(self) -> None:
        p, q = parameters((2,), (2,))
        lr = ad.Parameter(np.float32(1), "lr")
        a, b = p.asnumpy(), q.asnumpy()
        nodes = [ad.sgd_update_op(p, q, lr), ad.sgd_update_op(q, p, lr)]
        evaluate([ad.group_op(*nodes)], ctx=self.ctx)
        np.testing.assert_array_equal(p.asnumpy(), a - b)
        np.testing.assert_array_equal(q.asnumpy(), b - a)

    def test_more_parameters_than_a_launch_takes(self) -> None:
        shapes = [(k % 7,) if k % 5 else (k % 3 + 1, 1201) for k in range(MANY)]
        many = parameters(*shapes)
        before = [p.asnumpy() for p in many]
        lr, x = ad.Parameter(np.float32(0.25), "lr"), ad.Variable("x")
        grads = [p * x for p in many]
        nodes = [ad.sgd_update_op(p, g, lr) for p, g in zip(many, grads)]
        norm = ad.global_norm_op(*grads)
        executor = ad.Executor([norm, ad.group_op(*nodes)], self.ctx)
        got = executor.run({x: np.float32(2)}, convert_to_numpy_ret_vals=True)[0]
        wanted = 2 * np.linalg.norm(np.concatenate([p.ravel() for p in before]).astype(float))
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
        for p, old in zip(many, before):
            np.testing.assert_allclose(p.asnumpy(), 0.5 * old, rtol=1e-6)

    def test_it_is_checked_against_numpy(self) -> None:
        net = Training((6, 5, 4))
        adam = optim.AdamW(0.1, clip_norm=1.0, ema=0.5)
        executor = ad.Executor([adam.minimize(net.loss, net.parameters)], self.ctx)
        executor.check(net.batch(3))
        self.assertEqual(int(adam.steps.asnumpy()), 0)


CpuGrouped, GpuGrouped = on_native_devices(Grouped)

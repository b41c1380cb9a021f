"""Joined buckets: what a step exchanges lies side by side, and nothing else changes. Windows."""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import dist, nn, optim
from dlsys import functional as F
from dlsys.executor.capture.hazards import InOrder, lifetimes_of
from dlsys.executor.plan.arena import ALIGNMENT, aligned
from dlsys.executor.plan.memory import Plan, Step, Value, make_plan
from dlsys.executor.plan.schedule import schedule
from dlsys.fusion.all_reduce_update import all_reduce_update
from dlsys.fusion.shared.body import close
from dlsys.graph.node import Node
from dlsys.ops.leaf import Variable
from dlsys.ops.optim.apply import UPDATES


class Pair(dist.group.Alone):
    """Two ranks, of which nobody asks anything: plans alone are made."""

    size = 2


def planned(fetches: Sequence[Node], parallel: bool = True) -> Plan:
    order, values = schedule(fetches)
    lifetimes = lifetimes_of(order) if parallel else None
    return make_plan(order, values, lambda step: (), lifetimes=lifetimes)


def exchange(plan: Plan) -> Step:
    (step,) = (step for step in plan.steps if step.node.op.communicates)
    return step


def places(values: Sequence[Value]) -> list[int]:
    return [value.buffer.offset + value.skipped_nbytes for value in values]


class JoinedBuckets(unittest.TestCase):
    def setUp(self) -> None:
        self.x = Variable("x", (5, 3), np.float32)

    def exchanged(self, *nodes: Node) -> list[Node]:
        made = dist.collectives.bucket_op(len(nodes))(*nodes, group=Pair())
        return [F.sum(made[k]) for k in range(len(nodes))]

    def test_arrays_lie_side_by_side(self) -> None:
        nodes = [ad.exp_op(self.x), ad.log_op(self.x), ad.matmul_op(self.x, self.x, trans_B=True)]
        step = exchange(planned(self.exchanged(*nodes)))
        self.assertIs(step.node.attrs["joined"], True)
        for side in (step.inputs, step.outputs):
            self.assertEqual(len({value.buffer for value in side}), 1)
            apart = np.diff(places(side)).tolist()
            self.assertEqual(apart, [aligned(value.spec.nbytes) for value in side[:-1]])
            self.assertEqual(side[0].buffer.offset % ALIGNMENT, 0)
        inputs, results = step.inputs[0].buffer, step.outputs[0].buffer
        ends = inputs.offset + inputs.nbytes <= results.offset
        self.assertTrue(ends or results.offset + results.nbytes <= inputs.offset)

    def test_what_lies_elsewhere_stays(self) -> None:
        """A feed, and an array that is there twice."""
        exp = ad.exp_op(self.x)
        for nodes in ([self.x, exp], [exp, exp], [exp, ad.reshape_op(exp, (15,))]):
            step = exchange(planned(self.exchanged(*nodes)))
            self.assertNotIn("joined", step.node.attrs)

    def test_plans_of_steps_in_a_row_stay(self) -> None:
        nodes = [ad.exp_op(self.x), ad.log_op(self.x)]
        step = exchange(planned(self.exchanged(*nodes), parallel=False))
        self.assertNotIn("joined", step.node.attrs)

    def test_no_two_values_that_live_at_once_meet(self) -> None:
        """Of a training step with several buckets."""
        x = Variable("x", (16, 32), np.float32)
        model = nn.Sequential(*(nn.Linear(32, 32, rng=0) for _ in range(6)))
        update = optim.SGD(0.1).minimize(F.sum(model(x)), model.parameters())
        with mock.patch("dlsys.dist.data_parallel.BUCKET", 9000):
            executor = ad.Executor([update], group=Pair())
            order, values = schedule(executor._rewrite(executor._infer({x: x.spec})))
        plan = make_plan(order, values, lambda step: (), lifetimes=lifetimes_of(order))
        self.assertTrue(any("joined" in step.node.attrs for step in plan.steps))
        inside = [buffer for buffer in plan.buffers if buffer.kind == "arena"]
        for k, one in enumerate(inside):
            for other in inside[:k]:
                together = one.first <= other.last and other.first <= one.last
                apart = one.offset >= other.offset + other.nbytes
                apart = apart or other.offset >= one.offset + one.nbytes
                self.assertTrue(apart or not together)
        for step in plan.steps:
            for value in (*step.inputs, *step.outputs):
                end = value.skipped_nbytes + value.spec.nbytes
                self.assertLessEqual(end, value.buffer.nbytes)


class Windows(unittest.TestCase):
    """Gradients that an update reads on all ranks have memory of their own, step after step."""

    def test_they_are_no_part_of_the_arena(self) -> None:
        x, rate, group = Variable("x", (5, 3), np.float32), ad.constant(np.float32(0.1)), Pair()
        weights = [ad.Parameter(np.zeros((5, 3), np.float32), "w") for _ in range(3)]
        grads = [ad.exp_op(x), ad.log_op(x), ad.sqrt_op(x)]
        updates = [
            self.update([weights[0], weights[2]], [grads[0], grads[2]], rate, group),
            self.update([weights[1]], [grads[1]], rate, group),
        ]
        order, values = schedule(updates)
        apart = 2 * ALIGNMENT
        for lifetimes in (lifetimes_of(order), InOrder()):
            plan = make_plan(order, values, lambda step: (), lifetimes=lifetimes)
            steps = [step for step in plan.steps if step.node.op.communicates]
            (window,) = (buffer for buffer in plan.buffers if buffer.kind == "window")
            self.assertIs(window.node, steps[0].node)
            self.assertEqual((window.nbytes, plan.arena_nbytes), (3 * ALIGNMENT, 0))
            found = [
                [step.inputs[k].skipped_nbytes for k in step.node.op.gradient_inputs]
                for step in steps
            ]
            wanted = {2: [0, ALIGNMENT], 1: [0]}[len(found[0])]
            self.assertEqual(found[0], wanted)
            self.assertEqual(found[1], [apart] if len(wanted) == 2 else [ALIGNMENT, apart])
            for step in plan.steps:
                for value in (*step.inputs, *step.outputs):
                    self.assertTrue(value.buffer.kind != "arena", value)

    def update(
        self, weights: list[ad.Parameter], grads: list[Node], rate: Node, group: Pair
    ) -> Node:
        op = all_reduce_update(UPDATES["sgd_update"], len(weights))
        summed = dist.collectives.bucket_op(len(grads))(*grads, group=group)
        sums = [summed[k] for k in range(len(grads))] if len(grads) > 1 else [summed]
        node = Node(op, [*weights, *grads, rate], {"body": close(grads, sums), "group": group}, "u")
        return node[0] if len(weights) > 1 else node


if __name__ == "__main__":
    unittest.main()

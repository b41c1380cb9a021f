"""The planner alone: random graphs are simulated on their plans, without devices or arrays."""

from __future__ import annotations

import random
import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys.errors import GraphError
from dlsys.executor.plan import arena as packing
from dlsys.executor.plan.memory import make_plan
from dlsys.executor.plan.schedule import schedule
from dlsys.graph.node import Node, Op
from dlsys.graph.spec import Spec
from dlsys.runtime.device import cpu
from support.devices import require
from support.graphs import Training, here

FLOAT32 = np.dtype(np.float32)


class Fake(Op):
    """An operator with chosen traits; `attrs["shapes"]` are the shapes of its outputs."""

    def __init__(self, name, kernel="fake", scratch=(), **traits):
        self.name, self.kernel, self.scratch = name, kernel, scratch
        for trait, value in traits.items():
            setattr(self, trait, value)

    def infer(self, node, *specs):
        if self.writes:
            return specs[self.writes[0]]
        made = tuple(Spec(shape, FLOAT32) for shape in node.attrs["shapes"])
        return made if self.outputs > 1 else made[0]


PLAIN = Fake("plain")
PYTHON = Fake("python", kernel=None)
FALLIBLE = Fake("fallible", fallible=True)
INPLACE = Fake("inplace", inplace=True)
INPLACE_OF_LAST = Fake("inplace_of_last", inplace=(1,))
VIEW = Fake("view", kernel=None, view=True)
PAIR = Fake("pair", outputs=2)
SCRATCHY = Fake("scratchy", scratch=(3000, 64))
UPDATE = Fake("update", writes=(0,), scratch=(100,))
UPDATE_TWO = Fake("update_two", writes=(0, 1))


def scratch_of(step):
    return [Spec((n,), FLOAT32) for n in getattr(step.node.op, "scratch", ())]


class RandomGraph:
    """A graph with every trait in it, and what it computes by the rules that users are told."""

    def __init__(self, seed: int, size: int = 60) -> None:
        self.rng = random.Random(seed)
        self.values: list[Node] = []
        self.parameters = [ad.Parameter(np.zeros(n, np.float32)) for n in (7, 40, 40, 200, 7)]
        self.values += self.parameters
        self.values += [ad.Variable(shape=(n,), dtype=np.float32) for n in (40, 200)]
        self.values.append(ad.constant(np.zeros(40, np.float32)))
        free = list(self.parameters)
        self.rng.shuffle(free)
        for _ in range(size):
            self._grow(free)
        updates = [node for node in self.values if node.op.writes]
        picked = self.rng.sample(self.values, 6)
        self.fetches = [*picked, picked[0], *updates, ad.group_op(*updates)]
        self.give_meaning()

    def give_meaning(self) -> None:
        """Fills `meaning` of every node and `after`, the meaning of every Parameter after a run."""
        self.meaning: dict[Node, int] = {}
        self.after: dict[Node, int] = {}
        for node in ad.find_topo_sort(self.fetches):
            inputs = [self.meaning[x] for x in node.inputs]
            self.meaning[node] = meaning(node, inputs)
            if node.op.leaf:
                self.after.setdefault(node, self.meaning[node])
            for index, k in enumerate(node.op.writes):
                self.after[node.inputs[k]] = meaning(node, inputs, index)

    def _grow(self, free: list[ad.Parameter]) -> None:
        rng = self.rng
        inputs = rng.choices(self.values[-25:] + self.parameters, k=rng.randint(1, 3))
        shape = (rng.choice([7, 40, 200, 1000]),)
        kind = rng.random()
        if kind < 0.3 or (kind < 0.4 and len(inputs) < 2):
            self.values.append(INPLACE(*inputs, shapes=[inputs[0].spec.shape]))
        elif kind < 0.4:
            self.values.append(INPLACE_OF_LAST(*inputs[:2], shapes=[inputs[1].spec.shape]))
        elif kind < 0.6:
            ops = [PLAIN, PYTHON, FALLIBLE, SCRATCHY]
            self.values.append(rng.choice(ops)(*inputs, shapes=[shape]))
        elif kind < 0.75:
            size = inputs[0].spec.size
            self.values.append(
                VIEW(inputs[0], shapes=[rng.choice([(size, 1), (1, size), (size,)])])
            )
        elif kind < 0.85:
            self.values += list(PAIR(*inputs, shapes=[shape, (40,)]))
        elif kind < 0.9 and len(free) > 1:
            self.values.append(UPDATE_TWO(free.pop(), free.pop(), *inputs))
        elif free:
            self.values.append(UPDATE(free.pop(), *inputs))


def meaning(node: Node, inputs: list[int], index: int = 0) -> int:
    """A number that stands for a node's value: equal only for the same computation."""
    if node.op.leaf:
        return hash(("leaf", node.number))
    if "index" in node.attrs:
        return hash((inputs[0], node.attrs["index"]))
    if node.op.view or node.op is ad.copy_op:
        return inputs[0]
    if node.op.outputs > 1:
        return hash((node.op.name, node.number, *inputs))
    return hash((node.op.name, node.number, *inputs, index))


class Memory:
    """Simulated memory that holds meanings; what is overwritten is gone."""

    def __init__(self, plan):
        self.arena: dict[tuple[int, int], int] = {}
        self.outside: dict = {}
        for value in (*plan.feeds, *plan.states, *plan.constants):
            self.outside[value.buffer] = meaning(value.node, [])

    def read(self, value):
        if value.buffer.kind == "arena":
            return self.arena.get(interval(value))
        return self.outside.get(value.buffer)

    def write(self, value, what):
        if value.buffer.kind != "arena":
            self.outside[value.buffer] = what
            return
        mine = interval(value)
        self.arena = {held: v for held, v in self.arena.items() if not overlap(held, mine)}
        self.arena[mine] = what


def interval(value):
    return value.buffer.offset, value.buffer.offset + value.buffer.nbytes


def overlap(a, b):
    return a[0] < b[1] and b[0] < a[1]


class Simulation(unittest.TestCase):
    """Steps read what the graph means, whatever was written before them."""

    def check(self, graph: RandomGraph, reuse: bool) -> None:
        order, fetches = schedule(graph.fetches)
        plan = make_plan(order, fetches, scratch_of, reuse)
        memory = Memory(plan)
        for step in plan.steps:
            self.run_step(step, memory)
        for user_node, value in zip(graph.fetches, plan.fetches, strict=True):
            if value is None:
                self.assertEqual(user_node.op.outputs, 0)
                continue
            self.assertEqual(value.buffer.kind, "fetch")
            self.assertEqual(memory.read(value), graph.meaning[user_node])
        for value in (*plan.feeds, *plan.constants):
            self.assertEqual(memory.read(value), meaning(value.node, []))
        for value in plan.states:
            self.assertEqual(memory.read(value), graph.after[value.node])
        self.check_lifetimes(plan)

    def run_step(self, step, memory):
        held = [memory.read(value) for value in step.inputs]
        for value in step.workspace:
            memory.write(value, -1)
        self.assertEqual([memory.read(value) for value in step.inputs], held)
        self.assertNotIn(None, held)
        written = [step.inputs[k] for k in step.node.op.writes] or step.outputs
        inside = [v for v in (*step.inputs, *step.outputs) if v.buffer.kind == "arena"]
        for a in inside:
            for b in inside:
                same = step.node.op.inplace and interval(a) == interval(b)
                if a.buffer is not b.buffer and not same:
                    self.assertFalse(overlap(interval(a), interval(b)))
        total = meaning(step.node, held)
        for index, value in enumerate(written):
            self.assertTrue(value.buffer.kind in ("arena", "fetch") or step.node.op.writes)
            several = step.node.op.outputs > 1
            one = meaning(step.node, held, index)
            memory.write(value, hash((total, index)) if several else one)

    def check_lifetimes(self, plan):
        first, last = {}, {}
        for now, step in enumerate(plan.steps):
            for value in (*step.inputs, *step.outputs, *step.workspace):
                first.setdefault(value.buffer, now)
                last[value.buffer] = now
        inside = [buffer for buffer in first if buffer.kind == "arena"]
        for a in inside:
            self.assertEqual(a.offset % 256, 0)
            self.assertLessEqual(a.offset + a.nbytes, plan.arena_nbytes)
            self.assertTrue(a.first <= first[a] and last[a] <= a.last)
            for b in inside:
                alive_together = first[a] <= last[b] and first[b] <= last[a]
                if a is not b and alive_together:
                    self.assertFalse(
                        overlap((a.offset, a.offset + a.nbytes), (b.offset, b.offset + b.nbytes))
                    )
        live = max(
            (
                sum(b.nbytes for b in inside if first[b] <= now <= last[b])
                for now in range(len(plan.steps))
            ),
            default=0,
        )
        self.assertGreaterEqual(plan.live_nbytes, live)
        self.assertGreaterEqual(plan.arena_nbytes, live)

    def test_random_graphs(self):
        for seed in range(120):
            with self.subTest(seed=seed):
                self.check(RandomGraph(seed), reuse=True)

    def test_without_reuse_nothing_shares(self):
        for seed in range(20):
            graph = RandomGraph(seed)
            order, fetches = schedule(graph.fetches)
            plan = make_plan(order, fetches, scratch_of, reuse=False)
            taken = sorted(
                (b.offset, b.offset + b.nbytes) for b in plan.buffers if b.kind == "arena"
            )
            for before, after in zip(taken, taken[1:]):
                self.assertLessEqual(before[1], after[0])
        for seed in range(20):
            with self.subTest(seed=seed):
                self.check(RandomGraph(seed), reuse=False)

    def test_large_random_graph(self):
        self.check(RandomGraph(1000, size=600), reuse=True)

    def test_the_simulation_notices_a_clobbered_value(self):
        x = ad.Variable(shape=(64,), dtype=np.float32)
        a = PLAIN(x, shapes=[(64,)])
        b = PLAIN(a, shapes=[(64,)])
        order, fetches = schedule([PLAIN(a, b, shapes=[(64,)])])
        plan = make_plan(order, fetches, scratch_of)
        plan.values[b][0].buffer.offset = plan.values[a][0].buffer.offset
        with self.assertRaises(AssertionError):
            memory = Memory(plan)
            for step in plan.steps:
                self.run_step(step, memory)


class Schedules(unittest.TestCase):
    def setUp(self):
        self.p = ad.Parameter(np.zeros(3, np.float32), "p")
        self.q = ad.Parameter(np.zeros(3, np.float32), "q")

    def names(self, fetches):
        order, _ = schedule(fetches)
        return [node.op.name for node in order if not node.op.leaf]

    def test_readers_go_before_the_update_without_a_copy(self):
        update = ad.assign_op(self.p, self.q + 1)
        reader = ad.exp_op(self.p * 2)
        names = self.names([update, ad.sum_op(reader)])
        self.assertLess(names.index("mul_const"), names.index("assign"))
        self.assertEqual(names.count("copy"), 1)  # the fetched update, nothing else

    def test_a_swap_needs_one_snapshot(self):
        p, q = self.p, self.q
        names = self.names([ad.group_op(ad.assign_op(p, q), ad.assign_op(q, p))])
        self.assertIn(names.count("copy"), (1, 2))

    def test_updates_come_as_early_as_they_can(self):
        net = Training((6, 5, 4))
        names = self.names([net.train])
        self.assertLess(names.index("sgd_update"), len(names) - names[::-1].index("matmul"))

    def test_updates_wait_for_what_may_fail(self):
        update = ad.assign_op(self.p, self.q)
        python = PYTHON(self.q, shapes=[(3,)])
        fallible = FALLIBLE(self.q, shapes=[(3,)])
        names = self.names([update, python, fallible])
        self.assertGreater(names.index("assign"), names.index("python"))
        self.assertGreater(names.index("assign"), names.index("fallible"))

    def test_two_updates_name_both_lines(self):
        first, line = ad.assign_op(self.p, self.q), here()
        second, other = ad.assign_op(self.p, self.q + 1), here()
        with self.assertRaises(GraphError) as caught:
            schedule([first, second])
        for part in ("p is updated twice", line, other):
            self.assertIn(part, str(caught.exception))

    def test_one_update_that_writes_a_parameter_twice(self):
        lr = ad.Parameter(np.float32(1))
        with self.assertRaisesRegex(GraphError, "p"):
            schedule([ad.sgd_momentum_update_op(self.p, self.p, self.q, lr, momentum=0.5)])


class Sharing(unittest.TestCase):
    """Bytes of real graphs, counted again from the steps."""

    def check(self, executor, net):
        plan = executor.plan(net.shapes(1000))
        unshared = sum(
            packing.aligned(value.spec.nbytes)
            for step in plan.steps
            for value in (*step.outputs, *step.workspace)
            if value.buffer.kind == "arena"
        )
        self.assertEqual(plan.unshared_nbytes, unshared)
        # against numpy's plan, which fuses nothing: what is never stored counts as saved
        unfused = ad.Executor(executor.eval_node_list).plan(net.shapes(1000)).unshared_nbytes
        self.assertLessEqual(plan.arena_nbytes, 0.5 * unfused)
        self.assertLessEqual(plan.arena_nbytes, 1.1 * plan.live_nbytes)

    def test_mlp_training_step(self):
        for momentum in (0.0, 0.9):
            net = Training(momentum=momentum)
            self.check(ad.Executor([net.loss, net.train]), net)

    @require(cpu(0))
    def test_mlp_training_step_native(self):
        net = Training()
        self.check(ad.Executor([net.loss, net.train], cpu(0)), net)

    def test_a_long_chain_takes_one_buffer(self):
        y = x = ad.Variable("x")
        for _ in range(500):
            y = ad.exp_op(y)
        plan = ad.Executor([ad.sum_op(y)]).plan({x: (1000,)})
        self.assertEqual((plan.live_nbytes, plan.arena_nbytes), (4000, 4096))

    def test_an_output_takes_over_an_input_that_it_may(self):
        x = ad.Variable(shape=(1000,), dtype=np.float32)
        a, b = (PLAIN(x, shapes=[(1000,)]) for _ in range(2))
        y = INPLACE_OF_LAST(a, b, shapes=[(1000,)])
        order, fetches = schedule([PLAIN(y, shapes=[(1,)])])
        plan = make_plan(order, fetches, scratch_of)
        step = next(step for step in plan.steps if step.node is y)
        self.assertIs(step.outputs[0].buffer, step.inputs[1].buffer)

    def test_an_output_does_not_take_over_what_is_read_as_another_input_too(self):
        x = ad.Variable(shape=(1000,), dtype=np.float32)
        a = PLAIN(x, shapes=[(1000,)])
        y = INPLACE_OF_LAST(a, a, shapes=[(1000,)])
        order, fetches = schedule([PLAIN(y, shapes=[(1,)])])
        plan = make_plan(order, fetches, scratch_of)
        step = next(step for step in plan.steps if step.node is y)
        self.assertIsNot(step.outputs[0].buffer, step.inputs[1].buffer)

    def test_values_of_one_operator_die_one_by_one(self):
        x = ad.Variable(shape=(1000,), dtype=np.float32)
        a, b = PAIR(x, shapes=[(1000,), (40,)])
        y = PLAIN(PLAIN(a, shapes=[(1000,)]), shapes=[(1000,)])
        order, fetches = schedule([PLAIN(y, b, shapes=[(1,)])])
        plan = make_plan(order, fetches, scratch_of)
        first, second = plan.steps[0].outputs
        self.assertEqual((first.buffer.last, second.buffer.last), (1, 3))

    def test_the_table_shows_every_step_and_the_three_counts(self):
        net = Training((6, 5, 4))
        plan = ad.Executor([net.loss, net.train]).plan(net.shapes(8))
        lines = str(plan).splitlines()
        self.assertEqual(len(lines), len(plan.steps) + 2)
        for count in (plan.unshared_nbytes, plan.live_nbytes, plan.arena_nbytes):
            self.assertIn(f"{count:,}", lines[0])


class Packing(unittest.TestCase):
    def check(self, spans, offsets, top):
        self.assertTrue(all(offset % packing.ALIGNMENT == 0 for offset in offsets))
        ends = [o + nbytes for o, (nbytes, _, _) in zip(offsets, spans, strict=True)]
        self.assertGreaterEqual(top, max(ends))
        alive = {}
        for k, (_, first, last) in enumerate(spans):
            for now in range(first, last + 1):
                alive.setdefault(now, []).append(k)
        for together in alive.values():
            together.sort(key=offsets.__getitem__)
            for a, b in zip(together, together[1:]):
                self.assertLessEqual(ends[a], offsets[b])

    ORDERS = {
        "time": packing._in_time_order,
        "bytes": lambda spans: packing._largest_first(spans, 0),
        "bytes x steps": lambda spans: packing._largest_first(spans, 1),
    }

    def spans(self, seed, count, length=20):
        rng = random.Random(seed)
        made = []
        for _ in range(count):
            first = rng.randrange(count)
            nbytes = rng.choice([1, 255, 256, 257, 4096, rng.randint(1, 10**6)])
            made.append((nbytes, first, first + rng.randint(0, length)))
        return made

    def test_every_order(self):
        for name, strategy in self.ORDERS.items():
            for seed in range(20):
                spans = self.spans(seed, 100)
                with self.subTest(order=name, seed=seed):
                    self.check(spans, *strategy(spans))

    def test_the_best_one_is_taken_and_always_the_same(self):
        for seed in range(10):
            spans = self.spans(seed, 80)
            offsets, top = packing.pack(spans)
            self.assertEqual(top, min(order(spans)[1] for order in self.ORDERS.values()))
            self.assertEqual((offsets, top), packing.pack(spans))

    def test_many_spans(self):
        spans = self.spans(0, packing._EXACT_LIMIT + 500)
        offsets, top = packing.pack(spans)
        self.check(spans, offsets, top)
        live = [0] * (len(spans) + 30)
        for nbytes, first, last in spans:
            for now in range(first, last + 1):
                live[now] += packing.aligned(nbytes)
        self.assertLess(top, 2 * max(live))

    def test_without_sharing(self):
        spans = [(100, 0, 1), (300, 5, 6), (256, 7, 8)]
        self.assertEqual(packing.pack(spans, share=False), ([0, 256, 768], 1024))

    def test_nothing_to_pack(self):
        self.assertEqual(packing.pack([]), ([], 0))

"""Lanes: what needs what, byte for byte; steps beside each other; memory that lets them; and on a
GPU the bits of one chain.
"""

from __future__ import annotations

import random
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from devices import EMULATED, fewer, require
from dlsys import autodiff as ad
from dlsys import ndarray, nn, optim
from dlsys.errors import OutOfMemoryError
from dlsys.executor import lower, program
from dlsys.executor.lanes import LARGE, Access, Lanes, in_lanes, in_turn, needs
from dlsys.executor.plan import Plan, Step, make_plan
from dlsys.executor.recording import Ports, fixed_slots
from dlsys.executor.schedule import schedule
from dlsys.graph.node import Spec
from dlsys.runtime.device import counters, cpu, gpu
from dlsys.settings import settings
from graphs import Training
from test_planner import INPLACE, PLAIN, VIEW, RandomGraph, scratch_of

FOREVER = 10**6


def reads(*ranges: tuple[int, int]) -> Access:
    return Access(ranges, ())


def writes(*ranges: tuple[int, int]) -> Access:
    return Access((), ranges)


def accesses_of(plan: Plan) -> list[Access]:
    """What the steps read and write, with every buffer outside the arena far from the others."""
    starts = {buffer: (k + 1) << 40 for k, buffer in enumerate(plan.buffers)}

    def place(value: Any) -> tuple[int, int]:
        inside = value.buffer.kind == "arena"
        start = value.buffer.offset if inside else starts[value.buffer]
        return start + value.skipped_nbytes, start + value.skipped_nbytes + value.spec.nbytes

    def access(step: Step) -> Access:
        written = [step.inputs[k] for k in step.node.op.writes]
        made = [*written, *step.outputs, *step.workspace]
        return Access([place(x) for x in step.inputs], [place(y) for y in made])

    return [access(step) for step in plan.steps]


def conflicts(accesses: Sequence[Access]) -> Iterator[tuple[int, int]]:
    """Pairs (later, earlier) of which one writes bytes that the other reads or writes."""

    def meet(some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
        return any(a[0] < b[1] and b[0] < a[1] for a in some for b in others)

    for later, b in enumerate(accesses):
        for earlier, a in enumerate(accesses[:later]):
            if meet(a.writes, [*b.reads, *b.writes]) or meet(a.reads, b.writes):
                yield later, earlier


def reached(count: int, edges: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """All pairs (later, earlier) that edges (later, earlier) connect over any number of steps."""
    earlier_of: list[set[int]] = [set() for _ in range(count)]
    for later, earlier in sorted(edges):
        earlier_of[later] |= {earlier} | earlier_of[earlier]
    return {(later, earlier) for later in range(count) for earlier in earlier_of[later]}


def ordered(lanes: Lanes) -> set[tuple[int, int]]:
    """The pairs (later, earlier) that lanes and waits put in order."""
    edges = list(lanes.waits)
    for later, lane in enumerate(lanes.lane):
        before = [k for k in range(later) if lanes.lane[k] == lane]
        edges += [(later, before[-1])] if before else []
    return reached(len(lanes.lane), edges)


def planned(graph: RandomGraph, beside: int = 0) -> Plan:
    order, fetches = schedule(graph.fetches)
    return make_plan(order, fetches, scratch_of, beside=beside)


class Needs(unittest.TestCase):
    def test_reading_what_was_written(self):
        self.assertEqual(needs([writes((0, 8)), reads((4, 6))]), [[], [0]])

    def test_writing_what_was_read_or_written(self):
        self.assertEqual(needs([reads((0, 8)), writes((7, 9))]), [[], [0]])
        self.assertEqual(needs([writes((0, 8)), writes((7, 9))]), [[], [0]])

    def test_neighbours_and_two_readers_are_free(self):
        self.assertEqual(needs([writes((0, 8)), writes((8, 16))]), [[], []])
        self.assertEqual(needs([reads((0, 8)), reads((0, 8))]), [[], []])
        self.assertEqual(needs([writes((0, 8)), reads((0, 4)), writes((4, 8))]), [[], [0], [0]])

    def test_every_reader_since_the_last_writer(self):
        steps = [writes((0, 8)), reads((0, 4)), reads((2, 8)), writes((3, 4))]
        self.assertEqual(needs(steps), [[], [0], [0], [2, 1]])

    def test_what_follows_from_others_is_left_out(self):
        steps = [writes((0, 8)), Access([(0, 8)], [(8, 16)]), reads((0, 8), (8, 16))]
        self.assertEqual(needs(steps), [[], [0], [1]])

    def test_nothing_is_touched_by_an_empty_value(self):
        self.assertEqual(needs([writes((0, 8)), reads((4, 4)), writes((4, 4))]), [[], [], []])

    def test_a_view_is_the_bytes_that_it_shows(self):
        x = ad.Variable(shape=(64,), dtype=np.float32)
        whole = PLAIN(x, shapes=[(64,)])
        front = VIEW(whole, shapes=[(32,)])
        order, fetches = schedule([PLAIN(front, shapes=[(8,)]), PLAIN(x, shapes=[(8,)])])
        plan = make_plan(order, fetches, scratch_of)
        names = [step.node for step in plan.steps]
        found = needs(accesses_of(plan))
        reader = next(k for k, node in enumerate(names) if front in node.inputs)
        self.assertEqual(found[reader], [names.index(whole)])

    def test_random_graphs_have_all_their_conflicts_and_no_others(self):
        for seed in range(30):
            accesses = accesses_of(planned(RandomGraph(seed)))
            edges = [(k, j) for k, found in enumerate(needs(accesses)) for j in found]
            with self.subTest(seed=seed):
                pairs = list(conflicts(accesses))
                self.assertEqual(reached(len(accesses), edges), reached(len(accesses), pairs))
                self.assertLessEqual(set(edges), set(pairs))


class LanesOf(unittest.TestCase):
    def test_a_chain_is_one_lane(self):
        lanes = in_lanes([[], [0], [1], [2]], 4)
        self.assertEqual(lanes, Lanes([0, 0, 0, 0], [], 4))

    def test_the_longer_way_keeps_the_lane(self):
        # 0 makes a gradient; 1, 3 and 5 are for weights, 2 and 4 for the layers below, 6 updates.
        lanes = in_lanes([[], [0], [0], [2], [2], [4], [5, 3, 1]], 4)
        self.assertEqual([lanes.lane[k] for k in (0, 2, 4, 5, 6)], [0] * 5)
        self.assertEqual(lanes.waits, [(1, 0), (3, 2), (6, 3), (6, 1)])
        self.assertEqual(lanes.longest, 5)

    def test_steps_on_large_memory_take_turns(self):
        large, small = (0, LARGE), (0, LARGE - 1)
        accesses = [reads(large), reads(small), writes(large), reads(small), reads(large)]
        self.assertEqual(in_turn([[], [0], [1], [], []], accesses), [[], [0], [1, 0], [], [2]])
        self.assertEqual(in_turn([[]] * 3, [reads(small)] * 3), [[]] * 3)

    def test_one_lane_is_a_chain(self):
        lanes = in_lanes([[], [], [], [0]], 1)
        self.assertEqual(lanes, Lanes([0, 0, 0, 0], [], 4))

    def test_few_steps_begin_at_once(self):
        lanes = in_lanes([[] for _ in range(6)], 4)
        behind = ordered(lanes)
        roots = [k for k in range(6) if not any((k, j) in behind for j in range(k))]
        self.assertEqual(roots, [0, 1])

    def test_steps_that_do_nothing_at_either_end(self):
        lanes = in_lanes([[], [0], [0], [2, 1]], 4)
        padded = lanes.padded(1, 1)
        self.assertEqual(padded.lane, [0, *lanes.lane, 0])
        self.assertEqual(padded.waits, [(k + 1, j + 1) for k, j in lanes.waits])
        self.assertEqual(lanes.padded(0, 0), lanes)

    def test_random_graphs_keep_their_order(self):
        for seed in range(60):
            limit = seed % 4 + 1
            accesses = accesses_of(planned(RandomGraph(seed), beside=16))
            lanes = in_lanes(needs(accesses), limit)
            with self.subTest(seed=seed, limit=limit):
                self.assertLessEqual(set(conflicts(accesses)), ordered(lanes))
                self.assertLessEqual(lanes.count, limit)
                self.assertEqual([k for k, _ in lanes.waits], sorted(k for k, _ in lanes.waits))
                depth = [0] * len(accesses)
                for k, j in sorted(ordered(lanes)):
                    depth[k] = max(depth[k], depth[j] + 1)
                self.assertEqual(lanes.longest, max(depth) + 1)

    def test_no_wait_is_there_for_nothing(self):
        for seed in range(10):
            accesses = accesses_of(planned(RandomGraph(seed)))
            lanes = in_lanes(needs(accesses), 4)
            waits = random.Random(seed).sample(lanes.waits, min(5, len(lanes.waits)))
            for wait in waits:
                fewer = Lanes(lanes.lane, [w for w in lanes.waits if w != wait], 0)
                self.assertLess(ordered(fewer), ordered(lanes))


class MemoryForLanes(unittest.TestCase):
    """A plan for steps beside each other shares no memory that would make them wait."""

    def test_no_new_order_comes_from_the_arena(self):
        for seed in range(40):
            order, fetches = schedule(RandomGraph(seed).fetches)
            orders = []
            for ways in ({"reuse": False}, {"beside": FOREVER}):
                plan = make_plan(order, fetches, scratch_of, **ways)
                found = needs(accesses_of(plan))
                edges = [(k, j) for k, ones in enumerate(found) for j in ones]
                orders.append(reached(len(found), edges))
            with self.subTest(seed=seed):
                self.assertEqual(*orders)

    def test_it_costs_memory_where_steps_are_free_and_none_in_a_chain(self):
        more = 0
        for seed in range(10):
            order, fetches = schedule(RandomGraph(seed).fetches)
            plain, beside = (make_plan(order, fetches, scratch_of, beside=n) for n in (0, 16))
            more += beside.live_nbytes - plain.live_nbytes
        self.assertGreater(more, 0)
        x = ad.Variable(shape=(1000,), dtype=np.float32)
        y = x
        for _ in range(50):
            y = PLAIN(y, shapes=[(1000,)])
        order, fetches = schedule([PLAIN(y, shapes=[(1,)])])
        arenas = [make_plan(order, fetches, scratch_of, beside=n).arena_nbytes for n in (0, 16)]
        self.assertEqual(arenas[0], arenas[1])

    def test_a_long_program_costs_no_square_of_its_steps(self):
        order, fetches = schedule(RandomGraph(3).fetches)
        plain, beside = (make_plan(order, fetches, scratch_of, beside=n) for n in (0, FOREVER))
        self.assertNotEqual(plain.live_nbytes, beside.live_nbytes)
        for most, wanted in ((len(plain.steps), beside), (len(plain.steps) - 1, plain)):
            with mock.patch("dlsys.executor.plan.MOST", most):
                made = make_plan(order, fetches, scratch_of, beside=FOREVER)
            self.assertEqual(made.live_nbytes, wanted.live_nbytes)

    def forked(self, elements: int, beside: int) -> Plan:
        """a is read by one step and then, the last to need it, by another that may overwrite it."""
        x = ad.Variable(shape=(elements,), dtype=np.float32)
        a = PLAIN(x, shapes=[(elements,)])
        reader = PLAIN(a, shapes=[(1,)])
        last = INPLACE(a, shapes=[(elements,)])
        order, fetches = schedule([PLAIN(reader, last, shapes=[(1,)])])
        return make_plan(order, fetches, scratch_of, beside=beside)

    def test_a_reader_beside_it_forbids_a_result_in_place(self):
        for elements, beside, in_place in ((64, 0, True), (64, 8, False), (4 << 20, 8, True)):
            plan = self.forked(elements, beside)
            (step,) = [step for step in plan.steps if step.node.op is INPLACE]
            with self.subTest(elements=elements, beside=beside):
                self.assertEqual(step.outputs[0].buffer is step.inputs[0].buffer, in_place)

    @require(cpu(0))
    def test_a_network_keeps_its_bounds(self):
        with mock.patch.object(program.NativeBackend, "beside", 16):
            net = Training()
            executor = ad.Executor([net.loss, net.train], cpu(0))
            plan = executor.plan(net.shapes(1000))
        unshared = ad.Executor([net.loss, net.train]).plan(net.shapes(1000)).unshared_nbytes
        self.assertLessEqual(plan.arena_nbytes, 0.5 * unshared)
        self.assertLessEqual(plan.arena_nbytes, 1.1 * plan.live_nbytes)


@require(cpu(0))
class Segments(unittest.TestCase):
    """The lanes of a program bound to memory, with its copies."""

    def lanes(self, limit: int) -> tuple[Plan, Lanes]:
        net = Training((20, 16, 12, 4), momentum=0.9)
        executor = ad.Executor([net.loss, net.train], cpu(0))
        executor.run(net.batch(8))
        with mock.patch.object(program.NativeBackend, "beside", 16):
            plan = executor.plan(net.shapes(8))
        backend = program.NativeBackend(cpu(0))
        runner = backend.runner(plan)
        backend.reserve(runner, [])
        slots = fixed_slots(cpu(0), [value.spec for value in plan.feeds])
        for value, slot in zip(plan.feeds, slots):
            runner.table.place(value.buffer, slot.data_address)
        with mock.patch.object(settings, "lanes", limit):
            (segment,) = runner.segments
            return plan, segment.lanes(Ports(slots, True), Ports((), False))

    def test_a_training_step_runs_in_several(self):
        plan, lanes = self.lanes(4)
        self.assertEqual(len(lanes.lane), len(plan.steps) + 2)
        self.assertGreater(lanes.count, 1)
        self.assertLess(lanes.longest, len(plan.steps) + 1)
        behind = ordered(lanes)
        for k, step in enumerate(plan.steps):
            if any(value.buffer.kind == "feed" for value in step.inputs) or step.node.op.writes:
                self.assertIn((k + 1, 0), behind, "the copies of the feeds come first")

    def test_one_lane(self):
        plan, lanes = self.lanes(1)
        self.assertEqual((lanes.count, lanes.longest), (1, len(plan.steps) + 1))

    def test_a_long_program_is_one_lane(self):
        steps = len(self.lanes(4)[0].steps) + 1  # and the copies of the feeds
        for most, several in ((steps, True), (steps - 1, False)):
            with mock.patch.object(lower, "MOST", most):
                self.assertEqual(self.lanes(4)[1].count > 1, several)

    def test_closed_ports_copy_their_slots_to_themselves(self):
        slots = fixed_slots(cpu(0), [Spec((3,), np.dtype(np.float32))] * 2)
        for inward in (True, False):
            ports = Ports(slots, inward)
            for k in range(2):
                ports.connect(k, 4096 * (k + 1))
            self.assertEqual([row[inward] for row in ports.rows()], [4096, 8192])
            ports.close()
            addresses = [slot.data_address for slot in slots]
            self.assertEqual([row[:2] for row in ports.rows()], [[a, a] for a in addresses])


def perceptron() -> nn.Module:
    rng = np.random.default_rng(5)
    layers = [nn.Linear(784, 64, rng=rng), nn.ReLU(), nn.Dropout(0.3, rng=rng)]
    layers += [nn.Linear(64, 48, rng=rng), nn.ReLU(), nn.Dropout(0.3, rng=rng)]
    return nn.Sequential(*layers, nn.Linear(48, 10, rng=rng))


def on_gpu(value: np.ndarray) -> ndarray.NDArray:
    return ndarray.array(value, gpu(0))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp": (perceptron, 100),
    "lenet": (lambda: nn.LeNet5(seed=5), 32),
    "resnet": (lambda: nn.ResNetMNIST(seed=5), 16),
}


@require(gpu(0))
class GpuLanes(unittest.TestCase):
    def trained(
        self, name: str, many: bool = False, capture: bool = True, lanes: int = 4
    ) -> tuple[list, Any]:
        """The loss and the state after 40 steps with Adam, and the report."""
        make, rows = NETWORKS[name]
        rng = np.random.default_rng(1)
        rows = fewer(rows)
        images = on_gpu(rng.random((rows, 784), np.float32))
        labels = on_gpu(rng.integers(0, 10, rows))
        with mock.patch.multiple(settings, capture=capture, lanes=lanes):
            net = make()
            x = ad.Variable("x", shape=(None, 784), dtype=np.float32)
            y = ad.Variable("y", shape=(None,), dtype=np.int64)
            loss = ad.softmax_cross_entropy(net(x), y)
            optimizer = optim.Adam(optim.Cosine(0.01, 20))
            executor = ad.Executor([loss, optimizer.minimize(loss, net.parameters())], gpu(0))
            feeds = {x: images, y: labels}
            for _ in range(1 if many else 40):
                made = executor.run(feeds)[0]
            if many:
                made = executor.run_many(39, feeds)[0]
            states = [node for node in executor.topo_order if isinstance(node, ad.Parameter)]
            return [value.asnumpy() for value in (made, *states)], executor.report()

    def test_the_bits_of_one_chain(self):
        for name in NETWORKS.keys() - ({"resnet"} if EMULATED else set()):  # minutes
            plain, _ = self.trained(name, capture=False)
            chain, _ = self.trained(name, lanes=1)
            ways = {"chain": chain}
            for limit in (2, 4):
                ways[f"{limit} lanes"], report = self.trained(name, lanes=limit)
                (segment,) = report.plans[0].segments
                self.assertEqual(segment.lanes, limit, name)
                self.assertLess(segment.longest, segment.steps, name)
            for limit in (1, 4):
                ways[f"many, {limit} lane(s)"], report = self.trained(name, True, lanes=limit)
                self.assertEqual(report.plans[0].together > 1, name != "resnet")
            for way, values in ways.items():
                with self.subTest(network=name, way=way):
                    for a, b in zip(values, plain, strict=True):
                        np.testing.assert_array_equal(a, b)

    def test_many_replays(self):
        """Steps that overwrite what others read a moment before, thousands of times."""
        ends = []
        for capture, limit in ((False, 1), (True, 1), (True, 4)):
            with mock.patch.multiple(settings, capture=capture, lanes=limit):
                net = Training((20, 16, 12, 10, 4), momentum=0.9)
                executor = ad.Executor([net.loss, net.train], gpu(0))
                loss = executor.run_many(fewer(4000) + 1, net.batch(8))[0]
                ends.append([loss.asnumpy(), *net.values()])
        for values in ends[1:]:
            for a, b in zip(values, ends[0], strict=True):
                np.testing.assert_array_equal(a, b)

    def test_runs_together_that_change_nothing_share_no_place_to_meet(self):
        """Losses whose blocks add up their sums in one place, in runs that need not wait."""
        net = Training((20, 16, 4))
        rows = {node: np.repeat(value, 500, 0) for node, value in net.batch(8).items()}
        executor = ad.Executor([net.loss, *ad.gradients(net.loss, net.parameters)], gpu(0))
        first = executor.run(rows, True)
        for n in (33,) if EMULATED else (100, 101, 102):
            for a, b in zip(executor.run_many(n, rows, True), first, strict=True):
                np.testing.assert_array_equal(a, b)

    def summed(self, *turns: int, check: bool = False):
        """The plan of an executor that adds up its feed, from the host and from the GPU by turns,
        so many runs each.
        """
        x, total = ad.Variable("x"), ad.Parameter(np.zeros(5, np.float32), "total")
        added = ad.assign_op(total, total + x)
        executor = ad.Executor([added, x * 2], gpu(0))
        wanted = np.zeros(5, np.float32)
        for turn, n in enumerate(turns):
            host = np.full(5, turn + 1, np.float32)
            fed = on_gpu(host) if turn % 2 else host
            sums, double = executor.run_many(n, {x: fed}, convert_to_numpy_ret_vals=True)
            wanted += n * host
            np.testing.assert_array_equal(sums, wanted)
            np.testing.assert_array_equal(double, 2 * host)
            if check:
                executor.check({x: fed})  # which leaves other addresses in the table of arrays
        (plan,) = executor.report().plans
        return plan

    def test_feeds_of_runs_together(self):
        self.assertGreater(self.summed(50, 1, 64, 33, 40, check=True).together, 1)

    def test_feeds_and_fetches_of_many_runs_and_of_one_by_turns(self):
        self.assertEqual(self.summed(1, 1, 3, 1, 2, 5, 1).together, 1)

    def test_runs_together_read_a_feed_once(self):
        w = ad.Parameter(np.ones(5, np.float32), "w")
        x = ad.Variable("x")
        executor = ad.Executor([ad.sum_op(x), ad.assign_op(w, w + 1.0)], gpu(0))
        executor.run({x: on_gpu(np.ones(5, np.float32))})
        for _ in range(2):
            w.set(np.ones(5, np.float32))
            self.assertEqual(float(executor.run_many(70, {x: w.storage.array})[0]), 5)
            self.assertEqual(w.asnumpy().tolist(), [71.0] * 5)
        self.assertGreater(executor.report().plans[0].together, 1)

    def test_a_feed_that_shows_a_parameter_is_read_before_its_update(self):
        w = ad.Parameter(np.ones(70_000, np.float32), "w")
        x = ad.Variable("x")
        update = ad.assign_op(w, ad.exp_op(w * 0.0) * 3.0)
        executor = ad.Executor([ad.sum_op(x), update], gpu(0))
        executor.run({x: on_gpu(np.ones(70_000, np.float32))})
        for _ in range(3):
            w.set(np.ones(70_000, np.float32))
            self.assertEqual(float(executor.run({x: w.storage.array})[0]), 70_000)

    def test_runs_that_cannot_be_recorded_together_are_launched_one_by_one(self):
        net = Training((20, 16, 12, 4))
        executor = ad.Executor([net.loss, net.train], gpu(0))
        feeds = net.batch(8)
        executor.run_many(3, feeds)
        with mock.patch.object(program, "Rounds", side_effect=OutOfMemoryError("no room")):
            with self.assertWarnsRegex(RuntimeWarning, "one by one: no room"):
                executor.run_many(66, feeds)
        before = counters()
        executor.run_many(66, feeds)
        self.assertEqual(counters().program_launches - before.program_launches, 66)

    def test_lanes_that_make_no_sense_are_refused(self):
        x = ad.Variable("x")
        for lanes, said in (
            (Lanes([0, 9, 0, 1], [], 1), "part 1 is in lane 9"),
            (Lanes([0, 1, 0, 1], [(1, 2)], 1), "part 1 cannot wait for part 2"),
            (Lanes([0, 1, 0, 1], [(2, 0), (1, 0)], 1), "part 1 cannot wait for part 0"),
        ):
            executor = ad.Executor([ad.sum_op(ad.exp_op(x))], gpu(0))
            host = np.ones((2, 3), np.float32)
            executor.run({x: host})
            with mock.patch.object(lower.Segment, "lanes", return_value=lanes):
                with self.assertWarnsRegex(RuntimeWarning, said):
                    got = executor.run({x: host}, convert_to_numpy_ret_vals=True)[0]
            np.testing.assert_allclose(got, 6 * np.e, rtol=1e-6)

    def test_no_launch_outside_the_graph(self):
        net = Training((20, 16, 12, 4))
        executor = ad.Executor([net.loss, net.train], gpu(0))
        feeds = net.batch(8)
        executor.run_many(3, feeds)
        before = counters()
        executor.run_many(10, feeds)
        after = counters()
        self.assertEqual(after.program_launches - before.program_launches, 10)
        self.assertEqual(after.kernel_launches, before.kernel_launches)
        executor.run_many(66, feeds)  # records runs together: 1 run, 8 times 8, 1 run
        again = counters()
        self.assertEqual(again.program_launches - after.program_launches, 10)
        executor.run_many(66, feeds)
        self.assertEqual(counters().kernel_launches, again.kernel_launches)
        self.assertIn("lane(s), at most", str(executor.report()))


if __name__ == "__main__":
    unittest.main()

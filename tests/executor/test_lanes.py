"""Lanes: what needs what, byte for byte; steps beside each other; memory that lets them; and on a
GPU the bits of one chain.
"""

from __future__ import annotations

import random
import unittest
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys.executor import backend
from dlsys.executor.plan.memory import Plan, Step, make_plan
from dlsys.executor.plan.schedule import schedule
from dlsys.executor.plan.streams import LARGE, Access, Lanes, in_lanes, in_turn, needs, settled
from dlsys.executor.run import tables as lower
from dlsys.executor.run.cuda_graph import Ports, fixed_slots
from dlsys.graph.spec import Spec
from dlsys.runtime.device import cpu
from dlsys.settings import settings
from executor.test_planner import INPLACE, PLAIN, VIEW, RandomGraph, scratch_of
from support.devices import require
from support.graphs import Training

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
        reader = next(k for k, node in enumerate(names) if front in set(node.inputs))
        self.assertEqual(found[reader], [next(k for k, node in enumerate(names) if node is whole)])

    def test_random_graphs_have_all_their_conflicts_and_no_others(self):
        for seed in range(30):
            accesses = accesses_of(planned(RandomGraph(seed)))
            edges = [(k, j) for k, found in enumerate(needs(accesses)) for j in found]
            with self.subTest(seed=seed):
                pairs = list(conflicts(accesses))
                self.assertEqual(reached(len(accesses), edges), reached(len(accesses), pairs))
                self.assertLessEqual(set(edges), set(pairs))


class Settled(unittest.TestCase):
    ACCESSES = [writes((0, 8)), Access([(0, 8)], [(8, 16)]), reads((0, 8), (8, 16))]
    INPUTS = [[], [(0, 8)], [(0, 8), (8, 16)]]

    def test_what_the_step_before_does_not_write(self):
        self.assertEqual(settled([0, 0, 0], self.INPUTS, self.ACCESSES), [0, 0, 0b01])

    def test_the_step_before_is_that_of_the_lane(self):
        self.assertEqual(settled([0, 1, 0], self.INPUTS, self.ACCESSES), [0, 0, 0b10])

    def test_a_byte_is_enough(self):
        accesses = [writes((0, 8)), reads((7, 9), (8, 9))]
        self.assertEqual(settled([0, 0], [[], [(7, 9), (8, 9)]], accesses), [0, 0b10])

    def test_inputs_beyond_the_bits_are_not_settled(self):
        inputs = [[], [(8, 9)] * 70]
        self.assertEqual(settled([0, 0], inputs, [writes((0, 8)), reads()]), [0, 2**64 - 1])


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
            with mock.patch("dlsys.executor.plan.memory.MOST", most):
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
        with mock.patch.object(backend.NativeBackend, "beside", 16):
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
        with mock.patch.object(backend.NativeBackend, "beside", 16):
            plan = executor.plan(net.shapes(8))
        native = backend.NativeBackend(cpu(0))
        runner = native.runner(plan)
        native.reserve(runner, [])
        slots = fixed_slots(cpu(0), [value.spec for value in plan.feeds])
        for value, slot in zip(plan.feeds, slots):
            runner.table.place(value.buffer, slot.data_address)
        with mock.patch.object(settings, "streams", limit):
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
                ports.addresses[k] = 4096 * (k + 1)
            self.assertEqual([row[inward] for row in ports.rows()], [4096, 8192])
            ports.close()
            addresses = [slot.data_address for slot in slots]
            self.assertEqual([row[:2] for row in ports.rows()], [[a, a] for a in addresses])


if __name__ == "__main__":
    unittest.main()

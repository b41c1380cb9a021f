"""Graph streams: dependencies byte for byte, the assignment of streams, and plans of memory for
parallel steps.
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
from dlsys.executor.capture import graph as captured
from dlsys.executor.capture.graph import GraphCopies, fixed_slots, streams_of
from dlsys.executor.capture.hazards import (
    LARGE,
    Access,
    dependencies,
    lifetimes_of,
    serialize_large,
)
from dlsys.executor.capture.streams import (
    GraphStreams,
    assign_streams,
    chained,
    ready_inputs,
    wait_for_all,
)
from dlsys.executor.plan.memory import Plan, Step, make_plan
from dlsys.executor.plan.schedule import schedule
from dlsys.graph.node import Node
from dlsys.graph.spec import Spec
from dlsys.runtime.device import cpu
from dlsys.settings import settings
from executor.plan.test_planner import INPLACE, PLAIN, VIEW, RandomGraph, scratch_of
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


def ordered(streams: GraphStreams) -> set[tuple[int, int]]:
    """The pairs (later, earlier) that streams and waits put in order."""
    edges = list(streams.waits)
    for later, stream in enumerate(streams.stream):
        before = [k for k in range(later) if streams.stream[k] == stream]
        edges += [(later, before[-1])] if before else []
    return reached(len(streams.stream), edges)


def planned(graph: RandomGraph, overlap: int = 0) -> Plan:
    return plan_of(*schedule(graph.fetches), overlap=overlap)


def plan_of(order: Sequence[Node], fetches: Sequence[Node], overlap: int = 0, **ways: Any) -> Plan:
    """A plan whose steps may run in parallel up to a distance of `overlap`."""
    lifetimes = lifetimes_of(order, overlap) if overlap else None
    return make_plan(order, fetches, scratch_of, lifetimes=lifetimes, **ways)


def parallel() -> Any:
    """Lets native devices plan as one that runs steps in parallel does."""
    return mock.patch.object(
        backend.NativeBackend, "lifetimes", lambda self, order: lifetimes_of(order)
    )


class Dependencies(unittest.TestCase):
    def test_reading_what_was_written(self):
        self.assertEqual(dependencies([writes((0, 8)), reads((4, 6))]), [[], [0]])

    def test_writing_what_was_read_or_written(self):
        self.assertEqual(dependencies([reads((0, 8)), writes((7, 9))]), [[], [0]])
        self.assertEqual(dependencies([writes((0, 8)), writes((7, 9))]), [[], [0]])

    def test_neighbors_and_two_readers_are_free(self):
        self.assertEqual(dependencies([writes((0, 8)), writes((8, 16))]), [[], []])
        self.assertEqual(dependencies([reads((0, 8)), reads((0, 8))]), [[], []])
        self.assertEqual(
            dependencies([writes((0, 8)), reads((0, 4)), writes((4, 8))]), [[], [0], [0]]
        )

    def test_every_reader_since_the_last_writer(self):
        steps = [writes((0, 8)), reads((0, 4)), reads((2, 8)), writes((3, 4))]
        self.assertEqual(dependencies(steps), [[], [0], [0], [2, 1]])

    def test_what_follows_from_others_is_left_out(self):
        steps = [writes((0, 8)), Access([(0, 8)], [(8, 16)]), reads((0, 8), (8, 16))]
        self.assertEqual(dependencies(steps), [[], [0], [1]])

    def test_nothing_is_touched_by_an_empty_value(self):
        self.assertEqual(
            dependencies([writes((0, 8)), reads((4, 4)), writes((4, 4))]), [[], [], []]
        )

    def test_a_view_is_the_bytes_that_it_shows(self):
        x = ad.Variable(shape=(64,), dtype=np.float32)
        whole = PLAIN(x, shapes=[(64,)])
        front = VIEW(whole, shapes=[(32,)])
        order, fetches = schedule([PLAIN(front, shapes=[(8,)]), PLAIN(x, shapes=[(8,)])])
        plan = make_plan(order, fetches, scratch_of)
        names = [step.node for step in plan.steps]
        found = dependencies(accesses_of(plan))
        reader = next(k for k, node in enumerate(names) if front in set(node.inputs))
        self.assertEqual(found[reader], [next(k for k, node in enumerate(names) if node is whole)])

    def test_random_graphs_have_all_their_conflicts_and_no_others(self):
        for seed in range(30):
            accesses = accesses_of(planned(RandomGraph(seed)))
            edges = [(k, j) for k, found in enumerate(dependencies(accesses)) for j in found]
            with self.subTest(seed=seed):
                pairs = list(conflicts(accesses))
                self.assertEqual(reached(len(accesses), edges), reached(len(accesses), pairs))
                self.assertLessEqual(set(edges), set(pairs))


EARLY = 1 << 63  # the bit of a task whose successor may be set up early


class ReadyInputs(unittest.TestCase):
    ACCESSES = [writes((0, 8)), Access([(0, 8)], [(8, 16)]), reads((0, 8), (8, 16))]
    INPUTS = [[], [(0, 8)], [(0, 8), (8, 16)]]

    def test_what_the_step_before_does_not_write(self):
        self.assertEqual(ready_inputs([0, 0, 0], self.INPUTS, self.ACCESSES), [EARLY, 0, 0b01])

    def test_the_step_before_is_that_of_the_stream(self):
        self.assertEqual(ready_inputs([0, 1, 0], self.INPUTS, self.ACCESSES), [0, 0, 0b10])

    def test_a_successor_may_be_set_up_early_for_what_no_task_writes(self):
        accesses = [writes((0, 8)), writes((8, 16)), reads((0, 8), (16, 24))]
        constant, both = [[], [], [(8, 16), (16, 24)]], [[], [], [(0, 8), (16, 24)]]
        self.assertEqual(ready_inputs([0, 0, 0], constant, accesses), [EARLY, EARLY, 0b10])
        self.assertEqual(ready_inputs([0, 0, 0], both, accesses), [EARLY, 0, 0b11])

    def test_a_byte_is_enough(self):
        accesses = [writes((0, 8)), reads((7, 9), (8, 9))]
        self.assertEqual(ready_inputs([0, 0], [[], [(7, 9), (8, 9)]], accesses), [EARLY, 0b10])

    def test_inputs_beyond_the_bits_are_not_ready(self):
        inputs = [[], [(8, 9)] * 70]
        found = ready_inputs([0, 0], inputs, [writes((0, 8)), reads()])
        self.assertEqual(found, [EARLY, 2**63 - 1])


class AssignStreams(unittest.TestCase):
    def test_a_chain_is_one_stream(self):
        streams = assign_streams([[], [0], [1], [2]], 4)
        self.assertEqual(streams, GraphStreams([0, 0, 0, 0], [], 4))

    def test_the_longer_way_keeps_the_stream(self):
        # 0 makes a gradient; 1, 3 and 5 are for weights, 2 and 4 for the layers below, 6 updates.
        streams = assign_streams([[], [0], [0], [2], [2], [4], [5, 3, 1]], 4)
        self.assertEqual([streams.stream[k] for k in (0, 2, 4, 5, 6)], [0] * 5)
        self.assertEqual(streams.waits, [(1, 0), (3, 2), (6, 3), (6, 1)])
        self.assertEqual(streams.longest, 5)

    def test_steps_on_large_memory_are_serialized(self):
        large, small = (0, LARGE), (0, LARGE - 1)
        accesses = [reads(large), reads(small), writes(large), reads(small), reads(large)]
        self.assertEqual(
            serialize_large([[], [0], [1], [], []], accesses), [[], [0], [1, 0], [], [2]]
        )
        self.assertEqual(serialize_large([[]] * 3, [reads(small)] * 3), [[]] * 3)

    def test_one_stream_is_a_chain(self):
        streams = assign_streams([[], [], [], [0]], 1)
        self.assertEqual(streams, GraphStreams([0, 0, 0, 0], [], 4))

    def test_few_steps_begin_at_once(self):
        streams = assign_streams([[] for _ in range(6)], 4)
        behind = ordered(streams)
        roots = [k for k in range(6) if not any((k, j) in behind for j in range(k))]
        self.assertEqual(roots, [0, 1])

    def test_steps_that_do_nothing_at_either_end(self):
        streams = assign_streams([[], [0], [0], [2, 1]], 4)
        padded = streams.padded(1, 1)
        self.assertEqual(padded.stream, [0, *streams.stream, 0])
        self.assertEqual(padded.waits, [(k + 1, j + 1) for k, j in streams.waits])
        self.assertEqual(streams.padded(0, 0), streams)

    def test_random_graphs_keep_their_order(self):
        for seed in range(60):
            limit = seed % 4 + 1
            accesses = accesses_of(planned(RandomGraph(seed), overlap=16))
            streams = assign_streams(dependencies(accesses), limit)
            with self.subTest(seed=seed, limit=limit):
                self.assertLessEqual(set(conflicts(accesses)), ordered(streams))
                self.assertLessEqual(streams.count, limit)
                self.assertEqual([k for k, _ in streams.waits], sorted(k for k, _ in streams.waits))
                depth = [0] * len(accesses)
                for k, j in sorted(ordered(streams)):
                    depth[k] = max(depth[k], depth[j] + 1)
                self.assertEqual(streams.longest, max(depth) + 1)

    def test_no_wait_is_there_for_nothing(self):
        for seed in range(10):
            accesses = accesses_of(planned(RandomGraph(seed)))
            streams = assign_streams(dependencies(accesses), 4)
            waits = random.Random(seed).sample(streams.waits, min(5, len(streams.waits)))
            for wait in waits:
                fewer = GraphStreams(streams.stream, [w for w in streams.waits if w != wait], 0)
                self.assertLess(ordered(fewer), ordered(streams))


class TasksApart(unittest.TestCase):
    """Those that communicate: in one order, in a stream that has nothing else."""

    def test_they_are_a_chain(self) -> None:
        direct = [[], [0], [1], [2], [3]]
        self.assertEqual(chained(direct, [0, 2, 4]), [[], [0], [1, 0], [2], [3, 2]])
        self.assertEqual(chained(direct, []), direct)

    def test_they_have_a_stream(self) -> None:
        """A backward pass whose gradients are reduced as they come, and then used."""
        direct = [[], [0], [1], [2], [2, 1], [4, 3], [5, 3]]
        found = assign_streams(direct, 4, apart=[3, 5])
        own = found.stream[3]
        self.assertEqual([k for k, stream in enumerate(found.stream) if stream == own], [3, 5])
        self.assertEqual(len({found.stream[k] for k in (0, 1, 2, 4)}), 1, "backward goes on")
        self.assertIn((3, 2), found.waits)
        self.assertIn((6, 5), found.waits)

    def test_one_waits_for_all_before_it(self) -> None:
        direct = [[], [0], [0], [1], [], [3]]
        wait_for_all(direct, [5])
        self.assertEqual(direct, [[], [0], [0], [1], [], [4, 3, 2]])

    def test_the_one_that_touches_most_goes_on(self) -> None:
        direct = [[], [0], [0], [0], [3, 2, 1]]
        found = assign_streams(direct, 4, apart=[4], nbytes=[1, 2, 9, 3, 9])
        self.assertEqual(found.stream[2], found.stream[0])
        self.assertNotIn(found.stream[0], (found.stream[1], found.stream[3]))

    def test_random_graphs(self) -> None:
        rng = random.Random(3)
        for _ in range(200):
            count = rng.randrange(2, 30)
            direct = [
                sorted(rng.sample(range(k), min(k, rng.randrange(3))), reverse=True)
                for k in range(count)
            ]
            apart = [k for k in range(count) if rng.random() < 0.3]
            direct = chained(direct, apart)
            limit = rng.randrange(1, 4)
            found = assign_streams(direct, limit, apart)
            self.assertLessEqual(found.count, limit + bool(apart))
            theirs = {found.stream[k] for k in apart}
            self.assertLessEqual(len(theirs), 1)
            others = {stream for k, stream in enumerate(found.stream) if k not in apart}
            self.assertTrue(theirs.isdisjoint(others))
            self.check_order(found, direct)

    def check_order(self, found: GraphStreams, direct: Sequence[Sequence[int]]) -> None:
        """Every task comes after those that it depends on, by its stream and its waits."""
        before: list[set[int]] = []
        tails: dict[int, int] = {}
        for k, stream in enumerate(found.stream):
            direct_now = [earlier for task, earlier in found.waits if task == k]
            direct_now += [tails[stream]] if stream in tails else []
            before.append(set(direct_now).union(*(before[x] for x in direct_now)))
            self.assertLessEqual(set(direct[k]), before[k])
            tails[stream] = k


class MemoryForStreams(unittest.TestCase):
    """A plan for parallel steps shares no memory that would make them wait."""

    def test_no_new_order_comes_from_the_arena(self):
        for seed in range(40):
            order, fetches = schedule(RandomGraph(seed).fetches)
            orders = []
            for ways in ({"reuse": False}, {"overlap": FOREVER}):
                plan = plan_of(order, fetches, **ways)
                found = dependencies(accesses_of(plan))
                edges = [(k, j) for k, ones in enumerate(found) for j in ones]
                orders.append(reached(len(found), edges))
            with self.subTest(seed=seed):
                self.assertEqual(*orders)

    def test_it_costs_memory_where_steps_are_free_and_none_in_a_chain(self):
        more = 0
        for seed in range(10):
            order, fetches = schedule(RandomGraph(seed).fetches)
            plain, parallel = (plan_of(order, fetches, overlap=n) for n in (0, 16))
            more += parallel.live_nbytes - plain.live_nbytes
        self.assertGreater(more, 0)
        x = ad.Variable(shape=(1000,), dtype=np.float32)
        y = x
        for _ in range(50):
            y = PLAIN(y, shapes=[(1000,)])
        order, fetches = schedule([PLAIN(y, shapes=[(1,)])])
        arenas = [plan_of(order, fetches, overlap=n).arena_nbytes for n in (0, 16)]
        self.assertEqual(arenas[0], arenas[1])

    def test_a_long_program_costs_no_square_of_its_steps(self):
        order, fetches = schedule(RandomGraph(3).fetches)
        plain, parallel = (plan_of(order, fetches, overlap=n) for n in (0, FOREVER))
        self.assertNotEqual(plain.live_nbytes, parallel.live_nbytes)
        for most, wanted in ((len(plain.steps), parallel), (len(plain.steps) - 1, plain)):
            with mock.patch("dlsys.executor.capture.hazards.MAX_STEPS", most):
                made = plan_of(order, fetches, overlap=FOREVER)
            self.assertEqual(made.live_nbytes, wanted.live_nbytes)

    def forked(self, elements: int, overlap: int) -> Plan:
        """a is read by one step and then, the last to need it, by another that may overwrite it."""
        x = ad.Variable(shape=(elements,), dtype=np.float32)
        a = PLAIN(x, shapes=[(elements,)])
        reader = PLAIN(a, shapes=[(1,)])
        last = INPLACE(a, shapes=[(elements,)])
        order, fetches = schedule([PLAIN(reader, last, shapes=[(1,)])])
        return plan_of(order, fetches, overlap=overlap)

    def test_a_parallel_reader_forbids_a_result_in_place(self):
        for elements, overlap, in_place in ((64, 0, True), (64, 8, False), (4 << 20, 8, True)):
            plan = self.forked(elements, overlap)
            (step,) = [step for step in plan.steps if step.node.op is INPLACE]
            with self.subTest(elements=elements, overlap=overlap):
                self.assertEqual(step.outputs[0].buffer is step.inputs[0].buffer, in_place)

    @require(cpu(0))
    def test_a_network_keeps_its_bounds(self):
        with parallel():
            net = Training()
            executor = ad.Executor([net.loss, net.train], cpu(0))
            plan = executor.plan(net.shapes(1000))
        unshared = ad.Executor([net.loss, net.train]).plan(net.shapes(1000)).unshared_nbytes
        self.assertLessEqual(plan.arena_nbytes, 0.5 * unshared)
        self.assertLessEqual(plan.arena_nbytes, 1.1 * plan.live_nbytes)


@require(cpu(0))
class Segments(unittest.TestCase):
    """The graph streams of a program bound to memory, with its copies."""

    def streams(self, limit: int) -> tuple[Plan, GraphStreams]:
        net = Training((20, 16, 12, 4), momentum=0.9)
        executor = ad.Executor([net.loss, net.train], cpu(0))
        executor.run(net.batch(8))
        with parallel():
            plan = executor.plan(net.shapes(8))
        native = backend.NativeBackend(cpu(0))
        runner = native.runner(plan)
        native.reserve(runner)
        slots = fixed_slots(cpu(0), [value.spec for value in plan.feeds])
        for value, slot in zip(plan.feeds, slots):
            runner.table.place(value.buffer, slot.data_address)
        with mock.patch.object(settings, "streams", limit):
            (segment,) = runner.segments
            return plan, streams_of([segment], GraphCopies(slots, True), GraphCopies((), False))

    def test_a_training_step_runs_in_several(self):
        plan, streams = self.streams(4)
        self.assertEqual(len(streams.stream), len(plan.steps) + 2)
        self.assertGreater(streams.count, 1)
        self.assertLess(streams.longest, len(plan.steps) + 1)
        behind = ordered(streams)
        for k, step in enumerate(plan.steps):
            if any(value.buffer.kind == "feed" for value in step.inputs) or step.node.op.writes:
                self.assertIn((k + 1, 0), behind, "the copies of the feeds come first")

    def test_one_stream(self):
        plan, streams = self.streams(1)
        self.assertEqual((streams.count, streams.longest), (1, len(plan.steps) + 1))

    def test_a_long_program_is_one_stream(self):
        steps = len(self.streams(4)[0].steps) + 1  # and the copies of the feeds
        for most, several in ((steps, True), (steps - 1, False)):
            with mock.patch.object(captured, "MAX_STEPS", most):
                self.assertEqual(self.streams(4)[1].count > 1, several)

    def test_disconnected_copies_copy_their_slots_to_themselves(self):
        slots = fixed_slots(cpu(0), [Spec((3,), np.dtype(np.float32))] * 2)
        for inward in (True, False):
            copies = GraphCopies(slots, inward)
            for k in range(2):
                copies.addresses[k] = 4096 * (k + 1)
            self.assertEqual([row[inward] for row in copies.rows()], [4096, 8192])
            copies.disconnect()
            addresses = [slot.data_address for slot in slots]
            self.assertEqual([row[:2] for row in copies.rows()], [[a, a] for a in addresses])

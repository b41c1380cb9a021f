"""Graph streams on a GPU: the bits of one stream, whatever runs in parallel."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray, nn, optim
from dlsys.data import Dataset, DeviceLoader
from dlsys.errors import OutOfMemoryError
from dlsys.executor.capture import graph as captured
from dlsys.executor.capture import program
from dlsys.executor.capture.streams import GraphStreams
from dlsys.runtime.device import counters, gpu
from dlsys.settings import settings
from support import sample
from support.devices import EMULATED, fewer, require, slow
from support.graphs import Training

FOREVER = 10**6
STEPS = 12 if EMULATED else 40
WORTH = 1 if EMULATED else captured._WORTHWHILE  # so that STEPS pay for recording several runs


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
class GpuStreams(unittest.TestCase):
    def trained(
        self,
        name: str,
        many: bool = False,
        capture: bool = True,
        streams: int = 4,
        most_nodes: int = 1000,
    ) -> tuple[list, Any]:
        """The loss and the state after STEPS steps with Adam, and the report."""
        make, rows = NETWORKS[name]
        rng = np.random.default_rng(1)
        rows = fewer(rows)
        images = on_gpu(rng.random((rows, 784), np.float32))
        labels = on_gpu(rng.integers(0, 10, rows))
        worth = mock.patch.object(captured, "_WORTHWHILE", WORTH)
        nodes = mock.patch.object(captured, "_MOST_NODES", most_nodes)
        with worth, nodes, mock.patch.multiple(settings, capture=capture, streams=streams):
            net = make()
            x = ad.Variable("x", shape=(None, 784), dtype=np.float32)
            y = ad.Variable("y", shape=(None,), dtype=np.int64)
            loss = ad.softmax_cross_entropy(net(x), y)
            optimizer = optim.Adam(optim.Cosine(0.01, 20))
            executor = ad.Executor([loss, optimizer.minimize(loss, net.parameters())], gpu(0))
            feeds = {x: images, y: labels}
            for _ in range(1 if many else STEPS):
                made = executor.run(feeds)[0]
            if many:
                made = executor.run_many(STEPS - 1, feeds)[0]
            states = [node for node in executor.topo_order if isinstance(node, ad.Parameter)]
            return [value.asnumpy() for value in (made, *states)], executor.report()

    @slow
    def test_the_bits_of_one_chain(self):
        for name in NETWORKS.keys() - ({"resnet"} if EMULATED else set()):  # minutes
            plain, _ = self.trained(name, capture=False)
            chain, _ = self.trained(name, streams=1)
            ways = {"chain": chain}
            for limit in (*sample.rest([2]), 4):
                ways[f"{limit} streams"], report = self.trained(name, streams=limit)
                (segment,) = report.plans[0].segments
                self.assertEqual(segment.streams, limit, name)
                self.assertLess(segment.longest, segment.steps, name)
            for limit in (*sample.rest([1]), 4):
                ways[f"many, {limit} stream(s)"], report = self.trained(name, True, streams=limit)
                self.assertGreater(report.plans[0].unrolled, 1, name)
            for way, values in ways.items():
                with self.subTest(network=name, way=way):
                    for a, b in zip(values, plain, strict=True):
                        np.testing.assert_array_equal(a, b)

    def test_runs_of_many_kernels_are_not_unrolled(self):
        many, report = self.trained("mlp", True, most_nodes=1)
        self.assertEqual(report.plans[0].unrolled, 1)
        for a, b in zip(many, self.trained("mlp")[0], strict=True):
            np.testing.assert_array_equal(a, b)

    @slow
    def test_many_replays(self):
        """Steps that overwrite what others read a moment before, thousands of times."""
        ends = []
        for capture, limit in ((False, 1), (True, 1), (True, 4)):
            with mock.patch.multiple(settings, capture=capture, streams=limit):
                net = Training((20, 16, 12, 10, 4), momentum=0.9)
                executor = ad.Executor([net.loss, net.train], gpu(0))
                loss = executor.run_many(fewer(sample.count(4000, 2000)) + 1, net.batch(8))[0]
                ends.append([loss.asnumpy(), *net.values()])
        for values in ends[1:]:
            for a, b in zip(values, ends[0], strict=True):
                np.testing.assert_array_equal(a, b)

    def from_device(self, runs: tuple[int, ...], capture: bool = True) -> tuple[list, Any, list]:
        """The loss and the Parameters after runs, so many at a time, over batches that are taken on
        the GPU; the report; and the streams and operators of unrolled graphs.
        """
        rng = np.random.default_rng(3)
        images = rng.integers(0, 256, (200, 20), dtype=np.uint8)
        loader = DeviceLoader(Dataset(images, rng.integers(0, 4, 200)), 16, shuffle=True)
        found: list = []
        streams_of = captured.streams_of

        def noted(segments, inputs, outputs):
            streams = streams_of(segments, inputs, outputs)
            if len(segments) > 1:
                found.append((streams, [s.node.op for one in segments for s in one.steps]))
            return streams

        with (
            mock.patch.object(settings, "capture", capture),
            mock.patch.object(captured, "streams_of", noted),
        ):
            x, y = loader.inputs()
            net = nn.MLP([20, 16, 4], seed=2)
            loss = ad.softmax_cross_entropy(net(x), y)
            update = optim.SGD(0.1, momentum=0.9).minimize(loss, net.parameters())
            executor = ad.Executor([loss, update], gpu(0))
            for n in runs:
                made = executor.run_many(n)[0]
            states = [node for node in executor.topo_order if isinstance(node, ad.Parameter)]
            return [value.asnumpy() for value in (made, *states)], executor.report(), found

    def test_batches_taken_in_parallel_with_the_step_before(self):
        plain, _, _ = self.from_device((41,), capture=False)
        single, _, none = self.from_device((1,) * 41)
        many, report, ((streams, operators),) = self.from_device((1, 40))
        self.assertEqual(none, [])
        for a, b, c in zip(plain, single, many, strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c)
        self.assertGreater(report.plans[0].unrolled, 1)
        behind: list[set[int]] = []  # of each step: those that it comes after
        for k, stream in enumerate(streams.stream):
            before = [e for later, e in streams.waits if later == k]
            before += [e for e in range(k) if streams.stream[e] == stream][-1:]
            behind.append(set(before).union(*(behind[e] for e in before)))
        takes = [k for k, op in enumerate(operators, 1) if op.name == "shuffled_batch"]
        self.assertGreater(len(takes), 2)
        for first, second in zip(takes, takes[1:]):
            updates = [k for k in range(first, second) if "momentum" in operators[k - 1].name]
            self.assertTrue(updates)
            self.assertTrue(behind[second].isdisjoint(updates))

    @slow
    def test_unrolled_runs_that_change_nothing_share_no_arrival_counter(self):
        """Losses whose blocks add up their sums in one workspace, in runs that need not wait."""
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

    def test_feeds_of_unrolled_runs(self):
        self.assertGreater(self.summed(50, 1, 64, 33, 40, check=True).unrolled, 1)

    def test_feeds_and_fetches_of_many_runs_and_of_one_by_turns(self):
        self.assertEqual(self.summed(1, 1, 3, 1, 2, 5, 1).unrolled, 1)

    def test_unrolled_runs_read_a_feed_once(self):
        w = ad.Parameter(np.ones(5, np.float32), "w")
        x = ad.Variable("x")
        executor = ad.Executor([ad.sum_op(x), ad.assign_op(w, w + 1.0)], gpu(0))
        executor.run({x: on_gpu(np.ones(5, np.float32))})
        for _ in range(2):
            w.set(np.ones(5, np.float32))
            self.assertEqual(float(executor.run_many(70, {x: w.storage.array})[0]), 5)
            self.assertEqual(w.asnumpy().tolist(), [71.0] * 5)
        self.assertGreater(executor.report().plans[0].unrolled, 1)

    def test_a_feed_that_shows_a_parameter_is_read_before_its_update(self):
        w = ad.Parameter(np.ones(70_000, np.float32), "w")
        x = ad.Variable("x")
        update = ad.assign_op(w, ad.exp_op(w * 0.0) * 3.0)
        executor = ad.Executor([ad.sum_op(x), update], gpu(0))
        executor.run({x: on_gpu(np.ones(70_000, np.float32))})
        for _ in range(3):
            w.set(np.ones(70_000, np.float32))
            self.assertEqual(float(executor.run({x: w.storage.array})[0]), 70_000)

    def test_runs_that_cannot_be_unrolled_are_launched_one_by_one(self):
        net = Training((20, 16, 12, 4))
        executor = ad.Executor([net.loss, net.train], gpu(0))
        feeds = net.batch(8)
        executor.run_many(3, feeds)
        with mock.patch.object(program, "UnrolledGraph", side_effect=OutOfMemoryError("no room")):
            with self.assertWarnsRegex(RuntimeWarning, "one by one: no room"):
                executor.run_many(66, feeds)
        before = counters()
        executor.run_many(66, feeds)
        self.assertEqual(counters().program_launches - before.program_launches, 66)

    def test_streams_that_make_no_sense_are_refused(self):
        x = ad.Variable("x")
        for streams, said in (
            (GraphStreams([0, 9, 0, 1], [], 1), "task 1 is in graph stream 9"),
            (GraphStreams([0, 1, 0, 1], [(1, 2)], 1), "task 1 cannot wait for task 2"),
            (GraphStreams([0, 1, 0, 1], [(2, 0), (1, 0)], 1), "task 1 cannot wait for task 0"),
        ):
            executor = ad.Executor([ad.sum_op(ad.exp_op(x))], gpu(0))
            host = np.ones((2, 3), np.float32)
            executor.run({x: host})
            with mock.patch.object(captured, "streams_of", return_value=streams):
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
        before = counters()
        executor.run_many(66, feeds)  # captures an unrolled graph: 1 run, 4 times 16, 1 run
        after = counters()
        self.assertEqual(after.program_launches - before.program_launches, 6)
        executor.run_many(34, feeds)  # a shorter one: 1 run, 4 times 8, 1 run
        again = counters()
        self.assertEqual(again.program_launches - after.program_launches, 6)
        executor.run_many(66, feeds)
        executor.run_many(34, feeds)
        self.assertEqual(counters().kernel_launches, again.kernel_launches)
        self.assertIn("stream(s), at most", str(executor.report()))

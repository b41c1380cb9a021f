"""Predictions between arrays of the host: one launch that reads and writes pinned memory."""

from __future__ import annotations

import ctypes
import unittest

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import nn
from dlsys.errors import DeviceError, OutOfRangeError
from dlsys.executor.capture.program import CapturingProgram
from dlsys.executor.on_host import HostCall, _calls, run_on_host
from dlsys.runtime.library import load
from support.devices import require

GPU, CPU = dl.ndarray.gpu(0), dl.ndarray.cpu(0)
RNG = np.random.default_rng(0)


def programs(executor: ad.Executor) -> list[CapturingProgram]:
    """The programs of an executor."""
    return [found[0] for found in executor._runners.values()]


@require(GPU)
class OnHost(unittest.TestCase):
    def setUp(self) -> None:
        self.x, self.w = ad.Variable("x"), ad.Parameter(np.eye(3, dtype=np.float32), "w")
        self.executor = ad.Executor([ad.matmul_op(self.x, self.w), self.x + 1], ctx=GPU)

    def check(self, rows: int) -> list[np.ndarray]:
        x = RNG.standard_normal((rows, 3)).astype(np.float32)
        product, more = run_on_host(self.executor, [x])
        np.testing.assert_array_equal(product, x)
        np.testing.assert_array_equal(more, x + 1)
        return [product, more]

    def test_results_are_fresh_arrays(self) -> None:
        held = [self.check(2)[0] for _ in range(4)]
        self.assertEqual(len({y.tobytes() for y in held}), 4)
        (program,) = programs(self.executor)
        self.assertIsNotNone(program._host_graph)
        self.assertEqual(program.runs, 4)

    def test_other_shapes_take_over_the_arena(self) -> None:
        for rows in (2, 2, 2, 4096, 4096, 2, 2, 3, 2):
            self.check(rows)

    def test_other_runs_come_in_between(self) -> None:
        for _ in range(3):
            self.check(2)
            x = np.ones((2, 3), np.float32)
            got = self.executor.run({self.x: dl.ndarray.array(x, GPU)})[1]
            np.testing.assert_array_equal(got.asnumpy(), x + 1)

    def test_large_arrays_are_copied_in_parts(self) -> None:
        for _ in range(3):
            self.check(1 << 16)
        self.assertIsNone(programs(self.executor)[0]._host_graph)

    def test_a_moved_parameter_is_planned_for_anew(self) -> None:
        for _ in range(3):
            self.check(2)
        self.w.set(2 * np.eye(3, dtype=np.float32))
        x = np.ones((2, 3), np.float32)
        np.testing.assert_array_equal(run_on_host(self.executor, [x])[0], 2 * x)

    def test_values_that_are_refused(self) -> None:
        table = ad.Parameter(RNG.standard_normal((5, 4)).astype(np.float32), "table")
        index = ad.Variable("index", dtype=np.int64)
        executor = ad.Executor([ad.gather_op(table, index)], ctx=GPU)
        for _ in range(3):
            run_on_host(executor, [np.array([1, 4])])
        with self.assertRaises(OutOfRangeError):
            run_on_host(executor, [np.array([1, 5])])
        got = run_on_host(executor, [np.array([0, 3])])[0]
        np.testing.assert_array_equal(got, table.asnumpy()[[0, 3]])

    def kernels(self, program: dl.inference.program.InferenceProgram) -> int:
        """Those of the one launch that is a prediction."""
        (entry,) = program._executors.values()
        graph = programs(entry.executor)[-1]._host_graph
        assert graph is not None
        return graph._graph.info.kernels

    def test_kernels_read_and_write_memory_of_the_host(self) -> None:
        """A small image and a few outputs are copied by no kernel of their own."""
        model, lenet = nn.MLP((36, 24, 20, 10), seed=0), nn.LeNet5(seed=0)
        wide = nn.MLP((36, 24, 600), seed=0)  # of more outputs than are told one by one
        for network, shape, count in (
            (model, (36,), 1),
            (wide, (36,), 1),
            (lenet, (1, 28, 28), 3),
        ):
            program, plain = dl.infer(network, ctx=GPU), dl.infer(network)
            for k in range(6):
                x = RNG.standard_normal((1, *shape)).astype(np.float32)
                np.testing.assert_allclose(program(x), plain(x), rtol=1e-4, atol=1e-5)
                if k == 3:  # another run in between uses arrays of the device
                    (entry,) = program._executors.values()
                    feeds = {entry._inputs[0]: dl.ndarray.array(x, GPU)}
                    got = entry.executor.run(feeds)[0].asnumpy()
                    np.testing.assert_array_equal(got, program(x))
            self.assertEqual(self.kernels(program), count)

    def test_a_value_that_is_refused_before_the_kernel_that_tells_the_host(self) -> None:
        layers = nn.Embedding(5, 36, rng=0), nn.Flatten(), nn.MLP((36, 24, 10), seed=0)
        program, plain = (dl.infer(nn.Sequential(*layers), ctx=ctx) for ctx in (GPU, None))
        for index in (1, 4, 2, 5, 3, 0):
            x = np.array([[index]])
            if index == 5:
                with self.assertRaisesRegex(OutOfRangeError, "index 5"):
                    program(x)
            else:
                np.testing.assert_allclose(program(x), plain(x), rtol=1e-4, atol=1e-5)
        self.assertEqual(self.kernels(program), 3)  # a copy of the index, gather and the chain

    def test_larger_batches_are_copied_to_the_device(self) -> None:
        program, x = dl.infer(nn.LeNet5(seed=0), ctx=GPU), np.ones((2, 1, 28, 28), np.float32)
        for _ in range(3):
            program(x)
        self.assertEqual(self.kernels(program), 4)

    def test_one_image_of_a_convolution_with_pooling(self) -> None:
        """An output a block: 3, 5 and 7 wide filters, windows of 2 and 3, several channels."""
        for kernel, window, channels in ((3, 2, 1), (5, 2, 6), (7, 3, 8), (2, 3, 3), (4, 2, 40)):
            layers = [nn.Conv2d(channels, 5, kernel, padding=1, rng=0), nn.ReLU()]
            model = nn.Sequential(*layers, nn.MaxPool2d(window))
            x = RNG.standard_normal((2, channels, 17, 19)).astype(np.float32)
            program, wanted = dl.infer(model, ctx=GPU), dl.infer(model)(x)
            for _ in range(3):
                # Sums of up to 640 products in another order: 1e-6 was measured.
                np.testing.assert_allclose(program(x), wanted, rtol=1e-5, atol=1e-5)


@require(CPU)
class OnCpu(unittest.TestCase):
    """One call, from the second run on: the same values as the usual way."""

    def setUp(self) -> None:
        self.x, self.w = ad.Variable("x"), ad.Parameter(np.eye(3, dtype=np.float32), "w")
        self.executor = ad.Executor([ad.matmul_op(self.x, self.w), self.x + 1], ctx=CPU)

    def check(self, x: np.ndarray) -> list[np.ndarray]:
        found = run_on_host(self.executor, [x])
        np.testing.assert_array_equal(found[0], x @ self.w.asnumpy())
        np.testing.assert_array_equal(found[1], x + 1)
        return found

    def call(self) -> HostCall | None:
        return _calls.get(programs(self.executor)[-1])

    def test_results_are_fresh_and_feeds_are_read_where_they_lie(self) -> None:
        held = [self.check(RNG.standard_normal((2, 3)).astype(np.float32))[0] for _ in range(4)]
        self.assertEqual(len({y.tobytes() for y in held}), 4)
        self.assertIsNotNone(self.call())
        content = RNG.standard_normal(7).astype(np.float32).tobytes()
        self.check(np.frombuffer(content, np.float32, 6, 4).reshape(2, 3))  # read-only, unaligned
        self.check(np.ones((3, 2), np.float32).T)
        self.check(np.ones((4, 6), np.float32)[::2, ::2])

    def test_other_runs_come_in_between(self) -> None:
        for rows in (2, 2, 2, 500, 500, 2, 2):
            x = RNG.standard_normal((rows, 3)).astype(np.float32)
            self.check(x)
            kept = self.executor.run({self.x: x})[1]
            self.check(x + 1)
            np.testing.assert_array_equal(kept.asnumpy(), x + 1)

    def test_a_changed_parameter_is_read(self) -> None:
        x = np.ones((2, 3), np.float32)
        for value in (1, 2, 3):
            self.w.set(value * np.eye(3, dtype=np.float32))
            for _ in range(3):
                self.check(x)

    def test_values_that_are_refused(self) -> None:
        table = ad.Parameter(RNG.standard_normal((5, 4)).astype(np.float32), "table")
        index = ad.Variable("index", dtype=np.int64)
        executor = ad.Executor([ad.gather_op(table, index)], ctx=CPU)
        for _ in range(3):
            run_on_host(executor, [np.array([1, 4])])
        with self.assertRaisesRegex(OutOfRangeError, "5"):
            run_on_host(executor, [np.array([1, 5])])
        got = run_on_host(executor, [np.array([0, 3])])[0]
        np.testing.assert_array_equal(got, table.asnumpy()[[0, 3]])

    def test_what_changes_parameters_or_has_no_kernel_runs_the_usual_way(self) -> None:
        x, w = ad.Variable("x"), ad.Parameter(np.zeros(3, np.float32), "w")
        w.to(CPU)
        executor = ad.Executor([ad.assign_op(w, w + x)], ctx=CPU)
        for k in range(4):
            run_on_host(executor, [np.ones(3, np.float32)])
            np.testing.assert_array_equal(w.asnumpy(), k + 1)

    def test_a_fetch_that_no_step_makes(self) -> None:
        executor = ad.Executor([self.w], ctx=CPU)
        for _ in range(3):
            np.testing.assert_array_equal(run_on_host(executor, [])[0], np.eye(3))


@require(CPU)
class Pinned(unittest.TestCase):
    def test_the_cpu_has_no_memory_of_its_own(self) -> None:
        library, address = load(), ctypes.c_void_p()
        with self.assertRaisesRegex(DeviceError, "is that of the host"):
            library.check(library.cdll.DLHostAlloc(CPU.struct, 8, ctypes.byref(address)))


if __name__ == "__main__":
    unittest.main()

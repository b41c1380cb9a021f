"""What a user's own `compute` must do, and how the executor finds out that it does not."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray
from dlsys.errors import GraphError
from dlsys.executor.debug.contract import _left, _pattern
from dlsys.runtime.device import Context, cpu, gpu
from dlsys.settings import settings
from support.devices import require
from support.graphs import here


class OwnOp(ad.Op):
    """Calls `act(inputs, output, use_numpy)`; the output has the shape of the first input."""

    def infer_shape(self, node, input_shapes):
        return input_shapes[0]

    def compute(self, node, input_vals, output_val, use_numpy=True):
        return node.attrs["act"](input_vals, output_val, use_numpy)


own_op = OwnOp()


def copies(inputs: list, output: Any, use_numpy: bool) -> None:
    output[...] = inputs[0]


def writes_nothing(inputs: list, output: Any, use_numpy: bool) -> None:
    pass


def on_host(write: Callable[[np.ndarray, np.ndarray], None]) -> Callable[..., None]:
    """An `act` that lets `write(input, output)` change the output as a numpy array."""

    def act(inputs: list, output: Any, use_numpy: bool) -> None:
        x, y = (a if use_numpy else a.asnumpy() for a in (inputs[0], output))
        write(x, y)
        if not use_numpy:
            output[:] = y

    return act


def writes_all_but_one(x: np.ndarray, y: np.ndarray) -> None:
    y.reshape(-1)[1:] = x.reshape(-1)[1:]


def adds(x: np.ndarray, y: np.ndarray) -> None:
    with np.errstate(invalid="ignore"):
        y += x


def writes_an_input(inputs: list, output: Any, use_numpy: bool) -> None:
    output[...] = inputs[0]
    inputs[0][...] = output.asnumpy() * 2 if not use_numpy else output * 2


def returns(inputs: list, output: Any, use_numpy: bool) -> Any:
    return inputs[0]


def returns_the_output(inputs: list, output: Any, use_numpy: bool) -> Any:
    output[...] = inputs[0]
    return output


class OwnCompute:
    """The same on every device."""

    ctx: Context | None = None
    host = np.arange(6, dtype=np.float32).reshape(2, 3)

    def setUp(self) -> None:
        self.x = ad.Variable("x")
        self.count = ad.Parameter(np.float32(0), "count")

    def executor(self, act: Callable[..., Any], x: ad.Node | None = None) -> ad.Executor:
        update = ad.assign_op(self.count, self.count + 1)
        y = own_op(self.x if x is None else x, update, act=act)
        return ad.Executor([y * 2, y], self.ctx)

    def check_refused(self, act: Callable[..., Any], message: str) -> None:
        executor = self.executor(act)
        for _ in range(3):  # a GPU captures the second run
            with self.assertRaisesRegex(GraphError, f"operator own: its compute {message}"):
                executor.run({self.x: self.host})
            self.assertEqual(self.count.asnumpy(), 0)

    def test_an_output_that_is_not_written(self) -> None:
        for act in (writes_nothing, on_host(writes_all_but_one), on_host(adds)):
            self.check_refused(act, "left a part of its output unwritten")

    def test_a_value_that_is_returned(self) -> None:
        self.check_refused(returns, "returned (ndarray|NDArray), which nobody reads")
        value = self.executor(returns_the_output).run({self.x: self.host}, True)[1]
        np.testing.assert_array_equal(value, self.host)

    def test_an_input_that_is_written(self) -> None:
        self.check_refused(writes_an_input, "wrote to (an input|a read-only array)")
        np.testing.assert_array_equal(self.host, OwnCompute.host)

    def test_a_parameter_or_a_part_that_is_written(self) -> None:
        table = ad.Parameter(self.host, "table")
        for x in (table, ad.reshape_op(table, (3, 2)), table[1:], table * 1):
            with self.assertRaisesRegex(GraphError, "own: its compute wrote"):
                self.executor(writes_an_input, x).run()
            np.testing.assert_array_equal(table.asnumpy(), self.host)
            value = self.executor(copies, x).run({}, True)[1]
            self.assertEqual(value.tobytes(), self.host.tobytes()[-value.nbytes :])

    def test_the_line_is_named(self) -> None:
        y, line = own_op(self.x, act=writes_nothing), here()
        with self.assertRaisesRegex(GraphError, rf"\[{line}\]"):
            ad.Executor([y], self.ctx).run({self.x: self.host})

    def test_every_call_is_checked_while_steps_are_watched(self) -> None:
        acts = iter((copies, copies, writes_nothing, writes_nothing))
        executor = self.executor(lambda *arguments: next(acts)(*arguments))
        executor.run({self.x: self.host})
        executor.run({self.x: self.host})
        executor.run({self.x: self.host})  # by now it is trusted
        with mock.patch.object(settings, "debug_nan", True):
            with self.assertRaisesRegex(GraphError, "unwritten"):
                executor.run({self.x: self.host})
        self.assertEqual(self.count.asnumpy(), 3)

    def test_values_that_look_odd_are_no_fault(self) -> None:
        nan = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFC00000], np.uint32)
        random = np.random.default_rng(5).integers(0, 256, 4096, np.uint8)
        for host in (nan.view(np.float32), np.zeros((0, 3), np.float32), np.float32(np.nan)):
            value = self.executor(copies).run({self.x: host}, True)[1]
            self.assertEqual(value.tobytes(), host.tobytes())
        pixels = ad.Variable("pixels", dtype=np.uint8)
        for host in (random, random[:1], random[:0], np.full(50, 0xA5, np.uint8)):
            y = own_op(pixels, act=copies)
            value = ad.Executor([y], self.ctx).run({pixels: host}, True)[0]
            np.testing.assert_array_equal(value, host)

    def test_unwritten_integers_and_bools(self) -> None:
        half = on_host(lambda x, y: y.__setitem__(slice(20), x[:20]))
        for dtype in (np.uint8, np.int32, np.int64, np.bool_):
            x = ad.Variable("x", dtype=dtype)
            for act in (writes_nothing, half):
                with self.subTest(dtype=dtype), self.assertRaisesRegex(GraphError, "unwritten"):
                    y = own_op(x, act=act)
                    ad.Executor([y], self.ctx).run({x: np.ones(40, dtype)})


class Pattern(unittest.TestCase):
    """The pattern itself."""

    def test_it_is_found_in_every_dtype(self) -> None:
        for name in ("f2", "f4", "f8", "i1", "u1", "i2", "i4", "i8", "?"):
            pattern = _pattern((7, 9), np.dtype(name))
            self.assertTrue(_left(pattern.copy(), pattern), name)
            self.assertFalse(_left(np.ones((7, 9), name), pattern), name)
            if name[0] == "f":
                self.assertTrue(np.isnan(pattern).all())
                self.assertFalse(_left(np.full((7, 9), np.nan, name), pattern))
                with np.errstate(invalid="ignore"):
                    self.assertTrue(_left(-(pattern * 2) + 1, pattern), name)


class NumpyOwnCompute(OwnCompute, unittest.TestCase):
    def test_inputs_are_read_only(self) -> None:
        seen = []

        def look(inputs: list, output: Any, use_numpy: bool) -> None:
            seen.extend(x.flags.writeable for x in inputs)
            output[...] = inputs[0]

        for x in (self.x, self.x * 2, ad.Parameter(self.host), ad.constant(self.host)):
            executor = self.executor(look, x)
            for _ in range(2):
                executor.run({self.x: self.host} if self.x in set(executor.topo_order) else {})
        self.assertEqual(set(seen), {False})
        self.assertTrue(self.host.flags.writeable)


@require(cpu(0))
class CpuOwnCompute(OwnCompute, unittest.TestCase):
    ctx = cpu(0)

    def test_a_fed_array_of_the_device_is_restored(self) -> None:
        fed = ndarray.array(self.host, self.ctx)
        with self.assertRaisesRegex(GraphError, "wrote to an input"):
            self.executor(writes_an_input).run({self.x: fed})
        np.testing.assert_array_equal(fed.asnumpy(), self.host)


@require(gpu(0))
class GpuOwnCompute(CpuOwnCompute):
    ctx = gpu(0)

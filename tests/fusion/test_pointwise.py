"""Pointwise fusion: which elementwise operators become one kernel, which must not, and that the
bits stay what they were.
"""

from __future__ import annotations

import re
import unittest
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import optim
from dlsys.dtypes import FLOAT16, FLOAT32, ROUNDING, bfloat16, rounded
from dlsys.errors import GraphError, KernelError
from dlsys.fusion.pointwise import (
    INPUTS,
    INSTRUCTIONS,
    encode,
    pointwise_op,
    steps_between,
)
from dlsys.graph.node import Node, find_topo_sort
from dlsys.ndarray import array, empty, launch
from dlsys.ops.elementwise import cast_op
from dlsys.ops.loss.regression import huber_op
from dlsys.optim import schedule
from dlsys.runtime.device import Context
from dlsys.runtime.interface import interface
from dlsys.runtime.target import Target
from dlsys.settings import settings
from support import sample
from support.devices import on_native_devices
from support.fusion import fused as run_fusions
from support.fusion import require_fusion, without
from support.graphs import operators, simplified, variable

NARROW = (bfloat16, FLOAT16)
SPECIALS = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, 3e38], np.float32)
SCHEDULES = (
    schedule.OneCycle(0.1, 1000),
    schedule.OneCycle(0.1, 1000, shape="linear"),
    schedule.Warmup(schedule.Cosine(0.1, 500, 0.01), 50),
    schedule.Warmup(schedule.Step(0.1, 30), 10),
    schedule.WarmRestarts(0.1, 40),
    schedule.Polynomial(0.1, 300, 0.9),
    schedule.Exponential(0.1, 0.99),
)


def gelu(x: Node) -> Node:
    return 0.5 * x * (1 + ad.tanh_op(0.79788456 * (x + 0.044715 * x**3)))


def huber(x: Node, y: Node) -> Node:
    error = ad.abs_op(x - y)
    return ad.where_op(ad.less_op(error, 1.0), 0.5 * error * error, error - 0.5)


def fused(fetches: Sequence[Node]) -> list[Node]:
    """The fetches after the passes."""
    return run_fusions(simplified(fetches), "cross_entropy", "gemm_epilogue", "pointwise")


class Rewrites(unittest.TestCase):
    """That they happen, and only where they may."""

    def setUp(self) -> None:
        self.x, self.y = variable("x", 6, 5), variable("y", 6, 5)
        self.row, self.column = variable("row", 5), variable("column", 6, 1)

    def assert_becomes(self, fetches: Sequence[Node], *names: str) -> list[Node]:
        found = fused(fetches)
        self.assertEqual(operators(found), sorted(names))
        return found

    def test_a_schedule_is_one_kernel(self) -> None:
        step = ad.Parameter(np.int64(0), "step", trainable=False)
        for one in SCHEDULES:
            with self.subTest(type(one).__name__):
                (node,) = self.assert_becomes([one.node(step)], "pointwise")
                self.assertEqual([x.name for x in node.inputs], ["step"])

    def test_what_users_write_by_hand_is_one_kernel(self) -> None:
        x, y = self.x, self.y
        for node in (
            gelu(x),
            huber(x, y),
            ad.relu_op(x + y),
            0.3 * x + 0.7 * y,
            (x - self.column) * self.row + 1,
            cast_op(ad.greater_op(x, y), np.float32) * x,
            ad.logical_and_op(ad.less_op(x, y), ad.greater_op(x, 0.0)),
            cast_op(variable("pixels", 6, 5, dtype=np.uint8), np.float32) / 255 - 0.5,
        ):
            with self.subTest(str(node)):
                self.assert_becomes([node], "pointwise")

    def test_gradients_of_what_users_write_are_a_few(self) -> None:
        total = ad.sum_op(huber(self.x, self.y))
        names = operators(fused([total, *ad.gradients(total, [self.x])]))
        self.assertLess(len(names), 8)
        self.assertEqual(names.count("pointwise"), 2)

    def test_what_somebody_else_reads_is_still_computed(self) -> None:
        shared = ad.exp_op(self.x)
        self.assert_becomes([ad.relu_op(shared + 1), shared], "pointwise", "exp")
        self.assert_becomes([ad.relu_op(shared + 1), ad.sum_op(shared)], "pointwise", "exp", "sum")
        self.assert_becomes(
            [shared * 2 + 1, ad.tanh_op(shared) * 3], "pointwise", "pointwise", "exp"
        )

    def test_what_is_read_twice_inside_is_computed_once(self) -> None:
        value = self.x
        for _ in range(10):
            value = value * value
        (node,) = self.assert_becomes([value], "pointwise")
        self.assertEqual(length(node), 10)
        text = re.sub(r"\.\d+", "", str(node.attrs["body"]))  # numbers grow with the nodes made
        self.assertLess(len(text), 400)

    def test_single_operators_stay_as_they_are(self) -> None:
        self.assert_becomes([self.x + self.y], "add")
        self.assert_becomes([cast_op(variable("k", 3, dtype=np.int64), np.float32)], "cast")

    def test_programs_end_where_the_shape_changes(self) -> None:
        mean = ad.mean_op(self.x, axis=1, keepdims=True)
        scale = ad.rsqrt_op(mean * mean + 1e-5)
        self.assert_becomes([(self.x - mean) * scale], "pointwise", "pointwise", "mean")
        self.assert_becomes([ad.exp_op(2 * self.row) + self.x], "add", "pointwise")

    def test_operands_that_are_repeated_along_scattered_axes_stay_outside(self) -> None:
        x, y = variable("x", 2, 3, 4), variable("y", 2, 1, 4)
        self.assert_becomes([ad.relu_op(x + y)], "add", "relu")
        self.assert_becomes([ad.relu_op(x + variable("z", 3, 1))], "pointwise")
        self.assert_becomes([ad.relu_op(x + variable("u", 2, 1, 1))], "pointwise")

    def test_products_take_what_follows_them_first(self) -> None:
        product = ad.matmul_op(self.x, variable("w", 5, 7))
        bias = variable("bias", 7)
        self.assert_becomes([ad.relu_op(product + bias)], "matmul_bias")
        self.assert_becomes([ad.exp_op(ad.relu_op(product + bias)) * 2], "pointwise", "matmul_bias")

    def test_integers_stay_unless_casts_enclose_them(self) -> None:
        whole = cast_op(self.x * 3, np.int64)
        self.assert_becomes([cast_op(whole, np.float32) - 0.5], "pointwise")
        self.assert_becomes(
            [cast_op(whole, np.float32) - 0.5, whole], "cast", "pointwise", "mul_const"
        )
        k = variable("k", 6, 5, dtype=np.int64)
        self.assert_becomes(
            [ad.where_op(ad.less_op(k, k), self.x, self.y) * 2], "pointwise", "less"
        )

    def test_casts_of_16_bits_join_what_is_between_them(self) -> None:
        for dtype in NARROW:
            h = variable("h", 6, 5, dtype=dtype)
            wide = ad.relu_op(cast_op(h, FLOAT32)) + self.x
            (node,) = self.assert_becomes([cast_op(wide, dtype)], "pointwise")
            self.assertEqual((length(node), node.spec.dtype), (2, dtype))  # it rounds as it stores
            (node,) = self.assert_becomes([ad.exp_op(cast_op(wide, dtype)) * 2], "pointwise")
            self.assertEqual(length(node), 5)
            self.assert_becomes([gelu(h)], "pointwise")
            self.assert_becomes([ad.less_op(2 * h, 0.3)], "pointwise")

    def test_floats_of_16_bits_stay_apart_where_no_kernel_takes_them(self) -> None:
        kernels = frozenset({("pointwise", FLOAT32)})
        target = Target("other", kernels)
        for dtype, name in ((np.float32, "pointwise"), *((dtype, "relu") for dtype in NARROW)):
            fetches = simplified([ad.relu_op(2 * variable("h", 6, 5, dtype=dtype))])
            self.assertIn(name, operators(run_fusions(fetches, "pointwise", target=target)))

    def test_immediates_are_no_inputs(self) -> None:
        node = ad.where_op(ad.less_op(self.x, 0.0), ad.constant(np.float32(-2)) * self.x, -0.0)
        (found,) = self.assert_becomes([node], "pointwise")
        self.assertEqual(len(found.inputs), 1)
        immediates = encode(found.attrs["body"]).immediates[:4]  # one more than there are
        self.assertEqual(sorted(map(repr, immediates)), ["-0.0", "-2.0", "0.0", "0.0"])

    def test_constants_alone_make_no_program(self) -> None:
        number = ad.constant(np.float32(3))
        self.assert_becomes([ad.exp_op(number) * ad.log_op(number)], "exp", "log", "mul")

    def test_long_programs_are_cut(self) -> None:
        deep = self.x
        for k in range(60):
            deep = ad.tanh_op(deep * (1 + k))
        for fetch in (deep, ad.sum_node_list([variable(f"v{k}", 6, 5) for k in range(30)])):
            found = fused([fetch])
            for node in find_topo_sort(found):
                if node.op is pointwise_op:
                    self.assertLessEqual(len(node.inputs), INPUTS)
                    self.assertLessEqual(length(node), INSTRUCTIONS)
            self.assertGreater(operators(found).count("pointwise"), 2)
            self.assertLessEqual(set(operators(found)), {"pointwise", "add"})

    def test_a_body_that_is_too_long_is_refused(self) -> None:
        deep = self.x
        for _ in range(INSTRUCTIONS + 1):
            deep = ad.exp_op(deep)
        with self.assertRaisesRegex(
            GraphError, "25 instructions with 0 immediates, expected 1 to 24"
        ):
            encode(steps_between([self.x], deep))

    def test_large_values_are_not_kept_for_a_program(self) -> None:
        large = [variable(f"v{k}", 1024, 512) for k in range(4)]
        moved = [ad.transpose_op(v, (1, 0)) for v in large]
        total = moved[0] + moved[1]
        for other in moved[2:]:
            total = total + other  # each is made just before it is added
        names = operators(fused([total]))
        self.assertEqual(names.count("add"), 3)
        self.assertEqual(operators(fused([ad.relu_op(moved[0] + moved[1])])).count("pointwise"), 1)

    def test_updates_stay_apart(self) -> None:
        w = ad.Parameter(np.ones((6, 5), np.float32), "w")
        loss = ad.mean_op(huber(self.x * w, self.y))
        train = optim.Adam(schedule.OneCycle(0.1, 100)).minimize(loss, [w])
        names = operators(fused([loss, train]))
        self.assertEqual(names.count("adam_update"), 1)
        self.assertNotIn("cos", names)

    def test_a_program_shows_its_body_and_its_line(self) -> None:
        y = ad.relu_op(0.5 * self.x + self.y)
        (node,) = fused([y])
        self.assertEqual(node.where, y.where)
        self.assertIn("body=relu(add(mul_const(x, 0.5), y))", ad.text(node))

    def test_the_users_graph_is_left_alone(self) -> None:
        y = gelu(self.x)
        before = ad.text(y)
        fused([y])
        self.assertEqual(ad.text(y), before)


UNARY = (
    ad.exp_op, ad.log_op, ad.sqrt_op, ad.tanh_op, ad.cos_op, ad.sin_op, ad.sigmoid_op, ad.relu_op,
    ad.log1p_op, ad.rsqrt_op, ad.abs_op, ad.sign_op, ad.silu_op, ad.gelu_op, ad.gelu_tanh_op,
    ad.softplus_op, ad.hard_sigmoid_op, ad.hard_swish_op, ad.leaky_relu_op, ad.elu_op,
    lambda x: -x, lambda x: x + 0.3, lambda x: x * -0.7, lambda x: x / 3, lambda x: 0.3 - x,
    lambda x: 2 / x, lambda x: x**2, lambda x: x**1.7, lambda x: 1.3**x,
    lambda x: ad.clip_op(x, -0.5, 0.8), lambda x: huber_op(x, delta=0.7),
    lambda x: cast_op(cast_op(10 * x, np.int64), np.float32),
)  # fmt: skip
BINARY: tuple[Callable[..., Any], ...] = (
    lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: x / y,
    ad.pow_op, ad.minimum_op, ad.maximum_op, ad.relu_gradient_op,
    lambda x, y: ad.where_op(ad.less_op(x, y), x, y),
    lambda x, y: ad.where_op(ad.equal_op(x, y), 1.0, y),
    lambda x, y: ad.where_op(ad.logical_not_op(ad.not_equal_op(x, y)), x, y),
    lambda x, y: ad.where_op(
        ad.logical_or_op(ad.less_equal_op(x, y), ad.logical_xor_op(x, y)), x, 2.0
    ),
)  # fmt: skip
DIFFERENTIABLE = (
    ad.silu_op, ad.gelu_op, ad.gelu_tanh_op, ad.softplus_op, ad.hard_swish_op, ad.relu_op,
    ad.leaky_relu_op, ad.elu_op, ad.hard_sigmoid_op,
)  # fmt: skip


def drawn(rng: np.random.Generator, leaves: Sequence[Node], length: int) -> Node:
    """An expression of random operators, each over what was made before."""
    made = list(leaves)
    for _ in range(length):
        if rng.random() < 0.5:
            made.append(UNARY[rng.integers(len(UNARY))](made[-1]))
        else:
            other = made[rng.integers(len(made))]
            made.append(BINARY[rng.integers(len(BINARY))](made[-1], other))
    return made[-1]


class Values:
    """That fused graphs compute the same bits, on the device `ctx`."""

    ctx: Context

    def executor(self, fetches: Sequence[Node]) -> ad.Executor:
        return ad.Executor(fetches, self.ctx)

    def run_on(self, fetches: Sequence[Node], feeds: dict, together: bool) -> list[np.ndarray]:
        executor = self.executor(fetches)
        used = {x: feeds[x] for x in executor.topo_order if x.op.leaf == "feed"}
        with nullcontext() if together else without("pointwise"):
            return [executor.run(used, True) for _ in range(3)][-1]  # the last run is a replay

    def check(self, fetches: Sequence[Node], feeds: dict) -> None:
        plain = self.run_on(fetches, feeds, together=False)
        self.same_bits(self.run_on(fetches, feeds, together=True), plain)

    def same_bits(self, results: list[np.ndarray], others: list[np.ndarray]) -> None:
        """They are equal, of NaN any."""
        for found, wanted in zip(results, others, strict=True):
            self.assertEqual((found.shape, found.dtype), (wanted.shape, wanted.dtype))
            known = ~np.isnan(wanted) if wanted.dtype.kind == "f" else wanted == wanted
            np.testing.assert_array_equal(np.isnan(found), ~known)
            self.assertEqual(found[known].tobytes(), wanted[known].tobytes())

    def numbers(self, *shape: int, seed: int = 0) -> np.ndarray:
        """Numbers, NaN, infinities, zeros of both signs and others that are hard among them."""
        rng = np.random.default_rng((seed, *shape))
        values = rng.standard_normal(shape).astype(np.float32)
        return np.where(rng.random(shape) < 0.2, rng.choice(SPECIALS, shape), values)

    def narrow(self, x: Node, seed: int) -> np.ndarray:
        """Such numbers for a Variable of 16 bits."""
        with np.errstate(over="ignore"):
            return rounded(self.numbers(*x.spec.shape, seed=seed), x.spec.dtype)

    def test_every_operator_between_two_others(self) -> None:
        for shape in ((), (7,), (33, 31), (150, 128)):
            x, y = variable("x", *shape), variable("y", *shape)
            feeds = {x: self.numbers(*shape), y: self.numbers(*shape, seed=1)}
            made = [op(-x) + 1 for op in UNARY] + [op(-x, y) * 2 for op in BINARY]
            made += [
                ad.gradients(ad.sum_op(op(x) * y), [x])[0] * 2 for op in (*DIFFERENTIABLE, huber_of)
            ]
            with self.subTest(shape=shape):
                self.check(made, feeds)
                self.assertGreater(operators(fused(made)).count("pointwise"), len(made) - 4)

    def test_expressions_drawn_at_random(self) -> None:
        rng = np.random.default_rng(8)
        for shape, others in (
            ((), [()]),
            ((5,), [(5,), ()]),
            ((37, 41), [(37, 41), (41,), (37, 1), (1, 1)]),
            ((130, 132), [(130, 132), (132,), (130, 1), ()]),
            ((3, 5, 50, 64), [(3, 5, 50, 64), (5, 1, 1), (50, 64), (3, 5, 1, 1)]),
        ):
            feeds = {variable(f"v{k}", *s): self.numbers(*s, seed=k) for k, s in enumerate(others)}
            first = variable("first", *shape)
            for length in (2, 5, 9, 20, 40):
                with self.subTest(shape=shape, length=length):
                    node = drawn(rng, [*feeds, first], length)
                    self.check([node], {first: self.numbers(*shape, seed=9), **feeds})

    def test_sizes_around_the_width_of_a_thread(self) -> None:
        for n in (1, 3, 31, 33, 1023, 1025, 16383, 16384, 16385, 16387, 40_001):
            x = variable("x", n)
            self.check([gelu(x)], {x: self.numbers(n)})

    def test_dtypes_that_are_read_and_written(self) -> None:
        for shape in ((), (9, 3), (200, 100)):
            rng = np.random.default_rng(4)
            for dtype in (np.uint8, np.int32, np.int64, np.bool_):
                k = variable("k", *shape, dtype=np.dtype(dtype))
                feeds = {k: rng.integers(0, 2 if dtype is np.bool_ else 200, shape).astype(dtype)}
                y = 3 * cast_op(k, np.float32) - 7
                mask = ad.logical_not_op(ad.greater_op(y * 0.1, 4.0))
                with self.subTest(shape=shape, dtype=dtype):
                    self.assertIn("pointwise", operators(fused([y, mask])))
                    self.check([y, mask], feeds)

    @require_fusion("pointwise")
    def test_an_output_may_take_the_place_of_an_input(self) -> None:
        x, y = variable("x", 300, 128), variable("y", 300, 128)
        dying = ad.transpose_op(ad.transpose_op(x, (1, 0)) * 1.5, (1, 0))
        fetches = [ad.transpose_op(gelu(dying) * y + dying, (1, 0))]
        feeds = {x: self.numbers(300, 128), y: self.numbers(300, 128, seed=1)}
        plan = self.executor(fetches).plan({v: v.spec.shape for v in feeds})
        (step,) = [s for s in plan.steps if s.node.op is pointwise_op]
        if not settings.separate_arena:
            self.assertIs(step.outputs[0].buffer, step.inputs[0].buffer)
        self.check(fetches, feeds)

    def test_floats_of_16_bits_are_rounded_in_the_end(self) -> None:
        for dtype in NARROW:
            for shape in ((), (7,), (150, 128), *sample.rest([(16387,)])):
                h, g = variable("h", *shape, dtype=dtype), variable("g", *shape, dtype=dtype)
                feeds = {x: self.narrow(x, k) for k, x in enumerate((h, g))}
                made = [op(-h) + 1 for op in UNARY[:-1]] + [op(-h, g) * 2 for op in BINARY]
                x, y = cast_op(h, FLOAT32), cast_op(g, FLOAT32)
                wide = [op(-x) + 1 for op in UNARY[:-1]] + [op(-x, y) * 2 for op in BINARY]
                fetches = [cast_op(value, dtype) for value in wide]
                with self.subTest(shape=shape, dtype=str(dtype)):
                    together = self.run_on(made, feeds, together=True)
                    self.same_bits(together, self.run_on(fetches, feeds, together=False))
                    self.check(fetches, feeds)

    def test_casts_to_16_bits_round_inside(self) -> None:
        for dtype in NARROW:
            for shape, other in (((), ()), ((33, 31), (31,)), ((150, 128), (150, 1))):
                x, h = variable("x", *shape), variable("h", *other, dtype=dtype)
                feeds = {x: self.numbers(*shape), h: self.narrow(h, seed=1)}
                near = cast_op(ad.relu_op(x) * 1.3, dtype)
                mask = ad.less_op(cast_op(near, FLOAT32), x)
                made = [
                    cast_op(near, FLOAT32) - x,
                    mask,
                    cast_op(ad.where_op(mask, near, h), FLOAT32),
                ]
                for to in NARROW:
                    made.append(cast_op(cast_op(near, FLOAT32) * 3, to))
                with self.subTest(shape=shape, dtype=str(dtype)):
                    self.check(made, feeds)

    def test_programs_of_16_bits_differ_from_single_operators_by_roundings(self) -> None:
        rng = np.random.default_rng(5)
        for dtype in NARROW:
            h, g = variable("h", 60, 70, dtype=dtype), variable("g", 70, dtype=dtype)
            feeds = {x: rounded(rng.uniform(0.5, 2, x.spec.shape), dtype) for x in (h, g)}
            fetches = [ad.sqrt_op(h * g + 0.3) / (1 + h)]
            found, wanted = (self.run_on(fetches, feeds, together)[0] for together in (True, False))
            np.testing.assert_allclose(found.astype(np.float64), wanted, 6 * ROUNDING[dtype])
            self.executor([*fetches, cast_op(fetches[0], FLOAT32) * 2]).check(feeds)

    def test_float64_is_float32_natively(self) -> None:
        x = variable("x", 9)
        wide = cast_op(2 * x, np.float64) * 3 + 1
        self.assertEqual(operators(fused([wide])), ["pointwise"])
        self.check([wide], {x: self.numbers(9)})

    def test_a_step_without_rows(self) -> None:
        x = variable("x", 0, 5)
        row = variable("row", 5)
        self.check([gelu(x) + row], {x: self.numbers(0, 5), row: self.numbers(5)})

    def test_schedules_follow_the_step(self) -> None:
        for one in SCHEDULES:
            step = ad.Parameter(np.int64(0), "step", trainable=False)
            executor = self.executor([one.node(step)])
            for k in (0, 1, 9, 10, 39, 40, 41, 299, 300, 301, 700, 999, 1000, 5000):
                step.set(np.int64(k))
                (rate,) = executor.run({}, True)
                with self.subTest(type(one).__name__, step=k):
                    np.testing.assert_allclose(rate, one(k), rtol=2e-5, atol=2e-7)

    def test_every_step_passes_the_check(self) -> None:
        rng = np.random.default_rng(2)
        x, y = variable("x", 40, 50), variable("y", 40, 50)
        feeds = {v: rng.standard_normal((40, 50)).astype(np.float32) for v in (x, y)}
        loss = ad.mean_op(huber(gelu(x), y))
        step = ad.Parameter(np.int64(70), "step", trainable=False)
        rates = [one.node(step) for one in SCHEDULES]
        self.executor([loss, *ad.gradients(loss, [x, y]), *rates]).check(feeds)

    def test_training_follows_the_plain_path(self) -> None:
        rng = np.random.default_rng(6)
        feeds = {variable("x", 30, 8): rng.standard_normal((30, 8)).astype(np.float32)}
        (x,) = feeds
        losses = []
        for together in (True, False):
            w = ad.Parameter(np.full((8, 1), 0.3, np.float32), "w")
            loss = ad.mean_op(huber(gelu(ad.matmul_op(x, w)), ad.sum_op(x, axis=1, keepdims=True)))
            rate = schedule.Warmup(schedule.Cosine(0.5, 15), 4)
            train = optim.SGD(rate, clip_norm=0.5).minimize(loss, [w])
            executor = self.executor([loss, train])
            with nullcontext() if together else without("pointwise"):
                losses.append([executor.run(feeds, True)[0].tobytes() for _ in range(20)])
        self.assertEqual(losses[0], losses[1])

    def test_a_program_that_is_none_is_refused(self) -> None:
        x, y = array(np.ones(3, np.float32), self.ctx), empty((3,), self.ctx)

        def program(*code: dict[str, Any]) -> Any:
            made = interface.struct("Bytecode")()
            for k, step in enumerate(code):
                made.code[k] = interface.struct("Instruction")(**step)
            return made

        neg = {"opcode": interface.opcodes["neg"], "operands": (1,)}
        launch("pointwise", self.ctx, [x], program(neg), y)
        np.testing.assert_array_equal(y.asnumpy(), -np.ones(3, np.float32))
        others = {"opcode": 200}, {"operands": (3,)}, {"operands": (100,)}, {"destination": 60}
        long = [neg] * (INSTRUCTIONS + 1)
        for wrong in ([], long, *([neg | other] for other in others)):
            with self.subTest(wrong), self.assertRaisesRegex(KernelError, "pointwise: "):
                launch("pointwise", self.ctx, [x], program(*wrong), y)
        scattered = [array(np.ones((2, 1, 2), np.float32), self.ctx)]
        with self.assertRaisesRegex(KernelError, "does not spread over"):
            out = empty((2, 3, 2), self.ctx)
            launch("pointwise", self.ctx, scattered, program(neg), out)


def length(node: Node) -> int:
    """The instructions of a node's program."""
    return sum(step.opcode > 0 for step in encode(node.attrs["body"]).code)


def huber_of(x: Node) -> Node:
    return huber(x, 2 * x * x)


CpuValues, GpuValues = on_native_devices(Values)

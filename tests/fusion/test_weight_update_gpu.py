"""Updates that make their gradients themselves, on a GPU: that they do what products and updates of
their own do.
"""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.errors import KernelError
from dlsys.fusion.shared.update_operators import OPERANDS, argument
from dlsys.fusion.weight_update import MOST_PRODUCTS
from dlsys.ndarray import NDArray, array, empty, launch
from dlsys.ops.optim.rules import RULES
from dlsys.runtime.device import Context, gpu
from executor.test_transaction import Failure, and_then, fail
from fusion.test_gemm_epilogue import Network, values_of
from fusion.test_weight_update import FLOAT32, OPTIMIZERS, Layer, feeds_of, sgd, trained
from support import sample
from support.devices import EMULATED, require, slow
from support.fusion import without
from support.graphs import Training, variable


def unfused() -> AbstractContextManager:
    """Executors without the pass."""
    return without("weight_update")


@require(gpu(0))
class GpuUpdates(unittest.TestCase):
    """What the kernels compute, against numpy and against products and updates of their own."""

    ctx: Context = gpu(0)

    def run_on(
        self, ctx: Context | None, build: Callable, steps: int = 4, precision: str = "fp32"
    ) -> list[np.ndarray]:
        """All states after some runs; a GPU records the second."""
        layers, (train, states) = build()
        for state in states:
            state.to(ctx)
        executor = ad.Executor([train], ctx, precision)
        for step in range(steps):
            executor.run(feeds_of(layers, step))
        if ctx is not None:
            plan = executor.plan({x: value.shape for x, value in feeds_of(layers).items()})
            self.kernels = [step.node.op.name for step in plan.steps]
        return [state.asnumpy() for state in states]

    def check(self, build: Callable, kernel: str, ulps: float = 8, **options: Any) -> None:
        """The fused kernel, kernels of their own and numpy agree but for a few roundings of the
        rule: factors are integers. Each device has a graph of its own.
        """
        wanted = self.run_on(None, build, **options)
        with unfused():
            plain = self.run_on(self.ctx, build, **options)
        self.assertNotIn(kernel, self.kernels)
        found = self.run_on(self.ctx, build, **options)
        self.assertIn(kernel, self.kernels)
        for ours, theirs, right in zip(found, plain, wanted, strict=True):
            bound = ulps * 2.0**-23 * float(np.abs(right).max(initial=1e-3))
            np.testing.assert_allclose(ours, right, rtol=0, atol=bound)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)

    def check_exactly(self, *shapes: tuple, **options: Any) -> None:
        """Steps of SGD at a rate of 1/2, where nothing is rounded."""

        def build() -> tuple:
            layers = [Layer(*shape, number=k) for k, shape in enumerate(shapes)]
            return layers, (sgd(*layers), [p for layer in layers for p in layer.parameters])

        self.check(build, "matmul_sgd_update", ulps=0, **options)

    def test_every_rule_with_every_option(self) -> None:
        for optimizer in OPTIMIZERS:
            for options in (
                {},
                {"clip_value": 2.0, "weight_decay": 0.125},
                {"weight_decay": 0.125, "decoupled": True},
                {"accumulate": 3},
            ):
                with self.subTest(optimizer=optimizer().rule, **options):
                    self.check_rule(optimizer, options)

    def check_rule(self, optimizer: Callable, options: dict) -> None:
        def build() -> tuple:
            layers = [Layer(9, 8, 12, "A"), Layer(5, 7, 6, "B", 1)]
            return layers, trained(layers, optimizer(**options))

        made = optimizer(**options)
        rule = "accumulate_update" if "accumulate" in options else made.rule(made.options)[0].name
        self.check(build, f"matmul_{rule}", ulps=64)

    def test_a_rule_that_waits_for_its_round(self) -> None:
        """With a scale, a count and a decay that the kernel reads itself."""

        def build() -> tuple:
            layer = Layer(9, 8, 12)
            count = ad.Parameter(np.int64(1), "count", trainable=False)
            lr, scale = ad.constant(FLOAT32(0.5)), ad.constant(FLOAT32(0.25))
            nodes = [
                ad.sgd_update_op(p, g, lr, count=count, every=3, scale=scale, decay=0.5)
                for p, g in zip(layer.parameters, layer.gradients)
            ]
            train = ad.group_op(*nodes, ad.advance_step_op(count))
            return [layer], (train, [*layer.parameters, count])

        for steps in (1, 2, 4, 6):
            with self.subTest(steps=steps):
                self.check(build, "matmul_sgd_update", steps=steps)

    @slow
    def test_products_of_all_shapes(self) -> None:
        shapes = (
            (1, 1, 1), (1, 7, 5), (0, 7, 5), (3, 0, 5), (3, 5, 0), (37, 784, 10),
            (37, 10, 784), (33, 7, 5), (300, 130, 70), (64, 64, 64), (70, 33, 129),
        )  # fmt: skip
        every = itertools.product(("fp32", "tf32"), shapes, ("", "A", "B"))
        for precision, (k, m, n), sums in sample.of(every, 27):
            with self.subTest(precision=precision, k=k, m=m, n=n, sums=sums):
                self.check_exactly((k, m, n, sums), precision=precision, steps=2)

    def test_groups_of_all_shapes(self) -> None:
        shapes = [
            (50, 40, 30, "A"), (50, 30, 7, "B"), (50, 7, 3, ""), (1, 1, 1, "A"), (0, 5, 6, "B"),
            (9, 0, 6, "B"), (200, 12, 20, "B"), (20, 5, 0, "A"),
        ]  # fmt: skip
        self.assertEqual(len(shapes), MOST_PRODUCTS)
        for precision in ("fp32", "tf32"):
            self.check_exactly(*shapes, precision=precision)
            self.check_exactly(*shapes[:3], precision=precision)

    @slow
    def test_tiles_and_splits_of_all_sizes(self) -> None:
        """Shapes for which the launcher takes all of the tilings, and all numbers of splits, on
        an H200.
        """
        shapes = (
            (24, 900, 600), (1100, 130, 900), (130, 300, 900), (520, 130, 900),
            (1100, 1500, 33), (520, 1500, 33), (1100, 33, 600), (24, 20, 10), (300, 500, 20),
            (70, 20, 10), (300, 1500, 10), (300, 20, 10), (1100, 20, 10),
        )  # fmt: skip
        for first, precision in enumerate(("fp32", "tf32")):
            for shape in sample.of(shapes[first::2] if EMULATED else shapes, 3):
                with self.subTest(precision=precision, shape=shape):
                    self.check_exactly((*shape, "B"), precision=precision, steps=1)

    def test_training_follows_the_reference(self) -> None:
        for precision, bound in (("fp32", 1e-5), ("tf32", 2e-3)):  # of factors of 10 bits
            found = []
            for ctx in (None, self.ctx):
                net = Network((50,), (20, 30, 10, 5))
                train = optim.Adam(0.01, eps=1e-3).minimize(net.loss, net.parameters)
                step = ad.Executor([net.loss, train], ctx, precision if ctx else "fp32")
                feeds = values_of([net.x, net.labels])
                found.append([float(step.run(feeds, True)[0]) for _ in range(12)])
            np.testing.assert_allclose(found[1], found[0], rtol=bound)

    def test_runs_give_the_same_bits(self) -> None:
        bits = set()
        for _ in range(3):
            net = Training((60, 40, 5), momentum=0.9)
            executor = ad.Executor([net.loss, net.train], self.ctx)
            for k in range(4):
                executor.run(net.batch(300, seed=k))
            bits.add(b"".join(value.tobytes() for value in net.values()))
        self.assertEqual(len(bits), 1)

    def test_networks_with_convolutions(self) -> None:
        found = []
        for ctx in (None, self.ctx):
            model = nn.LeNet5(seed=0)
            x, labels = variable("x", 4, 28, 28), variable("labels", 4, dtype=np.int64)
            loss = ad.softmax_cross_entropy(model(x), labels)
            train = optim.SGD(0.05, momentum=0.5).minimize(loss, model.parameters())
            executor = ad.Executor([loss, train], ctx)
            feeds = values_of([x, labels])
            losses = [float(executor.run(feeds, True)[0]) for _ in range(3)]
            found.append([np.float32(losses), *(p.asnumpy() for p in model.parameters())])
        for wanted, got in zip(*found, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())

    def test_every_step_passes_the_check(self) -> None:
        for optimizer in OPTIMIZERS:
            for precision in ("fp32", "tf32"):
                net = Network((33,), (19, 12, 5))
                train = optimizer().minimize(net.loss, net.parameters)
                executor = ad.Executor([net.loss, train], self.ctx, precision)
                executor.check(values_of([net.x, net.labels]))

    def test_a_run_that_fails_later_is_taken_back(self) -> None:
        layer = Layer(9, 8, 12)
        before = [p.asnumpy() for p in layer.parameters]
        weight, bias = layer.update(ad.constant(FLOAT32(0.5)))
        for act in (fail, lambda: None):
            fetches = [ad.group_op(weight, bias), and_then(weight, act)]
            executor = ad.Executor(fetches, self.ctx)
            plan = executor.plan({x: v.shape for x, v in layer.feeds().items()})
            self.assertIn("matmul_sgd_update", [step.node.op.name for step in plan.steps])
            if act is not fail:
                executor.run(layer.feeds())
                continue
            for _ in range(3):
                with self.assertRaises(Failure):
                    executor.run(layer.feeds())
                for p, value in zip(layer.parameters, before):
                    np.testing.assert_array_equal(p.asnumpy(), value)
        a, b = layer.feeds().values()
        np.testing.assert_array_equal(layer.weight.asnumpy(), before[0] - a.T @ b / 2)

    def test_a_feed_that_shows_a_parameter_is_read_before_its_update(self) -> None:
        layer = Layer(70, 70, 90, "")
        executor = ad.Executor([sgd(layer)], self.ctx)
        fed = {x: array(value, self.ctx) for x, value in layer.feeds().items()}
        executor.run(fed)
        before = layer.weight.asnumpy()
        other = ad.Executor([sgd(layer)], self.ctx)
        b = layer.weight.storage.array
        for _ in range(3):
            before = layer.weight.asnumpy()
            other.run({**fed, layer.b: b})
            wanted = before - layer.feeds()[layer.a].T @ before / 2
            np.testing.assert_array_equal(layer.weight.asnumpy(), wanted)


@require(gpu(0))
class GpuKernel(unittest.TestCase):
    """The kernel of SGD, called with arrays that no executor makes."""

    ctx: Context = gpu(0)

    def shifted(self, value: np.ndarray, by: int) -> NDArray:
        """The value `by` floats behind the beginning of a block."""
        block = empty((value.size + by,), self.ctx).block
        made = NDArray.from_block(block, 4 * by, value.shape, value.dtype)
        made[:] = value
        return made

    def call(self, states: list, left: list, right: list, sums: Sequence = (), precision: int = 0):
        lr = array(np.float32(0.5), self.ctx)
        options = argument(RULES["sgd_update"], {}, "", "", precision)
        options.sums = tuple(OPERANDS.index(x) if isinstance(x, str) else x for x in sums)
        lists = states, left, right, [lr], [], [], [], []
        launch("matmul_sgd_update", self.ctx, *lists, options)

    def test_arrays_at_any_address(self) -> None:
        rng = np.random.default_rng(0)
        a, b, w, s = (
            rng.integers(-3, 4, shape).astype(FLOAT32)
            for shape in ((40, 68), (40, 36), (68, 36), 36)
        )
        for at in ((1, 0, 0, 0), (0, 2, 0, 0), (0, 0, 3, 0), (0, 0, 0, 1), (1, 1, 1, 1)):
            with self.subTest(at=at):
                arrays = [self.shifted(x, by) for x, by in zip((a, b, w, s), at)]
                self.call(arrays[2:], arrays[:1], arrays[1:2], sums="B")
                np.testing.assert_array_equal(arrays[2].asnumpy(), w - a.T @ b / 2)
                np.testing.assert_array_equal(arrays[3].asnumpy(), s - b.sum(axis=0) / 2)

    def test_what_it_refuses(self) -> None:
        def on_gpu(*shape: int) -> NDArray:
            return array(np.zeros(shape, FLOAT32), self.ctx)

        w, s, a, b = on_gpu(3, 4), on_gpu(4), on_gpu(5, 3), on_gpu(5, 4)
        for message, arguments in (
            ("expected the operands of 1 to 8 products, got 0 and 0", ([], [], [])),
            ("expected the operands of 1 to 8 products, got 1 and 2", ([w], [a], [b, b])),
            ("2 parameters need 2 states, got 1", ([w], [a], [b], "B")),
            ("expected operands 0 to 2, got 3 and 0", ([w, s], [a], [b], (3,))),
            (r"expected a state of 3 elements, got shape \(4,\)", ([w, s], [a], [b], "A")),
            ("expected a state of 12 elements", ([on_gpu(4, 4)], [a], [b])),
            ("shapes do not fit", ([w], [a], [on_gpu(6, 4)])),
            ("there is no precision 3", ([w], [a], [b], "", 3)),
        ):
            with self.assertRaisesRegex(KernelError, f"matmul_sgd_update: .*{message}"):
                self.call(*arguments)

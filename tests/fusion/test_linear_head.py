"""Linear classifiers whose loss and gradients are one kernel of a GPU, and updates that add up
parts: where the pass makes them, and that they do what heads and updates of their own do.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import optim
from dlsys.fusion.linear_head import MOST_PARTS, ROWS, parts_of
from dlsys.graph.node import Node, find_topo_sort
from dlsys.runtime.device import Context, gpu
from fusion.test_gemm_epilogue import Network, feeds_of
from fusion.test_weight_update import OPTIMIZERS, grouped
from support import sample
from support.devices import require
from support.fusion import GPU, without
from support.fusion import fused as run_fusions
from support.graphs import operators

UPDATE = "summed_sgd_update"


def step_of(net: Network, optimizer: optim.Optimizer | None = None) -> list[Node]:
    """The loss of a network, and a training step."""
    return [net.loss, (optimizer or optim.SGD(0.25)).minimize(net.loss, net.parameters)]


def fused(fetches: Sequence[Node]) -> list[Node]:
    """The fetches after the pass and those before it."""
    return run_fusions(grouped(fetches), "weight_update", "linear_head", target=GPU)


class Rewrites(unittest.TestCase):
    """That they happen, and only where they may."""

    def assert_becomes(self, fetches: Sequence[Node], *names: str) -> list[Node]:
        found = fused(fetches)
        self.assertEqual(operators(found), sorted([*names, "advance_step"]))
        return found

    def test_a_linear_classifier_is_two_kernels(self) -> None:
        for options, head in (
            ({}, "sparse_linear_head"),
            ({"transposed": True}, "sparse_linear_head"),
            ({"transposed": True, "dense": True, "reduction": "sum"}, "linear_head"),
        ):
            with self.subTest(**options):
                self.assert_becomes(step_of(Network((9,), (8, 5), **options)), head, UPDATE)

    def test_what_more_than_one_update_needs_is_left(self) -> None:
        net = Network((9,), (8, 5))
        names = ["fused_sparse_mlp_head", "matmul_sgd_update"]
        self.assert_becomes(
            [*step_of(net), net.gradients[1]], *names[:1], "matmul_sums", "sgd_update"
        )
        dx = ad.gradients(net.loss, [net.x])
        self.assert_becomes([*step_of(net), *dx], *names)
        self.assert_becomes(step_of(Network((9,), (8, 6, 5))), *names)

    def test_the_body_of_the_head_makes_gradients_in_parts(self) -> None:
        for rows in (2, ROWS, 3 * ROWS + 1, ROWS * MOST_PARTS + 9):
            for transposed in (False, True):
                net = Network((rows,), (8, 5), transposed=transposed)
                feeds = feeds_of(net.fetches)
                arrays = {x.name: value for x, value in feeds.items()}
                arrays |= {p.name: p.asnumpy() for p in net.parameters}
                arrays["workspace"] = np.zeros(512, np.int32)
                (head,) = (
                    x for x in find_topo_sort(fused(step_of(net))) if x.op.name.endswith("_head")
                )
                made = [np.empty(spec.shape, spec.dtype) for spec in head.spec]
                head.op.numpy(head, *(arrays[x.name] for x in head.inputs), *made)
                self.assertEqual(len(made[1]), parts_of(rows))
                loss, dw, db = ad.Executor(net.fetches).run(feeds)
                np.testing.assert_allclose(made[0], loss, rtol=1e-5)
                np.testing.assert_allclose(made[1].sum(axis=0), dw, rtol=1e-4, atol=1e-6)
                np.testing.assert_allclose(made[2].sum(axis=0), db, rtol=1e-4, atol=1e-6)


@require(gpu(0))
class OnGpu(unittest.TestCase):
    """The kernels against numpy and against heads and updates of their own."""

    ctx: Context = gpu(0)

    def trained(
        self, ctx: Context | None, build: Callable[[], Network], optimizer: Callable, steps: int = 3
    ) -> list[np.ndarray]:
        """The losses of some steps and the parameters after them."""
        net = build()
        executor = ad.Executor(step_of(net, optimizer()), ctx)
        feeds = feeds_of(net.fetches)
        feeds[net.x] /= np.float32(1 + feeds[net.x].shape[1] / 64)  # logits of about 1
        if feeds[net.labels].dtype.kind == "i":
            feeds[net.labels] %= net.parameters[1].spec.shape[0]
        losses = [float(executor.run(feeds, True)[0]) for _ in range(steps)]
        plan = executor.plan({x: value.shape for x, value in feeds.items()})
        self.kernels = [step.node.op.name for step in plan.steps]
        return [np.float32(losses), *(p.asnumpy() for p in net.parameters)]

    def check(self, build: Callable[[], Network], optimizer: Callable[..., Any]) -> None:
        wanted = self.trained(None, build, optimizer)
        with without("linear_head"):
            plain = self.trained(self.ctx, build, optimizer)
        self.assertFalse([name for name in self.kernels if name.startswith("summed_")])
        found = self.trained(self.ctx, build, optimizer)
        self.assertTrue([name for name in self.kernels if name.startswith("summed_")])
        for ours, theirs, right in zip(found, plain, wanted, strict=True):
            bound = 2e-6 * max(1, float(np.abs(right).max()))  # of sums of up to 1024 products
            np.testing.assert_allclose(ours, right, rtol=0, atol=bound)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)

    def test_shapes(self) -> None:
        shapes = (
            (2, 4, 1), (7, 8, 5), (8, 12, 4), (9, 1024, 5), (20, 784, 10), (17, 36, 16),
            (9, 20, 11), (ROWS * MOST_PARTS + 9, 8, 6),
        )  # fmt: skip
        cases = [
            (shape, options)
            for shape in shapes
            for options in (
                *({}, {"transposed": True}),
                {"transposed": shape[0] % 2 == 0, "dense": True},
            )
        ]
        for shape, options in sample.of(cases, 10):  # of each shape, and of all options
            with self.subTest(shape=shape, **options):
                self.check(self.network(*shape, options), lambda: optim.SGD(0.25))

    def network(self, rows: int, k: int, classes: int, options: dict) -> Callable[[], Network]:
        return lambda: Network((rows,), (k, classes), **options)

    def test_every_rule(self) -> None:
        for optimizer in OPTIMIZERS:
            for options in ({}, {"clip_value": 0.01, "weight_decay": 0.125}):
                with self.subTest(optimizer=optimizer().rule, **options):
                    self.check(
                        self.network(33, 20, 5, {"transposed": True}),
                        lambda: optimizer(**options),  # noqa: B023
                    )

    def test_runs_give_the_same_bits(self) -> None:
        build = self.network(300, 20, 5, {})
        runs = [self.trained(self.ctx, build, lambda: optim.SGD(0.25)) for _ in range(3)]
        self.assertEqual(len({b"".join(x.tobytes() for x in run) for run in runs}), 1)

"""Products that add a residual: where they are made, where not, and that nothing changes by it."""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys.dtypes import bfloat16
from dlsys.fusion.gemm_residual import matmul_add_op
from dlsys.graph.node import Node
from dlsys.runtime.device import Context
from support.devices import on_native_devices
from support.fusion import GPU, fused, fusions, require_fusion, without
from support.graphs import operators, simplified, variable

NAMES = ("gemm_epilogue", "layer_norm", "scattered", "gemm_residual", "pointwise")


def names_of(*fetches: Node) -> list[str]:
    return operators(fused(simplified(fetches), *NAMES, target=GPU))


class Network:
    """Residual blocks x + activation(x W1 + b1) W2 + b2, with a loss and gradients."""

    def __init__(
        self, rows: int, width: int, hidden: int, blocks: int = 2, activation: Any = ad.relu_op
    ) -> None:
        rng = np.random.default_rng(3)
        self.x = variable("x", rows, width)
        self.parameters, y = [], self.x
        for k in range(blocks):
            shapes = {"w": (width, hidden), "b": (hidden,), "v": (hidden, width), "c": (width,)}
            w, b, v, c = (
                ad.Parameter((0.2 * rng.standard_normal(shape)).astype(np.float32), f"{name}{k}")
                for name, shape in shapes.items()
            )
            y = y + ad.linear_op(activation(ad.linear_op(y, w, b)), v, c)
            self.parameters += [w, b, v, c]
        self.y = y
        self.loss = ad.sum_op(y * y)
        self.fetches = [self.loss, *ad.gradients(self.loss, self.parameters)]


class Rewrites(unittest.TestCase):
    def setUp(self) -> None:
        self.a, self.b = variable("a", 6, 4), variable("b", 4, 5)
        self.bias, self.r = variable("bias", 5), variable("r", 6, 5)
        self.product = ad.matmul_op(self.a, self.b)
        self.linear = ad.linear_op(self.a, self.b, self.bias)

    def test_blocks_forward_and_backward(self) -> None:
        names = names_of(*Network(9, 8, 6, blocks=3).fetches)
        self.assertEqual(names.count("matmul_bias_add"), 3)
        # Where the gradient of a block meets what passes it by; nothing reads that of x.
        self.assertEqual(names.count("matmul_add"), 2)
        self.assertEqual(names.count("add"), 1)  # of the loss

    def test_either_order_and_relu(self) -> None:
        for product, name in ((self.product, "matmul_add"), (self.linear, "matmul_bias_add")):
            for total in (product + self.r, self.r + product):
                self.assertEqual(names_of(total), [name])
                self.assertEqual(names_of(ad.relu_op(total)), [name])
                self.assertEqual(names_of(ad.relu_op(total), total), sorted([name, "relu"]))

    def test_views_of_rows(self) -> None:
        x, r = variable("x", 2, 3, 4), variable("r", 2, 3, 5)
        total = ad.relu_op(ad.linear_op(x, self.b, self.bias) + r)
        (node,) = fused(simplified([total]), *NAMES, target=GPU)
        self.assertEqual(operators([node]), ["matmul_bias_add"])
        self.assertEqual(node.spec, total.spec)

    def test_of_two_products_the_one_with_the_longer_way_adds(self) -> None:
        early, late = self.product, ad.matmul_op(ad.exp_op(self.a), variable("d", 4, 5))
        for total in (early + late, late + early):
            (node,) = fused(simplified([total]), *NAMES, target=GPU)
            self.assertEqual(operators([node]), ["exp", "matmul", "matmul_add"])
            self.assertEqual(node.inputs[0].op.name, "exp")
        self.assertEqual(names_of(self.product + self.product), ["add", "matmul"])

    def test_what_is_no_residual(self) -> None:
        for other in (variable("row", 1, 5), variable("column", 6, 1), variable("one", 1)):
            for product in (self.product, self.linear):
                found = names_of(product + other)
                self.assertFalse({"matmul_add", "matmul_bias_add"}.intersection(found), found)
        wide = ad.cast_op(ad.matmul_op(*(ad.cast_op(x, bfloat16) for x in (self.a, self.b))), "f")
        self.assertNotIn("matmul_add", names_of(wide + self.r))
        integers = variable("i", 6, 5, dtype=np.int64)
        self.assertNotIn("matmul_add", names_of(self.product + integers))

    def test_what_others_read_or_make_stays(self) -> None:
        total = self.product + self.r
        self.assertIn("matmul", names_of(total, self.product))
        self.assertIn("matmul", names_of(ad.exp_op(total)))  # one pointwise program
        self.assertIn("matmul", names_of(self.product + ad.exp_op(self.r)))
        applied = ad.tanh_op(self.linear) + self.r  # ends in an activation
        self.assertEqual(names_of(applied), ["add", "matmul_bias"])
        self.assertEqual(names_of(ad.matmul_op(self.a, self.b, algo="naive") + self.r),
                         ["add", "matmul"])  # fmt: skip

    def test_a_normalization_takes_the_sum(self) -> None:
        scale, shift = variable("scale", 5), variable("shift", 5)
        total = self.linear + self.r
        names = names_of(total, F.layer_norm(total, (5,), scale, shift))
        self.assertIn("matmul_bias", names)
        self.assertFalse({"matmul_add", "matmul_bias_add"}.intersection(names))


class Values:
    ctx: Context

    def run_on(self, fetches: Sequence[Node], feeds: dict, precision: str = "fp32") -> list:
        executor = ad.Executor(fetches, self.ctx, precision)
        for parameter in (x for x in executor.topo_order if x.op.leaf == "state"):
            parameter.to(executor.ctx)
        return executor.run(feeds, convert_to_numpy_ret_vals=True)

    @require_fusion("gemm_residual")
    def test_a_network_computes_the_same(self: Any) -> None:
        rng = np.random.default_rng(5)
        for rows, width, hidden in ((9, 8, 6), (70, 36, 20), (1, 3, 5), (140, 130, 64)):
            values = rng.standard_normal((rows, width)).astype(np.float32)
            for precision, bound in (("fp32", 2e-5), ("3xtf32", 2e-5), ("bf16", 5e-2)):
                # A rounding to 16 bits may put relu's input on the other side of zero.
                activation = ad.tanh_op if precision == "bf16" else ad.relu_op
                net = Network(rows, width, hidden, activation=activation)
                feeds = {net.x: values}
                with self.subTest(shape=(rows, width, hidden), precision=precision):
                    got = self.run_on(net.fetches, feeds, precision)
                    with without("gemm_residual"):
                        alone = self.run_on(net.fetches, feeds, precision)
                    with fusions("off"):
                        off = self.run_on(net.fetches, feeds, precision)
                    again = self.run_on(net.fetches, feeds, precision)
                    for k, value in enumerate(got):
                        self.assertEqual(value.tobytes(), again[k].tobytes())
                        size = np.abs(off[k]).max()
                        for other in (alone[k], off[k]):
                            self.assertLessEqual(np.abs(value - other).max(), bound * size)

    @require_fusion("gemm_residual")
    def test_every_step_passes_the_check(self: Any) -> None:
        net = Network(136, 24, 40)
        feeds = {net.x: np.random.default_rng(1).standard_normal((136, 24)).astype(np.float32)}
        for parameter in net.parameters:
            parameter.to(self.ctx)
        for precision in ("fp32", "tf32", "bf16"):
            ad.Executor(net.fetches, self.ctx, precision).check(feeds)

    @require_fusion("gemm_residual")
    def test_the_result_takes_the_memory_of_a_residual_that_dies(self: Any) -> None:
        a, b, r = variable("a", 40, 32), variable("b", 32, 48), variable("r", 40, 48)
        d = variable("d", 48, 48)
        total = ad.matmul_op(ad.exp_op(r), d) + ad.matmul_op(a, b)
        plan = ad.Executor([ad.sum_op(total)], self.ctx, "3xtf32").plan(
            {x: x.spec.shape for x in (a, b, r, d)}
        )
        (step,) = (step for step in plan.steps if step.node.op is matmul_add_op)
        self.assertIs(step.outputs[0].buffer, step.inputs[2].buffer)

    @require_fusion("gemm_residual")
    def test_a_residual_that_the_product_reads_is_kept(self: Any) -> None:
        rng = np.random.default_rng(2)
        x, w = variable("x", 70, 40), variable("w", 40, 40)
        y = ad.exp_op(x)
        fetch = ad.sum_op(ad.matmul_op(y, w) + y, axis=1)
        feeds = {node: rng.standard_normal(node.spec.shape).astype(np.float32) for node in (x, w)}
        executor = ad.Executor([fetch], self.ctx, "3xtf32")
        plan = executor.plan({node: node.spec.shape for node in (x, w)})
        self.assertIn(matmul_add_op, [step.node.op for step in plan.steps])
        (got,) = executor.run(feeds, convert_to_numpy_ret_vals=True)
        wide = np.exp(feeds[x].astype(np.float64))
        scale = (wide @ np.abs(feeds[w]) + wide).sum(1)
        self.assertLessEqual((np.abs(got - (wide @ feeds[w] + wide).sum(1)) / scale).max(), 1e-5)


CpuValues, GpuValues = on_native_devices(Values)

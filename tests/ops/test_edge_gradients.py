"""Gradients of powers at base 0 and of quotients at the ends of float32: 0 where PyTorch's
conventions say 0, finite where the true value is, on every device.
"""

from __future__ import annotations

import unittest
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.runtime.device import Context
from support.devices import needs_torch, on_native_devices

torch: Any = import_module("torch") if find_spec("torch") else None
BASES = np.array([0.0, -0.0, 2.0, -2.0, 1e-30, 1e-45, np.inf, np.nan], np.float32)
EXPONENTS = np.array([0.0, 0.5, 1.0, 2.0, 3.0, -1.0, -0.5, np.nan, np.inf], np.float32)


class EdgeGradients:
    ctx: Context | None = None

    def run_on(self, nodes: list[ad.Node], feeds: dict) -> list[np.ndarray]:
        executor = ad.Executor(nodes, self.ctx)
        used = set(executor.topo_order)
        given = {x: value for x, value in feeds.items() if x in used}
        return executor.run(given, convert_to_numpy_ret_vals=True)

    def gradients(self, build: Any, *arrays: np.ndarray, dy: float = 1.0) -> list[np.ndarray]:
        inputs = [ad.Variable(f"x{k}", dtype=np.float32) for k in range(len(arrays))]
        total = ad.sum_op(build(*inputs) * dy)
        return self.run_on(ad.gradients(total, inputs), dict(zip(inputs, arrays)))

    def second(self, build: Any, *arrays: np.ndarray) -> list[list[np.ndarray]]:
        """The gradients of the sums of the first gradients."""
        inputs = [ad.Variable(f"x{k}", dtype=np.float32) for k in range(len(arrays))]
        firsts = ad.gradients(ad.sum_op(build(*inputs)), inputs)
        feeds = dict(zip(inputs, arrays))
        return [self.run_on(ad.gradients(ad.sum_op(g), inputs), feeds) for g in firsts]

    # ---- powers ----
    @needs_torch
    def test_powers_have_the_conventions_of_pytorch(self) -> None:
        a, b = (x.ravel().copy() for x in np.meshgrid(BASES, EXPONENTS, indexing="ij"))
        wide = [torch.tensor(x, requires_grad=True) for x in (a, b)]
        torch.pow(*wide).sum().backward()
        got = self.gradients(lambda a, b: a**b, a, b)
        for name, ours, theirs in zip("ab", got, wide):
            with self.subTest(name):
                np.testing.assert_allclose(ours, theirs.grad.numpy(), rtol=1e-6)

    def test_powers_of_a_base_of_zero(self) -> None:
        zeros = np.array([0.0, -0.0], np.float32)
        for exponent, slope in ((0, 0), (1, 1), (2, 0), (3, 0)):
            with self.subTest(exponent=exponent):
                b = np.full(2, exponent, np.float32)
                of_a, of_b = self.gradients(lambda a, b: a**b, zeros, b, dy=-3)
                np.testing.assert_array_equal(of_a, -3 * slope)
                np.testing.assert_array_equal(of_b, 0)
                [of_x] = self.gradients(lambda x, c=exponent: x**c, zeros, dy=-3)
                np.testing.assert_array_equal(of_x, -3 * slope)

    def test_the_power_one_half_of_one_exponent_for_all(self) -> None:
        x, half = ad.Variable("x", dtype=np.float32), ad.Variable("half", dtype=np.float32)
        array = np.float32([-np.inf, -0.0, 0.0, 4.0])
        for shape in ((1,), (4,)):
            [y] = self.run_on([ad.pow_op(x, half)], {x: array, half: np.full(shape, 0.5, "f4")})
            np.testing.assert_array_equal(y, [np.inf, 0, 0, 2])
            self.assertFalse(np.signbit(y).any())

    def test_a_number_to_a_power(self) -> None:
        x = np.array([0.0, 2.0, 0.5, np.inf, -1.0, np.nan], np.float32)
        [got] = self.gradients(lambda x: 0.0**x, x)
        np.testing.assert_array_equal(got, [0, 0, 0, 0, -np.inf, np.nan])
        [got] = self.gradients(lambda x: 2.0**x, x)
        wanted = 2 ** x.astype(np.float64) * np.log(2)
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
        [[of_first]] = self.second(lambda x: 0.0**x, x[:4])
        np.testing.assert_array_equal(of_first, 0)

    def test_second_gradients_of_powers(self) -> None:
        a, b = (x.ravel() for x in np.meshgrid([0.0, -0.0, 3.0], [0.0, 1.0, 2.0, 4.0]))
        a, b = a.astype(np.float32), b.astype(np.float32)
        (aa, ab), (ba, bb) = self.second(lambda a, b: a**b, a, b)
        zero = a == 0
        a64, b64 = np.where(zero, 1.0, a), b.astype(np.float64)
        log = np.log(a64)
        self.close(aa, np.where(zero, 2.0 * (b == 2), b64 * (b64 - 1) * a64 ** (b64 - 2)))
        self.close(bb, np.where(zero, 0.0, a64**b64 * log * log))
        mixed = a64 ** (b64 - 1) * (1 + b64 * log)
        # True are 0 beyond exponent 1 and -inf at 1 and 0, where 0 · log 0 counts as 0.
        for got, at_most_one in ((ab, 1.0), (ba, 0.0)):
            wanted = np.where(zero, 0.0, mixed)
            known = ~zero | (b >= 2)
            self.close(got[known], wanted[known])
            self.close(got[zero & (b == 1)], at_most_one)

    def close(self, got: np.ndarray, wanted: Any) -> None:
        np.testing.assert_allclose(got, np.broadcast_to(wanted, got.shape), rtol=2e-6)

    # ---- quotients ----
    def test_gradients_of_quotients_do_not_overflow(self) -> None:
        for a, b, dy in (
            (1e30, 1e20, 1e30), (1e-20, 1e-30, 1e-20), (1e20, 1e10, -1e35), (3.0, -2.0, 0.5),
            (1e-38, 1e-38, 1e-38), (1e38, 1e38, 1e38),
        ):  # fmt: skip
            with self.subTest(a=a, b=b, dy=dy):
                arrays = [np.full(3, value, np.float32) for value in (a, b)]
                x, y = (array.astype(np.float64) for array in arrays)
                dz = float(np.float32(dy))
                wanted = dz / y, -dz * x / y / y
                inputs = [ad.Variable(f"x{k}", dtype=np.float32) for k in range(2)]
                g = ad.Variable("g", dtype=np.float32)
                feeds = {**dict(zip(inputs, arrays)), g: np.full(3, dy, np.float32)}
                for node in (inputs[0] / inputs[1], float(np.float32(a)) / inputs[1]):
                    ends = [n for n in inputs if any(n is x for x in node.inputs)]
                    got = self.run_on(ad.gradients(ad.sum_op(node * g), ends), feeds)
                    for ours, theirs in zip(got, wanted[-len(ends) :]):
                        np.testing.assert_allclose(ours, theirs, rtol=1e-6)

    # ---- losses ----
    def test_losses_of_probabilities_at_0_and_1_are_finite(self) -> None:
        sure = np.array([[0, 1], [1, 0], [0.5, 0.5]])
        wanted = {"kl_divergence": 0.0, "binary_cross_entropy": np.log(2) / 3}
        for dtype in (np.float32, np.float16):
            p = sure.astype(dtype)
            logs = np.log(np.maximum(p, np.finfo(dtype).smallest_subnormal))
            for name, given in (("kl_divergence", logs), ("binary_cross_entropy", p)):
                with self.subTest(name, dtype=dtype):
                    x, y = (ad.Variable(n, p.shape, dtype) for n in "xy")
                    loss = getattr(ad, name)(x, y)
                    nodes = [loss, *ad.gradients(loss, [x, y])]
                    value, *slopes = self.run_on(nodes, {x: given, y: p})
                    # Half a unit of float16 in the log of each of six elements: 5e-4 of 0.69.
                    np.testing.assert_allclose(value, wanted[name], atol=5e-4)
                    self.assertTrue(all(np.isfinite(slope).all() for slope in slopes))


class NumpyEdgeGradients(EdgeGradients, unittest.TestCase):
    pass


CpuEdgeGradients, GpuEdgeGradients = on_native_devices(EdgeGradients)

"""Slices that are views share memory with what they show, on every device, and change nothing."""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.ops import indexing
from dlsys.runtime.device import Context
from support.devices import on_native_devices


class PeekOp(ad.Op):
    """A copy of the values, and a note of where they were."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def infer_shape(self, node: ad.Node, shapes: Any) -> tuple[int, ...]:
        return shapes[0]

    def compute(self, node: ad.Node, values: Any, output: Any, use_numpy: bool = True) -> None:
        self.seen[node.name] = values[0]
        output[:] = values[0]


def address(array: Any) -> int:
    return array.__array_interface__["data"][0] if type(array) is np.ndarray else array.data_address


class Windows:
    ctx: Context | None = None

    def values(self, nodes: list, feeds: dict) -> list[np.ndarray]:
        return ad.Executor(nodes, self.ctx).run(feeds, convert_to_numpy_ret_vals=True)

    def test_slices_are_views(self) -> None:
        """Of feeds, Parameters, constants, computed values, fetches and other slices."""
        value = np.arange(96, dtype=np.float32).reshape(6, 4, 4)
        peek = PeekOp()
        x, p = ad.Variable("x", (6, 4, 4), "float32"), ad.Parameter(value, "p")
        roots = {"x": x, "p": p, "c": ad.constant(value), "computed": x + 1, "fetched": x * 2}
        nodes = [roots["fetched"]]
        for name, root in roots.items():
            part = root[2:5]
            nodes += [
                peek(node, name=f"{name}.{kind}")
                for kind, node in (("root", root), ("part", part), ("inner", part[1, 1:3]))
            ]
        fetched, *shown = self.values(nodes, {x: value})
        np.testing.assert_array_equal(fetched, 2 * value)
        for k, name in enumerate(roots):
            whole = {"computed": value + 1, "fetched": 2 * value}.get(name, value)
            for array, expected in zip(shown[3 * k :], (whole, whole[2:5], whole[3, 1:3])):
                np.testing.assert_array_equal(array, expected, name)
            start = address(peek.seen[f"{name}.root"])
            self.assertEqual(address(peek.seen[f"{name}.part"]), start + 4 * 32, name)
            self.assertEqual(address(peek.seen[f"{name}.inner"]), start + 4 * 52, name)

    def test_only_aligned_neighbors_are_views(self) -> None:
        x = ad.Variable("x", (6, 4, 4), "float32")
        views = [x[2:5], x[3], x[3, 1], x[2:3, 1:3], x[5, 3, :2], x[:, :, :][1:]]
        copies = [x[::2], x[:, 1], x[1, 1, 1:], x[::-1], x[2:4, 1:]]
        for part, copied in [(v, 0) for v in views] + [(c, 1) for c in copies]:
            executor = ad.Executor([part * 2], self.ctx)
            plan = executor.plan({x: (6, 4, 4)})
            self.assertEqual(len(plan.steps), 1 + copied, part)

    def test_fetched_slices_are_copies(self) -> None:
        x = ad.Variable("x", (8, 4), "float32")
        value = np.arange(32, dtype=np.float32).reshape(8, 4)
        y = x + 0.5
        results = self.values([y[1:3], y, y[2:], x[4:]], {x: value})
        for result, expected in zip(
            results, (value[1:3] + 0.5, value + 0.5, value[2:] + 0.5, value[4:])
        ):
            np.testing.assert_array_equal(result, expected)
            self.assertFalse(np.shares_memory(result, value))

    def test_nothing_is_done_in_place_beside_a_slice(self) -> None:
        """x + x[0] reads the first row for every row, so it must not write over it."""
        x = ad.Variable("x", (64, 16), "float32")
        value = np.random.default_rng(0).uniform(-1, 1, (64, 16)).astype(np.float32)
        y = ad.exp_op(x)
        got = self.values([(y + y[1:2]) * 1.0, (y[32:] * y[:32]) + 1], {x: value})
        e = np.exp(value)
        np.testing.assert_allclose(got[0], e + e[1:2], rtol=1e-6)
        np.testing.assert_allclose(got[1], e[32:] * e[:32] + 1, rtol=1e-6)

    def test_slices_of_updated_parameters(self) -> None:
        """They show the value from the run's start."""
        value = np.arange(32, dtype=np.float32).reshape(8, 4)
        p, x = ad.Parameter(value, "p"), ad.Variable("x", (8, 4), "float32")
        update = ad.sgd_update_op(p, x, ad.constant(1.0))
        late = update + 0.0  # reads the new value
        step = ad.Executor([p[4:] * 1.0, late[:4] * p[:4], update], self.ctx)
        before, mixed, after = step.run(
            {x: np.ones((8, 4), np.float32)}, convert_to_numpy_ret_vals=True
        )
        np.testing.assert_array_equal(before, value[4:])
        np.testing.assert_array_equal(mixed, (value[:4] - 1) * value[:4])
        np.testing.assert_array_equal(after, value - 1)

    def test_random_graphs(self) -> None:
        """Slices, reshapes and arithmetic in any order give what numpy gives."""
        for seed in range(40):
            rng = np.random.default_rng(seed)
            x = ad.Variable("x")
            value = rng.uniform(-1, 1, (12, 8)).astype(np.float32)
            nodes, values = [x], [value]
            for _ in range(12):
                k = int(rng.integers(len(nodes)))
                node, array = nodes[k], values[k]
                start, stop = sorted(int(n) for n in rng.integers(0, len(array) + 1, 2))
                kind = int(rng.integers(4))
                if kind == 0:
                    node, array = node[start:stop], array[start:stop]
                elif kind == 1:
                    node, array = ad.reshape_op(node, (-1, 4)), array.reshape(-1, 4)
                elif kind == 2:
                    node, array = node * 2 + node, array * 3
                elif len(array):
                    node, array = node + node[-1], array + array[-1]
                nodes.append(node)
                values.append(array)
            chosen = [int(k) for k in rng.integers(0, len(nodes), 4)]
            results = self.values([nodes[k] for k in chosen], {x: value})
            for k, result in zip(chosen, results):
                with self.subTest(seed=seed, node=k):
                    np.testing.assert_allclose(result, values[k], rtol=1e-5, atol=1e-5)

    def test_window(self) -> None:
        x = ad.Variable("x", (3, 8), "float32")
        value = np.arange(24, dtype=np.float32).reshape(3, 8)
        node = indexing.window_op(x, 4, (2, 5))
        slope = ad.gradients(ad.sum_op(node * node), [x])[0]
        got, gradient = self.values([node, slope], {x: value})
        np.testing.assert_array_equal(got, value.ravel()[4:14].reshape(2, 5))
        expected = np.zeros(24, np.float32)
        expected[4:14] = 2 * value.ravel()[4:14]
        np.testing.assert_array_equal(gradient, expected.reshape(3, 8))


class NumpyWindows(Windows, unittest.TestCase):
    pass


CpuWindows, GpuWindows = on_native_devices(Windows)

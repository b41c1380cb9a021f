"""The rungs of convolution on the CPU device and in numpy: every algorithm in every direction
against the definition in float64, any number of threads, what is not finite, and what is refused.
"""

from __future__ import annotations

import unittest
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys.errors import NotApplicableError
from dlsys.ndarray import array, empty, launch
from dlsys.ops.conv.algorithms import ALGORITHMS, Algorithm
from dlsys.ops.conv.geometry import Windows
from dlsys.rungs import CONV
from dlsys.runtime.device import Context, cpu, unavailable
from dlsys.runtime.interface import interface
from dlsys.runtime.library import load
from dlsys.settings import settings
from fusion.conv.test_conv_pool_cpu import threads
from support.devices import require

EPS = 2.0**-24  # half a unit in the last place of 1 in float32


class Case(NamedTuple):
    """A convolution: images (n, c, *image), filters (o, c / groups, *size)."""

    n: int
    c: int
    o: int
    image: tuple[int, int]
    size: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    before: tuple[int, int] = (1, 1)
    after: tuple[int, int] | None = None
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def windows(self) -> Windows:
        after = self.before if self.after is None else self.after
        axes = zip(self.image, self.before, after, self.size, self.dilation, self.stride)
        out = tuple((h + b + a - (k - 1) * d - 1) // s + 1 for h, b, a, k, d, s in axes)
        sizes = self.image, self.size, self.stride, self.dilation, self.before, after
        return Windows(*sizes, out)  # type: ignore[arg-type]

    def operands(self, seed: int = 0) -> list[np.ndarray]:
        """x, f, bias and dy."""
        rng, windows = np.random.default_rng(seed), self.windows
        shapes = (
            (self.n, self.c, *self.image),
            (self.o, self.c // self.groups, *self.size),
            (self.o,),
            (self.n, self.o, *windows.out),
        )
        return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


# Primes, 1, 0 and more channels than a block; tiles that images fill and do not; all attributes.
CASES = [
    Case(2, 3, 5, (7, 11)),
    Case(1, 1, 1, (1, 1), (1, 1), before=(0, 0)),
    Case(0, 3, 5, (7, 9)),
    Case(3, 17, 33, (11, 13), before=(0, 1)),
    Case(1, 513, 2, (3, 3)),
    Case(1, 2, 513, (4, 3)),
    Case(2, 2, 130, (4, 4), (1, 1), before=(0, 0)),
    Case(2, 64, 31, (7, 5), before=(2, 0), after=(1, 2)),
    Case(1, 2, 3, (5, 5), before=(4, 5)),
    Case(2, 12, 8, (9, 31), groups=2),
    Case(2, 6, 9, (10, 9), stride=(2, 3), groups=3),
    Case(2, 3, 4, (13, 12), dilation=(3, 2), before=(3, 2)),
    Case(2, 4, 6, (14, 13), (5, 3), (2, 3), (2, 1), (1, 2), (2, 3), 2),
    Case(3, 7, 7, (9, 9), groups=7),
    Case(2, 5, 10, (8, 10), (2, 4), (3, 2), (1, 3), dilation=(2, 1), groups=5),
    Case(1, 16, 16, (2, 53)),
]


def reference(case: Case, operands: list[np.ndarray], magnitudes: bool = False) -> list[np.ndarray]:
    """y with bias, dx and df by the definition in float64, or those of the absolute values."""
    x, f, bias, dy = (np.abs(a) if magnitudes else a for a in map(np.float64, operands))
    windows, groups = case.windows, case.groups
    y, dx, df = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(f.shape)
    for g in range(groups):
        of = slice(g * case.o // groups, (g + 1) * case.o // groups)
        on = slice(g * case.c // groups, (g + 1) * case.c // groups)
        for (i, j), (rows, columns), (down, across) in windows.kernel_offsets():
            seen, weights = x[:, on, down, across], f[of, :, i, j]
            gradient = dy[:, of, rows, columns]
            y[:, of, rows, columns] += np.einsum("oc,nchw->nohw", weights, seen)
            dx[:, on, down, across] += np.einsum("oc,nohw->nchw", weights, gradient)
            df[of, :, i, j] = np.einsum("nohw,nchw->oc", gradient, seen)
    return [y + bias[:, None, None], dx, df]


def terms(case: Case) -> list[int]:
    """The most products in a sum of each result, and one more for the bias."""
    kernel, windows = case.size[0] * case.size[1], case.windows
    per_group = case.c // case.groups, case.o // case.groups
    return [
        per_group[0] * kernel + 1,
        per_group[1] * kernel,
        case.n * windows.out[0] * windows.out[1],
    ]


# Of the largest result. F(2×2, 3×3) rounds like a direct convolution: measured at most 4.8e-7 over
# these cases and 128 channels. F(4×4, 3×3) has factors of up to 2.8 in its transforms: measured
# 2.4e-6. A Fourier transform rounds once in each of its stages: measured 6e-7.
OF_LARGEST = {"winograd": 2e-6, "winograd 2x2": 2e-6, "winograd 4x4": 1e-5, "fft": 3e-6}


def check(
    name: str, case: Case, results: list[np.ndarray], operands: list[np.ndarray], unit: float = EPS
) -> None:
    """Sums of products in any order err by at most (terms) · eps · sum of magnitudes; transforms
    mix elements, so that their error is judged by the largest result.
    """
    exact, magnitudes = reference(case, operands), reference(case, operands, True)
    for got, wanted, size, count in zip(results, exact, magnitudes, terms(case)):
        assert got.shape == wanted.shape, (name, got.shape)
        bound = (count + 1) * unit * size
        if name in OF_LARGEST:
            scale = OF_LARGEST[name] * unit / EPS
            bound = np.full_like(bound, scale * np.abs(wanted).max(initial=0) + 1e-30)
        error = np.abs(got - wanted)
        assert np.all(error <= bound), (name, case, float(np.max(error / (bound + 1e-300))))


_Options = interface.struct("WindowOptions")


def on_cpu(case: Case, operands: list[np.ndarray], algorithm: int) -> list[np.ndarray]:
    """y with bias, dx and df by an algorithm of the kernels."""
    ctx, windows = cpu(0), case.windows
    x, f, bias, dy = (array(a, ctx) for a in operands)
    results = [empty(a.shape, ctx) for a in (operands[3], operands[0], operands[1])]
    how = windows.argument, case.groups, algorithm, 0
    launch("conv2d_bias", ctx, x, f, bias, results[0], *how)
    launch("conv2d_data_gradient", ctx, f, dy, results[1], *how)
    launch("conv2d_filter_gradient", ctx, x, dy, results[2], *how)
    return [a.asnumpy() for a in results]


def names() -> tuple[str, ...]:
    return load().algorithms("cpu", "conv2d")


def serves(name: str, case: Case) -> bool:
    if name == "depthwise":
        return case.groups > 1 and case.groups == case.c
    return not name.startswith("winograd") or ALGORITHMS["winograd"].fits(case.windows)


@require(cpu(0))
class Cpu(unittest.TestCase):
    def test_every_algorithm_in_every_direction(self) -> None:
        for case in CASES:
            operands = case.operands()
            for number, name in enumerate(("auto", *names())):
                if serves(name, case):
                    with self.subTest(name, case=case):
                        check(name, case, on_cpu(case, operands, number), operands)

    def test_any_number_of_threads_gives_the_same_bits(self) -> None:
        case = Case(9, 33, 40, (15, 14))
        operands = case.operands()
        for number, name in enumerate(names(), 1):
            if not serves(name, case):
                continue
            made = []
            for count in (1, 2, 3):
                with threads(count):
                    made.append(on_cpu(case, operands, number))
            for other in made[1:]:
                for a, b in zip(made[0], other):
                    np.testing.assert_array_equal(a, b, name)

    def test_what_is_not_finite_stays_where_a_direct_convolution_has_it(self) -> None:
        case = Case(2, 16, 17, (9, 8))
        implicit = names().index("implicit") + 1
        for value in (np.inf, -np.inf, np.nan, 3e38):
            for k in range(4):
                operands = case.operands()
                operands[k].reshape(-1)[operands[k].size // 2] = value
                wanted = on_cpu(case, operands, implicit)
                for name in ("fft", "winograd 2x2", "winograd 4x4"):
                    got = on_cpu(case, operands, names().index(name) + 1)
                    for a, b in zip(got, wanted):
                        with self.subTest(name, value=value, operand=k):
                            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))

    def test_auto_goes_by_channels_and_positions(self) -> None:
        taken = {
            Case(1, 32, 32, (8, 8)): "winograd 2x2",
            Case(16, 32, 32, (8, 8)): "winograd 4x4",  # tiles make up for the filters' transforms
            Case(1, 3, 64, (8, 8)): "implicit",  # few channels
            Case(1, 64, 64, (1, 1)): "implicit",  # a tile would have one output of four
            Case(1, 32, 32, (8, 8), stride=(2, 2)): "implicit",
            Case(1, 32, 32, (8, 8), groups=32): "depthwise",
            Case(16, 32, 32, (8, 8), stride=(2, 2)): "im2col",  # one product of small images
            Case(16, 16, 32, (4, 4), (1, 1), before=(0, 0)): "im2col",
            Case(16, 256, 256, (2, 2)): "im2col",  # filters are most of what is read
        }
        for case, name in taken.items():
            operands = case.operands()
            of_auto = on_cpu(case, operands, 0)
            for a, b in zip(of_auto, on_cpu(case, operands, names().index(name) + 1)):
                np.testing.assert_array_equal(a, b, name)

    def test_a_rung_that_cannot_names_those_that_can(self) -> None:
        case = Case(1, 2, 2, (8, 8), (5, 5))
        number = names().index("winograd") + 1
        message = "winograd is for 3 x 3 filters at stride 1 without dilation; use naive, im2col"
        with self.assertRaisesRegex(NotApplicableError, message):
            on_cpu(case, case.operands(), number)

    def test_every_name_in_a_refusal_can_be_said(self) -> None:
        case = Case(1, 2, 2, (8, 8), (3, 3))
        with self.assertRaises(NotApplicableError) as caught:
            on_cpu(case, case.operands(), names().index("depthwise") + 1)
        said = str(caught.exception).partition(" [")[0].partition("use ")[2].split(", ")
        self.assertIn("winograd 4x4", said)
        for name in said:
            ad.conv2d(ad.Variable("x"), ad.Variable("f"), algo=name)


class Tiles(unittest.TestCase):
    """Winograd's tiles are selected by name, on a node and by the setting."""

    def test_tiles_by_name(self) -> None:
        rng = np.random.default_rng(3)
        x, f = ad.Variable("x"), ad.Variable("f")
        feeds = {x: rng.standard_normal((2, 5, 9, 8)), f: rng.standard_normal((6, 5, 3, 3))}
        feeds = {node: value.astype(np.float32) for node, value in feeds.items()}
        for ctx in (None, cpu(0)):
            if ctx is not None and unavailable(ctx):
                continue
            by_node, by_setting = (
                {name: run(ctx, x, f, feeds, name, on_node) for name in CONV.variants}
                for on_node in (True, False)
            )
            for name in CONV.variants:
                for one, two in zip(by_node[name], by_setting[name]):
                    self.assertEqual(one.tobytes(), two.tobytes())
            pairs = zip(*by_node.values())
            self.assertTrue(any((one != two).any() for one, two in pairs), ctx)

    def test_one_that_does_not_fit(self) -> None:
        x, f = ad.Variable("x"), ad.Variable("f")
        executor = ad.Executor([ad.conv2d(x, f, stride=2, algo="winograd 4x4")])
        with self.assertRaisesRegex(NotApplicableError, "winograd 4x4 is for 3×3 filters at"):
            executor.run({x: np.ones((1, 1, 5, 5)), f: np.ones((1, 1, 3, 3))})


def run(
    ctx: Context | None, x: ad.Node, f: ad.Node, feeds: dict, name: str, on_node: bool
) -> list[np.ndarray]:
    """A convolution with both gradients by a rung or a variant, named there or by the setting."""
    with mock.patch.object(settings, "conv", "auto" if on_node else name):
        y = ad.conv2d(x, f, padding=1, algo=name if on_node else None)
        executor = ad.Executor([y, *ad.gradients(ad.sum_op(y * y), [x, f])], ctx)
        results = executor.run(feeds, convert_to_numpy_ret_vals=True)
    if ctx is not None:
        assert set(executor.algorithms().values()) == {name}, executor.algorithms()
    return results


class Numpy(unittest.TestCase):
    def results(
        self, algorithm: Algorithm, case: Case, operands: list[np.ndarray]
    ) -> list[np.ndarray]:
        x, f, bias, dy = operands
        n, groups, o = case.n, case.groups, case.o // case.groups
        images, gradients = (a.reshape(n, groups, -1, *a.shape[2:]) for a in (x, dy)) if n else (
            a.reshape(0, groups, a.shape[1] // groups, *a.shape[2:]) for a in (x, dy)
        )  # fmt: skip
        filters = f.reshape(groups, o, *f.shape[1:])
        y, dx, df = (np.full_like(a, 9) for a in (gradients, images, filters))
        algorithm.forward(case.windows, images, filters, y)
        algorithm.data(case.windows, filters, gradients, dx)
        algorithm.filter(case.windows, images, gradients, df)
        return [
            y.reshape(dy.shape) + bias[:, None, None],
            dx.reshape(x.shape),
            df.reshape(f.shape),
        ]

    def test_every_rung_in_every_direction(self) -> None:
        for case in CASES:
            if case.c * case.o > 1100:
                continue  # naive is a loop in Python
            for dtype, unit in ((np.float32, EPS), (np.float64, 2.0**-53)):
                operands: list[Any] = [a.astype(dtype) for a in case.operands()]
                for name, algorithm in ALGORITHMS.items():
                    if algorithm.fits(case.windows):
                        with self.subTest(name, case=case, dtype=dtype):
                            results = self.results(algorithm, case, operands)
                            self.assertEqual({a.dtype for a in results}, {np.dtype(dtype)})
                            check(name, case, results, operands, unit)


if __name__ == "__main__":
    unittest.main()

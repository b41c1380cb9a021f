"""The ladder of convolution: every rung computes every convolution that it takes, with both
gradients, within the error of its arithmetic, and says what it does not take.

cudnn and fft call NVIDIA's libraries: they need a GPU, and are left out where there is none.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import unittest
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn
from dlsys.errors import DeviceError, NotApplicableError
from dlsys.executor.tune.microbenchmark import Microbenchmark
from dlsys.graph.spec import FLOAT32, Spec
from dlsys.learn.conv import CHANNELS_LAST, DIRECTIONS, Shape, climb, node_of
from dlsys.ndarray import array, empty, launch
from dlsys.ops.conv import convolution as C
from dlsys.rungs import HEURISTIC, Algorithm, rungs_among
from dlsys.runtime.device import gpu
from dlsys.runtime.library import load
from dlsys.settings import settings
from support import sample
from support.devices import require

UNIT = 2.0**-24  # of float32, rounded to nearest
SIGMAS = 8  # of an error whose deviation is estimated

PASSES = {
    "conv2d": C.convolution_op,
    "conv2d_data_gradient": C.data_gradient_op,
    "conv2d_filter_gradient": C.filter_gradient_op,
}


class Case(NamedTuple):
    """A convolution of x (n, c, *image) by f (o, c/groups, *kernel)."""

    n: int
    c: int
    image: tuple[int, int]
    o: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: Any = 0
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def sides(self) -> tuple[tuple[int, int], tuple[int, int]]:
        if isinstance(self.padding, int):
            return ((self.padding,) * 2,) * 2
        return self.padding

    @property
    def out(self) -> tuple[int, int]:
        sizes = zip(self.image, self.kernel, self.stride, self.sides, self.dilation)
        high, wide = ((h + sum(p) - (k - 1) * d - 1) // s + 1 for h, k, s, p, d in sizes)
        return high, wide

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "x": (self.n, self.c, *self.image),
            "f": (self.o, self.c // self.groups, *self.kernel),
            "y": (self.n, self.o, *self.out),
        }

    @property
    def is_winograd(self) -> bool:
        one = (1, 1)
        return self.kernel == (3, 3) and self.stride == one and self.dilation == one


# Parts of the rung `implicit` for 1 x 1 filters, and the strides of CASES that they take.
POINTWISE = {"implicit batched": (1, 1), "implicit compact": (2, 2)}

CASES = [
    Case(1, 1, (1, 1), 1, (1, 1)),
    Case(2, 1, (7, 5), 1, (3, 3)),
    Case(2, 3, (9, 8), 5, (3, 3), padding=1),
    Case(3, 17, (13, 11), 19, (3, 3), padding=1),
    Case(1, 4, (6, 7), 8, (3, 3), padding=((2, 1), (0, 3))),
    Case(1, 513, (4, 5), 3, (3, 3), padding=1),
    Case(1, 2, (5, 5), 129, (3, 3), padding=2),
    Case(2, 33, (7, 7), 31, (1, 1)),
    Case(2, 16, (8, 6), 12, (1, 1), stride=(2, 2)),
    Case(2, 6, (14, 14), 16, (5, 5)),
    Case(1, 5, (11, 13), 7, (3, 2), stride=(2, 3), padding=1),
    Case(2, 4, (12, 10), 6, (3, 3), stride=(2, 2), padding=((0, 1), (1, 0))),
    Case(1, 3, (11, 11), 4, (3, 3), padding=2, dilation=(2, 2)),
    Case(1, 2, (13, 9), 3, (2, 4), stride=(3, 2), padding=((3, 0), (1, 2)), dilation=(2, 1)),
    Case(2, 6, (7, 8), 9, (3, 3), padding=1, groups=3),
    Case(2, 6, (7, 8), 6, (3, 3), padding=1, groups=6),
    Case(1, 4, (9, 9), 8, (3, 3), stride=(2, 2), padding=1, groups=4),
    Case(3, 4, (19, 21), 4, (3, 3), padding=((1, 0), (0, 2)), groups=4),
    Case(2, 5, (13, 11), 5, (5, 5), padding=2, groups=5),
    Case(2, 3, (17, 9), 6, (7, 7), stride=(2, 2), padding=3, groups=3),
    Case(2, 3, (18, 11), 3, (3, 3), stride=(2, 2), padding=1, groups=3),
    Case(1, 2, (21, 16), 2, (5, 5), stride=(2, 2), padding=((2, 1), (1, 2)), groups=2),
    Case(1, 2, (14, 15), 2, (7, 7), stride=(2, 2), groups=2),
    Case(1, 3, (9, 8), 3, (3, 3), padding=1, dilation=(2, 2), groups=3),
    Case(2, 16, (9, 7), 12, (1, 1), stride=(2, 2)),
    Case(2, 36, (9, 7), 20, (3, 3), padding=1),
    Case(3, 12, (8, 6), 260, (3, 3), padding=1),
    Case(5, 68, (4, 5), 68, (1, 1)),
    Case(2, 40, (9, 12), 24, (3, 3), stride=(2, 2), padding=1),
    Case(0, 3, (5, 5), 2, (3, 3), padding=1),
    Case(2, 3, (5, 5), 0, (3, 3), padding=1),
]


def winograd_matrices(out: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """B^T, G and A^T of F(out × out, 3 × 3) from the points 0, ±1 and infinity, or, of 4 × 4, from
    0, ±√½, ±√2 and infinity.
    """
    if out == 2:
        return (
            np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], float),
            np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]]),
            np.array([[1, 1, 1, 0], [0, 1, -1, -1]], float),
        )
    half, root = np.sqrt(0.5), np.sqrt(2)
    inputs = [[1, 0, -2.5, 0, 1, 0],
              [0, -root, -2, half, 1, 0], [0, root, -2, -half, 1, 0],
              [0, -half, -0.5, root, 1, 0], [0, half, -0.5, -root, 1, 0],
              [0, 1, 0, -2.5, 0, 1]]  # fmt: skip
    filters = [[1, 0, 0],
               [-2 / 3, -root / 3, -1 / 3], [-2 / 3, root / 3, -1 / 3],
               [1 / 6, root / 6, 1 / 3], [1 / 6, -root / 6, 1 / 3], [0, 0, 1]]  # fmt: skip
    outputs = [[1, 1, 1, 1, 1, 0], [0, half, -half, root, -root, 0],
               [0, 0.5, 0.5, 2, 2, 0],
               [0, half / 2, -half / 2, 2 * root, -2 * root, 1]]  # fmt: skip
    return np.array(inputs, float), np.array(filters), np.array(outputs, float)


def winograd_error(kernel: str, case: Case, out: int) -> float:
    """The deviation of an element from rounding, of operands drawn from N(0, 1).

    Each element of a transformed tile has the variance that its rows of the matrices give it. A
    product sums `terms` of them, each rounded to within UNIT of the partial sum, and the transform
    behind it amplifies that by its rows.
    """
    inputs, filters, outputs = ((m * m).sum(1) for m in winograd_matrices(out))
    to_output = winograd_matrices(out)[2] ** 2
    if kernel == "conv2d_filter_gradient":
        tiles = [-(-size // out) for size in case.out]
        terms = case.n * tiles[0] * tiles[1]
        columns = (winograd_matrices(out)[2] ** 2).sum(0)  # of A dy A^T
        axis = (winograd_matrices(out)[1] ** 2).T @ (columns * inputs)
    else:
        terms = case.c // case.groups if kernel == "conv2d" else case.o // case.groups
        axis = to_output @ (filters * inputs)
    return UNIT * np.sqrt(terms + 2 * (out + 2)) * np.sqrt(terms) * float(axis.max())


def reference(kernel: str, case: Case, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The result in float64, by a loop over kernel offsets."""
    (top, bottom), (left, right) = case.sides
    around = ((0, 0), (0, 0), (top, bottom), (left, right))
    f_shape, g = case.shapes["f"], case.groups
    x = np.zeros(case.shapes["x"]) if kernel == "conv2d_data_gradient" else first.astype(float)
    padded = np.pad(x, around)
    dy = np.zeros(case.shapes["y"]) if kernel == "conv2d" else second.astype(float)
    f = {"conv2d": second, "conv2d_data_gradient": first}.get(kernel, np.zeros(f_shape))
    f = f.astype(float).reshape(g, case.o // g, *f_shape[1:])
    dy = dy.reshape(case.n, g, case.o // g, *case.out)
    df = np.zeros_like(f)
    for a, b in itertools.product(*map(range, case.kernel)):
        at = [
            slice(k * d, k * d + (o - 1) * s + 1, s)
            for k, d, o, s in zip((a, b), case.dilation, case.out, case.stride)
        ]
        seen = padded[:, :, at[0], at[1]].reshape(case.n, g, case.c // g, *case.out)
        if kernel == "conv2d":
            dy += np.einsum("ngchw,goc->ngohw", seen, f[..., a, b])
        elif kernel == "conv2d_data_gradient":
            part = np.einsum("ngohw,goc->ngchw", dy, f[..., a, b])
            padded[:, :, at[0], at[1]] += part.reshape(case.n, case.c, *case.out)
        else:
            df[..., a, b] = np.einsum("ngohw,ngchw->goc", dy, seen)
    if kernel == "conv2d":
        return dy.reshape(case.shapes["y"])
    if kernel == "conv2d_filter_gradient":
        return df.reshape(f_shape)
    height, width = case.image
    return padded[:, :, top : top + height, left : left + width]


def terms_of(kernel: str, case: Case) -> int:
    """How many products an element sums."""
    area = case.kernel[0] * case.kernel[1]
    if kernel == "conv2d_filter_gradient":
        return case.n * case.out[0] * case.out[1]
    return area * (case.c if kernel == "conv2d" else case.o) // case.groups


def limit(
    kernel: str, case: Case, algorithm: str, precision: str, first: np.ndarray, second: np.ndarray
) -> Any:
    """The most that each element may be off.

    A sum of products in any order: Higham's gamma times the sum of magnitudes; at tf32 factors are
    rounded to 11 bits and tensor cores cut what they add. Winograd: as `winograd_error` says. fft:
    Higham, Accuracy and Stability, 24.2, with three transforms and Cauchy and Schwarz for the
    product: log2 of the plane's area times the norms.
    """
    count = terms_of(kernel, case)
    rung = algorithm.partition(" ")[0]
    if rung == "winograd":
        outs = {"winograd 2x2": (2,), "winograd 4x4": (4,)}.get(algorithm, (2, 4))
        return SIGMAS * max(winograd_error(kernel, case, out) for out in outs)
    if rung == "fft":
        area = np.prod([s + max(p) + k * d for s, p, k, d in zip(
            case.image, case.sides, case.kernel, case.dilation)])  # fmt: skip
        norms = np.sqrt((first.astype(float) ** 2).sum() * (second.astype(float) ** 2).sum())
        return UNIT * (8 * np.log2(area + 1) + count) * norms
    magnitude = reference(kernel, case, np.abs(first), np.abs(second))
    gamma = (count + 2) * UNIT
    if precision == "tf32" and (rung in ("im2col", "implicit", "cudnn")):
        gamma = 2.0**-10 + 2.0**-22 + 2 * (count + 2) * UNIT
    return gamma * magnitude + 2.0**-126


@require(gpu(0))
class TestLadder(unittest.TestCase):
    ctx = gpu(0)

    def algorithms(self, kernel: str = "conv2d") -> tuple[str, ...]:
        return load().algorithms(self.ctx.kernel_device, kernel)

    def usable(self, kernel: str) -> Iterator[str]:
        """The rungs and variants of convolution that work here, tiles left out."""
        for number, name in enumerate(self.algorithms(kernel), 1):
            try:
                load().algorithm_source(self.ctx.kernel_device, kernel, number)
            except DeviceError:
                continue  # cuDNN or cuFFT is not here
            parts = ("winograd 2x2", "winograd 4x4", *POINTWISE)
            parts += ("implicit fma", "implicit mma", "implicit wgmma")
            if name in rungs_among(self.algorithms(kernel)) or name in parts:
                yield name

    def operands(self, kernel: str, case: Case) -> list[np.ndarray]:
        rng = np.random.default_rng(case.c + 3 * case.o)
        which = {"conv2d": "xf", "conv2d_data_gradient": "fy", "conv2d_filter_gradient": "xy"}
        return [rng.standard_normal(case.shapes[k], np.float32) for k in which[kernel]]

    def node(self, kernel: str, case: Case, name: str, precision: str) -> ad.Node:
        shapes = case.shapes
        which = {"conv2d": "xfy", "conv2d_data_gradient": "fyx", "conv2d_filter_gradient": "xyf"}
        inputs = [ad.Variable(k) for k in which[kernel][:2]]
        for node, k in zip(inputs, which[kernel]):
            node.spec = Spec(shapes[k], FLOAT32)
        attrs: dict[str, Any] = dict(
            stride=case.stride, padding=case.sides, dilation=case.dilation, groups=case.groups
        )
        if kernel == "conv2d_filter_gradient":
            attrs["size"] = case.kernel
        if kernel == "conv2d_data_gradient":
            sizes = zip(case.image, case.sides, case.kernel, case.dilation, case.stride)
            rest = tuple((h + sum(p) - (k - 1) * d - 1) % s for h, p, k, d, s in sizes)
            attrs["output_padding"] = rest
        node = PASSES[kernel](*inputs, **attrs)
        node.spec = Spec(shapes[which[kernel][2]], FLOAT32)
        number = self.algorithms(kernel).index(name) + 1
        node.attrs |= {"precision": precision, "algorithm": Algorithm(number, name)}
        return node

    def run_by(
        self, kernel: str, case: Case, name: str, precision: str, arrays: list[np.ndarray]
    ) -> np.ndarray:
        node = self.node(kernel, case, name, precision)
        result = empty(node.spec.shape, self.ctx)
        result[:] = np.float32(np.nan)
        given = [array(x, self.ctx) for x in arrays]
        launch(kernel, self.ctx, *given, result, *node.op.scalars(node))
        return result.asnumpy()

    def check(self, kernel: str, case: Case, name: str, precision: str) -> bool:
        arrays = self.operands(kernel, case)
        try:
            got = self.run_by(kernel, case, name, precision, arrays)
        except NotApplicableError as error:
            self.assertIn("use auto, naive", str(error))
            return False
        off = np.abs(got - reference(kernel, case, *arrays))
        most = limit(kernel, case, name, precision, *arrays)
        excess = (off - most).max(initial=-np.inf)
        self.assertLessEqual(excess, 0, f"off by {off.max(initial=0)}")
        return True

    def test_every_case_by_every_rung(self) -> None:
        for kernel in PASSES:
            for name, case in itertools.product(self.usable(kernel), sample.of(CASES, 14)):
                if kernel == "conv2d_data_gradient" and 0 in (case.n, case.o):
                    continue
                for precision in ("fp32", "tf32"):
                    with self.subTest(kernel=kernel, name=name, case=case, precision=precision):
                        served = self.check(kernel, case, name, precision)
                        rung = name.partition(" ")[0]
                        if name in ("naive", "im2col", "implicit", "fft"):
                            self.assertTrue(served)
                        if name in POINTWISE:
                            fits = case.kernel == (1, 1) and case.stride == POINTWISE[name]
                            self.assertEqual(served, fits or not case.n * case.o)
                        if name == "implicit wgmma" and case.n * case.o:
                            fits = case.c % 4 == case.o % 4 == 0 and case.groups == 1
                            self.assertEqual(served, precision == "tf32" and fits)
                        if name == "depthwise" and case.n * case.o:
                            self.assertEqual(served, case.groups > 1 and case.groups == case.c)
                        if rung == "winograd" and case.n * case.o:
                            self.assertEqual(served, case.is_winograd)

    def test_bias(self) -> None:
        names, served = self.algorithms("conv2d_bias"), set()
        for name, case in itertools.product(self.usable("conv2d_bias"), CASES[3:9]):
            with self.subTest(name=name, case=case):
                x, f = self.operands("conv2d", case)
                bias = np.linspace(-1, 1, case.o, dtype=np.float32)
                by = "tf32" if name in ("implicit mma", "implicit wgmma") else "fp32"
                node = self.node("conv2d", case, name, by)
                y = empty(case.shapes["y"], self.ctx)
                given = [array(a, self.ctx) for a in (x, f, bias)]
                windows, groups, _, precision = node.op.scalars(node)
                how = windows, groups, names.index(name) + 1, precision
                try:
                    launch("conv2d_bias", self.ctx, *given, y, *how)
                except NotApplicableError:
                    continue
                served.add(name)
                wanted = reference("conv2d", case, x, f) + bias[:, None, None].astype(float)
                most = limit("conv2d", case, name, by, x, f) + 2 * UNIT * np.abs(wanted)
                self.assertTrue((np.abs(y.asnumpy() - wanted) <= most).all())
        self.assertEqual(served, set(self.usable("conv2d_bias")) - {"depthwise"})

    def test_gradients_go_by_the_rung(self) -> None:
        case = Case(2, 4, (6, 7), 5, (3, 3), padding=1)
        x, f = self.operands("conv2d", case)
        dy = self.operands("conv2d_filter_gradient", case)[1]
        nodes = [ad.Variable(name) for name in ("x", "f", "dy")]
        for rung in dict.fromkeys(name.partition(" ")[0] for name in self.usable("conv2d")):
            if rung == "depthwise":
                continue
            with self.subTest(rung=rung):
                y = ad.conv2d(nodes[0], nodes[1], padding=1, algo=rung)
                grads = ad.gradients(ad.sum_op(y * nodes[2]), nodes[:2])
                executor = ad.Executor([y, *grads], self.ctx)
                feeds = dict(zip(nodes, (x, f, dy)))
                got = executor.run(feeds, convert_to_numpy_ret_vals=True)
                self.assertEqual(set(executor.algorithms().values()), {rung})
                for kernel, result, given in zip(PASSES, got, ((x, f), (f, dy), (x, dy))):
                    off = np.abs(result - reference(kernel, case, *given))
                    most = limit(kernel, case, rung, "fp32", *given)
                    self.assertTrue((off <= most).all())

    def test_rungs_of_both_layouts_are_told_apart(self) -> None:
        """At tf32 both are measured; every time is that of the layout that a name says."""
        climbing = climb(self.ctx, Shape(2, 8, 6, 8, 3, 1, 1), "forward", ("fp32", "tf32"))
        found = {one.algorithm: one for one in climbing}
        for name in ("auto", "implicit wgmma", f"{CHANNELS_LAST}auto"):
            self.assertIn(name, found)
        last = found[f"{CHANNELS_LAST}implicit wgmma"]
        self.assertEqual(last.precision, "tf32")
        self.assertLess(last.workspace_nbytes, found["implicit wgmma"].workspace_nbytes)
        self.assertLess(max(one.error for one in found.values()), 2.0**14)

    def test_setting_names_the_rung(self) -> None:
        x, f = ad.Variable("x"), ad.Variable("f")
        feeds = dict(zip((x, f), self.operands("conv2d", CASES[2])))
        with mock.patch.object(settings, "conv", "naive"):
            executor = ad.Executor([nn.Conv2d(3, 4, 3)(x), ad.conv2d(x, f, algo="auto")], self.ctx)
            executor.run(feeds)
            self.assertEqual(set(executor.algorithms().values()), {"naive", ""})

    def test_product_of_im2col_goes_by_its_setting(self) -> None:
        x, f = ad.Variable("x"), ad.Variable("f")
        arrays = self.operands("conv2d", CASES[2])
        with mock.patch.object(settings, "gemm", "tiled"):
            executor = ad.Executor([ad.conv2d(x, f, padding=1, algo="im2col")], self.ctx)
            (y,) = executor.run(dict(zip((x, f), arrays)), convert_to_numpy_ret_vals=True)
            self.assertEqual(set(executor.algorithms().values()), {"im2col tiled"})
        off = np.abs(y - reference("conv2d", CASES[2], *arrays))
        self.assertTrue((off <= limit("conv2d", CASES[2], "im2col", "fp32", *arrays)).all())

    def test_auto_does_without_libraries_and_within_its_workspace(self) -> None:
        """Large convolutions, for which the model wants cuDNN or much scratch: none is run."""
        for shape in ((16, 128, 28, 128, 3, 1, 1), (16, 256, 28, 512, 1, 2)):
            for direction, precision in itertools.product(DIRECTIONS, ("fp32", "tf32")):
                with self.subTest(shape=shape, direction=direction, precision=precision):
                    benchmark = Microbenchmark(
                        node_of(Shape(*shape), direction, precision), self.ctx
                    )
                    self.assertLessEqual(benchmark.workspace_nbytes(HEURISTIC), 1 << 30)

    def test_a_workspace_limit_is_respected(self) -> None:
        """Images go in parts, or the rung says what it would need."""
        code = """
from dlsys.executor.tune.microbenchmark import Microbenchmark
from dlsys.learn.conv import DIRECTIONS, Shape, node_of
from dlsys.rungs import Algorithm
from dlsys.errors import NotApplicableError
from dlsys.runtime.device import gpu
from dlsys.runtime.library import load
for direction in DIRECTIONS:
    node = node_of(Shape(12, 16, 12, 16, 3, 1, 1), direction, "fp32")
    names = load().algorithms("cuda", node.op.kernel)
    benchmark = Microbenchmark(node, gpu(0))
    wanted = benchmark.results(Algorithm(names.index("naive") + 1, "naive"))
    for name in ("im2col", "winograd 2x2", "winograd 4x4"):
        algorithm = Algorithm(names.index(name) + 1, name)
        assert benchmark.is_right(algorithm, wanted), name
        print(benchmark.workspace_nbytes(algorithm) <= 1 << 20)
node = node_of(Shape(1, 64, 80, 64, 3, 1, 1), "forward", "fp32")
try:
    Microbenchmark(node, gpu(0)).workspace_nbytes(Algorithm(names.index("im2col") + 1, "im2col"))
except NotApplicableError as error:
    print(error)
"""
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "DLSYS_CONV_WORKSPACE": "1", "PYTHONPATH": paths}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("True"), 9, done.stdout)
        self.assertRegex(done.stdout, r"im2col takes \d+ MiB of workspace, .*WORKSPACE allows 1")

    def test_refusal_names_those_that_can(self) -> None:
        x, f = ad.Variable("x"), ad.Variable("f")
        feeds = dict(zip((x, f), self.operands("conv2d", CASES[9])))
        executor = ad.Executor([ad.conv2d(x, f, algo="winograd")], self.ctx)
        with self.assertRaises(NotApplicableError) as caught:
            executor.run(feeds)
        self.assertIn("3 x 3 filters at stride 1", str(caught.exception))
        self.assertIn("use auto, naive, im2col", str(caught.exception))


if __name__ == "__main__":
    unittest.main()

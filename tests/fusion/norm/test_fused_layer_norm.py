"""Layer and RMS normalization with the residual stream around it, one kernel each way, on a GPU."""

from __future__ import annotations

import itertools
import unittest
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.dtypes import ROUNDING, bfloat16, rounded
from dlsys.errors import KernelError
from dlsys.executor.plan.memory import Plan
from dlsys.fusion.shared.rewrite import exchange
from dlsys.graph.node import Node
from dlsys.ndarray import array, empty, launch
from dlsys.runtime.device import gpu
from fusion.test_gemm_epilogue import feeds_of
from support import sample
from support.devices import native_contexts, require
from support.fusion import GPU, fused, require_fusion, without
from support.graphs import evaluate, operators, simplified, variable

FORWARD, BACKWARD = "fused_row_normalize", "fused_row_normalize_gradient"
Shape = tuple[int, ...]


def trained(y: Node, inputs: Sequence[Node]) -> list[Node]:
    """y, and the gradients of a sum over it with weights of both signs."""
    weights = variable("weights", *y.spec.shape)
    return [y, *ad.gradients(ad.sum_op(y * weights), list(inputs))]


class Layer:
    """A normalization with parameters that are fed, and products of few units behind it."""

    def __init__(self, name: str, width: int, rms: bool = False) -> None:
        self.scale, self.bias = variable(f"{name}scale", width), variable(f"{name}bias", width)
        self.down, self.up = variable(f"{name}down", 4, width), variable(f"{name}up", width, 4)
        self.shift = variable(f"{name}shift", width)
        self.rms = rms

    def norm(self, x: Node) -> Node:
        if self.rms:
            return ad.rms_normalization(x, self.scale)
        return ad.layer_normalization(x, self.scale, self.bias)

    def linear(self, x: Node) -> Node:
        return F.linear(F.linear(x, self.down), self.up, self.shift)

    @property
    def inputs(self) -> list[Node]:
        affine = [self.scale] if self.rms else [self.scale, self.bias]
        return [*affine, self.down, self.up, self.shift]


def alone(shape: Shape) -> list[Node]:
    x, layer = variable("x", *shape), Layer("a", shape[-1])
    return trained(layer.norm(x), [x, layer.scale, layer.bias])


def pre_norm(shape: Shape, rms: bool = False) -> list[Node]:
    """Two blocks of a residual stream, and a normalization at its end."""
    x, layers = variable("x", *shape), [Layer(name, shape[-1], rms) for name in "abc"]
    h = x
    for layer in layers[:2]:
        h = h + layer.linear(layer.norm(h))
    y = layers[2].linear(layers[2].norm(h))
    return trained(y, [x, *(v for layer in layers for v in layer.inputs)])


def post_norm(shape: Shape) -> list[Node]:
    """Two blocks whose normalization comes behind the addition."""
    x, layers = variable("x", *shape), [Layer(name, shape[-1]) for name in "ab"]
    h = x
    for layer in layers:
        h = layer.norm(h + layer.linear(h))
    return trained(h, [x, *(v for layer in layers for v in layer.inputs)])


def two_of_a_sum(shape: Shape) -> list[Node]:
    """Two normalizations of one sum, which is fetched too."""
    x, r, a, b = (variable("x", *shape), variable("r", *shape),
                  Layer("a", shape[-1]), Layer("b", shape[-1], rms=True))  # fmt: skip
    total = x + r
    return [total, *trained(a.norm(total) * b.norm(total), [x, r, a.scale, b.scale])]


def scale_of_the_sum(shape: Shape) -> list[Node]:
    """Scale and bias are computed from the sum, which therefore is made first."""
    x, r = variable("x", *shape), variable("r", *shape)
    total = x + r
    scale = ad.sum_op(total, axis=tuple(range(len(shape) - 1)))
    return trained(ad.layer_normalization(total, scale, scale * 2), [x, r])


def data(shape: Shape) -> list[Node]:
    """Nobody wants the gradient of x."""
    y, _, *gradients = alone(shape)
    return [y, *gradients]


def frozen(shape: Shape) -> list[Node]:
    """Nobody wants those of scale and bias."""
    return alone(shape)[:2]


def broadcast(shape: Shape) -> list[Node]:
    """What is added has another shape: the addition stays."""
    x, row = variable("x", *shape), variable("row", shape[-1])
    return trained(Layer("a", shape[-1]).norm(x + row), [x, row])


def groups(shape: Shape) -> list[Node]:
    """Group normalization has kernels of its own."""
    x = variable("x", *shape)
    scale, bias = variable("scale", shape[1]), variable("bias", shape[1])
    return trained(ad.group_normalization(x, scale, bias, 1), [x, scale, bias])


# Graphs nobody wrote the pass for, with the normalizations and additions that there are then.
GRAPHS: dict[str, tuple[Callable, dict[str, int]]] = {
    "alone": (alone, {FORWARD: 1, BACKWARD: 1}),
    "pre-norm": (pre_norm, {FORWARD: 3, BACKWARD: 3}),
    "RMS": (lambda s: pre_norm(s, rms=True), {FORWARD: 3, BACKWARD: 3}),
    "post-norm": (post_norm, {FORWARD: 2, BACKWARD: 2, "add": 1}),
    "two of a sum": (two_of_a_sum, {FORWARD: 2, BACKWARD: 2}),
    "scale of the sum": (scale_of_the_sum, {FORWARD: 1, BACKWARD: 1, "add": 3}),
    "data": (data, {FORWARD: 1, BACKWARD: 1}),
    "frozen": (frozen, {FORWARD: 1, BACKWARD: 1}),
    "broadcast": (broadcast, {FORWARD: 1, BACKWARD: 1, "add": 1}),
    "groups": (groups, dict.fromkeys(
        ("row_normalize", "row_normalize_gradient", "row_normalize_sums"), 1)),
}  # fmt: skip
WIDTHS = (1, 5, 32, 66, 260, 1000, 1030, 1032)  # of a warp and of a block, by one and by four
COUNTED = ("add", FORWARD, BACKWARD)


def counted(fetches: Sequence[Node]) -> Counter:
    found = operators(fetches)
    return Counter(name for name in found if name in COUNTED or name.startswith("row_normalize"))


def without_bias_sums(fetches: list[Node]) -> list[Node]:
    """The graph behind gemm_epilogue, which takes the additions of a bias."""
    return fused(simplified(fetches), "gemm_epilogue", target=GPU)


class Rewrites(unittest.TestCase):
    """The rewrite of graphs, with no device: numpy runs what it makes."""

    def test_what_it_makes(self) -> None:
        for name, (build, wanted) in GRAPHS.items():
            with self.subTest(name):
                fetches = build((2, 3, 8))
                feeds = feeds_of(fetches)
                expected = evaluate(fetches, feeds)
                made = fused(without_bias_sums(fetches), "layer_norm", target=GPU)
                self.assertEqual(counted(made), Counter(wanted))
                own = {x: variable(x.name, *x.spec.shape) for x in feeds_of(made)}
                named = {x.name: value for x, value in feeds.items()}
                again = exchange(made, own)
                found = evaluate(again, {x: named[x.name] for x in own.values()})
                for value, exact in zip(found, expected, strict=True):
                    size = np.abs(exact).max(initial=1.0)
                    np.testing.assert_allclose(value, exact, rtol=0, atol=1e-5 * size)

    def test_rows_that_no_kernel_holds(self) -> None:
        made = alone((2, 9000))
        target = GPU.__class__("cuda", GPU.kernels, kernel_fits=lambda kernel, *arguments: False)
        self.assertNotIn(FORWARD, operators(fused(simplified(made), "layer_norm", target=target)))


@require(gpu(0))
@require_fusion("layer_norm", "gemm_epilogue", "pointwise", "casts")
class GpuNorms(unittest.TestCase):
    """What the kernels compute, and what is left around them."""

    ctx = gpu(0)

    def test_values_are_those_of_numpy_in_float64(self) -> None:
        """Measured: at most 1.1e-6 of the largest element, and 1.0e-6 without the pass."""
        for name, (build, _) in GRAPHS.items():
            for width in WIDTHS if name in ("pre-norm", "post-norm") else (66,):
                with self.subTest(name, width=width):
                    fetches = build((2, 3, width))
                    feeds = feeds_of(fetches)
                    found = evaluate(fetches, feeds, self.ctx)
                    for value, wanted in zip(found, self.exact(build, width, feeds), strict=True):
                        size = np.abs(wanted).max(initial=1.0)
                        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-5 * size)

    def exact(self, build: Callable, width: int, feeds: dict) -> list[np.ndarray]:
        named = {x.name: value for x, value in feeds.items()}
        fetches = build((2, 3, width))
        leaves = feeds_of(fetches)
        wide = {x: ad.Variable(x.name, x.spec.shape, np.float64) for x in leaves}
        again = [copied(node, wide) for node in fetches]
        return evaluate(again, {wide[x]: named[x.name].astype(np.float64) for x in leaves})

    def test_bf16_is_as_exact_as_without_the_pass(self) -> None:
        """Relative errors of all gradients. Measured: 1.0000 to 1.0004 of those without the
        pass.
        """
        every = itertools.product((7, 64, 260, 1030), ("pre-norm", "RMS", "post-norm"))
        for width, name in sample.of(every, 6):
            with self.subTest(name, width=width):
                fetches = GRAPHS[name][0]((2, 5, width))
                feeds = feeds_of(fetches)
                exact = evaluate(fetches, feeds)
                made, again = (self.run_bf16(fetches, feeds) for _ in range(2))
                self.assertEqual(*([x.tobytes() for x in run] for run in (made, again)))
                with without("layer_norm"):
                    plain = self.run_bf16(fetches, feeds)
                self.assertLess(distance(made, exact), 1.02 * distance(plain, exact))

    def run_bf16(self, fetches: Sequence[Node], feeds: dict) -> list[np.ndarray]:
        return ad.Executor(fetches, self.ctx, precision="bf16").run(feeds, True)

    def test_each_step_of_a_gpt_is_what_numpy_computes(self) -> None:
        for norm in ("layer", "rms"):
            executor, feeds = gpt(norm=norm)
            executor.check(feeds)

    def test_no_cast_is_left_in_a_gpt(self) -> None:
        """One kernel casts the Parameters. Of 2 layers there are 5 normalizations, and of additions
        that of positions; the gradient of the shared embedding is added where its product is.
        """
        executor, feeds = gpt()
        plan = executor.plan({x: value.shape for x, value in feeds.items()})
        names = Counter(step.node.op.name for step in plan.steps)
        counted = ("cast", "casts", *COUNTED, "pointwise", "scatter_add_to")
        self.assertEqual({n: names[n] for n in counted},
                         {"cast": 0, "casts": 1, FORWARD: 5, BACKWARD: 5, "add": 1,
                          "pointwise": 0, "scatter_add_to": 1})  # fmt: skip
        self.assertEqual(stream_dtypes(plan), {"float32"})

    def test_rows_that_come_ahead(self) -> None:
        """So many rows that warps have theirs brought to shared memory, on a GPU of up to 132
        multiprocessors. Errors relative to the largest element; measured: 4e-7, and half a unit of
        bfloat16 where results are that.
        """
        rng = np.random.default_rng(0)
        count = 132 * 12 * 2 + 7
        for width, narrow in ((264, bfloat16), (516, np.dtype(np.float32))):
            x, other, dy = rng.standard_normal((3, count, width)).astype(np.float32)
            dy, scale = rounded(dy, narrow), rng.standard_normal(width).astype(np.float32)
            wide = (x + dy).astype(np.float64)
            centered = wide - wide.mean(1, keepdims=True)
            inverse = 1 / np.sqrt((centered**2).mean(1, keepdims=True) + 1e-5)
            xhat, d = centered * inverse, dy.astype(np.float64) * scale
            mean, product = (v.mean(1, keepdims=True) for v in (d, d * xhat))
            dx = (d - mean - xhat * product) * inverse + other
            sums = [(dy * xhat).sum(0), dy.astype(np.float64).sum(0), dx.sum(0)]
            with self.subTest(width=width, dtype=str(narrow)):
                given = [array(v, self.ctx) for v in (x, other, scale, 0 * scale)]
                of_dy, total = array(dy, self.ctx, narrow), empty(x.shape, self.ctx)
                y = [empty(x.shape, self.ctx, dtype) for dtype in (np.float32, narrow)]
                arguments = [given[0], of_dy], *given[2:], [total, *y], 1, 1e-5
                launch(FORWARD, self.ctx, *arguments)
                made = [empty(x.shape, self.ctx, dtype) for dtype in (np.float32, narrow)]
                made_sums = [empty((width,), self.ctx) for _ in range(3)]
                arguments = total, given[2], of_dy, [given[1]], made, made_sums, 1, 0, 1e-5
                launch(BACKWARD, self.ctx, *arguments)
                pairs = [(total, wide), (y[0], xhat * scale), (y[1], xhat * scale)]
                pairs += [(v, dx) for v in made] + list(zip(made_sums, sums))
                for found, exact in pairs:
                    close = ROUNDING.get(found.dtype, 2e-6) * np.abs(exact).max()
                    np.testing.assert_allclose(found.asnumpy(), exact, rtol=0, atol=close)

    def test_nan_stays_in_its_row(self) -> None:
        fetches = alone((6, 40))
        feeds = feeds_of(fetches)
        x = next(x for x in feeds if x.name == "x")
        feeds[x][2, 3] = np.nan
        for value in evaluate(fetches[:2], feeds, self.ctx):
            self.assertTrue(np.isnan(value[2]).all())
            self.assertTrue(np.isfinite(np.delete(value, 2, axis=0)).all())

    def test_a_mean_far_from_zero(self) -> None:
        values = (1e4 + np.random.default_rng(0).standard_normal((5, 768))).astype(np.float32)
        x, one = variable("x", 5, 768), np.ones(768, np.float32)
        y = ad.layer_normalization(x, ad.constant(one), ad.constant(0 * one))
        (found,) = evaluate([y], {x: values}, self.ctx)
        wide = values.astype(np.float64)
        exact = (wide - wide.mean(1, keepdims=True)) / wide.std(1, keepdims=True)
        np.testing.assert_allclose(found, exact, atol=2e-3)  # 1e4 has digits of 1e-3

    def test_arrays_that_do_not_fit(self) -> None:
        x, one = array(np.ones((4, 3), np.float32), self.ctx), empty((3,), self.ctx)
        other, long = empty((3, 4), self.ctx), empty((9000,), self.ctx)
        call = lambda *arguments: launch(FORWARD, self.ctx, *arguments, 1, 1e-5)  # noqa: E731
        with self.assertRaisesRegex(KernelError, "2 inputs do not fit 1 results"):
            call([x, x], one, one, [x])
        with self.assertRaisesRegex(KernelError, r"shapes differ: \(4, 3\) and \(3, 4\)"):
            call([x], one, one, [other])
        with self.assertRaisesRegex(KernelError, "expected rows of 1 to 8192 values"):
            call([long], long, long, [long])
        with self.assertRaisesRegex(KernelError, "expected none, 2 or 3 sums, got 1"):
            launch(BACKWARD, self.ctx, x, one, x, [], [], [one], 1, 0, 1e-5)


class EveryDevice(unittest.TestCase):
    def test_a_gpt_in_bf16_on_each_device_as_on_numpy(self) -> None:
        """The devices round in different places. Measured: at most 5e-5 of the loss."""
        losses = []
        for ctx in (None, *native_contexts()):
            executor, feeds = gpt(ctx)
            losses.append([float(executor.run(feeds, True)[0]) for _ in range(3)])
        for found in losses[1:]:
            np.testing.assert_allclose(found, losses[0], rtol=5e-4)


def gpt(ctx: object = gpu(0), norm: str = "layer") -> tuple[ad.Executor, dict]:
    """The training step of a GPT of 2 layers in bf16, and a batch."""
    config = nn.GPTConfig(vocabulary=96, context=16, layers=2, heads=2, features=64, norm=norm)
    model = nn.GPT(config, seed=0)
    tokens, targets = (ad.Variable(name, (2, 16), np.int64) for name in ("tokens", "targets"))
    loss = F.cross_entropy(model(tokens), targets)
    step = optim.AdamW(1e-3).minimize(loss, model.parameters())
    rng = np.random.default_rng(0)
    feeds = {x: rng.integers(0, 96, (2, 16)) for x in (tokens, targets)}
    return ad.Executor([loss, step], ctx, precision="bf16"), feeds


def stream_dtypes(plan: Plan) -> set[str]:
    """The dtypes of the residual stream: of the sums that normalizations make."""
    steps = [step for step in plan.steps if step.node.op.name == FORWARD]
    return {str(step.outputs[0].spec.dtype) for step in steps if len(step.outputs) == 2}


def copied(node: Node, made: dict[Node, Node]) -> Node:
    """The node over other leaves."""
    if node not in made:
        made[node] = node.derive([copied(x, made) for x in node.inputs], None)
    return made[node]


def distance(found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    squares = sum(float(((a - b) ** 2).sum()) for a, b in zip(found[1:], exact[1:], strict=True))
    return float((squares / sum(float((b**2).sum()) for b in exact[1:])) ** 0.5)


if __name__ == "__main__":
    unittest.main()

"""Training of random small networks: fused and unfused on native devices, and in float64 on numpy.

They have what rewrites must see through: weights used twice or fed, values that are fetched and
read elsewhere, reshapes between a product and its bias, chains of elementwise operators, several
losses, gradients of gradients, effects, several updates of different kinds. Every failure names the
seed; DLSYS_TEST_SEED=<seed> draws the same networks again.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dlsys import autodiff as ad
from dlsys import optim
from dlsys.fusion.shared.body import ACTIVATIONS
from dlsys.graph.node import Node
from dlsys.passes.pipeline import Pass
from dlsys.runtime.device import Context
from support import sample
from support.devices import on_native_devices, slow
from support.fusion import GPU, fusions, named
from support.seeds import SEED
from support.table.draws import Draw

COUNT = 25  # networks
RUNS = 3  # of each: on a GPU the second is recorded
COARSE = 0.02  # of the largest magnitude: in some networks float32 cancels much
LARGEST = 100.0  # of a value that is compared: some networks run away
CLASSES = 4


def setUpModule() -> None:
    print(f"{__name__}: DLSYS_TEST_SEED={SEED}", file=sys.stderr)


class Network:
    """A network with its losses, updates and what else is fetched, drawn by `d`."""

    def __init__(self, d: Draw) -> None:
        self.d = d
        self.batches = d.one(1, 2, 5, 9, 33), d.one(0, 1, 2, 9, 33)
        self.fed: dict[Node, Callable[[int], np.ndarray]] = {}  # arrays for so many samples
        self.weights: list[ad.Parameter] = []
        self.values: list[Node] = []  # what may be fetched
        trunk = self.images() if d.flag() else self.rows(d.number(1, 9))
        for _ in range(d.number(0, 3)):
            trunk = self.layer(trunk)
        losses = [self.noted(self.loss(trunk)) for _ in range(d.one(1, 1, 2, 3))]
        self.fetches = [*losses, *self.updates(losses)]
        self.fetches += [d.one(*self.values) for _ in range(d.number(0, 3))]

    # ---- leaves ----
    def numbers(self, *shape: int) -> np.ndarray:
        return self.d.rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))

    def rows(self, *extents: int) -> Node:
        """A fed array of so many numbers a sample."""
        x = ad.Variable(f"x{len(self.fed)}")
        self.fed[x] = lambda n: self.d.rng.standard_normal((n, *extents))
        return x

    def weight(self, *shape: int) -> Node:
        """A Parameter, new or one that is used already; now and then it is fed."""
        fitting = [w for w in self.weights if w.shape == shape]
        if fitting and self.d.flag():
            return self.d.one(*fitting)
        value = self.numbers(*shape)
        if self.d.number(0, 7) == 0:
            w = ad.Variable(f"w{len(self.fed)}")
            self.fed[w] = lambda n: value
            return w
        self.weights.append(ad.Parameter(value, f"p{len(self.weights)}"))
        return self.weights[-1]

    # ---- layers ----
    def noted(self, x: Node) -> Node:
        self.values.append(x)
        return x

    def images(self) -> Node:
        """Convolutions with pools, down to rows."""
        d, channels, extent = self.d, self.d.number(1, 3), self.d.one(9, 10, 13)
        x = self.rows(channels, extent, extent)
        for _ in range(d.number(1, 2)):
            filters, size, window = d.number(1, 5), d.number(1, 3), d.one(2, 2, 3)
            bias = self.weight(filters) if d.flag() else None
            f = self.weight(filters, channels, size, size)
            x = self.noted(ad.conv2d(x, f, bias, padding=size - 1))
            before, after = d.one((True, False), (False, True), (False, False))
            x = self.noted(ad.relu_op(x)) if before else x
            x = self.noted(ad.max_pool2d(x, window, stride=d.one(window, window, 2)))
            x, channels = ad.relu_op(x) if after else x, filters
        return ad.flatten_op(x)

    def layer(self, x: Node) -> Node:
        """Rows of another width, or of the same."""
        kind = self.d.one(self.dense, self.dense, self.dense, self.chain, self.thinned)
        return self.noted(kind(x))

    def dense(self, x: Node, width: int | None = None) -> Node:
        d, inputs = self.d, self.width(x)
        outputs = width or d.one(inputs, d.number(1, 12))
        transposed = d.flag()
        w = self.weight(*((outputs, inputs) if transposed else (inputs, outputs)))
        y = ad.matmul_op(x, w, trans_B=transposed)
        if d.flag():
            y = self.noted(y)
        if d.flag():
            b = self.weight(*d.one((outputs,), (1, outputs)))
            between = d.number(0, 3) == 0
            y = ad.reshape_op(y, (-1, 1, outputs)) if between else y
            y = self.noted(y + b if d.flag() else b + y)
            y = ad.reshape_op(y, (-1, outputs)) if between else y
        if width is None and d.number(0, 3):
            y = getattr(ad, f"{d.one('relu', *ACTIVATIONS)}_op")(y)
        return x + y if outputs == inputs and d.flag() else y

    def chain(self, x: Node) -> Node:
        """Operators on single elements, with values that are read twice."""
        d, width = self.d, self.width(x)
        forms = (
            lambda y: 0.5 * y * (1 + ad.tanh_op(0.8 * y)),
            lambda y: y * self.weight(width) + self.weight(1, width),
            lambda y: ad.where_op(ad.less_op(y, 0.1), 0.3 * y, ad.tanh_op(y) - 0.2),
            lambda y: ad.clip_op(y, -1, 1) + ad.sigmoid_op(y),
            lambda y: y / (1 + ad.abs_op(y)),
            lambda y: y - ad.mean_op(y, axis=1, keepdims=True),
        )
        for _ in range(d.number(1, 3)):
            x = self.noted(d.one(*forms)(x))
        return x

    def thinned(self, x: Node) -> Node:
        return ad.dropout(x, 0.3, ad.Generator(self.d.number(0, 99)))

    # ---- losses and updates ----
    def width(self, x: Node) -> int:
        """How many numbers a row has."""
        rows = {node: arrays(2) for node, arrays in self.fed.items()}
        executor = ad.Executor([x])
        read = set(executor.topo_order)
        used = {node: value.shape for node, value in rows.items() if node in read}
        executor.infer_shape(used)
        return executor.node_to_shape_map[x][1]

    def loss(self, x: Node) -> Node:
        d = self.d
        if d.number(0, 3) == 0:
            wanted = self.rows(self.width(x))
            return d.one(ad.mean_squared_error, ad.huber_loss)(x, wanted)
        logits = self.dense(x, CLASSES)
        labels = ad.Variable(f"labels{len(self.fed)}", dtype=d.one(None, np.int64))
        if "dtype" in labels.attrs:
            self.fed[labels] = lambda n: d.rng.integers(0, CLASSES, n)
        else:
            self.fed[labels] = lambda n: np.eye(CLASSES)[d.rng.integers(0, CLASSES, n)]
        reduction = d.one("mean", "mean", "sum", "none")
        loss = ad.softmax_cross_entropy(logits, labels, reduction)
        return loss if reduction != "none" else ad.mean_op(self.noted(loss) * 0.5)

    def updates(self, losses: Sequence[Node]) -> list[Node]:
        """Of the weights by all losses, or of one half by each of two."""
        d, total = self.d, ad.sum_node_list(list(losses))
        used = set(ad.find_topo_sort([total]))
        weights = [w for w in self.weights if w in used]
        if not weights:
            return []
        if d.number(0, 4) == 0:
            gradient = ad.gradients(total, [d.one(*weights)])[0]
            total = total + 0.01 * ad.sum_op(gradient * gradient)
        if d.number(0, 4) == 0:
            total = total + 0.01 * ad.sum_node_list([ad.sum_op(w * w) for w in weights])
        if d.flag():
            self.values += ad.gradients(total, weights)
        parts = [weights] if d.flag() else [weights[::2], weights[1::2]]
        return [self.optimizer().minimize(total, part) for part in parts if part]

    def optimizer(self) -> optim.Optimizer:
        d = self.d
        rate = d.one(0.01, 0.02, optim.OneCycle(0.02, 10))
        return optim.SGD(
            rate,
            momentum=d.one(0.0, 0.9),
            clip_norm=d.one(None, None, 1.0),
            accumulate=d.one(1, 1, 2),
            ema=d.one(None, None, 0.9),
        )


class _Exact:
    """All kernels but that of quantized derivatives: a GPU has it for floats of 16 bits alone."""

    def __contains__(self, kernel: tuple[str, object]) -> bool:
        return kernel[0] != "matmul_bias_slope"


FOR_A_GPU = [
    named(name, replace(GPU, kernels=_Exact()))
    for name in (
        "conv_pool", "cross_entropy", "gemm_epilogue", "mlp_head", "pointwise", "multi_tensor",
    )
]  # fmt: skip


class Trained:
    """What runs on one device gave: the fetched values of each, and how the Parameters moved."""

    def __init__(
        self,
        fetches: Sequence[Node],
        feeds: Sequence[dict],
        ctx: Context | None,
        fusions: Sequence[Pass] | None = None,
    ) -> None:
        executor = ad.Executor(fetches, ctx, fusions=fusions)
        used = set(executor.topo_order)
        states = [node for node in executor.topo_order if isinstance(node, ad.Parameter)]
        before = [state.asnumpy() for state in states]
        for state in states:
            state.to(ctx)
        self.names: list[str] = []
        self.values: list[np.ndarray] = []
        for k, fed in enumerate(feeds):
            given = {x: value for x, value in fed.items() if x in used}
            for node, value in zip(fetches, executor.run(given, True)):
                if value is not None:
                    self.names.append(f"{node!r} of run {k}")
                    self.values.append(np.asarray(value))
        for state, was in zip(states, before):
            self.names.append(f"how {state.name} moved")
            self.values.append(state.asnumpy() - was)
            state.to(None)
            state.set(was)


class Training:
    ctx: Context | None = None
    bound = 2e-4  # of the largest magnitude

    def compare(self, found: Trained, plain: Trained, wanted: Trained) -> None:
        """Fused with the reference, up to what rounding does to this network when unfused."""
        for name, *values in zip(wanted.names, found.values, plain.values, wanted.values):
            got, beside, expected = values
            self.assertEqual(got.shape, expected.shape, name)
            known = ~np.isnan(expected)  # the mean of no rows is none
            np.testing.assert_array_equal(np.isnan(got), ~known, name)
            got, beside, expected = got[known], beside[known], expected[known]
            scale = np.abs(expected).max(initial=1e-3)
            rounding = np.abs(beside - expected).max(initial=0)
            self.assertLessEqual(rounding, COARSE * scale, f"{name}, unfused")
            bound = max(self.bound * scale, 8 * rounding)
            np.testing.assert_allclose(got, expected, 0, bound, err_msg=name)

    def train(self, net: Network, feeds: Sequence[dict], wanted: Trained) -> None:
        with fusions("off"):
            plain = Trained(net.fetches, feeds, self.ctx)
        fused = Trained(net.fetches, feeds, self.ctx)
        self.compare(fused, plain, wanted)
        again = Trained(net.fetches, feeds, self.ctx)
        for got, same in zip(fused.values, again.values, strict=True):
            self.assertEqual(got.tobytes(), same.tobytes())

    def check(self, number: int) -> bool:
        """Whether the network's values are such that it could be compared."""
        net = Network(Draw(SEED, number))
        first, other = ({x: of(n) for x, of in net.fed.items()} for n in net.batches)
        feeds = [first] * RUNS + [other]
        wanted = Trained(net.fetches, feeds, None)
        if any((np.abs(value) > LARGEST).any() for value in wanted.values):
            return False
        self.train(net, feeds, wanted)
        return True

    @slow
    def test_networks(self) -> None:
        compared, count = 0, sample.count(COUNT, 15)
        for number in range(count):
            with self.subTest(number=number):
                try:
                    compared += self.check(number)
                except Exception as error:
                    what = f"DLSYS_TEST_SEED={SEED}: network {number}"
                    raise AssertionError(f"{what}: {error}") from error
        self.assertGreater(compared, count // 2)


class BodyTraining(Training, unittest.TestCase):
    """What passes make for a GPU, heads among it, by the bodies of its nodes in float64."""

    bound = 1e-7

    def train(self, net: Network, feeds: Sequence[dict], wanted: Trained) -> None:
        found = Trained(net.fetches, feeds, None, FOR_A_GPU)
        self.compare(found, wanted, wanted)


CpuTraining, GpuTraining = on_native_devices(Training)

"""Random numbers as operators: a number is a function of (seed, step, node, element), by Philox.

The generator is Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(2011); src/math/philox.h has it for native devices. The seed is the key; the counter is the number
of the block of four elements, the step and the node. The step is state on the device that training
steps advance, so that a captured program draws new numbers each time.

Looking at a graph must not change its training, so a graph that does not advance a step leaves it
alone. Its executor counts its own runs instead, on the device, and draws at (step, number of the
run): each run draws anew, run 0 what a training step would draw now, and `executor.draws = k` makes
run k come again. Uniforms and masks are the same bits on every device; normals are within 4 ulp.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...arguments.kinds import Bool, Instance, Int, Kind, Number, Shape
from ...arguments.signature import Signature, declared
from ...describe import described
from ...errors import GraphError
from ...graph.lines import where
from ...graph.node import Node, Op
from ...graph.spec import FLOAT32, Spec, floating
from ..leaf import Parameter
from ..optim.assign import advance_step_op, check_count
from .philox import normal_quantile, step_of_draw, unit, words

__all__ = [
    "Generator", "dropout", "dropout_op", "random_bernoulli", "random_normal",
    "random_truncated_normal", "random_uniform", "seed",
]  # fmt: skip

_BLOCKS = 4096  # blocks of four words made at a time on numpy, so that scratch stays in the cache


class Generator:
    """A source of random nodes: a seed, and a step that the training steps over its nodes advance.

    Its nodes are numbered in the order of making, so that the same program makes the same numbers.
    `step` is a Parameter of one int64; `generator.step.set(0)` has training start anew. Executors
    whose graph does not advance it draw by the number of their own run besides: set
    `executor.draws` to repeat one.
    """

    __repr__ = described

    @declared(seed=Int())
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.step = Parameter(np.int64(0), name="random.step", trainable=False)
        self.advance = advance_step_op(self.step)
        self._nodes = itertools.count()

    def attrs(self) -> dict[str, int]:
        """The seed and the number of a new node."""
        return {"seed": self.seed, "node": next(self._nodes)}


class _Default:
    """The generators of nodes that are given none: each has its own step, so that they may live on
    different devices, and a number of its own.
    """

    seed_value = 0
    nodes = itertools.count()


@declared(value=Int())
def seed(value: int) -> None:
    """Sets the seed of random nodes that are made without a generator, and numbers them anew.

    value: an integer.
    """
    _Default.seed_value = value
    _Default.nodes = itertools.count()


def attached(generator: Generator | None) -> tuple[Generator, dict[str, Any]]:
    if generator is not None:
        return generator, generator.attrs()
    generator = Generator(_Default.seed_value)
    return generator, {"seed": generator.seed, "node": next(_Default.nodes)}


def _words(node: Node, step: np.ndarray, size: int) -> Iterator[tuple[slice, np.ndarray]]:
    """The words of all elements of an output of that size, a part after the other."""
    attrs = node.attrs
    for first in range(0, size, 4 * _BLOCKS):
        count = min(4 * _BLOCKS, size - first)
        made = words(attrs["seed"], step.item(), attrs["node"], first, count)
        yield slice(first, first + count), made


class DropoutProbability(Number):
    """A probability of being 0, below 1."""

    expected = "a probability from 0 to below 1"

    def take(self, value: Any) -> float:
        p = super().take(value)
        if not 0 <= p < 1:
            raise ValueError
        return p


PROBABILITY = DropoutProbability()  # of being 0

# ---- operators ----

IDENTITY: dict[str, Kind] = dict(shape=Shape(), seed=Int(), node=Int())  # of a random node


class StepOfDrawOp(Op):
    """The step that a random operator draws for in a run of which the executor counts `draws`
    before: the step itself where there was none.
    """

    name = kernel = "step_of_draw"
    any_dtype = True
    signature = Signature("step", "draws")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_count(node, "step", specs[0])
        check_count(node, "number of draws", specs[1])
        return specs[0]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        step, draws, y = (array.view(np.uint64) for array in arrays)
        y[...] = step_of_draw(step.item(), draws.item())

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None, None]


class RandomOp(Op):
    """Numbers of a shape; the one input is the step."""

    random = True
    step_at = 0
    any_dtype = (0,)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_count(node, "step", specs[0])
        return Spec(node.attrs["shape"], FLOAT32, declared=False)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None]

    def scalars(self, node: Node) -> tuple[float | int, ...]:
        return tuple(value for name, value in node.attrs.items() if name != "shape")

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 30 * output.size


class UniformOp(RandomOp):
    """low + range · u, u uniform in [0, 1) in steps of 2^-24; equal on all devices."""

    name = kernel = "random_uniform"
    signature = Signature("step", "*", **IDENTITY, low=Number(), range=Number(low=0))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        step, y = arrays
        low, extent = (float(np.float32(node.attrs[name])) for name in ("low", "range"))
        flat = y.reshape(-1)
        for part, made in _words(node, step, y.size):
            flat[part] = unit(made) * extent + low


class BernoulliOp(RandomOp):
    """1 where the word is below `threshold`, a count of 2^32, else 0; equal on all devices."""

    name = kernel = "random_bernoulli"
    signature = Signature("step", "*", **IDENTITY, threshold=Int(low=0, high=2**32))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        step, y = arrays
        flat, threshold = y.reshape(-1), np.uint64(node.attrs["threshold"])
        for part, made in _words(node, step, y.size):
            flat[part] = made < threshold


class NormalOp(RandomOp):
    """mean + deviation · z, z standard normal between `low` and `high`, by the inverse of its
    distribution: a word in (0, 1), times `within`, plus `below`.
    """

    name = kernel = "random_normal"
    signature = Signature(
        "step", "*", **IDENTITY, mean=Number(), deviation=Number(low=0), below=Number(),
        within=Number(), low=Number(), high=Number(),
    )  # fmt: skip

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        step, y = arrays
        names = ("mean", "deviation", "below", "within", "low", "high")
        mean, deviation, below, within, low, high = (
            float(np.float32(node.attrs[name])) for name in names
        )
        flat = y.reshape(-1)
        for part, made in _words(node, step, y.size):
            z = normal_quantile(below + (made + 0.5) * 2.0**-32 * within)
            flat[part] = mean + deviation * np.clip(z, low, high)


class DropoutOp(Op):
    """x · scale where the element's word is below `threshold`, a count of 2^32, else 0.

    The mask is made of (seed, step, node, element) anew in the gradient, never stored.
    """

    name = kernel = "dropout"
    autocast = "follow"
    random = True
    step_at = 1
    inplace = True
    any_dtype = (1,)
    signature = Signature(
        "x", "step", "*", seed=Int(), node=Int(), threshold=Int(low=0, high=2**32), scale=Number()
    )

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_count(node, "step", specs[1])
        return specs[0]._replace(dtype=floating(specs[0].dtype))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, step, y = arrays
        flat, out = x.reshape(-1), y.reshape(-1)
        threshold, scale = np.uint64(node.attrs["threshold"]), node.attrs["scale"]
        for part, made in _words(node, step, y.size):
            np.multiply(flat[part], scale, out=out[part])
            np.copyto(out[part], 0, where=made >= threshold)

    def scalars(self, node: Node) -> tuple[int, int, int, float]:
        attrs = node.attrs
        return attrs["seed"], attrs["node"], attrs["threshold"], attrs["scale"]

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [masked_op(output_grad, node.inputs[1], **node.attrs), None]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 30 * output.size


step_of_draw_op = StepOfDrawOp()
masked_op = DropoutOp()
uniform_op = UniformOp()
bernoulli_op = BernoulliOp()
normal_op = NormalOp()


@declared(p=PROBABILITY, generator=Instance(Generator), training=Bool())
def dropout(
    x: Node, p: float = 0.5, generator: Generator | None = None, training: bool = True
) -> Node:
    """x with each element 0 with probability p, else divided by 1 - p.

    The same elements are kept on every device, and others in the next run (see `Executor.draws`).
    In inference form (`training=False`) it is x itself; which of the two is decided here, when the
    graph is built. generator: a source of numbers with a seed of its own; that of `seed` where it
    is None. SignatureError unless 0 <= p < 1. After Srivastava et al. (2014).
    """
    return _dropped(x, 1 - p, generator) if training else x


@declared(keep_prob=Number(above=0, high=1))
def dropout_op(x: Node, keep_prob: float) -> Node:
    """The course's `dropout` in training form: each element is kept with probability `keep_prob`
    and divided by it, else 0. Everywhere else a probability of dropout is that of being 0.
    """
    return _dropped(x, keep_prob, None)


def _dropped(x: Node, keep_prob: float, generator: Generator | None) -> Node:
    if keep_prob == 1:
        return x
    generator, attrs = attached(generator)
    attrs = attrs | {"threshold": round(keep_prob * 2**32), "scale": 1 / keep_prob}
    y = masked_op(x, generator.step, **attrs)
    y.effects = (generator.advance,)
    return y


@declared(
    shape=Shape(), low=Number(finite=True), high=Number(finite=True),
    generator=Instance(Generator),
)  # fmt: skip
def random_uniform(
    shape: Sequence[int], low: float = 0.0, high: float = 1.0, generator: Generator | None = None
) -> Node:
    """float32 numbers uniform in [low, high), 2^24 of them; rounding may give `high` itself.

    shape: that of the result. generator: a source of numbers with a seed of its own; that of `seed`
    where it is None. GraphError unless low <= high.
    """
    if not low <= high:
        raise GraphError(f"random_uniform: expected low <= high, got {low} and {high} [{where()}]")
    return _random(uniform_op, shape, generator, low=float(low), range=float(high) - float(low))


@declared(shape=Shape(), probability=Number(low=0, high=1), generator=Instance(Generator))
def random_bernoulli(
    shape: Sequence[int], probability: float, generator: Generator | None = None
) -> Node:
    """float32 ones with the given probability, else zeros. GraphError unless it is in [0, 1].

    shape: that of the result. generator: a source of numbers with a seed of its own; that of `seed`
    where it is None.
    """
    return _random(bernoulli_op, shape, generator, threshold=round(probability * 2**32))


@declared(
    shape=Shape(), mean=Number(finite=True), deviation=Number(low=0, finite=True),
    generator=Instance(Generator),
)  # fmt: skip
def random_normal(
    shape: Sequence[int],
    mean: float = 0.0,
    deviation: float = 1.0,
    generator: Generator | None = None,
) -> Node:
    """float32 numbers of a normal distribution. GraphError unless deviation >= 0.

    mean and deviation: of the distribution. shape: that of the result. generator: a source of
    numbers with a seed of its own; that of `seed` where it is None.
    """
    return _normal(shape, mean, deviation, -math.inf, math.inf, generator)


@declared(
    shape=Shape(), mean=Number(finite=True), deviation=Number(low=0, finite=True), low=Number(),
    high=Number(), generator=Instance(Generator),
)  # fmt: skip
def random_truncated_normal(
    shape: Sequence[int],
    mean: float = 0.0,
    deviation: float = 1.0,
    low: float = -2.0,
    high: float = 2.0,
    generator: Generator | None = None,
) -> Node:
    """float32 numbers of a normal distribution within mean + low · deviation and mean + high ·
    deviation. GraphError unless deviation >= 0 and low < high.

    shape: that of the result. generator: a source of numbers with a seed of its own; that of `seed`
    where it is None.
    """
    if not low < high:
        raise GraphError(
            f"random_truncated_normal: expected low < high, got {low} and {high} [{where()}]"
        )
    return _normal(shape, mean, deviation, low, high, generator)


def _random(op: Op, shape: Sequence[int], generator: Generator | None, **attrs: Any) -> Node:
    generator, identity = attached(generator)
    node = op(generator.step, shape=shape, **identity, **attrs)
    node.effects = (generator.advance,)
    return node


def _normal(
    shape: Sequence[int],
    mean: float,
    deviation: float,
    low: float,
    high: float,
    generator: Generator | None,
) -> Node:
    below = 0.5 * math.erfc(-low / math.sqrt(2))
    within = 0.5 * math.erfc(-high / math.sqrt(2)) - below
    attrs = dict(mean=mean, deviation=deviation, below=below, within=within, low=low, high=high)
    return _random(normal_op, shape, generator, **attrs)

"""Batch normalization, by the statistics of each channel of x (N, C, …), and the update of
running statistics.

Training is two operators each way: `batch_statistics` and `batch_normalize` forward,
`batch_normalize_sums` and `batch_normalize_gradient` backward; what they hand on is one number a
channel, so that no activation lives longer for it. In training form mean and variance are those of
x: the gradient of x counts what x does through them, and their own inputs get none. The formulas
are those of Ioffe and Szegedy (2015); their derivatives of any order are these operators again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...arguments.kinds import Bool, Number, Rung
from ...arguments.signature import Signature, declared
from ...errors import GraphError
from ...graph.lines import where
from ...graph.node import Node, Op
from ...graph.spec import Spec
from ...rungs import BATCH_NORM
from ..elementwise import cast_like_op
from ..leaf import Parameter, oneslike_op, zeroslike_op
from ..math.power import pow_byconst_op
from ..movement import ReshapedOp, reshape_like_op, reshape_op
from ..optim.assign import check_parameter
from ..reduce import expand_like_op, sum_op
from .storage import dtype_of_sums, dtype_of_values

__all__ = ["batch_normalization", "batch_normalization_op"]

EPS = Number(above=0, finite=True)
RUNG = Rung(BATCH_NORM)


class ChannelsOp(ReshapedOp):
    """x (N, C, …) seen as (N, C, positions), whatever its dimensions."""

    name = "channels"
    signature = Signature("x")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        shape = check_channels(node, specs[0])
        return specs[0]._replace(shape=(*shape[:2], Spec(shape[2:], None).size))


class BatchStatisticsOp(Op):
    """Mean and variance (over the count, not the count less one) of each channel of x (N, C, …)."""

    name = kernel = "batch_statistics"
    autocast = "follow"
    signature = Signature("x")
    outputs = 2

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, Spec]:
        shape = check_channels(node, specs[0])
        spec = Spec(shape[1:2], dtype_of_sums(specs[0].dtype), specs[0].declared)
        return spec, spec

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [outputs[0], Spec(inputs[0].shape, outputs[0].dtype)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, rest, scratch, mean, variance = arrays
        x, scratch = as_channels(x), as_channels(scratch)
        count = x.size // mean.size if mean.size else 0
        np.sum(x, axis=(0, 2), dtype=mean.dtype, out=mean)
        np.divide(mean, count, out=mean)  # NaN without values
        np.subtract(x, mean[:, None], out=scratch)
        np.sum(scratch, axis=(0, 2), out=rest)  # what rounding left out of the mean
        np.divide(rest, count, out=rest)
        np.square(scratch, out=scratch)
        np.sum(scratch, axis=(0, 2), out=variance)
        np.divide(variance, count, out=variance)
        np.add(mean, rest, out=mean)
        np.square(rest, out=rest)
        np.subtract(variance, rest, out=variance)

    def gradient(self, node: Node, output_grad: Any) -> list[Node | None]:
        x = channels_op(cast_like_op(node.inputs[0], node[0]))
        total = _spread(output_grad[0], x) if output_grad[0] is not None else None
        if output_grad[1] is not None:
            by_variance = _spread(2 * output_grad[1], x) * (x - per_channel(node[0]))
            total = by_variance if total is None else total + by_variance
        assert total is not None
        return [_like(total, node.inputs[0])]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 4 * inputs[0].size


class BatchNormalizeOp(Op):
    """(x - mean) / sqrt(variance + eps) · scale + bias, all but x (N, C, …) one number a channel.

    `training` says that mean and variance are those of x.
    """

    name = kernel = "batch_normalize"
    autocast, autocast_inputs = "follow", (0,)
    signature = Signature(
        "x", "mean", "variance", "scale", "bias", "*", eps=EPS, training=Bool(), algo=RUNG
    )
    ladder = BATCH_NORM
    inplace = True

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_channels(node, specs[0], specs[1:])
        dtype = dtype_of_values(node, specs, own=(0,), affine=(3, 4))
        return Spec(specs[0].shape, dtype, any(s.declared for s in specs))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [Spec(inputs[1].shape, dtype_of_sums(outputs[0].dtype))]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, mean, variance, scale, bias, factor, y = arrays
        x, y = as_channels(x), as_channels(y)
        inverse_deviation(variance, node.attrs["eps"], factor)
        np.multiply(factor, scale, out=factor)
        np.subtract(x, mean[:, None], out=y)
        np.multiply(y, factor[:, None], out=y)
        np.add(y, bias[:, None], out=y)

    def scalars(self, node: Node) -> tuple[float]:
        return (float(node.attrs["eps"]),)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, mean, variance, scale, bias = node.inputs
        sums = batch_normalize_sums_op(x, mean, variance, output_grad, **node.attrs)
        by_scale, by_bias = cast_like_op(sums[0], scale), cast_like_op(sums[1], bias)
        if node.attrs["training"]:
            gradient = batch_normalize_gradient_op(
                x, mean, variance, scale, sums[0], sums[1], output_grad, **_without_form(node)
            )
            return [gradient, None, None, by_scale, by_bias]
        return [*_fixed_gradients(node, scale, sums, output_grad), by_scale, by_bias]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 3 * output.size


class BatchNormalizeSumsOp(Op):
    """Σ dy · x̂ and Σ dy of each channel, x̂ = (x - mean) / sqrt(variance + eps): the gradients of
    scale and bias.
    """

    name = kernel = "batch_normalize_sums"
    autocast, autocast_inputs = "follow", (0, 3)
    signature = Signature("x", "mean", "variance", "dy", "*", eps=EPS, training=Bool(), algo=RUNG)
    ladder = BATCH_NORM
    outputs = 2

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, Spec]:
        shape = check_channels(node, specs[0], specs[1:3])
        check_gradient(node, specs[0], specs[3], node.inputs[3])
        dtype = dtype_of_sums(dtype_of_values(node, specs, own=(0, 3)))
        spec = Spec(shape[1:2], dtype, any(s.declared for s in specs))
        return spec, spec

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [outputs[0], Spec(inputs[0].shape, outputs[0].dtype)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, mean, variance, dy, factor, scratch, dscale, dbias = arrays
        x, dy, scratch = as_channels(x), as_channels(dy), as_channels(scratch)
        inverse_deviation(variance, node.attrs["eps"], factor)
        np.subtract(x, mean[:, None], out=scratch)
        np.multiply(scratch, dy, out=scratch)
        np.sum(scratch, axis=(0, 2), out=dscale)
        if x.size:  # else the sum is 0 and the deviation of no values NaN
            np.multiply(dscale, factor, out=dscale)
        np.sum(dy, axis=(0, 2), out=dbias)

    scalars = BatchNormalizeOp.scalars

    def gradient(self, node: Node, output_grad: Any) -> list[Node | None]:
        x, mean, variance, dy = node.inputs
        # Σ scale · dscale + bias · dbias = Σ dy · (scale · x̂ + bias)
        scale, bias = [zeroslike_op(mean) if g is None else g for g in output_grad]
        of_dy = batch_normalize_op(x, mean, variance, scale, bias, **node.attrs)
        if node.attrs["training"]:
            of_x = batch_normalize_gradient_op(
                x, mean, variance, scale, node[0], node[1], dy, **_without_form(node)
            )
            return [of_x, None, None, of_dy]
        return [*_fixed_gradients(node, scale, node, dy), of_dy]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 4 * inputs[0].size


class BatchNormalizeGradientOp(Op):
    """scale / sqrt(variance + eps) · (dy - (dbias + x̂ · dscale) / count): the gradient of x in
    training form; dscale and dbias are the sums of `batch_normalize_sums`.
    """

    name = kernel = "batch_normalize_gradient"
    autocast, autocast_inputs = "follow", (0, 6)
    signature = Signature(
        "x", "mean", "variance", "scale", "dscale", "dbias", "dy", "*", eps=EPS, algo=RUNG
    )
    ladder = BATCH_NORM
    inplace = cache_local = True

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_channels(node, specs[0], specs[1:6])
        check_gradient(node, specs[0], specs[6], node.inputs[6])
        dtype = dtype_of_values(node, specs, own=(0, 6), affine=(3,))
        return Spec(specs[0].shape, dtype, any(s.declared for s in specs))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        dtype = dtype_of_sums(outputs[0].dtype)
        one = Spec(inputs[1].shape, dtype)
        return [one, one, Spec(outputs[0].shape, dtype)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, mean, variance, scale, dscale, dbias, dy, factor, coefficient, scratch, dx = arrays
        x, dy, scratch, dx = (as_channels(a) for a in (x, dy, scratch, dx))
        share = mean.size / max(x.size, 1)
        inverse_deviation(variance, node.attrs["eps"], factor)
        np.multiply(factor, dscale, out=coefficient)
        np.multiply(coefficient, share, out=coefficient)
        np.subtract(x, mean[:, None], out=scratch)
        np.multiply(scratch, coefficient[:, None], out=scratch)
        np.multiply(dbias, share, out=coefficient)
        np.add(scratch, coefficient[:, None], out=scratch)
        np.subtract(dy, scratch, out=dx)
        np.multiply(factor, scale, out=factor)
        np.multiply(dx, factor[:, None], out=dx)

    scalars = BatchNormalizeOp.scalars

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, mean, variance, scale, dscale, dbias, dy = node.inputs
        attrs = dict(node.attrs, training=True)
        sums = batch_normalize_sums_op(x, mean, variance, output_grad, **attrs)
        of_dy = batch_normalize_gradient_op(
            x, mean, variance, scale, sums[0], sums[1], output_grad, **node.attrs
        )
        r = pow_byconst_op(variance + node.attrs["eps"], -0.5)
        normalized = batch_normalize_op(
            x, mean, variance, oneslike_op(mean), zeroslike_op(mean), **attrs
        )
        wide = [cast_like_op(v, mean) for v in (x, dy, output_grad, normalized)]
        x_, dy_, g, xhat = map(channels_op, wide)
        share = 1 / sum_op(oneslike_op(x_), axis=(0, 2))
        a, b, c, e = (total * share for total in (dbias, dscale, sums[0], sums[1]))
        inner = sum_op(g * dy_, axis=(0, 2)) * share - a * e
        of_x = (
            xhat * per_channel(inner - 3 * b * c)
            + per_channel(c) * (dy_ - per_channel(a))
            + per_channel(b) * (g - per_channel(e))
        ) * per_channel(-cast_like_op(scale, mean) * r * r)
        of_scale = cast_like_op((inner - b * c) * r / share, scale)
        return [_like(of_x, x), None, None, of_scale, None, None, of_dy]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 5 * output.size


class RunningStatisticsUpdateOp(Op):
    """running = (1 - momentum) · running + momentum · new, of mean and variance; the variance
    counts as that of a sample, times count / (count - 1).

    The fifth input is the batch that they were taken of; only its shape is used. A batch without
    values tells nothing and changes nothing; one value a channel tells nothing of the variance,
    0 / 0 as that of a sample, and moves the mean alone.
    """

    name = "running_statistics"
    signature = Signature(
        "running_mean", "running_variance", "mean", "variance", "x", "*",
        momentum=Number(low=0, high=1),
    )  # fmt: skip
    writes = (0, 1)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        for target in node.inputs[:2]:
            check_parameter(node, target)
        check_channels(node, specs[4], specs[:4])
        for target, spec in zip(node.inputs[:2], specs):
            if spec.dtype != dtype_of_sums(spec.dtype):
                raise node.error(
                    f"running statistics are float32, got {target.name} of {spec.dtype}; "
                    "declare it float32"
                )
        return specs[0]

    def simplify(self, node: Node) -> Node:
        x = node.inputs[4].spec
        count = x.size // max(x.shape[1], 1)
        return running_update_op(
            *node.inputs[:4],
            momentum=node.attrs["momentum"] if count else 0.0,
            correction=count / (count - 1) if count > 1 else 0.0,
        )


class RunningUpdateOp(Op):
    """running = (1 - momentum) · running + momentum · new, the new variance times `correction`, of
    one layer or of several that share these numbers. What is new with no weight, momentum 0 or
    correction 0, changes nothing, whatever its value.

    Inputs: the means of all, their variances, then the new means and the new variances. The values
    are the means' new ones.
    """

    name = kernel = "running_update"

    def __init__(self, count: int = 1) -> None:
        self.outputs = count
        kinds = dict(momentum=Number(low=0, high=1), correction=Number(low=0))
        states = ("running_mean", "running_variance", "mean", "variance", "*")
        self.signature = Signature(*(states if count == 1 else ("*inputs",)), **kinds)
        self.writes = tuple(range(2 * count))

    def infer(self, node: Node, *specs: Spec) -> Any:
        return specs[0] if self.outputs == 1 else tuple(specs[: self.outputs])

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [max(inputs, key=lambda spec: spec.size)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        n = self.outputs
        states, taken, scratch = arrays[: 2 * n], arrays[2 * n : 4 * n], arrays[4 * n]
        momentum = node.attrs["momentum"]
        for k, (state, value) in enumerate(zip(states, taken)):
            weight = momentum * (1.0 if k < n else node.attrs["correction"])
            if weight == 0:
                continue
            part = scratch[: value.size]
            np.multiply(value, weight, out=part)
            if momentum == 1:
                np.copyto(state, part)  # what was there before is forgotten, infinite or not
                continue
            np.multiply(state, 1 - momentum, out=state)
            np.add(state, part, out=state)

    def scalars(self, node: Node) -> tuple[float, float, float]:
        momentum = node.attrs["momentum"]
        return 1 - momentum, momentum, momentum * node.attrs["correction"]

    def lists(self, node: Node) -> tuple[int, int]:
        return 2 * self.outputs, 2 * self.outputs

    def merge_key(self, node: Node) -> Hashable | None:
        dtype = node.inputs[0].spec.dtype
        return ("running_update", dtype, *sorted(node.attrs.items())) if self.outputs == 1 else None

    def merged(self, nodes: Sequence[Node]) -> Node:
        inputs = [node.inputs[k] for k in range(4) for node in nodes]
        name = f"{self.name} of {len(nodes)}"
        return Node(running_updates_op(len(nodes)), inputs, nodes[0].attrs, name)


@lru_cache
def running_updates_op(count: int) -> RunningUpdateOp:
    """The update of so many layers at once."""
    return RunningUpdateOp(count)


@declared(momentum=Number(low=0, high=1), eps=EPS, training=Bool(), algo=RUNG)
def batch_normalization(
    x: Node,
    scale: Node,
    bias: Node,
    running_mean: Parameter | None = None,
    running_variance: Parameter | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    training: bool = True,
    algo: str | None = None,
) -> Node:
    """(x - mean) / sqrt(variance + eps) · scale + bias for each channel of x (N, C, …).

    scale, bias and the running statistics are (C,). In training form mean and variance are the
    batch's own, over N and all positions; the running statistics, where given, then become `(1 -
    momentum) · running + momentum · new` (the variance times n / (n - 1)) at the end of every step
    that `optim` builds from a loss over this node. In inference form the running statistics are
    used instead. Which of the two it is, is decided here, when the graph is built. Over x of 16
    bits, scale and bias are of its dtype or float32, and the running statistics float32.
    running_mean, running_variance: Parameters, both or neither. algo: "cudnn" computes the training
    form with its gradient, or the inference form, by cuDNN on a GPU; without it DLSYS_BATCH_NORM
    counts.

    Raises ShapeError where the extents differ, GraphError for missing or one running statistic.
    After Ioffe and Szegedy, "Batch normalization" (2015).
    """
    running = [given for given in (running_mean, running_variance) if given is not None]
    if len(running) == 1 or not (training or running):
        raise GraphError(
            "batch_normalization: expected running_mean and running_variance, "
            f"got {running_mean} and {running_variance} [{where()}]"
        )
    mean, variance = batch_statistics_op(x) if training else running
    rung = {} if algo is None else {"algo": algo}
    inputs = (x, mean, variance, scale, bias)
    y = batch_normalize_op.make(inputs, {"eps": eps, "training": training, **rung}, None)
    if training and running:
        attrs = {"momentum": momentum}
        y.effects = (running_statistics_op.make((*running, mean, variance, x), attrs, None),)
    return y


@declared(momentum=Number(low=0, high=1), eps=EPS)
def batch_normalization_op(
    x: Node, scale: Node, bias: Node, momentum: float = 0.1, eps: float = 1e-5
) -> Node:
    """`batch_normalization` in training form, with running statistics of its own: the node has
    them as `running_mean` and `running_variance`. The shape of `scale` must be known.
    """
    if scale.spec is None:
        raise GraphError(
            "batch_normalization: the shape of scale is unknown here; declare it, or use "
            f"batch_normalization with running statistics of your own [{scale.where}]"
        )
    dtype = dtype_of_sums(scale.spec.dtype)
    mean, variance = (
        Parameter(np.full(scale.spec.shape, value, dtype), name, trainable=False)
        for value, name in ((0.0, f"{scale.name}.mean"), (1.0, f"{scale.name}.variance"))
    )
    y: Any = batch_normalization(x, scale, bias, mean, variance, momentum, eps)
    y.running_mean, y.running_variance = mean, variance
    return y


def per_channel(values: Node) -> Node:
    """One number a channel, shaped to broadcast over (N, C, positions)."""
    return reshape_op(values, (-1, 1))


def as_channels(x: np.ndarray) -> np.ndarray:
    """A view of x (N, C, …) as (N, C, positions)."""
    return x.reshape(*x.shape[:2], Spec(x.shape[2:], None).size)


def inverse_deviation(variance: np.ndarray, eps: float, out: np.ndarray) -> None:
    """out = 1 / sqrt(variance + eps)."""
    np.add(variance, eps, out=out)
    np.sqrt(out, out=out)
    np.reciprocal(out, out=out)


def check_channels(node: Node, x: Spec, others: tuple[Spec, ...] = ()) -> tuple[int, ...]:
    """The shape of x, which must have channels; `others` must be one number a channel."""
    if len(x.shape) < 2:
        raise node.error(f"expected an array of (N, C, …), got {x.shape}")
    for spec in others:
        if spec.shape != x.shape[1:2]:
            wanted = f"{x.shape[1]} channels as x {x.shape} has them"
            raise node.error(f"expected {wanted}, got {spec.shape}")
    return x.shape


def check_gradient(node: Node, x: Spec, dy: Spec, source: Node) -> None:
    """Refuses an output gradient that is not of x's shape."""
    if dy.shape != x.shape:
        raise node.error(f"expected a gradient of shape {x.shape}, got {source.name} {dy.shape}")


def _without_form(node: Node) -> dict[str, Any]:
    """The attributes but `training`, of which the gradient of x knows one form."""
    return {key: value for key, value in node.attrs.items() if key != "training"}


def _fixed_gradients(node: Node, scale: Node, sums: Node, dy: Node) -> list[Node | None]:
    """Of Σ dy · (scale · x̂ + …) with respect to x, mean and variance that do not depend on x."""
    x, _, variance = node.inputs[:3]
    r = pow_byconst_op(variance + node.attrs["eps"], -0.5)
    factor = cast_like_op(scale, variance) * r
    of_x = _like(channels_op(cast_like_op(dy, variance)) * per_channel(factor), x)
    return [of_x, -sums[1] * factor, -0.5 * sums[0] * factor * r]


def _like(values: Node, x: Node) -> Node:
    """Values in the shape and dtype of x."""
    return cast_like_op(reshape_like_op(values, x), x)


def _spread(values: Node, x: Node) -> Node:
    """One number a channel, divided among all the channel's values."""
    return expand_like_op(values, x, axis=(0, 2), mean=True)


channels_op = ChannelsOp()
batch_statistics_op = BatchStatisticsOp()
batch_normalize_op = BatchNormalizeOp()
batch_normalize_sums_op = BatchNormalizeSumsOp()
batch_normalize_gradient_op = BatchNormalizeGradientOp()
running_statistics_op = RunningStatisticsUpdateOp()
running_update_op = RunningUpdateOp()

"""Batch normalization over the shares of all ranks as one batch."""

from __future__ import annotations

from ..graph.node import Node
from ..ops.leaf import Parameter
from ..ops.norm.batch_norm import batch_normalize_op, batch_statistics_op, running_statistics_op
from .collectives import all_gather_op, all_reduce_op
from .group import Group


def synchronized_batch_norm(
    x: Node,
    scale: Node,
    bias: Node,
    running_mean: Parameter,
    running_variance: Parameter,
    momentum: float,
    eps: float,
    group: Group,
) -> Node:
    """`batch_normalization` in training form of x (N, C, …), a share of each rank.

    Of equal shares with means m and variances v the mean is M = mean(m), the variance mean(v + (m -
    M)²), which loses no digits where means are large beside deviations.
    """
    means, variances = batch_statistics_op(x)
    mean = all_reduce_op(means, group=group, op="mean")
    apart = means - mean
    variance = all_reduce_op(variances + apart * apart, group=group, op="mean")
    # They depend on x by what was reduced, and gradients go that way.
    y = batch_normalize_op(x, mean, variance, scale, bias, eps=eps, training=False)
    batch = all_gather_op(x, group=group)  # for its shape, and never computed
    update = running_statistics_op(
        running_mean, running_variance, mean, variance, batch, momentum=momentum
    )
    y.effects = (update,)
    return y

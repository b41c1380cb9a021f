"""The operators that people write, one file or room a family; importing this package fills in
what nodes and gradients need.
"""

from ..graph.node import hooks
from . import (
    comparison,
    elementwise,
    extents,
    in_fp8,
    indexing,
    leaf,
    matmul,
    movement,
    reduce,
)
from .math import power, rounding
from .optim import assign
from .random import sampling

hooks.update(
    add=elementwise.add,
    sub=elementwise.sub,
    mul=elementwise.mul,
    div=elementwise.div,
    power=power.power,
    floor_divide=rounding.floor_divide_op,
    remainder=rounding.remainder_op,
    neg=elementwise.neg_op,
    abs=elementwise.abs_op,
    matmul=matmul.product,
    in_fp8=in_fp8.in_fp8,
    sum_to_like=reduce.sum_to_like,
    ones_like=leaf.oneslike_op,
    zeros_like=leaf.zeroslike_op,
    full=leaf.full_op,
    variable=leaf.placeholder_op,
    cast=elementwise.cast_op,
    copy=movement.copy_op,
    getitem=indexing.getitem_op,
    stop_gradient=movement.stop_gradient_op,
    step_of_draw=sampling.step_of_draw_op,
    advance_step=assign.advance_step_op,
    group=assign.group_op,
    partial=extents.partial,
    equal=comparison.equal_op,
    not_equal=comparison.not_equal_op,
    less=comparison.less_op,
    less_equal=comparison.less_equal_op,
    greater=comparison.greater_op,
    greater_equal=comparison.greater_equal_op,
)
hooks.update(
    {
        "and": comparison.truth_and_op,
        "or": comparison.truth_or_op,
        "xor": comparison.truth_xor_op,
        "not": comparison.truth_not_op,
    }
)

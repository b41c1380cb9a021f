"""The operators, one file a family; importing this package fills in what nodes and gradients
need.
"""

from ..graph.node import hooks
from . import (
    accumulate,
    activation,
    batch,
    compare,
    conv,
    convolution,
    einsum,
    elementwise,
    fused,
    fused_chain,
    fused_conv,
    image,
    index,
    join,
    layout,
    loss,
    losses,
    matmul,
    norm,
    pad,
    pool,
    pooling,
    product,
    random,
    reduce,
    row_norm,
    running,
    softmax,
    source,
    statistics,
    update,
    update_all,
)

hooks.update(
    add=elementwise.add,
    sub=elementwise.sub,
    mul=elementwise.mul,
    div=elementwise.div,
    power=elementwise.power,
    neg=elementwise.neg_op,
    matmul=lambda a, b: matmul.matmul_op(elementwise.as_node(a), elementwise.as_node(b)),
    ones_like=source.oneslike_op,
    zeros_like=source.zeroslike_op,
    full=source.full_op,
    variable=source.placeholder_op,
    cast=elementwise.cast_op,
    copy=layout.copy_op,
    getitem=index.getitem_op,
    step_of_draw=random.step_of_draw_op,
    advance_step=update.advance_step_op,
    group=update.group_op,
    equal=compare.equal_op,
    not_equal=compare.not_equal_op,
    less=compare.less_op,
    less_equal=compare.less_equal_op,
    greater=compare.greater_op,
    greater_equal=compare.greater_equal_op,
)
hooks.update(
    {
        "and": compare.truth_and_op,
        "or": compare.truth_or_op,
        "xor": compare.truth_xor_op,
        "not": compare.truth_not_op,
    }
)

FAMILIES = (
    convolution, conv, pooling, pool,
    activation, compare, statistics, product, einsum,
    source, elementwise, reduce, layout, index, join, pad, image,
    matmul, softmax, loss, losses, norm, row_norm, running, random, update, update_all,
    accumulate, batch, fused, fused_chain, fused_conv,
)  # fmt: skip

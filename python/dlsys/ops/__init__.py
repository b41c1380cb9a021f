"""The operators, one file a family; importing this package fills in what nodes and gradients
need.
"""

from ..graph.node import hooks
from . import elementwise, layout, loss, matmul, reduce, softmax, source, update

hooks.update(
    add=elementwise.add,
    sub=elementwise.sub,
    mul=elementwise.mul,
    div=elementwise.div,
    power=elementwise.power,
    neg=elementwise.neg_op,
    matmul=lambda a, b: matmul.matmul_op(elementwise._as_node(a), elementwise._as_node(b)),
    ones_like=source.oneslike_op,
    zeros_like=source.zeroslike_op,
    full=source.full_op,
    variable=source.placeholder_op,
    cast=elementwise.cast_op,
    copy=layout.copy_op,
)

FAMILIES = (source, elementwise, reduce, layout, matmul, softmax, loss, update)

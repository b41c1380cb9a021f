"""The face of dlsys: Variables, operators, gradients and the Executor.

from dlsys import autodiff as ad
"""

from __future__ import annotations

from .executor.executor import Executor
from .graph.gradients import gradients, sum_node_list
from .graph.node import Node, Op, Spec, find_topo_sort
from .graph.text import text
from .ops.elementwise import (
    add_byconst_op,
    add_op,
    cast_op,
    const_div_op,
    const_pow_op,
    const_sub_op,
    div_byconst_op,
    div_op,
    exp_op,
    log_op,
    mul_byconst_op,
    mul_op,
    neg_op,
    pow_byconst_op,
    pow_op,
    relu_gradient_op,
    relu_op,
    sigmoid_op,
    sqrt_op,
    sub_op,
    tanh_op,
)
from .ops.layout import broadcast_to_op, copy_op, reshape_like_op, reshape_op, transpose_op
from .ops.loss import softmax_cross_entropy, softmaxcrossentropy_op
from .ops.matmul import matmul_op
from .ops.reduce import (
    broadcastto_op,
    expand_like_op,
    mean_op,
    reducesumaxiszero_op,
    sum_op,
    sum_to_like_op,
)
from .ops.softmax import log_softmax_op, softmax_func, softmax_op
from .ops.source import (
    Parameter,
    Variable,
    full_op,
    oneslike_op,
    placeholder_op,
    zeroslike_op,
)
from .ops.source import constant_op as constant
from .ops.update import assign_op, group_op, sgd_momentum_update_op, sgd_update_op

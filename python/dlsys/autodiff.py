"""The face of dlsys: Variables, operators, gradients and the Executor.

from dlsys import autodiff as ad
"""

from __future__ import annotations

from .executor.executor import Executor
from .graph.gradients import gradients, sum_node_list
from .graph.node import Node, Op, find_topo_sort
from .graph.spec import Spec
from .graph.text import text
from .ops.activation import (
    elu_op,
    gelu_op,
    gelu_tanh_op,
    hard_sigmoid_op,
    hard_swish_op,
    leaky_relu_op,
    relu6_op,
    silu_op,
    softplus_op,
)
from .ops.comparison import (
    equal_op,
    greater_equal_op,
    greater_op,
    less_equal_op,
    less_op,
    logical_and_op,
    logical_not_op,
    logical_or_op,
    logical_xor_op,
    maximum_op,
    minimum_op,
    not_equal_op,
    where_op,
)
from .ops.concat import concat, concat_op, split, stack, tile
from .ops.conv.convolution import (
    conv1d,
    conv2d,
    conv2d_add_bias_op,
    conv2d_gradient_of_data_op,
    conv2d_gradient_of_filter_op,
    conv2d_op,
    conv_transpose2d,
)
from .ops.conv.pooling import (
    avg_pool2d,
    avg_pool2d_gradient_op,
    avg_pool2d_op,
    global_avg_pool2d,
    global_max_pool2d,
    max_pool2d,
    max_pool2d_gradient_op,
    max_pool2d_op,
    max_pool_op,
)
from .ops.einsum import einsum
from .ops.elementwise import (
    abs_op,
    add_byconst_op,
    add_op,
    cast_op,
    clip_op,
    const_div_op,
    const_sub_op,
    cos_op,
    div_byconst_op,
    div_op,
    exp_op,
    log1p_op,
    log_op,
    mul_byconst_op,
    mul_op,
    neg_op,
    relu_gradient_op,
    relu_op,
    rsqrt_op,
    sigmoid_op,
    sign_op,
    sin_op,
    sqrt_op,
    sub_op,
    tanh_op,
)
from .ops.indexing import (
    embedding_lookup_op,
    embedding_op,
    gather_op,
    one_hot_op,
    scatter_add_op,
    slice_op,
)
from .ops.leaf import Parameter, Variable, full_op, oneslike_op, placeholder_op, zeroslike_op
from .ops.leaf import constant_op as constant
from .ops.loss.classification import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    binarycrossentropy_op,
    hinge_loss,
    kl_divergence,
    multiclass_hinge_loss,
)
from .ops.loss.cross_entropy import softmax_cross_entropy, softmaxcrossentropy_op
from .ops.loss.likelihood import negative_log_likelihood
from .ops.loss.regression import huber_loss, mean_absolute_error, mean_squared_error
from .ops.loss.softmax import log_softmax_op, softmax_func, softmax_op
from .ops.matmul import batched_matmul_op, linear_op, matmul_op, outer_op
from .ops.movement import (
    array_reshape_op,
    broadcast_to_op,
    copy_op,
    expand_dims_op,
    flatten_op,
    reshape_like_op,
    reshape_op,
    squeeze_op,
    transpose_op,
)
from .ops.norm.batch_norm import batch_normalization, batch_normalization_op
from .ops.norm.layer_norm import (
    group_normalization,
    instance_normalization,
    layer_normalization,
    layer_normalization_op,
    rms_normalization,
)
from .ops.optim.apply import (
    accumulate_update_op,
    adagrad_update_op,
    adam_update_op,
    average_update_op,
    global_norm_op,
    lion_update_op,
    rmsprop_centred_momentum_update_op,
    rmsprop_centred_update_op,
    rmsprop_momentum_update_op,
    rmsprop_update_op,
    sgd_momentum_update_op,
    sgd_update_op,
)
from .ops.optim.assign import accumulate_op, advance_step_op, assign_op, group_op
from .ops.pad import pad_op
from .ops.power import const_pow_op, pow_byconst_op, pow_op
from .ops.random.device_batch import shuffled_batch_op, shuffled_index_op, take_batch_op
from .ops.random.sampling import (
    Generator,
    dropout,
    dropout_op,
    random_bernoulli,
    random_normal,
    random_truncated_normal,
    random_uniform,
    seed,
)
from .ops.reduce import (
    argmax_op,
    argmin_op,
    broadcastto_op,
    expand_like_op,
    logsumexp_op,
    max_op,
    mean_op,
    min_op,
    prod_op,
    reduce_mean_op,
    reduce_sum_op,
    reducesumaxiszero_op,
    sum_op,
    sum_to_like_op,
    var_op,
)
from .ops.resize import depth_to_space_op, resize, space_to_depth_op
from .ops.scan import cumsum_op

"""Rows of dlsys.functional: calls of its functions, and what they build, written with operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys.graph.node import hooks
from dlsys.ops.attention.attention import attention
from dlsys.ops.attention.packed import packed_attention
from dlsys.ops.conv.pooling import max_pool_op

RNG = np.random.default_rng(7)
ARRAYS = {
    "x": RNG.normal(size=(2, 3)).astype(np.float32),
    "y": RNG.normal(size=(2, 3)).astype(np.float32),
    "logits": RNG.normal(size=(2, 3)).astype(np.float32),
    "labels": np.array([1, 0]),
    "images": RNG.normal(size=(2, 3, 6, 4)).astype(np.float32),
    "filters": RNG.normal(size=(5, 3, 3, 3)).astype(np.float32),
}
NODES = {name: ad.Variable(name, array.shape, array.dtype) for name, array in ARRAYS.items()}
X, Y, LOGITS, LABELS, IMAGES, FILTERS = NODES.values()
SCALE, BIAS = ad.Parameter(np.full(3, 2, np.float32)), ad.Parameter(np.ones(3, np.float32))
TRUE = ad.greater_op(X, Y)

# What each function builds, written with operators: the same ones in the same order.
ROWS: dict[str, list[tuple[Callable[[], Any], Callable[[], Any]]]] = {}


def row(name: str, built: Callable[[], Any], expected: Callable[[], Any]) -> None:
    ROWS.setdefault(name, []).append((built, expected))


def same(name: str, op: Callable[..., Any], *args: Any, **options: Any) -> None:
    """A row of a function that takes what its operator does."""
    row(name, lambda: getattr(F, name)(*args, **options), lambda: op(*args, **options))


for _name, _op in {
    "relu": ad.relu_op, "relu6": ad.relu6_op, "silu": ad.silu_op, "gelu": ad.gelu_op,
    "softplus": ad.softplus_op, "hardsigmoid": ad.hard_sigmoid_op, "hardswish": ad.hard_swish_op,
    "sigmoid": ad.sigmoid_op, "tanh": ad.tanh_op, "softmax": ad.softmax_op,
    "log_softmax": ad.log_softmax_op, "elu": ad.elu_op, "leaky_relu": ad.leaky_relu_op,
    "neg": ad.neg_op, "abs": ad.abs_op, "sign": ad.sign_op, "exp": ad.exp_op, "log": ad.log_op,
    "log1p": ad.log1p_op, "sqrt": ad.sqrt_op, "rsqrt": ad.rsqrt_op, "sin": ad.sin_op,
    "cos": ad.cos_op, "copy": ad.copy_op, "stop_gradient": ad.stop_gradient_op,
    "zeros_like": ad.zeroslike_op, "ones_like": ad.oneslike_op, "logical_not": ad.logical_not_op,
    "sum": ad.sum_op, "mean": ad.mean_op, "max": ad.max_op, "min": ad.min_op, "prod": ad.prod_op,
    "var": ad.var_op, "logsumexp": ad.logsumexp_op, "argmax": ad.argmax_op,
    "argmin": ad.argmin_op, "cumsum": ad.cumsum_op, "squeeze": ad.squeeze_op,
    "transpose": ad.transpose_op, "clip": lambda x: x,
}.items():  # fmt: skip
    same(_name, _op, X)
for _name in ("sum", "mean", "max", "min", "prod", "logsumexp", "argmax", "argmin", "var"):
    same(_name, getattr(ad, f"{_name}_op"), X, axis=-1, keepdims=True)
for _name, _op in {
    "add": ad.add_op, "sub": ad.sub_op, "mul": ad.mul_op, "div": ad.div_op, "pow": ad.pow_op,
    "maximum": ad.maximum_op, "minimum": ad.minimum_op, "equal": ad.equal_op,
    "not_equal": ad.not_equal_op, "less": ad.less_op, "less_equal": ad.less_equal_op,
    "greater": ad.greater_op, "greater_equal": ad.greater_equal_op,
    "logical_and": ad.logical_and_op, "logical_or": ad.logical_or_op,
    "logical_xor": ad.logical_xor_op, "global_norm": ad.global_norm_op,
    "mse_loss": ad.mean_squared_error, "l1_loss": ad.mean_absolute_error,
    "huber_loss": ad.huber_loss, "binary_cross_entropy": ad.binary_cross_entropy,
    "binary_cross_entropy_with_logits": ad.binary_cross_entropy_with_logits,
    "hinge_loss": ad.hinge_loss, "kl_div": ad.kl_divergence,
    "cross_entropy": ad.softmax_cross_entropy, "multi_margin_loss": ad.multiclass_hinge_loss,
}.items():  # fmt: skip
    same(_name, _op, X, Y)
for _name in ("add", "sub", "mul", "div", "power"):
    same(_name.removesuffix("er"), hooks[_name], X, 2)
    same(_name.removesuffix("er"), hooks[_name], 2.5, X)

for _name in (
    "acos acosh asin asinh atan atanh ceil cosh cumprod erf exp2 expm1 floor isfinite isinf isnan "
    "log10 log2 reciprocal round sinh std tan tril triu trunc argsort"
).split():
    same(_name, getattr(ad, f"{_name}_op"), X)
for _name in ("atan2", "floor_divide", "fmod", "remainder", "recurrence"):
    same(_name, getattr(ad, f"{_name}_op"), X, Y)

row("all", lambda: F.all(X > 0, 1, True), lambda: ad.equal_op(ad.sum_op((X > 0) == 0, 1, True), 0))
row("any", lambda: F.any(X > 0, 0), lambda: ad.not_equal_op(ad.sum_op((X > 0) != 0, 0), 0))
for _k in (0, 1):
    row("sort", lambda k=_k: F.sort(X, 0, True)[k], lambda k=_k: ad.sort_op(X, 0, True)[k])
    row("topk", lambda k=_k: F.topk(X, 2, 1, False)[k], lambda k=_k: ad.topk_op(X, 2, 1, False)[k])
BOXES, CHANCES = ad.Variable("boxes", (2, 7, 4), "f4"), ad.Variable("chances", (2, 3, 7), "f4")
for _name in ("non_max_suppression", "soft_nms"):
    for _k in range(getattr(ad, f"{_name}_op").outputs):
        row(
            _name,
            lambda name=_name, k=_k: getattr(F, name)(BOXES, CHANCES, 4, 0.6, 0.1, True)[k],
            lambda name=_name, k=_k: getattr(ad, f"{name}_op")(
                BOXES, CHANCES, max_output_boxes_per_class=4, iou_threshold=0.6,
                score_threshold=0.1, center_point_box=True,
            )[k],
        )  # fmt: skip
same("take_along_axis", ad.take_along_axis_op, X, ad.argmax_op(X, 1, True), 1)
same("masked_fill", ad.masked_fill_op, X, TRUE, 0.5)

STEP, ZERO = ad.constant(np.float32(0.1)), ad.constant(np.uint8(3))
same("quantize", ad.quantize_op, X, STEP, ZERO)
same("dequantize", ad.dequantize_op, ad.quantize_op(X, STEP, ZERO), STEP, ZERO)
row("leaky_relu", lambda: F.leaky_relu(X, 0.2), lambda: ad.leaky_relu_op(X, 0.2))
row("elu", lambda: F.elu(X, alpha=2.0), lambda: ad.elu_op(X, 2.0))
row("gelu", lambda: F.gelu(X, approximate="tanh"), lambda: ad.gelu_tanh_op(X))
row("softmax", lambda: F.softmax(X, axis=0), lambda: ad.softmax_op(X, 0))
row("log_softmax", lambda: F.log_softmax(X, axis=0), lambda: ad.log_softmax_op(X, 0))
row("clip", lambda: F.clip(X, 0, 1), lambda: ad.clip_op(X, 0, 1))
row("clip", lambda: F.clip(X, max=1.0), lambda: ad.minimum_op(X, 1.0))
row("clip", lambda: F.clip(X, min=1.0), lambda: ad.maximum_op(X, 1.0))
row("astype", lambda: F.astype(X, "float16"), lambda: ad.cast_op(X, "float16"))
row("var", lambda: F.var(X, axis=0, ddof=1), lambda: ad.var_op(X, 0, ddof=1))
row("cumsum", lambda: F.cumsum(X, 0, True), lambda: ad.cumsum_op(X, 0, True))
row("where", lambda: F.where(TRUE, X, 0), lambda: ad.where_op(TRUE, X, 0))
row("where", lambda: F.where(TRUE, 1.0, 0.0), lambda: ad.where_op(TRUE, 1.0, 0.0))

row(
    "cross_entropy",
    lambda: F.cross_entropy(LOGITS, LABELS, [1, 2, 3], "sum", 0.1, -1),
    lambda: ad.softmax_cross_entropy(LOGITS, LABELS, "sum", 0.1, (1, 2, 3), -1),
)
row(
    "nll_loss",
    lambda: F.nll_loss(LOGITS, LABELS, BIAS, "none", 2),
    lambda: ad.negative_log_likelihood(LOGITS, LABELS, "none", BIAS, 2),
)
row("huber_loss", lambda: F.huber_loss(X, Y, 2.0), lambda: ad.huber_loss(X, Y, 2.0))
row(
    "binary_cross_entropy_with_logits",
    lambda: F.binary_cross_entropy_with_logits(X, Y, "sum", pos_weight=3.0),
    lambda: ad.binary_cross_entropy_with_logits(X, Y, "sum", 3.0),
)
row(
    "multi_margin_loss",
    lambda: F.multi_margin_loss(LOGITS, LABELS, 0.5, "sum"),
    lambda: ad.multiclass_hinge_loss(LOGITS, LABELS, 0.5, "sum"),
)

row(
    "conv2d",
    lambda: F.conv2d(IMAGES, FILTERS, None, 2, "same", 1, 1),
    lambda: ad.conv2d(IMAGES, FILTERS, stride=2, padding="same"),
)
row(
    "conv2d",
    lambda: F.conv2d(IMAGES, FILTERS[:3], BIAS, padding=1),
    lambda: ad.conv2d(IMAGES, FILTERS[:3], BIAS, padding=1),
)
row(
    "conv1d",
    lambda: F.conv1d(IMAGES[:, :, 0], FILTERS[:, :, 0], None, 1, 1, 2),
    lambda: ad.conv1d(IMAGES[:, :, 0], FILTERS[:, :, 0], padding=1, dilation=2),
)
row(
    "conv_transpose2d",
    lambda: F.conv_transpose2d(IMAGES, FILTERS[:3], BIAS, 2, 1, 1, 1, 2),
    lambda: ad.conv_transpose2d(
        IMAGES, FILTERS[:3], BIAS, stride=2, padding=1, output_padding=1, dilation=2
    ),
)
row(
    "max_pool2d",
    lambda: F.max_pool2d(IMAGES, 2, 1, 1, 2, True),
    lambda: max_pool_op(IMAGES, window=2, stride=1, padding=1, dilation=2, ceil_mode=True)[0],
)
row(
    "max_pool2d",
    lambda: F.max_pool2d(IMAGES, 3, 2, 1, return_indices=True)[1],
    lambda: ad.cast_op(max_pool_op(IMAGES, window=3, stride=2, padding=1)[1], np.int64),
)
row(
    "avg_pool2d",
    lambda: F.avg_pool2d(IMAGES, (3, 2), 2, 1, True, False),
    lambda: ad.avg_pool2d(IMAGES, (3, 2), 2, 1, True, False),
)
row(
    "global_avg_pool2d",
    lambda: F.global_avg_pool2d(IMAGES, True),
    lambda: ad.global_avg_pool2d(IMAGES, True),
)
row(
    "global_max_pool2d",
    lambda: F.global_max_pool2d(IMAGES),
    lambda: ad.global_max_pool2d(IMAGES),
)
row(
    "resize",
    lambda: F.resize(IMAGES, (3, 9), None, "bilinear", True),
    lambda: ad.resize(IMAGES, (3, 9), mode="bilinear", align_corners=True),
)
row(
    "pixel_shuffle",
    lambda: F.pixel_shuffle(ad.tile(IMAGES, (1, 4, 1, 1)), 2),
    lambda: ad.depth_to_space_op(ad.tile(IMAGES, (1, 4, 1, 1)), 2, "CRD"),
)
row(
    "pixel_unshuffle",
    lambda: F.pixel_unshuffle(IMAGES, 2, "DCR"),
    lambda: ad.space_to_depth_op(IMAGES, 2, "DCR"),
)

row(
    "layer_norm",
    lambda: F.layer_norm(X, 3, SCALE, BIAS, 1e-3),
    lambda: ad.layer_normalization(X, SCALE, BIAS, 1e-3),
)
row(
    "layer_norm",
    lambda: F.layer_norm(X, (3,)),
    lambda: ad.layer_normalization(X, ad.full_op((3,), 1.0), ad.full_op((3,), 0.0)),
)
row(
    "rms_norm",
    lambda: F.rms_norm(X, 3, SCALE, 1e-3),
    lambda: ad.rms_normalization(X, SCALE, eps=1e-3),
)
row(
    "group_norm",
    lambda: F.group_norm(IMAGES, 3, SCALE, BIAS),
    lambda: ad.group_normalization(IMAGES, SCALE, BIAS, 3),
)
row(
    "instance_norm",
    lambda: F.instance_norm(IMAGES, None, BIAS),
    lambda: ad.instance_normalization(IMAGES, ad.oneslike_op(BIAS), BIAS),
)
row(
    "batch_norm",
    lambda: F.batch_norm(IMAGES, BIAS, SCALE, SCALE, BIAS, eps=1e-3),
    lambda: ad.batch_normalization(IMAGES, SCALE, BIAS, BIAS, SCALE, eps=1e-3, training=False),
)
row(
    "batch_norm",
    lambda: F.batch_norm(IMAGES, training=True),
    lambda: ad.batch_normalization(IMAGES, ad.full_op((3,), 1.0), ad.full_op((3,), 0.0)),
)

row("reshape", lambda: F.reshape(X, 6), lambda: ad.reshape_op(X, (6,)))
row("reshape", lambda: X.reshape(3, -1), lambda: ad.reshape_op(X, (3, -1)))
row("flatten", lambda: F.flatten(IMAGES, 2), lambda: ad.flatten_op(IMAGES, 2))
row("flatten", lambda: IMAGES.flatten(), lambda: ad.flatten_op(IMAGES, 0))
row("squeeze", lambda: F.squeeze(X[:1], 0), lambda: ad.squeeze_op(X[:1], 0))
row("expand_dims", lambda: F.expand_dims(X, (0, 2)), lambda: ad.expand_dims_op(X, (0, 2)))
row("transpose", lambda: X.transpose(1, 0), lambda: ad.transpose_op(X, (1, 0)))
row("transpose", lambda: X.T, lambda: ad.transpose_op(X))
row("swapaxes", lambda: F.swapaxes(IMAGES, 1, -1), lambda: ad.transpose_op(IMAGES, (0, 3, 2, 1)))
row("broadcast_to", lambda: F.broadcast_to(X, (4, 2, 3)), lambda: ad.broadcast_to_op(X, (4, 2, 3)))
row("tile", lambda: F.tile(X, 2), lambda: ad.tile(X, 2))
row("concatenate", lambda: F.concatenate((X, Y), 1), lambda: ad.concat([X, Y], 1))
row("stack", lambda: F.stack((X, Y), -1), lambda: ad.stack([X, Y], -1))
row("split", lambda: F.split(X, 3, 1)[1], lambda: ad.split(X, 3, 1)[1])
row("split", lambda: F.split(X, (1, 2), 1)[1], lambda: ad.split(X, (1, 2), 1)[1])
row(
    "pad",
    lambda: F.pad(X, ((1, 0), 2), value=3),
    lambda: ad.pad_op(X, ((1, 0), 2), constant_values=3),
)
row("flip", lambda: F.flip(X, 1), lambda: X[::1, ::-1])
row("flip", lambda: F.flip(X), lambda: X[::-1, ::-1])
row("roll", lambda: F.roll(X, 1, -1), lambda: ad.concat([X[:, 2:], X[:, :2]], -1))
row("roll", lambda: F.roll(X, -4, 1), lambda: ad.concat([X[:, 1:], X[:, :1]], 1))
row("roll", lambda: F.roll(X, 6, 1), lambda: X)
row("full", lambda: F.full((2,), 3, np.int64), lambda: ad.full_op((2,), 3, np.int64))

row("getitem", lambda: F.getitem(X, (0, slice(1))), lambda: X[0, :1])
row("slice", lambda: F.slice(X, (0, 1), (1, -1)), lambda: ad.slice_op(X, (0, 1), (1, -1)))
row("take", lambda: F.take(X, LABELS, axis=1), lambda: ad.gather_op(X, LABELS, 1))
row("embedding", lambda: F.embedding(LABELS, X), lambda: ad.embedding_op(X, LABELS))
row(
    "scatter_add",
    lambda: F.scatter_add(X, LABELS, Y),
    lambda: ad.scatter_add_op(X, LABELS, Y),
)
row(
    "one_hot",
    lambda: F.one_hot(LABELS, 4, np.int64),
    lambda: ad.one_hot_op(LABELS, 4, np.int64),
)

row("matmul", lambda: F.matmul(X, Y, transpose_b=True), lambda: ad.matmul_op(X, Y, trans_B=True))
row(
    "matmul",
    lambda: F.matmul(IMAGES, IMAGES, True),
    lambda: ad.batched_matmul_op(IMAGES, IMAGES, True),
)
row("linear", lambda: F.linear(X, Y), lambda: ad.linear_op(X, Y, trans_B=True))
row(
    "grouped_matmul",
    lambda: F.grouped_matmul(X, IMAGES[:, :, 0], LABELS),
    lambda: ad.grouped_matmul_op(X, IMAGES[:, :, 0], LABELS),
)
row("outer", lambda: F.outer(X[0], Y[1]), lambda: ad.outer_op(X[0], Y[1]))
row("einsum", lambda: F.einsum("ij,kj", X, Y), lambda: ad.einsum("ij,kj", X, Y))


def seeded(build: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        ad.seed(5)
        return build()

    return made


same("scaled_dot_product_attention", attention, IMAGES, IMAGES, IMAGES, causal=True, scale=0.5)
row(
    "scaled_dot_product_attention",
    lambda: F.scaled_dot_product_attention(IMAGES, IMAGES, IMAGES, dropout=0.5, training=False),
    lambda: attention(IMAGES, IMAGES, IMAGES),
)

QKV = ad.Variable("qkv", (2, 3, 24), np.dtype(np.float32))
same("packed_attention", packed_attention, QKV, 2, causal=True)
row(
    "packed_attention",
    lambda: F.packed_attention(QKV, 4, 1, scale=0.5, dropout=0.5, training=False),
    lambda: packed_attention(QKV, 4, 1, scale=0.5),
)

for _name, _built, _expected in (
    ("dropout", lambda: F.dropout(X, 0.75), lambda: ad.dropout(X, 0.75)),
    ("dropout", lambda: F.dropout(X, 0.75), lambda: ad.dropout_op(X, 0.25)),
    ("dropout", lambda: F.dropout(X, training=False), lambda: X),
    ("random_uniform", lambda: F.random_uniform((2,), 0, 3), lambda: ad.random_uniform((2,), 0, 3)),
    (
        "random_bernoulli",
        lambda: F.random_bernoulli((2,), 0.3),
        lambda: ad.random_bernoulli((2,), 0.3),
    ),
    ("random_normal", lambda: F.random_normal((2,), 1, 2), lambda: ad.random_normal((2,), 1, 2)),
    (
        "random_truncated_normal",
        lambda: F.random_truncated_normal((2,), 0, 1, -1, 1),
        lambda: ad.random_truncated_normal((2,), 0, 1, -1, 1),
    ),
):
    row(_name, seeded(_built), seeded(_expected))

"""The names that scripts of this family use: they exist, take their arguments and compute."""

from __future__ import annotations

import inspect
import unittest
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dlsys import autodiff as ad
from dlsys import gpu_op, ndarray
from dlsys.runtime.device import Context
from support.devices import on_native_devices

# A script may give these by position or by name; "=" follows what it may leave out.
SIGNATURES = {
    "conv2d_op": "A B padding=0 stride=1",
    "conv2d_add_bias_op": "A B bias padding=0 stride=1",
    "max_pool2d_op": "A kernel_H kernel_W padding stride",
    "avg_pool2d_op": "A kernel_H kernel_W padding stride",
    "batch_normalization_op": "x scale bias momentum=0.1 eps=1e-05",
    "layer_normalization_op": "x scale bias eps",
    "dropout_op": "x keep_prob",
    "concat_op": "A B axis=0",
}
KERNELS = {
    "conv2d": "x f out padding stride",
    "conv2d_gradient_of_data": "f dy dx padding stride",
    "conv2d_gradient_of_filter": "x dy df padding stride",
    "max_pooling2d": "in_arr kernel_h kernel_w out padding stride",
    "max_pooling2d_gradient": "in_arr out_grad kernel_h kernel_w in_grad padding stride",
    "average_pooling2d": "in_arr kernel_h kernel_w out padding stride",
    "average_pooling2d_gradient": "out_grad kernel_h kernel_w in_grad padding stride",
    "batch_normalization": "in_arr scale bias out mean variance eps=1e-05",
    "batch_normalization_gradient": (
        "out_grad in_arr scale mean variance in_grad scale_grad bias_grad eps=1e-05"
    ),
    "dropout": "in_arr keep_prob out",
    "leaky_relu": "in_arr alpha out",
    "sigmoid": "in_arr out",
    "tanh": "in_arr out",
    "concat": "in_arr_a in_arr_b out axis=0",
    "pad": "in_arr out paddings mode='constant' constant_values=0.0",
    "slice": "in_arr out begin",
    "sgd_update": "param grad lr",
    "adam_update": "param grad mean square lr step beta1=0.9 beta2=0.999 eps=1e-08",
}
VOCABULARY = """
    add_op sub_op mul_op div_op neg_op pow_op exp_op log_op log1p_op sqrt_op rsqrt_op abs_op sign_op
    minimum_op maximum_op clip_op where_op cast_op equal_op not_equal_op less_op less_equal_op
    greater_op greater_equal_op logical_and_op logical_or_op logical_xor_op logical_not_op
    sigmoid_op tanh_op relu_op leaky_relu_op elu_op silu_op gelu_op gelu_tanh_op softplus_op
    hard_sigmoid_op hard_swish_op relu6_op
    sum_op mean_op max_op min_op prod_op var_op argmax_op argmin_op logsumexp_op cumsum_op
    reshape_op transpose_op squeeze_op expand_dims_op flatten_op slice_op concat stack split pad_op
    tile gather_op scatter_add_op one_hot_op embedding_op depth_to_space_op resize
    matmul_op batched_matmul_op linear_op outer_op einsum
    conv2d conv_transpose2d conv1d max_pool2d avg_pool2d global_avg_pool2d global_max_pool2d
    batch_normalization layer_normalization group_normalization instance_normalization
    rms_normalization dropout random_uniform random_bernoulli random_normal random_truncated_normal
    softmax_cross_entropy negative_log_likelihood mean_squared_error mean_absolute_error huber_loss
    binary_cross_entropy binary_cross_entropy_with_logits hinge_loss multiclass_hinge_loss
    kl_divergence
""".split()


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(len(shapes))
    return [rng.uniform(-2, 2, shape).astype(np.float32) for shape in shapes]


X, F, B = arrays((2, 3, 6, 5), (4, 3, 3, 2), (4,))
SCALE, BIAS, ROWS = arrays((3,), (3,), (4, 3))
P, Y = np.array([[0.1, 0.9], [0.5, 0.25]], np.float32), np.array([[0, 1], [1, 0]], np.float32)


def windows(x: np.ndarray, height: int, width: int, padding: int, stride: int) -> np.ndarray:
    """Each window of x (N, C, H, W), padded with zeros: (N, C, oH, oW, height, width)."""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    view = np.lib.stride_tricks.sliding_window_view(x, (height, width), axis=(2, 3))
    return view[:, :, ::stride, ::stride]


def convolved(x: np.ndarray, f: np.ndarray, padding: int = 0, stride: int = 1) -> np.ndarray:
    seen = windows(x, *f.shape[2:], padding, stride)
    return np.einsum("nchwij,ocij->nohw", seen.astype(np.float64), f)


def normalized(x: np.ndarray, axes: tuple[int, ...], eps: float = 1e-5) -> np.ndarray:
    x = x.astype(np.float64)
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps)


def channels(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, 1, 1)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Call(NamedTuple):
    """A call as a script writes it, its inputs and what it gives."""

    build: Callable[..., ad.Node]
    inputs: list[np.ndarray]
    expected: np.ndarray


CALLS = [
    Call(ad.conv2d_op, [X, F], convolved(X, F)),
    Call(lambda x, f: ad.conv2d_op(x, f, 1, 2), [X, F], convolved(X, F, 1, 2)),
    Call(lambda x, f: ad.conv2d_op(A=x, B=f, padding=1), [X, F], convolved(X, F, 1)),
    Call(ad.conv2d_add_bias_op, [X, F, B], convolved(X, F) + channels(B)),
    Call(
        lambda x, f, b: ad.conv2d_add_bias_op(x, f, b, padding=2, stride=2),
        [X, F, B],
        convolved(X, F, 2, 2) + channels(B),
    ),
    Call(lambda x: ad.max_pool2d_op(x, 3, 2, 0, 2), [X], windows(X, 3, 2, 0, 2).max((4, 5))),
    Call(lambda x: ad.avg_pool2d_op(x, 3, 2, 1, 2), [X], windows(X, 3, 2, 1, 2).mean((4, 5))),
    Call(
        lambda x: ad.max_pool2d_op(A=x, kernel_H=2, kernel_W=2, padding=0, stride=1),
        [X],
        windows(X, 2, 2, 0, 1).max((4, 5)),
    ),
    Call(
        lambda x, *p: ad.layer_normalization_op(x, *p, 1e-3),
        [ROWS, SCALE, BIAS],
        normalized(ROWS, (1,), 1e-3) * SCALE + BIAS,
    ),
    Call(lambda x: ad.dropout_op(x, 1.0), [ROWS], ROWS),
    Call(lambda x: ad.leaky_relu_op(x, 0.2), [ROWS], np.where(ROWS > 0, ROWS, 0.2 * ROWS)),
    Call(lambda x: ad.leaky_relu_op(x, alpha=0.3), [ROWS], np.where(ROWS > 0, ROWS, 0.3 * ROWS)),
    Call(ad.sigmoid_op, [ROWS], sigmoid(ROWS)),
    Call(ad.tanh_op, [ROWS], np.tanh(ROWS)),
    Call(ad.concat_op, [ROWS, ROWS[:1]], np.concatenate([ROWS, ROWS[:1]])),
    Call(lambda a, b: ad.concat_op(a, b, axis=1), [ROWS, ROWS], np.concatenate([ROWS, ROWS], 1)),
    Call(lambda x: ad.pad_op(x, ((1, 0), (0, 2))), [ROWS], np.pad(ROWS, ((1, 0), (0, 2)))),
    Call(
        lambda x: ad.pad_op(x, ((0, 0), (1, 1)), "CONSTANT", constant_values=5),
        [ROWS],
        np.pad(ROWS, ((0, 0), (1, 1)), constant_values=5),
    ),
    Call(
        lambda x: ad.pad_op(x, ((1, 2), (2, 0)), mode="REFLECT"),
        [ROWS],
        np.pad(ROWS, ((1, 2), (2, 0)), mode="reflect"),
    ),
    Call(lambda x: ad.slice_op(x, (1, 0), (2, 3)), [ROWS], ROWS[1:3]),
    Call(lambda x: ad.slice_op(x, (1, 2), (-1, -1)), [ROWS], ROWS[1:, 2:]),
    Call(lambda x: ad.array_reshape_op(x, (2, -1)), [ROWS], ROWS.reshape(2, 6)),
    Call(ad.transpose_op, [ROWS], ROWS.T),
    Call(lambda x: ad.transpose_op(x, (0, 2, 3, 1)), [X], X.transpose(0, 2, 3, 1)),
    Call(ad.reduce_mean_op, [ROWS], ROWS.mean()),
    Call(lambda x: ad.reduce_mean_op(x, 0), [ROWS], ROWS.mean(0)),
    Call(
        lambda x: ad.reduce_sum_op(x, axis=(0, 2), keepdims=True), [X], X.sum((0, 2), keepdims=True)
    ),
    Call(ad.binarycrossentropy_op, [P, Y], -np.log(np.where(Y > 0, P, 1 - P))),
    Call(ad.linear_op, [ROWS, ROWS.T, B], ROWS @ ROWS.T + B),
    Call(lambda a, b: ad.linear_op(a, b, trans_A=True), [ROWS, ROWS], ROWS.T @ ROWS),
    Call(lambda a, b, c: ad.linear_op(a, b, c, False, True), [ROWS, ROWS, B], ROWS @ ROWS.T + B),
]


def run(build: Callable[..., Any], *values: np.ndarray) -> list[np.ndarray]:
    """The value of one node, or of several."""
    inputs = [ad.Variable(f"x{k}", value.shape, value.dtype) for k, value in enumerate(values)]
    nodes = build(*inputs)
    nodes = [nodes] if isinstance(nodes, ad.Node) else nodes
    return ad.Executor(nodes).run(dict(zip(inputs, values)))


def differences(function: Callable[..., Any], wanted: str) -> list[str]:
    """The complaint where a function's first parameters are not the wanted ones; others must have
    defaults.
    """
    parameters = list(inspect.signature(function).parameters.values())
    words = wanted.split()
    found = []
    for word, parameter in zip(words, parameters):
        name, _, default = word.partition("=")
        if parameter.name != name or default and repr(parameter.default) != default:
            found.append(f"{parameter} for {word}")
    found += [f"{word} is missing" for word in words[len(parameters) :]]
    more = parameters[len(words) :]
    return found + [f"{p} has no default" for p in more if p.default is p.empty]


class Names(unittest.TestCase):
    def test_the_vocabulary_is_there(self) -> None:
        missing = [name for name in VOCABULARY if not callable(getattr(ad, name, None))]
        self.assertEqual(missing, [])

    def test_signatures(self) -> None:
        for module, table in ((ad, SIGNATURES), (gpu_op, KERNELS)):
            for name, wanted in table.items():
                with self.subTest(name=name):
                    self.assertEqual(differences(getattr(module, name), wanted), [])


class Values(unittest.TestCase):
    def test_calls(self) -> None:
        for k, (build, inputs, expected) in enumerate(CALLS):
            with self.subTest(call=k, inputs=[x.shape for x in inputs]):
                result = run(build, *inputs)[0]
                np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
                self.assertEqual(result.shape, expected.shape)

    def test_gradients_of_convolution(self) -> None:
        for padding, stride in ((0, 1), (1, 1), (2, 2)):
            with self.subTest(padding=padding, stride=stride):
                y = convolved(X, F, padding, stride)
                dy = np.cos(np.arange(y.size)).reshape(y.shape).astype(np.float32)
                attrs = dict(padding=padding, stride=stride)

                def both(x, f, dy, attrs=attrs):
                    dx = ad.conv2d_gradient_of_data_op(f, dy, x, **attrs)
                    df = ad.conv2d_gradient_of_filter_op(x, dy, f, **attrs)
                    return [dx, df]

                dx, df = run(both, X, F, dy)
                # The convolution is linear in each: <dy, conv(x', f)> = <dx, x'>, and so for f.
                for other, gradient, image in (
                    (X[::-1], dx, convolved(X[::-1], F, **attrs)),
                    (F[::-1], df, convolved(X, F[::-1], **attrs)),
                ):
                    self.assertEqual(gradient.shape, other.shape)
                    wanted, got = np.sum(dy * image), np.sum(gradient * other)
                    self.assertAlmostEqual(got, wanted, delta=1e-4 * np.abs(dy * image).sum())

    def test_gradients_of_pooling(self) -> None:
        dy = arrays((2, 3, 3, 2))[0]
        seen = windows(X, 2, 2, 0, 2)
        first = seen.reshape(*dy.shape, 4).argmax(-1)
        largest, mean = np.zeros_like(X), np.zeros_like(X)
        for at in np.ndindex(dy.shape):
            n, c, row, column = at
            largest[n, c, 2 * row + first[at] // 2, 2 * column + first[at] % 2] += dy[at]
            mean[n, c, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] += dy[at] / 4
        for name, expected in (("max", largest), ("avg", mean)):
            pool = getattr(ad, f"{name}_pool2d_op")
            gradient = getattr(ad, f"{name}_pool2d_gradient_op")

            def build(x, dy, pool=pool, gradient=gradient):
                return gradient(pool(x, 2, 2, 0, 2), dy, x, 2, 2, 0, 2)

            np.testing.assert_allclose(run(build, X, dy)[0], expected, rtol=1e-5)

    def test_batch_normalization_and_its_statistics(self) -> None:
        x = ad.Variable("x")
        scale, bias = ad.Parameter(SCALE, "scale"), ad.Parameter(BIAS, "bias")
        y = ad.batch_normalization_op(x, scale, bias, momentum=0.5, eps=1e-3)
        result = ad.Executor([y]).run({x: X})[0]
        expected = normalized(X, (0, 2, 3), 1e-3) * channels(SCALE) + channels(BIAS)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
        ad.Executor([ad.group_op(*y.effects)]).run({x: X})
        np.testing.assert_allclose(
            y.running_mean.asnumpy(), 0.5 * X.mean((0, 2, 3)), rtol=1e-4, atol=1e-6
        )

    def test_dropout_keeps_about_as_many_as_it_says(self) -> None:
        x = np.ones((100, 100), np.float32)
        result = run(lambda x: ad.dropout_op(x, 0.8), x)[0]
        self.assertEqual(set(np.unique(result)), {0.0, np.float32(1.25)})
        self.assertAlmostEqual(float((result != 0).mean()), 0.8, delta=0.02)


class Kernels:
    """test_gpu_network.py has the numbers; here a call as scripts write it, by position alone."""

    ctx: Context

    def test_a_forward_pass_by_position(self) -> None:
        put = lambda value: ndarray.array(value, self.ctx)  # noqa: E731
        room = lambda *shape: ndarray.empty(shape, self.ctx)  # noqa: E731
        images, pooled = room(2, 4, 6, 6), room(2, 4, 3, 3)
        gpu_op.conv2d(put(X), put(F), images, 1, 1)
        gpu_op.leaky_relu(images, 0.1, images)
        gpu_op.max_pooling2d(images, 2, 2, pooled, 0, 2)
        y = convolved(X, F, 1)
        y = windows(np.where(y > 0, y, 0.1 * y), 2, 2, 0, 2).max((4, 5))
        np.testing.assert_allclose(pooled.asnumpy(), y, rtol=1e-4, atol=1e-5)
        gpu_op.average_pooling2d(images, 6, 6, means := room(2, 4, 1, 1), 0, 1)
        np.testing.assert_allclose(
            means.asnumpy(), images.asnumpy().mean((2, 3), keepdims=True), rtol=1e-4, atol=1e-5
        )


CpuKernels, GpuKernels = on_native_devices(Kernels)

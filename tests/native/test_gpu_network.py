"""The network kernels of gpu_op as functions on arrays, against the operators on numpy."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import gpu_op, ndarray
from dlsys.errors import NotApplicableError, ShapeError
from dlsys.ops.conv import convolution, pooling
from dlsys.ops.norm import batch_norm
from dlsys.runtime.device import Context
from dlsys.settings import settings
from support.devices import on_native_devices

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.uniform(-2, 2, shape).astype(np.float32)


def graph(build: Any, *values: np.ndarray) -> list[np.ndarray]:
    """The value of build(x, …) and, after it, the gradients of Σ value · dy; dy is the last."""
    inputs = [ad.Variable(f"x{k}") for k in range(len(values))]
    node = build(*inputs[:-1])
    total = ad.sum_op(node * inputs[-1])
    nodes = [node, *ad.gradients(total, inputs[:-1])]
    return ad.Executor(nodes).run({x: value.astype(np.float64) for x, value in zip(inputs, values)})


class Network:
    ctx: Context

    def put(self, *values: np.ndarray) -> list[ndarray.NDArray]:
        return [ndarray.array(value, self.ctx) for value in values]

    def room(self, *shape: int) -> ndarray.NDArray:
        return ndarray.array(np.full(shape, np.nan, np.float32), self.ctx)

    def close(self, array: ndarray.NDArray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(array.asnumpy(), expected, rtol=1e-4, atol=1e-4)

    def test_convolution(self) -> None:
        for padding, stride in ((0, 1), (2, 1), ((1, 0), (2, 3))):
            x, f = floats(2, 3, 8, 9), floats(4, 3, 3, 2)
            build = lambda x, f, p=padding, s=stride: convolution.conv2d_op(x, f, p, s)  # noqa: E731
            xs, fs = ad.Variable("x", x.shape, "float32"), ad.Variable("f", f.shape, "float32")
            shape = build(xs, fs).spec.shape
            dy = floats(*shape)
            y, dx, df = graph(build, x, f, dy)
            x_, f_, dy_ = self.put(x, f, dy)
            y_, dx_, df_ = self.room(*shape), self.room(*x.shape), self.room(*f.shape)
            gpu_op.conv2d(x_, f_, y_, padding, stride)
            gpu_op.conv2d_gradient_of_data(f_, dy_, dx_, padding, stride)
            gpu_op.conv2d_gradient_of_filter(x_, dy_, df_, padding, stride)
            for array, expected in ((y_, y), (dx_, dx), (df_, df)):
                self.close(array, expected)

    def test_convolution_by_a_rung(self) -> None:
        x, f, dy = floats(2, 3, 7, 6), floats(4, 3, 3, 3), floats(2, 4, 7, 6)
        wanted = graph(lambda x, f: convolution.conv2d_op(x, f, 1, 1), x, f, dy)
        x_, f_, dy_ = self.put(x, f, dy)
        calls = {
            gpu_op.conv2d: (x_, f_),
            gpu_op.conv2d_gradient_of_data: (f_, dy_),
            gpu_op.conv2d_gradient_of_filter: (x_, dy_),
        }
        for rung in ("naive", "im2col", "winograd 4x4", "implicit", "auto", ""):
            for (call, given), expected in zip(calls.items(), wanted):
                with self.subTest(rung=rung, call=call.__name__):
                    result = self.room(*expected.shape)
                    call(*given, result, 1, 1, algo=rung)
                    self.close(result, expected)
        for rung, told in (("tiled", "no rung 'tiled' on"), ("depthwise", "depthwise")):
            with self.subTest(rung=rung), self.assertRaisesRegex(NotApplicableError, told):
                gpu_op.conv2d(x_, f_, self.room(*dy.shape), 1, 1, algo=rung)
        with mock.patch.object(settings, "conv", "tiled"):
            with self.assertRaisesRegex(NotApplicableError, "no rung 'tiled'.*use auto, naive"):
                gpu_op.conv2d(x_, f_, self.room(*dy.shape), 1, 1)

    def test_pooling(self) -> None:
        for padding, stride in ((0, 1), (1, 2), ((0, 1), (2, 1))):
            x = floats(2, 3, 7, 8)
            for name in ("max", "avg"):
                op = getattr(pooling, f"{name}_pool2d_op")
                build = lambda x, op=op, p=padding, s=stride: op(x, 3, 2, p, s)  # noqa: E731
                dy = floats(*build(ad.Variable("x", x.shape, "float32")).spec.shape)
                y, dx = graph(build, x, dy)
                x_, dy_ = self.put(x, dy)
                y_, dx_ = self.room(*dy.shape), self.room(*x.shape)
                if name == "max":
                    gpu_op.max_pooling2d(x_, 3, 2, y_, padding, stride)
                    gpu_op.max_pooling2d_gradient(x_, dy_, 3, 2, dx_, padding, stride)
                else:
                    gpu_op.average_pooling2d(x_, 3, 2, y_, padding, stride)
                    gpu_op.average_pooling2d_gradient(dy_, 3, 2, dx_, padding, stride)
                self.close(y_, y)
                self.close(dx_, dx)

    def test_batch_normalization(self) -> None:
        x, scale, bias, dy = floats(4, 3, 5, 2), floats(3), floats(3), floats(4, 3, 5, 2)
        expected = graph(batch_norm.batch_normalization, x, scale, bias, dy)
        x_, scale_, bias_, dy_ = self.put(x, scale, bias, dy)
        y, dx, mean, variance, dscale, dbias = (
            self.room(*shape) for shape in (x.shape, x.shape, (3,), (3,), (3,), (3,))
        )
        gpu_op.batch_normalization(x_, scale_, bias_, y, mean, variance)
        gpu_op.batch_normalization_gradient(dy_, x_, scale_, mean, variance, dx, dscale, dbias)
        for array, wanted in zip((y, dx, dscale, dbias), expected):
            self.close(array, wanted)
        self.close(mean, x.mean(axis=(0, 2, 3)))

    def test_activations_and_dropout(self) -> None:
        x = floats(50, 40)
        x_, y = *self.put(x), self.room(50, 40)
        for call, expected in (
            (lambda: gpu_op.leaky_relu(x_, 0.1, y), np.where(x > 0, x, 0.1 * x)),
            (lambda: gpu_op.sigmoid(x_, y), 1 / (1 + np.exp(-x))),
            (lambda: gpu_op.tanh(x_, y), np.tanh(x)),
        ):
            call()
            self.close(y, expected)
        gpu_op.dropout(x_, 0.25, y, seed=3)
        kept = y.asnumpy() != 0
        self.close(y, np.where(kept, 4 * x, 0))
        self.assertLess(abs(kept.mean() - 0.25), 0.06)
        gpu_op.dropout(x_, 0.25, y, seed=3, step=1)
        self.assertTrue(((y.asnumpy() != 0) != kept).any())

    def test_layout(self) -> None:
        a, b = floats(2, 3), floats(2, 5)
        a_, b_, y = *self.put(a, b), self.room(2, 8)
        gpu_op.concat(a_, b_, y, axis=1)
        self.close(y, np.hstack([a, b]))
        y, pads = self.room(3, 6), ((1, 0), (2, 1))
        gpu_op.pad(a_, y, pads, constant_values=7)
        self.close(y, np.pad(a, pads, constant_values=7))
        y = self.room(1, 4)
        gpu_op.slice(b_, y, (1, 1))
        self.close(y, b[1:, 1:])

    def test_updates(self) -> None:
        p, g, m, v = floats(9), floats(9), floats(9), np.abs(floats(9))
        p_, g_, m_, v_ = self.put(p, g, m, v)
        gpu_op.sgd_update(p_, g_, 0.5)
        p = p - 0.5 * g
        self.close(p_, p)
        gpu_op.adam_update(p_, g_, m_, v_, 0.1, step=3)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        self.close(p_, p - 0.1 * (m / (1 - 0.9**3)) / (np.sqrt(v / (1 - 0.999**3)) + 1e-8))
        self.close(m_, m)
        self.close(v_, v)

    def test_refusals(self) -> None:
        x, f, y = self.put(floats(2, 3, 5, 5), floats(4, 3, 3, 3), floats(2, 4, 3, 3))
        few, wide = self.put(floats(4, 2, 3, 3), floats(4, 3, 9, 3))
        refusals = {
            r"3 channels in 1 group\(s\) do not fit a filter of 2": lambda: gpu_op.conv2d(
                x, few, y
            ),
            r"expected \(2, 4, 5, 5\)": lambda: gpu_op.conv2d(x, f, y, padding=1),
            r"window \(9, 3\) is larger than the image \(5, 5\)": lambda: gpu_op.conv2d(x, wide, y),
            r"stride": lambda: gpu_op.conv2d(x, f, y, stride=0),
            r"padding": lambda: gpu_op.conv2d(x, f, y, -1),
            r"must be below the window": lambda: gpu_op.max_pooling2d(x, 3, 3, y, 3),
            r"expected 0 < keep_prob <= 1": lambda: gpu_op.dropout(x, 0, x),
            r"axis 4 does not fit": lambda: gpu_op.concat(x, x, y, axis=4),
            r"4 positions from 0 on do not lie in axis 1": lambda: gpu_op.slice(x, y, (0, 0, 0, 0)),
            r"has 4 axes and paddings are given for 1": lambda: gpu_op.pad(x, y, ((1, 1),)),
            r"the mode here is constant": lambda: gpu_op.pad(x, y, ((0, 0),) * 4, "edge"),
            r"steps are counted from 1": lambda: gpu_op.adam_update(x, x, x, x, 0.1, 0),
            r"the output is also an input": lambda: gpu_op.conv2d(x, f, x, 1),
        }
        for message, call in refusals.items():
            with self.assertRaisesRegex(ShapeError, message):
                call()
        with self.assertRaisesRegex(TypeError, "expected an NDArray, got ndarray"):
            gpu_op.sigmoid(np.ones(3), y)


CpuNetwork, GpuNetwork = on_native_devices(Network)

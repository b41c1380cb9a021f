"""Pooling, the largest or the mean element of each window of images (N, C, H, W): its
operators, and the functions and older names under which people call them.

Max-pooling gives values and where they were found, as an int32 index into H×W; a tie goes to the
first in row-major order, on every device, and NaN counts as larger than every number. Its gradient
needs the indices only, and is itself differentiable: reading at the indices and adding there are
each other's gradients, as are mean pooling and its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arguments.kinds import Bool, Int, Kind, Rung
from ...arguments.signature import Signature, declared
from ...graph.node import Node, Op
from ...graph.spec import Spec, describe, floating
from ...rungs import POOL
from ..reduce import mean_op, sum_op
from .geometry import IntPair, Padding, Pair, Windows, check_images, in_floats, slide

__all__ = [
    "avg_pool2d", "avg_pool2d_gradient_op", "avg_pool2d_op", "global_avg_pool2d",
    "global_max_pool2d", "max_pool2d", "max_pool2d_gradient_op", "max_pool2d_op", "max_pool_op",
]  # fmt: skip

INT32 = np.dtype(np.int32)
UINT8 = np.dtype(np.uint8)
BOOL = np.dtype(np.bool_)


SHARED: dict[str, Kind] = dict(
    window=IntPair(None, low=1),
    stride=IntPair(None, low=1),
    padding=Padding(0),
    ceil_mode=Bool(False),
    algo=Rung(POOL),
)
DILATED: dict[str, Kind] = SHARED | {"dilation": IntPair(1, low=1)}
COUNTED: dict[str, Kind] = SHARED | {"count_include_pad": Bool(True, omitted=True)}


class PoolOp(Op):
    """Base of the operators of pooling: window (None: all of H×W), stride, padding, ceil_mode, algo
    (the rung, which gradients inherit) and, for the maximum alone, dilation.
    """

    autocast = "follow"
    ladder = POOL

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        if attrs["stride"] is None:
            attrs["stride"] = attrs["window"] or (1, 1)
        return Node(self, inputs, attrs, name)

    def windows(self, node: Node, image: tuple[int, ...]) -> Windows:
        """The windows over an image; each meets at least one element."""
        size = node.attrs["window"] or image
        windows = slide(node, (image[0], image[1]), size, node.attrs["ceil_mode"])
        for extent, around in zip(windows.extents, windows.padding):
            if max(around) >= extent:
                raise node.error(
                    f"padding {node.attrs['padding']} must be below the window {windows.extents}, "
                    "else a window would see padding alone"
                )
        if windows.dilation != (1, 1) and windows.blind:
            raise node.error(
                f"a window {size} with dilation {windows.dilation} and padding "
                f"{node.attrs['padding']} sees nothing of the image {windows.image}"
            )
        return windows

    def pooled(self, node: Node, x: Spec) -> Spec:
        """The spec of the pooled images."""
        check_images(node, 0, x)
        shape = (*x.shape[:2], *self.windows(node, x.shape[2:]).out)
        return Spec(shape, floating(x.dtype), x.declared)

    def simplify(self, node: Node) -> Node | None:
        """Integers become floats, but indices."""
        spec = node.spec if self.outputs == 1 else node.spec[0]
        return in_floats(node, spec.dtype, free=(1,) if self.any_dtype else ())

    def attributes(self, node: Node, windows: Windows | None = None) -> dict[str, Any]:
        """The attributes for an operator over the same windows, as extents where they are known."""
        attrs = {k: v for k, v in node.attrs.items() if k != "image"}
        if windows is not None:
            attrs.update(window=windows.size, padding=windows.padding, image=windows.image)
        return attrs

    def check_result(self, node: Node, x: Spec, dy: Spec) -> Windows:
        """Refuses a dy that is not of the pooled shape."""
        check_images(node, len(node.inputs) - 1, x)
        windows = self.windows(node, x.shape[2:])
        if dy.shape != (*x.shape[:2], *windows.out):
            expected = (*x.shape[:2], *windows.out)
            raise node.error(f"pooling gives {expected}, its gradient is {dy.shape}")
        return windows

    def spec_of_gradient(self, node: Node, *specs: Spec) -> Spec:
        """The spec of images (H, W), whose pooling gives those of the first input."""
        windows = self.windows(node, node.attrs["image"])
        if specs[0].shape[2:] != windows.out:
            raise node.error(f"expected images {windows.out}, got {describe(node, specs)}")
        shape = (*specs[0].shape[:2], *node.attrs["image"])
        return Spec(shape, floating(specs[0].dtype), specs[0].declared)


# ---- max ----


class MaxPoolOp(PoolOp):
    """x (N, C, H, W) → the largest element of each window and its index, both (N, C, oH, oW)."""

    name = kernel = "max_pool2d"
    vocabulary = False
    signature = Signature("x", "*", **DILATED)
    outputs = 2

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, ...]:
        values = self.pooled(node, specs[0])
        return values, values._replace(dtype=INT32)

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        count = window_size(node, inputs[0].shape[2:])
        number = outputs[0]._replace(dtype=UINT8 if count < 256 else INT32)
        indices = outputs[0]._replace(dtype=np.dtype(np.intp))
        return [outputs[0]._replace(dtype=BOOL), number, number, indices]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, mask, rank, found, indices, y, argmax = arrays
        windows = self.windows(node, x.shape[2:])
        covers_all = windows.size == windows.image and windows.before == (0, 0)
        if covers_all and windows.out == (1, 1) and x.size:
            images = x.reshape(y.size, -1)
            first = np.argmax(images, axis=1)  # of several, or the first NaN
            np.copyto(argmax.reshape(-1), first, casting="same_kind")
            y.reshape(-1)[:] = images[np.arange(y.size), first]
            return
        y.fill(-np.inf)
        for to, at in windows.reads():
            np.maximum(y[to], x[at], out=y[to])  # NaN wins
        # Kernel offsets count down, so that the first of several has the largest rank.
        found.fill(0)
        with_nan, last = np.isnan(y, out=mask).any(), window_size(node, windows.image)
        for k, (to, at) in enumerate(windows.reads()):
            same = np.equal(x[at], y[to], out=mask[to])
            if with_nan:
                np.logical_or(same, np.isnan(x[at]), out=same)
            this = np.multiply(same, last - k, out=rank[to], dtype=rank.dtype)
            np.maximum(found[to], this, out=found[to])
        np.subtract(found, 1, out=indices)
        np.take(flat_offsets(windows)[::-1], indices, out=argmax, mode="clip")
        np.add(argmax, corners(windows), out=argmax)

    def scalars(self, node: Node) -> tuple[Any, ...]:
        return (self.windows(node, node.inputs[0].spec.shape[2:]).argument,)

    def gradient(self, node: Node, output_grad: Any) -> list[Node | None]:
        if output_grad[0] is None:
            return [None]
        attrs = self.attributes(node)
        return [max_pool_gradient_like_op(output_grad[0], node[1], node.inputs[0], **attrs)]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return inputs[0].size


class MaxPoolGradientOp(PoolOp):
    """Adds each dy (N, C, oH, oW) to where its maximum was found: (N, C, H, W)."""

    name = kernel = "max_pool2d_gradient"
    signature = Signature("dy", "argmax", "*", **DILATED, image=IntPair())
    any_dtype = (1,)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_indices(node, specs[0], specs[1])
        return self.spec_of_gradient(node, *specs)

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        if not self.windows(node, node.attrs["image"]).overlap:
            return [inputs[1]._replace(dtype=np.dtype(np.intp))]
        return [inputs[0]._replace(dtype=BOOL), Spec(node.attrs["image"], INT32)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        (dy, argmax), scratch, dx = arrays[:2], arrays[2:-1], arrays[-1]
        dx.fill(0)
        if len(scratch) == 1:
            np.put(dx, flat_indices(dx, argmax, scratch[0]), dy, mode="clip")
            return
        mine, indices = scratch
        np.copyto(indices, np.arange(indices.size, dtype=INT32).reshape(indices.shape))
        for to, at in self.windows(node, node.attrs["image"]).reads():
            mask, into = mine[to], dx[at]
            np.equal(argmax[to], indices[at], out=mask)
            np.add(into, dy[to], out=into, where=mask)

    def scalars(self, node: Node) -> tuple[Any, ...]:
        return (self.windows(node, node.attrs["image"]).argument,)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [max_pool_read_op(output_grad, node.inputs[1], **self.attributes(node)), None]


class MaxPoolGradientLikeOp(PoolOp):
    """The gradient of max-pooling x: (dy, argmax, x) → (N, C, H, W)."""

    name = "max_pool2d_gradient_like"
    signature = Signature("dy", "argmax", "x", "*", **DILATED)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_indices(node, specs[0], specs[1])
        self.check_result(node, specs[2], specs[0])
        return Spec(specs[2].shape, floating(specs[0].dtype), specs[0].declared)

    def simplify(self, node: Node) -> Node:
        dy, argmax, x = node.inputs
        windows = self.windows(node, x.spec.shape[2:])
        return max_pool_gradient_op(dy, argmax, **self.attributes(node, windows))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        read = max_pool_read_op(output_grad, node.inputs[1], **self.attributes(node))
        return [read, None, None]


class MaxPoolReadOp(PoolOp):
    """x (N, C, H, W) at the indices that a pooling of its windows found: (N, C, oH, oW)."""

    name = kernel = "max_pool2d_read"
    signature = Signature("x", "argmax", "*", **DILATED)
    any_dtype = (1,)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        pooled = self.pooled(node, specs[0])
        if specs[1].shape != pooled.shape:
            raise node.error(f"expected indices {pooled.shape}, got {describe(node, specs)}")
        return pooled

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [Spec(inputs[1].shape, np.dtype(np.intp))]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, argmax, flat, y = arrays
        flat_indices(x, argmax, flat)
        if y.size:
            np.take(x.reshape(-1), flat, out=y, mode="clip")

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, argmax = node.inputs
        attrs = self.attributes(node)
        return [max_pool_gradient_like_op(output_grad, argmax, x, **attrs), None]


# ---- mean ----


class AvgPoolOp(PoolOp):
    """x (N, C, H, W) → the mean of each window, (N, C, oH, oW)."""

    name = kernel = "avg_pool2d"
    signature = Signature("x", "*", **COUNTED)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        return self.pooled(node, specs[0])

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, y = arrays
        windows = self.windows(node, x.shape[2:])
        y.fill(0)
        for to, at in windows.reads():
            np.add(y[to], x[at], out=y[to])
        count = divisors(windows, node.attrs.get("count_include_pad", True))
        np.divide(y, count.astype(y.dtype), out=y)

    def scalars(self, node: Node) -> tuple[Any, ...]:
        return averages(node, self.windows(node, node.inputs[0].spec.shape[2:]))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [avg_pool_gradient_like_op(output_grad, node.inputs[0], **self.attributes(node))]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return inputs[0].size


class AvgPoolGradientOp(PoolOp):
    """Spreads each dy (N, C, oH, oW) evenly over its window: (N, C, H, W)."""

    name = kernel = "avg_pool2d_gradient"
    signature = Signature("dy", "*", **COUNTED, image=IntPair())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_images(node, 0, specs[0])
        return self.spec_of_gradient(node, *specs)

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [inputs[0]._replace(dtype=outputs[0].dtype)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        dy, share, dx = arrays
        windows = self.windows(node, node.attrs["image"])
        count = divisors(windows, node.attrs.get("count_include_pad", True))
        np.divide(dy, count.astype(dy.dtype), out=share)
        dx.fill(0)
        for to, at in windows.reads():
            np.add(dx[at], share[to], out=dx[at])

    def scalars(self, node: Node) -> tuple[Any, ...]:
        return averages(node, self.windows(node, node.attrs["image"]))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [avg_pool_op(output_grad, **self.attributes(node))]


class AvgPoolGradientLikeOp(PoolOp):
    """The gradient of mean pooling x: (dy, x) → (N, C, H, W)."""

    name = "avg_pool2d_gradient_like"
    signature = Signature("dy", "x", "*", **COUNTED)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        self.check_result(node, specs[1], specs[0])
        return Spec(specs[1].shape, floating(specs[0].dtype), specs[0].declared)

    def simplify(self, node: Node) -> Node:
        dy, x = node.inputs
        windows = self.windows(node, x.spec.shape[2:])
        return avg_pool_gradient_op(dy, **self.attributes(node, windows))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [avg_pool_op(output_grad, **self.attributes(node)), None]


max_pool_op = MaxPoolOp()
max_pool_gradient_op = MaxPoolGradientOp()
max_pool_gradient_like_op = MaxPoolGradientLikeOp()
max_pool_read_op = MaxPoolReadOp()
avg_pool_op = AvgPoolOp()
avg_pool_gradient_op = AvgPoolGradientOp()
avg_pool_gradient_like_op = AvgPoolGradientLikeOp()


def check_indices(node: Node, dy: Spec, argmax: Spec) -> None:
    """Refuses indices that are not of the gradient's shape."""
    check_images(node, 0, dy)
    if dy.shape != argmax.shape:
        raise node.error(
            f"expected one index for each gradient, got {describe(node, (dy, argmax))}"
        )


def averages(node: Node, windows: Windows) -> tuple[Any, int]:
    """The arguments of the native kernels of mean pooling."""
    return windows.argument, int(node.attrs.get("count_include_pad", True))


# ---- numpy ----


def window_size(node: Node, image: tuple[int, ...]) -> int:
    """The number of elements of a window."""
    height, width = node.attrs["window"] or image
    return height * width


def corners(windows: Windows) -> np.ndarray:
    """The index of each window's first element, (oH, oW): before the image with padding."""
    down, across = (
        np.arange(n, dtype=INT32) * s - b
        for n, s, b in zip(windows.out, windows.stride, windows.before)
    )
    return down[:, None] * windows.image[1] + across


def flat_offsets(windows: Windows) -> np.ndarray:
    """The flat distance of each kernel offset from the window's corner."""
    down, across = (np.arange(n, dtype=INT32) * d for n, d in zip(windows.size, windows.dilation))
    return (down[:, None] * windows.image[1] + across).reshape(-1)


def flat_indices(x: np.ndarray, argmax: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """Indices into H×W as indices into all of x (N, C, H, W), written to `flat`."""
    firsts = np.arange(x.shape[0] * x.shape[1], dtype=flat.dtype) * (x.shape[2] * x.shape[3])
    return np.add(argmax, firsts.reshape(*x.shape[:2], 1, 1), out=flat)


def divisors(windows: Windows, with_padding: bool) -> np.ndarray:
    """By how many elements each window divides, (oH, oW)."""
    counts = []
    for axis in (0, 1):
        start = np.arange(windows.out[axis]) * windows.stride[axis] - windows.before[axis]
        stop = start + windows.size[axis]
        stop = np.minimum(stop, windows.image[axis] + (windows.after[axis] if with_padding else 0))
        counts.append(stop - (start if with_padding else np.maximum(start, 0)))
    return counts[0][:, None] * counts[1]


OLD: dict[str, Kind] = dict(  # attributes of the operators of older scripts
    kernel_H=Int(low=1), kernel_W=Int(low=1), padding=Padding(), stride=IntPair(low=1)
)


@declared(**(DILATED | {"window": IntPair(low=1)}))
def max_pool2d(
    x: Node,
    window: int | Pair,
    stride: int | Pair | None = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    dilation: int | Pair = 1,
    algo: str | None = None,
    name: str | None = None,
) -> Node:
    """The largest element of each window of x (N, C, H, W): (N, C, oH, oW).

    oH = (H + padding before and after - extent) // stride + 1, where a window extends over
    dilation · (window - 1) + 1 elements and sees every dilation-th of them; `ceil_mode` rounds up,
    as long as the last window begins on the image or the padding before it. stride: that of the
    window by default. padding: as of `conv2d`, below the extent; it never wins. A tie goes to the
    first element in row-major order, and NaN counts as larger than every number. For the indices
    too, call `max_pool_op`. algo: "cudnn" computes it and its gradient by cuDNN on a GPU; without
    it DLSYS_POOL counts. Raises ShapeError for attributes or shapes that do not fit.
    """
    pooled = max_pool_op(
        x, window=window, stride=stride, padding=padding, ceil_mode=ceil_mode, dilation=dilation,
        algo=algo, name=name,
    )  # fmt: skip
    return pooled[0]


@declared(**(COUNTED | {"window": IntPair(low=1)}))
def avg_pool2d(
    x: Node,
    window: int | Pair,
    stride: int | Pair | None = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    algo: str | None = None,
    name: str | None = None,
) -> Node:
    """The mean of each window of x (N, C, H, W): (N, C, oH, oW), sizes as of `max_pool2d`.

    `count_include_pad` counts zeros of the padding too; what `ceil_mode` adds behind it is never
    counted. algo: as of `max_pool2d`. Raises ShapeError for attributes or shapes that do not fit.
    """
    return avg_pool_op(
        x, window=window, stride=stride, padding=padding, ceil_mode=ceil_mode,
        count_include_pad=count_include_pad, algo=algo, name=name,
    )  # fmt: skip


@declared(keepdims=Bool())
def global_max_pool2d(x: Node, keepdims: bool = False) -> Node:
    """The largest element over H×W of x (N, C, H, W): (N, C), or (N, C, 1, 1).

    keepdims: keeps the axes that go, with extent 1.
    """
    largest = max_pool_op(x)[0]
    return largest if keepdims else sum_op(largest, axis=(2, 3))  # over extents of 1: a view


@declared(keepdims=Bool())
def global_avg_pool2d(x: Node, keepdims: bool = False) -> Node:
    """The mean over H×W of x (N, C, H, W): (N, C), or (N, C, 1, 1).

    keepdims: keeps the axes that go, with extent 1.
    """
    return mean_op(x, axis=(2, 3), keepdims=keepdims)


@declared(**OLD)
def max_pool2d_op(
    A: Node, kernel_H: int, kernel_W: int, padding: Any = 0, stride: int | Pair = 1
) -> Node:
    """`max_pool2d` of A (N, C, H, W) with windows (kernel_H, kernel_W)."""
    return max_pool2d(A, (kernel_H, kernel_W), stride, padding)


@declared(**OLD)
def avg_pool2d_op(
    A: Node, kernel_H: int, kernel_W: int, padding: Any = 0, stride: int | Pair = 1
) -> Node:
    """`avg_pool2d` of A (N, C, H, W) with windows (kernel_H, kernel_W), padding counted.

    stride: one number or a pair.
    """
    return avg_pool2d(A, (kernel_H, kernel_W), stride, padding)


@declared(**OLD)
def max_pool2d_gradient_op(
    y: Node, dy: Node, x: Node, kernel_H: int, kernel_W: int, padding: Any = 0, stride: Any = 1
) -> Node:
    """The gradient of `max_pool2d_op` for x; y, its result, is not needed.

    dy: the gradient of y. kernel_H, kernel_W, padding and stride: those of the pooling.
    """
    attrs: dict[str, Any] = dict(window=(kernel_H, kernel_W), stride=stride, padding=padding)
    return max_pool_gradient_like_op(dy, max_pool_op(x, **attrs)[1], x, **attrs)


@declared(**OLD)
def avg_pool2d_gradient_op(
    y: Node, dy: Node, x: Node, kernel_H: int, kernel_W: int, padding: Any = 0, stride: Any = 1
) -> Node:
    """The gradient of `avg_pool2d_op` for x; neither y, its result, nor the values of x matter.

    dy: the gradient of y. kernel_H, kernel_W, padding and stride: those of the pooling.
    """
    attrs: dict[str, Any] = dict(window=(kernel_H, kernel_W), stride=stride, padding=padding)
    return avg_pool_gradient_like_op(dy, x, count_include_pad=True, **attrs)

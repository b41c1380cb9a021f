"""Convolution: its operators, and the functions and older names under which people call them.
Images are in the layout (N, C, H, W), as in Dumoulin and Visin, "A guide to convolution arithmetic
for deep learning" (2016). As in all of deep learning it is a correlation: the filter is not
mirrored.

y[n, o, i, j] = Σ_{c, a, b} x[n, c, i·stride + a·dilation - padding, …] · f[o, c, a, b]

It is linear in x and in f, so three operators are a closed family under differentiation: the
convolution C(x, f), its gradient for the data D(f, dy) and its gradient for the filter F(x, dy).
Each gradient operator has a second form, `…_like`, that takes the size of its result from another
node; the plain one replaces it as soon as shapes are known.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arguments.kinds import Int, Kind, Rung, is_integer
from ...arguments.signature import Signature, declared
from ...errors import GraphError
from ...graph.lines import where
from ...graph.node import Node, Op
from ...graph.spec import Spec, describe, floating, promote
from ...rungs import CONV
from ..matmul import algorithm_number, precision_number
from ..movement import expand_dims_op, reshape_op, squeeze_op
from ..reduce import sum_op
from .algorithms import algorithm_of, filters, grouped
from .geometry import IntPair, Padding, Pair, Windows, check_images, in_floats, slide
from .im2col import (
    by_group,
    by_image,
    chunks,
    gather,
    im2col,
    im2col_workspace,
    images_at_once,
    is_pointwise,
    spec_of,
)

__all__ = [
    "conv1d", "conv2d", "conv2d_add_bias_op", "conv2d_gradient_of_data_op",
    "conv2d_gradient_of_filter_op", "conv2d_op", "conv_transpose2d",
]  # fmt: skip

SHARED: dict[str, Kind] = dict(  # the attributes that all of the family have
    stride=IntPair(1, low=1),
    padding=Padding(0),
    dilation=IntPair(1, low=1),
    groups=Int(1, low=1),
    algo=Rung(CONV),
)


class ConvolutionOp(Op):
    """Base of the operators of convolution: attributes, native arguments and dtypes."""

    has_precision = tunable = True
    autocast = "bf16"
    ladder = CONV
    tolerance = 1e-4  # as of products: a filter's gradient sums over every position of the batch

    def simplify(self, node: Node) -> Node | None:
        """Integers become floats; `same` and `valid` become extents."""
        return in_floats(node, node.spec.dtype)

    def scalars(self, node: Node) -> tuple[Any, ...]:
        windows = self.windows(node, *[x.spec for x in node.inputs])
        how = algorithm_number(node), precision_number(node)
        return windows.argument, node.attrs["groups"], *how

    def windows(self, node: Node, *specs: Spec) -> Windows:
        """The windows over the images of the data."""
        raise NotImplementedError


class Conv2dOp(ConvolutionOp):
    """x (N, C, H, W) convolved with f (O, C/groups, kH, kW): (N, O, oH, oW)."""

    name = kernel = "conv2d"
    signature = Signature("x", "f", "*", **SHARED)

    def windows(self, node: Node, *specs: Spec) -> Windows:
        return slide(node, specs[0].shape[2:], specs[1].shape[2:])

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_images(node, 0, specs[0])
        check_images(node, 1, specs[1], "a filter (O, C/groups, kH, kW)")
        check_groups(node, specs[0].shape[1], specs[1].shape[0])
        groups = node.attrs["groups"]
        if specs[0].shape[1] != specs[1].shape[1] * groups:
            raise node.error(
                f"{specs[0].shape[1]} channels in {groups} group(s) do not fit a filter of "
                f"{specs[1].shape[1]}: {describe(node, specs)}"
            )
        if len(specs) > 2 and specs[2].shape != specs[1].shape[:1]:
            raise node.error(
                f"expected one bias for each of {specs[1].shape[0]} filters, "
                f"got {describe(node, specs)}"
            )
        out = self.windows(node, *specs).out
        return result(node, specs, (specs[0].shape[0], specs[1].shape[0], *out))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        windows = self.windows(node, *inputs)
        if algorithm_of(node, windows) is not None:
            return []
        return im2col_workspace(windows, inputs[0], outputs[0].dtype)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, f, y = arrays[0], arrays[1], arrays[-1]
        windows, groups = self.windows(node, spec_of(x), spec_of(f)), node.attrs["groups"]
        algorithm = algorithm_of(node, windows)
        if algorithm is not None:
            algorithm.forward(windows, grouped(x, groups), filters(f, groups), grouped(y, groups))
        else:
            scratch = arrays[-2] if not is_pointwise(windows) else None
            convolve(x, f, windows, groups, scratch, y)
        if len(node.inputs) == 3:
            np.add(y, arrays[2][:, None, None], out=y)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, f = node.inputs[:2]
        return [
            data_gradient_like_op(f, output_grad, x, **shared(node)),
            filter_gradient_like_op(x, output_grad, f, **shared(node)),
        ]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 2 * output.size * (inputs[1].size // max(inputs[1].shape[0], 1))


def convolve(
    x: np.ndarray,
    f: np.ndarray,
    windows: Windows,
    groups: int,
    scratch: np.ndarray | None,
    y: np.ndarray,
) -> None:
    """y = the convolution of x by f, by im2col."""
    matrices = by_group(f, groups)
    for images, columns in im2col(x, windows, scratch):
        shape = (len(columns), groups, matrices.shape[2], windows.out[0] * windows.out[1])
        np.matmul(matrices, columns.reshape(shape), out=by_image(y[images], groups))


class Conv2dBiasOp(Conv2dOp):
    """A convolution that adds bias[o] to every element of channel o."""

    name = kernel = "conv2d_bias"
    signature = Signature("x", "f", "bias", "*", **SHARED)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [*super().gradient(node, output_grad), sum_op(output_grad, axis=(0, 2, 3))]


class DataGradientOp(ConvolutionOp):
    """D(f, dy): the gradient of a convolution for its data, which is also the transposed
    convolution of dy.

    f (O, C/groups, kH, kW) and dy (N, O, oH, oW) give (N, C, H, W); of the sizes H that a
    convolution takes to oH it is the smallest, plus `output_padding`, which is below the stride.
    """

    name = kernel = "conv2d_data_gradient"
    signature = Signature("f", "dy", "*", **SHARED, output_padding=IntPair(None, omitted=True))

    def windows(self, node: Node, *specs: Spec) -> Windows:
        f, dy = specs[0].shape, specs[1].shape
        stride, dilation = node.attrs["stride"], node.attrs["dilation"]
        padding, extra = node.attrs["padding"], node.attrs.get("output_padding", (0, 0))
        if padding == "same":
            raise node.error("padding 'same' leaves the size open, expected numbers or 'valid'")
        if any(e < 0 or e >= s for e, s in zip(extra, stride)):
            raise node.error(f"output_padding {extra} must be below the stride {stride}")
        image = []
        for axis in (0, 1):
            around = both_sides(padding, axis)
            extent = (f[2 + axis] - 1) * dilation[axis] + 1
            image.append((dy[2 + axis] - 1) * stride[axis] + extent - around + extra[axis])
        if min(image) < 1 or min(dy[2:]) < 1:
            raise node.error(
                f"padding {padding} leaves nothing of {describe(node, specs)} at stride {stride}"
            )
        return slide(node, (image[0], image[1]), f[2:])

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_images(node, 0, specs[0], "a filter (O, C/groups, kH, kW)")
        check_images(node, 1, specs[1], "(N, O, H, W)")
        check_groups(node, specs[0].shape[1] * node.attrs["groups"], specs[0].shape[0])
        if specs[0].shape[0] != specs[1].shape[1]:
            raise node.error(
                f"expected as many channels as filters have outputs, got {describe(node, specs)}"
            )
        channels = specs[0].shape[1] * node.attrs["groups"]
        image = self.windows(node, *specs).image
        return result(node, specs, (specs[1].shape[0], channels, *image))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        windows = self.windows(node, *inputs)
        if algorithm_of(node, windows) is not None:
            return []
        return im2col_workspace(windows, outputs[0], outputs[0].dtype)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        f, dy, dx = arrays[0], arrays[1], arrays[-1]
        windows, groups = self.windows(node, spec_of(f), spec_of(dy)), node.attrs["groups"]
        algorithm = algorithm_of(node, windows)
        if algorithm is not None:
            algorithm.data(windows, filters(f, groups), grouped(dy, groups), grouped(dx, groups))
            return
        matrices = by_group(f, groups).transpose(0, 2, 1)
        if is_pointwise(windows):
            np.matmul(matrices, by_image(dy, groups), out=by_image(dx, groups))
            return
        dx.fill(0)
        for images in chunks(len(dy), len(arrays[2])):
            columns = arrays[2][: images.stop - images.start]
            shape = (len(columns), groups, matrices.shape[1], windows.out[0] * windows.out[1])
            np.matmul(matrices, by_image(dy[images], groups), out=columns.reshape(shape))
            for at_offset, positions, seen in windows.kernel_offsets():
                at, column = (..., *seen), (slice(None), slice(None), *at_offset, *positions)
                into = dx[images][at]
                np.add(into, columns[column], out=into)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        f, dy, *like = node.inputs
        attrs = shared(node)
        return [
            filter_gradient_like_op(output_grad, dy, f, **attrs),
            convolution_op(output_grad, f, **attrs),
            *[None] * len(like),
        ]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 2 * inputs[1].size * (inputs[0].size // max(inputs[0].shape[0], 1))


class DataGradientLikeOp(ConvolutionOp):
    """D(f, dy) in the shape of the convolution's data x: (f, dy, x) → (N, C, H, W)."""

    name = "conv2d_data_gradient_like"
    signature = Signature("f", "dy", "x", "*", **SHARED)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        f, dy, x = specs
        check_output(node, x, f, dy)
        return result(node, specs[:2], x.shape)

    def simplify(self, node: Node) -> Node:
        f, dy, x = node.inputs
        windows = slide(node, x.spec.shape[2:], f.spec.shape[2:])
        sizes = zip(windows.image, windows.before, windows.after, windows.size, windows.dilation)
        room = [n + a + b - (k - 1) * d - 1 for n, a, b, k, d in sizes]
        extra = tuple(r % s for r, s in zip(room, windows.stride))
        attrs = shared(node) | {"padding": windows.padding, "output_padding": extra}
        return data_gradient_op(f, dy, **attrs)

    gradient = DataGradientOp.gradient


class FilterGradientOp(ConvolutionOp):
    """F(x, dy): the gradient of a convolution for its filter.

    x (N, C, H, W) and dy (N, O, oH, oW) give (O, C/groups, kH, kW), where (kH, kW) is the attribute
    `size`, or without it the largest filter that takes H to oH.
    """

    name = kernel = "conv2d_filter_gradient"
    signature = Signature("x", "dy", "*", **SHARED, size=IntPair(None, low=1, omitted=True))

    def windows(self, node: Node, *specs: Spec) -> Windows:
        x, dy = specs[0].shape, specs[1].shape
        size = node.attrs.get("size") or self._largest(node, x, dy)
        windows = slide(node, x[2:], size)
        if windows.out != dy[2:]:
            raise node.error(
                f"a filter {size} at stride {windows.stride} gives images {windows.out}: "
                f"{describe(node, specs)}"
            )
        return windows

    def _largest(self, node: Node, x: tuple[int, ...], dy: tuple[int, ...]) -> Pair:
        padding, stride = node.attrs["padding"], node.attrs["stride"]
        if padding == "same":
            raise node.error("padding 'same' leaves the filter's size open, expected numbers")
        size = []
        for axis in (0, 1):
            extent = x[2 + axis] + both_sides(padding, axis) - (dy[2 + axis] - 1) * stride[axis]
            size.append((extent - 1) // node.attrs["dilation"][axis] + 1)
        if min(size) < 1:
            raise node.error(f"no filter at stride {stride} takes images {x[2:]} to {dy[2:]}")
        return size[0], size[1]

    def infer(self, node: Node, *specs: Spec) -> Spec:
        x, dy = specs
        check_images(node, 0, x)
        check_images(node, 1, dy, "(N, O, oH, oW)")
        check_groups(node, x.shape[1], dy.shape[1])
        if x.shape[0] != dy.shape[0]:
            raise node.error(f"expected as many images in both, got {describe(node, specs)}")
        size = self.windows(node, *specs).size
        shape = (dy.shape[1], x.shape[1] // node.attrs["groups"], *size)
        return result(node, specs, shape)

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        windows = self.windows(node, *inputs)
        if algorithm_of(node, windows) is not None:
            return []
        (n, c), o = inputs[0].shape[:2], outputs[0].shape[0]
        positions = windows.out[0] * windows.out[1]
        dtype = outputs[0].dtype
        rows = c * windows.size[0] * windows.size[1]
        count = images_at_once(n, rows * positions, dtype)
        flat = [Spec((extent * count * positions,), dtype) for extent in (rows, o)]
        return [*flat, outputs[0]]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, dy, df = arrays[0], arrays[1], arrays[-1]
        windows, groups = self.windows(node, spec_of(x), spec_of(dy)), node.attrs["groups"]
        algorithm = algorithm_of(node, windows)
        if algorithm is not None:
            algorithm.filter(windows, grouped(x, groups), grouped(dy, groups), filters(df, groups))
            return
        columns, gradients, part = arrays[2:-1]
        positions = windows.out[0] * windows.out[1]
        (n, c), o = x.shape[:2], dy.shape[1]
        df.fill(0)
        sums = by_group(part, groups)
        for images in chunks(n, gradients.size // max(o * positions, 1)):
            count = images.stop - images.start
            across = gradients[: o * count * positions].reshape(o, count, *windows.out)
            np.copyto(across, dy[images].transpose(1, 0, 2, 3))
            matrix = columns[: c * windows.size[0] * windows.size[1] * count * positions]
            matrix = matrix.reshape(c, *windows.size, count, *windows.out)
            gather(x[images].transpose(1, 0, 2, 3), matrix.transpose(0, 3, 1, 2, 4, 5), windows)
            left = across.reshape(groups, o // groups, count * positions)
            right = matrix.reshape(groups, sums.shape[2], count * positions)
            np.matmul(left, right.transpose(0, 2, 1), out=sums)
            np.add(df, part, out=df)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        x, dy, *like = node.inputs
        attrs = shared(node)
        return [
            data_gradient_like_op(output_grad, dy, x, **attrs),
            convolution_op(x, output_grad, **attrs),
            *[None] * len(like),
        ]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 2 * inputs[1].size * (output.size // max(output.shape[0], 1))


class FilterGradientLikeOp(ConvolutionOp):
    """F(x, dy) in the shape of the filter f: (x, dy, f) → (O, C/groups, kH, kW)."""

    name = "conv2d_filter_gradient_like"
    signature = Signature("x", "dy", "f", "*", **SHARED)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        x, dy, f = specs
        check_output(node, x, f, dy)
        return result(node, specs[:2], f.shape)

    def simplify(self, node: Node) -> Node:
        x, dy, f = node.inputs
        padding = slide(node, x.spec.shape[2:], f.spec.shape[2:]).padding
        attrs = shared(node) | {"padding": padding, "size": f.spec.shape[2:]}
        return filter_gradient_op(x, dy, **attrs)

    gradient = FilterGradientOp.gradient


convolution_op = Conv2dOp()
convolution_bias_op = Conv2dBiasOp()
data_gradient_op = DataGradientOp()
data_gradient_like_op = DataGradientLikeOp()
filter_gradient_op = FilterGradientOp()
filter_gradient_like_op = FilterGradientLikeOp()


# ---- shapes ----


def result(node: Node, specs: tuple[Spec, ...], shape: tuple[int, ...]) -> Spec:
    """A floating result of that shape."""
    return Spec(shape, floating(promote(node, *specs)), any(spec.declared for spec in specs))


def check_groups(node: Node, channels: int, filters: int) -> None:
    """Refuses groups that do not divide the channels or the filters."""
    groups = node.attrs["groups"]
    for count, what in ((channels, "channels"), (filters, "filters")):
        if count % groups:
            raise node.error(f"groups={groups} do not divide {count} {what}")


def check_output(node: Node, x: Spec, f: Spec, dy: Spec) -> None:
    """Refuses a dy that is not of the convolution's shape."""
    expected = convolution_op.infer(node, x, f).shape
    if dy.shape != expected:
        raise node.error(f"the convolution gives {expected}, its gradient is {dy.shape}")


def both_sides(padding: Any, axis: int) -> int:
    """The padding before and after an axis, of numbers or "valid"."""
    around = 0 if padding == "valid" else padding[axis]
    return sum(around) if isinstance(around, tuple) else 2 * around


def shared(node: Node) -> dict[str, Any]:
    """The attributes that all of the family have."""
    return {name: node.attrs[name] for name in SHARED if name in node.attrs}


class Sides(Padding):
    """(before, after) of one axis, one number for both, or a word."""

    expected = "'same', 'valid' or one or two integers that are not negative"

    def take(self, value: Any) -> Any:
        if not (isinstance(value, str) or is_integer(value) or all(map(is_integer, value))):
            raise TypeError
        return super().take(value)


@declared(**SHARED)
def conv2d(
    x: Node,
    f: Node,
    bias: Node | None = None,
    stride: int | Pair = 1,
    padding: Any = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    name: str | None = None,
    algo: str | None = None,
) -> Node:
    """The convolution of x (N, C, H, W) with f (O, C/groups, kH, kW), plus bias (O,) if given.

    Gives (N, O, oH, oW), oH = (H + padding before and after - dilation·(kH - 1) - 1) // stride + 1.
    padding: an integer or a pair for both sides of each axis, ((top, bottom), (left, right)),
    "valid" (none) or "same" (oH = ceil(H / stride), an odd rest behind). groups: channels and
    filters in that many parts that do not mix; groups=C is a depthwise convolution. algo: the rung
    of the ladder by which it and its gradients are computed, such as "winograd"; without it
    DLSYS_CONV counts. Floats of one dtype. Raises ShapeError for attributes or shapes that do not
    fit, NotApplicableError when it runs by a rung that cannot compute it.
    """
    attrs: dict[str, Any] = dict(
        stride=stride, padding=padding, dilation=dilation, groups=groups, algo=algo
    )
    if bias is None:
        return convolution_op.make((x, f), attrs, name)
    return convolution_bias_op.make((x, f, bias), attrs, name)


@declared(**SHARED, output_padding=IntPair())
def conv_transpose2d(
    x: Node,
    f: Node,
    bias: Node | None = None,
    stride: int | Pair = 1,
    padding: Any = 0,
    output_padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    name: str | None = None,
    algo: str | None = None,
) -> Node:
    """The transposed convolution of x (N, C, H, W) with f (C, O/groups, kH, kW), plus bias (O,).

    It is the gradient of the convolution by f for its data. Gives (N, O, oH, oW) with
    oH = (H - 1)·stride - padding before and after + dilation·(kH - 1) + 1 + output_padding.
    padding: as of `conv2d`, less "same". output_padding: below the stride. algo: as of `conv2d`.
    Raises ShapeError for attributes or shapes that do not fit.
    """
    y = data_gradient_op(
        f, x, stride=stride, padding=padding, dilation=dilation, groups=groups, algo=algo,
        output_padding=output_padding, name=name,
    )  # fmt: skip
    return y if bias is None else y + reshape_op(bias, (-1, 1, 1))


@declared(
    stride=Int(low=1), padding=Sides(), dilation=Int(low=1), groups=Int(low=1), algo=Rung(CONV)
)
def conv1d(
    x: Node,
    f: Node,
    bias: Node | None = None,
    stride: int = 1,
    padding: Any = 0,
    dilation: int = 1,
    groups: int = 1,
    algo: str | None = None,
) -> Node:
    """The convolution of x (N, C, L) with f (O, C/groups, k), plus bias (O,): (N, O, oL).

    It is `conv2d` over images of one row. padding: an integer, (before, after), "same" or "valid".
    """
    if not isinstance(padding, str):
        padding = ((0, 0), padding)
    image, filters = expand_dims_op(x, axis=2), expand_dims_op(f, axis=2)
    y = conv2d(image, filters, bias, (1, stride), padding, (1, dilation), groups, algo=algo)
    return squeeze_op(y, axis=2)


@declared(padding=Padding(), stride=IntPair(low=1))
def conv2d_op(A: Node, B: Node, padding: Any = 0, stride: int | Pair = 1) -> Node:
    """`conv2d` of A (N, C, H, W) with the filter B (O, C, kH, kW)."""
    return conv2d(A, B, stride=stride, padding=padding)


@declared(padding=Padding(), stride=IntPair(low=1))
def conv2d_add_bias_op(
    A: Node, B: Node, bias: Node, padding: Any = 0, stride: int | Pair = 1
) -> Node:
    """`conv2d_op` plus bias (O,). padding, stride: as of `conv2d_op`."""
    return conv2d(A, B, bias, stride=stride, padding=padding)


def conv2d_gradient_of_data_op(
    A: Node, B: Node, *more: Any, padding: Any = 0, stride: int | Pair = 1
) -> Node:
    """The gradient of `conv2d_op` for its data, from the filter A (O, C, kH, kW) and dy B.

    Scripts call it in two ways, and both work: (filter, dy, padding, stride) gives the smallest
    images that the convolution takes to dy, (filter, dy, x, padding, stride) gives those of x.
    more: x, padding and stride by position.
    """
    like, padding, stride = _sorted("conv2d_gradient_of_data", more, padding, stride)
    if like is None:
        return data_gradient_op(A, B, stride=stride, padding=padding)
    return data_gradient_like_op(A, B, like, stride=stride, padding=padding)


def conv2d_gradient_of_filter_op(
    A: Node, B: Node, *more: Any, padding: Any = 0, stride: int | Pair = 1
) -> Node:
    """The gradient of `conv2d_op` for its filter, from the data A (N, C, H, W) and dy B.

    (x, dy, padding, stride) gives the largest filter that takes x to dy's size, which at stride 1
    is the only one; (x, dy, filter, padding, stride) gives one like `filter`. more: filter, padding
    and stride by position.
    """
    like, padding, stride = _sorted("conv2d_gradient_of_filter", more, padding, stride)
    if like is None:
        return filter_gradient_op(A, B, stride=stride, padding=padding)
    return filter_gradient_like_op(A, B, like, stride=stride, padding=padding)


def _sorted(
    called: str, more: tuple[Any, ...], padding: Any, stride: Any
) -> tuple[Node | None, Any, Any]:
    """The optional node, padding and stride among positional arguments."""
    like = more[0] if more and isinstance(more[0], Node) else None
    given = more if like is None else more[1:]
    if len(given) > 2:
        raise GraphError(
            f"{called}: expected at most three nodes, padding and stride, got "
            f"{2 + len(more)} arguments [{where()}]"
        )
    return like, *(*given, *(padding, stride)[len(given) :])[:2]

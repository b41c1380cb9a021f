"""Convolution, pooling and resizing of images (N, C, H, W)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dtypes import INT64
from ..errors import GraphError
from ..graph.lines import where
from ..graph.node import Node
from ..ops.concat import concat
from ..ops.conv import convolution, pooling
from ..ops.elementwise import as_node, cast_op
from ..ops.indexing import getitem_op
from ..ops.reduce import max_op, mean_op
from ..ops.resize import depth_to_space_op, space_to_depth_op
from ..ops.resize import resize as resize_images
from .record import Array, optional, recorded

__all__ = [
    "adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "conv1d", "conv2d",
    "conv_transpose2d", "global_avg_pool2d", "global_max_pool2d", "max_pool2d", "pixel_shuffle",
    "pixel_unshuffle", "resize",
]  # fmt: skip

Pair = int | tuple[int, int]


@recorded
def conv2d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Pair = 1,
    padding: Any = 0,
    dilation: Pair = 1,
    groups: int = 1,
    algo: str | None = None,
) -> Array:
    """The convolution (cross-correlation) of x (N, C, H, W) with weight (O, C/groups, kH, kW), plus
    bias (O,).

    Gives (N, O, oH, oW), oH = (H + padding before and after - dilation·(kH - 1) - 1) // stride + 1.
    padding: an integer or a pair for both sides of each axis, ((top, bottom), (left, right)),
    "valid" (none) or "same" (oH = ceil(H / stride), an odd rest behind). groups: channels and
    filters in that many parts that do not mix. algo: the rung of the ladder by which the
    convolution and its gradients are computed, such as "winograd"; without it DLSYS_CONV counts.
    Floats of one dtype. ShapeError for attributes or shapes that do not fit, NotApplicableError
    when it runs by a rung that cannot compute it.

    >>> images = dl.arange(16.0).reshape(1, 1, 4, 4)
    >>> weight = dl.ones(1, 1, 3, 3)
    >>> F.conv2d(images, weight)
    Tensor([[[[45., 54.],
              [81., 90.]]]],
           device=numpy)
    >>> F.conv2d(images, weight, stride=2, padding=1).shape
    (1, 1, 2, 2)
    """
    return convolution.conv2d(
        as_node(x), as_node(weight), optional(bias), stride, padding, dilation, groups, algo=algo
    )


@recorded
def conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: int = 1,
    padding: Any = 0,
    dilation: int = 1,
    groups: int = 1,
    algo: str | None = None,
) -> Array:
    """The convolution (cross-correlation) of x (N, C, L) with weight (O, C/groups, k), plus bias
    (O,): (N, O, oL).

    oL and algo are as of `conv2d`. padding: an integer, (before, after), "same" or "valid". stride,
    dilation and groups: as of `conv2d`, of one axis. ShapeError for attributes or shapes that do
    not fit.

    >>> x = dl.tensor([[[1.0, 2.0, 4.0, 8.0]]])
    >>> F.conv1d(x, dl.tensor([[[-1.0, 1.0]]]))
    Tensor([[[1., 2., 4.]]], device=numpy)
    """
    return convolution.conv1d(
        as_node(x), as_node(weight), optional(bias), stride, padding, dilation, groups, algo=algo
    )


@recorded
def conv_transpose2d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Pair = 1,
    padding: Any = 0,
    output_padding: Pair = 0,
    groups: int = 1,
    dilation: Pair = 1,
    algo: str | None = None,
) -> Array:
    """The transposed convolution of x (N, C, H, W) with weight (C, O/groups, kH, kW), plus bias
    (O,): the gradient of the convolution by weight for its data.

    Gives (N, O, oH, oW) with oH = (H - 1)·stride - padding before and after + dilation·(kH - 1) + 1
    + output_padding. padding and algo: as of `conv2d`, less "same". output_padding: below the
    stride. ShapeError for attributes or shapes that do not fit.

    >>> x = dl.tensor([[[[1.0, 2.0]]]])
    >>> F.conv_transpose2d(x, dl.ones(1, 1, 2, 2), stride=2)
    Tensor([[[[1., 1., 2., 2.],
              [1., 1., 2., 2.]]]],
           device=numpy)
    """
    return convolution.conv_transpose2d(
        as_node(x), as_node(weight), optional(bias), stride, padding, output_padding, dilation,
        groups, algo=algo,
    )  # fmt: skip


@recorded
def max_pool2d(
    x: Array,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Any = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    algo: str | None = None,
) -> Any:
    """The largest element of each window of x (N, C, H, W): (N, C, oH, oW).

    oH = (H + padding before and after - extent) // stride + 1, where a window extends over
    dilation · (kernel_size - 1) + 1 elements; `ceil_mode` rounds up, as long as the last window
    begins on the image or the padding before it. stride: kernel_size by default. padding: as of
    `conv2d`, below the extent; it never wins. A tie goes to the first element in row-major order,
    and NaN counts as the largest. return_indices: gives (values, indices), where an index, int64,
    counts the elements of the image H·W in row-major order. algo: "cudnn" computes it and its
    gradient by cuDNN on a GPU, without indices, where a window of -inf alone gives the least finite
    number; without it DLSYS_POOL counts. ShapeError for attributes or shapes that do not fit,
    NotApplicableError at the first run where the device lacks the rung or cuDNN cannot compute
    this.

    >>> images = dl.arange(16.0).reshape(1, 1, 4, 4)
    >>> F.max_pool2d(images, 2)
    Tensor([[[[ 5.,  7.],
              [13., 15.]]]],
           device=numpy)
    >>> F.max_pool2d(images, 2, return_indices=True)[1].tolist()
    [[[[5, 7], [13, 15]]]]
    """
    given = as_node(x), kernel_size, stride, padding, ceil_mode, dilation, algo
    return _with_indices(*given) if return_indices else pooling.max_pool2d(*given)


def _with_indices(
    x: Node, window: Pair, stride: Pair | None, padding: Any, ceil_mode: bool, dilation: Pair,
    algo: str | None,
) -> tuple[Node, Node]:  # fmt: skip
    """Max-pooling, and which element of its image each is."""
    pooled = pooling.max_pool_op(
        x, window=window, stride=stride, padding=padding, ceil_mode=ceil_mode, dilation=dilation,
        algo=algo,
    )  # fmt: skip
    return pooled[0], cast_op(pooled[1], INT64)


@recorded
def avg_pool2d(
    x: Array,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    algo: str | None = None,
) -> Array:
    """The mean of each window of x (N, C, H, W): (N, C, oH, oW), sizes as of `max_pool2d`.

    `count_include_pad` counts zeros of the padding too; what `ceil_mode` adds behind it is never
    counted. Floats keep their dtype, integers give floats. kernel_size: the extents of the window,
    or one number for both. algo: as of `max_pool2d`, and so are the errors.

    >>> images = dl.arange(16.0).reshape(1, 1, 4, 4)
    >>> F.avg_pool2d(images, 2)
    Tensor([[[[ 2.5,  4.5],
              [10.5, 12.5]]]],
           device=numpy)
    """
    return pooling.avg_pool2d(
        as_node(x), kernel_size, stride, padding, ceil_mode, count_include_pad, algo
    )


@recorded
def global_avg_pool2d(x: Array, keepdims: bool = False) -> Array:
    """The mean of each plane of x (N, C, H, W): (N, C), or (N, C, 1, 1) with `keepdims`.

    Floats keep their dtype, integers give floats. ShapeError unless x has four axes.

    >>> images = dl.arange(16.0).reshape(1, 1, 4, 4)
    >>> F.global_avg_pool2d(images)
    Tensor([[7.5]], device=numpy)
    """
    return pooling.global_avg_pool2d(as_node(x), keepdims)


@recorded
def global_max_pool2d(x: Array, keepdims: bool = False) -> Array:
    """The largest element of each plane of x (N, C, H, W): (N, C), or (N, C, 1, 1) with `keepdims`.

    The dtype is that of x. ShapeError unless x has four axes.

    >>> images = dl.arange(16.0).reshape(1, 1, 4, 4)
    >>> F.global_max_pool2d(images)
    Tensor([[15.]], device=numpy)
    """
    return pooling.global_max_pool2d(as_node(x), keepdims)


@recorded
def adaptive_avg_pool2d(x: Array, output_size: Pair) -> Array:
    """The means of x (N, C, H, W) over oH · oW windows that cover each plane: (N, C, oH, oW).

    Window i of an axis of n positions goes from floor(i·n / o) to ceil((i + 1)·n / o), as in
    PyTorch. Floats keep their dtype, integers give floats. output_size: the extents (oH, oW), or
    one number for both. GraphError where H and W are not known when the graph is built, or there
    are fewer than windows.

    >>> images = dl.arange(16.0).reshape(1, 1, 4, 4)
    >>> F.adaptive_avg_pool2d(images, (1, 2))
    Tensor([[[[6.5, 8.5]]]], device=numpy)
    """
    return _adaptive("adaptive_avg_pool2d", as_node(x), output_size, mean_op)


@recorded
def adaptive_max_pool2d(x: Array, output_size: Pair) -> Array:
    """The largest elements of x (N, C, H, W) in oH · oW windows that cover each plane:
    (N, C, oH, oW).

    The windows and the errors are those of `adaptive_avg_pool2d`; the dtype is that of x.
    output_size: the extents (oH, oW), or one number for both.

    >>> images = dl.arange(16.0).reshape(1, 1, 4, 4)
    >>> F.adaptive_max_pool2d(images, 2)
    Tensor([[[[ 5.,  7.],
              [13., 15.]]]],
           device=numpy)
    """
    return _adaptive("adaptive_max_pool2d", as_node(x), output_size, max_op)


def _adaptive(name: str, x: Node, output_size: Pair, reduce: Callable[..., Node]) -> Node:
    """x reduced over the windows of one axis after the other: a mean or maximum over a rectangle
    is that of the rows' results.
    """
    sizes = (output_size, output_size) if isinstance(output_size, int) else tuple(output_size)
    shape = x.shape
    if shape is None or len(shape) != 4 or len(sizes) != 2 or None in shape[2:]:
        raise GraphError(
            f"{name}: expected images (N, C, H, W) of known height and width and one or two output "
            f"sizes, got {x.name} {shape} and {output_size}; declare the Variable's shape "
            f"[{where()}]"
        )
    for axis, size in zip((2, 3), sizes):
        n = shape[axis]
        if not 1 <= size <= n:
            raise GraphError(
                f"{name}: {size} windows along axis {axis} of {x.name} {shape}; there must be at "
                f"least one and at most {n} [{where()}]"
            )
        bounds = [(k * n // size, -(-(k + 1) * n // size)) for k in range(size)]
        before = (slice(None),) * axis
        x = concat(
            [reduce(getitem_op(x, (*before, slice(*b))), axis, keepdims=True) for b in bounds], axis
        )
    return x


@recorded
def resize(
    x: Array,
    size: tuple[int, int] | None = None,
    scale: float | tuple[float, float] | None = None,
    mode: str = "nearest",
    align_corners: bool = False,
) -> Array:
    """Images x (…, H, W) resized to `size`, or by `scale` (rounded down).

    mode: "nearest" or "bilinear". Centers of pixels are half-way between their borders, as in
    PyTorch's "nearest-exact" and "bilinear"; with align_corners the centers of the corners stay
    where they are. Floats keep their dtype, integers give floats. GraphError unless one of size and
    scale is given, ShapeError for an image without pixels.

    >>> F.resize(dl.tensor([[[[1.0, 3.0]]]]), size=(1, 4), mode="bilinear")
    Tensor([[[[1. , 1.5, 2.5, 3. ]]]], device=numpy)
    """
    return resize_images(as_node(x), size, scale, mode, align_corners)


@recorded
def pixel_shuffle(x: Array, factor: int, mode: str = "CRD") -> Array:
    """Channels to blocks of factor · factor pixels: (N, C·factor², H, W) becomes
    (N, C, H·factor, W·factor).

    The channel is counted (c, row, column) in mode "CRD", as PyTorch does, and (row, column, c) in
    "DCR", the depth-to-space of ONNX. Any dtype. x: four dimensions. ShapeError where the channels
    do not divide.

    >>> F.pixel_shuffle(dl.arange(4.0).reshape(1, 4, 1, 1), 2)
    Tensor([[[[0., 1.],
              [2., 3.]]]],
           device=numpy)
    """
    return depth_to_space_op(as_node(x), factor, mode)


@recorded
def pixel_unshuffle(x: Array, factor: int, mode: str = "CRD") -> Array:
    """Blocks of factor · factor pixels to channels: (N, C, H·factor, W·factor) becomes
    (N, C·factor², H, W), the opposite of `pixel_shuffle` in the same mode.

    Any dtype. x: four dimensions. ShapeError where height or width do not divide.

    >>> images = dl.arange(16.0).reshape(1, 1, 4, 4)
    >>> F.pixel_unshuffle(images, 2).shape
    (1, 4, 2, 2)
    """
    return space_to_depth_op(as_node(x), factor, mode)

"""Convolution, pooling and resizing of images (N, C, H, W)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .... import autodiff as ad
from ....graph.node import Node
from ....graph.spec import FLOAT32
from ....ops.conv.geometry import Pair, Windows
from ....ops.conv.pooling import divisors
from ....ops.resize import resize
from ..registry import rule
from ..trace import Emitter, Refused
from .elementwise import operands
from .layout import zeros_of

INT64 = np.dtype(np.int64)


# ---- convolution ----


def _geometry(windows: Windows) -> dict[str, Any]:
    return dict(
        kernel_shape=list(windows.size),
        strides=list(windows.stride),
        pads=[*windows.before, *windows.after],
        dilations=list(windows.dilation),
    )


def _windows(node: Node) -> Windows:
    return node.op.windows(node, *[x.spec for x in node.inputs])  # type: ignore[attr-defined]


@rule("conv2d conv2d_bias", "Conv")
def _conv(g: Emitter, node: Node, *inputs: str) -> str:
    given = operands(g, node, inputs, node.spec.dtype)
    return g("Conv", *given, **_geometry(_windows(node)), group=node.attrs["groups"])


@rule("conv2d_data_gradient", "ConvTranspose")
def _conv_transpose(g: Emitter, node: Node, *inputs: str) -> str:
    f, dy = operands(g, node, inputs, node.spec.dtype)
    return _transposed(g, _windows(node), dy, f, node.attrs["groups"])


def _transposed(g: Emitter, windows: Windows, dy: str, f: str, groups: int) -> str:
    extra = [
        n + before + after - (out - 1) * stride - extent
        for n, before, after, out, stride, extent in zip(
            windows.image, windows.before, windows.after, windows.out, windows.stride,
            windows.extents,
        )
    ]  # fmt: skip
    return g("ConvTranspose", dy, f, **_geometry(windows), output_padding=extra, group=groups)


@rule("conv2d_filter_gradient", "Conv, Transpose, Slice")
def _filter_gradient(g: Emitter, node: Node, *names: str) -> str:
    """A convolution of x by dy whose images and channels have changed places: what was a stride is
    a dilation and the other way round. A group is a group of channels again.
    """
    x, dy = operands(g, node, names, node.spec.dtype)
    (n, c, h, w), (_, o, oh, ow) = (i.spec.shape for i in node.inputs)
    groups, windows = node.attrs["groups"], _windows(node)
    data = g("Transpose", g.reshape(x, (n, groups, c // groups, h, w)), perm=[2, 1, 0, 3, 4])
    data = g.reshape(data, (c // groups, groups * n, h, w))
    filters = g("Transpose", dy, perm=[1, 0, 2, 3])
    y = g(
        "Conv", data, filters, strides=list(windows.dilation), dilations=list(windows.stride),
        pads=[*windows.before, *windows.after], group=groups,
    )  # fmt: skip
    y = g("Transpose", y, perm=[1, 0, 2, 3])
    begin, axes = g.axes([0, 0]), g.axes([2, 3])
    return g("Slice", y, begin, g.axes(windows.size), axes)


# ---- pooling ----


def _behind(windows: Windows) -> Pair:
    """The padding behind that all windows fit into, which `ceil_mode` makes more than is given."""
    found = list(windows.after)
    for axis, out in enumerate(windows.out):
        end = (out - 1) * windows.stride[axis] + windows.extents[axis]
        found[axis] = max(found[axis], end - windows.image[axis] - windows.before[axis])
    return found[0], found[1]


def _pooling(node: Node, image: tuple[int, ...]) -> Windows:
    return node.op.windows(node, image)  # type: ignore[attr-defined]


@rule("max_pool2d", "MaxPool, GlobalMaxPool")
def _max_pool(g: Emitter, node: Node, x: str) -> tuple[str, str]:
    """Values, and indices into H×W, which ONNX counts through all images and channels."""
    spec = node.inputs[0].spec
    h, w = spec.shape[2:]
    windows, dtype = _pooling(node, (h, w)), node.spec[0].dtype
    x = g.cast(x, spec.dtype, dtype)
    if node.attrs["window"] is None and windows.out == (1, 1) and not any(windows.before):
        flat = g.reshape(x, (*spec.shape[:2], h * w))
        first = g.reshape(g("ArgMax", flat, axis=2, keepdims=1), node.spec[1].shape)
        return g("GlobalMaxPool", x), g.cast(first, INT64, node.spec[1].dtype)
    top, left = windows.before
    down, across = _behind(windows)
    pads = [top, left, down, across]
    wide = any(pad >= size for pad, size in zip(pads, windows.size * 2))
    if wide:  # which ONNX allows only in Pad
        borders = g.extents([0, 0, top, left, 0, 0, down, across])
        x, pads = g("Pad", x, borders, np.array(-np.inf, dtype)), [0] * 4
        h, w = h + top + down, w + left + across
    values, indices = g("MaxPool", x, outputs=2, **_geometry(windows) | {"pads": pads})
    indices = g("Mod", indices, np.array(h * w, np.int64))
    if wide:
        row = g("Sub", g("Div", indices, np.array(w, np.int64)), np.array(top, np.int64))
        column = g("Sub", g("Mod", indices, np.array(w, np.int64)), np.array(left, np.int64))
        rows = g("Mul", row, np.array(spec.shape[3], np.int64))
        indices = g("Add", rows, column)
    return values, g.cast(indices, INT64, node.spec[1].dtype)


@rule("max_pool2d_gradient", "ScatterElements")
def _max_pool_gradient(g: Emitter, node: Node, dy: str, argmax: str) -> str:
    n, c, h, w = node.spec.shape
    out = node.inputs[0].spec.shape
    flat = (n * c, out[2] * out[3])
    dy = g.reshape(g.cast(dy, node.inputs[0].spec.dtype, node.spec.dtype), flat)
    zeros = zeros_of(g, (n * c, h * w), node.spec.dtype)
    at = g.reshape(argmax, flat)
    y = g("ScatterElements", zeros, at, dy, axis=1, reduction="add")
    return g.reshape(y, (n, c, h, w))


@rule("max_pool2d_read", "GatherElements")
def _max_pool_read(g: Emitter, node: Node, x: str, argmax: str) -> str:
    n, c, h, w = node.inputs[0].spec.shape
    out = node.spec.shape
    x = g.reshape(g.cast(x, node.inputs[0].spec.dtype, node.spec.dtype), (n * c, h * w))
    at = g.reshape(argmax, (n * c, out[2] * out[3]))
    return g.reshape(g("GatherElements", x, at, axis=1), out)


@rule("avg_pool2d", "AveragePool")
def _avg_pool(g: Emitter, node: Node, x: str) -> str:
    """Where `ceil_mode` adds positions that are not counted, sums are divided by the counts."""
    spec = node.inputs[0].spec
    windows = _pooling(node, spec.shape[2:])
    counted = node.attrs.get("count_include_pad", True)
    x = g.cast(x, spec.dtype, node.spec.dtype)
    behind = _behind(windows)
    added = behind != windows.after
    y = g(
        "AveragePool", x, kernel_shape=list(windows.size), strides=list(windows.stride),
        pads=[*windows.before, *behind], count_include_pad=int(counted or added),
    )  # fmt: skip
    if not added:
        return y
    area = windows.size[0] * windows.size[1]
    factor = area / divisors(windows, counted)
    return g("Mul", y, factor.astype(node.spec.dtype))


@rule("avg_pool2d_gradient", "ConvTranspose")
def _avg_pool_gradient(g: Emitter, node: Node, dy: str) -> str:
    n, c, h, w = node.spec.shape
    windows = _pooling(node, (h, w))
    share = 1 / divisors(windows, node.attrs.get("count_include_pad", True))
    dy = g.cast(dy, node.inputs[0].spec.dtype, node.spec.dtype)
    dy = g("Mul", dy, share.astype(node.spec.dtype))
    planes = g.reshape(dy, (n * c, 1, *windows.out))
    ones = g.constant(np.ones((1, 1, *windows.size)), node.spec.dtype)
    exact = windows._replace(after=_behind(windows))
    return g.reshape(_transposed(g, exact, planes, ones, 1), (n, c, h, w))


# ---- resizing ----


@rule("depth_to_space", "DepthToSpace")
def _depth_to_space(g: Emitter, node: Node, x: str) -> str | None:
    if node.spec.dtype.kind != "f":
        return None
    return g("DepthToSpace", x, blocksize=node.attrs["block"], mode=node.attrs["mode"])


@rule("space_to_depth", "SpaceToDepth")
def _space_to_depth(g: Emitter, node: Node, x: str) -> str | None:
    if node.spec.dtype.kind != "f" or node.attrs["mode"] != "DCR":
        return None
    return g("SpaceToDepth", x, blocksize=node.attrs["block"])


@rule("resize_nearest resize_bilinear", "Resize")
def _resize(g: Emitter, node: Node, x: str, *like: str) -> str:
    before, after = node.inputs[0].spec.shape, node.spec.shape
    x = g.cast(x, node.inputs[0].spec.dtype, node.spec.dtype)
    if before == after:
        return x
    planes = int(np.prod(before[:-2]))
    align, nearest = node.attrs["align_corners"], node.op.name == "resize_nearest"
    y = g(
        "Resize", g.reshape(x, (planes, 1, *before[-2:])), None, None,
        g.extents((planes, 1, *after[-2:])), mode="nearest" if nearest else "linear",
        coordinate_transformation_mode="align_corners" if align else "half_pixel",
        nearest_mode=("round_prefer_floor" if align else "round_prefer_ceil") if nearest else None,
    )  # fmt: skip
    return g.reshape(y, after)


@rule("resize_nearest_gradient resize_bilinear_gradient", "MatMul")
def _resize_gradient(g: Emitter, node: Node, dy: str, *like: str) -> str:
    """Rowsᵀ dy columns, of the matrices by which resizing multiplies an image from both sides."""
    mode = node.op.name.removeprefix("resize_").removesuffix("_gradient")
    before, after = node.spec.shape[-2:], node.inputs[0].spec.shape[-2:]
    rows, columns = (
        _weights(mode, node.attrs["align_corners"], n, m).astype(node.spec.dtype)
        for n, m in zip(before, after)
    )
    dy = g.cast(dy, node.inputs[0].spec.dtype, node.spec.dtype)
    return g("MatMul", rows.T.copy(), g("MatMul", dy, columns))


def _weights(mode: str, align: bool, n: int, m: int) -> np.ndarray:
    """The matrix (m, n) that resizes an axis of n elements to m: what it makes of unit vectors."""
    units = ad.constant(np.eye(n).reshape(n, n, 1))
    resized = resize(units, size=(m, 1), mode=mode, align_corners=align)
    return ad.Executor([resized]).run({}, convert_to_numpy_ret_vals=True)[0][..., 0].T


# ---- boxes ----


@rule("non_max_suppression", "NonMaxSuppression")
def _non_max_suppression(g: Emitter, node: Node, boxes: str, scores: str) -> tuple[str, str]:
    """The boxes that ONNX gives, and behind them rows of -1."""
    dtypes = [x.spec.dtype for x in node.inputs]
    if any(dtype.itemsize > 4 for dtype in dtypes):
        raise Refused("of float64 it has no ONNX form, whose boxes and scores are float32")
    attrs, least = node.attrs, node.attrs["score_threshold"]
    rows = g(
        "NonMaxSuppression", *map(g.cast, (boxes, scores), dtypes, (FLOAT32, FLOAT32)),
        np.array([attrs["max_output_boxes_per_class"]]),
        np.array([attrs["iou_threshold"]], np.float32),
        None if least is None else np.array([least], np.float32),
        center_point_box=int(attrs["center_point_box"]),
    )  # fmt: skip
    count = g("Gather", g("Shape", rows), g.axes([0]), axis=0)
    left = g("Sub", g.extents([node.spec[0].shape[0]]), count)
    pads = g("Concat", g.axes([0, 0]), left, g.axes([0]), axis=0)
    padded = g("Pad", rows, pads, np.array(-1), mode="constant")
    return padded, g.reshape(count, ())

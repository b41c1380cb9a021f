"""Channels last: networks of convolutions in 16 bits whose images lie as (N, H, W, C) on a GPU.

Tensor cores read the channels of a position side by side. Convolutions and max-pooling that have
kernels for this layout take it, and so does what follows them: batch normalization, elementwise
operators, means over H×W. Such images are nodes (N·H·W, C), which elementwise operators and batch
normalization compute as they are. Where an image meets an operator of neither kind, a transpose
stands between them, one for all readers; shapes that the user sees stay (N, C, H, W).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arguments.kinds import Instance, Int
from ..arguments.signature import Signature
from ..dtypes import bfloat16
from ..graph.lines import attributed_to
from ..graph.node import Node, Op
from ..graph.spec import Spec
from ..ops.axes import normalize_axes
from ..ops.conv.convolution import convolution_op, data_gradient_op, filter_gradient_op
from ..ops.conv.geometry import Windows
from ..ops.conv.pooling import max_pool_gradient_op, max_pool_op
from ..ops.matmul import algorithm_number
from ..ops.movement import broadcast_to_op, reshape_op, transpose_op
from ..ops.norm.batch_norm import (
    batch_normalize_gradient_op,
    batch_normalize_op,
    batch_normalize_sums_op,
    batch_statistics_op,
)
from ..ops.reduce import mean_op, sum_op
from ..passes.pipeline import Options, Pass
from ..rungs import HEURISTIC
from ..runtime.target import Target
from .body import Body, Fused, close
from .rewrite import Graph, exchange, value_of

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # the axes of (N, H, W, C) in (N, C, H, W), and back


class OverImages(Fused):
    """An operator over images (N, H, W, C); filters stay (O, C/groups, kH, kW)."""

    tolerance = 1e-4
    signature = Signature("*inputs", body=Instance(Body), windows=Instance(Windows))

    def scalars(self, node: Node) -> tuple[Any, ...]:
        return (node.attrs["windows"].argument,)


class Convolution(OverImages):
    """A convolution or a gradient of it."""

    tunable = True
    signature = Signature(
        "*inputs", body=Instance(Body), windows=Instance(Windows), groups=Int(low=1)
    )

    def scalars(self, node: Node) -> tuple[Any, ...]:
        return (*super().scalars(node), node.attrs["groups"], algorithm_number(node))


conv2d_channels_last_op = Convolution("conv2d_channels_last")
data_gradient_channels_last_op = Convolution("conv2d_data_gradient_channels_last")
filter_gradient_channels_last_op = Convolution("conv2d_filter_gradient_channels_last")
max_pool_channels_last_op = OverImages("max_pool2d_channels_last", 2)
max_pool_gradient_channels_last_op = OverImages("max_pool2d_gradient_channels_last", 1, (1,))

# Of a convolution: the operator over images, which inputs are images, whether the result is, and
# the positions of x, f and y among the inputs and the result.
_CONVOLUTIONS: dict[Any, tuple[Convolution, tuple[int, ...], bool, tuple[int, int, int]]] = {
    convolution_op: (conv2d_channels_last_op, (0,), True, (0, 1, 2)),
    data_gradient_op: (data_gradient_channels_last_op, (1,), True, (2, 0, 1)),
    filter_gradient_op: (filter_gradient_channels_last_op, (0, 1), False, (0, 2, 1)),
}
_NORMS = (
    batch_statistics_op,
    batch_normalize_op,
    batch_normalize_sums_op,
    batch_normalize_gradient_op,
)


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose convolutions of 16 bits have their channels last. The graph
    must be the executor's own: its nodes change.
    """
    layout = _Layout(options.target)
    for node in Graph(fetches).order:
        with attributed_to(node):
            layout.visit(node)
    return exchange(fetches, layout.replaced)


def stands_for(op: Op) -> tuple[Convolution, tuple[int, ...], bool]:
    """Of a convolution or a gradient of it: the operator with channels last, which of its inputs
    are images, and whether its result is.
    """
    return _CONVOLUTIONS[op][:3]


class _Layout:
    """The nodes that have their channels last so far, as (N·H·W, C).

    replaced: what takes the place of a node where somebody reads it in its own layout.
    """

    def __init__(self, target: Target) -> None:
        self.replaced: dict[Node, Node] = {}
        self._target = target
        self._flat: dict[Node, Node] = {}  # of every image that was asked for
        self._images: dict[Node, Node] = {}  # the same as (N, H, W, C)
        self._with_values: dict[Node, Node] = {}  # operators with several values

    def visit(self, node: Node) -> None:
        """Moves the channels of a node last where that pays."""
        if node.op in _CONVOLUTIONS:
            self._convolution(node)
        elif node.op.projection:
            self._value(node)
        elif not any(x in self.replaced for x in node.inputs):
            return
        elif node.op is max_pool_op or node.op is max_pool_gradient_op:
            self._max_pool(node)
        elif node.op in _NORMS:
            self._norm(node)
        elif node.op in (sum_op, mean_op):
            self._mean(node)
        elif _is_elementwise(node):
            inputs = [self._flat_of(x) if _is_image(x) else x for x in node.inputs]
            self._replace(node, node.derive(inputs, _flat_spec(node.spec)))

    def _replace(self, node: Node, flat: Node) -> None:
        flat.stand_for(node)
        self._flat[node] = flat
        back = transpose_op(self._images_of(node), axes=FIRST, name=node.name)
        back.stand_for(node)
        self.replaced[node] = back

    def _flat_of(self, node: Node) -> Node:
        """An image as (N·H·W, C)."""
        if node not in self._flat:
            shape = _flat_spec(node.spec).shape
            self._flat[node] = reshape_op(self._moved(node), shape)
        return self._flat[node]

    def _images_of(self, node: Node) -> Node:
        """An image as (N, H, W, C)."""
        if node not in self._images:
            shape = tuple(node.spec.shape[k] for k in LAST)
            self._images[node] = reshape_op(self._flat_of(node), shape)
        return self._images[node]

    def _moved(self, node: Node) -> Node:
        """An image that is (N, C, H, W), its channels moved last."""
        n, c, h, w = node.spec.shape
        if node.op is broadcast_to_op and node.inputs[0].spec.shape == (n, c, 1, 1):
            return broadcast_to_op(reshape_op(node.inputs[0], (n, 1, 1, c)), shape=(n, h, w, c))
        return transpose_op(node, axes=LAST)

    # ---- operators ----

    def _convolution(self, node: Node) -> None:
        op, images, is_image, (x, f, y) = _CONVOLUTIONS[node.op]
        specs = [*[x.spec for x in node.inputs], node.spec]
        convolution: Any = node.op
        windows, groups = convolution.windows(node, *specs[:-1]), node.attrs["groups"]
        dtype = node.spec.dtype
        if "algo" in node.attrs or not self._target.has(op.kernel, dtype):
            return
        arrays = last_spec(specs[x]), specs[f], last_spec(specs[y])
        if all(s.dtype == dtype for s in specs) and self._target.fits(
            "conv2d_channels_last", *arrays, windows.argument, groups, HEURISTIC.number
        ):
            made = self._over_images(op, node, images, windows=windows, groups=groups)
            if is_image:
                self._replace(node, reshape_op(made, _flat_spec(node.spec).shape))
            else:
                made.stand_for(node)
                self.replaced[node] = made

    def _max_pool(self, node: Node) -> None:
        forward = node.op is max_pool_op
        op = max_pool_channels_last_op if forward else max_pool_gradient_channels_last_op
        image = node.inputs[0].spec.shape[2:] if forward else node.attrs["image"]
        pooling: Any = node.op
        windows = pooling.windows(node, image)
        dtype = node.inputs[0].spec.dtype
        if windows.dilation != (1, 1) or not self._target.has(op.kernel, dtype):
            return
        made = self._over_images(op, node, range(len(node.inputs)), windows=windows)
        if forward:
            self._with_values[node] = made
        else:
            self._replace(node, reshape_op(made, _flat_spec(node.spec).shape))

    def _over_images(self, op: OverImages, node: Node, images: Sequence[int], **attrs: Any) -> Node:
        """The operator over images (N, H, W, C) where inputs of `images` are such."""
        inputs = [self._images_of(x) if k in images else x for k, x in enumerate(node.inputs)]
        moved = [transpose_op(x, axes=FIRST) if k in images else x for k, x in enumerate(inputs)]
        inner = node.derive(moved, node.spec)
        values = [value_of(inner, k) for k in range(op.outputs)] if op.outputs > 1 else [inner]
        is_image = op is not filter_gradient_channels_last_op
        outputs = [transpose_op(v, axes=LAST) for v in values] if is_image else values
        return op(*inputs, body=close(inputs, outputs), **attrs)

    def _norm(self, node: Node) -> None:
        """The same operator over (N·H·W, C)."""
        inputs = [self._flat_of(x) if _is_image(x) else x for x in node.inputs]
        if node.op.outputs > 1:
            self._with_values[node] = node.derive(inputs, node.spec)
        elif _is_image(node):
            self._replace(node, node.derive(inputs, _flat_spec(node.spec)))

    def _value(self, node: Node) -> None:
        of = self._with_values.get(node.inputs[0])
        if of is None:
            return
        value = value_of(of, node.attrs["index"])
        if _is_image(node):
            self._replace(node, reshape_op(value, _flat_spec(node.spec).shape))
        else:
            value.stand_for(node)
            self.replaced[node] = value

    def _mean(self, node: Node) -> None:
        """A sum or a mean over H×W."""
        x = node.inputs[0]
        if not _is_image(x) or normalize_axes(node, node.attrs["axis"], 4) != (2, 3):
            return
        n, c, h, w = x.spec.shape
        attrs = {k: v for k, v in node.attrs.items() if k not in ("axis", "keepdims")}
        made = node.op(reshape_op(self._flat_of(x), (n, h * w, c)), axis=1, **attrs)
        made.stand_for(node)
        view = made if made.spec.shape == node.spec.shape else reshape_op(made, node.spec.shape)
        view.stand_for(node)
        self.replaced[node] = view


def _is_image(node: Node) -> bool:
    return isinstance(node.spec, Spec) and len(node.spec.shape) == 4


def _is_elementwise(node: Node) -> bool:
    """True for an elementwise operator over images of one shape and single numbers."""
    return (
        node.op.elementwise
        and _is_image(node)
        and all(x.spec.shape in (node.spec.shape, ()) for x in node.inputs)
    )


def _flat_spec(spec: Spec) -> Spec:
    n, c, h, w = spec.shape
    return spec._replace(shape=(n * h * w, c))


def last_spec(spec: Spec) -> Spec:
    """That of images (N, C, H, W), with the channels last."""
    return spec._replace(shape=tuple(spec.shape[k] for k in LAST))


def _has_kernels(options: Options) -> bool:
    return options.target.has(conv2d_channels_last_op.kernel, bfloat16)


FUSION = Pass("channels_last", fuse, position=45, when=_has_kernels)

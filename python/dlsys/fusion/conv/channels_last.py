"""Channels last: networks of convolutions whose images lie as (N, H, W, C) on a GPU.

Tensor cores read the channels of a position side by side. Convolutions and max-pooling that have
kernels for this layout take it, and so does what follows them: batch normalization, elementwise
operators, means over H×W. Such images are nodes (N·H·W, C), which elementwise operators and batch
normalization compute as they are. Where an image meets an operator of neither kind, a transpose
stands between them, one for all readers; shapes that the user sees stay (N, C, H, W).

Convolutions of 16 bits have no other layout, so any of them gains. Those of float32, at tf32, do
where a cost model says so, and where convolutions pass on more than transposes move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...dtypes import bfloat16, is_narrow
from ...graph.lines import attributed_to
from ...graph.node import Node, Op
from ...graph.spec import Spec
from ...ops.axes import normalize_axes
from ...ops.conv.convolution import (
    convolution_bias_op,
    convolution_op,
    data_gradient_op,
    filter_gradient_op,
    shared,
)
from ...ops.conv.pooling import max_pool_gradient_op, max_pool_op
from ...ops.elementwise import add_op
from ...ops.movement import broadcast_to_op, reshape_op, transpose_op
from ...ops.norm.batch_norm import (
    batch_normalize_gradient_op,
    batch_normalize_op,
    batch_normalize_sums_op,
    batch_statistics_op,
)
from ...ops.reduce import mean_op, sum_op
from ...passes.pipeline import Options, Pass
from ...passes.precision import of_products
from ...rungs import HEURISTIC
from ...runtime.target import Target
from ..shared.body import close
from ..shared.image_operators import (
    MOST_PLACES,
    Convolution,
    OverImages,
    conv2d_channels_last_op,
    data_gradient_channels_last_op,
    filter_gradient_channels_last_op,
    max_pool_channels_last_op,
    max_pool_gradient_channels_last_op,
)
from ..shared.rewrite import Graph, exchange, value_of

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # the axes of (N, H, W, C) in (N, C, H, W), and back


# Of a convolution: the operator over images, which inputs are images, and whether the result is.
_CONVOLUTIONS: dict[Any, tuple[Convolution, tuple[int, ...], bool]] = {
    convolution_op: (conv2d_channels_last_op, (0,), True),
    data_gradient_op: (data_gradient_channels_last_op, (1,), True),
    filter_gradient_op: (filter_gradient_channels_last_op, (0, 1), False),
}
# Of float32, the largest share of what convolutions read and write that transposes may move.
_MOST_MOVED = 0.25
_NORMS = (
    batch_statistics_op,
    batch_normalize_op,
    batch_normalize_sums_op,
    batch_normalize_gradient_op,
)


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph whose convolutions have their channels last where that pays. The
    graph must be the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    layout = _Layout(options, graph)
    for node in graph.order:
        with attributed_to(node):
            layout.visit(node)
    return exchange(fetches, layout.replaced) if layout.pays() else list(fetches)


def stands_for(op: Op) -> tuple[Convolution, tuple[int, ...], bool]:
    """Of a convolution or a gradient of it: the operator with channels last, which of its inputs
    are images, and whether its result is.
    """
    return _CONVOLUTIONS[op]


class _Layout:
    """The nodes that have their channels last so far, as (N·H·W, C).

    replaced: what takes the place of a node where somebody reads it in its own layout.
    """

    def __init__(self, options: Options, graph: Graph) -> None:
        self.replaced: dict[Node, Node] = {}
        self._graph = graph
        self._target: Target = options.target
        self._tf32 = of_products(options.precision) == "tf32"
        self._of_16_bits = False  # some convolution is
        self._convolved = self._moved_last = 0  # elements
        self._flat: dict[Node, Node] = {}  # of every image that was asked for
        self._images: dict[Node, Node] = {}  # the same as (N, H, W, C)
        self._with_values: dict[Node, Node] = {}  # operators with several values

    def visit(self, node: Node) -> None:
        """Moves the channels of a node last where that pays."""
        if node.op in _CONVOLUTIONS:
            self._convolution(node)
        elif node.op is convolution_bias_op and not is_narrow(node.spec.dtype):
            self._biased(node)
        elif node.op.projection:
            self._value(node)
        elif not any(x in self.replaced and x.op is not filter_gradient_op for x in node.inputs):
            return
        elif node.op is max_pool_op or node.op is max_pool_gradient_op:
            self._max_pool(node)
        elif node.op in _NORMS:
            self._norm(node)
        elif node.op in (sum_op, mean_op):
            self._sum(node)
        elif _is_elementwise(node):
            inputs = [self._flat_of(x) if _is_image(x) else x for x in node.inputs]
            self._replace(node, node.derive(inputs, _flat_spec(node.spec)))

    def pays(self) -> bool:
        """True where the replaced nodes are faster, transposes included."""
        moved_first = sum(
            node.spec.size
            for node, back in self.replaced.items()
            if back.op is transpose_op
            and any(self._reads_first(u) for u, _ in self._graph.readers(node))
        )
        moved = self._moved_last + moved_first
        return self._of_16_bits or moved <= _MOST_MOVED * self._convolved

    def _reads_first(self, reader: Node) -> bool:
        """True where a node reads images in the user's layout."""
        return reader not in self.replaced and reader not in self._with_values

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
        self._moved_last += node.spec.size
        return transpose_op(node, axes=LAST)

    # ---- operators ----

    def _convolution(self, node: Node) -> None:
        made = self._convolved_last(node)
        if made is None:
            return
        if _CONVOLUTIONS[node.op][2]:
            self._replace(node, reshape_op(made, _flat_spec(node.spec).shape))
        else:
            made.stand_for(node)
            self.replaced[node] = made

    def _biased(self, node: Node) -> None:
        """A convolution of float32 with a bias, which what follows it adds."""
        x, f, bias = node.inputs
        made = self._convolved_last(convolution_op(x, f, **shared(node)))
        if made is not None:
            flat = reshape_op(made, _flat_spec(node.spec).shape)
            self._replace(node, add_op(flat, bias))

    def _convolved_last(self, node: Node) -> Node | None:
        """A convolution over images (N, H, W, C); None where that is not there, or slower."""
        op, images, is_image = _CONVOLUTIONS[node.op]
        assert op.kernel is not None
        specs = [x.spec for x in node.inputs]
        convolution: Any = node.op
        windows, groups = convolution.windows(node, *specs), node.attrs["groups"]
        dtype, narrow = node.spec.dtype, is_narrow(node.spec.dtype)
        if "algo" in node.attrs or not self._target.has(op.kernel, dtype):
            return None
        if any(s.dtype != dtype for s in specs) or not (narrow or self._tf32):
            return None
        arrays = [last_spec(s) if k in images else s for k, s in enumerate(specs)]
        arrays.append(last_spec(node.spec) if is_image else node.spec)
        if not self._target.fits(op.kernel, *arrays, windows.argument, groups, HEURISTIC.number):
            return None
        self._of_16_bits |= narrow
        self._convolved += sum(specs[k].size for k in images) + node.spec.size * is_image
        made = self._over_images(op, node, images, windows=windows, groups=groups)
        if not narrow:
            made.attrs = {**made.attrs, "precision": "tf32"}  # for whoever compares it
        return made

    def _max_pool(self, node: Node) -> None:
        forward = node.op is max_pool_op
        op = max_pool_channels_last_op if forward else max_pool_gradient_channels_last_op
        image = node.inputs[0].spec.shape[2:] if forward else node.attrs["image"]
        pooling: Any = node.op
        windows = pooling.windows(node, image)
        has_kernel = self._target.has(op.kernel, node.inputs[0].spec.dtype)
        has_places = self._has_places(node) if forward else node.inputs[1] in self.replaced
        if windows.dilation != (1, 1) or not (has_kernel and has_places):
            return
        made = self._over_images(op, node, range(len(node.inputs)), windows=windows)
        if forward:
            self._with_values[node] = made
        else:
            self._replace(node, reshape_op(made, _flat_spec(node.spec).shape))

    def _has_places(self, node: Node) -> bool:
        """True where gradients alone read where maxima are: they take places within windows."""
        height, width = node.attrs["window"] or node.inputs[0].spec.shape[2:]
        found = [value for value in self._graph.users[node] if value.attrs["index"] == 1]
        only_gradients = all(
            user.op is max_pool_gradient_op and user.spec.dtype == node.inputs[0].spec.dtype
            for value in found
            for user in self._graph.users[value]
        )
        fetched = any(self._graph.is_fetched(value) for value in found)
        return height * width <= MOST_PLACES and only_gradients and not fetched

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

    def _sum(self, node: Node) -> None:
        """A sum or a mean over H×W, or N×H×W."""
        x = node.inputs[0]
        axes = normalize_axes(node, node.attrs["axis"], 4) if _is_image(x) else ()
        if axes not in ((2, 3), (0, 2, 3)):
            return
        n, c, h, w = x.spec.shape
        attrs = {k: v for k, v in node.attrs.items() if k not in ("axis", "keepdims")}
        flat = self._flat_of(x)
        if axes == (2, 3):
            flat = reshape_op(flat, (n, h * w, c))
        made = node.op(flat, axis=len(flat.spec.shape) - 2, **attrs)
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

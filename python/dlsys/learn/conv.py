"""Measures the rungs of convolution: time, rate, workspace, and error against float64.

A rung is timed among other launches of itself in a captured graph. The operands of all rungs are
the same and normally distributed. The error is that of sampled elements, relative to the sum of the
magnitudes of an element's terms, in units of float32's rounding, 2^-24: so a sum of K terms in any
order stays below K. What transforms its operands, as Winograd and FFT do, shows it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..autodiff import Variable
from ..errors import DeviceError, KernelError
from ..executor.tune.microbenchmark import DRAWN, LONG_US, Microbenchmark
from ..fusion.conv import channels_last
from ..fusion.shared.body import close
from ..graph.node import Node
from ..graph.spec import FLOAT32, Spec
from ..ops.conv.convolution import convolution_op, data_gradient_op, filter_gradient_op
from ..ops.movement import transpose_op
from ..rungs import CONV, Algorithm, rungs_among
from ..runtime.device import Context
from ..runtime.library import load
from .conv_numpy import NumpyBenchmark
from .gemm import NARROW, ROUNDING, Figures

DIRECTIONS = ("forward", "data", "filter")
# Variants that are algorithms of their own rather than tiles.
_PARTS = (
    *("winograd 2x2", "winograd 4x4"),
    *("implicit compact", "implicit batched", "implicit fma", "implicit mma"),
    *("implicit wgmma", "implicit halo", "implicit gemm", "implicit groups"),
)
# At these precisions images lie in both layouts. With their channels last they have kernels of
# these names alone, whose times hold no move of the channels; before their names stands so.
_LAYOUTS = {"tf32": (False, True)}
_OF_LAST = (
    *("auto", "implicit wgmma", "implicit gemm", "implicit halo", "implicit groups"),
    "depthwise",
)
CHANNELS_LAST = "channels last: "  # before their names
_SAMPLED = 48  # elements that are compared, or fewer where their sums are long
_SAMPLED_TERMS = 4_000_000  # of all of them together


class Shape(NamedTuple):
    """A convolution of square images x (n, c, size, size) by o square filters."""

    n: int
    c: int
    size: int
    o: int
    kernel: int
    stride: int = 1
    padding: int = 0
    groups: int = 1

    def __str__(self) -> str:
        more = f" stride {self.stride}" * (self.stride > 1) + f" groups {self.groups}" * (
            self.groups > 1
        )
        return (
            f"{self.n} x {self.c} x {self.size}², {self.o} filters {self.kernel}²"
            f"{f' padded by {self.padding}' * (self.padding > 0)}{more}"
        )

    @property
    def out(self) -> int:
        """The extent of a result's images."""
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def operations(self) -> int:
        """Multiplications and additions of a direct convolution, padding included."""
        return 2 * self.n * self.o * self.out**2 * self.c // self.groups * self.kernel**2

    @property
    def arrays(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shapes of x, f and y."""
        f = (self.o, self.c // self.groups, self.kernel, self.kernel)
        return (self.n, self.c, *[self.size] * 2), f, (self.n, self.o, *[self.out] * 2)


def node_of(shape: Shape, direction: str, precision: str, last: bool | None = None) -> Node:
    """The operator of a direction, with its specs; over images with their channels last, by
    default of 16 bits alone.
    """
    made = _first_node_of(shape, direction, precision)
    return _last_node_of(made) if (precision in NARROW if last is None else last) else made


def _first_node_of(shape: Shape, direction: str, precision: str) -> Node:
    """The operator over images (N, C, H, W)."""
    dtype = NARROW.get(precision, FLOAT32)
    x, f, y = shape.arrays
    attrs: dict[str, Any] = dict(stride=shape.stride, padding=shape.padding, groups=shape.groups)
    if direction == "forward":
        op: Any = convolution_op
        first, second, result = x, f, y
    elif direction == "data":
        op, (first, second, result) = data_gradient_op, (f, y, x)
        rest = (shape.size + 2 * shape.padding - shape.kernel) % shape.stride
        attrs["output_padding"] = rest
    else:
        op, (first, second, result) = filter_gradient_op, (x, y, f)
        attrs["size"] = shape.kernel
    inputs = []
    for array in (first, second):
        inputs.append(Variable("operand"))
        inputs[-1].spec = Spec(array, dtype)
    node = op(*inputs, **attrs)
    node.spec = Spec(result, dtype)
    if precision not in NARROW:
        node.attrs = {**node.attrs, "precision": precision}
    return node


def _last_node_of(first: Node) -> Node:
    """The operator over images (N, H, W, C) that stands for one over (N, C, H, W)."""
    op, images, is_image = channels_last.stands_for(first.op)
    specs = [
        channels_last.last_spec(x.spec) if k in images else x.spec
        for k, x in enumerate(first.inputs)
    ]
    inputs = [Variable("operand", spec.shape, dtype=spec.dtype) for spec in specs]
    seen = [
        transpose_op(x, axes=channels_last.FIRST) if k in images else x
        for k, x in enumerate(inputs)
    ]
    inner = first.derive(seen, first.spec)
    body = close(inputs, [transpose_op(inner, axes=channels_last.LAST) if is_image else inner])
    convolution: Any = first.op
    windows = convolution.windows(inner, *(x.spec for x in seen))
    made = op(*inputs, body=body, windows=windows, groups=first.attrs["groups"])
    if "precision" in first.attrs:
        made.attrs = {**made.attrs, "precision": first.attrs["precision"]}
    return made


def climb(
    ctx: Context | None,
    shape: Shape,
    direction: str,
    precisions: Sequence[str] = ("fp32",),
    variants: bool = False,
    down: bool = False,
) -> Iterator[Figures]:
    """The figures of auto and of every rung that can compute a direction of a shape, in the
    ladder's order, with both of Winograd's tiles and the parts of `implicit`; or of every
    algorithm; with `down` from the last to the first. Without a context, of numpy's rungs. At bf16
    and fp16, which are storage types, images have their channels last; at tf32 they are measured in
    both layouts, and where their channels are last a rung's name begins with CHANNELS_LAST. Times
    include every move of channels that a rung needs of the layout that it is given.
    """
    drawn = np.random.default_rng(0).standard_normal(DRAWN).astype(np.float32)
    if ctx is None:
        yield from _climb_numpy(shape, direction, drawn)
        return
    samples: dict[tuple[str, bool], _Sample] = {}
    layouts = [(p, last) for p in precisions for last in _LAYOUTS.get(p, (p in NARROW,))]
    for precision, last in layouts:
        node = node_of(shape, direction, precision, last)
        kernel = node.op.kernel
        assert kernel is not None
        if (ctx.kernel_device, kernel, node.spec.dtype) not in load().index:
            continue
        names = load().algorithms(ctx.kernel_device, kernel)
        benchmark = Microbenchmark(node, ctx, drawn)
        # All of float32 share a sample of a layout.
        layout = precision if precision in NARROW else "", last
        if layout not in samples:
            samples[layout] = _Sample(benchmark, shape, direction, last)
        sample = samples[layout]
        numbered = [*enumerate(("auto", *names))]
        for number, name in reversed(numbered) if down else numbered:
            rung = name == "auto" or name in rungs_among(names) or name in _PARTS
            if not (rung or variants):
                continue
            is_other = layout == ("", True)
            if is_other and not name.startswith(_OF_LAST):
                continue
            try:
                found = _figures(benchmark, sample, shape, Algorithm(number, name), precision)
            except (KernelError, DeviceError):
                continue  # it cannot serve this, or its library is not here
            yield found._replace(algorithm=f"{CHANNELS_LAST}{name}") if is_other else found


def _climb_numpy(shape: Shape, direction: str, drawn: np.ndarray) -> Iterator[Figures]:
    benchmark = NumpyBenchmark(node_of(shape, direction, "fp32"), drawn)
    sample = _Sample(benchmark, shape, direction, False)
    for rung in (*CONV.numpy, *CONV.variants):
        try:
            yield _figures(benchmark, sample, shape, Algorithm(0, rung), "fp32")
        except KernelError:
            continue  # it cannot serve this


def _figures(
    benchmark: Microbenchmark | NumpyBenchmark,
    sample: _Sample,
    shape: Shape,
    algorithm: Algorithm,
    precision: str,
) -> Figures:
    nbytes = benchmark.workspace_nbytes(algorithm)
    us = benchmark.us_about(algorithm)
    if us < LONG_US:
        us = benchmark.us(algorithm, us)
    error = sample.errors(benchmark)
    rate = shape.operations / us / 1e6
    worst, mean = float(error.max()), float(error.mean())
    return Figures(algorithm.name, precision, us / 1e3, rate, nbytes, worst, mean)


def errors_of(
    benchmark: Microbenchmark, shape: Shape, direction: str, algorithm: Algorithm
) -> np.ndarray:
    """How far off sampled elements are by an algorithm, as above."""
    benchmark.results(algorithm)
    return _Sample(benchmark, shape, direction, False).errors(benchmark)


class _Sample:
    """Elements of a result in float64, and the sums of the magnitudes of their terms."""

    def __init__(
        self,
        benchmark: Microbenchmark | NumpyBenchmark,
        shape: Shape,
        direction: str,
        last: bool,
    ) -> None:
        """`last` where images have their channels last."""
        result = dict(zip(DIRECTIONS, (shape.arrays[2], shape.arrays[0], shape.arrays[1])))
        extents = result[direction]
        kinds = _OPERANDS[direction]
        lasts = [last and kind != "filter" for kind in (*kinds, direction)]
        size = int(np.prod(extents))
        rng = np.random.default_rng(1)
        length = max(shape.operations // 2 // size, 1)  # of a sum
        count = min(_SAMPLED, max(_SAMPLED_TERMS // length, 4), size)
        places = sorted(rng.choice(size, count, replace=False).tolist())
        self.at = _moved(np.array(places), extents).tolist() if lasts[-1] else places
        exact, scale = [], []
        for k in places:
            position = tuple(int(one) for one in np.unravel_index(k, extents))
            first, second, met = _TERMS[direction](shape, *position)
            a, b = (
                benchmark.value(
                    i, _moved(at, result[kinds[i]]) if lasts[i] else at.astype(np.int64)
                ).astype(np.float64)
                for i, at in enumerate(np.broadcast_arrays(first, second))
            )
            products = np.where(met, a * b, 0.0)
            exact.append(products.sum())
            scale.append(np.abs(products).sum())
        # An element that sums nothing, as at a stride, is compared with the largest of the others.
        largest = max(*scale, np.finfo(np.float32).tiny)
        self.exact, self.scale = np.array(exact), np.array([one or largest for one in scale])

    def errors(self, benchmark: Microbenchmark | NumpyBenchmark) -> np.ndarray:
        """Of the last run, in units of float32's rounding."""
        off = np.abs(benchmark.elements(self.at) - self.exact)
        return np.asarray(off / self.scale / ROUNDING)


# The operands of a direction, by the direction whose result has their shape.
_OPERANDS = {
    "forward": ("data", "filter"), "data": ("filter", "forward"), "filter": ("data", "forward")
}  # fmt: skip


def _moved(at: np.ndarray, extents: tuple[int, ...]) -> np.ndarray:
    """The row-major indices in (N, H, W, C) of what has these in (N, C, H, W); of what there is
    not, any.
    """
    n, c, h, w = np.unravel_index(np.minimum(at, np.prod(extents) - 1), extents)
    moved = np.ravel_multi_index((n, h, w, c), [extents[k] for k in channels_last.LAST])
    return np.asarray(moved)


# For an element of a result: the indices in row-major order of the factors of its terms in both
# operands, and which of the terms there are.


def _of_output(s: Shape, n: int, o: int, i: int, j: int) -> tuple[Any, Any, Any]:
    channels = s.c // s.groups
    c, a, b = np.ogrid[:channels, : s.kernel, : s.kernel]
    h, w = i * s.stride + a - s.padding, j * s.stride + b - s.padding
    channel = o // (s.o // s.groups) * channels + c
    met = (h >= 0) & (h < s.size) & (w >= 0) & (w < s.size)
    x = ((n * s.c + channel) * s.size + h) * s.size + w
    return np.maximum(x, 0), ((o * channels + c) * s.kernel + a) * s.kernel + b, met


def _of_data(s: Shape, n: int, channel: int, h: int, w: int) -> tuple[Any, Any, Any]:
    channels, filters = s.c // s.groups, s.o // s.groups
    k, a, b = np.ogrid[:filters, : s.kernel, : s.kernel]
    o = channel // channels * filters + k
    down, across = h + s.padding - a, w + s.padding - b
    i, j = down // s.stride, across // s.stride
    met = (down % s.stride == 0) & (across % s.stride == 0)
    met = met & (i >= 0) & (i < s.out) & (j >= 0) & (j < s.out)
    f = ((o * channels + channel % channels) * s.kernel + a) * s.kernel + b
    return f, np.maximum(((n * s.o + o) * s.out + i) * s.out + j, 0), met


def _of_filter(s: Shape, o: int, c: int, a: int, b: int) -> tuple[Any, Any, Any]:
    n, i, j = np.ogrid[: s.n, : s.out, : s.out]
    h, w = i * s.stride + a - s.padding, j * s.stride + b - s.padding
    channel = o // (s.o // s.groups) * (s.c // s.groups) + c
    met = (h >= 0) & (h < s.size) & (w >= 0) & (w < s.size)
    x = ((n * s.c + channel) * s.size + h) * s.size + w
    return np.maximum(x, 0), ((n * s.o + o) * s.out + i) * s.out + j, met


_TERMS = {"forward": _of_output, "data": _of_data, "filter": _of_filter}

"""The geometry of windows that slide over images, which convolution and pooling share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...arguments.kinds import Kind, integers, is_integer
from ...graph.node import Node, same_nodes
from ...graph.spec import Spec
from ...runtime.interface import interface
from ..elementwise import cast_op

_Options = interface.struct("WindowOptions")
Pair = tuple[int, int]
Slices = tuple[slice, slice]


class Windows(NamedTuple):
    """The windows of one operator over images of one size; pairs are (height, width)."""

    image: Pair  # H×W
    size: Pair
    stride: Pair
    dilation: Pair
    before: Pair  # rows of padding above, columns of padding to the left
    after: Pair
    out: Pair  # output positions, down and across

    @property
    def padding(self) -> tuple[Pair, Pair]:
        """The padding as the attribute that stands for it: ((top, bottom), (left, right))."""
        return (self.before[0], self.after[0]), (self.before[1], self.after[1])

    @property
    def argument(self) -> Any:
        """The windows as kernels take them."""
        return _Options(**{name: getattr(self, name) for name, _ in _Options._fields_})

    @property
    def extents(self) -> Pair:
        """The extent of a window, from its first kernel offset to its last."""
        height, width = ((n - 1) * d + 1 for n, d in zip(self.size, self.dilation))
        return height, width

    @property
    def overlap(self) -> bool:
        """True where an element may lie in two windows."""
        return any(extent > stride for extent, stride in zip(self.extents, self.stride))

    @property
    def blind(self) -> bool:
        """True where some window lies in the padding with all of its elements."""
        for axis in (0, 1):
            met = np.zeros(self.out[axis], np.bool_)
            for offset in range(self.size[axis]):
                met[self._reach(axis, offset)[0]] = True
            if not met.all():
                return True
        return False

    def kernel_offsets(self) -> Iterator[tuple[Pair, Slices, Slices]]:
        """Each kernel offset in row-major order, with the output positions at which it reads an
        element of the image, and these elements.
        """
        down = [self._reach(0, offset) for offset in range(self.size[0])]
        across = [self._reach(1, offset) for offset in range(self.size[1])]
        for i, (rows, seen_rows) in enumerate(down):
            for j, (columns, seen_columns) in enumerate(across):
                yield (i, j), (rows, columns), (seen_rows, seen_columns)

    def reads(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """The keys of `kernel_offsets` for arrays (N, C, …): where it is read, and what."""
        for _, positions, seen in self.kernel_offsets():
            yield (..., *positions), (..., *seen)

    def _reach(self, axis: int, offset: int) -> Slices:
        stride = self.stride[axis]
        first = offset * self.dilation[axis] - self.before[axis]  # what the first window sees
        start = max(0, -(first // stride))
        stop = min(self.out[axis], (self.image[axis] - 1 - first) // stride + 1)
        if start >= stop:
            return slice(0, 0), slice(0, 0)
        seen = start * stride + first
        return slice(start, stop), slice(seen, seen + (stop - start - 1) * stride + 1, stride)


class IntPair(Kind):
    """Two integers, for height and width; one stands for both."""

    low = 0

    @property
    def expected(self) -> str:  # type: ignore[override]
        how = "positive integers" if self.low else "integers that are not negative"
        return f"one or two {how}"

    def take(self, value: Any) -> tuple[int, int]:
        if type(value) is int:
            height = width = value
        else:
            height, width = integers((value, value) if is_integer(value) else value)
        if height < self.low or width < self.low:
            raise ValueError
        return height, width


class Padding(Kind):
    """Rows and columns around an image: an integer or a pair for both sides of each axis, pairs of
    them for (before, after), or a word that says how many.
    """

    expected = (
        "'same', 'valid' or one or two integers (or pairs of them, before and after) that are not "
        "negative"
    )

    def take(self, value: Any) -> Any:
        if isinstance(value, str):
            if value not in ("same", "valid"):
                raise ValueError
            return value
        if is_integer(value):
            return _PAIR.take(value)
        height, width = value
        if is_integer(height) or is_integer(width):
            return _PAIR.take((height, width))
        return _PAIR.take(height), _PAIR.take(width)


_PAIR = IntPair()


def slide(
    node: Node, image: tuple[int, ...], size: tuple[int, ...], ceil_mode: bool = False
) -> Windows:
    """The windows of `node`, of its stride, padding and dilation, over an image.

    Raises ShapeError when no window fits into the padded image.
    """
    stride, dilation = node.attrs["stride"], node.attrs.get("dilation", (1, 1))
    before, after, out = [], [], []
    for axis in (0, 1):
        extent = (size[axis] - 1) * dilation[axis] + 1
        lead, tail = _padding(node, axis, image[axis], extent, stride[axis])
        room = image[axis] + lead + tail - extent
        if room < 0 or size[axis] < 1:
            dilated = f" with dilation {dilation}" if dilation != (1, 1) else ""
            raise node.error(
                f"window {size}{dilated} is larger than the image {image} with padding "
                f"{node.attrs['padding']!r}"
            )
        count = -(-room // stride[axis]) + 1 if ceil_mode else room // stride[axis] + 1
        if ceil_mode and (count - 1) * stride[axis] >= image[axis] + lead:
            count -= 1  # the last window would begin behind the image
        before.append(lead)
        after.append(tail)
        out.append(count)
    pairs = (image, size, stride, dilation, tuple(before), tuple(after), tuple(out))
    return Windows(*pairs)  # type: ignore[arg-type]


def check_images(node: Node, position: int, spec: Spec, layout: str = "(N, C, H, W)") -> None:
    """Refuses an input that has not four dimensions."""
    if len(spec.shape) != 4:
        raise node.error(f"expected {layout}, got {node.inputs[position].name} {spec.shape}")


def in_floats(node: Node, dtype: np.dtype, free: tuple[int, ...] = ()) -> Node | None:
    """The node over inputs cast to `dtype` where they differ, else None; `free` inputs stay."""
    inputs = [
        x if k in free or x.spec.dtype == dtype else cast_op(x, dtype)
        for k, x in enumerate(node.inputs)
    ]
    return None if same_nodes(inputs, node.inputs) else node.derive(inputs, node.spec)


def _padding(node: Node, axis: int, image: int, extent: int, stride: int) -> Pair:
    padding = node.attrs["padding"]
    if padding == "valid":
        return 0, 0
    if padding == "same":  # as many windows as the image has strides; an odd rest goes behind
        total = max((-(-image // stride) - 1) * stride + extent - image, 0)
        return total // 2, total - total // 2
    return padding[axis] if isinstance(padding[axis], tuple) else (padding[axis], padding[axis])

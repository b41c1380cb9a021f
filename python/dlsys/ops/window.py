"""Windows that slide over planes: the geometry that convolution and pooling share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..graph.node import Node, Spec, same_nodes
from .elementwise import cast_op

Pair = tuple[int, int]
Slices = tuple[slice, slice]


class Windows(NamedTuple):
    """The windows of one operator over planes of one size; pairs are (height, width)."""

    plane: Pair
    size: Pair
    stride: Pair
    dilation: Pair
    before: Pair  # rows of padding above, columns of padding to the left
    after: Pair
    out: Pair  # how many windows there are, down and across

    @property
    def padding(self) -> tuple[Pair, Pair]:
        """The padding as the attribute that stands for it: ((top, bottom), (left, right))."""
        return (self.before[0], self.after[0]), (self.before[1], self.after[1])

    @property
    def extents(self) -> Pair:
        """How far a window reaches, from its first tap to its last."""
        height, width = ((n - 1) * d + 1 for n, d in zip(self.size, self.dilation))
        return height, width

    @property
    def overlap(self) -> bool:
        """Whether an element may lie in two windows."""
        return any(extent > stride for extent, stride in zip(self.extents, self.stride))

    @property
    def blind(self) -> bool:
        """Whether there is a window none of whose taps lies on the plane."""
        for axis in (0, 1):
            met = np.zeros(self.out[axis], np.bool_)
            for tap in range(self.size[axis]):
                met[self._reach(axis, tap)[0]] = True
            if not met.all():
                return True
        return False

    def taps(self) -> Iterator[tuple[Pair, Slices, Slices]]:
        """Each tap of the windows in row-major order, with the windows in which it lies on the
        plane and the elements that it meets there.
        """
        down = [self._reach(0, tap) for tap in range(self.size[0])]
        across = [self._reach(1, tap) for tap in range(self.size[1])]
        for i, (rows, seen_rows) in enumerate(down):
            for j, (columns, seen_columns) in enumerate(across):
                yield (i, j), (rows, columns), (seen_rows, seen_columns)

    def _reach(self, axis: int, tap: int) -> Slices:
        stride = self.stride[axis]
        first = tap * self.dilation[axis] - self.before[axis]  # what the first window sees
        start = max(0, -(first // stride))
        stop = min(self.out[axis], (self.plane[axis] - 1 - first) // stride + 1)
        if start >= stop:
            return slice(0, 0), slice(0, 0)
        seen = start * stride + first
        return slice(start, stop), slice(seen, seen + (stop - start - 1) * stride + 1, stride)


def pair(value: Any) -> Any:
    """A number for both axes as two; everything else as tuples, to be checked later."""
    if isinstance(value, (int, np.integer)):
        return (int(value), int(value))
    if isinstance(value, str) or value is None:
        return value
    return tuple(int(v) if isinstance(v, np.integer) else pair_or_item(v) for v in value)


def pair_or_item(value: Any) -> Any:
    """Inner pairs as tuples."""
    return tuple(value) if isinstance(value, (list, tuple)) else value


def check_attributes(node: Node) -> None:
    """Refuses strides, windows, dilations, groups and paddings that no plane could have."""
    for name in ("window", "stride", "dilation"):
        value = node.attrs.get(name)
        if value is not None and not _is_pair(value, 1):
            raise node.error(f"{name} must be one or two positive integers, got {_shown(value)}")
    groups = node.attrs.get("groups", 1)
    if not isinstance(groups, int) or groups < 1:
        raise node.error(f"groups must be a positive integer, got {groups!r}")
    padding = node.attrs.get("padding")
    if padding in ("same", "valid") or padding is None or _is_pair(padding, 0):
        return
    if isinstance(padding, tuple) and len(padding) == 2 and all(_is_pair(p, 0) for p in padding):
        return
    raise node.error(
        "padding must be 'same', 'valid' or one or two integers (or pairs of them, before and "
        f"after) that are not negative, got {_shown(padding)}"
    )


def slide(
    node: Node, plane: tuple[int, ...], size: tuple[int, ...], ceil_mode: bool = False
) -> Windows:
    """The windows of `node`, of its stride, padding and dilation, over a plane.

    Raises ShapeError when the attributes make no sense or no window fits into the padded plane.
    """
    check_attributes(node)
    stride, dilation = node.attrs["stride"], node.attrs.get("dilation", (1, 1))
    before, after, out = [], [], []
    for axis in (0, 1):
        extent = (size[axis] - 1) * dilation[axis] + 1
        lead, tail = _padding(node, axis, plane[axis], extent, stride[axis])
        room = plane[axis] + lead + tail - extent
        if room < 0 or size[axis] < 1:
            dilated = f" with dilation {dilation}" if dilation != (1, 1) else ""
            raise node.error(
                f"window {size}{dilated} is larger than the plane {plane} with padding "
                f"{_shown(node.attrs['padding'])}"
            )
        count = -(-room // stride[axis]) + 1 if ceil_mode else room // stride[axis] + 1
        if ceil_mode and (count - 1) * stride[axis] >= plane[axis] + lead:
            count -= 1  # the last window would begin behind the plane
        before.append(lead)
        after.append(tail)
        out.append(count)
    pairs = (plane, size, stride, dilation, tuple(before), tuple(after), tuple(out))
    return Windows(*pairs)  # type: ignore[arg-type]


def check_planes(node: Node, position: int, spec: Spec, layout: str = "(N, C, H, W)") -> None:
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


def packed(value: Pair) -> int:
    """Two numbers in one kernel argument: the height in the high half."""
    return value[0] << 32 | value[1]


def _padding(node: Node, axis: int, plane: int, extent: int, stride: int) -> Pair:
    padding = node.attrs["padding"]
    if padding == "valid":
        return 0, 0
    if padding == "same":  # as many windows as the plane has strides; an odd rest goes behind
        total = max((-(-plane // stride) - 1) * stride + extent - plane, 0)
        return total // 2, total - total // 2
    return padding[axis] if isinstance(padding[axis], tuple) else (padding[axis], padding[axis])


def _is_pair(value: Any, least: int) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(v, int) and v >= least for v in value)
    )


def _shown(value: Any) -> str:
    return repr(value)

"""Convolution in numpy by im2col: the windows of some images become the columns of a matrix, a
kernel offset a row, and GEMMs do the rest. Images go in chunks, so that columns stay in the caches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...graph.spec import Spec
from .geometry import Windows

CHUNK_NBYTES = 4 << 20  # of columns


def spec_of(array: np.ndarray) -> Spec:
    """Shape and dtype of an array."""
    return Spec(array.shape, array.dtype)


def by_group(f: np.ndarray, groups: int) -> np.ndarray:
    """A filter as a matrix a group: (groups, O/groups, C/groups · kH · kW)."""
    return f.reshape(groups, f.shape[0] // groups, f.shape[1] * f.shape[2] * f.shape[3])


def by_image(x: np.ndarray, groups: int) -> np.ndarray:
    """H×W as the columns of a matrix for each image and group: (N, groups, C/groups, H · W)."""
    n, c, h, w = x.shape
    return x.reshape(n, groups, c // groups, h * w)


def is_pointwise(windows: Windows) -> bool:
    """True for a 1×1 kernel at stride 1, which needs no im2col."""
    return windows.size == windows.stride == (1, 1) and windows.image == windows.out


def images_at_once(n: int, elements: int, dtype: np.dtype | None) -> int:
    """The number of images in a chunk when the columns of each have that many elements."""
    assert dtype is not None
    return max(1, min(n, CHUNK_NBYTES // max(elements * dtype.itemsize, 1)))


def chunks(n: int, size: int) -> Iterator[slice]:
    """The images in chunks."""
    for start in range(0, n, max(size, 1)):
        yield slice(start, min(n, start + size))


def im2col_workspace(windows: Windows, x: Spec, dtype: np.dtype | None) -> list[Spec]:
    """The workspace of `im2col`: (images, C, kH, kW, oH, oW)."""
    if is_pointwise(windows):
        return []
    one = (x.shape[1], *windows.size, *windows.out)
    return [Spec((images_at_once(x.shape[0], Spec(one, dtype).size, dtype), *one), dtype)]


def im2col(
    x: np.ndarray, windows: Windows, scratch: np.ndarray | None
) -> Iterator[tuple[slice, np.ndarray]]:
    """Chunks of images with their columns: what each kernel offset of each window reads."""
    if scratch is None:
        yield slice(0, len(x)), x
        return
    for images in chunks(len(x), len(scratch)):
        columns = scratch[: images.stop - images.start]
        gather(x[images], columns, windows, fresh=images.start == 0)
        yield images, columns


def gather(x: np.ndarray, columns: np.ndarray, windows: Windows, fresh: bool = True) -> None:
    """Copies x (A, B, H, W) to the columns (A, B, kH, kW, oH, oW); padding is zeros, written when
    the columns are fresh.
    """
    if fresh and windows.padding != ((0, 0), (0, 0)):
        columns.fill(0)
    for (i, j), (rows, across), seen in windows.kernel_offsets():
        at = (..., *seen)
        np.copyto(columns[:, :, i, j, rows, across], x[at])

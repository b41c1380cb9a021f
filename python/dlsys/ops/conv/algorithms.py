"""The rungs of convolution in numpy beside im2col: naive, implicit, fft and winograd.

Each computes the convolution and its two gradients over arrays with an axis of groups: x and dx
(N, groups, C, H, W), f and df (groups, O, C, kH, kW), y and dy (N, groups, O, oH, oW). Each result
is written in full.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...errors import NotApplicableError
from ...graph.node import Node
from ...rungs import CONV
from .geometry import Pair, Slices, Windows


class Algorithm:
    """One rung: three functions of the windows."""

    serves = ""  # what it is for, where that is not everything

    def fits(self, windows: Windows) -> bool:
        """True where it computes a convolution over these windows."""
        return True

    def forward(self, windows: Windows, x: np.ndarray, f: np.ndarray, y: np.ndarray) -> None:
        """The convolution y."""
        raise NotImplementedError

    def data(self, windows: Windows, f: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        """The gradient for the data, dx."""
        raise NotImplementedError

    def filter(self, windows: Windows, x: np.ndarray, dy: np.ndarray, df: np.ndarray) -> None:
        """The gradient for the filter, df."""
        raise NotImplementedError


def at(last: Iterable[int | slice]) -> tuple[Any, ...]:
    """The key of positions along the last two axes, such as of a kernel offset in filters."""
    return (..., *last)


class Naive(Algorithm):
    """The definition: one filter, channel and kernel offset at a time."""

    def forward(self, windows: Windows, x: np.ndarray, f: np.ndarray, y: np.ndarray) -> None:
        y.fill(0)
        for g, o, c in np.ndindex(*f.shape[:3]):
            for offset, to, seen in windows.kernel_offsets():
                y[:, g, o][at(to)] += f[g, o, c][offset] * x[:, g, c][at(seen)]

    def data(self, windows: Windows, f: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        dx.fill(0)
        for g, o, c in np.ndindex(*f.shape[:3]):
            for offset, to, seen in windows.kernel_offsets():
                dx[:, g, c][at(seen)] += f[g, o, c][offset] * dy[:, g, o][at(to)]

    def filter(self, windows: Windows, x: np.ndarray, dy: np.ndarray, df: np.ndarray) -> None:
        for g, o, c in np.ndindex(*df.shape[:3]):
            for offset, to, seen in windows.kernel_offsets():
                products = dy[:, g, o][at(to)] * x[:, g, c][at(seen)]
                df[g, o, c][offset] = products.sum()


class Implicit(Algorithm):
    """A GEMM for each kernel offset, whose columns are gathered for it alone."""

    def forward(self, windows: Windows, x: np.ndarray, f: np.ndarray, y: np.ndarray) -> None:
        y.fill(0)
        for offset, to, seen in windows.kernel_offsets():
            into = y[at(to)]
            into += np.matmul(f[at(offset)], columns(x, seen)).reshape(into.shape)

    def data(self, windows: Windows, f: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        dx.fill(0)
        for offset, to, seen in windows.kernel_offsets():
            into = dx[at(seen)]
            into += np.matmul(f[at(offset)].swapaxes(1, 2), columns(dy, to)).reshape(into.shape)

    def filter(self, windows: Windows, x: np.ndarray, dy: np.ndarray, df: np.ndarray) -> None:
        for offset, to, seen in windows.kernel_offsets():
            parts = np.matmul(columns(dy, to), columns(x, seen).swapaxes(2, 3))
            np.sum(parts, axis=0, out=df[at(offset)])


def columns(x: np.ndarray, where: Slices) -> np.ndarray:
    """Images at some positions as matrices: (N, groups, channels, positions)."""
    part = x[at(where)]
    return part.reshape(*part.shape[:3], part.shape[3] * part.shape[4])


class Fft(Algorithm):
    """Products of Fourier transforms. A correlation is the product with the conjugate; strides
    sample a result or space dy out, dilation spaces the filter out.
    """

    def forward(self, windows: Windows, x: np.ndarray, f: np.ndarray, y: np.ndarray) -> None:
        size = spans(windows)
        left = transformed(x.swapaxes(0, 1), size, windows.before)
        right = transformed(f, size, (0, 0), windows.dilation)
        product = np.matmul(left, right.conj().swapaxes(-1, -2))
        y[...] = sampled(product, size, windows.out, windows.stride).swapaxes(0, 1)

    def data(self, windows: Windows, f: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        padded = windows.image[0] + windows.before[0], windows.image[1] + windows.before[1]
        size = tuple(map(max, padded, spans(windows)))
        left = transformed(dy.swapaxes(0, 1), size, (0, 0), windows.stride)
        right = transformed(f, size, (0, 0), windows.dilation)
        result = sampled(np.matmul(left, right), size, padded, (1, 1)).swapaxes(0, 1)
        dx[...] = result[..., windows.before[0] :, windows.before[1] :]

    def filter(self, windows: Windows, x: np.ndarray, dy: np.ndarray, df: np.ndarray) -> None:
        size = spans(windows)
        left = transformed(dy.swapaxes(0, 1), size, (0, 0), windows.stride)
        right = transformed(x.swapaxes(0, 1), size, windows.before)
        product = np.matmul(left.conj().swapaxes(-1, -2), right)
        df[...] = sampled(product, size, windows.size, windows.dilation)


def spans(windows: Windows) -> tuple[int, ...]:
    """The rows and columns of the padded image that windows see."""
    reach = zip(windows.out, windows.stride, windows.extents)
    return tuple(max((n - 1) * stride + extent, 1) for n, stride, extent in reach)


def transformed(
    x: np.ndarray, size: tuple[int, ...], origin: Pair, spacing: Pair = (1, 1)
) -> np.ndarray:
    """Transforms of zero-padded planes whose elements are `spacing` apart from `origin` on: from
    (groups, A, B, h, w) to (rows, columns, groups, A, B).
    """
    plane = np.zeros((*x.shape[:3], *size), x.dtype)
    into, taken = [], []
    for axis in (0, 1):
        room = -(-max(size[axis] - origin[axis], 0) // spacing[axis])
        count = min(x.shape[3 + axis], room)
        into.append(slice(origin[axis], origin[axis] + count * spacing[axis], spacing[axis]))
        taken.append(slice(0, count))
    plane[at(into)] = x[at(taken)]
    return np.moveaxis(np.fft.rfft2(plane), (3, 4), (0, 1))


def sampled(product: np.ndarray, size: tuple[int, ...], count: Pair, step: Pair) -> np.ndarray:
    """`count` elements, `step` apart, of the planes whose transforms are a product: (rows, columns,
    groups, A, B) to (groups, A, B, …).
    """
    planes = np.fft.irfft2(np.moveaxis(product, (0, 1), (3, 4)), s=size)
    ends = [(n - 1) * s + 1 for n, s in zip(count, step)]
    return planes[..., : ends[0] : step[0], : ends[1] : step[1]]


class Winograd(Algorithm):
    """F(m×m, 3×3) of Lavin and Gray, "Fast algorithms for convolutional neural networks" (2016):
    y = Aᵀ[(G g Gᵀ) ∘ (Bᵀ d B)]A over tiles of m×m outputs, a GEMM for each of (m + 2)² elements.
    The filter's gradient is the adjoint of the same formula. src/math/winograd.h says at which
    points the matrices for m = 2 and 4 interpolate.
    """

    serves = "3×3 filters at stride 1 without dilation"

    def __init__(self, Bt: Any, G: Any, At: Any) -> None:
        self.B, self.G, self.A = (np.array(matrix, np.float64) for matrix in (Bt, G, At))
        self.out, self.size = self.A.shape

    def fits(self, windows: Windows) -> bool:
        return windows.size == (3, 3) and windows.stride == windows.dilation == (1, 1)

    def forward(self, windows: Windows, x: np.ndarray, f: np.ndarray, y: np.ndarray) -> None:
        self._correlate(x, f, windows.before, y)

    def data(self, windows: Windows, f: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        mirrored = f[..., ::-1, ::-1].swapaxes(1, 2)
        self._correlate(dy, mirrored, (2 - windows.before[0], 2 - windows.before[1]), dx)

    def filter(self, windows: Windows, x: np.ndarray, dy: np.ndarray, df: np.ndarray) -> None:
        left = elements(self._tiles(dy, (0, 0), windows.out, self.out), self.A.T)
        right = elements(self._tiles(x, windows.before, windows.out, self.size), self.B)
        sums = np.matmul(left, right.swapaxes(-1, -2))  # (size², groups, O, C)
        back = np.kron(self.G, self.G).astype(df.dtype)
        df[...] = np.tensordot(sums, back, (0, 0)).reshape(df.shape)

    def _correlate(self, x: np.ndarray, f: np.ndarray, before: Pair, y: np.ndarray) -> None:
        """y = the correlation of x, with rows and columns before it, and f."""
        out, m = (y.shape[3], y.shape[4]), self.out
        right = elements(self._tiles(x, before, out, self.size), self.B)
        forms = np.kron(self.G, self.G).astype(f.dtype)
        left = np.moveaxis(f.reshape(*f.shape[:3], 9) @ forms.T, 3, 0)
        product = np.matmul(left, right)  # (size², groups, O, tiles)
        back = np.kron(self.A, self.A).astype(y.dtype)
        down, across = (-(-n // m) for n in out)
        made = np.tensordot(product, back, (0, 1))  # (groups, O, tiles, m²)
        made = made.reshape(*made.shape[:2], len(y), down, across, m, m)
        made = made.transpose(2, 0, 1, 3, 5, 4, 6).reshape(*y.shape[:3], m * down, m * across)
        y[...] = made[..., : out[0], : out[1]]

    def _tiles(self, x: np.ndarray, before: Pair, out: Pair, size: int) -> np.ndarray:
        """Tiles of size × size at every m-th pixel of the padded images (N, groups, C, H, W), as
        many as outputs take: (groups, C, N, down, across, size²).
        """
        m = self.out
        extents = [m * (-(-n // m) - 1) + size for n in out]
        padded = np.zeros((*x.shape[:3], *extents), x.dtype)
        into, taken = [], []
        for axis in (0, 1):
            start = max(before[axis], 0)
            stop = min(before[axis] + x.shape[3 + axis], extents[axis])
            into.append(slice(start, max(start, stop)))
            taken.append(slice(start - before[axis], max(start, stop) - before[axis]))
        padded[at(into)] = x[at(taken)]
        seen = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (3, 4))
        seen = np.moveaxis(seen[..., ::m, ::m, :, :], 0, 2)
        return seen.reshape(*seen.shape[:5], size * size)


def elements(tiles: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """M t Mᵀ of each tile t: (elements, groups, C, tiles)."""
    both = np.kron(matrix, matrix).astype(tiles.dtype)
    flat = tiles.reshape(*tiles.shape[:2], -1, tiles.shape[-1])
    return np.moveaxis(flat @ both.T, 3, 0)


F2 = Winograd(
    [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
    [[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]],
    [[1, 1, 1, 0], [0, 1, -1, -1]],
)
_b = 2**0.5
F4 = Winograd(
    [[1, 0, -2.5, 0, 1, 0], [0, -_b, -2, _b / 2, 1, 0], [0, _b, -2, -_b / 2, 1, 0],
     [0, -_b / 2, -0.5, _b, 1, 0], [0, _b / 2, -0.5, -_b, 1, 0], [0, 1, 0, -2.5, 0, 1]],
    [[1, 0, 0], [-2 / 3, -_b / 3, -1 / 3], [-2 / 3, _b / 3, -1 / 3],
     [1 / 6, _b / 6, 1 / 3], [1 / 6, -_b / 6, 1 / 3], [0, 0, 1]],
    [[1, 1, 1, 1, 1, 0], [0, _b / 2, -_b / 2, _b, -_b, 0], [0, 0.5, 0.5, 2, 2, 0],
     [0, _b / 4, -_b / 4, 2 * _b, -2 * _b, 1]],
)  # fmt: skip

ALGORITHMS: dict[str, Algorithm] = {
    "naive": Naive(),
    "fft": Fft(),
    "winograd": F2,
    "winograd 2x2": F2,
    "winograd 4x4": F4,
    "implicit": Implicit(),
}


def algorithm_of(node: Node, windows: Windows) -> Algorithm | None:
    """The rung that a node names, or None for im2col; NotApplicableError where it does not fit."""
    algorithm = ALGORITHMS.get(node.attrs.get("algo", ""))
    if algorithm is None or algorithm.fits(windows):
        return algorithm
    known = [r for r in CONV.numpy if r not in ALGORITHMS or ALGORITHMS[r].fits(windows)]
    raise NotApplicableError(
        f"{node.op.name}: {node.attrs['algo']} is for {algorithm.serves}; use {', '.join(known)} "
        f"[{node.where}]"
    )


def grouped(x: np.ndarray, groups: int) -> np.ndarray:
    """Images (N, C, H, W) with the groups as an axis: (N, groups, C/groups, H, W)."""
    return x.reshape(len(x), groups, x.shape[1] // groups, *x.shape[2:])


def filters(f: np.ndarray, groups: int) -> np.ndarray:
    """Filters (O, C/groups, kH, kW) with the groups as an axis: (groups, O/groups, …)."""
    return f.reshape(groups, f.shape[0] // groups, *f.shape[1:])

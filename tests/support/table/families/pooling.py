"""The rows of samples.py for pooling, and its formulas window by window in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys.ops.conv import pooling
from support.table.families.conv import around, pair
from support.table.rows import Case, Sample, case, refuse

# ---- formulas ----


class Naive:
    """Every window of a pooling as slices of the image, and how much of the padding it covers."""

    def __init__(
        self, image: Any, window: Any = None, stride: Any = None, padding: Any = 0,
        ceil_mode: bool = False, dilation: Any = 1,
    ) -> None:  # fmt: skip
        self.image = tuple(image)
        self.dilation = pair(dilation)
        size = pair(image if window is None else window)
        self.size = tuple((n - 1) * d + 1 for n, d in zip(size, self.dilation))
        default = 1 if window is None else window
        self.stride = pair(default if stride is None else stride)
        self.pads = around(padding, self.image, self.size, self.stride, (1, 1))
        self.out = tuple(self.count(axis, ceil_mode) for axis in (0, 1))

    def count(self, axis: int, ceil_mode: bool) -> int:
        before, after = self.pads[axis]
        room = (self.image[axis] + before + after - self.size[axis]) / self.stride[axis]
        last = int(np.ceil(room) if ceil_mode else np.floor(room))
        while ceil_mode and last * self.stride[axis] >= self.image[axis] + before:
            last -= 1
        return last + 1

    def windows(self) -> Any:
        """Each window's position, slices, and count of elements with those of the padding."""
        for at in np.ndindex(*self.out):
            slices, padded = [], 1
            for axis in (0, 1):
                start = at[axis] * self.stride[axis] - self.pads[axis][0]
                stop = start + self.size[axis]
                step = self.dilation[axis]
                first = next(k for k in range(start, stop, step) if k >= 0)
                slices.append(slice(first, min(stop, self.image[axis]), step))
                padded *= min(stop, self.image[axis] + self.pads[axis][1]) - start
            yield at, tuple(slices), padded


def max_pooled(x: np.ndarray, **attrs: Any) -> np.ndarray:
    naive = Naive(x.shape[2:], **attrs)
    y = np.zeros((*x.shape[:2], *naive.out))
    for at, seen, _ in naive.windows():
        y[(..., *at)] = x[(..., *seen)].max(axis=(2, 3))  # NaN wins
    return y


def first_indices(x: np.ndarray, **attrs: Any) -> np.ndarray:
    """The flat index in H×W of the first largest element of each window."""
    naive = Naive(x.shape[2:], **attrs)
    flat = np.arange(x.shape[2] * x.shape[3]).reshape(x.shape[2:])
    indices = np.zeros((*x.shape[:2], *naive.out), np.int32)
    if not x.size:
        return indices
    for at, seen, _ in naive.windows():
        met = x[(..., *seen)].reshape(*x.shape[:2], -1)
        indices[(..., *at)] = flat[seen].ravel()[met.argmax(axis=-1)]
    return indices


def spread(dy: np.ndarray, indices: np.ndarray, image: Any) -> np.ndarray:
    dx = np.zeros((dy.shape[0] * dy.shape[1], image[0] * image[1]))
    rows = np.arange(len(dx)).repeat(dy[0, 0].size if dy.size else 0)
    np.add.at(dx, (rows, indices.ravel()), dy.ravel())
    return dx.reshape(*dy.shape[:2], *image)


def read(x: np.ndarray, indices: np.ndarray, **attrs: Any) -> np.ndarray:
    flat = (*x.shape[:2], x.shape[2] * x.shape[3])
    chosen = indices.reshape(*x.shape[:2], indices.shape[2] * indices.shape[3])
    taken = np.take_along_axis(x.reshape(flat), chosen.astype(np.int64), -1)
    return taken.reshape(indices.shape)


def averaged(x: np.ndarray, count_include_pad: bool = True, **attrs: Any) -> np.ndarray:
    naive = Naive(x.shape[2:], **attrs)
    y = np.zeros((*x.shape[:2], *naive.out))
    for at, seen, padded in naive.windows():
        met = x[(..., *seen)]
        count = padded if count_include_pad else met[0, 0].size if met.size else 1
        y[(..., *at)] = met.sum(axis=(2, 3)) / count
    return y


def average_spread(
    dy: np.ndarray, image: Any, count_include_pad: bool = True, **attrs: Any
) -> np.ndarray:
    naive = Naive(image, **attrs)
    dx = np.zeros((*dy.shape[:2], *image))
    for at, seen, padded in naive.windows():
        inside = (seen[0].stop - seen[0].start) * (seen[1].stop - seen[1].start)
        share = dy[(..., *at)] / (padded if count_include_pad else inside)
        dx[(..., *seen)] += share[:, :, None, None]
    return dx


def max_gradient(y: np.ndarray, dy: np.ndarray, x: np.ndarray, **attrs: Any) -> np.ndarray:
    return spread(dy, first_indices(x, **windows_of(attrs)), x.shape[2:])


def avg_gradient(y: np.ndarray, dy: np.ndarray, x: np.ndarray, **attrs: Any) -> np.ndarray:
    return average_spread(dy, x.shape[2:], **windows_of(attrs))


def windows_of(attrs: Any) -> dict[str, Any]:
    """The attributes of older names, as those of today."""
    window = attrs["kernel_H"], attrs["kernel_W"]
    return dict(window=window, padding=attrs.get("padding", 0), stride=attrs.get("stride", 1))


def apart(rng: np.random.Generator, shape: Any) -> np.ndarray:
    """Different numbers, far enough apart for finite differences: no ties."""
    size = int(np.prod(shape))
    return (rng.permutation(size).reshape(shape) - size // 2) / 16


# ---- rows ----

CASES = (
    case((2, 3, 6, 8), window=2),
    case((2, 3, 7, 5), window=(3, 2), stride=(2, 1), padding=(1, 0)),
    case((1, 1, 5, 5), window=3, stride=1, padding=1),
    case((2, 2, 7, 9), window=3, stride=2, ceil_mode=True),
    case((2, 2, 8, 7), window=(2, 3), stride=3, padding=1, ceil_mode=True),
    case((1, 2, 6, 5), window=2, stride=3),
    case((1, 2, 6, 5), window=3, stride=2, padding="same"),
    case((1, 2, 6, 5), window=3, stride=2, padding=((0, 2), (1, 0))),
    case((2, 2, 4, 3), window=(4, 3)),
    case((0, 2, 4, 4), window=2),
    case((2, 0, 4, 4), window=2),
    case((3, 6, 28, 28), window=2),
    case((2, 17, 13, 11), window=3, stride=2, padding=1),
)
# size that leave elements out, windows that overlap and that do not, padding all around
DILATED = (
    case((2, 3, 7, 8), window=2, dilation=2),
    case((2, 2, 9, 8), window=(2, 3), stride=1, dilation=(3, 2)),
    case((2, 3, 6, 7), window=3, stride=2, padding=2, dilation=2),
    case((1, 2, 8, 9), window=(3, 1), stride=(1, 3), dilation=(2, 5), ceil_mode=True),
    case((2, 2, 7, 7), window=3, stride=2, padding="same", dilation=2),
    case((1, 1, 5, 6), window=2, stride=2, padding=((1, 3), (0, 2)), dilation=3),
    case((2, 0, 6, 6), window=2, dilation=2),
)
ALL = CASES + DILATED
UNPADDED = tuple(Case(c.shapes, {**c.attrs, "count_include_pad": False}) for c in CASES[1:5])
WHOLE = tuple(
    case(s) for s in [(2, 3, 4, 5), (2, 3, 20, 37), (1, 1, 1, 1), (0, 3, 2, 2), (3, 65, 7, 7)]
)
OLD = (
    case((2, 3, 6, 8), kernel_H=2, kernel_W=2, padding=0, stride=2),
    case((2, 3, 6, 8), kernel_H=3, kernel_W=2, padding=1, stride=1),
    case((2, 3, 6, 8), kernel_H=2, kernel_W=3),
)
GOOD = (2, 3, 6, 6)
PAIR = r"must be one or two positive integers, got"
REFUSALS = (
    refuse(rf"window {PAIR} \(0, 2\)", GOOD, window=(0, 2)),
    refuse(rf"stride {PAIR} 0", GOOD, window=2, stride=0),
    refuse(r"padding must be .* not negative, got \(0, -1\)", GOOD, window=2, padding=(0, -1)),
    refuse(r"window \(7, 2\) is larger than the image \(6, 6\)", GOOD, window=(7, 2)),
    refuse(r"padding \(2, 2\) must be below the window \(2, 2\)", GOOD, window=2, padding=2),
    refuse(r"expected \(N, C, H, W\), got \S+ \(2, 3\)", (2, 3), window=2),
)
REFUSALS_OF_MAX = (
    *REFUSALS,
    refuse("dilation must be one or two positive integers, got 0", GOOD, window=2, dilation=0),
    refuse(r"window \(3, 3\) with dilation \(3, 3\) is larger than the image", GOOD, window=3,
           dilation=3),
    refuse(r"padding \(4, 4\) must be below the window \(4, 4\)", GOOD, window=2, dilation=3,
           padding=4),
    refuse(r"a window \(2, 2\) with dilation \(3, 3\) and padding \(1, 1\) sees nothing of the "
           r"image \(2, 6\)", (2, 3, 2, 6), window=2, dilation=3, padding=1),
)  # fmt: skip
REFUSALS_OF_MEAN = (
    *REFUSALS, refuse(r"unexpected attribute 'dilation'", GOOD, window=2, dilation=2),
)  # fmt: skip


def first(op: Any) -> Any:
    return lambda *inputs, **attrs: op(*inputs, **attrs)[0]


def with_indices(cases: tuple[Case, ...], layout: str) -> tuple[Case, ...]:
    """Cases of what takes indices: d for dy, i for indices, x for the data."""
    found = []
    for c in cases:
        shape = c.shapes[0]
        naive = Naive(shape[2:], **c.attrs)
        out = (*shape[:2], *naive.out)

        def indices(rng: Any, _: Any, shape: Any = shape, attrs: Any = c.attrs) -> np.ndarray:
            return first_indices(apart(rng, shape), **attrs)

        domains = {"d": apart, "i": indices, "x": apart}
        shapes = {"d": out, "i": out, "x": shape}
        attrs = {**c.attrs, "image": shape[2:]} if layout == "di" else c.attrs
        made = tuple(shapes[k] for k in layout), attrs, tuple(domains[k] for k in layout)
        found.append(Case(*made))
    return tuple(found)


def of_gradient(cases: tuple[Case, ...], like: bool) -> tuple[Case, ...]:
    """Cases of the gradient of a mean: dy, and the data or its H×W."""
    found = []
    for c in cases:
        shape = c.shapes[0]
        attrs = {k: v for k, v in c.attrs.items() if k != "count_include_pad"}
        dy = (*shape[:2], *Naive(shape[2:], **attrs).out)
        given = {"count_include_pad": True, **c.attrs}
        found.append(
            Case((dy, shape), given) if like else Case((dy,), {**given, "image": shape[2:]})
        )
    return tuple(found)


def triples(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """(y, dy, x) of poolings by their older names."""
    found = []
    for c in cases:
        shape = c.shapes[0]
        out = (*shape[:2], *Naive(shape[2:], **windows_of(c.attrs)).out)
        found.append(Case((out, out, shape), c.attrs))
    return tuple(found)


def exact(name: str, op: Any, formula: Any, cases: Any, **more: Any) -> Sample:
    return Sample(name, op, formula, cases, more.pop("domain", apart), ulps=0, **more)


def summed(name: str, op: Any, formula: Any, cases: Any, **more: Any) -> Sample:
    """Sums of a window: an error of a few ulp of the sizes of its terms."""

    def scale(*arrays: np.ndarray, **attrs: Any) -> np.ndarray:
        sizes = [np.abs(x) if x.dtype.kind == "f" else x for x in arrays]
        return formula(*sizes, **attrs)

    return Sample(name, op, formula, cases, scale=scale, ulps=8, **more)


BOTH = tuple(Case(c.shapes, {**c.attrs, "count_include_pad": True}) for c in CASES)
MIXED_DY = r"pooling gives \(2, 3, 3, 3\), its gradient is \(2, 3, 2, 3\)"

POOLING = (
    exact("max_pool2d", pooling.max_pool_op, max_pooled, ALL,
          build=first(pooling.max_pool_op), refusals=REFUSALS_OF_MAX, integers="float"),
    exact("max_pool2d_function", pooling.max_pool2d, max_pooled, CASES[:4] + DILATED[:3]),
    exact("max_pool2d_op", pooling.max_pool2d_op,
           lambda x, **a: max_pooled(x, **windows_of(a)), OLD),
    exact("global_max_pool2d", pooling.global_max_pool2d, lambda x: x.max(axis=(2, 3)), WHOLE),
    summed(
        "max_pool2d_gradient", pooling.max_pool_gradient_op,
        lambda dy, indices, image, **attrs: spread(dy, indices, image), with_indices(ALL, "di"),
        differentiable=(0,), specials=False,
        refusals=(
            refuse(r"expected one index for each gradient, got", (1, 1, 2, 2), (1, 1, 2, 1),
                   dtypes=("float32", "int32"), window=2, image=(4, 4)),
            refuse(r"expected images \(2, 2\), got", (1, 1, 2, 1), (1, 1, 2, 1),
                   dtypes=("float32", "int32"), window=2, image=(4, 4)),
        ),
    ),
    summed(
        "max_pool2d_gradient_like", pooling.max_pool_gradient_like_op,
        lambda dy, indices, x, **attrs: spread(dy, indices, x.shape[2:]), with_indices(ALL, "dix"),
        differentiable=(0,), specials=False,
        refusals=(
            refuse(MIXED_DY, (2, 3, 2, 3), (2, 3, 2, 3), GOOD,
                   dtypes=("float32", "int32", "float32"), window=2),
        ),
    ),
    exact(
        "max_pool2d_read", pooling.max_pool_read_op, read, with_indices(ALL, "xi"),
        differentiable=(0,), specials=False,
        refusals=(
            refuse(r"expected indices \(2, 3, 3, 3\), got", GOOD, (2, 3, 2, 3),
                   dtypes=("float32", "int32"), window=2),
        ),
    ),
    summed("max_pool2d_gradient_op", pooling.max_pool2d_gradient_op, max_gradient, triples(OLD),
           differentiable=(1,), specials=False, domain=apart, roundings=4),
    summed("avg_pool2d", pooling.avg_pool_op, averaged, BOTH + UNPADDED, integers="float",
           refusals=REFUSALS_OF_MEAN),
    summed("avg_pool2d_function", pooling.avg_pool2d, averaged, CASES[:4] + UNPADDED),
    summed("avg_pool2d_op", pooling.avg_pool2d_op,
           lambda x, **a: averaged(x, **windows_of(a)), OLD),
    summed("global_avg_pool2d", pooling.global_avg_pool2d,
           lambda x: x.sum(axis=(2, 3)) / max(x.shape[2] * x.shape[3], 1), WHOLE),
    summed("avg_pool2d_gradient", pooling.avg_pool_gradient_op, average_spread,
           of_gradient(BOTH + UNPADDED, like=False), specials=False),
    summed(
        "avg_pool2d_gradient_like", pooling.avg_pool_gradient_like_op,
        lambda dy, x, **attrs: average_spread(dy, x.shape[2:], **attrs),
        of_gradient(BOTH + UNPADDED, like=True), differentiable=(0,), specials=False,
        refusals=(refuse(MIXED_DY, (2, 3, 2, 3), GOOD, window=2, count_include_pad=True),),
    ),
    summed("avg_pool2d_gradient_op", pooling.avg_pool2d_gradient_op, avg_gradient, triples(OLD),
           differentiable=(1,), specials=False),
)  # fmt: skip

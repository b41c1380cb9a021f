"""The rows of samples.py for convolution, and its formula tap by tap in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys.ops.conv import convolution
from support.table.rows import Case, Sample, case, refuse

# ---- formulas ----


def pair(value: Any) -> tuple[Any, Any]:
    return (value, value) if isinstance(value, int) else tuple(value)


def around(padding: Any, image: Any, size: Any, stride: Any, dilation: Any) -> list:
    """The padding before and after, along each axis."""
    if padding == "valid":
        return [(0, 0), (0, 0)]
    if padding != "same":
        return [pair(p) for p in pair(padding)]
    pads = []
    for n, k, s, d in zip(image, size, stride, dilation):
        total = max(0, (int(np.ceil(n / s)) - 1) * s + d * (k - 1) + 1 - n)
        pads.append((total // 2, total - total // 2))
    return pads


class Naive:
    """What each tap of the filters meets in a convolution, as a view of the padded data."""

    def __init__(
        self, x: np.ndarray, size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> None:  # fmt: skip
        self.size, self.stride, self.dilation = size, pair(stride), pair(dilation)
        self.groups, image = groups, x.shape[2:]
        pads = around(padding, image, size, self.stride, self.dilation)
        self.padded = np.pad(x, [(0, 0), (0, 0), *pads])
        self.inside = self.padded[
            :, :, pads[0][0] : pads[0][0] + image[0], pads[1][0] : pads[1][0] + image[1]
        ]
        self.out = tuple(
            (n - d * (k - 1) - 1) // s + 1
            for n, k, s, d in zip(self.padded.shape[2:], size, self.stride, self.dilation)
        )

    def taps(self) -> Any:
        """Each position in the filters, and what it meets: (batch, group, channel, row, column)."""
        n, channels, *image = self.padded.shape
        groups = self.padded.reshape(n, self.groups, channels // self.groups, *image)
        for at in np.ndindex(*self.size):
            rows, columns = (
                slice(k * d, k * d + (count - 1) * s + 1, s)
                for k, count, s, d in zip(at, self.out, self.stride, self.dilation)
            )
            yield at, groups[..., rows, columns]

    def filters(self, f: np.ndarray) -> np.ndarray:
        """(row, column, group, filter, channel) of (filter, channel, row, column), as a view."""
        return f.reshape(self.groups, len(f) // self.groups, *f.shape[1:]).transpose(3, 4, 0, 1, 2)

    def outputs(self, y: np.ndarray) -> np.ndarray:
        """(batch, group, filter, position) of (batch, filter, row, column), as a view."""
        n, channels, rows, columns = y.shape
        return y.reshape(n, self.groups, channels // self.groups, rows * columns)


def lines(tap: np.ndarray) -> np.ndarray:
    """(…, position) of (…, row, column)."""
    return tap.reshape(*tap.shape[:-2], tap.shape[-2] * tap.shape[-1])


def convolved(x: np.ndarray, f: np.ndarray, bias: Any = None, **attrs: Any) -> np.ndarray:
    naive = Naive(x, f.shape[2:], **attrs)
    y = np.zeros((len(x), len(f), *naive.out))
    outputs, filters = naive.outputs(y), naive.filters(f)
    for at, tap in naive.taps():
        outputs += filters[at] @ lines(tap)
    return y if bias is None else y + bias.reshape(-1, 1, 1)


def data_gradient(f: np.ndarray, dy: np.ndarray, x: np.ndarray, **attrs: Any) -> np.ndarray:
    naive = Naive(np.zeros(x.shape), f.shape[2:], **attrs)
    outputs, filters = naive.outputs(dy), naive.filters(f)
    for at, tap in naive.taps():
        tap += (filters[at].swapaxes(1, 2) @ outputs).reshape(tap.shape)
    return naive.inside.copy()


def filter_gradient(x: np.ndarray, dy: np.ndarray, f: np.ndarray, **attrs: Any) -> np.ndarray:
    naive = Naive(x, f.shape[2:], **attrs)
    df = np.zeros(f.shape)
    outputs, filters = naive.outputs(dy), naive.filters(df)
    for at, tap in naive.taps():
        filters[at] += (outputs @ lines(tap).swapaxes(2, 3)).sum(0)
    return df


def transposed(
    x: np.ndarray, f: np.ndarray, bias: Any = None, output_padding: Any = 0, **attrs: Any
) -> np.ndarray:
    strides, dilations = pair(attrs.get("stride", 1)), pair(attrs.get("dilation", 1))
    pads = around(attrs.get("padding", 0), (), f.shape[2:], strides, dilations)
    sizes = zip(x.shape[2:], f.shape[2:], strides, dilations, pads, pair(output_padding))
    image = [(n - 1) * s + d * (k - 1) + 1 - sum(p) + extra for n, k, s, d, p, extra in sizes]
    like = np.zeros((len(x), f.shape[1] * attrs.get("groups", 1), *image))
    y = data_gradient(f, x, like, **attrs)
    return y if bias is None else y + bias.reshape(-1, 1, 1)


def row(x: np.ndarray, f: np.ndarray, bias: Any = None, **attrs: Any) -> np.ndarray:
    padding = attrs.pop("padding", 0)
    if not isinstance(padding, str):
        padding = ((0, 0), pair(padding))
    for name in ("stride", "dilation"):
        attrs[name] = (1, attrs.get(name, 1))
    args = (x[:, :, None], f[:, :, None], bias)
    return convolved(*args, padding=padding, **attrs)[:, :, 0]


def sizes_of(formula: Any, terms: Any) -> Any:
    """The scale of errors: the formula of sizes, times the root of the number of terms."""

    def scale(*arrays: np.ndarray, **attrs: Any) -> np.ndarray:
        return np.sqrt(max(terms(*arrays), 1)) * formula(*map(np.abs, arrays), **attrs)

    return scale


def depth(x: np.ndarray, f: np.ndarray, *rest: np.ndarray) -> float:
    return np.prod(f.shape[1:])


def of_data(f: np.ndarray, dy: np.ndarray, *rest: np.ndarray) -> float:
    return f.shape[0] * np.prod(f.shape[2:])


def of_filter(x: np.ndarray, dy: np.ndarray, *rest: np.ndarray) -> float:
    return dy.shape[0] * np.prod(dy.shape[2:])


# ---- rows ----

CASES = (
    case((2, 3, 6, 5), (4, 3, 3, 2)),
    case((1, 1, 5, 5), (1, 1, 3, 3), padding=1),
    case((2, 3, 7, 9), (4, 3, 3, 3), stride=2, padding=1),
    case((2, 4, 9, 8), (6, 2, 3, 2), stride=(2, 3), padding=(2, 1), groups=2),
    case((2, 3, 9, 11), (5, 3, 3, 3), dilation=(2, 3), padding=((1, 2), (0, 3))),
    case((1, 2, 11, 10), (3, 2, 2, 3), stride=(3, 2), dilation=(3, 2), padding=2),
    case((1, 2, 13, 7), (3, 2, 3, 2), stride=4, dilation=2),
    case((3, 4, 6, 6), (4, 1, 3, 3), groups=4, padding="same"),
    case((2, 3, 8, 7), (6, 1, 3, 2), groups=3, stride=2, padding="same"),
    case((2, 3, 7, 7), (4, 3, 4, 4), padding="same", stride=(1, 2)),
    case((2, 5, 4, 6), (3, 5, 1, 1)),
    case((2, 4, 4, 6), (6, 2, 1, 1), stride=2, groups=2, padding="valid"),
    case((1, 3, 4, 4), (2, 3, 4, 4)),
    case((1, 1, 1, 40), (1, 1, 1, 3)),
    case((2, 2, 5, 5), (2, 2, 3, 3), padding=(4, 3)),
    case((0, 3, 5, 5), (4, 3, 3, 3)),
    case((2, 3, 5, 5), (0, 3, 3, 3)),
    case((2, 0, 5, 5), (4, 0, 3, 3)),
    case((5, 6, 14, 14), (16, 6, 5, 5)),
    case((3, 1, 28, 28), (6, 1, 5, 5), padding=2),
    case((2, 33, 9, 9), (17, 33, 3, 3), padding=1),
    case((1, 513, 5, 4), (7, 513, 3, 3), padding=1),
    case((2, 64, 14, 14), (70, 64, 3, 3), padding=1),
    case((1, 130, 13, 13), (132, 65, 3, 3), padding=1, groups=2, stride=2),
    case((2, 2, 1, 700), (3, 2, 1, 3), padding=((0, 0), (1, 1))),
    case((1, 2, 3, 300), (3, 2, 2, 3), stride=(2, 2), padding=3, dilation=(4, 40)),
    case((1, 2, 4, 5), (3, 2, 3, 3), padding=100, dilation=100),
)
WITH_BIAS = tuple(Case((*c.shapes, (c.shapes[1][0],)), c.attrs) for c in CASES)


def gradient_cases(for_data: bool) -> tuple[Case, ...]:
    """(f, dy, x) or (x, dy, f) of the convolutions above."""
    cases = []
    for c in CASES:
        x, f = c.shapes
        dy = convolved(np.zeros(x), np.zeros(f), **c.attrs).shape
        cases.append(Case((f, dy, x) if for_data else (x, dy, f), c.attrs))
    return tuple(cases)


def plain(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Those in which the sizes follow from the two inputs alone."""
    named = ("same", "valid")
    found = []
    for c in cases:
        if c.attrs.get("padding") not in named and c.attrs.get("stride", 1) == 1:
            found.append(Case(c.shapes[:2], c.attrs))
    return tuple(found)


def old(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The attributes that older scripts have: padding and stride."""
    return tuple(c for c in cases if not set(c.attrs) & {"groups", "dilation"})[:6]


TRANSPOSED = (
    case((2, 4, 5, 6), (4, 3, 3, 4), stride=(2, 3), padding=(1, 0), output_padding=(1, 2)),
    case((1, 3, 4, 4), (3, 5, 3, 3)),
    case(
        (2, 8, 4, 3), (8, 1, 3, 4), stride=(3, 2), padding=(2, 1), output_padding=(0, 1), groups=4
    ),
    case((2, 4, 3, 3), (4, 2, 2, 2), stride=2, dilation=(2, 1), padding=((0, 1), (1, 0))),
)
ROWS = (
    case((2, 3, 9), (4, 3, 3)),
    case((2, 4, 11), (6, 2, 2), stride=2, padding=1, groups=2, dilation=3),
    case((1, 3, 8), (3, 1, 3), padding="same", groups=3),
    case((1, 3, 8), (3, 3, 5), padding=(4, 0)),
)
GOOD = ((2, 4, 6, 6), (4, 4, 3, 3))
PAIR = r"must be one or two positive integers, got"
REFUSALS = (
    refuse(rf"stride {PAIR} \(0, 1\)", *GOOD, stride=(0, 1)),
    refuse(rf"stride {PAIR} -1", *GOOD, stride=-1),
    refuse(rf"stride {PAIR} \(1.5, 1\)", *GOOD, stride=(1.5, 1)),
    refuse(rf"dilation {PAIR} \(1, 0\)", *GOOD, dilation=(1, 0)),
    refuse(r"padding must be .* not negative, got -1", *GOOD, padding=-1),
    refuse(r"padding must be .* got 'full'", *GOOD, padding="full"),
    refuse(r"groups must be a positive integer, got 0", *GOOD, groups=0),
    refuse(r"groups=3 do not divide 4 channels", *GOOD, groups=3),
    refuse(r"groups=2 do not divide 3 filters", (2, 4, 6, 6), (3, 2, 3, 3), groups=2),
    refuse(r"4 channels in 2 group\(s\) do not fit a filter of 4", *GOOD, groups=2),
    refuse(r"4 channels in 1 group\(s\) do not fit a filter of 3", (2, 4, 6, 6), (4, 3, 3, 3)),
    refuse(
        r"window \(7, 7\) is larger than the image \(6, 4\) with padding \(0, 1\)",
        (2, 4, 6, 4), (4, 4, 7, 7), padding=(0, 1),
    ),
    refuse(r"window \(3, 3\) with dilation \(3, 3\) is larger", *GOOD, dilation=3),
    refuse(r"expected \(N, C, H, W\), got \S+ \(2, 3\)", (2, 3), (4, 4, 3, 3)),
    refuse(r"expected a filter \(O, C/groups, kH, kW\), got", (2, 4, 6, 6), (4, 4)),
    refuse(r"\S+ is float32 and \S+ is float64", *GOOD, dtypes=("float32", "float64")),
)  # fmt: skip
BIAS = refuse(r"expected one bias for each of 4 filters, got .* \(3,\)", *GOOD, (3,))
WRONG_DY = r"the convolution gives \(2, 4, 4, 4\), its gradient is \(2, 4, 5, 4\)"


def like(formula: Any) -> Any:
    """A gradient's formula from two arrays: stride 1 leaves one size for the third."""

    def of_two(a: np.ndarray, b: np.ndarray, **attrs: Any) -> np.ndarray:
        strides, dilations = (1, 1), pair(attrs.get("dilation", 1))
        groups = attrs.get("groups", 1)
        pads = [sum(p) for p in around(attrs.get("padding", 0), (), (), strides, dilations)]
        if formula is data_gradient:
            sizes = zip(b.shape[2:], a.shape[2:], dilations, pads)
            shape = [n + (k - 1) * d - p for n, k, d, p in sizes]
            third = np.zeros((len(b), a.shape[1] * groups, *shape))
        else:
            sizes = zip(a.shape[2:], b.shape[2:], dilations, pads)
            shape = [(n + p - m) // d + 1 for n, m, d, p in sizes]
            third = np.zeros((b.shape[1], a.shape[1] // groups, *shape))
        return formula(a, b, third, **attrs)

    return of_two


def sample(name: str, op: Any, formula: Any, cases: Any, terms: Any = depth, **more: Any) -> Sample:
    scale = sizes_of(formula, terms)
    return Sample(name, op, formula, cases, scale=scale, ulps=1, gradient_ulps=32, **more)


data_of_two, filter_of_two = like(data_gradient), like(filter_gradient)
OF_DATA, OF_FILTER = gradient_cases(True), gradient_cases(False)

CONVOLUTION = (
    # Where the filter has an infinity or NaN, the zeros of the padding make NaN of it, on all
    # devices but in the CPU device's depthwise kernels, which leave these products out.
    sample("conv2d", convolution.convolution_op, convolved, CASES, integers="float",
           refusals=REFUSALS),
    sample("conv2d_bias", convolution.convolution_bias_op, convolved, WITH_BIAS, refusals=(BIAS,)),
    sample("conv2d_function", convolution.conv2d, convolved, (CASES[3], WITH_BIAS[4])),
    sample("conv2d_op", convolution.conv2d_op, convolved, old(CASES)),
    sample("conv2d_add_bias_op", convolution.conv2d_add_bias_op, convolved, old(WITH_BIAS)),
    sample("conv1d", convolution.conv1d, row, (*ROWS, case((2, 3, 9), (4, 3, 3), (4,)))),
    # A NaN in a filter reaches results at the border on some devices only: numpy makes no products
    # of the kernel offsets that lie off the image there.
    sample(
        "conv2d_data_gradient", convolution.data_gradient_op, data_of_two, plain(OF_DATA), of_data,
        specials=False,
        refusals=(
            refuse(r"padding 'same' leaves the size open", (4, 4, 3, 3), GOOD[0], padding="same"),
            refuse(r"output_padding \(2, 0\) must be below the stride \(2, 2\)",
                   (4, 4, 3, 3), GOOD[0], stride=2, output_padding=(2, 0)),
            refuse(r"expected as many channels as filters", (3, 4, 3, 3), GOOD[0]),
            refuse(r"padding \(9, 9\) leaves nothing", (4, 4, 3, 3), GOOD[0], padding=9),
        ),
    ),
    sample(
        "conv2d_data_gradient_like", convolution.data_gradient_like_op, data_gradient, OF_DATA,
        of_data, specials=False, differentiable=(0, 1),
        refusals=(refuse(WRONG_DY, (4, 4, 3, 3), (2, 4, 5, 4), GOOD[0]),),
    ),
    sample(
        "conv2d_filter_gradient", convolution.filter_gradient_op, filter_of_two,
        plain(OF_FILTER), of_filter, specials=False,
        refusals=(
            refuse(r"expected as many images in both", GOOD[0], (3, 4, 4, 4)),
            refuse(r"a filter \(2, 2\) at stride \(1, 1\) gives images \(5, 5\)",
                   GOOD[0], (2, 4, 4, 4), size=(2, 2)),
            refuse(r"no filter at stride \(1, 1\) takes images", GOOD[0], (2, 4, 7, 4)),
        ),
    ),
    sample(
        "conv2d_filter_gradient_like", convolution.filter_gradient_like_op, filter_gradient,
        OF_FILTER, of_filter, specials=False, differentiable=(0, 1),
        refusals=(refuse(WRONG_DY, GOOD[0], (2, 4, 5, 4), (4, 4, 3, 3)),),
    ),
    sample("conv2d_gradient_of_data_op", convolution.conv2d_gradient_of_data_op, data_gradient,
           old(OF_DATA), of_data, specials=False, differentiable=(0, 1)),
    sample("conv2d_gradient_of_filter_op", convolution.conv2d_gradient_of_filter_op,
           filter_gradient,
           old(OF_FILTER), of_filter, specials=False, differentiable=(0, 1)),
    sample(
        "conv_transpose2d", convolution.conv_transpose2d, transposed,
        (*TRANSPOSED, case((1, 3, 4, 4), (3, 5, 3, 3), (5,))),
        lambda x, f, *rest: f.shape[0] * np.prod(f.shape[2:]), specials=False,
    ),
)  # fmt: skip

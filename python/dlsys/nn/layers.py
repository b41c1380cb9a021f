"""Layers with weights, and those that only reshape. Weights are laid out as PyTorch's.

`initializer` is a function of (shape, rng) as in `dlsys.init`, He's normal form by default; what it
returns becomes float32, and has the shape or is refused by ShapeError. Biases begin at 0. `rng` is
a numpy Generator, a seed, or None for the one that `init.seed` starts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import functional as F
from ..arguments.kinds import Bool, Int, Kind, Rung
from ..arguments.signature import declared
from ..autodiff import Node, Parameter
from ..errors import GraphError, ShapeError
from ..graph.lines import where
from ..init import RNG, Initializer, Rng, generator, he_normal, normal, zeros
from ..ops.conv.geometry import IntPair, Padding
from ..rungs import CONV
from .kinds import AsGiven, Function
from .module import Module, changed

Pair = int | tuple[int, int]


SIZE = Int(low=1)
DRAWN: dict[str, Kind] = dict(initializer=Function(), rng=RNG)
WINDOW = AsGiven(IntPair(low=1))
SLIDING: dict[str, Kind] = dict(
    stride=WINDOW,
    padding=AsGiven(Padding()),
    dilation=WINDOW,
    groups=SIZE,
    bias=Bool(),
    algo=Rung(CONV),
)


class Linear(Module):
    """x @ weightᵀ + bias: x (…, inputs), weight (outputs, inputs), bias (outputs,) to (…, outputs).

    initializer: a function of `init`, which draws the weight. GraphError for extents below 1.

    >>> nn.Linear(3, 2, rng=0)(dl.ones(4, 3)).shape
    (4, 2)
    """

    @declared(inputs=SIZE, outputs=SIZE, bias=Bool(), **DRAWN)
    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        *,
        initializer: Initializer = he_normal,
        rng: Rng = None,
    ) -> None:
        self.weight = Parameter(drawn("Linear", initializer, (outputs, inputs), rng), "weight")
        self.bias = Parameter(zeros((outputs,)), "bias") if bias else None

    def forward(self, x: Node) -> Node:
        return F.linear(x, self.weight, self.bias)

    def options(self) -> str:
        outputs, inputs = self.weight.shape
        return f"{inputs}, {outputs}{', bias=False' if self.bias is None else ''}"


class Filtered(Module):
    """Base of convolutions: weight, bias, and the attributes of the operator."""

    def __init__(
        self, weight: np.ndarray, inputs: int, outputs: int, bias: bool, attrs: dict[str, Any]
    ) -> None:
        self.weight = Parameter(weight, "weight")
        self.bias = Parameter(zeros((outputs,)), "bias") if bias else None
        self.inputs, self.outputs, self.attrs = inputs, outputs, attrs

    def options(self) -> str:
        usual = dict(stride=1, padding=0, output_padding=0, dilation=1, groups=1, algo=None)
        shown = [str(self.inputs), str(self.outputs), str(self.weight.shape[2:])]
        return ", ".join(
            [*shown, *changed(self.attrs, usual), *["bias=False"] * (self.bias is None)]
        )


class Conv2d(Filtered):
    """The convolution of x (N, inputs, H, W) with weight (outputs, inputs/groups, kH, kW), plus
    bias (outputs,); the other arguments are those of `F.conv2d`.

    window: the extents (kH, kW), or one number for both. initializer: a function of `init`, which
    draws the weight. GraphError for extents below 1 and groups that do not divide inputs and
    outputs; ShapeError at use for attributes or shapes that do not fit.

    >>> nn.Conv2d(3, 8, 3, padding=1)(dl.zeros(2, 3, 16, 16)).shape
    (2, 8, 16, 16)
    """

    @declared(inputs=SIZE, outputs=SIZE, window=WINDOW, **SLIDING, **DRAWN)
    def __init__(
        self,
        inputs: int,
        outputs: int,
        window: Pair,
        stride: Pair = 1,
        padding: Any = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        initializer: Initializer = he_normal,
        rng: Rng = None,
        algo: str | None = None,
    ) -> None:
        shape = filter_shape("Conv2d", inputs, outputs, window, groups)
        weight = drawn("Conv2d", initializer, shape, rng)
        attrs = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, algo=algo)
        super().__init__(weight, inputs, outputs, bias, attrs)

    def forward(self, x: Node) -> Node:
        # By position, in the order of the constructor: names would be part of what is recorded.
        return F.conv2d(x, self.weight, self.bias, *self.attrs.values())


class ConvTranspose2d(Filtered):
    """The transposed convolution of x (N, inputs, H, W) with weight (inputs, outputs/groups, kH,
    kW), plus bias (outputs,); the other arguments are those of `F.conv_transpose2d`.

    The initializer draws a filter (outputs, inputs/groups, kH, kW), so that its fans are right.
    Raises what `Conv2d` raises.

    >>> nn.ConvTranspose2d(8, 3, 2, stride=2)(dl.zeros(2, 8, 4, 4)).shape
    (2, 3, 8, 8)
    """

    @declared(
        inputs=SIZE, outputs=SIZE, window=WINDOW, output_padding=AsGiven(IntPair()), **SLIDING,
        **DRAWN,
    )  # fmt: skip
    def __init__(
        self,
        inputs: int,
        outputs: int,
        window: Pair,
        stride: Pair = 1,
        padding: Any = 0,
        output_padding: Pair = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Pair = 1,
        *,
        initializer: Initializer = he_normal,
        rng: Rng = None,
        algo: str | None = None,
    ) -> None:
        shape = filter_shape("ConvTranspose2d", inputs, outputs, window, groups)
        filters = drawn("ConvTranspose2d", initializer, shape, rng)
        parts = filters.reshape(groups, outputs // groups, *shape[1:]).swapaxes(1, 2)
        weight = parts.reshape(inputs, outputs // groups, *shape[2:])
        attrs: dict[str, Any] = dict(stride=stride, padding=padding, output_padding=output_padding)
        attrs |= {"dilation": dilation, "groups": groups, "algo": algo}
        super().__init__(weight, inputs, outputs, bias, attrs)

    def forward(self, x: Node) -> Node:
        return F.conv_transpose2d(x, self.weight, self.bias, **self.attrs)


class Embedding(Module):
    """Row i of weight (count, features) for each number i of an integer x: (…) to (…, features).

    The rows begin standard normal. The row of `padding_idx` begins as zeros and gets no gradient.
    initializer: a function of `init`, which draws the weight. OutOfRangeError for a number out of
    range, GraphError for extents below 1 and a padding_idx that is not below count.

    >>> nn.Embedding(10, 4)(dl.tensor([[1, 2, 3]])).shape
    (1, 3, 4)
    """

    @declared(count=SIZE, features=SIZE, padding_idx=Int(low=0), **DRAWN)
    def __init__(
        self,
        count: int,
        features: int,
        padding_idx: int | None = None,
        *,
        initializer: Initializer = normal,
        rng: Rng = None,
    ) -> None:
        rows = drawn("Embedding", initializer, (count, features), rng)
        if padding_idx is not None:
            if padding_idx >= count:
                raise GraphError(
                    f"Embedding: expected padding_idx below {count}, got {padding_idx} [{where()}]"
                )
            rows = rows.copy()  # it may be the initializer's own
            rows[padding_idx] = 0
        self.weight, self.padding_idx = Parameter(rows, "weight"), padding_idx

    def forward(self, x: Node) -> Node:
        rows = F.embedding(x, self.weight)
        if self.padding_idx is None:
            return rows
        padding = F.expand_dims(F.equal(x, self.padding_idx), -1)
        return F.where(padding, F.stop_gradient(rows), rows)

    def options(self) -> str:
        rest = [] if self.padding_idx is None else [f"padding_idx={self.padding_idx}"]
        return ", ".join(["{}, {}".format(*self.weight.shape), *rest])


class Flatten(Module):
    """All axes from `axis` on as one.

    >>> nn.Flatten()(dl.zeros(2, 3, 4)).shape
    (2, 12)
    """

    @declared(axis=Int())
    def __init__(self, axis: int = 1) -> None:
        self.axis = axis

    def forward(self, x: Node) -> Node:
        return F.flatten(x, self.axis)

    def options(self) -> str:
        return f"{self.axis}" if self.axis != 1 else ""


class Reshape(Module):
    """Each sample in another shape: x (N, …) to (N, *shape), whatever N.

    >>> nn.Reshape(2, 6)(dl.zeros(5, 12)).shape
    (5, 2, 6)
    """

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def forward(self, x: Node) -> Node:
        return F.reshape(x, (-1, *self.shape))

    def options(self) -> str:
        return ", ".join(map(str, self.shape))


def filter_shape(
    layer: str, inputs: int, outputs: int, window: Pair, groups: int
) -> tuple[int, int, int, int]:
    """(outputs, inputs/groups, kH, kW). GraphError where there is no such filter."""
    height, width = IntPair(low=1).take(window)
    if inputs % groups or outputs % groups:
        raise GraphError(
            f"{layer}: {groups} groups do not divide {inputs} inputs and {outputs} outputs "
            f"[{where()}]"
        )
    return outputs, inputs // groups, height, width


def drawn(layer: str, initializer: Initializer, shape: tuple[int, ...], rng: Rng) -> np.ndarray:
    """The first weights, float32 whatever the initializer computes in."""
    weight = np.asarray(initializer(shape, generator(rng)), np.float32)
    if weight.shape != shape:
        raise ShapeError(f"{layer}: the initializer made {weight.shape}, expected {shape}")
    return weight

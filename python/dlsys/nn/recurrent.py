"""Recurrent layers and their cells. Parameters are named and laid out as PyTorch's.

A layer is unrolled over time when its graph is built, so the number of steps is known then; the
batch may be of any size. The products with the inputs are one GEMM over all steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .. import functional as F
from ..arguments.kinds import Bool, Kind, OneOf
from ..arguments.signature import declared
from ..autodiff import Node, Parameter
from ..errors import GraphError
from ..functional.record import recorded
from ..graph.lines import where
from ..init import RNG, Rng, generator, uniform
from ..ops.random.sampling import PROBABILITY
from .layers import SIZE
from .module import Module, changed
from .regularize import Dropout
from .shapes import known, shape_of

State = tuple[Node, ...]
Weights = tuple[Any, ...]  # weight_ih, weight_hh, bias_ih, bias_hh; a bias may be None
PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
NONLINEARITY = OneOf("tanh", "relu")
SHARED: dict[str, Kind] = dict(
    inputs=SIZE, hidden=SIZE, num_layers=SIZE, bias=Bool(), batch_first=Bool(),
    dropout=PROBABILITY, bidirectional=Bool(), rng=RNG,
)  # fmt: skip
CELL: dict[str, Kind] = dict(inputs=SIZE, hidden=SIZE, bias=Bool(), rng=RNG)
USUAL = dict(num_layers=1, nonlinearity="tanh", bias=True, batch_first=False, dropout=0.0,
             bidirectional=False)  # fmt: skip


# ---- one step: x (N, gates · hidden) is the input's product already ----
def _tanh_step(x: Node, state: State, weight: Node, bias: Node | None) -> State:
    return (F.tanh(x + F.linear(state[0], weight, bias)),)


def _relu_step(x: Node, state: State, weight: Node, bias: Node | None) -> State:
    return (F.relu(x + F.linear(state[0], weight, bias)),)


def _lstm_step(x: Node, state: State, weight: Node, bias: Node | None) -> State:
    h, c = state
    i, f, g, o = F.split(x + F.linear(h, weight, bias), 4, axis=1)
    c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(g)
    return F.sigmoid(o) * F.tanh(c), c


def _gru_step(x: Node, state: State, weight: Node, bias: Node | None) -> State:
    (h,) = state
    x_r, x_z, x_n = F.split(x, 3, axis=1)
    h_r, h_z, h_n = F.split(F.linear(h, weight, bias), 3, axis=1)
    z = F.sigmoid(x_z + h_z)
    n = F.tanh(x_n + F.sigmoid(x_r + h_r) * h_n)
    return (n + z * (h - n),)


Step = Callable[[Node, State, Node, Any], State]
# The step of each kind, its number of gates, and that of its states.
STEPS: dict[str, tuple[Step, int, int]] = {
    "tanh": (_tanh_step, 1, 1),
    "relu": (_relu_step, 1, 1),
    "lstm": (_lstm_step, 4, 2),
    "gru": (_gru_step, 3, 1),
}


@recorded
def step(kind: str, x: Node, state: State | None, weights: Weights) -> State:
    """The states after one step from x (N, inputs); None begins with zeros."""
    weight_ih, weight_hh, bias_ih, bias_hh = weights
    x = F.linear(x, weight_ih, bias_ih)
    return STEPS[kind][0](x, state or _zeros(kind, x, weight_hh), weight_hh, bias_hh)


@recorded
def sequence(
    kind: str,
    x: Node,
    state: State | None,
    weights: Weights,
    backward: bool = False,
    lengths: Any = None,
) -> State:
    """All steps over x (T, N, inputs), from the last to the first where `backward` says so: the
    outputs (T, N, hidden) in the order of x, then the final states. Of lengths (N,) each sample has
    so many steps: behind them its states stay as they are, and its outputs are 0.
    """
    weight_ih, weight_hh, bias_ih, bias_hh = weights
    parts = list(enumerate(_steps(F.linear(x, weight_ih, bias_ih), x.shape[0])))
    state = state or _zeros(kind, parts[0][1], weight_hh)
    outputs = []
    for t, part in reversed(parts) if backward else parts:
        new = STEPS[kind][0](part, state, weight_hh, bias_hh)
        if lengths is None:
            state, output = new, new[0]
        else:
            within = F.expand_dims(F.greater(lengths, t), 1)
            state = tuple([F.where(within, n, old) for n, old in zip(new, state)])
            output = F.where(within, new[0], 0.0)
        outputs.append(output)
    return F.stack(outputs[::-1] if backward else outputs), *state


def _zeros(kind: str, x: Node, weight_hh: Any) -> State:
    """States of zeros, for as many samples as x (N, …) has."""
    return (F.zeros_like(x[:, : weight_hh.shape[1]]),) * STEPS[kind][2]


def _steps(x: Node, count: int) -> list[Node]:
    """x (T, …) as T nodes, cut in halves again and again. The gradient of a slice is an array of
    the whole's size, so T slices of x would write T · T steps; halves write T · log T.
    """
    if count == 1:
        return [F.squeeze(x, 0)]
    half = count // 2
    return [*_steps(x[:half], half), *_steps(x[half:], count - half)]


class _Recurrent(Module):
    """Base of the layers: their parameters, and the way through layers and directions."""

    kind: str

    def __init__(self, inputs: int, hidden: int, attrs: dict[str, Any], rng: Rng) -> None:
        self.inputs, self.hidden, self.attrs = inputs, hidden, attrs
        self.directions = ("", "_reverse") if attrs["bidirectional"] else ("",)
        rng = generator(rng)
        for layer in range(attrs["num_layers"]):
            width = hidden * len(self.directions) if layer else inputs
            for direction in self.directions:
                made = _parameters(self.kind, width, hidden, attrs["bias"], rng)
                for name, parameter in made.items():
                    setattr(self, f"{name}_l{layer}{direction}", parameter)
        between = attrs["num_layers"] - 1 if attrs["dropout"] else 0
        self.dropouts = [Dropout(attrs["dropout"], rng=rng) for _ in range(between)]

    def _run(self, x: Node, begin: Sequence[Node] | None, lengths: Any) -> tuple[Node, State]:
        """The output, and each final state (num_layers · directions, N, hidden)."""
        name, first = type(self).__name__, self.attrs["batch_first"]
        shape = shape_of(name, x, "batch steps features" if first else "steps batch features")
        known(name, shape[1 if first else 0], "steps")
        x = F.transpose(x, (1, 0, 2)) if first else x
        finals: list[State] = []
        for layer in range(self.attrs["num_layers"]):
            if layer and self.dropouts:
                x = self.dropouts[layer - 1](x)
            outputs = []
            for direction in self.directions:
                state = None if begin is None else tuple([part[len(finals)] for part in begin])
                weights = tuple(
                    getattr(self, f"{part}_l{layer}{direction}", None) for part in PARTS
                )
                y, *final = sequence(self.kind, x, state, weights, bool(direction), lengths)
                outputs.append(y)
                finals.append(tuple(final))
            x = F.concatenate(outputs, axis=2) if len(outputs) > 1 else outputs[0]
        y = F.transpose(x, (1, 0, 2)) if first else x
        return y, tuple([F.stack(list(parts)) for parts in zip(*finals)])

    def options(self) -> str:
        return ", ".join([f"{self.inputs}, {self.hidden}", *changed(self.attrs, USUAL)])


class RNN(_Recurrent):
    """h = tanh(weight_ih x + bias_ih + weight_hh h + bias_hh) at each step, or relu of it: x
    (steps, N, inputs) to the outputs (steps, N, hidden) and the final h (num_layers, N, hidden).

    Layer k > 0 reads what layer k - 1 made, dropped out with the given probability in training.
    bidirectional: a second run from the last step to the first, whose outputs stand beside the
    first's, (steps, N, 2 · hidden); states are (num_layers · 2, N, hidden) then. batch_first:
    inputs and outputs are (N, steps, …), states stay. Parameters are `weight_ih_l0` (hidden,
    inputs), `weight_hh_l0` (hidden, hidden), `bias_ih_l0`, `bias_hh_l0`, then `…_l0_reverse`,
    `…_l1`; they begin uniform within 1 / sqrt(hidden), all as in PyTorch. Elman (1990).
    nonlinearity: "tanh" or "relu". bias: False leaves bias_ih and bias_hh out. num_layers: how
    many, one above the other; dropout: the probability between them.

    The steps must be known when the graph is built, the batch need not. GraphError for extents
    below 1, at use for an unknown number of steps; ShapeError at use unless x has three axes.

    >>> outputs, h = nn.RNN(4, 8)(dl.zeros(5, 2, 4))
    >>> outputs.shape, h.shape
    ((5, 2, 8), (1, 2, 8))
    """

    @declared(nonlinearity=NONLINEARITY, **SHARED)
    def __init__(
        self,
        inputs: int,
        hidden: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        rng: Rng = None,
    ) -> None:
        self.kind = nonlinearity
        attrs = dict(num_layers=num_layers, nonlinearity=nonlinearity, bias=bias)
        attrs |= dict(batch_first=batch_first, dropout=dropout, bidirectional=bidirectional)
        super().__init__(inputs, hidden, attrs, rng)

    def forward(
        self, x: Node, h: Node | None = None, lengths: Node | None = None
    ) -> tuple[Node, Node]:
        """The outputs and the final h; without a first h it is 0. lengths (N,): the number of steps
        of each sample, behind which x is padding: outputs are 0 there, and the final h is that of
        the last step, as of PyTorch's packed sequences.
        """
        y, (h,) = self._run(x, None if h is None else (h,), lengths)
        return y, h


class _Gated(_Recurrent):
    """Base of the layers with gates, whose options are the same."""

    @declared(**SHARED)
    def __init__(
        self,
        inputs: int,
        hidden: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        rng: Rng = None,
    ) -> None:
        attrs = dict(num_layers=num_layers, bias=bias, batch_first=batch_first)
        super().__init__(
            inputs, hidden, attrs | dict(dropout=dropout, bidirectional=bidirectional), rng
        )


class GRU(_Gated):
    """r = σ(W_r x + U_r h), z = σ(W_z x + U_z h), n = tanh(W_n x + r · U_n h), h = (1 - z) n + z h
    at each step, U_n h with its bias: x (steps, N, inputs) to the outputs and the final h.

    `weight_ih_l0` (3 · hidden, inputs) has W_r, W_z and W_n; all else is as of `RNN`. Cho et al.
    (2014). bias and dropout: as of `RNN`.

    >>> outputs, h = nn.GRU(4, 8, bidirectional=True)(dl.zeros(5, 2, 4))
    >>> outputs.shape, h.shape
    ((5, 2, 16), (2, 2, 8))
    """

    kind = "gru"

    forward = RNN.forward


class LSTM(_Gated):
    """i, f, o = σ(W x + U h) and g = tanh(W_g x + U_g h), c = f · c + i · g, h = o · tanh(c) at
    each step: x (steps, N, inputs) to the outputs and the final (h, c), each
    (num_layers, N, hidden).

    `weight_ih_l0` (4 · hidden, inputs) has the rows of i, f, g and o; all else is as of `RNN`.
    Hochreiter and Schmidhuber (1997), with the forget gate of Gers et al. (2000). bias and dropout:
    as of `RNN`.

    >>> outputs, (h, c) = nn.LSTM(4, 8, batch_first=True)(dl.zeros(2, 5, 4))
    >>> outputs.shape, c.shape
    ((2, 5, 8), (1, 2, 8))
    """

    kind = "lstm"

    def forward(
        self,
        x: Node,
        state: tuple[Node, Node] | None = None,
        lengths: Node | None = None,
    ) -> tuple[Node, tuple[Node, Node]]:
        """The outputs and the final (h, c); without a first state both are 0. lengths (N,) is as of
        `RNN.forward`.
        """
        _check_pair("LSTM", state)
        y, (h, c) = self._run(x, state, lengths)
        return y, (h, c)


class _Cell(Module):
    """Base of the cells, which make one step."""

    kind: str

    def __init__(self, inputs: int, hidden: int, bias: bool, rng: Rng) -> None:
        self.inputs, self.hidden = inputs, hidden
        for name, parameter in _parameters(self.kind, inputs, hidden, bias, generator(rng)).items():
            setattr(self, name, parameter)

    def _step(self, x: Node, state: State | None) -> State:
        shape_of(type(self).__name__, x, "batch features")
        weights = tuple(getattr(self, part, None) for part in PARTS)
        return tuple(step(self.kind, x, state, weights))

    def options(self) -> str:
        bias = "" if hasattr(self, "bias_ih") else ", bias=False"
        return f"{self.inputs}, {self.hidden}{bias}"


class RNNCell(_Cell):
    """One step of an `RNN`: x (N, inputs) and h (N, hidden), by default 0, to the next h.

    bias and nonlinearity: as of `RNN`.
    """

    @declared(nonlinearity=NONLINEARITY, **CELL)
    def __init__(
        self,
        inputs: int,
        hidden: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        *,
        rng: Rng = None,
    ) -> None:
        self.kind = nonlinearity
        super().__init__(inputs, hidden, bias, rng)

    def forward(self, x: Node, h: Node | None = None) -> Node:
        """The next h."""
        return self._step(x, None if h is None else (h,))[0]


class _GatedCell(_Cell):
    """Base of the cells with gates."""

    @declared(**CELL)
    def __init__(self, inputs: int, hidden: int, bias: bool = True, *, rng: Rng = None) -> None:
        super().__init__(inputs, hidden, bias, rng)


class GRUCell(_GatedCell):
    """One step of a `GRU`: x (N, inputs) and h (N, hidden), by default 0, to the next h."""

    kind = "gru"

    forward = RNNCell.forward


class LSTMCell(_GatedCell):
    """One step of an `LSTM`: x (N, inputs) and (h, c), each (N, hidden) and by default 0, to the
    next (h, c).

    bias: as of `RNN`.
    """

    kind = "lstm"

    def forward(self, x: Node, state: tuple[Node, Node] | None = None) -> tuple[Node, Node]:
        """The next (h, c).

        x: (N, inputs). state: the last (h, c), zeros where it is None.
        """
        _check_pair("LSTMCell", state)
        h, c = self._step(x, state)
        return h, c


def _parameters(kind: str, inputs: int, hidden: int, bias: bool, rng: Any) -> dict[str, Parameter]:
    """The Parameters of one direction of one layer, uniform within 1 / sqrt(hidden)."""
    rows, bound = STEPS[kind][1] * hidden, 1 / math.sqrt(hidden)
    shapes = ((rows, inputs), (rows, hidden), (rows,), (rows,))
    return {
        name: Parameter(uniform(shape, rng, low=-bound, high=bound), name)
        for name, shape in zip(PARTS, shapes)
        if bias or not name.startswith("bias")
    }


def _check_pair(layer: str, state: Any) -> None:
    if state is not None and not (isinstance(state, (tuple, list)) and len(state) == 2):
        raise GraphError(
            f"{layer}: the state is {type(state).__name__}, expected the pair (h, c) [{where()}]"
        )

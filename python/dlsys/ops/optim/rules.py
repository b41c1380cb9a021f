"""The rules of optimizers, for numpy: what one step does to a parameter and its slots.

src/operators/optimizer_rules.h has the same formulas for native devices; apply.py makes operators
of them. Names, slots and constants are the same there, which tests hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
Attrs = dict[str, Any]


class Now(NamedTuple):
    """The constants of one step."""

    lr: float
    step: int | None  # updates before this one, where the rule is told
    fresh: bool  # a round of accumulation begins


class Rule:
    """The update of a chunk of a parameter by one step: `apply` changes the states in place and may
    use the scratch array `s`.
    """

    name: str
    slots: tuple[str, ...] = ()  # states beside the parameter
    attributes: Attrs = {}  # with their defaults; None: must be given
    operations = 2  # an element
    takes_rate = True
    needs_step = False
    every_run = False  # acts in every run of a round, not in the last one only
    beside = False  # its state is a sum or an average beside a parameter, as slots are
    steady = False  # small changes of a gradient change its states a little, at zero too

    def constants(self, attrs: Attrs) -> dict[str, float]:
        """The numbers that a step computes with, by the names that its kernels have for it."""
        return {}

    def apply(self, states: Sequence[Array], g: Array, s: Array, attrs: Attrs, now: Now) -> None:
        raise NotImplementedError


class Sgd(Rule):
    """p -= lr · g."""

    name = "sgd_update"
    steady = True

    def apply(self, states: Sequence[Array], g: Array, s: Array, attrs: Attrs, now: Now) -> None:
        descend(states[0], g, now.lr, s)


class Momentum(Rule):
    """v = momentum · v + (1 - dampening) · g; p -= lr · v, or with Nesterov's momentum p -= lr ·
    (g + momentum · v). The gradient of step 0 is not dampened.
    """

    name = "sgd_momentum_update"
    slots = ("velocity",)
    attributes = {"momentum": None, "dampening": 0.0, "nesterov": False}
    operations = 4
    steady = True

    def constants(self, attrs: Attrs) -> dict[str, float]:
        share = 1 - attrs["dampening"]
        return dict(momentum=attrs["momentum"], share=share, nesterov=attrs["nesterov"])

    def apply(self, states: Sequence[Array], g: Array, s: Array, attrs: Attrs, now: Now) -> None:
        p, v = states
        momentum, share, nesterov = self.constants(attrs).values()
        np.multiply(v, momentum, out=v)
        np.add(v, g if share == 1 or now.step == 0 else np.multiply(g, share, out=s), out=v)
        if nesterov:
            np.multiply(v, momentum, out=s)
            np.add(s, g, out=s)
        descend(p, s if nesterov else v, now.lr, s)


class Adam(Rule):
    """Adam of Kingma and Ba (2015): with t = step + 1,

    m = beta1 · m + (1 - beta1) · g; v = beta2 · v + (1 - beta2) · g²;
    p -= lr / (1 - beta1^t) · m / (sqrt(v / (1 - beta2^t)) + eps).

    A g² that overflows makes v infinite, and with it the element's steps 0 until v is forgotten
    (never, unless beta2 is 0), as in PyTorch.
    """

    name = "adam_update"
    slots = ("mean", "square")
    attributes = {"beta1": None, "beta2": None, "eps": None}
    operations = 12
    needs_step = True

    def constants(self, attrs: Attrs) -> dict[str, float]:
        moments = _shares("mean", attrs["beta1"]) | _shares("square", attrs["beta2"])
        return {**moments, "eps": attrs["eps"]}

    def apply(self, states: Sequence[Array], g: Array, s: Array, attrs: Attrs, now: Now) -> None:
        p, m, v = states
        keep1, take1, keep2, take2, eps = self.constants(attrs).values()
        _blend(m, keep1, np.multiply(g, take1, out=s))
        _blend(v, keep2, _share_of_square(g, take2, s))
        np.sqrt(v, out=s)
        np.multiply(s, 1 / math.sqrt(_correction(take2, now)), out=s)
        np.add(s, eps, out=s)
        np.divide(m, s, out=s)
        descend(p, s, now.lr / _correction(take1, now), s)


class RmsProp(Rule):
    """RMSprop of Tieleman and Hinton (2012), with Graves's centering (2013) and momentum:

    square = alpha · square + (1 - alpha) · g²; mean = alpha · mean + (1 - alpha) · g;
    change = g / (sqrt(square - mean²) + eps), without mean² where it is not centered;
    velocity = momentum · velocity + change; p -= lr · velocity, or lr · change without momentum.

    Where g² overflows the change is 0. The centered difference is all rounding where alpha is so
    small that `square` is the square of one gradient.
    """

    attributes = {"alpha": None, "eps": None}
    operations = 8

    def __init__(self, centered: bool = False, momentum: bool = False) -> None:
        words = ["rmsprop", *["centered"] * centered, *["momentum"] * momentum, "update"]
        self.name = "_".join(words)
        self.slots = ("square", *["mean"] * centered, *["velocity"] * momentum)
        if momentum:
            self.attributes = {**self.attributes, "momentum": None}

    def constants(self, attrs: Attrs) -> dict[str, float]:
        keep, momentum = attrs["alpha"], attrs.get("momentum", 0.0)
        return dict(keep=keep, take=1 - keep, eps=attrs["eps"], momentum=momentum)

    def apply(self, states: Sequence[Array], g: Array, s: Array, attrs: Attrs, now: Now) -> None:
        named = dict(zip(("param", *self.slots), states))
        keep, take, eps, momentum = self.constants(attrs).values()
        _blend(named["square"], keep, _share_of_square(g, take, s))
        variance = named["square"]
        if "mean" in named:
            _blend(named["mean"], keep, np.multiply(g, take, out=s))
            np.multiply(named["mean"], named["mean"], out=s)
            np.minimum(s, np.finfo(s.dtype).max, out=s)  # an infinite square minus it stays so
            np.subtract(variance, s, out=s)
            variance = np.maximum(s, 0, out=s)  # below 0 by rounding
        np.sqrt(variance, out=s)
        np.add(s, eps, out=s)
        change = np.divide(g, s, out=s)
        if "velocity" in named:
            np.multiply(named["velocity"], momentum, out=named["velocity"])
            change = np.add(named["velocity"], s, out=named["velocity"])
        descend(named["param"], change, now.lr, s)


class Adagrad(Rule):
    """Adagrad of Duchi, Hazan and Singer (2011): total += g²; p -= lr · g / (sqrt(total) + eps)."""

    name = "adagrad_update"
    slots = ("total",)
    attributes = {"eps": None}
    operations = 6

    def constants(self, attrs: Attrs) -> dict[str, float]:
        return {"eps": attrs["eps"]}

    def apply(self, states: Sequence[Array], g: Array, s: Array, attrs: Attrs, now: Now) -> None:
        p, total = states
        np.add(total, np.multiply(g, g, out=s), out=total)
        np.sqrt(total, out=s)
        np.add(s, attrs["eps"], out=s)
        descend(p, np.divide(g, s, out=s), now.lr, s)


class Lion(Rule):
    """Lion of Chen et al. (2023): p -= lr · sign(beta1 · m + (1 - beta1) · g); m = beta2 · m +
    (1 - beta2) · g.
    """

    name = "lion_update"
    slots = ("mean",)
    attributes = {"beta1": None, "beta2": None}
    operations = 8

    def constants(self, attrs: Attrs) -> dict[str, float]:
        return _shares("direction", attrs["beta1"]) | _shares("mean", attrs["beta2"])

    def apply(self, states: Sequence[Array], g: Array, s: Array, attrs: Attrs, now: Now) -> None:
        p, m = states
        keep1, take1, keep2, take2 = self.constants(attrs).values()
        # The direction is that of m + (take1 / keep1) · g, which takes no second array.
        np.multiply(g, take1 / keep1 if keep1 else 1.0, out=s)
        if keep1:
            np.add(s, m, out=s)
        descend(p, np.sign(s, out=s), now.lr, s)
        _blend(m, keep2, np.multiply(g, take2, out=s))


class Average(Rule):
    """The exponentially weighted mean of the values given so far, of which the gradient is the
    newest: with t = step + 1 and share = (1 - decay) / (1 - decay^t),
    average = (1 - share) · average + share · g. The weight of a value that is k steps old is
    proportional to decay^k, so what was there before has none.
    """

    name = "average_update"
    attributes = {"keep": None}
    operations = 3
    beside = True
    takes_rate = False
    needs_step = True

    def constants(self, attrs: Attrs) -> dict[str, float]:
        return {"decay": 1 - attrs["keep"]}

    def apply(self, states: Sequence[Array], g: Array, s: Array, attrs: Attrs, now: Now) -> None:
        decay = 1 - attrs["keep"]
        keep = float(s.dtype.type(1 - decay / _correction(decay, now)))
        _blend(states[0], keep, np.multiply(g, 1 - keep, out=s))


class Accumulate(Rule):
    """total += g, from 0 in the first of every `every` runs."""

    name = "accumulate_update"
    operations = 1
    takes_rate = False
    every_run = True
    beside = True
    steady = True

    def apply(self, states: Sequence[Array], g: Array, s: Array, attrs: Attrs, now: Now) -> None:
        if now.fresh:
            np.copyto(states[0], g)
        else:
            np.add(states[0], g, out=states[0])


def _correction(decay: float, now: Now) -> float:
    """1 - beta^t with beta = 1 - decay, without the cancellation."""
    assert now.step is not None
    return -math.expm1((now.step + 1) * math.log1p(-decay)) if decay < 1 else 1.0


def descend(p: Array, direction: Array, rate: float, s: Array) -> None:
    np.subtract(p, np.multiply(direction, rate, out=s), out=p)


def _shares(average: str, beta: float) -> dict[str, float]:
    """The weights of a moving average: of itself, and of a new value."""
    return {f"{average}_keep": beta, f"{average}_take": 1 - beta}


def _share_of_square(g: Array, take: float, s: Array) -> Array:
    return np.multiply(np.multiply(g, take, out=s), g, out=s)


def _blend(state: Array, keep: float, taken: Array) -> None:
    """state = keep · state + taken; a state of no weight is forgotten even where it is infinite."""
    if keep == 0:
        np.copyto(state, taken)
    else:
        np.multiply(state, keep, out=state)
        np.add(state, taken, out=state)


# One for each rule of the native kernels.
RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Sgd(), Momentum(), Adam(), RmsProp(), RmsProp(centered=True), RmsProp(momentum=True),
        RmsProp(centered=True, momentum=True), Adagrad(), Lion(), Average(), Accumulate(),
    )
}  # fmt: skip

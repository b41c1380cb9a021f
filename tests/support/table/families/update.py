"""The rows of samples.py for the rules of optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlsys.ops.optim import apply, assign
from support.table.rows import Case, Domain, Sample, Shape, case, positive, refuse, signed, uniform


def exact_norm(*arrays: np.ndarray) -> float:
    """The root of the sum of squares, added up without rounding: BLAS sums 70,000 terms in an order
    of its own, with one thread by up to 17 eps from the exact sum.
    """
    return math.sqrt(math.fsum(float(x) ** 2 for array in arrays for x in array.flat))


PARAMETERS = [(), (1,), (0, 3), (37, 41), (70_001,)]
EVERY_OPTION = dict(clip=0.75, l2=0.5, decay=0.125)


def at(value: int) -> Domain:
    return lambda rng, shape: np.full(shape, value, np.int64)


# ---- formulas: the change of the parameter over the rate, and the new slots ----


def sgd(g: Any, step: int) -> tuple:
    return g, ()


def momentum(
    g: Any, step: int, v: Any, momentum: float, dampening: float = 0.0, nesterov: bool = False
) -> tuple:
    v = momentum * v + (g if step == 0 else g - dampening * g)
    return (g + momentum * v if nesterov else v), (v,)


def adam(g: Any, step: int, m: Any, v: Any, beta1: float, beta2: float, eps: float) -> tuple:
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    root = (v / (1 - beta2 ** (step + 1))) ** 0.5
    return m / (1 - beta1 ** (step + 1)) / (root + eps), (m, v)


def rmsprop(centered: bool) -> Callable:
    def formula(g: Any, step: int, *slots: Any, alpha: float, eps: float, momentum: float = 0):
        square, *rest = slots
        square = alpha * square + (1 - alpha) * g * g
        mean = alpha * rest.pop(0) + (1 - alpha) * g if centered else None
        change = g / ((square - (mean**2 if centered else 0)) ** 0.5 + eps)
        kept = [square, mean] if centered else [square]
        if rest:
            change = momentum * rest[0] + change
            kept.append(change)
        return change, kept

    return formula


def adagrad(g: Any, step: int, total: Any, eps: float) -> tuple:
    total = total + g**2
    return g / (total**0.5 + eps), (total,)


def lion(g: Any, step: int, m: Any, beta1: float, beta2: float) -> tuple:
    return np.sign(beta1 * m + (1 - beta1) * g), (beta2 * m + (1 - beta2) * g,)


def one_by_one(rule: RuleOf, arrays: Sequence[Any]) -> list[tuple[list, Any, list]]:
    """Of each parameter the states and the gradient, and what they share."""
    states, count = rule.op.rule.slots, rule.count
    owned = (len(states) + 2) * count
    columns = [arrays[k:owned:count] for k in range(count)]
    return [(list(own[:-1]), own[-1], list(arrays[owned:])) for own in columns]


class RuleOf:
    """The row of a rule, or of several parameters under it."""

    def __init__(self, op: Any, formula: Callable, *slots: Domain, count: int = 1) -> None:
        self.op, self.formula, self.slots, self.count = op, formula, slots, count

    def node(self, *inputs: Any, given: Sequence[str] = (), **attrs: Any) -> Any:
        op = self.op if self.count == 1 else apply.several(self.op, self.count)
        plain = len(inputs) - len(given)
        node = op(*inputs[:plain], **dict(zip(given, inputs[plain:])), **attrs)
        return node if self.count == 1 else assign.group_op(*node)

    def reference(self, *arrays: Any, **attrs: Any) -> tuple:
        made = [self.updated(*one, **attrs) for one in one_by_one(self, arrays)]
        return tuple(state for states in zip(*made) for state in states)

    def updated(
        self, states: list, g: Any, shared: list, given: Sequence[str] = (), clip: float = np.inf,
        l2: float = 0, decay: float = 0, every: int = 1, **attrs: Any,
    ) -> list:  # fmt: skip
        p, *slots = states
        lr, *options = (x.item() for x in shared)
        named = dict(zip(given or ("step",), options))
        if "count" in named and (named["count"] + 1) % every:
            return states
        g = np.minimum(np.maximum(g * named.get("scale", 1), -clip), clip) + l2 * p
        change, slots = self.formula(g, named.get("step", 1), *slots, **attrs)
        kept = p * (1 - lr * decay) if decay else p
        return [kept - lr * change, *slots]

    def scale(self, *arrays: Any, **attrs: Any) -> tuple:
        """The sizes of what is added: the formula's change of sizes, and those of the slots."""
        made = []
        for states, g, shared in one_by_one(self, arrays):
            sizes = [np.abs(state) for state in states]
            size = np.abs(g) * max(1, *(abs(x.item()) for x in shared))
            grown = self.updated([0 * sizes[0], *sizes[1:]], size + sizes[0], shared, **attrs)
            made.append([sizes[0] + np.abs(grown[0])])
            made[-1] += [a + np.abs(b) + size for a, b in zip(sizes[1:], grown[1:])]
        return tuple(state for states in zip(*made) for state in states)

    def case(self, *shapes: Shape, given: dict[str, Domain] | None = None, **attrs: Any) -> Case:
        given = given or {}
        states = 1 + len(self.slots)
        domains = [x for d in (signed, *self.slots, signed) for x in [d] * len(shapes)]
        return case(
            *shapes * (states + 1), (), *[()] * len(given),
            domain=(*domains, positive, *given.values()),
            **({"given": tuple(given)} if given else {}), **attrs,
        )  # fmt: skip

    def row(self, ulps: float, needs: dict[str, Domain] | None = None, **attrs: Any) -> Sample:
        """Cases of every shape, of every option, and of runs that are and are not due."""
        needs = needs or {}
        gated = {**needs, "count": at(3), "scale": uniform(0.25, 1)}
        cases = [
            *(self.case(*[s] * self.count, given=needs, **attrs) for s in PARAMETERS[:5]),
            self.case(*[(37, 41)] * self.count, given=gated, every=2, **EVERY_OPTION, **attrs),
            self.case(*[(7,)] * self.count, given=gated, every=3, **attrs),
        ]
        return self.sample(tuple(cases), ulps)

    def sample(self, cases: tuple[Case, ...], ulps: float, **more: Any) -> Sample:
        name = self.op.name + ("" if self.count == 1 else f"_of_{self.count}")
        return Sample(
            name, self.op, self.reference, cases, scale=self.scale, ulps=ulps, differentiable=(),
            specials=False, states=self.count * (1 + len(self.slots)), build=self.node,
            wide=self.wide, **more,
        )  # fmt: skip

    @property
    def wide(self) -> tuple[int, ...]:
        """The inputs that stay float32: slots, the rate and what follows it."""
        states = self.count * (1 + len(self.slots))
        return *range(self.count, states), *range(states + self.count, states + self.count + 4)


SGD = RuleOf(apply.sgd_update_op, sgd)
MOMENTUM = RuleOf(apply.sgd_momentum_update_op, momentum, signed)
ADAM = RuleOf(apply.adam_update_op, adam, signed, positive)
SHAPES = [(), (5,), (0, 3), (4, 6), (7,), (40_000,), (3, 3, 3)]
SEVERAL = RuleOf(apply.adam_update_op, adam, signed, positive, count=len(SHAPES))
SMALL = uniform(-0.25, 0.25)  # a mean whose square is well below the mean square


def steps(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.integers(0, 1000, shape)


def totals(g: np.ndarray, keep: float, step: int, average: np.ndarray) -> np.ndarray:
    """The weights of a mean, keep^age, added up as a series."""
    weights = keep ** np.arange(step + 1)
    return (weights[0] * g + weights[1:].sum() * average) / weights.sum()


# Of the sizes of what is added. Worst: sgd 1.0, with momentum 1.5, the rules with roots and
# quotients 1.8, average 0.5.
RULES = (
    Sample(
        "sgd_update", apply.sgd_update_op, SGD.reference,
        (
            *SGD.row(1).cases, case((3,), (3,), (1,)),
        ),
        scale=SGD.scale, ulps=1.5, differentiable=(), states=1, build=SGD.node,
        refusals=(
            refuse(r"sgd_update: \S+ is no Parameter and cannot be written", (3,), (3,), ()),
            refuse(
                r"expected states and gradient of one shape and a scalar rate, got",
                (3,), (3,), (2,), states=1,
            ),
            refuse(
                r"expected a rate of float32, got float16", (3,), (3,), (),
                dtypes=("float16",) * 3, states=1,
            ),
        ), wide=SGD.wide,
    ),
    Sample(
        "sgd_momentum_update", apply.sgd_momentum_update_op, MOMENTUM.reference,
        (
            *MOMENTUM.row(1, momentum=0.9).cases,
            *MOMENTUM.row(1, momentum=0.9, nesterov=True).cases[3:],
            *MOMENTUM.row(1, {"step": at(0)}, momentum=0.5, dampening=0.25).cases[3:],
            *MOMENTUM.row(1, {"step": at(1)}, momentum=0.5, dampening=0.25).cases[3:],
            MOMENTUM.case((7,), momentum=0.0),
        ),
        scale=MOMENTUM.scale, ulps=2, differentiable=(), states=2, specials=False,
        build=MOMENTUM.node,
        refusals=(
            refuse(
                r"\S+ is no Parameter and cannot be written", (3,), (3,), (3,), (), states=1,
                momentum=0.9,
            ),
            refuse(
                r"unexpected attribute 'damping' \(did you mean 'dampening'\?\)", (3,), (3,), (3,),
                (), states=2, damping=0.9,
            ),
            refuse(
                r"\S+ is float16, expected float32: slots, sums and averages are, and gradients",
                (3,), (3,), (3,), (), dtypes=("float16",) * 3 + ("float32",), states=2,
                momentum=0.9,
            ),
        ), wide=MOMENTUM.wide,
    ),
    ADAM.sample(
        (
            *ADAM.row(2.5, {"step": steps}, beta1=0.9, beta2=0.999, eps=1e-8).cases,
            case(
                *[(7,)] * 4, (), (), domain=(signed, signed, positive, signed, positive, steps),
                beta1=0.9, beta2=0.999, eps=1e-8,
            ),
        ),
        2.5,
        refusals=(
            refuse(
                r"expected a step of one int64, got float32 \(\)", (3,), (3,), (3,), (3,), (), (),
                dtypes=("float32",) * 6, states=3, beta1=0.9, beta2=0.999, eps=1e-8,
            ),
        ),
    ),
    SEVERAL.sample(
        (
            SEVERAL.case(*SHAPES, given={"step": steps}, beta1=0.9, beta2=0.999, eps=1e-8),
            SEVERAL.case(
                *SHAPES, given={"step": at(0), "count": at(5), "scale": positive}, every=6,
                beta1=0.5, beta2=0.75, eps=1e-3, **EVERY_OPTION,
            ),
        ),
        2.5,
    ),
    RuleOf(apply.rmsprop_update_op, rmsprop(False), positive).row(2.5, alpha=0.9, eps=1e-8),
    RuleOf(apply.rmsprop_centered_update_op, rmsprop(True), positive, SMALL).row(
        2.5, alpha=0.9, eps=1e-3
    ),
    RuleOf(apply.rmsprop_momentum_update_op, rmsprop(False), positive, signed).row(
        2.5, alpha=0.9, eps=1e-8, momentum=0.5
    ),
    RuleOf(
        apply.rmsprop_centered_momentum_update_op, rmsprop(True), positive, SMALL, signed
    ).row(2.5, alpha=0.9, eps=1e-3, momentum=0.5),
    RuleOf(apply.adagrad_update_op, adagrad, positive).row(2.5, eps=1e-10),
    RuleOf(apply.lion_update_op, lion, signed).row(1.5, beta1=0.9, beta2=0.75),
    Sample(
        "average_update", apply.average_update_op,
        lambda average, value, step, keep, **given: (totals(value, keep, int(step), average),),
        (
            *(case(s, s, (), keep=0.75, domain=(signed, signed, steps)) for s in PARAMETERS),
            case((5,), (5,), (), keep=0.99, domain=(signed, signed, at(0))),
        ),
        scale=lambda average, value, step, keep: (np.abs(average) + np.abs(value),),
        ulps=1, differentiable=(), states=1, specials=False, wide=(0,),
    ),
    Sample(
        "accumulate_update", apply.accumulate_update_op,
        lambda total, g, count, every: (g if count % every == 0 else total + g,),
        tuple(
            case(s, s, (), every=3, domain=(signed, signed, at(n)))
            for s, n in [((), 0), ((0, 3), 1), ((37, 41), 3), ((37, 41), 4), ((70_001,), 5)]
        ),
        ulps=0.5, differentiable=(), states=1, specials=False, wide=(0,),
        build=lambda total, g, count, every: apply.accumulate_update_op(
            total, g, count=count, every=every
        ),
    ),
    Sample(
        "global_norm", apply.global_norm_op,
        exact_norm,
        (
            case((7,)), case(()), case((0, 3), (5,)), case((37, 41), (), (3,)),
            case((70_001,), (5,), (33, 31)), case(*[(3,)] * 40),
        ),
        ulps=0.5, integers="float",
    ),
    Sample(
        "advance_step", assign.advance_step_op, lambda step: (step + 1,), (case(()), case((1,))),
        domain=steps, ulps=0, states=1, differentiable=(), specials=False,
        refusals=(
            refuse(r"expected a step of one int64, got float32 \(3,\)", (3,), states=1),
        ),
    ),
    Sample(
        "advance_step_at_the_end", assign.advance_step_op,
        lambda step, count, every: (step + ((count + 1) % every == 0),),
        tuple(case((), (), every=3, domain=(steps, at(n))) for n in (0, 1, 2)),
        ulps=0, states=1, differentiable=(), specials=False,
        build=lambda step, count, every: assign.advance_step_op(step, count=count, every=every),
    ),
)  # fmt: skip

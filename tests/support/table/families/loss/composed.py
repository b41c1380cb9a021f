"""The rows of samples.py for the losses that are built of other operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.ops.loss import classification, cross_entropy, likelihood, rows
from dlsys.ops.loss.regression import huber_op
from support.table.formulas import dense_scale, log_softmax, mean, pick, rows_of
from support.table.rows import (
    Case,
    Domain,
    Sample,
    case,
    classes,
    extreme,
    one_hot,
    positive,
    refuse,
    signed,
    uniform,
)

REDUCE: dict[str, Callable] = {"none": lambda x: x, "mean": mean, "sum": np.sum}
WEIGHTS = [0.5, 1.0, 2.0, 0.25]
probability = uniform(0.05, 0.95)
inside = uniform(0.25, 0.75)  # where finite differences of log are good


def beside_one(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of both signs, and not so near to 1 that finite differences meet a kink there."""
    size = np.where(rng.uniform(size=shape) < 0.5, positive(rng, shape) / 2.5, 1.2)
    return (size * rng.choice([-1.0, 1.0], shape)).astype(np.float32).astype(np.float64)


def distribution(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of probabilities with zeros among them, exact in float32."""
    counts = rng.integers(0, 9, shape) + (np.arange(shape[-1]) == 0)
    return np.round(counts / counts.sum(axis=-1, keepdims=True) * 2**16) / 2**16


def some_ignored(count: int, ignore: int, dtype: Any) -> Domain:
    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        labels = rng.integers(0, count, shape)
        return np.where(rng.uniform(size=shape) < 0.4, ignore, labels).astype(dtype)

    return draw


def over_rows(rows: np.ndarray, counts: np.ndarray, reduction: str) -> np.ndarray:
    """Rows that count differently; those that count 0 may hold anything."""
    rows = np.where(counts == 0, 0, rows)
    return rows.sum() / counts.sum() if reduction == "mean" else REDUCE[reduction](rows)


def class_loss(
    x: np.ndarray, labels: np.ndarray, reduction: str = "mean", label_smoothing: float = 0.0,
    weights: Any = None, ignore_index: int | None = None,
) -> np.ndarray:  # fmt: skip
    w = np.ones(x.shape[-1]) if weights is None else np.array(weights)
    if labels.ndim == x.ndim:
        share = (1 - label_smoothing) * labels + label_smoothing / x.shape[-1]
        return REDUCE[reduction]((share * w * -log_softmax(x)).sum(axis=-1))
    ignored = labels == (-1 if ignore_index is None else ignore_index)
    safe = np.where(ignored, 0, labels)
    share = (1 - label_smoothing) * rows_of(safe, x) + label_smoothing / x.shape[-1]
    rows = (share * w * -log_softmax(x)).sum(axis=-1)
    return over_rows(rows, np.where(ignored, 0, w[safe.astype(int)]), reduction)


def class_scale(x: np.ndarray, labels: np.ndarray, **attrs: Any) -> np.ndarray:
    return 4 + np.abs(dense_scale(x, 0 * x + 1)).max(initial=0) * np.ones(
        x.shape[:-1] if attrs["reduction"] == "none" else ()
    )


def likelihood_loss(
    x: np.ndarray, labels: np.ndarray, reduction: str = "mean", weights: Any = None,
    ignore_index: int | None = None,
) -> np.ndarray:  # fmt: skip
    w = np.ones(x.shape[-1]) if weights is None else np.array(weights)
    ignored = labels == (-1 if ignore_index is None else ignore_index)
    safe = np.where(ignored, 0, labels).astype(int)
    return over_rows(-pick(x, safe) * w[safe], np.where(ignored, 0, w[safe]), reduction)


def huber(p: np.ndarray, t: np.ndarray, delta: float, reduction: str) -> np.ndarray:
    d = np.abs(p - t)
    return REDUCE[reduction](np.where(d <= delta, d * d / 2, delta * (d - delta / 2)))


def binary_loss(p: np.ndarray, y: np.ndarray, reduction: str = "none") -> np.ndarray:
    p = np.clip(p, 2.0**-126, 1 - 2.0**-24)
    return REDUCE[reduction](-(y * np.log(p) + (1 - y) * np.log(1 - p)))


def logit_loss(
    x: np.ndarray, y: np.ndarray, reduction: str, positive_weight: float = 1.0
) -> np.ndarray:
    low, high = np.logaddexp(0, -x), np.logaddexp(0, x)
    return REDUCE[reduction](positive_weight * y * low + (1 - y) * high)


def multiclass_hinge(
    x: np.ndarray, labels: np.ndarray, margin: float, reduction: str
) -> np.ndarray:
    chosen = rows_of(labels, x) if labels.ndim < x.ndim else labels
    own = (chosen * x).sum(axis=-1, keepdims=True)
    excess = np.where(chosen == 1, 0, np.maximum(0, margin - own + x))
    return REDUCE[reduction](excess.mean(axis=-1))


def divergence(q: np.ndarray, p: np.ndarray, reduction: str) -> np.ndarray:
    terms = np.where(p > 0, p * (np.log(np.where(p > 0, p, 1)) - q), 0)
    return REDUCE[reduction](terms.sum(axis=-1))


def reduced(*shapes: Any, domain: Any = None, **attrs: Any) -> list[Case]:
    return [case(*shapes, domain=domain, reduction=name, **attrs) for name in REDUCE]


def pairs(*settings: dict) -> tuple[Case, ...]:
    return tuple(
        one
        for attrs in settings or ({},)
        for shape in [(), (7,), (33, 17), (4, 3), (0, 3)]
        for one in reduced(shape, shape, **attrs)
    )


def largest(formula: Callable) -> Callable:
    """Errors are measured against the largest loss of a row, or all of them."""

    def scale(*arrays: np.ndarray, reduction: str = "none", **attrs: Any) -> np.ndarray:
        each = np.abs(formula(*arrays, reduction="none", **attrs)).max(initial=0) + 1
        total = formula(*arrays, reduction=reduction, **attrs)
        return each * np.ones(np.shape(total)) + np.abs(total)

    return scale


OPTIONS = (
    *reduced((7, 4), (7,), domain=(signed, classes(4, np.int64)), label_smoothing=0.1),
    *reduced((7, 4), (7,), domain=(extreme, classes(4, np.uint8)), weights=WEIGHTS),
    *reduced((9, 4), (9,), domain=(signed, some_ignored(4, -100, np.int32)), ignore_index=-100),
    *reduced((3, 5, 4), (3, 5), domain=(signed, some_ignored(4, 255, np.uint8)), ignore_index=255,
             weights=WEIGHTS, label_smoothing=0.2),
    *reduced((7, 4), (7,), domain=(signed, classes(4, np.uint8)), ignore_index=-100),
)  # fmt: skip
DENSE_OPTIONS = (
    *reduced((7, 4), (7, 4), label_smoothing=0.1),
    *reduced((7, 4), (7, 4), weights=WEIGHTS, label_smoothing=0.25),
    *reduced((3, 5, 4), (3, 5, 4), weights=WEIGHTS),
)
LOG = uniform(-5, -0.1)
LIKELIHOOD = (
    *reduced((7, 4), (7,), domain=(LOG, classes(4, np.int64))),
    *reduced((7, 4), (7,), domain=(LOG, classes(4, np.int32)), weights=WEIGHTS),
    *reduced((9, 4), (9,), domain=(LOG, some_ignored(4, -1, np.int64)), ignore_index=-1),
    *reduced((3, 5, 4), (3, 5), domain=(LOG, some_ignored(4, 2, np.uint8)), ignore_index=2,
             weights=WEIGHTS),
)  # fmt: skip
BAD_REDUCTION = refuse(
    "reduction must be mean, sum or none, got 'max'", (3,), (3,), reduction="max"
)


def unequal(name: str, *more: tuple[Any, Any], **attrs: Any) -> tuple[Any, ...]:
    """Targets that numpy would broadcast against their predictions, and others."""
    message = rf"{name}: prediction and target must have one shape, got \S+ \(.*\) and \S+ \(.*\); "
    shapes = [((7, 1), (7,)), ((7,), (7, 1)), ((4, 3), (3,)), ((4, 3), (4, 1)), ((3,), (1,)), *more]
    return tuple(refuse(message + "reshape one of them", *pair, **attrs) for pair in shapes)


def apart(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of 1/4 plus 1/8: differences from multiples of 1/4 have no kinks nearby."""
    return rng.integers(-8, 8, shape) / 4 + 0.125


def quarters(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-8, 8, shape) / 4.0


def signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([-1.0, 1.0], shape)


def elementwise(name: str, formula: Callable, *settings: dict, **more: Any) -> Sample:
    refusals = (BAD_REDUCTION, *unequal(name, ((5,), (6,)), ((3,), ())), *more.pop("refusals", ()))
    more = {"domain": (apart, quarters), "ulps": 8, "refusals": refusals} | more
    return Sample(
        name, getattr(ad, name), formula, pairs(*settings), scale=largest(formula), **more
    )


LOSS_ROWS = (
    Sample(
        "uniform_like", cross_entropy.uniform_like_op, lambda x: 0 * x + 1 / x.shape[-1],
        (case((4, 3)), case((5,)), case((0, 2))), differentiable=(), specials=False,
    ),
    Sample(
        "class_weights", rows.class_weights_op, lambda x, values: np.array(values),
        (case((5, 4), values=tuple(WEIGHTS)),), differentiable=(), specials=False, ulps=0,
        refusals=(refuse(r"got 2 weights for \S+ \(5, 4\)", (5, 4), values=(1.0, 2.0)),),
    ),
    Sample(
        "class_weights_function", rows.class_weights, lambda x, weights: np.array(weights),
        (case((5, 4), weights=WEIGHTS),), differentiable=(), specials=False, ulps=0,
        build=lambda x, weights: rows.class_weights(weights, x),
    ),
    Sample(
        "reduce_rows", rows.reduce_rows, lambda x, reduction: REDUCE[reduction](x),
        tuple(one for s in [(7,), (3, 5)] for one in reduced(s)),
        build=lambda x, reduction: rows.reduce_rows("reduce_rows", x, reduction), ulps=4,
        scale=largest(lambda x, reduction: REDUCE[reduction](x)),
    ),
    Sample(
        "is_one_hot", classification.classes_like_op, lambda x, labels: rows_of(labels, x),
        (
            case((7, 4), (7,), domain=(signed, classes(4, np.int32))),
            case((2, 3, 5), (2, 3), domain=(signed, classes(5, np.uint8))),
            case((0, 5), (0,), domain=(signed, classes(5, np.int64))),
        ),
        ulps=0, differentiable=(), specials=False,
    ),
    Sample(
        "softmax_cross_entropy_options", cross_entropy.softmax_cross_entropy, class_loss, OPTIONS,
        ulps=8,
        scale=class_scale, differentiable=(0,), specials=False,
    ),
    Sample(
        "softmax_cross_entropy_dense_options", cross_entropy.softmax_cross_entropy, class_loss,
        DENSE_OPTIONS, domain=(signed, one_hot), ulps=8, scale=class_scale, specials=False,
        refusals=(
            refuse(
                "label_smoothing must be a number from 0 to 1, got 1.5", (3, 4), (3, 4),
                label_smoothing=1.5,
            ),
            refuse("ignore_index needs class indices as labels", (3, 4), (3, 4), ignore_index=0),
        ),
    ),
    Sample(
        "negative_log_likelihood", likelihood.negative_log_likelihood, likelihood_loss, LIKELIHOOD,
        ulps=8,
        scale=largest(likelihood_loss), differentiable=(0,), specials=False,
    ),
    elementwise("mean_squared_error", lambda p, t, reduction: REDUCE[reduction]((p - t) ** 2)),
    elementwise("mean_absolute_error", lambda p, t, reduction: REDUCE[reduction](np.abs(p - t))),
    Sample(
        "huber", huber_op, lambda d, delta: huber(d, 0, delta, "none"),
        tuple(
            case(shape, delta=delta) for shape in ((), (7,), (33, 17), (0, 3), (1003,))
            for delta in (0.05, 1.0, 3.0)
        ),
        beside_one, ulps=2, integers="float",
        refusals=(refuse("huber: expected delta > 0, got 0", (3,), delta=0),),
    ),
    elementwise(
        "huber_loss", huber, {"delta": 1.0}, {"delta": 0.25}, specials=False,
        refusals=(refuse("delta must be a number above 0, got 0", (3,), (3,), delta=0),),
    ),
    elementwise(
        "binary_cross_entropy", binary_loss, domain=(inside, probability), gradient_ulps=64,
        specials=False,
    ),
    Sample(
        "binarycrossentropy", classification.binarycrossentropy_op, binary_loss,
        (case((5, 3), (5, 3)),),
        domain=(inside, probability), ulps=8, specials=False,
        refusals=unequal("binary_cross_entropy"), roundings=2,
    ),
    elementwise(
        "binary_cross_entropy_with_logits", logit_loss, {}, {"positive_weight": 2.5},
        domain=(signed, probability), specials=False,
    ),
    Sample(
        "binary_cross_entropy_with_array_weights", classification.binary_cross_entropy_with_logits,
        logit_loss,
        tuple(
            one
            for weights in (WEIGHTS, np.array([[0.5], [2], [3]]), np.int64([1, 2, 3, 4]), 1)
            for one in reduced((3, 4), (3, 4), positive_weight=weights)
        ),
        domain=(signed, probability), ulps=8, scale=largest(logit_loss), specials=False,
        refusals=(
            refuse(r"weights_like: weights do not broadcast: \S+ \(3,\) and \S+ \(3, 4\)",
                   (3, 4), (3, 4), positive_weight=[1, 2, 3]),
            refuse(r"weights_like: weights do not broadcast: \S+ \(2, 3, 4\) and \S+ \(3, 4\)",
                   (3, 4), (3, 4), positive_weight=np.ones((2, 3, 4))),
        ),
    ),
    Sample(
        "binary_cross_entropy_with_node_weights",
        classification.binary_cross_entropy_with_logits,
        lambda x, y, w, reduction: logit_loss(x, y, reduction, w),
        tuple(one for w in ((4,), (3, 1), (3, 4)) for one in reduced((3, 4), (3, 4), w)),
        domain=(signed, probability, positive), ulps=8, specials=False,
        scale=largest(lambda x, y, w, reduction: logit_loss(x, y, reduction, w)),
        build=lambda x, y, w, reduction: classification.binary_cross_entropy_with_logits(
            x, y, reduction, w
        ), roundings=2,
    ),
    Sample(
        "weights_like", classification.weights_like_op, lambda w, x: w, (case((4,), (3, 4)),),
        differentiable=(0,), specials=False, ulps=0,
        refusals=(
            refuse(r"weights do not broadcast", (3,), (3, 4)),
            refuse(r"\S+ is float32 and \S+ is float64", (4,), (3, 4),
                   dtypes=("float32", "float64")),
        ),
    ),
    elementwise(
        "hinge_loss", lambda x, y, reduction: REDUCE[reduction](np.maximum(0, 1 - y * x)),
        domain=(apart, signs),
    ),
    Sample(
        "multiclass_hinge_loss", classification.multiclass_hinge_loss, multiclass_hinge,
        (
            *reduced((7, 4), (7,), domain=(signed, classes(4, np.int64)), margin=1.0),
            *reduced((2, 5, 4), (2, 5), domain=(extreme, classes(4, np.uint8)), margin=0.5),
        ),
        ulps=8, scale=largest(multiclass_hinge), differentiable=(0,), specials=False,
    ),
    Sample(
        "multiclass_hinge_loss_of_one_hot", classification.multiclass_hinge_loss, multiclass_hinge,
        tuple(reduced((7, 4), (7, 4), domain=(signed, one_hot), margin=1.0)),
        ulps=8, scale=largest(multiclass_hinge), differentiable=(0,), specials=False,
        refusals=unequal("multiclass_hinge_loss", ((5, 3), (1, 3))),
    ),
    Sample(
        "kl_divergence", classification.kl_divergence, divergence,
        (
            *reduced((7, 4), (7, 4), domain=(LOG, distribution)),
            *reduced((3, 2, 5), (3, 2, 5), domain=(LOG, probability)),
        ),
        ulps=8, scale=largest(divergence), differentiable=(0,), specials=False,
        refusals=unequal("kl_divergence", ((5, 3), (1, 3))),
    ),
    Sample(
        "target", rows.target_op, lambda x, y, loss: y,
        tuple(case(s, s, loss="a_loss") for s in [(), (7,), (3, 5), (0, 4)]), ulps=0,
        differentiable=(1,), refusals=unequal("a_loss", loss="a_loss"),
    ),
    Sample(
        "target_of", rows.target_of, lambda x, y: y, (case((3, 5), (3, 5)),), ulps=0,
        build=lambda x, y: rows.target_of("a_loss", x, y), differentiable=(1,),
        refusals=unequal("a_loss"),
    ),
    Sample(
        "class_scores", rows.class_scores_op, lambda x: x,
        tuple(case(s) for s in [(2,), (7, 4), (0, 3), (2, 3, 5)]), ulps=0, integers="moved",
        refusals=tuple(
            refuse(r"class_scores: expected scores .* got \S+ \(.*\); train.BinaryAccuracy", s)
            for s in [(), (1,), (7, 1), (7, 0)]
        ),
    ),
)  # fmt: skip

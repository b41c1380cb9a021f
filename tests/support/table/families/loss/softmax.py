"""The rows of samples.py for softmax and the losses of classes that are operators."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dlsys.ops.loss import cross_entropy, likelihood, rows, softmax
from support.table.formulas import (
    dense_gradient,
    dense_gradient_scale,
    dense_loss,
    dense_scale,
    log_softmax,
    pick,
    softmax_scale,
    sparse_gradient,
    sparse_gradient_scale,
    sparse_loss,
    sparse_scale,
)
from support.table.rows import (
    WIDE,
    Case,
    Domain,
    Refusal,
    Sample,
    Shape,
    case,
    classes,
    extreme,
    one_hot,
    product,
    refuse,
    signed,
    uniform,
    weights,
)

LOGITS = ((1, 1), (4, 3), (7, 10), (0, 3), (2, 3, 5), (33, 17), (5, 129))
ROWS = tuple(case(s) for s in [(1,), (5,), *LOGITS, (3, 0), (0,), WIDE])
ROWS += (case((61, 130)), case((7, 10), domain=extreme), case((3, 2), domain=extreme))
# the last of several, short and long columns, few and many, wide rows, and nothing
AXES = tuple(
    case(shape, axis=axis)
    for shape, axis in [
        ((3, 4), 0), ((3, 4), 1), ((3, 4), -2), ((2, 3, 5), 1), ((2, 3, 5), -3), ((5, 7, 1, 1), 1),
        (WIDE, 2), ((1, 5), 0), ((0, 3), 0), ((3, 0), 0), ((2, 0, 3), 1), ((33, 40), 0),
        ((103, 3), 0), ((5, 50, 20), 1), ((2, 40, 600), 1), ((3, 7, 300), 1), ((100, 2), 0),
        ((61, 5, 7), 1),
    ]
)  # fmt: skip
AXES += (case((7, 10), axis=0, domain=extreme), case((70, 9), axis=0, domain=uniform(-90, 90)))
NO_AXES = (
    *(
        refuse(rf"axes \({k},\) do not fit an array of 2 dimensions", (3, 4), axis=k)
        for k in (2, -3)
    ),
    *(refuse("axis must be an integer, got", (3, 4), axis=k) for k in (1.0, "0", None, True)),
)
DENSE = tuple(case(s, s) for s in [(5,), *LOGITS, WIDE, (61, 130)])
DENSE += (case((7, 10), (7, 10), domain=(extreme, one_hot)),)
LABELS = (classes(10, np.int32), classes(10, np.int64), classes(10, np.uint8))
SPARSE = tuple(
    case((*lead, count), lead, domain=(domain, labels))
    for lead, count in [((), 10), ((1,), 10), ((7,), 11), ((0,), 10), ((2, 3), 10), ((61,), 130)]
    for domain, labels in zip((signed, extreme, signed), LABELS)
)
# rows of no class, many classes, and rows for several threads
PICKED = SPARSE + tuple(
    case((rows, count), (rows,), domain=(signed, classes(max(count, 1), dtype)))
    for rows, count, dtype in [(0, 0, np.int32), (9, 1030, np.int64), (40_000, 2, np.int32)]
)
REDUCTION = tuple({"reduction": name} for name in ("mean", "sum", "none"))
INTEGER = ("float32", "int32", "float32")  # dtypes
LABELS_FIRST = ("int32", "float32", "float32")


def over_axis(formula: Callable) -> Callable:
    """A formula over the last axis as one over any."""
    return lambda x, axis=-1: np.moveaxis(formula(np.moveaxis(x, axis, -1)), -1, axis)


def bad_labels(*dy: Shape) -> tuple[Refusal, ...]:
    message = "expected one class index a row"
    return (
        refuse(r"class indices must be integers, got \S+ of float32", (4, 3), (4,), *dy),
        refuse(message, (4, 3), (3,), *dy, dtypes=INTEGER),
        refuse(message, (), (), *dy, dtypes=INTEGER),
    )


def bad_rows(*dy: Shape) -> tuple[Refusal, ...]:
    message = "logits and one-hot labels must have one shape"
    return (
        refuse(rf"{message}, got \S+ \(4, 3\) and \S+ \(4,\)", (4, 3), (4,), *dy),
        refuse(message, (), (), *dy),
    )


def with_dy(cases: tuple[Case, ...], domain: tuple[Domain, ...]) -> tuple[Case, ...]:
    """The cases of a loss for its gradient, which takes a number a row besides."""
    return tuple(
        Case((*one.shapes, one.shapes[0][:-1]), one.attrs, (*(one.domain or domain), signed))
        for one in cases
    )


def placed(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The cases of a loss of class indices for labels, dy and logits, in this order."""
    return tuple(
        Case((one.shapes[1], one.shapes[1], one.shapes[0]), {}, (one.domain[1], signed, signed))
        for one in cases
    )


def with_classes(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The gradient with the number of classes as an attribute."""
    return tuple(
        Case(one.shapes[:2], {"classes": one.shapes[2][-1]}, one.domain[:2]) for one in cases
    )


def likelihood_gradient(labels: np.ndarray, dy: np.ndarray, classes: int) -> np.ndarray:
    return np.where(np.arange(classes) == labels[..., None], -dy[..., None], 0)


# A rounded difference x - max(x), an exp of up to 2 ulp, a sum and a quotient. Worst: softmax 1.7,
# log_softmax 0.8, losses 1.2, their gradients 2.1.
SOFTMAX = (
    Sample(
        "softmax", softmax.softmax_op, over_axis(lambda x: np.exp(log_softmax(x))), ROWS + AXES,
        scale=over_axis(softmax_scale),
        ulps=4, integers="float",
        refusals=(refuse(r"softmax: expected at least one dimension, got \S+ \(\)", ()), *NO_AXES),
    ),
    Sample(
        "log_softmax", softmax.log_softmax_op, over_axis(log_softmax), ROWS + AXES, ulps=4,
        integers="float", scale=over_axis(lambda x: 1 + np.abs(log_softmax(x))),
        refusals=(refuse(r"log_softmax: expected at least one dimension", ()), *NO_AXES),
    ),
)  # fmt: skip

LOSSES = (
    Sample(
        "softmax_cross_entropy_rows", cross_entropy.cross_entropy_rows_op, dense_loss, DENSE,
        domain=(signed, weights), scale=dense_scale, ulps=4,
        refusals=bad_rows(),
    ),
    Sample(
        "softmax_cross_entropy", cross_entropy.softmax_cross_entropy, dense_loss,
        product(DENSE, *REDUCTION), domain=(signed, weights), scale=dense_scale, ulps=4,
        refusals=(
            refuse("must be mean, sum or none, got 'max'", (3, 4), (3, 4), reduction="max"),
        ),
    ),
    Sample(
        "softmaxcrossentropy", cross_entropy.softmaxcrossentropy_op,
        lambda x, labels: dense_loss(x, labels, "mean").reshape(1), DENSE, domain=(signed, one_hot),
        scale=lambda x, labels: dense_scale(x, labels, "mean").reshape(1), ulps=4,
        differentiable=(0,), refusals=bad_rows(),
        # The assignment's gradient, (softmax - y_) * output_grad, is of the rows' sum, and of rows
        # of labels that sum to 1.
        gradient_factor=lambda x, labels: float(np.prod(x[:-1])),
    ),
    Sample(
        "softmax_cross_entropy_gradient", cross_entropy.cross_entropy_gradient_op, dense_gradient,
        with_dy(DENSE, (signed, weights)), scale=dense_gradient_scale, ulps=4,
        refusals=(
            *bad_rows((4,)),
            refuse(r"expected one output gradient a row, got", (4, 3), (4, 3), (3,)),
        ),
    ),
    Sample(
        "sparse_softmax_cross_entropy_rows", cross_entropy.sparse_cross_entropy_rows_op,
        sparse_loss, SPARSE,
        scale=sparse_scale, ulps=4, differentiable=(0,), refusals=bad_labels(),
    ),
    Sample(
        "sparse_softmax_cross_entropy", cross_entropy.softmax_cross_entropy, sparse_loss,
        tuple(Case(c.shapes, attrs, c.domain) for c in SPARSE[3:12] for attrs in REDUCTION),
        scale=sparse_scale, ulps=4, differentiable=(0,),
    ),
    Sample(
        "sparse_softmax_cross_entropy_gradient", cross_entropy.sparse_cross_entropy_gradient_op,
        sparse_gradient, with_dy(SPARSE, ()), scale=sparse_gradient_scale, ulps=4,
        differentiable=(0, 2),
        refusals=(
            *bad_labels((4,)),
            refuse(
                r"expected one output gradient a row, got", (4, 3), (4,), (3,), dtypes=INTEGER,
            ),
        ),
    ),
    Sample(
        "negative_log_likelihood_rows", likelihood.likelihood_rows_op, lambda x,
        labels: -pick(x, labels),
        PICKED, ulps=0, differentiable=(0,), refusals=bad_labels(),
    ),
    Sample(
        "negative_log_likelihood_gradient_like", likelihood.likelihood_gradient_like_op,
        lambda labels, dy, x: likelihood_gradient(labels, dy, x.shape[-1]), placed(PICKED), ulps=0,
        differentiable=(1,),
        refusals=tuple(
            refuse("expected one label and dy a row, got", *shapes, dtypes=LABELS_FIRST)
            for shapes in [((4,), (4,), (3, 2)), ((4,), (3,), (4, 2)), ((), (), ())]
        ),
    ),
    Sample(
        "negative_log_likelihood_gradient", likelihood.likelihood_gradient_op, likelihood_gradient,
        with_classes(placed(PICKED)), ulps=0, differentiable=(1,),
        refusals=(
            refuse(r"class indices must be integers, got \S+ of float32", (4,), (4,), classes=3),
            refuse("expected one dy a label, got", (4,), (3,), dtypes=LABELS_FIRST, classes=3),
            refuse("classes must be an integer that is not negative, got -1", (4,), (4,),
                   dtypes=LABELS_FIRST, classes=-1),
        ),
    ),
    Sample(
        "expand_last", rows.expand_last, lambda x, like: x.reshape(*like.shape[:-1], 1),
        (case((4,), (4, 3)), case((2, 3), (2, 3, 5)), case((1,), (3,)), case((0,), (0, 3))), ulps=0,
        differentiable=(0,),
    ),
)  # fmt: skip

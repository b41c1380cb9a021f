"""The table of operators: a row an operator, with inputs, an independent formula and a tolerance.

test_operators.py runs every row on every device. A row's `reference` is written in float64 and does
not call the operator's own numpy form. Its tolerance is |error| <= ulps * eps * scale, where
`scale` says what the error is measured against: by default the result itself, for sums the sizes of
the terms, since what cancels leaves the terms' errors. "Worst" is the largest error measured in
float32, in the unit of `ulps`, on numpy 2.4 and on the CPU device with AVX-512.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.graph.node import hooks
from dlsys.ops import elementwise, leaf, movement, reduce
from dlsys.ops.math import power
from dlsys.ops.optim import assign
from support.table.families.accumulate import ACCUMULATE
from support.table.families.activation import CHOICES, FUNCTIONS
from support.table.families.attention import ATTENTION
from support.table.families.boxes import BOXES
from support.table.families.concat import JOIN
from support.table.families.conv import CONVOLUTION
from support.table.families.device_batch import BATCHES
from support.table.families.fp8 import FP8
from support.table.families.fused.channels_last import CHANNELS_LAST
from support.table.families.fused.conv import FUSED_CONV
from support.table.families.fused.gemm import FUSED
from support.table.families.fused.layer_norm import FUSED_LAYER_NORM
from support.table.families.fused.norm import FUSED_NORM
from support.table.families.fused.pointwise import POINTWISE
from support.table.families.fused.quantized import FUSED_QUANTIZED
from support.table.families.fused.scattered import FUSED_SCATTERED
from support.table.families.fused.uint8 import FUSED_UINT8
from support.table.families.generation import GENERATION
from support.table.families.grouped import GROUPED
from support.table.families.loss.composed import LOSS_ROWS
from support.table.families.loss.softmax import LOSSES, SOFTMAX
from support.table.families.mathematics import MATHEMATICS
from support.table.families.matmul import PRODUCTS
from support.table.families.movement import INDEX, RESHAPES
from support.table.families.norm import NORMALIZATION
from support.table.families.order import ORDER
from support.table.families.pooling import POOLING
from support.table.families.quantize import QUANTIZED
from support.table.families.random import RANDOM
from support.table.families.resize import IMAGES
from support.table.families.statistics import STATISTICS
from support.table.families.update import RULES
from support.table.formulas import (
    einsum_axes,
    expand,
    mean,
    mean_scale,
    root_of_terms,
    sum_scale,
    sum_to,
    tanh,
)
from support.table.rows import (
    WIDE,
    Case,
    Refusal,
    Sample,
    case,
    mixed,
    nonzero,
    positive,
    product,
    refuse,
    uniform,
)

ONE = tuple(case(s) for s in [(), (1,), (7,), (0,), (3, 5), (0, 4), WIDE, (31, 33), (70_001,)])
FEW = tuple(case(s) for s in [(), (7,), (0, 4), (37, 41)])
TWO = tuple(
    case(a, b)
    for a, b in [
        ((), ()), ((7,), ()), ((), (7,)), ((3, 5), (3, 5)), ((3, 5), (5,)), ((5,), (3, 5)),
        ((3, 1), (1, 5)), ((4, 1, 3), (2, 1)), ((2, 1), (4, 1, 3)), ((0, 3), (3,)), ((1,), (0,)),
        (WIDE, (1, 3, 1, 2, 1, 2, 1, 1)), ((131, 67), (67,)), ((67, 1), (67, 129)),
        ((1,), (1, 1, 1)), ((300, 257), (257,)), ((300, 257), (300, 257)),
    ]
)  # fmt: skip
BAD_PAIR = (
    refuse(r"shapes do not broadcast: \S+ \(3, 4\) and \S+ \(3,\)", (3, 4), (3,)),
    refuse(r"shapes do not broadcast: \S+ \(2, 3\) and \S+ \(4, 3\)", (2, 3), (4, 3)),
)


def unary(name: str, reference: Callable, **more: Any) -> Sample:
    return Sample(name, getattr(ad, f"{name}_op"), reference, ONE, **more)


def binary(name: str, reference: Callable, op: Any = None, **more: Any) -> Sample:
    refusals = tuple(Refusal(f"{name}: {r.message}", r.shapes) for r in BAD_PAIR) + mixed(name)
    op = op or getattr(ad, f"{name}_op")
    return Sample(name, op, reference, TWO, refusals=refusals, **more)


def with_const(op: Any, reference: Callable, *constants: float, **more: Any) -> Sample:
    cases = product(FEW, *({"const": c} for c in constants))
    return Sample(op.name, op, reference, cases, **more)


def function(name: str, reference: Callable, **more: Any) -> Sample:
    """A function of a node with a number or an array on either side."""
    values = (2, 2.5, np.float32(1.5), np.array(3.0, np.float32), np.array([1, 2, 3, 4]))
    cases = product(
        (case((3, 4)),), *({"value": v, "left": left} for v in values for left in (True, False))
    )
    op = hooks[name]
    build = lambda x, value, left: op(value, x) if left else op(x, value)  # noqa: E731
    formula = lambda x, value, left: reference(value, x) if left else reference(x, value)  # noqa: E731
    return Sample(f"{name}_function", op, formula, cases, positive, build=build, **more)


# IEEE 754 rounds + - * / and sqrt exactly: half an ulp. Functions: numpy documents 4 ulp for its
# vector code (exp 2.5, log 3.8), CUDA 2 ulp for exp, log and tanh and 4 for pow, the CPU device 2
# ulp for exp and tanh. Worst: exp 1.4, log 1.9, tanh 1.1, sigmoid 1.6, pow 0.9, all others 0.5.
ELEMENTWISE = (
    unary("neg", lambda x: 0 - x, ulps=0, integers="same"),
    unary("exp", lambda x: np.e**x, ulps=3, integers="float"),
    unary("log", lambda x: np.log2(x) * np.log(2.0), domain=positive, ulps=4, integers="float"),
    unary(
        "sqrt", lambda x: np.where(x < 0, np.nan, np.abs(x) ** 0.5), domain=positive,
        integers="float",
    ),
    unary("tanh", tanh, ulps=4, integers="float"),
    unary("cos", lambda x: np.exp(1j * x).real, ulps=2, scale=np.ones_like, integers="float"),
    unary("sin", lambda x: np.exp(1j * x).imag, ulps=2, integers="float"),
    unary("sigmoid", lambda x: 0.5 * (1 + np.tanh(x / 2)), ulps=4, integers="float"),
    unary("relu", lambda x: np.where(x <= 0, 0, x), domain=nonzero, ulps=0, integers="same"),
    binary("add", lambda a, b: a + b, integers="same"),
    binary("sub", lambda a, b: a - b, integers="same"),
    binary("mul", lambda a, b: a * b, integers="same"),
    binary("div", lambda a, b: a * (1 / b), domain=nonzero, integers="float"),
    binary("pow", lambda a, b: a**b, domain=positive, ulps=4, integers="float"),
    binary(
        "relu_gradient", lambda x, g: np.where(x > 0, g, 0), domain=nonzero, ulps=0,
        differentiable=(1,), integers="same",
    ),
    # Without a rung these are compositions; with one see tests/native/test_cudnn.py.
    binary(
        "sigmoid_gradient", lambda y, g: g * y * (1 - y), elementwise.sigmoid_gradient_op,
        ulps=4, integers="float", roundings=3,
    ),
    binary(
        "tanh_gradient", lambda y, g: g * (1 - y * y), elementwise.tanh_gradient_op,
        ulps=4, integers="float", scale=lambda y, g: np.abs(g) * (1 + y * y), roundings=3,
    ),
    with_const(elementwise.add_byconst_op, lambda x, const: x + const, 0, 2, -1.5, integers="same"),
    with_const(elementwise.mul_byconst_op, lambda x, const: x * const, 1, 3, -0.5, integers="same"),
    with_const(
        elementwise.div_byconst_op, lambda x, const: x / const, 1, 2, -0.75, integers="float"
    ),
    with_const(elementwise.const_sub_op, lambda x, const: const - x, 0, 2, 1.5, integers="same"),
    with_const(
        elementwise.const_div_op, lambda x, const: const / x, 0, 1, -2.5, domain=nonzero,
        integers="float",
    ),
    with_const(
        power.pow_byconst_op, lambda x, const: x**const, 0, 1, 2, 3, -1, 0.5, -1.5,
        domain=positive, ulps=4,
    ),
    with_const(
        power.const_pow_op, lambda x, const: const**x, 1, 2, 0.25, ulps=4, integers="float"
    ),
    Sample(
        "cast", elementwise.cast_op, lambda x, dtype: x.copy(), product(ONE, {"dtype": "float64"}),
        ulps=0, integers="moved",
    ),
    Sample(
        "cast_to_integers", elementwise.cast_op, lambda x, dtype: x.astype(dtype),
        product(FEW, *({"dtype": name} for name in ("int32", "int64", "uint8", "bool", "float32"))),
        domain=uniform(0, 200), ulps=0, differentiable=(), specials=False, integers="moved",
    ),
    function("add", lambda a, b: a + b),
    function("sub", lambda a, b: a - b),
    function("mul", lambda a, b: a * b),
    function("div", lambda a, b: a / b),
    function("power", lambda a, b: a**b, ulps=4),
)  # fmt: skip


# ---- sums, and what moves elements ----


AXES = (
    *(case(s) for s in [(), (7,), (0,), (3, 4, 5), (0, 4)]),
    *product(
        (case((3, 4, 5)),),
        *({"axis": a} for a in (0, -1, (0, 2), (-1, 0), (0, 1, 2), (), np.int64(1))),
    ),
    *product((case((3, 1, 5)), case((2, 0, 3))), {"axis": 1}, {"axis": 1, "keepdims": True}),
    *product((case(WIDE),), {"axis": (0, 2, 5)}, {"axis": (1, 6), "keepdims": True}, {"axis": 7}),
    *product((case((131, 67)),), {"axis": 0}, {"axis": 1}, {"keepdims": True}),
    *product((case((2003, 97)),), {"axis": 0}, {"axis": 1}, {}),
    *product((case((17, 65, 129)),), {"axis": 1}, {"axis": (0, 2)}),
    *product((case((3001, 3)), case((301, 50)), case((5, 301, 4))), {"axis": 1}),
    case((20_003, 3), axis=0),
)
BAD_AXES = tuple(
    refuse(rf"axes \({axes}\) do not fit an array of 2 dimensions", (3, 4), axis=axis)
    for axes, axis in [("2,", 2), ("-3,", -3), ("0, 0", (0, 0)), ("0, -2", (0, -2))]
)
SPREAD = (
    ((), (3,)), ((1,), (0, 1)), ((5,), (5,)), ((5,), (3, 5)), ((3, 1), (3, 5)), ((1, 1), (4, 5)),
    ((4, 1, 3), (2, 4, 5, 3)), ((2, 1, 1, 1, 2, 1, 1, 3), WIDE), ((129,), (257, 129)), ((), ()),
)  # fmt: skip
TRANSPOSED = tuple(
    Case((shape,), {"axes": axes})
    for shape, axes in [
        ((), None), ((7,), None), ((3, 5), None), ((0, 4), None), ((3, 5), (0, 1)),
        ((2, 3, 4), None), ((2, 3, 4), (1, 2, 0)), ((2, 3, 4), (-1, 0, 1)),
        ((3, 1, 5), (1, 0, 2)), ((131, 67), None), (WIDE, None),
        (WIDE, (7, 2, 0, 4, 1, 6, 3, 5)), ((37, 5, 41), (0, 2, 1)), ((600, 301), None),
    ]
)  # fmt: skip

# Worst: sum 0.3, mean 0.5 (its factor is rounded as well), expand_like 0.6. The bound grows with
# the root of the number of terms: eps times the number itself would let a kernel pass that adds
# with half the digits.
REDUCTIONS = (
    Sample(
        "sum", reduce.sum_op,
        lambda x, axis=None, keepdims=False: x.sum(axis=axis, keepdims=keepdims), AXES,
        scale=sum_scale, ulps=1, integers="same", refusals=BAD_AXES,
    ),
    Sample(
        "mean", reduce.mean_op, mean, AXES, scale=mean_scale, ulps=1, integers="float",
        refusals=BAD_AXES,
    ),
    Sample(
        "reducesumaxiszero", reduce.reducesumaxiszero_op,
        lambda x: x.sum(axis=0).reshape(x.shape[1:] or (1,)),
        tuple(case(s) for s in [(7,), (0,), (3, 5), (0, 4), (4, 0), (2, 3, 4), (131, 67), WIDE]),
        scale=lambda x: sum_scale(x, axis=0).reshape(x.shape[1:] or (1,)), ulps=1, integers="same",
        refusals=(refuse(r"expected at least one dimension, got \S+ \(\)", ()),),
    ),
    Sample(
        "expand_like", reduce.expand_like_op, expand,
        (
            case((), (3, 4), axis=None, keepdims=False, mean=False),
            case((4,), (3, 4), axis=0, keepdims=False, mean=True),
            case((3, 1), (3, 4), axis=1, keepdims=True, mean=True),
            case((3, 5), (3, 4, 5), axis=-2, keepdims=False, mean=False),
            case((131, 1), (131, 67), axis=(1,), keepdims=True, mean=True),
        ),
        ulps=1, differentiable=(0,),
    ),
    Sample(
        "broadcast_like", reduce.broadcast_like_op, lambda x, like: x + np.zeros(like.shape),
        tuple(case(a, b) for a, b in SPREAD), ulps=0, differentiable=(0,), integers="moved",
        refusals=(refuse(r"\(3,\) does not broadcast to \S+ \(3, 4\)", (3,), (3, 4)),),
    ),
    Sample(
        "sum_to_like", reduce.sum_to_like_op, sum_to, tuple(case(b, a) for a, b in SPREAD),
        scale=lambda x, like: root_of_terms(x, sum_to(np.abs(x), like)), ulps=1,
        differentiable=(0,), refusals=(refuse(r"cannot be summed to \S+ \(3,\)", (3, 4), (3,)),),
    ),
    Sample(
        "sum_to_like_function", reduce.sum_to_like, sum_to,
        (case((3, 4), (3, 4)), case((3, 4), (4,))), ulps=1, differentiable=(0,),
        scale=lambda x, like: root_of_terms(x, sum_to(np.abs(x), like)),
    ),
)  # fmt: skip

LAYOUT = (
    Sample(
        "reshape", movement.reshape_op, lambda x, shape: np.array(list(x.flat)).reshape(shape),
        tuple(
            Case((before,), {"shape": after})
            for before, after in [
                ((), (1, 1)), ((1,), ()), ((6,), (2, 3)), ((3, 4), (2, -1)), ((0, 3), (3, 0)),
                ((0, 3), (2, -1, 3)), (WIDE, (-1,)), ((12, 5), (12, 5)), ((3, 4), (3, 2, 2)),
            ]
        ),
        ulps=0, integers="moved",
        refusals=(
            refuse(r"\(3, 4\) has 12 elements and cannot become \(5, -1\)", (3, 4), shape=(5, -1)),
            refuse(r"has 12 elements and cannot become \(-1, -1\)", (3, 4), shape=(-1, -1)),
            refuse(r"has 12 elements and cannot become \(3, 5\)", (3, 4), shape=(3, 5)),
            refuse(r"has 0 elements and cannot become \(0, -1\)", (0, 3), shape=(0, -1)),
        ),
    ),
    Sample(
        "reshape_like", movement.reshape_like_op,
        lambda x, like: np.array(list(x.flat)).reshape(like.shape),
        tuple(case(a, b) for a, b in [((), (1,)), ((6,), (2, 3)), ((0, 3), (0,)), (WIDE, (6, 12))]),
        ulps=0, differentiable=(0,), integers="moved",
        refusals=(refuse(r"\(3, 4\) and \S+ \(5,\) differ in their number", (3, 4), (5,)),),
    ),
    Sample(
        "transpose", movement.transpose_op, lambda x, axes: np.einsum(x, *einsum_axes(x, axes)),
        TRANSPOSED, ulps=0, integers="moved",
        refusals=(
            refuse(r"axes \(0,\) do not name each of 2 dimensions once", (3, 4), axes=(0,)),
            refuse(r"axes \(0, 0\) do not fit an array of 2 dimensions", (3, 4), axes=(0, 0)),
            refuse(r"axes \(0, 2\) do not fit an array of 2 dimensions", (3, 4), axes=(0, 2)),
        ),
    ),
    Sample(
        "broadcast_to", movement.broadcast_to_op, lambda x, shape: x + np.zeros(shape),
        tuple(Case((a,), {"shape": b}) for a, b in SPREAD), ulps=0, integers="moved",
        refusals=(
            refuse(r"\(3,\) does not broadcast to \(3, 4\)", (3,), shape=(3, 4)),
            refuse(r"\(3, 4\) does not broadcast to \(4,\)", (3, 4), shape=(4,)),
        ),
    ),
    Sample("copy", movement.copy_op, lambda x: x * 1, ONE, ulps=0, integers="moved"),
    Sample(
        "stop_gradient", movement.stop_gradient_op, lambda x: x * 1, ONE, ulps=0,
        integers="moved", differentiable=(),
    ),
)  # fmt: skip


# ---- where values come from, and where they go ----

SOURCES = (
    Sample(
        "constant", leaf.constant_op, lambda value: np.array(value, np.float64),
        tuple(
            case(value=value)
            for value in [2, 1.5, [1.0, 2.0], np.float32(3), np.arange(6).reshape(2, 3),
                          np.ones((0, 2), np.float32), np.arange(6, dtype=np.float32)[::2]]
        ),
        ulps=0,
    ),
    Sample(
        "full", leaf.full_op, lambda shape, value, dtype: np.full(shape, float(value)),
        tuple(
            case(shape=shape, value=value, dtype=dtype)
            for shape in [(), (5,), (0, 3), (33, 31)]
            for value, dtype in [
                (1.5, "float32"), (0, "int64"), (7, "uint8"), (1, "bool"), (-3, "int32"),
            ]
        ),
        ulps=0,
    ),
    Sample("ones_like", leaf.oneslike_op, lambda x: x * 0 + 1, ONE, ulps=0, differentiable=(),
           specials=False, integers="moved"),
    Sample("zeros_like", leaf.zeroslike_op, lambda x: x * 0, ONE, ulps=0, differentiable=(),
           specials=False, integers="moved"),
)  # fmt: skip

PARAMETERS = [(), (1,), (0, 3), (37, 41), (70_001,)]


UPDATES = (
    Sample(
        "assign", assign.assign_op, lambda p, value: (value,),
        tuple(case(s, s) for s in PARAMETERS), ulps=0, differentiable=(), states=1,
        refusals=(
            refuse(r"assign: \S+ is no Parameter and cannot be written", (3,), (3,)),
            refuse(r"assign: shapes differ: \S+ \(3,\) and \S+ \(4,\)", (3,), (4,), states=1),
        ),
    ),
    Sample(
        "group", assign.group_op, lambda p, q, a, b: (a, b), (case((3,), (2, 5), (3,), (2, 5)),),
        build=lambda p, q, a, b: assign.group_op(assign.assign_op(p, a), assign.assign_op(q, b)),
        ulps=0, differentiable=(), states=2,
    ),
)  # fmt: skip

SAMPLES = (
    *ELEMENTWISE, *FUNCTIONS, *CHOICES, *REDUCTIONS, *STATISTICS, *LAYOUT, *RESHAPES, *INDEX,
    *JOIN, *IMAGES, *PRODUCTS, *GROUPED, *CONVOLUTION, *POOLING, *SOFTMAX, *NORMALIZATION,
    *MATHEMATICS, *ORDER, *BOXES, *LOSSES, *LOSS_ROWS, *RANDOM, *SOURCES, *UPDATES, *RULES,
    *ACCUMULATE, *ATTENTION, *BATCHES, *FUSED, *POINTWISE, *FUSED_CONV, *FUSED_NORM,
    *GENERATION, *FUSED_LAYER_NORM, *FUSED_UINT8, *QUANTIZED, *FUSED_QUANTIZED, *CHANNELS_LAST,
    *FUSED_SCATTERED, *FP8,
)  # fmt: skip

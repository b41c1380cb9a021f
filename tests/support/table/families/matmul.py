"""The rows of samples.py for matrix products, batched ones, linear, outer and einsum."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys.ops import einsum, matmul
from support.table.formulas import matmul_reference, matmul_scale
from support.table.rows import Case, Sample, case, mixed, refuse


def flip(x: np.ndarray, flag: bool) -> np.ndarray:
    return np.moveaxis(x, -1, -2) if flag else x


def batched(a: np.ndarray, b: np.ndarray, trans_A: bool = False, trans_B: bool = False) -> Any:
    return np.einsum(
        "...ik,...kj->...ij", flip(a, trans_A), flip(b, trans_B), optimize=a.size > 9999
    )


def batched_scale(
    a: np.ndarray, b: np.ndarray, trans_A: bool = False, trans_B: bool = False
) -> Any:
    inner = a.shape[-2 if trans_A else -1]
    return np.sqrt(max(inner, 1)) * batched(np.abs(a), np.abs(b), trans_A, trans_B)


def flipped(batch_a: tuple, batch_b: tuple, m: int, k: int, n: int) -> list[Case]:
    return [
        case(
            (*batch_a, *((k, m) if trans_A else (m, k))),
            (*batch_b, *((n, k) if trans_B else (k, n))),
            trans_A=trans_A, trans_B=trans_B,
        )
        for trans_A in (False, True)
        for trans_B in (False, True)
    ]  # fmt: skip


def linear(a: np.ndarray, b: np.ndarray, bias: np.ndarray, trans_B: bool = False) -> np.ndarray:
    return batched(a, b, trans_B=trans_B) + bias


def linear_scale(a: np.ndarray, b: np.ndarray, bias: np.ndarray, trans_B: bool = False) -> Any:
    return batched_scale(a, b, trans_B=trans_B) + np.abs(bias)


def product_like(a: np.ndarray, b: np.ndarray, like: np.ndarray, **flags: bool) -> np.ndarray:
    y = batched(a, b, **flags)
    y = y.sum(axis=tuple(range(y.ndim - like.ndim)))
    return y.sum(axis=tuple(k for k, n in enumerate(like.shape) if n == 1), keepdims=True)


def any_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By einsum: a vector has no axis beside the one that is summed."""
    left = "...ik" if a.ndim > 1 else "k"
    right = "...kj" if b.ndim > 1 else "k"
    return np.einsum(f"{left},{right}->...{left[3:-1]}{right[4:]}", a, b)


def any_product_scale(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.sqrt(max(a.shape[-1], 1)) * any_product(np.abs(a), np.abs(b))


def product_gradient(a: np.ndarray, b: np.ndarray, dy: np.ndarray, side: int) -> np.ndarray:
    """Columns of a Jacobian: the product is linear in each operand."""
    of = (a, b)[side]
    found = np.zeros(of.size)
    for k in range(of.size):
        unit = np.zeros(of.size)
        unit[k] = 1
        unit = unit.reshape(of.shape)
        found[k] = np.sum(dy * (any_product(a, unit) if side else any_product(unit, b)))
    return found.reshape(of.shape)


ANY_PRODUCTS = tuple(
    case(a, b)
    for a, b in [
        ((3, 4), (4, 2)), ((4,), (4,)), ((4,), (4, 2)), ((3, 4), (4,)), ((2, 3, 4), (4,)),
        ((4,), (2, 4, 3)), ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (3, 4, 2)), ((2, 3, 4), (4, 2)),
        ((3, 4), (2, 4, 2)), ((0, 4), (4, 2)), ((3, 0), (0,)), ((2, 0, 4), (4, 3)),
        ((131, 67), (67,)),
    ]
)  # fmt: skip


def equation(attrs: dict) -> str:
    return f"{','.join(attrs['operands'])}->{attrs['result']}"


def general(*arrays: np.ndarray, **attrs: Any) -> np.ndarray:
    if not attrs["like"]:
        return np.einsum(equation(attrs), *arrays)
    *factors, like = arrays
    ones = np.ones(like.shape)
    return np.einsum(
        f"{','.join(attrs['operands'])},{attrs['result']}->{attrs['result']}", *factors, ones
    )


def general_scale(*arrays: np.ndarray, **attrs: Any) -> np.ndarray:
    return 8 * general(*[np.abs(x) for x in arrays], **attrs)


EINSUMS = (
    ("ij,jk->ik", (2, 3), (3, 4)), ("ij->ji", (2, 3)), ("ij->", (2, 3)), ("i,i->", (3,), (3,)),
    ("i,j->ij", (3,), (4,)), ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)), ("ij,jk", (2, 3), (3, 4)),
    ("bij,bkj->bik", (2, 3, 4), (2, 5, 4)), ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("bqhd,bkhd->bhqk", (2, 4, 3, 5), (2, 6, 3, 5)), ("ijk,jil->kl", (2, 3, 4), (3, 2, 5)),
    ("i,ij,j->", (3,), (3, 4), (4,)), ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)),
    ("ij,kl->ij", (2, 3), (4, 5)), ("ab,ab->ab", (2, 3), (2, 3)), ("ab,b->ab", (2, 3), (3,)),
    ("abc->ca", (2, 3, 4)), (",ij->ij", (), (2, 3)),
    ("abcd,cdef->abef", (2, 3, 4, 5), (4, 5, 2, 3)),
    ("ai,bi,ci->abc", (2, 5), (3, 5), (4, 5)), ("ij,ji->", (2, 3), (3, 2)),
    ("bi,bij->bj", (2, 3), (2, 3, 4)), ("ij,jk->ik", (0, 3), (3, 4)), ("ij,jk->ik", (2, 0), (0, 4)),
    ("ij,jk->ik", (131, 67), (67, 33)), ("i j , jk -> ki", (2, 3), (3, 4)),
)  # fmt: skip


def bad_einsum(message: str, text: str, *shapes: tuple) -> Any:
    return refuse(message, *shapes, text=text)


EXTENTS = (  # of rows, of what is summed over, and of columns
    (1, 1, 1), (1, 7, 5), (6, 1, 3), (0, 3, 2), (2, 0, 3), (3, 2, 0), (17, 31, 13), (64, 64, 64),
    (131, 67, 97), (5, 1031, 3), (257, 300, 129),
)  # fmt: skip

PRODUCTS = (
    # Worst 0.5, at K = 1. True float32 stays further below sqrt(K) * eps * |A||B| the larger K is,
    # and factors of 11 significant bits (tf32) exceed it: 200 x at K = 67, 6 x at K = 1031.
    Sample(
        "matmul", matmul.matmul_op, matmul_reference,
        (
            case((3, 5), (5, 4)),
            *(each for extents in EXTENTS for each in flipped((), (), *extents)),
        ),
        scale=matmul_scale, ulps=1, integers="same",
        refusals=(
            refuse(
                r"inner dimensions differ: \S+ \(64, 784\) and \S+ \(10, 784\); "
                r"did you mean trans_B=True\?", (64, 784), (10, 784),
            ),
            refuse(r"inner dimensions differ: .*trans_A=False\?", (3, 4), (4, 5), trans_A=True),
            refuse(r"expected two matrices, got \S+ \(3,\) and \S+ \(3, 4\)", (3,), (3, 4)),
            refuse(r"expected two matrices", (2, 3, 4), (4, 5)),
            *mixed("matmul", (3, 3)),
        ),
    ),
    Sample(
        "batched_matmul", matmul.batched_matmul_op, batched,
        (
            *flipped((3,), (3,), 2, 5, 4), *flipped((), (), 3, 4, 2), *flipped((3,), (), 2, 5, 4),
            *flipped((), (3,), 2, 5, 4), *flipped((2, 1), (4,), 3, 1, 2),
            *flipped((0,), (0,), 2, 3, 2),
            *flipped((2, 1, 3), (1, 5, 1), 2, 3, 4), *flipped((2,), (1,), 1, 7, 1),
            *flipped((2,), (2,), 3, 0, 2), *flipped((2,), (2,), 3, 2, 0),
            *flipped((3,), (3,), 65, 33, 70),
            *flipped((70,), (70,), 7, 9, 5), *flipped((2,), (2,), 131, 257, 67),
        ),
        scale=batched_scale, ulps=1, integers="same",
        refusals=(
            refuse(r"inner dimensions differ: .*trans_B=True\?", (2, 3, 4), (2, 5, 4)),
            refuse(r"inner dimensions differ: .*trans_A=False\?", (3, 4), (2, 4, 5), trans_A=True),
            refuse(r"expected at least two dimensions, got \S+ \(3,\) and", (3,), (2, 3, 4)),
            refuse(r"leading dimensions do not broadcast: \S+ \(2, 3, 4\)", (2, 3, 4), (3, 4, 5)),
            *mixed("batched_matmul", (3, 3)),
        ),
    ),
    Sample(
        "product_like", matmul.product_like_op, product_like,
        (
            case((3, 2, 4), (3, 2, 5), (4, 5), trans_A=True, trans_B=False),
            case((3, 2, 4), (4, 5), (3, 2, 5), trans_A=False, trans_B=False),
            case((3, 2, 4), (3, 5, 4), (1, 2, 5), trans_A=False, trans_B=True),
            case((2, 3, 4, 2), (3, 4, 5), (2, 5), trans_A=True, trans_B=False),
        ),
        scale=lambda *arrays, **flags: 4 * product_like(*[abs(x) for x in arrays], **flags), ulps=1,
        differentiable=(0, 1),
    ),
    Sample(
        "product", matmul.product_op, any_product, ANY_PRODUCTS, scale=any_product_scale, ulps=1,
        integers="same",
        refusals=(
            refuse(r"product: expected at least one dimension, got \S+ \(\) and", (), (3,)),
            refuse(r"product: \S+ \(3,\) and \S+ \(4,\) do not fit", (3,), (4,)),
            refuse(r"\(2, 3, 4\) and \S+ \(3, 4, 5\) do not fit", (2, 3, 4), (3, 4, 5)),
            *mixed("product", (3, 3)),
        ),
    ),
    Sample(
        "product_operator", matmul.product, any_product, ANY_PRODUCTS, scale=any_product_scale,
        ulps=1,
    ),
    Sample(
        "product_gradient", matmul.product_gradient_op, product_gradient,
        tuple(
            case(*one.shapes, np.matmul(*map(np.zeros, one.shapes)).shape, side=side)
            for one in ANY_PRODUCTS for side in (0, 1) if max(map(max, one.shapes)) < 100
        ),
        scale=lambda *arrays, side: 4 * product_gradient(*map(np.abs, arrays), side=side), ulps=1,
        specials=False,
    ),
    Sample(
        "linear", matmul.linear_op, linear,
        (
            case((5, 3), (3, 4), (4,)), case((5, 3), (4, 3), (4,), trans_B=True),
            case((2, 5, 3), (3, 4), (4,)), case((2, 5, 3), (4, 3), (4,), trans_B=True),
            case((0, 3), (3, 4), (4,)), case((131, 67), (67, 129), (129,)),
        ),
        scale=linear_scale, ulps=1, integers="same",
        refusals=(
            refuse(r"batched_matmul: inner dimensions differ", (5, 3), (4, 3), (4,)),
            refuse(r"add: shapes do not broadcast", (5, 3), (3, 4), (3,)),
        ),
    ),
    Sample(
        "outer", matmul.outer_op, lambda a, b: np.einsum("i,j->ij", a, b),
        (case((5,), (3,)), case((1,), (4,)), case((0,), (3,)), case((131,), (257,))), ulps=1,
        integers="same",
        refusals=(refuse(r"outer: expected two vectors, got", (5,), (3, 1)), *mixed("outer")),
    ),
    Sample(
        "times_vector", matmul.times_vector_op, lambda A, v: np.einsum("ij,j->i", A, v),
        (case((5, 3), (3,)), case((0, 3), (3,)), case((5, 0), (0,)), case((131, 67), (67,))),
        scale=lambda A, v: np.sqrt(v.size) * np.einsum("ij,j->i", abs(A), abs(v)), ulps=1,
        integers="same", refusals=(refuse(r"times_vector: expected \(m, n\) and", (5, 3), (5,)),),
    ),
    Sample(
        "einsum", einsum.einsum, lambda *arrays, text: np.einsum(text, *arrays),
        tuple(case(*shapes, text=text) for text, *shapes in EINSUMS),
        scale=lambda *arrays, text: 8 * np.einsum(text, *map(np.abs, arrays)), ulps=1,
        build=lambda *nodes, text: einsum.einsum(text, *nodes), integers="same",
        refusals=(
            bad_einsum(r"einsum: an ellipsis is not supported", "...i->i", (2, 3)),
            bad_einsum(r"repeats a letter; diagonals are not supported", "ii->i", (3, 3)),
            bad_einsum(r"must have letters of the operands, each once", "ij->iz", (2, 3)),
            bad_einsum(r"must have letters of the operands, each once", "ij->ii", (2, 3)),
            bad_einsum(r"'ij' names 1 operands, got 2", "ij", (2, 3), (3,)),
            bad_einsum(r"cannot read 'i1->i'; expected letters", "i1->i", (2, 3)),
            bad_einsum(r"j of ij,jk->ik is both 3 and 2", "ij,jk->ik", (2, 3), (2, 3)),
            bad_einsum(r"ijk->i does not fit \S+ \(2, 3\)", "ijk->i", (2, 3)),
        ),
    ),
    Sample(
        "einsum_op", einsum.einsum_op, general,
        (
            case((2, 3), (3, 4), operands=("ij", "jk"), result="ik", like=False),
            case((2,), (2, 3), operands=("i",), result="ij", like=True),
            case((), (3,), (2, 3), operands=("", "j"), result="ij", like=True),
        ),
        scale=general_scale, ulps=1, differentiable=(0,),
    ),
)  # fmt: skip

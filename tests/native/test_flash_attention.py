"""Flash attention on GPUs of sm_90a: values and gradients against float64 within what the roundings
of its operands allow, the same bits each time, and what it refuses.
"""

from __future__ import annotations

import itertools
import unittest
from typing import Any, NamedTuple

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys.dtypes import FLOAT16, ROUNDING, bfloat16, rounded
from dlsys.errors import DeviceError, NotApplicableError
from dlsys.ops.attention.attention import dropped_attention_op
from dlsys.ops.attention.heads import heads_of
from dlsys.runtime.device import gpu
from dlsys.runtime.library import load
from support import sample
from support.devices import EMULATED, require
from support.table.families.random import SEED, keeps

TF32 = np.dtype(np.float32)  # which the tensor cores read as tf32
DTYPES = (bfloat16, FLOAT16, TF32)
UNITS = {**ROUNDING, TF32: 2.0**-11}


def as_operand(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounded as the tensor cores would."""
    if dtype is not TF32:
        return rounded(x, dtype)
    return ((x.view(np.uint32) + 0x1000) & ~np.uint32(0x1FFF)).view(np.float32)


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    rows: int
    columns: int
    size: int


SHAPES = [
    Shape(1, 1, 1, 1, 1, 8),
    Shape(1, 1, 1, 64, 64, 64),
    Shape(2, 2, 1, 130, 190, 64),
    Shape(1, 4, 2, 257, 129, 128),
    Shape(1, 2, 2, 129, 260, 32),
    Shape(1, 1, 1, 7, 300, 72),
    Shape(1, 2, 1, 520, 640, 128),
]


def arrays(shape: Shape, dtype: Any) -> list[np.ndarray]:
    """q, k, v and dy."""
    rng = np.random.default_rng(sum(shape))
    of_q = (shape.batch, shape.heads, shape.rows, shape.size)
    of_k = (shape.batch, shape.kv_heads, shape.columns, shape.size)
    made = (rng.standard_normal(of, np.float32) for of in (of_q, of_k, of_k, of_q))
    return [as_operand(x, dtype) for x in made]


def policy(dtype: Any) -> str:
    return "tf32" if dtype is TF32 else "fp32"


def computed(
    given: list[np.ndarray], dtype: Any, causal: bool, algo: str | None, keep: float = 1.0
) -> list[Any]:
    """The output and the gradients of q, k and v; `keep` is the share of weights that dropout
    leaves.
    """
    q, k, v, dy = (ad.Variable(name, x.shape, dtype) for name, x in zip("qkvd", given))
    if keep == 1.0:
        y = F.scaled_dot_product_attention(q, k, v, causal=causal, algo=algo)
    else:
        drawn = dict(seed=SEED, node=0, threshold=round(keep * 2**32), keep=1 / keep, algo=algo)
        y = dropped_attention_op(q, k, v, ad.Parameter(np.int64(0)), causal=causal, **drawn)[0]
    executor = ad.Executor([y, *ad.gradients(y, [q, k, v], dy)], gpu(0), policy(dtype))
    feeds = dict(zip((q, k, v, dy), given))
    return [x.astype(np.float64) for x in executor.run(feeds, convert_to_numpy_ret_vals=True)]


def reference(
    given: list[np.ndarray], dtype: Any, causal: bool, keep: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same in float64, each with the most by which it may be off: computed operands of
    products are rounded, as is each result, and with y the sum of y dy of its row.
    """
    q, k, v, dy = (x.astype(np.float64) for x in given)
    group, scale, unit = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5, UNITS[dtype]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    summed = lambda x: x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2)  # noqa: E731
    scores = np.einsum("nhld,nhsd->nhls", q, k) * scale
    if causal:
        scores[:, :, ~np.tri(*scores.shape[2:], dtype=bool)] = -np.inf
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    factors = keeps(p.shape, keep) / keep
    left = p * factors
    y = left @ v
    row_sums = np.sum(y * dy, axis=-1, keepdims=True)
    d_scores = p * (factors * (dy @ np.swapaxes(v, -1, -2)) - row_sums) * scale
    off_sums = unit * np.sum(np.abs(y * dy), axis=-1, keepdims=True)
    off_scores = unit * np.abs(d_scores) + p * off_sums * scale
    across = lambda x: np.swapaxes(x, -1, -2)  # noqa: E731
    results = [
        (y, unit * (left @ np.abs(v))),
        (d_scores @ k, off_scores @ np.abs(k)),
        (summed(across(d_scores) @ q), summed(across(off_scores) @ np.abs(q))),
        (summed(across(left) @ dy), summed(unit * across(left) @ np.abs(dy))),
    ]
    # Of float32: scores, their exponentials and sums; and the smallest float16.
    return [(x, 1.02 * off + unit * np.abs(x) + 2e-5 * (1 + off) + 2.0**-24) for x, off in results]


@require(gpu(0))
class FlashAttention(unittest.TestCase):
    def setUp(self) -> None:
        algorithms = load().algorithms("cuda", "attention")
        number = algorithms.index("flash") + 1
        try:
            load().algorithm_source("cuda", "attention", number)
        except DeviceError as error:
            self.skipTest(str(error))

    def check(self, shape: Shape, dtype: Any, causal: bool, keep: float = 1.0) -> None:
        given = arrays(shape, dtype)
        found = computed(given, dtype, causal, "flash", keep)
        for name, got, (wanted, most) in zip(
            ("y", "dq", "dk", "dv"), found, reference(given, dtype, causal, keep)
        ):
            off = np.abs(got - wanted) - most
            self.assertTrue((off <= 0).all(), f"{name} is off by {off.max():.3g} too much")

    def test_every_shape(self) -> None:
        for shape, dtype, causal in sample.of(itertools.product(SHAPES, DTYPES, (False, True)), 14):
            if EMULATED and dtype is FLOAT16 and shape not in SHAPES[:3]:
                continue  # slow there, and the kernels are one template
            with self.subTest(shape=shape, dtype=str(dtype), causal=causal):
                self.check(shape, dtype, causal)

    def test_more_heads_than_blocks(self) -> None:
        """Blocks that take several tiles: their rings go around, stages are filled again."""
        cases = (72, bfloat16), (64, TF32), (64, bfloat16)
        for size, dtype in sample.of(cases, 2):
            shape = Shape(67, 2, 2, 70, 70, size)  # of 134 heads
            with self.subTest(shape=shape, dtype=str(dtype)):
                self.check(shape, dtype, causal=True)

    def test_dropped_weights(self) -> None:
        """The same weights as anywhere else are dropped; keys come in fours."""
        shapes = (Shape(2, 2, 1, 130, 192, 64), Shape(1, 4, 2, 257, 132, 128))
        for shape, dtype, causal in itertools.product(shapes, DTYPES[:2], (False, True)):
            if EMULATED and (dtype is FLOAT16) == causal:
                continue  # slow there
            with self.subTest(shape=shape, dtype=str(dtype), causal=causal):
                self.check(shape, dtype, causal, keep=0.7)

    def test_packed_heads_give_the_same_bits(self) -> None:
        """Rows that lie apart, among those of other heads, are read and written alike; sizes of 80
        and 72 do not fill their tiles, whose rest is other heads' and stays as it is.
        """
        problems = ((2, 4, 2, 133, 64, True), (2, 3, 3, 129, 80, False), (1, 2, 1, 70, 128, True),
                    (3, 2, 1, 5, 72, True), (1, 1, 1, 65, 32, False))  # fmt: skip
        for n, heads, kv, length, size, causal in sample.of(problems, 3):
            rng, counts = np.random.default_rng(length), (heads, kv, kv)
            widths = [size * sum(counts), size * heads]
            qkv, dy = (rounded(rng.standard_normal((n, length, w), np.float32), bfloat16)
                       for w in widths)  # fmt: skip
            parts = [*(heads_of(qkv, counts)), *heads_of(dy, counts[:1])]
            wanted = computed([np.ascontiguousarray(x) for x in parts], bfloat16, causal, "flash")
            x, d = (ad.Variable(name, of.shape, bfloat16) for name, of in zip("xd", (qkv, dy)))
            y = F.packed_attention(x, heads, kv, causal=causal, algo="flash")
            executor = ad.Executor([y, *ad.gradients(y, [x], d)], gpu(0))
            got = executor.run({x: qkv, d: dy}, convert_to_numpy_ret_vals=True)
            made = [*heads_of(got[0], counts[:1]), *heads_of(got[1], counts)]
            for name, one, other in zip(("y", "dq", "dk", "dv"), made, wanted):
                with self.subTest(size=size, causal=causal, of=name):
                    np.testing.assert_array_equal(one.astype(np.float64), other)

    def test_the_same_bits_each_time(self) -> None:
        """Also where blocks add to the same sums: 16 bits and heads of more than 64 columns."""
        problems = ((SHAPES[2], bfloat16, True), (SHAPES[2], TF32, True),
                    (SHAPES[6], bfloat16, True), (SHAPES[6], bfloat16, False))  # fmt: skip
        for shape, dtype, causal in problems:
            with self.subTest(shape=shape, dtype=str(dtype), causal=causal):
                given = arrays(shape, dtype)
                first, again = (computed(given, dtype, causal, "flash") for _ in range(2))
                for x, y in zip(first, again):
                    np.testing.assert_array_equal(x, y)

    def test_later_keys_do_not_leak(self) -> None:
        for dtype, size in itertools.product((bfloat16, TF32), (64, 72)):
            with self.subTest(dtype=str(dtype), size=size):
                given = arrays(Shape(1, 1, 1, 200, 200, size), dtype)
                before = computed(given, dtype, True, "flash")[0]
                for x in given[1:3]:
                    x[:, :, 150:] = 7
                after = computed(given, dtype, True, "flash")[0]
                np.testing.assert_array_equal(before[:, :, :150], after[:, :, :150])
                self.assertTrue((before[:, :, 150:] != after[:, :, 150:]).any())

    def test_nan_goes_where_it_is_seen(self) -> None:
        """A key of NaN makes all rows that see it NaN and no other, and the gradients of all keys
        that such a row sees; the next sample, which is NaN, is not read.
        """
        for dtype in (bfloat16, TF32):
            given = arrays(Shape(2, 1, 1, 100, 100, 64), dtype)
            given[1][1] = given[2][1] = np.nan
            given[1][0, :, 70] = np.nan
            y, dq, dk, dv = computed(given, dtype, True, "flash")
            self.assertTrue(np.isfinite(y[0, :, :70]).all())
            self.assertTrue(np.isnan(y[0, :, 70:]).all() and np.isnan(dq[0, :, 70:]).all())
            self.assertTrue(np.isnan(dk[0]).all() and np.isnan(dv[0]).all())
            self.assertTrue(np.isnan(y[1]).all())

    def test_auto_takes_it(self) -> None:
        for dtype in (bfloat16, TF32):
            given = arrays(SHAPES[2], dtype)
            own, named, other = (
                computed(given, dtype, True, algo) for algo in (None, "flash", "tiled")
            )
            for x, y, z in zip(own, named, other):
                np.testing.assert_array_equal(x, y)
                self.assertTrue((x != z).any(), "tiled has the same bits: this shows nothing")

    def test_dropout_it_refuses(self) -> None:
        cases = ((Shape(1, 1, 1, 8, 6, 8), bfloat16, "keys in multiples of four"),
                 (Shape(1, 1, 1, 8, 8, 8), TF32, "weights of float32"))  # fmt: skip
        for shape, dtype, text in cases:
            given = arrays(shape, dtype)
            with self.subTest(text), self.assertRaisesRegex(NotApplicableError, text):
                computed(given, dtype, True, "flash", 0.5)
            computed(given, dtype, True, "tiled", 0.5)

    def test_refusals_name_what_serves(self) -> None:
        q, k, v = (rounded(x, bfloat16) for x in arrays(SHAPES[1], bfloat16)[:3])
        cases: list[tuple[str, Any, dict[str, Any]]] = [
            ("no mask or lengths", bfloat16, dict(lengths=np.array([5]))),
            ("float32 at precision tf32", np.dtype(np.float32), {}),
        ]
        for text, dtype, options in cases:
            nodes = [ad.Variable(name, x.shape, dtype) for name, x in zip("qkv", (q, k, v))]
            given = {key: ad.Variable(key, x.shape, x.dtype) for key, x in options.items()}
            y = F.scaled_dot_product_attention(*nodes, algo="flash", **given)
            executor = ad.Executor([y], gpu(0))
            feeds = dict(zip(nodes, (q, k, v))) | {given[key]: options[key] for key in options}
            with self.assertRaisesRegex(
                NotApplicableError, f"algo=flash cannot compute this: it takes {text}; use auto, "
                "naive, tiled"
            ):  # fmt: skip
                executor.run(feeds)

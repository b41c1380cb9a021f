"""The works of operators.py: an operator at a size, and its equivalent in PyTorch.

Every row of the operators' table (tests/support/table/samples.py) is a work, or is named in WITHIN
(a work times it along) or in WITHOUT (PyTorch has no counterpart).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys.ops import leaf as source
from dlsys.ops.attention.attention import attention

Shape = tuple[int, ...]
Array = np.ndarray
FLAT: Shape = (1000, 1000)
CUBE: Shape = (100, 100, 100)
IMAGES: Shape = (32, 32, 32, 32)


@dataclass(frozen=True)
class Work:
    """An operator at a size.

    `ours` makes a node of nodes, `theirs` a tensor of torch and tensors; `inputs` are shapes, of
    float32 numbers from `low` to `high`, or arrays. `wanted` says which inputs get a gradient,
    by default all of float32; `states` that both are steps that change something and give no value.
    `alike` says that both compute the same numbers.
    """

    row: str  # in the table of operators
    note: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    inputs: tuple[Shape | Array, ...] = (FLAT,)
    low: float = -2.0
    high: float = 2.0
    wanted: tuple[int, ...] | None = None
    states: bool = False
    alike: bool = True

    @property
    def name(self) -> str:
        """The row, and what tells its works apart."""
        return f"{self.row}, {self.note}" if self.note else self.row

    def arrays(self) -> list[Array]:
        """The inputs."""
        rng = np.random.default_rng(len(self.name))
        return [
            x if isinstance(x, np.ndarray) else rng.uniform(self.low, self.high, x).astype("f4")
            for x in self.inputs
        ]

    def differentiated(self) -> tuple[int, ...]:
        """The positions of the inputs that get a gradient."""
        if self.wanted is not None:
            return self.wanted
        kinds = [x.dtype.kind if isinstance(x, np.ndarray) else "f" for x in self.inputs]
        return tuple(k for k, kind in enumerate(kinds) if kind == "f")


def integers(count: int, *shape: int, dtype: Any = np.int64) -> Array:
    """Numbers below `count`."""
    return np.random.default_rng(count).integers(0, count, shape).astype(dtype)


def distinct(*shape: int) -> Array:
    """Numbers without ties, which PyTorch would share a gradient among."""
    count = int(np.prod(shape))
    return (np.random.default_rng(count).permutation(count) / 2**22).astype("f4").reshape(shape)


def functional(torch: Any) -> Any:
    """torch.nn.functional."""
    return torch.nn.functional


# ---- elementwise ----


def elementwise() -> Iterator[Work]:
    """Functions of one array, of two, and of one and a number."""
    positive = {"low": 0.25, "high": 2.0}
    for name in ("neg", "exp", "tanh", "cos", "sin", "sigmoid", "relu", "abs"):
        op = getattr(ad, f"{name}_op")
        yield Work(name, "", op, lambda t, x, name=name: getattr(t, name)(x))
    yield Work("sin", "to 10⁷", ad.sin_op, lambda t, x: t.sin(x), low=-1e7, high=1e7)
    yield Work("sign", "", ad.sign_op, lambda t, x: t.sign(x), wanted=())
    for name in ("log", "sqrt", "log1p", "rsqrt"):
        op = getattr(ad, f"{name}_op")
        yield Work(name, "", op, lambda t, x, name=name: getattr(t, name)(x), **positive)
    for name in ("floor", "ceil", "round", "trunc"):
        op = getattr(ad, f"{name}_op")
        yield Work(name, "", op, lambda t, x, name=name: getattr(t, name)(x), wanted=())
    for name in ("expm1", "exp2", "erf", "tan", "atan", "sinh", "cosh", "asinh"):
        op = getattr(ad, f"{name}_op")
        yield Work(name, "", op, lambda t, x, name=name: getattr(t, name)(x), low=-1.4, high=1.4)
    for name in ("log2", "log10", "reciprocal", "asin", "acos", "atanh", "acosh"):
        op, low = getattr(ad, f"{name}_op"), 1.25 if name == "acosh" else 0.25
        yield Work(
            name, "", op, lambda t, x, name=name: getattr(t, name)(x), low=low, high=low + 0.7
        )
    two = {"inputs": (FLAT, FLAT)}
    for name in ("add", "sub", "mul"):
        op = getattr(ad, f"{name}_op")
        yield Work(name, "", op, lambda t, x, y, name=name: getattr(t, name)(x, y), **two)
    row = {"inputs": (FLAT, FLAT[1:])}
    yield Work("add", "a row to a matrix", ad.add_op, lambda t, x, y: x + y, **row)
    yield Work("div", "", ad.div_op, lambda t, x, y: x / y, **two, **positive)
    yield Work("pow", "", ad.pow_op, lambda t, x, y: x**y, **two, **positive)
    for name in ("minimum", "maximum"):
        op = getattr(ad, f"{name}_op")
        yield Work(name, "", op, lambda t, x, y, name=name: getattr(t, name)(x, y), **two)
    for name, op, theirs in (
        ("add_const", ad.add_byconst_op, lambda t, x: x + 1.5),
        ("mul_const", ad.mul_byconst_op, lambda t, x: x * 1.5),
        ("div_const", ad.div_byconst_op, lambda t, x: x / 1.5),
        ("rsub_const", ad.const_sub_op, lambda t, x: 1.5 - x),
        ("rdiv_const", ad.const_div_op, lambda t, x: 1.5 / x),
        ("pow_const", ad.pow_byconst_op, lambda t, x: x**1.5),
        ("rpow_const", ad.const_pow_op, lambda t, x: 1.5**x),
    ):
        yield Work(name, "", lambda x, op=op: op(x, 1.5), theirs, **positive)
    for name in ("remainder", "fmod", "atan2"):
        op = getattr(ad, f"{name}_op")
        yield Work(
            name, "", op, lambda t, x, y, name=name: getattr(t, name)(x, y), **two, **positive
        )
    yield Work(
        "floor_divide", "", ad.floor_divide_op, lambda t, x, y: x // y, **two, **positive,
        wanted=(),
    )  # fmt: skip
    for power in (2, 3):
        yield Work(
            "pow_const", f"to the {power}", lambda x, n=power: ad.pow_byconst_op(x, n),
            lambda t, x, n=power: x**n,
        )  # fmt: skip
    yield Work("cast", "", lambda x: ad.cast_op(x, "float64"), lambda t, x: x.double(), wanted=())
    yield Work(
        "cast_to_integers", "", lambda x: ad.cast_op(x, "int64"), lambda t, x: x.long(), wanted=()
    )
    yield Work("clip", "", lambda x: ad.clip_op(x, -1.0, 1.0), lambda t, x: x.clamp(-1, 1))


def activations() -> Iterator[Work]:
    """Activation functions."""
    for row, name, given in (
        ("relu6", "relu6", {}),
        ("leaky_relu", "leaky_relu", {"negative_slope": 0.01}),
        ("elu", "elu", {}),
        ("silu", "silu", {}),
        ("gelu", "gelu", {}),
        ("softplus", "softplus", {}),
        ("hard_sigmoid", "hardsigmoid", {}),
        ("hard_swish", "hardswish", {}),
    ):
        yield Work(
            row, "", getattr(ad, f"{row}_op"),
            lambda t, x, name=name, given=given: getattr(functional(t), name)(x, **given),
            low=-4.0, high=4.0,
        )  # fmt: skip
    yield Work(
        "gelu_tanh", "", ad.gelu_tanh_op, lambda t, x: functional(t).gelu(x, approximate="tanh"),
        low=-4.0, high=4.0,
    )  # fmt: skip


def comparisons() -> Iterator[Work]:
    """Comparisons, logic and choice."""
    two = {"inputs": (FLAT, FLAT), "wanted": ()}
    for ours, theirs in (
        *(("equal", "eq"), ("not_equal", "ne"), ("less", "lt"), ("less_equal", "le")),
        *(("greater", "gt"), ("greater_equal", "ge")),
    ):
        op = getattr(ad, f"{ours}_op")
        yield Work(ours, "", op, lambda t, x, y, name=theirs: getattr(t, name)(x, y), **two)
    truth = integers(2, *FLAT, dtype=np.bool_)
    logic = {"inputs": (truth, truth[::-1].copy()), "wanted": ()}
    for name in ("logical_and", "logical_or", "logical_xor"):
        op = getattr(ad, f"{name}_op")
        yield Work(name, "", op, lambda t, x, y, name=name: getattr(t, name)(x, y), **logic)
    yield Work(
        "logical_not", "", ad.logical_not_op, lambda t, x: t.logical_not(x), (truth,), wanted=()
    )
    yield Work("where", "", ad.where_op, lambda t, *x: t.where(*x), (truth, FLAT, FLAT))


# ---- reductions ----

ALONG: tuple[tuple[str, Shape, int | None], ...] = (
    ("all", FLAT, None),
    ("the first axis", FLAT, 0),
    ("the middle axis", CUBE, 1),
    ("the last axis", FLAT, 1),
)


def reductions() -> Iterator[Work]:
    """Reductions over all elements, the first, the middle and the last axis."""
    for note, shape, axis in ALONG:
        given = {} if axis is None else {"axis": axis}
        dim = tuple(range(len(shape))) if axis is None else (axis,)
        one = {"inputs": (shape,)}
        for name in ("sum", "mean"):
            op = getattr(ad, f"{name}_op")
            yield Work(
                name, note, lambda x, op=op, given=given: op(x, **given),
                lambda t, x, name=name, dim=dim: getattr(t, name)(x, dim), **one,
            )  # fmt: skip
        for name in ("max", "min"):
            op = getattr(ad, f"{name}_op")
            yield Work(
                name, note, lambda x, op=op, given=given: op(x, **given),
                lambda t, x, name=name, dim=dim: getattr(t, f"a{name}")(x, dim),
                (distinct(*shape),),
            )  # fmt: skip
        for name in ("argmax", "argmin"):
            op = getattr(ad, f"{name}_op")
            yield Work(
                name, note, lambda x, op=op, given=given: op(x, **given),
                lambda t, x, name=name, axis=axis: getattr(t, name)(x, axis), **one, wanted=(),
            )  # fmt: skip
        yield Work(
            "prod", note, lambda x, given=given: ad.prod_op(x, **given),
            lambda t, x, axis=axis: t.prod(x) if axis is None else t.prod(x, axis),
            **one, low=0.99, high=1.01,
        )  # fmt: skip
        yield Work(
            "logsumexp", note, lambda x, given=given: ad.logsumexp_op(x, **given),
            lambda t, x, dim=dim: t.logsumexp(x, dim), **one,
        )  # fmt: skip
        yield Work(
            "var", note, lambda x, given=given: ad.var_op(x, **given),
            lambda t, x, dim=dim: t.var(x, dim, correction=0), **one,
        )  # fmt: skip
        if axis is not None:
            for row, limits in (("cumsum", {}), ("cumprod", {"low": 0.99, "high": 1.01})):
                op = getattr(ad, f"{row}_op")
                yield Work(
                    row, note, lambda x, op=op, axis=axis: op(x, axis),
                    lambda t, x, row=row, axis=axis: getattr(t, row)(x, axis), **one, **limits,
                )  # fmt: skip
    for row in ("sum", "mean"):  # as a loss or a norm over images sums
        op = getattr(ad, f"{row}_op")
        yield Work(
            row, "all but the channels of images", lambda x, op=op: op(x, axis=(0, 2, 3)),
            lambda t, x, row=row: getattr(t, row)(x, (0, 2, 3)), (IMAGES,),
        )  # fmt: skip
    yield Work("reducesumaxiszero", "", ad.reducesumaxiszero_op, lambda t, x: x.sum(0))
    yield Work(
        "sum_to_like", "", ad.sum_to_like_op, lambda t, x, y: x.sum_to_size(y.shape),
        (FLAT, (1, FLAT[1])), wanted=(0,),
    )  # fmt: skip


def sorts() -> Iterator[Work]:
    """Sorts, the best elements, and elements at indices along an axis."""
    for note, axis in (("rows of 1000", 1), ("the first axis", 0)):
        one = {"inputs": (distinct(700, 1000),), "wanted": ()}
        yield Work(
            "sort", note, lambda x, axis=axis: ad.sort_op(x, axis)[0],
            lambda t, x, axis=axis: t.sort(x, axis, stable=True)[0], **one,
        )  # fmt: skip
        yield Work(
            "topk", f"10 of {note}", lambda x, axis=axis: ad.topk_op(x, 10, axis)[0],
            lambda t, x, axis=axis: t.topk(x, 10, axis)[0], **one,
        )  # fmt: skip
        yield Work(
            "take_along_axis", note,
            lambda x, at, axis=axis: ad.take_along_axis_op(x, at, axis),
            lambda t, x, at, axis=axis: t.gather(x, axis, at),
            (distinct(700, 1000), integers(700, 700, 1000)), wanted=(0,),
        )  # fmt: skip
    for row in ("tril", "triu"):
        op = getattr(ad, f"{row}_op")
        yield Work(row, "", op, lambda t, x, row=row: getattr(t, row)(x))


# ---- layout ----


def layout() -> Iterator[Work]:
    """The operators that move elements."""
    yield Work("copy", "", ad.copy_op, lambda t, x: x.clone())
    yield Work("transpose", "a matrix", ad.transpose_op, lambda t, x: x.t().contiguous())
    yield Work(
        "transpose", "channels last", lambda x: ad.transpose_op(x, (0, 2, 3, 1)),
        lambda t, x: x.permute(0, 2, 3, 1).contiguous(), (IMAGES,),
    )  # fmt: skip
    yield Work(
        "transpose", "heads", lambda x: ad.transpose_op(x, (0, 2, 1, 3)),
        lambda t, x: x.permute(0, 2, 1, 3).contiguous(), ((8, 128, 16, 64),),
    )  # fmt: skip
    for note, shape in (("rows", (1, 1000)), ("columns", (1000, 1))):
        yield Work(
            "broadcast_to", note, lambda x: ad.broadcast_to_op(x, FLAT),
            lambda t, x: x.expand(FLAT).contiguous(), (shape,),
        )  # fmt: skip
    yield Work(
        "broadcast_like", "", ad.broadcastto_op, lambda t, x, y: x.expand_as(y).contiguous(),
        (FLAT[1:], FLAT), wanted=(0,),
    )  # fmt: skip
    yield Work(
        "getitem", "a part", lambda x: x[100:900, 50:950],
        lambda t, x: x[100:900, 50:950].contiguous(),
    )  # fmt: skip
    yield Work("getitem", "every second", lambda x: x[:, ::2], lambda t, x: x[:, ::2].contiguous())
    yield Work("getitem", "flipped", lambda x: x[:, ::-1], lambda t, x: x.flip(1))
    yield Work(
        "slice", "", lambda x: ad.slice_op(x, (100, 50), (800, 900)),
        lambda t, x: x[100:900, 50:950].contiguous(),
    )  # fmt: skip
    yield from indexed()
    yield from joined()


def indexed() -> Iterator[Work]:
    """Choices by index."""
    chosen = integers(1000, 1000)
    for note, axis, shape in (
        ("the first axis", 0, FLAT), ("the middle axis", 1, CUBE), ("the last axis", 1, FLAT),
    ):  # fmt: skip
        at = chosen[: shape[axis]] % shape[axis]
        yield Work(
            "gather", note, lambda x, at, axis=axis: ad.gather_op(x, at, axis),
            lambda t, x, at, axis=axis: t.index_select(x, axis, at), (shape, at),
        )  # fmt: skip
        yield Work(
            "scatter_add", note, lambda x, at, u, axis=axis: ad.scatter_add_op(x, at, u, axis),
            lambda t, x, at, u, axis=axis: t.index_add(x, axis, at, u), (shape, at, shape),
        )  # fmt: skip
    many = integers(10_000, 128 * 64)
    yield Work(
        "embedding", "8192 of 10,000 rows of 128", ad.embedding_op,
        lambda t, table, at: functional(t).embedding(at, table), ((10_000, 128), many),
    )  # fmt: skip
    yield Work(
        "one_hot", "", lambda at: ad.one_hot_op(at, 1000),
        lambda t, at: functional(t).one_hot(at, 1000).float(), (chosen,), wanted=(),
    )  # fmt: skip


def joined() -> Iterator[Work]:
    """Arrays put together and taken apart."""
    half = (500, 1000)
    for note, axis, shape in (("the first axis", 0, half), ("the last axis", 1, half[::-1])):
        yield Work(
            "concat", note, lambda x, y, axis=axis: ad.concat([x, y], axis),
            lambda t, x, y, axis=axis: t.cat([x, y], axis), (shape, shape),
        )  # fmt: skip
        yield Work(
            "stack", note, lambda x, y, axis=axis: ad.stack([x, y], axis),
            lambda t, x, y, axis=axis: t.stack([x, y], axis), (half, half),
        )  # fmt: skip
    yield Work(
        "split_equal", "the last axis", lambda x: ad.split(x, 2, 1)[1],
        lambda t, x: t.split(x, 500, 1)[1].contiguous(),
    )  # fmt: skip
    around = ((0, 0), (0, 0), (2, 2), (2, 2))
    for row, mode in (
        ("constant_pad", "constant"),
        ("pad_edge", "edge"),
        ("pad_reflect", "reflect"),
    ):
        theirs = "replicate" if mode == "edge" else mode
        yield Work(
            row, "images by 2", lambda x, mode=mode: ad.pad_op(x, around, mode),
            lambda t, x, mode=theirs: functional(t).pad(x, (2, 2, 2, 2), mode), (IMAGES,),
        )  # fmt: skip
    for note, given, theirs in (
        ("the last axis", ((0, 0), (0, 0), (8, 8)), (8, 8)),
        ("both last axes", ((0, 0), (8, 8), (8, 8)), (8, 8, 8, 8)),
    ):
        yield Work(
            "pad_reflect", note, lambda x, given=given: ad.pad_op(x, given, "reflect"),
            lambda t, x, given=theirs: functional(t).pad(x, given, "reflect"), (CUBE,),
        )  # fmt: skip
    yield Work("tile", "", lambda x: ad.tile(x, (2, 2)), lambda t, x: x.tile(2, 2), ((500, 500),))


def images() -> Iterator[Work]:
    """Images in other sizes and layouts."""
    yield Work(
        "depth_to_space", "", lambda x: ad.depth_to_space_op(x, 2, "CRD"),
        lambda t, x: functional(t).pixel_shuffle(x, 2), (IMAGES,),
    )  # fmt: skip
    yield Work(
        "space_to_depth", "", lambda x: ad.space_to_depth_op(x, 2, "CRD"),
        lambda t, x: functional(t).pixel_unshuffle(x, 2), (IMAGES,),
    )  # fmt: skip
    for mode, theirs in (("nearest", "nearest-exact"), ("bilinear", "bilinear")):
        yield Work(
            f"resize_{mode}", "to twice the size",
            lambda x, mode=mode: ad.resize(x, scale=2, mode=mode),
            lambda t, x, mode=theirs: functional(t).interpolate(x, scale_factor=2, mode=mode),
            ((16, 16, 32, 32),),
        )  # fmt: skip


# ---- networks ----


def products() -> Iterator[Work]:
    """Matrix products."""
    yield Work(
        "matmul", "1000·784·256", ad.matmul_op, lambda t, x, y: x @ y, ((1000, 784), (784, 256))
    )
    yield Work("matmul", "512³", ad.matmul_op, lambda t, x, y: x @ y, ((512, 512), (512, 512)))
    yield Work(
        "batched_matmul", "64 of 128·64·128", ad.batched_matmul_op, lambda t, x, y: x @ y,
        ((64, 128, 64), (64, 64, 128)),
    )  # fmt: skip
    yield Work(
        "linear", "1000·784·256", ad.linear_op, lambda t, x, w, b: t.addmm(b, x, w),
        ((1000, 784), (784, 256), (256,)),
    )  # fmt: skip
    yield Work("outer", "", ad.outer_op, lambda t, x, y: t.outer(x, y), ((1000,), (1000,)))
    yield Work(
        "einsum", "bij,bjk->bik", lambda x, y: ad.einsum("bij,bjk->bik", x, y),
        lambda t, x, y: t.einsum("bij,bjk->bik", x, y), ((64, 128, 64), (64, 64, 128)),
    )  # fmt: skip


CONVOLUTIONS: tuple[tuple[str, Shape, Shape, dict[str, Any]], ...] = (
    ("LeNet's first", (128, 1, 28, 28), (6, 1, 5, 5), {"padding": 2}),
    ("LeNet's second", (128, 6, 14, 14), (16, 6, 5, 5), {}),
    ("3·3, 64 channels", (32, 64, 16, 16), (64, 64, 3, 3), {"padding": 1}),
    ("3·3, stride 2", (32, 64, 32, 32), (64, 64, 3, 3), {"padding": 1, "stride": 2}),
    ("1·1", (32, 64, 32, 32), (64, 64, 1, 1), {}),
    ("depthwise", IMAGES, (32, 1, 3, 3), {"padding": 1, "groups": 32}),
    ("dilated", (32, 32, 16, 16), (32, 32, 3, 3), {"padding": 2, "dilation": 2}),
)


def convolutions() -> Iterator[Work]:
    """Convolutions of ordinary networks."""
    for note, x, f, given in CONVOLUTIONS:
        yield Work(
            "conv2d", note, lambda x, f, given=given: ad.conv2d(x, f, **given),
            lambda t, x, f, given=given: functional(t).conv2d(x, f, **given), (x, f),
        )  # fmt: skip
    yield Work(
        "conv2d_bias", "3·3, 64 channels", lambda x, f, b: ad.conv2d(x, f, b, padding=1),
        lambda t, x, f, b: functional(t).conv2d(x, f, b, padding=1),
        ((32, 64, 16, 16), (64, 64, 3, 3), (64,)),
    )  # fmt: skip
    yield Work(
        "conv1d", "", lambda x, f: ad.conv1d(x, f, padding=2),
        lambda t, x, f: functional(t).conv1d(x, f, padding=2), ((64, 32, 500), (32, 32, 5)),
    )  # fmt: skip
    yield Work(
        "conv_transpose2d", "to twice the size", lambda x, f: ad.conv_transpose2d(x, f, stride=2),
        lambda t, x, f: functional(t).conv_transpose2d(x, f, stride=2),
        ((32, 64, 16, 16), (64, 32, 2, 2)),
    )  # fmt: skip


def pools() -> Iterator[Work]:
    """Pooling of ordinary networks."""
    for note, given in (
        ("2·2", {"kernel_size": 2, "stride": 2}),
        ("3·3, stride 2", {"kernel_size": 3, "stride": 2, "padding": 1}),
    ):
        ours = {"window": given["kernel_size"], "stride": given["stride"]}
        ours["padding"] = given.get("padding", 0)
        for name in ("max", "avg"):
            op = getattr(ad, f"{name}_pool2d")
            more = {"count_include_pad": True} if name == "avg" else {}
            yield Work(
                f"{name}_pool2d", note, lambda x, op=op, ours=ours: op(x, **ours),
                lambda t, x, name=name, given={**given, **more}: getattr(
                    functional(t), f"{name}_pool2d"
                )(x, **given),
                (IMAGES,),
            )  # fmt: skip
    yield Work(
        "global_avg_pool2d", "", ad.global_avg_pool2d, lambda t, x: x.mean((2, 3)), (IMAGES,)
    )
    yield Work(
        "global_max_pool2d", "", ad.global_max_pool2d, lambda t, x: x.amax((2, 3)), (IMAGES,)
    )


def norms() -> Iterator[Work]:
    """Softmax, attention and normalization."""
    for shape in (FLAT, (100_000, 10)):
        for name in ("softmax", "log_softmax"):
            op = getattr(ad, f"{name}_op")
            yield Work(
                name, f"rows of {shape[1]}", op, lambda t, x, name=name: getattr(t, name)(x, -1),
                (shape,),
            )  # fmt: skip
    yield Work(
        "attention", "causal", lambda q, k, v: attention(q, k, v, causal=True),
        lambda t, q, k, v: functional(t).scaled_dot_product_attention(q, k, v, is_causal=True),
        ((2, 8, 256, 64),) * 3,
    )  # fmt: skip
    channels = (IMAGES, (32,), (32,))
    yield Work(
        "batch_normalization", "", lambda *x: ad.batch_normalization(*x),
        lambda t, x, s, b: functional(t).batch_norm(x, None, None, s, b, True), channels,
    )  # fmt: skip
    yield Work(
        "layer_normalization", "rows of 768", ad.layer_normalization,
        lambda t, x, s, b: functional(t).layer_norm(x, s.shape, s, b),
        ((1300, 768), (768,), (768,)),
    )  # fmt: skip
    yield Work(
        "rms_normalization", "rows of 768", ad.rms_normalization,
        lambda t, x, s: functional(t).rms_norm(x, s.shape, s, 1e-5), ((1300, 768), (768,)),
    )  # fmt: skip
    yield Work(
        "group_normalization", "8 groups", lambda *x: ad.group_normalization(*x, groups=8),
        lambda t, x, s, b: functional(t).group_norm(x, 8, s, b), channels,
    )  # fmt: skip
    yield Work(
        "instance_normalization", "", ad.instance_normalization,
        lambda t, x, s, b: functional(t).instance_norm(x, weight=s, bias=b), channels,
    )  # fmt: skip


def losses() -> Iterator[Work]:
    """Losses: of classes over rows, of numbers element by element."""
    for shape in (FLAT, (100_000, 10)):
        classes = integers(shape[1], shape[0])
        note = f"rows of {shape[1]}"
        yield Work(
            "sparse_softmax_cross_entropy", note, ad.softmax_cross_entropy,
            lambda t, x, y: functional(t).cross_entropy(x, y), (shape, classes), wanted=(0,),
        )  # fmt: skip
        dense = np.eye(shape[1], dtype=np.float32)[classes]
        yield Work(
            "softmax_cross_entropy", note, ad.softmax_cross_entropy,
            lambda t, x, y: functional(t).cross_entropy(x, y), (shape, dense), wanted=(0,),
        )  # fmt: skip
    yield Work(
        "softmax_cross_entropy_options", "smoothed", lambda x, y: ad.softmax_cross_entropy(
            x, y, label_smoothing=0.1
        ),
        lambda t, x, y: functional(t).cross_entropy(x, y, label_smoothing=0.1),
        (FLAT, integers(1000, 1000)), wanted=(0,),
    )  # fmt: skip
    yield Work(
        "negative_log_likelihood", "", ad.negative_log_likelihood,
        lambda t, x, y: functional(t).nll_loss(x, y), (FLAT, integers(1000, 1000)), wanted=(0,),
    )  # fmt: skip
    two = {"inputs": (FLAT, FLAT), "wanted": (0,)}
    inside = {"low": 0.05, "high": 0.95}
    for row, name in (("mean_squared_error", "mse_loss"), ("mean_absolute_error", "l1_loss"),
                      ("huber_loss", "huber_loss")):  # fmt: skip
        yield Work(
            row, "", getattr(ad, row),
            lambda t, x, y, name=name: getattr(functional(t), name)(x, y), **two,
        )  # fmt: skip
    yield Work(
        "binary_cross_entropy", "", ad.binary_cross_entropy,
        lambda t, x, y: functional(t).binary_cross_entropy(x, y), **two, **inside,
    )  # fmt: skip
    yield Work(
        "binary_cross_entropy_with_logits", "", ad.binary_cross_entropy_with_logits,
        lambda t, x, y: functional(t).binary_cross_entropy_with_logits(x, y), **two, **inside,
    )  # fmt: skip
    yield Work(
        "multiclass_hinge_loss", "rows of 10", lambda x, y: ad.multiclass_hinge_loss(x, y) / 10,
        lambda t, x, y: functional(t).multi_margin_loss(x, y),
        ((100_000, 10), integers(10, 100_000)), wanted=(0,), alike=False,
    )  # fmt: skip
    yield Work(
        "kl_divergence", "", ad.kl_divergence,
        lambda t, x, y: functional(t).kl_div(x, y, reduction="batchmean"), **two, **inside,
    )  # fmt: skip


# ---- random numbers, sources, updates ----


def random() -> Iterator[Work]:
    """Random numbers; the generators differ, and so do the numbers."""
    made = {"inputs": (), "wanted": (), "alike": False}
    yield Work(
        "random_uniform", "", lambda: ad.random_uniform(FLAT), lambda t: t.rand(FLAT), **made
    )
    yield Work(
        "random_bernoulli", "", lambda: ad.random_bernoulli(FLAT, 0.3),
        lambda t: t.empty(FLAT).bernoulli_(0.3), **made,
    )  # fmt: skip
    yield Work("random_normal", "", lambda: ad.random_normal(FLAT), lambda t: t.randn(FLAT), **made)
    yield Work(
        "random_truncated_normal", "", lambda: ad.random_truncated_normal(FLAT),
        lambda t: t.nn.init.trunc_normal_(t.empty(FLAT)), **made,
    )  # fmt: skip
    yield Work(
        "dropout", "half", lambda x: ad.dropout(x, 0.5), lambda t, x: t.dropout(x, 0.5, True),
        alike=False,
    )  # fmt: skip
    yield Work("full", "", lambda: source.full_op(FLAT, 1.5), lambda t: t.full(FLAT, 1.5), **made)
    yield Work("ones_like", "", source.oneslike_op, lambda t, x: t.ones_like(x), wanted=())
    yield Work("zeros_like", "", source.zeroslike_op, lambda t, x: t.zeros_like(x), wanted=())


def weights() -> Any:
    """A Parameter of a million numbers."""
    return ad.Parameter(np.ones(FLAT, np.float32), "p")


def stepper(name: str, **given: Any) -> Callable[[Any, Any], Callable[[], None]]:
    """A step of PyTorch's optimizer of that name, one kernel where it has that."""

    def make(t: Any, g: Any) -> Callable[[], None]:
        p = t.nn.Parameter(t.ones(FLAT))
        p.grad = g
        return getattr(t.optim, name)([p], lr=1e-6, **given).step

    return make


def rule(op: Any, slots: int, **attrs: Any) -> Callable[[Any], Any]:
    """An update of a million numbers by a fed gradient, with its step counted."""

    def build(g: Any) -> Any:
        p, lr = weights(), ad.Parameter(np.float32(1e-6), "lr", trainable=False)
        kept = [
            ad.Parameter(np.full(FLAT, 0.1, np.float32), f"s{k}", trainable=False)
            for k in range(slots)
        ]
        step = ad.Parameter(np.int64(3), "step", trainable=False) if op.rule.needs_step else None
        update = op(p, *kept, g, lr, step=step, scale=None, **attrs)
        return ad.group_op(update, *([ad.advance_step_op(step)] if step is not None else []))

    return build


def updates() -> Iterator[Work]:
    """Optimizers' steps of a million numbers."""
    more: dict[str, Any] = {"wanted": (), "states": True, "alike": False}
    adam = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    rms = {"alpha": 0.99, "eps": 1e-8}
    swing = {**rms, "momentum": 0.9}
    for row, ours, theirs in (
        ("sgd_update", rule(ad.sgd_update_op, 0), stepper("SGD", fused=True)),
        ("sgd_momentum_update", rule(ad.sgd_momentum_update_op, 1, momentum=0.9),
         stepper("SGD", momentum=0.9, fused=True)),
        ("adam_update", rule(ad.adam_update_op, 2, **adam), stepper("Adam", fused=True)),
        ("rmsprop_update", rule(ad.rmsprop_update_op, 1, **rms), stepper("RMSprop")),
        ("rmsprop_centered_update", rule(ad.rmsprop_centered_update_op, 2, **rms),
         stepper("RMSprop", centered=True)),
        ("rmsprop_momentum_update", rule(ad.rmsprop_momentum_update_op, 2, **swing),
         stepper("RMSprop", momentum=0.9)),
        ("rmsprop_centered_momentum_update",
         rule(ad.rmsprop_centered_momentum_update_op, 3, **swing),
         stepper("RMSprop", centered=True, momentum=0.9)),
        ("adagrad_update", rule(ad.adagrad_update_op, 1, eps=1e-10),
         stepper("Adagrad", fused=True)),
    ):  # fmt: skip
        yield Work(row, "", ours, theirs, **more)
    yield Work(
        "assign", "", lambda g: ad.group_op(ad.assign_op(weights(), g)),
        lambda t, g: (lambda p: lambda: p.copy_(g))(t.ones(FLAT)), **more,
    )  # fmt: skip
    yield Work(
        "global_norm", "", ad.global_norm_op, lambda t, *x: t.nn.utils.get_total_norm(x),
        ((784, 256), (256,), (256, 100), FLAT), wanted=(),
    )  # fmt: skip


def works() -> list[Work]:
    """All of them, in the order of the table."""
    families = (
        *(elementwise, activations, comparisons, reductions, sorts, layout, images, products),
        *(convolutions, pools, norms, losses, random, updates),
    )
    return [work for family in families for work in family()]


# ---- rows without a work of their own ----

WITHIN = {
    "relu_gradient": "relu",
    "cast_like": "cast",
    "std": "var",
    "argsort": "sort",
    "topk_indices": "topk",
    "put_along_axis": "take_along_axis",
    **dict.fromkeys(("recurrence", "shifted"), "cumprod"),
    **dict.fromkeys(("isnan", "isinf", "isfinite"), "equal"),
    "masked_fill": "where",
    **dict.fromkeys(("product", "product_operator", "product_gradient"), "batched_matmul"),
    **{f"{name}_gradient": name for name in (
        "sigmoid", "tanh", "leaky_relu", "elu", "silu", "gelu", "gelu_tanh", "softplus",
        "hard_swish", "gather", "concat", "pad_edge", "pad_reflect", "tile", "resize_nearest",
        "resize_bilinear", "slice",
    )},
    "clip_gradient": "clip",
    **{f"truth_{name}": f"logical_{name}" for name in ("and", "or", "xor", "not")},
    **{f"{name}_function": row for name, row in (
        ("add", "add"), ("sub", "sub"), ("mul", "mul"), ("div", "div"), ("power", "pow"),
        ("sum_to_like", "sum_to_like"), ("conv2d", "conv2d"), ("max_pool2d", "max_pool2d"),
        ("avg_pool2d", "avg_pool2d"), ("class_weights", "softmax_cross_entropy_options"),
    )},
    "clip_smooth": "clip",
    "huber": "huber_loss",
    "expand_like": "sum",
    "place": "constant_pad",
    "window": "getitem",
    "scatter": "scatter_add",
    "scatter_add_to": "scatter_add",
    "concat_two": "concat",
    "split_sizes": "split_equal",
    "pad": "constant_pad",
    "tile_op": "tile",
    "resize": "resize_nearest",
    "product_like": "batched_matmul",
    **dict.fromkeys(("grouped_matmul", "grouped_contraction"), "batched_matmul"),
    "times_vector": "outer",
    "einsum_op": "einsum",
    **dict.fromkeys((
        "conv2d_op", "conv2d_data_gradient", "conv2d_data_gradient_like", "conv2d_filter_gradient",
        "conv2d_filter_gradient_like", "conv2d_gradient_of_data_op",
        "conv2d_gradient_of_filter_op",
    ), "conv2d"),
    "conv2d_add_bias_op": "conv2d_bias",
    **dict.fromkeys((
        "max_pool2d_op", "max_pool2d_gradient", "max_pool2d_gradient_like",
        "max_pool2d_gradient_op", "max_pool2d_read",
    ), "max_pool2d"),
    **dict.fromkeys((
        "avg_pool2d_op", "avg_pool2d_gradient", "avg_pool2d_gradient_like",
        "avg_pool2d_gradient_op",
    ), "avg_pool2d"),
    **dict.fromkeys((
        "channels", "per_channel", "batch_statistics", "batch_normalize", "batch_normalize_sums",
        "batch_normalize_gradient", "batch_normalization_op",
    ), "batch_normalization"),
    **dict.fromkeys((
        "attention_op", "attention_biased", "attention_gradient", "dropped_attention",
        "dropped_attention_gradient", "attention_of_mask", "dropped_attention_second",
        "packed_attention", "packed_attention_op", "packed_attention_gradient",
        "dropped_packed_attention", "dropped_packed_attention_gradient", "split_heads",
        "join_heads",
    ), "attention"),
    **dict.fromkeys((
        "normalization_view", "row_normalize", "row_normalize_gradient", "row_normalize_sums",
    ), "layer_normalization"),
    **dict.fromkeys(("softmax_cross_entropy_rows", "softmax_cross_entropy_gradient",
                     "softmaxcrossentropy"), "softmax_cross_entropy"),
    **dict.fromkeys((
        "sparse_softmax_cross_entropy_rows", "sparse_softmax_cross_entropy_gradient",
    ), "sparse_softmax_cross_entropy"),
    **dict.fromkeys((
        "uniform_like", "class_weights", "softmax_cross_entropy_dense_options",
    ), "softmax_cross_entropy_options"),
    **dict.fromkeys(("reduce_rows", "expand_last"), "mean_squared_error"),
    **dict.fromkeys((
        "negative_log_likelihood_rows", "negative_log_likelihood_gradient",
        "negative_log_likelihood_gradient_like",
    ), "negative_log_likelihood"),
    "is_one_hot": "multiclass_hinge_loss",
    "binarycrossentropy": "binary_cross_entropy",
    **dict.fromkeys((
        "binary_cross_entropy_with_array_weights", "binary_cross_entropy_with_node_weights",
    ), "binary_cross_entropy_with_logits"),
    "multiclass_hinge_loss_of_one_hot": "multiclass_hinge_loss",
    "uniform": "random_uniform",
    "bernoulli": "random_bernoulli",
    "normal": "random_normal",
    **dict.fromkeys(("dropout_op", "masked"), "dropout"),
    "adam_update_of_7": "adam_update",
    "group": "assign",
}  # fmt: skip
_VIEW = "a view in PyTorch, and a shape without a copy here"
_CHECK = "checks shapes and dtypes as a graph is built: no kernel"
_FUSED = "made by a pass: the training steps time it"
WITHOUT = {
    **dict.fromkeys((
        "quantize", "dequantize", "quantized_add", "quantized_conv2d", "quantized_matmul",
        "quantized_max_pool2d",
    ), "integers of 8 bits, which PyTorch has under another rule of rounding"),
    **dict.fromkeys((
        "conv2d_channels_last", "conv2d_data_gradient_channels_last",
        "conv2d_filter_gradient_channels_last", "max_pool2d_channels_last",
        "max_pool2d_gradient_channels_last",
    ), "of 16 bits on a GPU; `benchmarks large` times a network of them"),
    **dict.fromkeys((
        "reshape", "reshape_like", "squeeze", "expand_dims", "flatten", "as_node", "constant",
        "stop_gradient",
    ), _VIEW),
    **dict.fromkeys(("target", "target_of", "class_scores", "weights_like"), _CHECK),
    "step_of_draw": "counts the draws of a program, of which PyTorch's generator keeps its own",
    "hinge_loss": "PyTorch has it for embeddings only",
    **dict.fromkeys((
        "non_max_suppression", "non_max_suppression_count", "soft_nms", "soft_nms_scores",
        "soft_nms_count",
    ), "PyTorch has none; `benchmarks suppression` times it beside ONNX Runtime"),
    "lion_update": "PyTorch has no Lion",
    **dict.fromkeys((
        "average_update", "accumulate_update", "advance_step", "advance_step_at_the_end",
        "accumulate", "running_update", "running_statistics",
    ), "a part of a step, which PyTorch does within its modules or by hand"),
    **dict.fromkeys((
        "shuffled_index", "take_batch", "shuffled_batch", "shuffled_batch_labels",
    ), "takes batches of data on the device"),
    **dict.fromkeys((
        "fp8_both", "fp8_columns", "fp8_matmul", "fp8_rows",
    ), "made by precision=fp8; `benchmarks gemm --precisions fp8` times it on a GPU"),
    **dict.fromkeys((
        "append_to_cache", "cached_attention", "draw_token",
    ), "a part of generation: `benchmarks generation` times a token"),
    **dict.fromkeys((
        "matmul_add", "matmul_bias", "matmul_bias_add", "matmul_bias_both", "matmul_bias_slope",
        "matmul_map", "matmul_gradient", "matmul_sums", "fused_cross_entropy",
        "fused_row_normalize", "fused_row_normalize_gradient", "fused_sparse_cross_entropy",
        "narrow_cross_entropy", "narrow_cross_entropy_gradient",
        "pointwise", "conv2d_pool", "conv2d_pool_data_gradient", "conv2d_pool_chain",
        "conv2d_pool_filter_gradient", "conv2d_pool_filter_bias_gradient", "linear_cross_entropy",
        "matmul_row_factors",
        "batch_normalize_map", "batch_normalize_map_gradient", "batch_normalize_map_sums",
        "batch_normalize_relu_sums_output_1", "batch_normalize_relu_sums_output_2",
        "batch_normalize_relu_sums_recomputed_1", "batch_normalize_relu_sums_recomputed_2",
        "batch_normalize_sums_single_pass", "batch_statistics_single_pass", "matmul_u8",
        "batch_normalize_relu_bits", "batch_normalize_relu_sums_bits_1",
        "batch_normalize_relu_sums_bits_2", "conv2d_channels_last_statistics", "keep_by_bits",
        "positive_bits", "conv2d_kept",
        "matmul_u8_bias", "scaled", "shuffled_rows", "shuffled_rows_labels", "matvec",
        "matvec_chain", "quantized_conv2d_fused", "quantized_matmul_chain",
    ), _FUSED),
}  # fmt: skip

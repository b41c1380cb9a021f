"""The rows of samples.py for quantized layers that are fused with what stands around them. Their
nodes are built as `fusion/` builds them: around the nodes that they stand for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys.fusion import quantized_chain, quantized_fused
from dlsys.fusion.shared.body import close
from dlsys.ops import movement, quantize
from support.table.families.device_batch import pixels
from support.table.families.quantize import (
    NO_PARTS,
    UINT8,
    added,
    convolved,
    eighths,
    multiplied,
    pooled,
    powers,
    quantized,
)
from support.table.rows import Case, Sample, case, classes

Array = np.ndarray
SUM = 0.75, 0.3125, -20.5, 3  # scales, offset and the least value, exact in float32


def fused(
    x: Array, w: Array, bias: Array, multiplier: Array, *rest: Array,
    unit: bool, pool: int, adds: bool, **attrs: Any,
) -> Array:  # fmt: skip
    if unit:
        x = quantized(x, *rest[:2]).transpose(0, 2, 3, 1)
    y = convolved(x, w, bias, multiplier, **attrs)
    if pool > 1:
        return pooled(y, (pool, pool), pool)
    return added(y, rest[-1], *SUM[:3], low=SUM[3]) if adds else y


def fused_node(x: Any, *rest: Any, unit: bool, pool: int, adds: bool, **attrs: Any) -> Any:
    images = x
    if unit:
        images = movement.transpose_op(quantize.quantize_op(x, *rest[3:5]), (0, 2, 3, 1))
    last = conv = quantize.quantized_conv2d_op(images, *rest[:3], **attrs)
    if pool > 1:
        last = quantize.quantized_max_pool2d_op(conv, size=(pool, pool), stride=pool)
    if adds:
        scale_a, scale_b, offset, low = SUM
        numbers = dict(scale_a=scale_a, scale_b=scale_b, offset=offset, low=low)
        last = quantize.quantized_add_op(conv, rest[-1], **numbers)
    inputs = x, *rest
    return quantized_fused.quantized_convolution_op(
        *inputs, body=close(inputs, (last,)), convolution=conv, unit=int(unit), pool=pool,
        sum=SUM if adds else (),
    )  # fmt: skip


def fused_case(x: Any, n: int, k: int, result: Any = None, **attrs: Any) -> Case:
    """A convolution of x by filters (n, k); result: the shape of what is added."""
    unit = attrs.get("unit", False)
    shapes, domain = operands(n, k)
    if unit:
        shapes, domain = [*shapes, (), ()], [*domain, powers, UINT8]
    if result:
        shapes, domain = [*shapes, result], [*domain, pixels]
    more = {"unit": False, "pool": 1, "adds": result is not None, **attrs}
    return case(x, *shapes, domain=(eighths if unit else pixels, *domain), **more)


def operands(n: int, k: int) -> tuple[list, list]:
    """The shapes of packed weights (n, k), bias and multipliers, and what they are fed."""
    weights = lambda rng, _: quantize.packed(rng.integers(-128, 128, (n, k)).astype(np.int8))  # noqa: E731
    halves = lambda rng, shape: np.full(shape, 2.0**-11)  # noqa: E731
    packed = (-(-n // 16), -(-k // 4), 64)
    return [packed, (n,), (n,)], [weights, classes(20_000, np.int32), halves]


FIRST = dict(unit=True, size=(3, 3), padding=1, pad=7)
CONVOLUTIONS = (
    fused_case((1, 1, 8, 6), 6, 9, **FIRST),
    fused_case((2, 3, 9, 7), 20, 27, **FIRST, pool=2, zero=4, low=4),
    fused_case((1, 10, 9, 16), 24, 144, size=(3, 3), padding=1, pad=9, pool=2),
    fused_case((1, 7, 7, 64), 40, 576, (1, 7, 7, 40), size=(3, 3), padding=1, zero=140),
    fused_case((2, 6, 5, 5), 7, 45, (2, 4, 3, 7), size=(3, 3), zero=128),
    fused_case((2, 80, 80, 16), 64, 16, (2, 80, 80, 64), size=(1, 1), low=7),
    # Of few channels, with several outputs a block; and such as are gathered.
    fused_case((3, 12, 9, 6), 10, 36, size=(3, 2), stride=2, padding=1, pad=200, pool=2, high=250),
    fused_case((40, 12, 12, 3), 20, 75, size=(5, 5), padding=2, pad=3, low=1),
    fused_case((1, 3, 127, 131), 70, 27, **FIRST, zero=2),
    fused_case((2, 3, 9, 9), 5, 27, **FIRST | dict(dilation=2, padding=2), pool=2),
)


# ---- chains ----


def chained(x: Array, *operands: Array, layers: tuple[dict[str, int], ...]) -> Array:
    count = len(layers)
    for k, attrs in enumerate(layers):
        x = multiplied(x, *(operands[part * count + k] for part in range(3)), **attrs)
    return x


def chained_node(x: Any, *operands: Any, layers: tuple[dict[str, int], ...]) -> Any:
    count, y = len(layers), x
    for k, attrs in enumerate(layers):
        y = quantize.quantized_matmul_op(
            y, *(operands[part * count + k] for part in range(3)), **attrs
        )
    inputs, filled = (x, *operands), dict(zero=0, low=0, high=255)
    numbers = {
        name: sum({**filled, **attrs}[name] << 8 * k for k, attrs in enumerate(layers))
        for name in filled
    }
    return quantized_chain.quantized_chain_op(*inputs, body=close(inputs, (y,)), **numbers)


def chained_case(m: int, sizes: tuple[int, ...], *layers: dict[str, Any]) -> Case:
    """Layers from sizes[0] inputs to sizes[-1] outputs."""
    made = [operands(n, k) for k, n in zip(sizes, sizes[1:])]
    shapes = [shapes[part] for part in range(3) for shapes, _ in made]
    domain = [domain[part] for part in range(3) for _, domain in made]
    return case((m, sizes[0]), *shapes, domain=(pixels, *domain), layers=layers)


CHAINS = (
    chained_case(1, (400, 120, 84, 10), dict(low=3), dict(zero=120), dict(dtype=np.float32)),
    chained_case(3, (7, 33, 5), dict(zero=9, low=9), dict(high=200)),
    chained_case(8, (36, 260, 17, 16, 1), {}, {}, dict(low=5), {}),
)

FUSED_QUANTIZED = (
    Sample(
        "quantized_conv2d_fused", quantized_fused.quantized_convolution_op, fused, CONVOLUTIONS,
        build=fused_node, fused=True, **NO_PARTS,
    ),
    Sample(
        "quantized_matmul_chain", quantized_chain.quantized_chain_op, chained, CHAINS,
        build=chained_node, fused=True, **NO_PARTS,
    ),
)  # fmt: skip

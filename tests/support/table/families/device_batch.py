"""The rows of samples.py for batches of a resident data set."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys.ops.random import device_batch
from support.table.families.random import SEED, philox_words
from support.table.rows import Sample, Shape, case, classes, product, refuse, signed

# ---- formulas ----


def mixed(h: int) -> int:
    """MurmurHash3's fmix32."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ h >> shift) * factor & 0xFFFFFFFF
    return h


def sample_at(position: int, count: int) -> int:
    """The sample at a position of the shuffled stream, a position at a time."""
    epoch, at = divmod(position, count)
    keys = philox_words(0, 0x6F726472, epoch)
    side = next(n for n in range(8, 1 << 16) if n * n >= count)
    while True:
        left, right = divmod(at, side)
        for turn in range(6):
            hashed = mixed(right ^ (keys[turn % 4] + turn * 0x9E3779B9) & 0xFFFFFFFF)
            left, right = right, (left + (hashed * side >> 32)) % side
        at = left * side + right
        if at < count:
            return at


def chosen(step: Any, count: int, batch: int, seed: int = SEED, shuffle: bool = True) -> np.ndarray:
    assert seed == SEED
    positions = range(int(step.item()) * batch, (int(step.item()) + 1) * batch)
    return np.array([sample_at(p, count) if shuffle else p % count for p in positions])


def scaled(samples: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    size = int(np.prod(samples.shape[1:]))
    slopes, offsets = (np.repeat(a, size // a.size) for a in (scale, shift))
    made = samples.reshape(len(samples), size).astype(np.float64) * slopes + offsets
    return made.reshape(samples.shape)


def taken(samples: Any, index: Any, scale: Any, shift: Any) -> np.ndarray:
    return scaled(samples[index.reshape(-1)], scale, shift).reshape(
        *index.shape, *samples.shape[1:]
    )


def next_samples(samples: Any, labels: Any, step: Any, scale: Any, shift: Any, **attrs: Any) -> Any:
    return scaled(samples[chosen(step, len(samples), **attrs)], scale, shift)


def next_labels(samples: Any, labels: Any, step: Any, scale: Any, shift: Any, **attrs: Any) -> Any:
    return labels[chosen(step, len(samples), **attrs)]


def part(k: int) -> Any:
    """One of the two values of a batch, as a node of one value."""
    return lambda *inputs, **attrs: device_batch.shuffled_batch_op(*inputs, **attrs)[k]


# ---- rows ----


def pixels(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.integers(0, 256, shape, np.uint8)


def steps(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.integers(0, 1000, shape)


def far_steps(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Epochs beyond 2^32."""
    return np.full(shape, 2**45 + 12345)


SETS = (
    (((7, 1, 4, 4), ()), pixels),
    (((1, 5), ()), pixels),
    (((937, 3, 5, 4), (3,)), pixels),  # channels of whole quads
    (((50, 18), (3,)), pixels),  # flattened, channels that are no whole quads
    (((33, 2), (2,)), signed),
    (((40, 4, 8), (4,)), signed),
    (((20, 784), (1,)), pixels),
)
INTEGERS = classes(10, np.int64)
TAKEN = tuple(
    case(shape, index, channels, channels, domain=(kind, classes(shape[0], dtype), signed, signed))
    for (shape, channels), kind in SETS
    for index, dtype in (((3,), np.int64), ((2, 5), np.int32), ((0,), np.int64))
)
NEXT = tuple(
    case(
        shape, labels, (), channels, channels, batch=size, seed=SEED, shuffle=shuffle,
        domain=(kind, signed if labels[1:] else INTEGERS, steps, signed, signed),
    )
    for (shape, channels), kind in SETS
    for labels in (shape[:1], (shape[0], 3))
    for size in (1, 12)
    for shuffle in (True, False)
)  # fmt: skip
BAD_STEP = refuse(
    r"expected a step of one int64, got float32 \(3,\)", (3,), count=4, batch=2, seed=0
)

BATCHES = (
    Sample(
        "shuffled_index", device_batch.shuffled_index_op, chosen,
        product(
            tuple(case((), count=n) for n in (1, 2, 7, 937, 50_000, 2**31 - 1))
            + (case((1,), count=100, domain=far_steps),),
            *({"batch": size, "seed": SEED, "shuffle": shuffle}
              for size in (1, 33) for shuffle in (True, False)),
        ),
        domain=steps, ulps=0, differentiable=(), specials=False,
        refusals=(
            BAD_STEP,
            refuse(
                r"expected 1 to 2147483647 samples in batches of at least 1, got 0 in batches of 2",
                (), dtypes=("int64",), count=0, batch=2,
            ),
            refuse(r"got 4 in batches of 0", (), dtypes=("int64",), count=4, batch=0),
        ),
    ),
    Sample(
        "take_batch", device_batch.take_batch_op, taken, TAKEN, ulps=0.5, differentiable=(),
        scale=lambda samples, index, scale, shift: taken(
            np.abs(samples.astype(float)), index, np.abs(scale), np.abs(shift)
        ),
        specials=False,
        refusals=(
            refuse(
                r"scale \(3,\) and shift \(3,\) do not fit samples of \(5, 4\)",
                (5, 4), (2,), (3,), (3,), dtypes=("uint8", "int64", "float32", "float32"),
            ),
            refuse(
                r"expected an index of int32 or int64, got uint8", (5, 4), (2,), (), (),
                dtypes=("uint8", "uint8", "float32", "float32"),
            ),
            refuse(
                r"expected samples of uint8 or float32, got int32", (5, 4), (2,), (), (),
                dtypes=("int32", "int64", "float32", "float32"),
            ),
        ), storages=(),
    ),
    Sample(
        "shuffled_batch", device_batch.shuffled_batch_op, next_samples, NEXT, build=part(0),
        ulps=0.5,
        scale=lambda samples, labels, step, scale, shift, **attrs: next_samples(
            np.abs(samples.astype(float)), labels, step, np.abs(scale), np.abs(shift), **attrs
        ),
        differentiable=(), specials=False,
        refusals=(
            refuse(
                r"a label a sample is needed, got \S+ \(5, 4\) and \S+ \(4,\)",
                (5, 4), (4,), (), (), (), batch=2,
                dtypes=("uint8", "int64", "int64", "float32", "float32"),
            ),
        ), storages=(),
    ),
    Sample(
        "shuffled_batch_labels", device_batch.shuffled_batch_op, next_labels, NEXT, build=part(1),
        ulps=0,
        differentiable=(), specials=False, storages=(),
    ),
)  # fmt: skip

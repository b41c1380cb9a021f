"""Batches of a data set that is resident on a device: the order of its samples, and the samples
gathered, cast and normalized on the way.

Samples are taken in a stream of positions, `batch` of them a step: position p is the one numbered
p % count of epoch p // count. Each epoch has an order of its own in which every sample comes
exactly once, made of the seed and the epoch's number alone; src/operators/device_batch.h has it for
native devices, equal to the last bit. The step is state on the device, so that a captured program
takes the next batch each time it is replayed.
"""

from __future__ import annotations

import math

import numpy as np

from ...arguments.kinds import Bool, Int, Kind
from ...arguments.signature import Signature
from ...errors import GraphError
from ...graph.node import Node, Op
from ...graph.spec import FLOAT32, Spec, describe, floating
from ..indexing import check_range
from .philox import philox

__all__ = ["shuffled_batch_op", "shuffled_index_op", "take_batch_op"]

_ORDERS = 0x6F726472  # the fourth word of counters, where nodes are numbered
_ROUNDS = 6  # fewer leave traces in the orders of 100 samples
_LEAST_SIDE = 8  # smaller squares have too few permutations
_MOST = 2**31 - 1  # samples of a set
_CHUNK = 1 << 16  # elements scaled at a time on numpy, so that scratch stays in the cache
_INT64 = np.dtype(np.int64)
_INDICES = (np.dtype(np.int32), _INT64)
_SAMPLES = (np.dtype(np.uint8), FLOAT32, np.dtype(np.float64))


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The samples of an epoch in their order: a permutation (count,) of int64."""
    first = epoch * count
    return ordered(np.arange(first, first + count, dtype=np.uint64), count, seed)


def ordered(positions: np.ndarray, count: int, seed: int) -> np.ndarray:
    """The sample (int64) at each position (uint64) of the shuffled stream.

    A Feistel network over the square of numbers (left, right) that holds `count`, repeated until
    the number exists: Black and Rogaway, "Ciphers with arbitrary finite domains" (2002). Its keys
    are the Philox words of the epoch.
    """
    epochs, ranks = positions // np.uint64(count), positions % np.uint64(count)
    known, of_position = np.unique(epochs, return_inverse=True)
    low, high = known & np.uint64(0xFFFFFFFF), known >> np.uint64(32)
    words = philox((low, high, 0, _ORDERS), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    keys = np.stack([np.broadcast_to(word, known.shape) for word in words])
    side = max(_LEAST_SIDE, math.isqrt(count - 1) + 1)
    found = np.empty(positions.size, np.int64)
    waiting, at, of_key = np.arange(positions.size), ranks.reshape(-1), of_position.reshape(-1)
    while waiting.size:
        at = _permuted(at, keys[:, of_key], np.uint64(side))
        done = at < np.uint64(count)
        found[waiting[done]] = at[done]
        waiting, at, of_key = waiting[~done], at[~done], of_key[~done]
    return found.reshape(positions.shape)


def _permuted(at: np.ndarray, keys: np.ndarray, side: np.uint64) -> np.ndarray:
    left, right = at // side, at % side
    for turn in range(_ROUNDS):
        key = keys[turn & 3].astype(np.uint32) + np.uint32(turn * 0x9E3779B9 & 0xFFFFFFFF)
        mixed = _mix(right.astype(np.uint32) ^ key).astype(np.uint64)
        moved = left + (mixed * side >> np.uint64(32))
        left, right = right, np.where(moved >= side, moved - side, moved)
    return left * side + right


def _mix(h: np.ndarray) -> np.ndarray:
    """The finalizer of MurmurHash3 (Appleby) on uint32."""
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    h = (h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return h ^ h >> np.uint32(16)


def _stream(node: Node, step: np.ndarray, count: int, batch: int) -> np.ndarray:
    """The samples of the batch that `step` is at."""
    first = int(step.item()) * batch
    positions = np.arange(batch, dtype=np.uint64) + np.uint64(first & 0xFFFFFFFFFFFFFFFF)
    if node.attrs["shuffle"]:
        return ordered(positions, count, node.attrs["seed"])
    return (positions % np.uint64(count)).astype(np.int64)


def _scaled(x: np.ndarray, scale: np.ndarray, shift: np.ndarray, y: np.ndarray) -> None:
    """y = scale · x + shift, by channels of a sample; one rounding, as on every device."""
    if not y.size:
        return
    channels = scale.size
    shape = (len(x), channels, -1)
    scales = scale.reshape(channels, 1).astype(np.float64)
    offsets = shift.reshape(channels, 1).astype(np.float64)
    rows = max(1, _CHUNK * len(x) // x.size)
    for first in range(0, len(x), rows):
        part = slice(first, first + rows)
        y.reshape(shape)[part] = x.reshape(shape)[part] * scales + offsets


# ---- operators ----

BATCHES: dict[str, Kind] = dict(batch=Int(), seed=Int(0), shuffle=Bool(True))


class ShuffledIndexOp(Op):
    """The samples of the next batch: (batch,) int64 below `count`; the one input is the step.

    In the order of the epochs of `seed`, or from 0 to count - 1 again and again where `shuffle` is
    False.
    """

    name = kernel = "shuffled_index"
    vocabulary = False
    any_dtype = True
    signature = Signature("step", "*", count=Int(), **BATCHES)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        _check_step(node, specs[0])
        _check_counts(node, node.attrs["count"])
        return Spec((node.attrs["batch"],), _INT64, declared=False)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        step, index = arrays
        index[...] = _stream(node, step, node.attrs["count"], index.size)

    def scalars(self, node: Node) -> tuple[int, int, int]:
        return node.attrs["count"], node.attrs["seed"], int(node.attrs["shuffle"])

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None]


class TakeBatchOp(Op):
    """scale · samples[index] + shift in floats, in one kernel; no gradient.

    samples: (n, …) uint8 or float32. index: int32 or int64 of any shape; one out of range raises
    OutOfRangeError. scale, shift: (), or (c,) with a value for each of the c channels that a sample
    consists of, one after the other.
    """

    name = kernel = "take_batch"
    vocabulary = False
    signature = Signature("samples", "index", "scale", "shift")
    gathers = 1
    fallible = True
    any_dtype = (0, 1)

    def infer(self, node: Node, *specs: Spec) -> Spec:
        samples, index, scale, shift = specs
        if index.dtype is not None and index.dtype not in _INDICES:
            raise node.error(f"expected an index of int32 or int64, got {index.dtype}")
        dtype = _check_samples(node, samples, scale, shift)
        return Spec(index.shape + samples.shape[1:], dtype, scale.declared)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        samples, index, scale, shift, y = arrays
        check_range(node, "index", index, len(samples))
        rows = samples[index.reshape(-1)]
        _scaled(rows, scale, shift, y.reshape(rows.shape))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None] * 4


class ShuffledBatchOp(Op):
    """The next batch of a data set, (scale · samples + shift, labels), in one kernel: what
    `take_batch_op` and a gather make of `shuffled_index_op`. No gradient.

    samples: (n, …) uint8 or float32. labels: (n, …) of any dtype. step: one int64. scale, shift: as
    in `take_batch_op`.
    """

    name = kernel = "shuffled_batch"
    vocabulary = False
    outputs = 2
    gathers = 2
    any_dtype = (0, 1, 2)
    signature = Signature("samples", "labels", "step", "scale", "shift", "*", **BATCHES)

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, Spec]:
        samples, labels, step, scale, shift = specs
        _check_step(node, step)
        dtype = _check_samples(node, samples, scale, shift)
        if labels.shape[:1] != samples.shape[:1]:
            raise node.error(f"a label a sample is needed, got {describe(node, specs[:2])}")
        _check_counts(node, samples.shape[0])
        x, y = _batch_of(node, samples, labels)
        return x._replace(dtype=dtype, declared=scale.declared), y

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        samples, labels, step, scale, shift, x, y = arrays
        index = _stream(node, step, len(samples), len(x))
        _scaled(samples[index], scale, shift, x)
        y[...] = labels[index]

    def scalars(self, node: Node) -> tuple[int, int]:
        return node.attrs["seed"], int(node.attrs["shuffle"])

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None] * 5


class ShuffledRowsOp(Op):
    """The batch of a `shuffled_batch_op` as it is stored: (samples, labels), of uint8 and of any
    dtype. Inputs: samples, labels and step. Made by `fusion/uint8_inputs.py`; no gradient.
    """

    name = kernel = "shuffled_rows"
    signature = Signature("samples", "labels", "step", "*", **BATCHES)
    outputs = 2
    gathers = 2
    any_dtype = True

    def infer(self, node: Node, *specs: Spec) -> tuple[Spec, Spec]:
        return _batch_of(node, *specs[:2])

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        samples, labels, step, x, y = arrays
        index = _stream(node, step, len(samples), len(x))
        x[...] = samples[index]
        y[...] = labels[index]

    def scalars(self, node: Node) -> tuple[int, int]:
        return node.attrs["seed"], int(node.attrs["shuffle"])


class ScaledOp(Op):
    """scale · x of bytes x, one number for all: what kernels that read bytes take them for. It has
    no kernel of its own.
    """

    name = "scaled"
    signature = Signature("x", "scale")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        x, scale = specs
        return Spec(x.shape, _check_samples(node, x, scale, scale), scale.declared)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, scale, y = arrays
        _scaled(x, scale, np.zeros_like(scale), y)


def _batch_of(node: Node, samples: Spec, labels: Spec) -> tuple[Spec, Spec]:
    batch = (node.attrs["batch"],)
    return (
        samples._replace(shape=batch + samples.shape[1:]),
        labels._replace(shape=batch + labels.shape[1:]),
    )


def _check_step(node: Node, step: Spec) -> None:
    if step.size != 1 or step.dtype != _INT64:
        raise node.error(f"expected a step of one int64, got {step.dtype} {step.shape}")


def _check_counts(node: Node, count: int) -> None:
    batch = node.attrs["batch"]
    if not 1 <= count <= _MOST or batch < 1:
        raise GraphError(
            f"{node.op.name}: expected 1 to {_MOST} samples in batches of at least 1, got {count} "
            f"in batches of {batch} [{node.where}]"
        )


def _check_samples(node: Node, samples: Spec, scale: Spec, shift: Spec) -> np.dtype | None:
    """Refuses what cannot be scaled; the dtype of the result."""
    if samples.dtype is not None and samples.dtype not in _SAMPLES:
        raise node.error(f"expected samples of uint8 or float32, got {samples.dtype}")
    size = math.prod(samples.shape[1:])
    fits = samples.shape and scale.shape == shift.shape and len(scale.shape) <= 1 <= scale.size
    if not fits or size % scale.size:
        raise node.error(
            f"scale {scale.shape} and shift {shift.shape} do not fit samples of {samples.shape}; "
            "expected () or a value for each channel of a sample"
        )
    return floating(scale.dtype)


shuffled_index_op = ShuffledIndexOp()
take_batch_op = TakeBatchOp()
shuffled_batch_op = ShuffledBatchOp()
shuffled_rows_op = ShuffledRowsOp()
scaled_op = ScaledOp()

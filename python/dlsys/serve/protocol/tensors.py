"""Tensors of the Open Inference Protocol: their datatypes, as JSON numbers and as bytes."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import quoted
from ..faults import RequestError

# The protocol's names of dtypes. BYTES, which has no fixed size, is an output alone here.
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
}
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
_NUMBERS: dict[str, set[type]] = {
    "b": {bool},
    "u": {int},
    "i": {int},
    "f": {int, float},
}  # what JSON may have for each
_MOST_AXES = 32
_LITTLE = sys.byteorder == "little"


class TensorSpec(NamedTuple):
    """An input or an output of a model: its name, its datatype as the protocol writes it, and its
    extents with -1 for one that requests decide.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """As metadata has it."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}

    def check(self, datatype: Any, shape: Any) -> tuple[int, ...]:
        """The shape that a request gives this input. RequestError where it does not fit."""
        if datatype != self.datatype:
            raise RequestError(
                f"input {self.name} has datatype {self.datatype}, got {quoted(datatype)}"
            )
        is_list = isinstance(shape, (list, tuple)) and len(shape) <= _MOST_AXES
        if not is_list or not all(type(x) is int and 0 <= x < 2**40 for x in shape):
            raise RequestError(f"input {self.name}: shape {quoted(shape)} is no list of extents")
        fits = len(shape) == len(self.shape) and all(
            own in (-1, extent) for own, extent in zip(self.shape, shape)
        )
        if not fits or 0 in shape:
            raise RequestError(
                f"input {self.name} has shape {list(self.shape)}, where -1 is any extent above 0, "
                f"got {quoted(list(shape))}"
            )
        return tuple(shape)


def from_bytes(spec: TensorSpec, shape: tuple[int, ...], data: Any) -> np.ndarray:
    """An array of little-endian elements in row-major order. RequestError for another size."""
    dtype = DTYPES[spec.datatype]
    wanted = math.prod(shape) * dtype.itemsize
    if len(data) != wanted:
        raise RequestError(
            f"input {spec.name} of shape {list(shape)} has {wanted:,} bytes, got {len(data):,}"
        )
    array = np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape)
    if spec.datatype == "BOOL" and array.size and array.view(np.uint8).max() > 1:
        raise RequestError(f"input {spec.name}: a BOOL is a byte 0 or 1")
    return array


def from_numbers(spec: TensorSpec, shape: tuple[int, ...], data: Any) -> np.ndarray:
    """An array of the numbers of JSON, in one list or nested ones. RequestError for another count,
    for what are no numbers, and for those out of the datatype's range.
    """
    dtype, count = DTYPES[spec.datatype], math.prod(shape)
    flat = _flat(data, len(shape))
    if flat is None or set(map(type, flat)) - _NUMBERS[dtype.kind] or len(flat) != count:
        raise RequestError(
            f"input {spec.name} of shape {list(shape)} takes {count:,} numbers of {spec.datatype} "
            "in one list or nested ones, got others"
        )
    limits: Any = np.iinfo(dtype) if dtype.kind in "iu" else None
    try:
        if limits is not None and not limits.min <= min(flat) <= max(flat) <= limits.max:
            raise OverflowError
        with np.errstate(over="ignore"):  # a float32 beyond its range is infinite
            return np.array(flat, dtype).reshape(shape)
    except OverflowError:  # also of an integer that no float holds
        raise RequestError(
            f"input {spec.name}: a number is out of the range of {spec.datatype}"
        ) from None


def _flat(data: Any, depth: int) -> list[Any] | None:
    """The numbers of nested lists, as deep as the shape at most; None for anything else."""
    for _ in range(depth):
        if type(data) is not list or not data or type(data[0]) is not list:
            break
        if set(map(type, data)) != {list}:
            return None
        data = [*itertools.chain.from_iterable(data)]
    return data if type(data) is list else None


def to_numbers(array: np.ndarray) -> list[Any]:
    """The elements as JSON has them: one list, with null for NaN and infinities, which it lacks."""
    flat = array.reshape(-1)
    if array.dtype.kind == "f" and not np.isfinite(flat).all():
        return [x if math.isfinite(x) else None for x in flat.tolist()]
    return flat.tolist()


def to_bytes(array: np.ndarray) -> bytes:
    """The elements in little-endian, row-major order; texts with their lengths before them."""
    if array.dtype.kind == "O":
        parts = [text.encode() for text in array.reshape(-1)]
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    if _LITTLE and array.dtype.isnative:
        return array.tobytes()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def datatype_of(array: np.ndarray) -> str:
    """The protocol's name of an array's dtype."""
    return "BYTES" if array.dtype.kind == "O" else DATATYPES[array.dtype.newbyteorder("=")]


def top_classes(scores: np.ndarray, count: int, labels: Sequence[str]) -> np.ndarray:
    """The classification extension's texts (n, count), `score:index:label`, the highest first."""
    count = max(1, min(count, scores.shape[-1]))
    best = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    made = np.empty(best.shape, object)
    for position, index in np.ndenumerate(best):
        score = scores[position[:-1]][index]
        made[position] = f"{score:f}:{index}" + (f":{labels[index]}" if labels else "")
    return made

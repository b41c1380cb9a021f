"""Dtypes of values: numpy's, and bfloat16, which numpy lacks.

bfloat16 is a storage type of native devices: arrays there take two bytes an element, and kernels
compute in float32. numpy sees float32, so on `ctx=None` a value of it is computed and held in
float32. float16 is numpy's own, and a storage type of native devices likewise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
FLOAT16 = np.dtype(np.float16)
INT64 = np.dtype(np.int64)


class BFloat16:
    """The dtype bfloat16: the upper half of a float32. `bfloat16` is its only instance; it has the
    attributes of a np.dtype that the package reads, and is never equal to one.
    """

    name = "bfloat16"
    kind = "f"
    itemsize = 2

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name

    def newbyteorder(self, order: str) -> BFloat16:
        """Itself: no array of it is in another byte order."""
        return self

    @staticmethod
    def encode(values: Any) -> np.ndarray:
        """The bits of floats as uint16, rounded to nearest, ties to even; NaN stays NaN."""
        bits = np.asarray(values, FLOAT32, order="C").view(np.uint32)
        rounded = bits + (0x7FFF + (bits >> 16 & 1))
        exact = bits & 0x7FFFFFFF > 0x7F800000  # NaN, whose payload must not round away
        return np.asarray(np.where(exact, bits | 0x400000, rounded) >> 16, np.uint16)

    @staticmethod
    def decode(bits: np.ndarray) -> np.ndarray:
        """The float32 values of bits."""
        values = np.empty(np.shape(bits), FLOAT32)
        np.left_shift(bits, 16, out=values.view(np.uint32), dtype=np.uint32)
        return values


bfloat16 = BFloat16()
DType = np.dtype | BFloat16

# Floats that native kernels are written over; their arithmetic is in float32.
STORAGE: tuple[Any, ...] = (FLOAT32, bfloat16, FLOAT16)

# Half of the distance from 1 to the next larger value of the storage types of 16 bits.
ROUNDING: dict[Any, float] = {bfloat16: 2.0**-8, FLOAT16: 2.0**-11}


def as_dtype(value: Any) -> Any:
    """The dtype that a value names, as np.dtype does, and bfloat16 by its name."""
    if value is bfloat16 or isinstance(value, np.dtype):
        return value
    if getattr(value, "name", value) == bfloat16.name:
        return bfloat16
    return np.dtype(value)


def is_narrow(dtype: Any) -> bool:
    """True for the storage types of 16 bits; a dtype that is unknown is none of them."""
    return dtype is bfloat16 or (dtype is not None and dtype == FLOAT16)


def widened(dtype: Any) -> Any:
    """float32 for the storage types of 16 bits, else the dtype itself: that of sums, statistics and
    slots over values of a dtype.
    """
    return FLOAT32 if is_narrow(dtype) else dtype


def host(dtype: Any) -> np.dtype:
    """The dtype in which numpy holds values of a dtype."""
    return FLOAT32 if dtype is bfloat16 else dtype


def rounded(values: Any, dtype: Any) -> np.ndarray:
    """Values on the host in a dtype: an array of `host(dtype)` with what the dtype can hold."""
    if dtype is bfloat16:
        return bfloat16.decode(bfloat16.encode(values))
    return np.asarray(values, dtype)


def stored(values: Any, dtype: Any) -> np.ndarray:
    """The bytes of values in a dtype as a contiguous array: of it, or of uint16 for bfloat16."""
    if dtype is bfloat16:
        return bfloat16.encode(values)
    return np.ascontiguousarray(values, dtype)


def is_integral(dtype: Any) -> bool:
    """True for integers and truth values; a dtype that is unknown is neither."""
    return dtype is not None and dtype.kind in "iub"


def storage_dtype(dtypes: Iterable[Any]) -> Any:
    """The storage type of the floats of a call with arrays of these dtypes, which is part of its
    kernel's key: the first float of 16 bits, else float32.
    """
    for dtype in dtypes:
        if dtype is not FLOAT32 and is_narrow(dtype):
            return dtype
    return FLOAT32

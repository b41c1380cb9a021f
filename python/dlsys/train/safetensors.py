"""Reads and writes safetensors files: named arrays behind a JSON header, and nothing that runs.

A file is the header's length (8 bytes, little-endian), the header (JSON: for each name dtype, shape
and place of the data, and under `__metadata__` texts by name), and the data without gaps. Described
at https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError
from ..files import opened, replacing

_CODES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
_DTYPES = {code: np.dtype(text) for code, text in _CODES.items()}
_NAMES = {dtype: code for code, dtype in _DTYPES.items()}
_BFLOAT16 = np.dtype("<u2")  # numpy has none: read as the upper half of a float32
_MAX_HEADER = 100_000_000  # bytes; the format's own bound
_ALIGNMENT = 8  # of the data within the file, by spaces behind the header


class File(NamedTuple):
    """What a file holds: arrays by name and texts by name."""

    tensors: dict[str, np.ndarray]
    metadata: dict[str, str]


def write(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a file that is there as a whole or not at all; one of the same name stays until then.

    DataError for a dtype that the format does not have; OSError when the file cannot be written.
    """
    arrays = {name: little(name, array) for name, array in tensors.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, array in arrays.items():
        code, start, end = _NAMES[array.dtype], end, end + array.nbytes
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for array in arrays.values():
            file.write(array.data if array.size else b"")


def little(name: str, array: np.ndarray) -> np.ndarray:
    """An array as its bytes lie in a file: contiguous and little-endian."""
    dtype = np.asarray(array).dtype.newbyteorder("<")
    if dtype not in _NAMES:
        raise DataError(f"{name} is {dtype}, which safetensors cannot hold; expected numbers")
    return np.asarray(array, dtype, order="C")


def read(path: Path) -> File:
    """The file's arrays (writable, views of one buffer; bfloat16 becomes float32) and metadata.

    DataError, in one sentence, for what is no safetensors file, truncated or inconsistent.
    """
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = _header(path, file.read(8), size, file)
            data = bytearray(file.read())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    metadata = header.pop("__metadata__", {})
    if not _is_texts(metadata):
        raise DataError(f"{path}: the metadata of the safetensors header are no texts")
    places = {name: _place(path, name, entry) for name, entry in header.items()}
    _check_places(path, list(places.values()), len(data))
    tensors = {name: _array(place, data) for name, place in places.items()}
    return File(tensors, metadata)


class _Place(NamedTuple):
    code: str
    shape: tuple[int, ...]
    start: int
    end: int


def _header(path: Path, length: bytes, size: int, file: Any) -> dict[str, Any]:
    count = int.from_bytes(length, "little")
    if len(length) < 8 or not 2 <= count <= _MAX_HEADER:
        raise DataError(f"{path} is no safetensors file")
    if count > size - 8:
        raise DataError(f"{path} is truncated, or no safetensors file: its header is not whole")
    try:
        header = json.loads(file.read(count), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise DataError(f"{path} is no safetensors file: its header is no JSON") from None
    if not isinstance(header, dict):
        raise DataError(f"{path} is no safetensors file: its header is no JSON object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is there twice")
    return made


def _is_texts(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())


def _place(path: Path, name: str, entry: Any) -> _Place:
    try:
        code, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        right = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        right = False
    if not right:
        raise DataError(f"{path}: the entry of {name} in the safetensors header is malformed")
    if code not in _DTYPES and code != "BF16":
        raise DataError(f"{path}: {name} is {code}, expected one of {', '.join(_DTYPES)}, BF16")
    itemsize = _DTYPES.get(code, _BFLOAT16).itemsize
    if end - start != math.prod(shape) * itemsize:
        raise DataError(f"{path}: {name} {shape} of {code} does not have {end - start} bytes")
    return _Place(code, shape, start, end)


def _check_places(path: Path, places: list[_Place], size: int) -> None:
    """The arrays follow each other without gaps, up to the end of the file."""
    at = 0
    for place in sorted(places, key=lambda place: (place.start, place.end)):
        if place.start != at:
            raise DataError(f"{path}: the arrays in the safetensors file overlap or have gaps")
        at = place.end
    if at != size:
        what = "truncated" if size < at else "followed by something else"
        raise DataError(f"{path} is {what}: {size} bytes of data, expected {at}")


def _array(place: _Place, data: bytearray) -> np.ndarray:
    dtype = _DTYPES.get(place.code, _BFLOAT16)
    if place.end == place.start:
        return np.empty(place.shape, np.float32 if place.code == "BF16" else dtype)
    array = np.frombuffer(data, dtype, (place.end - place.start) // dtype.itemsize, place.start)
    if place.code == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.reshape(place.shape)

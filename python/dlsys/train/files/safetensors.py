"""Reads and writes safetensors files: named arrays behind a JSON header, and nothing that runs.

The format's own library reads and writes the arrays and checks the header: sizes, offsets and gaps.
This file adds what it leaves open: files that are complete or absent, numpy's dtypes,
and errors that name the file. The format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors as library
from safetensors import SafetensorError, deserialize, serialize
from safetensors.numpy import save

from ...dtypes import bfloat16
from ...errors import DataError, quoted
from ...files import opened, replacing

_CODES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
_DTYPES = {code: np.dtype(text) for code, text in _CODES.items()}
_Spec: Any = getattr(library, "TensorSpec", None)  # older ones take numpy's dtypes alone
_BFLOAT16 = np.dtype("<u2")  # numpy has none: read as the upper half of a float32


class File(NamedTuple):
    """The content of a file: arrays by name and texts by name."""

    tensors: dict[str, np.ndarray]
    metadata: dict[str, str]


def write(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    narrow: Container[str] = (),
) -> None:
    """Writes a file that is complete or absent; one of the same name stays until then.

    narrow: names of float32 arrays whose values are those of bfloat16; they are stored so where the
    library can, and are read as they were.

    DataError for a dtype that the format does not have; OSError when the file cannot be written.
    """
    arrays = {name: little(name, array) for name, array in tensors.items()}
    content = _serialized(arrays, narrow, dict(metadata) or None)
    with replacing(path) as file:
        file.write(content)


def little(name: str, array: np.ndarray) -> np.ndarray:
    """An array as its bytes lie in a file: contiguous and little-endian."""
    dtype = np.asarray(array).dtype.newbyteorder("<")
    if dtype not in _DTYPES.values():
        raise DataError(f"{name} is {dtype}, which safetensors cannot hold; expected a number type")
    return np.asarray(array, dtype, order="C")


def _serialized(
    arrays: Mapping[str, np.ndarray],
    narrow: Container[str],
    metadata: dict[str, str] | None = None,
) -> bytes:
    if _Spec is None or not any(name in narrow for name in arrays):
        return save(dict(arrays), metadata)
    stored = {
        name: bfloat16.encode(array).astype("<u2", copy=False) if name in narrow else array
        for name, array in arrays.items()
    }
    specs = {
        name: _Spec(
            dtype=bfloat16.name if name in narrow else array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in stored.items()
    }
    return bytes(serialize(specs, metadata))


def in_file_order(
    arrays: Mapping[str, np.ndarray], narrow: Container[str] = ()
) -> dict[str, np.ndarray]:
    """The arrays in the order in which `write` puts them and `read` returns them."""
    # The library orders by dtype and name; a file of nothing but names and dtypes shows how.
    stand_ins = {name: little(name, array).reshape(-1)[:0] for name, array in arrays.items()}
    return {name: arrays[name] for name in _header(_serialized(stand_ins, narrow))}


def read(path: Path) -> File:
    """The file's arrays (writable; bfloat16 becomes float32) in the file's order, and metadata.

    DataError, in one sentence, for what is no safetensors file, truncated or inconsistent.
    """
    content = _content(path)
    try:
        found = dict(deserialize(content))
        header = _header(content)
    except (SafetensorError, ValueError) as error:
        raise DataError(
            f"{path} is no safetensors file, or a damaged one: {_words(error)}"
        ) from None
    del content
    metadata = header.pop("__metadata__", None) or {}
    return File({name: _array(path, name, found.pop(name)) for name in header}, metadata)


def _content(path: Path) -> bytes:
    try:
        with opened(path) as file:
            return file.read()
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it does not fit into memory"
        raise DataError(f"{path}: {reason}") from None


def _header(content: bytes) -> dict[str, Any]:
    """The header of a file that the library has accepted. ValueError for a name that is twice."""
    return json.loads(
        content[8 : 8 + int.from_bytes(content[:8], "little")], object_pairs_hook=_unique
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is there twice")
    return made


def _words(error: Exception) -> str:
    text = str(error).removeprefix("Error while deserializing: ")
    return text if len(text) < 200 else f"{text[:200]}…"


def _array(path: Path, name: str, entry: Mapping[str, Any]) -> np.ndarray:
    code, shape = entry["dtype"], tuple(entry["shape"])
    if code not in _DTYPES and code != "BF16":
        expected = f"{', '.join(_DTYPES)}, BF16"
        raise DataError(f"{path}: {quoted(name)} is {code}, expected one of {expected}")
    array = np.frombuffer(entry["data"], _DTYPES.get(code, _BFLOAT16))
    if code == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    try:
        return array.reshape(shape)
    except ValueError as error:  # more axes, or longer ones, than numpy has
        raise DataError(f"{path}: {quoted(name)} is {quoted(shape)}: {error}") from None

"""State files of PyTorch, written without it: what `train.read_torch_file` reads."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import sys
import types
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

_STORAGES = {
    "<f4": "FloatStorage",
    "<i8": "LongStorage",
    "<f2": "HalfStorage",
    "|b1": "BoolStorage",
}


def write(path: Path, arrays: Mapping[str, np.ndarray], around: str = "") -> None:
    """Writes the ZIP archive of PyTorch 1.6 and later; `around` puts the state under a key."""
    pickled, stored = _pickled(arrays, around)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("made/data.pkl", pickled)
        for key, array in stored.items():
            archive.writestr(f"made/data/{key}", array.tobytes())


def write_stream(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the format before PyTorch 1.6."""
    pickled, stored = _pickled(arrays, "")
    with open(path, "wb") as file:
        for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
            pickle.dump(value, file, 2)
        file.write(pickled)
        pickle.dump(list(stored), file, 2)
        for array in stored.values():
            file.write(struct.pack("<q", array.size) + array.tobytes())


class _Storage:
    def __init__(self, key: str, array: np.ndarray) -> None:
        self.key, self.array = key, array


class _Tensor:
    def __init__(self, storage: _Storage) -> None:
        self.storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        array = self.storage.array
        strides = tuple(n // array.itemsize for n in array.strides)
        rebuild = sys.modules["torch._utils"]._rebuild_tensor_v2
        return rebuild, (self.storage, 0, array.shape, strides, False, None)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        kind = getattr(sys.modules["torch"], _STORAGES[value.array.dtype.str])
        return "storage", kind, value.key, "cpu", value.array.size


def _pickled(arrays: Mapping[str, np.ndarray], around: str) -> tuple[bytes, dict[str, np.ndarray]]:
    stored = {str(k): np.ascontiguousarray(array) for k, array in enumerate(arrays.values())}
    state: Any = {name: _Tensor(_Storage(*pair)) for name, pair in zip(arrays, stored.items())}
    output = io.BytesIO()
    with _names_of_pytorch():
        _Pickler(output, 2).dump({around: state, "epoch": 3} if around else state)
    return output.getvalue(), stored


@contextlib.contextmanager
def _names_of_pytorch() -> Iterator[None]:
    """Modules with the names that a state's pickle has, whether PyTorch is installed or not."""

    def _rebuild_tensor_v2() -> None:
        """Stands for PyTorch's."""

    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in _STORAGES.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))
    _rebuild_tensor_v2.__module__ = "torch._utils"
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2  # type: ignore[attr-defined]
    torch._utils = utils  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"torch": torch, "torch._utils": utils}):
        yield

"""State files of PyTorch, read without PyTorch and without running any code that a file names.

A state file is a pickle beside the bytes of its arrays: since PyTorch 1.6 in a ZIP archive, before
in one stream. A pickle may name any function, so that an unpickler for these files alone knows the
few names that states are made of, and refuses others.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from ...dtypes import bfloat16
from ...errors import DataError, quoted
from ...files import opened

# The first pickle of a stream, a number, and the second one, the version of the format.
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_MOST_PICKLED = 1 << 26  # bytes of the pickle alone, of which real ones have some 100,000
_DTYPES: dict[str, Any] = {
    "DoubleStorage": np.dtype("<f8"), "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"), "BFloat16Storage": bfloat16,
    "LongStorage": np.dtype("<i8"), "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"), "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"), "BoolStorage": np.dtype("?"),
}  # fmt: skip


class _Kind(NamedTuple):
    """The dtype that the name of a storage stands for."""

    dtype: Any

    @property
    def stored(self) -> np.dtype[Any]:
        """The dtype that numpy reads it with."""
        return np.dtype("<u2") if self.dtype is bfloat16 else self.dtype


class _Storage(NamedTuple):
    """A row of numbers that arrays are parts of, whose bytes lie elsewhere in the file."""

    key: str
    kind: _Kind
    size: int


class _Tensor(NamedTuple):
    """An array: a view of a storage; strides count elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_file(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a PyTorch state file, `model.state_dict()` as `torch.save` writes it, by name.

    PyTorch is not needed: an unpickler that knows the parts of such files alone reads them, so that
    a file runs no code. Arrays of bfloat16 become float32. A dictionary around the state, under
    "state_dict" or "model", is looked through; what else a checkpoint has is left out.

    path: of a file of any version of PyTorch. DataError where it is none, is damaged, or has no
    arrays by name; what torch.save wrote of a whole model, and not of its state, is refused.
    """
    path = Path(path)
    try:
        with opened(path) as file:
            return _arrays(str(path), file)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except DataError:
        raise
    # Damaged pickles raise what their instructions stumble over: IndexError, KeyError, TypeError …
    except Exception as error:
        raise DataError(f"{path} is no PyTorch state file, or is damaged: {error}") from None


def _arrays(what: str, file: IO[bytes]) -> dict[str, np.ndarray]:
    start = file.read(4)
    file.seek(0)
    read = _read_archive if start == b"PK\3\4" else _read_stream
    found, storages = read(what, file)
    while isinstance(found, Mapping) and not _tensors(found):
        inner = [found[key] for key in ("state_dict", "model") if key in found]
        if not inner:
            break
        found = inner[0]
    tensors = _tensors(found)
    if not tensors:
        raise DataError(f"{what} has no arrays by name: save model.state_dict() with torch.save")
    return {name: _array(what, tensor, storages) for name, tensor in tensors.items()}


def _tensors(found: Any) -> dict[str, _Tensor]:
    if not isinstance(found, Mapping):
        return {}
    return {str(name): value for name, value in found.items() if isinstance(value, _Tensor)}


def _array(what: str, tensor: _Tensor, storages: Mapping[str, np.ndarray]) -> np.ndarray:
    """The values of a tensor, copied out of its storage."""
    values = storages[tensor.storage.key]
    negative = min((tensor.offset, *tensor.shape, *tensor.strides)) < 0
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides))
    size = int(np.prod([n for n, s in zip(tensor.shape, tensor.strides) if s], dtype=object))
    if negative or len(tensor.shape) != len(tensor.strides) or size > values.size:
        raise DataError(f"{what} is damaged: an array is larger than what is stored of it")
    if 0 in tensor.shape:
        return np.zeros(tensor.shape, values.dtype)
    if tensor.offset + reach >= values.size:
        raise DataError(f"{what} is damaged: an array ends behind what is stored of it")
    if tensor.storage.kind.dtype is bfloat16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    strides = [s * values.itemsize for s in tensor.strides]
    view = np.lib.stride_tricks.as_strided(values[tensor.offset :], tensor.shape, strides)
    return view.copy()


# ---- the two formats ----
def _read_archive(what: str, file: IO[bytes]) -> tuple[Any, dict[str, np.ndarray]]:
    """PyTorch's ZIP archive: NAME/data.pkl and NAME/data/KEY, uncompressed."""
    try:
        with zipfile.ZipFile(file) as archive:
            pickled = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(pickled) != 1:
                raise DataError(f"{what} is a ZIP archive, but none of PyTorch's")
            folder = pickled[0].removesuffix("data.pkl")
            if archive.getinfo(pickled[0]).file_size > _MOST_PICKLED:
                raise DataError(f"{what} is damaged: its pickle is far too large")
            reader = _Reader(io.BytesIO(archive.read(pickled[0])))
            found = reader.load()
            storages = {}
            for key, storage in reader.storages.items():
                info = archive.getinfo(f"{folder}data/{key}")
                nbytes = storage.size * storage.kind.stored.itemsize
                if info.file_size != nbytes or info.compress_type != zipfile.ZIP_STORED:
                    raise DataError(f"{what} is damaged: {key} has not its {nbytes:,} bytes")
                storages[key] = np.frombuffer(archive.read(info), storage.kind.stored)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{what} is damaged: {error}") from None
    return found, storages


def _read_stream(what: str, file: IO[bytes]) -> tuple[Any, dict[str, np.ndarray]]:
    """The format before PyTorch 1.6: five pickles, then each storage's count and bytes."""
    if _Reader(file).load() != _MAGIC or _Reader(file).load() != _PROTOCOL:
        raise DataError(f"{what} is no PyTorch state file")
    if not _Reader(file).load()["little_endian"]:
        raise DataError(f"{what} was written on a big-endian machine: save it again on another")
    reader = _Reader(file)
    found, keys = reader.load(), _Reader(file).load()
    storages = {}
    for key in keys:
        storage = reader.storages[key]
        (count,) = struct.unpack("<q", file.read(8))
        nbytes = storage.size * storage.kind.stored.itemsize
        content = file.read(nbytes) if count == storage.size else b""
        if len(content) != nbytes:
            raise DataError(f"{what} is damaged: it ends within its arrays, fetch it again")
        storages[key] = np.frombuffer(content, storage.kind.stored)
    return found, storages


class _Reader(pickle.Unpickler):
    """An unpickler that knows what states are made of, and nothing else."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The few names that a state has. DataError for others, of which none is looked up."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return _tensor
        if module == "torch._utils" and name == "_rebuild_parameter":
            return _parameter
        if module in ("torch", "torch.storage") and name in _DTYPES:
            return _Kind(_DTYPES[name])
        raise DataError(
            f"the file is no state alone: it names {quoted(f'{module}.{name}')}, which is not run "
            "here; save model.state_dict() with torch.save"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage that a tensor is a view of."""
        word, kind, key, _, count, *view = pid
        if word != "storage" or not isinstance(kind, _Kind) or any(view) or not 0 <= count:
            raise DataError("the file names a storage in a way that states do not have")
        return self.storages.setdefault(str(key), _Storage(str(key), kind, int(count)))


def _tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _Tensor:
    return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _parameter(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor

"""CIFAR-10 in its Python version: pickles of dictionaries, read without running what they name.

A batch is a dictionary with the pixels, a uint8 array (n, 3072), under `data` and a list of labels
under `labels`. An unpickler that knows the parts of a numpy array alone reads it.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...errors import DataError, quoted
from ...files import opened
from ..dataset import Split

FOLDER = "cifar-10-batches-py"
FILES = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")
_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")


class _Array:
    """The parts of an array as a pickle gives them."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _Dtype(_Array):
    """Those of a dtype."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code = code.decode() if isinstance(code, bytes) else str(code)


def read_cifar_pickle(path: Path, sample: tuple[int, ...], classes: int, count: int) -> Split:
    """The images (count, *sample) uint8 and labels (count,) int64 of a batch. DataError, naming the
    file, for what is none.
    """
    try:
        with opened(path) as file:
            found = _Reader(file, encoding="bytes").load()
        pixels, labels = _pixels(found[b"data"]), np.asarray(found[b"labels"], np.int64)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # damaged pickles raise what their instructions stumble over
        raise DataError(f"{path}: no batch of CIFAR-10's Python version ({error})") from None
    good = pixels.shape == (count, int(np.prod(sample))) and labels.shape == (count,)
    if not good or labels.min() < 0 or labels.max() >= classes:
        raise DataError(
            f"{path}: expected {count} images with labels below {classes}, got pixels "
            f"{pixels.shape} and labels {labels.shape}; fetch the file again"
        )
    return Split(pixels.reshape(-1, *sample), labels)


def _pixels(found: Any) -> np.ndarray:
    """The array that an unpickled _Array describes."""
    _, shape, dtype, in_columns, content = found.state
    if dtype.code not in ("u1", "|u1") or in_columns or not isinstance(content, bytes):
        raise ValueError(f"its pixels are {quoted(dtype.code)}, expected rows of uint8")
    return np.frombuffer(content, np.uint8).reshape(shape)


class _Reader(pickle.Unpickler):
    """An unpickler that knows the parts of an array, and nothing else."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        super().__init__(file, encoding=encoding)

    def find_class(self, module: str, name: str) -> Any:
        """The few names of an array. DataError for others, of which none is looked up."""
        if module in _MODULES and name in ("_reconstruct", "ndarray", "dtype"):
            return {"_reconstruct": _reconstruct, "ndarray": _Array, "dtype": _Dtype}[name]
        if (module, name) == ("_codecs", "encode"):
            return _encode
        raise DataError(f"it names {quoted(f'{module}.{name}')}, which is not run here")


def _reconstruct(kind: Any, *_: Any) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    """Bytes as pickles of protocol 2 that Python 3 writes have them."""
    if encoding not in ("latin1", b"latin1"):
        raise ValueError("bytes in an encoding that no batch has")
    return text.encode("latin1")

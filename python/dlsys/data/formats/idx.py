"""IDX, the file format of MNIST, as Yann LeCun's MNIST page describes it.

Two zero bytes, a byte for the element type, a byte for the number of dimensions, each dimension as
an unsigned 32-bit integer, then the elements in row-major order; everything is big endian.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...errors import DataError
from ...files import opened, replacing

_TYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype("u1"),
    0x09: np.dtype("i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
Stream = IO[bytes] | gzip.GzipFile

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_NDIM = 32  # of numpy before 2.0
# A block of deflate holds at most 1032 bytes for each of its own. Data hold a fraction of that, and
# a small file must not fill the memory: beyond so many bytes a smaller ratio is believed.
_DEFLATE_MAX_RATIO = 1032
_DATA_MAX_RATIO = 64
_ANY_RATIO_NBYTES = 1 << 28
_CHUNK_NBYTES = 1 << 20


def is_gzip(path: Path) -> bool:
    """True if the file is packed, judged by its content, not its name."""
    with opened(path) as file:
        return file.read(2) == _GZIP_MAGIC


def read_idx(
    path: str | os.PathLike[str],
    *,
    shape: tuple[int, ...] | None = None,
    sha256: str | None = None,
) -> np.ndarray[Any, Any]:
    """The array that an IDX file holds, in native byte order.

    The file may be plain or gzip; its content decides, not its name. `shape` and `sha256` (of the
    uncompressed bytes, in hex) are what the caller expects.

    Raises DataError, naming the file, where it is truncated, corrupt, not IDX, longer than its
    header says, or not what the caller expects; the header is checked before memory is taken.
    Raises OSError where the file cannot be opened or read.
    """
    path = Path(path)
    with opened(path) as raw:
        packed = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        nbytes = os.fstat(raw.fileno()).st_size
        with gzip.GzipFile(fileobj=raw) if packed else nullcontext(raw) as stream:
            try:
                return _read(path, stream, nbytes, packed, shape, sha256)
            except EOFError:
                raise DataError(f"{path}: the gzip data ends early; fetch the file again") from None
            except (gzip.BadGzipFile, zlib.error) as error:
                raise DataError(
                    f"{path}: the gzip data is corrupt ({error}); fetch the file again"
                ) from None


def _read(
    path: Path,
    stream: Stream,
    file_nbytes: int,
    packed: bool,
    shape: tuple[int, ...] | None,
    sha256: str | None,
) -> np.ndarray[Any, Any]:
    header, dtype, found = _read_header(path, stream)
    if shape is not None and found != shape:
        raise DataError(
            f"{path}: expected an array of shape {shape}, the file holds {found}; "
            f"does it bear another file's name?"
        )
    nbytes = math.prod(found) * dtype.itemsize
    available = _unpacked_at_most(file_nbytes) if packed else file_nbytes - len(header)
    if nbytes > available:
        at_most = "at most " if packed else ""
        unpack = "; unpack it first if that is right" if packed else ""
        raise DataError(
            f"{path}: the file is truncated: its header {found} {dtype.name} asks for {nbytes} "
            f"bytes, there are {at_most}{available}{unpack}"
        )
    digest = hashlib.sha256(header)
    try:
        array = np.empty(found, dtype)
    except (ValueError, MemoryError) as error:
        raise DataError(f"{path}: its header asks for an array {found}: {error}") from None
    _read_elements(path, stream, array, digest)
    if stream.read(1):
        raise DataError(f"{path}: bytes follow the {nbytes} that its header {found} asks for")
    if sha256 is not None and digest.hexdigest() != sha256:
        raise DataError(
            f"{path}: the content is not the expected one: its SHA-256 is {digest.hexdigest()}, "
            f"expected {sha256}; fetch the file again"
        )
    return array.astype(dtype.newbyteorder("="), copy=False)


def _unpacked_at_most(file_nbytes: int) -> int:
    """The bytes that a packed file is believed to hold."""
    most = min(file_nbytes * _DEFLATE_MAX_RATIO, _ANY_RATIO_NBYTES)
    return max(most, file_nbytes * _DATA_MAX_RATIO)


def _read_header(path: Path, stream: Stream) -> tuple[bytes, np.dtype[Any], tuple[int, ...]]:
    magic = stream.read(4)
    if len(magic) < 4:
        raise DataError(f"{path}: the file is truncated: {len(magic)} bytes are too few for IDX")
    zeros, code, ndim = magic[:2], magic[2], magic[3]
    if zeros != b"\0\0" or code not in _TYPES or not 1 <= ndim <= _MAX_NDIM:
        raise DataError(f"{path}: not an IDX file: it starts with the bytes {magic.hex(' ')}")
    sizes = stream.read(4 * ndim)
    if len(sizes) < 4 * ndim:
        raise DataError(f"{path}: the file is truncated within its {ndim} dimensions")
    shape = tuple(int(n) for n in np.frombuffer(sizes, ">u4"))
    return magic + sizes, _TYPES[code], shape


def _read_elements(path: Path, stream: Stream, array: np.ndarray[Any, Any], digest: Any) -> None:
    target = array.reshape(-1).view(np.uint8)
    start = 0
    while start < len(target):
        chunk = stream.read(min(_CHUNK_NBYTES, len(target) - start))
        if not chunk:
            raise DataError(
                f"{path}: the file is truncated: {start} of {len(target)} bytes of elements came"
            )
        digest.update(chunk)
        target[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)
        start += len(chunk)


def write_idx(path: str | os.PathLike[str], array: np.ndarray[Any, Any]) -> None:
    """Writes `array` as an IDX file, gzip if the name ends in `.gz`; equal arrays give equal bytes.

    Raises DataError for a dtype or a shape that IDX does not have: it has uint8, int8, int16,
    int32, float32 and float64, 1 to 32 dimensions of less than 2**32 each.
    """
    path = Path(path)
    stored = array.dtype.newbyteorder(">")
    code = next((code for code, dtype in _TYPES.items() if dtype == stored), None)
    if code is None:
        names = ", ".join(dtype.name for dtype in _TYPES.values())
        raise DataError(f"{path}: IDX has no {array.dtype}; it has {names}")
    if not 1 <= array.ndim <= _MAX_NDIM or max(array.shape) >= 1 << 32:
        raise DataError(f"{path}: IDX has no shape {array.shape}")
    header = bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    with replacing(path) as file:
        packed = path.suffix == ".gz"
        stream = gzip.GzipFile("", "wb", 9, file, 0) if packed else nullcontext(file)
        with stream as output:
            output.write(header)
            output.write(np.ascontiguousarray(array, stored).tobytes())

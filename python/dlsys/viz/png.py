"""PNG files of small images, for which no package is needed."""

from __future__ import annotations

import struct
import zlib

import numpy as np

_RGBA = 6  # the color type of red, green, blue and opacity


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of an image (H, W, 4) of uint8: red, green, blue, opacity.

    Source: Portable Network Graphics specification (W3C, third edition), sections 5 and 11.
    """
    height, width, _ = pixels.shape
    rows = pixels.reshape(height, -1)
    filtered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)  # filter 0: none
    header = struct.pack(">IIBBBBB", width, height, 8, _RGBA, 0, 0, 0)
    data = zlib.compress(filtered.tobytes(), 9)
    chunks = (b"IHDR", header), (b"IDAT", data), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

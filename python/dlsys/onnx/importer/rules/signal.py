"""Signals: windows, Fourier transforms and mel weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..call import Call
from ..registry import host
from ..walk import guard
from .elementwise import dtype_of, wide


def _window(name: str, terms: tuple[float, ...]) -> None:
    """Registers a cosine sum Σ (-1)^k a_k cos(2π k n / N)."""

    @host(name, dynamic=True)
    def compute(call: Call, size: np.ndarray) -> np.ndarray:
        n = int(np.ravel(size)[0])
        guard((n,))
        count = n if call.get("periodic", 1) else n - 1
        k = 2 * np.pi * np.arange(n) / max(count, 1)
        made = sum((-1) ** j * a * np.cos(j * k) for j, a in enumerate(terms))
        return np.asarray(made).astype(dtype_of(call.get("output_datatype", 1)))


_window("HannWindow", (0.5, 0.5))
_window("HammingWindow", (25 / 46, 21 / 46))
_window("BlackmanWindow", (0.42, 0.5, 0.08))


def _complex(x: np.ndarray) -> np.ndarray:
    """(…, 1) or (…, 2) as complex numbers (…)."""
    w = wide(x)
    return w[..., 0] + (1j * w[..., 1] if x.shape[-1] == 2 else 0)


def _pairs(z: np.ndarray, dtype: Any) -> np.ndarray:
    return np.stack([z.real, z.imag], -1).astype(dtype)


@host("DFT", dynamic=True)
def _dft(call: Call, x: np.ndarray, length: Any = None, axis: Any = None) -> np.ndarray:
    at = int(np.ravel(axis)[0]) if axis is not None else (
        call.get("axis", 1) if call.version < 20 else -2)  # fmt: skip
    at %= x.ndim
    n = x.shape[at] if length is None else int(np.ravel(length)[0])
    guard((n,))
    onesided, inverse = call.get("onesided", 0), call.get("inverse", 0)
    z = _complex(x)
    if inverse and onesided:
        return np.fft.irfft(z, n if length is not None else None, at)[..., None].astype(x.dtype)
    f: Callable[..., np.ndarray] = np.fft.ifft if inverse else np.fft.fft
    made = f(z, n, at)
    return _pairs(np.take(made, range(n // 2 + 1), at) if onesided else made, x.dtype)


@host("STFT", dynamic=True)
def _stft(
    call: Call, x: np.ndarray, step: Any, window: Any = None, length: Any = None
) -> np.ndarray:
    n = len(window) if length is None else int(np.ravel(length)[0])
    hop = int(np.ravel(step)[0])
    if hop < 1 or n < 1:
        raise call.error(f"frames of {n} each {hop}")
    z = _complex(x) if x.ndim == 3 else wide(x)
    frames = [z[:, k : k + n] for k in range(0, z.shape[1] - n + 1, hop)]
    stacked = np.stack(frames, 1) * (1 if window is None else wide(window))
    made = np.fft.fft(stacked, axis=-1)
    return _pairs(made[..., : n // 2 + 1] if call.get("onesided", 1) else made, x.dtype)


@host("MelWeightMatrix", dynamic=True)
def _mel(call: Call, bins: Any, size: Any, rate: Any, low: Any, high: Any) -> np.ndarray:
    count, n, hertz = (int(np.ravel(v)[0]) for v in (bins, size, rate))
    a, b = (2595 * np.log10(1 + float(np.ravel(v)[0]) / 700) for v in (low, high))
    guard((n // 2 + 1, count))
    mels = np.arange(count + 2) * ((b - a) / (count + 2)) + a
    edges = ((n + 1) * (700 * (10 ** (mels / 2595) - 1)) // hertz).astype(int)
    made = np.zeros((n // 2 + 1, count))
    for k in range(count):
        left, center, right = edges[k : k + 3]
        for j in range(left, center + 1):
            made[j, k] = 1 if center == left else (j - left) / (center - left)
        for j in range(center + 1, right):
            made[j, k] = (right - j) / (right - center)
    return made.astype(dtype_of(call.get("output_datatype", 1)))

"""What a GPU did, and when: its kernels and copies, and the host's calls of CUDA, those of the
runtime and those of the driver that they end in or that libraries make, by CUPTI.

    with cupti.Trace() as trace:
        ...  # make executors here: a graph that was captured before may be one activity
    trace.activities, trace.calls

Records are read at the offsets of CUPTI 13's cupti_activity.h, which earlier releases share.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_SONAMES = ("libcupti.so.13", "libcupti.so.12", "libcupti.so")
# CUpti_ActivityKind, kernels side by side
_MEMCPY, _MEMSET, _DRIVER, _RUNTIME, _KERNEL = _KINDS = 1, 2, 4, 5, 10
_DOMAINS = {_DRIVER: 1, _RUNTIME: 2}  # CUpti_CallbackDomain
_START, _END, _NAME = 16, 24, 104  # bytes in a record of a kernel; copies share the first two
_CALL, _CALL_START, _CALL_END = 4, 8, 16  # in that of a call
_WAY = 4  # in that of a copy
_BUFFER = 8 << 20  # bytes
_WAYS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}  # CUpti_ActivityMemcpyKind

_Requested = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)  # fmt: skip
_Completed = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class Activity(NamedTuple):
    """One activity of the GPU, or a call, from start to end, in microseconds."""

    name: str
    start: float
    end: float


class Trace:
    """Collects what happens while it is open; the lists are complete, and sorted, behind it.

    Raises OSError without libcupti, RuntimeError where CUPTI refuses, as it does where another
    profiler has it.
    """

    def __init__(self) -> None:
        self.activities: list[Activity] = []
        self.calls: list[Activity] = []
        self._cupti = _library()
        self._buffers: dict[int, Any] = {}  # by address, as long as CUPTI has them
        # CUPTI calls these as long as the process lives.
        self._callbacks = _Requested(self._requested), _Completed(self._completed)

    def __enter__(self) -> Trace:
        _alive.append(self)
        self._check("cuptiActivityRegisterCallbacks", *self._callbacks)
        for kind in _KINDS:
            self._check("cuptiActivityEnable", kind)
        return self

    def __exit__(self, *error: object) -> None:
        for kind in _KINDS:
            self._check("cuptiActivityDisable", kind)
        self._check("cuptiActivityFlushAll", 1)
        for found in (self.activities, self.calls):
            found.sort(key=lambda each: each.start)

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cupti, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cupti.cuptiGetResultString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'').decode()} ({status})")

    def _requested(self, buffer: Any, nbytes: Any, most: Any) -> None:
        made = ctypes.create_string_buffer(_BUFFER)
        buffer[0] = ctypes.addressof(made)
        nbytes[0], most[0] = _BUFFER, 0  # as many records as it holds
        self._buffers[ctypes.addressof(made)] = made

    def _completed(self, context: Any, stream: int, buffer: int, nbytes: int, valid: int) -> None:
        for kind, at in self._records(buffer, valid):
            if kind in _DOMAINS:
                call = ctypes.c_uint32.from_address(at + _CALL).value
                span = _us(at + _CALL_START), _us(at + _CALL_END)
                self.calls.append(Activity(self._call_name(_DOMAINS[kind], call), *span))
            elif kind == _KERNEL:
                name = ctypes.c_char_p.from_address(at + _NAME).value or b""
                self.activities.append(Activity(_demangled(name), _us(at + _START), _us(at + _END)))
            elif kind in (_MEMCPY, _MEMSET):
                way = _WAYS.get(ctypes.c_uint8.from_address(at + _WAY).value, "of another kind")
                name = f"Memcpy {way}" if kind == _MEMCPY else "Memset"
                self.activities.append(Activity(name, _us(at + _START), _us(at + _END)))
        self._buffers.pop(buffer, None)

    def _records(self, buffer: int, valid: int) -> Iterator[tuple[int, int]]:
        """The kind and address of each record."""
        record = ctypes.c_void_p()
        following = self._cupti.cuptiActivityGetNextRecord
        at, size = ctypes.c_void_p(buffer), ctypes.c_size_t(valid)
        while valid and not following(at, size, ctypes.byref(record)):
            assert record.value is not None
            yield ctypes.c_uint32.from_address(record.value).value, record.value

    def _call_name(self, domain: int, call: int) -> str:
        name = ctypes.c_char_p()
        self._cupti.cuptiGetCallbackName(domain, call, ctypes.byref(name))
        return re.sub(r"_v\d+$", "", (name.value or b"").decode())


_alive: list[Trace] = []


def _us(at: int) -> float:
    """A time in microseconds, where there is one in nanoseconds."""
    return ctypes.c_uint64.from_address(at).value * 1e-3


def _library() -> Any:
    """libcupti: of the system, of NVIDIA's wheels, or of the toolkit."""
    beside = [Path(entry) / "nvidia" for entry in sys.path if entry]
    folders = [*filter(None, os.environ.get("DLSYS_CUDA_LIBRARY_PATH", "").split(":"))]
    folders += [str(path) for root in beside for path in sorted(root.glob("*/lib"))]
    folders += ["/usr/local/cuda/extras/CUPTI/lib64", "/usr/local/cuda/lib64"]
    for path in (*_SONAMES, *(f"{folder}/{name}" for folder in folders for name in _SONAMES)):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise OSError("libcupti is nowhere: pip install nvidia-cuda-cupti, or install the toolkit")


def _demangled(name: bytes) -> str:
    """A C++ name as it is written."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(name, None, None, ctypes.byref(status))
    if not text:
        return name.decode()
    try:
        return (ctypes.string_at(text)).decode()
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(text))

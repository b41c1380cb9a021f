"""What benchmarks/shared/cupti.py reads from records of CUPTI, at the offsets of its header."""

from __future__ import annotations

import ctypes
import struct
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from shared import cupti
from shared.cupti import Activity

KERNEL, COPY, CALL, DRIVER, MARKER = 10, 1, 5, 4, 12  # CUpti_ActivityKind
HOST_TO_DEVICE = 1


class Library:
    """CUPTI's reader of a buffer, whose records have one size here, and its names of calls."""

    size = 120

    def cuptiActivityGetNextRecord(self, buffer: Any, size: Any, record: Any) -> int:
        at = ctypes.cast(record, ctypes.POINTER(ctypes.c_void_p))
        following = buffer.value if at[0] is None else at[0] + self.size
        if following >= buffer.value + size.value:
            return 12  # CUPTI_ERROR_MAX_LIMIT_REACHED
        at[0] = following
        return 0

    def cuptiGetCallbackName(self, domain: int, call: int, name: Any) -> None:
        of = {1: b"cu", 2: b"cuda"}[domain]  # CUPTI_CB_DOMAIN_DRIVER_API and _RUNTIME_API
        ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = of + b"Call%d_v3020" % call


class Records(unittest.TestCase):
    def test_kernels_copies_and_calls(self) -> None:
        name = ctypes.create_string_buffer(b"_Z3sumPf")
        kernel = struct.pack("=IIQQQ", KERNEL, 0, 0, 5000, 7000).ljust(104, b"\0")
        kernel += struct.pack("=Q", ctypes.addressof(name))
        copy = struct.pack("=IB11xQQ", COPY, HOST_TO_DEVICE, 1000, 2500)
        call = struct.pack("=IIQQ", CALL, 7, 100, 900)
        driver = struct.pack("=IIQQ", DRIVER, 8, 200, 800)
        marker = struct.pack("=I", MARKER)
        records = kernel, copy, call, driver, marker
        found = b"".join(each.ljust(Library.size, b"\0") for each in records)
        buffer = ctypes.create_string_buffer(found, len(found))
        with mock.patch.object(cupti, "_library", Library):
            trace = cupti.Trace()
        trace._completed(None, 0, ctypes.addressof(buffer), len(found), len(found))
        wanted = [Activity("sum(float*)", 5.0, 7.0), Activity("Memcpy HtoD", 1.0, 2.5)]
        self.assertEqual(trace.activities, wanted)
        calls = [Activity("cudaCall7", 0.1, 0.9), Activity("cuCall8", 0.2, 0.8)]
        self.assertEqual(trace.calls, calls)

    def test_a_refusal_is_told(self) -> None:
        def text(status: int, told: Any) -> None:
            ctypes.cast(told, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUPTI_ERROR_MULTIPLE"

        library = SimpleNamespace(
            cuptiActivityRegisterCallbacks=lambda *callbacks: 39, cuptiGetResultString=text
        )
        with mock.patch.object(cupti, "_library", lambda: library):
            trace = cupti.Trace()
        with self.assertRaisesRegex(RuntimeError, r"Callbacks: CUPTI_ERROR_MULTIPLE \(39\)"):
            trace.__enter__()


if __name__ == "__main__":
    unittest.main()

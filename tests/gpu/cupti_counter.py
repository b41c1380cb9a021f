"""CUDA calls of this process, counted by CUPTI; cupti_counter.cc is compiled on the spot.

Nothing here imports dlsys, so that counting can start before anything touches CUDA.
"""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("cupti_counter.cc")
NAMES = (
    "runtime_allocations",
    "driver_allocations",
    "host_allocations",
    "kernel_launches",
    "graph_launches",
    "synchronizations",
)


class CuptiMissing(RuntimeError):
    """CUPTI, its headers or a compiler is not there; the text says which."""


def _roots() -> list[str]:
    named = [os.environ.get("CUDA_HOME", ""), *sorted(glob.glob("/usr/local/cuda*"), reverse=True)]
    wheels = [
        root for entry in sys.path for root in sorted(glob.glob(f"{entry}/nvidia/*"), reverse=True)
    ]
    return [root for root in [*named, *wheels] if root]


def _find(kind: str, pattern: str) -> list[str]:
    """Files of a kind ("include" or "lib*") that match, in every layout of toolkits and wheels."""
    folders = (f"extras/CUPTI/{kind}", kind, f"targets/x86_64-linux/{kind}")
    return [
        path
        for root in _roots()
        for folder in folders
        for path in sorted(glob.glob(os.path.join(root, folder, pattern)))
    ]


def build(folder: Path) -> Path:
    """Compiles the counter into `folder`.

    Raises:
        CuptiMissing: a header, the library or a compiler is missing, or they do not fit.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    headers, libraries = _find("include", "cupti.h"), _find("lib*", "libcupti.so*")
    toolkits = _find("include", "cuda_runtime_api.h")
    if compiler is None:
        raise CuptiMissing("no C++ compiler here (g++, clang++)")
    if not headers or not libraries or not toolkits:
        wanted = {"cupti.h": headers, "libcupti.so": libraries, "cuda_runtime_api.h": toolkits}
        missing = ", ".join(name for name, found in wanted.items() if not found)
        raise CuptiMissing(f"no {missing} in {', '.join(_roots()) or 'any CUDA folder'}")
    out, library = folder / "libcupti_counter.so", libraries[0]
    includes = dict.fromkeys(os.path.dirname(path) for path in (headers[0], toolkits[0]))
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(out)]
    command += [f"-I{path}" for path in includes]
    command += [library, f"-Wl,-rpath,{os.path.dirname(library)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise CuptiMissing(f"the counter does not compile: {done.stderr.strip()[-2000:]}")
    return out


class Counter:
    """Counts from now on. Make one before the process touches CUDA, and one only."""

    def __init__(self, library: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise CuptiMissing(f"the counter does not load: {error}") from None
        self._library.CounterError.restype = ctypes.c_char_p
        status = self._library.CounterStart()
        if status:
            text = self._library.CounterError(status).decode()
            raise CuptiMissing(f"CUPTI refuses to count: {text} (status {status})")

    def read(self) -> dict[str, int]:
        """The counts so far, by the names in NAMES."""
        values = (ctypes.c_int64 * len(NAMES))()
        count = self._library.CounterRead(values, len(NAMES))
        assert count == len(NAMES), "cupti_counter.cc and NAMES differ"
        return dict(zip(NAMES, values))

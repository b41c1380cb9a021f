"""Every environment variable that dlsys reads, with its default and meaning; read once, at import.

================== ========= ===================================================================
variable           default   meaning
================== ========= ===================================================================
DLSYS_DEBUG        0         0 silent; 1 prints each plan as a table; 2 runs step by step and
                             prints a line a step with ms, GB/s and GFLOP/s; 3 prints the graph
                             before and after each pass; 4 compares every step with numpy and
                             stops at the first that differs; nan stops at the first node that
                             made a NaN or infinity and names it
DLSYS_DEBUG_ARENA  shared    separate: every buffer gets an allocation of its own, filled with
                             NaN bytes when nobody reads it any more, so that memory checkers
                             see what one arena hides
DLSYS_LIBRARY      (package) path of the native library
DLSYS_THREADS      (OpenMP)  worker threads of the CPU device; 0 is one for each core. Where it is
                             not set, OMP_NUM_THREADS, of a list its first number; else 0
DLSYS_BLAS         auto      matrix products on the GPU: auto uses cuBLAS where it is, own never
DLSYS_NVTX         0         1 marks every step as an NVTX range named by its kernel, for Nsight
                             Systems and the like; needs a library with the GPU part
DLSYS_CAPTURE      1         0 launches the kernels of a step one by one, where a GPU would replay
                             the whole step as one CUDA graph from its second run on
DLSYS_LANES        4         how many steps of such a graph may run beside each other; 1 makes it
                             one chain of steps
DLSYS_TUNE         cached    which implementation of a product or a convolution runs: full measures
                             what is not yet known of the shapes, precision and chip at hand and
                             keeps it; cached uses what is kept; off leaves it to a rule. With the
                             same choices a run repeats its bits, with others it may not
DLSYS_TUNE_CACHE   (cache)   the file of what is kept: dlsys/choices.json in $XDG_CACHE_HOME or
                             ~/.cache
DLSYS_REQUIRE_GPU  0         1 turns a skipped GPU test into a failure
DLSYS_TEST_LARGE   0         1 runs the tests that need 10 GB
DLSYS_TEST_QUICK   0         1 tests the operators on small arrays alone
DLSYS_TEST_SEED    20        seed of the tests that draw their cases; drawn draws one
================== ========= ===================================================================

DLSYS_CUDA_LIBRARY_PATH, folders in which the native library looks for cuBLAS, cuDNN and cuRAND, is
set when it is loaded to those of installed wheels, unless it is set already. DLSYS_BUILD_LIBRARY
steers the installation: `none` builds no native library, else it is the path of a finished one.
DLSYS_EMULATED_SEED, a number, has the emulated GPU (`make emulator`) decide otherwise what CUDA
leaves open, such as the order of a block's threads; DLSYS_EMULATED_SHARED is the shared memory of a
block there and DLSYS_EMULATED_MEMORY the memory of each emulated GPU, in bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .errors import SettingError

_MOST = 1024  # threads, lanes


def _debug_level() -> int:
    found_nan = os.environ.get("DLSYS_DEBUG") == "nan"
    return 0 if found_nan else _number("DLSYS_DEBUG", most=4, also=", or nan")


def _number(name: str, default: str = "0", most: int = _MOST, also: str = "") -> int:
    text = os.environ.get(name) or default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= most):
        raise SettingError(f"{name}={text}: expected a whole number from 0 to {most}{also}")
    return int(text)


def _one_of(name: str, default: str, *others: str) -> str:
    text = os.environ.get(name) or default
    if text not in (default, *others):
        raise SettingError(f"{name}={text}: expected {', '.join((default, *others))}")
    return text


@dataclass
class Settings:
    """The values in force. Tests change them; a program sets the environment before it imports
    dlsys.
    """

    debug: int = field(default_factory=_debug_level)
    debug_nan: bool = field(default_factory=lambda: os.environ.get("DLSYS_DEBUG") == "nan")
    separate_arena: bool = field(
        default_factory=lambda: _one_of("DLSYS_DEBUG_ARENA", "shared", "separate") == "separate"
    )
    library: str | None = field(default_factory=lambda: os.environ.get("DLSYS_LIBRARY"))
    threads: int = field(default_factory=lambda: _number("DLSYS_THREADS"))
    blas: str = field(default_factory=lambda: _one_of("DLSYS_BLAS", "auto", "own"))
    capture: bool = field(default_factory=lambda: _one_of("DLSYS_CAPTURE", "1", "0") == "1")
    lanes: int = field(default_factory=lambda: max(1, _number("DLSYS_LANES", "4")))
    tune: str = field(default_factory=lambda: _one_of("DLSYS_TUNE", "cached", "off", "full"))
    tune_cache: str | None = field(default_factory=lambda: os.environ.get("DLSYS_TUNE_CACHE"))
    require_gpu: bool = field(default_factory=lambda: _one_of("DLSYS_REQUIRE_GPU", "0", "1") == "1")

    @property
    def stepwise(self) -> bool:
        """Whether runs go step by step, to be seen."""
        return self.debug >= 2 or self.debug_nan or self.separate_arena


settings = Settings()

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
DLSYS_BLAS         auto      matrix products and convolutions that leave their algorithm to a
                             heuristic, on the GPU: auto uses cuBLAS and cuDNN, own neither
DLSYS_GEMM         auto      the rung of every matrix product that names none by algo=: auto leaves
                             it to a heuristic and to the autotuner; docs/learn/gemm.md has the list
DLSYS_CONV         auto      the same for convolutions
DLSYS_ATTENTION    auto      the same for attention: naive, tiled, flash
DLSYS_ACTIVATION   auto      the same for relu, sigmoid and tanh: cudnn, else the own kernels
DLSYS_POOL         auto      the same for max and average pooling
DLSYS_BATCH_NORM   auto      the same for batch normalization
DLSYS_NVTX         0         1 marks every step as an NVTX range named by its kernel, for Nsight
                             Systems and the like; needs a library with the GPU part
DLSYS_CAPTURE      1         0 launches the kernels of a step one by one, where a GPU would replay
                             the whole step as one CUDA graph from its second run on
DLSYS_STREAMS      4         how many graph streams, or parallel branches, such a graph has at most;
                             1 makes it one chain of steps
DLSYS_FUSION       all       which fusions (dlsys/fusion) run: all, off, the names of some, or those
                             of others with a minus, as in -pointwise,-mlp_head. Values depend on
                             it by their rounding alone, speed does
DLSYS_TUNE         cached    autotuning of the algorithms of matrix products and convolutions: full
                             measures those that the tuning cache lacks for the shapes, precision
                             and chip at hand and adds them; cached uses the cache; off leaves the
                             algorithm to a heuristic. All take those that are as accurate as the
                             precision. With the same algorithms a run repeats its bits, with others
                             it may not
DLSYS_TUNE_CACHE   (cache)   the tuning cache's file: dlsys/tuning.json in $XDG_CACHE_HOME or
                             ~/.cache
DLSYS_REQUIRE_GPU  0         1 turns a skipped GPU test into a failure
DLSYS_TEST_LARGE   0         1 runs the tests that need 10 GB
DLSYS_TEST_QUICK   0         1 tests the operators on small arrays alone
DLSYS_TEST_SEED    20        seed of the tests that draw their cases; drawn draws one
================== ========= ===================================================================

The native library itself reads DLSYS_CONV_WORKSPACE, the MiB (1024) of scratch that a convolution
on the GPU may take: an algorithm that needs more goes through the images in parts or is not used.
DLSYS_CUDA_LIBRARY_PATH, folders in which the native library looks for cuBLAS, cuDNN and cuRAND, is
set when it is loaded to those of installed wheels, unless it is set already. DLSYS_BUILD_LIBRARY
steers the installation: `none` builds no native library, else it is the path of a finished one.
DLSYS_EMULATED_SEED, a number, has the emulated GPU (`make emulator`) decide otherwise what CUDA
leaves open, such as the order of a block's threads; DLSYS_EMULATED_SHARED is the shared memory of a
block there and DLSYS_EMULATED_MEMORY the memory of each emulated GPU, in bytes;
DLSYS_EMULATED_LIBRARIES is a folder of libraries that stand in for those of a GPU, such as NCCL.
"""

from __future__ import annotations

import os
import warnings

from .errors import SettingError
from .rungs import ACTIVATION, ATTENTION, BATCH_NORM, CONV, GEMM, POOL, Ladder

_MOST = 1024  # threads, streams
CONV_WORKSPACE = 1024  # MiB, as in src/cuda/conv/conv.cu
_MOST_MIB = 1 << 20


# Settings by their names of before, which are read for one release more.
_FORMER_NAMES = {"DLSYS_STREAMS": "DLSYS_LANES"}


def _text(name: str) -> str | None:
    """The value of a variable, or of its former name, which warns; None where neither is set."""
    former = _FORMER_NAMES.get(name, name)
    if name in os.environ or former not in os.environ:
        return os.environ.get(name)
    message = f"{former} is called {name} now; the next release does not read the former name"
    warnings.warn(message, FutureWarning, stacklevel=2)
    return os.environ[former]


def _debug_level() -> int:
    found_nan = _text("DLSYS_DEBUG") == "nan"
    return 0 if found_nan else _number("DLSYS_DEBUG", most=4, also=", or nan")


def _number(name: str, default: str = "0", most: int = _MOST, also: str = "") -> int:
    text = _text(name) or default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= most):
        raise SettingError(f"{name}={text}: expected an integer from 0 to {most}{also}")
    return int(text)


def _one_of(name: str, default: str, *others: str) -> str:
    text = _text(name) or default
    if text not in (default, *others):
        raise SettingError(f"{name}={text}: expected {', '.join((default, *others))}")
    return text


class Settings:
    """The values in force. Tests change them; a program sets the environment before it imports
    dlsys.
    """

    def __init__(self) -> None:
        self.debug = _debug_level()
        self.debug_nan = _text("DLSYS_DEBUG") == "nan"
        self.separate_arena = _one_of("DLSYS_DEBUG_ARENA", "shared", "separate") == "separate"
        self.library = _text("DLSYS_LIBRARY")
        self.threads = _number("DLSYS_THREADS")
        self.blas = _one_of("DLSYS_BLAS", "auto", "own")
        self.gemm = _one_of("DLSYS_GEMM", *GEMM.words)
        self.conv = _one_of("DLSYS_CONV", *CONV.words)
        self.conv_workspace = _number("DLSYS_CONV_WORKSPACE", str(CONV_WORKSPACE), _MOST_MIB)
        self.attention = _one_of("DLSYS_ATTENTION", *ATTENTION.words)
        self.activation = _one_of("DLSYS_ACTIVATION", *ACTIVATION.words)
        self.pool = _one_of("DLSYS_POOL", *POOL.words)
        self.batch_norm = _one_of("DLSYS_BATCH_NORM", *BATCH_NORM.words)
        self.capture = _one_of("DLSYS_CAPTURE", "1", "0") == "1"
        self.streams = max(1, _number("DLSYS_STREAMS", "4"))
        self.fusion = os.environ.get("DLSYS_FUSION") or "all"
        self.tune = _one_of("DLSYS_TUNE", "cached", "off", "full")
        self.tune_cache = _text("DLSYS_TUNE_CACHE")
        self.require_gpu = _one_of("DLSYS_REQUIRE_GPU", "0", "1") == "1"

    def rung(self, ladder: Ladder, named: str | None) -> str:
        """The rung of what is on a ladder: the one that it names itself, or the setting's."""
        return named or getattr(self, ladder.setting)

    @property
    def stepwise(self) -> bool:
        """True when runs go step by step, to be observed."""
        return self.debug >= 2 or self.debug_nan or self.separate_arena


settings = Settings()

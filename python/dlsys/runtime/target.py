"""Target: what a device can do, for whoever plans for it. Passes and the executor ask a Target and
never which device it is, so a new backend changes this file and the native library alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from dlsys.dtypes import FLOAT32
from dlsys.rungs import rungs_among
from dlsys.runtime.device import Context
from dlsys.runtime.library import DL_GPU, MAX_NDIM, Library, load


@dataclass(frozen=True, eq=False)
class Target:
    """The kernels, abilities and limits of a kind of device.

    Attributes:
        name: its column of the library's kernel table ("cpu", "cuda"), or "numpy".
        kernels: the names of its kernels, each with the storage type that it is for; on numpy, of
            the fused operators that pay there.
        native: steps are kernels of the native library; else every operator runs its numpy form.
        streams: kernels are launched on streams and the host runs ahead of them. Where it is False,
            a kernel is a call that returns when its work is done.
        capture: the steps of a plan can be captured as a graph and replayed by one launch.
        kernel_fits: the library's answer to `fits`.
        max_ndim: the most dimensions of an array.
        kernel_rungs: the library's answer to `rungs`.
        kernel_workspace: the library's answer to `workspace`.
    """

    name: str
    kernels: Container[tuple[str | None, Any]] = field(repr=False)
    native: bool = True
    streams: bool = False
    capture: bool = False
    kernel_fits: Callable[..., bool] = field(default=lambda kernel, *arguments: True, repr=False)
    max_ndim: int = MAX_NDIM
    kernel_rungs: Callable[[str], tuple[str, ...]] = field(default=lambda kernel: (), repr=False)
    kernel_workspace: Callable[..., int] = field(default=lambda kernel, *arguments: 0, repr=False)

    def has(self, kernel: str | None, dtype: Any = FLOAT32) -> bool:
        """True when the target has a kernel of this name for floats of a storage type."""
        return (kernel, dtype) in self.kernels

    def fits(self, kernel: str, *arguments: Any) -> bool:
        """True when a kernel that the target has does a call, no slower than several kernels do.

        The arguments are those of the call: numbers, and a Spec for each array.
        """
        return self.kernel_fits(kernel, *arguments)

    def workspace(self, kernel: str, *arguments: Any) -> int:
        """The bytes of scratch memory that a kernel takes for a call, arguments as for `fits`."""
        return self.kernel_workspace(kernel, *arguments)

    def rungs(self, kernel: str | None) -> tuple[str, ...]:
        """The rungs of a kernel, slowest first; none for most, and for one that is not there."""
        return self.kernel_rungs(kernel) if kernel is not None and self.has(kernel) else ()


# The fusions whose numpy form is faster than those of the nodes that they replace.
_FUSED_ON_NUMPY = (
    "conv2d_pool", "conv2d_pool_data_gradient", "conv2d_pool_filter_gradient", "conv2d_pool_chain",
    "fused_sparse_cross_entropy",
)  # fmt: skip
NUMPY = Target(
    "numpy",
    frozenset((kernel, FLOAT32) for kernel in _FUSED_ON_NUMPY),
    native=False,
    max_ndim=32,
)


def target_of(ctx: Context | None) -> Target:
    """The Target of a device, or of numpy for None; the same object for devices of one kind.

    Raises DeviceError when the native library cannot be loaded.
    """
    if ctx is None:
        return NUMPY
    return _native_target(load(), ctx.kernel_device, ctx.streams, ctx.device_type == DL_GPU)


@functools.cache
def _native_target(library: Library, name: str, streams: bool, capture: bool) -> Target:
    kernels = frozenset(key[1:] for key in library.index if key[0] == name)
    fits = functools.partial(library.fits, name)
    return Target(
        name,
        kernels,
        streams=streams,
        capture=capture,
        kernel_fits=fits,
        kernel_rungs=lambda kernel: rungs_among(library.algorithms(name, kernel)),
        kernel_workspace=functools.partial(library.workspace, name),
    )

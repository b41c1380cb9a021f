"""The native devices that tests can use here, and what happens to tests of those that they cannot.

A test class for every device is a plain class with the tests and one subclass a device:

    @require(gpu(0))
    class GpuThings(Things, unittest.TestCase):
        ctx = gpu(0)

which `CpuThings, GpuThings = on_native_devices(Things)` makes of each native device. Without the
device its tests are skipped with the reason; with DLSYS_REQUIRE_GPU=1 they fail. What
a test needs is noted at it, for `tests/run.py --needs gpu`, which runs on the emulated GPU. A test
that takes seconds is marked `slow`: it is dealt first, and `tests/run.py --quick` leaves it out.
"""

from __future__ import annotations

import functools
import os
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from dlsys.runtime.device import Context, cpu, emulated, gpu, unavailable
from dlsys.settings import settings
from support import sample

if "DLSYS_TUNE" not in os.environ:
    settings.tune = "off"  # what was measured on this machine changes bits


EMULATED = unavailable(gpu(0)) is None and emulated()


def fewer(count: int) -> int:
    """So many rounds of a test, or a few where they would take minutes on an emulated GPU."""
    return max(3, count // 20) if EMULATED else count


def noted(kind: str) -> Callable[[Any], Any]:
    """Decorates a test class or method with the name of a device kind that it needs."""

    def decorate(item: Any) -> Any:
        item.needs_devices = getattr(item, "needs_devices", frozenset()) | {kind}
        return item

    return decorate


def slow(item: Any) -> Any:
    """Decorates a test class or method that takes seconds."""
    item.slow = True
    return item


def together(item: Any) -> Any:
    """Decorates a test class whose tests share what is dear to make: one process gets them all."""
    item.together = True
    return item


_no_second = unavailable(gpu(1)) or ""
not_emulated = unittest.skipIf(EMULATED, "not on an emulated GPU: slow, or of what it has not")
_small_gpu = "not here: an emulated GPU, which can be made smaller"


def two_gpus(item: Any) -> Any:
    """Decorates a test class or method that needs a second GPU."""
    return unittest.skipIf(_no_second, f"not here: a second GPU; {_no_second}")(noted("gpu")(item))


def four_gpus(item: Any) -> Any:
    """Decorates a test class or method that needs four GPUs."""
    lacks = unavailable(gpu(3))
    return unittest.skipIf(lacks, f"not here: four GPUs; {lacks}")(noted("gpu")(item))


def emulated_gpu(item: Any) -> Any:
    """Decorates a test class or method that needs the emulated GPU, not any other."""
    return unittest.skipUnless(EMULATED, _small_gpu)(noted("gpu")(item))


needs_torch = unittest.skipUnless(find_spec("torch"), "not here: PyTorch")
needs_torchvision = unittest.skipUnless(
    find_spec("torch") and find_spec("torchvision"), "not here: PyTorch with torchvision"
)


def native_contexts() -> list[Context]:
    """The native devices that work here; of a sample on an emulated GPU that one alone, since the
    sample without a GPU has the CPU.
    """
    devices = (gpu(0),) if sample.SAMPLED and EMULATED else (cpu(0), gpu(0))
    return [ctx for ctx in devices if unavailable(ctx) is None]


def each_context() -> list[Context | None]:
    """numpy, as None, and the native devices that work here; of a sample on an emulated GPU that
    one alone, since the sample without a GPU has the others.
    """
    native = native_contexts()
    return list(native) if sample.SAMPLED and EMULATED else [None, *native]


def gpu_skip_reason() -> str | None:
    """Why GPU tests cannot run here; None when they can."""
    return unavailable(gpu(0))


def require(ctx: Context) -> Callable[[Any], Any]:
    """Decorates a test class or method that needs `ctx`."""
    reason = unavailable(ctx)

    def decorate(item: Any) -> Any:
        noted(ctx.name)(item)
        if reason is None:
            return item
        if settings.require_gpu:
            return _failing(item, f"{ctx} is required: {reason}")
        return unittest.skip(reason)(item)

    return decorate


def on_native_devices(cases: type) -> tuple[type, ...]:
    """The test classes CpuThings and GpuThings of a plain class Things, each with its `ctx`."""
    made = []
    for ctx in (cpu(0), gpu(0)):
        body = {"ctx": ctx, "__module__": cases.__module__, "__doc__": cases.__doc__}
        name = f"{ctx.name.capitalize()}{cases.__name__}"
        made.append(require(ctx)(type(name, (cases, unittest.TestCase), body)))
    return tuple(made)


def _failing(item: Any, reason: str) -> Any:
    def fail(self: unittest.TestCase, *_: Any) -> None:
        self.fail(reason)

    if not isinstance(item, type):
        return functools.wraps(item)(fail)
    item.setUp = fail
    return item

"""Devices by name, and the engine of each in each thread."""

from __future__ import annotations

import threading
from typing import Any

from ..passes.precision import check_precision
from ..runtime.device import best_context, context_of
from ..runtime.device import synchronize as wait
from .engine import Engine

Device = Any  # "numpy", "cpu", "gpu", "gpu:1", a Context, or None for the best there is


class _OfThread(dict[Any, Engine]):
    """The engines of a thread, by device; gone with the thread."""

    def __del__(self) -> None:
        for engine in self.values():
            engine.retire()


class _Engines(threading.local):
    def __init__(self) -> None:
        self.of = _OfThread()
        self.grad = True


_engines = _Engines()


def best_device() -> str:
    """The device that Tensors live on by default: "gpu:0" where one can be used, else "cpu:0", else
    "numpy".

    >>> dl.best_device()
    'numpy'
    """
    return engine_of(None).name


def engine_of(device: Device) -> Engine:
    """The engine of a device for this thread. DeviceError where it cannot be used, with why."""
    engine = _engines.of.get(device)
    if engine is None:
        ctx = best_context()[0] if device is None else context_of(device)
        key = "numpy" if ctx is None else ctx
        engine = _engines.of.get(key)
        if engine is None:
            engine = _engines.of[key] = Engine(ctx, engine_of)
            engine.grad = _engines.grad
        _engines.of[device] = engine
    return engine


def set_grad_enabled(value: bool) -> bool:
    """Has operations of this thread recorded for gradients or not; returns what was before."""
    before, _engines.grad = _engines.grad, value
    for engine in _engines.of.values():
        engine.grad = value
    return before


def engines() -> list[Engine]:
    """The engines of this thread."""
    return list(dict.fromkeys(_engines.of.values()))


def synchronize() -> None:
    """Runs what was recorded and waits until the devices have computed it, for timings.

    >>> y = dl.ones(2) + 1
    >>> dl.synchronize()  # y is computed now
    """
    for engine in engines():
        engine.flush(writing=True)
        if engine.ctx is not None:
            wait(engine.ctx)


def set_precision(precision: str, device: Device = None) -> None:
    """Has Tensors on a device be computed in another precision, in this thread.

    precision: "fp32", the default; "tf32" or "3xtf32", products on the tensor cores of a GPU that
    has them; "bf16", products and activations in bfloat16 beside Parameters of float32, where
    Tensors keep the dtypes that they would have without; "fp8", the same with operands of products
    in 8 bits. device: as of `tensor`. GraphError for
    another word.

    >>> dl.set_precision("fp32")
    """
    engine = engine_of(device)
    engine.flush(writing=True)
    engine.precision = check_precision(precision)

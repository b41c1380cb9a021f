"""The counters of a device and its allocator, as values and as a table."""

from __future__ import annotations

from typing import NamedTuple

from ..describe import drawn_by
from ..runtime import device
from ..runtime.device import Context, MemoryStats


class Counters(NamedTuple):
    """A device at one moment; print it for a table.

    `free_nbytes` and `total_nbytes` are the device's own account, of all processes; `memory` is
    this process's allocator there; `launches` is what the library has asked of all GPUs together.
    """

    device: str
    free_nbytes: int
    total_nbytes: int
    memory: MemoryStats
    launches: device.Counters

    def _repr_html_(self) -> str:
        return drawn_by("counters_html")(self)

    def rows(self) -> list[tuple[str, int]]:
        """Every number with its name, in the order of the table."""
        own = [("free_nbytes", self.free_nbytes), ("total_nbytes", self.total_nbytes)]
        return [*own, *self.memory._asdict().items(), *self.launches._asdict().items()]

    def __str__(self) -> str:
        lines = [f"{name:<20} {_amount(name, value)}" for name, value in self.rows()]
        return "\n".join([f"{'device':<20} {self.device}", *lines])


def counters(ctx: Context) -> Counters:
    """The counters of a native device now. Raises DeviceError where the device is not available."""
    free, total = device.device_memory(ctx)
    name, memory = device.device_name(ctx), device.memory_stats(ctx)
    return Counters(name, free, total, memory, device.counters())


def _amount(name: str, value: int) -> str:
    return f"{value:>18,}" + (f"  {value / 2**20:,.1f} MiB" if name.endswith("nbytes") else "")

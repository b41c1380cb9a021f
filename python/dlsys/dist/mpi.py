"""Groups over MPI, by mpi4py: what numpy and the CPU communicate by, and how ranks find each other.

Every call is a nonblocking one of MPI, which is then waited for with a limit: a rank that does not
come ends the run with a sentence that names it. Ranks that wait give their core to others after a
short while, so that more ranks than cores make progress.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from ..errors import CommunicationError, DeviceError, how_to_install
from . import nccl
from .group import Array, Group

_SPINS = 100  # tests of a request before the core is given to others between two of them
_NAP = 50e-6  # seconds between two tests of a request that takes long
_ANNOUNCED = 1.0  # seconds of waiting after which a rank tells the others that it waits
_WAITING = 1  # tag of what it tells
_DATA = 2  # tag of the arrays of a permutation
_ABORTED = 70  # the status of a run that ends on all ranks
_FORWARDED = 0.3  # seconds in which mpirun passes on what a rank printed last


class MpiGroup(Group):
    """The ranks of an MPI communicator. comm: mpi4py's. timeout: seconds to wait for the others."""

    def __init__(self, comm: Any, timeout: float) -> None:
        self._mpi = sys.modules["mpi4py.MPI"]
        self._comm, self._control = comm, comm.Dup()
        self._timeout = timeout
        self._calls = 0  # collectives so far, by which ranks know which one they wait in
        self.rank, self.size = comm.rank, comm.size
        local = comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        self.local_rank, self.one_host = local.rank, local.size == comm.size
        local.Free()

    def split(self, color: int) -> MpiGroup:
        """The group of the ranks that give the same color, in the order of their ranks.

        color: a number from 0 on. Every rank of this group calls it.
        """
        return MpiGroup(self._comm.Split(color, self.rank), self._timeout)

    def reduce_into(self, x: Array, y: Array, op: str) -> None:
        summed = _summable(x)
        made = y if summed is x else np.empty_like(summed)
        self._wait(self._comm.Iallreduce(summed, made, self._reduction(op)), "all_reduce")
        if made is not y:
            np.copyto(y, made, casting="same_kind")

    def gather_into(self, x: Array, y: Array) -> None:
        self._wait(self._comm.Iallgather(_bytes(x), _bytes(y)), "all_gather")

    def scatter_into(self, x: Array, y: Array, op: str) -> None:
        summed = _summable(x)
        made = y if summed is x else np.empty(y.shape, summed.dtype)
        call = self._comm.Ireduce_scatter_block(summed, made, self._reduction(op))
        self._wait(call, "reduce_scatter")
        if made is not y:
            np.copyto(y, made, casting="same_kind")

    def broadcast_into(self, x: Array, root: int) -> None:
        self._wait(self._comm.Ibcast(_bytes(x), root), "broadcast")

    def exchange_into(self, x: Array, y: Array) -> None:
        self._wait(self._comm.Ialltoall(_bytes(x), _bytes(y)), "all_to_all")

    def permute_into(self, x: Array, y: Array, target: int | None, source: int | None) -> None:
        null = self._mpi.PROC_NULL
        calls = [
            self._comm.Irecv(_bytes(y), null if source is None else source, _DATA),
            self._comm.Isend(_bytes(x), null if target is None else target, _DATA),
        ]
        for call in calls:
            self._wait(call, "permute")

    def objects(self, value: Any) -> list[Any]:
        return self._comm.allgather(value)

    def connect(self, ctx: Any) -> None:
        if ctx is None or not ctx.streams or self.handle:
            return
        fault, common = "", np.zeros(0, np.uint8)
        try:
            common = nccl.new_id(ctx)  # on every rank, so that all know where there is none
        except DeviceError as error:
            fault = f"{error} (rank {self.rank})"
        fault = next(filter(None, self.objects(fault)), "")
        if fault:
            raise DeviceError(fault)
        self._gpu = ctx
        self.handle = nccl.communicator(ctx, self.broadcast(common), self.rank, self.size)
        self.sums_in_kernels = self.agreed(nccl.sums_in_kernels(ctx, self.handle)) != 0

    def check(self) -> None:
        if self.handle:
            nccl.check(self._gpu, self.handle)

    def abort(self, sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)
        time.sleep(_FORWARDED)
        self._comm.Abort(_ABORTED)

    def _reduction(self, op: str) -> Any:
        return {"sum": self._mpi.SUM, "max": self._mpi.MAX, "min": self._mpi.MIN}[op]

    # ---- waiting ----
    def _wait(self, request: Any, what: str) -> None:
        """Returns when a call is complete. Ends all ranks where some do not come to it in time."""
        self._calls += 1
        for _ in range(_SPINS):
            if request.Test():
                return
        start, announced = time.monotonic(), False
        while not request.Test():
            waited = time.monotonic() - start
            if waited > _ANNOUNCED and not announced:
                announced = True
                self._announce()
            if waited > self._timeout:
                self._give_up(what)
            os.sched_yield() if waited < 1e-3 else time.sleep(_NAP)

    def _announce(self) -> None:
        """Tells the others which call this rank waits in."""
        told = np.array([self._calls], np.int64)
        for other in range(self.size):
            if other != self.rank:
                self._control.Isend(told.copy(), other, _WAITING)

    def _give_up(self, what: str) -> None:
        """Names the ranks that did not come, and ends all; the first of those that came speaks."""
        time.sleep(_ANNOUNCED)  # for what ranks tell that came late
        calls = {self.rank: self._calls}
        status, told = self._mpi.Status(), np.empty(1, np.int64)
        while self._control.Iprobe(tag=_WAITING, status=status):
            self._control.Recv(told, status.source, _WAITING)
            calls[status.source] = max(calls.get(status.source, 0), int(told[0]))
        came = [rank for rank, call in calls.items() if call == self._calls]
        missing = [rank for rank in range(self.size) if rank not in came]
        if self.rank == min(came):
            ranks = ", ".join(map(str, missing)) or "unknown"
            self.abort(
                f"dlsys.dist: rank{'s' * (len(missing) != 1)} {ranks} did not come to call "
                f"{self._calls}, {what}, within {self._timeout:g} s: it hangs, or is slower than "
                "dist.init(timeout=) allows; all ranks end"
            )
        time.sleep(self._timeout)  # until the one that speaks has ended this process


def world(timeout: float) -> MpiGroup:
    """The group of all ranks that MPI started. CommunicationError without mpi4py or MPI itself."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommunicationError(
            f"dist.init: this process was started as a rank of MPI, which needs mpi4py and MPI: "
            f"{how_to_install('mpi4py')} mpich ({error})"
        ) from None
    group = MpiGroup(MPI.COMM_WORLD, timeout)
    _end_all_on_error(group)
    return group


def _end_all_on_error(group: MpiGroup) -> None:
    """An error that nobody catches ends all ranks: the others would wait for this one."""
    former = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        former(kind, error, trace)
        if group.size > 1:
            group.abort(f"dlsys.dist: rank {group.rank} ended by {kind.__name__}; all ranks end")

    sys.excepthook = hook


def _bytes(x: Array) -> Array:
    """The bytes of an array, for calls that only move them."""
    return x.reshape(-1).view(np.uint8)


def _summable(x: Array) -> Array:
    """An array that MPI can reduce: float16, which it does not know, in float32."""
    return x.astype(np.float32) if x.dtype == np.float16 else x

"""NCCL: the communicators of GPUs, and a group that needs no MPI, as torchrun starts one.

Kernels call NCCL (src/cuda/collective/nccl.cu). What ranks say to each other beside kernels, such
as digests and sums of losses, are a few bytes: a group without MPI gathers them on the GPU and
reduces on the host, in the order of ranks.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
from typing import Any

import numpy as np

from ..executor.executor import Executor
from ..ops.leaf import Variable
from ..runtime.device import Context, gpu
from ..runtime.interface import interface
from ..runtime.library import load
from .collectives import all_gather_op
from .group import Array, Group

_UINT8 = np.dtype(np.uint8)
_ABORTED = 70  # the status of a run that ends on all ranks


def new_id(ctx: Context) -> Array:
    """A new id (uint8) for the communicator of several ranks. DeviceError without NCCL."""
    library = load()
    made = np.zeros(interface.limits["communicator_id_nbytes"], np.uint8)
    library.check(library.cdll.DLCommunicatorId(ctx.struct, made.ctypes.data))
    return made


def communicator(ctx: Context, common: Array, rank: int, size: int) -> int:
    """The handle of this rank's communicator; returns when all ranks have called it."""
    handle = ctypes.c_int64()
    create = load().cdll.DLCommunicatorCreate
    at = ctypes.byref(handle)
    load().check(create(ctx.struct, common.ctypes.data, rank, size, at))
    return handle.value


def sums_in_kernels(ctx: Context, handle: int) -> int:
    """Not 0, and the same on all ranks, where other kernels than those of collectives can sum over
    a communicator's ranks.
    """
    found = ctypes.c_int32()
    call = load().cdll.DLCommunicatorSumsInKernels
    load().check(call(ctx.struct, handle, ctypes.byref(found)))
    return found.value


def check(ctx: Context, handle: int) -> None:
    """KernelError where NCCL has found a rank or a network to be broken."""
    load().check(load().cdll.DLCommunicatorCheck(ctx.struct, handle))


class NcclGroup(Group):
    """The ranks of `torchrun`, each with the GPU of its local rank."""

    compares_every_run = False  # a comparison waits for the GPU

    def __init__(self, rank: int, size: int, local_rank: int) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.one_host = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == size
        self._ctx = gpu(local_rank)
        # NCCL itself hands out the id: all ranks find rank 0 by this address.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        os.environ.setdefault("NCCL_COMM_ID", f"{address}:{port + 1}")  # torchrun has the first
        self.handle = communicator(self._ctx, new_id(self._ctx), rank, size)
        self.sums_in_kernels = self.agreed(sums_in_kernels(self._ctx, self.handle)) != 0

    def connect(self, ctx: Any) -> None:
        pass  # it has been from the start

    def check(self) -> None:
        check(self._ctx, self.handle)

    def _gathered(self, x: Array) -> Array:
        """All ranks' arrays, (size, …)."""
        flat = x.reshape(-1).view(_UINT8)
        got = self._gather(flat.size)(flat)
        return got.view(x.dtype).reshape(self.size, *x.shape)

    @functools.cache  # noqa: B019 - a group lives as long as the process
    def _gather(self, nbytes: int) -> Any:
        x = Variable("x", (nbytes,), _UINT8)
        executor = Executor([all_gather_op(x, group=self)], self._ctx)
        return lambda values: executor.run({x: values}, True)[0]

    def reduce_into(self, x: Array, y: Array, op: str) -> None:
        reduction = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]
        np.copyto(y, reduction.reduce(self._gathered(x), axis=0), casting="same_kind")

    def gather_into(self, x: Array, y: Array) -> None:
        np.copyto(y, self._gathered(x).reshape(y.shape))

    def scatter_into(self, x: Array, y: Array, op: str) -> None:
        total = np.empty_like(x)
        self.reduce_into(x, total, op)
        np.copyto(y, total.reshape(self.size, *y.shape)[self.rank])

    def broadcast_into(self, x: Array, root: int) -> None:
        np.copyto(x, self._gathered(x)[root])

    def exchange_into(self, x: Array, y: Array) -> None:
        parts = self._gathered(x).reshape(self.size, self.size, -1)
        np.copyto(y, parts[:, self.rank].reshape(y.shape))

    def permute_into(self, x: Array, y: Array, target: int | None, source: int | None) -> None:
        found = self._gathered(x)
        if source is not None:
            np.copyto(y, found[source])

    def objects(self, value: Any) -> list[Any]:
        own = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = self._gathered(np.array([own.size]))[:, 0]
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: own.size] = own
        rows = zip(self._gathered(padded), sizes)
        return [json.loads(row[:size].tobytes()) for row, size in rows]

    def abort(self, sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)
        os._exit(_ABORTED)  # torchrun ends the others; a wait for them would not end


def world() -> NcclGroup:
    """The group that RANK, WORLD_SIZE and so on describe. DeviceError without a GPU or NCCL."""
    return NcclGroup(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))

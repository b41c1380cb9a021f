"""How a process finds out which rank it is: from MPI, or from variables as torchrun sets them."""

from __future__ import annotations

import os

from ..errors import CommunicationError
from . import mpi, nccl
from .group import Alone, Group

# What launchers of MPI tell their processes, so that a plain `python script.py` needs no MPI.
_OF_MPI = ("PMI_SIZE", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_worlds: list[Group] = []


def init(timeout: float = 30.0) -> Group:
    """The group of all ranks of this run; the same one at every call.

    timeout: seconds that a rank waits for the others before all end with a sentence that names
    those that did not come.

    Ranks are found from MPI, however it started them (`mpirun`, `srun`, `python -m dlsys.dist
    launch`), or else from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as `torchrun`
    sets them. A process that nobody started as one of several is a world of its own.

    Raises CommunicationError where what was started cannot communicate, with what to install;
    DeviceError for torchrun's ranks without GPUs or NCCL: without MPI these are all they have.

    >>> from dlsys import dist
    >>> dist.init()
    Alone(rank=0, size=1)
    """
    if not timeout > 0:
        raise CommunicationError(f"dist.init: expected timeout > 0 seconds, got {timeout}")
    if not _worlds:
        _worlds.append(_found(timeout))
    return _worlds[0]


def _found(timeout: float) -> Group:
    if any(name in os.environ for name in _OF_MPI):
        return mpi.world(timeout)
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        return Alone()
    missing = [name for name in _OF_RANKS if not os.environ.get(name)]
    if missing:
        raise CommunicationError(
            f"dist.init: WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} not "
            "set: start the ranks with torchrun, mpirun or `python -m dlsys.dist launch`"
        )
    return nccl.world()

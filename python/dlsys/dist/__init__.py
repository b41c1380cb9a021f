"""Several processes, or ranks, that train one model: on several GPUs, cores or machines.

    from dlsys import dist
    world = dist.init()
    train.fit(model, data, optimizer, parallel="data")

docs/dist.md tells how ranks are started, and what each of them computes.
"""

from . import data_parallel  # executors with a group find it
from .collectives import (
    all_gather_op,
    all_reduce_op,
    all_to_all_op,
    broadcast_op,
    reduce_op,
    reduce_scatter_op,
    send_recv_op,
)
from .environment import init
from .group import Group
from .mpi import MpiGroup

"""What ranks that train together share beside gradients: data, statistics and checkpoints."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from ..dist import Group
from ..errors import CommunicationError, DataError
from ..nn import Module

Tensors = dict[str, np.ndarray]


def share_of(data: Any, group: Group) -> Any:
    """A rank's share of a loader. DataError for one that has none."""
    if not hasattr(data, "shard"):
        raise DataError(
            f"fit: {type(data).__name__} has no shares for {group.size} ranks: use a Loader, or "
            "give it a method shard(rank, size)"
        )
    return data.shard(group.rank, group.size)


def average_statistics(model: Module, group: Group) -> None:
    """Gives all ranks the mean of their running statistics, which each has taken of its share."""
    for _, parameter in model.named_state():
        if not parameter.trainable and parameter.dtype.kind == "f":
            parameter.set(group.all_reduce(parameter.asnumpy(), "mean"))


def joined(tensors: Tensors, totals: str, group: Group) -> Tensors:
    """The state of all ranks as that of one: equal arrays, and the sum of their `totals`.

    CommunicationError on all ranks where an array is not the same on all of them.
    """
    made = {**tensors, totals: group.all_reduce(tensors[totals])}
    sums = [zlib.crc32(np.ascontiguousarray(array).data) for array in made.values()]
    different = (group.all_gather(np.array(sums, np.int64)) != sums).any(axis=0)
    if group.all_reduce(np.array([different.any()], np.int32), "max")[0]:
        names = [name for name, wrong in zip(made, different) if wrong]
        told = group.objects(names)
        rank, first = next((k, t[0]) for k, t in enumerate(told) if t)
        raise CommunicationError(
            f"{first} is not the same on all ranks, as rank {rank} finds: something but the run "
            "itself changes it on some of them; the state is not saved"
        )
    return made

"""The row of samples.py for scattered sums added to an array, as `fusion/scattered.py` builds
them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlsys.fusion.scattered import scatter_to_op
from dlsys.fusion.shared.body import close
from dlsys.ops.indexing import scatter_op
from support.table.families.movement import SCATTERS
from support.table.formulas.layout import scattered
from support.table.rows import Case, Sample, signed


def build(updates: Any, indices: Any, x: Any, axis: int) -> Any:
    total = x + scatter_op(updates, indices, x.spec.shape[axis], axis)
    inputs = updates, indices, x
    return scatter_to_op(*inputs, body=close(inputs, (total,)), axis=axis)


def added(case: Case) -> Case:
    """A case of scatter with an array to which the sums are added."""
    updates, indices = case.shapes
    axis = case.attrs["axis"] % (len(updates) - len(indices) + 1)
    shape = (*updates[:axis], case.attrs["size"], *updates[axis + len(indices) :])
    return Case((updates, indices, shape), {"axis": axis}, (*case.domain, signed))


FUSED_SCATTERED = (
    Sample(
        "scatter_add_to",
        scatter_to_op,
        lambda u, i, x, axis: x + scattered(u, i, x.shape[axis], axis),
        tuple(map(added, SCATTERS)),
        scale=lambda u, i, x, axis: np.abs(x) + scattered(np.abs(u), i, x.shape[axis], axis),
        ulps=4,
        differentiable=(),
        build=build,
        roundings=2,
    ),
)

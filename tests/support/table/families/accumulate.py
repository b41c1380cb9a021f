"""The row of samples.py for sums over steps."""

from __future__ import annotations

import numpy as np

from dlsys.ops.optim import assign
from support.table.rows import Sample, case, refuse

ACCUMULATE = (
    Sample(
        "accumulate", assign.accumulate_op, lambda t, x: (np.stack([t[0] + x, t[1]]),),
        tuple(case((2, n), (n,)) for n in (0, 1, 7, 1031, 70_001)),
        scale=lambda t, x: (np.stack([np.abs(t[0]) + np.abs(t[1]) + np.abs(x)] * 2),),
        ulps=1, differentiable=(), states=1, specials=False,  # inf - inf is the error of inf
        wide=(0,),
        refusals=(
            refuse(
                r"expected a total \(2, n\) and \(n,\), got .* \(2, 3\)", (2, 3), (4,), states=1
            ),
            refuse(r"accumulate: \S+ is no Parameter and cannot be written", (2, 3), (3,)),
            refuse(
                r"expected a total of float32, got float16", (2, 3), (3,),
                dtypes=("float16",) * 2, states=1,
            ),
        ),
    ),
)  # fmt: skip

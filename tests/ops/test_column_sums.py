"""Sums of the columns of large arrays, which GPUs read by vectors of 16 bytes in two stages."""

from __future__ import annotations

import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys.dtypes import FLOAT32, as_dtype
from dlsys.runtime.device import Context
from support.devices import on_native_devices
from support.graphs import variable

# Shapes of 4 MB and more, the axes that are summed, and a storage type. Of the rows some are left
# over by the vectors of a warp, the segments of the axis, or both.
CASES = (
    ((2100, 1016), (0,), "bfloat16"), ((3, 701, 1024), (1,), "float16"),
    ((16, 131, 1024), (0, 1), "bfloat16"), ((8300, 128), (0,), "float32"),
    ((2, 400, 3, 1000), (1, 3), "float32"), ((257, 8200), (0,), "bfloat16"),
)  # fmt: skip


class ColumnSums:
    ctx: Context

    def test_are_exact_of_integers(self) -> None:
        """Sums of integers below 2^24 are exact in float32, in any order."""
        rng = np.random.default_rng(0)
        for shape, axes, dtype in CASES:
            with self.subTest(shape=shape, axes=axes, dtype=dtype):
                x = variable("x", *shape, dtype=as_dtype(dtype))
                values = rng.integers(-8, 9, shape).astype(np.float32)
                total = ad.sum_op(x, axis=axes, dtype=FLOAT32)
                given = values.astype(np.float16) if dtype == "float16" else values
                (found,) = ad.Executor([total], self.ctx).run({x: given}, True)
                np.testing.assert_array_equal(found, values.sum(axis=axes))

    def test_results_of_16_bits_are_rounded_once(self) -> None:
        """Of each value at most half a unit in the last place, 2^-8, from the exact sum."""
        values = np.random.default_rng(1).integers(-8, 9, (4100, 512)).astype(np.float32)
        x = variable("x", 4100, 512, dtype=as_dtype("bfloat16"))
        made = ad.cast_op(ad.mean_op(x, axis=0), FLOAT32)
        (found,) = ad.Executor([made], self.ctx).run({x: values}, True)
        wanted = values.mean(axis=0, dtype=np.float64)
        self.assertTrue((abs(found - wanted) <= abs(wanted) * (2.0**-8 + 2.0**-22)).all())


CpuColumnSums, GpuColumnSums = on_native_devices(ColumnSums)

if __name__ == "__main__":
    unittest.main()

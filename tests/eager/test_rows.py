"""Every row of the operators' table through Tensors: values and gradients as graphs give them."""

from __future__ import annotations

import unittest
from functools import partial
from typing import Any

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys.eager.device import engine_of
from dlsys.eager.tensor import Tensor
from dlsys.fusion.shared.body import Fused
from dlsys.ndarray import cpu, gpu
from dlsys.runtime.device import Context, unavailable
from dlsys.runtime.target import target_of
from support import sample as sampling
from support.devices import require
from support.table.cases import Gradients, Use, in_dtype, make_arrays
from support.table.rows import Case, Sample
from support.table.samples import SAMPLES

FLOAT32 = np.dtype(np.float32)
MOST = 2000  # elements of the cases that are run; sizes are for kernels, which are the same


def is_met(sample: Sample, ctx: Context | None) -> bool:
    """False for rows of what users do not write: fused operators that a device has no kernel for,
    updates, which optimizers make, and groups.
    """
    fused = sample.fused or isinstance(sample.op, Fused)
    return not sample.states and (not fused or target_of(ctx).has(sample.op.kernel))


def is_random(use: Use) -> bool:
    """True for what draws: Tensors count draws otherwise than graphs."""
    return any(node.op.random for node in ad.find_topo_sort([use.node]))


def cases(sample: Sample) -> list[Case]:
    """The cases of a row that are small."""
    return sampling.of((case for case in sample.cases if case.size <= MOST), 2)


class Rows:
    """Rows on the device `ctx`."""

    ctx: Context | None = None

    @property
    def device(self) -> str:
        return "numpy" if self.ctx is None else f"{self.ctx.name}:{self.ctx.device_id}"

    def check(self, sample: Sample) -> None:
        for case in cases(sample):
            with self.subTest(shapes=case.shapes, **case.attrs):
                arrays = in_dtype(make_arrays(sample, case), FLOAT32)
                use = Use(sample, case, arrays)
                expected = use.run(self.ctx)
                made = self.record(sample, case, arrays)
                self.assertEqual(made.shape, expected[0].shape)
                if is_random(use):
                    self.assertEqual(made.dtype, expected[0].dtype)
                    self.assertEqual(made.numpy().shape, expected[0].shape)
                    continue
                np.testing.assert_array_equal(made.numpy(), expected[0])
                if sample.differentiable != () and case.shapes:
                    self.check_gradients(sample, case)

    def record(self, sample: Sample, case: Case, arrays: list[np.ndarray]) -> Tensor:
        tensors = [dl.tensor(x, self.device) for x in arrays]
        return engine_of(self.device).record(partial(sample.node, **case.attrs), tensors)

    def check_gradients(self, sample: Sample, case: Case) -> None:
        graph = Gradients(sample, case, FLOAT32)
        expected = graph.run(graph.gradients, self.ctx)
        tensors = [
            dl.tensor(x, self.device, requires_grad=k in graph.chosen and x.dtype == FLOAT32)
            for k, x in enumerate(graph.arrays)
        ]
        made = dl.apply(partial(sample.node, **case.attrs), *tensors[:-1])
        made.backward(tensors[-1])
        for k, wanted in zip(graph.chosen, expected):
            grad = tensors[k].grad
            got = np.zeros_like(wanted) if grad is None else grad.numpy()
            scale = float(np.abs(wanted).max(initial=0.0)) + 1.0
            # The graph multiplies by the weights and sums, which may be fused with the operator.
            np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6 * scale)


def with_rows(to: type) -> type:
    """A class with a test method for each row that its device meets."""
    ctx = to.ctx  # type: ignore[attr-defined]
    for sample in SAMPLES:
        if ctx is not None and unavailable(ctx) is not None or is_met(sample, ctx):

            def method(self: Any, sample: Sample = sample) -> None:
                self.check(sample)

            setattr(to, f"test_{sample.name}", method)
    return to


@with_rows
class NumpyRows(Rows, unittest.TestCase):
    pass


@require(cpu(0))
@with_rows
class CpuRows(Rows, unittest.TestCase):
    ctx = cpu(0)


@require(gpu(0))
@with_rows
class GpuRows(Rows, unittest.TestCase):
    ctx = gpu(0)

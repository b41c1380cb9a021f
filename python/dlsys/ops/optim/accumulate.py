"""Sums over the steps of a run that stay on the device: losses, counts of right answers, …

A float32 sum stops counting at 2^24 and loses the digits of small terms long before. A total is
therefore two rows, the sums and what rounding took from them (Knuth, The Art of Computer
Programming 2, 4.2.2, theorem B): together 48 bits, so that counts are exact.
"""

from __future__ import annotations

import numpy as np

from ...graph.node import Node, Op, Spec
from ...graph.shapes import describe
from ...graph.signature import Signature
from .assign import check_parameter


class AccumulateOp(Op):
    """total[0] + total[1] += x, for a Parameter `total` (2, n) and x (n,)."""

    name = kernel = "accumulate"
    writes = (0,)
    signature = Signature("total", "x")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        check_parameter(node, node.inputs[0])
        if len(specs[1].shape) != 1 or specs[0].shape != (2, *specs[1].shape):
            raise node.error(f"expected a total (2, n) and (n,), got {describe(node, specs)}")
        return specs[0]

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        return [inputs[0], inputs[0]._replace(shape=inputs[1].shape)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        (sums, errors), x, (total, added), lost = arrays
        np.add(sums, x, out=total)
        np.subtract(total, sums, out=added)
        np.subtract(x, added, out=lost)
        np.subtract(total, added, out=added)
        np.subtract(sums, added, out=added)
        np.add(lost, added, out=lost)
        np.add(errors, lost, out=errors)
        np.copyto(sums, total)

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 7 * inputs[1].size


accumulate_op = AccumulateOp()

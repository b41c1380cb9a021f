"""The floating-point operations that a graph's products need, for the use of a chip's peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..executor.debug.observe import flops
from ..executor.executor import Executor
from ..graph.node import Node


def product_flops(
    fetches: Sequence[Node], feed_shapes: Mapping[Node, tuple[int, ...]] | None = None
) -> int:
    """The floating-point operations of all matrix products and convolutions of one run that
    computes `fetches`, a multiplication and an addition being two. Divided by a run's seconds and
    a chip's peak this is its MFU (model FLOPs utilization, Chowdhery et al., "PaLM", 2022);
    elementwise operators do not count.

    feed_shapes: of the Variables whose shapes are not declared. Nothing is run.

    >>> x = ad.Variable("x", (4, 8), np.float32)
    >>> profile.product_flops([nn.Linear(8, 16, rng=0)(x)])
    1024
    """
    executor = Executor(list(fetches), fusions=())
    shapes = {
        node: node.shape
        for node in executor.topo_order
        if node.op.leaf == "feed" and node.shape is not None
    }
    plan = executor.plan({**shapes, **(feed_shapes or {})})
    return sum(flops(step) for step in plan.steps if step.node.op.has_precision)

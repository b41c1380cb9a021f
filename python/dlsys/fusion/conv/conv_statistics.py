"""Batch-norm statistics where a convolution stores its result: the mean and variance of each
filter's results, which are then not read again for them.

Pattern: the statistics of a convolution with channels last. Its kernel keeps, beside each tile of
results, the moments of their columns as they are stored; a small kernel combines them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...dtypes import bfloat16
from ...graph.lines import attributed_to
from ...graph.node import Node
from ...ops.norm.batch_norm import batch_statistics_op
from ...passes.pipeline import Options, Pass
from ..shared.body import close
from ..shared.image_operators import Convolution, conv2d_channels_last_op
from ..shared.rewrite import Graph, exchange, strip_views, value_of

conv2d_channels_last_statistics_op = Convolution("conv2d_channels_last_statistics", 3)


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph in which convolutions make the statistics of their results. The
    graph must be the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    replaced: dict[Node, Node] = {}
    for statistics in graph.order:
        if statistics.op is batch_statistics_op:
            convolution = strip_views(statistics.inputs[0])
            if convolution not in replaced and _is_by_filter(convolution, statistics):
                _fuse(graph, convolution, statistics, replaced)
    return exchange(fetches, replaced)


def _is_by_filter(convolution: Node, statistics: Node) -> bool:
    """True where the statistics are those of each filter, of images (N, H, W, O)."""
    is_convolution = convolution.op is conv2d_channels_last_op
    return is_convolution and statistics.inputs[0].spec.shape[1:] == convolution.spec.shape[3:]


def _fuse(graph: Graph, convolution: Node, statistics: Node, replaced: dict[Node, Node]) -> None:
    values = {value.attrs["index"]: value for value in graph.users[statistics]}
    inputs = convolution.inputs
    kept = {key: value for key, value in convolution.attrs.items() if key != "body"}
    attrs = {key: value for key, value in kept.items() if key != "precision"}
    with attributed_to(convolution):
        moments = [values[k] if k in values else value_of(statistics, k) for k in (0, 1)]
        made = conv2d_channels_last_statistics_op(
            *inputs, body=close(inputs, [convolution, *moments]), **attrs
        )
        made.attrs = {**made.attrs, **kept}
        made.stand_for(convolution)
        replaced[convolution] = value_of(made, 0, convolution)
        for k, value in values.items():
            replaced[value] = value_of(made, k + 1, value)


def _has_kernels(options: Options) -> bool:
    return options.target.has(conv2d_channels_last_statistics_op.kernel, bfloat16)


FUSION = Pass("conv_statistics", fuse, position=47, when=_has_kernels)

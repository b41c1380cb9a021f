"""Exponential moving averages of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..describe import described
from ..dtypes import widened
from ..errors import GraphError
from ..graph.node import Node
from ..ops.leaf import Parameter
from ..ops.optim.apply import UPDATES
from ..ops.optim.assign import advance_step_op


class EMA:
    """The mean of the weights after each update, of which the weight of those that are k updates
    old is proportional to decay^k: after n updates it has seen w_1 to w_n and not w_0.

    Give it to an optimizer, `optim.Adam(1e-3, ema=optim.EMA(0.999))`; `averages` has the averaged
    Parameter of each Parameter, float32 for those of 16 bits, for graphs of their own, and
    `with ema.applied():` evaluates the graphs there are.

    >>> w = ad.Parameter(np.array([1.0, 2.0], np.float32))
    >>> average = optim.EMA(0.9)
    >>> optimizer = optim.SGD(0.1, params=[w], ema=average)
    >>> optimizer.ema is average
    True
    """

    __repr__ = described

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise GraphError(f"EMA: expected 0 <= decay < 1, got {decay}")
        self.decay = decay
        self.step = Parameter(np.int64(0), "ema.step", trainable=False)
        self.averages: dict[Parameter, Parameter] = {}

    def updates(
        self, values: Mapping[Parameter, Node], count: Node | None = None, every: int = 1
    ) -> list[Node]:
        """The nodes that take the values that Parameters have after an update into their averages,
        in the last of every `every` runs if `count` counts the runs before.
        """
        accumulation: dict[str, Any] = {} if count is None else {"count": count, "every": every}
        nodes = [advance_step_op(self.step, **accumulation)]
        for parameter, value in values.items():
            if parameter not in self.averages:
                name = f"{parameter.name}.average"
                value_now = parameter.asnumpy().astype(widened(parameter.dtype))
                self.averages[parameter] = Parameter(value_now, name, trainable=False)
            average = self.averages[parameter]
            attrs = dict(step=self.step, keep=self.decay, **accumulation)
            nodes.append(UPDATES["average_update"](average, value, **attrs))
        return nodes

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within `with`, the Parameters have their averages' values; afterwards their own again,
        so that what is trained within is lost. Before the first update there is nothing to apply.
        """
        averages = self.averages if self.step.asnumpy() else {}
        own = {parameter: parameter.asnumpy() for parameter in averages}
        try:
            for parameter, average in averages.items():
                parameter.set(average.asnumpy())
            yield
        finally:
            for parameter, value in own.items():
                parameter.set(value)

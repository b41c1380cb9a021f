"""Optimizers: they build update nodes, so a training step is a graph like any other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import GraphError
from .graph.gradients import gradients
from .graph.node import Node, find_topo_sort
from .ops.source import Parameter
from .ops.update import group_op, sgd_momentum_update_op, sgd_update_op


class SGD:
    """Stochastic gradient descent: `v = momentum · v + g`, `w -= lr · v` (without momentum, `w -=
    lr · g`).

    `lr` is a Parameter of one number: `optimizer.lr.set(0.01)` takes effect at the next run of
    every executor.
    """

    def __init__(self, lr: float, momentum: float = 0.0) -> None:
        if not lr >= 0 or not 0 <= momentum < 1:
            raise GraphError(
                f"SGD: expected lr >= 0 and 0 <= momentum < 1, got lr={lr}, momentum={momentum}"
            )
        self.lr = Parameter(np.float32(lr), name="lr", trainable=False)
        self.momentum = momentum
        self.velocity: dict[Parameter, Parameter] = {}

    def minimize(self, loss: Node, parameters: Sequence[Parameter]) -> Node:
        """One node that, when fetched, updates every given Parameter by the gradient of `loss` and
        makes the effects of the loss's nodes (running statistics, random steps); its value is None.
        """
        grads = gradients(loss, parameters)
        updates = [self._update(w, grad) for w, grad in zip(parameters, grads)]
        return group_op(*updates, *effects_of(loss), name="train")

    def _update(self, parameter: Parameter, grad: Node) -> Node:
        if not self.momentum:
            return sgd_update_op(parameter, grad, self.lr)
        if parameter not in self.velocity:
            zeros = np.zeros(parameter.shape, parameter.dtype)
            self.velocity[parameter] = Parameter(
                zeros, f"{parameter.name}.velocity", trainable=False
            )
        velocity = self.velocity[parameter]
        return sgd_momentum_update_op(parameter, velocity, grad, self.lr, momentum=self.momentum)


def effects_of(loss: Node) -> list[Node]:
    """The effects that the nodes behind `loss` carry, each once, in the order of the graph."""
    return list(dict.fromkeys(e for node in find_topo_sort([loss]) for e in node.effects))

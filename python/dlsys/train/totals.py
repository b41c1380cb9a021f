"""Totals: the loss and the metrics of many steps, summed on the device in one Parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import autodiff as ad
from ..errors import GraphError
from .metrics import Metric, several


class Totals:
    """A Parameter that `update`, an effect of each step, adds a batch's figures to: the loss times
    the rows, the rows (the first extent of the output, or of the first of several), and what each
    metric counts.
    """

    def __init__(self, loss: ad.Node, output: Any, label: Any, metrics: Sequence[Metric]) -> None:
        names = ["loss", *(metric.name for metric in metrics)]
        if len(set(names)) < len(names):
            raise GraphError(f"metrics need names of their own, got {', '.join(names)}")
        self._metrics = tuple(metrics)
        # Known with the shapes: no kernel counts the rows.
        first = next(iter(several(output)))
        rows = ad.mean_op(ad.sum_op(ad.oneslike_op(first), axis=0))
        parts = [ad.reshape_op(ad.cast_op(x, np.float32), (1,)) for x in (loss, rows)]
        parts[0] = parts[0] * parts[1]
        parts += [metric.sums(output, label) for metric in metrics]
        size = 2 + sum(metric.size for metric in metrics)
        self.parameter = ad.Parameter(np.zeros((2, size), np.float32), "totals", trainable=False)
        self.parameter.of_rank = True
        self.update = ad.accumulate_op(self.parameter, ad.concat(parts))

    def zeros(self) -> np.ndarray:
        """The sums of nothing."""
        return np.zeros(self.parameter.shape[1])

    def take(self) -> np.ndarray:
        """The sums since they were taken last, float64; waits for the device."""
        sums = self.parameter.asnumpy().astype(np.float64).sum(axis=0)
        self.reset()
        return sums

    def reset(self) -> None:
        """Starts from nothing."""
        self.parameter.set(np.zeros(self.parameter.shape, np.float32))

    def figures(self, sums: np.ndarray) -> dict[str, Any]:
        """The mean loss and the metrics, by name."""
        made: dict[str, Any] = {"loss": float(sums[0] / sums[1]) if sums[1] else math.nan}
        at = 2
        for metric in self._metrics:
            value = metric.result(sums[at : at + metric.size])
            made[metric.name] = float(value) if np.ndim(value) == 0 else value
            at += metric.size
        return made

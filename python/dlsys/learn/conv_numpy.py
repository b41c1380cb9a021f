"""numpy's rungs of convolution, measured as those of a device are."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence

import numpy as np

from ..executor.tune.microbenchmark import DRAWN
from ..graph.node import Node
from ..rungs import Algorithm

_ROUNDS = 5
_LONG = 0.5  # seconds; what takes longer is not repeated


class NumpyBenchmark:
    """A `Microbenchmark` of a convolution's node in numpy; an algorithm is a rung by its name."""

    def __init__(self, node: Node, drawn: np.ndarray) -> None:
        """`drawn`: DRAWN elements, which every operand repeats."""
        self._node, self._drawn = node, drawn
        self._inputs = [
            np.resize(np.roll(drawn, 7919 * k), x.spec.shape) for k, x in enumerate(node.inputs)
        ]
        self._output = np.empty(node.spec.shape, np.float32)

    def value(self, k: int, at: np.ndarray) -> np.ndarray:
        """The elements of input `k` at indices in row-major order."""
        return np.roll(self._drawn, 7919 * k)[at % DRAWN]

    def elements(self, at: Sequence[int]) -> np.ndarray:
        """The output's elements at indices in row-major order, of the last run."""
        return self._output.reshape(-1)[list(at)]

    def workspace_nbytes(self, algorithm: Algorithm) -> int:
        """The most memory that a run takes at a time. Raises NotApplicableError where the rung
        cannot compute this.
        """
        tracemalloc.start()
        try:
            self._run(algorithm)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def us_about(self, algorithm: Algorithm) -> float:
        """The microseconds of one run."""
        start = time.perf_counter()
        self._run(algorithm)
        return (time.perf_counter() - start) * 1e6

    def us(self, algorithm: Algorithm, about: float) -> float:
        """The least microseconds of several runs, of one where it takes long."""
        rounds = _ROUNDS if about < _LONG * 1e6 else 0
        return min([about, *(self.us_about(algorithm) for _ in range(rounds))])

    def _run(self, algorithm: Algorithm) -> None:
        node = self._node
        node.attrs = {**node.attrs, "algo": algorithm.name}
        planned = node.op.workspace(node, [x.spec for x in node.inputs], [node.spec])
        scratch = [np.empty(spec.shape, spec.dtype) for spec in planned]
        node.op.numpy(node, *self._inputs, *scratch, self._output)

"""Matrices with gradients under the names that programs for micrograd on CUDA use.

    from dlsys.micrograd import MLP, Operations, Tensor

Samples are columns. Everything is recorded and computed as `dlsys.Tensor` does it, which is the way
to write new programs: a training step is planned once, on "numpy", "cpu" and "gpu".
"""

from __future__ import annotations

from .mlp import MLP
from .operations import Operations
from .tensor import Tensor

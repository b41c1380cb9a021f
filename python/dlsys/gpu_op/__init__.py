"""Kernels as plain functions on NDArrays of either native device: those of the assignment and those
of networks.

The last argument is the output; the elementwise functions accept an input as the output. All arrays
are float32 on one device. Every function raises TypeError for what is no NDArray and ShapeError for
shapes, dtypes or devices that do not fit, before anything is written.
"""

from .assignment import *
from .networks import *

"""Kernels as plain functions on NDArrays of either native device: those of the assignment and those
of networks.

The names say what an array is: in_arr, in_arr_a, in_arr_b, mat_a, mat_b and x are inputs, f is a
filter (O, C, kH, kW), param, grad, mean and square are of an update; dy and out_grad are the
gradient of the output, in_grad_arr that of what comes behind; out_arr, mat_c, out, output, dx, df,
in_grad, scale_grad and bias_grad are written. trans_a and trans_b say that a matrix is given
transposed; kernel_h and kernel_w are the extents of a window, padding and stride one integer or
(height, width); scale, eps, lr, beta1 and beta2 are numbers as of `optim.Adam` and
`F.batch_norm`; mode is "constant".

The last argument is the output; the elementwise functions accept an input as the output. All arrays
are float32 on one device. Every function raises TypeError for what is no NDArray and ShapeError for
shapes, dtypes or devices that do not fit, before anything is written.
"""

from .assignment import *
from .networks import *

"""Kernels say which calls they serve before there is memory for one."""

import unittest

import numpy as np

from dlsys.errors import KernelError
from dlsys.graph.node import Spec
from dlsys.runtime.device import gpu
from dlsys.runtime.interface import interface
from dlsys.runtime.library import load
from support.devices import require

FLOAT32, UINT8, INT32 = map(np.dtype, ("float32", "uint8", "int32"))


def conv_pool(device, channels, filters, plane, size, window):
    """The answers of the three kernels for a convolution without padding and the pool behind it."""
    extent = (plane - size + 1) // window
    x = Spec((8, channels, plane, plane), FLOAT32)
    f = Spec((filters, channels, size, size), FLOAT32)
    y = Spec((8, filters, extent, extent), FLOAT32)
    code = y._replace(dtype=UINT8)
    before, fits = interface.struct("HW")(), load().fits
    return (
        fits(device, "conv2d_pool", x, f, [], y, code, before, window, 1, 0),
        fits(device, "conv2d_pool_data_gradient", f, y, code, x, before, window, 0),
        fits(device, "conv2d_pool_filter_gradient", x, y, code, [f], before, window, 0),
    )


class FitsTest(unittest.TestCase):
    def test_cpu_conv_pool_fits_few_channels(self):
        self.assertEqual(conv_pool("cpu", 64, 8, 12, 3, 2), (True, True, True))
        self.assertEqual(conv_pool("cpu", 65, 8, 12, 3, 2), (False, False, False))

    def test_what_the_checks_refuse_does_not_fit(self):
        self.assertEqual(conv_pool("cpu", 4, 4, 24, 8, 2), (False, False, False))

    def test_a_kernel_that_says_nothing_fits(self):
        x = Spec((3,), FLOAT32)
        self.assertTrue(load().fits("cpu", "relu", x, x))

    def test_unknown_kernel(self):
        with self.assertRaisesRegex(KernelError, "no_such: device cpu has no such kernel"):
            load().fits("cpu", "no_such")

    def test_number_of_arguments(self):
        with self.assertRaisesRegex(KernelError, "conv2d_pool: its kernel on cpu takes 9"):
            load().fits("cpu", "conv2d_pool", Spec((1,), FLOAT32))

    def test_dtype_that_no_device_holds(self):
        x = Spec((3,), np.dtype("complex64"))
        with self.assertRaisesRegex(KernelError, "no native device holds complex64"):
            load().fits("cpu", "conv2d_pool", x)


@require(gpu(0))
class FitsGpuTest(unittest.TestCase):
    def test_conv_pool_fits_shared_memory(self):
        self.assertEqual(conv_pool("cuda", 8, 16, 14, 5, 2), (True, True, True))
        self.assertEqual(conv_pool("cuda", 64, 64, 28, 5, 2), (False, False, False))

    def test_each_gradient_has_limits_of_its_own(self):
        self.assertEqual(conv_pool("cuda", 1, 20, 40, 3, 2), (True, False, True))

    def test_mlp_head(self):
        self.assertTrue(self.head((784, 32), (32, 10)))
        self.assertFalse(self.head((784, 64), (64, 10)))  # elements
        self.assertFalse(self.head((1025, 10)))  # width
        self.assertFalse(self.head(*[(10, 10)] * 7))  # layers

    @staticmethod
    def head(*shapes):
        weights = [Spec(shape, FLOAT32) for shape in shapes]
        x, logits = Spec((100, shapes[0][0]), FLOAT32), Spec((100, shapes[-1][1]), FLOAT32)
        values = [Spec((100, columns), FLOAT32) for _, columns in shapes[:-1]]
        name = next(
            name for device, name, _ in load().index if device == "cuda" and "mlp_head" in name
        )
        partials, loss = Spec((512,), INT32), Spec((), FLOAT32)
        options = interface.struct("HeadOptions")()
        given = x, weights, [], logits, partials, options, loss, logits, values, []
        return load().fits("cuda", name, *given)

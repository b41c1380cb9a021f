"""`mnist_dlsys.py -m cnn --conv-algo NAME`: every rung trains to the same accuracy."""

from __future__ import annotations

import contextlib
import unittest

from dlsys.errors import DeviceError
from dlsys.rungs import CONV, rungs_among
from dlsys.runtime.device import cpu, gpu, unavailable
from dlsys.runtime.library import load
from support import sample
from support.devices import not_emulated, require, slow
from support.small_digits import ENDING, TEST, Folder

OPTIONS = ("-m", "cnn", "-e", 3, "--batch-size", 20, "--seed", 3)
# What LeNet-5 has not: filters of 3 x 3, and one channel a group.
REFUSED = {
    "winograd": "winograd( cannot compute this: it)? is for 3 ?[x×] ?3 filters at stride 1 without "
    "dilation; use (auto, )?naive, ",
    "depthwise": "depthwise( cannot compute this: it)? is for one channel a group; "
    "use (auto, )?naive, im2col",
}


@slow
class EveryRung(Folder):
    def accuracy(self, device: str, rung: str) -> float:
        out = self.done(*OPTIONS, "-c", device, "--conv-algo", rung)
        found = ENDING.search(out)
        assert found is not None, out
        return float(found[2])

    def check(self, device: str, rungs: tuple[str, ...]) -> None:
        expected = self.accuracy(device, "auto")
        self.assertGreater(expected, 0.9)
        for rung in sample.of(rungs, 4):
            with self.subTest(device=device, rung=rung):
                if rung in REFUSED:
                    options = "-c", device, "--conv-algo", rung, "--data-dir", self.data
                    self.refused(REFUSED[rung], *OPTIONS, *options, status=1)
                    continue
                # Rounding differs from rung to rung, which may turn one image.
                self.assertAlmostEqual(self.accuracy(device, rung), expected, delta=1.01 / TEST)

    @unittest.skipIf(unavailable(cpu(0)), "not here: the native library")
    def test_on_the_cpu(self) -> None:
        self.check("cpu", rungs_among(load().algorithms("cpu", "conv2d")))

    def test_on_numpy(self) -> None:
        self.check("numpy", CONV.numpy)

    @not_emulated
    @require(gpu(0))
    def test_on_a_gpu(self) -> None:
        names, there = load().algorithms("cuda", "conv2d"), []
        for rung in rungs_among(names):
            with contextlib.suppress(DeviceError):  # its library is not here
                load().algorithm_source("cuda", "conv2d", names.index(rung) + 1)
                there.append(rung)
        self.check("gpu", tuple(there))

    def test_the_option_is_named_in_what_is_refused(self) -> None:
        told = "--conv-algo cudnn: device numpy has no such rung; use auto, naive, fft"
        options = "-c", "numpy", "--conv-algo", "cudnn", "--data-dir", self.data
        self.refused(told, *OPTIONS, *options, status=1)
        told = "--conv-algo is for what convolves, cnn and resnet; mlp does not: leave it out"
        self.refused(told, "-m", "mlp", "--conv-algo", "fft", "--data-dir", self.data, status=2)


if __name__ == "__main__":
    unittest.main()

"""`python -m dlsys.learn`: the ladder on this machine, and its drawing."""

from __future__ import annotations

import contextlib
import io
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

from dlsys.learn import gemm
from dlsys.learn.__main__ import main
from dlsys.learn.chart import bars
from dlsys.learn.gemm import ROUNDING, Shape, climb
from dlsys.runtime.device import cpu, gpu, unavailable
from support.devices import require


def run(*arguments: str) -> tuple[int, str, str]:
    """The status, the output and the errors of a command."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch("sys.argv", ["learn", *arguments]),
        mock.patch.object(gemm, "_ROUND_SECONDS", 1e-4),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        return main(), out.getvalue(), err.getvalue()


@unittest.skipIf(unavailable(cpu(0)), "not here: the native library")
class Learn(unittest.TestCase):
    def test_the_ladder_is_run_and_drawn(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ladder.svg"
            status, out, _ = run("gemm", "--device", "cpu", "--size", "40", "--picture", str(path))
            drawn = ElementTree.parse(path).getroot()
        self.assertEqual(status, 0)
        self.assertIn("40 x 40 x 40 NN", out)
        self.assertIn("threads (fp32)", out)
        self.assertGreater(out.count("GFLOP/s"), 0)
        texts = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
        self.assertIn("threads, fp32", texts)

    def test_convolutions(self) -> None:
        for direction, rungs in (("forward", 5), ("data", 5), ("filter", 5)):
            status, out, _ = run(
                *("conv", "--device", "cpu", "--shape", "2,4,7,6,3,1,1"), "--direction", direction
            )
            self.assertEqual(status, 0)
            self.assertIn(f"2 x 4 x 7², 6 filters 3² padded by 1, {direction}", out)
            errors = {
                line.split(" (fp32)")[0]: float(line.split("at most ")[1].split(" x ")[0])
                for line in out.splitlines()
                if "(fp32)" in line
            }
            self.assertGreater(len(errors), rungs)
            # A sum of K terms in any order stays below K; Winograd's transforms add theirs.
            self.assertLess(errors["implicit"], 2 * 7 * 7 * 2)
            self.assertLess(errors["winograd"], 1000)

    def test_shapes_that_are_none(self) -> None:
        for shape in ("2,4,7", "2,4,seven,6,3", "2,4,7,6,9", "2,4,7,6,3,1,1,5", "0,4,7,6,3"):
            status, _, err = run("conv", "--device", "cpu", "--shape", shape)
            self.assertEqual(status, 2, shape)
            self.assertIn("--shape: ", err)

    def test_what_cannot_be_run_is_said(self) -> None:
        cases = {
            ("gemm", "--precision", "fp31"): "expected fp32, tf32, 3xtf32, bf16, fp16, fp8 here",
            ("gemm", "--size", "-5"): "--size: expected an integer from 1 on, got -5",
            ("gemm", "--size", "0"): "--size: expected an integer from 1 on, got 0",
            ("gemm", "--size", "3000000"): "(?i)unable to allocate|memory",
            ("gemm", "--shape", "2,4,7,6,3"): "--shape is not of gemm",
            ("gemm", "--direction", "data"): "--direction is not of gemm",
            ("conv", "--size", "40"): "--size is not of conv",
            ("gemm", "--size", "8", "--picture", "/nowhere/a.svg"): "there is no folder /nowhere",
        }
        for arguments, told in cases.items():
            with self.subTest(arguments):
                status, _, err = run(*arguments, "--device", "cpu")
                self.assertEqual(status, 2)
                self.assertRegex(err, told)
        status, _, err = run("gemm", "--device", "numpy", "--precision", "tf32")
        self.assertEqual((status, "expected fp32 on numpy" in err), (2, True))

    @require(gpu(0))
    def test_both_ladders_on_a_gpu(self) -> None:
        status, out, _ = run("gemm", "--device", "gpu", "--size", "40", "--precision", "fp32,bf16")
        self.assertEqual(status, 0)
        for rung in ("naive", "tiled", "register", "warp"):
            self.assertRegex(out, rf"{rung} \(fp32\) .* error at most \d+\.\d x")
        self.assertIn("tensor (bf16)", out)
        for direction in ("forward", "data", "filter"):
            shape = "--shape", "1,5,6,7,3,1,1"
            status, out, _ = run("conv", "--device", "gpu", *shape, "--direction", direction)
            self.assertEqual(status, 0)
            for rung in ("naive", "im2col", "winograd", "implicit"):
                self.assertRegex(out, rf"{rung} \(fp32\) .* error at most \d+\.\d x")

    @require(cpu(0))
    def test_the_heuristic_comes_first(self) -> None:
        """Of operands that repeat the numbers that are drawn."""
        auto, *rungs = climb(cpu(0), Shape(1100, 40, 1000, True), auto=True)
        self.assertEqual((auto.algorithm, rungs[0].algorithm), ("auto", "naive"))
        self.assertLess(max(one.error for one in (auto, *rungs)), 1000)
        down = climb(cpu(0), Shape(11, 4, 10), auto=True, down=True)
        self.assertEqual([one.algorithm for one in down][-2:], ["naive", "auto"])

    @require(gpu(0))
    def test_products_of_16_bits(self) -> None:
        found = list(climb(gpu(0), Shape(33, 24, 48), ("bf16", "fp32", "fp16")))
        for precision, most in (("bf16", 2**16), ("fp16", 2**13), ("fp32", 48)):
            rungs = [one for one in found if one.precision == precision]
            self.assertGreater(len(rungs), 3)
            for one in rungs:
                self.assertTrue(0 < one.error <= most, one)

    @require(gpu(0))
    def test_a_product_of_8_bits_has_two_figures(self) -> None:
        """With the rounding of its operands, which is off by up to 2^-4 of each, and of codes."""
        for flags in ((False, False), (True, False), (False, True)):
            both, codes = climb(gpu(0), Shape(40, 24, 72, *flags), ("fp8",))
            self.assertEqual((both.algorithm, codes.algorithm), ("hopper", "hopper codes"))
            self.assertEqual(both.error, codes.error)
            self.assertTrue(2**16 < both.error < 2**21, both)
        self.assertEqual(list(climb(cpu(0), Shape(40, 24, 72), ("fp8",))), [])

    @require(gpu(0))
    def test_what_multiplies_in_float32_is_measured_once(self) -> None:
        """Where that is asked: its figures at the other precisions would be those at fp32."""
        precisions = ("fp32", "3xtf32", "tf32", "bf16")
        every = list(climb(gpu(0), Shape(33, 24, 48), precisions))
        once = list(climb(gpu(0), Shape(33, 24, 48), precisions, once=True))

        def pairs(found: Any) -> list[tuple[str, str]]:
            return [(one.algorithm, one.precision) for one in found]

        left_out = set(pairs(every)) - set(pairs(once))
        self.assertIn(("naive", "bf16"), left_out)
        self.assertFalse(set(pairs(once)) - set(pairs(every)))
        self.assertEqual(
            [one for one in pairs(every) if one[1] == "fp32"],
            [one for one in pairs(once) if one[1] == "fp32"],
        )
        errors = {(one.algorithm, one.precision): one.error for one in every}
        for name, precision in left_out - {(name, "bf16") for name, _ in left_out}:
            self.assertEqual(errors[name, precision], errors[name, "fp32"], name)

    def test_numpy_has_ladders_too(self) -> None:
        for flags in ((False, False), (True, False), (False, True)):
            found = list(climb(None, Shape(33, 20, 500, *flags)))
            self.assertEqual([one.algorithm for one in found], ["naive", "blas"])
            self.assertLess(max(one.error for one in found), 500)
        for direction in ("forward", "data", "filter"):
            shape = "--shape", "2,4,7,6,3,1,1", "--direction", direction
            status, out, _ = run("conv", "--device", "numpy", *shape)
            self.assertEqual(status, 0)
            for rung in ("naive", "fft", "winograd", "implicit", "im2col"):
                self.assertRegex(out, rf"{rung} \(fp32\) .* error at most \d+\.\d x")

    def test_errors_are_in_units_of_rounding(self) -> None:
        for found in climb(cpu(0), Shape(33, 20, 500)):
            self.assertLess(found.mean_error, found.error)
            self.assertLess(found.error, 500)  # K: the bound of a sum in any order
        self.assertEqual(ROUNDING, 2.0**-24)

    def test_bars_are_as_long_as_their_numbers(self) -> None:
        first, second = bars([("a", 1.0), ("bc", 2.0)], "x").splitlines()
        self.assertEqual((first.count("█"), second.count("█")), (24, 48))
        self.assertTrue(second.startswith("bc "))

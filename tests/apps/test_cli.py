"""The command line as a person uses it: its output, its exit statuses, its errors."""

from __future__ import annotations

import functools
import gzip
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

from dlsys.runtime.device import cpu, gpu
from support import sample
from support.devices import native_contexts, not_emulated, require, slow, together

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "mnist_dlsys.py"
ENDING = re.compile(r"validation set accuracy=(0\.\d{6})\ntest set accuracy=(0\.\d{6})\n\Z")


def command(*arguments: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    """Runs the command line to its end."""
    line = [sys.executable, str(script), *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def losses(output: str) -> list[float]:
    """The losses that `-l` printed, an epoch each."""
    return [float(value) for value in re.findall(r"^epoch \d+/\d+  loss (\S+)", output, re.M)]


@functools.cache
def curve(*arguments: str, device: str = "numpy", epochs: int = 3) -> list[float]:
    """The losses of a training, which several tests look at."""
    return losses(command(*arguments, "-c", device, "-e", str(epochs), "-l").stdout)


@together
@slow
class Training(unittest.TestCase):
    def test_logreg_on_numpy_ends_with_the_two_lines(self):
        done = command("-m", "logreg", "-c", "numpy", "-e", "10", "-l")
        self.assertEqual(done.returncode, 0, done.stderr)
        ending = ENDING.search(done.stdout)
        self.assertIsNotNone(ending, done.stdout)
        self.assertGreaterEqual(float(ending[1]), 0.92)
        found = losses(done.stdout)
        self.assertEqual(len(found), 10)
        self.assertEqual(found, sorted(found, reverse=True), "the loss falls")
        self.assertEqual(done.stderr, "", "no bar where there is no terminal")

    def test_the_old_path_and_a_partial_last_batch(self):
        door = ROOT / "tests" / "mnist_dlsys.py"
        done = command("-m", "logreg", "-e", "1", "--batch-size", "300", script=door)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, ENDING)

    def test_the_assignments_networks_keep_their_weights_and_their_order(self):
        """The losses that they had when the command line could do nothing else."""
        known = (
            (("-m", "logreg"), [0.528706, 0.456562]),
            (("-m", "mlp", "--lr", "0.1", "--seed", "5"), [0.663937, 0.511793]),
            (("-m", "mlp", "--lr", "0.1"), [0.678506, 0.517261]),
        )
        for arguments, expected in sample.of(known, 2):
            for ours, theirs in zip(curve(*arguments)[:2], expected, strict=True):
                self.assertAlmostEqual(ours, theirs, delta=1e-3, msg=f"{arguments}")

    def test_profile_prints_operators_and_counters(self):
        done = command("-m", "logreg", "-c", "numpy", "-e", "1", "--profile")
        self.assertRegex(done.stdout, r"(?m)^operator +calls +ms +share +GB/s +GFLOP/s$")
        self.assertRegex(done.stdout, r"(?m)^matmul +100 ")
        self.assertRegex(done.stdout, r"(?m)^total of 50 runs ")

    @not_emulated
    def test_native_devices_agree_with_numpy(self):
        # At the assignment's rate the MLP's first epochs amplify rounding beyond any bound (float32
        # and float64 on one device part by 0.06), so its curves are compared at a tenth of it.
        contexts = native_contexts()
        if not contexts:
            self.skipTest("no native device")
        for arguments in (("-m", "mlp", "--lr", "0.1"), *sample.rest([("-m", "logreg")])):
            expected = curve(*arguments)
            self.assertEqual(len(expected), 3)
            for ctx in contexts:
                for ours, theirs in zip(curve(*arguments, device=ctx.name), expected, strict=True):
                    self.assertAlmostEqual(ours, theirs, delta=1e-3, msg=f"{arguments} {ctx}")


class MlpAccuracy:
    @slow
    @sample.left_to_full("its first losses are compared with numpy's")
    def test_mlp_reaches_its_accuracy(self):
        done = command("-m", "mlp", "-c", self.ctx.name, "-e", "10", "-l")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreaterEqual(float(ENDING.search(done.stdout)[1]), 0.965)


@require(cpu(0))
class CpuMlpAccuracy(MlpAccuracy, unittest.TestCase):
    ctx = cpu(0)


@require(gpu(0))
@not_emulated
class GpuMlpAccuracy(MlpAccuracy, unittest.TestCase):
    ctx = gpu(0)


@slow
class ConvolutionalAccuracy(unittest.TestCase):
    def check(self, device: str, model: str, epochs: int, accuracy: float) -> None:
        done = command("-m", model, "-c", device, "-e", str(epochs))
        self.assertEqual(done.returncode, 0, done.stderr)
        ending = ENDING.search(done.stdout)
        self.assertIsNotNone(ending, done.stdout)
        self.assertGreaterEqual(float(ending[2]), accuracy)

    @require(cpu(0))
    def test_cnn_after_an_epoch_on_the_cpu(self):
        self.check("cpu", "cnn", 1, 0.975)

    @not_emulated
    @require(gpu(0))
    def test_cnn_on_the_gpu(self):
        self.check("gpu", "cnn", 3, 0.988)

    @not_emulated
    @require(gpu(0))
    def test_resnet_on_the_gpu(self):
        self.check("gpu", "resnet", 3, 0.992)


@slow
class Errors(unittest.TestCase):
    def assert_refused(self, done: subprocess.CompletedProcess[str], status: int, text: str):
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.assertRegex(done.stderr, text)
        self.assertNotIn("Traceback", done.stderr)

    def test_unknown_options(self):
        self.assert_refused(command("--batchsize", "3"), 2, "unrecognized arguments: --batchsize 3")
        self.assert_refused(command("-m", "cnnn"), 2, "invalid choice: 'cnnn'")
        self.assert_refused(command("--batch-size", "0"), 2, "expected a positive number, got 0")

    def test_version(self):
        self.assertRegex(command("--version").stdout, r"^dlsys \d+\.\d+\.\d+\n$")

    def test_a_corrupt_data_file_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            for file in (ROOT / "data" / "mnist").glob("*.gz"):
                (Path(folder) / file.name).write_bytes(file.read_bytes())
            bad = Path(folder) / "t10k-labels-idx1-ubyte.gz"
            content = bytearray(gzip.decompress(bad.read_bytes()))
            content[100] ^= 1
            bad.write_bytes(gzip.compress(bytes(content)))
            done = command("-m", "logreg", "-e", "1", "--data-dir", folder)
            self.assert_refused(done, 1, "^error: .*t10k-labels-idx1-ubyte")

    def test_gpu_asked_for_where_there_is_none(self):
        # CUDA shows the process no GPU, whatever the machine has
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="-1"):
            done = command("-m", "logreg", "-e", "1", "-c", "gpu")
        self.assert_refused(done, 1, "^error: .*(driver|library|GPU|make lib)")

    def interrupted(self, *arguments: str, after: str) -> str:
        """The stderr after Ctrl-C, sent once a line that begins with `after` was printed."""
        line = [sys.executable, str(SCRIPT), "-c", "numpy", *arguments]
        with subprocess.Popen(line, stdout=-1, stderr=-1, text=True) as process:
            while not (shown := process.stdout.readline()).startswith(after):
                self.assertTrue(shown, "it ended early")
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, stderr)
        return stderr

    def test_ctrl_c_says_what_was_done(self):
        stderr = self.interrupted("-m", "mlp", "-e", "500", after="epoch 1/")
        self.assertRegex(stderr, r"^interrupted; done: \d+ epochs and \d+ of 50 batches\n$")

    def test_a_reader_that_goes_away_ends_it_quietly(self):
        line = [sys.executable, str(SCRIPT), "-m", "logreg", "-c", "numpy", "-e", "1"]
        with subprocess.Popen(line, stdout=-1, stderr=-1, text=True) as process:
            process.stdout.close()
            stderr = process.stderr.read()
        self.assertEqual((process.returncode, stderr), (1, ""))

    def test_cnn_takes_a_batch_size_and_a_rate(self):
        options = ("-m", "cnn", "--batch-size", "250", "--lr", "0.02")
        stderr = self.interrupted(*options, after="training cnn on numpy")
        self.assertRegex(stderr, r"^interrupted; done: 0 epochs and \d+ of 200 batches\n$")

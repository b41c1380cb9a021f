"""The messages of the command line where something around it is at fault: streams, names, sizes,
rates, environment. A fault is one sentence on standard error, a status of 1 or 2, and never a hang.
"""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import numpy as np

import support.small_digits as small
from dlsys import train
from dlsys.apps import streams
from dlsys.apps.setup import SCHEDULES, UsageError, choose
from dlsys.data import write_idx
from dlsys.data.formats import mnist
from dlsys.errors import DivergedError
from dlsys.runtime.device import cpu
from support.devices import require, slow
from support.small_digits import ENDING, MLP, Done, Folder, needs

BARE = (*MLP, "-e", 1, "-c", "numpy")


class Faults(Folder):
    def sentence(self, pattern: str, status: int, *arguments: object) -> Done:
        """A run that is refused in one line, before it trains."""
        done = small.run(*arguments)
        self.assertEqual(done.status, status, done)
        line = done.err.splitlines()[-1]
        self.assertRegex(line, pattern)
        if status == 1:
            self.assertEqual(len(done.err.splitlines()), 1, done.err)
        self.assertNotIn("Traceback", done.err)
        self.assertNotIn("epoch 1", done.out)
        return done


class Names(Faults):
    def test_a_name_that_is_empty(self) -> None:
        for option in ("checkpoint", "resume", "report", "log", "data-dir"):
            with self.subTest(option):
                pattern = f"error: argument --{option}: expected a path, got nothing$"
                self.sentence(pattern, 2, *BARE, f"--{option}", "")
        self.sentence("expected a path, got nothing", 2, "evaluate", "")
        self.sentence("expected a path, got nothing", 2, "predict", "x", "")

    def test_a_fifo_or_a_folder_where_a_file_should_be(self) -> None:
        """Nobody ever writes into the FIFO, or reads it."""
        fifo, image = self.folder / "fifo", self.data / "t10k-images-idx3-ubyte"
        os.mkfifo(fifo)
        options = (*BARE, "--data-dir", self.data)
        for pattern, *arguments in (
            ("fifo is a FIFO, expected a file", "evaluate", fifo),
            ("fifo is a FIFO, expected a file", "predict", fifo, image),
            ("fifo is a FIFO, expected a file", *options, "--resume", fifo),
            ("fifo: no folder can be made there: File exists", *options, "--checkpoint", fifo),
            ("fifo.*the log cannot be written: File exists", *options, "--log", fifo),
            (f"{self.data} has no last.safetensors", "evaluate", self.data),
        ):
            with self.subTest(arguments=arguments):
                self.sentence(f"^error: .*{pattern}", 1, *arguments)
        run = self.folder / "run"
        self.done(*BARE, "--checkpoint", run)
        images = "a folder without images, whose names end in .bmp, .*"
        for pattern, path, taken in (("a FIFO", fifo, None), ("a folder", self.data, images)):
            with self.subTest(path=path):
                refused = f"^error: {path} is {pattern}, expected a file$"
                told = f"^error: {path} is {taken}$" if taken else refused
                self.sentence(told, 1, "predict", run, path)
                self.sentence(refused, 1, "evaluate", run, path, image)
                self.sentence(refused, 1, "evaluate", run, image, path)

    def test_a_folder_has_a_fifo_for_a_checkpoint(self) -> None:
        run = self.folder / "run"
        run.mkdir()
        os.mkfifo(run / "last.safetensors")
        options = (*BARE, "--data-dir", self.data)
        self.sentence("error: .*run has the checkpoints of a run", 2, *options, "--checkpoint", run)
        self.sentence("last.safetensors is a FIFO", 1, "--resume", run)
        os.replace(run / "last.safetensors", run / "best.safetensors")
        self.sentence(r"another run \(best.safetensors\)", 1, *options, "--checkpoint", run)


@needs("matplotlib", "viz")
class Reports(Faults):
    """The page itself is a short one here."""

    def setUp(self) -> None:
        super().setUp()
        page = mock.patch("dlsys.viz.report.html", return_value="<html></html>")
        page.start()
        self.addCleanup(page.stop)

    def run_with(self, path: Path) -> tuple[Done, Path]:
        kept = self.folder / f"kept of {path.name}"
        options = ("--checkpoint", kept, "--log", kept, "--data-dir", self.data)
        return small.run(*BARE, *options, "--report", path), kept

    def check_saved(self, done: Done, kept: Path, pattern: str) -> None:
        self.assertEqual(done.status, 1)
        self.assertRegex(done.err, rf"\Aerror: --report {pattern}\n\Z")
        self.assertRegex(done.out, ENDING)
        self.assertEqual(train.load(kept).header["epoch"], 1)
        self.assertIn('"event": "epoch"', (kept / "log.jsonl").read_text())

    def test_a_full_disk_costs_the_report_alone(self) -> None:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        class Full:
            def write(self, content: bytes) -> None:
                raise full

        page = self.folder / "page.html"
        with mock.patch("dlsys.viz.report.replacing") as replacing:
            replacing.return_value.__enter__.return_value = Full()
            replacing.return_value.__exit__.return_value = False
            done, kept = self.run_with(page)
        self.check_saved(done, kept, f"{page}: it cannot be written: No space left on device")
        self.assertFalse(page.exists())
        done, kept = self.run_with(Path("/dev/full"))
        self.check_saved(done, kept, "/dev/full: it cannot be written: No space left on device")

    def test_a_device_takes_the_report(self) -> None:
        done, _ = self.run_with(Path(os.devnull))
        self.assertEqual((done.status, done.err), (0, ""))
        self.assertTrue(Path(os.devnull).is_char_device())

    def test_a_link_is_followed(self) -> None:
        target = self.folder / "pages" / "page.html"
        (self.folder / "link.html").symlink_to(target)
        done, _ = self.run_with(self.folder / "link.html")
        self.assertEqual((done.status, done.err), (0, ""))
        self.assertIn("<html", target.read_text())
        self.assertTrue((self.folder / "link.html").is_symlink())

    def test_what_cannot_be_a_report_is_told_before_the_training(self) -> None:
        run = self.folder / "run"
        options = (*BARE, "--data-dir", self.data, "--checkpoint", run, "--report")
        self.sentence("^error: --report .*this is a folder", 1, *options, self.folder)
        page = self.folder / "page"
        page.touch()
        with mock.patch("os.access", lambda path, *_: Path(path) != page):
            self.sentence("page is write-protected", 1, *options, page)
        os.mkfifo(self.folder / "fifo")
        done = small.run(*options, self.folder / "fifo")
        self.assertEqual(done.status, 1)
        self.assertRegex(done.err, r"\Aerror: .*fifo is a FIFO that nobody reads: .*\n\Z")
        self.assertRegex(done.out, ENDING)


class Sizes(Faults):
    def test_absurd_ones_are_refused_at_once(self) -> None:
        model = ("-m", "mlp", "-c", "numpy", "--data-dir", self.data)
        for pattern, *arguments in (
            ("--batch-size: expected at most 1000000000, got 10{12}", "--batch-size", 10**12),
            ("--num-epochs: expected at most 1000000000, got 10{30}", "-e", 10**30),
            ("--num-epochs: expected a positive number, got 9{40}…", "-e", "9" * 5000),
            ("--hidden: expected a positive number, got -5", "--hidden=-5"),
            ("--hidden: expected at most 100 sizes, got 2000", "--hidden", "1," * 1999 + "1"),
            ("a step takes at least [0-9,]+ GiB and this machine has .*--hidden",
             "--hidden", 10**9),
            ("--batch-size is at most 131,072, more than any set here has", "--batch-size", 10**9),
            ("--batch-size 201 is more than the 200 images of the training set",
             "--batch-size", 201, "--hidden", 5),
            ("--early-stop: expected at most", "--early-stop", 10**18),
            ("--batch-size: expected a positive number, got -1", "--batch-size", -1),
            ("--seed: expected an integer from 0", "--seed", 10**30),
        ):  # fmt: skip
            with self.subTest(arguments=str(arguments)[:60]):
                self.sentence(f"error: .*{pattern}", 2, *model, *arguments)
        self.sentence("--top: expected at most", 2, "predict", "x", "y", "-k", 10**30)

    def test_a_very_long_run_can_begin(self) -> None:
        for name in SCHEDULES:
            setup = choose("mlp", {"schedule": name, "epochs": 10**9})
            self.assertGreater(setup.build_schedule(10**9 * 500)(10), 0, name)

    def test_no_memory_is_told(self) -> None:
        failed = MemoryError("Unable to allocate 9 GiB")
        with mock.patch("dlsys.apps.trained.mnist_sets", side_effect=failed):
            self.sentence("^error: there is not enough memory: Unable to allocate 9 GiB$", 1, *BARE)


class Rates(Faults):
    def test_a_run_that_diverged_says_so(self) -> None:
        """No rate separates labels that have nothing to do with their images."""
        labels = np.random.default_rng(0).integers(0, 10, small.TRAIN + small.VALIDATION)
        write_idx(self.data / mnist.MNIST.files[1].name, labels.astype(np.uint8))
        plain = ("-c", "numpy", "-e", 2, "--data-dir", self.data)
        for pattern, *options in (
            (r"the run diverged: the validation loss is .*guessing has 2.30; .*--lr than 1e\+09",
             "-m", "logreg", "--lr", 1e9),
            ("the run diverged: the validation loss is nan at the end", "-m", "mlp", "--lr", 1e9),
            ("the loss was nan at the end of epoch 1: use a smaller --lr than 1e[+]38",
             "-m", "mlp", "--lr", 1e38, "--batch-size", 20),
            ("the run diverged|became NaN or infinite", *MLP, "--lr", 1e9),
            ("became NaN or infinite|the run diverged", *MLP, "--lr", 1e30),
            ("the run diverged|became NaN or infinite",
             *MLP, "--lr", 1e9, "--optimizer", "adam", "--checkpoint", self.folder / "run"),
        ):  # fmt: skip
            with self.subTest(options=options):
                done = small.run(*plain, *options)
                self.assertEqual(done.status, 1, done)
                self.assertRegex(done.err, rf"\Aerror: .*({pattern}).*\n\Z")
        self.assertNotIn("nan", done.out)

    def test_a_run_that_learns_little_is_no_fault(self) -> None:
        for rate in (0, 1e-6):
            self.done(*BARE, "--lr", rate)

    def test_what_counts(self) -> None:
        setup = choose("mlp", {})
        setup.check_loss(2.5)
        for loss in (30.0, float("inf"), float("nan")):
            with self.assertRaises(DivergedError):
                setup.check_loss(loss)
        with self.assertRaisesRegex(UsageError, "--hidden"):
            choose("mlp", {"hidden": (10**7, 10**7)})


@slow
class Streams(Faults):
    """In processes of their own, which have descriptors to lose."""

    def ended(
        self, redirection: str, *arguments: object, real: bool = False, **environment: object
    ) -> Done:
        program = [small.ROOT / "mnist_dlsys.py"] if real else [small.__file__, "0"]
        program = [sys.executable, *map(str, (*program, *arguments))]
        line = ["sh", "-c", f'exec "$@" {redirection}', "sh", *program]
        given = os.environ | {name: str(value) for name, value in environment.items()}
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=given)
        self.assertNotIn("Traceback", done.stderr)
        self.assertLessEqual(len(done.stderr.splitlines()), 1)
        return Done(done.returncode, done.stdout, done.stderr)

    def test_closed_and_full_ones(self) -> None:
        run = (*BARE, "--data-dir", self.data)
        closed = "error: standard output is closed: leave it open, or use >/dev/null\n"
        full = "error: standard output cannot be written: No space left on device\n"
        self.assertEqual(self.ended(">&-", *run), (1, "", closed))
        self.assertEqual(self.ended("<&- >&- 2>&-", *run), (1, "", ""))
        self.assertEqual(self.ended(">/dev/full", *run, PYTHONUNBUFFERED=""), (1, "", full))
        for unbuffered in ("", "1"):
            done = self.ended(">/dev/full", "--help", PYTHONUNBUFFERED=unbuffered)
            self.assertEqual(done, (1, "", full))
        self.assertEqual(self.ended("2>/dev/full", "-m", "bad", PYTHONUNBUFFERED="").status, 2)
        done = self.ended("2>&-", *run, "--checkpoint", self.folder / "run")
        self.assertEqual(done.status, 0)
        self.assertRegex(done.out, ENDING)
        train.load(self.folder / "run")

    def test_an_error_elsewhere_is_not_the_streams(self) -> None:
        def fail(kind: int, name: str | None = None) -> int:
            raise OSError(kind, os.strerror(kind), name)

        for arguments, expected in (
            ((errno.EACCES, "x"), "error: x: Permission denied\n"),
            ((errno.EPIPE, "fifo"), "error: fifo: Broken pipe\n"),
            ((errno.EIO,), "error: [Errno 5] Input/output error\n"),
        ):
            out, err = io.StringIO(), io.StringIO()
            with redirect_stdout(out), redirect_stderr(err):
                self.assertEqual(streams.guarded(lambda given=arguments: fail(*given)), 1)
            self.assertEqual((out.getvalue(), err.getvalue()), ("", expected))

    def test_values_of_the_environment(self) -> None:
        fifo = self.folder / "fifo"
        os.mkfifo(fifo)
        run = (*BARE, "--data-dir", self.data)
        for pattern, name, value in (
            ("DLSYS_DEBUG=x: expected an integer from 0 to 4, or nan", "DLSYS_DEBUG", "x"),
            ("DLSYS_THREADS=1000000000000: expected .* to 1024", "DLSYS_THREADS", 10**12),
            ("DLSYS_TUNE=fast: expected cached, off, full", "DLSYS_TUNE", "fast"),
        ):
            with self.subTest(name):
                done = self.ended("", *run, real=True, **{name: value})
                self.assertEqual((done.status, done.out), (1, ""))
                self.assertRegex(done.err, rf"\Aerror: {pattern}\n\Z")
        done = self.ended("", *run[:-4], "-c", "cpu", *run[-2:], DLSYS_LIBRARY=fifo)
        self.assertEqual((done.status, done.out), (1, ""))
        self.assertRegex(done.err, r"\Aerror: the native library .*fifo is no file; .*\n\Z")


@require(cpu(0))
class KeptOnTheCpu(Folder):
    def test_a_checkpoint_is_asked_about_pixels_as_it_was_trained(self) -> None:
        """The probabilities that predict prints are those of evaluate, on uint8 images."""
        run, image = self.folder / "run", self.data / "t10k-images-idx3-ubyte"
        self.done(*MLP, "-e", 3, "-c", "cpu", "--checkpoint", run)
        shown = small.run("predict", run, image, "-k", 1, "-c", "cpu").out.splitlines()
        labels = small.digits(small.TEST, 1)[1]
        right = np.mean([int(line.split()[1]) == y for line, y in zip(shown, labels)])
        found = ENDING.search(small.run("evaluate", run, "--data-dir", self.data, "-c", "cpu").out)
        assert found is not None
        self.assertAlmostEqual(right, float(found[2]), places=5)
        self.assertEqual(train.load(run).trained_on("x").dtype, "uint8")

    def test_a_checkpoint_of_an_older_version_is_asked_alike_and_says_so(self) -> None:
        run, image = self.folder / "run", self.data / "t10k-images-idx3-ubyte"
        self.done(*MLP, "-e", 2, "-c", "cpu", "--checkpoint", run)
        wanted = small.run("predict", run, image, "-c", "cpu")
        for name in ("last", "best"):
            path = run / f"{name}.safetensors"
            tensors, header = train.load(path)
            del header["trained_on"]
            train.save(path, tensors, header)
        with self.assertWarnsRegex(RuntimeWarning, "without the description of its data"):
            self.assertEqual(small.run("predict", run, image, "-c", "cpu"), wanted)

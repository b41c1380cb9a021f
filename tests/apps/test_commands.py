"""The command `dlsys`: how its commands are found, what it refuses, what a run says at its end."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

import support.small_digits as small
from dlsys import __version__, nn, train
from dlsys.apps import cli, commands, hints
from dlsys.apps.devices import choose_device
from dlsys.apps.setup import AUGMENTATIONS, MODELS, OPTIMIZERS, SCHEDULES, choose
from dlsys.runtime.device import cpu, gpu
from support.small_digits import ENDING, MLP, Done, Folder, needs

BARE = (*MLP, "-c", "numpy")


def dlsys(*arguments: object) -> Done:
    """Runs the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with small.small_sets(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main([str(argument) for argument in arguments])
    return Done(status, out.getvalue(), err.getvalue())


class Registry(unittest.TestCase):
    def test_every_command_has_its_parts(self) -> None:
        self.assertLessEqual({"mnist", "predict", "evaluate", "info"}, set(cli.names()))
        for name in cli.names():
            module = importlib.import_module(f"dlsys.apps.commands.{name}")
            self.assertTrue(module.__doc__ and module.__doc__.splitlines()[0].endswith("."), name)
            for part in ("add_arguments", "run"):
                self.assertTrue(callable(getattr(module, part)), (name, part))
            self.assertLessEqual(set(getattr(module, "ALIASES", ())), set(cli.names()))

    def test_a_module_is_a_command(self) -> None:
        """The one of docs/adding.md."""
        page = (small.ROOT / "docs" / "adding.md").read_text()
        text = re.findall(r"```python\n(.*?)```", page[page.index("## A command") :], re.S)[0]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "names.py").write_text(text)
            with mock.patch.object(commands, "__path__", [*commands.__path__, folder]):
                self.assertIn("names     Print the names of operators.", dlsys("--help").out)
                done = dlsys("names", "softmax")
        sys.modules.pop("dlsys.apps.commands.names")
        self.assertEqual((done.status, done.err), (0, ""))
        self.assertIn("softmax_cross_entropy\n", done.out)

    def test_the_help_lists_them(self) -> None:
        for arguments in ((), ("--help",), ("-h",)):
            done = dlsys(*arguments)
            self.assertEqual((done.status, done.err), (0, ""))
            for name in cli.names():
                self.assertRegex(done.out, rf"(?m)^  {name} +\w.*\.$")
            self.assertIn("exit status: 0; 1 for", done.out)

    def test_each_has_a_help_under_each_of_its_names(self) -> None:
        for words in ("mnist", "predict", "evaluate", "info", "mnist predict", "mnist evaluate"):
            done = dlsys(*words.split(), "--help")
            self.assertEqual((done.status, done.err), (0, ""), words)
            self.assertTrue(done.out.startswith(f"usage: dlsys {words} "), done.out[:60])
        self.assertTrue(small.run("predict", "-h").out.startswith("usage: mnist_dlsys.py predict "))

    def test_version(self) -> None:
        for words in ("--version", "mnist --version"):
            self.assertEqual(dlsys(*words.split()), (0, f"dlsys {__version__}\n", ""))

    def test_the_help_loads_nothing_heavy(self) -> None:
        program = (
            "import sys; from dlsys.apps import cli; status = cli.main(['--help']); "
            "heavy = 'dlsys.train dlsys.nn dlsys.executor matplotlib PIL'; "
            "sys.exit(status or [name for name in heavy.split() if name in sys.modules] or 0)"
        )
        path = {"PYTHONPATH": str(small.ROOT / "python")}
        done = subprocess.run([sys.executable, "-c", program], env=path, capture_output=True)
        self.assertEqual((done.returncode, done.stderr), (0, b""))

    def test_as_a_module(self) -> None:
        line = [sys.executable, "-m", "dlsys", "info"]
        path = {"PYTHONPATH": str(small.ROOT / "python")}
        done = subprocess.run(line, env=path, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn(__version__, done.stdout)

    def test_the_program_is_installed_with_the_package(self) -> None:
        project = (small.ROOT / "pyproject.toml").read_text()
        module, function = re.search(r'(?m)^dlsys = "([\w.]+):(\w+)"$', project).groups()  # type: ignore[union-attr]
        self.assertIs(getattr(importlib.import_module(module), function), cli.main)


class Refused(unittest.TestCase):
    def test_in_one_sentence_with_status_2(self) -> None:
        for pattern, line in (
            ("there is no command 'minst', only cifar, .*; did you mean mnist[?]", "minst"),
            (
                "there is no command 'x', only cifar, detect, evaluate, explain, export, gpt, "
                "info, mnist, predict, style, superres",
                "x",
            ),
            ("unrecognized arguments: --verison; did you mean --version[?]", "--verison"),
            ("unrecognized arguments: --batchsize 3; did you mean --batch-size[?]",
             "mnist --batchsize 3"),
            ("unrecognized arguments: now", "info now"),
            ("-m/--model: invalid choice: 'cnnn'", "mnist -m cnnn"),
            ("-e/--epochs/--num-epochs: expected a positive number, got 0", "mnist --epochs 0"),
            ("--device/.*: expected auto, numpy, cpu, gpu or gpu:1, got tpu", "mnist --device tpu"),
            ("--device/.*: expected auto, .*, got gpu:x", "predict x y -c gpu:x"),
            ("--report: a report is an HTML page and cannot be out.pdf: write a/out.html, which",
             "mnist -m cnn --report a/out.pdf"),
            ("--resume goes on with a run and --init-from begins another",
             "mnist --resume x --init-from y"),
        ):  # fmt: skip
            with self.subTest(line):
                done = dlsys(*line.split())
                self.assertEqual((done.status, done.out), (2, ""))
                self.assertRegex(done.err, rf"\Aerror: [^\n]*{pattern}[^\n]*\n\Z")

    def test_no_error_names_a_line_that_the_user_did_not_write(self) -> None:
        info = importlib.import_module("dlsys.apps.commands.info")
        made = {"nn": nn}  # a function of the package, as errors see it
        exec(compile("def run(*_): nn.GroupNorm(2, 3)", cli.__file__, "exec"), made)
        with mock.patch.object(info, "run", made["run"]):
            done = dlsys("info")
        self.assertEqual(
            (done.status, done.err), (1, "error: GroupNorm: 2 groups do not divide 3 channels\n")
        )


class Devices(unittest.TestCase):
    def test_by_name(self) -> None:
        self.assertIsNone(choose_device("numpy"))
        self.assertEqual(choose_device("cpu"), cpu(0))
        self.assertEqual([choose_device(name) for name in ("gpu", "gpu:1")], [gpu(0), gpu(1)])

    def test_info_shows_them_and_what_is_installed(self) -> None:
        done = dlsys("info")
        self.assertEqual((done.status, done.err), (0, ""))
        rows = dict(line.split("  ", 1) for line in done.out.splitlines())
        self.assertRegex(rows["dlsys"], rf"^ *{re.escape(__version__)}, .*dlsys$")
        self.assertEqual(rows["numpy"].strip(), np.__version__)
        with contextlib.redirect_stdout(io.StringIO()):
            best = choose_device("auto")
        self.assertEqual(rows["best device"].strip(), str(best or "numpy"))
        self.assertIn("gpu(0)", rows)
        self.assertTrue(rows["native library"].strip())
        with mock.patch.dict("dlsys.errors.PACKAGES", {"PIL": "no-such-package"}, clear=True):
            self.assertRegex(dlsys("info").out, "no-such-package +not installed: pip install no-s")


class Runs(Folder):
    def test_the_usual_names_of_options_stand_beside_the_courses(self) -> None:
        old = self.done(*MLP, "--num-epochs", 2, "--executor-context", "numpy", "-l")
        new = dlsys("mnist", *MLP, "--epochs", 2, "--device", "numpy", "-l",
                    "--data-dir", self.data)  # fmt: skip
        self.assertEqual((new.status, new.err), (0, ""))
        without_speed = [re.sub(r"[\d,]+ images/s", "", out) for out in (old, new.out)]
        self.assertEqual(*without_speed)

    def test_each_epoch_has_its_loss_and_validation_accuracy(self) -> None:
        figures = r"(?m)^epoch 2/2  loss \S+  (val_loss \S+  )?val_accuracy \d\.\d{6}  [\d,]+ i"
        for model in (("-m", "mlp"), MLP):
            out = self.done(*model, "-c", "numpy", "-e", 2, "-l")
            self.assertRegex(out, figures)
            last = re.findall(r"val_accuracy (\S+)", out)[-1]
            self.assertEqual(ENDING.search(out)[1], last)  # type: ignore[index]

    def test_hints_are_command_lines_that_are_understood(self) -> None:
        out = self.done("-m", "mlp", "-c", "numpy", "-e", 1, "--hints")
        self.assertIn("to try next:\n  mnist_dlsys.py -m cnn -e 3 --checkpoint runs/cnn ", out)
        for model in MODELS:
            for folder in (None, self.folder):
                text = hints.after(choose(model, {}), folder, "dlsys mnist")
                for line in re.findall(r"(?m)^  dlsys (.*?) *#", text):
                    module = mock.patch("dlsys.apps.commands.mnist.run", return_value=0)
                    with module, mock.patch("dlsys.apps.commands.predict.run", return_value=0):
                        done = dlsys(*line.split())
                    self.assertEqual((done.status, done.err), (0, ""), line)

    def test_a_terminal_gets_hints(self) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        options = ("-m", "mlp", "-c", "numpy", "-e", "1", "--data-dir", str(self.data))
        for more, hinted in (((), True), (("--no-hints",), False)):
            out = Terminal()
            with small.small_sets(), contextlib.redirect_stdout(out):
                self.assertEqual(cli.main(["mnist", *options, *more]), 0)
            self.assertEqual("to try next:" in out.getvalue(), hinted)

    def test_a_loss_that_diverges_is_told_in_one_sentence(self) -> None:
        done = dlsys("mnist", *BARE, "-e", 1, "--lr", "1e30", "--data-dir", self.data)
        self.assertEqual(done.status, 1)
        pattern = r"became NaN or infinite in step \d[^\n]*; use a smaller --lr than 1e.30"
        self.assertRegex(done.err, rf"\Aerror: [^\n]* {pattern}\n\Z")


class Onward(Folder):
    """A run that is finished, and others that begin with its weights."""

    def setUp(self) -> None:
        super().setUp()
        self.run_folder = self.folder / "run"
        self.done(*BARE, "-e", 3, "--checkpoint", self.run_folder)

    def test_a_cycle_that_is_finished_says_why_it_ends_and_how_to_go_on(self) -> None:
        out = self.done("--resume", self.run_folder, "-c", "numpy")
        told = (
            "finished: .*run has all of its 3 epochs; its rate follows one-cycle over 3 epochs and"
        )
        self.assertRegex(out, rf"(?m)^{told} .*: begin another .*--init-from .*run -e 3")
        self.assertRegex(out, ENDING)
        pattern = "is a run with -e 3, not 5; its rate follows one-cycle.*--init-from .* -e 5 "
        self.refused(pattern, "--resume", self.run_folder, "-e", 5)
        plain = self.folder / "plain"
        self.done(*BARE, "-e", 2, "--schedule", "constant", "--checkpoint", plain)
        out = self.done("--resume", plain, "-c", "numpy")
        self.assertRegex(out, "has all of its 2 epochs; a larger -e than 2 goes on with it")

    def test_another_run_begins_with_its_weights(self) -> None:
        begun = self.folder / "begun"
        still = ("-e", 1, "--lr", 0, "-c", "numpy", "--checkpoint", begun)
        self.done("--init-from", self.run_folder, *still)
        wanted = train.load(self.run_folder / "best.safetensors").part("model")
        got = train.load(begun).part("model")
        self.assertEqual(list(got), list(wanted))
        for name, value in wanted.items():
            np.testing.assert_array_equal(got[name], value, name)
        self.assertEqual(train.load(begun).header["epoch"], 1)

    def test_it_has_the_same_network(self) -> None:
        other = ("--init-from", self.run_folder)
        self.refused("has the weights of -m mlp, not cnn: leave -m out", *other, "-m", "cnn")
        self.refused("of --hidden 16, not 5: leave --hidden out", *other, "--hidden", 5)
        nowhere = self.folder / "none"
        self.refused("^error: .*No such file", "--init-from", nowhere, status=1)

    def test_the_assignments_networks_go_on_too(self) -> None:
        first = self.folder / "first"
        for model in ("logreg", "mlp"):
            kept = first / model
            options = ("-c", "numpy", "-e", 2, "--batch-size", 20, "--lr", 0.05)
            self.done("-m", model, *options, "--checkpoint", kept)
            out = self.done("--init-from", kept, *options, "-l")
            self.assertIn(f"training {model} on numpy", out)

    @needs("PIL", "images")
    def test_predict_goes_on_behind_a_file_that_cannot_be_read(self) -> None:
        from PIL import Image

        images = self.folder / "images"
        images.mkdir()
        for name, image in zip("ac", small.digits(2, 0)[0]):
            Image.fromarray(image).save(images / f"{name}.png")
        (images / "b.png").write_text("nothing")
        none = self.folder / "none.png"
        done = dlsys("predict", self.run_folder, none, "-c", "numpy", images, "-k", 1)
        self.assertEqual(done.status, 1)
        shown = [line.split()[0] for line in done.out.splitlines()]
        self.assertEqual(shown, [str(images / "a.png"), str(images / "c.png")])
        self.assertRegex(done.err, r"\Aerror: .*none.png: No such.*\nerror: .*b.png: cannot .*\n\Z")


class Reports(Folder):
    @needs("matplotlib", "viz")
    def test_the_settings_read_as_people_write_them(self) -> None:
        written = []
        with mock.patch("dlsys.viz.report.write", lambda path, page: written.append(page)):
            page = self.folder / "run.html"
            self.done(*BARE, "-e", 2, "--augment", "shift,rotate=5", "--report", page)
        (report,) = written
        self.assertTrue(report.command.startswith("mnist_dlsys.py -m mlp --hidden 16 "))
        settings = report.settings
        self.assertEqual(settings["network"], "multilayer perceptron (mlp)")
        self.assertEqual(settings["learning rate"], "0.1, one-cycle")
        wanted = "shifted by up to 2 pixels, turned by up to 5°"
        self.assertEqual(settings["augmentation"], wanted)
        for name in ("weight decay", "dropout", "early stopping"):
            self.assertNotIn(name, settings)

    def test_every_choice_has_words(self) -> None:
        augment = tuple((name, usual) for name, (usual, _) in AUGMENTATIONS.items())
        for model in MODELS:
            for optimizer in OPTIMIZERS:
                for schedule in SCHEDULES:
                    given = {"optimizer": optimizer, "schedule": schedule, "dataset": "fashion"}
                    given |= {"augment": augment, "early_stop": 1}
                    words = choose(model, given).in_words()
                    self.assertIn(schedule, words["learning rate"])
                    self.assertRegex(words["optimizer"], rf"^{optimizer}( 0\.9)?$")
                    self.assertEqual(len(words["augmentation"].split(", ")), len(augment))
                    self.assertEqual(words["early stopping"], "after 1 epoch without gain")

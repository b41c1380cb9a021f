"""The command line around a training: its options, checkpoints, reports."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import support.small_digits as small
from dlsys import train
from dlsys.apps.setup import OPTIMIZERS, SCHEDULES, Setup, UsageError, choose
from dlsys.errors import DataError
from dlsys.runtime.device import Context, cpu, gpu
from dlsys.train.files import safetensors
from support.devices import native_contexts, not_emulated, require
from support.small_digits import ENDING, MLP, Folder, needs

# Everything that has a state: slots, a schedule, masks, the order and the changes of images.
STATEFUL = ("--optimizer", "adam", "--schedule", "cosine", "--dropout", "0.2")
AUGMENTED = ("--augment", "shift=1,rotate")
EPOCH = re.compile(r"^epoch (\d+)/\d+  loss (\S+)", re.M)


def epochs_of(log: Path) -> list[dict[str, Any]]:
    """The records of epochs that a run logged."""
    lines = [json.loads(line) for line in (log / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "epoch"]


class Options(Folder):
    def losses(self, *arguments: object) -> list[float]:
        out = self.done(*MLP, "-c", "numpy", "-l", *arguments)
        self.assertRegex(out, ENDING)
        return [float(loss) for _, loss in EPOCH.findall(out)]

    def test_every_optimizer_learns(self) -> None:
        for name in OPTIMIZERS:
            with self.subTest(optimizer=name):
                found = self.losses("-e", 4, "--optimizer", name)
                self.assertEqual(len(found), 4)
                self.assertLess(found[-1], 0.9 * found[0])

    def test_every_schedule_has_its_course(self) -> None:
        for name in SCHEDULES:
            with self.subTest(schedule=name):
                rate = choose("mlp", {"schedule": name, "lr": 0.5}).build_schedule(140)
                rates = [rate(step) for step in range(140)]
                self.assertAlmostEqual(max(rates), 0.5, places=6)
                if name in ("constant", "plateau"):
                    self.assertEqual(set(rates), {0.5})
                else:
                    self.assertLess(rates[-1], 0.1)

    def test_warm_up_rises_to_the_schedule(self) -> None:
        setup = choose("mlp", {"schedule": "cosine", "lr": 0.5, "warmup": 2.0, "epochs": 10})
        rate = setup.build_schedule(100)
        rates = [rate(step) for step in range(100)]
        self.assertEqual(rates[:21], sorted(rates[:21]))
        self.assertAlmostEqual(rates[20], 0.5, places=6)
        self.assertEqual(rates[20:], sorted(rates[20:], reverse=True))

    def test_the_rate_falls_on_a_plateau_only(self) -> None:
        rates = {}
        for lr in (0.05, 30):
            log = self.folder / f"{lr}"
            options = ("--schedule", "plateau", "--optimizer", "sgd", "--lr", lr, "--log", log)
            self.losses("-e", 8, *options)
            rates[lr] = [record["lr"] for record in epochs_of(log)]
        self.assertEqual(len(set(rates[0.05])), 1, "the loss falls all the time")
        self.assertLessEqual(rates[30][-1], 3.001, "nothing gets better")

    def test_augmentation_and_decay_change_the_course(self) -> None:
        plain = self.losses("-e", 2)
        for option in (AUGMENTED, ("--augment", "mixup,cutout=4"), ("--weight-decay", "0.1")):
            with self.subTest(option=option):
                self.assertGreater(self.losses("-e", 2, *option)[-1], plain[-1])

    def test_precision_changes_the_course_a_little(self) -> None:
        exact, found = (self.losses("-e", 2, "--precision", word) for word in ("fp32", "bf16"))
        self.assertNotEqual(found, exact)
        np.testing.assert_allclose(found, exact, rtol=0.02)  # measured: 0.0073
        plain = ("-m", "mlp", "-c", "numpy", "-e", 1, "--batch-size", 20, "-l")  # the assignment's
        lines = [self.done(*plain, "--precision", word) for word in ("fp32", "bf16")]
        self.assertEqual(len({re.search(r"loss (\S+)", line)[1] for line in lines}), 2)  # type: ignore[index]

    def test_the_same_seed_gives_the_same_run_and_another_one_another(self) -> None:
        runs = [self.losses("-e", 2, *STATEFUL, *AUGMENTED, "--seed", seed) for seed in (5, 5, 6)]
        self.assertEqual(runs[0], runs[1])
        self.assertNotEqual(runs[0], runs[2])

    def test_all_is_both_of_the_assignments_networks(self) -> None:
        out = self.done("-c", "numpy", "-e", 1, "--optimizer", "adam", "--batch-size", 20)
        self.assertEqual(re.findall(r"^training (\w+) on numpy$", out, re.M), ["logreg", "mlp"])

    def test_what_is_kept_changes_nothing_of_the_assignments_training(self) -> None:
        bare = ("-m", "mlp", "-c", "numpy", "-e", 3, "--batch-size", 30)  # the last one has 20
        endings = [
            [float(x) for x in ENDING.search(self.done(*bare, *kept)).groups()]  # type: ignore[union-attr]
            for kept in ((), ("--checkpoint", self.folder / "a"), ("--early-stop", 3))
        ]
        for ending in endings[1:]:
            np.testing.assert_allclose(ending, endings[0], atol=0.011)  # an image of 100

    def test_it_stops_early_with_the_best_weights(self) -> None:
        """Nothing is better than the first epoch where the rate is far too high after it."""
        kept, options = self.folder / "run", ("-e", 30, "--schedule", "constant")
        worse = ("--optimizer", "sgd", "--lr", 30, "--early-stop", 2)
        out = self.done(*MLP, "-c", "numpy", "-l", *options, *worse, "--checkpoint", kept)
        found = re.search(r"stopped: val_loss has not improved since epoch (\d+)", out)
        assert found is not None, out
        best = int(found[1])
        self.assertEqual(len(EPOCH.findall(out)), best + 2)
        shown = re.findall(r"val_accuracy (\S+)", out)[best - 1]
        self.assertEqual(ENDING.search(out)[1], shown)  # type: ignore[index]


class Conflicts(Folder):
    def test_options_that_do_not_go_together_say_what_does(self) -> None:
        for pattern, *arguments in (
            ("--momentum does not apply to --optimizer adam: .*--optimizer momentum, nesterov",
             "-m", "mlp", "--optimizer", "adam", "--momentum", 0.5),
            ("sgd has no momentum: use --optimizer momentum",
             "--optimizer", "sgd", "--momentum", 0),
            ("nesterov needs a momentum above 0.*--optimizer sgd",
             "--optimizer", "nesterov", "--momentum", 0),
            ("--hidden has the sizes of -m mlp; cnn has its own", "-m", "cnn", "--hidden", 5),
            ("--hidden has the sizes of mlp: add -m mlp", "--hidden", 5),
            ("--dropout needs a hidden layer: use -m mlp", "-m", "logreg", "--dropout", 0.5),
            ("one-cycle warms up by itself: .*--schedule cosine", "-m", "cnn", "--warmup", 1),
            ("--warmup takes all of the epochs",
             "-m", "cnn", "--warmup", 3, "-e", 3, "--schedule", "cosine"),
            ("a digit flipped is no digit: .*--dataset fashion", "-m", "cnn", "--augment", "flip"),
            ("--checkpoint is for one run: choose a model", "--checkpoint", "x"),
            ("--report is for one run: choose a model", "-m", "all", "--report", "x"),
            ("--resume goes on from a checkpoint: say which, --resume DIR", "--resume"),
            ("leave -m out, the checkpoint says it", "-m", "all", "--resume", "x"),
        ):  # fmt: skip
            with self.subTest(arguments=arguments):
                self.refused(pattern, *arguments)

    def test_values_that_are_none_say_what_is_expected(self) -> None:
        for pattern, *arguments in (
            ("expected names of shift, rotate, .*got|unknown 'blur'", "--augment", "blur"),
            ("expected shift= with an integer above 0, at most 27, got 0.5",
             "--augment", "rotate,shift=0.5"),
            ("expected rotate= with a number above 0, at most 180, got nan",
             "--augment", "rotate=nan"),
            ("expected a positive number, got 2.5", "-e", 2.5),
            ("expected a positive number, got x", "--hidden", "30,x"),
            ("expected 0 or more and less than 1, got 1", "--dropout", 1),
            ("expected a number from 0 on, got nan", "--lr", "nan"),
            ("expected an integer from 0 to 4294967295, got -1", "--seed", -1),
            ("invalid choice: 'sdg'.*momentum", "--optimizer", "sdg"),
        ):  # fmt: skip
            with self.subTest(arguments=arguments):
                self.refused(pattern, *arguments)

    def test_too_short_for_a_cycle(self) -> None:
        options = ("-m", "mlp", "-c", "numpy", "-e", 1, "--hidden", 5, "--data-dir", self.data)
        self.refused("2 steps are too few for one cycle.*--schedule constant", *options)

    def test_questions_need_what_they_are_about(self) -> None:
        self.refused("predict needs a checkpoint", "predict")
        self.refused("predict needs images", "predict", "x")
        self.refused("evaluate needs a checkpoint", "evaluate")
        self.refused("takes two IDX files, IMAGES LABELS, or none", "evaluate", "x", "images")
        self.refused("in --data-dir: leave one", "evaluate", "x", "a", "b", "--data-dir", "c")

    def test_what_cannot_be_kept_is_refused_before_the_training(self) -> None:
        options = ("-m", "cnn", "-c", "numpy", "--data-dir", self.data)
        self.refused("this is a folder", *options, "--report", self.folder, status=1)
        image = self.data / "t10k-images-idx3-ubyte"
        for option, path in (("report", image / "a.html"), ("checkpoint", image), ("log", image)):
            with self.subTest(option):
                message = f"^error: {image}.*((made there|be written): File exists|Not a directory)"
                self.refused(message, *options, f"--{option}", path, status=1)

    def test_help_names_every_option(self) -> None:
        out = small.run("--help").out
        training = "optimizer schedule warmup momentum weight-decay dropout augment hidden"
        around = "dataset checkpoint resume early-stop log report profile"
        for option in f"{training} {around}".split():
            self.assertIn(f"--{option}", out)
        for command in ("predict", "evaluate"):
            self.assertIn(f"{command} CHECKPOINT", out)
            self.assertIn("the folder of a run", small.run(command, "--help").out)


class Resume:
    """A run that is ended from outside and resumed ends with the bits of one that never was."""

    ctx: Context | None = None

    @property
    def device(self) -> str:
        return "numpy" if self.ctx is None else self.ctx.name

    def whole(self, *options: object) -> dict[str, np.ndarray]:
        folder = self.folder / "whole"
        self.done(*MLP, "-c", self.device, *options, "--checkpoint", folder)
        return train.load(folder).tensors

    def ended(self, how: signal.Signals, *options: object) -> tuple[int, str]:
        """Sends a signal to a run in its third epoch; returns its status and what it complained."""
        program = [sys.executable, small.__file__, "0.02", *MLP, "-c", self.device, *options,
                   "--data-dir", self.data, "--checkpoint", self.folder / "run"]  # fmt: skip
        with subprocess.Popen(list(map(str, program)), stdout=-1, stderr=-1, text=True) as process:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            assert any(line.startswith("epoch 2/") for line in lines), "it ended early"
            process.send_signal(how)
            _, err = process.communicate(timeout=60)
        return process.returncode, err

    def check_resumed(self, wanted: dict[str, np.ndarray]) -> None:
        out = self.done("--resume", self.folder / "run", "-c", self.device)
        self.assertRegex(out, r"(?m)^going on after \d+ epochs and \d of 10 batches$")
        self.assertRegex(out, ENDING)
        got = train.load(self.folder / "run").tensors
        self.assertEqual(list(got), list(wanted))
        for name, value in wanted.items():
            np.testing.assert_array_equal(got[name], value, name)

    def test_after_ctrl_c(self) -> None:
        options = ("-e", 6, *STATEFUL, *AUGMENTED, "--early-stop", 6)
        status, err = self.ended(signal.SIGINT, *options)
        self.assertEqual(status, 130, err)
        done = (
            r"^interrupted; done: \d+ epochs and \d of 10 batches; the state of step \d+ is in .*"
        )
        self.assertRegex(err, done + r"last\.safetensors\n$")
        self.check_resumed(self.whole(*options))

    def test_after_a_kill(self) -> None:
        options = ("-e", 6, *STATEFUL)
        status, err = self.ended(signal.SIGKILL, *options)
        self.assertEqual((status, err), (-signal.SIGKILL, ""))
        self.check_resumed(self.whole(*options))


class NumpyResume(Resume, Folder):
    def test_a_constant_rate_can_go_on_for_longer(self) -> None:
        options = ("--schedule", "constant", "--optimizer", "momentum")
        wanted = self.whole("-e", 4, *options)
        self.done(*MLP, "-c", "numpy", "-e", 2, *options, "--checkpoint", self.folder / "run")
        out = self.done("--resume", "--checkpoint", self.folder / "run", "-e", 4, "-c", "numpy")
        self.assertIn("going on after 2 epochs", out)
        for name, value in train.load(self.folder / "run").tensors.items():
            np.testing.assert_array_equal(value, wanted[name], name)

    def test_other_options_than_those_of_the_run_are_refused(self) -> None:
        self.whole("-e", 2, "--early-stop", 2)
        run = self.folder / "whole"
        for pattern, *options in (
            ("is a run with -m mlp, not cnn; .*leave this one out", "-m", "cnn"),
            ("is a run with -e 2, not 3", "-e", 3),
            ("is a run with --hidden 16, not 5,6", "--hidden", "5,6"),
            ("is a run with --augment none, not shift=2.0", "--augment", "shift"),
            ("is a run with --early-stop 2, not 3", "--early-stop", 3),
            ("is a run with --precision fp32, not bf16", "--precision", "bf16"),
        ):
            with self.subTest(options=options):
                self.refused(pattern, "--resume", run, *options)
        self.refused("has the checkpoints of a run: .*--resume", *MLP, "--checkpoint", run)

    def test_what_is_no_checkpoint_of_the_command_line(self) -> None:
        other = self.folder / "other.safetensors"
        train.save(other, {"model.x": np.zeros(3, np.float32)}, {"callbacks": []})
        foreign = self.folder / "foreign.safetensors"
        safetensors.write(foreign, {"x": np.zeros(3, np.float32)}, {})
        image = self.data / "t10k-images-idx3-ubyte"
        for pattern, path in (
            ("does not say which network it is of", other),
            ("no checkpoint of dlsys", foreign),
            ("is no safetensors file", image),
            ("No such file", self.folder / "nothing"),
            ("has no last.safetensors", self.data),
        ):
            with self.subTest(path=path.name):
                self.refused(f"^error: .*{pattern}", "--resume", path, status=1)
                self.refused(f"^error: .*{pattern}", "predict", path, image, status=1)

    def test_a_setup_survives_json(self) -> None:
        setup = choose("mlp", {"hidden": (5, 6), "augment": (("shift", 2.0),), "early_stop": 3})
        self.assertEqual(Setup.from_dict("x", json.loads(json.dumps(setup.as_dict()))), setup)
        pattern = "x (does not say which network|is damaged or forged: its)"
        for change in ({"model": "vgg"}, {"hidden": None}, {"more": 1}):
            with self.assertRaisesRegex(DataError, pattern):
                Setup.from_dict("x", setup.as_dict() | change)
        with self.assertRaisesRegex(UsageError, "--seed 123, not 7"):
            setup.check_same("x", {"seed": 7})


@require(cpu(0))
class CpuResume(Resume, Folder):
    ctx = cpu(0)


@require(gpu(0))
class GpuResume(Resume, Folder):
    ctx = gpu(0)


class Kept(Folder):
    def test_the_log_has_every_epoch(self) -> None:
        log = self.folder / "log"
        self.done(*MLP, "-c", "numpy", "-e", 3, "--log", log)
        epochs = epochs_of(log)
        self.assertEqual([line["step"] for line in epochs], [10, 20, 30])
        for line in epochs:
            self.assertGreater(line["val_loss"], 0)
            self.assertTrue(0 <= line["val_accuracy"] <= 1)
        written = bool(list(log.glob("events.out.tfevents.*")))
        self.assertEqual(written, importlib.util.find_spec("tensorboardX") is not None)

    @not_emulated
    @needs("matplotlib", "viz")
    def test_the_report_has_all_of_its_sections(self) -> None:
        path = self.folder / "new" / "run.html"
        device = ["numpy", *(ctx.name for ctx in native_contexts())][-1]
        options = ("-m", "cnn", "-c", device, "-e", 2, "--batch-size", 20)
        out = self.done(*options, "--report", path)
        text = path.read_text()
        for section in ("run training model filters activations confusion mistakes graph memory "
                        "operators").split():  # fmt: skip
            self.assertIn(f'id="{section}"', text)
        accuracy = float(ENDING.search(out)[2])  # type: ignore[index]
        self.assertIn("cnn on mnist", text)
        self.assertIn(f"{accuracy:.2%}", text)
        self.assertIn("max_pool2d", text)
        self.assertNotRegex(text, r'(src|href)="(?!#|data:)')

    def test_profile_prints_a_table(self) -> None:
        out = self.done(*MLP, "-c", "numpy", "-e", 2, "--profile")
        self.assertRegex(out, r"(?m)^total of 20 runs ")
        self.assertRegex(out, ENDING)

    def test_fashion_has_names(self) -> None:
        run = self.folder / "run"
        options = ("--dataset", "fashion", "--augment", "flip", "-e", 2, "--checkpoint", run)
        self.done(*MLP, "-c", "numpy", *options)
        image = self.data / "t10k-images-idx3-ubyte"
        self.assertIn("ankle boot 0.", small.run("predict", run, image, "-k", 10).out)


class Startup(Folder):
    def test_ctrl_c_before_the_training(self) -> None:
        with mock.patch("dlsys.apps.trained.mnist_sets", side_effect=KeyboardInterrupt):
            done = small.run(*MLP, "-c", "numpy")
        self.assertEqual(done, (130, "", "interrupted; done: nothing trained yet\n"))

    def test_a_bare_run_imports_what_it_needs_and_no_more(self) -> None:
        program = (
            "import sys; from support import small_digits as small\n"
            "done = small.run('-m', 'mlp', '-c', 'numpy', '-e', 1, '--data-dir', sys.argv[1])\n"
            "assert done.status == 0, done\n"
            "late = 'dlsys.train dlsys.nn dlsys.viz matplotlib PIL tensorboardX urllib.request'\n"
            "print([name for name in late.split() if name in sys.modules])\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(self.data)],
            cwd=small.ROOT / "tests",
            capture_output=True,
            text=True,
        )
        self.assertEqual((done.stdout, done.stderr), ("[]\n", ""))

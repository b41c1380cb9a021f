"""The generators of fuzz/ try cases, and each finds a defect that is planted for it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dlsys import optim, train
from dlsys.apps.commands import mnist
from support import sample
from support.devices import needs_torch, slow
from support.table.rows import Sample

HYPOTHESIS = importlib.util.find_spec("hypothesis") is not None
if HYPOTHESIS:
    from fuzz import formats, harness, kills, operators, options, oracles, training
    from fuzz.harness import Batch, Finding

ROOT = Path(__file__).resolve().parents[2]
needs_hypothesis = unittest.skipUnless(HYPOTHESIS, "not here: hypothesis")


def program(*arguments: object) -> tuple[int, str]:
    """The command's exit status and output."""
    command = [sys.executable, str(ROOT / "tests" / "fuzz"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def found(trial: Any, count: int = 200, known: Any = ()) -> list[dict[str, str]]:
    """What the first batch finds beside what is known."""
    with contextlib.redirect_stdout(io.StringIO()):  # hypothesis shows what fails
        return Batch(trial, 1, count, set(known)).run().findings


@slow
@needs_hypothesis
class Cases(unittest.TestCase):
    """Some cases of each generator, by the command."""

    def tried(self, name: str, cases: int, *more: object) -> None:
        status, told = program(name, "--cases", cases, "--seed", 3, *more)
        self.assertIn("fuzz: seed 3\n", told)
        counts = re.search(rf"^{name}: (\d+) tried, (\d+) held", told, re.M)
        assert counts is not None, told
        self.assertGreaterEqual(int(counts[1]), cases // 2, told)
        self.assertGreater(int(counts[2]), 0, told)
        self.assertNotIn("worker ended", told)
        self.assertEqual(status, 1 if "FOUND" in told else 0, told)

    @needs_torch
    def test_operators_and_training(self) -> None:
        for trial, cases in ((operators.trial(["cpu"], []), 60), (training.trial(["cpu"], []), 8)):
            with contextlib.redirect_stdout(io.StringIO()):
                tally = Batch(trial, 3, cases).run()
            self.assertGreater(tally.held, 0)
            self.assertEqual(tally.tried, tally.held + tally.unjudged + sum(tally.kinds.values()))

    def test_formats(self) -> None:
        self.tried("formats", sample.count(60, 20))

    def test_options(self) -> None:
        self.tried("options", sample.count(8, 4))

    def test_kills(self) -> None:
        self.tried("kills", 3)

    def test_what_cannot_be_tried_is_told_with_its_count(self) -> None:
        with mock.patch.object(operators, "missing", lambda: "no oracle"):
            from fuzz.campaign import Campaign, Options

            with contextlib.redirect_stdout(io.StringIO()) as told:
                status = Campaign(Options(["operators"], 1.0, None, 0)).run()
        self.assertEqual(status, 0)
        self.assertEqual(told.getvalue(), "operators: SKIPPED, 0 cases tried: no oracle\n")


@slow
@needs_hypothesis
class Planted(unittest.TestCase):
    """A defect that each generator has to find, shrink and repeat."""

    def changed(self, name: str, **values: Any) -> Any:
        row: Sample = operators.ROWS[name]
        return mock.patch.dict(operators.ROWS, {name: dataclasses.replace(row, **values)})

    @needs_torch
    def test_an_operator_that_is_off_in_the_fifth_digit(self) -> None:
        op = operators.ROWS["tanh"].op
        with self.changed("tanh", build=lambda x: op(x) * 1.00001):
            (one,) = found(operators.trial(["numpy"], ["tanh"]))
            self.assertEqual(one["kind"], "tanh value")
            again = Batch(operators.trial(["numpy"], ["tanh"]), 0, 1).run(one["replay"])
            self.assertEqual([f["text"] for f in again.findings], [one["text"]])

    @needs_torch
    def test_a_wrong_gradient_and_a_wrong_answer_to_infinity(self) -> None:
        from dlsys import autodiff as ad

        class Cut(ad.Op):
            """x, whose gradient is none."""

            def infer_shape(self, node: Any, input_shapes: Any) -> Any:
                return input_shapes[0]

            def compute(self, node: Any, values: Any, output: Any, use_numpy: bool = True) -> None:
                output[...] = values[0]

            def gradient(self, node: Any, output_grad: Any) -> list[Any]:
                return [ad.zeroslike_op(output_grad)]

        with self.changed("copy", build=Cut()):
            (one,) = found(operators.trial(["numpy"], ["copy"]))
            self.assertEqual(one["kind"], "copy gradient 0")
        with self.changed("neg", build=lambda x: ad.clip_op(-x, -1e30, 1e30)):
            (one,) = found(operators.trial(["numpy"], ["neg"]), 800)
            self.assertRegex(one["kind"], "^neg value")

    @needs_torch
    def test_an_optimizer_that_forgets_its_momentum(self) -> None:
        class Forgetful(optim.SGD):
            def __init__(self, lr: Any, momentum: float = 0.0, **more: Any) -> None:
                super().__init__(lr, **{k: v for k, v in more.items() if k == "weight_decay"})

        with mock.patch.object(optim, "SGD", Forgetful):
            kinds = {one["kind"] for one in found(training.trial(["cpu"], ["optimizer"]))}
        self.assertLessEqual({"SGD float32"}, kinds)

    def read_by(self, read: Any, name: str = "history") -> list[dict[str, str]]:
        reader = formats.READERS[name]._replace(read=read, names=False)
        with (
            mock.patch.object(formats, "limit_memory"),
            mock.patch.dict(formats.READERS, {name: reader}),
        ):
            return found(formats.trial([], [name]), 400)

    def test_a_reader_that_raises_what_no_caller_expects(self) -> None:
        import json

        from dlsys.errors import DataError

        def read(path: Path) -> None:
            try:
                values = json.loads(path.read_bytes())
            except (ValueError, RecursionError):
                raise DataError("it is no JSON") from None
            if isinstance(values, dict):
                values["epochs"]

        (one,) = self.read_by(read)
        self.assertEqual(one["kind"], "history raises KeyError")

    def test_a_reader_that_takes_too_long_or_prints_an_escape(self) -> None:
        import time

        from dlsys.errors import DataError

        def spin(until: float) -> None:
            while time.process_time() < until:
                pass

        with mock.patch.object(formats, "SECONDS", 0.05):
            (one,) = self.read_by(lambda path: spin(time.process_time() + 1))
        self.assertEqual(one["kind"], "history takes too long")

        class Raw(DataError):
            __str__ = Exception.__str__  # ours are shown escaped

        def read(path: Path) -> None:
            raise Raw("\x1b[31m")

        (one,) = self.read_by(read)
        self.assertEqual(one["kind"], "history prints what is no text")

    def test_a_reader_that_takes_too_much_memory(self) -> None:
        script = (
            "import pathlib, numpy as np\n"
            "from fuzz import formats\n"
            "formats.limit_memory()\n"
            "reader = formats.Reader(list, lambda path: np.ones(1 << 30, np.uint8))\n"
            "formats.check('x', reader, pathlib.Path('f'), b'')\n"
        )
        paths = [str(ROOT / "tests"), str(ROOT / "python")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        self.assertRegex(done.stderr, r"Finding: x raises \w*MemoryError")

    def test_an_option_that_ends_in_a_traceback(self) -> None:
        right = mnist.choose

        def wrong(model: str, given: dict[str, Any]) -> Any:
            if given.get("epochs") == 2:
                raise KeyError("epochs")
            return right(model, given)

        with (
            mock.patch.object(options, "limit_memory"),
            mock.patch.object(mnist, "choose", wrong),
        ):
            known = ["prints what is no text", "something was replaced"]
            kinds = [one["kind"] for one in found(options.trial(["numpy"], []), 200, known)]
        self.assertEqual(kinds, ["KeyError at test_fuzz.py:wrong"])

    def test_a_command_line_that_says_success_over_a_loss_that_is_none(self) -> None:
        with self.assertRaisesRegex(Finding, "success with a loss"):
            options.check([], 0, "epoch 1/1  loss nan  9 images/s\n", "")
        with self.assertRaisesRegex(Finding, "an end without a sentence"):
            options.check([], 1, "", "")
        options.check([], 1, "", "error: x: no such file\n")

    def test_a_checkpoint_that_is_not_written_as_a_whole(self) -> None:
        import time

        kind = kills.Kind("numpy", 1, 0.0)
        shots = [kills.Shot((9,), 5, 0, 0)]

        def torn(kind: Any, folder: Path, steps: int) -> None:
            def copy(run: Any) -> None:
                whole = (folder / "last.safetensors").read_bytes()
                with open(folder / "best.safetensors", "wb") as file:
                    file.write(whole[:100])
                    file.flush()
                    os.write(steps, b".....")
                    time.sleep(1.0)  # it is killed in this time
                    file.write(whole[100:])

            from dlsys import train
            from support.small_runs import OnStep, loader, model, sgd

            keep = train.Checkpoint(folder, steps=1)
            first = OnStep(lambda run: keep._write(run, folder / "last.safetensors"))
            train.fit(
                model(),
                loader(20),
                sgd(),
                epochs=1,
                callbacks=[keep, first, OnStep(copy)],
                quiet=True,
            )

        with tempfile.TemporaryDirectory() as folder:
            with (
                mock.patch.object(kills, "reference", lambda *_: {}),
                self.assertRaisesRegex(Finding, "a checkpoint cannot be read after a kill"),
            ):
                kills.follow(kind, shots, Path(folder), torn)

    def test_an_end_with_other_bits_or_files_beside(self) -> None:
        def ends(value: float, extra: str = "") -> Any:
            def run(kind: Any, folder: Path, steps: int) -> None:
                np.savez(folder / "final.npz", w=np.float32(value))
                (folder / "log.jsonl").write_text("")
                train.History().save(folder / "history.json")
                if extra:
                    (folder / extra).write_text("")

            return run

        kind, right = kills.Kind("numpy", 1, 0.0), {}
        with tempfile.TemporaryDirectory() as folder:
            ends(1.0)(kind, Path(folder), 0)
            right = kills.ending(Path(folder))
        cases = (
            (ends(1.0), None), (ends(-0.0), "the end has other bits"),
            (ends(1.0, ".last.safetensors.12"), "files are left behind"),
        )  # fmt: skip
        for run, wrong in cases:
            with (
                tempfile.TemporaryDirectory() as folder,
                mock.patch.object(kills, "reference", lambda *_: right),
                self.assertRaisesRegex(Finding, wrong) if wrong else contextlib.nullcontext(),
            ):
                kills.follow(kind, [], Path(folder), run)


@needs_hypothesis
class Table(unittest.TestCase):
    @needs_torch
    def test_every_operator_is_tried_or_says_why_not(self) -> None:
        without = {name for names in oracles.WITHOUT.values() for name in names.split()}
        tried = set(oracles.ORACLES)
        self.assertEqual(set(operators.ROWS) - tried - without, set(), "add it to fuzz/oracles.py")
        self.assertEqual((tried | without) - set(operators.ROWS), set())
        self.assertEqual(tried & without, set())
        self.assertLessEqual(set(oracles.PURPOSE), tried)

    def test_the_same_seed_draws_the_same_cases(self) -> None:
        def drawn() -> list[int]:
            seen: list[int] = []
            Batch(lambda source: seen.append(source.number(0, 2**30)), 5, 20).run()
            return seen

        self.assertEqual(drawn(), drawn())
        self.assertNotEqual(harness.seed_of(1, "x", 0, 0), harness.seed_of(1, "x", 0, 1))

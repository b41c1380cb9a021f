"""The reports of a run: progress, logs, and the history that it leaves."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dlsys import train
from dlsys.errors import DataError, DlsysError
from support.small_runs import InFolder, OnStep, Scripted, loader


class Terminal(io.StringIO):
    """A text that takes itself for a terminal."""

    def isatty(self) -> bool:
        return True


class Reports(InFolder):
    def shown(self, errors: io.StringIO, *others: train.Callback, **options: Any) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            self.fit(train.Progress(), *others, **{"metrics": (train.accuracy,)} | options)
        return out.getvalue()

    def test_lines_where_there_is_no_terminal(self) -> None:
        errors = io.StringIO()
        text = self.shown(errors, epochs=2, validation=loader(10))
        self.assertEqual(errors.getvalue(), "")
        lines = text.splitlines()
        self.assertEqual(len(lines), 2)
        number = r"[\d.e-]+"
        self.assertRegex(lines[1], (
            rf"^epoch 2/2  loss {number}  accuracy {number}  val_loss {number}  "
            rf"val_accuracy {number}  [\d,]+ images/s$"
        ))  # fmt: skip

    def test_a_bar_on_a_terminal_that_is_clean_afterwards(self) -> None:
        errors = Terminal()
        with mock.patch.object(train.report.time, "monotonic", iter(range(10**6)).__next__):
            self.shown(errors, epochs=1, data=loader(160), log_every=2)
        text = errors.getvalue()
        self.assertIn("epoch 1/1", text)
        self.assertRegex(text, r"\d+/160")
        self.assertRegex(text, r"images/s, loss [\d.]+  accuracy [\d.]+")
        self.assertRegex(text, r"\r *\r$")  # the bar is gone

    def test_why_it_stopped(self) -> None:
        stop = OnStep(lambda run: run.stop("the test said so") if run.step == 3 else None)
        self.assertIn("stopped: the test said so\n", self.shown(io.StringIO(), stop))

    def test_json_lines(self) -> None:
        path = self.folder / "logs" / "run.jsonl"
        matrix = train.ConfusionMatrix(3)
        self.fit(train.JsonLog(path), epochs=2, log_every=1, metrics=(train.accuracy, matrix))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        self.assertEqual([x["event"] for x in lines], ["log", "log", "epoch"] * 2)
        self.assertEqual([x["step"] for x in lines], [1, 2, 2, 3, 4, 4])
        self.assertEqual(np.sum(lines[2]["confusion"]), 20)
        self.assertLessEqual({"loss", "accuracy", "lr", "seconds"}, set(lines[2]))

    def test_a_log_that_cannot_be_written(self) -> None:
        with self.assertRaisesRegex(DataError, "is a folder: name a file to write to"):
            self.fit(train.JsonLog(self.folder))
        full = Path("/dev/full")  # Linux's disk without a byte left
        if full.exists():
            with self.assertRaisesRegex(DataError, "full: the log cannot be written: No space"):
                self.fit(train.JsonLog(full))

    def test_a_part_of_a_line_is_taken_away(self) -> None:
        path = self.folder / "run.jsonl"
        path.write_text('{"event": "epoch"}\n{"event": "ep')
        self.fit(train.JsonLog(path), epochs=1)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        self.assertEqual([len(lines), lines[0], lines[1]["step"]], [3, {"event": "epoch"}, 2])

    def test_only_the_lines_of_the_run_that_is_resumed_are_taken_back(self) -> None:
        keep = train.Checkpoint(self.folder)
        self.fit(train.JsonLog(self.folder / "run.jsonl"), keep, epochs=1)
        other = self.folder / "other.jsonl"
        foreign = [
            json.dumps({"event": "epoch", "of": "another run", "epoch": k}) for k in range(9)
        ]
        other.write_text("".join(f"{line}\n" for line in foreign))
        self.fit(train.JsonLog(other), epochs=2, resume=keep.last)
        self.assertEqual(other.read_text().splitlines()[:9], foreign)

    def test_nan_is_null_in_json(self) -> None:
        path = self.folder / "run.jsonl"
        self.fit(Scripted("odd", [np.nan, np.inf]), train.JsonLog(path), epochs=2)
        for line in path.read_text().splitlines():
            entry = json.loads(line, parse_constant=self.fail)
            self.assertIsNone(entry.get("odd"))

    def test_tensorboard(self) -> None:
        try:
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.record_writer import RecordWriter  # noqa: F401
        except ImportError:
            self.skipTest("not here: tensorboardX")
        self.fit(train.TensorBoard(self.folder), epochs=2, metrics=(train.accuracy,), log_every=1)
        values: dict[str, list[int]] = {}
        content = next(self.folder.glob("events*")).read_bytes()
        while content:  # length (8), its checksum (4), the event, its checksum (4)
            size = int.from_bytes(content[:8], "little")
            event = Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            for value in event.summary.value:
                values.setdefault(value.tag, []).append(event.step)
        self.assertEqual(values["train/loss"], [1, 2, 3, 4])
        self.assertEqual(values["epoch/accuracy"], [2, 4])
        self.assertIn("epoch/samples_per_second", values)

    def test_without_tensorboardx_it_says_what_to_install(self) -> None:
        with mock.patch.dict(sys.modules, {"tensorboardX": None}):
            with self.assertRaisesRegex(DlsysError, r"pip install tensorboardX"):
                train.TensorBoard(self.folder)


class Histories(InFolder):
    def test_a_history_is_saved_and_loaded(self) -> None:
        history = self.fit(epochs=2, metrics=(train.ConfusionMatrix(3),))
        path = self.folder / "history.json"
        history.save(path)
        self.assertEqual(train.History.load(path).as_dict(), history.as_dict())
        path.write_text('{"epoch": []}')
        with self.assertRaisesRegex(DlsysError, "history.json is no history of a run"):
            train.History.load(path)

    def test_a_long_curve_is_thinned_out_evenly(self) -> None:
        history = train.History()
        for step in range(10_000):
            history.add_to_curve({"step": step})
        steps = [entry["step"] for entry in history.curve]
        self.assertLessEqual(len(steps), 4096)
        self.assertGreater(len(steps), 2000)
        self.assertEqual(set(np.diff(steps)), {4})

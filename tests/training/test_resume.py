"""A run that is stopped anywhere and resumed ends with the bits of one that never was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import dlsys
from dlsys import autodiff as ad
from dlsys import nn, train
from dlsys.data import Loader
from dlsys.errors import DataError
from dlsys.executor.tune import autotune as tune
from dlsys.runtime.device import Context, cpu, gpu
from dlsys.runtime.tuning_cache import Measurement, tuning_cache
from dlsys.settings import settings
from dlsys.train.kernel_algorithms import Kernels
from support import sample
from support.devices import require, slow
from support.small_runs import OnStep, final, loader, model, sgd, timeless

EPOCHS, STEPS = 4, 20  # 5 batches an epoch
METRICS = (train.accuracy, train.F1(3))

# What a killed process runs: fit to the end, from the last checkpoint if there is one.
SCRIPT = """
import sys, time
import numpy as np
from pathlib import Path
from dlsys import train
from dlsys.runtime.device import cpu, gpu
from support import small_runs as small

folder, device, pause = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
ctx = {"numpy": None, "cpu": cpu(0), "gpu": gpu(0)}[device]
net, optimizer = small.model(), small.sgd()
callbacks = [
    train.JsonLog(folder / "log.jsonl"),
    train.Checkpoint(folder, steps=2),
    train.EarlyStopping(50),
    small.OnStep(lambda run: (print(run.step, flush=True), time.sleep(pause))),
]
history = train.fit(
    net, small.loader(), optimizer, epochs=int(sys.argv[4]), validation=small.loader(seed=1),
    ctx=ctx, callbacks=callbacks, log_every=3,
    resume=folder if (folder / "last.safetensors").exists() else None, quiet=True,
)
np.savez(folder / "final.npz", **small.final(net, optimizer))
history.save(folder / "history.json")
"""


class Interrupted(Exception):
    pass


def fit(ctx: Context | None, folder: Path, net: Any = None, **options: Any) -> Any:
    """A run with everything that has a state, and what it ended with."""
    callbacks = [*options.pop("callbacks", []), train.EarlyStopping(50, monitor="val_loss")]
    net, optimizer = net or model(), options.pop("optimizer", None) or sgd()
    history = train.fit(
        net, options.pop("data", None) or loader(), optimizer, epochs=EPOCHS, ctx=ctx,
        validation=loader(seed=1), metrics=options.pop("metrics", METRICS), log_every=3,
        callbacks=[train.JsonLog(folder / "log.jsonl"), *callbacks], **options, quiet=True,
    )  # fmt: skip
    return final(net, optimizer), timeless(history)


def stop_at(step: int) -> OnStep:
    def act(run: train.Run) -> None:
        if run.step == step:
            run.stop("the test wants it")

    return OnStep(act)


def log_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in x.items() if k not in ("seconds", "samples_per_second")} for x in lines
    ]


class Resume:
    ctx: Context | None

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)  # type: ignore[attr-defined]
        self.folder = Path(folder.name)

    def same(self, got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
        self.assertEqual(list(got), list(wanted))  # type: ignore[attr-defined]
        for name, value in wanted.items():
            np.testing.assert_array_equal(got[name], value, name)

    def test_a_run_stopped_at_any_step_ends_as_if_it_were_not(self) -> None:
        wanted, history = fit(self.ctx, self.folder / "whole")
        for step in (1, 4, 5, 6, 14):
            with self.subTest(step=step):
                folder = self.folder / f"{step}"
                fit(self.ctx, folder, callbacks=[stop_at(step), train.Checkpoint(folder)])
                got, resumed = fit(
                    self.ctx, folder, callbacks=[train.Checkpoint(folder)], resume=folder
                )
                self.same(got, wanted)
                self.assertEqual(resumed, history)
                self.assertEqual(log_of(folder), log_of(self.folder / "whole"))

    def test_it_does_not_matter_how_the_new_model_was_drawn(self) -> None:
        wanted, _ = fit(self.ctx, self.folder / "whole")
        fit(self.ctx, self.folder, callbacks=[stop_at(7), train.Checkpoint(self.folder)])
        rng = np.random.default_rng(99)
        net = model()
        for _, parameter in net.named_state():
            if parameter.dtype == np.float32:
                parameter.set(rng.standard_normal(parameter.shape).astype(np.float32))
        net[2].key.set(np.array([1, 2]))
        got, _ = fit(self.ctx, self.folder, net, resume=self.folder)
        self.same(got, wanted)

    def test_a_callback_that_is_new_starts_anew(self) -> None:
        folder = self.folder
        wanted, _ = fit(self.ctx, folder / "whole")
        fit(self.ctx, folder, callbacks=[stop_at(7), train.Checkpoint(folder)])
        got, _ = fit(
            self.ctx, folder, callbacks=[train.JsonLog(folder / "second.jsonl")], resume=folder
        )
        self.same(got, wanted)
        self.assertGreater(len((folder / "second.jsonl").read_text().splitlines()), 3)

    def test_a_run_that_was_finished_has_nothing_left_to_do(self) -> None:
        folder = self.folder
        wanted, history = fit(self.ctx, folder, callbacks=[train.Checkpoint(folder)])
        steps: list[int] = []
        seen = OnStep(lambda run: steps.append(run.step))
        got, again = fit(self.ctx, folder, callbacks=[seen], resume=folder)
        self.assertEqual(steps, [])
        self.same(got, wanted)
        self.assertEqual(again, history)

    def test_random_nodes_outside_of_layers_draw_on(self) -> None:
        class Noisy(nn.Module):
            def __init__(self) -> None:
                self.inner = model(0.0)

            def forward(self, x: ad.Node) -> ad.Node:
                return self.inner(ad.dropout(x, 0.5) if self.training else x)

        ad.seed(4)
        wanted, _ = fit(self.ctx, self.folder / "whole", Noisy())
        ad.seed(4)
        fit(self.ctx, self.folder, Noisy(), callbacks=[stop_at(8), train.Checkpoint(self.folder)])
        ad.seed(5)  # a program that draws other numbers before
        got, _ = fit(self.ctx, self.folder, Noisy(), resume=self.folder)
        self.same(got, wanted)

    def test_what_does_not_fit_is_refused_and_changes_nothing(self) -> None:
        fit(self.ctx, self.folder, callbacks=[stop_at(7), train.Checkpoint(self.folder)])
        rng = np.random.default_rng(0)
        wide = nn.Sequential(nn.Linear(4, 9, rng=rng), nn.Linear(9, 3, rng=rng))
        drier = nn.Sequential(*[layer for k, layer in enumerate(model()) if k != 2])
        cases: list[tuple[str, dict[str, Any]]] = [
            (
                "of another model or optimizer: it lacks .*; it has besides model.2.key",
                {"net": wide},
            ),
            ("it has model.0.weight float32 \\(8, 4\\) instead of", {"net": wide}),
            ("it has besides model.2.key, model.2.step", {"net": drier}),
            ("of a run over other data: batch_size 16, now 15$", {"data": loader(batch_size=15)}),
            ("of a run over other data: samples 70, now 60", {"data": loader(count=60)}),
            ("other data: shuffle True, now False$", {"data": loader(shuffle=False)}),
            ("other data: labels' checksum \\d+, now \\d+$", {"data": loader(seed=1)}),
            ("weights' checksum None, now \\d+$", {"data": loader(weights=np.arange(70))}),
            (
                "for the metrics \\['accuracy', 'f1'\\], now \\['top2'\\]",
                {"metrics": [train.TopK(2)]},
            ),
        ]
        for message, options in cases:
            with self.subTest(message=message):
                net = options.pop("net", None) or model()
                before = net.state_dict()
                with self.assertRaisesRegex(DataError, message) as caught:
                    fit(self.ctx, self.folder, net, resume=self.folder, **options)
                self.assertIn(str(self.folder), str(caught.exception))
                self.same(net.state_dict(), before)

    def test_another_sampling_is_refused(self) -> None:
        drawn = np.arange(70.0)
        keep = [train.Checkpoint(self.folder), stop_at(6)]
        fit(self.ctx, self.folder, model(), data=loader(weights=drawn), callbacks=keep)
        fit(self.ctx, self.folder, model(), data=loader(weights=drawn), resume=self.folder)
        for other in (None, drawn[::-1]):
            with self.assertRaisesRegex(DataError, r"other data: weights' checksum \d+, now"):
                fit(self.ctx, self.folder, model(), data=loader(weights=other), resume=self.folder)

    def test_files_that_are_no_checkpoint_are_refused(self) -> None:
        text = self.folder / "text.safetensors"
        text.write_text("weights\n" * 100)
        weights = self.folder / "weights.safetensors"
        train.save(weights, model().state_dict(), {})
        steps = self.folder / "steps.safetensors"
        train.save(steps, model().state_dict(), {"step": 4})
        no_run = "not the state of a run"
        for path, message in ((text, "is no safetensors file"), (weights, no_run), (steps, no_run)):
            net = model()
            before = net.state_dict()
            with self.assertRaisesRegex(DataError, message):
                fit(self.ctx, self.folder, net, resume=path)
            self.same(net.state_dict(), before)

    def test_a_log_has_each_line_once_however_often_a_run_is_killed(self) -> None:
        class Kill(train.Callback):
            def __init__(self, step: int) -> None:
                self._step = step

            def on_commit(self, run: train.Run) -> None:
                if run.step == self._step:
                    raise Interrupted

        fit(self.ctx, self.folder / "whole")
        folder = self.folder / "killed"
        with self.assertRaises(Interrupted):
            keep = train.Checkpoint(folder)  # after step 10, the log is behind step 12
            fit(self.ctx, folder, callbacks=[Kill(13), keep])
        with self.assertRaises(Interrupted):
            keep = train.Checkpoint(folder, steps=11)  # before anything else is logged
            fit(self.ctx, folder, callbacks=[Kill(12), keep], resume=folder)
        fit(self.ctx, folder, resume=folder)
        self.assertEqual(log_of(folder), log_of(self.folder / "whole"))

    # ---- kills ----
    def start(self, folder: Path, pause: float, epochs: int) -> subprocess.Popen:
        device = "numpy" if self.ctx is None else self.ctx.name
        paths = [str(Path(dlsys.__file__).parents[1]), str(Path(__file__).parents[1])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
        }
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), device, str(pause), str(epochs)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def finish(self, folder: Path, epochs: int) -> dict[str, np.ndarray]:
        process = self.start(folder, 0.0, epochs)
        _, errors = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0, errors)
        with np.load(folder / "final.npz") as values:
            return dict(values)

    @slow
    def test_kill_at_random_moments(self) -> None:
        epochs = 6
        whole, killed = self.folder / "whole", self.folder / "killed"
        for folder in (whole, killed):
            folder.mkdir()
        wanted = self.finish(whole, epochs)
        seed = random.randrange(2**32)
        moments = random.Random(seed)
        reached = []
        for _ in range(sample.count(3, 1)):
            process = self.start(killed, 0.005, epochs)
            assert process.stdout is not None
            for _ in range(moments.randrange(3, 9)):  # some steps, then a part of one
                line = process.stdout.readline()
                reached.append(int(line or 0))
            time.sleep(moments.random() * 0.01)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            self.assertEqual(process.returncode, -signal.SIGKILL, f"seed {seed}")
        self.assertLess(0, max(reached), f"seed {seed}")
        self.assertLess(max(reached), 5 * epochs, f"seed {seed}")  # all in the midst of training
        self.assertTrue((killed / "last.safetensors").exists(), f"seed {seed}")
        self.same(self.finish(killed, epochs), wanted)
        self.assertEqual(log_of(killed), log_of(whole), f"seed {seed}")
        histories = [timeless(train.History.load(f / "history.json")) for f in (killed, whole)]
        self.assertEqual(*histories)
        left = {path.name for path in killed.iterdir()}
        files = {"last.safetensors", "best.safetensors", "log.jsonl", "final.npz", "history.json"}
        self.assertEqual(left, files)


class NumpyResume(Resume, unittest.TestCase):
    ctx = None


@require(cpu(0))
class CpuResume(Resume, unittest.TestCase):
    ctx = cpu(0)

    def images(self, epochs: int, resume: Path | None = None) -> list[str]:
        """Trains a network whose convolution two algorithms can do; returns the warnings."""
        rng = np.random.default_rng(1)
        net = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, groups=4, rng=rng),
            nn.Flatten(),
            nn.Linear(100, 3, rng=rng),
        )
        x = rng.standard_normal((20, 4, 5, 5)).astype(np.float32)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            train.fit(
                net, Loader((x, np.arange(20) % 3), 8), sgd(), epochs=epochs, ctx=self.ctx,
                callbacks=[train.Checkpoint(self.folder)], resume=resume, quiet=True,
            )  # fmt: skip
        return [str(warning.message) for warning in told]

    def test_other_kernels_than_those_of_the_run_are_warned_of(self) -> None:
        for name, value in (("tune", "cached"), ("tune_cache", str(self.folder / "tuning.json"))):
            patch = mock.patch.object(settings, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.assertEqual(self.images(1), [])
        had = train.load(self.folder).header["kernels"]["algorithms"]
        self.assertEqual(set(had.values()), {""})
        with mock.patch.object(Kernels, "as_dict", _as_before):
            self.assertEqual(self.images(2, resume=self.folder), [])

        small = next(key for key in had if "conv2d_bias float32(4,4,5,5)" in key)  # the last batch
        chosen = Measurement("implicit", "", 1.0, 2.0)
        tuning_cache().add(tune._environment(cpu(0)), {small: chosen})
        told = self.images(3, resume=self.folder)
        self.assertEqual(len(told), 1)
        self.assertRegex(told[0], r"other kernels \(conv2d_bias .*: heuristic, now implicit\)")
        now = train.load(self.folder).header["kernels"]["algorithms"]
        self.assertEqual(now, had | {small: "implicit"})
        self.assertEqual(self.images(4, resume=self.folder), [])


def _as_before(kernels: Kernels, as_dict: Callable[[Kernels], dict] = Kernels.as_dict) -> dict:
    """What older checkpoints have."""
    found = as_dict(kernels)
    return {"device": found["device"], "choices": found["algorithms"]}


@require(gpu(0))
class GpuResume(Resume, unittest.TestCase):
    ctx = gpu(0)

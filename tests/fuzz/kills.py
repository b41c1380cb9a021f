"""Kills: a small training run with checkpoints is killed at random moments and resumed to its end.

A case is a run: its process gets SIGKILL, SIGTERM or SIGINT (now and then two of them) after some
steps and some microseconds, which may fall into a step, a checkpoint or the time between; then
another process goes on from what there is, until one of them comes to the end. Every kill that met
a living process counts. The case holds if the folder could be read after each kill, and the end has
the bits of a run that nobody killed: weights, optimizer, history, log, and no file besides.

Processes are forks of this one, which has imported everything, so that many are killed a minute;
on a GPU, and now and then elsewhere, they are new ones.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import support.small_runs as small
from dlsys import ndarray, train
from dlsys.errors import DlsysError

from .harness import Slow, Source, Trial

EPOCHS = 5
STEPS = 5 * EPOCHS
PATIENCE = 60.0  # seconds for a run that nobody kills
FILES = {"last.safetensors", "best.safetensors", "log.jsonl", "final.npz", "history.json"}
HERE = Path(__file__).resolve().parent


class Kind(NamedTuple):
    """What is run: the device, steps between checkpoints, dropout, and whether in a new process."""

    device: str
    every: int
    dropout: float
    fresh: bool = False


class Shot(NamedTuple):
    """Signals, the steps and microseconds before the first, and microseconds between them."""

    signals: tuple[int, ...]
    steps: int
    pause: int
    between: int


def missing() -> str | None:
    """Why these cases cannot be tried here."""
    return None if hasattr(os, "fork") else "there is no fork here"


def trial(devices: Sequence[str], parts: Sequence[str]) -> Trial:
    """A run on one of the devices with some kills."""
    del parts
    warnings.simplefilter("ignore")
    return lambda source: attack(source, devices)


# ---- a case ----
def attack(source: Source, devices: Sequence[str]) -> int:
    """How many kills met; Finding where the end, or the folder on the way, is not as it should."""
    device = source.one(*devices)
    fresh = device == "gpu" or source.rarely(25)
    kind = Kind(device, source.one(1, 2, 3, 7), source.one(0.25, 0.0), fresh)
    shots = [draw_shot(source) for _ in range(source.number(1, 6))]
    place = source.one(None, "/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz", dir=place) as name:
        return follow(kind, shots, Path(name), run_to_end)


def draw_shot(source: Source) -> Shot:
    """A signal at some moment."""
    which = source.one(signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    signals = (which, source.one(signal.SIGINT, signal.SIGKILL)) if source.rarely(5) else (which,)
    return Shot(signals, source.number(0, STEPS // 2), source.number(0, 4000),
                source.number(0, 2000))  # fmt: skip


def follow(
    kind: Kind, shots: Sequence[Shot], folder: Path, program: Callable[[Kind, Path, int], None]
) -> int:
    """Kills a program and lets it go on, until the shots are spent; then compares its end."""
    wanted = reference(kind._replace(fresh=False), program)
    met = 0
    told = f"{kind} {list(map(tuple, shots))}"
    for shot in shots:
        child = start(kind, folder, program)
        died = shoot(child, shot)
        met += died
        check_folder(folder, told)
        if not died and (folder / "final.npz").exists():
            break
    child = start(kind, folder, program)
    status = child.wait(PATIENCE)
    if status is None:
        raise Slow("the resumed run does not end", told)
    if status:
        raise Slow("the resumed run fails", f"{told}: status {status}: {child.errors()}")
    compare(folder, wanted, told)
    return max(met, 1)


def shoot(child: Child, shot: Shot) -> bool:
    """Whether the child died of it, or ended early because of it."""
    child.read_steps(shot.steps, PATIENCE)
    time.sleep(shot.pause / 1e6)
    for number in shot.signals:
        child.kill(number)
        time.sleep(shot.between / 1e6)
    status = child.wait(PATIENCE)
    if status is None:
        raise Slow("a killed run does not end", f"{shot}")
    return status != 0


def check_folder(folder: Path, told: str) -> None:
    """Raises Finding unless everything in the folder can be read."""
    for name in ("last.safetensors", "best.safetensors"):
        if (folder / name).exists():
            try:
                train.load(folder / name)
            except DlsysError as error:
                raise Slow("a checkpoint cannot be read after a kill", f"{told}: {error}") from None
    log = folder / "log.jsonl"
    whole = log.read_text().split("\n")[:-1] if log.exists() else []
    try:
        for line in whole:
            json.loads(line)
    except ValueError as error:
        raise Slow("a log cannot be read after a kill", f"{told}: {error}") from None


def compare(folder: Path, wanted: dict[str, Any], told: str) -> None:
    """Raises Finding unless the end is that of a run that nobody killed."""
    got = ending(folder)
    for name, value in wanted["final"].items():
        own = got["final"][name]
        if name == "optimizer.lr":  # float64 until a step on a device takes it: here none was left
            own = own.astype(value.dtype)
        if own.tobytes() != value.tobytes():
            raise Slow("the end has other bits", f"{told}: {name}")
    for name in ("history", "log"):
        if got[name] != wanted[name]:
            both = zip_longest(got[name], wanted[name])
            first = next((pair for pair in both if pair[0] != pair[1]), None)
            raise Slow(f"the {name} is another one", f"{told}: {first}")
    # A history is no checkpoint: what it was killed in writing lies beside it.
    names = {path.name for path in folder.iterdir()}
    left = {name for name in names - FILES if not name.startswith((".history.json.", "final.part"))}
    if left:
        raise Slow("files are left behind", f"{told}: {sorted(left)}")


def ending(folder: Path) -> dict[str, Any]:
    """What a run that came to its end has left, without times."""
    with np.load(folder / "final.npz") as values:
        final = dict(values)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {
        "final": final,
        "history": small.timeless(train.History.load(folder / "history.json")),
        "log": [{k: v for k, v in line.items() if k not in small.TIMES} for line in lines],
    }


@functools.cache
def reference(kind: Kind, program: Callable[[Kind, Path, int], None]) -> dict[str, Any]:
    """The end of a run that nobody kills."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    try:
        child = start(kind, folder, program)
        status = child.wait(PATIENCE)
        if status != 0:
            raise RuntimeError(f"the run itself fails: {status}: {child.errors()}")
        return ending(folder)
    finally:
        shutil.rmtree(folder)


# ---- the program ----
def run_to_end(kind: Kind, folder: Path, steps: int) -> None:
    """Trains from the last checkpoint, or from the start; a byte into `steps` after each step."""
    going_on = (folder / "last.safetensors").exists()
    if not going_on:  # then it begins anew, and so does its log
        (folder / "log.jsonl").unlink(missing_ok=True)
    ctx = {"numpy": None, "cpu": ndarray.cpu(0), "gpu": ndarray.gpu(0)}[kind.device]
    net, optimizer = small.model(kind.dropout), small.sgd()
    callbacks = [
        train.JsonLog(folder / "log.jsonl"),
        train.Checkpoint(folder, steps=kind.every),
        train.EarlyStopping(50),
        small.OnStep(lambda run: os.write(steps, b".")),
    ]
    history = train.fit(
        net, small.loader(), optimizer, epochs=EPOCHS, validation=small.loader(seed=1), ctx=ctx,
        callbacks=callbacks, log_every=3,
        resume=folder if going_on else None, quiet=True,
    )  # fmt: skip
    temporary = folder / "final.part.npz"
    np.savez(temporary, **small.final(net, optimizer))
    history.save(folder / "history.json")
    os.replace(temporary, folder / "final.npz")


class Child:
    """A process that trains, and a pipe of the steps that it has made."""

    def __init__(self, pid: int, steps: int, errors: Any, own: Any = None) -> None:
        self.pid, self._steps, self._errors, self._own = pid, steps, errors, own
        self._status: int | None = None

    def read_steps(self, count: int, seconds: float) -> None:
        """Waits until so many steps are made, or the process has ended."""
        until = time.monotonic() + seconds
        while count > 0 and time.monotonic() < until:
            ready, _, _ = select.select([self._steps], [], [], 1.0)
            if ready:
                read = os.read(self._steps, count)
                if not read:
                    return
                count -= len(read)

    def kill(self, number: int) -> None:
        """Unless it has been waited for."""
        if self._status is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> int | None:
        """The exit status, negative for a signal; None, and it is killed, if it does not end."""
        until = time.monotonic() + seconds
        late = False
        while self._status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self._status = os.waitstatus_to_exitcode(status)
                if self._own is not None:
                    self._own.returncode = self._status
            elif time.monotonic() > until:
                late = True
                os.kill(self.pid, signal.SIGKILL)
                until = float("inf")
            else:
                time.sleep(0.001)
        os.close(self._steps)
        self._steps = os.open(os.devnull, os.O_RDONLY)
        return None if late else self._status

    def errors(self) -> str:
        """The end of what it wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read()[-400:]


def start(kind: Kind, folder: Path, program: Callable[[Kind, Path, int], None]) -> Child:
    """A process that runs the program."""
    reader, writer = os.pipe()
    errors = tempfile.TemporaryFile("w+")
    if kind.fresh:
        os.set_inheritable(writer, True)
        program_text = "import fuzz.kills; fuzz.kills.main()"
        command = [
            sys.executable,
            "-c",
            program_text,
            *map(str, kind[:3]),
            str(folder),
            str(writer),
        ]
        paths = [str(HERE.parent), str(HERE.parents[1] / "python")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        own = subprocess.Popen(command, close_fds=False, stderr=errors, stdout=errors,
                               env=environment)  # fmt: skip
        os.close(writer)
        return Child(own.pid, reader, errors, own)
    pid = os.fork()
    if pid:
        os.close(writer)
        return Child(pid, reader, errors)
    status = 1
    try:
        os.close(reader)
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        program(kind, folder, writer)
        status = 0
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc(file=errors)
        errors.flush()
    finally:
        os._exit(status)


def main() -> None:
    """The program as a process of its own: device, steps, dropout, folder, pipe."""
    device, every, dropout, folder, writer = sys.argv[1:]
    run_to_end(Kind(device, int(every), float(dropout)), Path(folder), int(writer))

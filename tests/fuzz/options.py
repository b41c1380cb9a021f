"""Command lines: random options of mnist_dlsys.py with odd values, on sets of a few images.

The program runs in this process, in a folder of its own. A case holds if it ends well with nothing
on stderr but warnings, or with status 1 or 2 and, as the last line, one printable sentence. Nothing
outside of the folder may change, what was no regular file stays what it was, and no case may take
more than SECONDS.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shutil
import signal
import stat
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import support.small_digits as small_digits
from dlsys.apps.setup import AUGMENTATIONS, DATASETS, MODELS, OPTIMIZERS, SCHEDULES
from dlsys.data import write_idx
from dlsys.data.formats import mnist

from .formats import TooLong, limit_memory
from .harness import Finding, Slow, Source, Trial

SECONDS = 10.0
ROOM = 3 << 30
TRAIN, VALIDATION, TEST = 40, 20, 20
ODD = (
    "", "0", "-0", "-1", "1", "2", "3.5", "1e9", "1e-30", "1e400", "nan", "inf", "-inf", "x", "-",
    "--", "٣", "1_000", " 2", "2 ", "0x10", "99999999999999999999", "1,2", ",", "1,", "=", "a=b",
    "\x1b[31m", "\n", "é", "'", "$(touch x)", ".", "-m",
)  # fmt: skip


def missing() -> str | None:
    """Why these cases cannot be tried here."""
    return None


def trial(devices: Sequence[str], parts: Sequence[str]) -> Trial:
    """A random command line, on one of the devices."""
    del parts
    base = Path(tempfile.mkdtemp(prefix="fuzz"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    warnings.simplefilter("ignore")
    make_sets(base)
    limit_memory(ROOM)
    return lambda source: attack(source, base, devices)


def make_sets(base: Path) -> None:
    """A data set of a few images, and checkpoints of networks that saw it."""
    data = base / "data"
    data.mkdir()
    parts = [*small_digits.digits(TRAIN + VALIDATION, 0), *small_digits.digits(TEST, 1)]
    for file, array in zip(mnist.MNIST.files, parts):
        write_idx(data / file.name, array)
    for name, more in (("mlp", ["--hidden", "4"]), ("logreg", [])):
        done = run(base, ["-m", name, *more, "-e", "1", "--batch-size", "20", "--data-dir", "data",
                          "--optimizer", "sgd", "--schedule", "constant", "-c", "numpy",
                          "--checkpoint", f"old-{name}"])  # fmt: skip
        assert done[0] == 0, done
    write_idx(base / "images.idx", parts[2])
    write_idx(base / "labels.idx", parts[3])
    (base / "text.txt").write_text("nothing\n")
    (base / "link").symlink_to("linked")
    (base / "empty").mkdir()


# ---- a case ----
def attack(source: Source, base: Path, devices: Sequence[str]) -> None:
    """Raises Finding unless the command line does its work or says why not."""
    arguments = command_line(source, devices)
    with tempfile.TemporaryDirectory(dir=base.parent) as name:
        folder = Path(name) / "f"
        shutil.copytree(base, folder, symlinks=True)
        os.mkfifo(folder / "pipe")
        with contextlib.suppress(PermissionError):  # a device like /dev/null, of our own
            os.mknod(folder / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        before = _kinds(folder)
        status, out, err = run(folder, arguments)
        shown = f"mnist_dlsys.py {arguments}: {err[-300:]!r}"
        check(arguments, status, out, err)
        changed = [path for path, kind in before.items() if _kind(folder / path) != kind]
        if changed:
            raise Finding("something was replaced", f"{changed}: {shown}")
        beside = {path.name for path in Path(name).iterdir()} - {"f"}
        if beside:
            raise Finding("something outside was written", f"{beside}: {shown}")
        left = [p.name for p in folder.rglob(".*.*") if len(p.suffix) == 17]
        if left:
            raise Finding("temporary files are left", f"{left}: {shown}")


def check(arguments: list[str], status: Any, out: str, err: str) -> None:
    """Raises Finding for an end that is no end."""
    shown = f"mnist_dlsys.py {arguments}: {status!r} {err[-300:]!r}"
    if isinstance(status, TooLong):
        raise Slow(f"takes more than {SECONDS:g} s", f"mnist_dlsys.py {arguments}")
    if isinstance(status, BaseException):
        kind = type(status).__name__
        where = traceback.extract_tb(status.__traceback__)[-1]
        text = f"mnist_dlsys.py {arguments}: {kind}: {str(status)[:200]}"
        raise Finding(f"{kind} at {Path(where.filename).name}:{where.name}", text)
    if status == 0:
        if any(word in out for word in ("loss nan", "loss inf", "loss -inf")):
            raise Finding("success with a loss that is no number", f"{shown}: {out[-200:]!r}")
        return
    if status not in (1, 2):
        raise Finding(f"status {status}", shown)
    lines = err.strip().splitlines()
    if not lines or "Traceback" in err:
        raise Finding("an end without a sentence", shown)
    last = err.strip("\n").rsplit("\n", 1)[-1]
    if status == 2 and "usage: " in err:  # argparse has its own words
        return
    if not last.isprintable():
        raise Finding("prints what is no text", shown)
    if "error: " not in last:
        raise Finding("more than one line", shown)


def run(folder: Path, arguments: list[str]) -> tuple[Any, str, str]:
    """Runs the command line in a folder: its status, or what it raised, and its outputs."""

    def late(*_: Any) -> None:
        raise TooLong

    out, err = io.StringIO(), io.StringIO()
    back = os.getcwd()
    os.chdir(folder)
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    status: Any
    try:
        with _sets(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = small_digits.mnist_dlsys.main(arguments)
    except SystemExit as end:
        status = end.code or 0
    except (Exception, TooLong) as error:
        status = error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.chdir(back)
    return status, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def _sets() -> Any:
    """MNIST and Fashion-MNIST are sets of this size, and nothing is fetched."""
    with (
        mock.patch.object(small_digits, "TRAIN", TRAIN),
        mock.patch.object(small_digits, "VALIDATION", VALIDATION),
        mock.patch.object(small_digits, "TEST", TEST),
        small_digits.small_sets(),
        mock.patch("urllib.request.urlopen", side_effect=OSError("no network here")),
    ):
        yield


def _kinds(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): _kind(p) for p in folder.rglob("*")}


def _kind(path: Path) -> int:
    try:
        return stat.S_IFMT(os.lstat(path).st_mode)
    except OSError:
        return 0


# ---- command lines ----
def command_line(source: Source, devices: Sequence[str]) -> list[str]:
    """Options and their values, most of them good."""
    kind = source.one("train", "train", "train", "predict", "evaluate", "bare")
    device = [source.one("-c", "--device"), source.one(*devices)]
    if kind == "train":
        found = ["-m", _mostly(source, *MODELS[:2], *MODELS[:2], "cnn"), "--data-dir", "data"]
        found += [source.one("-e", "--epochs"), _mostly(source, "1", "2")]
        found += ["--batch-size", _mostly(source, "20", "10", "40", "7")]
        for _ in range(source.number(0, 5)):
            found += _option(source)
        return [*found, *device]
    if kind == "bare":
        return [source.one("-h", "--help", "--version", "-m", "-q", "predict", "evaluate", *ODD)
                for _ in range(source.number(1, 3))]  # fmt: skip
    checkpoint = _mostly(source, "old-mlp", "old-logreg", "old-mlp/last.safetensors")
    found = [kind, checkpoint] if source.number(0, 9) else [kind]
    if kind == "predict":
        found += [_file(source) for _ in range(source.number(0, 3))]
        if source.flag():
            found += ["-k", _mostly(source, "1", "3", "100")]
    elif source.flag():
        found += ["images.idx", "labels.idx"] if source.flag() else [_file(source), _file(source)]
    else:
        found += ["--data-dir", _mostly(source, "data", "data", "empty")]
    return [*found, *device]


def _mostly(source: Source, *good: str) -> str:
    if source.number(0, 4):
        return source.one(*good)
    return source.one(*ODD, source.text(6).translate({0: None, ord("/"): None}))


def _file(source: Source) -> str:
    return source.one(
        "images.idx", "labels.idx", "text.txt", "empty", "absent", "old-mlp", "link",
        "old-mlp/best.safetensors", "null", "pipe", *ODD[:6],
    )  # fmt: skip


def _option(source: Source) -> list[str]:
    """An option with its value."""
    values = {
        "--dataset": DATASETS, "--lr": ("0.1", "0", "1e9", "1e30", "1e-30"),
        "--seed": ("0", "1", "4294967295"), "--optimizer": OPTIMIZERS, "--schedule": SCHEDULES,
        "--warmup": ("0", "0.5", "1", "1e-9"), "--momentum": ("0", "0.9", "0.999999"),
        "--weight-decay": ("0", "0.01", "1e9"), "--hidden": ("4", "4,3", "1"),
        "--dropout": ("0", "0.5", "0.999"), "--early-stop": ("1", "3"),
        "--augment": (*AUGMENTATIONS, "shift=1,rotate", "mixup=10", "scale=0.9", "rotate=180"),
        "--checkpoint": ("new", "old-mlp", "empty", "text.txt", "pipe", "link", "null", "a/b"),
        "--resume": ("old-mlp", "old-logreg", "new", "empty", "text.txt", "link", "images.idx"),
        "--init-from": ("old-mlp", "old-logreg", "new", "empty", "text.txt", "link", "pipe"),
        "--log": ("logs", "empty", "text.txt", "pipe", "null", "link"),
        "--report": ("r.html", "r.html", "empty", "link", "a/b.html", "pipe", "null",
                     "old-mlp/last", "r.pdf"),
    }  # fmt: skip
    name = source.one("-l", "--profile", "--hints", *values)
    if name not in values:
        return [name]
    if name == "--resume" and source.rarely(5):
        return [name]
    return [name, _mostly(source, *values[name])]

"""Callbacks that show a run: on the terminal, as JSON lines, in TensorBoard."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError, DlsysError, how_to_install
from ..files import appending
from .callback import Callback, Run
from .files.schema import integer, latin, maybe
from .history import Record, plain

_TAIL = 200  # bytes by which one log is known from another


class Progress(Callback):
    """On a terminal and in a notebook a bar an epoch with loss, metrics, samples/s and the time
    left in the epoch; a line an epoch in any case.

    unit: what samples are called.
    """

    first_rank_only = True

    def __init__(self, unit: str = "images") -> None:
        self._unit = unit
        self._bar: Any = None
        self._printed_at = 0.0

    def on_step(self, run: Run) -> None:
        if self._bar is None:
            self._bar = self._new_bar(run)
        now = time.monotonic()
        if now - self._printed_at > 0.1 or run.batch == len(run.data):
            self._printed_at = now
            self._bar.update(_samples(run, run.batch) - self._bar.n)

    def on_log(self, run: Run, record: Record) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(_figures(record, run), refresh=False)

    def on_epoch_end(self, run: Run, record: Record) -> None:
        self._close()

    def on_record(self, run: Run, record: Record) -> None:
        rate = f"{record['samples_per_second']:,.0f} {self._unit}/s"
        print(f"epoch {record['epoch']}/{run.epochs}  {_figures(record, run)}  {rate}", flush=True)

    def on_stop(self, run: Run) -> None:
        self._close()
        if run.outcome == "stopped":
            print(f"stopped: {run.reason}", flush=True)

    def _new_bar(self, run: Run) -> Any:
        in_notebook = _in_notebook()
        return _bar_class(in_notebook)(
            total=_samples(run, len(run.data)),
            initial=_samples(run, run.batch - 1),
            desc=f"epoch {run.epoch + 1}/{run.epochs}",
            unit=f" {self._unit}",
            leave=False,
            disable=False if in_notebook else None,  # None: unless it is a terminal
            mininterval=0,  # on_step sees to it
            file=sys.stderr,
        )

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _in_notebook() -> bool:
    """True in a cell of a notebook: where IPython's shell has a kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _bar_class(in_notebook: bool) -> Any:
    """tqdm's bar: in a notebook a widget where ipywidgets is installed, else a line of text."""
    if not in_notebook:
        from tqdm import tqdm

        return tqdm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ipywidgets is missing, and that autodetection is new
        from tqdm.auto import tqdm as chosen

    return chosen


class JsonLog(Callback):
    """Appends a JSON object a line to a file: {"event": "log", …} where a log is due and {"event":
    "epoch", …} after each epoch. A run that is resumed drops the lines behind its checkpoint.
    DataError for a file that cannot be written.
    """

    first_rank_only = True
    schemas = {"nbytes": maybe(integer()), "tail": latin}

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        # The length and the last bytes of the log as the run that is resumed left it.
        self._nbytes: int | None = None
        self._tail = b""
        self._file: Any = None

    def on_start(self, run: Run) -> None:
        with self._naming_path():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = appending(self._path)
            found = self._path.read_bytes() if self._path.is_file() else b""  # no pipe
            kept = found[: self._nbytes] if run.step and self._nbytes is not None else found
            if not kept.endswith(self._tail):
                kept = found  # of another run
            kept = kept[: kept.rfind(b"\n") + 1]  # without a part of a line, after a kill
            if len(kept) < len(found):
                self._file.truncate(len(kept))
        self._nbytes, self._tail = 0, b""
        self._count(kept)

    def on_log(self, run: Run, record: Record) -> None:
        self._write("log", record)

    def on_record(self, run: Run, record: Record) -> None:
        self._write("epoch", record)

    def on_stop(self, run: Run) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # was raised when it was written
                self._file.close()

    def state_dict(self) -> dict[str, Any]:
        return {"nbytes": self._nbytes, "tail": self._tail.decode("latin-1")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._nbytes, self._tail = state["nbytes"], state["tail"].encode("latin-1")

    def _write(self, event: str, record: Record) -> None:
        line = json.dumps({"event": event, **plain(record)}).encode() + b"\n"
        with self._naming_path():
            self._file.write(line)
            self._file.flush()
        self._count(line)

    @contextlib.contextmanager
    def _naming_path(self) -> Iterator[None]:
        """Raises what the file system refuses as a DataError that names the log."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{self._path}: the log cannot be written: {reason}") from error

    def _count(self, lines: bytes) -> None:
        self._nbytes = (self._nbytes or 0) + len(lines)
        self._tail = (self._tail + lines)[-_TAIL:]


class TensorBoard(Callback):
    """Writes every log (train/…) and epoch (epoch/…) for TensorBoard, by step. DlsysError without
    tensorboardX. folder: where to.
    """

    first_rank_only = True

    def __init__(self, folder: str | Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise DlsysError(
                f"TensorBoard needs tensorboardX: {how_to_install('tensorboardX')}"
            ) from None
        self._folder = str(folder)
        self._writer_class = SummaryWriter
        self._writer: Any = None

    def on_start(self, run: Run) -> None:
        purge = run.step or None  # hides what the interrupted run wrote beyond its checkpoint
        self._writer = self._writer_class(self._folder, purge_step=purge)

    def on_log(self, run: Run, record: Record) -> None:
        self._write("train", record)

    def on_record(self, run: Run, record: Record) -> None:
        self._write("epoch", record)

    def on_stop(self, run: Run) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, group: str, record: Record) -> None:
        for name, value in record.items():
            if isinstance(value, (int, float)) and name not in ("step", "epoch"):
                self._writer.add_scalar(f"{group}/{name}", value, record["step"])


def _samples(run: Run, batches: int) -> int:
    """About how many samples so many batches have; batches where a loader does not count them."""
    return round(getattr(run.data, "samples", len(run.data)) * batches / len(run.data))


def _figures(record: Record, run: Run) -> str:
    """The loss and the metrics that are numbers, those of the validation set behind them."""
    names = ["loss", *(metric.name for metric in run.metrics)]
    figures = [n for n in record if n.removeprefix("val_") in names]
    return "  ".join(f"{n} {record[n]:.4g}" for n in figures if isinstance(record[n], (int, float)))

"""The callbacks that come with `fit`: they stop a run, measure more or keep its state."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from ..dtypes import host
from ..errors import DataError, DlsysError, GraphError
from ..files import FolderLock, check_replaceable, make_folder, sweep
from ..optim import EMA, ReduceOnPlateau
from .callback import Callback, Run
from .evaluation import Evaluator
from .files.checkpoint import save
from .files.schema import integer, maybe, number
from .history import Record


class Best:
    """The best value of one figure of the records so far: the lowest of a loss, the highest of
    anything else, unless `higher` says which.
    """

    def __init__(self, monitor: str, higher: bool | None = None, min_delta: float = 0.0) -> None:
        self.monitor = monitor
        self.value: float | None = None
        self.min_delta = min_delta
        self._sign = 1 if (not monitor.endswith("loss") if higher is None else higher) else -1

    def read(self, run: Run, record: Record) -> float | None:
        """The figure in a record; None where it is measured in some epochs only and not in this.
        DlsysError when there is none of that name.
        """
        value = record.get(self.monitor)
        if isinstance(value, (int, float)):
            return float(value)
        if value is None and any(self.monitor in callback.adds for callback in run.callbacks):
            return None
        known = ", ".join(name for name, v in record.items() if isinstance(v, (int, float)))
        raise DlsysError(
            f"the epoch's record has no figure {self.monitor}, it has {known}; give fit a "
            "validation set for val_*, or monitor one of these"
        )

    def improved(self, value: float) -> bool:
        """True if a value is better than the best by more than `min_delta`; it is the best then.
        NaN never is.
        """
        bound = -math.inf if self.value is None else self._sign * self.value + self.min_delta
        better = self._sign * value > bound
        if better:
            self.value = value
        return better


class Validation(Callback):
    """Adds val_loss and val_<metric> over a validation set to the record of every so many epochs,
    and of the last. With `ema` the weights are those averages, and only for this.

    data: a Loader. every: epochs from one to the next. prefix: of the names in the record.
    """

    def __init__(
        self, data: Any, every: int = 1, prefix: str = "val_", ema: EMA | None = None
    ) -> None:
        if every < 1:
            raise GraphError(f"Validation: expected every >= 1, got {every}")
        self._data = data
        self._every = every
        self._prefix = prefix
        self._ema = ema
        self._evaluator: Evaluator | None = None

    def on_start(self, run: Run) -> None:
        what = (run.model, self._data, run.metrics, run.loss, run.ctx, run.precision)
        self._evaluator = Evaluator(*what)
        names = ["loss", *(metric.name for metric in run.metrics)]
        self.adds = frozenset(f"{self._prefix}{name}" for name in names)

    def on_epoch_end(self, run: Run, record: Record) -> None:
        if record["epoch"] % self._every == 0 or record["epoch"] == run.epochs:
            assert self._evaluator is not None
            with self._ema.applied() if self._ema else contextlib.nullcontext():
                figures = self._evaluator.run()
            record.update({f"{self._prefix}{name}": value for name, value in figures.items()})


class EarlyStopping(Callback):
    """Stops when the monitored figure has not improved by more than `min_delta` for `patience`
    epochs. With `restore_best` the model ends as it was after its best epoch.

    monitor: the figure of the record. higher: whether larger is better; by default for all but
    losses.
    """

    schemas = {"value": maybe(number(finite=False)), "epoch": integer(), "waited": integer()}

    def __init__(
        self,
        patience: int = 5,
        min_delta: float = 0.0,
        monitor: str = "val_loss",
        higher: bool | None = None,
        restore_best: bool = True,
    ) -> None:
        if patience < 1 or min_delta < 0:
            raise GraphError(
                f"EarlyStopping: expected patience >= 1 and min_delta >= 0, got {patience} and "
                f"{min_delta}"
            )
        self.best_epoch = 0
        self._best = Best(monitor, higher, min_delta)
        self._patience = patience
        self._restore = restore_best
        self._waited = 0
        self._weights: dict[str, np.ndarray] = {}

    def on_start(self, run: Run) -> None:
        if not run.step:  # what an earlier run has left here is none of this one's
            self.load_state_dict({"value": None, "epoch": 0, "waited": 0})
        self._check_weights(run)
        self._stop_if_due(run)

    def on_record(self, run: Run, record: Record) -> None:
        value = self._best.read(run, record)
        if value is None:
            return
        if self._best.improved(value):
            self._waited, self.best_epoch = 0, record["epoch"]
            self._weights = run.model.state_dict() if self._restore else {}
        else:
            self._waited += 1
            self._stop_if_due(run)

    def on_stop(self, run: Run) -> None:
        if self._weights and run.outcome in ("finished", "stopped"):
            run.model.load_state_dict(self._weights)

    def state_dict(self) -> dict[str, Any]:
        weights = {f"best.{name}": value for name, value in self._weights.items()}
        own = {"value": self._best.value, "epoch": self.best_epoch, "waited": self._waited}
        return own | weights

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rest = dict(state)
        self._best.value = rest.pop("value")
        self.best_epoch, self._waited = rest.pop("epoch"), rest.pop("waited")
        self._weights = {name.removeprefix("best."): value for name, value in rest.items()}

    def _check_weights(self, run: Run) -> None:
        """Now rather than when the run ends, and has them taken over."""
        own = {name: (p.shape, host(p.dtype)) for name, p in run.model.named_state()}
        arrays = {n: v for n, v in self._weights.items() if isinstance(v, np.ndarray)}
        kept = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        if self._weights and kept != own:
            raise DataError("the best weights that EarlyStopping has kept are of another model")

    def _stop_if_due(self, run: Run) -> None:
        if self._waited < self._patience:
            return
        if self._best.value is None:
            run.stop(f"{self._best.monitor} was NaN in each of {self._waited} epochs")
            return
        run.stop(
            f"{self._best.monitor} has not improved since epoch {self.best_epoch}, where it "
            f"was {self._best.value:.6g}"
        )


class PlateauSchedule(Callback):
    """Reports a figure to a schedule that lowers the rate on a plateau, after each epoch. What the
    schedule remembers is state of the optimizer. monitor: the figure of the record.
    """

    def __init__(self, schedule: ReduceOnPlateau, monitor: str = "val_loss") -> None:
        self._schedule = schedule
        self._figure = Best(monitor)

    def on_record(self, run: Run, record: Record) -> None:
        value = self._figure.read(run, record)
        if value is not None:
            self._schedule.report(value)


class Checkpoint(Callback):
    """Keeps the run in a folder: `last.safetensors` after every `epochs` epochs and, unless 0,
    every `steps` steps, and `best.safetensors` when the monitored figure is better than ever.

    monitor: by default val_loss, or loss without a validation set. Ctrl-C writes `last` too. A
    state with NaN or infinity is never written. `fit(..., resume=folder)` goes on from `last`.
    higher: whether larger is better; by default for all but losses. DataError for a folder that
    cannot be written, that another run is writing to, or that has the checkpoints of a run that
    this one does not go on with. A folder that is removed during the run is made again.
    """

    schemas = {"value": maybe(number(finite=False))}

    def __init__(
        self,
        folder: str | Path,
        epochs: int = 1,
        steps: int = 0,
        monitor: str | None = None,
        higher: bool | None = None,
    ) -> None:
        if epochs < 1 or steps < 0:
            raise GraphError(
                f"Checkpoint: expected epochs >= 1 and steps >= 0, got {epochs}, {steps}"
            )
        self.folder = Path(folder)
        self._epochs, self._steps = epochs, steps
        self._monitor, self._higher = monitor, higher
        self._best: Best | None = None
        self._value: float | None = None
        self._improved = False
        self._saved_step = -1
        self._lock: FolderLock | None = None

    @property
    def last(self) -> Path:
        """The newest state."""
        return self.folder / "last.safetensors"

    @property
    def best(self) -> Path:
        """The state with the best figure."""
        return self.folder / "best.safetensors"

    def on_start(self, run: Run) -> None:
        if run.writes:
            self._take_folder(run.resumed_folder)
        if not run.step:  # what an earlier run has left here is none of this one's
            self._value = None
        self._improved = False
        validated = any("val_loss" in callback.adds for callback in run.callbacks)
        monitor = self._monitor or ("val_loss" if validated else "loss")
        self._best = Best(monitor, self._higher)
        self._best.value = self._value

    def on_record(self, run: Run, record: Record) -> None:
        assert self._best is not None
        value = self._best.read(run, record)
        self._improved = value is not None and self._best.improved(value)
        self._value = self._best.value

    def on_commit(self, run: Run) -> None:
        ended = run.batch == 0
        due = ended and (run.epoch % self._epochs == 0 or run.epoch == run.epochs)
        if self._improved:
            self._improved = False
            self._write(run, self.best)
        if due or run.stopping or (not ended and self._steps and run.step % self._steps == 0):
            self._write(run, self.last)
            self._saved_step = run.step

    def on_stop(self, run: Run) -> None:
        if run.outcome == "interrupted":
            run.notes.append(f"the state of step {self._saved_step} is in {self.last}")
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._value = state["value"]

    def _write(self, run: Run, path: Path) -> None:
        tensors, header = run.saved()  # on every rank: each has a part of the state
        if run.writes:
            assert self._lock is not None
            if not self._lock.holds:  # removed or replaced since: the lock is of what is gone
                self._lock.release()
                self._take_folder(None)
            save(path, tensors, header, run.state.narrow)
        if run.group is not None:
            run.group.barrier()  # the file is there for every rank from here on

    def _take_folder(self, own: Path | None) -> None:
        """Makes the folder this run's. own: the folder whose run goes on, which may have files."""
        make_folder(self.folder)
        try:
            self._lock = FolderLock(self.folder)
        except BlockingIOError:
            raise DataError(
                f"{self.folder}: another run keeps its checkpoints in this folder: choose another "
                "one, or wait until it has ended"
            ) from None
        there = [path.name for path in (self.last, self.best) if path.exists()]
        if there and not (own is not None and own.samefile(self.folder)):
            raise DataError(
                f"{self.folder} has the checkpoints of another run ({', '.join(there)}): go on "
                f'with that one, fit(..., resume="{self.folder}"), or choose another folder'
            )
        for path in (self.last, self.best):
            check_replaceable(path)
            sweep(path)

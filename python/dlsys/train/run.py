"""TrainingRun: one training run, from the graphs to the last callback."""

from __future__ import annotations

import contextlib
import functools
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import autodiff as ad
from ..data.description import DataDescription
from ..dist import Group
from ..errors import DataError
from ..interrupts import Interrupts
from ..nn import Module
from ..runtime.device import Context, context_or_numpy
from .callback import Callback
from .evaluation import Loss, batches_of, output_and_label
from .files import schema
from .files.checkpoint import Saved
from .files.models import recipe_of
from .history import History, Record, plain
from .kernel_algorithms import Kernels
from .metrics import Metric, suiting
from .nan_search import FiniteState, diverged
from .ranks import average_statistics, joined, share_of
from .state import State
from .totals import Totals

_NO_KERNELS: dict[str, Any] = {"device": "", "algorithms": {}}
_FINITE_STATE_SECONDS = 60.0  # until a state to go back to is read anew within an epoch


class TrainingRun:
    """One training run of `fit`, which its callbacks see (see Callback)."""

    def __init__(
        self,
        model: Module,
        data: Any,
        optimizer: Any,
        loss: Loss,
        epochs: int,
        ctx: Context | str | None,
        metrics: Sequence[Metric] | None,
        callbacks: Sequence[Callback],
        log_every: int,
        parameters: Sequence[Any] | None = None,
        precision: str = "fp32",
        group: Group | None = None,
    ) -> None:
        self.precision, self.group = precision, group
        self.model, self.optimizer = model, optimizer
        self.data = data if group is None else share_of(data, group)
        self.loss = loss
        self.callbacks = tuple(c for c in callbacks if self.writes or not c.first_rank_only)
        self.epochs, self.ctx = epochs, context_or_numpy(ctx)
        self.history = History()
        self.epoch = self.batch = self.step = 0
        self.outcome = ""
        self.reason: str | None = None  # why a callback stopped the run
        self.interrupted = False
        self.notes: list[str] = []  # what callbacks did about an interruption
        self.resumed_folder: Path | None = None  # of the checkpoint that this run goes on from
        self._log_every = log_every
        self._trained_on = DataDescription.of(data)
        self._build(parameters, metrics)
        self._sums = self.totals.zeros()  # of this epoch, up to the last log
        self._seconds = 0.0  # that this epoch has taken in runs before this one
        self._clock = time.monotonic()
        self._last_finite: FiniteState

    def _build(self, parameters: Sequence[Any] | None, metrics: Sequence[Metric] | None) -> None:
        with self.model.in_mode(training=True):
            output, label = output_and_label(self.model, self.data)
            loss = self.loss(output, label)
        self.metrics = suiting(loss, output, label) if metrics is None else tuple(metrics)
        self.totals = Totals(loss, output, label, self.metrics)
        trained = self.model.parameters() if parameters is None else parameters
        update = self.optimizer.minimize(loss, trained)
        step = ad.group_op(update, self.totals.update, name="step")
        self.executor = ad.Executor([step], self.ctx, self.precision, group=self.group)
        self.state = State(self.model, self.optimizer, self.data, self.executor)
        self._kernels = Kernels(self.executor)

    # ---- what callbacks may do ----
    def stop(self, reason: str) -> None:
        """Ends the run after this step, or after this epoch when called at its end."""
        self.reason = reason

    @property
    def writes(self) -> bool:
        """True where this process writes the run's files: on rank 0 of several."""
        return self.group is None or self.group.rank == 0

    @property
    def stopping(self) -> bool:
        """True if no further step will be made."""
        return self.reason is not None or self.interrupted

    def saved(self) -> Saved:
        """All that a run needs to go on from here, as arrays and JSON values. DivergedError rather
        than a state with NaN or infinity.
        """
        if self.group is not None:
            average_statistics(self.model, self.group)
        tensors = dict(self._read_finite())
        if self.group is not None:
            tensors = joined(tensors, self._name_of_totals, self.group)
        states = []
        for k, callback in enumerate(self.callbacks):
            state = callback.state_dict()
            arrays = {k: v for k, v in state.items() if isinstance(v, (np.ndarray, np.generic))}
            tensors |= {f"callback.{k}.{key}": np.asarray(v) for key, v in arrays.items()}
            rest = {key: value for key, value in state.items() if key not in arrays}
            states.append({"name": type(callback).__name__, "state": rest})
        header = {
            "epoch": self.epoch,
            "batch": self.batch,
            "step": self.step,
            "data": self._data_facts,
            "model": recipe_of(self.model),
            "trained_on": self._trained_on and self._trained_on.as_dict(),
            "metrics": [metric.name for metric in self.metrics],
            "sums": self._sums.tolist(),
            "seconds": self._elapsed(),
            "random": self.state.random_keys(),
            "kernels": self._kernels.as_dict(),
            "history": self.history.as_dict(),
            "callbacks": states,
        }
        return Saved(tensors, header)

    def resume(self, what: str, saved: Saved) -> None:
        """Goes on from what `saved` returned. DataError, and nothing is changed, where that was a
        run over other data, with other metrics, or of another model or optimizer.
        """
        if "epoch" not in saved.header or "history" not in saved.header:
            raise DataError(f"{what} has arrays, but not the state of a run to go on with")
        header = {"kernels": _NO_KERNELS} | saved.header  # older checkpoints do not say
        schema.check(what, header, schema.RUN)
        values = {n: v for n, v in saved.tensors.items() if not n.startswith("callback.")}
        metrics = [metric.name for metric in self.metrics]
        now = self._data_facts
        had = {key: value for key, value in header["data"].items() if value != now.get(key)}
        other = [f"{key} {value}, now {now.get(key)}" for key, value in had.items()]
        if other:
            raise DataError(f"{what} is of a run over other data: {'; '.join(other)}")
        if header["metrics"] != metrics:
            raise DataError(f"{what} has sums for the metrics {header['metrics']}, now {metrics}")
        self._check_counts(what, header)
        self.state.check(what, values)
        pairs = self._states_of_callbacks(what, saved)
        if not self.writes:  # rank 0 goes on with the sums of all ranks
            name = self._name_of_totals
            values[name] = np.zeros_like(values[name])
        history = History.from_dict(what, header["history"])
        self.state.set_random_keys(what, header["random"])
        self.state.write(values)
        self.epoch, self.batch, self.step = header["epoch"], header["batch"], header["step"]
        self._sums, self._seconds = np.array(header["sums"]), header["seconds"]
        self.history = history
        self._kernels.resume(what, header["kernels"])
        for callback, state in pairs:
            _take_over(what, callback, state)

    def _check_counts(self, what: str, header: dict[str, Any]) -> None:
        """DataError unless the counts in a run's header fit each other and this run."""
        sums = schema.items(schema.number(), len(self._sums))
        schema.check(what, header, schema.fields(sums=sums))
        epoch, batch, step = header["epoch"], header["batch"], header["step"]
        if batch > len(self.data) or step != epoch * len(self.data) + batch:
            raise DataError(
                f"{what} is damaged or forged, or of a run over other data: step {step} is not "
                f"batch {batch} of epoch {epoch} where an epoch has {len(self.data)} batches"
            )

    def _states_of_callbacks(
        self, what: str, saved: Saved
    ) -> list[tuple[Callback, dict[str, Any]]]:
        """Each callback with the state of the one at the same position among those of its class."""
        unused, pairs = list(enumerate(saved.header["callbacks"])), []
        for callback in self.callbacks:
            name = type(callback).__name__
            found = next((entry for entry in unused if entry[1]["name"] == name), None)
            if found is not None:
                unused.remove(found)
                k, entry = found
                state = entry["state"] | saved.part(f"callback.{k}")
                schema.check(f"{what}: {name}", state, schema.fields(**callback.schemas))
                pairs.append((callback, state))
        return pairs

    @property
    def _name_of_totals(self) -> str:
        named = self.state.parameters.items()
        return next(name for name, p in named if p is self.totals.parameter)

    @functools.cached_property
    def _data_facts(self) -> dict[str, Any]:
        """The facts by which one loader is known from another."""
        names = "seed", "shuffle", "batch_size", "samples"
        labels = getattr(getattr(self.data, "dataset", None), "labels", None)
        chosen = {name: getattr(self.data, name, None) for name in names}
        return plain(chosen) | {
            "batches": len(self.data),
            "labels' checksum": _checksum(labels),
            "weights' checksum": _checksum(getattr(self.data, "weights", None)),
        }

    # ---- the loop ----
    def go(self) -> History:
        """Runs the epochs that are left.

        DivergedError when a loss becomes NaN or infinite. Ctrl-C ends the run after the step that
        it is in; then KeyboardInterrupt says what was done, and `model.history` has what was
        measured.
        """
        self._clock = time.monotonic()
        with Interrupts() as keys, contextlib.ExitStack() as stopped:
            self.outcome = "failed"
            if self.group is not None:
                self.group.agree(self.step, {"steps so far": [str(self.step)]})
            before = self.model.trained_on, self.model.history
            stopped.callback(self._describe_again, before, self.step)
            self.model.trained_on, self.model.history = self._trained_on, self.history
            for callback in self.callbacks:
                stopped.callback(callback.on_stop, self)
                callback.on_start(self)
            while self.epoch < self.epochs and not self.stopping:
                self._run_epoch(keys)
            self.outcome = "stopped" if self.reason is not None else "finished"
            if self.interrupted:
                self.outcome = "interrupted"
        if keys.pressed or self.interrupted:  # perhaps only when no step was left
            raise KeyboardInterrupt("; ".join([self._progress(), *self.notes]))
        return self.history

    def _describe_again(self, before: tuple[Any, Any], step: int) -> None:
        """A run that failed before it made a step has changed nothing of the model."""
        if self.outcome == "failed" and self.step == step:
            self.model.trained_on, self.model.history = before

    def _run_epoch(self, keys: Interrupts) -> None:
        self._read_finite()
        with batches_of(self.data, self.executor, self.epoch, self.batch) as feeds:
            for feed in feeds:
                self.executor.run(feed)
                self.batch += 1
                self.step += 1
                for callback in self.callbacks:
                    callback.on_step(self)
                if self.step % self._log_every == 0 or self.batch == len(self.data):
                    self._log()
                self._commit(keys)
                if self.stopping:
                    break
        if not self.stopping:
            self._end_epoch()
            self._commit(keys)

    def _commit(self, keys: Interrupts) -> None:
        self.interrupted = self._on_any_rank(keys.pressed)
        if self._on_any_rank(self.reason is not None) and self.reason is None:
            self.reason = "another rank stopped"
        for callback in self.callbacks:
            callback.on_commit(self)

    def _on_any_rank(self, here: bool) -> bool:
        """True where it holds on a rank: all ranks go on, or stop, together."""
        if self.group is None:
            return here
        return bool(self.group.all_reduce(np.array([here], np.int32), "max")[0])

    def _log(self) -> None:
        """Reads what the device has added up since the last log, and logs it."""
        sums = self.totals.take()
        if self.group is not None:
            sums = self.group.all_reduce(sums)
        if not np.isfinite(sums[0]):
            raise diverged(self, self._last_finite)
        self._sums += sums
        record = self._record(sums) | {"lr": self.optimizer.learning_rate()}
        self.history.add_to_curve(record)
        for callback in self.callbacks:
            callback.on_log(self, record)
        self._kernels.compare()
        if self._on_any_rank(time.monotonic() - self._last_finite.taken > _FINITE_STATE_SECONDS):
            self._read_finite()

    def _end_epoch(self) -> None:
        seconds = self._elapsed()
        if self.group is not None:
            average_statistics(self.model, self.group)
        record = self._record(self._sums) | {
            "lr": self.optimizer.learning_rate(),
            "seconds": seconds,
            "samples_per_second": float(self._sums[1]) / max(seconds, 1e-9),
        }
        for callback in self.callbacks:
            callback.on_epoch_end(self, record)
        self.history.epochs.append(record)
        self.epoch, self.batch = self.epoch + 1, 0
        self._sums = self.totals.zeros()
        self._seconds, self._clock = 0.0, time.monotonic()
        for callback in self.callbacks:
            callback.on_record(self, record)

    def _record(self, sums: np.ndarray) -> Record:
        return {"epoch": self.epoch + 1, "step": self.step, **self.totals.figures(sums)}

    def _elapsed(self) -> float:
        return self._seconds + time.monotonic() - self._clock

    def _progress(self) -> str:
        where = f"{self.epoch} of {self.epochs} epochs"
        if self.batch:
            where += f" and {self.batch} of {len(self.data)} batches"
        return f"{where}, {self.step} steps"

    def _read_finite(self) -> dict[str, np.ndarray]:
        """Reads the state, to which the search for a NaN can go back from now on."""
        values = self.state.read()
        if self.state.broken(values):
            raise diverged(self, self._last_finite)
        self._last_finite = FiniteState(values, self.epoch, self.batch, self.step, time.monotonic())
        return values


def _checksum(array: Any) -> int | None:
    return None if array is None else zlib.crc32(np.ascontiguousarray(array).data)


def _take_over(what: str, callback: Callback, state: dict[str, Any]) -> None:
    """Gives a callback its state; DataError where one without schemas for it stumbles over it."""
    try:
        callback.load_state_dict(state)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        name, reason = type(callback).__name__, f"{type(error).__name__}: {error}"
        raise DataError(f"{what}: {name} cannot take over its state ({reason})") from error

"""The base of callbacks, and the part of a run that they see."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ..autodiff import Executor
from ..describe import described
from ..dist import Group
from ..nn import Module
from ..runtime.device import Context
from .evaluation import Loss
from .files.checkpoint import Saved
from .files.schema import Schema
from .history import History, Record
from .metrics import Metric
from .state import State
from .totals import Totals


class Run(Protocol):
    """A training run as its callbacks see it; see Callback for what each attribute is."""

    model: Module
    data: Any
    optimizer: Any
    loss: Loss
    ctx: Context | None
    precision: str
    metrics: tuple[Metric, ...]
    callbacks: tuple[Callback, ...]
    executor: Executor
    state: State
    totals: Totals
    history: History
    epochs: int
    epoch: int
    batch: int
    step: int
    outcome: str
    reason: str | None
    notes: list[str]
    resumed_folder: Path | None
    group: Group | None

    @property
    def writes(self) -> bool:
        """True where this process writes the run's files: on rank 0 of several."""

    @property
    def stopping(self) -> bool:
        """True if no further step will be made."""

    def stop(self, reason: str) -> None:
        """Ends the run after this step, or after this epoch when called at its end.

        reason: what the run tells at its end.
        """

    def saved(self) -> Saved:
        """All that a run needs to go on from here, as arrays and JSON values."""


class Callback:
    """Base of callbacks, all of whose methods do nothing.

    A run calls its callbacks in the order in which `fit` got them: `on_start` once; then for every
    batch `on_step`, and where a log is due `on_log` with the means since the last one; after an
    epoch `on_epoch_end`, with a record that they may add to, and `on_record` when all have; after
    each batch and each epoch, when all other methods have been called, `on_commit`, which is the
    moment to keep the run's state; `on_stop`, in the opposite order, however the run ends.

    `run` has `model optimizer data ctx metrics loss epochs history`, `epoch` (finished ones),
    `batch` (done in this one), `step` (batches since the beginning), `stop(reason)`, and in
    `on_stop` the `outcome`: "finished", "stopped" by a callback, "interrupted" by Ctrl-C or
    "failed".
    On a device a step may still be computing when `on_step` is called: nothing has been read.

    The state of a callback goes into checkpoints: `state_dict` returns JSON values and arrays,
    `load_state_dict` gets them back before `on_start`.
    """

    __repr__ = described

    first_rank_only = False  # of several ranks that train together, rank 0 alone calls it
    adds: frozenset[str] = frozenset()  # names of figures that it adds to some records only
    schemas: Mapping[str, Schema] = {}  # of entries that a state must have to be loaded

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for former, name in (("on_settled", "on_commit"), ("forms", "schemas")):
            if former in vars(cls):
                warnings.warn(f"{former} is {name} now", DeprecationWarning, stacklevel=2)
                setattr(cls, name, vars(cls)[former])

    def on_start(self, run: Run) -> None:
        """The graphs are built and a state that is resumed is loaded."""

    def on_step(self, run: Run) -> None:
        """A batch was handed to the device."""

    def on_log(self, run: Run, record: Record) -> None:
        """epoch, step, loss, metrics and lr over the steps since the last log."""

    def on_epoch_end(self, run: Run, record: Record) -> None:
        """The record of the epoch, which callbacks may add to."""

    def on_record(self, run: Run, record: Record) -> None:
        """The complete record of an epoch, which is in the history now."""

    def on_commit(self, run: Run) -> None:
        """All callbacks have seen this step or epoch."""

    def on_stop(self, run: Run) -> None:
        """The run is over, or could not go on."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs of this callback."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned in the run that is resumed, once `schemas` (see
        schema.py) hold.
        """

"""fit: trains a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .. import functional as F
from ..data.description import DataDescription, as_trained
from ..dist import Group, init
from ..errors import DataError, GraphError
from ..nn import Module
from ..optim import Optimizer
from ..runtime.device import Context
from .callbacks import Callback, Validation
from .evaluation import Loss, check_as_trained, inputs_of
from .files import checkpoint
from .history import History
from .metrics import Metric
from .report import Progress
from .run import TrainingRun


def fit(
    model: Module,
    data: Any,
    optimizer: Optimizer,
    loss: Loss | None = None,
    epochs: int = 1,
    *,
    validation: Any = None,
    ctx: Context | str | None = None,
    metrics: Sequence[Metric] | None = None,
    callbacks: Sequence[Callback] = (),
    log_every: int = 50,
    parameters: Sequence[Any] | None = None,
    resume: str | Path | None = None,
    quiet: bool = False,
    precision: str = "fp32",
    parallel: str | None = None,
) -> History:
    """Trains a model and returns what was measured.

    model: in whichever mode; it is trained in training mode, and afterwards `model.trained_on`
    describes the data. data: a Loader, whose last input is the label; of several fields the inputs
    go to the model, by name where they have names, and several targets to the loss as a tuple or a
    dictionary. One that does not say how it normalizes does it as what the run that is resumed, or
    the model, was trained on. optimizer: from dlsys.optim. loss: a function (output, label) -> the
    mean loss of the batch; None is cross_entropy. validation: a Loader, over which the loss and
    metrics are measured after each epoch as val_*. metrics: None is what means something for the
    loss, see train.metrics.suiting: accuracy, binary_accuracy or nothing. ctx: None for numpy,
    `ndarray.cpu(0)`, `ndarray.gpu(0)`, or the device's name, such as `dl.best_device()`.
    log_every: steps between two readings of the loss; between them nothing leaves the device, but
    for what callbacks ask. parameters: what to train, or the optimizer's groups; by default
    `model.parameters()`. resume: a checkpoint, or the folder of one, to go on from; the run then
    ends with the same bits as one that was never interrupted on this device. quiet: without it
    `Progress` shows the run, unless it is among the callbacks. epochs: how often the data is gone
    through. precision: as of `Executor`; with "bf16" the model's Parameters stay float32, and so do
    checkpoints. parallel: "data" trains on all ranks of `dist.init()` (docs/dist.md): the loader's
    batches are those of all ranks together, of which each takes its share.

    DivergedError when the loss becomes NaN or infinite, with the step, the learning rate and the
    first node at fault; the model is then as it was before that step. Ctrl-C ends the run after a
    step and raises KeyboardInterrupt, so that what follows in a script or a notebook does not take
    the model for a trained one; its text says what was done, and `model.history` has what was
    measured. DataError for a checkpoint that does not fit.

    >>> points = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
    >>> labels = (points[:, 0] > 0).astype(np.int64)
    >>> batches = data.Loader((points, labels), 16)
    >>> model = nn.Linear(2, 2, rng=0)
    >>> history = train.fit(model, batches, optim.Adam(0.1), epochs=5, quiet=True)
    >>> len(history.epochs), bool(history.epochs[-1]["accuracy"] > 0.9)
    (5, True)
    """
    if epochs < 1 or log_every < 1:
        raise GraphError(f"fit: expected epochs and log_every >= 1, got {epochs} and {log_every}")
    metrics = None if metrics is None else _all_of("metrics", metrics, Metric)
    callbacks = _all_of("callbacks", callbacks, Callback)
    if not isinstance(optimizer, Optimizer):
        raise GraphError(f"fit: expected an optimizer such as optim.Adam(1e-3), got {optimizer!r}")
    inputs_of(data)
    if len(data) < 1:
        raise DataError("fit: the data have no batch to train on")
    group = _group_of(parallel)
    saved = checkpoint.load(resume) if resume is not None else None
    data = _prepared(data, model, resume, saved)
    if not quiet and not any(isinstance(callback, Progress) for callback in callbacks):
        callbacks = [*callbacks, Progress("samples")]
    if validation is not None:
        callbacks = [Validation(validation), *callbacks]
    run = TrainingRun(
        model,
        data,
        optimizer,
        loss or F.cross_entropy,
        epochs,
        ctx,
        metrics,
        callbacks,
        log_every,
        parameters,
        precision,
        group,
    )
    if resume is not None and saved is not None:
        run.resume(str(resume), saved)
        run.resumed_folder = Path(resume) if Path(resume).is_dir() else Path(resume).parent
    return run.go()


def _group_of(parallel: str | None) -> Group | None:
    """The ranks that train together, None for one alone."""
    if parallel not in (None, "data"):
        raise GraphError(f'fit: parallel is None or "data", got {parallel!r}')
    world = None if parallel is None else init()
    return world if world is not None and world.size > 1 else None


def _prepared(
    data: Any, model: Module, resume: str | Path | None, saved: checkpoint.Saved | None
) -> Any:
    """The loader, normalized as the run before it was, or as what the model was trained on before
    was if these were samples of the same shape, unless the loader says how.
    """
    if saved is not None:
        description = saved.trained_on(str(resume))
        data = as_trained(data, description)
        check_as_trained(str(resume), data, description)
        return data
    own, before = DataDescription.of(data), model.trained_on
    fits = own is not None and before is not None and own.shape == before.shape
    return as_trained(data, before) if fits else data


def _all_of(name: str, given: Any, kind: type) -> list[Any]:
    items = list(given) if isinstance(given, Iterable) else [given]
    wrong = [item for item in items if not isinstance(item, kind)]
    if wrong or not isinstance(given, Iterable):
        raise GraphError(
            f"fit: {name} is a list of objects of train.{kind.__name__}, got {given!r}"
        )
    return items

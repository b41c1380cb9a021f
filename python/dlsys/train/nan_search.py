"""Finds where a run became NaN: repeats it from its last finite state, then looks into the step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..errors import DivergedError, KernelError
from ..settings import settings
from .callback import Run
from .evaluation import batches_of


class FiniteState(NamedTuple):
    """A state without NaN or infinity, and its position in the data."""

    values: dict[str, np.ndarray]
    epoch: int
    batch: int
    step: int
    taken: float  # on the clock, so that a repetition takes no longer than it takes until the next


def diverged(run: Run, last: FiniteState) -> DivergedError:
    """The error that says at which step and node a run broke after `last`.

    The run is left as it was before that step.
    """
    last_step = run.step
    run.state.write(last.values)
    run.totals.reset()
    run.epoch, run.batch, run.step = last.epoch, last.batch, last.step
    bad = _first_bad(run, last_step)
    if bad is None:
        return DivergedError(
            f"a loss became NaN or infinite between step {last.step + 1} and {last_step}, but not "
            f"when these steps were repeated; the model is as it was after step {run.step}"
        )
    broken, where, rate = bad
    return DivergedError(
        f"{broken} became NaN or infinite in step {run.step + 1} (epoch {run.epoch + 1}, batch "
        f"{run.batch + 1}) at learning rate {rate:.6g}: {where}; the model is as it was before "
        "that step"
    )


def _first_bad(run: Run, last_step: int) -> tuple[str, str, float] | None:
    """Repeats steps until one breaks: what broke, where, and the learning rate. The run is before
    that step then.
    """
    before = run.state.read()
    with batches_of(run.data, run.executor, run.epoch, run.batch) as feeds:
        for feed in feeds:
            run.executor.run(feed)
            after = run.state.read()
            broken = run.state.broken(after)
            if broken is not None:
                loss_too = not np.isfinite(run.totals.parameter.asnumpy()).all()
                run.state.write(before)
                rate = run.optimizer.learning_rate()
                where = _first_bad_node(run, feed)
                run.state.write(before)
                return "the loss" if loss_too else broken, where, rate
            before = after
            run.batch += 1
            run.step += 1
            if run.step == last_step:
                break
    return None


def _first_bad_node(run: Run, feed: Any) -> str:
    if run.group is not None:  # a rank that stops at a node would leave the others waiting
        return "train without parallel= to learn at which node"
    before = settings.debug_nan
    settings.debug_nan = True
    try:
        run.executor.run(feed)
    except KernelError as error:
        return str(error)
    finally:
        settings.debug_nan = before
    return "no node made one when the step was repeated node by node"

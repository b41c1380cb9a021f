"""Which algorithms a run's kernels have: with others, a resumed run ends with other bits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from .. import autodiff as ad
from ..runtime.device import device_name


class Kernels:
    """The algorithms of an executor's kernels, and those of the run that this one goes on with."""

    def __init__(self, executor: ad.Executor) -> None:
        self._executor = executor
        self._device = "numpy" if executor.ctx is None else device_name(executor.ctx)
        self._algorithms: dict[str, str] = {}
        self._resumed = ""
        self._before: dict[str, str] = {}  # of kernels that have not been seen yet

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        self._algorithms |= self._executor.algorithms()  # plans are dropped when Parameters move
        return {"device": self._device, "algorithms": self._algorithms}

    def resume(self, what: str, recorded: Mapping[str, Any]) -> None:
        """Compares, from now on, with what `as_dict` gave in the run of the checkpoint `what`."""
        if recorded.get("device") == self._device:
            older = recorded.get("choices", {})  # their name in checkpoints of before
            self._resumed, self._before = what, dict(recorded.get("algorithms", older))

    def compare(self) -> None:
        """Warns once if the algorithms differ: plans, which have them, are made as batches come."""
        if not self._before:
            return
        now = self._executor.algorithms()
        had = {key: self._before.pop(key) for key in now if key in self._before}
        other = [key for key, name in had.items() if name != now[key]]
        if other:
            self._before = {}
            key, more = other[0], f" and {len(other) - 1} more" if len(other) > 1 else ""
            names = f"{had[key] or 'heuristic'}, now {now[key] or 'heuristic'}"
            warnings.warn(
                f"{self._resumed} is of a run with other kernels ({key.split(' | ')[0]}: {names}"
                f"{more}), so this one will not end with the bits that it would have had; "
                "DLSYS_TUNE_CACHE names the file of the algorithms",
                RuntimeWarning,
                stacklevel=6,
            )

"""What a training application prints and keeps while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import train


def kept(folder: Path, lines: train.Callback) -> list[train.Callback]:
    """What a run leaves in its folder, checkpoints and a log, and the lines that it prints."""
    return [train.Checkpoint(folder), train.JsonLog(folder / "log.jsonl"), lines]


class Progress(train.Progress):
    """A line for each validation, whose `figures` an application says. unit: what a batch has, such
    as "photos"; steps: updates in all.
    """

    def __init__(self, unit: str, steps: int) -> None:
        super().__init__(unit)
        self._unit, self._steps = unit, steps

    def figures(self, record: dict[str, Any]) -> tuple[str, ...]:
        """Texts about what a validation has found."""
        raise NotImplementedError

    def on_start(self, run: train.Run) -> None:
        print(f"{run.model.num_parameters():,} parameters, on {run.ctx or 'numpy'}", flush=True)
        if run.step:
            print(f"going on after {run.step} steps", flush=True)

    def on_record(self, run: train.Run, record: dict[str, Any]) -> None:
        print(
            f"step {record['step']}/{self._steps}",
            *self.figures(record),
            f"lr {record['lr']:.2e}",
            f"{record['samples_per_second']:,.0f} {self._unit}/s",
            sep="  ",
            flush=True,
        )

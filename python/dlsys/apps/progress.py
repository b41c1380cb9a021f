"""What a training application prints while it runs."""

from __future__ import annotations

from typing import Any

from .. import train


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

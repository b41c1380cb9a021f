"""History: what a run measured, an entry an epoch and a finer curve."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..describe import counted, drawn_by
from ..errors import DataError
from ..files import opened, replacing
from .files.schema import HISTORY, check

Record = dict[str, Any]
_NO_MEASURES = ("lr", "seconds", "samples_per_second")
_MAX_CURVE = 4096  # entries; a longer curve keeps every second one


@dataclass(repr=False)
class History:
    """`epochs` has a record an epoch: epoch, step, loss, the metrics, val_* of the validation set,
    lr, seconds, samples_per_second. `curve` has records over `log_every` steps each, with the means
    of these steps; it is thinned out when it grows beyond 4,096.

    kept, logged: of the curve, how many logs make a record of it, and how many there were.
    """

    epochs: list[Record] = field(default_factory=list)
    curve: list[Record] = field(default_factory=list)
    kept: int = 1  # every how many-th entry of the curve is kept
    logged: int = 0  # entries that the curve was given
    _repr_html_ = drawn_by("history_html")

    def __repr__(self) -> str:
        last = self.epochs[-1] if self.epochs else {}
        figures = [
            f"{name}={value:.4g}"
            for name, value in last.items()
            if isinstance(value, float) and name not in _NO_MEASURES
        ]
        counts = f"{counted(len(self.epochs), 'epoch')}, {len(self.curve)} points of the curve"
        return f"History({', '.join([counts, *figures])})"

    def add_to_curve(self, record: Record) -> None:
        """Adds an entry to the curve unless it is one of those that are left out."""
        if self.logged % self.kept == 0:
            self.curve.append(record)
        self.logged += 1
        if len(self.curve) > _MAX_CURVE:
            del self.curve[1::2]
            self.kept *= 2

    def column(self, name: str) -> list[Any]:
        """One figure of every epoch that has it, such as `history.column("val_loss")`."""
        return [record[name] for record in self.epochs if name in record]

    def as_dict(self) -> dict[str, Any]:
        """The history as JSON values: arrays become lists; NaN and infinities become None."""
        return plain(vars(self))

    def save(self, path: str | Path) -> None:
        """Writes the history as JSON."""
        with replacing(Path(path)) as file:
            file.write(json.dumps(self.as_dict(), indent=1).encode())

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Reads what `save` wrote. DataError for anything else."""
        try:
            with opened(path) as file:
                values = json.loads(file.read())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is no history of a run: {error}") from None
        return cls.from_dict(str(path), values)

    @classmethod
    def from_dict(cls, what: str, values: Any) -> History:
        """The history that `as_dict` gave. DataError, naming `what`, for anything else."""
        check(what, values, HISTORY, "is no history of a run")
        return cls(**{name: values[name] for name in ("epochs", "curve", "kept", "logged")})


def plain(value: Any) -> Any:
    """Numbers, arrays and containers of them as JSON values."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

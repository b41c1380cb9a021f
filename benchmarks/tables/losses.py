"""The tables of losses.py: curves and single steps against the reference."""

from __future__ import annotations

from typing import Any

from .gpu import NAMES, Results, rows, source

Cells = list[str]


def table(results: Results) -> str:
    """Each network's curve, then its steps."""
    record = results.read("losses")
    bounds, works = record["bounds"], record["works"]
    samples = "samples an epoch"
    curves = [_cells(name, work, "curve", _curve) for name, work in works.items()]
    steps = [_cells(name, work, "steps", _steps) for name, work in works.items()]
    head = ["curve", samples, "rate", "losses of the epochs", "steps"]
    head += [f"a step's losses, apart at most (judged: {bounds['curve']:g})"]
    head += ["means of epochs, apart at most", "s"]
    first = rows(head, curves)
    head = ["steps", samples, "rate", "losses of the epochs", "compared"]
    head += [f"loss, wrong at most (judged: {bounds['loss']:g})"]
    head += ["update, median step", "judged", "worst step", "s"]
    second = rows(head, steps)
    note = "Wrong is a share: of the loss, and of the largest update in the same Parameter."
    return f"{first}\n\n{second}\n\n{note} {source(record)}"


def _cells(name: str, work: dict[str, Any], kind: str, tell: Any) -> Cells:
    found = work[kind]
    start = [NAMES[name], f"{work['samples']:,}"]
    if "error" in found:
        return [*start, "failed"]
    losses = ", ".join(f"{loss:.3f}" for loss in found["epoch_losses"])
    return [*start, f"{found['rate']:g}", losses, *tell(work, found), f"{found['seconds']:.0f}"]


def _curve(work: dict[str, Any], found: dict[str, Any]) -> Cells:
    apart = [found["largest_difference"], found["largest_difference_of_epoch_means"]]
    return [str(found["steps"]), *(f"{each:.1e}" for each in apart)]


def _steps(work: dict[str, Any], found: dict[str, Any]) -> Cells:
    loss, update = found["loss_error"]["largest"], found["update_error"]
    compared = f"{found['compared']} of {found['steps']}"
    median, largest = f"{update['median']:.1e}", f"{update['largest']:.1e}"
    return [compared, f"{loss:.1e}", median, f"{work['update']:g}", largest]

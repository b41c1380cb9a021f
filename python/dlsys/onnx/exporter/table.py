"""The table of what can be exported."""

from __future__ import annotations

from typing import NamedTuple

from ...graph.node import Op
from ...ops.axes import AxisKernel
from .registry import NO_RULE, RULES, is_composed, operators, refusal_of


class Exportable(NamedTuple):
    """An operator and its ONNX form.

    operator: its name. targets: the ONNX operators that it becomes; "" where it becomes simpler
    operators of ours that have a form. reason: why it has none, "" where it has one.
    """

    operator: str
    targets: str
    reason: str


def exportable() -> list[Exportable]:
    """What `export` makes of each operator, by name.

    >>> [row for row in dl.onnx.exportable() if row.operator == "relu"]
    [Exportable(operator='relu', targets='Relu', reason='')]
    """
    found = operators().items()
    return [_row(name, ops) for name, ops in found if ops[0].leaf is None and not _is_kernel(ops)]


def _row(name: str, found: list[Op]) -> Exportable:
    reasons = [refusal_of(op) for op in found]
    if reasons[0] is not None:
        return Exportable(name, "", reasons[0])
    for op in found:
        if op in RULES:
            return Exportable(name, RULES[op].targets, "")
    lowered = found[0].kernel is None and type(found[0]).simplify is not Op.simplify
    return Exportable(name, "", "" if lowered or is_composed(found[0]) else NO_RULE)


def _is_kernel(found: list[Op]) -> bool:
    """True for what operators of this name only become on a device."""
    return all(isinstance(op, AxisKernel) for op in found)


def markdown() -> str:
    """The table as Markdown: direct forms, what becomes simpler operators, what has no form."""
    rows = exportable()
    direct = [f"| `{row.operator}` | {row.targets} |" for row in rows if row.targets]
    simpler = [f"`{row.operator}`" for row in rows if not row.targets and not row.reason]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            reasons.setdefault(row.reason, []).append(f"`{row.operator}`")
    without = [f"| {' '.join(names)} | {reason} |" for reason, names in reasons.items()]
    parts = [
        ["| operator | ONNX |", "|---|---|", *direct],
        ["These become operators above:", "", " ".join(simpler).replace("`|`", "`\\|`")],
        ["| no form | why |", "|---|---|", *without],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"

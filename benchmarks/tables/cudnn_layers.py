"""The table of layers by the own kernels beside cuDNN's (operators/cudnn_layers.py)."""

from __future__ import annotations

from typing import Any

from tables.gpu import Results, rows, source

DIRECTIONS = ("forward", "gradient")
SIDES = {"own": "own", "cudnn": "cuDNN"}


def table(results: Results) -> str:
    """Microseconds and shares of the bandwidth of both sides and directions, at each dtype, and the
    larger error of the two.
    """
    record = results.read("cudnn_layers")
    works: dict[str, dict[str, dict[str, Any]]] = {}
    for row in record["works"]:
        works.setdefault(f"{row['work']}, {row['dtype']}", {})[row["direction"]] = row
    body = [
        [
            name,
            *(
                _cell(found[direction][side]) if direction in found else "-"
                for direction in DIRECTIONS
                for side in SIDES
            ),
            *(f"{max(row[side]['error'] for row in found.values()):.0e}" for side in SIDES),
        ]
        for name, found in works.items()
    ]
    head = [
        "layer",
        *(f"{direction}, {side}" for direction in DIRECTIONS for side in SIDES.values()),
    ]
    head += [f"error, {side}" for side in SIDES.values()]
    note = (
        "Microseconds, medians, and the share of the bandwidth; errors relative to the largest "
        f"value, against float64. {record['cudnn']}."
    )
    told = filter(None, (note, record.get("note", ""), source(record)))
    return f"{rows(head, body)}\n\n{' '.join(told)}"


def _cell(side: dict[str, Any]) -> str:
    return f"{side['us']:.{1 if side['us'] < 100 else 0}f} ({side['of_bandwidth']:.0%})"

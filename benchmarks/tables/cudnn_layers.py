"""The table of layers by the own kernels beside cuDNN's (speed/cudnn_layers.py)."""

from __future__ import annotations

from typing import Any

from tables.gpu import Results, rows, source


def table(results: Results) -> str:
    """Microseconds, shares of the bandwidth and errors of both sides, at each dtype."""
    record = results.read("cudnn_layers")
    body = [
        [
            f"{row['work']}, {row['dtype']}, {row['direction']}",
            *_cells(row["own"]),
            *_cells(row["cudnn"]),
            f"{row['cudnn']['us'] / row['own']['us']:.2f}",
        ]
        for row in record["works"]
    ]
    head = ["layer", "own, µs", "of bandwidth", "error"]
    head += [f"{record['cudnn']}, µs", "of bandwidth", "error", "cuDNN / own"]
    note = "Medians; errors relative to the largest value, against float64."
    return f"{rows(head, body)}\n\n{note} {source(record)}"


def _cells(side: dict[str, Any]) -> list[str]:
    return [f"{side['us']:.1f}", f"{side['of_bandwidth']:.0%}", f"{side['error']:.0e}"]

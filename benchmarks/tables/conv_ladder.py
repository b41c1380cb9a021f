"""The tables and the picture of convolution's ladder (speed/conv.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlsys.learn.chart import picture
from dlsys.learn.conv import Shape
from tables.gpu import Results, rows, source

DRAWN = [32, 256, 14, 256, 3, 1, 1, 1], "forward"


def table(results: Results) -> str:
    """Milliseconds of every rung, shape and direction, at every precision."""
    record = results.read("conv")
    columns = list(dict.fromkeys(_column(row) for work in record["works"] for row in work["rungs"]))
    body = []
    for work in record["works"]:
        found = {_column(row): row for row in work["rungs"]}
        cells = [f"{found[one]['ms']:.3g}" if one in found else "-" for one in columns]
        body.append([work["net"], str(Shape(*work["shape"])), work["direction"], *cells])
    head = ["network", "shape", "direction", *columns]
    return f"{rows(head, body)}\n\nMilliseconds. {source(record)}"


def drawn(results: Results) -> str:
    """The convolution that is drawn: time, shares, workspace and errors of each rung."""
    record = results.read("conv")
    body = [
        [
            _column(row),
            f"{row['ms']:.3f}",
            f"{row['tflops']:.1f}",
            _percent(row["of_cudnn"]),
            _percent(row["of_limit"]),
            f"{row['workspace_nbytes'] / 2**20:.0f}",
            f"{row['error']:.1f}",
            f"{row['mean_error']:.2f}",
        ]
        for row in _work(record)["rungs"]
    ]
    head = ["rung", "ms", "TFLOP/s", "of cuDNN", "of the limit", "workspace, MiB"]
    head += ["largest error", "mean error"]
    note = (
        "TFLOP/s of a direct convolution's operations, so that Winograd's may exceed the limit. "
        "Errors relative to the sums of |x f|, in units of 2^-24."
    )
    return f"{rows(head, body)}\n\n{note} {source(record)}"


def draw(results: Results, path: Path) -> str:
    """Draws the rungs of one convolution into an SVG file, or says why not."""
    try:
        record = results.read("conv")
    except FileNotFoundError as missing:
        return f"{path.name}: left as it is, for want of {missing}"
    bars = [(_column(row), row["tflops"]) for row in _work(record)["rungs"]]
    path.write_text(picture(f"{Shape(*DRAWN[0])}, {record['device']}", bars))
    return str(path)


def _work(record: dict[str, Any]) -> dict[str, Any]:
    works = record["works"]
    return next(one for one in works if (one["shape"], one["direction"]) == DRAWN)


def _column(row: dict[str, Any]) -> str:
    return f"{row['algorithm']} {row['precision']}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"

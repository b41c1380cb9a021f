"""The tables and the picture of the matrix product's ladder (operators/gemm.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlsys.learn.chart import picture
from tables.gpu import Results, part_source, rows

DRAWN = [4096, 4096, 4096]
CPU_DRAWN = [1024, 1024, 1024]


def table(results: Results) -> str:
    """TFLOP/s of every rung and shape, and below cuBLAS's the share of it that the best reaches."""
    return _table(results.read("gemm"), "TFLOP/s", 1.0)


def cpu_table(results: Results) -> str:
    """GFLOP/s of the CPU's rungs and numpy's, by shape."""
    return _table(results.read("gemm_cpu"), "GFLOP/s", 1e3)


def _three_digits(x: float) -> str:
    return f"{x:.0f}" if x >= 1000 else f"{x:.3g}"


def _table(record: dict[str, Any], unit: str, scale: float) -> str:
    columns = list(dict.fromkeys(_column(row) for work in record["works"] for row in work["rungs"]))
    body = []
    for work in record["works"]:
        found = {_column(row): row for row in work["rungs"]}
        rates = {one: row["tflops"] * scale for one, row in found.items()}
        cells = [_three_digits(rates[one]) if one in rates else "-" for one in columns]
        body.append([_shape(work), *cells])
    note = f"{unit}. N and T: operands stored as they are, or transposed. {part_source(record)}"
    return f"{rows(['m x n x k', *columns], body)}\n\n{note}"


def squares(results: Results) -> str:
    """The product that is drawn: time, shares and errors of each rung."""
    record = results.read("gemm")
    work = next(work for work in record["works"] if work["shape"] == DRAWN)
    body = [
        [
            _column(row),
            f"{row['ms']:.3f}",
            f"{row['tflops']:.1f}",
            _percent(row["of_cublas"]),
            _percent(row["of_limit"]),
            f"{row['workspace_nbytes'] / 2**20:.0f}",
            f"{row['error']:.1f}",
            f"{row['mean_error']:.2f}",
        ]
        for row in _of_rungs(work)
    ]
    head = ["rung", "ms", "TFLOP/s", "of cuBLAS", "of the limit", "workspace, MiB"]
    head += ["largest error", "mean error"]
    note = f"Errors relative to the sums of |a b|, in units of 2^-24. {part_source(record)}"
    return f"{rows(head, body)}\n\n{note}"


def cpu_squares(results: Results) -> str:
    """The product that is shown of the CPU and numpy: time, share of the BLAS, and errors."""
    record = results.read("gemm_cpu")
    work = next(work for work in record["works"] if work["shape"] == CPU_DRAWN)
    body = [
        [
            row["algorithm"],
            f"{row['ms']:.2f}",
            f"{row['tflops'] * 1e3:.3g}",
            _percent(row["of_blas"]),
            f"{row['workspace_nbytes'] / 2**20:.1f}",
            f"{row['error']:.1f}",
            f"{row['mean_error']:.2f}",
        ]
        for row in work["rungs"]
    ]
    head = ["rung", "ms", "GFLOP/s", "of blas", "workspace, MiB", "largest error", "mean error"]
    note = f"{_shape(work)}, in float32. Errors as above. {part_source(record)}"
    return f"{rows(head, body)}\n\n{note}"


def draw(results: Results, path: Path) -> str:
    """Draws the rungs of one product into an SVG file, or says why not."""
    try:
        record = results.read("gemm")
    except FileNotFoundError as missing:
        return f"{path.name}: left as it is, for want of {missing}"
    work = next(work for work in record["works"] if work["shape"] == DRAWN)
    bars = [(_column(row), row["tflops"]) for row in _of_rungs(work)]
    path.write_text(picture(f"{_shape(work)}, {record['device']}", bars))
    return str(path)


def _of_rungs(work: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of rungs, without those of the heuristic."""
    return [row for row in work["rungs"] if row["algorithm"] != "auto"]


def _column(row: dict[str, Any]) -> str:
    return f"{row['algorithm']} {row['precision']}"


def _shape(work: dict[str, Any]) -> str:
    m, n, k, *flags = work["shape"]
    stored = "".join("NT"[flag] for flag in flags or (False, False))
    return f"{m} x {n} x {k} {stored}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"

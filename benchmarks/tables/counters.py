"""The tables of the profiler's counters (operators/counters.py)."""

from __future__ import annotations

from typing import Any

from tables.gpu import Results, rows, source

HEAD = [
    *("rung", "issue slots", "FMA", "tensor cores", "L1 and shared memory", "L2", "memory"),
    "warps wait for, cycles an instruction",
]
SHARES = ("issue", "fma", "tensor", "l1", "l2", "dram")
# Reasons that warps wait for, by Nsight Compute's names.
REASONS = {
    "long_scoreboard": "global memory",
    "short_scoreboard": "shared memory",
    "lg_throttle": "the queue of global loads",
    "mio_throttle": "the queue of shared loads",
    "math_pipe_throttle": "a busy arithmetic unit",
    "barrier": "a barrier",
    "wait": "the instruction before",
    "dispatch_stall": "registers in one bank",
    "no_instruction": "instructions",
    "tex_throttle": "the queue of L1",
    "gmma": "tensor cores",
    "sleeping": "a timer",
    "membar": "a fence",
}


def gemm(results: Results) -> str:
    """The rungs of the matrix product."""
    return _table(results.read("counters"), ("gemm",))


def conv(results: Results) -> str:
    """The rungs of convolution, and the depthwise one on a shape of its own."""
    return _table(results.read("counters"), ("conv", "depthwise"))


def _table(record: dict[str, Any], ladders: tuple[str, ...]) -> str:
    body = []
    for work in record["works"]:
        if work["ladder"] not in ladders:
            continue
        where = ", depthwise" if work["ladder"] == "depthwise" else ""
        for row in work["rungs"]:
            name = f"{row['rung']} {row['precision']}{where}"
            if row["kernels"] > 1:
                name += f" (`{row['kernel']}`, {row['share']:.0%} of {row['kernels']} kernels)"
            cells = [f"{row[share]:.0f}%" for share in SHARES]
            body.append([name, *cells, f"{REASONS[row['stall']]}, {row['stall_cycles']:.1f}"])
    note = f"Shares of the most that a unit can do, by Nsight Compute. {source(record)}"
    return f"{rows(HEAD, body)}\n\n{note}"

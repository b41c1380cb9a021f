"""The tables of recording and of eager training loops (eager.py)."""

from __future__ import annotations

from typing import Any

from .gpu import NAMES, Results, rows, source

_RECORDING = {
    "operator_us": "`x + y` is recorded",
    "number_us": "`x * 2.0` is recorded",
    "function_us": "`F.relu(x)` is recorded",
    "layer_us": "`nn.ReLU` is called",
    "linear_us": "`nn.Linear` is called",
    "find_us": "the program of a known tape is found, and what was run is let go",
    "program_us": "a program of one addition is run",
}


def recording(results: Results) -> str:
    """Microseconds of recording."""
    record = results.read("eager")
    found, targets = record["recording"], record["targets"]
    limits = {"operator_us": "recorded_call_us", "find_us": "found_program_us"}
    limits |= dict.fromkeys(("number_us", "function_us"), "recorded_call_us")
    body = [
        [words, f"{found[name]:.2f}", targets.get(limits.get(name, ""), "")]
        for name, words in _RECORDING.items()
    ]
    return f"{rows(['µs, on numpy', 'least', 'at most'], body)}\n\n{source(record)}"


def loops(results: Results) -> str:
    """Milliseconds a step of training loops."""
    record = results.read("eager")
    body = [_row(found) for found in record["loops"]]
    head = ["training loop, ms a step", "eager", "`jit`", "`Executor.run`"]
    head += ["PyTorch eager", "captured", "eager over PyTorch eager"]
    note = (
        f"Batches on the device, the loss read every {record['look']} steps; medians of "
        f"{record['loops'][0]['ms']['eager']['n']} rounds. {source(record)}"
    )
    return f"{rows(head, body)}\n\n{note}"


def _row(found: dict[str, Any]) -> list[str]:
    def ms(system: str | None) -> str:
        return f"{found['ms'][system]['median']:.3f}" if system in found["ms"] else ""

    systems = ("eager", "jit", "graph", found.get("rival"), "torch captured")
    ratio = f"{found['ratio']['eager']['median']:.2f} ×" if "ratio" in found else ""
    return [f"{NAMES[found['work']]}, {found['device']}", *map(ms, systems), ratio]

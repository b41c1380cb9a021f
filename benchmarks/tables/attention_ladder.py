"""The tables of the rungs of attention (operators/attention.py)."""

from __future__ import annotations

from typing import Any

from tables.gpu import Results, rows, source

DIRECTIONS = {"forward": "forward", "both": "with gradients"}


def cpu_table(results: Results) -> str:
    """Milliseconds of each rung on the CPU and of PyTorch, by shape."""
    return _table(results.read("attention_cpu"))


def gpu_table(results: Results) -> str:
    """The same on a GPU, by precision too."""
    return _table(results.read("attention"))


def _table(record: dict[str, Any]) -> str:
    several = [work["times"]["forward"] for work in record["works"]]
    systems = list(max(several, key=len))  # some take part at few precisions only
    body = []
    for work in record["works"]:
        for direction, words in DIRECTIONS.items():
            times = work["times"][direction]
            cells = [f"{times[x]['ms']['median']:.3g}" if x in times else "-" for x in systems]
            share = times["auto"].get("of_torch", {}).get("median")
            body.append([f"{_shape(work)}, {words}", *cells, f"{share:.2f} ×" if share else "-"])
    head = ["shape", *(f"{system}, ms" for system in systems), "auto, of PyTorch's rate"]
    rounds = record["works"][0]["times"]["forward"]["auto"]["ms"]["n"]
    note = f"N x heads (kv heads) x tokens x d; median of {rounds} rounds. {_source(record)}"
    return f"{rows(head, body)}\n\n{note}"


def _source(record: dict[str, Any]) -> str:
    machine = {**record["machine"], "torch": record["torch"]}
    return source({**record, "machine": machine})


def _shape(work: dict[str, Any]) -> str:
    batch, heads, kv_heads, tokens, size, causal = work["shape"]
    grouped = f" ({kv_heads})" if kv_heads != heads else ""
    kind = ", causal" if causal else ""
    return f"{batch} x {heads}{grouped} x {tokens} x {size}{kind}, {work['precision']}"

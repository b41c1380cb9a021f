"""The tables of large training steps (speed/large.py)."""

from __future__ import annotations

from typing import Any

from tables.gpu import Results, rows, source

NAMES = {
    "gpt2": "GPT-2 124M, 16 × 1,024 tokens, AdamW",
    "resnet50": "ResNet-50, 128 images, SGD with momentum",
}
SHOWN = 0.01  # of a step's time; operators below are left out


def steps(results: Results) -> str:
    """Milliseconds, memory and the first steps of each side."""
    record = results.read("large")
    body = []
    for step in _in_order(record):
        work = f"{NAMES[step['work']]}, {step['precision']}"
        cells = [f"{step['ms']:.1f}", f"{step['peak_mib'] / 1024:.1f}", f"{step['first_s']:.1f}"]
        body.append([f"{work}: {step['side']}", *cells])
    head = ["training step", "ms", "GiB at most", "s, the first two steps"]
    return f"{rows(head, body)}\n\n{source(record)}"


def kernels(results: Results) -> str:
    """The time of our steps by operator."""
    record = results.read("large")
    parts = []
    for step in _in_order(record):
        if "kernels" in step:
            parts.append(f"{NAMES[step['work']]}, {step['precision']}:\n\n{_kernels(step)}")
    return "\n\n".join(parts)


def sentence(results: Results) -> str:
    """The README's line: each work in bf16, ours and PyTorch's."""
    record = results.read("large")
    told = []
    for work, name in NAMES.items():
        found = _in_order(record)
        ms = [x["ms"] for x in found if (x["work"], x["precision"]) == (work, "bf16")]
        told.append(f"{name}: {ms[0]:.1f} ms a step, PyTorch compiled and captured {ms[1]:.1f}")
    gpu = record["machine"]["gpu"].partition(" (")[0]
    return f"In bf16 on an {gpu}: {'; '.join(told)} (`python benchmarks large`)."


def _in_order(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps by precision and work, ours before PyTorch's."""
    works = list(NAMES)
    return sorted(
        record["steps"],
        key=lambda x: (x["precision"], works.index(x["work"]), x["side"] != "dlsys"),
    )


def _kernels(step: dict[str, Any]) -> str:
    total = sum(row["ms"] for row in step["kernels"])
    body = [
        [f"`{row['operator']}`", row["calls"], f"{row['ms']:.2f}", row["gb_per_s"], row["tflops"]]
        for row in step["kernels"]
        if row["ms"] >= SHOWN * total
    ]
    return rows(["operator", "calls", "ms", "GB/s at least", "TFLOP/s"], body)

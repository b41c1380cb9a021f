"""The tables of generation.py and ten_steps.py: tokens that GPT-2 writes, errors of training."""

from __future__ import annotations

from .gpu import Results, rows, source

_NAMES = {"gpt2": "GPT-2", "resnet50": "ResNet-50"}


def generation(results: Results) -> str:
    """Microseconds a token by how it is drawn."""
    record = results.read("generation_gpu")
    positions = [*next(iter(record["us"].values()))]
    body = [
        [name, *(f"{found[at]['median']:.0f}" for at in positions)]
        for name, found in record["us"].items()
    ]
    head = ["drawn from", *(f"µs a token, behind {at} tokens" for at in positions)]
    return f"{rows(head, body)}\n\n{source(record)}"


def ten_steps(results: Results) -> str:
    """Errors against float64, ours beside PyTorch's."""
    parts = []
    for device in ("gpu", "cpu"):
        try:
            record = results.read(f"ten_steps_{device}")
        except FileNotFoundError:
            continue
        body = [
            [
                f"{_NAMES[name]}, {work['parameters']:,} parameters, {precision}",
                *(f"{sides[side][kind]:.1e}" for kind in ("loss", "gradient")
                  for side in ("dlsys", "PyTorch")),
            ]
            for name, work in record["works"].items()
            for precision, sides in work["errors"].items()
        ]  # fmt: skip
        head = ["network", "loss, dlsys", "PyTorch", "gradient, dlsys", "PyTorch"]
        parts.append(f"{rows(head, body)}\n\n{source(record)}")
    if not parts:
        raise FileNotFoundError("ten_steps_gpu.json")
    return "\n\n".join(parts)

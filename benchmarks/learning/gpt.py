"""Trains a small GPT on characters of Python's library, as docs/gpt.md shows, and draws its losses.

    python benchmarks gpt [--device cpu] [--steps 1200] [--preset 30m] [--picture FILE.png]

One run of `dlsys gpt train`: `seconds` are those of the command, with reading, validation and
samples, those of records are of training steps. Writes gpt_<device>.json, with a preset
gpt_<preset>_<device>.json, with the record of each validation, and the samples. The exit status is
0 when the loss on text that was held back ends below half of the guess among all characters.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared import measure

FIGURES = ("step", "loss", "val_loss", "lr", "seconds", "tokens_per_second", "flops_per_second")


def train(folder: str, device: str, steps: int, preset: str | None) -> dict[str, Any]:
    """The command, the vocabulary, the parameters, a record each validation, and samples."""
    recipe = f"--preset {preset}" if preset else "--max-bytes 4000000"
    words = f"{recipe} --steps {steps} --every {max(steps // 12, 1)} -c {device}".split()
    command = [sys.executable, "-m", "dlsys", "gpt", "train", folder, *words]
    environment = os.environ | {"PYTHONPATH": str(measure.ROOT / "python")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    lines = Path(folder, "log.jsonl").read_text().splitlines()
    logs = [json.loads(line) for line in lines]
    head = re.search(r"([\d,]+) parameters, ([\d,]+) tokens of (\d+)", done.stdout)
    assert head is not None, done.stdout
    parameters, tokens, vocabulary = (int(n.replace(",", "")) for n in head.groups())
    return {
        "run": " ".join(["dlsys", "gpt", "train", "DIR", *words]),
        "parameters": parameters,
        "tokens": tokens,
        "vocabulary": vocabulary,
        "epochs": [{n: r[n] for n in FIGURES if n in r} for r in logs if r["event"] == "epoch"],
        "curve": [[r["step"], round(r["loss"], 4)] for r in logs if r["event"] == "log"],
        "samples": re.findall(r"^  (['\"].*)$", done.stdout, re.MULTILINE),
    }


def picture(path: Path, found: dict[str, Any]) -> None:
    """The losses over the steps: of the batches, and on text that was held back."""
    from dlsys.viz.figure import legend, new_figure, plot
    from dlsys.viz.svg import BLUE, ORANGE

    figure = new_figure(6.4, 3.4)
    axes = plot(figure, 1, 1, 1, title="loss a character", grid=True)
    axes.plot(*zip(*found["curve"]), color=BLUE, linewidth=1.2, label="training")
    held = [(record["step"], record["val_loss"]) for record in found["epochs"]]
    axes.plot(*zip(*held), color=ORANGE, marker="o", markersize=3.5, label="held back")
    axes.set_xlabel("steps")
    legend(axes)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Returns 0 when the model has learned."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=("numpy", "cpu", "gpu"), default="cpu")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--preset", help="a recipe of `dlsys gpt train`")
    parser.add_argument("--picture", type=Path, help="a PNG of the losses")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = train(folder, options.device, options.steps, options.preset)
    seconds = time.monotonic() - start
    last = found["epochs"][-1]["val_loss"]
    ok = last < math.log(found["vocabulary"]) / 2
    found = {"ok": ok, "device": options.device, "seconds": round(seconds, 1), **found}
    name = "_".join(filter(None, ("gpt", options.preset, options.device)))
    path = measure.save(name, options, found)
    if options.picture:
        picture(options.picture, found)
    print(f"{'ok' if ok else 'NOT OK'}, {seconds:.0f} s, val_loss {last:.3f}, written to {path}")
    return 0 if ok else 1

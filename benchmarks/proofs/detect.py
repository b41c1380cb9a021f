"""Trains the detector of docs/detect.md on made scenes and measures it on those held out.

    python benchmarks detect [--device gpu] [--steps 3000] [--seed 0] [--pictures FILE.webp]

One run of `dlsys detect train`, then `evaluate` with NMS, Soft-NMS and none, so that what each of
them brings stands beside the others. Writes detect_DEVICE.json with commands, seconds and COCO's
figures. The exit status is 0 when mAP at IoU 0.5 with NMS is at least 0.90 on a GPU; the small
version, `--device cpu --steps 1500 --batch-size 8 --images 2000`, has no such goal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared import measure

_GOAL = {"gpu": 0.9}  # of AP50


def dlsys(*words: str) -> tuple[str, float]:
    """What `dlsys detect …` prints, and its seconds."""
    command = [sys.executable, "-m", "dlsys", "detect", *words]
    start = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(measure.ROOT / "python")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout, round(time.monotonic() - start, 1)


def main() -> int:
    """Returns 0 when the detector has reached its goal."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=("numpy", "cpu", "gpu"), default="gpu")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=Path, help="photos that were held out, with boxes")
    options = parser.parse_args()
    where = ["-c", options.device]
    words = f"--steps {options.steps} --batch-size {options.batch_size} --images {options.images}"
    words += f" --seed {options.seed}"
    found: dict[str, Any] = {"run": f"dlsys detect train DIR {words} -c {options.device}"}
    with tempfile.TemporaryDirectory() as name:
        folder = str(Path(name) / "run")
        out, found["seconds"] = dlsys("train", folder, *words.split(), *where)
        print(out, f"{found['seconds']} s", flush=True)
        logs = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
        found["validations"] = [
            {name: round(log[name], 4) for name in ("step", "loss", "val_loss", "seconds")}
            for log in logs
            if log["event"] == "epoch"
        ]
        for way in ("hard", "soft", "none"):
            figures = Path(name) / f"{way}.json"
            show = ["--pictures", str(options.pictures)] if options.pictures else []
            out, _ = dlsys(
                "evaluate", folder, "--suppression", way, "--json", str(figures), *where,
                *(show if way == "hard" else []),
            )  # fmt: skip
            found[way] = json.loads(figures.read_text())
            print(out, flush=True)
    reached = found["hard"]["figures"]["AP50"]
    found["ok"] = reached >= _GOAL.get(options.device, 0)
    path = measure.save(f"detect_{options.device}", options, found)
    print(f"{'ok' if found['ok'] else 'NOT OK'}: AP50 {reached:.3f}, written to {path}")
    return 0 if found["ok"] else 1

"""Trains the detector of docs/detect.md on made scenes and measures it on those held out.

    python benchmarks detect [--device gpu] [--steps 6000] [--seed 0] [--pictures FILE.webp]

One run of `dlsys detect train`, then `evaluate` with NMS, Soft-NMS and none, so that what each of
them brings stands beside the others. Writes detect_DEVICE.json with commands, seconds and COCO's
figures. The exit status is 0 when mAP at IoU 0.5 with NMS is at least 0.90 on a GPU; the small
version, `--device cpu --steps 1500 --batch-size 8 --width 48`, has no such goal.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shared import measure

_GOAL = {"gpu": 0.9}  # of AP50
_WAYS = ("hard", "soft", "none")


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
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--images", type=int, default=0, help="0: new ones in each batch")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=Path, help="photos that were held out, with boxes")
    parser.add_argument("--keep", type=Path, help="a folder for the run")
    options = parser.parse_args()
    where = ["-c", options.device]
    words = f"--steps {options.steps} --batch-size {options.batch_size} --images {options.images}"
    words += f" --width {options.width} --every {max(options.steps // 6, 1)} --seed {options.seed}"
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
        show = ["--pictures", str(options.pictures)] if options.pictures else []

        def evaluate(way: str) -> str:
            figures = str(Path(name) / f"{way}.json")
            more = show if way == "hard" else []
            return dlsys(
                "evaluate", folder, "--suppression", way, "--json", figures, *where, *more
            )[0]

        with ThreadPoolExecutor() as pool:
            for way, out in zip(_WAYS, pool.map(evaluate, _WAYS)):
                found[way] = json.loads((Path(name) / f"{way}.json").read_text())
                print(out, flush=True)
        if options.keep is not None:
            shutil.copytree(folder, options.keep)
    reached = found["hard"]["figures"]["AP50"]
    found["ok"] = reached >= _GOAL.get(options.device, 0)
    path = measure.save(f"detect_{options.device}", options, found)
    print(f"{'ok' if found['ok'] else 'NOT OK'}: AP50 {reached:.3f}, written to {path}")
    return 0 if found["ok"] else 1

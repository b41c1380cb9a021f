"""Trains ESPCN and SRCNN at 2, 3 and 4 times, as docs/superres.md shows, beside bicubic enlarging.

    python benchmarks superres [--device cpu] [--seed 0] [--pictures FILE.webp]

Six runs of `dlsys superres train` on the photos of scikit-image and scikit-learn, then the table
over those held out. SRCNN, which works at the size of the large photo, gets fewer steps, so that
both train about as long. Writes superres.json with commands, seconds and the table. The exit status
is 0 when ESPCN at 2 times is at least 0.5 dB above bicubic in the mean.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared import measure

STEPS = {"espcn": 1500, "srcnn": 400}
SCALES = (2, 3, 4)
_GOAL = 0.5  # dB of PSNR


def dlsys(*words: str) -> tuple[str, float]:
    """What `dlsys superres …` prints, and its seconds."""
    command = [sys.executable, "-m", "dlsys", "superres", *words]
    environment = {"PYTHONPATH": str(measure.ROOT / "python"), "PATH": "/usr/bin:/bin"}
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout, round(time.monotonic() - start, 1)


def trained(root: Path, network: str, scale: int, words: list[str]) -> dict[str, Any]:
    """One run: its command, seconds, and a record each validation."""
    steps = STEPS[network]
    words = f"--network {network} --scale {scale} --steps {steps}".split() + words
    folder = root / f"{network}{scale}"
    _, seconds = dlsys("train", str(folder), *words)
    print(f"{network} {scale}x: {seconds} s", flush=True)
    logs = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    records = [
        {"step": log["step"], **{n: round(log[n], 3) for n in ("psnr", "val_psnr", "seconds")}}
        for log in logs
        if log["event"] == "epoch"
    ]
    return {
        "run": " ".join(["dlsys", "superres", "train", "DIR", *words]),
        "network": network, "scale": scale, "seconds": seconds, "validations": records,
    }  # fmt: skip


def main() -> int:
    """Returns 0 when ESPCN has reached its goal."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=("numpy", "cpu", "gpu"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=Path, help="a sheet at 2 times")
    options = parser.parse_args()
    words = ["-c", options.device, "--seed", str(options.seed)]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        runs = [trained(root, network, k, words) for k in SCALES for network in STEPS]
        folders = [str(root / f"{run['network']}{run['scale']}") for run in runs]
        show = ["--pictures", str(options.pictures)] if options.pictures else []
        out, seconds = dlsys(
            "evaluate", *folders, "--json", str(root / "table.json"), *show, *words[:2]
        )
        rows = json.loads((root / "table.json").read_text())
    mean = next(row for row in rows if row["photo"] == "mean" and row["scale"] == 2)["figures"]
    gain = mean["espcn"][0] - mean["bicubic"][0]
    found = {
        "ok": gain >= _GOAL, "device": options.device, "seed": options.seed,
        "espcn_2x_gain_db": round(gain, 3),
        "photos_held_out": sum(row["scale"] == 2 for row in rows) - 1,
        "evaluation_seconds": seconds, "runs": runs, "rows": rows,
    }  # fmt: skip
    path = measure.save("superres", options, found)
    print(out)
    print(f"{'ok' if found['ok'] else 'NOT OK'}: +{gain:.2f} dB at 2x, written to {path}")
    return 0 if found["ok"] else 1

"""Paints photos by optimization, trains a network that does, and measures both: docs/style.md.

    python benchmarks style [--device cpu] [--steps 1500] [--pictures FILE.webp]

`dlsys style paint` with L-BFGS and with Adam on the photos of packages, then `train` and
`evaluate`: the losses of the network beside those of the photos themselves and of L-BFGS, on the
photos that were held out. Writes style_DEVICE.json with commands, seconds and losses. The exit
status is 0 when the network's mean loss on them is at most a half of that of the photos themselves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared import measure

PAINTED = (
    ("china", "coffee", "lbfgs"), ("china", "coffee", "adam"), ("chelsea", "gravel", "lbfgs"),
    ("astronaut", "hubble_deep_field", "lbfgs"),
)  # fmt: skip
_GOAL = 0.5  # of the loss of the photos themselves
_LINE = re.compile(r"step (\d+)  loss ([\d.]+)  content ([\d.]+)  style ([\d.]+)")


def dlsys(*words: str) -> tuple[str, float]:
    """What `dlsys style …` prints, and its seconds."""
    command = [sys.executable, "-m", "dlsys", "style", *words]
    start = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(measure.ROOT / "python")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout, round(time.monotonic() - start, 1)


def painted(root: Path, options: Any, paths: dict[str, Path]) -> tuple[list[Any], list[Any]]:
    """A record of each painting, and the rows of pictures: photo, style, painting."""
    from dlsys.apps.style.pictures import read

    records, rows = [], []
    for photo, style, method in PAINTED:
        target = root / f"{photo}_{style}_{method}.png"
        words = f"--method {method} --size {options.size} --steps {options.painted} -c "
        words += options.device
        out, seconds = dlsys(
            "paint", str(paths[photo]), str(paths[style]), "-o", str(target), *words.split()
        )
        print(f"{photo} {style} {method}: {seconds} s", flush=True)
        losses = [[float(x) for x in match] for match in _LINE.findall(out)]
        run = f"dlsys style paint {paths[photo].name} {paths[style].name} {words}"
        records.append({"run": run, "seconds": seconds, "step_loss_content_style": losses})
        if method == "lbfgs":
            made = read(target)
            # The style's picture as high as the photo.
            side = round(made.shape[0] * max(1, _aspect(paths[style])))
            rows.append([read(paths[photo], options.size), read(paths[style], side), made])
    return records, rows


def _aspect(path: Path) -> float:
    """The width of a picture in heights."""
    from dlsys.apps.style.pictures import read

    height, width, _ = read(path).shape
    return width / height


def main() -> int:
    """Returns 0 when the network has reached its goal."""
    from dlsys.apps.style.applying import side_by_side, stacked
    from dlsys.apps.style.pictures import read, write
    from dlsys.apps.superres.photos import packaged_photos

    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=("numpy", "cpu", "gpu"), default="cpu")
    parser.add_argument("--size", type=int, default=256, help="of painted photos")
    parser.add_argument("--painted", type=int, default=100, help="steps of paint; 0: none")
    parser.add_argument("--steps", type=int, default=1500, help="of training")
    parser.add_argument(
        "--network", default="--width 16 --blocks 3 --patch 128 --batch-size 2 --style-size 256"
    )
    parser.add_argument("--pictures", type=Path, help="photos, styles and paintings")
    parser.add_argument("--keep", type=Path, help="a folder for the trained run")
    options = parser.parse_args()
    paths = {path.stem: path for path in packaged_photos()}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        records, rows = painted(root, options, paths) if options.painted else ([], [])
        words = f"{options.network} --steps {options.steps} --seed 0 -c {options.device}"
        style = str(paths["gravel"])
        out, seconds = dlsys("train", str(root / "run"), "--style", style, *words.split())
        print(out, f"{seconds} s", flush=True)
        table, _ = dlsys(
            "evaluate", str(root / "run"), "--json", str(root / "losses.json"), "--pictures",
            str(root / "sheet.png"), "-c", options.device,
        )  # fmt: skip
        print(table, flush=True)
        losses = json.loads((root / "losses.json").read_text())
        logs = [json.loads(x) for x in (root / "run" / "log.jsonl").read_text().splitlines()]
        if options.keep is not None:
            shutil.copytree(root / "run", options.keep)
        if options.pictures:
            if rows:
                write(options.pictures, stacked([side_by_side(row) for row in rows]))
            net = options.pictures.with_stem(f"{options.pictures.stem}_net")
            write(net, read(root / "sheet.png"))
    mean = losses[-1]
    share = mean["network"]["loss"] / mean["unchanged"]["loss"]
    found = {
        "ok": share <= _GOAL, "device": options.device, "loss_of_the_photos": round(share, 3),
        "paint": records, "train": f"dlsys style train DIR --style gravel.png {words}",
        "seconds": seconds, "losses": losses,
        "validations": [
            {n: round(log[n], 4) for n in ("step", "loss", "val_loss", "seconds")}
            for log in logs if log["event"] == "epoch"
        ],
    }  # fmt: skip
    path = measure.save(f"style_{options.device}", options, found)
    print(f"{'ok' if found['ok'] else 'NOT OK'}: {share:.2f} of the loss, written to {path}")
    return 0 if found["ok"] else 1

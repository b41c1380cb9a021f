"""Makes the pictures of docs/gallery.md by the commands that stand there: `make gallery`.

    python docs/site/gallery.py [NAME ...] [--device cpu]

Each work is a few commands of `dlsys` in a folder of its own, with the photos of scikit-image and
scikit-learn in `photos/` and some digits of MNIST's test set in `digits/`; nothing is downloaded,
and no GPU is needed. The last file that a work names becomes docs/gallery/NAME.webp.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "gallery"
_WIDEST = 900  # pixels of a picture
_DIGITS = 3


class Work(NamedTuple):
    """An application: its commands, and the file that they leave: a picture, or a log whose losses
    are drawn.
    """

    name: str
    commands: tuple[str, ...]
    made: str


WORKS = (
    Work(
        "mnist",
        (
            "mnist -m cnn -e 1 --checkpoint runs/cnn",
            "explain runs/cnn digits --method all --sheet mnist.png",
        ),
        "mnist.png",
    ),
    Work(
        "explain",
        (
            "explain efficientnet photos/chelsea.png photos/coffee.png "
            "--method grad_cam,grad_cam++,saliency --sheet explain.png",
        ),
        "explain.png",
    ),
    Work(
        "style",
        ("style paint photos/china.jpg photos/coffee.png --size 256 --steps 60 -o style.png",),
        "style.png",
    ),
    Work(
        "superres",
        (
            "superres train runs/espcn --scale 2 --steps 200 --every 200",
            "superres evaluate runs/espcn --pictures superres.png",
        ),
        "superres.png",
    ),
    Work(
        "detect",
        (
            "detect train runs/found --steps 400 --every 400 --batch-size 8 --images 800",
            "detect evaluate runs/found --pictures detect.png",
        ),
        "detect.png",
    ),
    Work(
        "gpt",
        ("gpt train runs/python --max-bytes 1000000 --steps 300 --every 50",),
        "runs/python/log.jsonl",
    ),
    Work(
        "cifar",
        (
            "cifar train runs/made --made 2000 --width 8 --batch-size 50 --lr 0.05 -e 5 "
            "--precision fp32",
        ),
        "runs/made/log.jsonl",
    ),
)


def make(work: Work, device: str) -> None:
    """Runs the commands and writes the picture. SystemExit where one fails."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _give(folder)
        for command in work.commands:
            _run(command, folder, device)
        made = folder / work.made
        picture = _curves(made) if made.suffix == ".jsonl" else made
        _save(picture, PICTURES / f"{work.name}.webp")
    print(f"{work.name}: {time.monotonic() - start:.0f} s", flush=True)


def _run(command: str, folder: Path, device: str) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT / "python"), os.environ.get("PYTHONPATH"))))
    words = [sys.executable, "-m", "dlsys", *command.split(), "-c", device]
    data = ["--data-dir", str(ROOT / "data" / "mnist")] if command.startswith("mnist") else []
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [*words, *data], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"dlsys {command}: {done.stderr}")


def _give(folder: Path) -> None:
    """Puts the photos and the digits into a folder."""
    from PIL import Image

    from dlsys.apps.superres.photos import packaged_photos
    from dlsys.data import read_idx

    for name in ("photos", "digits"):
        (folder / name).mkdir()
    for path in packaged_photos():
        shutil.copy(path, folder / "photos")
    digits = read_idx(next((ROOT / "data" / "mnist").glob("t10k-images*")))
    for k in range(_DIGITS):
        Image.fromarray(digits[k]).save(folder / "digits" / f"{k}.png")


def _curves(log: Path) -> Path:
    """A picture of the losses in a log."""
    from dlsys import viz

    records = [json.loads(line) for line in log.read_text().splitlines()]
    epochs = [record for record in records if record["event"] == "epoch"]
    fine = [record for record in records if record["event"] != "epoch" and "loss" in record]
    picture = log.with_suffix(".png")
    viz.save(viz.curves(epochs, fine), picture)
    return picture


def _save(source: Path, target: Path) -> None:
    """Writes a picture as WebP, at most so wide."""
    from PIL import Image

    image = Image.open(source).convert("RGB")
    if image.width > _WIDEST:
        size = (_WIDEST, round(image.height * _WIDEST / image.width))
        image = image.resize(size, Image.Resampling.LANCZOS)
    target.parent.mkdir(exist_ok=True)
    image.save(target, "WEBP", quality=75, method=6)


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the works that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT / "python"))
    for work in WORKS:
        if not options.names or work.name in options.names:
            make(work, options.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The seconds of an epoch of `dlsys cifar train` on made images in CIFAR-10's shapes.

    python benchmarks cifar [--device gpu] [--epochs 4] [--batch-size 512] [--precision bf16]

One run on 45,000 made images, 5,000 of them besides to validate on; the first epoch has planning
and capture in it. Writes cifar_DEVICE.json with each epoch's seconds, images a second and losses.
Accuracies are of made images and say whether the network learns, nothing about CIFAR-10. The exit
status is 0 when it is right on at least half of the made images held out.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from shared import measure

_GOAL = 0.5
_KEPT = ("seconds", "samples_per_second", "loss", "val_loss", "val_accuracy")


def main() -> int:
    """Returns 0 when the network learns."""
    from dlsys.apps.cifar import training
    from dlsys.runtime.device import context_of

    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=("numpy", "cpu", "gpu"), default="gpu")
    parser.add_argument("--made", type=int, default=45_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.4)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ctx = context_of(options.device)
    settings = training.Settings(
        epochs=options.epochs, batch_size=options.batch_size, width=options.width, lr=options.lr,
        precision=options.precision, seed=options.seed, made=options.made,
    )  # fmt: skip
    sets = settings.sets()
    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        model = training.fitted(settings, sets, Path(name), ctx)
        seconds = time.perf_counter() - start
        logs = [json.loads(line) for line in Path(name, "log.jsonl").read_text().splitlines()]
    epochs = [{key: round(log[key], 4) for key in _KEPT} for log in logs if log["event"] == "epoch"]
    accuracy = training.accuracy(model, sets.test, ctx)
    found = {
        "ok": accuracy >= _GOAL, "device": options.device, "made_images": options.made,
        "batch_size": options.batch_size, "width": options.width, "precision": options.precision,
        "seconds": round(seconds, 2), "epochs": epochs, "made_test_accuracy": accuracy,
    }  # fmt: skip
    path = measure.save(f"cifar_{options.device}", options, found)
    best = min(epoch["seconds"] for epoch in epochs)
    print(f"{'ok' if found['ok'] else 'NOT OK'}: {best:.2f} s an epoch, {accuracy:.3f}; {path}")
    return 0 if found["ok"] else 1

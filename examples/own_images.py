"""A classifier of one's own images: a folder with a subfolder for each class.

    python examples/own_images.py FOLDER [--epochs 10]

Without a folder it draws one: bars that stand and bars that lie.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from dlsys import nn, optim, train
from dlsys.data import Loader, image_folder


def draw(folder: Path) -> Path:
    """Forty noisy pictures of each of two classes."""
    rng = np.random.default_rng(0)
    for name in ("lying", "standing"):
        (folder / name).mkdir()
        for k in range(40):
            pixels = rng.integers(0, 60, (20, 20), np.uint8)
            at = rng.integers(2, 16)
            pixels[at : at + 3] = 250
            picture = pixels if name == "lying" else pixels.T
            Image.fromarray(picture).save(folder / name / f"{k}.png")
    return folder


parser = argparse.ArgumentParser()
parser.add_argument("folder", nargs="?", type=Path)
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()
folder = options.folder or draw(Path(tempfile.mkdtemp()))

# Every picture is resized; uint8 samples are scaled to [0, 1] by the loader.
pictures = image_folder(folder, size=(16, 16), mode="L")
rng = np.random.default_rng(1)
order = rng.permutation(len(pictures.labels))
held_out, training = (pictures.take(part) for part in (order[::4], np.delete(order, np.s_[::4])))

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1, rng=0), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(8 * 8 * 8, len(pictures.classes), rng=1),
)  # fmt: skip
train.fit(model, Loader(training, 20, shuffle=True), optim.Adam(0.01), epochs=options.epochs)
found = train.evaluate(model, Loader(held_out, 20))
print(f"classes {', '.join(pictures.classes)}: accuracy {found['accuracy']:.2f} on new pictures")

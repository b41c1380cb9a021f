"""Chapter 6: a classifier of digits, and what it looked at: gradients of a score by the pixels.

    python docs/learn/programs/6_explain.py [--picture FILE.png]

Saliency is |∂ score / ∂ pixel| (Simonyan et al., 2013); Grad-CAM weighs the planes of the last
convolution by the mean gradient of the score (Selvaraju et al., 2017).
"""

import argparse
from pathlib import Path

import numpy as np

import dlsys as dl
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.data import mnist_sets

parser = argparse.ArgumentParser()
parser.add_argument("--picture", type=Path)
options = parser.parse_args()
ROOT = Path(__file__).resolve().parents[3]
sets = mnist_sets(ROOT / "data" / "mnist")
images = dl.tensor(sets.train.images[:6000], dtype="float32") / 255
labels = dl.tensor(sets.train.labels[:6000])
test = dl.tensor(sets.test.images[:200], dtype="float32") / 255
wanted = sets.test.labels[:200]

body = nn.Sequential(
    nn.Conv2d(1, 8, 5, padding=2, rng=0), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(8, 24, 5, padding=2, rng=1), nn.BatchNorm2d(24), nn.ReLU(),
    nn.Conv2d(24, 24, 5, padding=2, rng=2), nn.BatchNorm2d(24), nn.ReLU(),
)  # fmt: skip
head = nn.Sequential(nn.GlobalAvgPool(), nn.Linear(24, 10, rng=3))
optimizer = optim.Adam(3e-3, params=[*body.parameters(), *head.parameters()])
for start in range(0, 2 * 6000, 50):
    batch = slice(start % 6000, start % 6000 + 50)
    loss = F.cross_entropy(head(body(images[batch])), labels[batch])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
body.eval()


def answers(x):
    """The classes of images."""
    return head(body(x)).argmax(axis=1).numpy()


found = answers(test)
print(f"accuracy on {len(wanted)} new digits: {(found == wanted).mean():.2f}")


def of_answer(scores):
    """The sum of the scores of the answers: each image's gradient is that of its own."""
    return (scores * dl.tensor(np.eye(10, dtype=np.float32)[found])).sum()


x = test.detach()
x.requires_grad = True
of_answer(head(body(x))).backward()
saliency = np.abs(x.grad.numpy())[:, 0]  # (n, 28, 28)

planes = body(test).detach()  # (n, 24, 14, 14): the last convolution's
planes.requires_grad = True
of_answer(head(planes)).backward()
weights = planes.grad.mean(axis=(2, 3), keepdims=True)
cam = F.relu((weights * planes.detach()).sum(axis=1, keepdims=True))
cam = F.resize(cam, (28, 28), mode="bilinear").numpy()[:, 0]


def erased(maps):
    """The share of answers that stay when the tenth of the pixels that a map marks is black."""
    marked = maps.reshape(len(maps), -1).argsort(axis=1)[:, -78:]
    pixels = test.numpy().reshape(len(maps), -1).copy()
    np.put_along_axis(pixels, marked, 0.0, axis=1)
    return (answers(dl.tensor(pixels.reshape(test.shape))) == found).mean()


chance = np.random.default_rng(0).uniform(size=saliency.shape)
for name, maps in {"chance": chance, "saliency": saliency, "Grad-CAM": cam}.items():
    print(f"answers that stay when a tenth of the pixels is erased, by {name}: {erased(maps):.2f}")

if options.picture:
    from dlsys.viz.png import png

    rows = [np.concatenate(list(m[:8] / np.maximum(m[:8].max((1, 2), keepdims=True), 1e-9)), 1)
            for m in (test.numpy()[:, 0], saliency, cam)]  # fmt: skip
    gray = np.kron(255 - 255 * np.concatenate(rows), np.ones((3, 3))).astype(np.uint8)
    options.picture.write_bytes(png(np.stack([gray, gray, gray, gray | 255], 2)))

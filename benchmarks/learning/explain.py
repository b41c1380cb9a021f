"""Where maps of evidence peak, on images in which its place is known, and with drawn weights.

    python benchmarks explain [--device cpu] [--images 60]

First on a network of one's own: three convolutions trained for some seconds to tell the digits of
scikit-learn, 16 pixels large on a tile of 24, that lie anywhere in noise of 64; the share of those
in which each method's map peaks inside the tile, and inside or half a cell of Grad-CAM's map off.
The tile leaves a cell around the digit because what is beside a stroke is evidence too: the network
tells a 5 by a bar with nothing above it, and a position of the map sees 18 pixels, 9 to each side.
Then on EfficientNet-Lite0 with weights of ImageNet, which needs its package: a cup of coffee and a
cat's face, cut out of photos of scikit-image as a whole, lie on grass, gravel or brick, 112 to 160
of 320 pixels large, which is 3.5 to 5 cells of 32 pixels. Both are of the images that the network
is right on; a peak is the strongest pixel, of several the middle one; `chance` is the share of the
image that the evidence covers. Last the correlation of each method's maps of three photos with
those after the last layer, and after all layers, of it were drawn anew: a map of the image alone
would not change (Adebayo et al., 2018). Writes explain.json. The exit status is 0 when the peaks of
Grad-CAM on both networks lie inside in at least 95 %, and no map with all weights drawn anew
correlates by more than 0.5.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared import measure

# Of photos: the square (top, left, extent) of a thing, and what it may be taken for.
THINGS = {
    "coffee": ((0, 80, 400), ("espresso", "cup", "coffee mug")),
    "chelsea": ((0, 70, 300), ("tabby", "tiger cat", "Egyptian cat")),
}
GROUNDS = ("grass", "gravel", "brick")
PHOTOS = ("chelsea", "coffee", "rocket")
SLOW = {"occlusion": 10, "integrated_gradients": 5}  # as many times fewer images
_OPTIONS = {"steps": 16, "window": (56, 56)}
_SIDE, _GOAL, _MOST = 224, 0.95, 0.5
_MADE, _LOW, _HIGH = 320, 112, 160  # pixels of a made image, and of the thing on it
_NOISE, _TILE, _MARGIN = 64, 24, 4  # pixels of an image of noise, its tile, and around the digit


def _photos() -> dict[str, Path]:
    from dlsys.apps.superres.photos import packaged_photos

    return {path.stem: path for path in packaged_photos()}


def composed(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Images (n, 3, 320, 320) uint8, the squares (n, 3) of their things, and these by name."""
    from PIL import Image

    from dlsys.apps.explain.photos import square

    rng, paths = np.random.default_rng(seed), _photos()
    images, places, names = [], [], []
    for _ in range(count):
        name = list(THINGS)[rng.integers(len(THINGS))]
        (top, left, extent), _ = THINGS[name]
        ground = square(paths[GROUNDS[rng.integers(len(GROUNDS))]], _MADE)
        side = int(rng.integers(_LOW, _HIGH + 1))
        part = Image.open(paths[name]).convert("RGB").crop((left, top, left + extent, top + extent))
        thing = np.asarray(part.resize((side, side), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
        y, x = rng.integers(0, _MADE - side, 2)
        image = ground.copy()
        image[:, y : y + side, x : x + side] = thing
        images.append(image)
        places.append((y, x, side))
        names.append(name)
    return np.stack(images), np.array(places), names


def scattered(count: int, seed: int, held: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images (n, 1, 64, 64) float32 of a digit on a tile in noise, the squares (n, 3) of the tiles
    and labels (n,).
    """
    from sklearn.datasets import load_digits

    rng, digits = np.random.default_rng((seed, held)), load_digits()
    part = np.s_[1400:] if held else np.s_[:1400]
    shapes, labels = digits.images[part] / 16, digits.target[part]
    chosen = rng.integers(len(labels), size=count)
    images = rng.random((count, 1, _NOISE, _NOISE), np.float32) * 0.5
    places = np.full((count, 3), _TILE)
    for image, place, k in zip(images, places, chosen):
        place[:2] = y, x = rng.integers(0, _NOISE - _TILE + 1, 2)
        tile = image[0, y : y + _TILE, x : x + _TILE]
        tile *= 0.2
        ink = shapes[k].repeat(2, 0).repeat(2, 1)
        tile[_MARGIN:-_MARGIN, _MARGIN:-_MARGIN] += ink
    return images, places, labels[chosen].astype(np.int64)


def own_network(seed: int, ctx: Any) -> Any:
    """The network that is trained on digits in noise."""
    from dlsys import data, nn, optim, train

    layers = [
        layer
        for k, (inputs, outputs) in enumerate([(1, 16), (16, 32), (32, 64)])
        for layer in (nn.Conv2d(inputs, outputs, 3, padding=1, rng=seed + k), nn.ReLU(),
                      nn.MaxPool2d(2) if k < 2 else nn.Identity())
    ]  # fmt: skip
    model = nn.Sequential(*layers, nn.GlobalMaxPool(), nn.Linear(64, 10, rng=seed + 3))
    images, _, labels = scattered(3000, seed, held=False)
    batches = data.Loader((images, labels), 50, shuffle=True, seed=seed)
    rate = optim.OneCycle(4e-3, 6 * len(batches))
    train.fit(model, batches, optim.Adam(rate), epochs=6, ctx=ctx, quiet=True)
    return model


def peaks(
    explainer: Any, images: np.ndarray, places: np.ndarray, labels: np.ndarray, near: int
) -> tuple[float, float]:
    """The shares of images whose map peaks inside the thing, and inside or `near` pixels off."""
    found = []
    for image, (top, left, side), label in zip(images, places, labels):
        (at,) = explainer(image[None], int(label)).peaks()
        low = np.array([top, left])
        off = np.maximum(np.maximum(low - at, at - low - side + 1), 0).max()
        found.append((off == 0, off <= near))
    inside, close = np.mean(found, axis=0)
    return round(float(inside), 3), round(float(close), 3)


def chance(places: np.ndarray, side: int) -> float:
    """The mean share of an image that its evidence covers."""
    return round(float(((places[:, 2] / side) ** 2).mean()), 3)


def on_own_network(options: Any, ctx: Any) -> dict[str, Any]:
    """The shares of peaks inside the digit, by method."""
    from dlsys import explain, train

    model = own_network(options.seed, ctx)
    images, places, labels = scattered(2 * options.images, options.seed, held=True)
    right = train.predict(model, images, ctx).argmax(axis=1) == labels
    print(f"{right.mean():.3f} of {len(right)} digits in noise are recognized", flush=True)
    rows: dict[str, Any] = {"images": int(right.sum()), "recognized": round(float(right.mean()), 3)}
    rows["chance"] = chance(places[right], _NOISE)
    for method in explain.METHODS:
        explainer = explain.Explainer(model, method, ctx=ctx, steps=16, window=(8, 8))
        rows[method] = peaks(explainer, images[right], places[right], labels[right], 2)
        print(method, rows[method], flush=True)
    return rows


def drawn_anew(model: Any, layers: tuple[str, ...]) -> Any:
    """A copy whose parameters of layers are those of the model in a random order."""
    made, rng = copy.deepcopy(model), np.random.default_rng(0)
    for name, parameter in made.named_parameters():
        if name.startswith(layers):
            values = parameter.asnumpy()
            parameter.set(rng.permutation(values.reshape(-1)).reshape(values.shape))
    return made


def top_of(photos: Sequence[str], logits: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    """The three likeliest classes of each photo, with their probabilities."""
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    return {
        name: [(classes[k], round(float(row[k]), 3)) for k in np.argsort(-row)[:3]]
        for name, row in zip(photos, chances)
    }


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """That of two maps, 0 where the second is nothing but zeros."""
    return round(float(np.corrcoef(a.ravel(), b.ravel())[0, 1]), 3) if b.any() else 0.0


def on_efficientnet(options: Any, ctx: Any) -> dict[str, Any]:
    """What EfficientNet-Lite0 sees in photos, and by method the shares of peaks inside things of
    made images, and how its maps are like those of a network with parameters in a random order.
    """
    from dlsys import explain, train
    from dlsys.apps.explain.photos import square

    paths, model = _photos(), train.load_efficientnet_lite()
    classes = model.trained_on.classes
    others = {"last layer": drawn_anew(model, ("fc",)), "all layers": drawn_anew(model, ("",))}
    for each in (model, *others.values()):
        each.to(ctx)
    photos = np.stack([square(paths[name], _SIDE) for name in PHOTOS])
    logits = train.predict(model, photos, ctx)
    likeliest, top = logits.argmax(axis=1), top_of(PHOTOS, logits, classes)
    print(top, flush=True)
    images, places, names = composed(options.images, options.seed)
    labels = train.predict(model, images, ctx).argmax(axis=1)
    known = [classes[label] in THINGS[name][1] for name, label in zip(names, labels)]
    images, places, labels = images[known], places[known], labels[known]
    print(f"{len(images)} of {len(known)} made images are recognized", flush=True)
    rows = {}
    for method in explain.METHODS:
        count = max(len(images) // SLOW.get(method, 1), 1)
        explainers = {
            what: explain.Explainer(one, method, ctx=ctx, **_OPTIONS)
            for what, one in {"": model, **others}.items()
        }
        start = time.perf_counter()
        share = peaks(explainers[""], images[:count], places[:count], labels[:count], 16)
        seconds = (time.perf_counter() - start) / count
        maps = {what: one(photos, likeliest).maps for what, one in explainers.items()}
        rows[method] = {
            "images": count, "peak_inside": share[0], "or_16_pixels_off": share[1],
            "seconds_an_image": round(seconds, 3),
            "correlation": {what: [*map(correlation, maps[""], maps[what])] for what in others},
        }  # fmt: skip
        print(method, rows[method], flush=True)
    counts = {"made": len(known), "recognized": len(images), "chance": chance(places, _MADE)}
    return {**counts, "photos": top, "methods": rows}


def main() -> int:
    """Returns 0 when the goals are reached."""
    from dlsys.runtime.device import context_of

    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=("numpy", "cpu", "gpu"), default="cpu")
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ctx = context_of(options.device)
    own = on_own_network(options, ctx)
    found = on_efficientnet(options, ctx)
    rows = found["methods"]
    largest = max(max(row["correlation"]["all layers"]) for row in rows.values())
    least = min(own["grad_cam"][0], rows["grad_cam"]["peak_inside"])
    ok = bool(least >= _GOAL and largest <= _MOST)
    of_run = {"ok": ok, "device": options.device, "seed": options.seed, "own_network": own}
    path = measure.save("explain", options, {**of_run, **found})
    print(f"{'ok' if ok else 'NOT OK'}: written to {path}")
    return 0 if ok else 1

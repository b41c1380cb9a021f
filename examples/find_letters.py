"""Letters found in a picture by the YOLOX that the package ddddocr ships as an ONNX file."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import dlsys as dl
from dlsys import functional as F

# The pixels of a side, the least score, and the IoU above which two boxes are of one letter.
SIDE, LEAST, OVERLAP = 416, 0.1, 0.45
# Of each output its cell (x, y) and its stride in pixels, (3549, 3): three grids, a row at a time.
_cells = [(np.mgrid[: SIDE // s, : SIDE // s][::-1].reshape(2, -1).T, s) for s in (8, 16, 32)]
CELLS = np.concatenate([np.insert(xy, 2, s, axis=1) for xy, s in _cells]).astype(np.float32)


def drawn() -> tuple[Image.Image, np.ndarray]:
    """A picture with five letters, and the boxes (5, 4) where they are, (left, top, right, low)."""
    picture = Image.new("RGB", (320, 200), (214, 226, 219))
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(44)
    places = {"8": (20, 16), "R": (150, 30), "5": (250, 90), "A": (70, 110), "k": (180, 130)}
    for letter, at in places.items():
        pen.text(at, letter, (150, 30, 60), font)
    boxes = [pen.textbbox(at, letter, font) for letter, at in places.items()]
    return picture, np.array(boxes, np.float32)


def letterboxed(picture: Image.Image) -> tuple[np.ndarray, float]:
    """A picture in the corner of a gray square, (1, 3, SIDE, SIDE) of BGR to 255, and its scale."""
    scale = SIDE / max(picture.size)
    size = [int(extent * scale) for extent in picture.size]
    square = Image.new("RGB", (SIDE, SIDE), (114, 114, 114))
    square.paste(picture.resize(size, Image.BILINEAR))
    return np.asarray(square, np.float32)[..., ::-1].transpose(2, 0, 1)[None].copy(), scale


def letters(yolox, picture: Image.Image, device: str) -> tuple[np.ndarray, np.ndarray]:
    """The boxes (n, 4) in pixels of the picture of what YOLOX finds, and their scores (n,)."""
    image, scale = letterboxed(picture)
    xy, stride = dl.tensor(CELLS[:, :2], device), dl.tensor(CELLS[:, 2:], device)
    with dl.no_grad():
        output = yolox.to(device)(dl.tensor(image, device))  # (1, 3549, 4 + 1 + classes)
        center, half = (output[..., :2] + xy) * stride, F.exp(output[..., 2:4]) * stride / 2
        boxes = F.concatenate([center - half, center + half], axis=-1) / scale
        scores = F.transpose(output[..., 4:5] * output[..., 5:], (0, 2, 1))
        rows, count = F.non_max_suppression(boxes, scores, 100, OVERLAP, LEAST)
    _, label, best = rows.numpy()[: int(count)].T
    return boxes.numpy()[0, best], scores.numpy()[0, label, best]


if __name__ == "__main__":
    package = find_spec("ddddocr") or sys.exit("this example needs: pip install ddddocr")
    yolox = dl.onnx.load(Path(package.origin).parent / "common_det.onnx")
    for box, score in zip(*letters(yolox, drawn()[0], dl.best_device())):
        print(f"letter at {box.round().astype(int).tolist()}, score {score:.2f}")

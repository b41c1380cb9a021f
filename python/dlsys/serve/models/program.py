"""A model that is ready to run, whatever file it comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...apps.pictures import SIDE, picture_in
from ...data import DataDescription
from ...data.formats.decode import decoded_content, planes
from ...data.formats.folder import CHANNELS, fitted
from ...data.formats.mnist import MNIST
from ...nn import Module
from ..protocol.inference import Signature
from ..protocol.tensors import DTYPES, TensorSpec

Run = Callable[[list[np.ndarray]], list[np.ndarray]]
Read = Callable[[bytes, int], np.ndarray]


@dataclass(frozen=True)
class Classifier:
    """What a program needs to take image files and to explain its answers.

    read: pixels (1, C, H, W) uint8 of the bytes of a file with at most so many pixels. prepared:
    these as the program's input. model: the network, whose output is logits. logits: whether the
    program's output is logits too, not yet probabilities.
    """

    read: Read
    prepared: Callable[[np.ndarray], np.ndarray]
    model: Module
    logits: bool

    def probabilities(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """Of each class (n, classes), from the program's outputs."""
        if not self.logits:
            return outputs[0]
        grown = np.exp(outputs[0] - outputs[0].max(axis=1, keepdims=True))
        return grown / grown.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class Program:
    """A model that can be served.

    platform: "dlsys" or "onnx", as metadata name it. run: outputs of inputs, in the signature's
    order. largest: samples of a batch; 1 where requests run alone. threads: whether `run` must stay
    in one thread. classifier: of images, else None. note: why requests run alone.
    """

    platform: str
    signature: Signature
    run: Run
    largest: int
    threads: bool = False
    classifier: Classifier | None = None
    note: str = ""


def buckets_of(largest: int) -> tuple[int, ...]:
    """The batches that are planned: powers of two, one between each two, and the largest."""
    powers = [1 << k for k in range(largest.bit_length())]
    between = [3 << k for k in range(largest.bit_length()) if 3 << k < largest]
    return tuple(sorted({*powers, *between, largest}))


def warm(run: Run, inputs: Sequence[TensorSpec], largest: int) -> None:
    """Runs each batch twice, of which a GPU captures the second, so that no request waits for a
    plan. Inputs must have one unknown extent, the first.
    """
    for size in sorted(buckets_of(largest) * 2):
        run([np.zeros((size, *spec.shape[1:]), DTYPES[spec.datatype]) for spec in inputs])


def several(made: Any) -> list[np.ndarray]:
    """The outputs of an inference program, of which one alone is no tuple."""
    return [made] if isinstance(made, np.ndarray) else list(made)


def reader_of(about: DataDescription) -> Read | None:
    """How image files become samples; None where samples are no images of classes.

    Those of MNIST's and Fashion-MNIST's size are read as `dlsys predict` reads them, with digits
    found in photos; others are resized to the size that the model was trained on.
    """
    modes = {channels: mode for mode, channels in CHANNELS.items()}
    is_images = len(about.shape) == 3 and about.shape[0] in modes and about.dtype == "uint8"
    if not is_images or not about.classes:
        return None
    if about.shape == (1, SIDE, SIDE):
        digits = about.classes == MNIST.classes
        return lambda content, most: picture_in("the image", content, digits, most)
    mode, size = modes[about.shape[0]], about.shape[1:]

    def read(content: bytes, most: int) -> np.ndarray:
        image = decoded_content("the image", content, lambda x: fitted(x, mode, size), most)
        return planes(image)[None]

    return read

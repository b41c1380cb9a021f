"""Data sets, their file formats, and the batches that training takes from them."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .augment import Augmentation, Compose, Crop, Cutout, Flip, Mixup, Shift
from .cifar import cifar10_sets, read_cifar
from .color import CenterCrop, ColorJitter, RandomResizedCrop, Resize
from .csv import csv_dataset, read_csv
from .dataset import Dataset, Sets, Split
from .description import DataDescription
from .folder import image_files, image_folder
from .idx import read_idx, write_idx
from .imagenet import imagenet_classes
from .loader import Loader
from .mnist import (
    Mnist,
    fashion_mnist_sets,
    load_fashion_mnist,
    load_mnist,
    mnist_sets,
)
from .normalize import Normalization
from .resident import DeviceLoader
from .sample_rng import SampleRng
from .samples import Samples, SampleSequence, as_samples
from .split import balanced_weights, split
from .warp import Rotate, Scale

if TYPE_CHECKING:
    from . import text


def __getattr__(name: str) -> Any:
    if name == "text":  # loaded at its first use
        return import_module(".text", __name__)
    if name == "Draws":
        warnings.warn("Draws is SampleRng now", DeprecationWarning, stacklevel=2)
        return SampleRng
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

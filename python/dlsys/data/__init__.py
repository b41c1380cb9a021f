"""Data sets, their file formats, and the batches that training takes from them."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .dataset import Dataset, Sets, Split
from .description import DataDescription
from .formats.cifar import cifar10_sets, read_cifar
from .formats.csv import csv_dataset, read_csv
from .formats.folder import image_files, image_folder
from .formats.idx import read_idx, write_idx
from .formats.imagenet import imagenet_classes
from .formats.mnist import Mnist, fashion_mnist_sets, load_fashion_mnist, load_mnist, mnist_sets
from .loader import Loader
from .resident import DeviceLoader
from .sample_rng import SampleRng
from .samples import Samples, SampleSequence, as_samples
from .split import balanced_weights, split
from .transforms.augment import Augmentation, Compose, Crop, Cutout, Flip, Mixup, Shift
from .transforms.color import CenterCrop, ColorJitter, RandomResizedCrop, Resize
from .transforms.normalize import Normalization
from .transforms.warp import Rotate, Scale

if TYPE_CHECKING:
    from . import text


def __getattr__(name: str) -> Any:
    if name == "text":  # loaded at its first use
        return import_module(".text", __name__)
    if name == "Draws":
        warnings.warn("Draws is SampleRng now", DeprecationWarning, stacklevel=2)
        return SampleRng
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

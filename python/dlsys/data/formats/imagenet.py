"""The names of ImageNet's 1,000 classes (Russakovsky et al., 2015)."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def imagenet_classes() -> tuple[str, ...]:
    """The names, in the order that networks for ImageNet have them: the first word that WordNet
    gives each class; of two cranes and two bathing suits, with what tells them apart.

    >>> data.imagenet_classes()[281:283]
    ('tabby', 'tiger cat')
    """
    return tuple(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines())

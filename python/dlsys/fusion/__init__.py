"""Fusions, one file each: the pattern that it looks for, the fused operator with its body, and the
names of its kernels. Each is a Pass of the pipeline, found by its name FUSION; without any of these
files every graph computes the same, only slower. `body.py` is what they share.
"""

from __future__ import annotations

import importlib
import pkgutil

from ..passes.pipeline import Pass


def _found() -> tuple[Pass, ...]:
    modules = [
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    ]
    found = [module.FUSION for module in modules if hasattr(module, "FUSION")]
    return tuple(sorted(found, key=lambda fusion: fusion.place))


FUSIONS = _found()

"""Reading ONNX files: `load` gives a Module (see module.py for what it can do)."""

from __future__ import annotations

from .module import ImportedModel as ImportedModel
from .module import load as load

__all__ = ["ImportedModel", "load"]

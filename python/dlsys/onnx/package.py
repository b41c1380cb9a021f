"""The package `onnx`, imported where it is first needed, and what of it both directions use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..errors import DlsysError, how_to_install


def onnx_package(name: str = "onnx") -> Any:
    """The module `onnx`, or one of its submodules such as `onnx.checker`.

    DlsysError says what to install where it is missing.
    """
    try:
        return import_module(name)
    except ImportError:
        raise DlsysError(f"ONNX files need the package onnx: {how_to_install('onnx')}") from None

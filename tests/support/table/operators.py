"""The modules of operators: found, not listed, so that none is left out of what tests check."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import dlsys.fusion
import dlsys.ops


def modules_of_operators() -> list[ModuleType]:
    """Every module of the operators that people write and of those that fusions make."""
    return [
        importlib.import_module(found.name)
        for package in (dlsys.ops, dlsys.fusion)
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]

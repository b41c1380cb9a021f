"""Fusions, one file each, `conv/` and `norm/` those around convolutions and normalizations: the
pattern that it looks for, the fused operator with its body, and the names of its kernels. Each is a
Pass of the pipeline, found by its name FUSION; without any of these files every graph computes the
same, only slower. `shared/` has what they share.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence

from ..errors import SettingError
from ..passes.pipeline import Pass


def _modules(folder: str, package: str) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _modules(entry.path, f"{package}.{entry.name}")
        elif entry.name.endswith(".py") and entry.name != "__init__.py":
            yield f"{package}.{entry.name[:-3]}"


def _found() -> tuple[Pass, ...]:
    names = sorted(_modules(os.path.dirname(__file__), __name__))
    modules = [importlib.import_module(name) for name in names]
    found = [module.FUSION for module in modules if hasattr(module, "FUSION")]
    return tuple(sorted(found, key=lambda fusion: fusion.position))


FUSIONS = _found()


def select(fusions: Sequence[Pass], setting: str) -> list[Pass]:
    """The fusions that a setting of DLSYS_FUSION leaves: `off`, `all`, the names of some, or those
    of others that are left out, as in `-pointwise,-mlp_head`. Raises SettingError for a name that
    there is not.
    """
    if setting in ("all", "off"):
        return list(fusions) if setting == "all" else []
    names = [name.strip() for name in setting.split(",")]
    left_out = {name[1:] for name in names if name.startswith("-")}
    known = {fusion.name for fusion in fusions}
    mixed = len(left_out) not in (0, len(set(names)))
    if mixed or not {name.removeprefix("-") for name in names} <= known:
        raise SettingError(
            f"DLSYS_FUSION={setting}: expected off, all, or names among "
            f"{', '.join(sorted(known))}, either all with a minus or none"
        )
    return [one for one in fusions if (one.name not in left_out if left_out else one.name in names)]

"""The models of a service: their versions, and loading them anew while requests run.

A path is a checkpoint, the folder of a run, an ONNX file, or a folder of versions: subfolders with
numbers as names, each with one of these, as Triton lays models out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import DataError, DlsysError, quoted
from ...runtime.device import Context
from ..faults import RequestError, UnknownError
from ..logs import Log
from ..metrics import Metrics
from ..settings import Limits
from .checkpoints import checkpoint_program
from .onnx_files import onnx_program
from .program import Program
from .served import ServedModel


class Repository:
    """Models by name and version.

    paths: by name. A request holds the version that it began with: one that is loaded anew takes
    its place at once, and the old one ends when the last request lets go of it.
    """

    def __init__(
        self, paths: Mapping[str, Path], ctx: Context | None, limits: Limits, log: Log
    ) -> None:
        self._paths, self._ctx, self._limits, self._log = dict(paths), ctx, limits, log
        self.metrics = Metrics()
        self._models: dict[str, dict[str, ServedModel]] = {}
        self._reasons: dict[str, str] = {}  # why a model is not there
        self._loading = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """All models, in the order in which they were given."""
        return [*self._paths]

    @property
    def ready(self) -> bool:
        """Whether each model has a version that answers."""
        return all(self._models.get(name) for name in self._paths)

    def find(self, name: str, version: str = "") -> ServedModel:
        """A version of a model, by default the highest. UnknownError where there is none."""
        versions = self._models.get(name)
        if not versions:
            known = ", ".join(self._paths)
            if name in self._paths:
                raise UnknownError(f"the model {name} is not loaded")
            raise UnknownError(f"there is no model {quoted(name)}; there are {known}")
        if not version:
            return versions[next(reversed(versions))]
        if version not in versions:
            raise UnknownError(
                f"{name} has no version {quoted(version)}; it has {', '.join(versions)}"
            )
        return versions[version]

    def versions(self, name: str) -> list[str]:
        """The versions of a model that answer, the lowest first."""
        return [*self._models.get(name, ())]

    def index(self) -> list[dict[str, Any]]:
        """Each version with its state, as the model repository extension lists them."""
        rows = []
        for name in self._paths:
            rows += [
                {"name": name, "version": version, "state": "READY"}
                for version in self.versions(name)
            ] or [
                {
                    "name": name,
                    "state": "UNAVAILABLE",
                    "reason": self._reasons.get(name, "unloaded"),
                }
            ]
        return rows

    # ---- loading ----
    async def load_all(self) -> None:
        """Loads every model. DataError for one that cannot be."""
        for name in self._paths:
            await self._load(name)

    async def load(self, name: str) -> None:
        """Loads a model anew from its path; until all of its versions are there, the old ones
        answer, and they go on where it fails. RequestError for a model that cannot be loaded.
        """
        if name not in self._paths:
            raise UnknownError(
                f"there is no model {quoted(name)} to load; there are {', '.join(self._paths)}"
            )
        try:
            await self._load(name)
        except DlsysError as error:
            self._reasons[name] = str(error)
            raise RequestError(f"{name} was not loaded: {error}") from error

    async def unload(self, name: str) -> None:
        """Takes a model out of service; what it has already is answered."""
        if name not in self._paths:
            raise UnknownError(f"there is no model {quoted(name)} to unload")
        self._models.pop(name, None)
        self._reasons[name] = "unloaded"
        self._log.write("unloaded", model=name)

    async def _load(self, name: str) -> None:
        async with self._loading:
            paths = versions_in(self._paths[name])
            loop = asyncio.get_running_loop()
            self._models[name] = await loop.run_in_executor(None, self._served, name, paths)
            self._reasons.pop(name, None)
        for version, model in self._models[name].items():
            alone = {"runs_alone": model.program.note} if model.program.note else {}
            path = str(paths[version])
            self._log.write("loaded", model=name, version=version, path=path, **alone)

    def _served(self, name: str, paths: Mapping[str, Path]) -> dict[str, ServedModel]:
        made = {}
        for version, path in paths.items():
            program = load_program(path, self._ctx, self._limits.batch)
            counts = self.metrics.of(name, version)
            made[version] = ServedModel(name, version, program, self._limits, counts)
        return made

    async def close(self) -> None:
        """Waits until all that was submitted has run."""
        for versions in self._models.values():
            for model in versions.values():
                await model.close()


def load_program(path: Path, ctx: Context | None, largest: int) -> Program:
    """The program of a checkpoint, of a run's folder or of an ONNX file."""
    if path.suffix.lower() == ".onnx":
        return onnx_program(path, ctx, largest)
    return checkpoint_program(path, ctx, largest)


def versions_in(path: Path) -> dict[str, Path]:
    """The versions below a path, the lowest first; one that has none is version 1. DataError for a
    path that is not there, and for a version without a model.
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    numbered = []
    if path.is_dir():
        numbered = sorted(
            (x for x in path.iterdir() if x.is_dir() and x.name.isascii() and x.name.isdigit()),
            key=lambda x: int(x.name),
        )
    return {x.name: _model_in(x) for x in numbered} or {"1": _model_in(path)}


def _model_in(path: Path) -> Path:
    """The ONNX file of a folder that has one, else the folder or file itself."""
    found = sorted(path.glob("*.onnx")) if path.is_dir() else []
    if len(found) > 1:
        raise DataError(
            f"{path} has several ONNX files, {found[0].name} and {found[1].name}: name one of them"
        )
    return found[0] if found else path


def named_paths(given: list[str]) -> dict[str, Path]:
    """Paths by the names of their models: NAME=PATH, or a path whose last part is the name.
    DataError for one name of two models.
    """
    found: dict[str, Path] = {}
    for text in given:
        name, sign, rest = text.partition("=")
        path = Path(rest if sign else text)
        name = name if sign else (path.stem if path.suffix else path.resolve().name)
        if not name or not all(c.isalnum() or c in "._-" for c in name) or not path.name:
            raise DataError(f"{text}: expected a path, or NAME=PATH with a name of letters and -._")
        if name in found:
            raise DataError(f"two models are named {name}: give one another name, NAME=PATH")
        found[name] = path
    return found

"""`run.json`: the settings of a run, which its folder has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ..errors import DataError
from ..files import make_folder, opened, replacing
from ..train.files import schema
from .usage import UsageError

Settings = TypeVar("Settings", bound=Any)  # a dataclass of numbers and texts

_NAME = "run.json"
_SCHEMAS = {
    "int": schema.integer(0),
    "float": schema.number(0),
    "str": schema.text,
    "tuple[str, ...]": schema.items(schema.text),
}


class Counted:
    """Settings of a run of so many updates, `steps`, that validates after each `every` of them."""

    steps: int
    every: int

    @property
    def epochs(self) -> int:
        """How often the run validates; `steps` are rounded up to a multiple of `every`."""
        return -(-self.steps // self.every)


def chosen(kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    """The settings, Counted ones, of a new run: what was given, and defaults for what is None."""
    names = [field.name for field in fields(kind)]
    settings = kind(**{name: given[name] for name in names if given.get(name) is not None})
    return replace(settings, every=min(settings.every, settings.steps))


def begin(folder: Path, command: str) -> None:
    """Makes the folder of a new run. UsageError where it has one, which `command` goes on with."""
    if (folder / "last.safetensors").exists():
        raise UsageError(
            f"{folder} has a run: go on with it, {command} {folder} --resume, or choose another "
            "folder"
        )
    make_folder(folder)


def write(folder: Path, settings: Any) -> None:
    """Writes the settings."""
    with replacing(folder / _NAME) as file:
        file.write(json.dumps(asdict(settings), indent=1).encode())


def read(folder: Path, kind: type[Settings], purpose: str = "go on with") -> Settings:
    """The settings of the run in a folder. DataError where there is none for that purpose, or where
    the file is damaged.
    """
    path = folder / _NAME
    try:
        with opened(path) as file:
            found = json.loads(file.read())
    except OSError as error:
        raise DataError(f"{folder} has no run to {purpose}: {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    wanted = {field.name: _SCHEMAS[str(field.type)] for field in fields(kind)}
    schema.check(str(path), found, schema.fields(**wanted))
    given = {name: found[name] for name in wanted}
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})


def check_same(folder: Path, settings: Any, given: Mapping[str, Any]) -> None:
    """Raises UsageError for an option that was given and differs from the settings of a run."""
    for name, value in asdict(settings).items():
        if given[name] not in (None, value):
            raise UsageError(
                f"the run in {folder} has --{name.replace('_', '-')} {_typed(value)}, not "
                f"{_typed(given[name])}: leave it out, or begin another run"
            )


def _typed(value: Any) -> str:
    """A value as one types it."""
    return " ".join(value) if isinstance(value, tuple) else str(value)

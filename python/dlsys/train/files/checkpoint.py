"""Checkpoints: safetensors files whose header describes the arrays and has their checksums.

The file's metadata has two texts: `dlsys`, the header as JSON, and `sha256`, over the header and
every array with its name, dtype and shape.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import __version__
from ...data.description import DataDescription
from ...describe import brief
from ...errors import DataError
from ...nn.module import StateDict
from . import safetensors
from .schema import check, fields, integer
from .schema import text as text_schema

FORMAT = 1  # grows when a file means something that older versions would misread


class Saved(NamedTuple):
    """A checkpoint: arrays by name (`model.<name>`, `optimizer.<name>`, …) and the header.

    tensors: the arrays. header: what JSON holds.
    """

    tensors: dict[str, np.ndarray]
    header: dict[str, Any]

    def __repr__(self) -> str:
        return f"Saved({len(self.tensors)} arrays, header {brief(self.header)})"

    def part(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays of `prefix.`, without it: `part("model")` is a state_dict, with which goes
        the description of the data that the model was trained on.
        """
        start = f"{prefix}."
        found = {n[len(start) :]: a for n, a in self.tensors.items() if n.startswith(start)}
        if prefix != "model":
            return found
        state = StateDict(found)
        state.trained_on = self.trained_on("the checkpoint")
        return state

    def trained_on(self, what: str) -> DataDescription | None:
        """The description of the data that the model was trained on; None, and a warning where the
        checkpoint of a run should have one, if it has none. `what` names the checkpoint.
        """
        values = self.header.get("trained_on")
        if values is not None:
            return DataDescription.from_dict(what, values)
        if "trained_on" not in self.header and "epoch" in self.header:
            warnings.warn(
                f"{what} was written by dlsys {self.header.get('version')} without the description "
                "of its data: inputs are not normalized unless whoever gives them does it",
                RuntimeWarning,
                stacklevel=3,
            )
        return None


def save(
    path: str | Path,
    tensors: Mapping[str, np.ndarray],
    header: Mapping[str, Any],
    narrow: Container[str] = (),
) -> None:
    """Writes a checkpoint; a file of that name stays as it is until the new one is complete.

    narrow: names of arrays whose values are bfloat16's. The header is JSON values; format and
    version are added. DataError when it cannot be written.
    """
    path = Path(path)
    try:
        text = json.dumps({"format": FORMAT, "version": __version__, **header})
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: the checkpoint's header is not JSON values: {error}") from None
    arrays = {name: safetensors.little(name, array) for name, array in tensors.items()}
    arrays = safetensors.in_file_order(arrays, narrow)
    metadata = {"dlsys": text, "sha256": _digest(text, arrays)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safetensors.write(path, arrays, metadata, narrow)
    except OSError as error:
        kept = "; the previous one is as it was" if path.exists() else ""
        reason = error.strerror or error
        raise DataError(f"{path}: the checkpoint cannot be written: {reason}{kept}") from error


def load(path: str | Path) -> Saved:
    """Reads a checkpoint, or `last.safetensors` of a folder.

    DataError, in one sentence, for a file that is missing, truncated, corrupt, written by something
    else or by a newer version.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "last.safetensors"
        if not path.exists():
            raise DataError(f"{path.parent} has no last.safetensors, so it is no run's folder")
    tensors, metadata = safetensors.read(path)
    text = metadata.get("dlsys")
    if text is None:
        raise DataError(
            f"{path} is a safetensors file but no checkpoint of dlsys; read its arrays with "
            "dlsys.train.safetensors.read"
        )
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{path} is corrupt: its header cannot be read") from None
    check(str(path), header, fields(format=integer(1), version=text_schema))
    version = header["format"]
    if version > FORMAT:
        raise DataError(
            f"{path} was written by dlsys {header['version']:.20} in format {version}; this is "
            f"dlsys {__version__}, which reads format {FORMAT}: install the newer one"
        )
    if metadata.get("sha256") != _digest(text, tensors):
        raise DataError(f"{path} is corrupt: its contents do not have the checksum in its header")
    return Saved(tensors, header)


def _digest(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, array in arrays.items():
        digest.update(f"\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()

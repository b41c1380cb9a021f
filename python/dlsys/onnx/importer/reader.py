"""Reading model files that nobody vouches for: sizes are bounded, and external data stays inside
the folder of the model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError, quoted
from ..package import onnx_package

MOST_NBYTES = 16 << 30  # of a model's file with its external data
MOST_NODES = 1 << 20
MOST_ELEMENTS = 1 << 31  # of one array


def read(path: Any) -> Any:
    """The ModelProto in a file. DataError for a file that is missing, too large or no model."""
    onnx, path = onnx_package(), Path(path)
    try:
        if path.stat().st_size > MOST_NBYTES:
            raise DataError(f"{path}: larger than {MOST_NBYTES} bytes, which is the limit")
        model = onnx.ModelProto.FromString(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except DataError:
        raise
    except Exception:  # protobuf's classes of errors differ between its versions
        raise DataError(f"{path}: no ONNX model, or a damaged one") from None
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise DataError(f"{path}: no ONNX model: it has no graph")
    if len(model.graph.node) > MOST_NODES:
        raise DataError(f"{path}: {len(model.graph.node)} nodes, the limit is {MOST_NODES}")
    return model


def array_of(tensor: Any, folder: Path | None) -> np.ndarray:
    """The values of a TensorProto; DataError where dimensions and bytes do not agree."""
    if any(extent < 0 for extent in tensor.dims) or math.prod(tensor.dims) > MOST_ELEMENTS:
        raise DataError(f"initializer {quoted(tensor.name)}: shape {list(tensor.dims)}")
    helper, onnx = onnx_package("onnx.numpy_helper"), onnx_package()
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        tensor = _internal(tensor, folder)
    try:
        return np.asarray(helper.to_array(tensor))
    except Exception as error:
        raise DataError(
            f"initializer {quoted(tensor.name)}: its values cannot be read: {quoted(str(error))}"
        ) from None


def _internal(tensor: Any, folder: Path | None) -> Any:
    """A TensorProto with the bytes that it refers to in another file of the model's folder."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name, where = entries.get("location", ""), f"initializer {quoted(tensor.name)}"
    if folder is None or not name:
        raise DataError(f"{where}: external data without a file")
    root = folder.resolve()
    path = (root / name).resolve()
    if Path(name).is_absolute() or not path.is_relative_to(root) or not path.is_file():
        raise DataError(f"{where}: {quoted(name)} is no file inside the folder of the model")
    try:
        offset, size = int(entries.get("offset", 0)), path.stat().st_size
        length = int(entries.get("length", size - offset))
        if offset < 0 or length < 0 or offset + length > size:
            raise ValueError
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(length)
    except (OSError, ValueError):
        raise DataError(f"{where}: its bytes lie outside {quoted(name)}") from None
    made = type(tensor)()
    made.CopyFrom(tensor)
    made.ClearField("external_data")
    made.data_location = 0
    made.raw_data = data
    return made

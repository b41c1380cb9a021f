"""Check an ONNX file with full shape inference, and say what it takes and gives."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...errors import DataError
from ..package import onnx_package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One file."""
    parser.add_argument("file", type=Path, help="the ONNX file to check")


def run(options: argparse.Namespace) -> None:
    """Prints what the file has. DataError where it is no valid model."""
    print(describe(options.file))


def describe(path: Path) -> str:
    """Inputs, outputs, versions and metadata of a file, which is checked first."""
    onnx, checker = onnx_package(), onnx_package("onnx.checker")
    errors = (checker.ValidationError, onnx_package("onnx.shape_inference").InferenceError)
    try:
        checker.check_model(str(path), full_check=True)
        model = onnx.load(str(path), load_external_data=False)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except (*errors, onnx_package("google.protobuf.message").DecodeError) as error:
        first = str(error).strip().splitlines()[0]
        raise DataError(f"{path} is no valid ONNX model: {first}") from error
    opsets = ", ".join(f"{one.domain or 'ai.onnx'} {one.version}" for one in model.opset_import)
    weights = {tensor.name for tensor in model.graph.initializer}
    rows = [("file", f"{path}, IR {model.ir_version}, operators {opsets}")]
    rows += [("input", _port(onnx, p)) for p in model.graph.input if p.name not in weights]
    rows += [("output", _port(onnx, port)) for port in model.graph.output]
    rows.append(("nodes", f"{len(model.graph.node):,}, {len(weights):,} constants and weights"))
    rows += [(one.key, one.value) for one in model.metadata_props]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _port(onnx: Any, port: Any) -> str:
    tensor = port.type.tensor_type
    kind = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    extents = [d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?")
               for d in tensor.shape.dim]  # fmt: skip
    return f"{port.name}: {kind} ({', '.join(extents)})"

"""ONNX files as programs that can be served."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...data import DataDescription
from ...errors import DataError, DlsysError
from ...inference import infer
from ...onnx.importer import ImportedModel, load
from ...onnx.importer.module import Value
from ...runtime.device import Context
from ..protocol.inference import Signature
from ..protocol.tensors import DATATYPES, TensorSpec
from .program import Classifier, Program, Run, buckets_of, reader_of, several, warm


def onnx_program(path: Path, ctx: Context | None, largest: int) -> Program:
    """The program of an ONNX file, with its own inputs and outputs. Requests run together where the
    first extent of all of them is open and every other one is known; else each runs alone.

    A file that `dlsys.onnx.export` wrote says what it was trained on, and so takes images too. ctx:
    where it runs. largest: samples of a batch. DataError for a file that cannot be served.
    """
    model = load(path)
    about = model.trained_on = _description(path, model.metadata)
    labels = about.classes if about is not None else ()
    signature = Signature(_specs(path, model.inputs), _specs(path, model.outputs), labels)
    note, run = _batched(model, signature, ctx, largest)
    if run is None:
        run, largest = _alone(model, signature, ctx), 1
    classifier = None
    if about is not None and [spec.shape[1:] for spec in signature.inputs] == [about.shape]:
        read = reader_of(about)
        classifier = read and Classifier(read, about.prepared, model.to(ctx), logits=True)
    return Program("onnx", signature, run, largest, bool(note), classifier, note)


def _specs(path: Path, values: Sequence[Value]) -> tuple[TensorSpec, ...]:
    """Inputs or outputs as the protocol describes them."""
    found = []
    for value in values:
        name, dtype, shape = value
        if dtype is None or shape is None or np.dtype(dtype) not in DATATYPES:
            raise DataError(
                f"{path}: {name} is no tensor of numbers with a known count of extents, which is "
                "what a service takes and gives"
            )
        extents = tuple(x if isinstance(x, int) and x > 0 else -1 for x in shape)
        found.append(TensorSpec(name, DATATYPES[np.dtype(dtype)], extents))
    if not found:
        raise DataError(f"{path} has no inputs, or no outputs: there is nothing to serve")
    return tuple(found)


def _batched(
    model: ImportedModel, signature: Signature, ctx: Context | None, largest: int
) -> tuple[str, Run | None]:
    """The program that runs requests together, or why there is none."""
    tensors = (*signature.inputs, *signature.outputs)
    if any(not spec.shape or spec.shape[0] != -1 for spec in tensors):
        return "the first extent of an input or an output is fixed", None
    if any(-1 in spec.shape[1:] for spec in signature.inputs):
        return "an input has an open extent beside the first", None
    program = infer(model, ctx=ctx, buckets=buckets_of(largest))

    def run(arrays: list[np.ndarray]) -> list[np.ndarray]:
        return several(program(*arrays))

    try:
        warm(run, signature.inputs, largest)
    except DlsysError as error:
        return str(error), None
    return "", run


def _alone(model: ImportedModel, signature: Signature, ctx: Context | None) -> Run:
    """The model as it is, for a request at a time."""
    names = [spec.name for spec in signature.inputs]

    def run(arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(y) for y in model.run(dict(zip(names, arrays)), ctx)]

    return run


def _description(path: Path, metadata: dict[str, str]) -> DataDescription | None:
    """What the file's model was trained on, where the file says it."""
    if "trained_on_shape" not in metadata:
        return None
    try:
        values = {
            "shape": json.loads(metadata["trained_on_shape"]),
            "dtype": metadata.get("trained_on_dtype"),
            "classes": json.loads(metadata.get("labels", "[]")),
            **json.loads(metadata.get("normalization", "{}")),
        }
    except (ValueError, TypeError, RecursionError):
        values = {}
    return DataDescription.from_dict(str(path), values)

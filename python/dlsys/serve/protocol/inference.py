"""The Open Inference Protocol's data model, and its requests and responses over HTTP.

The protocol is version 2 of KServe's and Triton's, with Triton's extensions for binary tensors, for
classification and for the timeout of a request. gRPC carries the same model in other messages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import quoted
from ..faults import RequestError
from .tensors import (
    DTYPES,
    TensorSpec,
    datatype_of,
    from_bytes,
    from_numbers,
    to_bytes,
    to_numbers,
    top_classes,
)

EXTENSIONS = (
    "binary_tensor_data", "classification", "model_repository", "parameters",
)  # fmt: skip
# Of a response, and of a request: the length of the JSON before the binary tensors.
HEADER_LENGTH = "inference-header-content-length"
_SHORTEST = 1e-3  # seconds: a timeout of fewer could not be met by anybody


class Signature(NamedTuple):
    """What a model takes and gives, and the names of its classes."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    labels: tuple[str, ...] = ()


class Wanted(NamedTuple):
    """An output that a request asks for. classes: how many of its highest as texts, 0 for the
    numbers themselves.
    """

    name: str
    binary: bool = False
    classes: int = 0


class InferRequest(NamedTuple):
    """An inference: arrays in the order of the model's inputs, and the outputs asked for.

    timeout: seconds, None for the service's own.
    """

    inputs: list[np.ndarray]
    outputs: tuple[Wanted, ...]
    id: str = ""
    timeout: float | None = None


# ---- requests ----
def read_request(body: bytes, header_length: str | None, signature: Signature) -> InferRequest:
    """The request in the body of a POST. RequestError for one that does not fit the signature.

    header_length: of the JSON at its beginning, where binary tensors follow. With 0 there is none,
    and the body is the only input, whose first extent follows from its size.
    """
    if header_length is None:
        text, rest = body, memoryview(b"")
    else:
        length = json_length(header_length, len(body))
        if not length:
            return _raw_request(body, signature)
        text, rest = body[:length], memoryview(body)[length:]
    request = _json_object(text)
    parameters = parameters_of(request)
    given = _named(request.get("inputs"), "inputs")
    check_names(list(given), signature)
    inputs = {}
    for name, tensor in given.items():  # binary tensors follow each other in this order
        spec = next(spec for spec in signature.inputs if spec.name == name)
        inputs[name], rest = _input(spec, tensor, rest)
    if rest:
        raise RequestError(f"{len(rest):,} bytes follow behind the tensors of the request")
    binary = parameters.get("binary_data_output") is True
    outputs = _wanted(request.get("outputs"), signature, binary)
    made = [inputs[spec.name] for spec in signature.inputs]
    identity = request.get("id", "")
    if not isinstance(identity, str):
        raise RequestError(f"id: expected a text, got {quoted(identity)}")
    return InferRequest(made, outputs, identity, timeout_of(parameters))


def _raw_request(body: bytes, signature: Signature) -> InferRequest:
    """The one input as the body's bytes; outputs are binary too."""
    spec, shape = raw_shape(len(body), signature)
    outputs = tuple(Wanted(output.name, binary=True) for output in signature.outputs)
    return InferRequest([from_bytes(spec, shape, body)], outputs)


def raw_shape(length: int, signature: Signature) -> tuple[TensorSpec, tuple[int, ...]]:
    """The input that a body of so many bytes without JSON is, and its shape. RequestError where it
    is none.
    """
    (spec, *others) = signature.inputs
    if others or -1 in spec.shape[1:]:
        raise RequestError("a body without JSON is for models of one input whose shape is known")
    size = math.prod(spec.shape[1:]) * DTYPES[spec.datatype].itemsize
    if not length or length % size:
        raise RequestError(
            f"input {spec.name}: a sample has {size:,} bytes, got {length:,}, which are not "
            "some of them"
        )
    return spec, spec.check(spec.datatype, [length // size, *spec.shape[1:]])


def json_length(text: str, most: int) -> int:
    """The length of the JSON before the tensors, from its header. RequestError for what is none of
    a body of `most` bytes.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) <= most):
        raise RequestError(
            f"{HEADER_LENGTH}: expected the length of the JSON, at most {most:,}, got "
            f"{quoted(text)}"
        )
    return int(text)


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("the request is no JSON") from None
    if not isinstance(found, dict):
        raise RequestError("the request is no JSON object, expected one with inputs")
    return found


def parameters_of(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of a request or of a tensor. RequestError for what are none."""
    found = item.get("parameters", {})
    if not isinstance(found, dict):
        raise RequestError(f"parameters: expected an object, got {quoted(found)}")
    return found


def timeout_of(parameters: Mapping[str, Any]) -> float | None:
    """Seconds, from the parameter `timeout` in microseconds."""
    found = parameters.get("timeout")
    if found is None or found == 0:
        return None
    if type(found) is not int or not 0 < found < 2**63:
        raise RequestError(f"timeout: expected microseconds, got {quoted(found)}")
    return max(found / 1e6, _SHORTEST)


def _named(items: Any, what: str) -> dict[str, dict[str, Any]]:
    """Tensors by name."""
    ok = isinstance(items, list) and all(
        isinstance(item, dict) and isinstance(item.get("name"), str) for item in items
    )
    if not ok:
        raise RequestError(f"{what}: expected a list of objects, each with a name")
    found = {item["name"]: item for item in items}
    if len(found) < len(items):
        raise RequestError(f"{what}: a name is there twice")
    return found


def check_names(given: Sequence[str], signature: Signature) -> None:
    """RequestError unless these are the names of the inputs, each once."""
    known = [spec.name for spec in signature.inputs]
    if sorted(given) != sorted(known):
        got = ", ".join(map(quoted, given[:8])) or "none"
        raise RequestError(f"the model has the inputs {', '.join(known)}, got {got}")


def _input(spec: TensorSpec, tensor: dict[str, Any], rest: memoryview) -> tuple[Any, memoryview]:
    """An input's array, and the bytes behind it."""
    shape = spec.check(tensor.get("datatype"), tensor.get("shape"))
    size = parameters_of(tensor).get("binary_data_size")
    if size is None:
        if "data" not in tensor:
            raise RequestError(f"input {spec.name} has neither data nor binary_data_size")
        return from_numbers(spec, shape, tensor["data"]), rest
    if type(size) is not int or not 0 <= size <= len(rest):
        raise RequestError(
            f"input {spec.name}: binary_data_size is {quoted(size)}, and {len(rest):,} bytes are "
            "left behind the JSON"
        )
    return from_bytes(spec, shape, rest[:size]), rest[size:]


def _wanted(items: Any, signature: Signature, binary: bool) -> tuple[Wanted, ...]:
    if items is None or items == []:
        return tuple(Wanted(spec.name, binary) for spec in signature.outputs)
    made = []
    for name, item in _named(items, "outputs").items():
        parameters = parameters_of(item)
        made.append(
            Wanted(
                check_output(name, signature),
                parameters.get("binary_data", binary) is True,
                class_count(parameters.get("classification", 0)),
            )
        )
    return tuple(made)


def check_output(name: str, signature: Signature) -> str:
    """The name of an output. RequestError where the model has none of that name."""
    known = [spec.name for spec in signature.outputs]
    if name not in known:
        raise RequestError(f"the model has the outputs {', '.join(known)}, got {quoted(name)}")
    return name


def class_count(value: Any) -> int:
    """How many classes are asked for as texts."""
    if type(value) is not int or not 0 <= value < 2**31:
        raise RequestError(f"classification: expected a number of classes, got {quoted(value)}")
    return value


# ---- responses ----
def selected(
    request: InferRequest, signature: Signature, outputs: Sequence[np.ndarray]
) -> list[tuple[Wanted, np.ndarray]]:
    """The outputs that a request asked for, those of classification as texts."""
    by_name = {spec.name: array for spec, array in zip(signature.outputs, outputs)}
    made = []
    for wanted in request.outputs:
        array = by_name[wanted.name]
        if wanted.classes and array.ndim:
            array = top_classes(array, wanted.classes, signature.labels)
        made.append((wanted, array))
    return made


def write_response(
    model: str, version: str, identity: str, outputs: Sequence[tuple[Wanted, np.ndarray]]
) -> tuple[bytes, int | None]:
    """The body of a response, and the length of its JSON where binary tensors follow."""
    listed, parts = [], []
    for wanted, array in outputs:
        tensor: dict[str, Any] = {
            "name": wanted.name, "datatype": datatype_of(array), "shape": list(array.shape),
        }  # fmt: skip
        if wanted.binary:
            parts.append(to_bytes(array))
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            tensor["data"] = to_numbers(array)
        listed.append(tensor)
    response = {"model_name": model, "model_version": version, "outputs": listed}
    if identity:
        response["id"] = identity
    text = json.dumps(response, separators=(",", ":")).encode()
    return b"".join((text, *parts)), len(text) if parts else None

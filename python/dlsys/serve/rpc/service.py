"""The Open Inference Protocol over gRPC: GRPCInferenceService on the models of a service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np

from ... import __version__
from ...errors import DataError
from ..faults import RequestError
from ..models.served import ServedModel
from ..protocol.inference import (
    EXTENSIONS,
    InferRequest,
    Signature,
    Wanted,
    check_names,
    check_output,
    class_count,
    timeout_of,
)
from ..protocol.tensors import TensorSpec, datatype_of, from_bytes, from_numbers, to_bytes
from ..service import Service
from .messages import METHODS, SERVICE, messages

# The field of InferTensorContents that has the numbers of a datatype; FP16 has none.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
_FRAME = 1 << 14  # bytes of a message beside its tensors
Facts = dict[str, Any]
Method = Callable[[Any, Facts], Awaitable[Any]]


class GrpcService:
    """The methods of GRPCInferenceService. service: what they answer for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # ---- methods: a request and the facts for the log -> a response ----
    async def ServerLive(self, request: Any, facts: Facts) -> Any:
        return messages()["ServerLiveResponse"](live=True)

    async def ServerReady(self, request: Any, facts: Facts) -> Any:
        return messages()["ServerReadyResponse"](ready=self._service.ready)

    async def ModelReady(self, request: Any, facts: Facts) -> Any:
        self._service.repository.find(request.name, request.version)
        return messages()["ModelReadyResponse"](ready=True)

    async def ServerMetadata(self, request: Any, facts: Facts) -> Any:
        response = messages()["ServerMetadataResponse"]
        return response(name="dlsys", version=__version__, extensions=EXTENSIONS)

    async def ModelMetadata(self, request: Any, facts: Facts) -> Any:
        repository = self._service.repository
        model = repository.find(request.name, request.version)
        return messages()["ModelMetadataResponse"](
            **model.metadata(repository.versions(request.name))
        )

    async def RepositoryIndex(self, request: Any, facts: Facts) -> Any:
        rows = self._service.repository.index()
        if request.ready:
            rows = [row for row in rows if row["state"] == "READY"]
        return messages()["RepositoryIndexResponse"](models=rows)

    async def RepositoryModelLoad(self, request: Any, facts: Facts) -> Any:
        await self._service.repository.load(request.model_name)
        return messages()["RepositoryModelLoadResponse"]()

    async def RepositoryModelUnload(self, request: Any, facts: Facts) -> Any:
        await self._service.repository.unload(request.model_name)
        return messages()["RepositoryModelUnloadResponse"]()

    async def ModelInfer(self, request: Any, facts: Facts) -> Any:
        model = self._service.repository.find(request.model_name, request.model_version)
        counts, started = model.counts, time.perf_counter()
        with model.counted():
            read = read_message(request, model.program.signature)
            counts.input_seconds += time.perf_counter() - started
            seconds = self._service.settings.limits.seconds
            limit = min(read.timeout or seconds, seconds)
            outputs, waiting = await asyncio.wait_for(model.answer(read), limit)
            answered = time.perf_counter()
            response = write_message(model, request.id, outputs)
            counts.output_seconds += time.perf_counter() - answered
        facts |= model.facts(waiting)
        return response

    # ---- around each of them ----
    def handlers(self) -> Any:
        """The methods as gRPC takes them."""
        found = {}
        for name in METHODS:
            found[name] = grpc.unary_unary_rpc_method_handler(
                self._guarded(name, getattr(self, name)),
                request_deserializer=messages()[f"{name}Request"].FromString,
                response_serializer=messages()[f"{name}Response"].SerializeToString,
            )
        return grpc.method_handlers_generic_handler(SERVICE, found)

    def _guarded(self, name: str, method: Method) -> Callable[[Any, Any], Awaitable[Any]]:
        """A method with its key, its faults as statuses, and its line in the log."""
        service = self._service

        async def answer(request: Any, context: Any) -> Any:
            started, facts, status = time.perf_counter(), Facts(), "CANCELLED"
            metadata = {key: value for key, value in context.invocation_metadata()}
            identity = service.request_id(_text(metadata.get("x-request-id")))
            service.active += 1
            try:
                await context.send_initial_metadata((("x-request-id", identity),))
                service.admit()
                service.authorize(
                    _text(metadata.get("authorization")), _text(metadata.get("x-api-key"))
                )
                response = await method(request, facts)
                status = "OK"
                return response
            except (RequestError, asyncio.TimeoutError) as fault:
                status = getattr(fault, "grpc", "DEADLINE_EXCEEDED")
                sentence = str(fault) or "the request was not answered in time"
            except Exception as error:
                service.log.fault(error, id=identity)
                status = "INTERNAL"
                sentence = f"the service failed; its log has why, at {identity}"
            finally:
                service.active -= 1
                ms = round(1e3 * (time.perf_counter() - started), 3)
                service.log.request(id=identity, method=name, status=status, ms=ms, **facts)
            await context.abort(grpc.StatusCode[status], sentence)

        return answer


def _text(value: str | bytes | None) -> str | None:
    return value.decode("latin-1") if isinstance(value, bytes) else value


# ---- requests and responses ----
def read_message(message: Any, signature: Signature) -> InferRequest:
    """The request in a ModelInferRequest. RequestError for one that does not fit the signature."""
    names = [tensor.name for tensor in message.inputs]
    check_names(names, signature)
    raw = message.raw_input_contents
    if raw and len(raw) != len(names):
        raise RequestError(
            f"raw_input_contents has {len(raw)} tensors for {len(names)} inputs: send all or none"
        )
    specs = {spec.name: spec for spec in signature.inputs}
    arrays = {
        tensor.name: _array(specs[tensor.name], tensor, raw[k] if raw else None)
        for k, tensor in enumerate(message.inputs)
    }
    outputs = [
        Wanted(
            check_output(output.name, signature),
            classes=class_count(_parameters(output.parameters).get("classification", 0)),
        )
        for output in message.outputs
    ]
    if len({output.name for output in outputs}) < len(outputs):
        raise RequestError("outputs: a name is there twice")
    return InferRequest(
        [arrays[spec.name] for spec in signature.inputs],
        tuple(outputs) or tuple(Wanted(spec.name) for spec in signature.outputs),
        message.id,
        timeout_of(_parameters(message.parameters)),
    )


def _array(spec: TensorSpec, tensor: Any, raw: bytes | None) -> np.ndarray:
    """An input's array, from its bytes or from the field of its datatype."""
    shape = spec.check(tensor.datatype, list(tensor.shape))
    if raw is not None:
        return from_bytes(spec, shape, raw)
    name = _CONTENTS.get(spec.datatype)
    if name is None:
        raise RequestError(f"input {spec.name}: {spec.datatype} goes into raw_input_contents")
    return from_numbers(spec, shape, list(getattr(tensor.contents, name)))


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as Python's values."""
    chosen = {key: value.WhichOneof("parameter_choice") for key, value in given.items()}
    return {key: getattr(given[key], kind) for key, kind in chosen.items() if kind}


def write_message(
    model: ServedModel, identity: str, outputs: Sequence[tuple[Wanted, np.ndarray]]
) -> Any:
    """The ModelInferResponse of outputs, their elements as bytes."""
    response = messages()["ModelInferResponse"](
        model_name=model.name, model_version=model.version, id=identity
    )
    for wanted, array in outputs:
        response.outputs.add(name=wanted.name, datatype=datatype_of(array), shape=array.shape)
        response.raw_output_contents.append(to_bytes(array))
    return response


def make_server(service: Service) -> tuple[Any, int]:
    """A server that listens, and its port. DataError where the port is taken."""
    settings = service.settings
    limit = settings.limits.body + _FRAME
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # or two services would share a port unseen
        ],
    )
    server.add_generic_rpc_handlers((GrpcService(service).handlers(),))
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        port = server.add_insecure_port(f"{host}:{settings.grpc_port}")
    except RuntimeError:
        port = 0
    if not port:
        raise DataError(
            f"gRPC cannot listen at {settings.host}:{settings.grpc_port}: choose another "
            "--grpc-port, or --grpc-port off"
        )
    return server, port

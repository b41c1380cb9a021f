"""The messages of the Open Inference Protocol over gRPC, built when they are first used.

Names, numbers and types of the fields are those of the protocol's `inference` package;
messages that are nested there stand beside the others here, which nothing on the wire tells.
Descriptors live in a pool of their own, so that clients of the same protocol can be in the same
process.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

# A message a line: its fields as `name number type`; `*` is repeated, `map` a map from strings to
# a message, and `|` stands before the fields of the message's one union.
_MESSAGES = """
ServerLiveRequest:
ServerLiveResponse: live 1 bool
ServerReadyRequest:
ServerReadyResponse: ready 1 bool
ModelReadyRequest: name 1 string, version 2 string
ModelReadyResponse: ready 1 bool
ServerMetadataRequest:
ServerMetadataResponse: name 1 string, version 2 string, extensions 3 string*
ModelMetadataRequest: name 1 string, version 2 string
TensorMetadata: name 1 string, datatype 2 string, shape 3 int64*
ModelMetadataResponse: name 1 string, versions 2 string*, platform 3 string, \
inputs 4 TensorMetadata*, outputs 5 TensorMetadata*
InferParameter: |bool_param 1 bool, |int64_param 2 int64, |string_param 3 string, \
|double_param 4 double, |uint64_param 5 uint64
InferTensorContents: bool_contents 1 bool*, int_contents 2 int32*, int64_contents 3 int64*, \
uint_contents 4 uint32*, uint64_contents 5 uint64*, fp32_contents 6 float*, \
fp64_contents 7 double*, bytes_contents 8 bytes*
InferInputTensor: name 1 string, datatype 2 string, shape 3 int64*, \
parameters 4 map InferParameter, contents 5 InferTensorContents
InferRequestedOutputTensor: name 1 string, parameters 2 map InferParameter
ModelInferRequest: model_name 1 string, model_version 2 string, id 3 string, \
parameters 4 map InferParameter, inputs 5 InferInputTensor*, \
outputs 6 InferRequestedOutputTensor*, raw_input_contents 7 bytes*
InferOutputTensor: name 1 string, datatype 2 string, shape 3 int64*, \
parameters 4 map InferParameter, contents 5 InferTensorContents
ModelInferResponse: model_name 1 string, model_version 2 string, id 3 string, \
parameters 4 map InferParameter, outputs 5 InferOutputTensor*, raw_output_contents 6 bytes*
RepositoryIndexRequest: repository_name 1 string, ready 2 bool
ModelIndex: name 1 string, version 2 string, state 3 string, reason 4 string
RepositoryIndexResponse: models 1 ModelIndex*
RepositoryModelLoadRequest: repository_name 1 string, model_name 2 string
RepositoryModelLoadResponse:
RepositoryModelUnloadRequest: repository_name 1 string, model_name 2 string
RepositoryModelUnloadResponse:
"""
_FIELD = re.compile(r"(\|?)(\w+) (\d+) (map )?(\w+)(\*?)")
METHODS = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata",
           "ModelInfer", "RepositoryIndex", "RepositoryModelLoad",
           "RepositoryModelUnload")  # fmt: skip


@cache
def messages() -> dict[str, Any]:
    """The classes of all messages, by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="dlsys/open_inference.proto", package=PACKAGE, syntax="proto3"
    )
    for line in _MESSAGES.strip().splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for found in _FIELD.finditer(fields):
            _add_field(message, *found.groups())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        each.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{PACKAGE}.{each.name}")
        )
        for each in file.message_type
    }


def _add_field(
    message: Any, union: str, name: str, number: str, mapped: str | None, kind: str, many: str
) -> None:
    """Adds a field to a message's descriptor; a map is a repeated entry of key and value."""
    field = message.field.add(name=name, number=int(number))
    field.label = field.LABEL_REPEATED if many or mapped else field.LABEL_OPTIONAL
    code = getattr(type(field), f"TYPE_{kind.upper()}", None)
    field.type = field.TYPE_MESSAGE if code is None else code
    if mapped:
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "", "key", "1", None, "string", "")
        _add_field(entry, "", "value", "2", None, kind, "")
        field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
    elif code is None:
        field.type_name = f".{PACKAGE}.{kind}"
    if union:
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0

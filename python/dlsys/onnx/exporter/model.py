"""A trace as an ONNX model: pruned, with its inputs, outputs and initializers, checked, written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import __version__
from ...dtypes import bfloat16
from ...errors import DlsysError
from ...files import replacing
from ...graph.spec import FLOAT32, FLOAT64
from ...ops.leaf import Parameter
from ..package import onnx_package
from .trace import Call, Names, Trace

_ALIGNMENT = 4096  # of weights in a file beside the model, so that it can be mapped
_DTYPES = {"float32": "FLOAT", "float64": "DOUBLE"}  # that TensorProto has under other names
_SMALL = 1024  # bytes of constants that shape inference may want to read


class Port(NamedTuple):
    """An input or output: its name, np.dtype and shape, with names for free extents."""

    name: str
    dtype: Any
    shape: Sequence[int | str]


def pruned(trace: Trace, opset: int) -> list[Call]:
    """The calls that outputs need, without optional outputs that nobody reads."""
    schema = onnx_package("onnx.defs").get_schema
    needed = {name for name, _ in trace.outputs}
    found = []
    for call in reversed(trace.calls):
        if needed.isdisjoint(call.outputs):
            continue
        used = max(k for k, name in enumerate(call.outputs) if name in needed) + 1
        used = max(used, schema(call.op_type, opset).min_output)
        found.append(call._replace(outputs=call.outputs[:used]))
        needed.update(filter(None, call.inputs))
    return found[::-1]


def with_outputs(trace: Trace, names: Sequence[str], node: Any) -> None:
    """Gives the outputs of a trace their names, by an Identity where a value has another one."""
    made = {name for call in trace.calls for name in call.outputs}
    renamed: dict[str, str] = {}
    for (value, _), name in zip(trace.outputs, names):
        if value in made and value not in renamed:
            renamed[value] = name
    trace.calls = [
        call._replace(
            inputs=tuple(renamed.get(x, x) for x in call.inputs),
            outputs=tuple(renamed.get(x, x) for x in call.outputs),
        )
        for call in trace.calls
    ]
    for (value, _), name in zip(trace.outputs, names):
        if renamed.get(value) != name:
            source = renamed.get(value, value)
            trace.calls.append(Call("Identity", (source,), (name,), {}, node))
    trace.outputs = [(name, spec) for name, (_, spec) in zip(names, trace.outputs)]


def parameter_dtype(parameter: Parameter) -> Any:
    """The dtype of a Parameter in a file: float32 for bfloat16, whose values it has, and for
    float64 that nobody declared, as on native devices.
    """
    undeclared = parameter.dtype == FLOAT64 and not parameter.declared
    return FLOAT32 if parameter.dtype is bfloat16 or undeclared else parameter.dtype


def initializers(trace: Trace) -> dict[str, np.ndarray]:
    """The constants that the calls of a trace read."""
    read = {name for call in trace.calls for name in call.inputs}
    found = {
        name: np.ascontiguousarray(parameter.asnumpy(), parameter_dtype(parameter))
        for name, parameter in trace.parameters.items()
        if name in read
    }
    found.update((name, array) for name, array in trace.arrays.items() if name in read)
    return found


def shared(calls: list[Call], arrays: dict[str, np.ndarray], keep: set[str]) -> list[Call]:
    """The calls with one name for constants that are equal, which `arrays` then has alone."""
    first: dict[Any, str] = {}
    same: dict[str, str] = {}
    for name, array in list(arrays.items()):
        if name in keep or array.nbytes > _SMALL:
            continue
        key = (array.dtype.str, array.shape, array.tobytes())
        if key in first:
            same[name] = first[key]
            del arrays[name]
        first.setdefault(key, name)
    return [call._replace(inputs=tuple(same.get(x, x) for x in call.inputs)) for call in calls]


def biased(calls: list[Call], arrays: Mapping[str, np.ndarray], outputs: set[str]) -> list[Call]:
    """The calls with a bias that is added to a Gemm as its third input."""
    users: dict[str, int] = {}
    for call in calls:
        for x in call.inputs:
            users[x] = users.get(x, 0) + 1
    gemms = {c.outputs[0]: c for c in calls if c.op_type == "Gemm" and len(c.inputs) == 2}
    vectors = {name for name, array in arrays.items() if array.ndim == 1}
    dequantized = (c for c in calls if c.op_type == "DequantizeLinear" and c.inputs[0] in vectors)
    vectors |= {c.outputs[0] for c in dequantized}
    gone: set[str] = set()
    found = []
    for call in calls:
        if call.op_type == "Add" and not call.attributes:
            for x, bias in (call.inputs, call.inputs[::-1]):
                single = x in gemms and users[x] == 1 and x not in outputs
                if single and bias in vectors:
                    gemm = gemms[x]
                    gone.add(x)
                    call = gemm._replace(inputs=(*gemm.inputs, bias), outputs=call.outputs)
                    break
        found.append(call)
    return [call for call in found if call.outputs[0] not in gone]


def made_model(
    calls: Sequence[Call],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    tensors: Sequence[Any],
    opset: int,
    metadata: Mapping[str, str],
) -> Any:
    """The ModelProto with these initializers."""
    onnx = onnx_package()
    helper = onnx.helper
    names = Names()
    nodes = [
        helper.make_node(
            call.op_type, call.inputs, call.outputs, name=names.unique(call.outputs[0]),
            **{key: _attribute(onnx, key, value) for key, value in call.attributes.items()},
        )
        for call in calls
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "dlsys", [_info(onnx, port) for port in inputs],
        [_info(onnx, port) for port in outputs], list(tensors),
    )  # fmt: skip
    imports = [helper.make_opsetid("", opset)]
    model = helper.make_model(
        graph, producer_name="dlsys", producer_version=__version__, opset_imports=imports,
        ir_version=helper.find_min_ir_version_for(imports),
    )  # fmt: skip
    helper.set_model_props(model, dict(metadata))
    return model


def _attribute(onnx: Any, key: str, value: Any) -> Any:
    if key == "to":  # of Cast
        return onnx.TensorProto.DataType.Value(_DTYPES.get(value, value.upper()))
    if isinstance(value, np.ndarray):
        return onnx.numpy_helper.from_array(value)
    return value


def _info(onnx: Any, port: Port) -> Any:
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(port.dtype))
    return onnx.helper.make_tensor_value_info(port.name, kind, list(port.shape))


def checked(model: Any, arrays: Mapping[str, np.ndarray]) -> list[Any]:
    """Checks a model that has no large weights in it, and returns the shapes of what lies between
    inputs and outputs. DlsysError where ONNX refuses it, which is a defect of a rule.

    Weights become inputs for the check: its result is the same, and it needs no memory for them.
    """
    onnx = onnx_package()
    checker, inference = onnx_package("onnx.checker"), onnx_package("onnx.shape_inference")
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    for name, array in arrays.items():
        if array.nbytes > _SMALL:
            probe.graph.input.append(_info(onnx, Port(name, array.dtype, array.shape)))
        else:
            probe.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    try:
        checker.check_model(probe, full_check=True)
        inferred = inference.infer_shapes(probe, check_type=True, strict_mode=True, data_prop=True)
    except (checker.ValidationError, inference.InferenceError) as error:
        raise DlsysError(f"export: onnx refuses the model that was made: {error}") from error
    return list(inferred.graph.value_info)


def write(path: Path, model: Any, arrays: Mapping[str, np.ndarray], most: int) -> None:
    """Writes a model with its weights; where they exceed `most` bytes, those above 1 KiB go to a
    file beside it, `NAME.data`, first. Each file replaces what was there when it is complete.
    """
    onnx = onnx_package()
    large = [name for name, array in arrays.items() if array.nbytes > _SMALL]
    if sum(arrays[name].nbytes for name in large) <= most:
        large = []
    data = path.with_name(f"{path.name}.data")
    offset = 0
    for name, array in arrays.items():
        if name not in large:
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
            continue
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        tensor = model.graph.initializer.add()
        tensor.name, tensor.data_location = name, onnx.TensorProto.EXTERNAL
        tensor.data_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor.dims.extend(array.shape)
        for key, value in (("location", data.name), ("offset", offset), ("length", array.nbytes)):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, str(value)
        offset += array.nbytes
    if large:
        with replacing(data) as file:
            for name in large:
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                file.write(arrays[name].reshape(-1).view(np.uint8).data)
    with replacing(path) as file:
        file.write(model.SerializeToString())

"""Engines of TensorRT from ONNX files.

TensorRT-RTX (`pip install tensorrt-rtx`) builds them on a machine without a GPU, for GPUs named by
their compute capability. TensorRT (`pip install tensorrt`) builds them for the GPU of the machine
that it runs on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError, DlsysError, how_to_install, quoted
from ..files import replacing
from .package import onnx_package

Range = tuple[int, int, int]  # the least, the most likely and the largest extent

BATCHES: Range = (1, 8, 32)


class Engine(NamedTuple):
    """What `build_engine` has written.

    nbytes: the size of the file. targets: the GPUs that it is for. layers: the number of layers of
    the network before the builder fuses them. quantized: those of them that quantize to integers
    of 8 bits.
    """

    nbytes: int
    targets: tuple[str, ...]
    layers: int
    quantized: int


def build_engine(
    file: str | Path,
    out: str | Path,
    *,
    targets: Sequence[str] = ("sm_89",),
    extents: Mapping[str, Range] | None = None,
    package: str = "tensorrt_rtx",
) -> Engine:
    """Builds an engine from an ONNX file and writes it to `out`.

    file: such as `dl.onnx.export` writes. A quantized model must be symmetric, made by
    `dl.quantize(…, symmetric=True)`, since TensorRT has no zero points; its biases become float32.
    targets: GPUs, those of `targets_of()`; TensorRT itself builds for the GPU that it runs on.
    extents: for each free extent of the inputs, by its name, the least, the most likely and the
    largest number; `batch` has (1, 8, 32) by default. package: tensorrt_rtx or tensorrt.

    DataError for a file that the package cannot read or build, with its message; DlsysError where
    the package is missing, or knows no such target.

    >>> dl.onnx.export(nn.LeNet5(seed=0), "build/lenet.onnx", inputs=(None, 1, 28, 28))
    >>> dl.onnx.build_engine("build/lenet.onnx", "build/lenet.engine", targets=("sm_120",)).nbytes
    """
    trt = _imported(package)
    log = _log(trt)
    builder = _builder(trt, log)
    network = builder.create_network(_strongly_typed(trt))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(with_float_biases(file)):
        errors = [parser.get_error(k).desc() for k in range(parser.num_errors)]
        raise DataError(f"{file}: {package} cannot read it: {_sentence(errors or log.errors)}")
    config = builder.create_builder_config()
    config.add_optimization_profile(_profile(builder, network, {"batch": BATCHES, **(extents or {})}))
    named = _choose_targets(trt, config, targets) if package == "tensorrt_rtx" else ("this GPU",)
    made = builder.build_serialized_network(network, config)
    if made is None:
        raise DataError(f"{file}: {package} cannot build an engine: {_sentence(log.errors)}")
    data = bytes(memoryview(made))
    with replacing(Path(out)) as target:
        target.write(data)
    layers = [network.get_layer(k) for k in range(network.num_layers)]
    quantized = sum(layer.type == trt.LayerType.QUANTIZE for layer in layers)
    return Engine(len(data), named, len(layers), quantized)


def targets_of(package: str = "tensorrt_rtx") -> tuple[str, ...]:
    """The GPUs that TensorRT-RTX builds engines for, such as sm_89.

    package: its module. DlsysError where it is missing.
    """
    names = _imported(package).ComputeCapability.__members__
    return tuple(f"sm_{name[2:]}" for name in names if name.startswith("SM"))


def with_float_biases(file: str | Path) -> bytes:
    """An ONNX file whose biases of int32 are float32, as TensorRT has them.

    file: its path. DataError for one that cannot be read, or whose tensors have zero points.
    """
    from .importer.reader import array_of, read

    onnx, path = onnx_package(), Path(file)
    model = read(path)
    arrays = {t.name: t for t in model.graph.initializer}
    kept = []
    for node in model.graph.node:
        sizes = [array_of(arrays[n], path.parent) for n in node.input if n in arrays]
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and len(node.input) > 2:
            zero = arrays.get(node.input[2])
            if zero is None or np.any(array_of(zero, path.parent)) or zero.data_type == UINT8:
                raise DataError(
                    f"{file}: {quoted(node.name)} has a zero point, which TensorRT has not; "
                    "quantize with symmetric=True"
                )
        bias = arrays.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if bias is not None and bias.data_type == onnx.TensorProto.INT32:
            value = (sizes[0] * sizes[1].astype(np.float64)).astype(np.float32)
            made = onnx_package("onnx.numpy_helper").from_array(value, node.output[0])
            model.graph.initializer.append(made)
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model.SerializeToString()

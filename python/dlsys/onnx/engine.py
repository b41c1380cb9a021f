"""Engines of TensorRT from ONNX files.

TensorRT-RTX (`pip install tensorrt-rtx`) builds them on a machine without a GPU, for GPUs that are
named by their compute capability. TensorRT (`pip install tensorrt`) builds for the GPU of the
machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError, DlsysError, how_to_install, quoted
from ..files import replacing
from .importer.reader import array_of, read
from .package import onnx_package

RTX, CLASSIC = "tensorrt_rtx", "tensorrt"
Range = tuple[int, int, int]  # the least, the most likely and the largest extent
_QUANTIZE = ("QuantizeLinear", "DequantizeLinear")
BATCHES: Range = (1, 8, 32)


class Engine(NamedTuple):
    """What `build_engine` has written.

    nbytes: the size of the file. targets: the GPUs that it is for. layers: those of the network
    before the builder fuses them. quantized: how many of them quantize to integers of 8 bits.
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
    package: str = RTX,
) -> Engine:
    """Builds an engine of TensorRT from an ONNX file and writes it to `out`.

    file: such as `dl.onnx.export` writes, with its weights in it. A quantized model must be of
    `dl.quantize(…, symmetric=True)`, since TensorRT has no zero points; its biases become float32.
    targets: the GPUs, of `engine_targets()`; TensorRT itself builds for the GPU that it runs on.
    extents: for each free extent of the inputs, by its name, the least, the most likely and the
    largest number; `batch` has (1, 8, 32) by default. package: tensorrt_rtx or tensorrt.

    DataError for a file that the package cannot read or build, with its message; DlsysError where
    the package is missing, or knows no such target.
    """
    trt = _imported(package)
    chosen = _capabilities(trt, targets) if package == RTX else {}
    log = _log(trt)
    builder, network, parser = _network(trt, log)
    if not parser.parse(with_float_biases(file)):
        found = [parser.get_error(k).desc() for k in range(parser.num_errors)]
        raise DataError(f"{file}: {package} cannot read it: {_first(found or log.errors)}")
    config = builder.create_builder_config()
    ranges = {"batch": BATCHES, **(extents or {})}
    config.add_optimization_profile(_profile(builder, network, Path(file), ranges))
    if chosen:
        config.num_compute_capabilities = len(chosen)
        for k, capability in enumerate(chosen.values()):
            config.set_compute_capability(capability, k)
    made = builder.build_serialized_network(network, config)
    if made is None:
        raise DataError(f"{file}: {package} cannot build an engine: {_first(log.errors)}")
    data = bytes(made)
    with replacing(Path(out)) as target:
        target.write(data)
    kinds = [network.get_layer(k).type for k in range(network.num_layers)]
    named = tuple(chosen) or ("the GPU of this machine",)
    return Engine(len(data), named, len(kinds), kinds.count(trt.LayerType.QUANTIZE))


def engine_targets() -> tuple[str, ...]:
    """The GPUs that TensorRT-RTX builds engines for, such as sm_89. DlsysError if it is missing."""
    return tuple(_known_targets(_imported(RTX)))


def with_float_biases(file: str | Path) -> bytes:
    """The bytes of an ONNX file whose biases of int32 have become float32, as TensorRT has them.

    file: its path. DataError for one that cannot be read, or whose tensors have zero points.
    """
    path = Path(file)
    model = read(path)
    arrays = {t.name: array_of(t, path.parent) for t in model.graph.initializer}
    to_tensor = onnx_package("onnx.numpy_helper").from_array
    for node in [n for n in model.graph.node if n.op_type in _QUANTIZE]:
        values = [arrays.get(name) for name in node.input]
        zero = values[2] if len(values) > 2 else None
        if zero is not None and (zero.dtype == np.uint8 or zero.any()):
            raise DataError(
                f"{file}: {quoted(node.name)} has a zero point, which TensorRT does not; quantize "
                "with symmetric=True"
            )
        bias, scale = values[:2]
        if bias is not None and bias.dtype == np.int32 and scale is not None:
            model.graph.initializer.append(
                to_tensor((bias * scale.astype(np.float64)).astype(np.float32), node.output[0])
            )
            model.graph.node.remove(node)
    return model.SerializeToString()


def _imported(package: str) -> Any:
    if package not in (RTX, CLASSIC):
        raise DlsysError(f"build_engine: package is {package!r}, expected {RTX} or {CLASSIC}")
    try:
        return import_module(package)
    except ImportError:
        raise DlsysError(f"engines need the package {package}: {how_to_install(package)}") from None


def _network(trt: Any, log: Any) -> tuple[Any, Any, Any]:
    """A builder, an empty network and the parser that fills it."""
    try:
        builder = trt.Builder(log)
    except Exception as error:  # of its C++ library, such as of a missing driver
        raise DlsysError(f"{trt.__name__} cannot build here: {_first([str(error)])}") from None
    flags = trt.NetworkDefinitionCreationFlag.__members__
    strong = 1 << int(flags["STRONGLY_TYPED"]) if "STRONGLY_TYPED" in flags else 0
    network = builder.create_network(strong)
    return builder, network, trt.OnnxParser(network, log)


def _known_targets(trt: Any) -> dict[str, Any]:
    members = trt.ComputeCapability.__members__
    return {f"sm_{n[2:]}": value for n, value in members.items() if n.startswith("SM")}


def _capabilities(trt: Any, targets: Sequence[str]) -> dict[str, Any]:
    known = _known_targets(trt)
    missing = [target for target in targets if target not in known]
    if missing or not targets:
        raise DlsysError(
            f"{trt.__name__} {trt.__version__} builds for {', '.join(known)}, "
            f"not for {', '.join(missing) or 'nothing'}"
        )
    return {target: known[target] for target in targets}


def _profile(builder: Any, network: Any, file: Path, ranges: Mapping[str, Range]) -> Any:
    """The ranges of the inputs' free extents, whose names are those of the file."""
    profile = builder.create_optimization_profile()
    named = {v.name: [d.dim_param for d in v.type.tensor_type.shape.dim]
             for v in read(file).graph.input}  # fmt: skip
    for k in range(network.num_inputs):
        given = network.get_input(k)
        rows = []
        for extent, name in zip(tuple(given.shape), named[given.name]):
            if extent < 0 and name not in ranges:
                raise DataError(
                    f"{file}: input {quoted(given.name)} has the free extent {quoted(name)}; give "
                    "its range in extents"
                )
            rows.append(ranges[name] if extent < 0 else (extent,) * 3)
        profile.set_shape(given.name, *map(tuple, zip(*rows)))
    return profile


def _log(trt: Any) -> Any:
    """A logger that keeps errors and prints nothing."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if severity in (self.INTERNAL_ERROR, self.ERROR):
                self.errors.append(text)

    return Log()


def _first(texts: Sequence[str]) -> str:
    """The first line of the first message."""
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    return lines[0].strip() if lines else "it does not say why"

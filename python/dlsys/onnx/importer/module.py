"""An imported model as a Module: its float weights are Parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...autodiff import Executor, Variable
from ...eager.autograd import no_grad, watched
from ...eager.device import engine_of
from ...eager.tensor import Tensor
from ...errors import DataError, DlsysError, GraphError, quoted
from ...graph.node import Node
from ...nn.module import Module
from ...ops.leaf import Parameter
from ..package import onnx_package
from . import rules as rules
from .hoist import hoist
from .reader import array_of, read
from .walk import STORED, Scope, Walker, on_device


class Value(NamedTuple):
    """An input or output of a model.

    name: its name. dtype: None for a sequence or an optional. shape: an integer, a name or None for
    each axis; None where the file does not say.
    """

    name: str
    dtype: Any
    shape: tuple[int | str | None, ...] | None


Positions = dict[str, tuple[int, ...]]  # of inputs, by operator

# Inputs that are statistics, which no gradient trains, and scales of integers: constants.
_STATISTICS: Positions = {"BatchNormalization": (3, 4)}
_SCALES: Positions = {
    "QuantizeLinear": (1,), "DequantizeLinear": (1,), "QLinearMatMul": (1, 4, 6),
    "QLinearConv": (1, 4, 6), "QLinearAdd": (1, 4, 6), "QGemm": (1, 4, 7),
}  # fmt: skip


class _Programs(dict[Any, Any]):
    """The programs of a quantized model by the signatures of feeds; a copy of it has none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Programs, ()


class ImportedModel(Module):
    """A model that was read from an ONNX file: call it on Nodes or Tensors, or `run` it on arrays.

    Initializers of float32 and float16, and constants that are weights of layers, are Parameters by
    their names, in `state_dict` as `weights.NAME`; scalars among them, such as the eps of a
    normalization, are not trained. Other constants are folded. inputs, outputs: a Value each.
    graph: the GraphProto, with these as its initializers. metadata: the texts that the file has
    beside it, by name.

    model: a ModelProto. folder: where its external data lies, None for none.
    """

    def __init__(self, model: Any, folder: Path | None = None) -> None:
        hoist(model)
        self._model, self._folder = model, folder
        self.graph = model.graph
        self.metadata = {each.key: each.value for each in model.metadata_props}
        initializers = {t.name: array_of(t, folder) for t in self.graph.initializer}
        for sparse in self.graph.sparse_initializer:
            initializers[sparse.values.name] = _dense(sparse, folder)
        statistics, scales = (self._read_as(table) for table in (_STATISTICS, _SCALES))
        self.weights = {
            name: Parameter(array, name, trainable=name not in statistics and array.ndim > 0)
            for name, array in initializers.items()
            if array.dtype.name in STORED and name not in scales
        }
        self._programs = _Programs()
        self._constants = {n: a for n, a in initializers.items() if n not in self.weights}
        self.inputs = [_value(v) for v in self.graph.input if v.name not in initializers]
        self.outputs = [_value(v) for v in self.graph.output]

    def _read_as(self, table: Positions) -> set[str]:
        """The names of values that are inputs at a table's positions of its operators."""
        return {
            node.input[k]
            for node in self.graph.node
            for k in table.get(node.op_type, ())
            if k < len(node.input)
        }

    def forward(self, *inputs: Any) -> Any:
        """The output of the model, or a tuple of several.

        inputs: Nodes or Tensors in the order of `inputs`; arrays are constants. DataError where the
        model asks for what they do not fit.
        """
        if len(inputs) > len(self.inputs):
            raise DataError(f"the ONNX model has {len(self.inputs)} inputs, got {len(inputs)}")
        symbolic = any(isinstance(x, Node) for x in inputs)
        device = next((x.device for x in inputs if isinstance(x, Tensor)), "numpy")
        walker = Walker(self._model, self._folder, None if symbolic else device)
        named = dict(zip((v.name for v in self.inputs), inputs))
        made = [walker.value(y) for y in self._walk(walker, named)]
        return made[0] if len(made) == 1 else tuple(made)

    def run(self, feeds: dict[str, Any], ctx: Any = None) -> list[Any]:
        """The outputs as arrays, a list of them for a sequence and None for an empty optional.

        feeds: an array for each input by its name. ctx: the device, None for numpy; the weights
        move there. DataError for names and arrays that do not fit the model.
        """
        known = {v.name for v in (*self.graph.input,)}
        needed = {v.name for v in self.inputs}
        if set(feeds) - known:
            raise DataError(
                f"the ONNX model has no input {quoted(sorted(set(feeds) - known)[0])}; it has "
                f"{', '.join(sorted(needed))}"
            )
        for _, state in self.named_state():
            if (state.home if state.storage is None else state.storage.ctx) != ctx:
                state.to(ctx)
        device = "numpy" if ctx is None else ctx
        made = self._in_integers(feeds, ctx)
        if made is not None:
            return made
        walker = Walker(self._model, self._folder, device)
        given = {
            name: Tensor(x, device) if on_device(x, device) else x for name, x in feeds.items()
        }
        try:
            with no_grad():
                return [walker.look(y) for y in self._walk(walker, given)]
        except DlsysError:
            raise
        except Exception as error:  # of what is computed here, behind the node that asked for it
            raise DataError(f"the ONNX model cannot be computed: {quoted(str(error))}") from error

    def _in_integers(self, feeds: dict[str, Any], ctx: Any) -> list[Any] | None:
        """The outputs of a quantized model by a program of Nodes, which computes with integers and
        is made once for each signature; None for another model, or one that only Tensors walk.
        """
        quantized = any(node.op_type in _SCALES for node in self.graph.node)
        if not quantized or any(isinstance(x, (list, tuple)) for x in feeds.values()):
            return None
        arrays = {name: np.asarray(x) for name, x in feeds.items()}
        if not all(on_device(x, ctx or "numpy") for x in arrays.values()):
            return None
        key = (*((n, x.shape, x.dtype.str) for n, x in sorted(arrays.items())), ctx)
        if key not in self._programs:
            self._programs[key] = self._program(arrays, ctx)
        program = self._programs[key]
        if program is None:
            return None
        variables, executor = program
        used = set(executor.topo_order)
        given = {x: arrays[name] for name, x in variables.items() if x in used}
        try:
            return executor.run(given, convert_to_numpy_ret_vals=True)
        except GraphError:  # of a dtype that the device does not hold, such as int16
            self._programs[key] = None
            return None

    def _program(self, arrays: dict[str, np.ndarray], ctx: Any) -> Any:
        variables = {n: Variable(n, x.shape, x.dtype) for n, x in arrays.items()}
        try:
            made = self._walk(Walker(self._model, self._folder, None), variables)
        except DataError:
            return None
        if not all(isinstance(y, Node) for y in made):
            return None
        return variables, Executor(made, ctx)

    def _walk(self, walker: Walker, given: dict[str, Any]) -> list[Any]:
        scope = Scope()
        scope.values = dict(self._constants)
        for name, state in self.weights.items():
            scope.values[name] = state if walker.symbolic else watched_on(walker.device, state)
        scope.values |= given
        missing = [v.name for v in self.inputs if v.name not in scope.values]
        if missing:
            raise DataError(f"the ONNX model's input {quoted(missing[0])} is not given")
        wanted = [v.name for v in self.graph.output]
        walker.nodes(self.graph.node, wanted, scope, {}, walker.versions)
        return [scope[name] for name in wanted]

    def options(self) -> str:
        return f"{len(self.graph.node)} nodes, {len(self.weights)} weights"


def load(path: Any) -> ImportedModel:
    """The model in an ONNX file as a Module that can be run, trained and called.

    path: the file; external data must lie in its folder. DataError for a file that cannot be read,
    is damaged or too large; an operator that is not supported is refused where it is computed.
    """
    return ImportedModel(read(path), Path(path).parent)


def watched_on(device: Any, parameter: Parameter) -> Tensor:
    """A Parameter as a Tensor of the device that the model is called on."""
    return engine_of(device).record(watched, (parameter,))


def _value(info: Any) -> Value:
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        return Value(info.name, None, None)
    of = info.type.tensor_type
    try:
        dtype = onnx_package("onnx.helper").tensor_dtype_to_np_dtype(of.elem_type)
    except KeyError:
        raise DataError(f"ONNX value {quoted(info.name)} has unknown type {of.elem_type}") from None
    if not of.HasField("shape"):
        return Value(info.name, dtype, None)
    extents = [
        d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in of.shape.dim
    ]
    return Value(info.name, dtype, tuple(extents))


def _dense(sparse: Any, folder: Path | None) -> np.ndarray:
    """A sparse initializer as an array."""
    from .walk import guard

    values, indices = array_of(sparse.values, folder), array_of(sparse.indices, folder)
    made = np.zeros(guard(sparse.dims), values.dtype)
    try:
        if indices.ndim == 1:
            made.reshape(-1)[indices] = values
        else:
            made[tuple(indices.T)] = values
    except IndexError:
        raise DataError(
            f"initializer {quoted(sparse.values.name)}: an index out of range"
        ) from None
    return made

"""Post-training quantization: a trained model with integers of 8 bits for its weights and for what
flows between its layers.

Weights are symmetric with a scale for each output channel, tensors asymmetric with one scale each:
Jacob et al., "Quantization and training of neural networks for efficient integer-arithmetic-only
inference" (2018), and Krishnamoorthi, "Quantizing deep convolutional networks for efficient
inference" (2018). The graph stays one of floats, with a quantization and a dequantization behind
each quantized tensor and a dequantization behind each weight, as ONNX's QDQ form has it;
`fusion/quantized.py` computes it in integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from ..autodiff import Executor, Node, Parameter, Variable, constant
from ..data.description import as_trained
from ..errors import DataError, GraphError
from ..functional.record import recorded
from ..graph.lines import attributed_to
from ..graph.node import find_topo_sort
from ..nn import Module
from ..ops.conv.convolution import convolution_bias_op, convolution_op
from ..ops.conv.pooling import max_pool_op
from ..ops.elementwise import add_op
from ..ops.matmul import batched_matmul_op, matmul_op
from ..ops.movement import expand_dims_op, flatten_op, squeeze_op
from ..ops.quantize import dequantize_op, quantize_op
from ..ops.reduce import sum_op
from .calibrate import METHODS
from .fold import folded
from .form import inference_form

_VIEWS = (flatten_op, squeeze_op, expand_dims_op)
_CONVOLUTIONS = (convolution_op, convolution_bias_op)
_PRODUCTS = (*_CONVOLUTIONS, matmul_op, batched_matmul_op)
Numbers = tuple[np.ndarray, np.ndarray]  # scale and zero point


class QuantizedModel(Module):
    """What `quantize` returns: a model over Nodes and Tensors whose numbers do not change.

    inputs: the Variables of a graph in QDQ form. outputs: its results, or one if `single`. ranges:
    the least and the largest number of each quantized tensor, by the name of its node. method: of
    the calibration.

    >>> loader = data.Loader((np.ones((4, 3), np.float32), np.zeros(4)), 2)
    >>> dl.quantize(nn.MLP((3, 2), seed=0), loader)
    QuantizedModel(minmax, 1 tensor of 8 bits)
    """

    def __init__(
        self, inputs: Sequence[Node], outputs: Sequence[Node], single: bool,
        ranges: Mapping[str, tuple[float, float]], method: str,
    ) -> None:  # fmt: skip
        self._variables, self._outputs, self._single = tuple(inputs), tuple(outputs), single
        self.ranges, self.method = dict(ranges), method
        self._build = recorded(self._built)

    def __deepcopy__(self, memo: Any) -> QuantizedModel:
        return self

    def forward(self, *inputs: Any) -> Any:
        """The outputs of the model that was quantized. inputs: those that it takes, float32."""
        if len(inputs) != len(self._variables):
            raise GraphError(f"the model takes {len(self._variables)} inputs, got {len(inputs)}")
        return self._build(*inputs)

    def _built(self, *inputs: Node) -> Any:
        new = dict(zip(self._variables, inputs))
        made = _rebuilt(self._outputs, new)
        return made[0] if self._single else tuple(made)

    def options(self) -> str:
        count = len(self.ranges)
        return f"{self.method}, {count} tensor{'s' * (count != 1)} of 8 bits"


def quantize(
    model: Module,
    data: Any,
    *,
    method: str = "minmax",
    percentile: float = 99.99,
    symmetric: bool = False,
    ctx: Any = None,
) -> QuantizedModel:
    """A model with weights of 8 bits, and tensors of 8 bits between its convolutions, linear
    layers, residual sums and max-poolings; what it computes otherwise stays float32.

    `dl.infer(dl.quantize(model, loader), ctx="cpu")` runs it in integers, `dl.onnx.export` writes
    it in ONNX's QDQ form, and `dl.onnx.load` reads that.

    model: a trained Module; the result has its weights as they are now, with batch normalization
    folded and without dropout. data: a `Loader` of samples like those that the model will see, of
    which some hundreds do; it is read in its order, without augmentation, normalized as the model
    was trained. method: how each tensor's range is found: "minmax", the range of all elements;
    "percentile", the range of `percentile` of them; "entropy", the range that loses least
    information. symmetric: tensors are int8 without zero points, as TensorRT has them, with half of
    the steps where they are not negative. ctx: where the model runs for that.

    DataError for data without samples or with NaN, GraphError for a model without such layers or
    an unknown method.

    >>> loader = data.Loader((np.random.rand(64, 1, 28, 28).astype("f"), np.zeros(64)), 32)
    >>> model = dl.quantize(nn.LeNet5(seed=0), loader)
    >>> dl.infer(model)(np.zeros((2, 1, 28, 28), np.float32)).shape
    (2, 10)
    """
    if method not in METHODS:
        raise GraphError(f"quantize: method must be one of {', '.join(METHODS)}, got {method!r}")
    if not 50 < percentile <= 100:
        raise GraphError(f"quantize: percentile must be above 50 and up to 100, got {percentile}")
    data = as_trained(data, model.trained_on)
    variables = _variables(data)
    trained_on, model = model.trained_on, deepcopy(model)  # whose Parameters may live elsewhere
    with model.in_mode(False):
        made = model(*variables)
    nodes: list[Node] = list(made) if isinstance(made, (tuple, list)) else [made]
    fetches = folded(inference_form(nodes))
    plan = _Plan(fetches)
    if not plan.tensors:
        raise GraphError("quantize: the model has no convolution and no linear layer")
    executor = Executor(plan.tensors, ctx)

    def batches() -> Iterator[list[np.ndarray]]:
        for arrays in _batches(data, len(variables)):
            feeds = {x: a for x, a in zip(variables, arrays) if x in set(executor.topo_order)}
            yield executor.run(feeds, convert_to_numpy_ret_vals=True)

    ranges = METHODS[method](batches, percentile)
    if not ranges:
        raise DataError("quantize: the data have no samples")
    numbers = map(_symmetric if symmetric else _numbers, ranges)
    outputs = _with_quantization(fetches, plan, dict(zip(plan.tensors, numbers)))
    named = {x.name: each for x, each in zip(plan.tensors, ranges)}
    result = QuantizedModel(variables, outputs, nodes[0] is made, named, method)
    result.trained_on = trained_on
    return result


def _variables(data: Any) -> list[Node]:
    """A Variable of any batch for each input of a batch."""
    if not hasattr(data, "inputs"):
        raise DataError(f"quantize: expected a Loader of samples, got {type(data).__name__}")
    nodes = data.inputs()
    count = max(len(nodes) - getattr(data, "targets", 1), 1)
    return [Variable(x.name, (None, *x.shape[1:]), x.dtype) for x in nodes[:count]]


def _batches(data: Any, count: int) -> Iterator[list[np.ndarray]]:
    """The inputs of each batch of one epoch, in the order of the samples where that is known."""
    ordered = data.in_order() if hasattr(data, "in_order") else data
    for feeds in ordered.epoch(0):
        yield [np.asarray(x) for x in list(feeds.values())[:count]]


class _Plan:
    """Which tensors of a graph are quantized.

    tensors: those with numbers of their own: what products and sums read. followers: what only
    moves or selects their elements, and has their numbers.
    """

    def __init__(self, fetches: Sequence[Node]) -> None:
        order = find_topo_sort(fetches)
        self.products = {x for x in order if _is_product(x)}
        sums = [x for x in order if x.op is add_op and self._is_sum(x)]
        read = [x.inputs[0] for x in self.products] + [x for s in sums for x in s.inputs]
        wanted = {self._source(x) for x in read}
        self.tensors = [x for x in order if x in wanted]
        self.followers = {x: s for x in order if (s := self._source(x)) in wanted and s is not x}

    def _source(self, x: Node) -> Node:
        """The tensor whose elements a node moves or selects."""
        while True:
            before = x.inputs[0] if x.inputs else None
            pool = x.op.projection and before is not None and before.op is max_pool_op
            if pool and before is not None and x.attrs["index"] == 0:
                x = before.inputs[0]
            elif before is not None and (
                x.op.movement or x.op.view or x.op in _VIEWS or _drops_axes(x)
            ) and len(x.inputs) == 1 and not x.op.projection:  # fmt: skip
                x = before
            else:
                return x

    def _is_sum(self, node: Node) -> bool:
        """True for the sum of a convolution and another tensor of its shape."""
        sources = [self._source(x) for x in node.inputs]
        shapes = {x.shape for x in node.inputs}
        alike = len(shapes) == 1 and None not in shapes
        return alike and any(x in self.products and x.op in _CONVOLUTIONS for x in sources)


def _drops_axes(x: Node) -> bool:
    """True for a sum over extents of 1, behind a pooling of whole images."""
    if x.op is not sum_op or x.inputs[0].shape is None:
        return False
    shape, axis = x.inputs[0].shape, x.attrs["axis"]
    axes = range(len(shape)) if axis is None else [axis] if isinstance(axis, int) else axis
    return all(shape[a] == 1 for a in axes)


def _is_product(node: Node) -> bool:
    """True for a product by a matrix or filter that is known."""
    if node.op not in _PRODUCTS or node.attrs.get("trans_A"):
        return False
    weight = node.inputs[1]
    return isinstance(weight, Parameter) and len(weight.shape) in (2, 4)


def _numbers(low_high: tuple[float, float]) -> Numbers:
    """The scale and the zero point of uint8 for a range, which is widened to hold 0."""
    low, high = min(low_high[0], 0.0), max(low_high[1], 0.0)
    scale = np.float32((high - low) / 255 or 1.0)
    scale = scale if scale > 0 else np.float32(1.0)
    zero = np.clip(np.rint(-low / scale), 0, 255).astype(np.uint8)
    return np.asarray(scale), np.asarray(zero)


def _symmetric(low_high: tuple[float, float]) -> Numbers:
    """The scale of int8 for a range, whose zero point is 0."""
    largest = max(abs(low_high[0]), abs(low_high[1]))
    scale = np.float32(largest / 127 or 1.0)
    return np.asarray(scale if scale > 0 else np.float32(1.0)), np.asarray(np.int8(0))


def _with_quantization(
    fetches: Sequence[Node], plan: _Plan, numbers: Mapping[Node, Numbers]
) -> list[Node]:
    """The fetches over a graph in QDQ form."""
    new: dict[Node, Node] = {}
    read: dict[Node, Node] = {}  # what other nodes read: the same, where it is quantized
    biases = _biases(fetches, plan)
    for node in find_topo_sort(fetches):
        with attributed_to(node):
            inputs = [read[x] for x in node.inputs]
            if node in plan.products or node in biases:
                _quantize_constants(node, biases.get(node, node), inputs, numbers, plan)
            new[node] = read[node] = node if node.op.leaf else _again(node, inputs)
            found = numbers.get(plan.followers.get(node, node))
            if found is not None:
                scale, zero = map(constant, found)
                read[node] = dequantize_op(quantize_op(new[node], scale, zero), scale, zero)
    return [new[node] for node in fetches]


def _biases(fetches: Sequence[Node], plan: _Plan) -> dict[Node, Node]:
    """The sums of a product of matrices and a bias, with the product."""
    found = {}
    for node in find_topo_sort(fetches):
        if node.op is add_op and node.inputs[0] in plan.products:
            product, bias = node.inputs
            if isinstance(bias, Parameter) and product.op not in _CONVOLUTIONS:
                if len(bias.shape) == 1 and bias.shape[0] == product.shape[-1]:
                    found[node] = product
    return found


def _quantize_constants(
    node: Node, product: Node, inputs: list[Node], numbers: Mapping[Node, Numbers], plan: _Plan
) -> None:
    """Exchanges the weight and the bias among a node's inputs for dequantized constants: int8 with
    a scale for each output channel, and int32 in units of the sums.
    """
    weight, source = product.inputs[1], product.inputs[0]
    axis = 0 if product.op in _CONVOLUTIONS or product.attrs["trans_B"] else 1
    assert isinstance(weight, Parameter)
    value = weight.asnumpy().astype(np.float64)
    others = tuple(a for a in range(value.ndim) if a != axis)
    largest = np.abs(value).max(axis=others, initial=0.0)
    scale = (np.where(largest > 0, largest, 1.0) / 127).astype(np.float32)
    if node is product:
        shape = [-1 if a == axis else 1 for a in range(value.ndim)]
        units = np.clip(np.rint(value / scale.reshape(shape)), -127, 127)
        inputs[1] = _constant(units.astype(np.int8), scale, axis, weight.name)
    for k, bias in enumerate(node.inputs):
        if k and bias is not weight:
            assert isinstance(bias, Parameter)
            of_sums = numbers[plan.followers.get(source, source)][0] * scale
            limit = 2.0**31 - 1
            sums = np.clip(np.rint(bias.asnumpy() / of_sums.astype(np.float64)), -limit, limit)
            inputs[k] = _constant(sums.astype(np.int32), of_sums, 0, bias.name)


def _constant(values: np.ndarray, scale: np.ndarray, axis: int, name: str) -> Node:
    zero = constant(np.zeros(len(scale), values.dtype))
    return dequantize_op(constant(values, name=name), constant(scale), zero, axis=axis)


def _again(node: Node, inputs: Sequence[Node]) -> Node:
    """A use of an operator over other inputs, whose specs decide its own."""
    return Node(node.op, inputs, dict(node.attrs), node.name)


def _rebuilt(fetches: Sequence[Node], new: dict[Node, Node]) -> list[Node]:
    """The fetches over other leaves."""
    for node in find_topo_sort(fetches):
        if node not in new:
            new[node] = node if node.op.leaf else _again(node, [new[x] for x in node.inputs])
    return [new[node] for node in fetches]

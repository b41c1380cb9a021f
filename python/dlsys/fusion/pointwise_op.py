"""chain: elementwise operators in one kernel, which `fusion/pointwise.py` makes of several.

Its kernel interprets a small program over float32 (src/math/pointwise_vm.h): the body, encoded
here. Truth values are 0 and 1 there, and integers appear as what casts to and from float32 make of
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import GraphError
from ..graph.kinds import Instance
from ..graph.node import Node
from ..graph.signature import Signature
from ..graph.spec import FLOAT32, Spec
from ..ops.comparison import BOOL
from ..ops.leaf import full_op
from .body import Body, Fused, close

INSTRUCTIONS, INPUTS, NUMBERS = 24, 8, 16  # at most, as in src/math/pointwise_vm.h
_FIRST_NUMBER = 64

# By the numbers of src/math/pointwise_vm.h, which count from 1: names of kernels, and two kinds of
# casts.
_CODES = (
    "neg", "exp", "log", "sqrt", "tanh", "cos", "sin", "sigmoid", "relu", "log1p", "rsqrt", "abs",
    "sign", "silu", "gelu", "gelu_tanh", "softplus", "hard_sigmoid", "hard_swish", "logical_not",
    "truth", "whole",
    "add", "sub", "mul", "div", "pow", "relu_gradient", "minimum", "maximum", "silu_gradient",
    "gelu_gradient", "gelu_tanh_gradient", "softplus_gradient", "hard_swish_gradient", "pow_const",
    "leaky_relu", "elu", "huber", "equal", "not_equal", "less", "less_equal", "logical_and",
    "logical_or", "logical_xor",
    "clip", "where",
    "clip_gradient", "leaky_relu_gradient", "elu_gradient",
)  # fmt: skip
_NUMBER_OF = {name: k for k, name in enumerate(_CODES, 1)}
# Operators between an array and a number that are others with the number as an operand; the last
# three have it first.
_OF_TWO = {
    "add_const": "add", "mul_const": "mul", "div_const": "div", "rsub_const": "sub",
    "rdiv_const": "div", "rpow_const": "pow",
}  # fmt: skip
_SWAPPED = ("rsub_const", "rdiv_const", "rpow_const")
_TESTS = ("equal", "not_equal", "less", "less_equal")
_EXACT = (FLOAT32, BOOL, np.dtype(np.uint8))  # whose values are all numbers of float32
_READ = (*_EXACT, np.dtype(np.int32), np.dtype(np.int64))


class Steps(Body):
    """The body of a chain. Values that several steps read are shown by name."""

    def __str__(self) -> str:
        uses = Counter(x for step in self.steps for x in step.inputs)
        shared = {
            x for x, count in uses.items() if count > 1 and not (x.op.leaf or x.op.constant_fill)
        }

        def text(node: Node, whole: bool = False) -> str:
            if node.op.leaf or (node in shared and not whole):
                return node.name
            if node.op.constant_fill:
                return f"{node.attrs['value']:g}"
            if node.op.kernel == "cast":
                return f"{node.spec.dtype}({text(node.inputs[0])})"
            arguments = [*map(text, node.inputs), *(f"{c:g}" for c in node.op.scalars(node))]
            return f"{node.op.name}({', '.join(arguments)})"

        named = [f"{step.name} = {text(step, True)}" for step in self.steps if step in shared]
        return "; ".join([*named, *map(text, self.outputs)])


class Program(NamedTuple):
    """What the kernel takes of a body."""

    words: list[int]
    numbers: list[float]


class ChainOp(Fused):
    """Elementwise operators over inputs that meet the output by neighbouring axes or not at all."""

    tolerance = 1e-4
    inplace = True

    def __init__(self) -> None:
        super().__init__("pointwise", any_dtype=True)
        self.signature = Signature("*inputs", output=Instance(Node))

    def make(self, inputs: Sequence[Node], attrs: dict[str, Any], name: str | None) -> Node:
        """The node that computes what `output` is of `inputs`."""
        return Node(self, inputs, {"body": steps_between(inputs, attrs["output"])}, name)

    def infer(self, node: Node, *specs: Spec) -> Spec | tuple[Spec, ...]:
        known = node.attrs["body"].outputs[0].spec  # natively no float64, whatever a cast asks for
        return known if known and known.dtype else super().infer(node, *specs)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        """In the dtypes of the body whatever it is given: operators round in between, and where
        values cancel or are compared that shows.
        """
        body: Body = node.attrs["body"]
        given = [a.astype(x.spec.dtype, copy=False) for x, a in zip(body.inputs, arrays)]
        made = np.empty(arrays[-1].shape, body.outputs[0].spec.dtype)
        super().numpy(node, *given, made)
        np.copyto(arrays[-1], made, casting="same_kind")

    def lists(self, node: Node) -> tuple[int]:
        return (len(node.inputs),)

    def scalars(self, node: Node) -> tuple[float | int, ...]:
        program = encode(node.attrs["body"])
        words = program.words + [0] * (INSTRUCTIONS - len(program.words))
        numbers = program.numbers + [0.0] * (NUMBERS - len(program.numbers))
        return (*words, *numbers)


chain_op = ChainOp()


def computes(node: Node) -> bool:
    """Whether a chain may have this node among its own."""
    name, spec = node.op.kernel, node.spec
    if not node.op.elementwise or not isinstance(spec, Spec):
        return False
    dtypes = [x.spec.dtype for x in node.inputs]
    if name == "cast":
        to_float = spec.dtype == FLOAT32 and dtypes[0] in _READ
        to_truth = spec.dtype == BOOL and dtypes[0] in _EXACT
        to_whole = spec.dtype == np.int64 and dtypes[0] == FLOAT32
        fits = to_float or to_truth or to_whole
    elif name == "where" or name in _TESTS or spec.dtype == BOOL:
        fits = spec.dtype in (FLOAT32, BOOL) and all(dtype in _EXACT for dtype in dtypes)
    else:
        fits = spec.dtype == FLOAT32 and all(dtype == FLOAT32 for dtype in dtypes)
    known = name == "cast" or name in _OF_TWO or name in _NUMBER_OF
    return known and fits and all(_number(x) is not None or spreads(x, spec) for x in node.inputs)


def spreads(x: Node, spec: Spec) -> bool:
    """Whether those axes of x that it does not repeat are neighbours in the output."""
    lead = len(spec.shape) - len(x.spec.shape)
    own = (1,) * lead + x.spec.shape
    axes = [k for k, extent in enumerate(spec.shape) if extent != 1]
    met = [own[k] == spec.shape[k] for k in axes]
    first, count = (met.index(True), sum(met)) if any(met) else (0, 0)
    return lead >= 0 and all(met[first : first + count])


def operands(node: Node) -> list[Node | float]:
    """What the instruction of a node reads, in its order: nodes and numbers."""
    numbers = [float(np.float32(c)) for c in node.op.scalars(node)]
    known = [_number(x) for x in node.inputs]
    found: list[Node | float] = [
        x if number is None else number for x, number in zip(node.inputs, known)
    ]
    return [*numbers, *found] if node.op.kernel in _SWAPPED else [*found, *numbers]


def steps_between(inputs: Sequence[Node], output: Node) -> Steps:
    """The nodes from `inputs` to `output` as a body; constants of one number become that number."""
    body = close(inputs, (output,))
    for step in body.steps:
        step.inputs = [_filled(x) if x.op.leaf == "constant" else x for x in step.inputs]
    return Steps(*body)


def encode(body: Body) -> Program:
    """A body as a program. GraphError for one that is too long."""
    steps = [step for step in body.steps if _code(step)]
    reads = [[_shown(x) if isinstance(x, Node) else x for x in operands(step)] for step in steps]
    last_read = {x: k for k, row in enumerate(reads) for x in row if isinstance(x, Node)}
    slots = {x: k for k, x in enumerate(body.inputs)}  # of values that are read again
    free: list[int] = []
    count = len(slots)
    words: list[int] = []
    numbers: list[float] = []
    for k, (step, row) in enumerate(zip(steps, reads)):
        places = [_place(x, steps[k - 1] if k else None, slots, numbers) for x in row]
        nodes = dict.fromkeys(x for x in row if isinstance(x, Node))
        free += [slots.pop(x) for x in nodes if x in slots and last_read[x] == k]
        if last_read.get(step, 0) > k + 1:
            slots[step] = free.pop() if free else count
            count = max(count, slots[step] + 1)
        word = (_code(step), 1 + slots[step] if step in slots else 0, *places)
        words.append(sum(byte << 8 * position for position, byte in enumerate(word)))
    if not 0 < len(words) <= INSTRUCTIONS or len(numbers) > NUMBERS:
        raise GraphError(
            f"pointwise: {len(words)} instructions with {len(numbers)} numbers, expected 1 to "
            f"{INSTRUCTIONS} with at most {NUMBERS}"
        )
    return Program(words, numbers)


def _place(
    x: Node | float, before: Node | None, slots: dict[Node, int], numbers: list[float]
) -> int:
    """Where an instruction finds an operand: 0 for the result of the one before."""
    if isinstance(x, Node):
        return 0 if x is before else 1 + slots[x]
    known = [repr(number) for number in numbers]  # tells -0.0 from 0.0, and NaN from nothing
    if repr(x) not in known:
        numbers.append(x)
    return _FIRST_NUMBER + (known.index(repr(x)) if repr(x) in known else len(known))


def _code(step: Node) -> int:
    """The code of the instruction that a node becomes; 0 if it becomes none."""
    name, dtype = step.op.kernel or "", step.spec.dtype
    if name == "cast":
        name = "truth" if dtype == BOOL else "whole" if dtype == np.int64 else ""
    return _NUMBER_OF.get(_OF_TWO.get(name, name), 0)


def _shown(x: Node) -> Node:
    """The value that a cast to float32 leaves as it is."""
    while x.op.kernel == "cast" and not _code(x):
        x = x.inputs[0]
    return x


def _number(x: Node) -> float | None:
    """The number that a node is everywhere, if it is one of float32."""
    if x.spec.dtype not in _EXACT:
        return None
    if x.op.constant_fill:
        return float(np.float32(x.attrs["value"]))
    if x.op.leaf == "constant" and x.spec.size == 1:
        return float(x.attrs["value"].reshape(()))
    return None


def _filled(x: Node) -> Node:
    """A constant as an operator, which a body can compute."""
    number = _number(x)
    return x if number is None else full_op(x.spec.shape, number, x.spec.dtype, name=x.name)

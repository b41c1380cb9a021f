"""Pointwise fusion: one kernel in place of elementwise operators that feed each other.

Pattern: elementwise nodes of one shape of which only the last value is read elsewhere; the others
never reach memory. That saves a launch for each of the few scalars of a learning rate's formula,
and a trip through memory for each operator on large arrays.

The kernel interprets a program over float32 (src/math/pointwise_vm.h): the body, encoded here.
Truth values are 0 and 1 there, and integers appear as what casts to and from float32 make of them.
Floats of 16 bits are widened as they are read; in between values stay float32 up to a cast to 16
bits or the end of the program, which round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arguments.kinds import Instance
from ..arguments.signature import Signature
from ..dtypes import FLOAT16, STORAGE, bfloat16, is_narrow, rounded
from ..errors import GraphError
from ..graph.lines import attributed_to
from ..graph.node import Node
from ..graph.spec import Spec
from ..ops.comparison import BOOL
from ..ops.leaf import full_op
from ..passes.pipeline import Options, Pass
from ..runtime.interface import interface
from ..runtime.target import Target
from .shared.body import Body, Fused, close, computed
from .shared.rewrite import Graph, exchange

# At most, of a program.
INSTRUCTIONS = interface.limits["pointwise_instructions"]
INPUTS = interface.limits["pointwise_inputs"]
IMMEDIATES = interface.limits["pointwise_immediates"]
_Instruction, _Bytecode = map(interface.struct, ("Instruction", "Bytecode"))
_FIRST_IMMEDIATE = interface.limits["pointwise_first_immediate"]
_OPCODE_OF = interface.opcodes  # by names of kernels, and kinds of casts
# Operators between an array and a scalar that are others with an immediate as an operand; the
# last three have it first.
_OF_TWO = {
    "add_const": "add", "mul_const": "mul", "div_const": "div", "rsub_const": "sub",
    "rdiv_const": "div", "rpow_const": "pow",
}  # fmt: skip
_SWAPPED = ("rsub_const", "rdiv_const", "rpow_const")
_CASTS = (  # that are instructions, by the dtype they lead to
    (BOOL, "truth"), (np.dtype(np.int64), "trunc_to_int64"), (bfloat16, "round_to_bfloat16"),
    (FLOAT16, "round_to_float16"),
)  # fmt: skip
_TESTS = ("equal", "not_equal", "less", "less_equal")
_EXACT = (*STORAGE, BOOL, np.dtype(np.uint8))  # dtypes whose values float32 has exactly
_READ = (*_EXACT, np.dtype(np.int32), np.dtype(np.int64))
_WRITTEN = (*STORAGE, BOOL)


class PointwiseBody(Body):
    """The body of a pointwise fusion. Values that several steps read are shown by name."""

    def __str__(self) -> str:
        uses = Counter(x for step in self.steps for x in step.inputs)
        shared = {
            x for x, count in uses.items() if count > 1 and not (x.op.leaf or x.op.constant_fill)
        }

        def text(node: Node, full: bool = False) -> str:
            if node.op.leaf or (node in shared and not full):
                return node.name
            if node.op.constant_fill:
                return f"{node.attrs['value']:g}"
            if node.op.kernel == "cast":
                return f"{node.spec.dtype}({text(node.inputs[0])})"
            arguments = [*map(text, node.inputs), *(f"{c:g}" for c in node.op.scalars(node))]
            return f"{node.op.name}({', '.join(arguments)})"

        named = [f"{step.name} = {text(step, True)}" for step in self.steps if step in shared]
        return "; ".join([*named, *map(text, self.outputs)])


class PointwiseOp(Fused):
    """Elementwise operators over inputs whose unbroadcast axes are neighbors in the output."""

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
        """As the kernel computes, whatever it is given: operators round in between, and where
        values cancel or are compared that shows.
        """
        body: Body = node.attrs["body"]
        specs = [computed(x.spec) for x in (*body.inputs, *body.outputs)]
        given = [a.astype(spec.dtype, copy=False) for spec, a in zip(specs, arrays[:-1])]
        made = np.empty(arrays[-1].shape, specs[-1].dtype)
        super().numpy(node, *given, made)
        np.copyto(arrays[-1], made, casting="same_kind")

    def lists(self, node: Node) -> tuple[int]:
        return (len(node.inputs),)

    def scalars(self, node: Node) -> tuple[Any]:
        return (encode(node.attrs["body"]),)


pointwise_op = PointwiseOp()


def computes(node: Node, target: Target) -> bool:
    """True for a node that a pointwise program of a target can compute."""
    name, spec = node.op.kernel, node.spec
    if not node.op.elementwise or not isinstance(spec, Spec):
        return False
    dtypes = [x.spec.dtype for x in node.inputs]
    if name == "cast":
        to_float = spec.dtype in STORAGE and dtypes[0] in _READ
        to_truth = spec.dtype == BOOL and dtypes[0] in _EXACT
        to_int = spec.dtype == np.int64 and dtypes[0] in STORAGE
        fits = to_float or to_truth or to_int
    elif name == "where" or name in _TESTS or spec.dtype == BOOL:
        fits = spec.dtype in _WRITTEN and all(dtype in _EXACT for dtype in dtypes)
    else:
        fits = spec.dtype in STORAGE and all(dtype in STORAGE for dtype in dtypes)
    fits &= all(target.has("pointwise", d) for d in (spec.dtype, *dtypes) if is_narrow(d))
    known = name == "cast" or name in _OF_TWO or name in _OPCODE_OF
    spread = all(_immediate(x) is not None or spreads(x, spec) for x in node.inputs)
    return known and fits and spread


def spreads(x: Node, spec: Spec) -> bool:
    """True where those axes of x that it does not repeat are neighbors in the output."""
    lead = len(spec.shape) - len(x.spec.shape)
    own = (1,) * lead + x.spec.shape
    axes = [k for k, extent in enumerate(spec.shape) if extent != 1]
    met = [own[k] == spec.shape[k] for k in axes]
    first, count = (met.index(True), sum(met)) if any(met) else (0, 0)
    return lead >= 0 and all(met[first : first + count])


def operands(node: Node) -> list[Node | float]:
    """The operands of a node's instruction, in its order: nodes and immediates."""
    immediates = [float(np.float32(c)) for c in node.op.scalars(node)]
    known = [_immediate(x) for x in node.inputs]
    found: list[Node | float] = [
        x if value is None else value for x, value in zip(node.inputs, known)
    ]
    return [*immediates, *found] if node.op.kernel in _SWAPPED else [*found, *immediates]


def steps_between(inputs: Sequence[Node], output: Node) -> PointwiseBody:
    """The nodes from `inputs` to `output` as a body; constants of one element become
    immediates."""
    body = close(inputs, (output,))
    for step in body.steps:
        step.inputs = [_filled(x) if x.op.leaf == "constant" else x for x in step.inputs]
    return PointwiseBody(*body)


def encode(body: Body) -> Any:
    """A body as the kernel's argument. GraphError for one that is too long."""
    steps = [step for step in body.steps if _opcode(step)]
    if len(steps) > 1 and steps[-1] is body.outputs[0] and _rounds(steps[-1]):
        steps.pop()  # the kernel rounds what it stores
    reads = [[_uncast(x) if isinstance(x, Node) else x for x in operands(step)] for step in steps]
    last_read = {x: k for k, row in enumerate(reads) for x in row if isinstance(x, Node)}
    slots = {x: k for k, x in enumerate(body.inputs)}  # of values that are read again
    free: list[int] = []
    count = len(slots)
    code: list[Any] = []
    immediates: list[float] = []
    for k, (step, row) in enumerate(zip(steps, reads)):
        found = [_where(x, steps[k - 1] if k else None, slots, immediates) for x in row]
        nodes = dict.fromkeys(x for x in row if isinstance(x, Node))
        free += [slots.pop(x) for x in nodes if x in slots and last_read[x] == k]
        if last_read.get(step, 0) > k + 1:
            slots[step] = free.pop() if free else count
            count = max(count, slots[step] + 1)
        to = 1 + slots[step] if step in slots else 0
        code.append(_Instruction(opcode=_opcode(step), destination=to, operands=tuple(found)))
    if not 0 < len(code) <= INSTRUCTIONS or len(immediates) > IMMEDIATES:
        raise GraphError(
            f"pointwise: {len(code)} instructions with {len(immediates)} immediates, expected "
            f"1 to {INSTRUCTIONS} with at most {IMMEDIATES}"
        )
    return _Bytecode(code=tuple(code), immediates=tuple(immediates))


def _where(
    x: Node | float, before: Node | None, slots: dict[Node, int], immediates: list[float]
) -> int:
    """Where an instruction finds an operand: 0 for the result of the one before."""
    if isinstance(x, Node):
        return 0 if x is before else 1 + slots[x]
    known = [repr(value) for value in immediates]  # tells -0.0 from 0.0, and NaN from nothing
    if repr(x) not in known:
        immediates.append(x)
    return _FIRST_IMMEDIATE + (known.index(repr(x)) if repr(x) in known else len(known))


def _opcode(step: Node) -> int:
    """The opcode of the instruction that a node becomes; 0 if it becomes none."""
    name, dtype = step.op.kernel or "", step.spec.dtype
    if name == "cast":
        name = next((name for to, name in _CASTS if to == dtype), "")
    return _OPCODE_OF.get(_OF_TWO.get(name, name), 0)


def _rounds(step: Node) -> bool:
    """True for a cast to floats of 16 bits."""
    return step.op.kernel == "cast" and is_narrow(step.spec.dtype)


def _uncast(x: Node) -> Node:
    """The value that a cast to float32 leaves as it is."""
    while x.op.kernel == "cast" and not _opcode(x):
        x = x.inputs[0]
    return x


def _immediate(x: Node) -> float | None:
    """The one value that all elements of a node have, if it is known and one of float32."""
    if x.spec.dtype not in _EXACT:
        return None
    if x.op.constant_fill:
        value = x.attrs["value"]
        return float(np.float32(rounded(value, x.spec.dtype) if is_narrow(x.spec.dtype) else value))
    if x.op.leaf == "constant" and x.spec.size == 1:
        return float(x.attrs["value"].reshape(()))
    return None


def _filled(x: Node) -> Node:
    """A constant as an operator, which a body can compute."""
    value = _immediate(x)
    return x if value is None else full_op(x.spec.shape, value, x.spec.dtype, name=x.name)


# ---- the pattern ----

_SMALL = 1 << 20  # bytes that are not worth the care for how long they live
Reads = tuple[list[Node], set[str]]  # operands of a program: nodes, and immediates
_NEAR = 2 * INSTRUCTIONS  # nodes that are looked at to tell whether a value lives longer


def fuse(fetches: Sequence[Node], options: Options) -> list[Node]:
    """The fetches over a graph with elementwise operators fused. The graph, simplified for native
    devices, must be the executor's own: its nodes change.
    """
    graph = Graph(fetches)
    replaced = {}
    for group in _groups(graph, options.target):
        last = group.last
        with attributed_to(last):
            made = pointwise_op(*group.inputs, output=last, name=last.name)
            made.stand_for(last)
            replaced[last] = made
    return exchange(fetches, replaced)


class _Group:
    """Nodes that become one; found from the last to the first."""

    def __init__(self, last: Node) -> None:
        self.last = last
        self.nodes: set[Node] = set()
        self.inputs: list[Node] = []
        self.immediates: set[str] = set()
        self.add(last, self.reads_with(last))

    def add(self, node: Node, reads: Reads) -> None:
        """Takes a node in; `reads` are those that it then has."""
        self.nodes.add(node)
        self.inputs, self.immediates = reads

    def has_room(self, reads: Reads) -> bool:
        """True where one more node fits, with which it reads this."""
        inputs, immediates = reads
        fits = len(inputs) <= INPUTS and len(immediates) <= IMMEDIATES
        return fits and len(self.nodes) < INSTRUCTIONS

    def reads_with(self, node: Node) -> Reads:
        """The operands of the group with this node in it."""
        read = operands(node)
        found = dict.fromkeys([*self.inputs, *(x for x in read if isinstance(x, Node))])
        found.pop(node, None)
        return list(found), self.immediates | {repr(x) for x in read if isinstance(x, float)}


def _groups(graph: Graph, target: Target) -> list[_Group]:
    """Groups of two nodes or more that read something. A node joins the group that all its users
    belong to; so nothing between two nodes of a group is outside of it, and no cycle arises.
    """
    group_of: dict[Node, _Group] = {}
    for node in reversed(graph.order):
        if not computes(node, target):
            continue
        group = _only_group(graph, group_of, node)
        reads = group.reads_with(node) if group is not None else ([], set())
        if group is not None and group.has_room(reads) and not _keeps_more(graph, group, node):
            group.add(node, reads)
            group_of[node] = group
        elif node.spec.dtype in _WRITTEN:
            group_of[node] = _Group(node)
    found = dict.fromkeys(group_of.values())
    return [group for group in found if len(group.nodes) > 1 and group.inputs]


def _only_group(graph: Graph, group_of: dict[Node, _Group], node: Node) -> _Group | None:
    """The group of all users of a node, where its value can stay inside."""
    groups = {group_of.get(user) for user in graph.users[node]}
    group = groups.pop() if len(groups) == 1 else None
    if group is None or graph.is_fetched(node) or group.last.spec.shape != node.spec.shape:
        return None
    if node.spec.dtype in _WRITTEN:
        return group
    converted = all(user.spec.dtype in STORAGE for user in graph.users[node])  # casts
    return group if converted else None


def _keeps_more(graph: Graph, group: _Group, node: Node) -> bool:
    """True where memory would be held for longer: a node reads more bytes than it makes, and others
    run between it and the end of the group.
    """
    own, inside = node.spec.nbytes, {node, *group.nodes}
    read = {x for x in node.inputs if not x.op.leaf and x not in inside}
    if own <= _SMALL or sum(x.spec.nbytes for x in read) <= own:
        return False
    first, last = graph.position[node], graph.position[group.last]
    between = graph.order[first : min(last, first + _NEAR)]
    return last > first + _NEAR or any(not (x in inside or x.op.leaf or x.op.view) for x in between)


# Under DLSYS_DEBUG=nan operators stay apart, so that it can name one. No bits of
# float32 change.
FUSION = Pass(
    "pointwise",
    fuse,
    position=60,
    needs=("pointwise",),
    when=lambda options: not options.one_by_one,
)

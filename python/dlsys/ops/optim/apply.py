"""The rules of optimizers as operators: one for a single parameter, which graphs are built of, and
one for any number, which executors make of these.

What comes before a rule's formula is the same for all:

g = clip(scale · g, -clip, clip) + l2 · p;  p -= lr · decay · p

with `scale` a node of one element, and the attributes `clip` (of single elements), `l2` (the
gradient of an L2 penalty) and `decay` (decoupled weight decay, Loshchilov and Hutter, 2019). With
`count`, a node of one int64 that tells how many runs came before, a rule acts in the last of every
`every` runs only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...arguments.kinds import Bool, Input, Int, Kind, Number
from ...arguments.signature import Signature
from ...dtypes import FLOAT16, FLOAT32, is_narrow, widened
from ...graph.node import Node, Op
from ...graph.spec import Spec, describe, floating, promote
from ...runtime.interface import interface
from ..elementwise import cast_like_op
from .assign import check_count, check_parameter
from .rules import RULES, Array, Attrs, Now, Rule, descend

__all__ = ["UPDATES", "global_norm_op"]

_CHUNK = 32768  # elements updated at a time on numpy, so that scratch stays in the cache
_SHARED = {"clip": math.inf, "l2": 0.0, "decay": 0.0, "every": 1}  # attributes of every rule
_OPTIONS = ("step", "count", "scale")  # inputs that may be left out
_KINDS: dict[str, dict[str, Any]] = {  # ranges of attributes
    **dict.fromkeys(("beta1", "beta2", "alpha", "keep"), {"low": 0, "high": 1}),
    **dict.fromkeys(("momentum", "eps", "clip"), {"low": 0}),
}
_Options = interface.struct("UpdateOptions")
_UNTREATED = (None, math.inf, 0.0, 0.0)  # scale, clip, l2 and lr · decay that change nothing


class RuleOp(Op):
    """A rule applied to one parameter, or to several that share everything else.

    Inputs: the parameters, then slot after slot for all of them, then the gradients, the rate (one
    element) if the rule takes one, and then those of step, count and scale that are given. The
    values are the parameters' new ones.
    """

    signature: Signature
    autocast = "reads"

    def __init__(self, rule: Rule, count: int = 1) -> None:
        self.rule = rule
        self.name = self.kernel = rule.name
        self.slots = rule.slots
        self.outputs = count
        self._defaults = {**_SHARED, **rule.attributes}
        self._states = count * (1 + len(rule.slots))
        self.writes = tuple(range(self._states))
        if not rule.beside:
            self.gradient_inputs = tuple(range(self._states, self._states + count))
        self._plain = self._states + count + rule.takes_rate  # inputs before step, count and scale
        self.any_dtype = (self._plain, self._plain + 1)
        self.signature = _signature(rule, count)
        self.doc = inspect.cleandoc(rule.__doc__ or "")

    def __call__(self, *inputs: Any, **attrs: Any) -> Node:
        """A node that updates; a step may also follow the rate. SignatureError where the call does
        not fit the signature.
        """
        values = self.signature.arguments(self.name, inputs, attrs)
        name = values.pop("name")
        nodes = [values.pop(key) for key in self.signature.inputs]
        given = tuple(key for key, x in zip(_OPTIONS, nodes[self._plain :]) if x is not None)
        if given:
            values["given"] = given
        return Node(self, [x for x in nodes if x is not None], values, name)

    def infer(self, node: Node, *specs: Spec) -> Any:
        for target in node.inputs[: self._states]:
            check_parameter(node, target)
        n = self.outputs
        shapes = [specs[k].shape for k in range(self._states + n)]
        options = dict(zip(node.attrs.get("given", ()), specs[self._plain :]))
        scalars = [specs[self._plain - 1]] if self.rule.takes_rate else []
        scalars += [options["scale"]] if "scale" in options else []
        if any(shape != shapes[k % n] for k, shape in enumerate(shapes)) or any(
            spec.size != 1 for spec in scalars
        ):
            raise node.error(
                "expected states and gradient of one shape and a scalar rate, got "
                f"{describe(node, specs)}"
            )
        for spec in scalars:
            if is_narrow(spec.dtype):
                raise node.error(f"expected a rate of float32, got {spec.dtype}")
        for what in ("step", "count"):
            if what in options:
                check_count(node, what, options[what])
        for k in range(n):
            self._check_storage(node, k, specs)
        return specs[0] if n == 1 else tuple(specs[:n])

    def _check_storage(self, node: Node, k: int, specs: tuple[Spec, ...]) -> None:
        """Refuses dtypes of parameter k, of its slots and gradient, that no kernel is for."""
        beside, gradient = self.rule.beside, self._states + k
        for position in range(k, self._states + self.outputs, self.outputs):
            dtype = specs[position].dtype
            if not is_narrow(dtype):
                continue
            if position == k:
                fits = not beside
            else:
                fits = position == gradient and (beside or specs[k].dtype in (dtype, FLOAT32))
            if not fits:
                raise node.error(
                    f"{node.inputs[position].name} is {dtype}, expected float32: slots, sums and "
                    "averages are, and gradients are so or of their parameter's dtype"
                )

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        size = max(spec.size for spec in inputs[: self.outputs])
        undivided = self.outputs == 1 and size <= _CHUNK
        shape = inputs[0].shape if undivided else (min(_CHUNK, size),)
        treated = node.attrs.keys() & {"clip", "l2"} or "scale" in node.attrs.get("given", ())
        count = (2 if treated else 1) + 2 * _is_half(inputs[0].dtype, inputs[self._states].dtype)
        return [Spec(shape, widened(inputs[0].dtype))] * count

    def numpy(self, node: Node, *arrays: Array) -> None:
        attrs, rule = self._defaults | node.attrs, self.rule
        given = attrs.get("given", ())
        end = self._plain + len(given)
        options = {key: x.item() for key, x in zip(given, arrays[self._plain : end])}
        run, every = options.get("count"), attrs["every"]
        if run is not None and not rule.every_run and (run + 1) % every:
            return
        lr = arrays[self._plain - 1].item() if rule.takes_rate else 0.0
        now = Now(lr, options.get("step"), run is not None and run % every == 0)
        shrink = lr * attrs["decay"] if attrs["decay"] else 0.0  # the rate may be infinite
        treatment = (options.get("scale"), attrs["clip"], attrs["l2"], shrink)
        plain = treatment == _UNTREATED
        for k in range(self.outputs):
            own = arrays[k : self._states + self.outputs : self.outputs]
            for states, g, s in _parts(own, arrays[end:]):
                stored = states[0]
                if _is_half(stored.dtype, g.dtype):
                    *s, p, wide = s
                    np.copyto(p, stored)
                    np.copyto(wide, g)
                    states, g = [p, *states[1:]], wide
                if not plain:
                    g = _treated(g, states[0], s, treatment)
                rule.apply(states, g, s[0], attrs, now)
                if states[0] is not stored:
                    np.copyto(stored, states[0], casting="same_kind")

    def counter(self, node: Node) -> Node | None:
        """The node that counts runs, of an update in the last of every so many runs only."""
        given = node.attrs.get("given", ())
        return node.inputs[self._plain + given.index("count")] if "count" in given else None

    def scalars(self, node: Node) -> tuple[Any]:
        return (options_of(self.rule, node.attrs),)

    def lists(self, node: Node) -> tuple[int, ...]:
        given = node.attrs.get("given", ())
        options = ("step" in given, "count" in given, "scale" in given)
        return self._states, self.outputs, int(self.rule.takes_rate), *map(int, options)

    def merge_key(self, node: Node) -> Hashable | None:
        if self.outputs > 1:
            return None
        attrs = tuple(sorted(node.attrs.items()))
        shared = node.inputs[self._states + 1 :]
        dtypes = node.inputs[0].spec.dtype, node.inputs[self._states].spec.dtype
        return self, dtypes, attrs, *map(id, shared)

    def merged(self, nodes: Sequence[Node]) -> Node:
        own = self._states + 1  # inputs that each node has for itself
        inputs = [node.inputs[k] for k in range(own) for node in nodes]
        inputs += nodes[0].inputs[own:]
        name = f"{self.name} of {len(nodes)}"
        return Node(several(self, len(nodes)), inputs, nodes[0].attrs, name)

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return self.rule.operations * sum(spec.size for spec in inputs[: self.outputs])


def _signature(rule: Rule, count: int) -> Signature:
    """Of a rule for so many parameters: what is not given is left out."""
    own = ["parameter", *rule.slots, "gradient"]
    names = own if count == 1 else [f"{name}{k}" for name in own for k in range(count)]
    names = [*names, *["rate"] * rule.takes_rate]
    step = Input() if rule.needs_step else Input(None)
    kinds: dict[str, Kind] = {"step": step, "count": Input(None), "scale": Input(None)}
    for key, value in (rule.attributes | _SHARED).items():
        more: dict[str, Any] = {} if value is None else {"default": value, "omitted": True}
        if key == "every":
            kinds[key] = Int(low=1, **more)
        elif isinstance(value, bool):
            kinds[key] = Bool(**more)
        else:
            kinds[key] = Number(**_KINDS.get(key, {}), **more)
    return Signature(*names, "*", **kinds)


def options_of(rule: Rule, attrs: Attrs) -> Any:
    """The argument of a rule's kernels that is the same in every run."""
    attrs = _SHARED | rule.attributes | attrs
    constants = rule.constants(attrs)
    ordered = tuple(constants[name] for name in interface.constants[rule.name])
    return _Options(**{name: attrs[name] for name in _SHARED}, constants=ordered)


class GlobalNormOp(Op):
    """The root of the sum of the squares of all elements of all inputs, as one number."""

    name = kernel = "global_norm"
    autocast = "reads"
    signature = Signature("*arrays")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        narrow = [spec for spec in specs if is_narrow(spec.dtype)]
        if len({spec.dtype for spec in narrow}) > 1:
            raise node.error("expected arrays of one storage type of 16 bits, got two")
        wide = [spec._replace(dtype=widened(spec.dtype)) for spec in specs]
        return Spec((), floating(promote(node, *wide)), any(spec.declared for spec in specs))

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        size = max(spec.size for spec in inputs)
        return [Spec((min(_CHUNK, size),), np.dtype(np.float64))]

    def numpy(self, node: Node, *arrays: Array) -> None:
        *inputs, scratch, y = arrays
        total = 0.0
        for x in inputs:
            for _, part, (s,) in _parts([x], [scratch]):
                np.multiply(part, part, out=s, dtype=np.float64)
                total += float(s.sum())
        y[()] = math.sqrt(total)

    def lists(self, node: Node) -> tuple[int]:
        return (len(node.inputs),)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        share = output_grad / node
        return [x * cast_like_op(share, x) for x in node.inputs]

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 2 * sum(spec.size for spec in inputs)


@lru_cache
def several(op: RuleOp, count: int) -> RuleOp:
    """The operator of the same rule for `count` parameters at once."""
    return RuleOp(op.rule, count)


def _is_half(*dtypes: Any) -> bool:
    """True where numpy, too, holds some of these in 16 bits."""
    return FLOAT16 in dtypes


def _treated(g: Array, p: Array, scratch: Sequence[Array], treatment: tuple) -> Array:
    """The gradient as the rule gets it; the parameter shrinks."""
    scale, clip, l2, shrink = treatment
    if scale is not None:
        g = np.multiply(g, scale, out=scratch[1])
    if clip < math.inf:
        g = np.clip(g, -clip, clip, out=scratch[1])
    if l2:
        g = np.add(g, np.multiply(p, l2, out=scratch[0]), out=scratch[1])
    if shrink:
        descend(p, p, shrink, scratch[0])
    return g


def _parts(
    own: Sequence[Array], scratch: Sequence[Array]
) -> Iterator[tuple[Sequence[Array], Array, Sequence[Array]]]:
    """States, the gradient and scratch of its shape, complete, or as flat parts of large ones."""
    if own[0].shape == scratch[0].shape:
        yield own[:-1], own[-1], scratch
        return
    flat = [array.reshape(-1) for array in own]
    for start in range(0, flat[0].size, _CHUNK):
        *states, g = [array[start : start + _CHUNK] for array in flat]
        yield states, g, [s[: g.size] for s in scratch]


global_norm_op = GlobalNormOp()
# By the names of their rules. Each has a name of its own, too, such as `sgd_update_op`.
UPDATES = {name: RuleOp(rule) for name, rule in RULES.items()}
globals().update({f"{name}_op": op for name, op in UPDATES.items()})
__all__ += [f"{name}_op" for name in UPDATES]

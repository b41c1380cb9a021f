"""The table of rules: operator → function that emits ONNX nodes, and why others have none."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from ... import ops
from ...fusion.shared.body import Fused
from ...graph.node import Op

Emit = Callable[..., Any]
NO_RULE = "there is no rule for it"


class Rule(NamedTuple):
    """emit: the function. targets: the ONNX operators that it writes, as the table shows them;
    "" where it builds operators of ours that have rules.
    """

    emit: Emit
    targets: str


RULES: dict[Op, Rule] = {}
REFUSED: dict[Op, str] = {}


@lru_cache(maxsize=1)
def operators() -> dict[str, list[Op]]:
    """The operators of `dlsys.ops` by their names, which some share with their kernels."""
    found: dict[str, dict[int, Op]] = {}
    for _, name, _ in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        for value in vars(import_module(name)).values():
            for op in value.values() if isinstance(value, dict) else (value,):
                if isinstance(op, Op):
                    found.setdefault(op.name, {})[id(op)] = op
    return {name: list(same.values()) for name, same in sorted(found.items())}


def rule(names: str, targets: str = "") -> Callable[[Emit], Emit]:
    """Enters a function as the rule of the operators of these names, which blanks part."""

    def enter(emit: Emit) -> Emit:
        for name in names.split():
            for op in operators()[name]:
                RULES[op] = Rule(emit, targets)
        return emit

    return enter


def refuse(names: str, reason: str) -> None:
    """Enters why the operators of these names have no ONNX form."""
    for name in names.split():
        for op in operators()[name]:
            REFUSED[op] = reason


def refusal_of(op: Op) -> str | None:
    """Why an operator has no ONNX form, None for one that may have."""
    if op in REFUSED:
        return REFUSED[op]
    if op.writes or not op.outputs:
        return "it updates state, and an ONNX graph has none"
    if op.random:
        return "its numbers are a function of seed and step, and those of ONNX's operators are not"
    if isinstance(op, Fused):
        return "a fusion makes it; export the graph as it was built"
    return None


def is_composed(op: Op) -> bool:
    """True for an operator whose `compose` gives its values by others."""
    return getattr(type(op), "compose", None) is not getattr(Op, "compose", None)

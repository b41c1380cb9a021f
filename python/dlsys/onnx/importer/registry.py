"""The table of ONNX operators: a rule on Nodes and Tensors, a rule on numpy arrays, or both.

A graph rule builds its result from `dlsys.functional`, so that it runs on every device and has a
gradient. A host rule computes with numpy; it serves constants, dtypes that devices lack, and
operators that no kernel computes. Both take the call and its inputs, None for one left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Function = Callable[..., Any]


class Unfit(Exception):
    """A graph rule does not take these inputs or attributes: the host rule does."""


class Rule(NamedTuple):
    """How an operator is computed.

    graph: on Nodes and Tensors. kinds: the kinds of dtypes that it takes. known: the inputs that it
    takes as arrays. host: on arrays. dynamic: the shape of the host's result depends on values.
    nodes: a function that runs subgraphs or takes sequences, given values as they are; where there
    is a host rule too, it may find them unfit.
    """

    graph: Function | None = None
    kinds: str = ""
    known: tuple[int, ...] = ()
    host: Function | None = None
    dynamic: bool = False
    nodes: Function | None = None


RULES: dict[tuple[str, str], Rule] = {}
Decorator = Callable[[Function], Function]


def _add(names: str, domain: str, **fields: Any) -> None:
    for name in names.split():
        RULES[domain, name] = RULES.get((domain, name), Rule())._replace(**fields)


def graph(names: str, kinds: str = "f", known: tuple[int, ...] = (), domain: str = "") -> Decorator:
    """Registers a graph rule for operators, named with spaces between them."""

    def register(function: Function) -> Function:
        _add(names, domain, graph=function, kinds=kinds, known=known)
        return function

    return register


def host(names: str, dynamic: bool = False, domain: str = "") -> Decorator:
    """Registers a host rule for operators."""

    def register(function: Function) -> Function:
        _add(names, domain, host=function, dynamic=dynamic)
        return function

    return register


def values(names: str, domain: str = "") -> Decorator:
    """Registers a rule that takes its inputs as they are: sequences, subgraphs, shapes."""

    def register(function: Function) -> Function:
        _add(names, domain, nodes=function)
        return function

    return register

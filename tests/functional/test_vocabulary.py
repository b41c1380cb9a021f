"""Each public operator has its name in dlsys.functional: none is forgotten, none has two."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

from dlsys import functional, ops
from dlsys.graph.node import Op

FILES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(ops.__path__, "dlsys.ops.")
]
VOCABULARY: dict[str, Callable[..., Any]] = {
    name: value
    for name, value in vars(functional).items()
    if isinstance(value, types.FunctionType) and not name.startswith("_")
}


def public() -> dict[int, tuple[str, Any]]:
    """Operators, and functions that build nodes, by identity: with the first of their names."""
    found: dict[int, tuple[str, Any]] = {}
    for module in FILES:
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            builds = "Node" in str(getattr(value, "__annotations__", {}).get("return", ""))
            if isinstance(value, Op) or (inspect.isfunction(value) and builds):
                found.setdefault(id(value), (name, value))
    return found


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code and those of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def named(function: types.FunctionType) -> list[Any]:
    """What a function names in its body, also as `module.name`, and what it closes over."""
    inner = inspect.unwrap(function)
    assert isinstance(inner, types.FunctionType)
    names = {name for code in codes(inner.__code__) for name in code.co_names}
    places = [inner.__globals__]
    places += [vars(v) for k, v in inner.__globals__.items() if k in names and inspect.ismodule(v)]
    values = [place[name] for place in places for name in names if name in place]
    return values + [cell.cell_contents for cell in inner.__closure__ or ()]


def reached(function: types.FunctionType, stop: dict[int, Any]) -> dict[int, Any]:
    """What a function of ours names, and what its helpers do: those of `stop` are none."""
    found: dict[int, Any] = {}
    left: list[Any] = [function]
    while left:
        for value in named(left.pop()):
            ours = str(getattr(value, "__module__", "")).startswith("dlsys.")
            if id(value) in found or not ours:
                continue
            if isinstance(value, Op) or id(value) in stop:
                found[id(value)] = value
            elif isinstance(value, types.FunctionType):
                found[id(value)] = value
                left.append(value)
    return found


def operators(function: types.FunctionType) -> dict[int, Any]:
    """The operators that a function reaches through any others, with the public ones of these."""
    known = public()
    found = reached(function, {})
    return {key: value for key, value in found.items() if isinstance(value, Op) or key in known}


def outside(name: str, value: Any) -> bool:
    """True for what is no function of values: sources, updates and groups, gradients, and what its
    trait `vocabulary` keeps out.
    """
    if "gradient" in name:
        return True
    if isinstance(value, types.FunctionType):
        found = operators(value).values()
        return bool(found) and all(isinstance(op, Op) and outside("", op) for op in found)
    return bool(not value.vocabulary or value.leaf or value.writes or value.outputs == 0)


class Vocabulary(unittest.TestCase):
    def test_every_public_operator_has_a_name(self) -> None:
        known = public()
        self.assertGreater(len(known), 130)
        direct: dict[int, Any] = {}
        for function in VOCABULARY.values():
            direct |= reached(function, known)
        within = dict(direct)
        for value in direct.values():
            if isinstance(value, types.FunctionType):
                within |= reached(value, {})
        for key, (name, value) in known.items():
            if key in direct or outside(name, value):
                continue
            with self.subTest(name=name):
                # The course's form of a function computes with the operators of that function.
                self.assertIs(type(value), types.FunctionType, "no function names it")
                self.assertLessEqual(operators(value).keys(), within.keys(), "no function is it")

    def test_none_has_two_names(self) -> None:
        known = public()
        names: dict[int, list[str]] = {}
        for name, function in VOCABULARY.items():
            found = reached(function, known)
            direct = [key for key in found if key in known and not outside(*known[key])]
            helped = any(getattr(value, "__name__", "").startswith("_") for value in found.values())
            if len(direct) == 1 and not helped:
                names.setdefault(direct[0], []).append(name)
        self.assertGreater(len(names), 60)
        twice = {known[key][0]: both for key, both in names.items() if len(both) > 1}
        self.assertEqual(twice, {})

    def test_the_files_say_what_they_have(self) -> None:
        for module in (m for m in vars(functional).values() if inspect.ismodule(m)):
            for name in getattr(module, "__all__", ()):
                if name in VOCABULARY:
                    self.assertIs(vars(module)[name], VOCABULARY[name])


if __name__ == "__main__":
    unittest.main()

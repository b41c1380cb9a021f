"""What is public: the names that users import, by module. The reference shows them, and tests hold
that it shows all of them and that they are documented.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

# The public modules, and the files of which they show what they import; all below a package.
MODULES: dict[str, tuple[str, ...]] = {
    "dlsys": ("dlsys.eager", "dlsys.inference"),
    "dlsys.functional": ("dlsys.functional",),
    "dlsys.nn": ("dlsys.nn",),
    "dlsys.optim": ("dlsys.optim",),
    "dlsys.dist": ("dlsys.dist",),
    "dlsys.init": ("dlsys.init",),
    "dlsys.data": ("dlsys.data",),
    "dlsys.data.text": ("dlsys.data.text",),
    "dlsys.train": ("dlsys.train",),
    "dlsys.viz": ("dlsys.viz",),
    "dlsys.profile": ("dlsys.profile",),
    "dlsys.onnx": ("dlsys.onnx",),
    "dlsys.autodiff": ("dlsys.ops", "dlsys.graph", "dlsys.executor"),
    "dlsys.ndarray": ("dlsys.ndarray", "dlsys.runtime.device"),
    "dlsys.gpu_op": ("dlsys.gpu_op",),
    "dlsys.gpumat": ("dlsys.gpumat",),
    "dlsys.micrograd": ("dlsys.micrograd",),
    "dlsys.errors": ("dlsys.errors",),
}
# What the engine calls, and notebooks, rather than users.
HIDDEN = {
    "dlsys.init": ("RngKind",),
    "Tensor": ("of", "holding", "refresh", "forget", "facts", "ndarray"),
    "NDArray": ("facts", "from_block", "handle"),
}
PARTS = ("Values", "HostNumbers", "Filtered")  # bases that stand for nothing of their own
SHOWN = ("__call__",)  # methods that an entry shows though their names are not public


def value(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def home(module: str, name: str) -> str:
    """The module that defines what a name stands for."""
    return getattr(value(module, name), "__module__", None) or ""


def names(module: str, files: tuple[str, ...] | None = None) -> list[str]:
    """The public names of a module: its functions, operators and classes; of some files alone in
    the order of these and as they stand there.
    """
    found = import_module(module)
    hidden = HIDDEN.get(module, ())
    homes = {
        name: home(module, name)
        for name in getattr(found, "__all__", None) or vars(found)
        if name[0] != "_" and name not in hidden and callable(value(module, name))
    }
    if files is None:
        below = tuple(f"{file}." for file in MODULES[module])
        return [name for name, at in homes.items() if f"{at}.".startswith(below)]
    return [n for file in files for n in sorted(homes, key=_position(file)) if homes[n] == file]


def files(module: str, chosen: list[str]) -> tuple[str, ...] | None:
    """The files of a module by their names in it; None, for all, where none are chosen."""
    base = "dlsys" if module == "dlsys.autodiff" else module
    return tuple(f"{base}.{file}" for file in chosen) or None


def _position(file: str) -> Callable[[str], int]:
    found = import_module(file)
    order = [*(getattr(found, "__all__", None) or vars(found))]
    return lambda name: order.index(name) if name in order else len(order)


def members(cls: type) -> list[str]:
    """The public methods and properties that a class defines, with those of its PARTS. One that
    overrides another and says nothing of its own is left to that.
    """
    kinds = (property, classmethod, staticmethod)
    bases = [base for base in cls.__mro__ if base is cls or base.__name__ in PARTS]
    found = {name: value for base in reversed(bases) for name, value in vars(base).items()}
    return [
        name
        for name, value in found.items()
        if (name in SHOWN or not name.startswith("_"))
        and name not in HIDDEN.get(cls.__name__, ())
        and (inspect.isfunction(value) or isinstance(value, kinds))
        and (value.__doc__ or not hasattr(super(cls, cls), name))
    ]


def methods() -> list[str]:
    """The functions that Tensors and nodes have as methods too."""
    found = import_module("dlsys.functional.methods").METHODS
    return sorted({name for name in found if name in names("dlsys.functional")})


def parameters(value: Any) -> list[str]:
    """The names of what something is called with."""
    if inspect.isclass(value):
        plain = value.__init__ is object.__init__ and not issubclass(value, tuple)
        if plain or getattr(value, "_is_protocol", False):
            return []
    try:
        return [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]
    except (TypeError, ValueError):
        return []

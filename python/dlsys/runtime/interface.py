"""The package and the native library agree on this: constants, limits, opcodes, the layouts of
structs and the library's functions.

They are declared once, in src/. The library writes them down (src/runtime/interface.cc), and
`make interface` copies that text into `interface_text.py`, where this module reads it; it is there
for numpy alone, too. A library that says anything else is refused when it is loaded.

    python -m dlsys.runtime.interface LIBRARY    writes interface_text.py anew
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from typing import Any, NamedTuple

from dlsys.runtime.interface_text import TEXT

_TYPES: dict[str, Any] = {
    "pointer": ctypes.c_void_p,
    "uint8": ctypes.c_uint8,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float32": ctypes.c_float,
}


class DeviceType(NamedTuple):
    """A kind of devices: its code, its column of the kernel table, and whether its kernels take a
    stream, on which the host runs ahead of them.
    """

    code: int
    column: str
    streams: bool


class Struct(ctypes.Structure):
    """A struct that a kernel takes as one argument. Fields that are not given are 0."""

    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name, _ in self._fields_)  # type: ignore[misc]
        shown = (f"{name}={list(x) if isinstance(x, ctypes.Array) else x}" for name, x in values)
        return f"{type(self).__name__}({', '.join(shown)})"


class Interface:
    """The text of an interface, read.

    Attributes:
        devices: the types of devices by name.
        enums: the enumerators of the C API by name.
        dtypes: the dtypes of native arrays by name, with their codes.
        limits: by name; see src/runtime/interface.cc.
        units: how far off algorithms of convolution may be; see src/operators/conv_accuracy.h.
        activations, activation_gradients: the kernels that an epilogue may end in, by number.
        opcodes: of a pointwise program, by the name of the kernel that each stands for.
        operands: of a GEMM, by name, as arguments of kernels have them.
        rules: of optimizers, by the names of their kernels; 1 where one acts in every run of an
            accumulation.
        slots: of a rule, the states beside the parameter.
        constants: of a rule, in the order of its kernels' argument.
    """

    def __init__(self, text: str) -> None:
        self.enums: dict[str, int] = {}
        self.devices: dict[str, DeviceType] = {}
        self.dtypes: dict[str, int] = {}
        self.limits: dict[str, int] = {}
        self.units: dict[str, int] = {}
        self.activations: dict[str, int] = {}
        self.activation_gradients: dict[str, int] = {}
        self.opcodes: dict[str, int] = {}
        self.operands: dict[str, int] = {}
        self.rules: dict[str, int] = {}
        self.slots: dict[str, tuple[str, ...]] = {}
        self.constants: dict[str, tuple[str, ...]] = {}
        self._structs: dict[str, type[Struct]] = {}
        self._fields: dict[str, list[tuple[str, str]]] = {}
        self._functions: dict[str, list[str]] = {}
        numbers = {
            "enum": self.enums,
            "dtype": self.dtypes,
            "limit": self.limits,
            "activation": self.activations,
            "activation_gradient": self.activation_gradients,
            "opcode": self.opcodes,
            "operand": self.operands,
            "rule": self.rules,
        }
        lists = {"slots": self.slots, "constants": self.constants}
        for line in text.splitlines():
            kind, name, *rest = line.split(" ")
            if kind in numbers:
                numbers[kind][name] = int(rest[0])
            elif kind == "device":
                self.devices[name] = DeviceType(int(rest[0]), rest[1], rest[2] == "1")
            elif kind == "units":
                self.units[" ".join(rest)] = int(name)
            elif kind in lists:
                lists[kind][name] = tuple(rest)
            elif kind == "struct":
                self._fields[name] = []
            elif kind == "field":
                self._fields[name].append((rest[0], rest[1]))
            else:
                self._functions[name] = rest

    def fields(self, struct: str, **pointers: Any) -> list[tuple[str, Any]]:
        """The `_fields_` of a struct or union for ctypes. A pointer is c_void_p, or what `pointers`
        says of that field.
        """
        fields = self._fields[struct]
        return [(name, pointers.get(name) or self._type(text)) for name, text in fields]

    def struct(self, name: str) -> Any:
        """A struct, by name, as a class whose keyword arguments are its fields."""
        if name not in self._structs:
            self._structs[name] = type(name, (Struct,), {"_fields_": self.fields(name)})
        return self._structs[name]

    def functions(self) -> dict[str, tuple[Any, ...]]:
        """The argument types of each function that returns a status, for ctypes. A pointer is
        c_void_p, which accepts byref(), a ctypes array and a plain address alike.
        """
        return {name: tuple(map(self._type, types)) for name, types in self._functions.items()}

    def _type(self, text: str) -> Any:
        name, _, extent = text.partition("*")
        known = DLContext if name == "DLContext" else _TYPES.get(name) or self.struct(name)
        return known * int(extent) if extent else known


interface = Interface(TEXT)


class DLContext(ctypes.Structure):
    _fields_ = interface.fields("DLContext")


def difference(text: str) -> str:
    """The first thing that a library's text says otherwise than the package's; "" for none."""
    for own, other in itertools.zip_longest(TEXT.splitlines(), text.splitlines(), fillvalue="-"):
        if own != other:
            return f'"{other}" in the library, "{own}" in the package'
    return ""


def write(library: str) -> None:
    """Copies the text of a library into interface_text.py."""
    describe = ctypes.CDLL(os.path.realpath(library)).DLInterface
    describe.restype = ctypes.c_char_p
    text = describe().decode()
    source = (
        f'"""Written by `make interface` from the native library."""\n\nTEXT = """\\\n{text}"""\n'
    )
    path = os.path.join(os.path.dirname(__file__), "interface_text.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(source)


if __name__ == "__main__":
    write(sys.argv[1])

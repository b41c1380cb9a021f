"""A planned program as files that run without Python.

The header src/include/dlsys_program.h reads them and calls the same kernels through the C API
(src/include/dlsys.h). The folder has two files:

- `weights.bin`: the bytes of Parameters and constants, each aligned to 256.
- `plan.txt`: what to do, as words separated by blanks, in this order:

      dlsys-program 1 INTERFACE DEVICE
      blocks N       and a line each: NBYTES KIND    KIND: weights, arena, input or output
      arrays N       and a line each: BLOCK START DTYPE NDIM EXTENT...
      inputs N       and a line each: NAME ARRAY
      outputs N      and a line each: NAME ARRAY
      steps N        and a line each: KERNEL SIGNATURE DTYPE NARGUMENTS ARGUMENT...

INTERFACE is the FNV-1a hash of DLInterface() and DEVICE a column of the kernel table, cpu or cuda;
an array lies START bytes into a block. An argument is a letter of the kernel's signature and its
value: an array (`i`, `o`), a count and arrays (`I`, `O`), a count of bytes and their hexadecimal
digits (`b`), an integer (`l`) or a float (`f`). One argument more than the signature has is the
workspace, an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..dtypes import stored
from ..errors import GraphError
from ..executor.executor import Executor
from ..executor.plan.arena import aligned
from ..executor.plan.memory import Buffer, Plan, Step, Value
from ..executor.run.tables import arguments_of, kernel_key
from ..files import replacing
from ..ops.leaf import Parameter
from ..runtime.device import Context
from ..runtime.interface import TEXT
from ..runtime.library import DTYPE_CODES, load

PLAN, WEIGHTS = "plan.txt", "weights.bin"


def interface_hash() -> str:
    """The FNV-1a hash of the interface (64 bits; Fowler, Noll and Vo), in hexadecimal."""
    made = 0xCBF29CE484222325
    for byte in TEXT.encode():
        made = (made ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{made:016x}"


def save_plan(executor: Executor, plan: Plan, outputs: Sequence[str], folder: Path) -> None:
    """Writes the two files. outputs: the names of the fetches. GraphError for a step that no native
    kernel computes.
    """
    ctx = executor.ctx
    if ctx is None:
        raise GraphError("save_program: a program has native kernels: say where, such as ctx='cpu'")
    text = _Text(plan, ctx)
    steps = [text.step(step) for step in plan.steps]
    parts = [
        ("blocks", text.blocks),
        ("inputs", [f"{_word(v.node.name)} {text.row(v)}" for v in plan.feeds]),
        ("outputs", [f"{_word(n)} {text.row(v)}" for n, v in zip(outputs, plan.fetches) if v]),
        ("steps", steps),
    ]
    parts.insert(1, ("arrays", text.arrays))  # all of them have their rows by now
    lines = [f"dlsys-program 1 {interface_hash()} {ctx.kernel_device}"]
    for name, part in parts:
        lines += [f"{name} {len(part)}", *part]
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS) as file:
        for value in (*plan.states, *plan.constants):
            file.write(_bytes_of(value).ljust(aligned(value.spec.nbytes), b"\0"))
    with replacing(folder / PLAN) as file:
        file.write("\n".join([*lines, ""]).encode())


class _Text:
    """The lines of a plan, with the arrays that they need."""

    def __init__(self, plan: Plan, ctx: Context) -> None:
        self._ctx, self._library = ctx, load()
        self._places: dict[Buffer, tuple[int, int]] = {}  # block and byte
        self._rows: dict[str, int] = {}  # by the line of the array
        weights = 0
        for value in (*plan.states, *plan.constants):
            self._places[value.buffer] = 0, weights
            weights += aligned(value.spec.nbytes)
        for buffer in plan.buffers:
            if buffer.kind == "arena":
                self._places[buffer] = 1, max(buffer.offset, 0)
        self.blocks = [f"{weights} weights", f"{plan.arena_nbytes} arena"]
        for kind in ("feed", "fetch"):
            for buffer in plan.buffers:
                if buffer.kind == kind and buffer not in self._places:
                    self._places[buffer] = len(self.blocks), 0
                    self.blocks.append(f"{buffer.nbytes} {'input' if kind == 'feed' else 'output'}")

    @property
    def arrays(self) -> list[str]:
        return list(self._rows)

    def row(self, value: Value) -> int:
        """The number of a value's array."""
        block, start = self._places[value.buffer]
        shape = value.spec.shape
        words = block, start + value.skipped_nbytes, DTYPE_CODES[value.spec.dtype], len(shape)
        return self._rows.setdefault(" ".join(map(str, (*words, *shape))), len(self._rows))

    def step(self, step: Step) -> str:
        """The line of a step."""
        key = kernel_key(step, self._ctx)
        if key not in self._library.index:
            raise GraphError(
                f"save_program: {step.node.name} runs in Python, there is no kernel for it on "
                f"{self._ctx} [{step.node.where}]"
            )
        signature = self._library.signature[key[:2]].rstrip("s")
        arguments = [
            f"{letter} {self._argument(letter, argument)}"
            for letter, argument in zip(signature, arguments_of(step, self._ctx))
        ]
        arguments += [f"o {self.row(value)}" for value in step.workspace]
        words = key[1], signature, DTYPE_CODES[key[2]], len(arguments)
        return " ".join([*map(str, words), *arguments])

    def _argument(self, letter: str, argument: Any) -> str:
        if letter in "io":
            return str(self.row(argument))
        if letter in "IO":
            return " ".join(map(str, (len(argument), *map(self.row, argument))))
        if letter == "b":
            data = bytes(argument)
            return f"{len(data)} {data.hex() or '-'}"
        return float(argument).hex() if letter == "f" else str(int(argument))


def _bytes_of(value: Value) -> bytes:
    node = value.node.origin
    held = node.asnumpy() if isinstance(node, Parameter) else np.asarray(node.attrs["value"])
    return np.ascontiguousarray(stored(held, value.spec.dtype)).tobytes()


def _word(name: str) -> str:
    return "_".join(name.split()) or "_"

"""Lowers the steps of a plan to the tables that the native library reads (DLArray, DLValue,
DLStep).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure
from functools import partial
from typing import Any

import numpy as np

from ...errors import GraphError, KernelError
from ...graph.node import Node
from ...runtime.device import Context
from ...runtime.library import DTYPE_CODES, DLArrayList, DLBytes, array_list, bytes_of, load
from ...runtime.target import target_of
from ..plan.memory import Buffer, Plan, Step, Value

_ROW_WORDS = 4  # a DLArray is four 64-bit words: data, ctx, ndim and dtype, address of the shape
_ROW_NBYTES = 8 * _ROW_WORDS
_APART = 1 << 44  # bytes between the buffers of a plan that has no memory yet


class ArrayTable:
    """Every array of a plan as a row of one table; equal parts of a buffer share a row."""

    def __init__(self, plan: Plan, ctx: Context) -> None:
        values: dict[tuple, Value] = {}
        for step in plan.steps:
            for value in (*step.inputs, *step.outputs, *step.workspace):
                values.setdefault(_row_key(value), value)
        extents = [extent for value in values.values() for extent in value.spec.shape]
        self._extents = np.array(extents or [0], np.int64)
        self._rows = {key: row for row, key in enumerate(values)}
        self._rows_of: dict[Buffer, list[tuple[int, int]]] = {}  # word, bytes that it skips
        rows: list[tuple[int, ...]] = []
        inside = []
        shape_at, most = self._extents.ctypes.data, target_of(ctx).max_ndim
        for row, value in enumerate(values.values()):
            ndim, skipped = len(value.spec.shape), value.skipped_nbytes
            rows.append((0, ctx.packed, ndim | _dtype_code(value, most) << 32, shape_at))
            shape_at += 8 * ndim
            self._rows_of.setdefault(value.buffer, []).append((row * _ROW_WORDS, skipped))
            if value.buffer.kind == "arena":
                inside.append((row, max(value.buffer.offset, 0) + skipped))
        self._inside = np.array([row for row, _ in inside], np.intp)
        self._offsets = np.array([offset for _, offset in inside], np.uint64)
        self._table = np.array(rows or [(0,) * _ROW_WORDS], np.uint64)
        self._base = self._table.ctypes.data
        self._words = memoryview(self._table.data).cast("B").cast("Q")

    def address(self, value: Value) -> int:
        """The address of a value's DLArray."""
        return self._base + _ROW_NBYTES * self._rows[_row_key(value)]

    def bytes_of(self, value: Value) -> tuple[int, int]:
        """The address range of a value now."""
        start = self._words[_ROW_WORDS * self._rows[_row_key(value)]]
        return start, start + value.spec.nbytes

    def place(self, buffer: Buffer, address: int) -> None:
        """Sets the address of a buffer, and so of every array that shows it."""
        for row, skipped in self._rows_of.get(buffer, ()):
            self._words[row] = address + skipped

    def place_arena(self, address: int) -> None:
        """Sets the address of the arena."""
        self._table[self._inside, 0] = self._offsets + np.uint64(address)


def _dtype_code(value: Value, most: int) -> int:
    """The library's number of a value's dtype. GraphError for an array that no device holds."""
    shape, dtype = value.spec[:2]
    code = DTYPE_CODES.get(dtype)
    if code is None or len(shape) > most:
        raise GraphError(
            f"{value.node.name} is {dtype} {shape}; native devices hold up to {most} dimensions of "
            f"{', '.join(map(str, DTYPE_CODES))} [{value.node.where}]"
        )
    return code


def _row_key(value: Value) -> tuple:
    return value.buffer, value.offset, value.spec.shape, value.spec.dtype


class Segment:
    """Consecutive native steps: one program, run by one call."""

    native = True

    def __init__(self, table: ArrayTable, ctx: Context, steps: Sequence[Step]) -> None:
        self._library = load()
        self.ctx = ctx
        self.steps = steps
        self.table = table  # the program reads it: keep it alive
        self._held: list[DLArrayList | DLBytes] = []  # and these
        records: list[tuple[int, int, int, int]] = []
        words: list[int] = []
        for step in steps:
            kernel, arguments = self._lowered(step)
            count = len(arguments) + len(step.workspace)
            # The user's line, for errors that a GPU reports after the call.
            line = self._library.place_number(step.node.where) if step.node.op.fallible else 0
            records.append((kernel, len(words), count, line))
            words.extend(arguments)
            words.extend(map(self.table.address, step.workspace))
        self.records = np.array(records, np.int32).reshape(-1, 4)
        self.words = np.array(words or [0], np.uint64)
        self.handle = self.program(self.records, self.words)
        self._run = partial(self._library.cdll.DLProgramRun, self.handle)

    def program(self, records: np.ndarray, words: np.ndarray) -> int | None:
        """A program of the library, which reads the words: keep them alive."""
        handle = ctypes.c_void_p()
        tables = (records.ctypes.data, len(records), words.ctypes.data, len(words))
        create = self._library.cdll.DLProgramCreate
        self._library.check(create(*tables, ctypes.byref(handle)))
        return handle.value

    @property
    def count(self) -> int:
        """The number of its steps."""
        return len(self.steps)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.cdll.DLProgramFree(self.handle)

    def run(self, on: int) -> None:
        """Queues every step on a stream."""
        status = self._run(on)
        if status:
            self.fail(status, self.handle)

    def calls(self, on: int) -> list[tuple[Step, Any]]:
        """Each step with a function that runs it alone."""
        return [(step, partial(self._call, k, on)) for k, step in enumerate(self.steps)]

    def timed(self, on: int) -> list[float]:
        """Runs every step and returns the device's milliseconds for each."""
        ms = (ctypes.c_double * len(self.steps))()
        profile = self._library.cdll.DLProgramProfile
        status = profile(self.handle, self.ctx.struct, on, ms)
        if status:
            self.fail(status, self.handle)
        return list(ms)

    def _call(self, k: int, on: int) -> None:
        record = self.records[k : k + 1].ctypes.data
        words = self.words.ctypes.data, len(self.words)
        self._check_step(self._library.cdll.DLKernelCall(record, *words, on), self.steps[k])

    def fail(self, status: int, handle: int | None) -> None:
        """Raises the error of a call on a program of these steps, with the step that failed."""
        failed = self._library.cdll.DLProgramFailedStep(handle)
        self._check_step(status, self.steps[failed % self.count] if failed >= 0 else None)

    def _check_step(self, status: int, step: Step | None) -> None:
        if step is None:
            self._library.check(status)
            return
        shapes = ", ".join(f"{value.node.name} {value.spec.shape}" for value in step.inputs)
        self._library.check(status, node=step.node.name, inputs=shapes, line=step.node.where)

    def _lowered(self, step: Step) -> tuple[int, list[int]]:
        """A step's kernel and its arguments as 64-bit words, in the order of the kernel's
        signature.
        """
        key = kernel_key(step, self.ctx)
        words = []
        for letter, argument in zip(self._library.signature[key[:2]], arguments_of(step, self.ctx)):
            if letter in "io":
                words.append(self.table.address(argument))
            elif letter in "IO":
                words.append(self._hold(array_list([*map(self.table.address, argument)])))
            elif letter == "b":
                words.append(self._hold(bytes_of(argument)))
            elif letter == "f":
                words.append(int(np.float32(argument).view(np.uint32)))
            else:
                words.append(int(argument) & 0xFFFFFFFFFFFFFFFF)
        return self._library.index[key], words

    def _hold(self, made: DLArrayList | DLBytes) -> int:
        """The address of an argument, which lives as long as the segment."""
        self._held.append(made)
        return ctypes.addressof(made)


def workspace_nbytes(step: Step, ctx: Context) -> int:
    """The bytes of scratch memory that the kernel of a step takes; the library remembers."""
    library, key = load(), kernel_key(step, ctx)
    if key not in library.index:
        return 0
    numbers: dict[Buffer, int] = {}
    asked: list[Any] = []
    for argument in arguments_of(step, ctx):
        if isinstance(argument, Value):
            asked.append(_planned(argument, numbers))
        elif isinstance(argument, list):
            asked.append(tuple([_planned(value, numbers) for value in argument]))
        else:
            asked.append(bytes(argument) if isinstance(argument, Structure) else argument)
    try:
        return library.ask("DLKernelWorkspace", key, ctx.device_id, tuple(asked))
    except KernelError:  # the run will say so, if memory for such arrays is found at all
        return 0


def _planned(value: Value, numbers: dict[Buffer, int]) -> tuple[tuple[int, ...], Any, int]:
    """An array that has no memory yet, as `Library.ask` takes it: its address tells how it will be
    aligned, and that what is in other buffers lies apart.
    """
    spec, number = value.spec, numbers.setdefault(value.buffer, len(numbers) + 1)
    return spec.shape, DTYPE_CODES.get(spec.dtype), number * _APART + value.skipped_nbytes


def kernel_key(step: Step, ctx: Context) -> tuple[str, Any, Any]:
    """The key of a step's kernel in `Library.index`; not in it where there is no such kernel."""
    return ctx.kernel_device, step.node.op.kernel, step.dtype


def arguments_of(step: Step, ctx: Context) -> list[Any]:
    """A step's arguments in the order of its kernel's signature, where a Value is an array."""
    if step.arguments is None:
        signature = load().signature[ctx.kernel_device, step.node.op.kernel].rstrip("s")
        step.arguments = in_kernel_order(step.node, signature, step.inputs, step.outputs)
    return step.arguments


def in_kernel_order(
    node: Node, signature: str, inputs: Sequence[Any], made: Sequence[Any]
) -> list[Any]:
    """A kernel's arguments by the letters of its signature: what the operator writes (Parameters,
    then what it makes) where the letter is o, its other inputs where it is i, else its scalars; a
    list of as many as it says where they are O and I.
    """
    op = node.op
    if op.writes:
        made = [*(inputs[k] for k in op.writes), *made]
        inputs = [x for k, x in enumerate(inputs) if k not in op.writes]
    written, read = iter(made), iter(inputs)
    scalars, lists = iter(op.scalars(node)), iter(op.lists(node))
    sources = {"o": written, "i": read, "O": written, "I": read}
    arguments: list[Any] = []
    try:
        for letter in signature:
            source = sources.get(letter, scalars)
            if letter in "IO":
                arguments.append([next(source) for _ in range(next(lists, 0))])
            else:
                arguments.append(next(source))
    except StopIteration:
        pass
    if len(arguments) < len(signature) or any(map(list, (written, read, scalars, lists))):
        raise GraphError(
            f"{op.name}: the library's kernel {op.kernel} takes other arguments ({signature}); it "
            f"is of another state of the sources, rebuild it with `make lib` [{node.where}]"
        )
    return arguments

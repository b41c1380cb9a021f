"""Lowers the steps of a plan to the tables that the native library reads (DLArray, DLValue,
DLStep).
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...dtypes import storage_dtype
from ...errors import GraphError, KernelError
from ...graph.node import Node
from ...ndarray import NDArray, launch
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
        self._target = target_of(ctx)
        self._rows: dict[tuple, int] = {}
        self._shapes: list[int] = []
        # value, ndim, dtype, start of the shape
        self._records: list[tuple[Value, int, int, int]] = []
        self._rows_of: dict[Buffer, list[tuple[int, int]]] = {}  # word, bytes that it skips
        for step in plan.steps:
            for value in (*step.inputs, *step.outputs, *step.workspace):
                self._add(value)
        self._fill(ctx)

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

    def _add(self, value: Value) -> None:
        key = _row_key(value)
        if key in self._rows:
            return
        row = self._rows[key] = len(self._records)
        shape = value.spec.shape
        assert value.spec.dtype is not None
        code = DTYPE_CODES.get(value.spec.dtype)
        if code is None or len(shape) > self._target.max_ndim:
            raise GraphError(
                f"{value.node.name} is {value.spec.dtype} {shape}; native devices hold up to "
                f"{self._target.max_ndim} dimensions of {', '.join(map(str, DTYPE_CODES))} "
                f"[{value.node.where}]"
            )
        self._records.append((value, len(shape), code, len(self._shapes)))
        self._shapes.extend(shape)
        place = (row * _ROW_WORDS, value.skipped_nbytes)
        self._rows_of.setdefault(value.buffer, []).append(place)

    def _fill(self, ctx: Context) -> None:
        self._extents = np.array(self._shapes or [0], np.int64)
        shapes_at = self._extents.ctypes.data
        table = np.zeros((max(len(self._records), 1), _ROW_WORDS), np.uint64)
        for row, (_, ndim, dtype, start) in enumerate(self._records):
            table[row] = (0, ctx.packed, ndim | dtype << 32, shapes_at + 8 * start)
        arena = [
            (row, max(value.buffer.offset, 0) + value.skipped_nbytes)
            for row, (value, *_) in enumerate(self._records)
            if value.buffer.kind == "arena"
        ]
        self._inside = np.array([row for row, _ in arena], np.intp)
        self._offsets = np.array([offset for _, offset in arena], np.uint64)
        self._table = table
        self._base = table.ctypes.data
        self._words = memoryview(table.data).cast("B").cast("Q")


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
            records.append((kernel, len(words), count, self._place(step)))
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

    def _place(self, step: Step) -> int:
        """The library's number of the user's line, for errors that a GPU reports after the call."""
        return self._library.place_number(step.node.where) if step.node.op.fallible else 0

    def _lowered(self, step: Step) -> tuple[int, list[int]]:
        """A step's kernel and its arguments as 64-bit words, in the order of the kernel's
        signature.
        """
        node, op = step.node, step.node.op
        key = (self.ctx.kernel_device, op.kernel, step_dtype(step))
        words = []
        signature = self._library.signature[key[:2]].rstrip("s")
        arguments = in_kernel_order(node, signature, step.inputs, step.outputs)
        for letter, argument in zip(signature, arguments):
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


def step_dtype(step: Step) -> Any:
    """The storage type of a step's floats, which its kernel is chosen by."""
    return storage_dtype([value.spec.dtype for value in (*step.inputs, *step.outputs)])


class _Planned(NamedTuple):
    """An array that has no memory yet: its address tells how it will be aligned, and that what is
    in other buffers lies apart.
    """

    shape: tuple[int, ...]
    dtype: Any
    address: int


def workspace_nbytes(step: Step, ctx: Context) -> int:
    """The bytes of scratch memory that the kernel of a step takes; the library remembers."""
    node, library = step.node, load()
    kernel = node.op.kernel
    if kernel is None or not library.takes_workspace(ctx.kernel_device, kernel):
        return 0
    numbers: dict[Buffer, int] = {}

    def planned(value: Value) -> _Planned:
        number = numbers.setdefault(value.buffer, len(numbers) + 1)
        return _Planned(*value.spec[:2], number * _APART + value.skipped_nbytes)

    signature = library.signature[ctx.kernel_device, kernel].rstrip("s")
    inputs, outputs = [*map(planned, step.inputs)], [*map(planned, step.outputs)]
    arguments = in_kernel_order(node, signature, inputs, outputs)
    try:
        return library.workspace(ctx.kernel_device, kernel, *arguments, device_id=ctx.device_id)
    except KernelError:  # the run will say so, if memory for such arrays is found at all
        return 0


def in_kernel_order(
    node: Node, signature: str, inputs: Sequence[Any], made: Sequence[Any]
) -> list[Any]:
    """A kernel's arguments by the letters of its signature: what the operator writes (Parameters,
    then what it makes) where the letter is o, its other inputs where it is i, else its scalars; a
    list of as many as it says where they are O and I.
    """
    op = node.op
    written = iter([*(inputs[k] for k in op.writes), *made])
    read = iter([x for k, x in enumerate(inputs) if k not in op.writes])
    scalars, lists = iter(op.scalars(node)), iter(op.lists(node))
    sources = {"o": written, "i": read, "O": written, "I": read}
    arguments: list[Any] = []
    for letter in signature:
        count = next(lists, 0) if letter in "IO" else 1
        taken = list(itertools.islice(sources.get(letter, scalars), count))
        if len(taken) < count:
            break
        arguments.append(taken if letter in "IO" else taken[0])
    if len(arguments) < len(signature) or any(map(list, (written, read, scalars, lists))):
        raise GraphError(
            f"{op.name}: the library's kernel {op.kernel} takes other arguments ({signature}); it "
            f"is of another state of the sources, rebuild it with `make lib` [{node.where}]"
        )
    return arguments


def call_kernel(
    ctx: Context, step: Step, inputs: Sequence[NDArray], made: Sequence[NDArray]
) -> None:
    """Runs the kernel of one step on arrays of any device, by its heuristic."""
    kernel = step.node.op.kernel
    assert kernel is not None
    node = step.node.derive(step.node.inputs, step.node.spec)
    node.attrs = {name: value for name, value in node.attrs.items() if name != "algorithm"}
    signature = load().signature[ctx.kernel_device, kernel].rstrip("s")
    launch(kernel, ctx, *in_kernel_order(node, signature, inputs, made))

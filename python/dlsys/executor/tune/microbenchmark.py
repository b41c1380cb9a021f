"""Microbenchmarks run the kernel of one node alone, on data of their own, by each algorithm."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...dtypes import ROUNDING, is_narrow, rounded, storage_dtype
from ...errors import DeviceError
from ...graph.node import Node
from ...graph.spec import Spec
from ...ndarray import NDArray, empty
from ...rungs import Algorithm
from ...runtime.device import Context, stream, synchronize
from ...runtime.library import bytes_of, load
from ..run.tables import in_kernel_order

_GRAPH_US = 500.0  # of device time: the host's part in timing a graph is then about 2 %
_MOST_LAUNCHES = 256  # of a graph
LONG_US = 5e4  # of a launch that one measurement is enough for
_ROUNDS = 5
_GLANCES = 4  # launches of an estimate
_SEGMENT, _SEGMENTS = 4096, 64  # elements of a large result that are compared
DRAWN = 262_147  # elements; larger arrays repeat them, a prime so that rows differ
_LOW_BITS = 0x1FFF  # of a float32, which tf32 rounds away


class Microbenchmark:
    """Runs the kernel of a node by any of its algorithms.

    The data tell the precisions apart. For tf32 all operands are representable in tf32, so that
    every algorithm computes the same up to float32's rounding. For fp32 a conversion to tf32 would
    round all of them towards zero by almost half a unit, which makes an error above the operator's
    tolerance. Their scale makes sums about 1, where activations are not flat.
    """

    def __init__(self, node: Node, ctx: Context, drawn: np.ndarray | None = None) -> None:
        """`drawn`: float32 of DRAWN elements, in place of those, which every operand repeats."""
        self._node = node
        self._ctx = ctx
        self._library = load()
        kernel = node.op.kernel
        assert kernel is not None
        specs = [x.spec for x in node.inputs]
        outputs = [node.spec] if isinstance(node.spec, Spec) else node.spec
        self._dtype = storage_dtype(x.dtype for x in (*specs, *outputs))
        self._kernel = self._library.index[ctx.kernel_device, kernel, self._dtype]
        self._signature = self._library.signature[ctx.kernel_device, kernel].rstrip("s")
        exact = node.attrs.get("precision", "fp32") != "fp32"
        terms = node.op.cost(node, specs, outputs[0]) / outputs[0].size / 2
        if drawn is None:
            drawn = _drawn(exact) * np.float32(2.0 ** -round(np.log2(max(terms, 1.0)) / 4))
        self._drawn = drawn
        known: dict[int, np.ndarray] = {}  # of an operator whose work depends on values of inputs
        if hasattr(node.op, "measured_inputs"):
            known = node.op.measured_inputs(node)
        self._inputs = [
            _repeated(known[k] if k in known else _data(x.spec, drawn, k), x.spec, ctx)
            for k, x in enumerate(node.inputs)
        ]
        self._outputs = [empty(spec.shape, ctx, spec.dtype) for spec in outputs]

    def results(self, algorithm: Algorithm) -> list[np.ndarray]:
        """Its outputs, of large ones a sample. Raises NotApplicableError where the algorithm cannot
        compute this, DeviceError where its library cannot be used.
        """
        for output in self._outputs:
            output[:] = np.float32(np.nan)  # so that an element that is not written is seen
        with self._program(algorithm, 1) as handle:
            run = self._library.cdll.DLProgramRun
            self._library.check(run(handle, self._stream()))
        return [_sample(output) for output in self._outputs]

    def value(self, k: int, at: np.ndarray) -> np.ndarray:
        """The elements of floating-point input `k` at indices in row-major order."""
        values, dtype = np.roll(self._drawn, 7919 * k)[at % DRAWN], self._node.inputs[k].spec.dtype
        return rounded(values, dtype) if is_narrow(dtype) else values

    def elements(self, at: Sequence[int]) -> np.ndarray:
        """The first output's elements at indices in row-major order, of the last run."""
        return np.concatenate([_part(self._outputs[0], k, 1).asnumpy() for k in at])

    def workspace_nbytes(self, algorithm: Algorithm) -> int:
        """The scratch memory of a launch. Raises as `results` does."""
        node = self._by(algorithm)
        arguments = in_kernel_order(node, self._signature, self._inputs, self._outputs)
        return self._workspace_nbytes(arguments)

    def is_right(self, algorithm: Algorithm, wanted: list[np.ndarray]) -> bool:
        """True when its results are `wanted` within the operator's tolerance."""
        tolerance = max(self._node.op.tolerance, 2 * ROUNDING.get(self._dtype, 0.0))
        return all(
            _error(got, expected) <= tolerance
            for got, expected in zip(self.results(algorithm), wanted)
        )

    def us_about(self, algorithm: Algorithm) -> float:
        """An estimate of a launch's microseconds. Raises as `results` does. In a graph too: what a
        library's call takes on the host, of which a step has none, can be more than its kernel's.
        """
        with self._program(algorithm, 1) as handle:
            us = self._us_of_run(handle)
            if us > LONG_US:  # which may be the time of loading libraries and kernels
                us = self._us_of_run(handle)
        return us if us > LONG_US else self._least(algorithm, 1, _GLANCES, 1)

    def _us_of_run(self, handle: int) -> float:
        start = time.perf_counter()
        self._library.check(self._library.cdll.DLProgramRun(handle, self._stream()))
        synchronize(self._ctx)
        return 1e6 * (time.perf_counter() - start)

    def us(self, algorithm: Algorithm, about: float) -> float:
        """Microseconds of a launch among others in a captured graph, the least of several."""
        launches = int(min(max(_GRAPH_US / max(about, 1e-3), 2), _MOST_LAUNCHES))
        return self._least(algorithm, launches, 1, _ROUNDS)

    def _least(self, algorithm: Algorithm, launches: int, replays: int, rounds: int) -> float:
        """Microseconds of a launch, the least over rounds of replays of a graph of launches."""
        on = self._stream()
        with self._program(algorithm, launches) as handle, self._captured(handle) as run:
            run(on, 1)
            synchronize(self._ctx)
            least = float("inf")
            for _ in range(rounds):
                start = time.perf_counter()
                run(on, replays)
                synchronize(self._ctx)
                least = min(least, time.perf_counter() - start)
        return 1e6 * least / launches / replays

    @contextlib.contextmanager
    def _program(self, algorithm: Algorithm, launches: int) -> Iterator[int]:
        words, _held = self._words(algorithm)
        step = self._kernel, 0, len(words), 0
        steps = np.array([step] * launches, np.int32)
        handle = ctypes.c_void_p()
        tables = steps.ctypes.data, launches, words.ctypes.data, len(words)
        cdll = self._library.cdll
        self._library.check(cdll.DLProgramCreate(*tables, ctypes.byref(handle)))
        assert handle.value is not None
        try:
            yield handle.value
        finally:
            synchronize(self._ctx)
            cdll.DLProgramFree(handle)

    @contextlib.contextmanager
    def _captured(self, handle: int) -> Iterator[Callable[[int, int], None]]:
        """A function that runs a program so many times as a captured graph, or step by step where
        the device has no graphs.
        """
        cdll, made = self._library.cdll, ctypes.c_void_p()
        nothing = None, 0, None, 0, None

        def run(on: int, times: int) -> None:
            for _ in range(times):
                self._library.check(cdll.DLProgramRun(handle, on))

        try:
            capture = cdll.DLProgramCapture
            status = capture(handle, self._ctx.struct, self._stream(), *nothing, ctypes.byref(made))
            self._library.check(status)
        except DeviceError:
            yield run
            return
        try:
            yield lambda on, times: self._library.check(cdll.DLGraphReplay(made, on, times))
        finally:
            cdll.DLGraphFree(made)

    def _words(self, algorithm: Algorithm) -> tuple[np.ndarray, list[object]]:
        """The arguments of a call, and what they point to and nobody else holds."""
        node = self._by(algorithm)
        words: list[int] = []
        held: list[object] = []
        arguments = in_kernel_order(node, self._signature, self._inputs, self._outputs)
        for argument in arguments:
            if isinstance(argument, NDArray):
                words.append(argument.handle_address)
            elif isinstance(argument, ctypes.Structure):
                held.append(made := bytes_of(argument))
                words.append(ctypes.addressof(made))
            elif isinstance(argument, float):
                words.append(int(np.float32(argument).view(np.uint32)))
            else:
                words.append(int(argument) & 0xFFFFFFFFFFFFFFFF)
        if nbytes := self._workspace_nbytes(arguments):
            held.append(workspace := empty((nbytes,), self._ctx, np.uint8))
            words.append(workspace.handle_address)
        return np.array(words, np.uint64), held

    def _by(self, algorithm: Algorithm) -> Node:
        node = self._node.derive(self._node.inputs, self._node.spec)
        node.attrs = {**node.attrs, "algorithm": algorithm}
        return node

    def _workspace_nbytes(self, arguments: Sequence[Any]) -> int:
        assert self._node.op.kernel is not None
        key = self._ctx.kernel_device, self._node.op.kernel
        return self._library.workspace(*key, *arguments, device_id=self._ctx.device_id)

    def _stream(self) -> int:
        return stream(self._ctx)


@functools.cache
def _drawn(exact: bool) -> np.ndarray:
    """Normally distributed values, as Microbenchmark says."""
    drawn = np.random.default_rng(0).standard_normal(DRAWN).astype(np.float32)
    bits = drawn.view(np.uint32)
    bits &= np.uint32(0xFFFFFFFF ^ _LOW_BITS)
    if not exact:
        bits |= np.uint32(_LOW_BITS >> 1)
    return drawn


def _data(spec: Spec, drawn: np.ndarray, k: int) -> np.ndarray:
    """The first values of input `k`, which differ from those of the other inputs."""
    assert spec.dtype is not None
    values = np.roll(drawn, 7919 * k)[: spec.size]
    if is_narrow(spec.dtype):
        return rounded(values, spec.dtype)
    if spec.dtype == np.uint8:
        values = 255 * (values > 0)  # often scaled by 1/255
    return values.astype(spec.dtype, copy=False)


def _repeated(first: np.ndarray, spec: Spec, ctx: Context) -> NDArray:
    """An array that repeats `first`. The device copies them, twice as many each time: sending so
    many would take longer than to measure.
    """
    made, done = empty(spec.shape, ctx, spec.dtype), first.size
    if done:
        _part(made, 0, done)[:] = first
    while 0 < done < spec.size:
        count = min(done, spec.size - done)
        _part(made, done, count)[:] = _part(made, 0, count)
        done += count
    return made


def _part(a: NDArray, start: int, count: int) -> NDArray:
    """A view of elements in row-major order."""
    offset = a.data_address - a.block.address + start * a.dtype.itemsize
    return NDArray.from_block(a.block, offset, (count,), a.dtype)


def _sample(a: NDArray) -> np.ndarray:
    """All elements of an array, or of a large one segments from its beginning to its end."""
    if a.size <= _SEGMENT * _SEGMENTS:
        return a.asnumpy()
    starts = np.linspace(0, a.size - _SEGMENT, _SEGMENTS).astype(int).tolist()
    return np.concatenate([_part(a, start, _SEGMENT).asnumpy() for start in starts])


def _error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest error relative to the largest magnitude; infinite for NaN."""
    if not wanted.size:
        return 0.0
    error = float(np.max(np.abs(got - wanted)))
    scale = max(float(np.max(np.abs(wanted))), float(np.finfo(np.float32).tiny))
    return error / scale if np.isfinite(error) else float("inf")

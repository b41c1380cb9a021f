"""trial: one node's kernel alone on data of its own, by one implementation after another."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...errors import DeviceError
from ...graph.node import Node
from ...graph.spec import Spec
from ...ndarray import NDArray, array, empty
from ...runtime.device import Context, stream, synchronize
from ...runtime.library import load
from ..run.tables import in_kernel_order

_RECORD_US = 1000.0  # of device time: the host's part in timing a recording is then about 1 %
_MOST_LAUNCHES = 256  # of a recording
_ROUNDS = 7
_DRAWN = 262_147  # numbers; larger arrays repeat them, a prime so that rows differ
_LOW_BITS = 0x1FFF  # of a float32, which tf32 rounds away


class Choice(NamedTuple):
    """An implementation, by its number and name in the library; 0 is the kernel's own rule."""

    number: int
    name: str

    def __str__(self) -> str:
        return self.name


BY_RULE = Choice(0, "")


class Trial:
    """Runs the kernel of a node as each choice does.

    Its data tell one precision from the other. For tf32 all factors are such that it rounds none of
    them, so that every implementation computes the same up to float32's rounding. For fp32 it would
    round all of them towards zero by almost half a unit, an error of the result that is larger than
    the operator's tolerance. They are of such a size that sums are about 1, where activations are
    not flat.
    """

    def __init__(self, node: Node, ctx: Context) -> None:
        self._node = node
        self._ctx = ctx
        self._library = load()
        kernel = node.op.kernel
        assert kernel is not None
        self._kernel = self._library.index[ctx.kernel_device, kernel]
        self._signature = self._library.signature[ctx.kernel_device, kernel].rstrip("s")
        exact = node.attrs.get("precision", "fp32") != "fp32"
        drawn = _drawn(exact)
        outputs = [node.spec] if isinstance(node.spec, Spec) else node.spec
        terms = node.op.cost(node, [x.spec for x in node.inputs], outputs[0]) / outputs[0].size / 2
        drawn *= np.float32(2.0 ** -round(np.log2(max(terms, 1.0)) / 4))
        self._inputs = [
            array(_data(x.spec, drawn, k), ctx, x.spec.dtype) for k, x in enumerate(node.inputs)
        ]
        self._outputs = [empty(spec.shape, ctx, spec.dtype) for spec in outputs]

    def results(self, choice: Choice) -> list[np.ndarray]:
        """What it computes. Raises NotApplicableError where it does not, DeviceError where its
        library cannot be used.
        """
        for output in self._outputs:
            output[:] = np.float32(np.nan)  # so that an element that is not written is seen
        with self._program(choice, 1) as handle:
            run = self._library.cdll.DLProgramRun
            self._library.check(run(handle, self._stream()))
        return [output.asnumpy() for output in self._outputs]

    def is_right(self, choice: Choice, wanted: list[np.ndarray]) -> bool:
        """Whether its results are those wanted, within the operator's tolerance."""
        return all(
            _error(got, expected) <= self._node.op.tolerance
            for got, expected in zip(self.results(choice), wanted)
        )

    def us_about(self, choice: Choice) -> float:
        """Microseconds of a launch, at a glance. Raises as `results` does."""
        self.results(choice)  # what loads at the first use is loaded then
        ms = (ctypes.c_double * 3)()
        with self._program(choice, len(ms)) as handle:
            profile = self._library.cdll.DLProgramProfile
            self._library.check(profile(handle, self._ctx.struct, self._stream(), ms))
        return 1e3 * min(ms)

    def us(self, choice: Choice, about: float) -> float:
        """Microseconds of a launch among others in a recording: the least of several rounds."""
        launches = int(min(max(_RECORD_US / max(about, 1e-3), 2), _MOST_LAUNCHES))
        on = self._stream()
        with self._program(choice, launches) as handle, self._recorded(handle) as run:
            run(on)
            synchronize(self._ctx)
            least = float("inf")
            for _ in range(_ROUNDS):
                start = time.perf_counter()
                run(on)
                synchronize(self._ctx)
                least = min(least, time.perf_counter() - start)
        return 1e6 * least / launches

    @contextlib.contextmanager
    def _program(self, choice: Choice, launches: int) -> Iterator[int]:
        words = np.array(self._words(choice), np.uint64)
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
    def _recorded(self, handle: int) -> Iterator[Any]:
        """What runs a program as a training step would: as a recording, where the device has
        them.
        """
        cdll, made = self._library.cdll, ctypes.c_void_p()
        nothing = None, 0, None, 0, None
        try:
            record = cdll.DLProgramRecord
            status = record(handle, self._ctx.struct, self._stream(), *nothing, ctypes.byref(made))
            self._library.check(status)
        except DeviceError:
            yield lambda on: self._library.check(cdll.DLProgramRun(handle, on))
            return
        try:
            yield lambda on: self._library.check(cdll.DLRecordingReplay(made, on, 1))
        finally:
            cdll.DLRecordingFree(made)

    def _words(self, choice: Choice) -> list[int]:
        node = self._node.derive(self._node.inputs, self._node.spec)
        node.attrs = {**node.attrs, "choice": choice}
        words = []
        arguments = in_kernel_order(node, self._signature, self._inputs, self._outputs)
        for argument in arguments:
            if isinstance(argument, NDArray):
                words.append(argument.handle_address)
            elif isinstance(argument, float):
                words.append(int(np.float32(argument).view(np.uint32)))
            else:
                words.append(int(argument) & 0xFFFFFFFFFFFFFFFF)
        return words

    def _stream(self) -> int:
        return stream(self._ctx)


def _drawn(exact: bool) -> np.ndarray:
    """Normal numbers, as the class says."""
    drawn = np.random.default_rng(0).standard_normal(_DRAWN).astype(np.float32)
    bits = drawn.view(np.uint32)
    bits &= np.uint32(0xFFFFFFFF ^ _LOW_BITS)
    if not exact:
        bits |= np.uint32(_LOW_BITS >> 1)
    return drawn


def _data(spec: Spec, drawn: np.ndarray, k: int) -> np.ndarray:
    """The values of input `k`, other numbers than those of the rest."""
    assert spec.dtype is not None
    values = np.resize(np.roll(drawn, 7919 * k), spec.shape)
    if spec.dtype == np.uint8:
        values = 255 * (values > 0)  # 0.0 and 1.0 of what are often 256 steps
    return values.astype(spec.dtype, copy=False)


def _error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest error, of the largest magnitude; infinite where something is not a number."""
    if not wanted.size:
        return 0.0
    error = float(np.max(np.abs(got - wanted)))
    scale = max(float(np.max(np.abs(wanted))), float(np.finfo(np.float32).tiny))
    return error / scale if np.isfinite(error) else float("inf")

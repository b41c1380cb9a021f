"""A model as a program for inference alone."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from ..autodiff import Executor, Node, Variable
from ..describe import described
from ..eager.tensor import Tensor
from ..errors import GraphError, ShapeError
from ..executor.on_host import run_on_host
from ..fusion import FUSIONS, select
from ..fusion.conv.kept_filters import KEPT_FILTERS
from ..nn import Module
from ..settings import settings
from .fold import folded
from .form import inference_form
from .save import save_plan

_MOST_DIRECT = 64  # batches that are recognized by their shape
_CLOSE = 1e-4  # of the largest number, between a batch as it is and the same in a bucket


class InferenceProgram:
    """What `infer` returns: call it with arrays, get arrays.

    Shapes of samples may change from call to call; each has a graph of its own. `buckets` are the
    batches that are planned for, ascending; None plans for each batch as it comes.

    model: what is computed, of which it has a copy. ctx: where.

    >>> program = dl.infer(nn.MLP((4, 3), seed=0), buckets=(8, 1))
    >>> program.buckets, program(np.ones((20, 4))).shape
    ((1, 8), (20, 3))
    """

    __repr__ = described

    def __init__(self, model: Module, ctx: Any, buckets: Sequence[int] | None) -> None:
        if buckets is not None and (not buckets or min(buckets) < 1):
            raise GraphError(f"infer: buckets are batches of at least 1, got {tuple(buckets)}")
        self.buckets = None if buckets is None else tuple(sorted(set(buckets)))
        self._model, self._ctx = deepcopy(model), ctx
        self._executors: dict[Any, _Entry] = {}
        # Of calls with one array, whose batch is one that is planned for: the executor, and whether
        # the model has one output.
        self._direct: dict[tuple[tuple[int, ...], Any], tuple[Executor, bool]] = {}

    def __call__(self, *inputs: Any) -> Any:
        """The model's output for a batch: an array, or a tuple of several.

        inputs: arrays or Tensors, samples along axis 0; float64 is taken as float32. ShapeError
        where they differ in number.
        """
        if len(inputs) == 1 and type(x := inputs[0]) is np.ndarray:
            key = (x.shape, x.dtype)
            direct = self._direct.get(key)
            if direct is not None:
                made = run_on_host(direct[0], inputs, (key,))
                return made[0] if direct[1] else tuple(made)
        arrays, count = _batch(inputs)
        entry = self._entry(arrays)
        if arrays[0] is inputs[0] and len(arrays) == 1 and len(self._direct) < _MOST_DIRECT:
            if count in (self.buckets or (count,)) and entry.reads_all:
                self._direct[arrays[0].shape, arrays[0].dtype] = entry.executor, entry.single
        if self.buckets is None or count in self.buckets:  # as it is, which is usual
            outputs = entry.run(arrays)
            return outputs[0] if entry.single else tuple(outputs)
        size = count if self.buckets is None else self.buckets[-1]
        parts = [
            self._bucket(entry, [x[k : k + size] for x in arrays])
            for k in range(0, max(count, 1), max(size, 1))
        ]
        made = [
            np.concatenate(outputs) if len(parts) > 1 else outputs[0] for outputs in zip(*parts)
        ]
        return made[0] if entry.single else tuple(made)

    def save_program(self, folder: str | Path, *inputs: Any) -> None:
        """Writes the program for one batch to a folder, for machines without Python.

        A C program that includes dlsys_program.h and is linked with the native library runs it,
        such as examples/deploy/run_program.c: the same kernels over the same memory, and so the
        same bits. The format is that of python/dlsys/inference/save.py.

        folder: is made if need be; `plan.txt` and `weights.bin` in it are replaced. inputs: a batch
        whose shapes and dtypes are planned; its values do not matter. GraphError where `infer` was
        not given a native device as `ctx`, or an operator has no native kernel there.

        >>> program = dl.infer(nn.MLP((4, 3), seed=0), ctx="cpu")
        >>> program.save_program("build/mlp", np.zeros((1, 4)))
        """
        arrays, _ = _batch(inputs)
        self._entry(arrays).save(arrays, Path(folder))

    def _entry(self, arrays: Sequence[np.ndarray]) -> _Entry:
        key = tuple([(x.shape[1:], x.dtype) for x in arrays])
        found = self._executors.get(key)
        if found is None:
            found = self._executors[key] = _Entry(self._model, self._ctx, arrays)
        return found

    def _bucket(self, entry: _Entry, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs of a batch that fits into the largest bucket, run in the smallest that it
        fits into.
        """
        count = len(arrays[0])
        size = count
        if self.buckets is not None:
            size = next(bucket for bucket in self.buckets if bucket >= count)
        if size == count:
            return entry.run(arrays)
        padded = [np.concatenate([x, np.zeros_like(x, shape=(size - count, *x.shape[1:]))])
                  for x in arrays]  # fmt: skip
        outputs = [y[:count] for y in entry.run(padded)]
        entry.check_rows(arrays, outputs)
        return outputs


def _batch(inputs: Sequence[Any]) -> tuple[list[np.ndarray], int]:
    """The arrays of a batch, and its number of samples. ShapeError where they differ in it."""
    if len(inputs) == 1 and type(x := inputs[0]) is np.ndarray and x.ndim and x.dtype.char != "d":
        return [x], len(x)  # as services ask, thousands of times a second
    arrays = [x.numpy() if isinstance(x, Tensor) else np.asarray(x) for x in inputs]
    arrays = [x.astype(np.float32) if x.dtype.char == "d" else x for x in arrays]
    counts = {x.shape[:1] for x in arrays}
    if len(counts) != 1 or () in counts:
        shapes = ", ".join(str(x.shape) for x in arrays) or "nothing"
        raise ShapeError(f"infer: expected as many samples in each input, got {shapes}")
    return arrays, counts.pop()[0]


class _Entry:
    """The folded graph for samples of one shape, and its executor, which plans for each batch."""

    def __init__(self, model: Module, ctx: Any, arrays: Sequence[np.ndarray]) -> None:
        self._inputs = [
            Variable(f"x{k}", (None, *x.shape[1:]), x.dtype) for k, x in enumerate(arrays)
        ]
        with model.in_mode(False):
            made = model(*self._inputs)
        nodes: list[Node] = list(made) if isinstance(made, (tuple, list)) else [made]
        if not all(isinstance(node, Node) and (node.shape or (0,))[0] is None for node in nodes):
            raise GraphError("infer: expected outputs with the samples along axis 0")
        self.single = nodes[0] is made
        self.executor = executor_for(folded(inference_form(nodes)), ctx)
        # The inputs that it reads, in its order; None: all as they come.
        at = {x: k for k, x in enumerate(self._inputs)}
        reads = [at[x] for x in self.executor.topo_order if x.op.leaf == "feed"]
        self._reads = None if reads == [*range(len(arrays))] else reads
        self._checked = False

    @property
    def reads_all(self) -> bool:
        """True where the executor has all inputs as feeds, in their order."""
        return self._reads is None

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs."""
        given = arrays if self._reads is None else [arrays[k] for k in self._reads]
        return run_on_host(self.executor, given)

    def save(self, arrays: Sequence[np.ndarray], folder: Path) -> None:
        """Writes the plan for a batch of these shapes."""
        reads = range(len(arrays)) if self._reads is None else self._reads
        shapes = {self._inputs[k]: arrays[k].shape for k in reads}
        plan = self.executor.plan(shapes)
        names = [f"y{k}" for k in range(len(plan.fetches))]
        save_plan(self.executor, plan, names, folder)

    def check_rows(self, arrays: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Compares, once, the outputs of a padded batch with those of the batch as it is."""
        if self._checked:
            return
        self._checked = True
        for padded, plain in zip(outputs, self.run(arrays)):
            scale = float(np.max(np.abs(plain), initial=0)) or 1.0
            if not np.allclose(padded, plain, rtol=_CLOSE, atol=_CLOSE * scale, equal_nan=True):
                raise GraphError(
                    "infer: samples of a batch depend on each other, so that a batch cannot be "
                    "filled up to a bucket; leave buckets out"
                )


def executor_for(fetches: Sequence[Node], ctx: Any) -> Executor:
    """An executor of a folded graph, whose weights nobody else has, so that they do not change."""
    return Executor(fetches, ctx, fusions=[*select(FUSIONS, settings.fusion), KEPT_FILTERS])


def infer(
    model: Module, *, ctx: Any = None, buckets: Sequence[int] | None = None
) -> InferenceProgram:
    """A model for inference alone: its weights as they are now, without dropout, with batch
    normalization folded into the layers before it, and what depends on no input computed once.

    ctx: where it runs. buckets: the batches to plan for, such as (1, 8, 32): a batch is filled up
    with zeros to the next of them, and larger ones are cut; on a GPU each is one captured graph. By
    default each batch has a plan of its own. Later changes of the model do not matter to it.
    GraphError where outputs do not have their samples along axis 0, at the first call.

    >>> classify = dl.infer(nn.LeNet5(seed=0), buckets=(1, 8))
    >>> classify(np.zeros((3, 1, 28, 28), np.float32)).shape
    (3, 10)
    """
    return InferenceProgram(model, ctx, buckets)

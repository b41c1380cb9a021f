"""evaluate and predict: a model in its inference mode over data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .. import autodiff as ad
from .. import functional as F
from .. import optim
from ..data.description import DataDescription, as_trained
from ..data.prefetch import on_device
from ..describe import brief, described
from ..dtypes import host
from ..errors import DataError, GraphError, ShapeError
from ..nn import Module
from ..ops.leaf import home_of
from ..runtime.device import Context, context_of
from .metrics import Metric, several, suiting
from .source import source_of
from .totals import Totals

Loss = Callable[[ad.Node, ad.Node], ad.Node]  # (output, label) -> the mean loss of a batch


def inputs_of(data: Any) -> tuple[ad.Node, ...]:
    """The nodes of a loader. DataError for what is none."""
    if not hasattr(data, "inputs"):
        raise DataError(
            f"expected a Loader of batches, got {type(data).__name__}; make one of a Dataset or "
            "of arrays: Loader((images, labels), batch_size)"
        )
    return tuple(data.inputs())


def output_and_label(model: Module, data: Any) -> tuple[Any, Any]:
    """A model's outputs for a loader's inputs, and the targets that a loss compares it with: one
    node, or a tuple of them, or a dictionary where fields have names, which inputs are given by.
    A loader of one's own has one target, the last. DataError for data without any.
    """
    nodes, names = inputs_of(data), getattr(data, "names", None)
    cut = len(nodes) - getattr(data, "targets", 1)
    if cut == len(nodes):
        raise DataError(
            "the data have inputs and no target to compare an output with: give the loader both, "
            "such as Loader((inputs, targets), batch_size)"
        )
    given, wanted = nodes[:cut], nodes[cut:]
    output = model(*given) if names is None else model(**dict(zip(names, given)))
    if len(wanted) == 1:
        return output, wanted[0]
    return output, wanted if names is None else dict(zip(names[cut:], wanted))


def check_as_trained(what: str, data: Any, description: DataDescription | None) -> None:
    """Raises DataError where a loader normalizes in another way than a model's description says."""
    own = DataDescription.of(data)
    if own is None or description is None:
        return
    if not own.normalization.agrees(description.normalization):
        raise DataError(
            f"{what} was trained on data normalized with mean {description.mean} and std "
            f"{description.std}, the loader has mean {own.mean} and std {own.std}: leave its "
            "normalize= out, and it takes the model's"
        )


@contextlib.contextmanager
def batches_of(
    data: Any, executor: ad.Executor, epoch: int, start: int = 0
) -> Iterator[Iterator[Any]]:
    """The feeds of an epoch of a loader that an executor reads (a loss without labels leaves some
    out), on a GPU copied there ahead. The loader ends its work when the block is left.
    """
    feeds = iter(data.epoch(epoch, start))
    inputs, read = data.inputs(), set(executor.topo_order)
    with contextlib.ExitStack() as stack:
        stack.callback(getattr(feeds, "close", _nothing))
        wanted = feeds
        if not read.issuperset(inputs):
            wanted = ({node: x for node, x in feed.items() if node in read} for feed in feeds)
        ctx = executor.ctx
        fed = any(node.op.leaf for node in inputs)  # else the data live on the device
        if ctx is not None and executor.target.streams and fed:
            wanted = stack.enter_context(contextlib.closing(on_device(wanted, ctx)))
        yield wanted


def _nothing() -> None:
    pass


class Evaluator:
    """The loss and metrics of a model over a data set, as often as wanted. precision: as of
    `Executor`.
    """

    __repr__ = described

    def __init__(
        self,
        model: Module,
        data: Any,
        metrics: Sequence[Metric] | None,
        loss: Loss,
        ctx: Context | str | None,
        precision: str = "fp32",
    ) -> None:
        inputs_of(data)
        data = as_trained(data, model.trained_on)
        check_as_trained("the model", data, model.trained_on)
        with model.in_mode(training=False):
            output, label = output_and_label(model, data)
        self._data = data
        mean = loss(output, label)
        metrics = suiting(mean, output, label) if metrics is None else metrics
        self._totals = Totals(mean, output, label, metrics)
        # The effects of the data besides each batch, such as counting batches on the device.
        effects = [effect for node in inputs_of(data) for effect in optim.effects_of(node)]
        step = ad.group_op(self._totals.update, *dict.fromkeys(effects), name="evaluate")
        self._executor = ad.Executor([step], ctx=ctx, precision=precision)

    def run(self) -> dict[str, Any]:
        """Loss and metrics by name; read from the device once."""
        self._totals.reset()
        with batches_of(self._data, self._executor, 0) as feeds:
            for feed in feeds:
                self._executor.run(feed)
        return self._totals.figures(self._totals.take())


def _context(ctx: Context | str | None, model: Module) -> Context | None:
    """Where a graph of a model runs: where it was asked for, else where its Parameters are."""
    return home_of(model) if ctx is None else context_of(ctx)


def evaluate(
    model: Module,
    data: Any,
    metrics: Sequence[Metric] | None = None,
    ctx: Context | str | None = None,
    loss: Loss = F.cross_entropy,
    precision: str = "fp32",
) -> dict[str, Any]:
    """The mean loss and the metrics of a model over one epoch of `data` (a Loader), by name.

    metrics: None is what means something for the loss, as for `fit`. precision: as of `Executor`.
    ctx: by default where the model's Parameters are; numpy if they are nowhere yet. A model is
    evaluated in its inference mode. A loader that does not say how it normalizes does it as the
    model's training data were (`model.trained_on`); DataError for one that does it otherwise.

    >>> points = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
    >>> labels = (points[:, 0] > 0).astype(np.int64)
    >>> batches = data.Loader((points, labels), 16)
    >>> model = nn.Linear(2, 2, rng=0)
    >>> sorted(train.evaluate(model, batches))
    ['accuracy', 'loss']
    """
    return Evaluator(model, data, metrics, loss, _context(ctx, model), precision).run()


def predict(
    model: Module,
    inputs: Any,
    ctx: Context | str | None = None,
    batch_size: int = 1000,
    precision: str = "fp32",
) -> Any:
    """The output (n, …) of a model in inference mode, or a tuple or a dictionary of arrays where it
    has several outputs.

    inputs: an array (n, …), or a tuple or, by name, a dictionary of them; the inputs of a data set
    or a Loader, in the order of the set; or images: a file, a folder or a list of files, made to
    the size of those that the model was trained on. A model that `fit` trained takes samples as its
    training set had them, uint8 or floats, which are normalized as they were in training
    (`model.trained_on`), unless a Loader says how; for any other model, and for several inputs,
    floats are taken in the dtype of the model's Parameters. ctx, precision: as for `evaluate`.
    batch_size: samples in a run.

    DataError for samples of another kind than those that the model was trained on; ShapeError for
    arrays of different lengths, or without any sample, for an output without
    rows of each sample, and for batch_size < 1.

    >>> train.predict(nn.Linear(2, 3), np.zeros((4, 2), np.float32)).shape
    (4, 3)
    """
    if batch_size < 1:
        raise ShapeError(f"predict: expected batch_size >= 1, got {batch_size}")
    dtypes = (parameter.dtype for _, parameter in model.named_state())
    real = next((host(dtype) for dtype in dtypes if dtype.kind == "f"), np.dtype(np.float32))
    source = source_of(inputs, model.trained_on)
    nodes: list[ad.Node] = []
    batches: list[list[np.ndarray]] = []
    for start in range(0, source.samples, batch_size):
        arrays = [_taken(x, real) for x in source.take(slice(start, start + batch_size))]
        if not nodes:
            nodes = [_variable(f"input{k}", array) for k, array in enumerate(arrays)]
            named = None if source.names is None else dict(zip(source.names, nodes))
            with model.in_mode(training=False):
                output = model(*nodes) if named is None else model(**named)
            outputs = _several_of(model, output)
            executor = ad.Executor(outputs, _context(ctx, model), precision)
        batch = executor.run(dict(zip(nodes, arrays)), convert_to_numpy_ret_vals=True)
        batches.append([_rows(x, len(arrays[0])) for x in batch])
    joined = [np.concatenate(parts) for parts in zip(*batches)]
    if isinstance(output, ad.Node):
        return joined[0]
    return dict(zip(output, joined)) if isinstance(output, Mapping) else tuple(joined)


def _several_of(model: Module, output: Any) -> list[ad.Node]:
    """The nodes of a model's output. GraphError where it is neither one nor some in a tuple."""
    found = several(output)
    if not found or not all(isinstance(node, ad.Node) for node in found):
        raise GraphError(
            f"predict: {type(model).__name__} returns {brief(output)}, expected a node, or a tuple "
            "or a dictionary of nodes: wrap the model in one that returns what is wanted"
        )
    return found


def _rows(output: np.ndarray, samples: int) -> np.ndarray:
    if not output.ndim or len(output) % samples:  # several rows a sample, as of tokens, will do
        raise ShapeError(
            f"predict: an output of shape {output.shape} does not have rows for each of {samples} "
            "samples: wrap the model in one that returns those that do"
        )
    return output


def _taken(x: Any, real: np.dtype[Any]) -> np.ndarray:
    array = np.asarray(x)
    return array.astype(real, copy=False) if array.dtype.kind == "f" else array


def _variable(name: str, array: np.ndarray) -> ad.Node:
    """A Variable for batches of an array; floats adapt to the device."""
    dtype = None if array.dtype.kind == "f" else array.dtype
    return ad.Variable(name, shape=(None, *array.shape[1:]), dtype=dtype)

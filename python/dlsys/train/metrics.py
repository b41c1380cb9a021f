"""Metrics: sums that a step leaves on the device, and the figure that the host makes of them.

They are graphs of ordinary operators. A batch's sums are float32 and exact as long as it counts
fewer than 2^24; over batches `accumulate_op` keeps them exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import autodiff as ad
from ..describe import described
from ..errors import DlsysError, GraphError
from ..graph.infer import infer
from ..ops.loss.classification import classes_like_op
from ..ops.loss.cross_entropy import (
    cross_entropy_rows_op,
    softmaxcrossentropy_op,
    sparse_cross_entropy_rows_op,
)
from ..ops.loss.rows import class_scores_op, is_integer, target_of, target_op

_AVERAGES = ("macro", "micro", None)
_OF_CLASSES = {
    cross_entropy_rows_op, sparse_cross_entropy_rows_op, softmaxcrossentropy_op, classes_like_op,
}  # fmt: skip
# Losses of outputs that decide between two classes: above which output, and which label, it is the
# positive one.
_BINARY = {
    "binary_cross_entropy": (0.5, 0.5),
    "binary_cross_entropy_with_logits": (0.0, 0.5),
    "hinge_loss": (0.0, 0.0),
}


class Metric:
    """A figure over a data set. A subclass sets `name` and `size` and has the two methods."""

    __repr__ = described

    name: str  # its key in records
    size: int  # how many sums it needs

    def sums(self, output: ad.Node, label: ad.Node) -> ad.Node:
        """float32 (size,): what one batch adds. `output` is (…, classes), `label` class indices
        (…), or weights (…, classes) whose largest counts.
        """
        raise NotImplementedError

    def result(self, sums: np.ndarray) -> Any:
        """A number, or an array, from the sums over all batches, float64 (size,)."""
        raise NotImplementedError


class Accuracy(Metric):
    """The share of rows whose largest output, the first of equal ones, is the label's."""

    name = "accuracy"
    size = 2

    def sums(self, output: ad.Node, label: ad.Node) -> ad.Node:
        taken = predicted(output)
        return _hits(ad.equal_op(taken, target_of(self.name, taken, class_indices(label))))

    def result(self, sums: np.ndarray) -> float:
        return _ratio(sums[0], sums[1])


class BinaryAccuracy(Metric):
    """The share of outputs that are on their label's side: above `threshold` where the label is
    above `label_threshold`, and not above it elsewhere; NaN is on no side. Outputs and labels have
    one shape. The default is for logits and labels of 0 and 1.
    """

    name = "binary_accuracy"
    size = 2

    def __init__(self, threshold: float = 0.0, label_threshold: float = 0.5) -> None:
        self._threshold, self._label_threshold = float(threshold), float(label_threshold)

    def sums(self, output: ad.Node, label: ad.Node) -> ad.Node:
        label = ad.cast_op(target_of(self.name, output, label), np.float32)
        taken = ad.greater_op(output, self._threshold)
        right = ad.equal_op(taken, ad.greater_op(label, self._label_threshold))
        return _hits(ad.logical_and_op(right, ad.equal_op(output, output)))

    def result(self, sums: np.ndarray) -> float:
        return _ratio(sums[0], sums[1])


class TopK(Metric):
    """The share of rows whose label is among the k largest outputs; of equal outputs the first come
    first, so that k = 1 is the accuracy.
    """

    size = 2

    def __init__(self, k: int) -> None:
        if k < 1:
            raise GraphError(f"TopK: expected k >= 1, got {k}")
        self.name = f"top{k}"
        self._k = k

    def sums(self, output: ad.Node, label: ad.Node) -> ad.Node:
        rows = classes_like_op(output, class_indices(label))
        own = ad.sum_op(ad.where_op(ad.greater_op(rows, 0.5), output, 0.0), -1, keepdims=True)
        earlier = ad.less_op(ad.cumsum_op(rows, axis=-1), 0.5)
        tied = ad.logical_and_op(ad.equal_op(output, own), earlier)
        ahead = ad.cast_op(ad.logical_or_op(ad.greater_op(output, own), tied), np.float32)
        among = ad.less_op(ad.sum_op(ahead, axis=-1, keepdims=True), self._k - 0.5)
        return _hits(ad.logical_and_op(among, ad.equal_op(own, own)))  # NaN is never among them

    def result(self, sums: np.ndarray) -> float:
        return _ratio(sums[0], sums[1])


class ConfusionMatrix(Metric):
    """The counts of each class (row) predicted as each class (column), int64.

    classes: how many there are.
    """

    name = "confusion"

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self.size = classes * classes

    def sums(self, output: ad.Node, label: ad.Node) -> ad.Node:
        labels, taken = _one_hot_pair(self.name, output, label, self._classes)
        return ad.reshape_op(ad.matmul_op(labels, taken, trans_A=True), (self.size,))

    def result(self, sums: np.ndarray) -> np.ndarray:
        return sums.reshape(self._classes, self._classes).astype(np.int64)


class _PerClass(Metric):
    """Figures made of three counts a class: right, predicted and present.

    average: "macro", the mean over the classes that were present or predicted; "micro", of the
    counts of all classes together; None, an array with one figure a class, NaN where undefined. A
    class that is undefined in a macro mean counts 0.
    """

    def __init__(self, classes: int, average: str | None = "macro") -> None:
        if average not in _AVERAGES:
            raise GraphError(f"{type(self).__name__}: average must be macro, micro or None")
        self._classes = classes
        self._average = average
        self.size = 3 * classes
        suffix = {"macro": "", "micro": "_micro", None: "_per_class"}[average]
        self.name = type(self).__name__.lower() + suffix

    def sums(self, output: ad.Node, label: ad.Node) -> ad.Node:
        labels, taken = _one_hot_pair(self.name, output, label, self._classes)
        return ad.concat([ad.sum_op(x, axis=0) for x in (labels * taken, taken, labels)])

    def result(self, sums: np.ndarray) -> Any:
        counts = sums.reshape(3, self._classes)
        if self._average == "micro":
            return float(self._figure(*counts.sum(axis=1)))
        figures = self._figure(*counts)
        if self._average is None:
            return figures
        seen = counts[1] + counts[2] > 0
        return float(np.nan_to_num(figures[seen]).mean()) if seen.any() else np.nan

    @staticmethod
    def _figure(right: Any, predicted: Any, present: Any) -> Any:
        raise NotImplementedError


class Precision(_PerClass):
    """The share of what was taken for a class that is of it.

    classes: how many there are. average: "macro" is the mean over classes, "micro" counts all
    classes together, None gives one number a class.
    """

    @staticmethod
    def _figure(right: Any, predicted: Any, present: Any) -> Any:
        return _ratio(right, predicted)


class Recall(_PerClass):
    """The share of a class that was taken for it.

    classes: how many there are. average: "macro" is the mean over classes, "micro" counts all
    classes together, None gives one number a class.
    """

    @staticmethod
    def _figure(right: Any, predicted: Any, present: Any) -> Any:
        return _ratio(right, present)


class F1(_PerClass):
    """The harmonic mean of precision and recall.

    classes: how many there are. average: "macro" is the mean over classes, "micro" counts all
    classes together, None gives one number a class.
    """

    @staticmethod
    def _figure(right: Any, predicted: Any, present: Any) -> Any:
        return _ratio(2 * right, predicted + present)


accuracy = Accuracy()


def several(nodes: Any) -> list[ad.Node]:
    """The nodes of an output or a target: itself, or those in a tuple or a dictionary."""
    if isinstance(nodes, ad.Node):
        return [nodes]
    return list(nodes.values() if isinstance(nodes, Mapping) else nodes)


def suiting(loss: ad.Node, output: Any, label: Any) -> tuple[Metric, ...]:
    """The metrics that mean something for a loss of `output` and `label`: the accuracy where it
    compares scores of classes with labels, the binary accuracy where one output decides between two
    classes, none where it compares values. For a loss of other operators: the accuracy if the
    labels are integers and there is a row of scores for each, as far as shapes are known. None for
    several outputs or targets.
    """
    if len(several(output)) > 1 or len(several(label)) > 1:
        return ()
    given = set(ad.find_topo_sort([output, label]))
    made = [node for node in ad.find_topo_sort([loss]) if node not in given]
    compared = {node.attrs["loss"] for node in made if node.op is target_op}
    if "multiclass_hinge_loss" in compared or any(node.op in _OF_CLASSES for node in made):
        return (accuracy,)
    binary = {_BINARY[name] for name in compared if name in _BINARY}
    if compared:
        return (BinaryAccuracy(*binary.pop()),) if len(binary) == 1 else ()
    scores, labels = _shape(output), _shape(label)
    rows = scores is not None and scores[:-1] == labels and scores[-1:] > (1,)
    return (accuracy,) if rows and is_integer(label) else ()


def _shape(node: ad.Node) -> tuple[int, ...] | None:
    """The shape of a node for batches of one, None where what is fed has no declared shape."""
    order = ad.find_topo_sort([node])
    feeds = [x for x in order if x.op.leaf == "feed" and x.spec is None]
    if any("shape" not in x.attrs for x in feeds):
        return None
    leaves = {
        x: ad.Spec(tuple(n or 1 for n in x.attrs["shape"]), x.attrs.get("dtype", np.float32))
        for x in feeds
    }
    try:
        return infer(order, leaves)[node].shape
    except DlsysError:  # the graph takes batches of one size alone
        return None


def predicted(output: ad.Node) -> ad.Node:
    """The class indices (…) of the largest outputs (…, classes), int64; ShapeError for outputs of
    a single class.
    """
    return ad.argmax_op(class_scores_op(output), axis=-1)


def class_indices(label: ad.Node) -> ad.Node:
    """Labels as int64 class indices; rows of weights count as their largest."""
    return ad.cast_op(label, np.int64) if is_integer(label) else ad.argmax_op(label, axis=-1)


def _hits(right: ad.Node) -> ad.Node:
    """The count of hits and the count of samples, (2,)."""
    right = ad.cast_op(right, np.float32)
    counts = [ad.sum_op(right), ad.sum_op(ad.oneslike_op(right))]
    return ad.concat([ad.reshape_op(count, (1,)) for count in counts])


def _one_hot_pair(
    name: str, output: ad.Node, label: ad.Node, classes: int
) -> tuple[ad.Node, ad.Node]:
    taken = predicted(output)
    classified = (target_of(name, taken, class_indices(label)), taken)
    labels, taken = (ad.one_hot_op(ad.reshape_op(x, (-1,)), classes) for x in classified)
    return labels, taken


def _ratio(part: Any, total: Any) -> Any:
    with np.errstate(invalid="ignore"):
        return np.divide(part, total)

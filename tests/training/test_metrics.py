"""Metrics on every device against formulas in numpy, and the sums that carry them over batches."""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim, train
from dlsys.data import Loader
from dlsys.errors import GraphError, ShapeError
from dlsys.runtime.device import Context
from dlsys.train.metrics import Metric
from dlsys.train.totals import Totals
from support.devices import on_native_devices

CLASSES = 5


def scored(metric: Metric, batches: Any, ctx: Context | None, dtype: Any = np.int64) -> Any:
    """A metric over batches of (outputs, labels), by way of the totals of a run."""
    output, label = ad.Variable("output", dtype=np.float32), ad.Variable("label", dtype=dtype)
    totals = Totals(ad.mean_op(output), output, label, [metric])
    executor = ad.Executor([ad.group_op(totals.update)], ctx)
    for outputs, labels in batches:
        executor.run({output: outputs.astype(np.float32), label: np.asarray(labels, dtype)})
    return totals.figures(totals.take())[metric.name]


def batches(seed: int = 0, sizes: Any = (7, 64, 1)) -> list[tuple[np.ndarray, np.ndarray]]:
    """Outputs and labels; class 4 is never present and class 3 never predicted."""
    rng = np.random.default_rng(seed)
    made = []
    for n in sizes:
        outputs = rng.standard_normal((n, CLASSES)).astype(np.float32)
        outputs[:, 3] = -10
        made.append((outputs, rng.integers(0, CLASSES - 1, n)))
    return made


def joined(given: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([x for x, _ in given]), np.concatenate([y for _, y in given])


class Metrics:
    ctx: Context | None

    def check(self, metric: Metric, expected: Any, given: Any = None) -> None:
        got = scored(metric, batches() if given is None else given, self.ctx)
        np.testing.assert_allclose(got, expected, rtol=1e-12)

    def test_accuracy(self) -> None:
        x, y = joined(batches())
        self.check(train.accuracy, np.mean(x.argmax(1) == y))

    def test_accuracy_of_positions_in_sequences(self) -> None:
        rng = np.random.default_rng(1)
        x, y = rng.standard_normal((6, 9, CLASSES)), rng.integers(0, CLASSES, (6, 9))
        self.check(train.accuracy, np.mean(x.argmax(-1) == y), [(x, y)])

    def test_accuracy_of_labels_that_are_weights(self) -> None:
        rng = np.random.default_rng(2)
        x, y = rng.standard_normal((20, CLASSES)), rng.random((20, CLASSES))
        got = scored(train.accuracy, [(x, y)], self.ctx, np.float32)
        self.assertAlmostEqual(got, np.mean(x.argmax(1) == y.argmax(1)), places=12)

    def test_binary_accuracy(self) -> None:
        rng = np.random.default_rng(3)
        x, y = rng.standard_normal((60, 1)), rng.integers(0, 2, (60, 1))
        x[0], y[0] = np.nan, 0
        right = (x > 0) == y
        right[0] = False
        given = [(x[:40], y[:40]), (x[40:], y[40:])]
        self.check(train.BinaryAccuracy(), right.mean(), given)
        signs = [(a, 2 * b - 1) for a, b in given]
        self.check(train.BinaryAccuracy(label_threshold=0), right.mean(), signs)
        self.check(train.BinaryAccuracy(0.5), np.mean((x > 0.5) == y) - 1 / 60, given)

    def test_small_integers_are_labels_too(self) -> None:
        x, y = joined(batches())
        for dtype in (np.uint8, np.int32):
            got = scored(train.accuracy, batches(), self.ctx, dtype)
            self.assertAlmostEqual(got, np.mean(x.argmax(1) == y), places=12)

    def test_top_k(self) -> None:
        x, y = joined(batches())
        ahead = (x > x[np.arange(len(y)), y][:, None]).sum(1)
        for k in range(1, CLASSES + 1):
            self.check(train.TopK(k), np.mean(ahead < k))

    def test_top_k_of_equal_outputs_takes_the_first(self) -> None:
        same = [(np.zeros((CLASSES, CLASSES)), np.arange(CLASSES))]
        for k in (1, 2, 4):
            self.check(train.TopK(k), k / CLASSES, same)
        self.check(train.accuracy, 1 / CLASSES, same)

    def test_nan_is_never_among_the_largest(self) -> None:
        x = np.zeros((4, CLASSES), np.float32)
        x[:2] = np.nan
        self.check(train.TopK(CLASSES), 0.5, [(x, np.arange(4))])

    def test_confusion_matrix(self) -> None:
        x, y = joined(batches())
        expected = np.zeros((CLASSES, CLASSES), np.int64)
        np.add.at(expected, (y, x.argmax(1)), 1)
        got = scored(train.ConfusionMatrix(CLASSES), batches(), self.ctx)
        np.testing.assert_array_equal(got, expected)
        self.assertEqual(got.dtype, np.int64)
        self.assertNotEqual(expected[0, 1], expected[1, 0])  # so that rows are told from columns

    def test_precision_recall_and_f1(self) -> None:
        x, y = joined(batches())
        taken = x.argmax(1)
        right, predicted, present = (
            np.array([np.sum(rows == k) for k in range(CLASSES)], float)
            for rows in (y[taken == y], taken, y)
        )
        with np.errstate(invalid="ignore"):
            figures = {
                train.Precision: right / predicted,
                train.Recall: right / present,
                train.F1: 2 * right / (predicted + present),
            }
        for kind, per_class in figures.items():
            with self.subTest(kind=kind.__name__):
                self.check(kind(CLASSES, average=None), per_class)
                self.check(kind(CLASSES), np.nan_to_num(per_class).mean())
                self.check(kind(CLASSES, average="micro"), np.mean(taken == y))

    def test_macro_means_leave_out_classes_that_nobody_mentions(self) -> None:
        x, y = np.eye(CLASSES)[[0, 1, 1]], np.array([0, 0, 1])
        self.check(train.Precision(CLASSES), (1 + 0.5) / 2, [(x, y)])
        self.check(train.Recall(CLASSES), (0.5 + 1) / 2, [(x, y)])

    def test_the_loss_is_the_mean_over_rows_of_batches_of_any_size(self) -> None:
        output, label = ad.Variable("output"), ad.Variable("label", dtype=np.int64)
        totals = Totals(ad.mean_op(output), output, label, [])
        executor = ad.Executor([ad.group_op(totals.update)], self.ctx)
        values = np.arange(12, dtype=np.float32).reshape(6, 2)
        for part in (slice(0, 4), slice(4, 6)):
            executor.run({output: values[part]})
        sums = totals.take()
        np.testing.assert_array_equal(sums, [33, 6])
        self.assertEqual(totals.figures(sums), {"loss": 5.5})
        np.testing.assert_array_equal(totals.take(), [0, 0])

    def test_counting_the_rows_costs_no_reduction(self) -> None:
        output, label = ad.Variable("output"), ad.Variable("label", dtype=np.int64)
        totals = Totals(ad.mean_op(output), output, label, [])
        plan = ad.Executor([ad.group_op(totals.update)], self.ctx).plan({output: (50, 3)})
        reductions = [step.node.name for step in plan.steps if "sum" in (step.node.op.kernel or "")]
        self.assertEqual(len(reductions), 1, plan)  # the loss itself

    def test_sums_count_beyond_what_float32_counts(self) -> None:
        total = ad.Parameter(np.zeros((2, 2), np.float32), "total", trainable=False)
        x = ad.Variable("x", dtype=np.float32)
        executor = ad.Executor([ad.group_op(ad.accumulate_op(total, x))], self.ctx)
        terms = [2.0**24, 1, 1, 1, 2.0**30, 3, 0.25]
        for term in terms:
            executor.run({x: np.array([term, -term], np.float32)})
        sums = total.asnumpy().astype(np.float64).sum(axis=0)
        np.testing.assert_array_equal(sums, [sum(terms), -sum(terms)])
        self.assertNotEqual(float(np.float32(sum(terms))), sum(terms))


class NumpyMetrics(Metrics, unittest.TestCase):
    ctx = None


CpuMetrics, GpuMetrics = on_native_devices(Metrics)


class Suiting(unittest.TestCase):
    """The metrics that `fit` and `evaluate` report by default."""

    def names(self, loss: Any, width: int, labels: np.ndarray) -> set[str]:
        x = np.random.default_rng(0).standard_normal((len(labels), 4)).astype(np.float32)
        data, net = Loader((x, labels), 10), nn.Linear(4, width)
        history = train.fit(net, data, optim.SGD(0.1), loss, validation=data, quiet=True)
        found = train.evaluate(net, data, loss=loss)
        record = history.epochs[0]
        for name, value in found.items():
            self.assertEqual(record[f"val_{name}"], value)
        usual = {"epoch", "step", "lr", "seconds", "samples_per_second", "loss"}
        return {name for name in record if not name.startswith("val_")} - usual

    def test_only_what_means_something_is_reported(self) -> None:
        numbers, ones = np.arange(20) % 3, np.float32(np.arange(20).reshape(20, 1) % 2)
        rows = np.eye(3, dtype=np.float32)[numbers]

        def smooth(output: ad.Node, label: ad.Node) -> ad.Node:
            return ad.softmax_cross_entropy(output, label, label_smoothing=0.1)

        def likelihood(output: ad.Node, label: ad.Node) -> ad.Node:
            return ad.negative_log_likelihood(ad.log_softmax_op(output), label)

        def square(output: ad.Node, label: ad.Node) -> ad.Node:
            return ad.mean_op(output * output)

        def probability(output: ad.Node, label: ad.Node) -> ad.Node:
            return ad.binary_cross_entropy(ad.sigmoid_op(output), label)

        cases: tuple[tuple[Any, int, np.ndarray, set[str]], ...] = (
            (ad.softmax_cross_entropy, 3, numbers, {"accuracy"}),
            (ad.softmax_cross_entropy, 3, rows, {"accuracy"}),
            (smooth, 3, numbers, {"accuracy"}),
            (smooth, 3, rows, {"accuracy"}),
            (likelihood, 3, numbers, {"accuracy"}),
            (ad.multiclass_hinge_loss, 3, numbers, {"accuracy"}),
            (ad.multiclass_hinge_loss, 3, rows, {"accuracy"}),
            (square, 3, numbers, {"accuracy"}),
            (square, 1, numbers, set()),
            (square, 3, rows, set()),
            (ad.binary_cross_entropy_with_logits, 1, ones, {"binary_accuracy"}),
            (probability, 1, ones, {"binary_accuracy"}),
            (ad.hinge_loss, 1, 2 * ones - 1, {"binary_accuracy"}),
            (ad.mean_squared_error, 1, ones, set()),
            (ad.mean_absolute_error, 3, rows, set()),
            (ad.huber_loss, 3, rows, set()),
            (ad.kl_divergence, 3, rows, set()),
        )
        for loss, width, labels, expected in cases:
            with self.subTest(loss=loss.__name__, width=width, labels=labels.shape):
                self.assertEqual(self.names(loss, width, labels), expected)

    def test_a_binary_accuracy_is_the_right_one(self) -> None:
        x = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
        labels = (x[:, :1] > 0).astype(np.float32)
        net = nn.Linear(4, 1)
        loss = ad.binary_cross_entropy_with_logits
        train.fit(net, Loader((x, labels), 20), optim.SGD(0.5), loss, epochs=3, quiet=True)
        found = train.evaluate(net, Loader((x, labels), 64), loss=loss)
        right = np.mean((train.predict(net, x) > 0) == (labels > 0))
        self.assertAlmostEqual(found["binary_accuracy"], right, places=12)
        self.assertGreater(right, 0.9)


class Refusals(unittest.TestCase):
    def test_two_metrics_of_one_name(self) -> None:
        output, label = ad.Variable("output"), ad.Variable("label", dtype=np.int64)
        twice = [train.Accuracy(), train.Accuracy()]
        with self.assertRaisesRegex(GraphError, "names of their own, got loss, accuracy, accuracy"):
            Totals(ad.mean_op(output), output, label, twice)

    def test_shapes_that_mean_nothing(self) -> None:
        for metric, outputs, labels, message in (
            (train.accuracy, (6, 1), (6,), r"two classes at least, got .* \(6, 1\); train.Binary"),
            (train.F1(2), (6,), (6,), "f1: prediction and target must have one shape"),
            (train.accuracy, (6, 3), (6, 1), r"accuracy: prediction and target .* \(6, 1\)"),
            (train.BinaryAccuracy(), (6, 1), (6,), r"binary_accuracy: .*one shape, .* \(6,\)"),
        ):
            with self.subTest(outputs=outputs, labels=labels):
                given = [(np.zeros(outputs), np.zeros(labels))]
                with self.assertRaisesRegex(ShapeError, message):
                    scored(metric, given, None)

    def test_attributes_that_mean_nothing(self) -> None:
        with self.assertRaisesRegex(GraphError, "k >= 1, got 0"):
            train.TopK(0)
        with self.assertRaisesRegex(GraphError, "average must be macro, micro or None"):
            train.Recall(3, average="weighted")

"""Losses and normalization against PyTorch on the CPU, with gradients.

On numpy in float64, on the CPU device in float32. Convolution is compared in test_conv.py.
"""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray, optim
from support.devices import needs_torch, require

torch: Any = import_module("torch") if find_spec("torch") else None
F: Any = torch and torch.nn.functional

REDUCTIONS = ("mean", "sum", "none")
LABELS = (np.int64, np.int32, np.uint8)
ROWS, CLASSES = 7, 5


def tensor(x: np.ndarray) -> Any:
    return torch.tensor(x if x.dtype.kind == "f" else x.astype(np.int64))


def given(weights: Any, ignored: int | None) -> dict[str, Any]:
    """PyTorch's names, without options that are None: it has no such value for one of them."""
    options = {"weight": weights if weights is None else tensor(weights), "ignore_index": ignored}
    return {name: value for name, value in options.items() if value is not None}


class AgainstTorch:
    ctx: Any = None
    dtype: Any = np.float64
    rtol = 1e-11  # of the largest element

    def setUp(self) -> None:
        self.rng = np.random.default_rng(0)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape)

    def compare(
        self, ours: Callable, theirs: Callable, arrays: Sequence[np.ndarray],
        constants: Sequence[np.ndarray] = (), options: Sequence[Any] = (), factor: float = 1,
    ) -> None:  # fmt: skip
        """Values, and gradients for `arrays`, of functions of arrays, constants and options."""
        shapes = [x.shape for x in arrays]
        dtypes = [str(x.dtype) for x in constants]
        with self.subTest(options=options, shapes=shapes, constants=dtypes):
            arrays, constants = self.rounded(*arrays), self.rounded(*constants)
            tensors = [tensor(x).requires_grad_() for x in arrays]
            value = theirs(*tensors, *map(tensor, constants), *options)
            (weights,) = self.rounded(self.normal(*value.shape))
            (value * tensor(weights)).sum().backward()
            wanted = [value.detach(), *(x.grad for x in tensors)]
            results = self.run_ours(ours, options, [*arrays, *constants, weights], len(arrays))
            for k, (result, expected) in enumerate(zip(results, wanted)):
                self.close(result, expected.numpy(), factor, f"gradient {k}" if k else "value")

    def run_ours(
        self, function: Callable, options: Sequence[Any], fed: list[np.ndarray], count: int
    ) -> list[np.ndarray]:
        """The value and its gradients for the first `count` arrays; the last array is weights."""
        nodes = [ad.Variable("x", dtype=None if x.dtype.kind == "f" else x.dtype) for x in fed]
        y = function(*nodes[:-1], *options)
        gradients = ad.gradients(ad.sum_op(y * nodes[-1]), nodes[:count])
        feeds = dict(zip(nodes, map(self.in_dtype, fed)))
        return ad.Executor([y, *gradients], self.ctx).run(feeds, convert_to_numpy_ret_vals=True)

    def rounded(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Arrays for both sides: float64 here, but exact in the dtype of the test."""
        return [x.astype(self.dtype).astype(float) if x.dtype.kind == "f" else x for x in arrays]

    def in_dtype(self, x: np.ndarray) -> np.ndarray:
        return x.astype(self.dtype) if x.dtype.kind == "f" else x

    def close(self, result: np.ndarray, wanted: np.ndarray, factor: float, what: Any) -> None:
        self.assertEqual((result.shape, result.dtype), (wanted.shape, self.dtype), what)
        allowed = factor * self.rtol * np.abs(wanted).max(initial=1e-12)
        self.assertLessEqual(np.abs(result - wanted).max(initial=0), allowed, what)

    # ---- losses ----

    def logits(self) -> np.ndarray:
        """Of ordinary size, or so large that exp overflows."""
        return self.rng.choice([3, 1e4]) * self.rng.uniform(-1, 1, (ROWS, CLASSES))

    def class_numbers(self, ignored: int | None) -> np.ndarray:
        labels = self.rng.integers(0, CLASSES, ROWS)
        if ignored is not None:
            labels[::3] = ignored
        return labels.astype(LABELS[self.rng.integers(len(LABELS))])

    def class_weights(self) -> tuple[Any, Any]:
        return None, self.rounded(self.rng.uniform(0.2, 2, CLASSES))[0]

    def test_cross_entropy_of_class_numbers(self) -> None:
        for reduction, smoothing, weights, ignored in itertools.product(
            REDUCTIONS, (0.0, 0.1), self.class_weights(), (None, 2, 255)
        ):
            self.compare(
                lambda x, y, r, s, w, i: ad.softmax_cross_entropy(x, y, r, s, w, i),
                lambda x, y, r, s, w, i: F.cross_entropy(
                    x, y, reduction=r, label_smoothing=s, **given(w, i)
                ),
                [self.logits()],
                [self.class_numbers(ignored)],
                (reduction, smoothing, weights, ignored),
            )

    def test_cross_entropy_of_rows_of_labels(self) -> None:
        hard = np.eye(CLASSES)[self.rng.integers(0, CLASSES, ROWS)]
        soft = self.rng.dirichlet(np.ones(CLASSES), ROWS)
        for reduction, smoothing, weights, labels in itertools.product(
            REDUCTIONS, (0.0, 0.1), self.class_weights(), (hard, soft)
        ):
            self.compare(
                lambda x, y, r, s, w: ad.softmax_cross_entropy(x, y, r, s, w),
                lambda x, y, r, s, w: F.cross_entropy(
                    x, y, reduction=r, label_smoothing=s, **given(w, None)
                ),
                [self.logits()],
                [labels],
                (reduction, smoothing, weights),
            )

    def test_negative_log_likelihood(self) -> None:
        log = np.log(self.rng.dirichlet(np.ones(CLASSES), ROWS))
        for reduction, weights, ignored in itertools.product(
            REDUCTIONS, self.class_weights(), (None, 2, 255)
        ):
            self.compare(
                lambda x, y, r, w, i: ad.negative_log_likelihood(x, y, r, w, i),
                lambda x, y, r, w, i: F.nll_loss(x, y, reduction=r, **given(w, i)),
                [log],
                [self.class_numbers(ignored)],
                (reduction, weights, ignored),
            )

    def test_regression(self) -> None:
        pair = self.normal(2, ROWS, CLASSES)
        for reduction in REDUCTIONS:
            for ours, theirs in (
                (ad.mean_squared_error, F.mse_loss),
                (ad.mean_absolute_error, F.l1_loss),
            ):
                self.compare(
                    lambda p, t, r, f, _: f(p, t, r),
                    lambda p, t, r, _, f: f(p, t, reduction=r),
                    pair,
                    options=(reduction, ours, theirs),
                )
            for delta in (0.5, 1.0, 3.0):
                self.compare(
                    lambda p, t, r, d: ad.huber_loss(p, t, d, r),
                    lambda p, t, r, d: F.huber_loss(p, t, delta=d, reduction=r),
                    pair,
                    options=(reduction, delta),
                )

    def test_binary_cross_entropy(self) -> None:
        labels = self.rng.uniform(0, 1, (ROWS, CLASSES))
        labels[0], labels[1] = 0, 1
        probabilities = self.rng.uniform(0.01, 0.99, (ROWS, CLASSES))
        weights = (1.0, 2.5, np.linspace(0.5, 3, CLASSES))
        for reduction, positive in itertools.product(REDUCTIONS, weights):
            self.compare(
                lambda p, y, r: ad.binary_cross_entropy(p, y, r),
                lambda p, y, r: F.binary_cross_entropy(p, y, reduction=r),
                [probabilities],
                [labels],
                (reduction,),
            )
            self.compare(
                lambda x, y, r, w: ad.binary_cross_entropy_with_logits(x, y, r, w),
                lambda x, y, r, w: F.binary_cross_entropy_with_logits(
                    x, y, reduction=r, pos_weight=torch.tensor(w)
                ),
                [self.logits()],
                [labels],
                (reduction, positive),
            )

    def test_multiclass_hinge(self) -> None:
        labels = self.class_numbers(None)
        hard = np.eye(CLASSES)[labels]
        for reduction, margin, chosen in itertools.product(
            REDUCTIONS, (0.5, 1.0, 2.0), (labels, hard)
        ):
            self.compare(
                lambda x, y, r, m: ad.multiclass_hinge_loss(x, y, m, r),
                lambda x, y, r, m: F.multi_margin_loss(
                    x, y if y.ndim == 1 else y.argmax(-1), margin=m, reduction=r
                ),
                [self.logits()],
                [chosen],
                (reduction, margin),
            )

    def test_kl_divergence(self) -> None:
        p, q = self.rng.dirichlet(np.ones(CLASSES), (2, ROWS))
        p[0] = np.eye(CLASSES)[2]
        reduce = {"mean": lambda x: x.mean(), "sum": lambda x: x.sum(), "none": lambda x: x}
        for reduction in REDUCTIONS:
            self.compare(
                lambda q, p, r: ad.kl_divergence(q, p, r),
                lambda q, p, r: reduce[r](F.kl_div(q, p, reduction="none").sum(-1)),
                [np.log(q)],
                [p],
                (reduction,),
            )

    # ---- normalization ----

    def each_shape(self, axis: int = 1) -> Any:
        """x with a scale and a bias for `axis`, and eps."""
        shapes = (4, 6, 5, 5), (9, 16), (2, 6, 9), (3, 2, 3, 4, 7)
        for shape, eps in itertools.product(shapes, (1e-5, 0.1)):
            yield [2 * self.normal(*shape) + 1, *self.normal(2, shape[axis])], eps

    def test_batch_normalization_in_training(self) -> None:
        for arrays, eps in self.each_shape():
            self.compare(
                lambda x, s, b, e: ad.batch_normalization(x, s, b, eps=e),
                lambda x, s, b, e: F.batch_norm(x, None, None, s, b, True, eps=e),
                arrays,
                options=(eps,),
                factor=8,
            )

    def test_batch_normalization_in_inference(self) -> None:
        def ours(x: Any, s: Any, b: Any, e: float, *statistics: np.ndarray) -> Any:
            states = [ad.Parameter(self.in_dtype(v), trainable=False) for v in statistics]
            return ad.batch_normalization(x, s, b, *states, eps=e, training=False)

        for arrays, eps in self.each_shape():
            count = arrays[0].shape[1]
            statistics = self.rounded(self.normal(count), self.rng.uniform(0.5, 2, count))
            self.compare(
                ours,
                lambda x, s, b, e, *v: F.batch_norm(x, *map(tensor, v), s, b, False, eps=e),
                arrays,
                options=(eps, *statistics),
                factor=8,
            )

    def test_running_statistics(self) -> None:
        """Those of three training steps with batches of different sizes."""
        for momentum in (0.1, 0.75):
            zeros, ones = np.zeros(3, self.dtype), np.ones(3, self.dtype)
            states = [ad.Parameter(v, trainable=False) for v in (zeros, ones)]
            scale, bias = ad.Parameter(ones), ad.Parameter(zeros)
            tensors = torch.zeros(3).double(), torch.ones(3).double()
            x = ad.Variable("x")
            loss = ad.sum_op(ad.batch_normalization(x, scale, bias, *states, momentum))
            train = optim.SGD(0.0).minimize(loss, [scale, bias])
            step = ad.Executor([loss, train], self.ctx)
            for batch in (2, 7, 4):
                (values,) = self.rounded(3 * self.normal(batch, 3, 4, 5) + 2)
                step.run({x: self.in_dtype(values)})
                F.batch_norm(tensor(values), *tensors, None, None, True, momentum)
            for state, wanted in zip(states, tensors):
                self.close(state.asnumpy(), wanted.numpy(), 1, momentum)

    def test_layer_normalization(self) -> None:
        for arrays, eps in self.each_shape(axis=-1):
            self.compare(
                lambda x, s, b, e: ad.layer_normalization(x, s, b, e),
                lambda x, s, b, e: F.layer_norm(x, s.shape, s, b, e),
                arrays,
                options=(eps,),
                factor=8,
            )

    def test_rms_normalization(self) -> None:
        for arrays, eps in self.each_shape(axis=-1):
            self.compare(
                lambda x, s, e: ad.rms_normalization(x, s, eps=e),
                lambda x, s, e: F.rms_norm(x, s.shape, s, e),
                arrays[:2],
                options=(eps,),
                factor=8,
            )

    def test_group_normalization(self) -> None:
        for (arrays, eps), groups in itertools.product(self.each_shape(), (1, 2)):
            self.compare(
                lambda x, s, b, g, e: ad.group_normalization(x, s, b, g, e),
                lambda x, s, b, g, e: F.group_norm(x, g, s, b, e),
                arrays,
                options=(groups, eps),
                factor=8,
            )

    def test_instance_normalization(self) -> None:
        for arrays, eps in self.each_shape():
            if arrays[0].ndim > 2:
                self.compare(
                    lambda x, s, b, e: ad.instance_normalization(x, s, b, e),
                    lambda x, s, b, e: F.instance_norm(x, None, None, s, b, eps=e),
                    arrays,
                    options=(eps,),
                    factor=8,
                )


@needs_torch
class NumpyAgainstTorch(AgainstTorch, unittest.TestCase):
    pass


@needs_torch
@require(ndarray.cpu(0))
class CpuAgainstTorch(AgainstTorch, unittest.TestCase):
    ctx = ndarray.cpu(0)
    dtype = np.float32
    rtol = 2e-6

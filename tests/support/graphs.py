"""Graphs and short cuts that several tests share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import optim
from dlsys.graph.infer import infer
from dlsys.graph.node import Node, find_topo_sort
from dlsys.passes.simplify import simplify
from dlsys.runtime.target import Target


class Everything:
    """A container that everything is in."""

    def __contains__(self, item: object) -> bool:
        return True


NATIVE = Target("native", Everything())  # with every kernel, for passes that no device is behind


def evaluate(fetches: Sequence[Node], feeds: Mapping[Node, Any] | None = None, ctx=None) -> list:
    """The values of some nodes, computed once, as numpy arrays."""
    return ad.Executor(fetches, ctx).run(feeds or {}, convert_to_numpy_ret_vals=True)


def variable(name: str, *shape: int, dtype: Any = np.float32) -> Node:
    """A Variable whose spec is known."""
    return ad.Variable(name, shape=shape, dtype=dtype)


def simplified(fetches: Sequence[Node]) -> list[Node]:
    """The fetches of a graph of such Variables as the passes for native devices get them."""
    order = find_topo_sort(fetches)
    leaves = {x: x.spec for x in order if x.op.leaf in ("feed", "state")}
    return simplify(infer(order, leaves, native=True), fetches, NATIVE)


def operators(fetches: Sequence[Node]) -> list[str]:
    """The names of the operators that compute in a graph, sorted."""
    order = find_topo_sort(fetches)
    return sorted(x.op.name for x in order if not (x.op.leaf or x.op.view or not x.op.outputs))


def here() -> str:
    """The caller's source line as messages show it, such as `test_graph.py:31`."""
    caller = inspect.stack()[1]
    return f"{caller.filename.rsplit('/', 1)[-1]}:{caller.lineno}"


class Training:
    """An MLP with its loss and its update: `x`, `labels`, `parameters`, `loss`, `train`."""

    def __init__(self, widths=(784, 256, 100, 10), momentum=0.0, seed=0) -> None:
        rng = np.random.default_rng(seed)
        self.widths = widths
        self.x, self.labels = ad.Variable("x"), ad.Variable("labels")
        self.parameters = []
        y = self.x
        for k, (rows, columns) in enumerate(zip(widths, widths[1:])):
            w = ad.Parameter(
                (0.1 * rng.standard_normal((rows, columns))).astype(np.float32), f"w{k}"
            )
            b = ad.Parameter(np.zeros(columns, np.float32), f"b{k}")
            self.parameters += [w, b]
            y = ad.matmul_op(y if k == 0 else ad.relu_op(y), w) + b
        self.loss = ad.softmax_cross_entropy(y, self.labels)
        self.optimizer = optim.SGD(lr=0.1, momentum=momentum)
        self.train = self.optimizer.minimize(self.loss, self.parameters)

    def batch(self, rows: int, seed=1) -> dict[Node, np.ndarray]:
        """Feeds of `rows` rows."""
        rng = np.random.default_rng(seed)
        x = rng.random((rows, self.widths[0]), np.float32)
        classes = rng.integers(0, self.widths[-1], rows)
        return {self.x: x, self.labels: np.eye(self.widths[-1], dtype=np.float32)[classes]}

    def shapes(self, rows: int) -> dict[Node, tuple[int, ...]]:
        """The feeds' shapes."""
        return {self.x: (rows, self.widths[0]), self.labels: (rows, self.widths[-1])}

    def values(self) -> list[np.ndarray]:
        """The Parameters' values now."""
        return [parameter.asnumpy() for parameter in self.parameters]


class TwoFold(ad.Op):
    """2x and x² from one operator; has no native kernel."""

    name = "two_fold"
    outputs = 2

    def infer_shape(self, node, input_shapes):
        return input_shapes[0], input_shapes[0]

    def compute(self, node, input_vals, output_val, use_numpy=True):
        x = input_vals[0] if use_numpy else input_vals[0].asnumpy()
        output_val[0][:] = 2 * x
        output_val[1][:] = x * x

    def gradient(self, node, output_grad):
        x = node.inputs[0]
        double, square = output_grad
        pieces = [] if double is None else [2 * double]
        pieces += [] if square is None else [2 * x * square]
        return [ad.sum_node_list(pieces)]


two_fold = TwoFold()


def on_host(value):
    return value if isinstance(value, np.ndarray) else value.asnumpy()


class DoubleOp(ad.Op):
    """2x in Python, on any device; `before` is called first."""

    def __call__(self, x, before=lambda: None):
        return super().__call__(x, before=before)

    def infer_shape(self, node, input_shapes):
        return input_shapes[0]

    def compute(self, node, input_vals, output_val, use_numpy=True):
        node.attrs["before"]()
        output_val[...] = 2 * on_host(input_vals[0])

    def gradient(self, node, output_grad):
        return [double_op(output_grad)]


double_op = DoubleOp()

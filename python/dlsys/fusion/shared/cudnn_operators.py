"""The rung `cudnn` of activations, pooling and batch normalization, for executor/tune/rungs.py.

cuDNN draws the lines between its functions elsewhere: its max-pooling keeps no indices, and its
gradient reads the images and their maxima instead; its batch normalization in training form is
statistics and map at once, and so are its gradients. So this rung is operators of its own, whose
kernels (src/cuda/cudnn/) call the library. Each keeps what it stands for as its body. No fusion
knows them: what names the rung is a kernel of its own.

What cuDNN lacks is refused: indices of maxima, and with them second derivatives of maxima; a
training form by statistics that are not those of x. The inference form has no gradient there, so
that its gradient is the own one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ...errors import NotApplicableError
from ...graph.lines import attributed_to
from ...graph.node import Node, find_topo_sort
from ...ops.conv.pooling import max_pool_gradient_op, max_pool_op
from ...ops.elementwise import relu_op
from ...ops.leaf import full_op
from ...ops.math.power import pow_byconst_op
from ...ops.norm.batch_norm import (
    batch_normalize_gradient_op,
    batch_normalize_op,
    batch_normalize_sums_op,
    batch_statistics_op,
)
from ...ops.reduce import broadcast_like_op
from .body import Fused, close
from .rewrite import Graph, value_of


class Cudnn(Fused):
    """A function of cuDNN. Its kernel takes the scalars of the operator that it stands for, which
    makes the first value of its body.
    """

    tolerance = 1e-4
    autocast = "follow"

    def __init__(
        self,
        kernel: str,
        outputs: int = 1,
        inplace: bool | tuple[int, ...] = False,
        own: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(f"cudnn_{kernel}", outputs)
        self.inplace, self.autocast_inputs = inplace, own

    def scalars(self, node: Node) -> tuple[Any, ...]:
        made = node.attrs["body"].outputs[0]
        source = made.inputs[0] if made.op.projection else made
        return source.op.scalars(source)


# Those that stand for one operator each, with its inputs and its value, by its kernel.
ALIKE = {
    kernel: Cudnn(kernel, inplace=inplace)
    for kernel, inplace in (
        ("relu", True), ("sigmoid", True), ("tanh", True),
        ("relu_gradient", (1,)), ("sigmoid_gradient", (1,)), ("tanh_gradient", (1,)),
        ("avg_pool2d", False), ("avg_pool2d_gradient", False),
    )
}  # fmt: skip
ALIKE["batch_normalize"] = Cudnn("batch_normalize", own=(0,))
max_pool = Cudnn("max_pool2d")  # x to y
max_pool_gradient = Cudnn("max_pool2d_gradient")  # x, y and dy to dx
# x, scale and bias to y, the mean and 1 / sqrt(variance + eps)
batch_norm = Cudnn("batch_normalize_training", outputs=3, own=(0,))
# x, scale, dy and those two to dx, dscale and dbias
batch_norm_gradient = Cudnn("batch_normalize_gradient", outputs=3, own=(0, 2))


def by_cudnn(fetches: Sequence[Node], named: Iterable[Node]) -> Mapping[Node, Node]:
    """What stands for the nodes that name the rung, `named`, and for values of theirs.

    NotApplicableError for what cuDNN has otherwise or not at all.
    """
    lowering = _Lowering(fetches)
    # Gradients go by what their normalization saves, and may come before it.
    for node in sorted(named, key=lambda node: node.op is not batch_normalize_op):
        with attributed_to(node):
            lowering.lower(node)
    return lowering.replaced


class _Lowering:
    def __init__(self, fetches: Sequence[Node]) -> None:
        self.replaced: dict[Node, Node] = {}
        self._graph = Graph(fetches)
        # The mean and 1 / sqrt(variance + eps) of what a gradient is of.
        self._saved: dict[tuple[Any, ...], tuple[Node, Node]] = {}
        self._done: set[Node] = set()

    def lower(self, node: Node) -> None:
        """Puts cuDNN's operator in the place of a node."""
        if node in self._done:
            return
        if node.op is max_pool_op:
            self._max_pool(node)
        elif node.op is batch_normalize_op and node.attrs["training"]:
            self._batch_norm(node)
        elif node.op is batch_normalize_sums_op:
            if node.attrs["training"]:
                self._sums(node)
        elif node.op is batch_normalize_gradient_op:
            self._gradient(node)
        elif node.op.kernel in ALIKE:
            self._alike(node)
        elif node.op is max_pool_gradient_op:
            _refuse(node, "it finds the maxima again, of a max_pool2d by the same rung")
        else:
            _refuse(node, "it has no such function")

    def _alike(self, node: Node) -> None:
        inputs = list(node.inputs)
        if node.op.elementwise:
            inputs = [x if _same(x, node) else broadcast_like_op(x, node) for x in inputs]
            source = node.derive(inputs, node.spec)
        else:
            source = node
        made = ALIKE[node.op.kernel or ""](*inputs, body=close(inputs, [source]))
        made.stand_for(node)
        self.replaced[node] = made

    def _max_pool(self, node: Node) -> None:
        """The maxima, and the gradients that read their indices."""
        values = self._values(node)
        (x,), y = node.inputs, self._value(node, 0)
        made = max_pool(x, body=close([x], [y]))
        made.stand_for(node)
        self.replaced[y] = made
        if 1 not in values:
            return
        if self._graph.is_fetched(values[1]):
            _refuse(node, "it gives no indices, and they are fetched")
        for user in self._graph.users[values[1]]:
            if user.op is not max_pool_gradient_op or "algo" not in user.attrs:
                _refuse(node, f"it gives no indices, which {user.name} reads")
            inputs = [x, y, user.inputs[0]]
            with attributed_to(user):
                gradient = max_pool_gradient(*inputs, body=close(inputs, [user]))
            gradient.stand_for(user)
            self.replaced[user] = gradient
            self._done.add(user)

    def _batch_norm(self, node: Node) -> None:
        made = self._train(node, node, *node.inputs[3:])
        self.replaced[node] = value_of(made, 0, node)

    def _sums(self, node: Node) -> None:
        """The gradients of scale and bias, with that of x where there is one."""
        self._train_anew(node)
        values = self._values(node)
        readers = (user for value in values.values() for user in self._graph.users[value])
        of_x = (
            user
            for user in readers
            if self._sums_of(user) is node and not _depends(user.inputs[3:4], node)
        )
        gradient, sums = next(of_x, None), [self._value(node, k) for k in (0, 1)]
        if gradient is None:
            scale = _per_channel(node, 1.0)
            *of_batch, dy = node.inputs
            eps = node.attrs["eps"]
            gradient = batch_normalize_gradient_op(*of_batch, scale, *sums, dy, eps=eps)
        self._backward(gradient, sums)

    def _gradient(self, node: Node) -> None:
        """A gradient of x by another scale than the normalization's, as a second derivative has."""
        self._train_anew(node)
        sums = self._sums_of(node)
        if sums is None:
            _refuse(node, "it computes the sums over dy itself")
        self._backward(node, [value_of(sums, k) for k in (0, 1)])

    def _backward(self, node: Node, sums: Sequence[Node]) -> None:
        x, _, _, scale, _, _, dy = node.inputs
        inputs = [x, scale, dy, *self._saved[_key(node)]]
        made = batch_norm_gradient(*inputs, body=close(inputs, [node, *sums]))
        made.stand_for(node)
        for k, value in enumerate((node, *sums)):
            if value not in self.replaced:
                self.replaced[value] = value_of(made, k, value)
        self._done.add(node)

    def _train_anew(self, node: Node) -> None:
        """Has what a gradient reads saved where no y is computed."""
        if _key(node) in self._saved:
            return
        affine = _per_channel(node, 1.0), _per_channel(node, 0.0)
        attrs = {"eps": node.attrs["eps"], "training": True}
        self._train(node, batch_normalize_op(*node.inputs[:3], *affine, **attrs), *affine)

    def _train(self, node: Node, y: Node, scale: Node, bias: Node) -> Node:
        """The training form, which gives y, the mean and the inverse deviation; for gradients the
        first one keeps these whose scale and bias are not made of them, as second derivatives have.
        """
        x, mean, variance = node.inputs[:3]
        made_of = [values.inputs[0] for values in (mean, variance) if values.op.projection]
        of_x = [s for s in made_of if s.op is batch_statistics_op and s.inputs[0] is x]
        if len(of_x) < 2:
            _refuse(node, "it computes the mean and variance of x itself")
        eps, inputs = node.attrs["eps"], [x, scale, bias]
        inverse = pow_byconst_op(variance + eps, -0.5)
        made = batch_norm(*inputs, body=close(inputs, [y, mean, inverse]))
        made.stand_for(node)
        if _key(node) not in self._saved and not _depends([scale, bias], of_x[0]):
            saved = value_of(made, 1, mean), value_of(made, 2)
            # Of a variance of 0 rounding may leave less.
            again = relu_op(pow_byconst_op(saved[1], -2.0) - eps)
            self.replaced |= {mean: saved[0], variance: again}
            self._saved[_key(node)] = saved
        return made

    def _sums_of(self, node: Node) -> Node | None:
        """The sums that a gradient of x reads, if they are of the same arrays."""
        if node.op is not batch_normalize_gradient_op:
            return None
        dscale, dbias = node.inputs[4:6]
        if not (dscale.op.projection and dbias.op.projection):
            return None
        sums = dscale.inputs[0]
        same = sums is dbias.inputs[0] and sums.op is batch_normalize_sums_op
        read = [*node.inputs[:3], node.inputs[6]]
        return sums if same and all(a is b for a, b in zip(sums.inputs, read)) else None

    def _values(self, node: Node) -> dict[int, Node]:
        """The values of a node that somebody reads, by their numbers."""
        return {value.attrs["index"]: value for value in self._graph.users[node]}

    def _value(self, node: Node, index: int) -> Node:
        """One of them, made where nobody reads it."""
        values = self._values(node)
        return values[index] if index in values else value_of(node, index)


def _key(node: Node) -> tuple[Any, ...]:
    """x, mean, variance and eps of a batch normalization or its gradient."""
    return *node.inputs[:3], node.attrs["eps"]


def _depends(values: Sequence[Node], on: Node) -> bool:
    return on in set(find_topo_sort(values))


def _per_channel(node: Node, value: float) -> Node:
    """One number for each channel."""
    mean = node.inputs[1].spec
    return full_op(mean.shape, value, dtype=mean.dtype)


def _same(x: Node, node: Node) -> bool:
    return x.spec.shape == node.spec.shape


def _refuse(node: Node, why: str) -> NoReturn:
    raise NotApplicableError(
        f"{node.op.name}: cuDNN cannot compute this: {why}; use auto [{node.where}]"
    )

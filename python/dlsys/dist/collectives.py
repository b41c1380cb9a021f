"""Operators by which the ranks of a group exchange arrays within a graph.

Every rank builds the same graph and runs it at the same time, so that all come to the same
operators in the same order. A gradient is the derivative of the sum of all ranks' losses: that of a
sum over ranks is the sum of the gradients over ranks, that of a gather the reduction and scatter.
On numpy and the CPU arrays go through the group (MPI); on GPUs kernels call NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ..arguments.kinds import Bool, Input, Instance, Int, Kind, OneOf, shown
from ..arguments.signature import Signature
from ..dtypes import is_integral
from ..graph.node import Node, Op
from ..graph.spec import Spec
from ..ops.elementwise import mul
from ..ops.leaf import zeroslike_op
from .group import REDUCTIONS, Group

_CODES = {"sum": 0, "max": 2, "min": 3, "mean": 4}  # of ncclRedOp_t


class Pairs(Kind):
    """Pairs (from, to) of ranks, in which each sends at most once and receives at most once."""

    expected = "pairs of ranks (from, to), each rank at most once on either side"

    def take(self, value: Any) -> tuple[tuple[int, int], ...]:
        pairs = tuple([(int(a), int(b)) for a, b in value])
        for side in zip(*pairs):
            if len(set(side)) < len(side) or min(side) < 0:
                raise ValueError
        return pairs


class Collective(Op):
    """Base of operators that all ranks of a group run together."""

    communicates = True
    any_dtype = True
    autocast = "follow"

    def group(self, node: Node) -> Group:
        """The ranks that take part."""
        return node.attrs["group"]

    def simplify(self, node: Node) -> Node | None:
        group = self.group(node)
        return None if group.size > 1 or group.handle or self.outputs > 1 else self.alone(node)

    def alone(self, node: Node) -> Node:
        """The value in a group of one rank."""
        return node.inputs[0]

    def scalars(self, node: Node) -> tuple[float | int, ...]:
        return (self.group(node).handle,)


class AllReduceOp(Collective):
    """The sum, mean, max or min of all ranks' arrays, element by element; of several arrays
    together, which go as one bucket.

    `behind` says that it waits for all steps before it, of backward say, and `joined`, which is the
    planner's, that its arrays lie side by side.

    With `count`, the number of runs before this one, numpy and the CPU reduce in the last of every
    `every` runs only, and leave the arrays as they are in the others; GPUs reduce in each.
    """

    kernel = "all_reduce"

    def __init__(self, count: int) -> None:
        self.name = "all_reduce"
        self.outputs = count
        names = ["x"] if count == 1 else [f"x{k}" for k in range(count)]
        self.signature = Signature(
            *names, "*", group=Instance(Group), op=OneOf(*REDUCTIONS, default="sum"),
            count=Input(None), every=Int(1, low=1), behind=Bool(False),
        )  # fmt: skip

    def of(self, count: int) -> AllReduceOp:
        """The operator of so many arrays."""
        return bucket_op(count)

    def infer(self, node: Node, *specs: Spec) -> Any:
        for x, spec in zip(node.inputs, specs[: self.outputs]):
            wrong = spec.dtype == np.bool_ or (node.attrs["op"] == "mean" and _integers(spec))
            if wrong or spec.dtype != specs[0].dtype:
                raise node.error(
                    f"expected numbers of one dtype, and floats for a mean, got {x.name} "
                    f"{spec.dtype}; cast it before"
                )
        return specs[0] if self.outputs == 1 else tuple(specs[: self.outputs])

    def workspace(self, node: Node, inputs: list[Spec], outputs: list[Spec]) -> list[Spec]:
        if self.outputs == 1:
            return []
        return [Spec((sum(y.size for y in outputs),), outputs[0].dtype)]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        n, group, op = self.outputs, self.group(node), node.attrs["op"]
        xs, ys = arrays[:n], arrays[-n:]
        if len(node.inputs) > n and (int(arrays[n].item()) + 1) % node.attrs["every"]:
            for x, y in zip(xs, ys):
                np.copyto(y, x)
            return
        joined = ys[0] if n == 1 else arrays[-n - 1]
        if n > 1:
            np.concatenate([x.reshape(-1) for x in xs], out=joined)
        group.reduce_into(joined.copy() if n > 1 else xs[0], joined, "sum" if op == "mean" else op)
        if op == "mean":
            np.multiply(joined, joined.dtype.type(1 / group.size), out=joined)
        at = 0
        for y in ys if n > 1 else ():
            np.copyto(y, joined[at : at + y.size].reshape(y.shape))
            at += y.size

    def scalars(self, node: Node) -> tuple[float | int, ...]:
        return *super().scalars(node), _CODES[node.attrs["op"]], int("joined" in node.attrs)

    def lists(self, node: Node) -> Sequence[int]:
        return self.outputs, len(node.inputs) - self.outputs, self.outputs

    def gradient(self, node: Node, output_grad: Any) -> Sequence[Node | None]:
        if node.attrs["op"] not in ("sum", "mean"):
            return super().gradient(node, output_grad)
        grads = output_grad if self.outputs > 1 else [output_grad]
        attrs = {key: node.attrs[key] for key in ("group", "op")}
        made = [None if dy is None else all_reduce_op(dy, **attrs) for dy in grads]
        return [*made, *[None] * (len(node.inputs) - self.outputs)]


class AllGatherOp(Collective):
    """All ranks' arrays (n, …) one after the other along axis 0: (size · n, …)."""

    name = kernel = "all_gather"
    signature = Signature("x", "*", group=Instance(Group))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        (x,) = specs
        _check_axis(node, x)
        return x._replace(shape=(self.group(node).size * x.shape[0], *x.shape[1:]))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        self.group(node).gather_into(*arrays)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [reduce_scatter_op(output_grad, group=self.group(node))]


class ReduceScatterOp(Collective):
    """The reduction of all ranks' arrays (size · n, …), of which rank k gets the k-th part,
    (n, …).
    """

    name = kernel = "reduce_scatter"
    signature = Signature("x", "*", group=Instance(Group), op=OneOf(*REDUCTIONS, default="sum"))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        (x,) = specs
        _check_axis(node, x, self.group(node).size)
        if x.dtype == np.bool_ or (node.attrs["op"] == "mean" and _integers(x)):
            raise node.error(f"expected numbers, floats for a mean, got {x.dtype}; cast it before")
        return x._replace(shape=(x.shape[0] // self.group(node).size, *x.shape[1:]))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        (x, y), group, op = arrays, self.group(node), node.attrs["op"]
        group.scatter_into(x, y, "sum" if op == "mean" else op)
        if op == "mean":
            np.multiply(y, y.dtype.type(1 / group.size), out=y)

    def scalars(self, node: Node) -> tuple[float | int, ...]:
        return *super().scalars(node), _CODES[node.attrs["op"]]

    def gradient(self, node: Node, output_grad: Node) -> Sequence[Node | None]:
        op, group = node.attrs["op"], self.group(node)
        if op not in ("sum", "mean"):
            return super().gradient(node, output_grad)
        dx = all_gather_op(output_grad, group=group)
        return [mul(dx, 1 / group.size) if op == "mean" else dx]


class Rooted(Collective):
    """An operator from or to one rank, whose arrays have one shape on all."""

    signature = Signature("x", "*", group=Instance(Group), root=Int(0, low=0))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        _check_root(node)
        return specs[0]

    def scalars(self, node: Node) -> tuple[float | int, ...]:
        return *super().scalars(node), node.attrs["root"]


class BroadcastOp(Rooted):
    """Rank `root`'s array on all ranks."""

    name = kernel = "broadcast"

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, y = arrays
        np.copyto(y, x)
        self.group(node).broadcast_into(y, node.attrs["root"])

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [reduce_op(output_grad, group=self.group(node), root=node.attrs["root"])]


class ReduceOp(Rooted):
    """The sum of all ranks' arrays on rank `root`, zeros on the others."""

    name = kernel = "reduce"

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, y = arrays
        self.group(node).reduce_into(x, y, "sum")
        if self.group(node).rank != node.attrs["root"]:
            y.fill(0)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [broadcast_op(output_grad, group=self.group(node), root=node.attrs["root"])]


class AllToAllOp(Collective):
    """Part r of x (size · n, …) goes to rank r, which puts it at the position of the rank that it
    came from.
    """

    name = kernel = "all_to_all"
    signature = Signature("x", "*", group=Instance(Group))

    def infer(self, node: Node, *specs: Spec) -> Spec:
        _check_axis(node, specs[0], self.group(node).size)
        return specs[0]

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        self.group(node).exchange_into(*arrays)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [all_to_all_op(output_grad, group=self.group(node))]


class SendRecvOp(Collective):
    """Rank a's array goes to rank b for each (a, b) of `pairs`; zeros where nobody sends."""

    name = kernel = "send_recv"
    signature = Signature("x", "*", group=Instance(Group), pairs=Pairs())

    def infer(self, node: Node, *specs: Spec) -> Spec:
        size = self.group(node).size
        if any(rank >= size for pair in node.attrs["pairs"] for rank in pair):
            raise node.error(
                f"pairs {shown(node.attrs['pairs'])} name ranks that a group of {size} has not"
            )
        return specs[0]

    def alone(self, node: Node) -> Node:
        return node.inputs[0] if node.attrs["pairs"] else zeroslike_op(node.inputs[0])

    def ends(self, node: Node) -> tuple[int | None, int | None]:
        """The ranks that this one sends to and receives from."""
        rank, pairs = self.group(node).rank, node.attrs["pairs"]
        return dict(pairs).get(rank), {b: a for a, b in pairs}.get(rank)

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        x, y = arrays
        target, source = self.ends(node)
        if source is None:
            y.fill(0)
        self.group(node).permute_into(x, y, target, source)

    def scalars(self, node: Node) -> tuple[float | int, ...]:
        return *super().scalars(node), *(-1 if end is None else end for end in self.ends(node))

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        back = tuple((b, a) for a, b in node.attrs["pairs"])
        return [send_recv_op(output_grad, group=self.group(node), pairs=back)]


def _integers(spec: Spec) -> bool:
    return spec.dtype is not None and is_integral(spec.dtype)


def _check_root(node: Node) -> None:
    root, size = node.attrs["root"], node.attrs["group"].size
    if root >= size:
        raise node.error(f"root is {root}, but the group has {size} ranks, counted from 0")


def _check_axis(node: Node, x: Spec, parts: int = 1) -> None:
    if not x.shape or x.shape[0] % parts:
        what = f"a multiple of {parts} rows, one part a rank" if parts > 1 else "an axis 0"
        raise node.error(f"expected {what}, got {node.inputs[0].name} {x.shape}; pad it before")


@cache
def bucket_op(count: int) -> AllReduceOp:
    """The reduction of so many arrays together."""
    return all_reduce_op if count == 1 else AllReduceOp(count)


all_reduce_op = AllReduceOp(1)
all_gather_op = AllGatherOp()
reduce_scatter_op = ReduceScatterOp()
broadcast_op = BroadcastOp()
reduce_op = ReduceOp()
all_to_all_op = AllToAllOp()
send_recv_op = SendRecvOp()

"""Data parallelism: each rank computes the gradients of its share of a batch, and updates use the
mean of all ranks' gradients, so that Parameters stay equal on all of them.

Gradients are reduced in buckets, in the order in which backward completes them, so that the first
buckets travel while the rest is computed; the first bucket is small, so that it leaves early. A
gradient that flows on to other gradients stays the rank's own there: what reads it beyond the
backward pass, updates and the norm that clips them, reads the mean.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ..dtypes import bfloat16
from ..errors import GraphError
from ..executor.plan.memory import Plan
from ..graph.lines import attributed_to
from ..graph.node import Node, find_topo_sort, hooks
from ..ops.elementwise import cast_op, mul
from ..ops.leaf import Parameter, constant
from ..ops.optim.apply import RuleOp, global_norm_op
from ..passes.pipeline import Options, Pass
from ..runtime.target import target_of
from ..settings import settings
from .collectives import bucket_op
from .group import LINE, Group, without_line
from .shard import Shard, Slice

FIRST_BUCKET = 1 << 20  # bytes
BUCKET = 25 << 20  # bytes
BUCKET_WITHIN = 64 << 20  # bytes, where sums wait for backward
_SEEDS = 0x9E3779B97F4A7C15  # odd: the keys of 2^64 ranks differ

Told = dict[str, list[str]]


class DataParallel:
    """What an executor does for a group of ranks: two passes, and a check before each run."""

    def __init__(self, group: Group, ctx: Any, parameters: Sequence[Parameter]) -> None:
        if not isinstance(group, Group):
            raise GraphError(f"Executor: group is one of dist.init(), got {group!r}")
        self._group, self._ctx = group, ctx
        self._shared = [parameter for parameter in parameters if not parameter.of_rank]
        self._shards = [parameter for parameter in parameters if isinstance(parameter, Shard)]
        self._told: dict[Hashable, tuple[int, Told]] = {}
        group.connect(ctx)
        # Within a host sums are quick, but kernels beside them that fill the chip are slow: a block
        # of theirs that finds no multiprocessor free begins when the others are done.
        self._behind = ctx is not None and bool(ctx.streams) and group.one_host
        self.passes: tuple[Pass, ...] = (
            Pass("rank_keys", self._draw_apart, position=3),
            Pass("reductions", self._reduce, position=6),
        )
        if group.size == 1 and not group.handle:
            self.passes = ()

    def before_run(
        self, key: Hashable, plan: Plan, specs: Callable[[], Mapping[Node, Any]]
    ) -> None:
        """Returns where all ranks are about to run the same graph on feeds of the same shapes, and
        exchange the same, which a group without MPI compares before the first run of each shape
        only. CommunicationError on all ranks, with the first difference, where they do not. Before
        the first run all ranks take over rank 0's Parameters.
        """
        first, known = not self._told, key in self._told
        if known:
            mine = self._told[key]
        else:
            told = _told(specs(), plan, self._ctx)
            text = "\n".join(without_line(line) for lines in told.values() for line in lines)
            digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
            mine = digest, told
        self._group.check()
        if not known or self._group.compares_every_run:
            self._group.agree(*mine)
            self._told[key] = mine
        if first:
            self._share_state()
        for part in self._shards:
            part.refresh()

    def _share_state(self) -> None:
        values = [parameter.asnumpy() for parameter in self._shared]
        own = np.array([zlib.crc32(np.ascontiguousarray(x).data) for x in values], np.int64)
        same = (self._group.all_gather(own) == own).all()
        if self._group.all_reduce(np.array([int(same)], np.int32), "min")[0]:
            return
        for parameter, value in zip(self._shared, values):
            parameter.set(self._group.broadcast(value))

    # ---- the passes, over the executor's own graph ----
    def _draw_apart(self, fetches: Sequence[Node], options: Options) -> list[Node]:
        """Gives random nodes keys of the rank, so that no two ranks drop the same units. Rank 0
        draws what a run without a group does.
        """
        for node in find_topo_sort(fetches):
            if node.op.random and "seed" in node.attrs and self._group.rank:
                seed = (node.attrs["seed"] + self._group.rank * _SEEDS) % (1 << 63)
                node.attrs = {**node.attrs, "seed": seed}
        return list(fetches)

    def _reduce(self, fetches: Sequence[Node], options: Options) -> list[Node]:
        order = find_topo_sort(fetches)
        rounds: dict[Node, tuple[Node | None, int]] = {}  # of each gradient: when it is used
        sent: dict[Node, Node] = {}  # of each: what is reduced
        reduced: dict[Node, Node] = {}
        narrow = _narrow(order)
        for node in order:
            for which, k in enumerate(node.op.gradient_inputs):
                gradient, parameter = node.inputs[k], node.inputs[which]
                if gradient.op.constant_fill or gradient.op.communicates:
                    continue
                with attributed_to(gradient, backward=True):
                    if isinstance(parameter.origin, Slice):  # no other rank has this part
                        reduced[gradient] = mul(gradient, 1 / self._group.size)
                        continue
                    half = parameter in narrow and gradient.spec.dtype == np.float32
                    sent[gradient] = cast_op(gradient, bfloat16) if half else gradient
                sent[gradient].number = gradient.number
                rounds[gradient] = _round(node)
        self._check_divided(order, reduced.keys())
        within = set(find_topo_sort([*rounds, *reduced])) | set(reduced.values())
        for node in within:
            if node.op.gradient_inputs:
                raise GraphError(
                    f"Executor: a gradient depends on {node.name} [{node.where}], an update: ranks "
                    "reduce all gradients of a graph before its updates; make them two graphs"
                )
        readers = [node for node in order if node not in within]
        summed = _divided_by_updates(readers, rounds)
        limits = (BUCKET_WITHIN,) * 2 if self._behind else (FIRST_BUCKET, BUCKET)
        buckets = _buckets(rounds, sent, summed, limits)
        if self._behind:  # each update runs beside the next sum, that of the last beside none
            buckets.sort(key=lambda bucket: -sum(sent[x].spec.nbytes for x in bucket))
        for place, bucket in enumerate(buckets):
            made = self._reduced(bucket, sent, "sum" if bucket[0] in summed else "mean", rounds)
            # It is scheduled as soon as they are there, or else in this order.
            made.number = buckets[-1][-1].number + place if self._behind else bucket[-1].number
            values = [made] if len(bucket) == 1 else [made[k] for k in range(len(bucket))]
            reduced.update(zip(bucket, values))
        self._divide(readers, summed, buckets)
        for node in readers:
            if not reduced.keys().isdisjoint(node.inputs):
                node.inputs = [reduced.get(x, x) for x in node.inputs]
        return list(fetches)

    def _reduced(
        self, bucket: Sequence[Node], sent: Mapping[Node, Node], op: str, rounds: Mapping[Node, Any]
    ) -> Node:
        """The reduction of the gradients of a bucket."""
        count, every = rounds[bucket[0]]
        attrs = {} if count is None else {"count": count, "every": every}
        attrs.update(group=self._group, op=op, behind=self._behind, name="gradients")
        with attributed_to(bucket[-1], backward=True):
            return bucket_op(len(bucket))(*(sent[x] for x in bucket), **attrs)

    def _divide(
        self, readers: Sequence[Node], summed: set[Node], buckets: Sequence[Sequence[Node]]
    ) -> None:
        """Lets updates divide what they read of the gradients that are `summed`. Updates that read
        one constant become one, which waits for all that it reads: each bucket has its own, so that
        it is used while others travel.
        """
        share: dict[Node, Node] = {}
        for bucket in buckets:
            own = constant(np.float32(1 / self._group.size), "share")
            share.update(dict.fromkeys(summed.intersection(bucket), own))
        for node in readers:
            for gradient in [x for x in node.inputs if x in share]:
                _scale(node, share[gradient])

    def _check_divided(self, order: Sequence[Node], divided: Collection[Node]) -> None:
        """GraphError where a norm is taken of a part of a weight: ranks would clip differently."""
        for node in order:
            if node.op is global_norm_op and not set(divided).isdisjoint(node.inputs):
                raise GraphError(
                    "Executor: clip_norm is not for weights that are divided among ranks, of "
                    "whose gradients each rank has a part; use clip_value"
                )


def _round(update: Node) -> tuple[Node | None, int]:
    """The counter of runs and how many make a round, of an update at the end of rounds only."""
    assert isinstance(update.op, RuleOp)
    return update.op.counter(update), update.attrs.get("every", 1)


def _narrow(order: Sequence[Node]) -> set[Node]:
    """The matrices of float32 that products read as bfloat16. Where a gradient of one is float32,
    since an embedding has a part in it, say, it is rounded before it is reduced, as the others are.
    """
    casts = [node for node in order if node.op.casts and node.spec.dtype is bfloat16]
    return {node.inputs[0] for node in casts if len(node.spec.shape) > 1}


def _divided_by_updates(readers: Sequence[Node], rounds: Mapping[Node, Any]) -> set[Node]:
    """The gradients that nothing but updates read, each of which scales all that it reads: the sum
    over ranks is enough there, for which NCCL has faster kernels than for the mean. Not those of
    float16, whose sum may be beyond its range.
    """
    found = {x for x, (count, _) in rounds.items() if count is None and x.spec.dtype != np.float16}
    for node in readers:
        op = node.op
        update = isinstance(op, RuleOp) and not op.rule.beside
        own = [node.inputs[k] for k in op.gradient_inputs] if update else []
        if not found.issuperset(own) or len(own) < sum(x in found for x in node.inputs):
            found.difference_update(node.inputs)
    return found


def _scale(update: Node, share: Node) -> None:
    """Lets an update multiply its gradient by `share`."""
    given = update.attrs.get("given", ())
    if "scale" in given:  # the last of the inputs
        update.inputs = [*update.inputs[:-1], mul(update.inputs[-1], share)]
    else:
        update.inputs = [*update.inputs, share]
        update.attrs = {**update.attrs, "given": (*given, "scale")}


def _buckets(
    rounds: Mapping[Node, Any],
    sent: Mapping[Node, Node],
    summed: Collection[Node],
    limits: tuple[int, int],
) -> list[list[Node]]:
    """The gradients in the order of their making, which is that of backward, cut into buckets of
    one dtype, one round and one reduction each, in the order in which they are complete: those of
    bfloat16 and of float32, which alternate in a network of 16 bits, fill at the same time.
    limits: the bytes of the first bucket and of the others.
    """
    found: list[list[Node]] = []
    filling: dict[Hashable, list[Node]] = {}
    for node in sorted(rounds, key=lambda node: node.number):
        count, every = rounds[node]
        kind = sent[node].spec.dtype, id(count), every, node in summed
        bucket = filling.get(kind)
        if bucket is not None:
            limit = limits[bucket is not found[0]]
            if sum(sent[x].spec.nbytes for x in [*bucket, node]) > limit:
                bucket = None
        if bucket is None:
            bucket = filling[kind] = []
            found.append(bucket)
        bucket.append(node)
    return sorted(found, key=lambda bucket: bucket[-1].number)


# ---- what ranks compare ----
def _told(specs: Mapping[Node, Any], plan: Plan, ctx: Any) -> Told:
    """The lines by which ranks compare feeds, settings, graphs and what these exchange, which may
    depend on the fetches.
    """
    numbers = {node: k for k, node in enumerate(specs)}
    feeds = [f"{x.name} {spec}" for x, spec in _described(specs) if x.op.leaf == "feed"]
    rules = f"{target_of(ctx).name}, DLSYS_FUSION={settings.fusion}"
    graph = []
    for node, spec in _described(specs):
        inputs = " ".join(f"#{numbers[x]}" for x in node.inputs)
        attrs = ", ".join(f"{key}={_value(node.attrs[key])}" for key in sorted(node.attrs))
        name = f" {node.name}" if node.op.leaf == "state" else ""
        graph.append(f"{node.op.name}{name} {spec} of {inputs} {attrs}{LINE}{node.where}]")
    exchanges = [
        f"{node.op.name} {node.attrs.get('op', '')} of {node.op.outputs} arrays{LINE}{node.where}]"
        for node in (step.node for step in plan.steps)
        if node.op.communicates
    ]
    return {"feeds": feeds, "settings": [rules], "graph": graph, "exchanges": exchanges}


def _described(specs: Mapping[Node, Any]) -> list[tuple[Node, str]]:
    def text(spec: Any) -> str:
        return f"{spec.dtype} {spec.shape}"

    return [
        (node, " and ".join(map(text, spec)) if node.op.outputs != 1 else text(spec))
        for node, spec in specs.items()
    ]


def _value(value: Any) -> str:
    """An attribute as ranks compare it: a group by its size, an array by its checksum."""
    if isinstance(value, Group):
        return f"{value.size} ranks"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {zlib.crc32(np.ascontiguousarray(value).data):x}"
    return repr(value)


hooks["data_parallel"] = DataParallel

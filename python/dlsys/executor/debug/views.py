"""An executor's views besides results: reports and checks of its plans, and the shapes of a
whole graph with arrays of these, as the assignment asks for them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ...describe import counted, drawn_by, few
from ...graph.node import Node
from ...graph.spec import Spec
from ...ndarray import empty
from ...runtime.device import Context
from ..plan.memory import Plan
from ..run.feeds import Feeds, Signature
from ..run.runner import Runner, second_run
from ..tune.autotune import algorithms_in
from .check import check_run
from .report import CountersSince, Report, plan_report


class Views:
    """The methods of an executor that look at what it does; runs read none of it."""

    ctx: Context | None
    recorder: Any
    precision: str
    eval_node_list: list[Node]
    topo_order: list[Node]
    _feeds: Feeds
    _runners: Mapping[tuple[Signature, ...], Any]
    _running: threading.Lock
    _since: CountersSince | None
    # Of the last run's feeds, or as `infer_shape` was asked since.
    _signatures: tuple[Signature, ...] | None = None
    _shapes: tuple[tuple[Signature, ...], dict[Node, Any]] | None = None  # those seen last
    _arrays: tuple[dict[Node, Any], dict[Node, Any]] | None = None  # by the shapes

    def _infer(self, feeds: Mapping[Node, Spec]) -> dict[Node, Any]:
        """The spec of every node of the graph."""
        raise NotImplementedError

    def _ready(self, feed_dict: Mapping[Node, Any] | None) -> tuple[Runner, Any, list[Any]]:
        """The bound plan for these feeds, and the feeds in its order."""
        raise NotImplementedError

    def _count_from_here(self) -> None:
        self._since = CountersSince(self.ctx) if self.ctx is not None else None

    @property
    def plans(self) -> list[Plan]:
        """The plans made so far, that of the last run as the last one where there are many."""
        return [runner.plan for runner, *_ in self._runners.values()]

    def __repr__(self) -> str:
        names = [node.name for node in self.eval_node_list]
        return (
            f"{type(self).__name__}([{', '.join(few(names))}], ctx={self.ctx}, "
            f"precision={self.precision}, {len(self.topo_order):,} nodes, "
            f"{counted(len(self._runners), 'plan')})"
        )

    _repr_html_ = drawn_by("executor_html")

    def report(self) -> Report:
        """Each plan made so far with its launches, its captured segments and what broke them, and
        the launches, waits and allocations since the executor was made. Print it.
        """
        plans = tuple(plan_report(runner, self.recorder) for runner, *_ in self._runners.values())
        return Report(self.ctx, plans, self._since.counts() if self._since else None)

    def algorithms(self) -> dict[str, str]:
        """The algorithm of each kernel that has several, "" for its heuristic, in the plans made so
        far; the keys have the kernel, the arrays and the precision.
        """
        if self.ctx is None:
            return {}
        return algorithms_in([runner.plan for runner, *_ in self._runners.values()], self.ctx)

    def check(
        self, feed_dict: Mapping[Node, Any] | None = None, reference: Context | None = None
    ) -> None:
        """Runs once, step by step, and compares each step with the same operator on numpy (in
        float64) or on another device. Parameters are as before afterwards.

        Raises KernelError naming the first step beyond its tolerance, with the largest error.
        """
        if self._running.locked():
            raise second_run()
        with self._running:
            runner, _, values = self._ready(feed_dict)
            check_run(runner, values, reference)

    def infer_shape(self, feed_shapes: Mapping[Node, tuple[int, ...]]) -> None:
        """Fills `node_to_shape_map` with the shape of every node of the graph, with no
        execution.
        """
        signatures = self._feeds.signatures_of(feed_shapes)
        self._shapes = signatures, self._shapes_for(signatures)
        self._signatures = signatures

    def memory_plan(self, feed_shapes: Mapping[Node, tuple[int, ...]]) -> None:
        """Fills `node_to_arr_map` lazily; runs use plans of their own."""
        self.infer_shape(feed_shapes)

    def _shapes_for(self, signatures: tuple[Signature, ...]) -> dict[Node, Any]:
        return {
            node: spec.shape if isinstance(spec, Spec) else tuple(s.shape for s in spec)
            for node, spec in self._infer(self._feeds.specs(signatures)).items()
        }

    @property
    def node_to_shape_map(self) -> dict[Node, Any] | None:
        """The shape of every node of the graph in the last run, or as `infer_shape` was asked since
        (a tuple of shapes for an operator with several outputs); None before either.
        """
        if self._signatures is None:
            return None
        if self._shapes is None or self._shapes[0] != self._signatures:
            self._shapes = self._signatures, self._shapes_for(self._signatures)
        return self._shapes[1]

    @property
    def node_to_arr_map(self) -> dict[Node, Any]:
        """An array for every computed node, in the shapes of `node_to_shape_map`; made when asked
        for.
        """
        shapes = self.node_to_shape_map or {}
        if self._arrays is None or self._arrays[0] is not shapes:
            make = np.empty if self.ctx is None else partial(empty, ctx=self.ctx)
            arrays = {
                node: make(shape)
                for node, shape in shapes.items()
                if node.op.outputs == 1 and not node.op.leaf
            }
            self._arrays = shapes, arrays
        return self._arrays[1]

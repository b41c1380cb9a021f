"""The executor: infers, rewrites, schedules and plans a graph once for each set of feed
signatures, then runs it.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import GraphError
from ..fusion import FUSIONS, select
from ..graph.collector import paused_collector
from ..graph.infer import infer
from ..graph.node import Node, find_topo_sort, hooks
from ..graph.spec import Spec
from ..ndarray import NDArray
from ..ops.leaf import Parameter, flush, unflushed
from ..passes.pipeline import Options, Pass, arrange
from ..passes.precision import check_precision
from ..runtime.device import Context, context_or_numpy
from ..runtime.target import Target
from ..settings import settings
from .autocast import AUTOCAST
from .backend import Backend, backend_of
from .debug.contract import Checked
from .debug.observe import may_stop, run_watched
from .debug.text import pass_printer
from .debug.views import Views
from .plan.memory import Plan, make_plan
from .plan.schedule import schedule
from .recompute import byte_count, fit
from .run import parameters as state
from .run.feeds import Feeds, Signature
from .run.runner import Runner, second_run
from .run.transaction import Transaction
from .tune.autotune import choose_kernels
from .tune.rungs import RUNGS

# Nothing is imported later, but what runtime.library.load imports: a child that is forked while
# another thread imports a module waits for that module for ever.

_MAX_PLANS = 64  # plans in the cache; the least recently used goes first


class Executor(Views):
    """Computes nodes of a graph.

    eval_node_list: the nodes to fetch. ctx: None for numpy, `ndarray.cpu(0)` or `ndarray.gpu(0)`
    for native code, or the device's name, "gpu". precision: fp32, or tf32 or 3xtf32 on GPUs with
    tensor cores, or bf16, products and activations in bfloat16 beside Parameters of float32, or fp8
    (docs/precision.md). fusions: the passes of `dlsys.fusion` to run, instead of those that
    DLSYS_FUSION leaves. backend: that of executors which never run at the same time; they share the
    memory of its arena. memory: the most bytes of the arena, where activations lie and Parameters
    do not, or a text such as "12 GiB"; what does not fit is computed again (docs/design.md). group:
    ranks that train together, of `dist.init()`: each feeds its share of a batch, and updates use
    the mean of all ranks' gradients (docs/dist.md). Plans are made once for each set of feed shapes
    and dtypes; a run after that allocates nothing. An executor belongs to one thread at a time.

    Raises GraphError for a fetch that is no node, a cycle, two updates of one Parameter, or a wrong
    `memory`; DeviceError when `ctx` cannot be used, with what to install.

    >>> x = ad.Variable("x", (2,))
    >>> ad.Executor([(x * x).sum()]).run({x: np.array([1.0, 3.0], np.float32)})
    [array(10., dtype=float32)]
    """

    def __init__(
        self,
        eval_node_list: Sequence[Node],
        ctx: Context | str | None = None,
        precision: str = "fp32",
        fusions: Sequence[Pass] | None = None,
        backend: Backend | None = None,
        group: Any = None,
        memory: int | str | None = None,
    ) -> None:
        if isinstance(eval_node_list, Node) or not isinstance(eval_node_list, Iterable):
            raise GraphError(f"Executor: expected a list of nodes to fetch, got {eval_node_list!r}")
        self.eval_node_list = list(eval_node_list)
        for node in self.eval_node_list:
            _check_fetch(node)
        self.ctx = context_or_numpy(ctx)
        self.precision = check_precision(precision)
        self.memory = None if memory is None else byte_count(memory)
        self._fusions = fusions
        self.topo_order = find_topo_sort(self.eval_node_list)
        self.recorder: Any = None  # a profile.Profile that times every step of every run
        self._feeds = Feeds(self.topo_order, self.ctx)
        self._parameters = [node for node in self.topo_order if isinstance(node, Parameter)]
        self._draws: Parameter | None = None  # what `draws` counts, where something is drawn
        if any(node.op.random for node in self.topo_order):
            self._draws = Parameter(np.int64(0), "draws", trainable=False)
        self._runners: OrderedDict[tuple[Signature, ...], Any] = OrderedDict()
        # Held by a run. Only `with` takes it atomically: Ctrl-C after a call of `acquire` would
        # leave it taken.
        self._running = threading.Lock()
        self._changes = Node.changes
        self._warned_of_plans = False
        self._backend: Backend = backend or backend_of(self.ctx)
        self._parallel: Any = None
        if group is not None:
            if "data_parallel" not in hooks:  # nobody has imported dlsys.dist
                raise GraphError(f"Executor: group is one of dist.init(), got {group!r}")
            self._parallel = hooks["data_parallel"](group, self.ctx, self._parameters)
        self._count_from_here()

    # ---- running ----
    def run(
        self, feed_dict: Mapping[Node, Any] | None = None, convert_to_numpy_ret_vals: bool = False
    ) -> list[Any]:
        """The values of the fetched nodes, in order.

        feed_dict: a numpy array, NDArray, number or nested list for every Variable that the graph
        uses. Results are fresh numpy arrays on numpy; NDArrays on native devices, unless
        convert_to_numpy_ret_vals. A group's value is None. A run that is refused or fails changes
        no Parameter; Ctrl-C between two updates waits for the rest of the run, a second does not.

        Raises GraphError for a missing or unknown feed, ShapeError for a feed or graph whose shapes
        or dtypes do not fit, OutOfMemoryError when a plan does not fit `memory` or the device, and
        OutOfRangeError for an index or a class label out of range. A GPU finds the last when the
        run is queued already: it is raised where its results are first waited for, and Parameters
        may hold NaN by then (see errors.OutOfRangeError).
        """
        if unflushed:
            flush()
        return self._runs(1, feed_dict, convert_to_numpy_ret_vals)

    def run_many(
        self,
        n: int,
        feed_dict: Mapping[Node, Any] | None = None,
        convert_to_numpy_ret_vals: bool = False,
    ) -> list[Any]:
        """`n` runs as of `run` with the same feeds, queued without waiting; the last one's values.

        For graphs that advance by themselves: a training step whose batch is drawn on the device.
        On a GPU a launch makes one run, or several of short ones, and the host is free as soon as
        they are queued. Raises as `run` does, and GraphError for another n than 1, 2 and so on.
        """
        if not isinstance(n, (int, np.integer)) or n < 1:
            raise GraphError(f"run_many: expected at least 1 run, got {n!r}")
        if unflushed:
            flush()
        return self._runs(n, feed_dict, convert_to_numpy_ret_vals)

    def run_recorded(self, feed_dict: Mapping[Node, Any]) -> list[Any]:
        """`run` for what was recorded with Tensors, which then waits for nothing recorded later."""
        return self._runs(1, feed_dict, False)

    def _runs(self, n: int, feed_dict: Mapping[Node, Any] | None, as_numpy: bool) -> list[Any]:
        if self._running.locked():
            raise second_run()
        with self._running:
            runner, transaction, values = self._ready(feed_dict)
            if self._parallel is not None:
                key, plan = self._signatures or (), runner.plan
                self._parallel.before_run(key, plan, lambda: self._infer(self._feeds.specs(key)))
            if n > 1 and not runner.runs:
                self._run(runner, transaction, values)  # the run after the first is captured
                n -= 1
            fetched = self._run(runner, transaction, values, n)
        if not as_numpy:
            return fetched
        return [value.asnumpy() if isinstance(value, NDArray) else value for value in fetched]

    def _run(
        self, runner: Runner, transaction: Transaction, values: list[Any], times: int = 1
    ) -> list[Any]:
        # As settings.stepwise says; a property costs a call, and this is every run.
        stepwise = settings.debug >= 2 or settings.debug_nan or settings.separate_arena
        watched = stepwise or self.recorder is not None
        if not watched and not transaction.needed:
            return runner.run(values, times)
        transaction.observed = watched and may_stop()
        for _ in range(times):
            with transaction:
                if watched:
                    fetched = run_watched(runner, values, self.ctx, self.recorder)
                else:
                    fetched = runner.run(values)
        return fetched

    @property
    def target(self) -> Target:
        """The kernels and abilities of the device that it plans for."""
        return self._backend.target

    @property
    def draws(self) -> int:
        """The number of runs that drew random numbers whose step this graph does not advance.

        Each of them draws anew: run k, counted from 0, draws the numbers of (seed, step, k). Set it
        to repeat them: after `executor.draws = k` the next run draws what run k drew, as do those
        of another executor of the graph. Raises GraphError for what is no such number.
        """
        return int(self._draws.asnumpy()) if self._draws is not None else 0

    @draws.setter
    def draws(self, number: int) -> None:
        if not isinstance(number, (int, np.integer)) or not 0 <= number < 2**32:
            raise GraphError(f"Executor.draws: expected a number of runs, got {number!r}")
        if self._draws is not None:
            self._draws.set(np.int64(number))

    def _ready(self, feed_dict: Mapping[Node, Any] | None) -> tuple[Runner, Transaction, list[Any]]:
        """The bound plan for these feeds, the transaction of its runs, the feeds in its order."""
        values, key = self._feeds.values(feed_dict or {})
        if self._changes != Node.changes:
            if any(node.changed > self._changes for node in self.topo_order):
                self._runners.clear()  # a constant is another now, a Parameter elsewhere
            self._changes = Node.changes
        found = self._runners.get(key)
        if found is None:
            found = self._add_runner(key)
        elif len(self._runners) == _MAX_PLANS:
            self._runners.move_to_end(key)
        self._signatures = key
        runner, transaction, order = found
        return runner, transaction, values if order is None else [values[k] for k in order]

    def _add_runner(self, key: tuple[Signature, ...]) -> tuple[Runner, Transaction, Any]:
        """Plans for feeds of these signatures, and binds the plan to memory."""
        runner = self._bind(self._make_plan(self._feeds.specs(key)))
        at = {node: k for k, node in enumerate(self._feeds.nodes)}
        order = [at[value.node.origin] for value in runner.plan.feeds]
        transaction = Transaction(runner.plan, self.target)
        # With which feeds it reads; None: all as they come.
        added = runner, transaction, order if order != [*range(len(at))] else None
        self._runners[key] = added
        if len(self._runners) > _MAX_PLANS:
            self._runners.popitem(last=False)
            self._warn_of_plans()
        return added

    def _warn_of_plans(self) -> None:
        """Warns once of shapes that keep changing, each of which is slow at first."""
        if not self._warned_of_plans:
            self._warned_of_plans = True
            message = (
                f"this executor was fed more than {_MAX_PLANS} sets of shapes; each new one is "
                "planned, and on a GPU it is captured only when it comes again: feed batches of "
                "few sizes, for example by padding"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=6)

    def _bind(self, plan: Plan) -> Runner:
        for parameter in self._parameters:
            state.check_home(parameter, self.ctx)
        # In the order in which steps write them, those only read last.
        written = [step.inputs[k].node for step in plan.steps for k in step.node.op.writes]
        states = dict.fromkeys([*written, *(value.node for value in plan.states)])
        state.place([node.origin for node in states], self.ctx)
        runner = self._backend.runner(plan, Checked)
        self._backend.reserve(runner)
        return runner

    # ---- planning ----
    def _infer(self, feeds: Mapping[Node, Spec]) -> dict[Node, Any]:
        leaves = dict(feeds)
        for parameter in self._parameters:
            dtype = state.dtype_on(parameter, self.ctx)
            leaves[parameter] = Spec(
                parameter.shape, dtype, parameter.declared or self.ctx is not None
            )
        return infer(self.topo_order, leaves, native=self.ctx is not None)

    def _make_plan(self, feeds: Mapping[Node, Spec]) -> Plan:
        with paused_collector():
            plan = fit(*schedule(self._rewrite(self._infer(feeds))), self.memory, self._planned)
        del plan.fetches[len(self.eval_node_list) :]  # those that only count draws
        if settings.debug >= 1:
            print(plan)
        return plan

    def _planned(self, order: list[Node], values: list[Node]) -> Plan:
        """The plan of a scheduled graph."""
        own, reuse = self._backend, not settings.separate_arena
        return make_plan(order, values, own.workspace, reuse, own.lifetimes(order))

    def _rewrite(self, specs: Mapping[Node, Any]) -> list[Node]:
        """The fetches over the graph as the target runs it."""
        fusions = self._fusions
        if fusions is None:
            fusions = select(FUSIONS, settings.fusion)
        options = Options(self.target, self.precision, settings.debug_nan, self._draws, specs)
        own = () if self._parallel is None else self._parallel.passes
        fetches, passes = self.eval_node_list, arrange((AUTOCAST, *fusions, RUNGS, *own), options)
        show = pass_printer(passes, fetches, specs) if settings.debug >= 3 else None
        for one in passes:
            fetches = one.run(fetches, options)
            if show is not None:
                show(one, fetches)
        if self.ctx is not None:
            choose_kernels(fetches, self.ctx)
        return fetches

    def plan(self, feed_shapes: Mapping[Node, tuple[int, ...]]) -> Plan:
        """The plan for `feed_shapes`, without running it: print it, or read its byte counts."""
        return self._make_plan(self._feeds.specs(self._feeds.signatures_of(feed_shapes)))


def _compute(node: Node, input_vals: Sequence[NDArray], output_val: NDArray) -> None:
    """One operator alone on NDArrays: `op.compute(node, inputs, output, use_numpy=False)`."""
    feeds = [
        hooks["variable"](x.name, dtype=value.dtype) for x, value in zip(node.inputs, input_vals)
    ]
    alone = node.derive(feeds, None)
    result = Executor([alone], ctx=output_val.ctx).run(dict(zip(feeds, input_vals)))[0]
    output_val[:] = result


hooks["compute"] = _compute


def _check_fetch(node: Any) -> None:
    if not isinstance(node, Node):
        raise GraphError(f"Executor: expected nodes to fetch, got {type(node).__name__} {node!r}")
    if node.op.outputs > 1:
        raise GraphError(
            f"Executor: {node.name} has {node.op.outputs} values; fetch {node.name}[0] and so on"
        )

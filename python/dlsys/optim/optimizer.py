"""The base of all optimizers: groups of Parameters, clipping, accumulation, averages, state."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ..describe import brief
from ..dist.collectives import all_reduce_op
from ..dist.group import Group as Ranks
from ..dist.shard import Shard, Slice, gathered, scattered
from ..dtypes import widened
from ..eager.step import drop_gradients
from ..eager.step import step as eager_step
from ..errors import DataError, GraphError
from ..graph.gradients import gradients
from ..graph.lines import where
from ..graph.node import Node, find_topo_sort
from ..ops.comparison import minimum_op
from ..ops.elementwise import sqrt_op
from ..ops.leaf import Parameter, constant_op
from ..ops.optim.apply import UPDATES, RuleOp, global_norm_op
from ..ops.optim.assign import advance_step_op, assign_op, group_op
from .ema import EMA
from .schedule import Schedule

Rate = float | Schedule
Options = dict[str, Any]
Range = tuple[str, Callable[[float], bool]]

UNIT: Range = ("0 <= {} < 1", lambda x: 0 <= x < 1)
NOT_NEGATIVE: Range = ("{} >= 0", lambda x: 0 <= x < float("inf"))
_OWN = -1  # the position of the rate that groups without one have
_NORM_EPS = 1e-6  # added to the norm, as in PyTorch's clip_grad_norm_


class Group(NamedTuple):
    """Parameters with their rate, rule, the rule's attributes and the value that slots begin at."""

    parameters: list[Parameter]
    lr: Node
    rule: RuleOp
    attrs: Options
    initial: float


class Optimizer:
    """Updates Parameters by the gradient of a loss.

    lr: a number, which becomes a Parameter: `optimizer.lr.set(0.01)` takes effect at the next run
    of every executor; or a Schedule of the updates made. weight_decay: of an L2 penalty, joined to
    the gradient; with `decoupled` the weights shrink by lr · weight_decay of themselves instead.
    clip_norm: gradients are scaled down so that the norm over all of them is at most this.
    clip_value: then each of their elements is cut to at most this size. accumulate: gradients are
    averaged over so many runs, the last of which makes the update. ema: an EMA of the weights, or
    its decay. shard: ranks (`dist.init()`), each of which keeps and updates a part of every slot
    and Parameter (docs/dist.md), for `minimize` and executors of that group. params: what `step()`
    updates after `backward()` of a Tensor, as `minimize` takes it.
    options: the constants of the rule, for subclasses.

    Attributes: `lr`, a scalar node, float64 on numpy and float32 natively; `steps`, a
    Parameter of one int64 that counts the updates made; `slots`, for each Parameter its further
    states by name, which are float32 for Parameters of 16 bits; `ema`.

    >>> x = dl.tensor([1.0, 2.0])
    >>> w = ad.Parameter(np.array([1.0, 2.0], np.float32))
    >>> optimizer = optim.SGD(0.1, params=[w], weight_decay=0.01, clip_norm=1.0)
    >>> (w * x).sum().backward()
    >>> optimizer.step()
    >>> w.asnumpy()
    array([0.95427865, 1.9085573 ], dtype=float32)
    """

    ranges: dict[str, Range] = {}

    def __init__(
        self,
        lr: Rate,
        options: Options,
        *,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        ema: EMA | float | None = None,
        shard: Ranks | None = None,
        params: Parameter | Sequence[Parameter] | Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.options = options | dict(weight_decay=weight_decay, decoupled=decoupled) | options
        self._check(lr, self.options)
        for key, value in (("clip_value", clip_value), ("clip_norm", clip_norm)):
            if value is not None and not value > 0:
                raise GraphError(f"{self._title}: expected {key} > 0 or None, got {value}")
        if int(accumulate) != accumulate or accumulate < 1:
            raise GraphError(f"{self._title}: expected accumulate >= 1, got {accumulate}")
        if shard is not None and (not isinstance(shard, Ranks) or accumulate > 1):
            raise GraphError(
                f"{self._title}: shard is a group of ranks, and goes without accumulate; got "
                f"{shard!r} and accumulate={accumulate}"
            )
        self._shard = shard if shard is not None and shard.size > 1 else None
        self._parts: dict[Parameter, Shard] = {}
        self.clip_value, self.clip_norm = clip_value, clip_norm
        self.accumulate = int(accumulate)
        self.ema = ema if ema is None or isinstance(ema, EMA) else EMA(ema)
        self.steps = Parameter(np.int64(0), "step", trainable=False)
        self.runs = Parameter(np.int64(0), "runs", trainable=False)
        self.slots: dict[Parameter, dict[str, Parameter]] = {}
        self._names: dict[Parameter, str] = {}
        self._rates: dict[tuple[int, Rate], Node] = {}  # by a group's position and what it gave
        self.lr: Any = self._rate(_OWN, lr)  # a Parameter for a number, else the schedule's node
        self._given = lr
        self.params: list[Parameter] = []
        self._params: Any = params
        if params is not None:
            self._params = self._groups(params)
            self.params = [p for group in self._params for p in group.parameters]

    def rule(self, options: Options) -> tuple[RuleOp, Options]:
        """The operator that updates one Parameter under these options, and its attributes."""
        raise NotImplementedError

    def __repr__(self) -> str:
        given = isinstance(self._given, Schedule)
        words = [f"lr={self._given!r}" if given else f"lr={self.learning_rate():g}"]
        options = self.options | dict(clip_value=self.clip_value, clip_norm=self.clip_norm)
        options |= dict(accumulate=self.accumulate > 1 and self.accumulate, ema=self.ema)
        words += [f"{name}={brief(value)}" for name, value in options.items() if value]
        return f"{type(self).__name__}({', '.join(words)})"

    # ---- building ----
    def minimize(
        self, loss: Node, parameters: Parameter | Sequence[Parameter] | Sequence[Mapping[str, Any]]
    ) -> Node:
        """One node that, when fetched, updates every given Parameter by the gradient of `loss` and
        makes the effects of the loss's nodes (running statistics, random steps); its value is None.

        parameters: Parameters, or groups of them as dicts: `{"params": [...], "lr": 0.01,
        "weight_decay": 0.0}` with whatever a group has for itself.

        A loss over no samples, be it NaN as a mean of none, has gradient 0: an empty batch leaves
        weights (but for momentum and weight decay) and running statistics as they are.

        Raises GraphError for what is no Parameter of floats, not trainable or given twice, and for
        options that the optimizer does not have or that are out of range.
        """
        groups = self._groups(parameters)
        flat = [parameter for group in groups for parameter in group.parameters]
        nodes = self._updates(groups, dict(zip(flat, gradients(loss, flat))))
        return group_op(*nodes, *effects_of(loss), name="train")

    def apply_gradients(self, pairs: Iterable[tuple[Any, Parameter]]) -> Node | None:
        """Updates Parameters by given gradients, (gradient, Parameter) pairs: clipped, scaled or
        joined as one likes. Of nodes it returns one that makes the updates when it is fetched; with
        Tensors it makes them, as `step` does, and returns None.

        Raises what `minimize` raises, and GraphError for a Parameter that `params` does not have
        where these were given.
        """
        given = [(p, grad) for grad, p in pairs]
        if all(isinstance(grad, Node) for _, grad in given):
            return group_op(*self.updates([(grad, p) for p, grad in given]), name="train")
        for parameter, grad in given:
            parameter.grad = grad
        eager_step(self, [parameter for parameter, _ in given])
        return None

    def updates(self, pairs: Sequence[tuple[Node, Parameter]]) -> list[Node]:
        """The nodes that update Parameters by gradients, (gradient, Parameter) pairs."""
        grads = {parameter: grad for grad, parameter in pairs}
        groups = self._params or self._groups(list(grads))
        unknown = grads.keys() - {p for group in groups for p in group.parameters}
        if unknown:
            raise GraphError(f"{self._title}: {unknown.pop().name} is not among params [{where()}]")
        chosen = [g._replace(parameters=[p for p in g.parameters if p in grads]) for g in groups]
        return self._updates(chosen, grads)

    def step(self) -> None:
        """Updates every Parameter of `params` by its `grad`, which `backward()` of a Tensor left;
        those without one stay. GraphError where none has one.
        """
        self._check_params("step")
        if self._shard is not None:
            raise GraphError(f"{self._title}.step: with shard, updates are nodes: see minimize")
        eager_step(self, self.params)

    def zero_grad(self) -> None:
        """Drops the gradients of `params`. Right after `step()` it lets a weight's gradient and its
        update be one kernel, since nobody can look at the gradient any more.
        """
        self._check_params("zero_grad")
        drop_gradients(self.params)

    def _check_params(self, method: str) -> None:
        if self._params is None:
            raise GraphError(
                f"{self._title}.{method}: it has no Parameters; make it with params="
                f"model.parameters() [{where()}]"
            )

    def _updates(self, groups: Sequence[Group], given: Mapping[Parameter, Node]) -> list[Node]:
        flat = [parameter for group in groups for parameter in group.parameters]
        grads = [given[parameter] for parameter in flat]
        if self._shard is not None:
            grads = [scattered(grad, p, self._shard) for grad, p in zip(grads, flat)]
        if self.accumulate > 1:
            totals = [self._slot(parameter, "gradient") for parameter in flat]
            grads = [
                UPDATES["accumulate_update"](total, grad, **self._accumulation)
                for total, grad in zip(totals, grads)
            ]
        scale = self._scale(grads)
        remaining = iter(grads)
        updated = {
            parameter: self._update(group, parameter, next(remaining), scale)
            for group in groups
            for parameter in group.parameters
        }
        nodes = [*updated.values(), advance_step_op(self.steps, **self._accumulation)]
        if self.accumulate > 1:
            nodes.append(advance_step_op(self.runs))
        if self.ema is not None:
            nodes += self.ema.updates(updated, **self._accumulation)
        return nodes

    @property
    def _accumulation(self) -> Options:
        """The arguments of updates that happen once every `accumulate` runs only."""
        return {"count": self.runs, "every": self.accumulate} if self.accumulate > 1 else {}

    def _update(self, group: Group, parameter: Parameter, grad: Node, scale: Node | None) -> Node:
        slots = [self._slot(parameter, name, group.initial) for name in group.rule.slots]
        counts = group.rule.rule.needs_step or group.attrs.get("dampening")
        options = {"step": self.steps if counts else None, "scale": scale, **self._accumulation}
        options |= group.attrs
        if self._shard is None:
            return group.rule(parameter, *slots, grad, group.lr, **options)
        if parameter not in self._parts:
            name = f"{parameter.name}.part"
            self._parts[parameter] = Shard(parameter, name, self._shard, None)
        part = group.rule(self._parts[parameter], *slots, grad, group.lr, **options)
        return assign_op(parameter, gathered(part, parameter, self._shard))

    def _scale(self, grads: Sequence[Node]) -> Node | None:
        """The factor of every gradient: one run's share, times that of clipping by the norm."""
        share = 1 / self.accumulate
        if self.clip_norm is None:
            return constant_op(np.array(share)) if share < 1 else None
        norm = global_norm_op(*grads)
        if self._shard is not None:
            norm = sqrt_op(all_reduce_op(norm * norm, group=self._shard))
        if share < 1:
            norm = norm * share
        return minimum_op(self.clip_norm / (norm + _NORM_EPS), 1.0) * share

    def _slot(self, parameter: Parameter, name: str, initial: float = 0.0) -> Parameter:
        slots = self.slots.setdefault(parameter, {})
        if name not in slots and self._shard is not None:
            slots[name] = Shard(parameter, f"{parameter.name}.{name}", self._shard, initial)
        elif name not in slots:
            value = np.full(parameter.saved_shape, initial, widened(parameter.dtype))
            label = f"{parameter.name}.{name}"
            if isinstance(parameter, Slice):
                slots[name] = Slice(value, label, parameter.group, parameter.axis, False)
            else:
                slots[name] = Parameter(value, label, trainable=False)
        return slots[name]

    def _groups(self, parameters: Any) -> list[Group]:
        given = [parameters] if isinstance(parameters, Node) else list(parameters)
        if not any(isinstance(item, Mapping) for item in given):
            given = [{"params": given}]
        groups = [self._group(k, item) for k, item in enumerate(given)]
        flat = [parameter for group in groups for parameter in group.parameters]
        self._check_parameters(flat)
        for parameter in flat:
            if parameter not in self._names:
                self._names[parameter] = self._new_name(parameter)
        if self.ema is not None and not self.ema.averages.keys() <= self._names.keys():
            raise GraphError(f"{self._title}: its EMA is another optimizer's; give each its own")
        return groups

    def _group(self, position: int, item: Any) -> Group:
        own = renamed(dict(item)) if isinstance(item, Mapping) else {}
        if "params" not in own or own.keys() - {"params", "lr", *self.options}:
            raise GraphError(
                f"{self._title}: a group is a dict with params and any of lr, "
                f"{', '.join(self.options)}; got {', '.join(map(str, own)) or 'none'}"
            )
        parameters, lr = own.pop("params"), own.pop("lr", None)
        options = {**self.options, **own}
        self._check(self._given if lr is None else lr, options)
        rule, attrs = self.rule(options)
        if options["weight_decay"]:
            attrs["decay" if options["decoupled"] else "l2"] = float(options["weight_decay"])
        if self.clip_value is not None:
            attrs["clip"] = float(self.clip_value)
        lr_node = self.lr if lr is None else self._rate(position, lr)
        parameters = [parameters] if isinstance(parameters, Node) else list(parameters)
        return Group(parameters, lr_node, rule, attrs, options.get("initial", 0.0))

    def _rate(self, position: int, lr: Rate) -> Node:
        """The node of a rate; the same for the same position and value, and for the same Schedule
        wherever it is given, in every graph.
        """
        key = _OWN if isinstance(lr, Schedule) else position, lr
        if key not in self._rates:
            made: Node
            if isinstance(lr, Schedule):
                made = lr.node(self.steps)
            else:
                made = Parameter(np.float64(lr), _nth("lr", len(self._rates)), trainable=False)
            self._rates[key] = made
        return self._rates[key]

    # ---- checks and names ----
    @property
    def _title(self) -> str:
        return type(self).__name__

    def _check_parameters(self, flat: Sequence[Any]) -> None:
        for parameter in flat:
            if not isinstance(parameter, Parameter):
                raise GraphError(f"{self._title}: expected Parameters, got {parameter!r}")
            if parameter.dtype.kind != "f" or not parameter.trainable:
                what = "not trainable" if parameter.dtype.kind == "f" else f"{parameter.dtype}"
                raise GraphError(f"{self._title}: {parameter.name} is {what}; leave it out")
        if len(set(flat)) < len(flat):
            twice = next(node for node, count in Counter(flat).items() if count > 1)
            raise GraphError(f"{self._title}: {twice.name} is given twice; give it once")

    def _check(self, lr: Rate, options: Options) -> None:
        if not isinstance(lr, (Schedule, Real)):
            raise GraphError(
                f"{self._title}: the rate is a number or a Schedule, got {type(lr).__name__}; "
                "Parameters go to minimize(loss, parameters)"
            )
        ranges = {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, **self.ranges}
        given = options if isinstance(lr, Schedule) else {"lr": lr, **options}
        checked = {key: value for key, value in given.items() if key in ranges}
        if not all(ranges[key][1](value) for key, value in checked.items()):
            wanted = ", ".join(ranges[key][0].format(key) for key in checked)
            got = ", ".join(f"{key}={value}" for key, value in checked.items())
            raise GraphError(f"{self._title}: expected {wanted}, got {got}")

    def _new_name(self, parameter: Parameter) -> str:
        """The Parameter's own name, or its position, or the next number that is free, where it has
        none or another has it too.
        """
        made_up = parameter.name == f"{parameter.op.name}.{parameter.number}"
        taken = set(self._names.values())
        if not made_up and parameter.name not in taken:
            return parameter.name
        return next(name for k in count(len(taken)) if (name := str(k)) not in taken)

    # ---- state ----
    def learning_rate(self) -> float:
        """The rate of the next update, on the host, where a group has none of its own."""
        if isinstance(self._given, Schedule):
            return self._given(int(self.steps.asnumpy()))
        return float(self.lr.asnumpy())

    def named_state(self) -> Iterator[tuple[str, Parameter]]:
        """All that a training continues from: counters, rates, slots, averages. The names come from
        the Parameters' names, or from their positions where they have none.
        """
        yield "step", self.steps
        if self.accumulate > 1:
            yield "runs", self.runs
        for k, ((_, lr), node) in enumerate(self._rates.items()):
            if isinstance(lr, Schedule):
                for name, parameter in lr.named_state():
                    yield f"{_nth('schedule', k)}.{name}", parameter
            elif isinstance(node, Parameter):
                yield node.name, node
        for parameter, slots in self.slots.items():
            for name, slot in slots.items():
                yield f"{self._names[parameter]}.{name}", slot
        if self.ema is not None:
            yield "ema.step", self.ema.step
            for parameter, average in self.ema.averages.items():
                yield f"{self._names[parameter]}.average", average

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of the state, by name."""
        return {name: parameter.asnumpy() for name, parameter in self.named_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the state to what `state_dict` gave, after `minimize` has made it.

        Raises DataError when names are missing or unknown, ShapeError when a shape differs; nothing
        is changed then.
        """
        own = dict(self.named_state())
        missing, unknown = own.keys() - state.keys(), state.keys() - own.keys()
        if missing or unknown:
            parts = [
                f"{what} {', '.join(sorted(names)[:5])}"
                for what, names in (("missing", missing), ("unknown", unknown))
                if names
            ]
            raise DataError(
                f"{self._title}: this state does not fit, {'; '.join(parts)}; call minimize with "
                "the same Parameters and options before load_state_dict"
            )
        before = self.state_dict()
        try:
            for name, parameter in own.items():
                parameter.set(state[name])
        except Exception:
            for name, parameter in own.items():
                parameter.set(before[name])
            raise


def renamed(options: Options) -> Options:
    """`options` itself, where the earlier spelling `centred` became `centered`, with a warning."""
    if "centred" in options:
        warnings.warn("centred is spelled centered now", DeprecationWarning, stacklevel=3)
        options["centered"] = options.pop("centred")
    return options


def _nth(name: str, k: int) -> str:
    return f"{name}.{k}" if k else name


def effects_of(loss: Node) -> list[Node]:
    """The effects that the nodes behind `loss` carry, each once, in the order of the graph.

    >>> y = nn.BatchNorm1d(2)(ad.Variable("x", (4, 2)))
    >>> len(optim.effects_of(y.sum()))  # which updates the running statistics
    1
    """
    return list(dict.fromkeys(e for node in find_topo_sort([loss]) for e in node.effects))

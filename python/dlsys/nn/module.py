"""Module, what layers and models have in common: state by name, modes, and building graphs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from reprlib import recursive_repr
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..autodiff import Node, Parameter, Variable
from ..describe import drawn_by, few
from ..dtypes import host
from ..eager.engine import tracing
from ..eager.step import drop_gradients
from ..errors import DataError, GraphError
from ..functional.record import Recorder
from ..graph.lines import where
from .summary import Call, Summary, summarize

Self = TypeVar("Self", bound="Module")

# A name that PyTorch's batch normalization saves and only uses when it has no momentum.
COUNTER = "num_batches_tracked"


class Differences(NamedTuple):
    """Names that a module has and a state_dict lacks, and the other way round.

    missing: names that the values lack. unexpected: names that the module does not have.
    """

    missing: list[str]
    unexpected: list[str]


_numbers = itertools.count()
Hook = Callable[["Module", tuple[Any, ...], Any], Any]


class HookHandle:
    """The handle that `Module.register_forward_hook` returns: `remove()` ends the hook's calls.

    hooks: those of the module. hook: this one.
    """

    def __init__(self, hooks: dict[int, Hook], hook: Hook) -> None:
        self._hooks, self._number = hooks, next(_numbers)
        hooks[self._number] = hook

    def remove(self) -> None:
        """The hook is not called anymore; a second time it does nothing."""
        self._hooks.pop(self._number, None)

    def __repr__(self) -> str:
        removed = "" if self._number in self._hooks else ", removed"
        return f"HookHandle({self._number}{removed})"

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class StateDict(dict[str, np.ndarray]):
    """Parameters and buffers by name; `trained_on` goes with them, see Module."""

    trained_on: Any = None

    def __repr__(self) -> str:
        words = [f"{name} {array.dtype} {array.shape}" for name, array in self.items()]
        return f"StateDict({', '.join(few(words))})"


_calls: ContextVar[list | None] = ContextVar("calls", default=None)


def _undefined(self: Module, *inputs: Any, **options: Any) -> Node:
    """Builds the graph of a call, of Nodes or Tensors, and returns its output: what a subclass
    defines. inputs, options: those of the call. GraphError where it is not defined.
    """
    raise GraphError(
        f"{type(self).__name__} builds no graph: give it a method forward(self, x) that does"
    )


class Module:
    """Base of layers and models: a subclass sets attributes and builds its graph in `forward`.

    Attributes that are Parameters are its state: parameters where trainable, else buffers, such as
    running statistics. Attributes that are Modules are its children. Both may also sit in lists,
    tuples and dicts, and in these within these. Names are paths as in PyTorch, `layer1.0.weight`;
    what is used several times has the first of its names.

    `model(x)` adds the model to the graph behind x, in the mode that it is in then: `train()`, the
    default, or `eval()`. Graphs in both modes share the state.

    `trained_on` is the description (`dlsys.data.DataDescription`) of the data that `train.fit`
    trained a model on, None where there is none: how inputs are normalized before the model sees
    them. It goes with `state_dict` and checkpoints. `history` is the `train.History` of its last
    run, also of one that was interrupted.

    >>> class Scale(nn.Module):
    ...     def __init__(self):
    ...         self.factor = ad.Parameter(np.array([2.0], np.float32))
    ...     def forward(self, x):
    ...         return x * self.factor
    ...
    >>> Scale()(dl.tensor([1.0, 3.0]))
    Tensor([2., 6.], device=numpy, requires_grad=True)
    """

    # Beside the attributes: what a layer was made of is not its state once more.
    __slots__ = ("__dict__", "__weakref__", "made_with")
    made_with: tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of its constructor

    training = True
    trained_on: Any = None
    history: Any = None
    forward: Callable[..., Any] = _undefined
    _repr_html_ = drawn_by("module_html")
    _changes = 0  # attributes that were set, of any module
    _named: int | None = None  # how many were when this module named its state
    torch_lacks: tuple[str, ...] = ()  # state that PyTorch's module of this kind does not have
    _hooks: dict[int, Hook] = {}

    def __new__(cls: type[Self], *args: Any, **options: Any) -> Self:
        if cls.__init__ is object.__init__ and (args or options):
            raise TypeError(f"{cls.__name__}() takes no arguments")  # object says so no more
        made = object.__new__(cls)
        object.__setattr__(made, "made_with", (args, options))
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "training":
            Module._changes += 1
        object.__setattr__(self, name, value)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Calls `forward` and returns its output node, or a tuple of several. State takes the names
        that it has in the outermost module called.

        inputs, options: as `forward` takes them.
        """
        if not (inputs and type(inputs[0]) is Recorder.tensor) and self._named != Module._changes:
            self._name_state()
        if tracing:
            tracing[-1].modes[self] = self.training
        calls = _calls.get()
        if calls is None:
            if not self._hooks:
                return self.forward(*inputs, **options)
            return self._hooked(inputs, self.forward(*inputs, **options))
        position = len(calls)
        calls.append(None)  # containers come before what they contain
        output = self._hooked(inputs, self.forward(*inputs, **options))
        calls[position] = (self, (*inputs, *options.values()), output)
        return output

    def _name_state(self) -> None:
        """Names the state; the next calls need not, until an attribute of a module is set or where
        state may come into a list or dict unseen.
        """
        for name, state in self.named_state():
            if not f".{state.name}".endswith(f".{name}"):
                state.name = name
        values = (value for _, module in self.named_modules() for value in vars(module).values())
        if not any(map(_may_change, values)):
            object.__setattr__(self, "_named", Module._changes)

    def _hooked(self, inputs: tuple[Any, ...], output: Any) -> Any:
        """The output, or what hooks made of it."""
        for hook in [*self._hooks.values()]:
            changed = hook(self, inputs, output)
            output = output if changed is None else changed
        return output

    def calls(self, *inputs: Any) -> list[Call]:
        """Builds the graph like a call, and says what each layer made; the first is the model's."""
        names = {module: name for name, module in self.named_modules()}
        recorded: list = []
        token = _calls.set(recorded)
        try:
            self(*inputs)
        finally:
            _calls.reset(token)
        return [Call(names.get(made[0], "?"), *made) for made in recorded]

    def activations(self, *inputs: Any) -> dict[str, Any]:
        """The output of each layer for the inputs, by the layer's name; "" is the model's output. A
        layer that is used again has its further outputs as `name#2`, `name#3`.

        Of Nodes these are nodes, which an Executor computes, of Tensors they are Tensors.
        """
        found: dict[str, Any] = {}
        used: Counter[str] = Counter()
        for call in self.calls(*inputs):
            used[call.name] += 1
            again = f"#{used[call.name]}" if used[call.name] > 1 else ""
            found[f"{call.name}{again}"] = call.output
        return found

    def register_forward_hook(self, hook: Hook) -> HookHandle:
        """Calls hook(module, inputs, output) behind each call of this module from now on, that is
        when a graph is built, or with Tensors whenever it computes. What the hook returns takes the
        output's place, unless it is None. The handle's `remove()`, or the end of a `with` over it,
        ends that. Executors that were made before do not change. GraphError for no function.
        """
        if not callable(hook):
            raise GraphError(f"register_forward_hook: {hook!r} is no function [{where()}]")
        if "_hooks" not in vars(self):
            self._hooks = {}
        return HookHandle(self._hooks, hook)

    # ---- modes ----
    def train(self: Self, mode: bool = True) -> Self:
        """Graphs built from now on are for training: batch statistics, dropout."""
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self: Self) -> Self:
        """Graphs built from now on are for inference: running statistics, no dropout."""
        return self.train(False)

    @contextmanager
    def in_mode(self, training: bool) -> Iterator[None]:
        """Graphs that the block builds are in one mode; afterwards each layer is in the one it
        had.
        """
        before = [(module, module.training) for _, module in self.named_modules()]
        self.train(training)
        try:
            yield
        finally:
            for module, mode in before:
                module.training = mode

    def freeze(self: Self) -> Self:
        """Training leaves the parameters of this module and all below it as they are: `parameters`
        no longer has them, and `buffers` does, until `unfreeze`. It counts for graphs that are
        built and optimizers that are made afterwards. Running statistics of a batch normalization
        still move in training mode; `eval()` holds them too.
        """
        for parameter in self.parameters():
            parameter.trainable, parameter.frozen = False, True
        return self

    def unfreeze(self: Self) -> Self:
        """Undoes `freeze`, also where it was called on a module above; buffers stay buffers."""
        for _, parameter in self.named_state():
            if parameter.frozen:
                parameter.trainable, parameter.frozen = True, False
        return self

    # ---- parts ----
    def apply(self: Self, function: Callable[[Module], Any]) -> Self:
        """Calls function(module) for all modules below this one and then itself, each once,
        children before their parents: to set weights anew by kind, for instance.
        """
        for _, module in sorted(self.named_modules(), key=lambda item: -_depth(item[0])):
            function(module)
        return self

    def num_parameters(self, trainable_only: bool = False) -> int:
        """The number of elements of all parameters, tied ones counted once, frozen ones too unless
        `trainable_only`; buffers do not count.
        """
        return sum(
            parameter.spec.size
            for _, parameter in self.named_state()
            if parameter.trainable or (parameter.frozen and not trainable_only)
        )

    def children(self) -> Iterator[tuple[str, Module]]:
        """The modules that are attributes of this one, with their names."""
        return ((name, item) for name, item in _members(self) if isinstance(item, Module))

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """This module, named "", and all below it, each once, parents first."""
        seen = {self}
        stack: list[tuple[str, Module]] = [("", self)]
        while stack:
            prefix, module = stack.pop()
            yield prefix, module
            new = []
            for name, child in module.children():
                if child not in seen:
                    seen.add(child)
                    new.append((_join(prefix, name), child))
            stack.extend(reversed(new))

    def named_state(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters and buffers with their names, each once."""
        seen = set()
        for prefix, module in self.named_modules():
            for name, item in _members(module):
                if isinstance(item, Parameter) and item not in seen:
                    seen.add(item)
                    yield _join(prefix, name), item

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The trainable Parameters, with names."""
        return ((name, state) for name, state in self.named_state() if state.trainable)

    def named_buffers(self) -> Iterator[tuple[str, Parameter]]:
        """State that is not trained by gradients, with names."""
        return ((name, state) for name, state in self.named_state() if not state.trainable)

    def parameters(self) -> list[Parameter]:
        """The trainable Parameters, for an optimizer, which keeps their names."""
        if self._named != Module._changes:
            self._name_state()
        return [state for _, state in self.named_parameters()]

    def zero_grad(self) -> None:
        """Drops the gradients that `backward` of a Tensor left."""
        drop_gradients(self.parameters())

    def buffers(self) -> list[Parameter]:
        """State that is not trained by gradients."""
        return [state for _, state in self.named_buffers()]

    # ---- state ----
    def to(self: Self, ctx: Any) -> Self:
        """Moves all state to another device.

        ctx: None for numpy, a context, or a name such as "gpu". DeviceError for what names none.
        """
        for _, state in self.named_state():
            state.to(ctx)
        return self

    def state_dict(self) -> StateDict:
        """A copy of all parameters and buffers, by name."""
        made = StateDict((name, state.asnumpy()) for name, state in self.named_state())
        made.trained_on = self.trained_on
        return made

    def load_state_dict(self, values: Mapping[str, Any], strict: bool = True) -> Differences:
        """Takes over parameters and buffers by name, from arrays or PyTorch tensors on the CPU.

        Everything must be there and fit; without `strict` names may be missing or unexpected, and
        are returned. A Parameter used several times may have any of its names; where PyTorch saved
        it under all of them, the first counts. PyTorch's `num_batches_tracked` is passed over.
        values: arrays by name, as `state_dict` gives them. DataError names all that is missing,
        unexpected or of another shape or kind; nothing is changed then.
        """
        own, trained_on = dict(self.named_state()), getattr(values, "trained_on", None)
        values = _by_first_names(values, own, dict(paths(self)))
        missing = [name for name in own if name not in values]
        unexpected = [name for name in values if name not in own and name.split(".")[-1] != COUNTER]
        arrays = {name: np.asarray(values[name]) for name in own if name in values}
        mismatched = [
            f"{name} is {array.dtype} {array.shape}, expected {own[name].dtype} "
            f"{own[name].saved_shape}"
            for name, array in arrays.items()
            if array.shape != own[name].saved_shape
            or not np.can_cast(array.dtype, host(own[name].dtype), "same_kind")
        ]
        if mismatched or (strict and (missing or unexpected)):
            faults = {"missing": missing, "unexpected": unexpected, "mismatched": mismatched}
            shown = [f"{what}: {', '.join(names)}" for what, names in faults.items() if names]
            draws = {f"{name}.{key}" for name, m in self.named_modules() for key in m.torch_lacks}
            theirs = missing and not unexpected and not mismatched and draws.issuperset(missing)
            hint = ", which PyTorch does not have: call nn.load_torch_state_dict" if theirs else ""
            raise DataError(
                f"{type(self).__name__}: the state_dict does not fit, nothing was loaded; "
                f"{'; '.join(shown)}{hint}"
            )
        for name, array in arrays.items():
            own[name].set(array)
        self.trained_on = self.trained_on if trained_on is None else trained_on
        return Differences(missing, unexpected)

    # ---- texts ----
    def summary(self, input_shape: tuple[int | None, ...], dtype: Any = np.float32) -> Summary:
        """A table of the layers that an input of this shape goes through, in the present mode:
        output shapes, parameters, operations. A free extent (None) counts as 1.

        input_shape: with the batch, such as (None, 1, 28, 28).
        """
        shape = tuple(1 if extent is None else extent for extent in input_shape)
        x = Variable("x", shape=shape, dtype=dtype)
        return summarize(x, self.calls(x))

    def options(self) -> str:
        """The options in the brackets of the module's repr."""
        return ""

    @recursive_repr()
    def __repr__(self) -> str:
        lines = [f"{name}: {child!r}".replace("\n", "\n  ") for name, child in self.children()]
        if not lines:
            return f"{type(self).__name__}({self.options()})"
        body = "".join(f"  {line}\n" for line in lines)
        options = self.options()
        return f"{type(self).__name__}({options}{',' if options else ''}\n{body})"


def changed(options: Mapping[str, Any], usual: Mapping[str, Any]) -> list[str]:
    """The options of a layer that are not as usual, as its repr shows them."""
    return [f"{name}={value}" for name, value in options.items() if value != usual[name]]


def _members(module: Module) -> Iterator[tuple[str, Any]]:
    """Attributes, and the items of those that are containers."""
    for name, value in vars(module).items():
        yield from _items(name, value)


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _items(_join(name, str(key)), item)
    elif isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            yield from _items(_join(name, str(k)), item)
    else:
        yield name, value


def _may_change(value: Any) -> bool:
    """True for a container that has state or modules, or is empty, and can be filled in place."""
    if isinstance(value, tuple):
        return any(map(_may_change, value))
    if not isinstance(value, (list, Mapping)):
        return False
    return not value or any(isinstance(x, (Module, Parameter)) for _, x in _items("", value))


def paths(module: Module, above: tuple[Module, ...] = ()) -> Iterator[tuple[str, Parameter]]:
    """All state by all the names that it has."""
    above = (*above, module)
    for name, item in _members(module):
        if isinstance(item, Parameter):
            yield name, item
        elif isinstance(item, Module) and item not in above:
            yield from ((_join(name, rest), state) for rest, state in paths(item, above))


def _by_first_names(
    values: Mapping[str, Any], own: Mapping[str, Parameter], paths: Mapping[str, Parameter]
) -> dict[str, Any]:
    """Values with the names of `own` where they have others of the same state."""
    first = {state: name for name, state in own.items()}
    others = {path: first[state] for path, state in paths.items() if path not in own}
    renamed = {others[name]: value for name, value in values.items() if name in others}
    return renamed | {name: value for name, value in values.items() if name not in others}


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name

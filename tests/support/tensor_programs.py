"""Random programs on Tensors, done side by side by PyTorch on the CPU, whose values are right.

A program draws leaves and then steps: arithmetic with broadcasting and promotion, functions,
reductions, indexing, views, changes in place, `detach`, `no_grad`, looks in the middle, backward
passes with their graph kept or let go. Values that are dropped in between are never computed. What
PyTorch refuses is left out; shapes and dtypes are compared at each step, values at looks and at the
end, gradients at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import dlsys as dl
from dlsys import functional as F
from dlsys.errors import GraphError

STEPS = 40
MOST = 1e3  # values beyond are dropped, so that errors of rounding stay small
BINARY = ("add", "sub", "mul", "maximum", "minimum", "div")
UNARY = ("tanh", "sigmoid", "relu", "exp", "neg", "abs", "square", "cumsum", "softmax", "copy")
NUMBERS = (2, -1, 3, 0.5, -1.5, 0.25, True)
DTYPES = ("float32", "float32", "float32", "int64", "bool")


class Mismatch(AssertionError):
    """The two sides differ."""


class Refused(Exception):
    """What PyTorch does and dlsys refuses, by design."""


BY_DESIGN = (
    "changed in place only inside no_grad",  # also by a view that detach() made
    "was broadcast has several elements in one place",
    "a change in place through detach()",
    "was changed in place since a value was computed from it",
)


class Pair:
    """A value of both sides."""

    def __init__(self, theirs: Any, ours: Any) -> None:
        self.theirs, self.ours = theirs, ours


class Program:
    """One program. draw: `number`, `flag` and `one`, as of support.table.draws.Draw."""

    def __init__(self, draw: Any, device: str) -> None:
        self.draw, self.device = draw, device
        self.told: list[str] = []  # what was done
        self.leaves: list[Pair] = []
        self.values: list[Pair] = []

    # ---- what happens ----
    def run(self) -> None:
        """Raises Mismatch where the two sides differ."""
        try:
            for _ in range(self.draw.number(1, 3)):
                self.leaf()
            for _ in range(self.draw.number(2, STEPS)):
                self.step()
            for pair in self.values:
                self.look(pair)
            for pair in self.leaves:
                self.gradient(pair)
        except Refused:
            return
        except Mismatch as error:
            told = "\n".join(f"  {line}" for line in self.told)
            raise Mismatch(f"{error}\n{self.device}:\n{told}") from None
        except Exception as error:
            told = "\n".join(f"  {line}" for line in self.told)
            text = f"{type(error).__name__}: {error}\n{self.device}:\n{told}"
            raise Mismatch(text) from error

    def step(self) -> None:
        """One step of a kind that is drawn."""
        kinds = (
            self.binary, self.binary, self.number, self.unary, self.reduction, self.index,
            self.view, self.in_place, self.assignment, self.detached, self.looked, self.dropped,
            self.backward, self.without_gradients, self.unary, self.number, self.chosen,
            self.cast, self.leaf,
        )  # fmt: skip
        self.draw.one(*kinds)()

    def pick(self, kinds: str = "fib") -> Pair | None:
        """A value of one of these kinds of dtype."""
        fit = [pair for pair in self.values if pair.ours.dtype.kind in kinds]
        return self.draw.one(*fit) if fit else None

    def name(self, pair: Pair) -> str:
        return f"v{self.values.index(pair)}"

    def add(self, told: str, theirs: Any, ours: Any) -> None:
        """Does it on both sides, and keeps what comes of it."""
        try:
            wanted = theirs()
        except (RuntimeError, TypeError, IndexError):  # PyTorch has no such thing
            return
        if wanted.dtype == torch.float64 or wanted.numel() > 4000:
            return
        if wanted.numel() and wanted.dtype == torch.float32:
            if not float(wanted.detach().abs().max()) < MOST:
                return
        self.told.append(f"v{len(self.values)} = {told}")
        pair = Pair(wanted, ours())
        self.values.append(pair)
        self.agree(pair)

    # ---- the steps ----
    def leaf(self) -> None:
        shape = tuple(self.draw.one(1, 2, 3, 4) for _ in range(self.draw.number(0, 3)))
        dtype = self.draw.one(*DTYPES)
        size = int(np.prod(shape))
        data = np.array([self.draw.number(-32, 32) for _ in range(size)]).reshape(shape)
        data = data / 16 if dtype == "float32" else data // 8 if dtype == "int64" else data > 0
        data = data.astype(dtype)
        requires = dtype == "float32" and self.draw.number(0, 2) > 0
        self.told.append(f"v{len(self.values)} = tensor({data.tolist()}, {dtype}, {requires})")
        pair = Pair(
            torch.tensor(data, requires_grad=requires),
            dl.tensor(data, self.device, requires_grad=requires),
        )
        self.values.append(pair)
        self.leaves.append(pair)

    def binary(self) -> None:
        a, b = self.pick(), self.pick()
        name = self.draw.one(*BINARY)
        if a is None or b is None or "b" in (a.ours.dtype.kind, b.ours.dtype.kind):
            return
        if name == "div" and "f" not in (a.ours.dtype.kind, b.ours.dtype.kind):
            return  # float64 as in numpy
        if name == "div" and not (b.theirs.abs() > 0.05).all():
            return
        if name in ("maximum", "minimum") and near(a, b):  # a tie's gradient goes either way
            return
        told = f"{name}({self.name(a)}, {self.name(b)})"
        theirs, ours = getattr(torch, name), getattr(F, name, None) or getattr(dl, name)
        self.add(told, lambda: theirs(a.theirs, b.theirs), lambda: ours(a.ours, b.ours))

    def number(self) -> None:
        a, n = self.pick("fi"), self.draw.one(*NUMBERS)
        if a is None:
            return
        name = self.draw.one("add", "sub", "rsub", "mul", "truediv", "radd", "gt", "le", "pow")
        if a.ours.dtype.kind == "i" and (name == "truediv" or type(n) is float):
            return  # float64 as in numpy
        if name == "pow":
            n = self.draw.one(2, 3)
        if name in ("gt", "le"):
            n = self.draw.number(-32, 32) / 16 + 0.03
            if a.theirs.numel() and float((a.theirs.detach() - n).abs().min()) < 1e-3:
                return
        told, method = f"{self.name(a)}.__{name}__({n})", f"__{name}__"
        self.add(told, lambda: getattr(a.theirs, method)(n), lambda: getattr(a.ours, method)(n))

    def unary(self) -> None:
        a, name = self.pick("f"), self.draw.one(*UNARY)
        if a is None:
            return
        if name in ("relu", "abs") and a.theirs.numel() and float(a.theirs.abs().min()) < 1e-3:
            return
        told = f"{name}({self.name(a)})"
        if name in ("cumsum", "softmax"):
            if not a.theirs.ndim:
                return
            axis = self.draw.number(-a.theirs.ndim, a.theirs.ndim - 1)
            self.add(
                f"{told} along {axis}",
                lambda: getattr(torch, name)(a.theirs, axis),
                lambda: getattr(F, name)(a.ours, axis=axis),
            )
        elif name in ("copy", "neg", "square", "abs"):
            f = {"copy": lambda x: x.clone(), "neg": lambda x: -x, "square": lambda x: x**2}
            g = f.get(name, abs)
            self.add(told, lambda: g(a.theirs), lambda: g(a.ours))
        else:
            self.add(told, lambda: getattr(torch, name)(a.theirs), lambda: getattr(F, name)(a.ours))

    def reduction(self) -> None:
        a = self.pick("fi")
        if a is None:
            return
        name = self.draw.one("sum", "mean", "amax", "amin")
        ndim = a.theirs.ndim
        axes = tuple(k for k in range(ndim) if self.draw.flag())
        keep = self.draw.flag()
        if not axes:
            axes = tuple(range(ndim))
        if name in ("amax", "amin") and a.theirs.unique().numel() < a.theirs.numel():
            return
        ours = {"amax": "max", "amin": "min"}.get(name, name)
        told = f"{self.name(a)}.{ours}(axis={axes}, keepdims={keep})"
        self.add(
            told,
            lambda: getattr(torch, name)(a.theirs, dim=axes, keepdim=keep),
            lambda: getattr(a.ours, ours)(axis=axes, keepdims=keep),
        )

    def key(self, shape: tuple[int, ...]) -> Any:
        """An index of one of the kinds that there are."""
        kind = self.draw.number(0, 3)
        if kind == 0:  # a mask
            size = int(np.prod(shape))
            mask = [self.draw.flag() for _ in range(size)]
            return np.array(mask, bool).reshape(shape)
        if kind == 1 and shape[0]:  # positions along the first axis
            count = self.draw.number(1, 4)
            return np.array([self.draw.number(-shape[0], shape[0] - 1) for _ in range(count)])
        entries: list[Any] = []
        for n in shape[: self.draw.number(1, len(shape))]:
            start, stop = self.draw.number(0, n), self.draw.one(None, self.draw.number(-n, n))
            step = self.draw.one(None, 1, 2)
            whole = [self.draw.number(-n, n - 1)] if n else []
            entries.append(self.draw.one(*whole, slice(start, stop, step)))
        if self.draw.number(0, 3) == 0:
            entries.insert(self.draw.number(0, len(entries)), None)
        if self.draw.number(0, 3) == 0:
            entries.append(...)
        return tuple(entries)

    def keys(self, key: Any) -> tuple[Any, Any]:
        """The index for both sides."""
        if not isinstance(key, np.ndarray):
            return key, key
        ours = dl.tensor(key, self.device) if self.draw.flag() else key
        return torch.tensor(key), ours

    def index(self) -> None:
        a = self.pick()
        if a is None or not a.theirs.ndim:
            return
        key = self.key(tuple(a.theirs.shape))
        theirs, ours = self.keys(key)
        self.add(f"{self.name(a)}[{key!r}]", lambda: a.theirs[theirs], lambda: a.ours[ours])

    def view(self) -> None:
        a = self.pick()
        if a is None:
            return
        name = self.draw.one("reshape", "T", "unsqueeze", "flatten", "broadcast")
        told = f"{self.name(a)}.{name}"
        if name == "T":
            order = tuple(range(a.theirs.ndim))[::-1]
            self.add(told, lambda: a.theirs.permute(order), lambda: a.ours.T)
        elif name == "broadcast":
            shape = (2, *a.theirs.shape)
            self.add(told, lambda: a.theirs.broadcast_to(shape), lambda: a.ours.broadcast_to(shape))
        elif name == "unsqueeze":
            self.add(told, lambda: a.theirs.unsqueeze(0), lambda: a.ours.unsqueeze(0))
        elif a.theirs.is_contiguous():  # PyTorch copies the others, which shows in place
            shape = (-1, a.theirs.shape[-1]) if a.theirs.ndim and name == "reshape" else (-1,)
            if a.theirs.numel():
                self.add(
                    f"{told} {shape}",
                    lambda: a.theirs.reshape(shape),
                    lambda: a.ours.reshape(shape),
                )

    def both(self, told: str, theirs: Any, ours: Any) -> None:
        """A change of both sides."""
        try:
            theirs()
        except (RuntimeError, TypeError, IndexError):
            return
        self.told.append(told)
        try:
            ours()
        except GraphError as error:
            if any(words in str(error) for words in BY_DESIGN):
                raise Refused from error
            raise

    def in_place(self) -> None:
        a, b = self.pick("fi"), self.pick("fi")
        if a is None or b is None:
            return
        name = self.draw.one("__iadd__", "__isub__", "__imul__")
        n = self.draw.one(*NUMBERS)
        whole = self.draw.flag()
        if not whole and a.theirs.dtype == torch.int64:
            n = 2
        told = f"{self.name(a)}.{name}({self.name(b) if whole else n})"
        theirs = b.theirs if whole else n
        ours = b.ours if whole else n
        self.both(
            told, lambda: getattr(a.theirs, name)(theirs), lambda: getattr(a.ours, name)(ours)
        )
        self.tame(a)

    def assignment(self) -> None:
        a = self.pick()
        if a is None or not a.theirs.ndim:
            return
        key = self.key(tuple(a.theirs.shape))
        theirs, ours = self.keys(key)
        region = a.theirs.detach()[theirs]
        kind, dtype = a.ours.dtype.kind, a.theirs.dtype
        fits = [
            p for p in self.values if p.theirs.shape == region.shape and p.theirs.dtype == dtype
        ]
        if getattr(key, "dtype", None) == np.int64 and len(
            set((key % len(a.theirs)).tolist())
        ) < len(key):
            return  # which of several counts is not said
        if fits and self.draw.flag():
            b = self.draw.one(*fits)
            value, their_value, told = b.ours, b.theirs, self.name(b)
        else:
            value = {"f": 0.5, "i": 3, "b": True}[kind]
            their_value, told = value, str(value)
        self.both(
            f"{self.name(a)}[{key!r}] = {told}",
            lambda: a.theirs.__setitem__(theirs, their_value),
            lambda: a.ours.__setitem__(ours, value),
        )

    def detached(self) -> None:
        a = self.pick()
        if a is not None:
            self.add(f"{self.name(a)}.detach()", a.theirs.detach, a.ours.detach)

    def without_gradients(self) -> None:
        a, b = self.pick("f"), self.pick("f")
        if a is None or b is None:
            return

        def theirs() -> Any:
            with torch.no_grad():
                return a.theirs * b.theirs

        def ours() -> Any:
            with dl.no_grad():
                return a.ours * b.ours

        self.add(f"no_grad: {self.name(a)} * {self.name(b)}", theirs, ours)

    def chosen(self) -> None:
        c, a, b = self.pick("b"), self.pick("f"), self.pick("f")
        if c is None or a is None or b is None:
            return
        self.add(
            f"where({self.name(c)}, {self.name(a)}, {self.name(b)})",
            lambda: torch.where(c.theirs, a.theirs, b.theirs),
            lambda: F.where(c.ours, a.ours, b.ours),
        )

    def cast(self) -> None:
        a = self.pick("ib")
        if a is not None:
            self.add(f"{self.name(a)}.float", a.theirs.float, lambda: a.ours.to("float32"))

    def looked(self) -> None:
        a = self.pick()
        if a is None:
            return
        how = self.draw.one("numpy", "repr", "item")
        self.told.append(f"{how} of {self.name(a)}")
        if how == "item" and a.theirs.numel() == 1:
            a.ours.item()
        elif how == "repr":
            repr(a.ours)
        self.look(a)

    def dropped(self) -> None:
        if len(self.values) > 2:
            at = self.draw.number(0, len(self.values) - 1)
            self.told.append(f"del v{at}; the later ones move up")
            del self.values[at]

    def backward(self) -> None:
        a = self.pick("f")
        if a is None or not a.theirs.requires_grad or not a.theirs.numel():
            return
        keep = self.draw.flag()
        try:
            a.theirs.sum().backward(retain_graph=keep)
        except RuntimeError as error:  # it may have left a part of the gradients
            raise Refused from error
        told = f"{self.name(a)}.sum().backward(retain_graph={keep})"
        self.both(told, lambda: None, lambda: a.ours.sum().backward(retain_graph=keep))
        if not keep:  # nothing that has a history is used any more
            self.told.append("only values without a history are kept")
            self.values = [p for p in self.values if p.theirs.is_leaf]

    # ---- comparison ----
    def tame(self, pair: Pair) -> None:
        if not small(pair):
            self.values = [p for p in self.values if small(p)]

    def agree(self, pair: Pair) -> None:
        """Shapes, dtypes and whether gradients are recorded."""
        theirs, ours = pair.theirs, pair.ours
        facts = tuple(theirs.shape), str(theirs.dtype)[6:], theirs.requires_grad
        mine = tuple(ours.shape), str(ours.dtype), ours.requires_grad
        if facts != mine:
            raise Mismatch(f"PyTorch has {facts}, dlsys {mine}")

    def look(self, pair: Pair) -> None:
        self.agree(pair)
        self.same(f"v{self.values.index(pair)}", pair.theirs.detach(), pair.ours)

    def same(self, what: str, theirs: Any, ours: Any) -> None:
        wanted, got = theirs.numpy(), ours.numpy()
        scale = float(np.abs(wanted).max()) if wanted.size and wanted.dtype.kind == "f" else 0.0
        if wanted.shape != got.shape or not np.allclose(
            got, wanted, rtol=2e-4, atol=2e-5 * (1 + scale), equal_nan=True
        ):
            raise Mismatch(f"{what}: PyTorch has {wanted.tolist()}, dlsys {got.tolist()}")

    def gradient(self, pair: Pair) -> None:
        theirs, ours = pair.theirs.grad, pair.ours.grad
        if (theirs is None) != (ours is None):
            raise Mismatch(f"a gradient: PyTorch has {theirs}, dlsys {ours}")
        if theirs is not None and float(theirs.abs().max() if theirs.numel() else 0) < 1e6:
            self.same(f"the gradient of leaf {self.leaves.index(pair)}", theirs, ours)


def small(pair: Pair) -> bool:
    """True where no element is large."""
    values = pair.theirs.detach().float().abs()
    return not values.numel() or float(values.max()) < MOST


def near(a: Pair, b: Pair) -> bool:
    """True where elements of both are almost the same."""
    try:
        apart = (a.theirs.detach().float() - b.theirs.detach().float()).abs()
    except RuntimeError:
        return False
    return bool(apart.numel() and float(apart.min()) < 1e-3)

"""Operators and losses against PyTorch: values, gradients and gradients of gradients.

A case is a row of tests/support/table/samples.py with random shapes, attributes and values, on one
device. What PyTorch computes of it in float64 is the oracle, and the bound is |error| <= c · K ·
eps · scale: values have the row's own `ulps` and `scale`; a gradient's c is 16, its K the root of
the number of elements that may have been summed, and its scale the largest element, together with
what the oracle moves by when its inputs move by a rounding error (the condition of the case, which
no algorithm can do without). Elementwise operators are judged element by element. An element that
is not finite must be so in PyTorch too, in float64 or in float32, with the same sign.

Values are ordinary, wide (sizes from 2^-12 to 2^12), tied (small halves), zeros of both signs, or
ordinary with edges among them: zeros, infinities, NaN, denormals and the largest numbers. Where an
oracle's gradient is not finite, ours is not judged. Where we differ on purpose, PURPOSE says so.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray
from dlsys.errors import DlsysError
from support.table.draws import DRAWS, SCALES, Draw
from support.table.rows import Case, Sample, Shape
from support.table.samples import SAMPLES

from .harness import Finding, Source, Trial, Unjudged
from .oracles import ORACLES, PURPOSE, Oracle

ROWS = {sample.name: sample for sample in SAMPLES}
GRADIENT_ULPS = 16
_STEP = 2.0**-24  # by which inputs are moved to see a case's condition
_PROBES = 6
LARGEST = 4096  # elements of an input: overheads, not elements, make the time of a case
EDGES = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1e-38, 3e38, -3e38, 1.0, -1.0, 0.5)


def missing() -> str | None:
    """Why these cases cannot be tried here."""
    return None if importlib.util.find_spec("torch") else "PyTorch is the oracle: install torch"


def trial(devices: Sequence[str], parts: Sequence[str]) -> Trial:
    """A case of any operator whose name has one of the parts, on one of the devices."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    places = [place for name in devices for place in _places(name)]
    names = [n for n in ORACLES if not parts or any(part in n for part in parts)]
    return lambda source: attack(source, source.one(*names), *source.one(*places))


def _places(device: str) -> list[tuple[Any, Any]]:
    if device == "numpy":
        return [(None, np.float64), (None, np.float32)]
    return [({"cpu": ndarray.cpu(0), "gpu": ndarray.gpu(0)}[device], np.float32)]


# ---- a case ----
class Drawn(Draw):
    """The draws of support/table/draws.py, each choice of which hypothesis can make smaller."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def rng(self) -> np.random.Generator:  # type: ignore[override]
        return self._source.rng

    def number(self, low: int, high: int) -> int:
        if high < low:
            raise ValueError("there is nothing to choose from: an extent is 0")
        return self._source.number(low, high)

    def shape(self, least: int, most: int) -> Shape:
        """A shape without elements now and then."""
        shape = super().shape(least, most)
        if shape and self._source.rarely(20):
            at = self.number(0, len(shape) - 1)
            shape = (*shape[:at], 0, *shape[at + 1 :])
        return shape


@dataclass
class Problem:
    """A case with its values, exact in `dtype`."""

    name: str
    sample: Sample
    oracle: Oracle
    case: Case
    arrays: list[np.ndarray]
    pattern: str
    ctx: Any
    dtype: Any

    @property
    def chosen(self) -> list[int]:
        """The inputs whose gradients there are."""
        wanted = self.sample.differentiable
        inputs = range(len(self.arrays)) if wanted is None else wanted
        return [k for k in inputs if self.arrays[k].dtype.kind == "f"]

    def __str__(self) -> str:
        shown = ", ".join(_shown(x) for x in self.arrays)
        where = f"{self.ctx or 'numpy'} {np.dtype(self.dtype)}"
        attrs = "".join(f", {key}={value!r}" for key, value in self.case.attrs.items())
        return f"{self.name}({shown}{attrs}) on {where}"


def _shown(x: np.ndarray) -> str:
    if x.size > 12:
        return f"{x.dtype}{list(x.shape)}"
    return f"{x.tolist()} of shape {x.shape}".replace(" of shape ()", "")


def draw(source: Source, name: str, ctx: Any, dtype: Any) -> Problem:
    """A case with values."""
    sample, oracle = ROWS[name], ORACLES[name]
    d = Drawn(source)
    if oracle.draw is not None:
        case = oracle.draw(d)
    elif name in DRAWS:
        case = DRAWS[name](d)
    else:
        small = [c for c in sample.cases if max(map(np.prod, c.shapes), default=0) <= LARGEST]
        case = source.one(*small)
        if oracle.local and len({c.shapes for c in sample.cases}) > 1:
            case = Case(tuple(d.broadcasting(len(case.shapes))), case.attrs, case.domain)
    pattern = source.one("plain", "edges", "wide", "ties", "zeros")
    if pattern != "plain" and not oracle.patterns:
        pattern = "plain"
    domains = sample.domains(case)
    arrays = [domain(source.rng, shape) for domain, shape in zip(domains, case.shapes)]
    arrays = [_patterned(source, np.asarray(x), pattern, oracle, dtype) for x in arrays]
    return Problem(name, sample, oracle, case, arrays, pattern, ctx, dtype)


def _patterned(
    source: Source, x: np.ndarray, pattern: str, oracle: Oracle, dtype: Any
) -> np.ndarray:
    if x.dtype.kind != "f" or not x.size:
        return x
    rng = source.rng
    if pattern == "wide":
        x = x * 2.0 ** rng.integers(-12, 13, x.shape)
    elif pattern == "ties":
        x = np.rint(2 * x) / 2
    elif pattern == "zeros":
        x = np.where(rng.random(x.shape) < 0.5, 0.0, -0.0)
    elif pattern == "edges":
        x = np.array(x)
        for _ in range(source.number(1, 3)):
            value = source.one(*EDGES)
            if oracle.local or not 1e30 < abs(value) < np.inf:
                x.flat[source.number(0, x.size - 1)] = value
    with np.errstate(over="ignore"):
        return np.array(x.astype(np.float32) if dtype == np.float32 else x).astype(np.float64)


# ---- the two sides ----
def attack(source: Source, name: str, ctx: Any, dtype: Any) -> None:
    """Raises Finding where the two sides differ."""
    try:
        problem = draw(source, name, ctx, dtype)
    except ValueError:  # no class, or no label, can be drawn for these shapes
        raise Unjudged from None
    order = 2 if problem.pattern in ("plain", "wide") and source.rarely(3) else 1
    order = order if problem.oracle.order >= order and problem.chosen else problem.oracle.order
    order = min(order, 2 if problem.chosen else 0)
    seed = source.number(0, 999)
    try:
        wanted = oracle_results(problem, problem.arrays, order, seed)
        refused = None
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
        refused, wanted = error, []
    try:
        results = our_results(problem, order, seed)
    except DlsysError as error:
        if refused is None and not problem.oracle.may_refuse(problem, error):
            raise Finding(f"{name} refuses", f"{problem}: {error}") from None
        raise Unjudged from None
    except Exception as error:
        raise Finding(
            f"{name} raises {type(error).__name__}", f"{problem}: {type(error).__name__}: {error}"
        ) from None
    if refused is not None:
        if not problem.oracle.local:  # PyTorch has limits of its own
            raise Unjudged
        raise Finding(f"{name} accepts", f"{problem}, which PyTorch refuses: {refused}")
    judge(problem, results, wanted, order, seed)
    if problem.oracle.local and ctx is not None and problem.pattern in ("zeros", "edges"):
        check_zeros(problem, results[0], seed)


def check_zeros(problem: Problem, value: np.ndarray, seed: int) -> None:
    """Raises Finding where a zero has another sign on numpy than on the device."""
    on_numpy = our_results(dataclasses.replace(problem, ctx=None), 0, seed)[0]
    other = (value == 0) & (on_numpy == 0) & (np.signbit(value) != np.signbit(on_numpy))
    if value.dtype.kind == "f" and other.any():
        at = tuple(int(n) for n in np.argwhere(other)[0])
        raise Finding(
            f"{problem.name}: sign of zero",
            f"{problem}: at {at} {value[at]}, on numpy {on_numpy[at]}",
        )


def weights_of(shape: Shape, seed: int, k: int = 0, moved: int = 0) -> np.ndarray:
    """What an output is multiplied with before it is summed; `moved` by half an eps of float32."""
    rng = np.random.default_rng((seed, k))
    w = rng.uniform(-1, 1, shape).astype(np.float32).astype(np.float64)
    return _moved(w, np.random.default_rng((seed, k, moved))) if moved else w


def _moved(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return x * (1 + _STEP * rng.choice([-1.0, 1.0], x.shape))


def our_results(problem: Problem, order: int, seed: int) -> list[np.ndarray]:
    """The value; with order 1 its gradients; with order 2 theirs too."""
    fed = [x.astype(problem.dtype) if x.dtype.kind == "f" else x for x in problem.arrays]
    nodes = [ad.Variable(f"x{k}", x.shape, x.dtype) for k, x in enumerate(fed)]
    y = problem.sample.node(*nodes, **problem.case.attrs)
    fetches = [y]
    feeds = dict(zip(nodes, fed))
    inputs = [nodes[k] for k in problem.chosen]
    if order:
        shape = y.spec.shape
        w = ad.Variable("w", shape, problem.dtype)
        feeds[w] = weights_of(shape, seed).astype(problem.dtype)
        firsts = ad.gradients(ad.sum_op(w * y), inputs)
        fetches += firsts
    if order == 2:
        total = None
        for k, gradient in enumerate(firsts):
            v = ad.constant(weights_of(problem.arrays[problem.chosen[k]].shape, seed, k + 1)
                            .astype(problem.dtype))  # fmt: skip
            term = ad.sum_op(v * gradient)
            total = term if total is None else total + term
        fetches += ad.gradients(total, inputs)
    executor = ad.Executor(fetches, problem.ctx)
    used = set(executor.topo_order)
    feeds = {node: array for node, array in feeds.items() if node in used}
    return executor.run(feeds, convert_to_numpy_ret_vals=True)


def oracle_results(
    problem: Problem,
    arrays: Sequence[np.ndarray],
    order: int,
    seed: int,
    dtype: Any = None,
    moved: int = 0,
) -> list[np.ndarray]:
    """The same by PyTorch, in float64 unless told otherwise."""
    import torch

    dtype = dtype or torch.float64
    tensors = [
        torch.tensor(x, dtype=dtype if x.dtype.kind == "f" else _integers(x)) for x in arrays
    ]
    inputs = [tensors[k].requires_grad_() for k in problem.chosen] if order else []
    y = problem.oracle.function(*tensors, **problem.case.attrs)
    results = [y]
    if order:
        w = torch.tensor(weights_of(tuple(y.shape), seed, 0, moved), dtype=dtype)
        firsts = _gradients((w * y).sum(), inputs, order == 2)
        results += firsts
    if order == 2:
        total = sum(
            (torch.tensor(weights_of(tuple(g.shape), seed, k + 1, moved), dtype=dtype) * g).sum()
            for k, g in enumerate(firsts)
        )
        results += _gradients(total, inputs, False)
    return [np.asarray(result.detach().clone()) for result in results]


def _integers(x: np.ndarray) -> Any:
    import torch

    return torch.bool if x.dtype.kind == "b" else torch.int64


def _gradients(total: Any, inputs: list[Any], again: bool) -> list[Any]:
    import torch

    if not total.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(total, inputs, create_graph=again, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found)]


# ---- the judgement ----
def judge(
    problem: Problem, results: list[np.ndarray], wanted: list[np.ndarray], order: int, seed: int
) -> None:
    """Raises Finding for the first result that is out of bounds."""
    narrow: list[np.ndarray] | None = None
    conditions: list[np.ndarray] | None = None
    infinite = not all(np.isfinite(x).all() for x in problem.arrays if x.dtype.kind == "f")
    blind = [np.isnan(x) for x in problem.arrays if x.dtype.kind == "f" and np.isnan(x).any()]
    for k, (result, right) in enumerate(zip(results, wanted)):
        if k >= _judged(problem, order) or (k and blind and not problem.oracle.local):
            break
        if k and infinite and not problem.oracle.derivatives:
            break
        what = _title(problem, k)
        if result.shape != right.shape:
            raise Finding(
                f"{problem.name} {what}: shape", f"{problem}: {result.shape}, not {right.shape}"
            )
        if result.dtype.kind != "f" or right.dtype.kind != "f":
            _same(problem, what, result, right)
            continue
        with np.errstate(all="ignore"):
            rounded = right.astype(result.dtype)
            odd = ~np.isfinite(rounded) | ~np.isfinite(result)
        if odd.any():
            narrow = _in_own_dtype(problem, order, seed) if narrow is None else narrow
            _check_odd(problem, what, k, result, rounded, narrow[k], odd)
        if k and blind:
            break  # the derivative at NaN is whatever a comparison with NaN says
        allowed = _allowed(problem, k, right, np.zeros(right.shape), result.dtype)
        wrong = _beyond(result, right, allowed, odd)
        if wrong.any() and order:
            conditions = conditions or _conditions(problem, wanted, order, seed)
            allowed = _allowed(problem, k, right, conditions[k], result.dtype)
            wrong = _beyond(result, right, allowed, odd)
        if wrong.any():
            _fail(problem, what, result, right, allowed, wrong)


def _beyond(
    result: np.ndarray, right: np.ndarray, allowed: np.ndarray, odd: np.ndarray
) -> np.ndarray:
    with np.errstate(all="ignore"):
        return ~odd & ~(np.abs(result.astype(np.float64) - right) <= allowed)


def _title(problem: Problem, k: int) -> str:
    count = len(problem.chosen)
    if k == 0:
        return "value"
    order, number = divmod(k - 1, count)
    kind = "second gradient" if order else "gradient"
    return f"{kind} {problem.chosen[number]}"


def _judged(problem: Problem, order: int) -> int:
    """How many of the results are compared."""
    first = PURPOSE.get(problem.name, {})
    if problem.pattern in first.get("values", ()):
        return 0
    if problem.pattern in first.get("gradients", ()):
        return 1
    return 1 + order * len(problem.chosen)


def _same(problem: Problem, what: str, result: np.ndarray, right: np.ndarray) -> None:
    if not np.array_equal(result.astype(np.float64), right.astype(np.float64)):
        raise Finding(
            f"{problem.name} {what}", f"{problem}: {_shown(result)}, PyTorch has {_shown(right)}"
        )


def _in_own_dtype(problem: Problem, order: int, seed: int) -> list[np.ndarray]:
    import torch

    dtype = torch.float32 if problem.dtype == np.float32 else torch.float64
    return oracle_results(problem, problem.arrays, order, seed, dtype)


def _check_odd(
    problem: Problem, what: str, k: int, result: np.ndarray, rounded: np.ndarray,
    narrow: np.ndarray, odd: np.ndarray,
) -> None:  # fmt: skip
    """What is not finite here or there; gradients only where the oracle's are finite."""
    if k:
        for x in problem.arrays:
            if x.shape == odd.shape and x.dtype.kind == "f":
                odd = odd & ~np.isnan(x)
        odd = odd & np.isfinite(rounded) & np.isfinite(narrow)
    agree = _like(result, rounded) | _like(result, narrow)
    bad = odd & ~agree
    if bad.any():
        at = tuple(int(n) for n in np.argwhere(bad)[0])
        raise Finding(
            f"{problem.name} {what}: not finite",
            f"{problem}: at {at} {result[at]}, PyTorch has {rounded[at]} ({narrow[at]} in its own "
            f"{narrow.dtype})",
        )


def _like(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Both NaN, both the same infinity, or both finite."""
    finite = np.isfinite(a) & np.isfinite(b)
    return finite | (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & (a == b))


def _conditions(
    problem: Problem, wanted: list[np.ndarray], order: int, seed: int
) -> list[np.ndarray]:
    """By how much, over eps, results move when the inputs move by about half an eps of theirs."""
    if problem.pattern not in ("plain", "wide"):
        return [np.zeros(()) for _ in wanted]
    moved = []
    for number in range(1, _PROBES + 1):
        rng = np.random.default_rng((seed, 77, number))
        arrays = [_moved(x, rng) if x.dtype.kind == "f" else x for x in problem.arrays]
        moved.append(oracle_results(problem, arrays, order, seed, moved=number))
    found = []
    for right, *others in zip(wanted, *moved):
        if right.dtype.kind != "f":
            found.append(np.zeros(()))
            continue
        with np.errstate(all="ignore"):
            by = np.max([np.abs(other - right) for other in others], axis=0) / _STEP
        by = np.where(np.isfinite(by), by, 0)
        found.append(by)
    return found


def _allowed(
    problem: Problem, k: int, right: np.ndarray, condition: np.ndarray, dtype: Any
) -> np.ndarray:
    """c · K · eps · scale, and what the oracle itself may be off by."""
    info, oracle = np.finfo(dtype), problem.oracle
    size = np.abs(np.where(np.isfinite(right), right, 0))
    largest = size.max(initial=1)
    summed = max((x.size for x in problem.arrays), default=1) + right.size
    with np.errstate(all="ignore"):
        if k == 0:
            size, ulps = _scale(problem, size), problem.sample.ulps
            if dtype == np.float64:
                ulps = 2 * ulps + 8 * (1 if oracle.local else np.sqrt(summed))
            size = size + oracle.conditioned * condition
        elif oracle.local and all(x.shape == right.shape for x in problem.arrays):
            ulps, size = GRADIENT_ULPS, condition + size
            if oracle.saturates:
                size = size + 1 + np.abs(problem.arrays[0])
        else:
            ulps = GRADIENT_ULPS * np.sqrt(summed)
            size = condition.max(initial=0) + size.max(initial=0)
            if oracle.saturates:
                size = size + 1 + np.abs(problem.arrays[0]).max(initial=0)
        if k and oracle.terms is not None:
            size = size + oracle.terms(*problem.arrays, **problem.case.attrs) ** _order(problem, k)
        own = 64 * np.finfo(np.float64).eps * largest if not oracle.local else 0
        # What saturates may underflow to 0 where 1 / (1 + exp(-x)) has overflown.
        least = info.smallest_normal if oracle.saturates else 4 * info.smallest_subnormal
        if k and oracle.underflows:
            least *= max(1.0, *(float(np.abs(x).max(initial=0)) for x in problem.arrays))
        floor = least + own
        return np.broadcast_to(ulps * info.eps * size + floor, right.shape)


def _order(problem: Problem, k: int) -> int:
    """Of the derivative that result k is."""
    return 0 if k == 0 else 1 + (k - 1) // max(len(problem.chosen), 1)


def _scale(problem: Problem, size: np.ndarray) -> np.ndarray:
    """What errors of values are measured against: the row says it."""
    scale = SCALES.get(problem.name, problem.sample.scale)
    if scale is None:
        return size
    try:
        given = np.asarray(scale(*problem.arrays, **problem.case.attrs), np.float64)
    except TypeError:  # an attribute that the row itself never has
        return np.full(size.shape, size.max(initial=1))
    return np.where(np.isfinite(given), given, np.inf)


def _fail(
    problem: Problem, what: str, result: np.ndarray, right: np.ndarray, allowed: np.ndarray,
    wrong: np.ndarray,
) -> None:  # fmt: skip
    at = tuple(int(n) for n in np.argwhere(wrong)[0])
    error = abs(float(result[at]) - float(right[at]))
    raise Finding(
        f"{problem.name} {what}",
        f"{problem} ({problem.pattern}): at {at} {result[at]!r}, PyTorch has {right[at]!r}: off by "
        f"{error:.3g}, allowed {allowed[at]:.3g}; {int(wrong.sum())} of {wrong.size} are wrong",
    )


@functools.cache
def without_oracle() -> dict[str, str]:
    """The rows that are not tried, by why; a test holds that every row is here or tried."""
    from .oracles import WITHOUT

    return {name: reason for reason, names in WITHOUT.items() for name in names.split()}

"""Optimizers, schedules and networks that are trained some steps, against PyTorch in float64.

The bound is |error| <= c · K · eps · scale with c = 16 and K the number of steps: a state's scale
is its largest element, and what the oracle moves by when what it is given (gradients, weights,
samples, rates and decays) moves by half an eps of float32. Edges are among the numbers that are
drawn: decays of 0 and next to 1, gradients that are zeros, tiny, huge, or huge once.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray, nn, optim
from dlsys.errors import DlsysError

from .harness import Finding, Source, Trial

try:
    import torch
    import torch.nn.functional as F
except ImportError:  # missing() says so
    torch = F = None  # type: ignore[assignment]

ULPS = 16
PROBES = 4
_STEP = 2.0**-24


def missing() -> str | None:
    """Why these cases cannot be tried here."""
    return None if importlib.util.find_spec("torch") else "PyTorch is the oracle: install torch"


def trial(devices: Sequence[str], parts: Sequence[str]) -> Trial:
    """An optimizer, a schedule or a network on one of the devices."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    contexts = {"numpy": None, "cpu": ndarray.cpu(0), "gpu": ndarray.gpu(0)}
    places = [(contexts[name], np.float32) for name in devices]
    if "numpy" in devices:
        places.append((None, np.float64))
    kinds = {"optimizer": optimizer, "schedule": schedule, "network": network}
    chosen = [kinds[n] for n in kinds if not parts or any(part in n for part in parts)]

    def one(source: Source) -> None:
        attack = source.one(*chosen)
        ctx, dtype = source.one(*places)
        try:
            attack(source, ctx, dtype)
        except DlsysError as error:
            kind = f"{attack.__name__} refuses"
            raise Finding(kind, f"on {ctx or 'numpy'}: {type(error).__name__}: {error}") from None

    return one


# ---- bounds ----
def compare(
    what: str, told: str, result: np.ndarray, right: np.ndarray, moved: Sequence[np.ndarray],
    factor: float, largest: float = 0.0,
) -> None:  # fmt: skip
    """Raises Finding where a result is out of bounds; `moved` is what the oracle gives for inputs
    that are rounded otherwise, `largest` the size of what the result's terms come from.
    """
    eps = np.finfo(result.dtype).eps
    with np.errstate(all="ignore"):
        condition = np.max([np.abs(other - right) for other in moved], axis=0) / _STEP
        size = np.where(np.isfinite(condition), condition, np.inf)
        size = size + np.abs(right).max(initial=largest)
        odd = ~np.isfinite(right.astype(result.dtype))
        agree = np.abs(result.astype(np.float64) - right) <= ULPS * factor * eps * size
        agree |= odd & ~np.isfinite(result)
    if result.shape != right.shape or not agree.all():
        at = tuple(int(n) for n in np.argwhere(~agree)[0]) if result.shape == right.shape else ()
        raise Finding(
            what,
            f"{told}: at {at} {result[at]!r}, PyTorch has {right[at]!r}; "
            f"{int((~agree).sum())} of {agree.size} are wrong",
        )


def nudged(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each element another by half an eps of float32."""
    return x * (1 + _STEP * rng.choice([-1.0, 1.0], x.shape))


def turned_by(rng: np.random.Generator, number: float) -> float:
    """One number nudged."""
    return float(nudged(np.float64(number), rng))


def in_dtype(x: np.ndarray, dtype: Any) -> np.ndarray:
    """The nearest numbers of a dtype, in float64."""
    return x.astype(dtype).astype(np.float64)


# ---- optimizers ----
Turn = Callable[[float], float]  # what a rule's number is rounded to


def rules(source: Source) -> tuple[str, dict[str, Any], Callable[[list[Any], Turn], Any]]:
    """Our class, its options, and PyTorch's over given parameters, with its numbers turned."""
    d = source.one
    lr = d(0.1, 0.01, 1.0, 1e-3, 0.0)
    decay = d(0.0, 0.0, 0.01, 0.5)
    eps = d(1e-8, 1e-3, 1e-6, 1.0)
    name = d("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")
    if name == "SGD":
        momentum = d(0.0, 0.9, 0.5, 0.999)
        nesterov = bool(momentum) and source.flag()
        options: dict[str, Any] = dict(
            momentum=momentum, nesterov=nesterov, weight_decay=decay,
            dampening=0.0 if nesterov or not momentum else d(0.0, 0.1, 0.9),
        )  # fmt: skip
        return (
            name, dict(lr=lr, **options),
            lambda p, turn: torch.optim.SGD(p, turn(lr), **turned(options, turn)),
        )  # fmt: skip
    if name in ("Adam", "AdamW"):
        betas = d(0.9, 0.0, 0.5, 0.999), d(0.999, 0.0, 1e-8, 0.5, 0.9, 0.9999)
        made = getattr(torch.optim, name)
        return (
            name, dict(lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=decay),
            lambda p, turn: made(p, turn(lr), tuple(map(turn, betas)), turn(eps), turn(decay)),
        )  # fmt: skip
    if name == "RMSprop":
        centered = source.rarely(4)
        # Centered, v - m² keeps a share alpha of the digits of v: a small one leaves none.
        alphas = (0.99, 0.5, 0.999) if centered else (0.99, 0.0, 0.5, 1e-8, 0.999)
        options = dict(alpha=d(*alphas), eps=eps, weight_decay=decay, momentum=d(0.0, 0.9, 0.5))
        return (
            name, dict(lr=lr, centered=centered, **options),
            lambda p, turn: torch.optim.RMSprop(
                p, turn(lr), centered=centered, **turned(options, turn)
            ),
        )  # fmt: skip
    initial = d(0.0, 0.1, 1.0)
    return (
        name, dict(lr=lr, eps=eps, initial=initial, weight_decay=decay),
        lambda p, turn: torch.optim.Adagrad(
            p, turn(lr), eps=turn(eps), initial_accumulator_value=turn(initial),
            weight_decay=turn(decay),
        ),
    )  # fmt: skip


def turned(options: dict[str, Any], turn: Turn) -> dict[str, Any]:
    """The options with each float turned."""
    return {k: turn(v) if isinstance(v, float) else v for k, v in options.items()}


def gradients(source: Source, shape: tuple[int, ...], steps: int) -> list[np.ndarray]:
    """Of each step."""
    pattern = source.one("plain", "small", "zeros", "large", "one large", "constant")
    rng, found = source.rng, []
    for k in range(steps):
        g = rng.standard_normal(shape)
        if pattern == "small":
            g *= 1e-6
        elif pattern == "zeros":
            g *= 0
        elif pattern == "large" or (pattern == "one large" and k == 0):
            g *= 1e10
        elif pattern == "constant":
            g = np.ones(shape)
        found.append(g)
    return found


def optimizer(source: Source, ctx: Any, dtype: Any) -> None:
    """Some steps with given gradients."""
    name, options, theirs = rules(source)
    shape = source.one((3,), (), (1,), (2, 3), (37,), (0,))
    steps = source.number(1, 6)
    grads = [in_dtype(g, dtype) for g in gradients(source, shape, steps)]
    start = in_dtype(source.rng.standard_normal(shape), dtype)
    shared: dict[str, Any] = {}
    if source.rarely(4):
        key = source.one("clip_norm", "clip_value")
        shared[key] = source.one(1.0, 0.1, 100.0)
    told = f"{name}({options | shared}), {steps} steps of {grads[0].tolist()} … on {ctx or 'numpy'}"
    told = f"{told[:700]} {np.dtype(dtype)}"
    p, g = ad.Parameter(start.astype(dtype), "p"), ad.Variable("g", shape, dtype)
    ours = getattr(optim, name)(**options, **shared)
    executor = ad.Executor([ours.minimize(ad.sum_op(p * g), [p])], ctx)
    right = _steps(lambda p: theirs(p, float), start, grads, shared)
    moved = []
    for number in range(PROBES):
        rng = np.random.default_rng(number)

        turn = functools.partial(turned_by, rng)
        rule = functools.partial(theirs, turn=turn)
        moved.append(_steps(rule, nudged(start, rng), [nudged(x, rng) for x in grads], shared))
    largest = 0.0
    if dtype == np.float64 and "beta2" in options:
        # 1 - beta^t keeps the fewer digits the nearer it is to 0; float32 has it from float64.
        largest = options["lr"] / (1 - max(options["beta1"], options["beta2"]))
    for k, grad in enumerate(grads):
        executor.run({g: grad.astype(dtype)})
        compare(f"{name} {np.dtype(dtype)}", f"{told}, step {k}", p.asnumpy(), right[k],
                [other[k] for other in moved], k + 2, largest)  # fmt: skip


def _steps(
    theirs: Callable[[list[Any]], Any], start: np.ndarray, grads: list[np.ndarray], shared: Any
) -> list[np.ndarray]:
    p = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    rule, found = theirs([p]), []
    for grad in grads:
        p.grad = torch.tensor(grad, dtype=torch.float64)
        if "clip_norm" in shared:
            torch.nn.utils.clip_grad_norm_([p], shared["clip_norm"])
        if "clip_value" in shared:
            torch.nn.utils.clip_grad_value_([p], shared["clip_value"])
        rule.step()
        found.append(p.detach().numpy().copy())
    return found


# ---- schedules ----
def schedule(source: Source, ctx: Any, dtype: Any) -> None:
    """The rates of a run, on the host and in a graph."""
    del dtype
    lr, total = source.one(0.1, 1.0, 1e-4), source.number(1, 40)
    gamma = source.one(0.1, 0.5, 0.999, 1.0)
    s = torch.optim.lr_scheduler
    end = lr * source.one(0.0, 0.01)
    name = source.one("Step", "MultiStep", "Exponential", "Polynomial", "Cosine", "WarmRestarts",
                      "OneCycle", "Warmup")  # fmt: skip
    size, power = source.number(1, 9), source.one(1.0, 2.0, 0.5)
    milestones = sorted({source.number(1, 40) for _ in range(source.number(0, 4))})
    shape = source.one("cosine", "linear")
    anneal = {"cosine": "cos", "linear": "linear"}[shape]
    factor = source.number(1, 3)
    if name == "OneCycle":
        total = max(total, 8)
    pairs: dict[str, tuple[Any, Any]] = {
        "Step": (lambda: optim.Step(lr, size, gamma), lambda o: s.StepLR(o, size, gamma)),
        "MultiStep": (lambda: optim.MultiStep(lr, milestones, gamma),
                      lambda o: s.MultiStepLR(o, milestones, gamma)),
        "Exponential": (lambda: optim.Exponential(lr, gamma), lambda o: s.ExponentialLR(o, gamma)),
        "Polynomial": (lambda: optim.Polynomial(lr, total, power),
                       lambda o: s.PolynomialLR(o, total, power)),
        "Cosine": (lambda: optim.Cosine(lr, total, end),
                   lambda o: s.CosineAnnealingLR(o, total, end)),
        "WarmRestarts": (lambda: optim.WarmRestarts(lr, size, factor, end),
                         lambda o: s.CosineAnnealingWarmRestarts(o, size, factor, end)),
        "OneCycle": (lambda: optim.OneCycle(lr, total, shape=shape),
                     lambda o: s.OneCycleLR(o, lr, total, anneal_strategy=anneal,
                                            cycle_momentum=False)),
        "Warmup": (lambda: optim.Warmup(optim.Constant(lr), size, 0.25),
                   lambda o: s.LinearLR(o, 0.25, 1.0, size)),
    }  # fmt: skip
    ours, theirs = pairs[name]
    made = ours()
    count = total if name in ("Cosine", "OneCycle", "Polynomial") else 41
    right = _rates(theirs, lr, count)
    told = f"{name} lr={lr} total={total} size={size} gamma={gamma} end={end} {milestones} {shape}"
    host = np.array([made(t) for t in range(count)])
    if not np.all(np.abs(host - right) <= 1e3 * np.finfo(np.float64).eps * lr):
        at = int(np.argmax(np.abs(host - right)))
        raise Finding(f"{name} on the host", f"{told}: at {at} {host[at]!r}, not {right[at]!r}")
    step = ad.Variable("t", (), np.int64)
    executor = ad.Executor([made.node(step)], ctx)
    for t in range(0, count, max(1, count // 8)):
        (rate,) = executor.run({step: np.array(t, np.int64)}, convert_to_numpy_ret_vals=True)
        if not abs(float(rate) - right[t]) <= 128 * np.finfo(np.float32).eps * lr:
            raise Finding(
                f"{name} in a graph", f"{told} on {ctx}: at {t} {rate!r}, not {right[t]!r}"
            )


def _rates(theirs: Callable[[Any], Any], lr: float, count: int) -> np.ndarray:
    rule = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr)
    schedule_, found = theirs(rule), []
    for _ in range(count):
        found.append(rule.param_groups[0]["lr"])
        rule.step()
        schedule_.step()
    return np.array(found)


# ---- networks ----
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "ReLU": lambda x: x.relu(), "Tanh": lambda x: x.tanh(), "GELU": lambda x: F.gelu(x),
    "SiLU": lambda x: F.silu(x), "Sigmoid": lambda x: x.sigmoid(),
    "LeakyReLU": lambda x: F.leaky_relu(x, 0.01), "Softplus": lambda x: F.softplus(x),
}  # fmt: skip


def layers_of(source: Source, rng: np.random.Generator) -> tuple[list[Any], list[Any], tuple]:
    """Our layers, PyTorch's as functions of weights and x, and the shape of a sample."""
    ours: list[Any] = []
    theirs: list[tuple[int, Callable[..., Any]]] = []

    def add(layer: Any, count: int, function: Callable[..., Any]) -> None:
        ours.append(layer)
        theirs.append((count, function))

    if source.flag():
        channels, side = source.number(1, 3), source.number(4, 9)
        sample: tuple[int, ...] = (channels, side, side)
        for _ in range(source.number(1, 2)):
            filters, window = source.number(1, 5), source.one(3, 1, 2)
            normalized = source.flag()  # which takes every bias away: its gradient is rounding
            add(nn.Conv2d(channels, filters, window, padding=1, bias=not normalized, rng=rng),
                2 - normalized,
                lambda x, w, b=None: F.conv2d(x, w, b, padding=1))  # fmt: skip
            channels, side = filters, side + 3 - window
            if normalized:
                add(nn.BatchNorm2d(channels), 2,
                    lambda x, w, b: F.batch_norm(x, None, None, w, b, True))  # fmt: skip
            kind = source.one(*ACTIVATIONS)
            add(getattr(nn, kind)(), 0, ACTIVATIONS[kind])
            if source.flag() and side >= 2:
                pool = source.one("max", "avg")
                layer = {"max": nn.MaxPool2d, "avg": nn.AvgPool2d}[pool](2)
                function = {"max": F.max_pool2d, "avg": F.avg_pool2d}[pool]
                add(layer, 0, lambda x, function=function: function(x, 2))
                side //= 2
        add(nn.Flatten(), 0, lambda x: x.flatten(1))
        width = channels * side * side
    else:
        width = source.number(1, 20)
        sample = (width,)
    for _ in range(source.number(0, 2)):
        after = source.number(1, 16)
        add(nn.Linear(width, after, rng=rng), 2, F.linear)
        width = after
        if source.flag():
            add(nn.LayerNorm(width), 2, lambda x, w, b: F.layer_norm(x, w.shape, w, b))
        kind = source.one(*ACTIVATIONS)
        add(getattr(nn, kind)(), 0, ACTIVATIONS[kind])
    add(nn.Linear(width, 4, rng=rng), 2, F.linear)
    return ours, theirs, sample


def network(source: Source, ctx: Any, dtype: Any) -> None:
    """A random network, trained some steps on a random batch."""
    del dtype  # layers are float32
    rng = np.random.default_rng(source.number(0, 999))
    ours, theirs, sample = layers_of(source, rng)
    rule = source.one("SGD", "Adam")
    steps, batch = source.number(1, 4), source.number(2, 9)
    x = in_dtype(rng.standard_normal((batch, *sample)), np.float32)
    labels = rng.integers(0, 4, batch)
    model = nn.Sequential(*ours)
    start = [p.asnumpy().astype(np.float64) for p in model.parameters()]
    told = f"{[type(layer).__name__ for layer in ours]} {rule} of {x.shape} on {ctx or 'numpy'}"
    right = _trained(theirs, start, x, labels, rule, steps)
    moved = []
    for number in range(PROBES):
        own = np.random.default_rng(number)
        moved.append(
            _trained(theirs, [nudged(w, own) for w in start], nudged(x, own), labels, rule, steps)
        )
    fed, y = ad.Variable("x", x.shape, np.float32), ad.Variable("y", labels.shape, np.int64)
    loss = ad.softmax_cross_entropy(model(fed), y)
    update = optim.SGD(0.1, 0.9) if rule == "SGD" else optim.Adam(0.01, eps=1e-3)
    executor = ad.Executor([loss, update.minimize(loss, model.parameters())], ctx)
    factor = (1 + steps) * np.sqrt(x[0].size + 16)
    largest = max(float(np.abs(w).max()) for w in right[1])
    for k in range(steps):
        value, _ = executor.run({fed: x.astype(np.float32), y: labels}, True)
        # It is the logarithm of 1 and more, whose rounding is of the size of 1.
        compare("a network's loss", f"{told}, step {k}", np.asarray(value), right[0][k],
                [other[0][k] for other in moved], factor, 1.0)  # fmt: skip
    for k, p in enumerate(model.parameters()):
        compare("a network's weights", f"{told}, {steps} steps: {p.name} {p.shape}", p.asnumpy(),
                right[1][k], [other[1][k] for other in moved], factor, largest)  # fmt: skip


def _trained(
    theirs: list[Any], start: list[np.ndarray], x: np.ndarray, labels: np.ndarray, rule: str,
    steps: int,
) -> tuple[list[np.ndarray], list[np.ndarray]]:  # fmt: skip
    """Losses and weights."""
    weights = [torch.tensor(w, dtype=torch.float64, requires_grad=True) for w in start]
    made = (
        torch.optim.SGD(weights, 0.1, 0.9) if rule == "SGD"
        else torch.optim.Adam(weights, 0.01, eps=1e-3)
    )  # fmt: skip
    losses = []
    for _ in range(steps):
        left, y = list(weights), torch.tensor(x, dtype=torch.float64)
        for count, function in theirs:
            y = function(y, *left[:count])
            left = left[count:]
        loss = F.cross_entropy(y, torch.tensor(labels))
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(loss.detach().numpy())
    return losses, [w.detach().numpy() for w in weights]

"""The optimizers: which rule of ops/optim/rules.py each is, with which constants.

All take the keywords of Optimizer too: `weight_decay`, `decoupled`, `clip_value`, `clip_norm`,
`accumulate`, `ema`. Options mean what they mean in PyTorch.
"""

from __future__ import annotations

from typing import Any

from ..errors import GraphError
from ..ops.leaf import Parameter
from ..ops.optim.apply import UPDATES, RuleOp
from .optimizer import NOT_NEGATIVE, UNIT, Optimizer, Options, Rate, renamed


class SGD(Optimizer):
    """Stochastic gradient descent: `v = momentum · v + (1 - dampening) · g`, `w -= lr · v` (without
    momentum, `w -= lr · g`; with Nesterov's, `w -= lr · (g + momentum · v)`).

    lr: the rate, a number or a Schedule. nesterov, dampening: need a momentum. GraphError for
    values out of range. shared: the keywords of `Optimizer`.

    >>> x = dl.tensor([1.0, 2.0])
    >>> w = ad.Parameter(np.array([1.0, 2.0], np.float32))
    >>> optimizer = optim.SGD(0.1, momentum=0.9, params=[w])
    >>> (w * x).sum().backward()
    >>> optimizer.step()
    >>> w.asnumpy()
    array([0.9, 1.8], dtype=float32)
    """

    ranges = {"momentum": UNIT, "dampening": UNIT}

    def __init__(
        self,
        lr: Rate,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        dampening: float = 0.0,
        **shared: Any,
    ) -> None:
        options = dict(momentum=momentum, nesterov=nesterov, dampening=dampening)
        super().__init__(lr, options, **shared)

    def rule(self, options: Options) -> tuple[RuleOp, Options]:
        momentum, nesterov, dampening = map(options.get, ("momentum", "nesterov", "dampening"))
        if nesterov and (not momentum or dampening):
            raise GraphError(
                f"SGD: nesterov wants a momentum and no dampening, got momentum={momentum}, "
                f"dampening={dampening}"
            )
        if not momentum:
            return UPDATES["sgd_update"], {}
        attrs = {"momentum": momentum, "nesterov": nesterov, "dampening": dampening}
        return UPDATES["sgd_momentum_update"], {key: value for key, value in attrs.items() if value}

    @property
    def velocity(self) -> dict[Parameter, Parameter]:
        """The velocity of each Parameter that has one."""
        return {p: slots["velocity"] for p, slots in self.slots.items() if "velocity" in slots}


class Adam(Optimizer):
    """Adam of Kingma and Ba (2015), `weight_decay` in the gradient.

    m = beta1 · m + (1 - beta1) · g, v = beta2 · v + (1 - beta2) · g², both divided by 1 - beta^t,
    and w -= lr · m / (sqrt(v) + eps). lr: the rate, a number or a Schedule. shared: the keywords of
    `Optimizer`.

    >>> x = dl.tensor([1.0, 2.0])
    >>> w = ad.Parameter(np.array([1.0, 2.0], np.float32))
    >>> optimizer = optim.Adam(0.1, params=[w])
    >>> (w * x).sum().backward()
    >>> optimizer.step()
    >>> w.asnumpy()
    array([0.9, 1.9], dtype=float32)
    """

    ranges = {"beta1": UNIT, "beta2": UNIT, "eps": NOT_NEGATIVE}

    def __init__(
        self,
        lr: Rate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        **shared: Any,
    ) -> None:
        options = dict(beta1=beta1, beta2=beta2, eps=eps)
        super().__init__(lr, options, **shared)

    def rule(self, options: Options) -> tuple[RuleOp, Options]:
        return UPDATES["adam_update"], {key: options[key] for key in ("beta1", "beta2", "eps")}


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    w shrinks by lr · weight_decay of itself; lr, beta1, beta2 and eps: as of `Adam`. shared: the
    keywords of `Optimizer`.

    >>> x = dl.tensor([1.0, 2.0])
    >>> w = ad.Parameter(np.array([1.0, 2.0], np.float32))
    >>> optimizer = optim.AdamW(0.1, params=[w])
    >>> (w * x).sum().backward()
    >>> optimizer.step()
    >>> w.asnumpy()
    array([0.899, 1.898], dtype=float32)
    """

    def __init__(
        self,
        lr: Rate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        *,
        weight_decay: float = 0.01,
        **shared: Any,
    ) -> None:
        super().__init__(lr, beta1, beta2, eps, weight_decay=weight_decay, decoupled=True, **shared)


class RMSprop(Optimizer):
    """RMSprop of Tieleman and Hinton (2012), with centering and momentum where asked for.

    v = alpha · v + (1 - alpha) · g² and w -= lr · g / (sqrt(v) + eps), through a velocity with
    momentum; centered: v less the square of the mean gradient. lr: the rate, a number or a
    Schedule. shared: the keywords of `Optimizer`.

    >>> x = dl.tensor([1.0, 2.0])
    >>> w = ad.Parameter(np.array([1.0, 2.0], np.float32))
    >>> optimizer = optim.RMSprop(0.01, params=[w])
    >>> (w * x).sum().backward()
    >>> optimizer.step()
    >>> w.asnumpy()
    array([0.90000004, 1.9       ], dtype=float32)
    """

    ranges = {"alpha": UNIT, "eps": NOT_NEGATIVE, "momentum": UNIT}

    def __init__(
        self,
        lr: Rate = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        momentum: float = 0.0,
        *,
        centered: bool = False,
        **shared: Any,
    ) -> None:
        centered = renamed(shared).pop("centered", centered)
        options = dict(alpha=alpha, eps=eps, momentum=momentum, centered=centered)
        super().__init__(lr, options, **shared)

    def rule(self, options: Options) -> tuple[RuleOp, Options]:
        attrs = {"alpha": options["alpha"], "eps": options["eps"]}
        if options["momentum"]:
            attrs["momentum"] = options["momentum"]
        words = (word for word in ("centered", "momentum") if options[word])
        return UPDATES["_".join(["rmsprop", *words, "update"])], attrs


class Adagrad(Optimizer):
    """Adagrad of Duchi, Hazan and Singer (2011); `initial` is where the totals begin.

    v += g² and w -= lr · g / (sqrt(v) + eps). lr: the rate, a number or a Schedule. shared: the
    keywords of `Optimizer`.

    >>> x = dl.tensor([1.0, 2.0])
    >>> w = ad.Parameter(np.array([1.0, 2.0], np.float32))
    >>> optimizer = optim.Adagrad(0.1, params=[w])
    >>> (w * x).sum().backward()
    >>> optimizer.step()
    >>> w.asnumpy()
    array([0.9, 1.9], dtype=float32)
    """

    ranges = {"eps": NOT_NEGATIVE, "initial": NOT_NEGATIVE}

    def __init__(
        self,
        lr: Rate = 1e-2,
        eps: float = 1e-10,
        *,
        initial: float = 0.0,
        **shared: Any,
    ) -> None:
        options = dict(eps=eps, initial=initial)
        super().__init__(lr, options, **shared)

    def rule(self, options: Options) -> tuple[RuleOp, Options]:
        return UPDATES["adagrad_update"], {"eps": options["eps"]}


class Lion(Optimizer):
    """Lion of Chen et al. (2023), whose weight decay is decoupled.

    w -= lr · sign(beta1 · m + (1 - beta1) · g), then m = beta2 · m + (1 - beta2) · g. lr: the rate,
    a number or a Schedule. shared: the keywords of `Optimizer`.

    >>> x = dl.tensor([1.0, 2.0])
    >>> w = ad.Parameter(np.array([1.0, 2.0], np.float32))
    >>> optimizer = optim.Lion(0.1, params=[w])
    >>> (w * x).sum().backward()
    >>> optimizer.step()
    >>> w.asnumpy()
    array([0.9, 1.9], dtype=float32)
    """

    ranges = {"beta1": UNIT, "beta2": UNIT}

    def __init__(
        self,
        lr: Rate = 1e-4,
        beta1: float = 0.9,
        beta2: float = 0.99,
        *,
        decoupled: bool = True,
        **shared: Any,
    ) -> None:
        options = dict(beta1=beta1, beta2=beta2)
        super().__init__(lr, options, decoupled=decoupled, **shared)

    def rule(self, options: Options) -> tuple[RuleOp, Options]:
        return UPDATES["lion_update"], {"beta1": options["beta1"], "beta2": options["beta2"]}

"""Setup: how a network is trained on MNIST, chosen by options that a checkpoint keeps."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..errors import DataError, DivergedError, quoted
from .usage import UsageError

if TYPE_CHECKING:  # what a bare run of the assignment's networks does without is imported late
    from ..data import Augmentation
    from ..nn import Module
    from ..optim import Optimizer, Schedule

MODELS = ("logreg", "mlp", "cnn", "resnet")
DATASETS = ("mnist", "fashion")
OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad", "lion")
PRECISIONS = ("fp32", "tf32", "3xtf32", "bf16", "fp8")
SCHEDULES = (
    "constant", "step", "exponential", "linear", "cosine", "warm-restarts", "one-cycle", "plateau",
)  # fmt: skip
# Each with the usual and the largest number that it takes: pixels, degrees, a share, pixels, a
# probability, alpha.
AUGMENTATIONS = {
    "shift": (2.0, 27.0), "rotate": (10.0, 180.0), "scale": (0.1, 0.9), "cutout": (8.0, 28.0),
    "flip": (0.5, 1.0), "mixup": (0.2, 10.0),
}  # fmt: skip
_IN_WORDS = {
    "shift": "shifted by up to {:g} pixels", "rotate": "turned by up to {:g}°",
    "scale": "scaled by up to {:.0%}", "cutout": "a square of {:g} pixels cut out",
    "flip": "flipped with probability {:g}", "mixup": "mixed in pairs (alpha {:g})",
}  # fmt: skip
_NETWORKS = {
    "logreg": "logistic regression (logreg)",
    "mlp": "multilayer perceptron (mlp)",
    "cnn": "LeNet-5 (cnn)",
    "resnet": "a small residual network (resnet)",
}
INTEGRAL = ("shift", "cutout")  # those whose strength is an integer
HIDDEN = (256, 100)
LARGEST_BATCH = 1 << 17  # images, which take 400 MB as floats; no set here has as many
_WEIGHTS_OF_ASSIGNMENT: dict[str, tuple[int, ...]] = {"logreg": (), "mlp": HIDDEN}

_RATES = {
    "sgd": 0.5, "momentum": 0.1, "nesterov": 0.1, "adam": 3e-3, "adamw": 3e-3, "rmsprop": 1e-3,
    "adagrad": 0.02, "lion": 3e-4,
}  # fmt: skip
_OWN_RATES = {("cnn", "momentum"): 0.05, ("cnn", "nesterov"): 0.05}
_MOMENTA = {"momentum": 0.9, "nesterov": 0.9, "rmsprop": 0.0}  # of those that have one
_SHORTEST_CYCLE = 4  # steps
_HUGE = 10  # a loss so many times that of guessing is one of a run that diverged
_PIXELS, _CLASSES = 784, 10
_ENDLESS = ("constant", "plateau")  # schedules that know no last step
_SHORT = {"model": "-m", "epochs": "-e"}
_ONE_OF_THESE = "--optimizer momentum, nesterov or rmsprop"


@dataclass(frozen=True)
class Setup:
    """Everything that decides what a run computes; `choose` makes it.

    lr: of the mean loss, the highest of the schedule. warmup: epochs of linear warm-up. augment:
    pairs of a name and its strength. early_stop: epochs of patience, None for all. assignment:
    batches in the order of the set and initial weights of N(0, 0.1²), else shuffled and He's.
    """

    model: str
    dataset: str
    epochs: int
    seed: int
    batch_size: int
    optimizer: str
    lr: float
    momentum: float
    weight_decay: float
    schedule: str
    warmup: float
    hidden: tuple[int, ...]
    dropout: float
    augment: tuple[tuple[str, float], ...]
    early_stop: int | None
    assignment: bool
    precision: str = "fp32"

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, what: str, values: Mapping[str, Any]) -> Setup:
        """The setup that `as_dict` gave. DataError, naming `what`, for anything else."""
        values = {"precision": "fp32"} | dict(values)  # older checkpoints do not say
        if values.keys() != {field.name for field in fields(cls)}:
            raise DataError(
                f"{what} does not say which network it is of; expected a checkpoint that "
                "`dlsys mnist` wrote with --checkpoint"
            )
        _check_schema(what, values)
        pairs = tuple((name, number) for name, number in values["augment"])
        found = cls(**{**values, "hidden": tuple(values["hidden"]), "augment": pairs})
        if found.assignment and found.model not in _WEIGHTS_OF_ASSIGNMENT:
            raise DataError(f"{what} is damaged or forged: {found.model} is none of the assignment")
        if found.assignment and found.hidden != _WEIGHTS_OF_ASSIGNMENT[found.model]:
            raise DataError(f"{what} is damaged or forged: the assignment has other hidden layers")
        return found

    def check_weights(self, what: str, arrays: Iterable[Any]) -> None:
        """Raises DataError unless the matrices among a model's arrays are as large as the
        network's, which is not built before that: a few bytes of a file may ask for any size.
        """
        if self.model != "mlp":
            return
        wanted = _weights(self.hidden)
        found = sum(array.size for array in arrays if array.ndim == 2)
        if found != wanted:
            raise DataError(
                f"{what} is damaged or forged: it has {found} weights, and the layers that it "
                f"names have {quoted(wanted)}"
            )

    def lasting(self, epochs: int) -> Setup:
        """This setup for another count of epochs."""
        return replace(self, epochs=epochs)

    def check_same(self, what: str, given: Mapping[str, Any]) -> None:
        """Raises UsageError where an option that was given says something else than this setup."""
        for field in fields(self):
            value, own = given.get(field.name), getattr(self, field.name)
            if value is None or value == own:
                continue
            if field.name == "epochs":
                if self.schedule in _ENDLESS:
                    continue
                raise UsageError(
                    f"{what} is a run with -e {own}, not {value}; {self.way_on(what, value)}"
                )
            option = _SHORT.get(field.name, f"--{field.name.replace('_', '-')}")
            raise UsageError(
                f"{what} is a run with {option} {as_option(own)}, not {as_option(value)}; "
                "--resume goes on with the options that it has: leave this one out, or begin "
                "another run"
            )

    def way_on(self, what: str, epochs: int | None = None) -> str:
        """Tells what to do for more epochs than this run has, whose checkpoint is `what`."""
        if self.schedule in _ENDLESS:
            return f"a larger -e than {self.epochs} goes on with it"
        return (
            f"its rate follows {self.schedule} over {counted(self.epochs)} and is down at the end, "
            "so that it cannot go on for longer: begin another run with its weights, --init-from "
            f"{what} -e {epochs or self.epochs} --checkpoint DIR"
        )

    def lasting_options(self) -> dict[str, Any]:
        """The options that a run which begins with the weights of this one has too: its network,
        and how its batches change the weights, but for rates and what is about one run.
        """
        names = ["dataset", "batch_size"]
        if not self.assignment:
            names += ["optimizer", "schedule", "dropout", *(["hidden"] if self.hidden else [])]
        return {name: getattr(self, name) for name in names}

    def check_memory(self) -> None:
        """Raises UsageError where this machine has not even the memory that the weights, their
        gradients and one batch take.
        """
        sizes = (_PIXELS, *self.hidden, _CLASSES)
        needed = 4 * (2 * _weights(self.hidden) + self.batch_size * sum(sizes))
        if not hasattr(os, "sysconf"):  # as on Windows, which says it in another way
            return
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > there:
            what = "--batch-size" if self.batch_size > max(sizes) else "--hidden"
            raise UsageError(
                f"a step takes at least {needed / 2**30:,.0f} GiB and this machine has "
                f"{there / 2**30:,.0f}: use a smaller {what}"
            )

    def check_loss(self, loss: float) -> None:
        """Raises DivergedError for a loss at the end of a run that is NaN, infinite or huge."""
        guessing = math.log(_CLASSES)
        if not loss <= _HUGE * guessing:
            raise DivergedError(
                f"the run diverged: the validation loss is {loss:.4g} at the end, where guessing "
                f"has {guessing:.2f}; use a smaller --lr than {self.lr:g}"
            )

    def in_words(self) -> dict[str, str]:
        """Describes the setup as people write it; without what does not apply."""
        momentum = f" {self.momentum:g}" if self.momentum else ""
        warmup = f" after {self.warmup:g} epochs of warm-up" if self.warmup else ""
        changes = ", ".join(_IN_WORDS[name].format(number) for name, number in self.augment)
        hidden = ", ".join(f"{size:,}" for size in self.hidden)
        words = {
            "network": _NETWORKS[self.model],
            "hidden layers": hidden and f"{hidden} units",
            "data set": {"mnist": "MNIST", "fashion": "Fashion-MNIST"}[self.dataset],
            "epochs": f"{self.epochs:,}",
            "batch size": f"{self.batch_size:,}",
            "optimizer": self.optimizer + momentum,
            "learning rate": f"{self.lr:g}, {self.schedule}{warmup}",
            "weight decay": f"{self.weight_decay:g}" if self.weight_decay else "",
            "dropout": f"{self.dropout:g}" if self.dropout else "",
            "augmentation": changes,
            "early stopping": self.early_stop and f"after {counted(self.early_stop)} without gain",
            "order of batches": "as in the set" if self.assignment else "shuffled",
            "seed": str(self.seed),
            "precision": self.precision if self.precision != "fp32" else "",
        }
        return {name: text for name, text in words.items() if text}

    # ---- what it builds ----
    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the outputs."""
        from ..data.formats.mnist import FASHION_MNIST, MNIST

        return (MNIST if self.dataset == "mnist" else FASHION_MNIST).classes

    def build_model(self) -> Module:
        """The network with its first weights."""
        from .. import nn

        if self.model == "logreg":
            model: Module = nn.LogisticRegression(784, 10)
        elif self.model == "mlp":
            model = nn.MLP((784, *self.hidden, 10), dropout=self.dropout, seed=self.seed)
        else:
            model = {"cnn": nn.LeNet5, "resnet": nn.ResNetMNIST}[self.model](seed=self.seed)
            if self.dropout:
                _drop_before_the_last(model, self.dropout, self.seed)
        if self.assignment:
            _set_assignment_weights(model, self.model, self.seed)
        return model

    def build_schedule(self, steps: int) -> Schedule:
        """The rate over a run of so many steps. UsageError for too few of them."""
        from .. import optim

        warm = round(self.warmup * steps / self.epochs)
        rest, lr = max(steps - warm, 1), self.lr
        if self.schedule == "one-cycle" and rest < _SHORTEST_CYCLE:
            raise UsageError(
                f"{rest} steps are too few for one cycle of the rate: use --schedule constant, a "
                "smaller --batch-size or a larger -e"
            )
        make: dict[str, Callable[[], Schedule]] = {
            "constant": lambda: optim.Constant(lr),
            "step": lambda: optim.Step(lr, -(-rest // 3)),
            "exponential": lambda: optim.Exponential(lr, 0.01 ** (1 / rest)),
            "linear": lambda: optim.Polynomial(lr, rest),
            "cosine": lambda: optim.Cosine(lr, rest),
            "warm-restarts": lambda: optim.WarmRestarts(lr, -(-rest // 7), factor=2),
            "one-cycle": lambda: optim.OneCycle(lr, rest),
            "plateau": lambda: optim.ReduceOnPlateau(lr, patience=1),
        }
        schedule = make[self.schedule]()
        return optim.Warmup(schedule, warm) if warm else schedule

    def build_optimizer(self, schedule: Schedule) -> Optimizer:
        """The optimizer of the weights."""
        from .. import optim

        shared: dict[str, Any] = {"weight_decay": self.weight_decay}
        if self.optimizer in ("sgd", "momentum", "nesterov"):
            nesterov = self.optimizer == "nesterov"
            return optim.SGD(schedule, self.momentum, nesterov=nesterov, **shared)
        if self.optimizer == "rmsprop":
            return optim.RMSprop(schedule, momentum=self.momentum, **shared)
        kinds = {
            "adam": optim.Adam, "adamw": optim.AdamW, "adagrad": optim.Adagrad, "lion": optim.Lion,
        }  # fmt: skip
        return kinds[self.optimizer](schedule, **shared)

    def build_augmentation(self) -> list[Augmentation]:
        """The augmentations of each batch."""
        from .. import data

        make: dict[str, Callable[[float], Any]] = {
            "shift": lambda x: data.Shift(round(x)),
            "rotate": data.Rotate,
            "scale": lambda x: data.Scale(1 - x, 1 + x),
            "cutout": lambda x: data.Cutout(round(x)),
            "flip": lambda x: data.Flip(probability=x),
            "mixup": lambda x: data.Mixup(10, x),
        }
        return [make[name](number) for name, number in self.augment]


def choose(model: str, given: Mapping[str, Any]) -> Setup:
    """The setup for a model; `given` has the options that were given, by their names in Setup.

    logreg and mlp are trained as the assignment does unless an option of training is given; the
    rest, and they with one, with momentum, one cycle of the rate and shuffled batches of 100.
    UsageError for options that do not go together.
    """
    given = {name: value for name, value in given.items() if value is not None}
    _check(model, given)
    assignment = model in ("logreg", "mlp") and not given.keys() & TRAINING
    optimizer = given.get("optimizer", "sgd" if assignment else "momentum")
    batch_size = given.get("batch_size", 1000 if assignment else 100)
    usual = _OWN_RATES.get((model, optimizer), _RATES[optimizer])
    setup = Setup(
        model=model,
        dataset=given.get("dataset", "mnist"),
        epochs=given.get("epochs", 10),
        seed=given.get("seed", 123),
        batch_size=batch_size,
        optimizer=optimizer,
        lr=given.get("lr", batch_size / 1000 if assignment else usual),
        momentum=given.get("momentum", _MOMENTA.get(optimizer, 0.0)),
        weight_decay=given.get("weight_decay", 0.01 if optimizer == "adamw" else 0.0),
        schedule=given.get("schedule", "constant" if assignment else "one-cycle"),
        warmup=given.get("warmup", 0.0),
        hidden=given.get("hidden", HIDDEN) if model == "mlp" else (),
        dropout=given.get("dropout", 0.0),
        augment=given.get("augment", ()),
        early_stop=given.get("early_stop"),
        assignment=assignment,
        precision=given.get("precision", "fp32"),
    )
    setup.check_memory()
    return setup


# The options of training: one of them is enough, and logreg and mlp are not the assignment's.
TRAINING = frozenset(
    ("optimizer", "schedule", "momentum", "weight_decay", "warmup", "hidden", "dropout", "augment")
)


def _check(model: str, given: Mapping[str, Any]) -> None:
    """Raises UsageError for options that do not go together, with what to use instead."""
    optimizer, schedule = given.get("optimizer", "momentum"), given.get("schedule", "one-cycle")
    if given.get("batch_size", 1) > LARGEST_BATCH:
        raise UsageError(f"--batch-size is at most {LARGEST_BATCH:,}, more than any set here has")
    if "momentum" in given and optimizer == "sgd":
        raise UsageError(f"--optimizer sgd has no momentum: use {_ONE_OF_THESE} with --momentum")
    if "momentum" in given and optimizer not in _MOMENTA:
        raise UsageError(
            f"--momentum does not apply to --optimizer {optimizer}: leave it out, or use "
            f"{_ONE_OF_THESE}"
        )
    if given.get("momentum") == 0 and optimizer == "nesterov":
        raise UsageError("--optimizer nesterov needs a momentum above 0; without: --optimizer sgd")
    if "hidden" in given and model != "mlp":
        raise UsageError(f"--hidden has the sizes of -m mlp; {model} has its own: leave it out")
    if given.get("dropout") and model == "logreg":
        raise UsageError("--dropout needs a hidden layer: use -m mlp, cnn or resnet")
    if given.get("warmup") and schedule == "one-cycle":
        raise UsageError(
            "one-cycle warms up by itself: leave --warmup out, or use --schedule cosine with it"
        )
    if given.get("warmup", 0) >= given.get("epochs", 10):
        raise UsageError("--warmup takes all of the epochs: use a smaller one, or a larger -e")
    flips = any(name == "flip" for name, _ in given.get("augment", ()))
    if flips and given.get("dataset", "mnist") == "mnist":
        raise UsageError("a digit flipped is no digit: use flip with --dataset fashion only")


def _check_schema(what: str, values: Mapping[str, Any]) -> None:
    """Raises DataError where a value of a setup from a file is none that `choose` could give."""
    from ..train.files import schema as is_

    strengths = [
        is_.row(is_.one_of(name), is_.number(0, most)) for name, (_, most) in AUGMENTATIONS.items()
    ]
    schema = is_.fields(
        model=is_.one_of(*MODELS),
        dataset=is_.one_of(*DATASETS),
        epochs=is_.integer(1),
        seed=is_.integer(0, 2**32 - 1),
        batch_size=is_.integer(1, LARGEST_BATCH),
        optimizer=is_.one_of(*OPTIMIZERS),
        lr=is_.number(0),
        momentum=is_.number(0, 1),
        weight_decay=is_.number(0),
        schedule=is_.one_of(*SCHEDULES),
        warmup=is_.number(0),
        hidden=is_.items(is_.integer(1)),
        dropout=is_.number(0, 1),
        augment=is_.items(is_.either(*strengths)),
        early_stop=is_.maybe(is_.integer(1)),
        assignment=is_.flag,
        precision=is_.one_of(*PRECISIONS),
    )
    is_.check(what, values, schema)


def _weights(hidden: tuple[int, ...]) -> int:
    """The weights of an MLP's matrices."""
    return sum(a * b for a, b in zip((_PIXELS, *hidden), (*hidden, _CLASSES)))


def as_option(value: Any) -> str:
    """A value of a setup as one would type it."""
    if not isinstance(value, tuple):
        return "none" if value is None else str(value)
    items = ("=".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in value)
    return ",".join(items) or "none"


def counted(epochs: int) -> str:
    """A number of epochs in words."""
    return f"{epochs} epoch{'s' * (epochs != 1)}"


def _drop_before_the_last(model: Any, probability: float, seed: int) -> None:
    """Puts dropout before a network's last layer."""
    from .. import nn

    name, last = list(model.children())[-1]
    setattr(model, name, nn.Sequential(nn.Dropout(probability, rng=seed), last))


def _set_assignment_weights(model: Module, name: str, seed: int) -> None:
    from .networks import initial_values

    matrices, biases = initial_values(name, seed)
    weights = [value for w, b in zip(matrices, biases) for value in (w.T, b)]
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.set(value)

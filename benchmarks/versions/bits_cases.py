"""The graphs that benchmarks/versions/bits.py runs, by name, drawn from fixed seeds.

Only names that programs are written with are used here (autodiff, nn, optim, data, train), so that
the same cases run on another version of the package.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dlsys import autodiff as ad
from dlsys import data, init, nn, optim, train
from shared import networks, workloads

STEPS = 3
SEED = 5
BOTH = {"gpu": ("fp32", "tf32"), "emulated": ("fp32", "tf32")}  # what multiplies
LARGE = {**BOTH, "emulated": ("fp32",)}
HUGE: dict[str, Any] = {**BOTH, "emulated": ()}

Arrays = dict[str, np.ndarray]
Nodes = Any  # one, or several in a list


class Case(NamedTuple):
    """Arrays by name, as a function of the device (None for numpy) and the precision.

    gpu, emulated: the precisions that a GPU runs it in, and one that the CPU emulates. native:
    whether native devices can run it at all.
    """

    name: str
    run: Callable[[Any, str], Arrays]
    gpu: tuple[str, ...] = ("fp32",)
    emulated: tuple[str, ...] = ("fp32",)
    native: bool = True


class Graph(NamedTuple):
    """A loss with what it is trained by; `state` is what else a step changes."""

    loss: ad.Node
    parameters: Mapping[str, ad.Parameter]
    feeds: dict[ad.Node, Any]
    state: Mapping[str, ad.Parameter] = {}
    fetches: list[ad.Node] = []
    output: Callable[[], ad.Node] | None = None  # in evaluation, of the same feeds


def steps(
    build: Callable[[], Graph], optimizer: Callable[[], Any], ctx: Any, precision: str
) -> Arrays:
    """Three training steps: what each fetches, then the whole state and an evaluation's output."""
    graph, rule = built(build), optimizer()
    update = rule.minimize(graph.loss, list(graph.parameters.values()))
    executor = ad.Executor([graph.loss, *graph.fetches, update], ctx, precision)
    found: Arrays = {}
    for step in range(STEPS):
        loss, *fetched = executor.run(graph.feeds, convert_to_numpy_ret_vals=True)[:-1]
        found[f"loss {step}"] = loss
        found.update({f"fetch {k}, step {step}": value for k, value in enumerate(fetched)})
    for kind, values in (
        ("parameter", {name: node.asnumpy() for name, node in graph.parameters.items()}),
        ("running", {name: node.asnumpy() for name, node in graph.state.items()}),
        ("optimizer", rule.state_dict()),
    ):
        found.update({f"{kind} {name}": value for name, value in values.items()})
    forward = ad.Executor([graph.loss], ctx, precision)  # which counts its own draws
    found["loss alone"] = forward.run(graph.feeds, convert_to_numpy_ret_vals=True)[0]
    if graph.output is not None:
        evaluation = ad.Executor([graph.output()], ctx, precision)
        used = {node: graph.feeds[node] for node in evaluation.topo_order if node in graph.feeds}
        found["evaluation"] = evaluation.run(used, convert_to_numpy_ret_vals=True)[0]
    return found


def built(build: Callable[[], Graph]) -> Graph:
    """A graph whose random nodes and weights have the same numbers each time."""
    ad.seed(SEED)
    init.seed(SEED)
    return build()


def sgd() -> Any:
    return optim.SGD(0.05, momentum=0.9)


# ---- networks ----
def measured(network: str, size: int) -> Graph:
    """A network of benchmarks/shared/networks.py."""
    loss, parameters, feeds = networks.graph(network, size)
    return Graph(loss, {str(k): node for k, node in enumerate(parameters)}, feeds)


MLP = partial(nn.MLP, [50, 40, 30, 10], seed=SEED)


def classified(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    dtype: Any = np.float32,
    dense: bool = False,
) -> Graph:
    """A model that tells ten classes apart; `shape` is the batch's, `dense` labels are rows."""
    rng = np.random.default_rng(SEED)
    model = make()
    x = ad.Variable("x", dtype=dtype)
    y = ad.Variable("y", dtype=np.float32 if dense else np.int64)
    images = rng.integers(0, 9, shape) if dtype == np.int64 else rng.random(shape, np.float32)
    labels = rng.integers(0, 10, shape[0])
    feeds = {x: images, y: np.eye(10, dtype=np.float32)[labels] if dense else labels}
    return Graph(
        ad.softmax_cross_entropy(model(x), y),
        dict(model.named_parameters()),
        feeds,
        dict(model.named_buffers()),
        output=lambda: model.eval()(x),
    )


def perceptron() -> Graph:
    rng = np.random.default_rng(SEED)
    model = nn.Perceptron(3)
    x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
    feeds = {x: rng.normal(size=(40, 3)).astype(np.float32), y: rng.integers(0, 2, 40)}
    return Graph(model.loss(model(x), y), dict(model.named_parameters()), feeds)


def tour(dtype: Any = np.float32) -> Graph:
    """The network of docs/tour.md."""
    rng = np.random.default_rng(0)
    x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
    w, v = (
        ad.Parameter(rng.normal(size=shape).astype(dtype), name)
        for shape, name in (((4, 8), "w"), ((8, 3), "v"))
    )
    b = ad.Parameter(np.zeros(8, dtype), "b")
    hidden = ad.relu_op(ad.matmul_op(x, w) + b)
    loss = ad.softmax_cross_entropy(ad.matmul_op(hidden, v), y)
    points = rng.normal(size=(64, 4)).astype(dtype)
    fetches = ad.gradients(loss, [w]) if dtype == np.float64 else []
    feeds = {x: points, y: points[:, :3].argmax(1)}
    return Graph(loss, {"w": w, "b": b, "v": v}, feeds, fetches=fetches)


def curvature() -> Graph:
    """Gradients of the gradient's norm."""
    graph = tour()
    gradients = ad.gradients(graph.loss, list(graph.parameters.values()))
    norm = ad.sum_node_list([ad.sum_op(gradient * gradient) for gradient in gradients])
    return graph._replace(loss=graph.loss + 0.1 * norm, fetches=gradients)


def layers(*make: Callable[[], nn.Module]) -> nn.Module:
    """Layers one after the other, drawn in this order."""
    return nn.Sequential(*(each() for each in make))


def block(planes: int = 8) -> nn.Module:
    """A residual block with dropout and both poolings."""
    body = layers(
        partial(nn.Conv2d, planes, planes, 3, padding=1, bias=False),
        *(partial(nn.BatchNorm2d, planes), nn.ReLU),
        *(partial(nn.Conv2d, planes, planes, 3, padding=1), partial(nn.BatchNorm2d, planes)),
    )
    return layers(
        *(partial(nn.Conv2d, 3, planes, 3, padding=1), nn.ReLU, lambda: nn.Residual(body), nn.ReLU),
        *(partial(nn.MaxPool2d, 3, stride=2, padding=1), partial(nn.AvgPool2d, 2)),
        *(nn.Flatten, partial(nn.Dropout, 0.3), partial(nn.Linear, 9 * planes, 10)),
    )


def convolved(filters: Callable[..., nn.Module], *after: Callable[[], nn.Module]) -> nn.Module:
    """A layer of 4 to 6 planes between others."""
    return layers(
        *(partial(nn.Conv2d, 3, 4, 3), nn.ReLU, filters, *after),
        *(nn.GlobalAvgPool, partial(nn.Linear, 6, 10)),
    )


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "5 by 5": partial(nn.Conv2d, 4, 6, 5),
    "1 by 1": partial(nn.Conv2d, 4, 6, 1, bias=False),
    "stride and padding": partial(nn.Conv2d, 4, 6, 3, stride=2, padding=1),
    "dilated": partial(nn.Conv2d, 4, 6, 3, dilation=2),
    "groups": partial(nn.Conv2d, 4, 6, 3, groups=2),
    "transposed": partial(nn.ConvTranspose2d, 4, 6, 3, stride=2, output_padding=1),
}
AFTER: dict[str, tuple[Callable[[], nn.Module], ...]] = {
    "max-pool": (nn.ReLU, partial(nn.MaxPool2d, 2)),
    "overlapping max-pool": (nn.ReLU, partial(nn.MaxPool2d, 3, stride=2, padding=1)),
    "avg-pool": (nn.ReLU, partial(nn.AvgPool2d, 2)),
    "batch norm": (partial(nn.BatchNorm2d, 6), nn.ReLU),
    "batch norm and max-pool": (partial(nn.BatchNorm2d, 6), nn.ReLU, partial(nn.MaxPool2d, 2)),
    "dropout": (nn.ReLU, partial(nn.Dropout, 0.4)),
    "tanh": (nn.Tanh,),
}


def trained_by_fit(loader: Callable[..., Any], ctx: Any, precision: str) -> Arrays:
    """Two epochs of `train.fit`: its history, the state, an evaluation and predictions."""
    init.seed(SEED)
    ad.seed(SEED)
    rng = np.random.default_rng(SEED)
    images = rng.integers(0, 256, (90, 1, 14, 14), np.uint8)
    split = data.Split(images, images.reshape(90, -1).astype(int).sum(1) % 10)
    model = layers(
        *(partial(nn.Conv2d, 1, 5, 3), partial(nn.BatchNorm2d, 5), nn.ReLU),
        *(partial(nn.MaxPool2d, 2), nn.Flatten, partial(nn.Dropout, 0.2)),
        *(partial(nn.Linear, 180, 40), nn.ReLU, partial(nn.Linear, 40, 10)),
    )
    batches = loader(split, 30, shuffle=True, seed=SEED)
    rule = optim.AdamW(optim.OneCycle(0.01, 6), clip_norm=1.0, ema=0.9)
    history = train.fit(model, batches, rule, epochs=2, ctx=ctx)
    told = train.evaluate(model, data.Loader(split, 45), ctx=ctx)
    return {
        "losses": np.array(history.column("loss")),
        "evaluation": np.array([told[key] for key in ("loss", "accuracy")]),
        **{f"model {name}": value for name, value in model.state_dict().items()},
        **{f"optimizer {name}": value for name, value in rule.state_dict().items()},
    }


def run_many(work: workloads.Work, ctx: Any, precision: str) -> Arrays:
    """Batches that the device draws itself: two runs, then seven that are queued together."""
    init.seed(SEED)
    rng = np.random.default_rng(SEED)
    images, labels = (
        rng.integers(0, 256, (3 * work.batch, 784), np.uint8),
        rng.integers(0, 10, 3 * work.batch),
    )
    loader = data.DeviceLoader(
        data.Dataset(images, labels), work.batch, shuffle=True, normalize=(0.0, 1.0)
    )
    x, y = loader.inputs()
    model = networks.model(work, SEED)
    loss = ad.softmax_cross_entropy(model(x), y)
    rule = optim.SGD(optim.Cosine(0.05, 20), momentum=0.9)
    executor = ad.Executor([loss, rule.minimize(loss, model.parameters())], ctx, precision)
    found = {f"loss {k}": executor.run({}, True)[0] for k in range(2)}
    found["loss 8"] = executor.run_many(7, {}, True)[0]
    found.update({f"model {name}": value for name, value in model.state_dict().items()})
    found.update({f"optimizer {name}": value for name, value in rule.state_dict().items()})
    return found


# ---- operators ----
def operator(make: Callable[..., Nodes], *shapes: tuple[int, ...], low: float = -2.0) -> Graph:
    """A loss over the results of `make` for Parameters of these shapes, elements from `low` to 2;
    the results are fetched too.
    """
    rng = np.random.default_rng(SEED)
    values = [rng.uniform(low, 2.0, shape).astype(np.float32) for shape in shapes]

    def results(parameters: Iterable[ad.Node]) -> list[ad.Node]:
        made = make(*parameters)
        return list(made) if isinstance(made, (list, tuple)) else [made]

    parameters = {f"p{k}": ad.Parameter(value, f"p{k}") for k, value in enumerate(values)}
    fetches = results(parameters.values())
    feeds = {
        ad.Variable(f"dy{k}"): rng.normal(size=np.shape(y)).astype(np.float32)
        for k, y in enumerate(ad.Executor(results(map(ad.constant, values))).run({}))
    }
    parts = [ad.sum_op(y * dy) for y, dy in zip(fetches, feeds)]
    return Graph(ad.sum_node_list(parts), parameters, feeds, fetches=fetches)


def numbers(high: int, *shape: int) -> ad.Node:
    """Integers below `high`."""
    return ad.constant(np.random.default_rng(SEED).integers(0, high, shape))


def shares() -> ad.Node:
    """Rows of class probabilities."""
    return ad.constant(np.random.default_rng(SEED).dirichlet(np.ones(37), 23).astype(np.float32))


def drawn(make: Callable[..., ad.Node], *arguments: Any) -> Callable[[ad.Node], ad.Node]:
    """Random numbers beside a Parameter."""
    return lambda x: x * make((23, 37), *arguments)


MATRIX, CORNER, CUBE, IMAGES = (23, 37), (1, 37), (5, 7, 11), (3, 4, 9, 10)
UNARY = (
    "relu sigmoid tanh leaky_relu elu silu gelu gelu_tanh softplus hard_sigmoid hard_swish relu6 "
    "exp sin cos abs sign neg softmax log_softmax cumsum"
).split()
ACTIVATIONS = UNARY[:12]
POSITIVE = "log log1p sqrt rsqrt".split()
BINARY = "add sub mul div maximum minimum".split()
REDUCTIONS = "sum mean max min prod var logsumexp".split()
PRODUCTS = ("matmul", "linear", "batched matmul", "einsum", "conv1d")
LABELS = partial(numbers, 37, 23)
OTHERS: dict[str, tuple[Callable[..., Nodes], tuple[tuple[int, ...], ...]]] = {
    "powers": (lambda x: [ad.pow_byconst_op(x, 3.0), ad.const_pow_op(x, 1.5)], (MATRIX,)),
    "clip": (lambda x: ad.clip_op(x, -1.0, 0.5), (MATRIX,)),
    "constants": (lambda x: [x / 3.0, 3.0 / x, 3.0 - x, x + 3.0, x * 3.0], (MATRIX,)),
    "pow": (lambda a, b: ad.pow_op(ad.abs_op(a) + 0.5, b), (MATRIX, MATRIX)),
    "where": (lambda a, b: ad.where_op((a < b) & (a > -1.0), a, b), (MATRIX, MATRIX)),
    "logic": (
        lambda a, b: ad.where_op(((a >= b) | ~(a <= 1.0)) ^ (a == b), a, b),
        (MATRIX, CORNER),
    ),
    "places": (
        lambda x: [ad.cast_op(find(x, 1), np.float32) for find in (ad.argmax_op, ad.argmin_op)],
        (MATRIX,),
    ),
    "softmax of columns": (lambda x: [ad.softmax_op(x, 0), ad.log_softmax_op(x, 0)], (MATRIX,)),
    "transpose": (lambda x: ad.transpose_op(x, (2, 0, 1)), (CUBE,)),
    "slice": (lambda x: x[1:4, ::2], (CUBE,)),
    "concat": (lambda a, b: ad.concat([a, b, a], 1), (MATRIX, MATRIX)),
    "concat of many": (lambda x: [ad.concat([x] * k, 0) for k in (4, 5, 6, 8, 9)], (MATRIX,)),
    "split and stack": (lambda x: ad.stack(ad.split(x, 7, 1), 0), (CUBE,)),
    "pad": (lambda x: ad.pad_op(x, [(1, 2), (0, 1), (2, 0)], "reflect"), (CUBE,)),
    "pad edge": (lambda x: ad.pad_op(x, [(1, 2), (0, 1), (2, 0)], "edge"), (CUBE,)),
    "tile": (lambda x: ad.tile(x, (1, 2, 3)), (CUBE,)),
    "gather": (lambda x: ad.gather_op(x, numbers(23, 40)), (MATRIX,)),
    "scatter_add": (lambda x, u: ad.scatter_add_op(x, numbers(23, 40), u), (MATRIX, (40, 37))),
    "embedding": (lambda x: ad.embedding_op(x, numbers(23, 6, 9)), (MATRIX,)),
    "matmul": (ad.matmul_op, ((65, 130), (130, 77))),
    "matmul, transposed": (partial(ad.matmul_op, trans_A=True, trans_B=True), ((70, 33), (41, 70))),
    "matmul, deep": (ad.matmul_op, ((9, 2000), (2000, 12))),
    "linear": (lambda x, w, b: ad.relu_op(ad.linear_op(x, w, b)), ((64, 48), (48, 32), (32,))),
    "batched matmul": (ad.batched_matmul_op, ((5, 17, 20), (5, 20, 19))),
    "einsum": (lambda a, b: ad.einsum("bij,bkj->ik", a, b), (CUBE, (5, 9, 11))),
    "outer": (ad.outer_op, ((31,), (45,))),
    "conv1d": (lambda x, f: ad.conv1d(x, f, stride=2, padding=1), ((3, 4, 21), (5, 4, 3))),
    "batch_normalization": (ad.batch_normalization, (IMAGES, (4,), (4,))),
    "layer_normalization": (ad.layer_normalization, (MATRIX, (37,), (37,))),
    "rms_normalization": (ad.rms_normalization, (MATRIX, (37,))),
    "group_normalization": (
        lambda x, s, b: ad.group_normalization(x, s, b, 2),
        (IMAGES, (4,), (4,)),
    ),
    "instance_normalization": (ad.instance_normalization, (IMAGES, (4,), (4,))),
    "max_pool2d": (lambda x: ad.max_pool2d(x, 3, 2, 1), (IMAGES,)),
    "avg_pool2d": (lambda x: ad.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (IMAGES,)),
    "global pools": (lambda x: [ad.global_avg_pool2d(x), ad.global_max_pool2d(x)], (IMAGES,)),
    "depth_to_space": (lambda x: ad.depth_to_space_op(x, 2), (IMAGES,)),
    "resize nearest": (lambda x: ad.resize(x, scale=2.0), (IMAGES,)),
    "resize bilinear": (lambda x: ad.resize(x, (7, 13), mode="bilinear"), (IMAGES,)),
    "dropout": (lambda x: ad.dropout_op(x, 0.6), (MATRIX,)),
    "random_uniform": (drawn(ad.random_uniform), (MATRIX,)),
    "random_normal": (drawn(ad.random_normal), (MATRIX,)),
    "random_truncated_normal": (drawn(ad.random_truncated_normal), (MATRIX,)),
    "random_bernoulli": (drawn(ad.random_bernoulli, 0.3), (MATRIX,)),
    "cross-entropy": (lambda x: ad.softmax_cross_entropy(x, LABELS()), (MATRIX,)),
    "cross-entropy, smoothed": (
        lambda x: ad.softmax_cross_entropy(x, LABELS(), label_smoothing=0.1, ignore_index=3),
        (MATRIX,),
    ),
    "cross-entropy, dense": (lambda x: ad.softmax_cross_entropy(x, shares(), "none"), (MATRIX,)),
    "cross-entropy, learned": (ad.softmaxcrossentropy_op, (MATRIX, MATRIX)),
    "negative_log_likelihood": (
        lambda x: ad.negative_log_likelihood(ad.log_softmax_op(x), LABELS()),
        (MATRIX,),
    ),
    "squared and absolute error": (
        lambda x, t: [ad.mean_squared_error(x, t), ad.mean_absolute_error(x, t)],
        (MATRIX, MATRIX),
    ),
    "huber_loss": (lambda x, t: ad.huber_loss(x, t, 0.7), (MATRIX, MATRIX)),
    "hinge losses": (
        lambda x: [
            ad.hinge_loss(x, ad.cast_op(numbers(2, 23, 37), np.float32) * 2 - 1),
            ad.multiclass_hinge_loss(x, LABELS()),
        ],
        (MATRIX,),
    ),
    "kl_divergence": (
        lambda x, p: ad.kl_divergence(ad.log_softmax_op(x), ad.softmax_op(p)),
        (MATRIX, MATRIX),
    ),
    "binary cross-entropies": (
        lambda x, p: [
            ad.binary_cross_entropy_with_logits(x, ad.sigmoid_op(p)),
            ad.binary_cross_entropy(ad.sigmoid_op(x), ad.sigmoid_op(p)),
        ],
        (MATRIX, MATRIX),
    ),
}


def over(reduction: str, axis: Any) -> Callable[[ad.Node], ad.Node]:
    return lambda x: getattr(ad, f"{reduction}_op")(x, axis)


def between_products(activation: Any, x: ad.Node, w: ad.Node, v: ad.Node) -> ad.Node:
    return ad.matmul_op(activation(ad.matmul_op(x, w)), v)


def twice(make: Callable[..., Nodes]) -> Callable[..., Nodes]:
    """Gradients of an operator, as results that have gradients themselves."""

    def gradients(*parameters: ad.Node) -> list[ad.Node]:
        made = make(*parameters)
        return ad.gradients(ad.sum_op(made * made), list(parameters))

    return gradients


TWICE = (
    *("batch_normalization", "layer_normalization", "max_pool2d", "avg_pool2d", "conv1d"),
    *("matmul", "cross-entropy", "huber_loss"),
)


def operators() -> Iterator[tuple[str, Callable[[], Graph]]]:
    """Every operator with a gradient, by itself."""
    for name in (*UNARY, *POSITIVE):
        low = 0.3 if name in POSITIVE else -2.0
        yield name, partial(operator, getattr(ad, f"{name}_op"), MATRIX, low=low)
    for name in ACTIVATIONS:
        make = partial(between_products, getattr(ad, f"{name}_op"))
        yield f"{name} between products", partial(operator, make, (9, 21), (21, 33), (33, 8))
    for name in BINARY:
        make = getattr(ad, f"{name}_op")
        yield name, partial(operator, make, MATRIX, MATRIX, low=0.3)
        yield f"{name}, broadcast", partial(operator, make, CUBE, (7, 1), low=0.3)
    for name in REDUCTIONS:
        for axis in (None, 0, 2, (0, 2)):
            yield f"{name} over {axis}", partial(operator, over(name, axis), CUBE)
    for name, (make, shapes) in OTHERS.items():
        yield name, partial(operator, make, *shapes)
        if name in TWICE:
            yield f"{name}, second order", partial(operator, twice(make), *shapes)
    yield "prod, second order", partial(operator, twice(over("prod", 1)), CUBE)


# Earlier versions, which bits are compared with, know the one spelling only.
_SPELLINGS = inspect.signature(optim.RMSprop).parameters.keys() & {"centered", "centred"}
_CENTERED: dict[str, Any] = dict.fromkeys(_SPELLINGS, True)
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": partial(optim.SGD, 0.05),
    "SGD, momentum": sgd,
    "SGD, nesterov": partial(optim.SGD, 0.05, momentum=0.9, nesterov=True),
    "SGD, dampening": partial(optim.SGD, 0.05, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "SGD, decoupled": partial(optim.SGD, 0.05, weight_decay=0.01, decoupled=True),
    "Adam": partial(optim.Adam, 0.01, weight_decay=0.01),
    "AdamW": partial(optim.AdamW, 0.01),
    "RMSprop": partial(optim.RMSprop, 0.01),
    "RMSprop, momentum": partial(optim.RMSprop, 0.01, momentum=0.9),
    "RMSprop, centred": partial(optim.RMSprop, 0.01, **_CENTERED),
    "RMSprop, centred, momentum": partial(optim.RMSprop, 0.01, momentum=0.9, **_CENTERED),
    "Adagrad": partial(optim.Adagrad, 0.01, initial=0.1),
    "Lion": partial(optim.Lion, 0.001, weight_decay=0.1),
    "clip_norm": partial(optim.SGD, 0.05, momentum=0.9, clip_norm=0.5),
    "clip_value": partial(optim.Adam, 0.01, clip_value=0.01),
    "accumulate": partial(optim.Adam, 0.01, accumulate=2),
    "ema": partial(optim.SGD, 0.05, ema=0.9),
}
SCHEDULES: dict[str, Callable[[], Any]] = {
    "Constant": lambda: optim.Constant(0.05),
    "Step": lambda: optim.Step(0.05, 2),
    "MultiStep": lambda: optim.MultiStep(0.05, [1, 2]),
    "Exponential": lambda: optim.Exponential(0.05, 0.9),
    "Polynomial": lambda: optim.Polynomial(0.05, 4, 2.0),
    "Cosine": lambda: optim.Cosine(0.05, 4),
    "WarmRestarts": lambda: optim.WarmRestarts(0.05, 2, 2),
    "Warmup": lambda: optim.Warmup(optim.Cosine(0.05, 4), 2),
    "OneCycle": lambda: optim.OneCycle(0.05, 4),
}


def small() -> Graph:
    """The network that the optimizers train: dense layers behind a normalized convolution."""
    make = partial(
        layers,
        *(partial(nn.Conv2d, 1, 4, 3), partial(nn.BatchNorm2d, 4), nn.ReLU, nn.Flatten),
        *(partial(nn.Linear, 144, 24), nn.ReLU, partial(nn.Linear, 24, 10)),
    )
    return classified(make, (32, 1, 8, 8))


def models() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]]:
    """The ready models and others with their batches' shapes."""
    dense = partial(nn.MLP, [50, 40, 30, 10], nn.Tanh, 0.3, seed=SEED)
    short = partial(nn.ResNet, nn.Bottleneck, (1, 1, 0, 0), 10, seed=SEED)
    yield "MLP, tanh and dropout", dense, (33, 50), BOTH
    yield "MLP, silu", partial(nn.MLP, [50, 600, 10], nn.SiLU, seed=SEED), (33, 50), BOTH
    yield "ResNetMNIST", partial(nn.ResNetMNIST, seed=SEED), (2, 784), BOTH
    yield "ResNetMNIST-64", partial(nn.ResNetMNIST, seed=SEED), (64, 784), HUGE
    yield "ResNet18", partial(nn.ResNet18, 10, seed=SEED), (2, 3, 40, 40), HUGE
    yield "ResNet50", partial(nn.ResNet50, 10, seed=SEED), (2, 3, 40, 40), HUGE
    yield "Bottleneck", short, (2, 3, 20, 20), LARGE
    yield "residual block", block, (4, 3, 12, 12), BOTH
    for work in workloads.drawn(4, SEED):
        yield work.name, partial(networks.model, work, SEED), (work.batch, 784), HUGE


def cases() -> Iterator[Case]:
    """All of them."""

    def trained(name: str, build: Callable[[], Graph], rule: Any = sgd, **more: Any) -> Case:
        return Case(name, partial(steps, build, rule), **more)

    plain = partial(optim.SGD, networks.LEARNING_RATE)
    slow = partial(optim.SGD, 0.005, momentum=0.9)
    measured_at = {"logreg": (100, 1000), "mlp": (256, 1000), networks.LENET: (16, 128, 1000)}
    for network, batches in measured_at.items():
        for size in batches:
            extent = (
                BOTH if size in (16, 100, 256) else HUGE if network == networks.LENET else LARGE
            )
            yield trained(f"{network}-{size}", partial(measured, network, size), plain, **extent)
    yield trained("tour", tour, partial(optim.SGD, 0.1))
    yield trained("tour, float64", partial(tour, np.float64), partial(optim.SGD, 0.1), native=False)
    yield trained("tour, second order", curvature)
    yield trained("Perceptron", perceptron)

    for name, make, shape, extent in models():
        yield trained(name, partial(classified, make, shape), slow, **extent)
    words = partial(layers, partial(nn.Embedding, 9, 6), nn.Flatten, partial(nn.Linear, 30, 10))
    yield trained("dense labels", partial(classified, MLP, (40, 50), dense=True), **BOTH)
    yield trained("embedding", partial(classified, words, (20, 5), np.int64))

    for name, filters in CONVOLUTIONS.items():
        make = partial(convolved, filters)
        yield trained(f"convolution, {name}", partial(classified, make, (5, 3, 13, 14)), **BOTH)
    for name, after in AFTER.items():
        make = partial(convolved, CONVOLUTIONS["5 by 5"], *after)
        yield trained(f"convolution, {name}", partial(classified, make, (5, 3, 13, 14)))
    for name, build in operators():
        yield trained(
            f"operator, {name}",
            build,
            partial(optim.SGD, 1e-5),
            **(BOTH if name.startswith(PRODUCTS) else {}),
        )
    for name, rule in OPTIMIZERS.items():
        yield trained(f"optimizer, {name}", small, rule)
    for name, schedule in SCHEDULES.items():
        yield trained(f"schedule, {name}", small, partial(scheduled, schedule))
    yield Case("fit, Loader", partial(trained_by_fit, augmented))
    yield Case("fit, DeviceLoader", partial(trained_by_fit, data.DeviceLoader))
    for work in (
        workloads.Work("dense", "dense", (784, 60, 30, 10), 50),
        workloads.Work("lenet", "lenet", (6, 16), 8),
    ):
        yield Case(f"run_many, {work.name}", partial(run_many, work), **BOTH)


def scheduled(schedule: Callable[[], Any]) -> Any:
    return optim.SGD(schedule(), momentum=0.9)


def augmented(split: Any, size: int, **options: Any) -> Any:
    return data.Loader(split, size, augment=[data.Shift(1), data.Rotate(10)], **options)

"""The step of micrograd's MLP, 300-300-300-1 with a batch of 100, beside PyTorch's.

    python benchmarks micrograd [--rounds N] [--seconds S] [--devices cpu gpu]

Forward, the sum of squared differences, backward and the update of plain gradient descent, in
float32, all on the device. Ours is the program of its page on `dlsys.micrograd` ("page"), Tensors
("eager"), Tensors under `jit`, and a graph; PyTorch's is eager, and on a GPU its whole step
captured by hand as a CUDA graph. The loss is read every hundred steps. Contestants live in
processes of their own that take turns; ratios are of one round.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from shared import measure, turns

SIZES, BATCH, RATE = (300, 300, 300, 1), 100, 1e-3
LOOK = 100  # steps between looks at the loss
DEVICES = ("cpu", "gpu")

Loop = Callable[[], float]  # LOOK steps; the last loss


def data() -> tuple[np.ndarray, np.ndarray]:
    """Samples (100, 300) and targets (100, 1), each -1 or 1."""
    rng = np.random.default_rng(0)
    return tuple(rng.choice([-1, 1], (BATCH, n)).astype(np.float32) for n in (SIZES[0], SIZES[-1]))


def weights() -> list[tuple[np.ndarray, np.ndarray]]:
    """The weight (inputs, outputs) and bias (outputs,) of each layer."""
    rng = np.random.default_rng(1)
    return [
        tuple(rng.uniform(-(m**-0.5), m**-0.5, s).astype(np.float32) for s in ((m, n), (n,)))
        for m, n in zip(SIZES, SIZES[1:])
    ]


def looked(step: Callable[[], Any]) -> Loop:
    """LOOK steps and a look at the last loss."""

    def loop() -> float:
        for _ in range(LOOK):
            loss = step()
        return float(loss)

    return loop


def page(device: str) -> Loop:
    """The loop of the page, over columns."""
    from dlsys.micrograd import MLP, Operations, Tensor

    model = MLP(SIZES[0], list(SIZES[1:])).to(device)
    for layer, (weight, bias) in zip(model.layers, weights()):
        layer.weight.data, layer.bias.data = weight.T, bias[:, None]
    xs, ys = (Tensor(values).T.to(device) for values in data())

    def step() -> Any:
        loss = ((model(xs) - ys) ** 2).sum()
        for p in model.parameters():
            p.grad.data, _ = Operations(p.device).zeros_matrix_like(shape=p.shape)
        loss.backward()
        for p in model.parameters():
            ops = Operations(p.device)
            change = ops.matrix_scalar_mul(-RATE, p.grad.data, shape=p.shape)
            p.data, _ = ops.matrix_add(change, p.data, shape=p.shape)
        return loss

    return looked(lambda: step().data.tensor)


def parameters() -> list[tuple[Any, Any]]:
    """The weights as Parameters."""
    from dlsys import autodiff as ad

    return [
        (ad.Parameter(w, f"w{k}"), ad.Parameter(b, f"b{k}")) for k, (w, b) in enumerate(weights())
    ]


def loss_of(x: Any, y: Any, layers: list[tuple[Any, Any]]) -> Any:
    """The loss of nodes or Tensors."""
    from dlsys import functional as F

    for weight, bias in layers:
        x = F.tanh(x @ weight + bias)
    return F.sum((x - y) * (x - y))


def eager(device: str, compiled: bool = False) -> Loop:
    """A loop of Tensors, its step as it stands or under `jit`."""
    import dlsys as dl
    from dlsys import optim

    layers = parameters()
    optimizer = optim.SGD(RATE, params=[p for pair in layers for p in pair])
    x, y = (dl.tensor(values, device) for values in data())

    def step() -> Any:
        loss = loss_of(x, y, layers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if not compiled:
        return looked(step)
    one = dl.jit(lambda x, y: step())
    return looked(lambda: one(x, y))


def graph(device: str) -> Loop:
    """A loop of `Executor.run` with feeds on the device."""
    from dlsys import autodiff as ad
    from dlsys import ndarray, optim
    from dlsys.eager.device import context_of

    ctx, layers = context_of(device), parameters()
    feeds = {
        ad.Variable(name, values.shape): ndarray.array(values, ctx)
        for name, values in zip("xy", data())
    }
    loss = loss_of(*feeds, layers)
    train = optim.SGD(RATE).minimize(loss, [p for pair in layers for p in pair])
    executor = ad.Executor([loss, train], ctx=ctx)
    return looked(lambda: executor.run(feeds)[0])


def torch_loop(device: str, captured: bool = False) -> Loop:
    """PyTorch's loop, eager or its whole step captured as a CUDA graph."""
    import torch

    from contestants import race_torch

    where = "cuda" if device == "gpu" else "cpu"
    torch.set_num_threads(os.cpu_count() or 1)
    torch.backends.cuda.matmul.allow_tf32 = False
    x, y = (torch.from_numpy(values).to(where) for values in data())
    layers = [[torch.from_numpy(v).to(where).requires_grad_() for v in p] for p in weights()]
    sgd = torch.optim.SGD([v for pair in layers for v in pair], lr=RATE, foreach=True)

    def step() -> Any:
        sgd.zero_grad(set_to_none=True)
        found = x
        for weight, bias in layers:
            found = torch.tanh(torch.addmm(bias, found, weight))
        loss = ((found - y) ** 2).sum()
        loss.backward()
        sgd.step()
        return loss.detach()

    if not captured:
        return looked(step)
    last: list[Any] = []
    replay = race_torch.captured(lambda: last.append(step()))

    def one() -> Any:
        replay()
        return last[-1]

    return looked(one)


OURS: dict[str, Callable[[str], Loop]] = {
    "page": page,
    "eager": eager,
    "jit": functools.partial(eager, compiled=True),
    "graph": graph,
}
LOOPS = OURS | {
    "torch eager": torch_loop,
    "torch captured": functools.partial(torch_loop, captured=True),
}


def contestant(device: str, system: str) -> None:
    """The other end: warms up, then runs for as long as each line says."""
    loop = LOOPS[system](device)
    first, last = loop(), loop()

    def sample(seconds: float) -> list[float]:
        return [ms / LOOK for ms in measure.step_ms(loop, seconds)]

    torch = sys.modules.get("torch")
    turns.serve(lambda _: sample, losses=[first, last], version=getattr(torch, "__version__", None))


def systems(devices: list[str]) -> list[tuple[str, str]]:
    """The contestants that can run here, as (device, system)."""
    from dlsys.eager.device import context_of
    from dlsys.runtime.device import unavailable

    found = []
    for device in devices:
        reason = unavailable(context_of(device))
        if reason is not None:
            print(f"{device} is left out: {reason}", file=sys.stderr)
            continue
        found += [(device, system) for system in OURS]
        if find_spec("torch") is None:
            print("no PyTorch here, so no ratios: pip install torch", file=sys.stderr)
        elif device == "cpu":
            found.append((device, "torch eager"))
        else:
            import torch

            if torch.cuda.is_available():
                found += [(device, "torch eager"), (device, "torch captured")]
            else:
                print("this PyTorch has no CUDA, so no ratios on the GPU", file=sys.stderr)
    return found


def compare(options: Any) -> list[dict[str, Any]]:
    """Milliseconds a step of each contestant, and over those of PyTorch eager on its device."""
    contestants = {
        key: turns.Contestant(
            measure.program("micrograd", "--contestant", *key), patience=options.patience
        )
        for key in systems(options.devices)
    }
    ms: dict[tuple[str, str], list[float]] = {key: [] for key in contestants}
    for _ in range(options.rounds):
        for key, each in contestants.items():
            ms[key].append(each.turn(options.seconds))
    found = []
    for (device, system), each in contestants.items():
        each.close()
        times, rival = ms[device, system], ms.get((device, "torch eager"))
        row: dict[str, Any] = {"device": device, "system": system, "ms": measure.summary(times)}
        row |= {"losses": each.ready["losses"], "version": each.ready["version"]}
        row["disturbed_turns"] = each.disturbed
        if rival and system != "torch eager":
            row["ratio"] = measure.summary([a / b for a, b in zip(times, rival)], 3)
        found.append(row)
    return found


def show(row: dict[str, Any]) -> None:
    """Prints a row."""
    ratio = f"  {row['ratio']['median']:.2f} x torch eager" if "ratio" in row else ""
    print(f"{row['device']:4} {row['system']:15} {row['ms']['median']:8.4f} ms{ratio}", flush=True)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.3, help="of one turn")
    parser.add_argument("--patience", type=int, default=turns.PATIENCE, help="disturbed turns")
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--contestant", nargs=2, metavar=("DEVICE", "SYSTEM"))
    options = parser.parse_args()
    if options.contestant:
        contestant(*options.contestant)
        return
    rows = compare(options)
    for row in rows:
        show(row)
    print(measure.save("micrograd", options, {"look": LOOK, "systems": rows}))

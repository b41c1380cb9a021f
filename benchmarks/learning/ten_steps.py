"""Ten steps of GPT-2 and ResNet-50 from equal weights against PyTorch in float64: errors of ours
and of PyTorch's, in float32 and in bf16.

    python benchmarks ten_steps [--device gpu] [--works gpt2,resnet50] [--seeds 3]
                                [--picture FILE.png]

On a GPU the networks have full size, GPT-2 124M and ResNet-50 over 224 × 224, elsewhere they are
small. All sides take SGD with momentum over the same batches. An error of a loss is its distance
from float64's in the same step, a share of that; an error of a gradient is, in the first step, the
distance of all gradients in the Euclidean norm, a share of float64's norm. PyTorch multiplies in
true float32, and under `autocast` for bf16. Training amplifies rounding, so that the error of a
loss varies a hundredfold from one draw of weights and batch to the next: what is compared is the
median over the seeds. Writes ten_steps_<device>.json. The exit status is 0 where no error of ours
is above 1.25 times PyTorch's: sums in another order differ that much.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, optim
from dlsys.eager.device import context_of
from shared import measure

STEPS, MOMENTUM, MARGIN = 10, 0.9, 1.25
ROUNDING = 2.0**-23  # of a loss in float32, where errors below it have no meaning
Arrays = tuple[np.ndarray, np.ndarray]


class Work(NamedTuple):
    """Our model, PyTorch's function of the same state, the batch and the rate."""

    model: nn.Module
    forward: Callable[[dict[str, Any], Any], Any]
    batch: Arrays
    rate: float


def gpt2(full: bool, seed: int) -> Work:
    """GPT-2 124M over 4 sequences of 512 tokens, or 2 layers of 32 features."""
    sizes = (
        dict(vocabulary=50304, context=512, layers=12, heads=12, features=768)
        if full
        else dict(vocabulary=97, context=32, layers=2, heads=2, features=32)
    )
    rng = np.random.default_rng(seed + 1)
    tokens = rng.integers(0, sizes["vocabulary"], (4, sizes["context"] + 1))
    heads, layers = sizes["heads"], sizes["layers"]

    def forward(state: dict[str, Any], x: Any) -> Any:
        from torch.nn import functional as f

        def linear(name: str, x: Any) -> Any:
            return f.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

        def norm(name: str, x: Any) -> Any:
            return f.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

        y = f.embedding(x, state["wte.weight"]) + state["wpe.weight"]
        for block in (f"h.{k}" for k in range(layers)):
            rows, length, width = y.shape
            parts = linear(f"{block}.attn.c_attn", norm(f"{block}.ln_1", y))
            q, k, v = parts.view(rows, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            attended = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            attended = attended.transpose(1, 2).reshape(rows, length, width)
            y = y + linear(f"{block}.attn.c_proj", attended)
            hidden = f.gelu(
                linear(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", y)), approximate="tanh"
            )
            y = y + linear(f"{block}.mlp.c_proj", hidden)
        return f.linear(norm("ln_f", y), state["wte.weight"]).flatten(0, 1)

    return Work(nn.GPT(**sizes, seed=seed), forward, (tokens[:, :-1], tokens[:, 1:]), 0.1)


def resnet50(full: bool, seed: int) -> Work:
    """ResNet-50 over 32 images of 224 × 224, or 4 of 64 × 64, with batch normalization in training
    form.
    """
    count, side, classes = (32, 224, 1000) if full else (4, 64, 10)
    rng = np.random.default_rng(seed + 1)
    images = rng.normal(size=(count, 3, side, side)).astype(np.float32)

    def forward(state: dict[str, Any], x: Any) -> Any:
        from torch.nn import functional as f

        def conv(name: str, x: Any, stride: int = 1) -> Any:
            weight = state[f"{name}.weight"]
            return f.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

        def norm(name: str, x: Any) -> Any:
            return f.batch_norm(
                x, None, None, state[f"{name}.weight"], state[f"{name}.bias"], training=True
            )

        y = f.max_pool2d(f.relu(norm("bn1", conv("conv1", x, 2))), 3, stride=2, padding=1)
        for stage, depth in enumerate((3, 4, 6, 3), 1):
            for k in range(depth):
                name, stride = f"layer{stage}.{k}", 2 if stage > 1 and k == 0 else 1
                z = f.relu(norm(f"{name}.bn1", conv(f"{name}.conv1", y)))
                z = f.relu(norm(f"{name}.bn2", conv(f"{name}.conv2", z, stride)))
                z = norm(f"{name}.bn3", conv(f"{name}.conv3", z))
                if k == 0:
                    shortcut = conv(f"{name}.downsample.0", y, stride)
                    y = norm(f"{name}.downsample.1", shortcut)
                y = f.relu(y + z)
        return f.linear(y.mean((2, 3)), state["fc.weight"], state["fc.bias"])

    model = nn.ResNet50(classes, seed=seed)
    for key, value in model.named_parameters():
        if "bn3.weight" in key:  # with 1 everywhere the gradients of 50 layers explode
            value.set(np.full(value.shape, 0.2, np.float32))
    labels = rng.integers(0, classes, count)
    return Work(model, forward, (images, labels), 0.001)


WORKS = {"gpt2": gpt2, "resnet50": resnet50}


class Steps(NamedTuple):
    """The losses of the steps, and the gradients of the first."""

    losses: list[float]
    gradients: dict[str, np.ndarray]


def ours(work: Work, device: str, precision: str) -> Steps:
    """Gradients are read from the first step's momentum, which begins with them."""
    ctx = context_of(device)
    model = work.model
    start = model.state_dict()
    if ctx is not None:
        model.to(ctx)
    x, y = (ad.Variable(n, a.shape, a.dtype) for n, a in zip("xy", work.batch))
    with model.in_mode(training=True):
        loss = F.cross_entropy(model(x), y)
    names = dict(model.named_parameters())
    train = optim.SGD(work.rate, momentum=MOMENTUM).minimize(loss, list(names.values()))
    step = ad.Executor([loss, train], ctx=ctx, precision=precision)
    feeds = dict(zip((x, y), work.batch))
    losses, gradients = [], {}
    for k in range(STEPS):
        losses.append(float(step.run(feeds, convert_to_numpy_ret_vals=True)[0]))
        if k == 0:  # w - rate · g
            gradients = {
                n: (start[n].astype(np.float64) - p.asnumpy()) / work.rate for n, p in names.items()
            }
    model.load_state_dict(start)
    return Steps(losses, gradients)


def theirs(work: Work, device: str, dtype: str) -> Steps:
    """PyTorch's, in float64, float32, or float32 under bf16's autocast."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kind = torch.float64 if dtype == "float64" else torch.float32
    on = "cuda" if device == "gpu" else "cpu"
    names = dict(work.model.named_parameters())
    start = work.model.state_dict()
    state = {n: torch.tensor(start[n], dtype=kind, device=on).requires_grad_() for n in names}
    x, y = (torch.tensor(a, device=on) for a in work.batch)
    x = x.to(kind) if x.is_floating_point() else x
    optimizer = torch.optim.SGD(state.values(), work.rate, momentum=MOMENTUM)
    losses, gradients = [], {}
    for k in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(on, torch.bfloat16, enabled=dtype == "bf16"):
            loss = torch.nn.functional.cross_entropy(work.forward(state, x), y.flatten())
        loss.backward()
        before = {n: p.detach().clone() for n, p in state.items()} if k == 0 else {}
        optimizer.step()
        losses.append(loss.item())
        for n, value in before.items():  # as ours are read, with the same rounding
            moved = value.double() - state[n].detach().double()
            gradients[n] = (moved / work.rate).cpu().numpy()
    return Steps(losses, gradients)


def errors(got: Steps, exact: Steps) -> dict[str, float]:
    """The largest and the mean error of the losses, and the error of all gradients."""
    shares = [abs(a - b) / abs(b) for a, b in zip(got.losses, exact.losses)]
    squares = [
        (np.sum((got.gradients[n] - g) ** 2), np.sum(g**2)) for n, g in exact.gradients.items()
    ]
    wrong, whole = (math.sqrt(math.fsum(column)) for column in zip(*squares))
    return {"first_loss": shares[0], "loss": max(shares), "gradient": wrong / whole}


def compare(name: str, device: str, seeds: int) -> dict[str, Any]:
    """The losses of all sides of a work with the first seed, and the errors of all seeds."""
    start = time.perf_counter()
    works = [WORKS[name](device == "gpu", seed) for seed in range(seeds)]
    drawn = [compare_drawn(work, device) for work in works]
    losses, first = drawn[0]

    def over_seeds(precision: str, side: str, kind: str) -> float:
        return statistics.median(found[precision][side][kind] for _, found in drawn)

    return {
        "losses": losses,
        "errors": {
            precision: {
                side: {kind: over_seeds(precision, side, kind) for kind in of_kinds}
                for side, of_kinds in sides.items()
            }
            for precision, sides in first.items()
        },
        "of_seeds": [found for _, found in drawn],
        "parameters": sum(p.asnumpy().size for p in works[0].model.parameters()),
        "seconds": round(time.perf_counter() - start, 1),
    }


def compare_drawn(work: Work, device: str) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The losses of all sides, and errors by precision and side."""
    exact = theirs(work, device, "float64")
    losses, found = {"float64": exact.losses}, {}
    for precision in ("float32", "bf16"):
        if precision == "bf16" and device == "numpy":
            continue
        sides = {
            "dlsys": ours(work, device, "fp32" if precision == "float32" else precision),
            "PyTorch": theirs(work, device, precision),
        }
        losses |= {f"{side} {precision}": s.losses for side, s in sides.items()}
        found[precision] = {side: errors(s, exact) for side, s in sides.items()}
    return losses, found


def no_larger(found: dict[str, Any]) -> bool:
    """True where no error of ours is above PyTorch's, within the margin."""
    return all(
        sides["dlsys"][kind] <= max(MARGIN * sides["PyTorch"][kind], ROUNDING)
        for sides in found["errors"].values()
        for kind in ("loss", "gradient")
    )


def picture(path: Path, works: dict[str, Any]) -> None:
    """The losses of all sides over the steps."""
    from dlsys.viz.figure import legend, new_figure, plot
    from dlsys.viz.svg import BLUE, ORANGE

    styles = {"dlsys float32": (BLUE, "-"), "PyTorch float32": (ORANGE, "-")}
    styles |= {"dlsys bf16": (BLUE, ":"), "PyTorch bf16": (ORANGE, ":")}
    figure = new_figure(4.2 * len(works), 3.4)
    for k, (name, found) in enumerate(works.items(), 1):
        axes = plot(figure, 1, len(works), k, title=name, grid=True)
        axes.plot(found["losses"]["float64"], color="0.6", linewidth=4, label="float64")
        for side, (color, line) in styles.items():
            if side in found["losses"]:
                axes.plot(found["losses"][side], line, color=color, linewidth=1.2, label=side)
        axes.set_xlabel("step")
        legend(axes)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Returns 0 where no error of ours is larger."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=("numpy", "cpu", "gpu"), default="cpu")
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--seeds", type=int, default=3, help="draws of weights and batch")
    parser.add_argument("--picture", type=Path, help="a PNG of the losses")
    options = parser.parse_args()
    works = {
        name: compare(name, options.device, options.seeds) for name in options.works.split(",")
    }
    ok = all(map(no_larger, works.values()))
    results = {"ok": ok, "device": options.device, "steps": STEPS, "margin": MARGIN, "works": works}
    path = measure.save(f"ten_steps_{options.device}", options, results)
    for name, found in works.items():
        for precision, sides in found["errors"].items():
            texts = (
                f"{side} {', '.join(f'{k} {v:.1e}' for k, v in e.items())}"
                for side, e in sides.items()
            )
            print(f"{name} {precision}: {'; '.join(texts)}", flush=True)
    if options.picture:
        picture(options.picture, works)
    print(f"{'ok' if ok else 'NOT OK'}, written to {path}")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())

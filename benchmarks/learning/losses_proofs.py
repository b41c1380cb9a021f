"""The proofs of losses.py for each network: its curve and its single steps against the reference.

    python benchmarks losses_proofs mlp steps --device gpu

runs one of them and prints what it found as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from dlsys import autodiff as ad
from dlsys import init, ndarray, nn, optim
from dlsys.apps.networks import initial_values
from dlsys.autodiff import Parameter
from dlsys.data import Split, load_mnist
from dlsys.ndarray import Context
from shared import networks, workloads
from shared.workloads import Work

EPOCHS = 3
SEED = 123
# The most that the losses of a step may be apart along a curve; and from the same state, as a share
# of the loss. The most measured was 2.5e-6, of a small loss.
BOUNDS = {"curve": 1e-3, "loss": 1e-5}
DEVICES = {"cpu": ndarray.cpu(0), "gpu": ndarray.gpu(0)}

Arrays = Mapping[str, np.ndarray]


class Proof(NamedTuple):
    """The samples of the training set that an epoch has, the rates of the curve and of the steps,
    that every how many-th step is compared, and the bound of its update: how far it may be wrong,
    as a share of the same Parameter's largest, in the median step.
    """

    samples: int
    gentle: float
    brisk: float
    every: int
    update: float = 1e-4


# The gentle rates are those at which the loss falls from epoch to epoch while rounding is not
# amplified: where a ReLU's input or two of a pooling's are within rounding of a tie, they flip, and
# the update changes by more than rounding. So curves part, in float32 numpy as on a device, and the
# more so the higher the rate. For that reason too the median step is judged, not the worst. The
# residual network has twenty million such inputs a step: some flip in most steps.
# The reference takes two seconds for a step of that network, which therefore gets fewer samples.
PROOFS = {
    "logreg": Proof(50_000, 1.0, 1.0, 1),
    "mlp": Proof(50_000, 0.1, 1.0, 1),
    "lenet-128": Proof(50_000, 0.001, 0.3, 7),
    "residual-512": Proof(5_120, 0.001, 0.05, 3, 2e-3),
}
WORKS = {work.name: work for work in workloads.NAMED if work.name in PROOFS}


class Training:
    """A network with its training step on one device; None is the reference, in float64."""

    def __init__(self, work: Work, rate: float, ctx: Context | None) -> None:
        self.dtype = np.dtype(np.float64 if ctx is None else np.float32)
        self.network = network(work, self.dtype)
        self.inputs = (
            ad.Variable("images", shape=(None, 784), dtype=self.dtype),
            ad.Variable("labels", shape=(None,), dtype=np.int64),
        )
        loss = ad.softmax_cross_entropy(self.network(self.inputs[0]), self.inputs[1])
        update = optim.SGD(rate).minimize(loss, self.network.parameters())
        self._executor = ad.Executor([loss, update], ctx=ctx)

    def step(self, batch: Split) -> float:
        """One step; its loss before the update."""
        values = (batch.images.astype(self.dtype), batch.labels)
        feeds = dict(zip(self.inputs, values))
        return float(self._executor.run(feeds, convert_to_numpy_ret_vals=True)[0])

    def state(self) -> Arrays:
        """Parameters and running statistics, in float64."""
        return {name: value.astype(np.float64) for name, value in self.network.state_dict().items()}

    def load(self, state: Arrays) -> None:
        """Takes over another training's state."""
        self.network.load_state_dict(state)


def network(work: Work, dtype: np.dtype) -> nn.Module:
    """The race's network with state of `dtype`; dense ones begin at the assignment's weights."""
    init.seed(SEED)
    made = networks.model(work)
    if work.kind == "dense":
        matrices, biases = initial_values(work.name, SEED)
        values = [array for w, b in zip(matrices, biases) for array in (w.T, b)]
        made.load_state_dict(dict(zip(made.state_dict(), values)))
    for _, module in made.named_modules():
        for name, item in vars(module).items():
            if isinstance(item, Parameter):
                setattr(module, name, Parameter(item.asnumpy(), item.name, dtype, item.trainable))
    return made


def batches(work: Work, samples: int) -> Iterator[Split]:
    """All epochs' batches: slices of the training set in its order."""
    images, labels = load_mnist().train
    for _ in range(EPOCHS):
        for start in range(0, samples, work.batch):
            rows = slice(start, min(start + work.batch, samples))
            yield Split(images[rows], labels[rows])


def curve(work: Work, proof: Proof, ctx: Context) -> dict[str, Any]:
    """Trains on both sides from equal weights and compares the losses."""
    device, reference = Training(work, proof.gentle, ctx), Training(work, proof.gentle, None)
    reference.load(device.state())
    pairs = [(device.step(b), reference.step(b)) for b in batches(work, proof.samples)]
    losses = np.array(pairs).reshape(EPOCHS, -1, 2)
    apart, means = np.abs(losses[..., 0] - losses[..., 1]), losses.mean(axis=1)
    fell = bool((means[-1] < means[0]).all())
    return {
        "ok": fell and bool(apart.max() <= BOUNDS["curve"]),
        "rate": proof.gentle,
        "steps": len(pairs),
        "largest_difference": float(apart.max()),
        "largest_difference_of_epoch_means": float(np.abs(means[:, 0] - means[:, 1]).max()),
        "largest_difference_by_epoch": apart.max(axis=1).tolist(),
        "epoch_losses": means[:, 0].tolist(),
        "epoch_losses_of_reference": means[:, 1].tolist(),
    }


def steps(work: Work, proof: Proof, ctx: Context) -> dict[str, Any]:
    """Trains on the device and holds single steps against the reference from the same state."""
    device, reference = Training(work, proof.brisk, ctx), Training(work, proof.brisk, None)
    losses: list[float] = []
    errors: list[float] = []
    shares: list[dict[str, float]] = []
    for k, batch in enumerate(batches(work, proof.samples)):
        if k % proof.every:
            losses.append(device.step(batch))
            continue
        before = device.state()
        reference.load(before)
        losses.append(device.step(batch))
        expected = reference.step(batch)
        errors.append(abs(losses[-1] - expected) / expected)
        shares.append(update_errors(before, device.state(), reference.state()))
    updates = {name: spread([each[name] for each in shares]) for name in shares[0]}
    loss, worst = spread(errors), max(each["median"] for each in updates.values())
    return {
        "ok": loss["largest"] <= BOUNDS["loss"] and worst <= proof.update,
        "rate": proof.brisk,
        "steps": len(losses),
        "compared": len(errors),
        "loss_error": loss,
        "update_error": {"median": worst, "largest": max(u["largest"] for u in updates.values())},
        "update_error_by_parameter": updates,
        "epoch_losses": np.reshape(losses, (EPOCHS, -1)).mean(axis=1).tolist(),
    }


def update_errors(before: Arrays, after: Arrays, expected: Arrays) -> dict[str, float]:
    """The error of each value's update, as a share of its largest update."""
    errors = {}
    for name, start in before.items():
        wrong = float(np.abs(after[name] - expected[name]).max())
        largest = float(np.abs(expected[name] - start).max())
        errors[name] = wrong / largest if largest else math.inf if wrong else 0.0
    return errors


def spread(errors: list[float]) -> dict[str, float]:
    """The median error and the largest."""
    return {"median": float(np.median(errors)), "largest": float(np.max(errors))}


KINDS = {"curve": curve, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=list(PROOFS))
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--device", choices=list(DEVICES), default="gpu")
    options = parser.parse_args()
    start = time.monotonic()
    work, proof = WORKS[options.work], PROOFS[options.work]
    found = KINDS[options.kind](work, proof, DEVICES[options.device])
    print(json.dumps({**found, "seconds": round(time.monotonic() - start, 1)}))

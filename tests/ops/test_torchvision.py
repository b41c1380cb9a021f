"""Layers against PyTorch's, and a step of training of ResNet18 and ResNet50 against torchvision's,
from the same state dicts.

How near float32 can come depends on the network: the step is compared with PyTorch's in float64,
and may be as far from it as PyTorch's own in float32, times a small factor. A gradient jumps where
the input of a relu changes its sign, so images are chosen that bring none as near to 0 as rounding
reaches.
"""

from __future__ import annotations

import unittest
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim
from dlsys.runtime.device import Context, cpu, gpu
from support.devices import needs_torch, needs_torchvision, require

torch: Any = import_module("torch") if find_spec("torch") else None
models: Any = import_module("torchvision.models") if torch and find_spec("torchvision") else None

BATCH, EXTENT, CLASSES, LR = 4, 64, 10, 1.0
FACTOR = 4  # of PyTorch's own error in float32
EPS = 2.0**-23  # of a value itself: twice what storing it in float32 may take away


class Result(NamedTuple):
    """Of a training step: the loss, all state afterwards, logits in inference then."""

    loss: float
    state: dict[str, np.ndarray]
    logits: np.ndarray


def arrays(module: Any) -> dict[str, np.ndarray]:
    """A torch module's state, without the counters of batches."""
    state = module.state_dict().items()
    return {name: value.numpy().copy() for name, value in state if value.ndim}


def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((BATCH, 3, EXTENT, EXTENT)).astype(np.float32)
    return images, rng.integers(0, CLASSES, BATCH)


@cache
def start(name: str) -> dict[str, np.ndarray]:
    """Random state. Normalized channels have their mean about three deviations from 0, so that few
    elements are near it. The last scale of each branch is small, as it becomes in training: with 1
    everywhere the gradients of 50 layers explode, and float32 has two digits of them.
    """
    rng = np.random.default_rng(1)
    state = arrays(getattr(models, name)(weights=None, num_classes=CLASSES))
    last = "bn2." if name == "resnet18" else "bn3."
    for key, value in state.items():
        ends_branch = last in key
        if value.ndim > 1:
            drawn = rng.standard_normal(value.shape) * np.sqrt(2 / value[0].size)
        elif key.endswith(("weight", "running_var")):
            drawn = rng.uniform(0.5, 1.5, value.shape) * (0.2 if ends_branch else 1)
        elif key.endswith("running_mean") or key == "fc.bias":
            drawn = rng.standard_normal(value.shape)
        else:  # in few channels a branch takes from the shortcut's, which would bring many near 0
            negative = 0.05 if ends_branch else 0.5
            sign = np.where(rng.uniform(size=value.shape) < negative, -1, 1)
            drawn = state[key.replace("bias", "weight")] * rng.uniform(2.5, 3.5, value.shape) * sign
        state[key] = drawn.astype(np.float32)
    return state


def torch_model(name: str, dtype: str) -> Any:
    model = getattr(models, name)(weights=None, num_classes=CLASSES)
    model.load_state_dict({k: torch.tensor(v) for k, v in start(name).items()}, strict=False)
    return model.to(getattr(torch, dtype)).train()


def before_relus(name: str, dtype: str, seed: int) -> list[np.ndarray]:
    """The inputs of all relus in training."""
    model, seen = torch_model(name, dtype), []
    for module in model.modules():
        if isinstance(module, torch.nn.ReLU):
            module.register_forward_pre_hook(lambda _, x: seen.append(x[0].numpy().copy()))
    with torch.no_grad():
        model(torch.tensor(batch(seed)[0]).to(getattr(torch, dtype)))
    return seen


@cache
def seed_of_images(name: str) -> int:
    """The first seed whose images bring no input of a relu so near to 0 that rounding might change
    its sign.
    """
    for seed in range(50):
        pairs = zip(before_relus(name, "float64", seed), before_relus(name, "float32", seed))
        if all(np.abs(x).min() > 1.5 * np.abs(x - rounded).max() for x, rounded in pairs):
            return seed
    raise AssertionError("no images are clear of all kinks")


@cache
def theirs(name: str, dtype: str) -> Result:
    model = torch_model(name, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    images, labels = map(torch.tensor, batch(seed_of_images(name)))
    images = images.to(getattr(torch, dtype))
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        logits = model.eval()(images).numpy()
    return Result(loss.item(), arrays(model), logits)


def exact_logits(name: str, state: dict[str, np.ndarray]) -> np.ndarray:
    """PyTorch's logits of inference in float64, of a state in any dtype."""
    model = torch_model(name, "float64").eval()
    model.load_state_dict({k: torch.tensor(v) for k, v in state.items()}, strict=False)
    with torch.no_grad():
        return model(torch.tensor(batch(seed_of_images(name))[0]).double()).numpy()


def ours(name: str, ctx: Context | None) -> Result:
    model = {"resnet18": nn.ResNet18, "resnet50": nn.ResNet50}[name](CLASSES)
    model.load_state_dict(start(name))
    images, labels = batch(seed_of_images(name))
    x = ad.Variable("x", shape=(None, 3, EXTENT, EXTENT), dtype=np.float32)
    y = ad.Variable("y", shape=(None,), dtype=np.int64)
    loss = ad.softmax_cross_entropy(model(x), y)
    update = optim.SGD(lr=LR, momentum=0.9).minimize(loss, model.parameters())
    value, _ = ad.Executor([loss, update], ctx).run({x: images, y: labels}, True)
    logits = ad.Executor([model.eval()(x)], ctx).run({x: images}, True)[0]
    return Result(float(value), model.state_dict(), logits)


class Steps:
    ctx: Context | None = None

    def near(self, what: str, found: Any, single: Any, exact: Any, before: Any = 0.0) -> bool:
        """Compares errors by Euclidean norm. Whether the bound is a small part of how far the value
        has moved from `before`, so that a wrong step could not be within it.
        """
        norm = np.linalg.norm
        allowed = FACTOR * norm(single - exact) + EPS * norm(exact)
        self.assertLessEqual(norm(found - exact), allowed, what)
        return bool(allowed < 0.01 * norm(exact - before))

    def check(self, name: str) -> None:
        exact, single = theirs(name, "float64"), theirs(name, "float32")
        found = ours(name, self.ctx)
        self.assertLess(abs(found.loss / exact.loss - 1), 1e-5)
        self.assertEqual(set(found.state), set(exact.state))
        telling = []
        for key, value in exact.state.items():
            before = start(name)[key].astype(np.float64)
            telling.append(self.near(key, found.state[key], single.state[key], value, before))
        self.assertGreater(np.mean(telling), 0.97)  # biases before a mean is removed hardly move
        # The state has been compared, and its errors cancel in logits by chance: the error of
        # either side's logits is that to the exact logits of its own state.
        errors = (side.logits - exact_logits(name, side.state) for side in (found, single))
        logits = (exact.logits + error for error in errors)
        self.assertTrue(self.near("logits", *logits, exact.logits))

    def test_resnet18(self) -> None:
        self.check("resnet18")

    def test_resnet50(self) -> None:
        self.check("resnet50")


class Layers:
    """Single layers: state by name, outputs and a step of training, then outputs in inference."""

    ctx: Context | None = None

    def pairs(self) -> list[tuple[Any, Any, tuple[int, ...]]]:
        t = torch.nn
        image, row = (3, 4, 7, 6), (5, 4)
        return [
            (nn.Linear(4, 3), t.Linear(4, 3), row),
            (nn.Linear(4, 3, bias=False), t.Linear(4, 3, bias=False), (2, 3, 4)),
            (nn.Conv2d(4, 6, 3, 2, 1), t.Conv2d(4, 6, 3, 2, 1), image),
            (
                nn.Conv2d(4, 6, (3, 2), (1, 2), (2, 1), 2, groups=2, bias=False),
                t.Conv2d(4, 6, (3, 2), (1, 2), (2, 1), 2, groups=2, bias=False),
                image,
            ),
            (nn.Conv2d(4, 6, 3, padding="same"), t.Conv2d(4, 6, 3, padding="same"), image),
            (
                nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2, dilation=2),
                t.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2, dilation=2),
                image,
            ),
            (nn.BatchNorm2d(4, 1e-3, 0.3), t.BatchNorm2d(4, 1e-3, 0.3), image),
            (nn.LayerNorm((7, 6), 1e-3), t.LayerNorm((7, 6), 1e-3), image),
            (nn.MaxPool2d(3, 2, 1), t.MaxPool2d(3, 2, 1), image),
            (nn.MaxPool2d(2, ceil_mode=True), t.MaxPool2d(2, ceil_mode=True), image),
            (
                nn.AvgPool2d(3, 2, 1, True, False),
                t.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
                image,
            ),
            (nn.Flatten(), t.Flatten(), image),
            (nn.LeakyReLU(0.3), t.LeakyReLU(0.3), image),
            (nn.ELU(0.5), t.ELU(0.5), image),
            (nn.GELU(), t.GELU(), image),
            (nn.GELU(True), t.GELU("tanh"), image),
            (nn.HardSwish(), t.Hardswish(), image),
            (nn.HardSigmoid(), t.Hardsigmoid(), image),
            (nn.Softplus(), t.Softplus(), image),
            (nn.LogSoftmax(), t.LogSoftmax(-1), image),
            (
                nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
                t.Sequential(t.Linear(4, 3), t.Tanh(), t.Linear(3, 2)),
                row,
            ),
        ]

    def test_layers_equal_pytorchs(self) -> None:
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        for layer, module, shape in self.pairs():
            with self.subTest(layer=repr(layer)):
                x = (2 * rng.standard_normal(shape)).astype(np.float32)
                self.compare(layer, module.double(), x, rng)

    def compare(self, layer: Any, module: Any, x: np.ndarray, rng: np.random.Generator) -> None:
        layer.load_state_dict(module.state_dict())
        inputs = torch.tensor(x).double().requires_grad_()
        wanted = module(inputs)
        weights = rng.standard_normal(wanted.shape).astype(np.float32)
        (wanted * torch.tensor(weights)).sum().backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.5 * parameter.grad

        node, w = ad.Variable("x", dtype=np.float32), ad.Variable("w", dtype=np.float32)
        y = layer(node)
        value = ad.sum_op(y * w)
        (dx,) = ad.gradients(value, [node])
        update = optim.SGD(lr=0.5).minimize(value, layer.parameters())
        step = ad.Executor([y, dx, update], self.ctx)
        found, gradient, _ = step.run({node: x, w: weights}, True)
        self.close(found, wanted.detach().numpy(), "output")
        self.close(gradient, inputs.grad.numpy(), "gradient")
        self.assertEqual(set(layer.state_dict()), set(arrays(module)))
        for name, state in arrays(module).items():
            self.close(layer.state_dict()[name], state, name)
        inference = ad.Executor([layer.eval()(node)], self.ctx).run({node: x}, True)[0]
        self.close(inference, module.eval()(inputs).detach().numpy(), "inference")

    def close(self, found: np.ndarray, wanted: np.ndarray, what: str) -> None:
        self.assertEqual(found.shape, wanted.shape, what)
        self.assertLessEqual(np.abs(found - wanted).max(), 1e-5 * np.abs(wanted).max(), what)

    def test_embedding(self) -> None:
        layer, module = nn.Embedding(6, 3), torch.nn.Embedding(6, 3)
        layer.load_state_dict(module.state_dict())
        numbers = np.array([[0, 5], [2, 5]], np.int64)
        x = ad.Variable("x", dtype=np.int64)
        found = ad.Executor([layer(x)], self.ctx).run({x: numbers}, True)[0]
        np.testing.assert_array_equal(found, module(torch.tensor(numbers)).detach().numpy())


@needs_torch
class NumpyLayers(Layers, unittest.TestCase):
    ctx = None


@needs_torch
@require(cpu(0))
class CpuLayers(Layers, unittest.TestCase):
    ctx = cpu(0)


@needs_torch
@require(gpu(0))
class GpuLayers(Layers, unittest.TestCase):
    ctx = gpu(0)


@needs_torchvision
class NumpySteps(Steps, unittest.TestCase):
    ctx = None


@needs_torchvision
@require(cpu(0))
class CpuSteps(Steps, unittest.TestCase):
    ctx = cpu(0)


@needs_torchvision
@require(gpu(0))
class GpuSteps(Steps, unittest.TestCase):
    ctx = gpu(0)

"""The networks that are measured, of PyTorch, with the weights that those of dlsys begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shared.networks import (
    CHARACTERS,
    CLASSES,
    CONTEXT,
    FEATURES,
    GPT,
    HEADS,
    LAYERS,
    LEARNING_RATE,
    LENET,
    MODELS,
    batch,
    built,
    initial,
)


def theirs(
    network: str, size: int, device: str, channels_last: bool = False, **optimizer: Any
) -> Callable[[], Any]:
    """A training step of PyTorch, eager, as a function that returns the loss."""
    model = (_convolutional(network) if network in MODELS else _dense(network)).to(device)
    images, classes = batch(size, network)
    x, y = torch.from_numpy(images).to(device), torch.from_numpy(classes).to(device)
    if network in MODELS and network != GPT and x.dim() == 2:
        x = x.reshape(size, 1, 28, 28)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, **optimizer)

    def step() -> Any:
        sgd.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(x), y.flatten())
        loss.backward()
        sgd.step()
        return loss.detach()

    return step


class Block(nn.Module):
    """Two normalized 3×3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *normalized(inputs, planes, stride=stride), *normalized(planes, planes)[:-1]
        )
        same = inputs == planes and stride == 1
        shortcut = normalized(inputs, planes, 1, stride)[:-1]
        self.shortcut = nn.Identity() if same else nn.Sequential(*shortcut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def normalized(inputs: int, outputs: int, window: int = 3, stride: int = 1) -> list[nn.Module]:
    """A convolution, batch norm and ReLU."""
    convolution = nn.Conv2d(inputs, outputs, window, stride, window // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def lenet() -> nn.Module:
    """LeNet-5."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
    )


def residual() -> nn.Module:
    """The residual network for MNIST."""
    return nn.Sequential(
        *(*normalized(1, 32), nn.MaxPool2d(2), *normalized(32, 64), Block(64, 64)),
        *(nn.MaxPool2d(2), *normalized(64, 128), Block(128, 128)),
        *(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES)),
    )


def resnet18() -> nn.Module:
    """ResNet-18."""
    stages = [Block(64, 64), Block(64, 64)]
    for planes in (128, 256, 512):
        stages += [Block(planes // 2, planes, 2), Block(planes, planes)]
    stem = [*normalized(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(
        *stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES)
    )


class TransformerBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, heads: int, features: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.norm2 = nn.LayerNorm(features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A GPT with tied embeddings, without dropout; logits (tokens, vocabulary)."""

    def __init__(
        self, vocabulary: int, context: int, layers: int, heads: int, features: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, features)
        self.positions = nn.Embedding(context, features)
        self.blocks = nn.Sequential(*(TransformerBlock(heads, features) for _ in range(layers)))
        self.norm = nn.LayerNorm(features)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions.weight))
        return functional.linear(x, self.tokens.weight).flatten(0, 1)


def gpt() -> nn.Module:
    return Gpt(CHARACTERS, CONTEXT, LAYERS, HEADS, FEATURES)


class Bottleneck(nn.Module):
    """Three normalized convolutions beside a shortcut, under the names of `dlsys.nn`."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * planes
        self.conv1, self.bn1, _ = normalized(inputs, planes, 1)
        self.conv2, self.bn2, _ = normalized(planes, planes, 3, stride)
        self.conv3, self.bn3, _ = normalized(planes, outputs, 1)
        same = inputs == outputs and stride == 1
        self.downsample = (
            None if same else nn.Sequential(*normalized(inputs, outputs, 1, stride)[:-1])
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(functional.relu(self.bn2(self.conv2(y)))))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    """ResNet-50 for 1,000 classes, under the names of `dlsys.nn`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, _ = normalized(3, 64, 7, 2)
        inputs = 64
        for k, (depth, planes) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
            blocks = []
            for j in range(depth):
                blocks.append(Bottleneck(inputs, planes, 2 if k > 1 and j == 0 else 1))
                inputs = 4 * planes
            setattr(self, f"layer{k}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            y = layer(y)
        return self.fc(y.mean(dim=(2, 3)))


def for_inference(name: str, model: Any) -> nn.Module:
    """The network of PyTorch for a `dlsys.nn` LeNet5, ResNetMNIST or ResNet50, with its state."""
    made = {"lenet": lenet, "resnet": residual, "resnet50": ResNet50}[name]()
    ours = model.state_dict()
    theirs = {k: v for k, v in made.state_dict().items() if not k.endswith("batches_tracked")}
    keys = theirs if set(theirs) == set(ours) else dict(zip(theirs, ours, strict=True))
    values = {key: torch.from_numpy(ours[keys[key] if keys is not theirs else key].copy())
              for key in theirs}  # fmt: skip
    made.load_state_dict(values, strict=False)
    return made.eval()


def _convolutional(network: str) -> nn.Module:
    kinds = {LENET: lenet, "residual": residual, "resnet18": resnet18, GPT: gpt}
    model = kinds[network]()
    ours = [parameter.asnumpy() for parameter in built(network).parameters()]
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), ours, strict=True):
            parameter.copy_(torch.from_numpy(value))
    return model


def _dense(network: str) -> nn.Module:
    """Matrices are stored (outputs, inputs), as `torch.nn.Linear` does."""
    layers: list[nn.Module] = []
    for matrix, bias in initial(network):
        linear = nn.Linear(*matrix.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(matrix.T))
            linear.bias.copy_(torch.from_numpy(bias))
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])

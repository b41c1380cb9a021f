"""Layers and models: they hold Parameters by name and build graphs.

from dlsys import nn
"""

from __future__ import annotations

from .activation import (
    ELU,
    GELU,
    HardSigmoid,
    HardSwish,
    LeakyReLU,
    LogSoftmax,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from .container import Residual, Sequential
from .layers import Conv2d, ConvTranspose2d, Embedding, Flatten, Linear, Reshape
from .models.dense import MLP, LogisticRegression
from .models.mnist import LeNet5, ResNetMNIST
from .models.perceptron import Perceptron
from .models.resnet import BasicBlock, Bottleneck, ResNet, ResNet18, ResNet50
from .module import Differences, Module
from .norm import BatchNorm2d, LayerNorm
from .pool import AvgPool2d, GlobalAvgPool, GlobalMaxPool, MaxPool2d
from .regularize import Dropout
from .summary import Call, Row, Summary

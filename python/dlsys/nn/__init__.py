"""Layers and models: they hold Parameters by name and build graphs.

>>> from dlsys import nn
>>> nn.Linear(2, 3)
Linear(2, 3)
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
from .attention import (
    LearnedPositions,
    MultiheadAttention,
    SinusoidalPositions,
    TransformerBlock,
    TransformerEncoderLayer,
)
from .container import Residual, Sequential
from .experts import MixtureOfExperts
from .images import Identity, PixelShuffle, PixelUnshuffle, Unflatten, Upsample
from .interop import load_torch_state_dict, to_torch_state_dict
from .layers import Conv2d, ConvTranspose2d, Embedding, Flatten, Linear, Reshape
from .models.cifar import ResNetCIFAR
from .models.decoding import Decoder, Sampling
from .models.dense import MLP, LogisticRegression
from .models.efficientnet import EfficientNetLite
from .models.gpt import GPT, GPTConfig, decay_groups
from .models.mnist import LeNet5, ResNetMNIST
from .models.perceptron import Perceptron
from .models.resnet import BasicBlock, Bottleneck, ResNet, ResNet18, ResNet50
from .models.style import StyleNet
from .models.superres import ESPCN, SRCNN
from .models.vit import VisionTransformer
from .module import Differences, HookHandle, Module
from .norm import (
    BatchNorm1d,
    BatchNorm2d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    LayerNorm,
    RMSNorm,
)
from .pool import AvgPool2d, GlobalAvgPool, GlobalMaxPool, MaxPool2d
from .recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from .regularize import Dropout
from .sequence import AvgPool1d, Conv1d, MaxPool1d
from .summary import Call, Row, Summary

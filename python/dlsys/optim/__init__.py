"""Optimizers and schedules: they build update nodes, so a training step is a graph like any other.

>>> from dlsys import optim
>>> w = ad.Parameter(np.ones(3, np.float32))
>>> rate = optim.Warmup(optim.Cosine(1e-3, 10_000), 500)
>>> update = optim.AdamW(rate).minimize((w * w).sum(), [w])  # a node for an Executor
"""

from .algorithms import SGD, Adagrad, Adam, AdamW, Lion, RMSprop
from .ema import EMA
from .lbfgs import LBFGS, Minimum
from .optimizer import Optimizer, effects_of
from .schedule import (
    Constant,
    Cosine,
    Exponential,
    MultiStep,
    OneCycle,
    Polynomial,
    ReduceOnPlateau,
    Schedule,
    Step,
    WarmRestarts,
    Warmup,
)

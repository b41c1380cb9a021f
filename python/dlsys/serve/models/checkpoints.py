"""Checkpoints of dlsys as programs that can be served."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ... import functional as F
from ... import train
from ...apps import trained
from ...autodiff import Node
from ...data import DataDescription
from ...errors import DataError
from ...inference import infer
from ...nn import Module
from ...runtime.device import Context
from ..protocol.inference import Signature
from ..protocol.tensors import DATATYPES, TensorSpec
from .program import Classifier, Program, buckets_of, reader_of, several, warm


def checkpoint_program(path: Path, ctx: Context | None, largest: int) -> Program:
    """The program of a checkpoint, or of the best one in a run's folder. Its input is what the
    model was trained on before it was normalized, such as pixels; its output is the probability of
    each class, or what the model makes where there are no classes.

    ctx: where it runs. largest: samples of a batch. DataError for a file that is no checkpoint, or
    that does not say what its model takes.
    """
    best = path / "best.safetensors"
    model = _read(best if best.exists() else path)
    about = model.trained_on
    if about is None:
        raise DataError(
            f"{path} does not say what its model was trained on, so that nobody knows what it "
            "takes: train it with train.fit, or serve its ONNX export"
        )
    program = infer(Normalized(model, about), ctx=ctx, buckets=buckets_of(largest))
    made = several(program(np.zeros((1, *about.shape), about.dtype)))
    name = "probabilities" if about.classes else "output"
    names = [name] if len(made) == 1 else [f"{name}{k}" for k in range(len(made))]
    inputs = (TensorSpec("input", DATATYPES[np.dtype(about.dtype)], (-1, *about.shape)),)
    outputs = tuple(
        TensorSpec(name, DATATYPES[y.dtype], (-1, *y.shape[1:])) for name, y in zip(names, made)
    )

    def run(arrays: list[np.ndarray]) -> list[np.ndarray]:
        return several(program(*arrays))

    warm(run, inputs, largest)
    read = reader_of(about)
    return Program(
        "dlsys",
        Signature(inputs, outputs, about.classes),
        run,
        largest,
        classifier=read and Classifier(read, lambda pixels: pixels, model.to(ctx), logits=False),
    )


def _read(file: Path) -> Module:
    """The model of a checkpoint. Those of `dlsys mnist` may be older than `trained_on`."""
    states = train.load(file).header.get("callbacks") or []
    if any(isinstance(s, dict) and s.get("name") == trained.Chosen.__name__ for s in states):
        return trained.load_model(file)[1]
    return train.load_model(file)


class Normalized(Module):
    """A model behind the normalization of its training data, which clients then need not know, and
    before the softmax of its logits where it has classes.

    model: takes normalized samples. about: its `trained_on`.
    """

    def __init__(self, model: Module, about: DataDescription) -> None:
        self.model, self.classes = model, bool(about.classes)
        kind = np.dtype(about.dtype)
        self.affine = None
        if kind.kind == "f" or kind == np.uint8:  # other integers are tokens
            column = (-1, *(1 for _ in about.shape[1:])) if len(about.mean) > 1 else ()
            self.affine = tuple(x.reshape(column) for x in about.normalization.affine(kind))

    def forward(self, x: Node) -> Node:
        """x (N, …) to probabilities (N, classes), or to what the model makes."""
        if self.affine is not None:
            scale, shift = self.affine
            x = F.astype(x, np.float32) * scale + shift
        made = self.model(x)
        return F.softmax(made, axis=1) if self.classes else made

"""Run an ONNX file on arrays of an .npz file, or on random ones, and say what comes out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A file, its inputs and outputs, and the device."""
    parser.add_argument("file", type=Path, help="the ONNX file")
    parser.add_argument("--inputs", type=Path, help=".npz with an array by each input's name")
    parser.add_argument("--out", type=Path, help=".npz that the outputs are written to")
    parser.add_argument("--device", choices=("numpy", "cpu", "gpu"), default="numpy")


def run(options: argparse.Namespace) -> None:
    """Prints a line for each output. DataError for files that do not fit."""
    from ...runtime.device import cpu, gpu
    from ..importer import load

    model = load(options.file)
    ctx = {"numpy": None, "cpu": cpu(), "gpu": gpu()}[options.device]
    made = model.run(_feeds(model, options.inputs), ctx)
    names = [value.name for value in model.outputs]
    for name, y in zip(names, made):
        print(f"{name}: {_described(y)}")
    if options.out is not None:
        arrays: Any = {n: y for n, y in zip(names, made) if isinstance(y, np.ndarray)}
        np.savez(options.out, **arrays)


def _feeds(model: Any, path: Path | None) -> dict[str, np.ndarray]:
    """The arrays of a file; without one standard normal floats and zeros, free extents 1."""
    if path is not None:
        try:
            with np.load(path) as file:
                return dict(file)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: no .npz file of arrays ({error})") from None
    draw, feeds = np.random.default_rng(0), {}
    for name, dtype, shape in model.inputs:
        if dtype is None or shape is None:
            raise DataError(f"input {name} has no shape in the model; give --inputs")
        extents = [n if isinstance(n, int) else 1 for n in shape]
        values = draw.standard_normal(extents) if dtype.kind == "f" else np.zeros(extents)
        feeds[name] = values.astype(dtype)
    return feeds


def _described(y: Any) -> str:
    if not isinstance(y, np.ndarray):
        return "empty" if y is None else f"a sequence of {len(y)}"
    numbers = y.size and y.dtype.kind in "fiub"
    return f"{y.dtype} {y.shape}" + (f", from {y.min():.6g} to {y.max():.6g}" if numbers else "")

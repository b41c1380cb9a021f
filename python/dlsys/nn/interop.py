"""Weights to and from PyTorch, by the names that both have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dtypes import bfloat16
from ..errors import DataError, how_to_install
from .module import COUNTER, Differences, Module, paths


def to_torch_state_dict(model: Module) -> dict[str, Any]:
    """The model's parameters and buffers as PyTorch tensors on the CPU, which a PyTorch model of
    the same structure loads strictly.

    State that only dlsys has, such as what `Dropout` draws by, is left out; tied state has all of
    its names; beside running statistics stands PyTorch's `num_batches_tracked`, which is 0 (it
    matters without a momentum only). DataError where PyTorch is not installed.
    """
    torch = _torch()
    lacking = _lacking(model)
    made = {}
    for name, state in paths(model):
        if name in lacking or name in made:
            continue
        tensor = torch.from_numpy(state.asnumpy())
        made[name] = tensor.to(torch.bfloat16) if state.dtype is bfloat16 else tensor
        if name.split(".")[-1] == "running_var":
            made[name.removesuffix("running_var") + COUNTER] = torch.tensor(0)
    return made


def load_torch_state_dict(model: Module, source: Any, strict: bool = True) -> Differences:
    """Takes over the weights of a PyTorch model, or of its state_dict, by name.

    Works as `Module.load_state_dict`, of which it has the errors, but state that only dlsys has may
    be missing and stays as it is. Tensors may be on any device, and of bfloat16. source: the
    PyTorch module, or its state_dict.
    """
    values = source.state_dict() if hasattr(source, "state_dict") else source
    if not isinstance(values, Mapping):
        raise DataError(
            f"load_torch_state_dict: got {type(source).__name__}, expected a PyTorch model or its "
            "state_dict"
        )
    lacking = _lacking(model)
    kept = {name: p.asnumpy() for name, p in model.named_state() if name in lacking}
    return model.load_state_dict(kept | {name: _array(v) for name, v in values.items()}, strict)


def _lacking(model: Module) -> set[str]:
    """The names of the state that PyTorch's modules do not have."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module.torch_lacks
    }


def _array(value: Any) -> np.ndarray:
    """A tensor, or what numpy takes, as an array; float32 where numpy has not its dtype."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    tensor = value.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise DataError(
            "to_torch_state_dict makes PyTorch tensors, and PyTorch is not installed: "
            f"{how_to_install('torch')}"
        ) from error
    return torch

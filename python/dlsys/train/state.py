"""State: every Parameter that a training graph reads or changes, by its name in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import autodiff as ad
from ..dtypes import bfloat16, host
from ..errors import DataError


class State:
    """The Parameters of a model (`model.<name>`), of its optimizer (`optimizer.<name>`), and what
    else the graph reads (`graph.<number>.<name>`: totals, steps of random nodes), without resident
    data.
    """

    def __init__(self, model: Any, optimizer: Any, data: Any, graph: ad.Executor) -> None:
        named = {f"model.{name}": p for name, p in model.named_state()}
        named |= {f"optimizer.{name}": p for name, p in optimizer.named_state()}
        order = graph.topo_order
        written = {node.inputs[k] for node in order for k in node.op.writes}
        resident = set(ad.find_topo_sort(data.inputs())) - written
        known = set(named.values())
        rest = [
            node
            for node in order
            if isinstance(node, ad.Parameter)
            and node not in known
            and node not in resident
            and not node.derived
        ]
        named |= {f"graph.{k}.{parameter.name}": parameter for k, parameter in enumerate(rest)}
        self.parameters: dict[str, ad.Parameter] = named
        self._random = [node for node in order if node.op.random and "node" in node.attrs]
        # A value that is infinite from the start, such as a mask, is not watched.
        self._watched = [name for name, value in self.read().items() if _finite(value)]

    def read(self) -> dict[str, np.ndarray]:
        """A copy of all values; waits for the device."""
        return {name: parameter.asnumpy() for name, parameter in self.parameters.items()}

    @property
    def narrow(self) -> set[str]:
        """The names of the values that are bfloat16, which `read` gives as float32."""
        return {name for name, p in self.parameters.items() if p.dtype is bfloat16}

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Replaces all values."""
        for name, parameter in self.parameters.items():
            parameter.set(values[name])

    def broken(self, values: Mapping[str, np.ndarray]) -> str | None:
        """The name of a value that has become NaN or infinite, if there is one."""
        return next((name for name in self._watched if not _finite(values[name])), None)

    def check(self, what: str, values: Mapping[str, np.ndarray]) -> None:
        """Raises DataError, naming all of them, unless the values are those of this state."""
        missing = [name for name in self.parameters if name not in values]
        foreign = [name for name in values if name not in self.parameters]
        other = [
            f"{name} {values[name].dtype} {values[name].shape} instead of {p.dtype} {p.saved_shape}"
            for name, p in self.parameters.items()
            if name in values
            and (
                values[name].shape != p.saved_shape
                or not np.can_cast(values[name].dtype, host(p.dtype), "same_kind")
            )
        ]
        faults = {"lacks": missing, "has besides": foreign, "has": other}
        texts = [f"it {verb} {_listed(names)}" for verb, names in faults.items() if names]
        if texts:
            raise DataError(f"{what} is of another model or optimizer: {'; '.join(texts)}")

    # ---- random keys ----
    def random_keys(self) -> list[list[int]]:
        """The seed and id of each random node, in the order of the graph."""
        return [[node.attrs["seed"], node.attrs["node"]] for node in self._random]

    def set_random_keys(self, what: str, keys: list[list[int]]) -> None:
        """Gives the random nodes the keys of a graph like it. DataError when counts differ."""
        if len(keys) != len(self._random):
            raise DataError(
                f"{what} is of another model: it draws random numbers in {len(keys)} places, this "
                f"one in {len(self._random)}"
            )
        for node, (seed, number) in zip(self._random, keys):
            node.attrs.update(seed=seed, node=number)


def _finite(value: np.ndarray) -> bool:
    return value.dtype.kind != "f" or bool(np.isfinite(value).all())


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

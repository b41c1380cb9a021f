"""A call of an ONNX operator as rules see it: attributes, version, and the graph around it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import DataError


def key(*items: Any) -> tuple[Any, ...]:
    """An index of several axes."""
    return items


class Call:
    """One node of a graph that is being walked.

    node: the NodeProto. attrs: its attributes by name. version: of the operator set. graph_mode:
    True where the values are Nodes. walker: runs subgraphs.
    """

    def __init__(
        self, node: Any, attrs: dict[str, Any], version: int, walker: Any, scope: Any
    ) -> None:
        self.node, self.attrs, self.version = node, attrs, version
        self.walker, self.scope = walker, scope

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or its default; text as str."""
        value = self.attrs.get(name, default)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def words(self, name: str) -> list[str]:
        """An attribute of several texts."""
        return [w.decode("utf-8", "replace") for w in self.attrs.get(name, ())]

    def axes(self, given: Any) -> tuple[int, ...] | None:
        """Axes from an attribute or, in newer versions, an input: None for neither."""
        found = self.attrs.get("axes") if given is None else np.asarray(given).ravel().tolist()
        return None if found is None or len(found) == 0 else tuple(int(a) for a in found)

    @property
    def where(self) -> str:
        """What messages call it."""
        return f"{self.node.op_type} {self.node.name!r}" if self.node.name else self.node.op_type

    def error(self, text: str) -> DataError:
        """An error that names the node, ready to raise."""
        return DataError(f"ONNX {self.where}: {text}")

    @property
    def count(self) -> int:
        """The number of outputs that anybody may read."""
        return len(self.node.output)

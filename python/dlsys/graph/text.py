"""A graph as readable text: a line a node, inputs before users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .node import Node, find_topo_sort
from .spec import Spec


def text(graph: Node | Iterable[Node], specs: Mapping[Node, Any] | None = None) -> str:
    """The graph behind one node or several, such as

    ```
    x        = Variable()
    w        = Parameter()                  float32 (784, 10)
    matmul.2 = matmul(x, w)                 model.py:7
    ```

    Shapes are shown where they are known, or taken from `specs` (see `Executor.infer_shape`).
    """
    nodes = find_topo_sort([graph] if isinstance(graph, Node) else graph)
    rows = [_row(node, (specs or {}).get(node, node.spec)) for node in nodes]
    widths = [max((len(row[k]) for row in rows), default=0) for k in range(3)]
    lines = [
        f"{name:<{widths[0]}} = {call:<{widths[1]}}  {spec:<{widths[2]}}  {where}".rstrip()
        for name, call, spec, where in rows
    ]
    return "\n".join(lines)


def _row(node: Node, spec: Any) -> tuple[str, str, str, str]:
    arguments = [x.name for x in node.inputs]
    for key, value in node.attrs.items():
        if isinstance(value, (int, float, str, tuple, type(None))):
            arguments.append(f"{key}={value}")
    shown = [spec] if isinstance(spec, Spec) else list(spec or ())
    return (
        node.name,
        f"{node.op.name}({', '.join(arguments)})",
        "; ".join(f"{s.dtype or '?'} {s.shape}" for s in shown),
        node.where,
    )

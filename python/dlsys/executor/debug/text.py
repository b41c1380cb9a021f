"""A graph as readable text: a line a node, inputs before users; and what passes make of one."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from ...graph.node import Node, find_topo_sort
from ...graph.spec import Spec
from ...passes.pipeline import Pass


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
    lines = [f"{name} = {call}  {spec}  {where}" for name, call, spec, where in columns(rows)]
    return "\n".join(line.rstrip() for line in lines)


def pass_printer(
    passes: Sequence[Pass], fetches: Sequence[Node], specs: Mapping[Node, Any]
) -> Callable[[Pass, Sequence[Node]], None]:
    """Prints a graph before all passes, and by what it returns after each that changed it."""
    before = text(fetches, specs)
    print(f"# passes: {', '.join(one.name for one in passes)}")
    print(f"# before {passes[0].name}\n{before}")

    def print_after(one: Pass, fetches: Sequence[Node]) -> None:
        nonlocal before
        after = text(fetches)
        if after != before:
            print(f"# after {one.name}\n{after}")
        before = after

    return print_after


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[list[str]]:
    """Rows of texts, each padded to the width of its column: words to the left, the columns
    `right`, which have numbers, to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        [
            text.rjust(width) if k in right else text.ljust(width)
            for k, (text, width) in enumerate(zip(row, widths))
        ]
        for row in rows
    ]


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

"""pipeline: the passes that every graph goes through, in one ordered list, each with its condition.

The passes below are always there. Fusions (dlsys/fusion) join them, each at the position that it
declares; with any of them a graph computes the same values, and without them it is only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..graph.node import Node
from ..runtime.target import Target
from .fresh_draws import draw_anew
from .precision import set_precision
from .simplify import simplify


class Options(NamedTuple):
    """The target of a graph, and how it is to run there.

    specs: shape and dtype of each node of the user's graph, in topological order. draws: the state
    that counts runs which draw random numbers, if the graph draws any. one_by_one: operators keep
    their names, so that a NaN can be traced to one of them.
    """

    target: Target
    precision: str = "fp32"
    one_by_one: bool = False
    draws: Node | None = None
    specs: Mapping[Node, Any] = MappingProxyType({})


Run = Callable[[Sequence[Node], Options], list[Node]]


class Pass(NamedTuple):
    """A rewrite of a graph: the fetches over another graph with the same values.

    Passes run in the order of `position`, each where the target has the kernels that it `needs` and
    `when` holds.
    """

    name: str
    run: Run
    position: int
    needs: tuple[str, ...] = ()
    when: Callable[[Options], bool] = lambda options: True

    def applies(self, options: Options) -> bool:
        """True where the pass runs under these options."""
        return all(map(options.target.has, self.needs)) and self.when(options)


PASSES = (
    Pass(
        "simplify",
        lambda fetches, options: simplify(options.specs, fetches, options.target),
        position=0,
    ),
    Pass(
        "fresh_draws",
        lambda fetches, options: draw_anew(fetches, options.draws),  # type: ignore[arg-type]
        position=1,
        when=lambda options: options.draws is not None,
    ),
    # Fusions stand here, at positions 10 to 90.
    Pass(
        "precision",
        lambda fetches, options: set_precision(fetches, options.precision),
        position=100,
        when=lambda options: options.target.native,
    ),
)


def arrange(fusions: Iterable[Pass], options: Options) -> list[Pass]:
    """All passes that run under these options, in their order."""
    return [
        one for one in sorted((*PASSES, *fusions), key=lambda p: p.position) if one.applies(options)
    ]

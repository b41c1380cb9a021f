"""pipeline: the passes that every graph goes through, in one ordered list, each with its condition.

The passes below are always there. Fusions (dlsys/fusion) join them by the place that each declares;
with any of them a graph computes the same values, and without them it is only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import SettingError
from ..graph.node import Node
from ..graph.text import text
from ..runtime.target import Target
from .fresh_draws import draw_anew
from .precision import set_precision
from .simplify import simplify


@dataclass(frozen=True)
class Options:
    """The target of a graph, and how it is to run there.

    specs: shape and dtype of each node of the user's graph, in topological order. draws: the state
    that counts runs which draw random numbers, if the graph draws any. one_by_one: operators keep
    their names, so that a NaN can be traced to one of them.
    """

    target: Target
    precision: str = "fp32"
    one_by_one: bool = False
    draws: Node | None = None
    specs: Mapping[Node, Any] = field(default_factory=dict)


Run = Callable[[Sequence[Node], Options], list[Node]]


@dataclass(frozen=True)
class Pass:
    """A rewrite of a graph: the fetches over another graph with the same values.

    Passes run in the order of `place`, each where the target has the kernels that it `needs` and
    `when` holds.
    """

    name: str
    run: Run
    place: int
    needs: tuple[str, ...] = ()
    when: Callable[[Options], bool] = lambda options: True

    def applies(self, options: Options) -> bool:
        """True where the pass runs under these options."""
        return all(map(options.target.has, self.needs)) and self.when(options)


def _simplify(fetches: Sequence[Node], options: Options) -> list[Node]:
    return simplify(options.specs, options.specs, fetches, options.target)


def _draw_anew(fetches: Sequence[Node], options: Options) -> list[Node]:
    assert options.draws is not None
    return draw_anew(fetches, options.draws)


def _set_precision(fetches: Sequence[Node], options: Options) -> list[Node]:
    set_precision(fetches, options.precision)
    return list(fetches)


PASSES = (
    Pass("simplify", _simplify, place=0),
    Pass("fresh_draws", _draw_anew, place=1, when=lambda options: options.draws is not None),
    # Fusions stand here, at places 10 to 90.
    Pass("precision", _set_precision, place=100, when=lambda options: options.target.native),
)


def arrange(fusions: Iterable[Pass], options: Options) -> list[Pass]:
    """All passes that run under these options, in their order."""
    return [
        one for one in sorted((*PASSES, *fusions), key=lambda p: p.place) if one.applies(options)
    ]


def select(fusions: Sequence[Pass], setting: str) -> list[Pass]:
    """The fusions that a setting of DLSYS_FUSION leaves: `off`, `all`, the names of some, or those
    of others that are left out, as in `-pointwise,-mlp_head`. Raises SettingError for a name that
    there is not.
    """
    if setting in ("all", "off"):
        return list(fusions) if setting == "all" else []
    names = [name.strip() for name in setting.split(",")]
    left_out = {name[1:] for name in names if name.startswith("-")}
    known = {fusion.name for fusion in fusions}
    mixed = len(left_out) not in (0, len(set(names)))
    if mixed or not {name.removeprefix("-") for name in names} <= known:
        raise SettingError(
            f"DLSYS_FUSION={setting}: expected off, all, or names among "
            f"{', '.join(sorted(known))}, either all with a minus or none"
        )
    return [one for one in fusions if (one.name not in left_out if left_out else one.name in names)]


def run_passes(
    fusions: Sequence[Pass],
    fetches: Sequence[Node],
    options: Options,
    show: Callable[[str], object] | None = None,
) -> list[Node]:
    """The fetches over the graph that a target runs. `show` gets the graph as text, before all
    passes and after each that changed it.
    """
    passes = arrange(fusions, options)
    if show is not None:
        show(f"# passes: {', '.join(one.name for one in passes)}")
        before = text(fetches, options.specs)
        show(f"# before {passes[0].name}\n{before}")
    for one in passes:
        fetches = one.run(fetches, options)
        if show is not None:
            after = text(fetches)
            if after != before:
                show(f"# after {one.name}\n{after}")
            before = after
    return list(fetches)

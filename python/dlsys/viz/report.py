"""One page that shows a training run: numbers, curves, filters, mistakes, graph, memory, times.

report = viz.report.Report("MLP on MNIST", settings={"epochs": 10}, history=records, model=model)
viz.report.write("out.html", report)
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..describe import described, drawn_by
from ..errors import DlsysError
from ..executor.debug.text import text
from ..executor.plan.memory import Plan
from ..files import replacing
from ..graph.node import Node, find_topo_sort
from ..runtime.library import load
from . import page
from .classification import confusion_matrix, decision_boundary
from .curves import curves
from .figure import svg_of
from .graph.drawing import graph_svg
from .images import captioned, filters, image_inputs, mistakes
from .layers import layer_activations
from .memory import memory_plan
from .page import Section
from .times import Timed, operator_times

_TEXT_LIMIT = 400  # nodes or steps up to which the page also has the graph and the plan as text

_OF_TRAINING = """\
Training figures are means over an epoch, while the weights change; validation figures are those of
the weights at its end."""
_OF_FILTERS = """\
The weights of the first layer that looks at the image. Red is positive, blue negative, white 0;
filters of three channels are in their colors."""
_OF_ACTIVATIONS = """\
The activations of each layer for one image: planes with a scale of their own, vectors as bars."""
_OF_CONFUSION = """\
How often each class (row) was taken for each (column). Green is right; the stronger the orange, the
more frequent the mistake."""
_OF_MISTAKES = "Wrong answers, those first that were given with the highest probability."
_OF_EVIDENCE = """\
Where the pixels lie that speak for each answer: Grad-CAM for networks with convolutions, else the
sizes of the gradients of pixels. Yellow is the strongest."""
_OF_GRAPH = """\
From top to bottom: what is fed and kept, the layers up to the loss, backward through their
gradients, the updates. A pointer over a box shows its node and the line that made it."""
_OF_MEMORY = """\
Each rectangle is a buffer, as wide as the steps that it lives for and as high as its bytes. Buffers
that do not live at the same time share memory."""
_OF_OPERATORS = """\
Each step timed by itself. GB/s and GFLOP/s count what an operator has to move and compute at
least."""


@dataclass(repr=False)
class Mistakes:
    """Images with what a model made of them; see `viz.mistakes` for the shapes."""

    images: Any
    labels: Any
    predictions: Any
    probabilities: Any
    __repr__ = described


@dataclass(repr=False)
class Evidence:
    """Pictures (n, h, w, 4) uint8 of `explain.overlay`, a caption for each, and the method."""

    pictures: Any
    captions: Sequence[str]
    method: str
    __repr__ = described


@dataclass(repr=False)
class Points:
    """Points of the plane (n, 2) and their labels, for a model that classifies them."""

    points: Any
    labels: Any
    __repr__ = described


@dataclass(repr=False)
class Report:
    """The content of the page; every part but the title may be missing, and its section with it.

    title: the heading. numbers: the main figures, such as test accuracy, in large type; shares of 1
    under a name with "accuracy" in it are printed as percent. command: the command line that made
    the run. settings: how it was made.
    environment: where; the default asks this process. history: one record an epoch, and `fine`
    within epochs, see `viz.curves`. model: an `nn.Module`, for its summary, filters and
    activations; `image` is an input without batch axis that it is shown. confusion: counts
    (classes, classes). mistakes, evidence, points: see there. classes: names of the classes. graph:
    the nodes of a training step; shapes: see `viz.graph_svg`. plan: from `Executor.plan`; its graph
    is then the one that is drawn. profile: a `profile.Profile`. counters: anything that prints,
    such as `profile.counters(ctx)`.
    """

    title: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    settings: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None
    history: Sequence[Mapping[str, Any]] = ()
    fine: Sequence[Mapping[str, Any]] = ()
    model: Any = None
    image: Any = None
    confusion: Any = None
    mistakes: Mistakes | None = None
    evidence: Evidence | None = None
    points: Points | None = None
    classes: Sequence[str] | None = None
    graph: Sequence[Node] | None = None
    shapes: Mapping[Node, Any] | None = None
    plan: Plan | None = None
    profile: Timed | None = None
    counters: Any = None
    __repr__ = described
    _repr_html_ = drawn_by("report_html")


def write(path: str | os.PathLike, report: Report) -> None:
    """Writes the report as one HTML file that loads nothing from elsewhere; an earlier file is
    replaced only by a complete one.

    Raises DlsysError where a part needs matplotlib (`pip install matplotlib`) and it is missing.
    """
    content = html(report).encode()
    with replacing(Path(path)) as file:
        file.write(content)


def html(report: Report) -> str:
    """The report as text."""
    made = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    lead = f"<p>dlsys {__version__}, {made}</p>" + page.numbers(
        {name: _formatted(name, value) for name, value in report.numbers.items()}
    )
    return page.document(report.title, lead, list(_sections(report)))


def environment() -> dict[str, str]:
    """The environment of this process: versions and the processor."""
    found = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
    }
    try:
        found["native library"] = load().version
    except DlsysError as error:
        found["native library"] = str(error)
    return found


def _sections(report: Report) -> Iterator[Section]:
    where = environment() if report.environment is None else report.environment
    tables = page.pairs("settings", report.settings) + page.pairs("environment", where)
    typed = f"<pre>{page.text_of(report.command)}</pre>" if report.command else ""
    columns = f'<div class="columns">{tables}</div>' if tables else ""
    yield Section("run", "Run", typed + columns)
    for heading, needs, body, lead in (
        ("Training", "history", _training, _OF_TRAINING),
        ("Model", "model", _model, ""),
        ("Learned filters", "model", _filters, _OF_FILTERS),
        ("Activations", "model image", _activations, _OF_ACTIVATIONS),
        ("Confusion matrix", "confusion", _confusion, _OF_CONFUSION),
        ("Worst mistakes", "mistakes", _mistakes, _OF_MISTAKES),
        ("Evidence", "evidence", _evidence, _OF_EVIDENCE),
        ("Decision boundary", "points model", _boundary, ""),
        ("Graph", "", _graph, _OF_GRAPH),
        ("Memory plan", "plan", _memory, _OF_MEMORY),
        ("Operators", "profile", _operators, _OF_OPERATORS),
        ("Device", "counters", _device, ""),
    ):
        if all(getattr(report, name) is not None for name in needs.split()):
            yield Section(body.__name__[1:], heading, body(report), lead)


def _training(report: Report) -> str:
    if not report.history:
        return ""
    figures = [name for r in report.history for name, value in r.items() if np.ndim(value) == 0]
    names = list(dict.fromkeys(figures))
    names.sort(key=lambda name: name != "epoch")
    rows = [[_formatted(name, record.get(name, "")) for name in names] for record in report.history]
    drawn = page.picture(svg_of(curves(report.history, report.fine), "curves"))
    return drawn + page.table([name.replace("_", " ") for name in names], rows)


def _model(report: Report) -> str:
    if report.image is not None:
        shape = (1, *np.shape(report.image))
        return f"<pre>{page.text_of(report.model.summary(shape))}</pre>"
    rows = [(name, str(p.shape), f"{np.prod(p.shape):,.0f}") for name, p in _parameters(report)]
    return page.table(("parameter", "shape", "elements"), rows)


def _filters(report: Report) -> str:
    """The first Parameter that can be seen: filters, or a matrix over the pixels of an image."""
    extents = tuple(n for n in np.shape(report.image) if n > 1)
    shape = extents if len(extents) > 1 else None
    for name, parameter in _parameters(report):
        seen = len(parameter.shape) == 2 and image_inputs(parameter.shape, shape)
        if seen or len(parameter.shape) == 4:
            figure = filters(parameter, shape, title=f"{name}  {parameter.shape}")
            return page.picture(svg_of(figure, "filters"))
    return ""


def _activations(report: Report) -> str:
    return page.picture(svg_of(layer_activations(report.model, report.image), "activations"))


def _confusion(report: Report) -> str:
    return page.picture(svg_of(confusion_matrix(report.confusion, report.classes), "confusion"))


def _mistakes(report: Report) -> str:
    given: Any = report.mistakes
    figure = mistakes(
        given.images, given.labels, given.predictions, given.probabilities, classes=report.classes
    )
    return page.picture(svg_of(figure, "mistakes"))


def _evidence(report: Report) -> str:
    given: Any = report.evidence
    figure = captioned(np.asarray(given.pictures), given.captions, given.method)
    return page.picture(svg_of(figure, "evidence"))


def _boundary(report: Report) -> str:
    given: Any = report.points
    figure = decision_boundary(report.model, given.points, given.labels, report.classes)
    return page.picture(svg_of(figure, "boundary"))


def _graph(report: Report) -> str:
    body = ""
    if report.plan is not None:
        body = "<p>As it runs, after the rewrites.</p>"
        body += page.picture(graph_svg(report.plan), zoom=True)
    elif report.graph:
        body = page.picture(graph_svg(report.graph, report.shapes), zoom=True)
    count = len(find_topo_sort(report.graph or []))
    if 0 < count <= _TEXT_LIMIT:
        body += page.folded(f"the graph as it was built, {count} nodes", text(report.graph or []))
    return body


def _memory(report: Report) -> str:
    plan: Any = report.plan
    drawn = page.picture(memory_plan(plan), zoom=True)
    if len(plan.steps) > _TEXT_LIMIT:
        return drawn
    return drawn + page.folded("the plan step by step", str(plan))


def _operators(report: Report) -> str:
    profile: Any = report.profile
    rows = profile.rows()
    if not rows:
        return ""
    total = sum(row.ms for row in rows)
    cells = [
        (
            row.name,
            f"{row.calls:,}",
            f"{row.ms:,.3f}",
            f"{row.ms / (total or 1.0):.1%}",
            f"{row.gigabytes_per_second:,.1f}",
            f"{row.gigaflops:,.1f}",
        )
        for row in rows
    ]
    calls = sum(row.calls for row in rows)
    totals = (f"total of {profile.runs:,} runs", f"{calls:,}", f"{total:,.3f}", "", "", "")
    head = ("operator", "calls", "ms", "share", "GB/s", "GFLOP/s")
    return page.picture(operator_times(profile)) + page.table(head, cells, totals)


def _device(report: Report) -> str:
    return f"<pre>{page.text_of(report.counters)}</pre>"


def _parameters(report: Report) -> list[tuple[str, Any]]:
    return list(report.model.named_parameters())


def _formatted(name: str, value: Any) -> str:
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float, np.number)):
        return str(value)
    if isinstance(value, (int, np.integer)):
        return f"{value:,}"
    if "accuracy" in name and 0 <= value <= 1:
        return f"{value:.2%}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.5g}"

"""Graphs, plans and executors in notebooks."""

from __future__ import annotations

from ...describe import counted
from ...executor.executor import Executor
from ...executor.plan.memory import Plan
from ...graph.node import Node, find_topo_sort
from ...ops.leaf import ANYWHERE, Parameter
from ..graph.drawing import graph_svg
from ..memory import memory_plan
from ..page import folded, picture
from .arrays import array_html
from .frame import framed, sentence

_NODES = 120  # of a graph that is drawn node by node
_STEPS = 400  # of a plan that is also shown as text


def graph_html(node: Node) -> str:
    """A node with the graph behind it; a Parameter with its value."""
    if isinstance(node, Parameter):
        return _parameter_html(node)
    count = len(find_topo_sort([node]))
    note = ""
    if count > _NODES:
        note = (
            f"The graph has {count:,} nodes, too many to draw one by one: each box is a piece of "
            "it. viz.graph_svg draws more with limit=."
        )
    drawn = picture(graph_svg(node, limit=_NODES), zoom=count > 20)
    return framed(type(node).__name__, node, sentence(note), drawn)


def _parameter_html(parameter: Parameter) -> str:
    name = f"{type(parameter).__name__} {parameter.name}"
    held, home = parameter.storage, parameter.home
    if held is not None:
        home = held.ctx
    device = "any device" if home is ANYWHERE else home or "numpy"
    value = parameter.asnumpy()
    return array_html(value, name, parameter.dtype, device, parameter.trainable)


def plan_html(plan: Plan) -> str:
    """A plan: its memory as a picture and its steps as a table."""
    return framed("Plan", f"of {counted(len(plan.steps), 'step')}", *_plan_parts(plan))


def _plan_parts(plan: Plan) -> list[str]:
    listed = len(plan.steps) <= _STEPS
    steps = folded("steps", str(plan)) if listed else sentence("print(plan) lists the steps.")
    return [picture(memory_plan(plan)), steps]


def executor_html(executor: Executor) -> str:
    """An executor: what it computes where, and the memory of the plan used last."""
    told = repr(executor).partition("(")[2].removesuffix(")")
    plans = executor.plans
    if not plans:
        return framed("Executor", told, sentence("Nothing is planned before the first run."))
    fed = ", ".join(f"{value.node.name} {value.spec.shape}" for value in plans[-1].feeds)
    head = sentence(f"The plan made last, for {fed or 'no feeds'}:")
    return framed(
        "Executor", told, folded("report", str(executor.report())), head, *_plan_parts(plans[-1])
    )

"""tune: which implementation each kernel of a graph uses, by measurement.

The library's kernels know how to choose for themselves, by a rule. Under DLSYS_TUNE=full what is
not yet known of this chip and library is measured: each implementation that a kernel offers, on
arrays of the node's shapes, in a recording as a training step is one. An implementation is taken
if its results are right and it is faster than the rule's by more than noise. Under `cached`, the
default, what has been measured is used; under `off` it is not.

All implementations repeat their bits exactly, but not each other's: a run is repeated with the same
choices. Precision is a part of what is measured, so that no choice changes it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...errors import DeviceError, DeviceLostError, KernelError, OutOfMemoryError
from ...graph.node import Node, find_topo_sort
from ...graph.spec import Spec
from ...runtime.device import Context, device_name, trim
from ...runtime.library import load
from ...runtime.tuning_cache import ChoiceFile, Measurement, choice_file
from ...settings import settings
from ..plan.memory import Plan
from .microbenchmark import BY_RULE, Choice, Trial

_TIE = 0.98  # of the rule's time; what takes longer is not worth other bits
_HOPELESS = 2.0  # times the best so far, at a glance

_measuring = threading.Lock()  # side by side, measurements would disturb each other
_told: set[str] = set()  # why a library cannot be used


def choose_kernels(fetches: Sequence[Node], ctx: Context) -> None:
    """Marks the nodes of an executor's own graph with the implementations that measurements found.
    The last of the passes: precision, shapes and what is fused are settled.
    """
    if settings.tune == "off":
        return
    nodes = [node for node in find_topo_sort(fetches) if _is_open(node, ctx)]
    if not nodes:
        return
    known = choice_file()
    if settings.tune == "cached" and known.is_empty():
        return
    environment = _environment(ctx)
    if settings.tune == "full":
        with _measuring:
            _measure_unknown(nodes, ctx, known, environment)
    measured = known.measurements(environment)
    for node in nodes:
        found = _choice(node, ctx, measured.get(key_of(node)))
        if found is not None and found.number:
            node.attrs = {**node.attrs, "choice": found}


def _measure_anew() -> None:
    """A forked child has no thread that measures, and would wait for its parent's for ever."""
    global _measuring
    _measuring = threading.Lock()


os.register_at_fork(after_in_child=_measure_anew)


def choices_in(plans: Iterable[Plan], ctx: Context) -> dict[str, str]:
    """The implementation that each kernel with several has in plans, "" for the one by its rule, by
    what a measurement is of.
    """
    found = {}
    for node in (step.node for plan in plans for step in plan.steps):
        if _is_open(node, ctx):
            bare = node.derive(node.inputs, node.spec)
            bare.attrs = {name: value for name, value in node.attrs.items() if name != "choice"}
            found[key_of(bare)] = node.attrs["choice"].name if "choice" in node.attrs else ""
    return found


def key_of(node: Node) -> str:
    """What a measurement is of: the kernel, its arrays, and its numbers, precision among them."""
    made = [node.spec] if isinstance(node.spec, Spec) else node.spec
    arrays = " ".join(_array(x.spec) for x in node.inputs), " ".join(map(_array, made))
    numbers = " ".join(map(str, node.op.scalars(node)))
    precision = node.attrs.get("precision", "fp32")
    return f"{node.op.kernel} {arrays[0]} -> {arrays[1]} | {numbers} | {precision}"


def _array(spec: Spec) -> str:
    return f"{spec.dtype}({','.join(map(str, spec.shape))})"


def _is_open(node: Node, ctx: Context) -> bool:
    """Whether there is anything to choose for a node."""
    if not node.op.tunable or node.op.kernel is None:
        return False
    made = [node.spec] if isinstance(node.spec, Spec) else node.spec
    sizes = [spec.size for spec in (*(x.spec for x in node.inputs), *made)]
    return min(sizes) > 0 and len(load().choices(ctx.kernel_device, node.op.kernel)) > 0


def _environment(ctx: Context) -> str:
    """What a measurement holds for."""
    library = load()
    own = ", own products" if settings.blas == "own" else ""
    return f"{device_name(ctx)}, dlsys {library.version} {_digest(library.path)}{own}"


@functools.cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _choice(node: Node, ctx: Context, measured: Measurement | None) -> Choice | None:
    """What was measured as a choice of the library as it is now; None if it is not of it."""
    if measured is None:
        return None
    if not measured.choice:
        return BY_RULE
    kernel = node.op.kernel
    assert kernel is not None
    names = load().choices(ctx.kernel_device, kernel)
    if measured.choice not in names:
        return None
    number = names.index(measured.choice) + 1
    try:
        source = load().choice_source(ctx.kernel_device, kernel, number)
    except DeviceError:
        return None  # cuBLAS or cuDNN is not there any more
    return Choice(number, measured.choice) if source == measured.source else None


# ---- measuring ----


def _measure_unknown(
    nodes: Iterable[Node], ctx: Context, known: ChoiceFile, environment: str
) -> None:
    measured = known.measurements(environment)
    unknown = {
        key: node
        for key, node in ((key_of(node), node) for node in nodes)
        if _choice(node, ctx, measured.get(key)) is None
    }
    if not unknown:
        return
    from tqdm import tqdm

    bar = tqdm(
        total=len(unknown), desc="measuring kernels", leave=False, disable=None, file=sys.stderr
    )
    with bar:
        for key, node in unknown.items():
            try:
                made = _measured(node, ctx)
            except OutOfMemoryError as error:
                _tell(f"no memory to measure {key}, which stays by rule: {error}")
                continue
            finally:
                bar.update()
            known.add(environment, {key: made})
            if bar.disable:  # no terminal
                _tell(
                    f"measured {key}: {made.choice or 'by rule'} {made.us:.1f} us, "
                    f"by rule {made.us_by_rule:.1f} us"
                )
    trim(ctx)


def _measured(node: Node, ctx: Context) -> Measurement:
    """The fastest implementation for a node that is right."""
    kernel = node.op.kernel
    assert kernel is not None
    trial = Trial(node, ctx)
    about = {BY_RULE: trial.us_about(BY_RULE)}
    for number, name in enumerate(load().choices(ctx.kernel_device, kernel), 1):
        choice = Choice(number, name)
        try:
            about[choice] = trial.us_about(choice)
        except DeviceLostError:
            raise
        except DeviceError as error:
            _tell_once(str(error))
        except KernelError:
            continue  # it does not do this, or there is no memory for it
    limit = _HOPELESS * min(about.values())
    us = {BY_RULE: trial.us(BY_RULE, about[BY_RULE])}
    for choice, glance in about.items():
        if glance <= limit and choice.number:
            try:
                us[choice] = trial.us(choice, glance)
            except DeviceLostError:
                raise
            except (KernelError, DeviceError):
                continue  # it cannot be recorded
    best = _fastest_right(node, trial, us)
    source = load().choice_source(ctx.kernel_device, kernel, best.number) if best.number else ""
    return Measurement(best.name, source, round(us[best], 3), round(us[BY_RULE], 3))


def _fastest_right(node: Node, trial: Trial, us: dict[Choice, float]) -> Choice:
    wanted = trial.results(BY_RULE)
    for choice in sorted(us, key=us.__getitem__):
        if choice == BY_RULE or us[choice] >= _TIE * us[BY_RULE]:
            break
        if trial.is_right(choice, wanted):
            return choice
        _tell(f"{key_of(node)}: {choice} is wrong by more than the tolerance, and passed over")
    return BY_RULE


def _tell(line: str) -> None:
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def _tell_once(line: str) -> None:
    if line not in _told:
        _told.add(line)
        _tell(line)

"""The autotuner selects the algorithm of each kernel of a graph by measurement.

A kernel with several algorithms has a heuristic. Under DLSYS_TUNE=full the autotuner measures what
the tuning cache lacks for this chip and library, on arrays of the node's shapes, in captured graphs
like a training step's. Each rung is estimated by a few launches of its own heuristic, the variants
of those alone that come near the fastest, and only the best of all of them are measured exactly. An
algorithm is taken if its results are right and it is faster than the heuristic's by more than
noise. One whose error is of another class than the precision allows, as that of some Winograds is,
runs where it is named and is no candidate here (src/operators/conv_accuracy.h). Under `cached`, the
default, the cache is used as it is; under `off` the heuristics decide.

Each algorithm repeats its bits exactly, but not those of another: a run is repeated with the same
algorithms. The precision is part of a measurement's key, so no algorithm changes it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...dtypes import is_integral, storage_dtype
from ...errors import DeviceError, DeviceLostError, KernelError, OutOfMemoryError
from ...graph.node import Node, find_topo_sort
from ...graph.spec import Spec
from ...rungs import HEURISTIC, Algorithm, rung_of
from ...runtime.device import Context, device_name, trim
from ...runtime.interface import interface
from ...runtime.library import load
from ...runtime.target import target_of
from ...settings import CONV_WORKSPACE, settings
from ...system import at_fork
from ..plan.memory import Plan
from .microbenchmark import Microbenchmark

if TYPE_CHECKING:
    from ...runtime.tuning_cache import Measurement, TuningCache

_TIE = 0.98  # of the heuristic's time; a smaller gain is not worth other bits
# An estimate above so many times the best one, and so many microseconds more, is not measured
# further: of long kernels estimates are good to a few percent, of short ones launches are a part.
_HOPELESS, _HOPELESS_US = 1.15, 5.0
# A rung whose own heuristic takes longer than so many times the fastest has no variant to win.
_SLOW_RUNG = 1.6

_measuring = threading.Lock()  # concurrent measurements would disturb each other
_warned: set[str] = set()  # reasons why a library cannot be used


def choose_kernels(fetches: Sequence[Node], ctx: Context) -> None:
    """Marks the nodes of an executor's own graph with the algorithms that measurements found. It is
    the last pass: precision, shapes and fusion are final.
    """
    ranked = [node for node in find_topo_sort(fetches) if _is_open(node, ctx)]
    for node in ranked:
        if "algo" in node.attrs:
            node.attrs = {**node.attrs, "algorithm": _default(node, ctx)}
    ranked = [node for node in ranked if not _names_variant(node)]
    if settings.tune == "off":
        return
    from ...runtime.tuning_cache import tuning_cache  # which the library's loading has imported

    known = tuning_cache()
    if settings.tune == "cached" and known.is_empty():
        return
    if not ranked:
        return
    environment = _environment(ctx)
    if settings.tune == "full":
        with _measuring:
            _measure_unknown(ranked, ctx, known, environment)
    measured = known.measurements(environment)
    for node in ranked:
        found = _algorithm(node, ctx, measured.get(key_of(node)))
        if found is not None and found.number:
            node.attrs = {**node.attrs, "algorithm": found}


def _measure_anew() -> None:
    """Gives a forked child a lock of its own; its parent's might never be released there."""
    global _measuring
    _measuring = threading.Lock()


at_fork(after_in_child=_measure_anew)


def algorithms_in(plans: Iterable[Plan], ctx: Context) -> dict[str, str]:
    """The algorithm of each kernel with several in plans, "" for its heuristic, by `key_of`."""
    found = {}
    for node in (step.node for plan in plans for step in plan.steps):
        if _is_open(node, ctx):
            found[key_of(node)] = node.attrs["algorithm"].name if "algorithm" in node.attrs else ""
    return found


def key_of(node: Node) -> str:
    """The key of a measurement: the kernel, its arrays and scalars, the precision, and the rung
    where one is named.
    """
    node = _without_algorithm(node)
    made = [node.spec] if isinstance(node.spec, Spec) else node.spec
    arrays = " ".join(_array(x.spec) for x in node.inputs), " ".join(map(_array, made))
    scalars = " ".join(map(str, node.op.scalars(node)))
    precision = node.attrs.get("precision", "fp32")
    rung = f" | {node.attrs['algo']}" if "algo" in node.attrs else ""
    return f"{node.op.kernel} {arrays[0]} -> {arrays[1]} | {scalars} | {precision}{rung}"


def _without_algorithm(node: Node) -> Node:
    bare = node.derive(node.inputs, node.spec)
    bare.attrs = {name: value for name, value in node.attrs.items() if name != "algorithm"}
    return bare


def _default(node: Node, ctx: Context) -> Algorithm:
    """The algorithm without a measurement: the heuristic, of the node's rung if it names one."""
    if "algo" not in node.attrs:
        return HEURISTIC
    assert node.op.kernel is not None
    names = load().algorithms(ctx.kernel_device, node.op.kernel)
    rung = node.attrs["algo"]
    with_product = f"{rung} {settings.gemm}"  # im2col has a variant for every rung of products
    name = with_product if with_product in names else rung
    return Algorithm(names.index(name) + 1, name)


def _names_variant(node: Node) -> bool:
    """True where settings name a variant, which leaves nothing to measure."""
    return "algorithm" in node.attrs and rung_of(node.attrs["algorithm"].name) != str(
        node.attrs["algorithm"]
    )


def _candidates(node: Node, ctx: Context) -> list[Algorithm]:
    """The algorithms to measure beside the default: of the node's rung, or of all but the rungs
    that later ones outdo for every shape; those of which others are variants first. None is less
    accurate than the precision allows.
    """
    assert node.op.kernel is not None
    outdone = () if node.op.ladder is None else node.op.ladder.outdone
    own = node.attrs.get("algo")
    found = [
        Algorithm(number, name)
        for number, name in enumerate(load().algorithms(ctx.kernel_device, node.op.kernel), 1)
        if (rung_of(name) == own if own else rung_of(name) not in outdone)
        and _is_accurate(name, node)
    ]
    return sorted(found, key=lambda algorithm: algorithm.name.count(" "))


def _is_accurate(algorithm: str, node: Node) -> bool:
    """Whether times alone may decide for an algorithm at the node's precision."""
    by = "tf32" if node.attrs.get("precision") == "tf32" else "fp32"
    return interface.units.get(algorithm, 0) <= interface.limits[f"units_{by}"]


def _parent(name: str, names: Iterable[str]) -> str | None:
    """The algorithm of which one is a variant: `implicit mma` of `implicit mma 64x128`."""
    return max((other for other in names if name.startswith(f"{other} ")), key=len, default=None)


def _array(spec: Spec) -> str:
    return f"{spec.dtype}({','.join(map(str, spec.shape))})"


def _is_open(node: Node, ctx: Context) -> bool:
    """True when a node's kernel has several algorithms for its arrays."""
    if not node.op.tunable or node.op.kernel is None:
        return False
    made = [node.spec] if isinstance(node.spec, Spec) else node.spec
    sizes = [spec.size for spec in (*(x.spec for x in node.inputs), *made)]
    floats = not any(is_integral(spec.dtype) for spec in made)
    dtype = storage_dtype(spec.dtype for spec in (*(x.spec for x in node.inputs), *made))
    known = floats and min(sizes) > 0 and target_of(ctx).has(node.op.kernel, dtype)
    return known and len(load().algorithms(ctx.kernel_device, node.op.kernel)) > 0


def _environment(ctx: Context) -> str:
    """The chip and library that measurements hold for, and what restricts them."""
    library = load()
    restrictions = ", own products" if settings.blas == "own" else ""
    if settings.conv_workspace != CONV_WORKSPACE:
        restrictions += f", {settings.conv_workspace} MiB of workspace"
    return f"{device_name(ctx)}, dlsys {library.version} {_digest(library.path)}{restrictions}"


@functools.cache
def _digest(path: str) -> str:
    import hashlib  # a tenth of the time that importing the package takes

    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:16]


def _algorithm(node: Node, ctx: Context, measured: Measurement | None) -> Algorithm | None:
    """The measured algorithm in the library as it is now; None if the library lacks it."""
    if measured is None:
        return None
    if not measured.algorithm:
        return _default(node, ctx)
    kernel = node.op.kernel
    assert kernel is not None
    names = load().algorithms(ctx.kernel_device, kernel)
    if measured.algorithm not in names or not _is_accurate(measured.algorithm, node):
        return None
    number = names.index(measured.algorithm) + 1
    try:
        source = load().algorithm_source(ctx.kernel_device, kernel, number)
    except DeviceError:
        return None  # cuBLAS or cuDNN is not there any more
    return Algorithm(number, measured.algorithm) if source == measured.source else None


# ---- measuring ----


def _measure_unknown(
    nodes: Iterable[Node], ctx: Context, known: TuningCache, environment: str
) -> None:
    measured = known.measurements(environment)
    unknown = {
        key: node
        for key, node in ((key_of(node), node) for node in nodes)
        if _algorithm(node, ctx, measured.get(key)) is None
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
                _print(f"no memory to measure {key}, which keeps its heuristic: {error}")
                continue
            finally:
                bar.update()
            known.add(environment, {key: made})
            if bar.disable:  # no terminal
                _print(
                    f"measured {key}: {made.algorithm or 'heuristic'} {made.us:.1f} us, "
                    f"heuristic {made.us_heuristic:.1f} us"
                )
    trim(ctx)


def _measured(node: Node, ctx: Context) -> Measurement:
    """The fastest algorithm for a node whose results are right."""
    from ...runtime.tuning_cache import Measurement

    benchmark, default = Microbenchmark(node, ctx), _default(node, ctx)
    about = _estimates(benchmark, default, _candidates(node, ctx))
    limit = _HOPELESS * min(about.values()) + _HOPELESS_US
    us = {default: benchmark.us(default, about[default])}
    for algorithm, glance in about.items():
        if glance <= limit and algorithm != default:
            try:
                us[algorithm] = benchmark.us(algorithm, glance)
            except DeviceLostError:
                raise
            except (KernelError, DeviceError):
                continue  # it cannot be captured
    best = _fastest_right(node, benchmark, us, default)
    if best == default:
        return Measurement("", "", round(us[best], 3), round(us[best], 3))
    assert node.op.kernel is not None
    source = load().algorithm_source(ctx.kernel_device, node.op.kernel, best.number)
    return Measurement(best.name, source, round(us[best], 3), round(us[default], 3))


def _estimates(
    benchmark: Microbenchmark, default: Algorithm, candidates: Sequence[Algorithm]
) -> dict[Algorithm, float]:
    """Estimated microseconds of the default, and of the candidates but for the variants of those
    that take much longer than the fastest or cannot compute this.
    """
    about = {default: benchmark.us_about(default)}
    by_name = {algorithm.name: algorithm for algorithm in candidates}
    for algorithm in candidates:
        parent = _parent(algorithm.name, by_name)
        limit = _SLOW_RUNG * min(about.values()) + _HOPELESS_US
        hopeless = parent is not None and about.get(by_name[parent], limit) >= limit
        if hopeless or algorithm in about:
            continue
        try:
            about[algorithm] = benchmark.us_about(algorithm)
        except DeviceLostError:
            raise
        except DeviceError as error:
            _print_once(str(error))
        except KernelError:
            continue  # it cannot compute this, or there is no memory for it
    return about


def _fastest_right(
    node: Node, benchmark: Microbenchmark, us: dict[Algorithm, float], default: Algorithm
) -> Algorithm:
    wanted = benchmark.results(default)
    for algorithm in sorted(us, key=us.__getitem__):
        if algorithm == default or us[algorithm] >= _TIE * us[default]:
            break
        if benchmark.is_right(algorithm, wanted):
            return algorithm
        _print(f"{key_of(node)}: {algorithm} is wrong by more than the tolerance, and passed over")
    return default


def _print(line: str) -> None:
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def _print_once(line: str) -> None:
    if line not in _warned:
        _warned.add(line)
        _print(line)

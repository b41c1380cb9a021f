"""Every operator against PyTorch on the CPU: forward, and forward with its gradients.

    python benchmarks operators [--threads 1] [--rounds N] [--seconds S] [--only PART ...]

The CPU device, numpy and PyTorch take turns in one process, a call each a round, on the same
arrays, after a warm-up; each contestant makes its results anew in each call. What was measured is
milliseconds, their minimum and their quartiles; other programs of a machine only ever lengthen a
call, so the ratios are those of the minima. A work whose numbers differ from PyTorch's ends the
benchmark.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shared import measure

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "DLSYS_THREADS")
OURS = ("cpu", "numpy")
Call = Callable[[], Any]


def ours(work: Any, arrays: Sequence[np.ndarray], seed: np.ndarray | None, ctx: Any) -> Call:
    """A run of the operator, with the gradients where `seed` is the result's gradient."""
    from dlsys import autodiff as ad
    from dlsys import ndarray

    fed = [*arrays] if seed is None else [*arrays, seed]
    nodes = [ad.Variable(f"x{k}", x.shape, x.dtype) for k, x in enumerate(fed)]
    y = work.ours(*nodes[: len(arrays)])
    fetches = [y]
    if seed is not None:
        wanted = [nodes[k] for k in work.differentiated()]
        fetches += ad.gradients(ad.sum_op(y * nodes[-1]), wanted)
    executor = ad.Executor(fetches, ctx)
    used = set(executor.topo_order)
    given = fed if ctx is None else [ndarray.array(x, ctx) for x in fed]
    feeds = {node: x for node, x in zip(nodes, given) if node in used}
    return lambda: executor.run(feeds)


def theirs(work: Any, arrays: Sequence[np.ndarray], seed: np.ndarray | None) -> Call:
    """The work by PyTorch."""
    import torch

    tensors = [torch.from_numpy(x) for x in arrays]
    if work.states:
        return work.theirs(torch, *tensors)
    if seed is None:

        def forward() -> list[Any]:
            with torch.no_grad():
                return [work.theirs(torch, *tensors)]

        return forward
    wanted = [tensors[k].requires_grad_() for k in work.differentiated()]
    dy = torch.from_numpy(seed)

    def both() -> list[Any]:
        y = work.theirs(torch, *tensors)
        gradients = torch.autograd.grad(y, wanted, dy)
        return [y.detach(), *(gradient.contiguous() for gradient in gradients)]

    return both


def check(work: Any, found: dict[str, list[Any]]) -> None:
    """Ends the benchmark unless all contestants computed the same."""
    if not work.alike:
        return
    expected = [np.asarray(x) for x in found["torch"]]
    for name in OURS:
        for mine, other in zip(found[name], expected, strict=True):
            mine = mine if isinstance(mine, np.ndarray) else mine.asnumpy()
            other = other.reshape(mine.shape)
            apart = np.abs(mine.astype("f8") - other.astype("f8")).max(initial=0)
            size = np.abs(other.astype("f8")).max(initial=1)
            if not apart <= 1e-3 * size:
                raise SystemExit(
                    f"{work.name}: {name} is {apart:.3g} apart from torch's {size:.3g}"
                )


def race(calls: dict[str, Call], rounds: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of each contestant, which take turns."""
    first = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        first[name] = time.perf_counter() - start
    count = int(min(rounds, max(7, seconds / sum(first.values()))))
    ms: dict[str, list[float]] = {name: [] for name in calls}
    for k in range(count):
        for name in (*calls,) if k % 2 else (*calls,)[::-1]:
            start = time.perf_counter()
            calls[name]()
            ms[name].append((time.perf_counter() - start) * 1e3)
    return {
        name: {"min": round(min(found), 5), **measure.summary(found)} for name, found in ms.items()
    }


def compare(work: Any, rounds: int, seconds: float) -> dict[str, Any]:
    """A work forward and, where it has gradients, with them."""
    from dlsys import ndarray

    arrays = work.arrays()
    found = {}
    seed = None
    for what in ("forward", "with gradients"):
        contexts = zip(OURS, (ndarray.cpu(0), None))
        calls = {name: ours(work, arrays, seed, ctx) for name, ctx in contexts}
        calls["torch"] = theirs(work, arrays, seed)
        results = {name: call() for name, call in calls.items()}
        check(work, results)
        found[what] = race(calls, rounds, seconds)
        if not work.differentiated():
            break
        y = np.asarray(results["numpy"][0])
        seed = np.random.default_rng(1).uniform(-1, 1, y.shape).astype(np.float32)
    return found


def ratio(found: dict[str, Any], name: str) -> float:
    """The contestant's time over PyTorch's."""
    return found[name]["min"] / found["torch"]["min"]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All works that were asked for."""
    from operators.operator_works import works

    results = {}
    for work in works():
        if options.only and not any(part in work.name for part in options.only):
            continue
        found = compare(work, options.rounds, options.seconds)
        told = [
            f"{what}: {each['torch']['min']:7.3f} ms, cpu {ratio(each, 'cpu'):5.2f} x, "
            f"numpy {ratio(each, 'numpy'):6.2f} x"
            for what, each in found.items()
        ]
        print(f"{work.name:45} {'; '.join(told)}", flush=True)
        results[work.name] = {"row": work.row, "inputs": _shapes(work), **found}
    return results


def _shapes(work: Any) -> list[list[int]]:
    return [list(x.shape if isinstance(x, np.ndarray) else x) for x in work.inputs]


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="of each contestant")
    parser.add_argument("--rounds", type=int, default=200, help="calls of each, at most")
    parser.add_argument("--seconds", type=float, default=0.8, help="for a work, about")
    parser.add_argument("--only", nargs="+", default=[], help="parts of works' names")
    options = parser.parse_args()
    if any(os.environ.get(name) != str(options.threads) for name in THREADS):
        given = dict.fromkeys(THREADS, str(options.threads))  # the libraries read it as they start
        again = measure.program("operators", *sys.argv[1:])
        os.execve(sys.executable, again, {**os.environ, **given})
    import torch

    torch.set_num_threads(options.threads)
    found = run(options)
    if not options.only:
        print(measure.save("operators", options, {"threads": options.threads, "works": found}))
    return 0

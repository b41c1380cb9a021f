"""Two versions of dlsys beside each other: what the later one costs against the earlier one.

    python benchmarks before_after --before /old/python --after python [--out FOLDER]
        [--before-library FILE] [--after-library FILE] [--only numpy,cpu] [--rounds 20]

Each version has a process of its own for each device, in which PYTHONPATH names its package (and
DLSYS_LIBRARY its library, where that is not the package's own). The two take turns, one runs while
the other sleeps, and who begins changes from round to round. A ratio is later over earlier, taken
within each round. New pairs of processes are started `--pairs` times, since the places where a
process has its memory favor one or the other for as long as it lives.

Rows are the steps of cpu.py on numpy and the CPU, those of race.py on a GPU, how long a run keeps
the host, from nothing to a step, and an import. A row is worse where the median of the ratios and
the ratio of the fastest turns are both beyond 1.03: other programs only ever lengthen a turn, so
that where one of the two is, the machine was too busy to tell. A worse row makes the status 1.
Leaves before_after.json. Only names that programs are written with are used here, so that either
version may be older than this file.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shared import measure, networks, turns, workloads
from steps import cpu, overhead

WORSE = 1.03
DEVICES = ("numpy", "cpu", "gpu")
VERSIONS = ("before", "after")
Ms = dict[str, list[float]]  # of each version


# ---- a contestant ----
def contestant(device: str) -> None:
    """The other end, in a process that has one version: measures the row that each turn names."""
    import dlsys

    rows = dict(sampled(device))
    made: dict[str, turns.Sampler] = {}

    def sampler(row: str) -> turns.Sampler:
        if row not in made:
            made[row] = rows[row]()
        return made[row]

    turns.serve(sampler, rows=list(rows), package=str(Path(dlsys.__file__).parents[1]))


def sampled(device: str) -> Iterator[tuple[str, Callable[[], turns.Sampler]]]:
    """The rows of a device, and what makes the sampler of each."""
    if device == "gpu":
        for work in workloads.NAMED:
            for precision in workloads.PRECISIONS:
                for mode in (queued, single, hosted):
                    name = f"{work.name} {precision} {mode.__name__}"
                    yield name, functools.partial(mode, work, precision)
        return
    for name, case in cpu.CASES.items():
        yield name, functools.partial(stepped, device, *case)
    yield "mlp-1, the host", functools.partial(stepped, device, "mlp", 1)
    for network in ("mlp", networks.LENET):
        yield f"{network}, built and planned", functools.partial(planned, device, network)


def stepped(device: str, network: str, size: int) -> turns.Sampler:
    """Training steps that are done on return."""
    from dlsys import ndarray

    ours = networks.Ours(network, size, ndarray.cpu(0) if device == "cpu" else None)
    ours.step()
    return functools.partial(measure.step_ms, ours.step)


def planned(device: str, network: str) -> turns.Sampler:
    """From nothing to the first step's end, of one sample."""
    from dlsys import ndarray

    ctx = ndarray.cpu(0) if device == "cpu" else None
    return functools.partial(measure.step_ms, lambda: networks.Ours(network, 1, ctx).step())


def trained(work: workloads.Work, precision: str, inputs: Any) -> Any:
    """The executor of a step on the GPU that fetches the loss and the update."""
    from dlsys import autodiff as ad
    from dlsys import ndarray, optim

    model = networks.model(work, seed=0)
    x, y = inputs
    loss = ad.softmax_cross_entropy(model(x), y)
    update = optim.SGD(workloads.RATE).minimize(loss, model.parameters())
    return ad.Executor([loss, update], ctx=ndarray.gpu(0), precision=precision)


@functools.cache
def dataset() -> Any:
    """The race's."""
    from dlsys.data import Dataset

    return Dataset(*workloads.data())


def queued(work: workloads.Work, precision: str) -> turns.Sampler:
    """Steps with batches of data on the device, queued together."""
    from dlsys.data import DeviceLoader

    loader = DeviceLoader(dataset(), work.batch, shuffle=True, normalize=(0.0, 1.0))
    executor = trained(work, precision, loader.inputs())
    last: list[Any] = executor.run({})

    def queue(steps: int) -> None:
        last[:] = executor.run_many(steps, {})

    return in_queues(queue, lambda: last[0].asnumpy())


def single(work: workloads.Work, precision: str) -> turns.Sampler:
    """Single runs whose feeds lie on the device, waited for together."""
    step, wait = fed(work, precision)

    def queue(steps: int) -> None:
        for _ in range(steps):
            step()

    return in_queues(queue, wait)


def hosted(work: workloads.Work, precision: str) -> turns.Sampler:
    """The time for which such a run keeps the host."""
    step, wait = fed(work, precision)
    return lambda seconds: [workloads.host_us(step, wait) * 1e-3]


def fed(work: workloads.Work, precision: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A run with feeds on the device, and the wait for the last one."""
    import numpy as np

    from dlsys import autodiff as ad
    from dlsys import ndarray

    x = ad.Variable("images", shape=(None, 784), dtype=np.float32)
    y = ad.Variable("labels", shape=(None,), dtype=np.int64)
    executor = trained(work, precision, (x, y))
    images, labels = networks.batch(work.batch)
    feeds = {x: ndarray.array(images, ndarray.gpu(0)), y: ndarray.array(labels, ndarray.gpu(0))}
    last: list[Any] = executor.run(feeds)

    def step() -> None:
        last[:] = executor.run(feeds)

    return step, lambda: last[0].asnumpy()


def in_queues(queue: Callable[[int], Any], wait: Callable[[], Any]) -> turns.Sampler:
    return lambda seconds: [workloads.queued_ms(queue, wait, 3, seconds / 3)[0]["median"]]


# ---- the comparison ----
def environments(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Each version's environment: its package, its library, algorithms by heuristic."""
    found = {}
    for version in VERSIONS:
        package = getattr(options, version).resolve()
        if not (package / "dlsys").is_dir():
            raise SystemExit(
                f"--{version}: there is no dlsys in {package}; name the folder it is in"
            )
        found[version] = {**os.environ, "PYTHONPATH": str(package), "DLSYS_TUNE": "off"}
        library = getattr(options, f"{version}_library")
        if library:
            found[version]["DLSYS_LIBRARY"] = str(library.resolve())
    return found


def in_turn(rounds: int) -> Iterator[tuple[str, ...]]:
    """The versions in the order of each round."""
    for k in range(rounds):
        yield VERSIONS if k % 2 == 0 else VERSIONS[::-1]


def on_device(device: str, options: argparse.Namespace) -> dict[str, Ms]:
    """Milliseconds of every row of a device, a turn each."""
    command = measure.program("before_after", "--contestant", device)
    every = environments(options)
    found: dict[str, Ms] = {}
    for _ in range(options.pairs):
        pair = {v: turns.Contestant(command, every[v], options.patience) for v in VERSIONS}
        for version, each in pair.items():
            if each.ready["package"] != every[version]["PYTHONPATH"]:
                raise SystemExit(f"{version}: Python found another dlsys, {each.ready['package']}")
        for row in pair["before"].ready["rows"]:
            if options.rows not in row:
                continue
            times = found.setdefault(f"{device}: {row}", {v: [] for v in VERSIONS})
            for order in in_turn(-(-options.rounds // options.pairs)):
                for version in order:
                    times[version].append(pair[version].turn(options.seconds, row))
        for each in pair.values():
            each.close()
    return found


def imported(options: argparse.Namespace) -> dict[str, Ms]:
    """Milliseconds of importing dlsys.autodiff, each in a fresh process."""
    packages = {version: getattr(options, version).resolve() for version in VERSIONS}
    with tempfile.TemporaryDirectory() as folder:
        for package in packages.values():
            overhead.one_import_ms(package, folder)  # which compiles
        times: Ms = {version: [] for version in VERSIONS}
        for order in in_turn(2 * options.rounds):
            for version in order:
                times[version].append(overhead.one_import_ms(packages[version], folder))
    return {"import": times}


def judged(times: Ms) -> dict[str, Any]:
    """Both versions' times, and the ratio in each round."""
    ratios = [b / a for a, b in zip(times["before"], times["after"])]
    found = {version: measure.summary(times[version]) for version in VERSIONS}
    ratio = measure.summary(ratios, 4)
    fastest = round(min(times["after"]) / min(times["before"]), 4)
    beyond = sum(value > WORSE for value in (ratio["median"], fastest))
    verdict = ("", "unclear", "WORSE")[beyond]
    return {**found, "ratio": ratio, "ratio_of_fastest": fastest, "verdict": verdict}


def table(rows: dict[str, Any]) -> str:
    """A line a row."""
    width = max(map(len, rows))
    lines = [f"{'ms':{width}}     before      after   ratio (quartiles), of the fastest"]
    for name, row in rows.items():
        before, after, ratio = (row[key] for key in (*VERSIONS, "ratio"))
        lines.append(
            f"{name:{width}} {before['median']:10.4f} {after['median']:10.4f}   "
            f"{ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f}), "
            f"{row['ratio_of_fastest']:.3f}  {row['verdict']}"
        )
    return "\n".join(line.rstrip() for line in lines)


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("--before", type=Path, help="the folder that has the earlier dlsys")
    parser.add_argument("--after", type=Path, default=measure.ROOT / "python")
    parser.add_argument("--before-library", type=Path, help="default: the package's own")
    parser.add_argument("--after-library", type=Path)
    default = [*DEVICES[:2], *(["gpu"] if measure.nvidia("name") else []), "import"]
    parser.add_argument("--only", default=",".join(default), help=f"of {', '.join(default)}")
    parser.add_argument("--rows", default="", help="rows whose names have this in them")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=3, help="of processes, a device")
    parser.add_argument("--seconds", type=float, default=0.15, help="of one turn")
    parser.add_argument("--patience", type=int, default=10, help="disturbed turns, a process")
    parser.add_argument("--contestant", choices=DEVICES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        contestant(options.contestant)
        return 0
    if options.before is None:
        parser.error("--before FOLDER")
    rows: dict[str, Any] = {}
    for part in options.only.split(","):
        found = imported(options) if part == "import" else on_device(part, options)
        rows.update({name: judged(times) for name, times in found.items()})
    print(table(rows))
    gpu = measure.nvidia("name"), measure.nvidia("driver_version")
    record = {"versions": versions(options), "gpu": gpu, "rows": rows}
    print(measure.save("before_after", options, record))
    return int(any(row["verdict"] == "WORSE" for row in rows.values()))


def versions(options: argparse.Namespace) -> dict[str, Any]:
    """Which packages were compared."""
    packages = {version: getattr(options, version).resolve() for version in VERSIONS}
    return {v: {"package": str(p), "commit": measure.commit(p)} for v, p in packages.items()}

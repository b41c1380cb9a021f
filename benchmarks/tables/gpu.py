"""The GPU's tables and its picture; what they share with the others of table.py."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = {
    "logreg": "logistic regression 784-10, batch 1000",
    "mlp": "MLP 784-256-100-10, batch 1000",
    "lenet-128": "LeNet-5, batch 128",
    "lenet-1000": "LeNet-5, batch 1000",
    "residual-512": "residual network with batch norm, batch 512",
}
ALIKE = (("logreg", "mlp"), ("lenet-128", "lenet-1000"))  # dense networks, LeNets
OURS = ("dlsys run_many", "dlsys tuned")
PEERS = (
    *("torch eager", "torch graph", "torch compile", "torch compiled graph"),
    *("jax jit", "jax scan"),
)


class Results:
    """The JSON files that are there; a missing one raises FileNotFoundError when it is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> dict[str, Any]:
        """`<name>.json`."""
        return json.loads((self._folder / f"{name}.json").read_text())


def rows(head: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """A markdown table; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    lines = [head, rule, *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def command_of(record: dict[str, Any]) -> str:
    """The command of a record as it is called now: programs were files of `benchmarks/` before."""
    return re.sub(r"\bbenchmarks/(\w+)\.py\b", r"benchmarks \1", record["command"])


def source(record: dict[str, Any]) -> str:
    """The source of a table, as a line below it."""
    machine = record["machine"]
    hardware = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    versions = [f"{key} {machine[key]}" for key in ("numpy", "torch", "driver") if machine.get(key)]
    for network in record.get("networks", {}).values():
        if "rival" in network:
            versions.append(f"PyTorch {network['rival_version']}")
            break
    return (
        f"{hardware}; Python {machine['python']}, {', '.join(versions)}; {record['date']}, "
        f"commit {record['commit']}; `{command_of(record)}`"
    )


def part_source(record: dict[str, Any]) -> str:
    """The source of a table whose record is made in parts, with the commits of what the last call
    did not measure.
    """
    told = {
        each["commit"] for work in record["works"] for each in work.get("measured", {}).values()
    }
    older = sorted(told - {record["commit"]})
    return source(record) + (f"; some precisions of commit {', '.join(older)}" if older else "")


def raced(results: Results) -> dict[str, Any]:
    """The record with the race, under that name: race.json where peers took part, else gpu.json."""
    try:
        alone = results.read("race")
    except FileNotFoundError:
        return results.read("gpu")
    return {**alone, "race": alone} if alone["versions"] else results.read("gpu")


def times(record: dict[str, Any], work: str, precision: str) -> dict[str, dict[str, Any]]:
    """The measurements of a work, by contestant and mode: `torch graph`."""
    return {
        f"{each['contestant']} {each['mode']}": each
        for each in record["race"]["times"]
        if "error" not in each and (each["work"], each["precision"]) == (work, precision)
    }


def fastest(
    record: dict[str, Any], work: str, precision: str
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Ours with data on the device, and the fastest peer, if one took part."""
    found = times(record, work, precision)
    rivals = [found[name] for name in PEERS if name in found]
    best = min(rivals, key=lambda each: each["ms"]["median"]) if rivals else None
    return found["dlsys run_many"], best


def race(results: Results) -> str:
    """Whole training steps against the peers."""
    record = raced(results)
    body = []
    for work, text in NAMES.items():
        for precision in ("fp32", "tf32", "bf16"):
            found = times(record, work, precision)
            if not found:
                continue
            _, best = fastest(record, work, precision)
            ours = [found.get(name) for name in OURS]
            ms = [f"**{each['ms']['median']:.4f}**" if each else "" for each in ours]
            ms += [f"{each['ms']['median']:.4f}" if each else "" for each in map(found.get, PEERS)]
            shares = [
                f"{each['ms']['median'] / best['ms']['median']:.2f}" if each and best else ""
                for each in ours
            ]
            host = found.get("dlsys run", {}).get("host_us", "")
            body.append([f"{text}, {precision}", *ms, *shares, host])
    head = [
        *("training step, ms", "dlsys", "dlsys tuned", *PEERS),
        *("of the best peer", "tuned, of the best peer", "host, µs a `run`"),
    ]
    rounds = next(each["ms"]["n"] for each in record["race"]["times"] if "ms" in each)
    versions = [f"{name} {text}" for name, text in record["race"]["versions"].items()]
    took_part = ", ".join(versions) or "No peer took part"
    picture = "![training steps](race.svg)\n\n" if versions else ""
    note = f"Medians of {rounds} rounds. {took_part}. {source(record)}"
    return f"{picture}{rows(head, body)}\n\n{note}"


def memory(results: Results) -> str:
    """The most device memory that a training step took, beside PyTorch's."""
    record = raced(results)
    body = []
    for work, text in NAMES.items():
        found = times(record, work, "fp32")
        ours = found["dlsys run_many"]
        cells = [mebibytes(found.get(name, {})) for name in PEERS if name.startswith("torch")]
        if "data_nbytes" in ours:
            body.append([text, mebibytes(ours), *cells])
    if not body:
        return "Not measured yet."
    head = ["MiB of device memory, fp32", "dlsys", *(n for n in PEERS if n.startswith("torch"))]
    note = (
        "The most that was in use at once: weights, batch and what a step makes, without the data "
        "set, which on dlsys lies on the device too."
    )
    return f"{rows(head, body)}\n\n{note}"


def mebibytes(found: dict[str, Any]) -> str:
    """The peak of a result without its data, "" where it was not measured."""
    if "peak_nbytes" not in found:
        return ""
    return f"{(found['peak_nbytes'] - found.get('data_nbytes', 0)) / 2**20:.1f}"


def drawn(results: Results) -> str:
    """Networks that nobody tuned for, beside the named ones."""
    record = raced(results)
    ours = [
        each
        for each in record["race"]["times"]
        if each.get("mode") == "run_many" and each["precision"] == "fp32"
    ]
    named = [each for each in ours if each["work"] in NAMES]
    body = [
        [
            each["work"],
            f"{each['ms']['median']:.4f}",
            each["kernels"],
            f"{each['floor_ms']:.4f}",
            f"{each['floor_ms'] / each['ms']['median']:.0%}",
            "" if each in named else f"{beside(each, named):.2f}",
            *first_steps(times(record, each["work"], "fp32")),
        ]
        for each in ours
    ]
    head = [
        "training step, fp32", "ms", "kernels", "floor, ms", "floor / ms", "beside a named one",
        "first two steps, s: heuristic", "tuning", "tuned before",
    ]  # fmt: skip
    note = (
        "A floor is the launch of one graph, 1.4 µs, and the floating-point operations at 61 "
        "TFLOP/s. Beside a named one: how many times further from its floor than the named network "
        "of its kind with the floor nearest to its own. The first two steps hold planning, the "
        "first run and the recording; in a process that takes the heuristic, in one that measures "
        "what to choose (DLSYS_TUNE=full), and in a new one that finds what was measured."
    )
    return f"{rows(head, body)}\n\n{note}"


def first_steps(found: dict[str, dict[str, Any]]) -> list[str]:
    """Seconds of the first two steps in each state of the choices, "" where not measured."""
    states = (found.get(f"dlsys {mode}") for mode in ("run_many", "tuned", "warm"))
    return [f"{each['first_s']:.3f}" if each else "" for each in states]


def beside(one: dict[str, Any], named: Sequence[dict[str, Any]]) -> float:
    """ms / floor of a drawn network over that of the named one of its kind with the next floor."""
    alike = [each for each in named if each["work"] in ALIKE[one["work"].startswith("lenet")]]
    model = min(alike, key=lambda each: abs(math.log(each["floor_ms"] / one["floor_ms"])))
    distance, usual = (each["ms"]["median"] / each["floor_ms"] for each in (one, model))
    return distance / usual


def small_mlps(results: Results) -> str:
    """The perceptrons of tiny-cuda-nn's benchmarks."""
    record = results.read("small_mlp")
    body = [
        [
            f"{work['network']}, {work['precision']}",
            f"{work['ms']['median']:.4f}",
            f"{work['operations'] / 1e9:.2f}",
            f"{work['tflops']:.1f}",
        ]
        for work in record["works"]
    ]
    head = ["training step", "ms", "GFLOP", "TFLOP/s"]
    return f"{rows(head, body)}\n\n{source(record)}"


def kernels(results: Results) -> str:
    """The training steps, kernel by kernel."""
    record = results.read("gpu")["kernels"]
    body = []
    for work, found in record["works"].items():
        total = sum(row["us"] for row in found)
        body += [
            [
                f"{work}: {row['operator']}",
                row["calls"],
                f"{row['us']:.1f}",
                f"{row['us'] / total:.1%}",
                f"{row['floor_us']:.1f}",
            ]
            for row in sorted(found, key=lambda row: -row["us"])
            if row["us"] >= 0.01 * total
        ]
    head = ["kernels of a training step, fp32", "calls", "µs", "share", "floor, µs"]
    note = (
        f"Medians of {record['runs']} runs, a kernel between two events; kernels of less than 1 % "
        "are left out."
    )
    return f"{rows(head, body)}\n\n{note}"


def limits(results: Results) -> str:
    """The large product, and kernels that are bound by memory."""
    record = results.read("gpu")
    products, bandwidth = record["products"], record["bandwidth"]
    shape, share = tuple(bandwidth["shape"]), bandwidth["of_copy"]
    body = [
        [f"{name} {products['n']}³, fp32", f"{tflops} TFLOP/s", ""]
        for name, tflops in products["tflops"].items()
    ]
    body += [
        [f"{name}, {shape}", f"{tbps} TB/s", f"{share[name]:.0%}"]
        for name, tbps in bandwidth["tbps"].items()
    ]
    return rows(["large arrays", "rate", "of a copy"], body)


def to99(results: Results) -> str:
    """Training until 99 % of MNIST's test set is known."""
    record = results.read("gpu")["to99"]
    body = [
        [run["seed"], f"{run['test_accuracy']:.4f}", f"{run['seconds']:.3f}"]
        for run in record["runs"]
    ]
    median = record["median_seconds"]
    recipe = ", ".join(f"{name} {value}" for name, value in record["recipe"].items())
    note = (
        f"Median, a seed below 99 % counting as infinite: "
        f"{'none' if median is None else f'{median:.3f} s'}; {record['reached']} of "
        f"{len(record['runs'])} seeds reached it. {recipe}."
        + (f" Of commit {record['commit']}." if "commit" in record else "")
    )
    return f"{rows(['seed', 'test accuracy', 's of training'], body)}\n\n{note}"


def draw(results: Results, path: Path) -> str:
    """Draws the race into an SVG file, or says why not."""
    try:
        import matplotlib
        from matplotlib.figure import Figure

        record = raced(results)
    except (ImportError, FileNotFoundError) as missing:
        return f"{path.name}: left as it is, for want of {missing}"
    if not record["race"]["versions"]:
        return f"{path.name}: not drawn, no peer took part"
    matplotlib.rcParams.update({"svg.hashsalt": "race", "svg.fonttype": "none"})
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.add_subplot()
    contestants = (*OURS, *PEERS)
    colors = (
        "#1b6ca8",
        "#6aaede",
        "#d9d9d9",
        "#b3b3b3",
        "#e0b896",
        "#c98a5e",
        "#a9c3a0",
        "#7fa874",
    )
    step = 0.84 / len(contestants)
    for k, name in enumerate(contestants):
        bars = [times(record, work, "fp32").get(name) for work in NAMES]
        places = [j + (k - (len(contestants) - 1) / 2) * step for j, bar in enumerate(bars) if bar]
        heights = [bar["ms"]["median"] for bar in bars if bar]
        axes.bar(places, heights, 0.93 * step, label=name, color=colors[k])
    axes.set_yscale("log")
    axes.set_ylabel("ms a training step, fp32")
    axes.set_xticks(range(len(NAMES)), list(NAMES))
    axes.legend(frameon=False, ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    return str(path)

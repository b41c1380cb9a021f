"""The tables and the picture of convolution's ladder (operators/conv.py), of every device that was
measured: a rung of the CPU is named `implicit, CPU`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlsys.learn.chart import picture
from dlsys.learn.conv import Shape
from operators.conv import sums_of
from tables.gpu import Results, part_source, rows

DRAWN = [128, 256, 14, 256, 3, 1, 1, 1], "forward"
RECORDS = {"conv": "", "conv_cpu": ", CPU"}  # the device, behind the names of its rungs
SUMMED = ("resnet50_all",)  # networks of which sums are shown, and not each convolution
NETS = {"resnet50_all": "all of resnet50", "depthwise": "depthwise and grouped"}


def table(results: Results) -> str:
    """Milliseconds of every rung, shape and direction, at every precision."""
    parts = []
    for record, device in _records(results):
        works = [work for work in record["works"] if work["net"] not in SUMMED]
        columns = list(dict.fromkeys(row["algorithm"] for work in works for row in work["rungs"]))
        body = []
        for work in works:
            for precision in dict.fromkeys(row["precision"] for row in work["rungs"]):
                ms = {r["algorithm"]: r["ms"] for r in work["rungs"] if r["precision"] == precision}
                cells = [f"{ms[one]:.3g}" if one in ms else "-" for one in columns]
                what = f"{work['net']}: {Shape(*work['shape'])}, {work['direction']}, {precision}"
                body.append([what, *cells])
        head = ["convolution", *(f"{column}{device}" for column in columns)]
        parts.append(f"{rows(head, body)}\n\nMilliseconds. {part_source(record)}")
    return "\n\n".join(parts)


def drawn(results: Results) -> str:
    """The convolution that is drawn: time, shares, workspace and errors of each rung."""
    body, sources = [], []
    for record, device in _records(results):
        sources.append(part_source(record))
        for row in _drawn(record):
            body.append(
                [
                    f"{_column(row)}{device}",
                    f"{row['ms']:.3f}",
                    f"{row['tflops']:.3g}",
                    _percent(row["of_cudnn"]),
                    _percent(row["of_limit"]),
                    f"{row['workspace_nbytes'] / 2**20:.0f}",
                    *_errors(row),
                ]
            )
    head = ["rung", "ms", "TFLOP/s", "of cuDNN", "of the limit", "workspace, MiB"]
    head += ["largest error", "mean error"]
    note = (
        "TFLOP/s of a direct convolution's operations, so that Winograd's may exceed the limit. "
        "Errors relative to the sums of |x f|, in units of 2^-24."
    )
    return f"{rows(head, body)}\n\n{note} {'; '.join(sources)}"


def networks(results: Results) -> str:
    """The sums over each network, by direction and precision: what `auto` takes beside the fastest
    algorithm of each convolution, and our fastest beside cuDNN.
    """
    parts = []
    for record, device in _records(results):
        body = []
        for (net, direction, precision), found in sums_of(record["works"]).items():
            name = f"{NETS.get(net, net)}{device}: {found.count}, {direction}, {precision}"
            times = [f"{ms:.3g}" for ms in (found.auto, found.fastest, found.ours)]
            ratios = [f"{found.auto / found.fastest:.2f}", f"{found.worst[0]:.2f}"]
            theirs = ["-", "-"]
            if found.cudnn is not None:
                theirs = [f"{found.cudnn:.3g}", f"{found.ours / found.cudnn:.2f}"]
            body.append([name, *times, *ratios, *theirs])
        head = ["convolutions of a network", "auto", "the fastest", "ours", "auto of the fastest"]
        head += ["at worst", "cuDNN", "ours of cuDNN"]
        parts.append(f"{rows(head, body)}\n\nMilliseconds. {part_source(record)}")
    return "\n\n".join(parts)


def errors(results: Results) -> str:
    """The largest error of each rung over all shapes, by direction."""
    parts = []
    for record, device in _records(results):
        worst: dict[str, dict[str, float]] = {}
        for work in record["works"]:
            for row in work["rungs"]:
                of_rung = worst.setdefault(f"{_column(row)}{device}", {})
                before = of_rung.get(work["direction"], 0.0)
                if row["error"] is not None:
                    of_rung[work["direction"]] = max(before, row["error"])
        directions = list(dict.fromkeys(work["direction"] for work in record["works"]))
        body = [
            [name, *(f"{found[one]:.3g}" if one in found else "-" for one in directions)]
            for name, found in worst.items()
        ]
        parts.append(f"{rows(['rung', *directions], body)}\n\n{part_source(record)}")
    return "\n\n".join(parts)


def draw(results: Results, path: Path) -> str:
    """Draws the rungs of one convolution into an SVG file, or says why not."""
    try:
        record, _ = next(_records(results))
    except FileNotFoundError as missing:
        return f"{path.name}: left as it is, for want of {missing}"
    bars = [(_column(row), row["tflops"]) for row in _drawn(record)]
    path.write_text(picture(f"{Shape(*DRAWN[0])}, {record['device']}", bars))
    return str(path)


def _records(results: Results) -> Iterator[tuple[dict[str, Any], str]]:
    """The records that are there, each with its device; FileNotFoundError where none is."""
    absent, found = None, 0
    for name, device in RECORDS.items():
        try:
            record = results.read(name)
        except FileNotFoundError as missing:
            absent = missing
            continue
        found += 1
        yield record, device
    if absent and not found:
        raise absent


def _drawn(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The rungs of the convolution that is drawn, at the record's batch."""
    (_, *image), direction = DRAWN
    for work in record["works"]:
        if (work["shape"][1:], work["direction"]) == (image, direction):
            return work["rungs"]
    return []


def _errors(row: dict[str, Any]) -> list[str]:
    """The largest and the mean error; a library's is not always looked at."""
    if row["error"] is None:
        return ["-", "-"]
    return [f"{row['error']:.1f}", f"{row['mean_error']:.2f}"]


def _column(row: dict[str, Any]) -> str:
    return f"{row['algorithm']} {row['precision']}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"

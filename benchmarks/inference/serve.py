"""Throughput and latency of dlsys.serve beside other services, in one run.

    python benchmarks serve [--seconds 1] [--rounds 9] [--rivals PYTHON] [--out FOLDER]

LeNet-5 with its first weights on the CPU device. Server and load run on this machine, each with one
thread for its kernels. A request is an image of 784 bytes over a connection that stays open; 1, 16
and 64 clients send the next one when the last is answered. All servers run in short turns, in
another order in each round, and are stopped between them, since some wait by asking again and
again. Of each figure the median of the rounds is told, and of the throughput also the median of its
ratios to the bare endpoint's of the same round.

`bare` reads the body and answers a constant, on the same uvicorn, loop and parser; `plain` is
FastAPI around ONNX Runtime; `litserve` is LitServe around the same session; `dlsys alone` is
dlsys.serve with --max-batch 1. The interpreter `rivals` has their packages: onnxruntime, litserve,
pyzmq, fastapi, uvicorn, uvloop, httptools. dlsys.serve writes its usual line of log for each
request, from which `beside_compute_ms` is: the median time from a request's last byte to its answer
without queue and compute. `server_us` is the time of the processor that the server took for a
request, which other work on the machine changes less. Writes serve.json and keeps its `proofs`.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared import measure
from shared.served import INFER, RAW, Running, busy_seconds, serving, write_models

CLIENTS = (1, 16, 64)
SERVERS = ("bare", "plain", "litserve", "dlsys alone", "dlsys")
BINARY = "application/octet-stream"
_FLUSHED = 0.25  # seconds after which the log has what was answered
# What Triton's documentation shows, of other hardware and another model: no comparison, a size.
_PUBLISHED = {
    "source": "Perf Analyzer, Quick Start (docs.nvidia.com)",
    "what": "`simple`, which adds and subtracts 16 integers; HTTP, 1 client, with a GPU",
    "requests_per_second": 1407.84,
    "p50_ms": 0.69,
    "p95_ms": 0.926,
    "p99_ms": 1.031,
    "compute_ms": 0.257,
    "beside_compute_ms": 0.124,  # 41 µs overhead, 41 queue, 26 input, 16 output
}


def load(name: str, running: Running, clients: int, seconds: float) -> dict[str, Any]:
    """The figures of one turn of the load."""
    is_ours = name.startswith("dlsys")
    path, extra = (
        (INFER, [RAW]) if is_ours else ("/infer", ["Content-Type=application/octet-stream"])
    )
    program = measure.HERE / "shared" / "http_load.py"
    arguments = [str(running.port), path, str(clients), str(seconds), *extra]
    begin, before = running.log.stat().st_size, busy_seconds(running.process)
    done = subprocess.run(
        [sys.executable, str(program), *arguments], capture_output=True, text=True, check=True
    )
    figures = json.loads(done.stdout)
    spent = busy_seconds(running.process) - before
    figures["server_us"] = round(1e6 * spent / figures.pop("answered"), 1)
    if is_ours:
        time.sleep(_FLUSHED)
        figures["beside_compute_ms"] = beside_compute(running.log, begin)
    return figures


def beside_compute(log: Path, begin: int) -> float:
    """The median of ms that a request took on the server without queue and compute, of the lines
    behind so many bytes.
    """
    with log.open("rb") as stream:
        stream.seek(begin)
        rows = [json.loads(line) for line in stream]
    times = [row["ms"] - row["queue_ms"] - row["compute_ms"] for row in rows if "compute_ms" in row]
    return round(statistics.median(times), 3)


def check(servers: Mapping[str, Running]) -> None:
    """All servers that compute give the same probabilities."""
    import numpy as np

    body = np.random.default_rng(0).integers(0, 256, 784, np.uint8).tobytes()
    found = []
    for name, running in servers.items():
        if name == "bare":
            continue
        path = INFER if name.startswith("dlsys") else "/infer"
        headers = dict([RAW.split("=")]) if name.startswith("dlsys") else {}
        headers["Content-Type"] = BINARY
        url = f"http://127.0.0.1:{running.port}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            found.append(np.frombuffer(answer.read()[-40:], "<f4"))
    for each in found[1:]:
        np.testing.assert_allclose(each, found[0], atol=1e-5)


def there(python: str) -> dict[str, str]:
    """The versions of what the other services need, of those packages that an interpreter has."""
    program = (
        "import importlib.metadata as m, json\n"
        "names = ('litserve', 'onnxruntime', 'fastapi', 'uvicorn', 'uvloop', 'httptools')\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({n: found[n] for n in names if n in found}))"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure; the sum of those that failed."""
    made = {key: round(statistics.median(r[key] for r in rounds), 3) for key in rounds[0]}
    return {**made, "failed": sum(r["failed"] for r in rounds)}


def shares(of: list[dict[str, Any]], bare: list[dict[str, Any]]) -> float:
    """The median ratio of throughputs, round by round."""
    key = "requests_per_second"
    return round(statistics.median(x[key] / y[key] for x, y in zip(of, bare)), 3)


def measured(options: Any, names: list[str]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The figures of each turn, by server and clients."""
    found: dict[str, dict[str, list[Any]]] = {n: {str(k): [] for k in CLIENTS} for n in names}
    with tempfile.TemporaryDirectory() as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        write_models(folder)
        servers = {
            name: stack.enter_context(serving(name, folder, options.rivals)) for name in names
        }
        time.sleep(1.0)
        check(servers)
        for name in names:  # what is compiled or learned with the first requests
            load(name, servers[name], 16, 0.5)
            servers[name].pause()
        for turn in range(options.rounds):
            for clients in CLIENTS:
                for k in range(len(names)):
                    name = names[(k + turn) % len(names)]
                    with servers[name].awake():
                        figures = load(name, servers[name], clients, options.seconds)
                    found[name][str(clients)].append(figures)
    return found


def main() -> int:
    """Returns 0 when every request was answered."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rivals", default=sys.executable, help="the others' interpreter")
    options = parser.parse_args()
    versions = there(options.rivals)
    missing = {"plain": "onnxruntime", "litserve": "litserve"}
    names = [name for name in SERVERS if missing.get(name, "uvicorn") in versions]
    before = os.getloadavg()[0]
    found = measured(options, names)
    facts = {
        "seconds": options.seconds,
        "rounds": options.rounds,
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        "versions": {"ours": there(sys.executable), "theirs": versions},
        "results": {n: {k: middle(rows) for k, rows in by.items()} for n, by in found.items()},
        "share_of_bare": {
            name: {k: shares(rows, found["bare"][k]) for k, rows in by.items()}
            for name, by in found.items()
            if name != "bare"
        },
        "published_by_triton": _PUBLISHED,
        **earlier(options.out / "serve.json"),
    }
    sys.argv = [text for text in sys.argv if text not in ("--rivals", options.rivals)]
    path = measure.save("serve", options, facts)
    show(facts)
    print(f"written to {path}")
    return int(any(row["failed"] for by in facts["results"].values() for row in by.values()))


def earlier(path: Path) -> dict[str, Any]:
    """What `benchmarks service` and `benchmarks serve_layers` have written there."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return {name: found[name] for name in ("proofs", "layers") if name in found}


def show(facts: Mapping[str, Any]) -> None:
    """Prints the figures."""
    for name, by in facts["results"].items():
        for n, row in by.items():
            times = "  ".join(f"{key} {row[f'{key}_ms']:.2f}" for key in ("p50", "p95", "p99"))
            share = facts["share_of_bare"].get(name, {}).get(n, 1.0)
            print(
                f"{name:<12} {n:>3} clients {row['requests_per_second']:>9,.0f} /s, {share:.2f} of "
                f"bare  {times} ms  {row['server_us']:.0f} us of the processor"
                + (f"  beside compute {row['beside_compute_ms']} ms" if "dlsys" in name else "")
            )

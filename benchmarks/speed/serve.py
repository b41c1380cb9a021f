"""Throughput and latency of dlsys.serve, beside a bare endpoint and FastAPI with ONNX Runtime.

    python benchmarks serve [--seconds 3] [--rounds 3] [--out FOLDER]

LeNet-5 with its first weights on the CPU device. Server and load run on this machine, each with one
thread for its kernels. A request is an image of 784 bytes over a connection that stays open; 1, 16
and 64 clients send the next one when the last is answered. All servers run in turns, round by
round; of each figure the median of the rounds is told. `dlsys alone` is dlsys.serve with
--max-batch 1. All servers are uvicorn with the same loop and parser; dlsys.serve writes its usual
line of log for each request, from which `beside compute` is: the median time from a request's
arrival to its answer without queue and compute. `server_us` is the time of the processor that the
server took for a request, which other work on the machine hardly changes. Writes serve.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared import measure

CLIENTS = (1, 16, 64)
INFER = "/v2/models/lenet/infer"
RAW = "Inference-Header-Content-Length=0"
_START = 60.0  # seconds that a server may take until it answers
SERVERS = ("bare", "plain", "dlsys alone", "dlsys")


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def write_models(folder: Path) -> None:
    """LeNet-5 as a checkpoint and as an ONNX file."""
    from dlsys import nn, onnx, train
    from dlsys.data import DataDescription

    model = nn.LeNet5(seed=0)
    classes = tuple("0123456789")
    model.trained_on = DataDescription((1, 28, 28), "uint8", (0.0,), (1.0,), classes)
    train.save(folder / "lenet.safetensors", model)
    onnx.export(model, folder / "lenet.onnx", inputs=(None, 1, 28, 28))


def command(name: str, folder: Path, port: int) -> list[str]:
    """What starts a server."""
    if name.startswith("dlsys"):
        batch = ["--max-batch", "1"] if name == "dlsys alone" else []
        model = str(folder / "lenet.safetensors")
        where = ["--device", "cpu", "--port", str(port), "--grpc-port", "off"]
        return [sys.executable, "-m", "dlsys.serve", model, *where, *batch]
    where = ["--app-dir", str(measure.HERE), "--port", str(port), "--no-access-log"]
    quiet = ["--factory", "--log-level", "warning"]
    return [sys.executable, "-m", "uvicorn", f"shared.services:{name}", *where, *quiet]


@contextlib.contextmanager
def serving(name: str, folder: Path) -> Iterator[tuple[int, Path, int]]:
    """A server's port, the file of its log and its process."""
    port, log = free_port(), folder / f"{name}.log"
    environment = {
        **os.environ,
        "PYTHONPATH": str(measure.ROOT / "python"),
        "SERVED_ONNX": str(folder / "lenet.onnx"),
        "DLSYS_THREADS": "1",
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(command(name, folder, port), env=environment, stderr=stream)
        try:
            _wait(name, port, process)
            yield port, log, process.pid
        finally:
            process.terminate()
            process.wait(30)


def _wait(name: str, port: int, process: subprocess.Popen) -> None:
    """Until the server answers."""
    end = time.monotonic() + _START
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{name} does not begin to serve")


def busy_seconds(process: int) -> float:
    """The time of the processor that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def attack(name: str, port: int, process: int, clients: int, seconds: float) -> dict[str, Any]:
    """The figures of one run of the load."""
    before = busy_seconds(process)
    path, extra = (INFER, [RAW]) if name.startswith("dlsys") else ("/infer", [])
    program = measure.HERE / "shared" / "http_load.py"
    arguments = [str(port), path, str(clients), str(seconds), *extra]
    done = subprocess.run(
        [sys.executable, str(program), *arguments], capture_output=True, text=True, check=True
    )
    figures = json.loads(done.stdout)
    spent = busy_seconds(process) - before
    figures["server_us"] = round(1e6 * spent / figures.pop("answered"), 1)
    return figures


def check(ports: Mapping[str, int]) -> None:
    """All servers that compute give the same probabilities."""
    import numpy as np

    body = np.random.default_rng(0).integers(0, 256, 784, np.uint8).tobytes()
    found = []
    for name in SERVERS[1:]:
        path = INFER if name.startswith("dlsys") else "/infer"
        headers = dict([RAW.split("=")]) if name.startswith("dlsys") else {}
        url = f"http://127.0.0.1:{ports[name]}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            found.append(np.frombuffer(answer.read()[-40:], "<f4"))
    for each in found[1:]:
        np.testing.assert_allclose(each, found[0], atol=1e-5)


def beside_compute(log: Path) -> float:
    """The median of ms that a request took on the server without queue and compute."""
    rows = (json.loads(line) for line in log.read_text().splitlines())
    times = [row["ms"] - row["queue_ms"] - row["compute_ms"] for row in rows if "compute_ms" in row]
    return round(statistics.median(times), 3)


def middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure."""
    return {key: round(statistics.median(r[key] for r in rounds), 3) for key in rounds[0]}


def main() -> int:
    """Returns 0 when every request was answered."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, dict[int, list[Any]]] = {name: {n: [] for n in CLIENTS} for name in SERVERS}
    with tempfile.TemporaryDirectory() as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        write_models(folder)
        started = {name: stack.enter_context(serving(name, folder)) for name in SERVERS}
        check({name: port for name, (port, *_) in started.items()})
        for _ in range(options.rounds):
            for clients in CLIENTS:
                for name in SERVERS:
                    port, _, process = started[name]
                    figures = attack(name, port, process, clients, options.seconds)
                    found[name][clients].append(figures)
        beside = {name: beside_compute(started[name][1]) for name in SERVERS[2:]}
    results = {
        name: {str(n): middle(rounds) for n, rounds in by.items()} for name, by in found.items()
    }
    shares = {
        name: {
            str(n): round(
                results[name][str(n)]["requests_per_second"]
                / results["bare"][str(n)]["requests_per_second"],
                3,
            )
            for n in CLIENTS
        }
        for name in SERVERS[1:]
    }
    facts = {
        "seconds": options.seconds, "rounds": options.rounds, "load_average": os.getloadavg()[0],
        "results": results, "share_of_bare": shares, "beside_compute_ms": beside,
    }  # fmt: skip
    path = measure.save("serve", options, facts)
    for name, by in results.items():
        for n, row in by.items():
            times = "  ".join(f"{key} {row[f'{key}_ms']:.2f}" for key in ("p50", "p95", "p99"))
            print(
                f"{name:<12} {n:>3} clients {row['requests_per_second']:>9,.0f} /s  {times} ms  "
                f"{row['server_us']:.0f} us of the processor"
            )
    print(f"share of bare: {shares}\nbeside compute: {beside}\nwritten to {path}")
    return int(any(row["failed"] for by in results.values() for row in by.values()))

"""Servers for the benchmarks of dlsys.serve: how each starts, what it takes, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shared import measure

INFER = "/v2/models/lenet/infer"
RAW = "Inference-Header-Content-Length=0"
_START = 120.0  # seconds that a server may take until it answers


class Running(NamedTuple):
    """A server. port, process: where it is. log: what it writes."""

    port: int
    process: int
    log: Path

    def pause(self) -> None:
        """Stops all of its processes, so that they take nothing of the machine."""
        os.killpg(self.process, signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Lets it go on for a while."""
        os.killpg(self.process, signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def write_models(folder: Path) -> None:
    """LeNet-5 with its first weights as a checkpoint and as an ONNX file."""
    from dlsys import nn, onnx, train
    from dlsys.data import DataDescription

    model = nn.LeNet5(seed=0)
    classes = tuple("0123456789")
    model.trained_on = DataDescription((1, 28, 28), "uint8", (0.0,), (1.0,), classes)
    train.save(folder / "lenet.safetensors", model)
    onnx.export(model, folder / "lenet.onnx", inputs=(None, 1, 28, 28))


def command(name: str, folder: Path, port: int, rivals: str = sys.executable) -> list[str]:
    """What starts a server: dlsys.serve, with `alone` without batching, or one of `services`, by
    the interpreter `rivals` where that needs more packages.
    """
    if name.startswith("dlsys"):
        batch = ["--max-batch", "1"] if name == "dlsys alone" else []
        model = str(folder / "lenet.safetensors")
        where = ["--device", "cpu", "--port", str(port), "--grpc-port", "off"]
        return [sys.executable, "-m", "dlsys.serve", model, *where, *batch]
    if name == "litserve":
        return [rivals, str(measure.HERE / "shared" / "lit_service.py"), str(port)]
    where = ["--app-dir", str(measure.HERE), "--port", str(port), "--no-access-log"]
    quiet = ["--factory", "--log-level", "warning"]
    python = sys.executable if name == "bare" else rivals
    return [python, "-m", "uvicorn", f"shared.services:{name}", *where, *quiet]


@contextlib.contextmanager
def serving(
    name: str, folder: Path, rivals: str = sys.executable, log: Path | None = None, port: int = 0
) -> Iterator[Running]:
    """A server that answers, and ends with the context. Kernels have one thread."""
    port, log = port or free_port(), log or folder / f"{name}.log"
    environment = {
        **os.environ,
        "PYTHONPATH": str(measure.ROOT / "python"),
        "SERVED_ONNX": str(folder / "lenet.onnx"),
        "DLSYS_THREADS": "1",
    }
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command(name, folder, port, rivals),
            env=environment,
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # LitServe leaves processes of its own behind otherwise
        )
        try:
            _wait(name, port, process)
            yield Running(port, process.pid, log)
        finally:
            os.killpg(process.pid, signal.SIGCONT)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def _wait(name: str, port: int, process: subprocess.Popen) -> None:
    """Until the server takes connections."""
    end = time.monotonic() + _START
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{name} does not begin to serve")


def busy_seconds(process: int) -> float:
    """The time of the processor that a server's processes have taken: those of its session."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that has just ended
            fields = file.read_text().rpartition(") ")[2].split()
            if int(fields[3]) == process:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_kib(process: int) -> int:
    """The memory of a process that is in use, in KiB."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise SystemExit(f"the process {process} has no memory")

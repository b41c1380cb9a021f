"""Where the microseconds of a request to dlsys.serve go.

    python benchmarks serve_layers [--repeats 400] [--out FOLDER]

Everything happens in this process: requests are given to the protocol of a connection as bytes and
their answers taken from a transport that does nothing, so that neither the kernel nor another
process takes part, and the least of many repeats is what the work itself takes, also on a machine
that does other things. `uvicorn` is an endpoint that answers a constant, `whole way` a request
through uvicorn's parser and the gateway, `shortcut` one whose head repeats; both without the
model's run, which `model` is. `echo` is the kernel's part: a message to a loop of uvloop and back
over a socket, less the loop's own turn. All are µs a request. Writes `layers` of serve.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared import measure, services
from shared.served import INFER, write_models

os.environ["DLSYS_THREADS"] = "1"
CLIENTS = (1, 16, 64)
_HEAD = (
    f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 784\r\nInference-Header-Content-Length"
)
REQUEST = f"{_HEAD}: 0\r\n\r\n".encode() + bytes(range(256)) * 3 + bytes(16)


class Sink:
    """A transport that counts what is written."""

    def __init__(self) -> None:
        self.writes = 0

    def write(self, data: bytes) -> None:
        self.writes += 1

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def close(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def connections(config: Any, count: int) -> list[Any]:
    """Connections of a server that is not started."""
    import uvicorn

    state = uvicorn.server.ServerState()
    state.default_headers = [(b"date", b"Tue, 24 Nov 2026 12:00:00 GMT")]
    loop = asyncio.get_running_loop()
    made = []
    for _ in range(count):
        made.append(config.http_protocol_class(config, state, {}, loop))
        made[-1].connection_made(Sink())
    return made


async def least(some: list[Any], writes: int, before: Callable[[Any], None], repeats: int) -> float:
    """The least seconds a request, of all connections at once. writes: of an answer."""
    best = float("inf")
    for _ in range(repeats):
        for each in some:
            before(each)
            each.transport.writes = 0
        last = some[-1].transport
        begin = time.perf_counter()
        for each in some:
            each.data_received(REQUEST)
        while last.writes < writes:
            await asyncio.sleep(0)
        best = min(best, time.perf_counter() - begin)
        while any(each.transport.writes < writes for each in some):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    return best / len(some)


async def bare(repeats: int) -> dict[int, float]:
    """The endpoint without a model."""
    import uvicorn

    config = uvicorn.Config(services.bare(), access_log=False, log_config=None, lifespan="off")
    config.load()
    return {n: await least(connections(config, n), 2, lambda c: None, repeats) for n in CLIENTS}


async def ours(folder: Path, repeats: int) -> dict[str, dict[int, float]]:
    """The service: both ways, and its model."""
    from dlsys.runtime.device import context_of
    from dlsys.serve.logs import Log
    from dlsys.serve.server import _http_server
    from dlsys.serve.service import Service
    from dlsys.serve.settings import Settings

    with open(os.devnull, "w") as nowhere:
        settings = Settings({"lenet": folder / "lenet.safetensors"}, context_of("cpu"))
        service = Service(settings, Log(nowhere))
        await service.repository.load_all()
        config = _http_server(service, 30).config
        config.load()
        batcher = service.repository.find("lenet").batcher
        found: dict[str, dict[int, float]] = {"model": {}, "whole way": {}, "shortcut": {}}
        for n in CLIENTS:
            run, outputs = batcher._run, {}

            def known(inputs: Any, run: Any = run, outputs: Any = outputs) -> Any:
                """What the model gave for as many samples: a run that takes no time."""
                count = len(inputs[0])
                if count not in outputs:
                    outputs[count] = run(inputs)
                return outputs[count]

            import numpy as np

            pixels = np.zeros((n, 1, 28, 28), np.uint8)
            found["model"][n] = min(_seconds(run, pixels) for _ in range(repeats)) / n
            batcher._run = known
            some = connections(config, n)
            found["whole way"][n] = await least(some, 2, _forget, repeats)
            await least(some, 1, lambda c: None, 2)
            found["shortcut"][n] = await least(some, 1, lambda c: None, repeats)
            batcher._run = run
    return found


def _forget(connection: Any) -> None:
    """Makes the next request go the whole way."""
    connection._route = connection._head = None


def _seconds(run: Any, pixels: Any) -> float:
    begin = time.perf_counter()
    run([pixels])
    return time.perf_counter() - begin


async def echo(repeats: int) -> float:
    """Seconds of the kernel, and of the loop's transports, for a request and its answer."""

    class Peer(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(bytes(300))

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Peer, "127.0.0.1", 0)
    client = socket.create_connection(server.sockets[0].getsockname())
    client.setblocking(False)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        client.sendall(REQUEST)
        while True:
            await asyncio.sleep(0)
            try:
                client.recv(1000)
                break
            except BlockingIOError:
                continue
        best = min(best, time.perf_counter() - begin)
    client.close()
    server.close()
    return best


async def layers(folder: Path, repeats: int) -> dict[str, Any]:
    """All of them, in µs."""
    found = {"uvicorn": await bare(repeats), **await ours(folder, repeats)}
    rounded = {
        name: {str(n): round(1e6 * seconds, 1) for n, seconds in by.items()}
        for name, by in found.items()
    }
    return {**rounded, "echo": round(1e6 * await echo(repeats), 1)}


def main() -> int:
    """Returns 0."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=400)
    options = parser.parse_args()
    import uvloop

    with tempfile.TemporaryDirectory() as text:
        write_models(Path(text))
        found = uvloop.run(layers(Path(text), options.repeats))
    for name, values in found.items():
        print(f"{name:<10} {values}")
    path = options.out / "serve.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    record["layers"] = {**measure.origin(options), "machine": measure.machine(), "us": found}
    path.write_text(measure.as_json(record))
    return 0

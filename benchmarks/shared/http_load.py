"""A closed-loop HTTP client: so many connections, each with one request at a time.

    python benchmarks/shared/http_load.py PORT PATH CLIENTS SECONDS [HEADER=VALUE ...]

The body is 784 random bytes, an image of MNIST's size, different in each connection. Prints the
requests a second and the percentiles of their latency in ms, as JSON. The first fifth of the time
is not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from typing import Any

_LENGTH = re.compile(rb"content-length: (\d+)", re.I)
_WARM = 0.2  # of the time


class Client(asyncio.Protocol):
    """A connection that sends its request again when it is answered."""

    def __init__(self, request: bytes, latencies: list[tuple[float, float]], end: float) -> None:
        self._request, self._latencies, self._end = request, latencies, end
        self._got = b""
        self.failed = 0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._got = b""
        self._began = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        cut = self._got.find(b"\r\n\r\n")
        if cut < 0:
            return
        found = _LENGTH.search(self._got, 0, cut + 2)
        assert found is not None, "the answer has no length"
        if len(self._got) < cut + 4 + int(found[1]):
            return
        now = time.perf_counter()
        self._latencies.append((now, now - self._began))
        self.failed += not self._got.startswith(b"HTTP/1.1 200")
        if now < self._end:
            self._send()
        else:
            self._transport.close()
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))


async def load(
    port: int, path: str, clients: int, seconds: float, headers: dict[str, str]
) -> dict[str, Any]:
    """The figures of a run."""
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    start = time.perf_counter()
    latencies: list[tuple[float, float]] = []
    made = []
    for _ in range(clients):
        request = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 784\r\n{head}\r\n".encode()
        client = Client(request + os.urandom(784), latencies, start + seconds)
        await asyncio.get_running_loop().create_connection(lambda c=client: c, "127.0.0.1", port)
        made.append(client)
    await asyncio.gather(*(client.done for client in made))
    begin = start + _WARM * seconds
    counted = sorted(latency for at, latency in latencies if at >= begin)
    span = max(at for at, _ in latencies) - begin

    def percentile(share: float) -> float:
        return round(1e3 * counted[min(int(share * len(counted)), len(counted) - 1)], 3)

    return {
        "answered": len(latencies),
        "requests_per_second": round(len(counted) / span, 1),
        "p50_ms": percentile(0.5),
        "p95_ms": percentile(0.95),
        "p99_ms": percentile(0.99),
        "failed": sum(client.failed for client in made),
    }


def main() -> None:
    """Runs what the command line says."""
    port, path, clients, seconds, *rest = sys.argv[1:]
    try:
        from uvloop import run
    except ImportError:
        from asyncio import run
    headers = dict(text.split("=", 1) for text in rest)
    print(json.dumps(run(load(int(port), path, int(clients), float(seconds), headers))))


if __name__ == "__main__":
    main()

"""What a service is told when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..runtime.device import Context


@dataclass(frozen=True)
class Limits:
    """What a request, and all requests together, may take of the machine.

    body: bytes of a request. pixels: of an image, before any is decoded. seconds: from a request's
    first byte to its answer. waiting: requests that wait for one model; further ones get 503.
    requests: of any kind that are in progress at once. batch: samples that run together.
    """

    body: int = 16 << 20
    pixels: int = 25_000_000
    seconds: float = 30.0
    waiting: int = 256
    requests: int = 512
    batch: int = 64


@dataclass(frozen=True)
class Settings:
    """A service: its models, where it runs, who may use it.

    models: paths by name, see `repository`. ctx: the device, None for numpy. host, port, grpc_port:
    where it listens; port 0 is one that is free, grpc_port None is no gRPC. keys: what requests
    must show one of; none lets all in. origins: of pages that a browser lets use the service beside
    its own. log_requests: a line for each request, else only for what goes wrong. limits: of what
    requests may take.
    """

    models: dict[str, Path]
    ctx: Context | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = 8001
    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    log_requests: bool = True
    limits: Limits = field(default_factory=Limits)

"""The HTTP gateway: the ASGI application in front of all routes.

It admits a request, reads its body within the limits, ends it at its deadline or when its client
goes away, gives it an id and a line in the log. Inference is answered here, on the shortest way;
everything else by the routes behind it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ..faults import (
    DeadlineError,
    RequestError,
    TooLargeError,
    TooSlowError,
)
from ..protocol.inference import HEADER_LENGTH, read_request, write_response
from ..service import Service

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

OPEN = ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready")  # without a key
_WATCHED = 0.1  # seconds after which it is worthwhile to see whether the client still waits
GONE = 499  # the status in the log where nobody was there to get one
_LENGTH = HEADER_LENGTH.encode()
JSON, BINARY = b"application/json", b"application/octet-stream"
INFERRED = "dlsys.inferred"  # of a scope's state: which model and version answered


class _ClientGoneError(RequestError):
    """The client closed its connection before the answer."""

    reason = "CANCELED"


class Attendance:
    """A context in which a request is worked on: it ends at a deadline, with DeadlineError, and
    when `watch` was called and the client goes away.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._fault: RequestError | None = None
        self._listener: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.reading = True
        self.limit(seconds)

    def limit(self, seconds: float) -> None:
        """Sets the deadline, from now."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._late, seconds)

    def watch(self, receive: Receive) -> None:
        """The body has been read: what is still received is that the client goes away."""
        self.reading = False
        self._watch = self._loop.call_later(_WATCHED, self._listen, receive)

    def _late(self, seconds: float) -> None:
        if self.reading:
            self._end(TooSlowError(f"the request was not sent within {seconds:g} seconds"))
        else:
            self._end(unanswered(seconds))

    def _listen(self, receive: Receive) -> None:
        self._listener = self._loop.create_task(self._until_gone(receive))

    async def _until_gone(self, receive: Receive) -> None:
        if (await receive())["type"] == "http.disconnect":
            self._end(_ClientGoneError("the client closed the connection"))

    def _end(self, fault: RequestError) -> None:
        if self._fault is None and self._task is not None:
            self._fault = fault
            self._task.cancel()

    def __enter__(self) -> Attendance:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        for handle in (self._timer, self._watch, self._listener):
            if handle is not None:
                handle.cancel()
        if self._fault is not None and kind is asyncio.CancelledError:
            getattr(self._task, "uncancel", int)()  # from Python 3.11 on cancellations are counted
            raise self._fault from None


class Exchange:
    """A request and its response: what the log tells of it."""

    def __init__(self, scope: Any, send: Send, identity: str) -> None:
        self.method, self.path = scope["method"], scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.id = identity
        self.status = GONE
        self.began = False
        self.facts: dict[str, Any] = {}
        self._send = send

    def header(self, name: bytes) -> str | None:
        """A header of the request, by its name in lower case."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def send(self, message: Message) -> None:
        """Sends a part of the response; its beginning gets the request's id."""
        if message["type"] == "http.response.start":
            self.began, self.status = True, message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.id.encode())]
        await self._send(message)

    async def answer(
        self, status: int, body: bytes, kind: bytes, *headers: tuple[bytes, bytes]
    ) -> None:
        """Sends a response."""
        length = str(len(body)).encode()
        listed = [(b"content-type", kind), (b"content-length", length), *headers]
        await self.send({"type": "http.response.start", "status": status, "headers": listed})
        await self.send({"type": "http.response.body", "body": body})

    async def refuse(self, status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
        """Sends an error as the protocol has it, unless a response has begun."""
        if not self.began:
            await self.answer(status, error_body(text), JSON, *headers)


class Gateway:
    """The ASGI application. service: what it answers for. app: the routes."""

    def __init__(self, service: Service, app: App) -> None:
        self._service, self._app = service, app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        service, started = self._service, time.perf_counter()
        exchange = Exchange(scope, send, "")
        exchange.id = service.request_id(exchange.header(b"x-request-id"))
        service.active += 1
        try:
            with Attendance(service.settings.limits.seconds) as attendance:
                await self._handle(exchange, attendance, scope, receive)
        except _ClientGoneError:
            exchange.status = GONE
        except RequestError as fault:
            await _refuse(exchange, attendance, fault)
        except Exception as error:
            service.log.fault(error, id=exchange.id)
            await exchange.refuse(500, failure(exchange.id))
        finally:
            service.active -= 1
            if service.log.requests:
                service.log.request(
                    id=exchange.id,
                    method=exchange.method,
                    path=exchange.path,
                    status=exchange.status,
                    ms=round(1e3 * (time.perf_counter() - started), 3),
                    **exchange.facts,
                )

    async def _handle(
        self, exchange: Exchange, attendance: Attendance, scope: Any, receive: Receive
    ) -> None:
        self._service.admit()
        if exchange.path not in OPEN:
            authorization = exchange.header(b"authorization")
            self._service.authorize(authorization, exchange.header(b"x-api-key"))
        if b"content-encoding" in exchange.headers:
            raise RequestError("content-encoding: send the body as it is, without compression")
        body = await read_body(exchange, receive, self._service.settings.limits.body)
        attendance.watch(receive)
        address = infer_address(exchange.path) if exchange.method == "POST" else None
        if address is not None:
            await self._infer(exchange, attendance, body, *address)
            scope["state"][INFERRED] = address
            return
        given = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(given, {"type": "http.disconnect"})

        scope["state"] = {"exchange": exchange}
        await self._app(scope, replay, exchange.send)

    async def _infer(
        self, exchange: Exchange, attendance: Attendance, body: bytes, name: str, version: str
    ) -> None:
        """Answers POST /v2/models/NAME[/versions/VERSION]/infer."""
        model = self._service.repository.find(name, version)
        counts, started = model.counts, time.perf_counter()
        with model.counted():
            signature = model.program.signature
            request = read_request(body, exchange.header(_LENGTH), signature)
            if request.timeout is not None:
                attendance.limit(min(request.timeout, self._service.settings.limits.seconds))
            counts.input_seconds += time.perf_counter() - started
            outputs, waiting = await model.answer(request)
            answered = time.perf_counter()
            text, length = write_response(model.name, model.version, request.id, outputs)
            counts.output_seconds += time.perf_counter() - answered
        exchange.facts = model.facts(waiting)
        if length is None:
            await exchange.answer(200, text, JSON)
        else:
            header = (_LENGTH, str(length).encode())
            await exchange.answer(200, text, BINARY, header)


def infer_address(path: str) -> tuple[str, str] | None:
    """The model and the version ("" for none) of a path of inference."""
    if not (path.startswith("/v2/models/") and path.endswith("/infer")):
        return None
    parts = path.split("/")
    if len(parts) == 5:
        return parts[3], ""
    if len(parts) == 7 and parts[4] == "versions":
        return parts[3], parts[5]
    return None


async def read_body(exchange: Exchange, receive: Receive, most: int) -> bytes:
    """The body of a request. TooLargeError, as soon as it is known, for more than `most` bytes."""
    length = exchange.headers.get(b"content-length", b"0")
    if len(length) > 18 or not length.isdigit() or int(length) > most:
        raise TooLargeError(f"the request has more than {most:,} bytes")
    parts = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGoneError("the client closed the connection")
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
        size += len(parts[-1])
        if size > most:
            raise TooLargeError(f"the request has more than {most:,} bytes")
    return b"".join(parts)


async def _refuse(exchange: Exchange, attendance: Attendance, fault: RequestError) -> None:
    headers = [(name.encode(), value.encode()) for name, value in fault.headers.items()]
    if attendance.reading:  # what is left of the body would be taken for the next request
        headers.append((b"connection", b"close"))
    await exchange.refuse(fault.status, str(fault), *headers)


def unanswered(seconds: float) -> DeadlineError:
    """A request that was not answered within so many seconds."""
    return DeadlineError(f"the request was not answered within {seconds:g} seconds")


def error_body(text: str) -> bytes:
    """The body of an error as the protocol has it."""
    return json.dumps({"error": text}).encode()


def failure(identity: str) -> str:
    """What a client is told of an error of the service itself."""
    return f"the service failed; its log has why, at {identity}"

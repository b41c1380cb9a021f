"""The shortcut of inference: a request whose head repeats goes from its bytes to its batch.

A client that stays connected sends the same request line and headers again and again. When a
request has gone the whole way, through uvicorn's parser and the gateway, and was answered, its head
is remembered for its connection. The next request that begins with the same bytes means the same:
only its body is read, and it waits for its batch without a task of its own. All that is not plain
goes the whole way, which also words every refusal, so that the answers of both are the same.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..faults import DeadlineError, RequestError
from ..logs import stamp
from ..models.batcher import Key, Ran, Waiting, batched
from ..models.served import ServedModel
from ..protocol.inference import (
    HEADER_LENGTH,
    InferRequest,
    Wanted,
    raw_shape,
    read_request,
    selected,
    write_response,
)
from ..protocol.tensors import TensorSpec, from_bytes, to_bytes
from ..service import Service
from .gateway import BINARY, INFERRED, JSON, error_body, unanswered

PERIOD = 0.1  # seconds: how exactly deadlines are kept here
# Seconds until an answer is counted and logged, together with others: the next request of its
# client need not wait for that, and for the turn of the loop that it would take.
_BOOKED = 5e-3
_LENGTH = HEADER_LENGTH.encode()
# Headers that ask for more than the shortcut does; of a connection, only that it stays.
_SPECIAL = {b"transfer-encoding", b"expect", b"upgrade", b"content-encoding"}
# Headers whose values may be others in a head that repeats: they are read, or mean nothing here.
_OPEN = {
    b"content-length": rb"(?P<length>\d{1,12})",
    _LENGTH: rb"(?P<json>\d{1,12})",
    b"x-request-id": rb"(?P<id>[!-~](?:[ -~]{0,126}[!-~])?)",
    b"traceparent": rb"[!-~]*",
}
Read = tuple[list[np.ndarray], int, Key, InferRequest | None]
_MOST_SHAPES = 64  # of a model's answers whose fixed parts are kept


class Form(NamedTuple):
    """Heads that are alike, as a pattern that matches each of them, and what they ask for.

    name, version: the model. path: as the log has it. most: bytes of a body.
    """

    pattern: re.Pattern[bytes]
    name: str
    version: str
    path: str
    most: int

    def route(self, data: bytes) -> Route | None:
        """That of the request that these bytes begin; None where its head is another."""
        found = self.pattern.match(data)
        if found is None or int(found["length"]) > self.most:
            return None
        return Route(self, found)


class Route:
    """Requests with one head. form: what heads like it mean. found: the head, by its pattern.

    `head` and `size` are the bytes up to the body, and how many there are with the body.
    """

    def __init__(self, form: Form, found: re.Match[bytes]) -> None:
        self.form = form
        self.head, self.start = found[0], found.end()
        values = found.groupdict()
        self.length = int(values["length"])
        self.size = self.start + self.length
        self.identity = values["id"].decode() if "id" in values else None
        self._json = values["json"].decode() if "json" in values else None
        self._is_raw = self._json is not None and not int(self._json)
        self._model: ServedModel | None = None
        self._spec: TensorSpec | None = None
        self._shape: tuple[int, ...] = ()
        self._key: Key = ()

    def read(self, model: ServedModel, data: bytes) -> Read:
        """The inputs of a request, their samples and key as a batch has them, and what is asked
        for: None is all outputs, binary. RequestError for a request that is at fault.
        """
        if not self._is_raw:
            request = read_request(data[self.start :], self._json, model.program.signature)
            model.check(request.inputs)
            return request.inputs, *batched(request.inputs), request
        if self._model is not model:
            self._spec, self._shape = raw_shape(self.length, model.program.signature)
            self._model, self._key = model, (self._shape[1:],)
        spec, shape = self._spec, self._shape
        assert spec is not None, "it was set with the model"
        if spec.datatype == "UINT8":  # which has neither an alignment nor values that are none
            array = np.ndarray(shape, np.uint8, data, self.start)
        else:
            array = from_bytes(spec, shape, data[self.start :])
        return [array], shape[0], self._key, None


def route_of(head: bytes, scope: Any, service: Service) -> Route | None:
    """The route of a head whose request was answered; None where that was no inference, or the head
    asks for more than its answer.

    scope: what uvicorn made of it.
    """
    address = scope["state"].get(INFERRED)
    values = dict(scope["headers"])
    special = _SPECIAL | {b"origin"} if service.settings.origins else _SPECIAL
    stays = values.get(b"connection", b"keep-alive").lower() == b"keep-alive"
    if address is None or not stays or scope["http_version"] != "1.1":
        return None
    if special & {*values} or b"content-length" not in values:
        return None
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    # Nothing before the request line, no header twice, and lines that end as everybody reads them.
    is_plain = first.startswith(b"POST /") and head.count(b"\n") == len(lines) + 2
    if not is_plain or not len(lines) == len(values) == len(scope["headers"]):
        return None
    pattern = re.compile(b"\r\n".join([re.escape(first), *map(_pattern, lines), b"\r\n"]))
    name, version = address
    path, most = json.dumps(scope["path"]), service.settings.limits.body
    return Form(pattern, name, version, path, most).route(head)


def _pattern(line: bytes) -> bytes:
    """What matches the same header: with any value where that may be another."""
    name, sign, value = line.partition(b":")
    if name.lower() not in _OPEN:
        return re.escape(line)
    space = value[: len(value) - len(value.lstrip(b" \t"))]
    return re.escape(name + sign + space) + _OPEN[name.lower()]


class Asked(Waiting):
    """A request on the shortcut.

    shortcut: of its service. connection: that it came by, None when nobody waits for it any more.
    route: of its head. model: that it asks. data: its bytes. `request` is what it asks for, see
    Route; `began` when its last byte had come.
    """

    __slots__ = ("shortcut", "connection", "route", "model", "data", "request", "began")

    def __init__(
        self,
        shortcut: Shortcut,
        connection: Connection,
        route: Route,
        model: ServedModel,
        data: bytes,
    ) -> None:
        self.began = perf_counter()
        self.shortcut, self.route, self.model, self.data = shortcut, route, model, data
        self.connection: Connection | None = connection
        self.inputs, self.size, self.key, self.request = route.read(model, data)
        self.ran = None
        self.arrived = perf_counter()

    def answer(self, outputs: list[np.ndarray]) -> None:
        if self.connection is not None:
            self.shortcut.answer(self, self.connection, outputs)

    def fail(self, error: Exception) -> None:
        if self.connection is not None:
            self.shortcut.leave(self).the_whole_way_after_all()


class Connection(Protocol):
    """What the shortcut needs of a connection."""

    def respond(self, status: int, fixed: bytes, identity: str, body: bytes) -> None:
        """Sends a response: its headers but the request's id, the id, the body."""

    def the_whole_way_after_all(self) -> None:
        """Sends the request that waits here the whole way."""

    def let_go(self) -> None:
        """Sends what was held for its other part the whole way."""


class Shortcut:
    """The shortcut of a service, for all of its connections. `held` are those that wait for the
    other part of a request.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.held: set[Connection] = set()
        self._asked: set[Asked] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._answered: list[tuple[Asked, str, float, float]] = []
        self._stamped: tuple[Ran | None, str] = None, ""
        service.settle = self.book

    def read(self, connection: Connection, route: Route, data: bytes) -> Asked | None:
        """A request from its bytes; None for one that has to go the whole way."""
        service = self.service
        if service.active >= service.settings.limits.requests:
            return None
        try:
            model = service.repository.find(route.form.name, route.form.version)
            asked = Asked(self, connection, route, model, data)
        except RequestError:
            return None
        is_timed = asked.request is not None and asked.request.timeout is not None
        return None if is_timed or model.batcher.full else asked

    def ask(self, asked: Asked, loop: asyncio.AbstractEventLoop, alone: bool) -> None:
        """Puts a request into its model's queue. alone: whether no other can come with it."""
        self.service.active += 1
        self._asked.add(asked)
        if self._timer is None:
            self.watch(loop)
        asked.model.batcher.put(asked, loop, alone)

    def answer(self, asked: Asked, connection: Connection, outputs: list[np.ndarray]) -> None:
        """Answers a request whose batch ran; counts and logs it soon after."""
        answering = perf_counter()
        service = self.service
        if asked.request is None:
            fixed, body = _raw_answer(asked.model, outputs)
        else:
            fixed, body = _answer(asked.model, asked.request, outputs)
        identity = service.request_id(asked.route.identity)
        self._asked.discard(asked)
        service.active -= 1
        connection.respond(200, fixed, identity, body)
        if not self._answered:
            asyncio.get_running_loop().call_later(_BOOKED, self.book)
        self._answered.append((asked, identity, answering, perf_counter()))

    def book(self) -> None:
        """Counts and logs what was answered."""
        answered, self._answered = self._answered, []
        is_logged, lines = self.service.log.requests, []
        for asked, identity, answering, now in answered:
            counts = asked.model.counts
            counts.input_seconds += asked.arrived - asked.began
            counts.output_seconds += now - answering
            counts.request_seconds += now - asked.began
            counts.success += 1
            asked.model.count(asked)
            if is_logged:
                lines.append(self._line(asked, identity, now))
        if lines:
            self.service.log.lines("".join(lines))

    def _line(self, asked: Asked, identity: str, now: float) -> str:
        """The line of the log, as `Log.request` writes it."""
        route, model, ran = asked.route, asked.model, asked.ran
        assert ran is not None, "it is answered"
        if self._stamped[0] is not ran:
            self._stamped = ran, stamp(time.time() - perf_counter() + now)
        name = identity if route.identity is None else json.dumps(identity)[1:-1]
        return (
            f'{{"time": "{self._stamped[1]}", "level": "info", "event": "request", "id": "{name}", '
            f'"method": "POST", "path": {route.form.path}, "status": 200, '
            f'"ms": {1e3 * (now - asked.began):.3f}, "model": "{model.name}", '
            f'"version": "{model.version}", "batch": {ran.samples}, '
            f'"queue_ms": {1e3 * (ran.started - asked.arrived):.3f}, '
            f'"compute_ms": {1e3 * (ran.ended - ran.started):.3f}}}\n'
        )

    # ---- what is not answered ----
    def leave(self, asked: Asked) -> Connection:
        """Takes a request out, whose outputs are for nobody then; its connection."""
        connection, asked.connection = asked.connection, None
        assert connection is not None, "it leaves once"
        self._asked.discard(asked)
        self.service.active -= 1
        asked.model.batcher.withdraw(asked)
        return connection

    def give_up(self, asked: Asked, status: int) -> tuple[Connection, str]:
        """Takes out a request that nobody waits for, counts and logs it; its connection and id."""
        connection = self.leave(asked)
        asked.model.counts.failures["CANCELED"] += 1
        identity = self.service.request_id(asked.route.identity)
        ms = round(1e3 * (perf_counter() - asked.began), 3)
        path = json.loads(asked.route.form.path)
        self.service.log.request(id=identity, method="POST", path=path, status=status, ms=ms)
        return connection, identity

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Looks in a while at what waits."""
        if self._timer is None:
            self._timer = loop.call_later(PERIOD, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends what is behind its deadline."""
        self._timer = None
        for connection in [*self.held]:
            connection.let_go()
        seconds, now = self.service.settings.limits.seconds, perf_counter()
        for asked in [asked for asked in self._asked if now - asked.began > seconds]:
            connection, identity = self.give_up(asked, DeadlineError.status)
            body = error_body(str(unanswered(seconds)))
            fixed = _fixed(len(body), JSON)
            connection.respond(DeadlineError.status, fixed, identity, body)
        if self._asked:
            self.watch(loop)


# ---- answers: the headers before the request's id, and the body ----
def _fixed(length: int, kind: bytes, *headers: bytes) -> bytes:
    lines = (b"content-type: " + kind, b"content-length: %d" % length, *headers, b"x-request-id: ")
    return b"\r\n".join(lines)


def _answer(
    model: ServedModel, request: InferRequest, outputs: list[np.ndarray]
) -> tuple[bytes, bytes]:
    """Of the outputs that a request asks for."""
    found = selected(request, model.program.signature, outputs)
    body, length = write_response(model.name, model.version, request.id, found)
    if length is None:
        return _fixed(len(body), JSON), body
    return _fixed(len(body), BINARY, b"%b: %d" % (_LENGTH, length)), body


def _raw_answer(model: ServedModel, outputs: list[np.ndarray]) -> tuple[bytes, bytes]:
    """Of all outputs as bytes: but for these it is the same for the same shapes."""
    shapes = tuple([y.shape for y in outputs])
    found = model.answers.get(shapes)
    if found is None:
        names = [Wanted(spec.name, binary=True) for spec in model.program.signature.outputs]
        fixed, body = _answer(model, InferRequest([], tuple(names)), outputs)
        size = sum(y.nbytes for y in outputs)
        if len(model.answers) == _MOST_SHAPES:
            model.answers.clear()
        found = model.answers[shapes] = fixed, body[: len(body) - size]
    return found[0], b"".join([found[1], *map(to_bytes, outputs)])

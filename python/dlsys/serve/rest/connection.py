"""A connection: uvicorn's protocol, with the shortcut before its parser."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..service import Service
from .gateway import GONE
from .shortcut import Asked, Route, Shortcut, route_of

_LONGEST = 1 << 16  # bytes of a request whose parts are put together before the parser


def connection_class(service: Service) -> type[HttpToolsProtocol]:
    """The protocol that uvicorn makes for each connection of a service."""
    shortcut = Shortcut(service)

    class Connection(ShortcutProtocol):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._shortcut = shortcut

    return Connection


class ShortcutProtocol(HttpToolsProtocol):
    """uvicorn's protocol, before whose parser a request can take the shortcut: where the parser is
    between two requests, and the bytes begin with the head of an earlier one (see `shortcut`).
    """

    _shortcut: Shortcut

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._begun = 0  # requests that the parser has begun
        self._parsing = False  # whether it is within one
        self._head: bytes | None = None  # of the parser's last request, until that is answered
        self._route: Route | None = None
        self._asked: Asked | None = None  # the request that is on the shortcut
        self._held = b""  # the first part of one
        self._later = b""  # what came behind it
        self._known: tuple[list[tuple[bytes, bytes]], bytes, bytes] = [], b"", b""
        self._last = 0.0  # when one was answered
        self._ending = False

    # ---- the parser ----
    def on_message_begin(self) -> None:
        self._begun += 1
        self._parsing = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._parsing = False
        super().on_message_complete()

    def _between(self) -> bool:
        """Whether all that the parser was given is answered."""
        return not self._parsing and (self.cycle is None or self.cycle.response_complete)

    def the_whole_way(self, data: bytes) -> None:
        """Gives bytes to the parser, and keeps the head of a request that begins and ends them."""
        begun, fresh = self._begun, self._between()
        super().data_received(data)
        if fresh:
            cut = data.find(b"\r\n\r\n") + 4
            self._head = data[:cut] if cut > 3 and self._begun == begun + 1 else None

    def _learn(self, head: bytes) -> None:
        """Keeps the route of an answered request."""
        if self._between():
            self._head = None
            self._route = route_of(head, self.scope, self._shortcut.service) or self._route

    # ---- the shortcut ----
    def data_received(self, data: bytes) -> None:
        if self._asked is not None:
            self._later += data
            self.flow.pause_reading()
            return
        if self._held:
            data = self._taken() + data
        if self._head is not None:
            self._learn(self._head)
        route = self._route
        if route is not None and self._between():
            if not data.startswith(route.head):
                route = route.form.route(data)
                self._route = route or self._route
        else:
            route = None
        if route is not None:
            if len(data) == route.size and not self.flow.write_paused:
                self._asked = asked = self._shortcut.read(self, route, data)
                if asked is not None:
                    self._shortcut.ask(asked, self.loop, len(self.connections) == 1)
                    return
            elif len(data) < route.size <= _LONGEST:
                self._hold(data)
                return
        self.the_whole_way(data)

    def _hold(self, data: bytes) -> None:
        self._held = data
        self._shortcut.held.add(self)
        self._shortcut.watch(self.loop)

    def _taken(self) -> bytes:
        held, self._held = self._held, b""
        self._shortcut.held.discard(self)
        return held

    def let_go(self) -> None:
        self.the_whole_way(self._taken())

    def _first(self, status: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
        """The status line and uvicorn's own headers, which are new each second."""
        known = self._known
        if known[0] is not headers or known[1] is not status:
            lines = [b"%b: %b\r\n" % pair for pair in headers]
            self._known = known = headers, status, b"".join([status, *lines])
        return known[2]

    def respond(self, status: int, fixed: bytes, identity: str, body: bytes) -> None:
        self._asked = None
        self._last = perf_counter()
        self.server_state.total_requests += 1
        end = b"\r\nconnection: close\r\n\r\n" if self._ending else b"\r\n\r\n"
        first = self._first(STATUS_LINE[status], self.server_state.default_headers)
        self.transport.write(b"".join([first, fixed, identity.encode(), end, body]))
        if self._ending:
            self.transport.close()
        elif self._later:
            self.flow.resume_reading()
            data, self._later = self._later, b""
            self.data_received(data)

    def the_whole_way_after_all(self) -> None:
        asked, self._asked = self._asked, None
        assert asked is not None, "it was asked"
        data, self._later = asked.data + self._later, b""
        self.the_whole_way(data)
        if self._ending:
            super().shutdown()

    # ---- the end ----
    def timeout_keep_alive_handler(self) -> None:
        # The parser's way sets this timer for each request anew; the shortcut moves it when it is
        # due.
        left = self._last + self.timeout_keep_alive - perf_counter()
        if self._asked is not None or self._held:
            left = self.timeout_keep_alive
        if left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(
                left, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self._taken()
        if self._asked is not None:
            self._shortcut.give_up(self._asked, GONE)
            self._asked = None
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._asked is not None:
            self._ending = True
            return
        if self._held:
            self.let_go()
        super().shutdown()

"""What REST and gRPC share: the models, the settings, and who may use them."""

from __future__ import annotations

import hmac
import itertools
import os
from collections.abc import Callable

from .faults import OverloadedError, UnauthorizedError
from .logs import Log
from .models.repository import Repository
from .models.served import ServedModel
from .settings import Settings

_LONGEST_ID = 128  # characters of a request id that a client gives


class Service:
    """A service without its listeners.

    settings: see there. log: where it tells what happens. `closing` is set when it has begun to
    end: it is not ready then, and still answers.
    """

    def __init__(self, settings: Settings, log: Log) -> None:
        self.settings, self.log = settings, log
        self.repository = Repository(settings.models, settings.ctx, settings.limits, log)
        self.closing = False
        self.settle: Callable[[], None] = lambda: None  # counts and logs what is answered
        self.active = 0  # requests in progress
        self._numbers = itertools.count(1)
        self._prefix = os.urandom(6).hex()
        self._keys = [key.encode() for key in settings.keys]

    @property
    def ready(self) -> bool:
        """Whether it takes requests, with every model there."""
        return not self.closing and self.repository.ready

    def first(self, name: str | None, version: str | None = None) -> ServedModel:
        """The model of a name, by default the first one that was given."""
        return self.repository.find(name or self.repository.names[0], version or "")

    def admit(self) -> None:
        """OverloadedError where too many requests are in progress."""
        if self.active > self.settings.limits.requests:
            raise OverloadedError(f"{self.active:,} requests are in progress: try again later")

    def authorize(self, authorization: str | None, key: str | None) -> None:
        """UnauthorizedError unless a key is one of the service's, or it has none.

        authorization: `Bearer KEY`, as the header of that name. key: as in the header X-API-Key.
        """
        if not self._keys:
            return
        given = key
        if given is None and authorization is not None:
            scheme, _, given = authorization.partition(" ")
            given = given.strip() if scheme.lower() == "bearer" else None
        # All keys are compared, so that the time does not tell which one was nearly right.
        encoded = (given or "").encode()
        if not any([hmac.compare_digest(encoded, known) for known in self._keys]):
            raise UnauthorizedError(
                "this service needs a key: send it as `Authorization: Bearer KEY` or `X-API-Key`"
            )

    def request_id(self, given: str | None) -> str:
        """The id of a request: the client's where it is printable and short, else a new one."""
        if given and len(given) <= _LONGEST_ID and given.isascii() and given.isprintable():
            return given
        return f"{self._prefix}-{next(self._numbers)}"

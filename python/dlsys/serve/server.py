"""A service with its listeners: HTTP by uvicorn and gRPC, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError, DlsysError, how_to_install
from ..runtime.device import context_of
from .logs import Forwarding, Log
from .models.repository import named_paths
from .service import Service
from .settings import Settings

_NEEDED = ("fastapi", "uvicorn", "grpc", "google.protobuf", "python_multipart", "PIL")
_KEPT_ALIVE = 75  # seconds of a connection without a request
_BACKLOG = 2048  # connections that the system holds until they are accepted
_SHORT = 1.0  # seconds of a deadline that is kept by a timer of its own
_GRACE = 5.0  # seconds beyond the limit of a request that the end of a service waits for


def require_packages() -> None:
    """DlsysError names what has to be installed for a service."""
    missing = [name for name in _NEEDED if not _is_there(name)]
    if missing:
        commands = " ".join(how_to_install(name).removeprefix("pip install ") for name in missing)
        raise DlsysError(f"a service needs further packages: pip install {commands}")


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


class Listeners:
    """What listens for a service.

    service: what answers. http: uvicorn's server. port: of HTTP. grpc_port: of gRPC, or None.
    """

    def __init__(self, service: Service, http: Any, port: int, grpc_port: int | None) -> None:
        self.service, self.port, self.grpc_port = service, port, grpc_port
        self._http = http

    def stop(self) -> None:
        """Takes no more connections and ends when all requests are answered; a second call ends at
        once.
        """
        self._http.force_exit = self.service.closing
        self.service.closing = self._http.should_exit = True

    async def reload(self) -> None:
        """Loads every model anew; one that cannot be loaded stays as it is, and the log has why."""
        for name in self.service.repository.names:
            try:
                await self.service.repository.load(name)
            except DlsysError as error:
                self.service.log.write("not loaded", "error", model=name, error=str(error))


async def serve(settings: Settings, log: Log, started: Callable[[Listeners], None]) -> None:
    """Serves until `stop` of the listeners, which `started` is called with when they are there;
    then answers what has begun. DlsysError where a model cannot be loaded or a port is taken.
    """
    from .rpc.service import make_server

    _forward(log)
    service = Service(settings, log)
    with contextlib.closing(_listening(settings.host, settings.port)) as listener:
        await service.repository.load_all()
        grpc_server, grpc_port = None, None
        if settings.grpc_port is not None:
            grpc_server, grpc_port = make_server(service)
            await grpc_server.start()
        grace = settings.limits.seconds + _GRACE
        http = _http_server(service, int(grace))
        port = listener.getsockname()[1]
        listener.listen(_BACKLOG)
        started(Listeners(service, http, port, grpc_port))
        log.write("serving", http=f"http://{settings.host}:{port}", grpc_port=grpc_port)
        try:
            await http.serve(sockets=[listener])
        finally:
            service.closing = True
            if grpc_server is not None:
                await grpc_server.stop(grace)
            await service.repository.close()
            service.settle()
            log.write("ended")


def _http_server(service: Service, grace: int) -> Any:
    """uvicorn with the application; `grace`: seconds for requests to end."""
    import uvicorn

    from .rest.app import make_app

    class Server(uvicorn.Server):
        """uvicorn's server, which leaves signals to the service."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        make_app(service), http=_protocol(service), log_config=None, access_log=False,
        lifespan="off", ws="none", server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=grace, timeout_keep_alive=_KEPT_ALIVE,
    )  # fmt: skip
    return Server(config)


def _protocol(service: Service) -> Any:
    """What uvicorn makes of a connection: with the shortcut of inference where its parser is there,
    and where deadlines are long enough for the shortcut to keep them.
    """
    if not _is_there("httptools") or service.settings.limits.seconds < _SHORT:
        return "auto"
    from .rest.connection import connection_class

    return connection_class(service)


def _listening(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet: what comes before the models are loaded is
    refused. DataError where that cannot be.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(found[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[4])
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"HTTP cannot listen at {host}:{port}: {reason}") from None
    return listener


def run(settings: Settings, log: Log | None = None) -> None:
    """Serves until SIGINT or SIGTERM, in the main thread; SIGHUP loads all models anew.

    settings: see there. log: by default on standard error. DlsysError as of `serve`.
    """
    require_packages()
    log = log or Log(requests=settings.log_requests)

    def started(listeners: Listeners) -> None:
        gc.freeze()  # models and modules stay: the collector need not look at them again and again
        loop = asyncio.get_running_loop()
        tasks = set()

        def reload() -> None:
            task = loop.create_task(listeners.reload())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, listeners.stop)
        loop.add_signal_handler(signal.SIGHUP, reload)

    _in_loop(serve(settings, log, started))


def _forward(log: Log) -> None:
    for name in ("uvicorn", "asyncio", "python_multipart"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [Forwarding(log)], False


def _in_loop(work: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine in a loop of its own, of uvloop where that is installed."""
    loop = asyncio.new_event_loop()
    if importlib.util.find_spec("uvloop"):
        import uvloop

        loop = uvloop.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(work)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


class Server:
    """A service in a thread of its own, for notebooks and tests: a context that serves within.

    models: paths, or NAME=PATH, or paths by name. device: "cpu", "gpu" or "numpy", by default.
    port, grpc_port: by default ones that are free; None is no gRPC. log: by default on standard
    error, without a line for each request. settings: more, as of Settings. `url` and `port` tell
    where it is. DlsysError where the context begins, for a model that cannot be loaded, a port that
    is taken or a package that is missing.
    """

    def __init__(
        self,
        models: Sequence[str | Path] | Mapping[str, str | Path],
        device: str = "numpy",
        port: int = 0,
        grpc_port: int | None = 0,
        log: Log | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(models, Mapping):
            paths = {name: Path(path) for name, path in models.items()}
        else:
            paths = named_paths([str(path) for path in models])
        ctx = context_of(device)
        self.settings = Settings(paths, ctx, port=port, grpc_port=grpc_port, **settings)
        self._log = log or Log(requests=False)
        self._started = threading.Event()
        self._fault: BaseException | None = None
        self._listeners: Listeners | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="dlsys-serve", daemon=True)

    @property
    def listeners(self) -> Listeners:
        """What listens. DlsysError outside of the context."""
        if self._listeners is None:
            raise DlsysError("the server does not serve: use it in a `with`")
        return self._listeners

    @property
    def port(self) -> int:
        """The port of HTTP."""
        return self.listeners.port

    @property
    def grpc_port(self) -> int | None:
        """The port of gRPC."""
        return self.listeners.grpc_port

    @property
    def url(self) -> str:
        """Where HTTP is."""
        return f"http://{self.settings.host}:{self.port}"

    def stop(self) -> None:
        """Begins to end, as leaving the context does, which also waits for it."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self.listeners.stop)

    def __enter__(self) -> Server:
        require_packages()
        self._thread.start()
        self._started.wait()
        if self._fault is not None:
            raise self._fault
        return self

    def __exit__(self, *error: object) -> None:
        if not self.listeners.service.closing:
            self.stop()
        self._thread.join()

    def _run(self) -> None:
        def started(listeners: Listeners) -> None:
            self._listeners, self._loop = listeners, asyncio.get_running_loop()
            self._started.set()

        try:
            _in_loop(serve(self.settings, self._log, started))
        except BaseException as error:
            self._fault = error
        finally:
            self._started.set()

"""Services on small networks, and clients of them, for the tests of dlsys.serve."""

from __future__ import annotations

import http.client
import io
import json
import socket
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlsys import nn, train
from dlsys.data import DataDescription
from dlsys.errors import DlsysError
from dlsys.serve import Log, Server
from dlsys.serve.server import require_packages

DIGITS = tuple("0123456789")
BOUNDARY = "xYzBoundary"


def missing() -> str:
    """What a service lacks here, "" for nothing."""
    try:
        require_packages()
    except DlsysError as error:
        return str(error)
    return ""


needs_serve = unittest.skipIf(missing(), f"not here: {missing()}")


class Answer(NamedTuple):
    """A response. headers: with names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


def digits_model(seed: int = 0) -> nn.Module:
    """LeNet-5 with its first weights, described as one that was trained on MNIST."""
    model = nn.LeNet5(seed=seed)
    model.trained_on = DataDescription((1, 28, 28), "uint8", (0.1,), (0.3,), DIGITS)
    return model


def digit_images(count: int, seed: int = 0) -> np.ndarray:
    """Random pixels (count, 1, 28, 28) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, 1, 28, 28), np.uint8)


def probabilities(model: nn.Module, pixels: np.ndarray) -> np.ndarray:
    """What a service must answer: softmax of the network on normalized pixels, in float64."""
    logits = np.asarray(train.predict(model, pixels), np.float64)
    grown = np.exp(logits - logits.max(axis=1, keepdims=True))
    return grown / grown.sum(axis=1, keepdims=True)


def request(
    port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> Answer:
    """The answer to one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read())
    finally:
        connection.close()


class Wire:
    """A connection that stays open, written and read as bytes."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it; the server sees that."""
        self._file.close()
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        """Sends bytes, each part on its own."""
        for k, part in enumerate(parts):
            if k:
                time.sleep(0.01)
            self.socket.sendall(part)

    def read(self) -> Answer:
        """The next answer, with its headers in order. ConnectionError at the end."""
        line = self._file.readline()
        if not line:
            raise ConnectionError("the server closed the connection")
        headers = {}
        while text := self._file.readline().strip().decode("latin-1"):
            name, _, value = text.partition(": ")
            headers[name] = value
        return Answer(
            int(line.split()[1]), headers, self._file.read(int(headers["content-length"]))
        )

    def ask(self, *parts: bytes) -> Answer:
        """The answer to one request."""
        self.send(*parts)
        return self.read()


def post_bytes(path: str, body: bytes, **headers: str) -> bytes:
    """A POST as it is on the wire; `_` in names of headers is `-`."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def form(content: bytes, name: str = "file") -> tuple[bytes, dict[str, str]]:
    """A multipart body with one file, and its header."""
    head = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\n\r\n'
    )
    body = head.encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()
    return body, {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def as_json(pixels: np.ndarray, **parts: Any) -> bytes:
    """An inference request of the protocol in JSON."""
    tensor = {
        "name": "input", "datatype": "UINT8", "shape": list(pixels.shape),
        "data": pixels.ravel().tolist(),
    }  # fmt: skip
    return json.dumps({"inputs": [tensor], **parts}).encode()


class Serving(unittest.TestCase):
    """One service for a class of tests: of `digits_model`, and of whatever `models` adds."""

    server: Server
    options: dict[str, Any] = {}

    @classmethod
    def models(cls, folder: Path) -> dict[str, Path]:
        """The models by name, made in a folder."""
        cls.model = digits_model()
        train.save(folder / "digits.safetensors", cls.model)
        return {"digits": folder / "digits.safetensors"}

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.lines = io.StringIO()
        paths = cls.models(cls.folder)
        cls.server = Server(paths, log=Log(cls.lines), **cls.options)
        cls.enterClassContext(cls.server)

    @classmethod
    def enterClassContext(cls, context: Any) -> Any:  # as of Python 3.11
        cls.addClassCleanup(context.__exit__, None, None, None)
        return context.__enter__()

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """The answer of the class's service."""
        return request(self.server.port, method, path, body, headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """The answer to a POST; `_` in names of headers is `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.send("POST", path, body, named)

    def check_refused(self, answer: Answer, status: int, sentence: str) -> None:
        """An error of the protocol: one sentence, without a traceback."""
        self.assertEqual(answer.status, status, answer.body)
        self.assertEqual([*answer.json], ["error"])
        self.assertRegex(answer.json["error"], sentence)
        self.assertNotIn("Traceback", answer.json["error"])
        self.assertNotIn("\n", answer.json["error"])

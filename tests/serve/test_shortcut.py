"""The shortcut of inference: what goes by it is answered as what goes the whole way."""

from __future__ import annotations

import io
import json
import random
import tempfile
import threading
import time
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dlsys import train
from dlsys.errors import DlsysError
from dlsys.serve import Limits, Log, Server
from serve.test_service import RAW, held
from support.serving import (
    Answer,
    Serving,
    Wire,
    as_json,
    digit_images,
    digits_model,
    needs_serve,
    post_bytes,
    probabilities,
    request,
)

INFER = "/v2/models/digits/infer"
CLOSE = 2e-6  # each side is up to 0.9e-6 from probabilities in float64, of logits of up to 13


@contextmanager
def shortcuts() -> Iterator[list[bool]]:
    """Whether each request that tried the shortcut took it."""
    from dlsys.serve.rest.shortcut import Shortcut

    taken: list[bool] = []
    read = Shortcut.read

    def noted(self: Any, *arguments: Any) -> Any:
        found = read(self, *arguments)
        taken.append(found is not None)
        return found

    with mock.patch.object(Shortcut, "read", noted):
        yield taken


def shown(answer: Answer) -> tuple[int, list[tuple[str, str]], bytes]:
    """An answer without what differs from request to request."""
    changing = ("date", "x-request-id")
    return answer.status, [x for x in answer.headers.items() if x[0] not in changing], answer.body


def raw(pixels: np.ndarray, **headers: str) -> bytes:
    return post_bytes(INFER, pixels.tobytes(), **RAW, **headers)


def binary(pixels: np.ndarray) -> bytes:
    """JSON with a binary tensor behind it, and binary outputs."""
    tensor = {
        "name": "input", "datatype": "UINT8", "shape": list(pixels.shape),
        "parameters": {"binary_data_size": pixels.nbytes},
    }  # fmt: skip
    parameters = {"binary_data_output": True}
    text = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    length = str(len(text))
    return post_bytes(INFER, text + pixels.tobytes(), Inference_Header_Content_Length=length)


@needs_serve
class Alike(Serving):
    options = {"grpc_port": None, "limits": Limits(body=300_000)}

    def requests(self) -> dict[str, bytes]:
        """Inferences of each form, on the wire."""
        pixels, several = digit_images(1), digit_images(3, seed=1)
        top = [{"name": "probabilities", "parameters": {"classification": 2}}]
        return {
            "raw": raw(pixels),
            "raw, several": raw(several),
            "version": post_bytes("/v2/models/digits/versions/1/infer", pixels.tobytes(), **RAW),
            "query": post_bytes(f"{INFER}?a=b", pixels.tobytes(), **RAW),
            "own id": raw(pixels, X_Request_Id='mine "and" yours'),
            "JSON": post_bytes(INFER, as_json(pixels, id="a")),
            "classes": post_bytes(INFER, as_json(several, outputs=top)),
            "binary": binary(several),
            "stays": raw(pixels, Connection="Keep-Alive"),
        }

    def test_answers_are_the_same_bytes(self) -> None:
        for name, data in self.requests().items():
            with self.subTest(name), shortcuts() as taken, Wire(self.server.port) as wire:
                first, *others = [wire.ask(data) for _ in range(3)]
                self.assertEqual(taken, [True, True])
                self.assertEqual(first.status, 200, first.body)
                for other in others:
                    self.assertEqual(shown(other), shown(first))
                    self.assertEqual([*other.headers], [*first.headers])
                ids = {answer.headers["x-request-id"] for answer in (first, *others)}
                self.assertEqual(len(ids), 1 if name == "own id" else 3)

    def test_heads_that_differ_in_lengths_and_ids(self) -> None:
        with shortcuts() as taken, Wire(self.server.port) as wire:
            for count in (1, 3, 2, 64, 1):
                data = post_bytes(INFER, as_json(digit_images(count)), X_Request_Id=f"id {count}")
                answer = wire.ask(data)
                self.assertEqual(answer.headers["x-request-id"], f"id {count}")
                self.assertEqual(answer.json["outputs"][0]["shape"], [count, 10])
            self.assertEqual(taken, [True] * 3)  # 64 are too long to be held until all is there
            data = post_bytes(INFER, bytes(300_001), X_Request_Id="large")
            self.assertEqual(wire.ask(data).status, 413)

    def test_they_are_the_answers_of_the_network(self) -> None:
        images = digit_images(32, seed=2)
        wanted = probabilities(self.model, images)
        with shortcuts() as taken, Wire(self.server.port) as wire:
            for image, probability in zip(images, wanted):
                got = np.frombuffer(wire.ask(raw(image)).body[-40:], "<f4")
                np.testing.assert_allclose(got, probability, atol=CLOSE)
        self.assertEqual(taken, [True] * 31)

    def test_what_asks_for_more_goes_the_whole_way(self) -> None:
        pixels = digit_images(1)
        late = as_json(pixels, parameters={"timeout": 20_000_000})
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\n"
        size = f"{len(pixels.tobytes()):x}".encode()
        for name, data in {
            "chunks": head.encode() + b"Transfer-Encoding: chunked\r\n"
            b"Inference-Header-Content-Length: 0\r\n\r\n"
            + size + b"\r\n" + pixels.tobytes() + b"\r\n0\r\n\r\n",
            "a line before": b"\r\n" + raw(pixels),
            "deadline": post_bytes(INFER, late),
            "metadata": b"GET /v2/models/digits HTTP/1.1\r\nHost: x\r\n\r\n",
        }.items():  # fmt: skip
            with self.subTest(name), shortcuts() as taken, Wire(self.server.port) as wire:
                answers = [wire.ask(data) for _ in range(3)]
                self.assertEqual({answer.status for answer in answers}, {200})
                self.assertNotIn(True, taken)
        with Wire(self.server.port) as wire:
            self.assertEqual(wire.ask(raw(pixels, Connection="close")).status, 200)
            self.assertRaises(ConnectionError, wire.read)

    def test_refusals_are_the_same_sentences(self) -> None:
        good = as_json(digit_images(1))
        for bad in (b"x" * len(good), good.replace(b"UINT8", b"UINT9"), good[:-1] + b"]"):
            self.assertEqual(len(bad), len(good))
            data = post_bytes(INFER, bad)
            with Wire(self.server.port) as wire:
                whole = shown(wire.ask(data))
            with shortcuts() as taken, Wire(self.server.port) as wire:
                self.assertEqual(wire.ask(post_bytes(INFER, good)).status, 200)
                self.assertEqual(shown(wire.ask(data)), whole)
                self.assertEqual(wire.ask(post_bytes(INFER, good)).status, 200)
                self.assertEqual(taken, [False, True])

    def test_a_stream_in_any_parts(self) -> None:
        """Requests of all forms, good and bad, cut anywhere and also sent before answers."""
        rng = random.Random(5)
        good = [*self.requests().values()]
        others = [
            post_bytes(INFER, b"{}"),
            post_bytes("/v2/models/none/infer", b"123", **RAW),
            b"GET /v2/models/digits HTTP/1.1\r\nHost: x\r\n\r\n",
            post_bytes(INFER, b"123", **RAW),
        ]
        wanted = {}
        for data in (*good, *others):
            with Wire(self.server.port) as wire:
                wanted[data] = shown(wire.ask(data))
        with shortcuts() as taken:
            for _ in range(12):
                some = rng.sample(good, 2)
                stream = [rng.choice(some * 4 + others) for _ in range(25)]
                self.check_stream(stream, wanted, rng)
        self.assertGreater(taken.count(True), 10)

    def check_stream(self, stream: list[bytes], wanted: Any, rng: random.Random) -> None:
        with Wire(self.server.port) as wire:
            left = list(stream)
            while left:
                count = min(len(left), rng.choice((1, 1, 1, 2, 3)))
                together = b"".join(left[:count])
                cuts = sorted(rng.sample(range(1, len(together)), rng.choice((0, 0, 1, 2))))
                parts = [together[a:b] for a, b in zip([0, *cuts], [*cuts, None])]
                wire.send(*parts)
                for data in left[:count]:
                    self.assertEqual(shown(wire.read()), wanted[data])
                del left[:count]

    def test_no_client_gets_anothers_answer(self) -> None:
        """24 connections on the shortcut at once, each with images of its own, some ahead."""
        images = digit_images(24 * 40, seed=4)
        wanted = probabilities(self.model, images)
        wrong: list[int] = []

        def client(first: int) -> None:
            own = range(first, len(images), 24)
            with Wire(self.server.port) as wire:
                for some in (*zip(own[:20]), *zip(own[20::2], own[21::2])):  # one, then two ahead
                    for k in some:
                        wire.send(raw(images[k]))
                    for k in some:
                        got = np.frombuffer(wire.read().body[-40:], "<f4")
                        if not np.allclose(got, wanted[k], atol=CLOSE):
                            wrong.append(k)

        with shortcuts() as taken:
            threads = [threading.Thread(target=client, args=(k,)) for k in range(24)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(wrong, [])
        self.assertGreater(taken.count(True), 300)

    def test_it_is_counted_and_logged(self) -> None:
        counts = self.server.listeners.service.repository.metrics.of("digits", "1")
        data = raw(digit_images(2), X_Request_Id='by \\ "it"')
        with Wire(self.server.port) as wire:
            wire.ask(data)
            time.sleep(0.05)  # what is counted after the answer
            before = counts.success, counts.samples, counts.executions
            wire.ask(data)
            time.sleep(0.05)
            after = counts.success, counts.samples, counts.executions
        self.assertEqual([b - a for a, b in zip(before, after)], [1, 2, 1])
        self.server.listeners.service.log.flush()
        lines = [json.loads(line) for line in self.lines.getvalue().splitlines()]
        whole, short = [line for line in lines if line.get("id") == 'by \\ "it"']
        self.assertEqual([*whole], [*short])
        same = ("level", "event", "method", "path", "status", "model", "version", "batch")
        self.assertEqual([whole[key] for key in same], [short[key] for key in same])
        self.assertLessEqual(short["queue_ms"] + short["compute_ms"], short["ms"])


@needs_serve
class Keys(Serving):
    options = {"grpc_port": None, "keys": ["secret"], "origins": ["http://page.example"]}

    def test_another_key_is_refused(self) -> None:
        pixels = digit_images(1)
        with shortcuts() as taken, Wire(self.server.port) as wire:
            for key, status in (("secret", 200), ("secret", 200), ("Secret", 401)):
                self.assertEqual(wire.ask(raw(pixels, X_Api_Key=key)).status, status)
        self.assertEqual(taken, [True])

    def test_other_pages(self) -> None:
        data = raw(digit_images(1), X_Api_Key="secret", Origin="http://page.example")
        with shortcuts() as taken, Wire(self.server.port) as wire:
            for _ in range(2):
                self.assertIn("access-control-allow-origin", wire.ask(data).headers)
        self.assertEqual(taken, [])


@needs_serve
class Ends(unittest.TestCase):
    """How requests on the shortcut end; each test has a service of its own."""

    def server(self, batch: int = 1, **limits: Any) -> Server:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "digits.safetensors"
        train.save(self.path, digits_model())
        self.lines = io.StringIO()
        limits = Limits(batch=batch, **limits)
        return Server([self.path], grpc_port=None, log=Log(self.lines), limits=limits)

    def wire(self, server: Server) -> Wire:
        """A connection whose next request takes the shortcut."""
        wire = Wire(server.port)
        self.addCleanup(wire.close)
        self.assertEqual(wire.ask(self.data).status, 200)
        return wire

    data = raw(digit_images(1))

    def wait(self, server: Server, count: int) -> None:
        """Until so many requests wait."""
        counts = server.listeners.service.repository.metrics.of("digits", "1")
        end = time.monotonic() + 10
        while counts.pending != count and time.monotonic() < end:
            time.sleep(0.01)
        self.assertEqual(counts.pending, count)

    def test_a_full_queue_is_503_and_a_deadline_504(self) -> None:
        with self.server(waiting=1, seconds=1.0) as server, shortcuts() as taken:
            running, waiting, refused = (self.wire(server) for _ in range(3))
            begun, go = held(server)
            running.send(self.data)
            begun.wait(10)
            waiting.send(self.data)
            self.wait(server, 1)
            answer = refused.ask(self.data)
            self.assertEqual(answer.status, 503, answer.body)
            self.assertGreaterEqual(int(answer.headers["retry-after"]), 1)
            self.assertEqual(taken, [True, True, False])
            for late in (running, waiting):
                answer = late.read()
                self.assertEqual(answer.status, 504, answer.body)
                sentence = "the request was not answered within 1 seconds"
                self.assertEqual(answer.json, {"error": sentence})
            go.set()
            self.assertEqual([x.ask(self.data).status for x in (running, waiting)], [200, 200])
            counts = server.listeners.service.repository.metrics.of("digits", "1")
            self.assertEqual((counts.failures["CANCELED"], counts.failures["REJECTED"]), (2, 1))
            self.assertEqual(server.listeners.service.active, 0)

    def test_too_many_in_progress(self) -> None:
        with self.server(requests=1) as server:
            running, refused = self.wire(server), self.wire(server)
            begun, go = held(server)
            running.send(self.data)
            begun.wait(10)
            self.assertEqual(refused.ask(self.data).status, 503)
            go.set()
            self.assertEqual(running.read().status, 200)

    def test_a_client_that_goes_away_is_not_worked_for(self) -> None:
        with self.server() as server, shortcuts() as taken:
            running, gone = self.wire(server), self.wire(server)
            counts = server.listeners.service.repository.metrics.of("digits", "1")
            ran = counts.executions
            begun, go = held(server)
            running.send(self.data)
            begun.wait(10)
            gone.send(self.data)
            self.wait(server, 1)
            gone.close()
            self.wait(server, 0)
            go.set()
            self.assertEqual(running.read().status, 200)
            self.assertEqual((counts.failures["CANCELED"], counts.executions), (1, ran + 1))
            self.assertEqual(taken, [True, True])
        self.assertIn('"status": 499', self.lines.getvalue())

    def test_a_body_that_never_comes_ends_in_time(self) -> None:
        with self.server(seconds=1.0) as server:
            wire = self.wire(server)
            self.assertEqual(wire.ask(self.data[:-700]).status, 408)

    def test_what_is_in_flight_is_answered_before_the_end(self) -> None:
        with self.server() as server, shortcuts() as taken:
            wire, ahead, part = (self.wire(server) for _ in range(3))
            begun, go = held(server)
            wire.send(self.data)
            begun.wait(10)
            ahead.send(self.data, self.data)
            part.send(self.data[:-1])
            self.wait(server, 1)
            server.stop()
            threading.Timer(0.3, go.set).start()
            time.sleep(0.15)
            part.send(self.data[-1:])
            for each in (wire, ahead, part):
                answer = each.read()
                self.assertEqual((answer.status, answer.headers["connection"]), (200, "close"))
                self.assertRaises(ConnectionError, each.read)
        self.assertEqual(taken, [True, True])
        with self.assertRaises(OSError):
            request(server.port, "GET", "/v2/health/live")

    def test_another_model_of_the_name(self) -> None:
        pixels = digit_images(1)
        with self.server() as server, shortcuts() as taken:
            wire = self.wire(server)
            train.save(self.path, digits_model(seed=7))
            self.assertEqual(wire.ask(post_bytes("/v2/repository/models/digits/load", b"")).status,
                             200)  # fmt: skip
            got = np.frombuffer(wire.ask(self.data).body[-40:], "<f4")
            wanted = probabilities(digits_model(seed=7), pixels)[0]
            np.testing.assert_allclose(got, wanted, atol=CLOSE)
            wire.ask(post_bytes("/v2/repository/models/digits/unload", b""))
            answer = wire.ask(self.data)
            self.assertEqual(answer.status, 404)
            self.assertIn("is not loaded", answer.json["error"])
        self.assertEqual(taken, [True, False])

    def test_a_run_that_fails(self) -> None:
        for error, status, sentence in (
            (DlsysError("no"), 400, "the model refuses the request: no"),
            (ValueError("x"), 500, "the service failed; its log has why"),
        ):
            with self.server(batch=8) as server:
                wires = [self.wire(server) for _ in range(3)]
                batcher: Any = server.listeners.service.repository.find("digits").batcher

                def run(inputs: Any, error: Exception = error) -> Any:
                    raise error

                batcher._run = run
                for wire in wires:
                    wire.send(self.data)
                for wire in wires:
                    answer = wire.read()
                    self.assertEqual(answer.status, status)
                    self.assertIn(sentence, answer.json["error"])

    def test_a_connection_without_requests_ends(self) -> None:
        with mock.patch("dlsys.serve.server._KEPT_ALIVE", 1), self.server() as server:
            wire = self.wire(server)
            for _ in range(3):  # the timer of the first answer must not end it
                time.sleep(0.45)
                self.assertEqual(wire.ask(self.data).status, 200)
            self.assertRaises(ConnectionError, wire.read)


if __name__ == "__main__":
    unittest.main()

"""The service over real HTTP: the protocol, images, limits, keys, reload, and its end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import dlsys
from dlsys import onnx, train
from dlsys.errors import DataError, DlsysError
from dlsys.serve import Limits, Log, Server
from dlsys.serve.__main__ import main
from support.serving import (
    DIGITS,
    Answer,
    Serving,
    as_json,
    digit_images,
    digits_model,
    form,
    needs_serve,
    probabilities,
    request,
)

RAW = {"Inference_Header_Content_Length": "0"}
PACKAGE = Path(dlsys.__file__).parent
INFER = "/v2/models/digits/infer"


def png(pixels: np.ndarray, kind: str = "PNG", mode: str = "L", **options: Any) -> bytes:
    """An image file of gray values (H, W)."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


@needs_serve
class Protocol(Serving):
    @classmethod
    def models(cls, folder: Path) -> dict[str, Path]:
        found = super().models(folder)
        onnx.export(cls.model, folder / "lenet.onnx", inputs=(None, 1, 28, 28))
        return {**found, "lenet": folder / "lenet.onnx"}

    def test_health_and_metadata(self) -> None:
        self.assertEqual(self.send("GET", "/v2/health/live").json, {"live": True})
        self.assertEqual(self.send("GET", "/v2/health/ready").json, {"ready": True})
        self.assertIn("binary_tensor_data", self.send("GET", "/v2").json["extensions"])
        for path in ("/v2/models/digits", "/v2/models/digits/versions/1"):
            found = self.send("GET", path).json
            self.assertEqual(found["versions"], ["1"])
            self.assertEqual(
                found["inputs"],
                [{"name": "input", "datatype": "UINT8", "shape": [-1, 1, 28, 28]}],
            )
            self.assertTrue(self.send("GET", f"{path}/ready").json["ready"])
        found = self.send("GET", "/v2/models/lenet").json
        self.assertEqual((found["platform"], found["inputs"][0]["datatype"]), ("onnx", "FP32"))
        states = [(row["name"], row["state"]) for row in self.post("/v2/repository/index", "").json]
        self.assertEqual(states, [("digits", "READY"), ("lenet", "READY")])

    def test_inference_in_json(self) -> None:
        pixels = digit_images(3)
        answer = self.post(INFER, as_json(pixels, id="mine"))
        self.assertEqual((answer.status, answer.json["id"]), (200, "mine"))
        [output] = answer.json["outputs"]
        self.assertEqual((output["name"], output["shape"]), ("probabilities", [3, 10]))
        got = np.array(output["data"]).reshape(3, 10)
        np.testing.assert_allclose(got, probabilities(self.model, pixels), atol=1e-6)
        nested = json.loads(as_json(pixels))
        nested["inputs"][0]["data"] = pixels.tolist()
        again = self.post("/v2/models/digits/versions/1/infer", json.dumps(nested))
        self.assertEqual(again.json["outputs"], answer.json["outputs"])

    def test_binary_tensors(self) -> None:
        pixels = digit_images(2, seed=1)
        wanted = probabilities(self.model, pixels)
        tensor = {
            "name": "input", "datatype": "UINT8", "shape": [2, 1, 28, 28],
            "parameters": {"binary_data_size": pixels.nbytes},
        }  # fmt: skip
        output = {"name": "probabilities", "parameters": {"binary_data": True}}
        for extra in ({"outputs": [output]}, {"parameters": {"binary_data_output": True}}):
            head = json.dumps({"inputs": [tensor], **extra}).encode()
            length = {"Inference_Header_Content_Length": str(len(head))}
            self.check_binary(self.post(INFER, head + pixels.tobytes(), **length), wanted)
        self.check_binary(self.post(INFER, pixels.tobytes(), **RAW), wanted)

    def check_binary(self, answer: Any, wanted: np.ndarray) -> None:
        self.assertEqual(answer.status, 200, answer.body)
        cut = int(answer.headers["inference-header-content-length"])
        [output] = json.loads(answer.body[:cut])["outputs"]
        self.assertEqual(output["parameters"]["binary_data_size"], len(answer.body) - cut)
        got = np.frombuffer(answer.body[cut:], "<f4").reshape(output["shape"])
        np.testing.assert_allclose(got, wanted, atol=1e-6)

    def test_classification(self) -> None:
        pixels = digit_images(1, seed=2)
        wanted = [{"name": "probabilities", "parameters": {"classification": 2}}]
        [output] = self.post(INFER, as_json(pixels, outputs=wanted)).json["outputs"]
        best = np.argsort(-probabilities(self.model, pixels)[0])[:2]
        self.assertEqual((output["datatype"], output["shape"]), ("BYTES", [1, 2]))
        self.assertEqual([int(x.split(":")[1]) for x in output["data"]], best.tolist())
        self.assertEqual([x.split(":")[2] for x in output["data"]], [DIGITS[k] for k in best])

    def test_onnx_equals_the_checkpoint(self) -> None:
        image = png(digit_images(1, seed=3)[0, 0])
        body, header = form(image)
        answers = [
            self.send("POST", f"/classify?model={name}", body, header).json["predictions"]
            for name in ("digits", "lenet")
        ]
        for one, other in zip(*answers):
            self.assertEqual(one["label"], other["label"])
            self.assertAlmostEqual(one["probability"], other["probability"], delta=1e-5)
        explained = [
            self.send("POST", f"/explain?label=4&model={name}", body, header).json
            for name in ("digits", "lenet")
        ]
        self.assertEqual(*(x["explained"]["label"] for x in explained))
        self.assertAlmostEqual(*(x["explained"]["probability"] for x in explained), delta=1e-5)
        self.assertEqual({x["method"] for x in explained}, {"grad_cam"})

    def test_request_ids(self) -> None:
        answer = self.send("GET", "/v2", headers={"x-request-id": "abc"})
        self.assertEqual(answer.headers["x-request-id"], "abc")
        ids = {self.send("GET", "/v2").headers["x-request-id"] for _ in range(3)}
        self.assertEqual(len(ids), 3)
        forged = self.send("GET", "/v2", headers={"x-request-id": "é" * 5})
        self.assertNotIn("é", forged.headers["x-request-id"])

    def test_metrics_count_under_tritons_names(self) -> None:
        def count(name: str) -> int:
            text = self.send("GET", "/metrics").body.decode()
            [line] = [x for x in text.splitlines() if x.startswith(f'{name}{{model="digits"')]
            return int(line.rpartition(" ")[2])

        names = ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count")
        before = [count(name) for name in names]
        self.post(INFER, as_json(digit_images(3)))
        self.assertEqual([count(n) - b for n, b in zip(names, before)], [1, 3, 1])
        self.assertGreater(count("nv_inference_compute_infer_duration_us"), 0)

    def test_logs_are_json_and_openapi_has_inference(self) -> None:
        self.send("GET", "/v2", headers={"x-request-id": "find-me"})
        self.server.listeners.service.log.flush()
        lines = [json.loads(line) for line in self.lines.getvalue().splitlines()]
        [line] = [line for line in lines if line.get("id") == "find-me"]
        self.assertEqual((line["status"], line["path"], line["level"]), (200, "/v2", "info"))
        paths = self.send("GET", "/openapi.json").json["paths"]
        self.assertLessEqual({"/v2/models/{name}/infer", "/classify", "/explain"}, {*paths})

    def test_no_client_gets_anothers_answer(self) -> None:
        """16 connections, each with images of its own, all at once."""
        images = digit_images(64, seed=4)
        wanted = probabilities(self.model, images)
        wrong: list[int] = []

        def client(first: int) -> None:
            for k in range(first, 64, 16):
                answer = self.post(INFER, images[k : k + 1].tobytes(), **RAW)
                got = np.frombuffer(answer.body[-40:], "<f4")
                if answer.status != 200 or not np.allclose(got, wanted[k], atol=1e-6):
                    wrong.append(k)

        threads = [threading.Thread(target=client, args=(first,)) for first in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])


@needs_serve
class Images(Serving):
    def test_any_format_size_and_mode(self) -> None:
        rng = np.random.default_rng(0)
        for kind, mode in (
            ("PNG", "L"), ("PNG", "RGBA"), ("PNG", "1"), ("PNG", "P"), ("PNG", "I;16"),
            ("JPEG", "RGB"), ("JPEG", "CMYK"), ("WEBP", "RGB"), ("WEBP", "RGBA"), ("GIF", "P"),
        ):  # fmt: skip
            for shape in ((28, 28), (5, 90), (1, 1)):
                body, header = form(png(rng.integers(0, 256, shape, np.uint8), kind, mode))
                answer = self.send("POST", "/classify?k=3", body, header)
                self.assertEqual(answer.status, 200, (kind, mode, answer.body))
                self.assertEqual(len(answer.json["predictions"]), 3)

    def test_it_is_the_preprocessing_of_predict(self) -> None:
        from dlsys.apps.pictures import read_pictures

        file = self.folder / "drawn.png"
        file.write_bytes(png(digit_images(1, seed=5)[0, 0].repeat(4, 0).repeat(3, 1)))
        chances = probabilities(self.model, read_pictures(file, digits=True))[0]
        body, header = form(file.read_bytes())
        found = self.send("POST", "/classify?k=10", body, header).json["predictions"]
        self.assertEqual([x["index"] for x in found], np.argsort(-chances).tolist())
        np.testing.assert_allclose([x["probability"] for x in found], -np.sort(-chances), atol=2e-6)

    def test_an_explanation_is_a_picture_of_the_right_size(self) -> None:
        from PIL import Image

        body, header = form(png(digit_images(1)[0, 0]))
        found = self.send("POST", "/explain?label=3", body, header).json
        self.assertEqual((found["explained"]["label"], found["method"]), ("3", "grad_cam"))
        self.assertTrue(found["overlay"].startswith("data:image/png;base64,"))
        answer = self.send("POST", "/explain", body, {**header, "accept": "image/png"})
        self.assertEqual(Image.open(io.BytesIO(answer.body)).size, (224, 224))

    def test_what_is_no_image_is_refused(self) -> None:
        good = png(np.zeros((40, 40), np.uint8))
        for content in (b"", b"no image", good[:30], good[:-20], b"%!PS-Adobe-3.0\n"):
            body, header = form(content)
            self.check_refused(self.send("POST", "/classify", body, header), 400, "^the image: ")
        body, header = form(good)
        self.check_refused(self.send("POST", "/explain?label=ten", body, header), 400, "class")
        self.check_refused(self.send("POST", "/explain?method=x", body, header), 400, "method")
        self.check_refused(self.send("POST", "/classify?k=0", body, header), 400, "query k")
        self.check_refused(self.send("POST", "/classify?model=x", body, header), 404, "no model")
        other, header = form(good, name="other")
        self.check_refused(self.send("POST", "/classify", other, header), 400, "body file")
        self.check_refused(self.send("POST", "/classify", good), 400, "body file")


def hostile() -> dict[str, tuple[bytes, str]]:
    """Bodies of inference that are at fault, with what their sentences say."""

    def changed(**parts: Any) -> bytes:
        found = json.loads(as_json(digit_images(1)))
        found["inputs"][0].update(parts)
        return json.dumps(found).encode()

    text = as_json(digit_images(1))
    return {
        "nothing": (b"", "no JSON"),
        "truncated": (text[:-7], "no JSON"),
        "no object": (b"[]", "no JSON object"),
        "deep": (b"[" * 200_000, "no JSON"),
        "bytes": (b"\xff\xfe\x00", "no JSON"),
        "no inputs": (b"{}", "inputs: expected a list"),
        "null": (b'{"inputs": null}', "inputs: expected a list"),
        "other name": (changed(name="y"), "inputs input, got 'y'"),
        "twice": (b'{"inputs": [{"name": "a"}, {"name": "a"}]}', "twice"),
        "datatype": (changed(datatype="FP32"), "datatype UINT8, got 'FP32'"),
        "shape": (changed(shape=[1, 28, 28]), "has shape"),
        "negative": (changed(shape=[-1, 1, 28, 28]), "no list of extents"),
        "huge": (changed(shape=[2**39, 1, 28, 28]), "numbers of UINT8"),
        "true": (changed(shape=[True, 1, 28, 28]), "no list of extents"),
        "empty": (changed(shape=[0, 1, 28, 28], data=[]), "above 0"),
        "texts": (changed(data=["9" * 9] * 784), "numbers of UINT8"),
        "floats": (changed(data=[0.5] * 784), "numbers of UINT8"),
        "large": (changed(data=[256] * 784), "out of the range"),
        "longer": (changed(data=[10**400] + [1] * 783), "out of the range"),
        "few": (changed(data=[1, 2]), "784 numbers"),
        "object": (changed(data={"a": 1}), "numbers of UINT8"),
        "size": (changed(parameters={"binary_data_size": 5}), "0 bytes are"),
        "parameters": (changed(parameters=3), "parameters: expected an object"),
        "id": (as_json(digit_images(1), id=3), "id: expected a text"),
        "timeout": (as_json(digit_images(1), parameters={"timeout": -1}), "microseconds"),
        "output": (as_json(digit_images(1), outputs=[{"name": "z"}]), "outputs probabilities"),
        "control": (changed(name="a\x1b[2J\n"), r"\\x1b"),
    }


def mutated(rng: np.random.Generator, body: bytes) -> bytes:
    """The body with up to three changes."""
    changed = bytearray(body)
    for _ in range(rng.integers(0, 4)):
        at = int(rng.integers(0, len(changed)))
        kind = rng.integers(0, 4)
        if kind == 0:
            changed[at] = rng.integers(0, 256)
        elif kind == 1:
            del changed[at : at + int(rng.integers(1, 40))]
        elif kind == 2:
            changed[at:at] = [b"null", b"-1", b"1e999", b"[[", b'"', b"9" * 30][rng.integers(0, 6)]
        else:
            changed[at:at] = rng.bytes(8)
        changed = changed or bytearray(b"x")
    return bytes(changed)


@needs_serve
class Hostile(Serving):
    options = {"limits": Limits(body=300_000, pixels=10_000)}

    def test_bodies(self) -> None:
        for name, (body, sentence) in hostile().items():
            with self.subTest(name):
                self.check_refused(self.post(INFER, body), 400, sentence)
        self.assertEqual(self.post(INFER, as_json(digit_images(1))).status, 200)

    def test_lengths_of_binary_headers(self) -> None:
        body = as_json(digit_images(1))
        for length in ("-1", "x", "9" * 30, str(len(body) + 1), "1e3", ""):
            answer = self.post(INFER, body, Inference_Header_Content_Length=length)
            self.check_refused(answer, 400, "header-content-length")
        self.check_refused(self.post(INFER, b"123", **RAW), 400, "a sample has 784 bytes, got 3")

    def test_addresses(self) -> None:
        self.check_refused(self.post("/v2/models/none/infer", b"{}"), 404, "no model 'none'")
        wrong = "/v2/models/digits/versions/2/infer"
        self.check_refused(self.post(wrong, b"{}"), 404, "no version '2'; it has 1")
        self.check_refused(self.send("GET", "/nowhere"), 404, "no such address")
        self.check_refused(self.send("GET", "/classify"), 405, "GET is not for")
        self.check_refused(self.send("GET", "/v2/models/%2e%2e"), 404, "no ")
        answer = self.post(INFER, b"x", Content_Encoding="gzip")
        self.check_refused(answer, 400, "without compression")

    def test_large_ones(self) -> None:
        self.check_refused(self.post(INFER, bytes(300_001)), 413, "more than 300,000 bytes")
        chunks = (bytes(100_000) for _ in range(4))
        answer = self.post(INFER, chunks)  # without a length before it
        self.check_refused(answer, 413, "more than 300,000 bytes")
        body, header = form(png(np.zeros((101, 100), np.uint8)))
        self.check_refused(self.send("POST", "/classify", body, header), 400, "10,100|101")

    def test_mutated_requests(self) -> None:
        """Random changes of bodies: an answer or one sentence, and never a fault of the service."""
        rng = np.random.default_rng(3)
        files = [png(digit_images(1)[0, 0], kind) for kind in ("PNG", "JPEG", "WEBP")]
        requests = [(INFER, as_json(digit_images(1), id="a"), {})]
        requests += [("/classify", *form(file)) for file in files]
        seen = set()
        for k in range(200):
            path, body, headers = requests[k % len(requests)]
            answer = self.send("POST", path, mutated(rng, body), headers)
            seen.add(answer.status)
            if answer.status != 200:
                self.check_refused(answer, 400, ".")
        self.assertEqual(seen, {200, 400})
        self.assertNotIn('"fault"', self.lines.getvalue())

    def test_garbage_instead_of_http(self) -> None:
        for data in (b"\x00\xff" * 50, b"GET / HTTP/9.9\r\n\r\n", b"POST\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", self.server.port), 10) as connection:
                connection.sendall(data)
                self.assertIn(connection.recv(1000)[:12], (b"", b"HTTP/1.1 400"))
        self.assertEqual(self.send("GET", "/v2/health/live").status, 200)


@needs_serve
class Keys(Serving):
    options = {"keys": ["secret"], "origins": ["http://page.example"]}

    def test_a_key_is_asked_for(self) -> None:
        for path in ("/", "/v2/health/live", "/v2/health/ready"):
            self.assertEqual(self.send("GET", path).status, 200)
        for headers in ({}, {"x-api-key": "Secret"}, {"authorization": "Basic secret"}):
            answer = self.send("GET", "/v2/models/digits", headers=headers)
            self.check_refused(answer, 401, "needs a key")
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            answer = self.send("GET", "/v2/models/digits", headers=headers)
            self.assertEqual(answer.status, 200)

    def test_other_pages(self) -> None:
        key = {"x-api-key": "secret"}
        for origin, allowed in (("http://page.example", True), ("http://evil.example", False)):
            answer = self.send("GET", "/v2", headers={**key, "origin": origin})
            self.assertEqual("access-control-allow-origin" in answer.headers, allowed)


@needs_serve
class Reload(Serving):
    options = {"grpc_port": None}

    @classmethod
    def models(cls, folder: Path) -> dict[str, Path]:
        for version in (1, 2):
            (folder / "digits" / str(version)).mkdir(parents=True)
            cls.save(folder, version, seed=version)
        return {"digits": folder / "digits"}

    @classmethod
    def save(cls, folder: Path, version: int, seed: int) -> None:
        train.save(folder / "digits" / str(version) / "best.safetensors", digits_model(seed))

    def check(self, path: str, seed: int) -> None:
        pixels = digit_images(1)
        [output] = self.post(path, as_json(pixels)).json["outputs"]
        wanted = probabilities(digits_model(seed), pixels)[0]
        np.testing.assert_allclose(output["data"], wanted, atol=1e-6)

    def test_versions_and_loading_anew_under_load(self) -> None:
        self.check("/v2/models/digits/versions/1/infer", 1)
        self.check("/v2/models/digits/versions/2/infer", 2)
        self.check(INFER, 2)
        self.save(self.folder, 2, seed=5)
        failed: list[Any] = []
        end = threading.Event()

        def client() -> None:
            while not end.is_set():
                answer = self.post(INFER, digit_images(1).tobytes(), **RAW)
                if answer.status != 200:
                    failed.append(answer)

        threads = [threading.Thread(target=client) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            self.assertEqual(self.post("/v2/repository/models/digits/load", "").status, 200)
        end.set()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])
        self.check(INFER, 5)

    def test_a_file_that_is_damaged_leaves_the_old_model(self) -> None:
        file = self.folder / "digits" / "1" / "best.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        answer = self.post("/v2/repository/models/digits/load", "")
        self.check_refused(answer, 400, "digits was not loaded: ")
        self.check("/v2/models/digits/versions/1/infer", 1)
        file.write_bytes(content)
        answer = self.post("/v2/repository/models/other/load", "")
        self.check_refused(answer, 404, "no model 'other'")


def held(server: Server) -> tuple[threading.Event, threading.Event]:
    """Lets the model of a server run only when the second event is set; the first tells that a
    batch has begun.
    """
    batcher: Any = server.listeners.service.repository.find("digits").batcher
    run, begun, go = batcher._run, threading.Event(), threading.Event()

    def slow(inputs: list[np.ndarray]) -> list[np.ndarray]:
        begun.set()
        go.wait(10)
        return run(inputs)

    batcher._run, batcher._threads = slow, True
    return begun, go


class Client:
    """A request in a thread of its own."""

    def __init__(self, port: int, parameters: dict[str, Any] | None = None) -> None:
        body = as_json(digit_images(1), parameters=parameters or {})
        self._found: list[Answer] = []

        def send() -> None:
            self._found.append(request(port, "POST", INFER, body))

        self._thread = threading.Thread(target=send)
        self._thread.start()

    def answer(self) -> Answer:
        """Waits for it."""
        self._thread.join()
        return self._found[0]


@needs_serve
class Ends(unittest.TestCase):
    """How requests and services end; each test has a service of its own, without gRPC."""

    def server(self, **limits: Any) -> Server:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = Path(folder.name) / "digits.safetensors"
        train.save(path, digits_model())
        log = Log(io.StringIO())
        return Server([path], grpc_port=None, log=log, limits=Limits(batch=1, **limits))

    def test_a_full_queue_is_503_and_a_deadline_504(self) -> None:
        with self.server(waiting=1, seconds=5.0) as server:
            begun, go = held(server)
            running = Client(server.port)
            begun.wait(10)
            late = Client(server.port, {"timeout": 200_000})
            answer = late.answer()  # it waits, and runs no more
            self.assertEqual(answer.status, 504, answer.body)
            waiting = Client(server.port)
            self.wait(server, 1)
            refused = Client(server.port).answer()
            self.assertEqual(refused.status, 503, refused.body)
            self.assertGreaterEqual(int(refused.headers["retry-after"]), 1)
            self.assertIn("try again later", refused.json["error"])
            go.set()
            self.assertEqual((running.answer().status, waiting.answer().status), (200, 200))

    def test_a_client_that_goes_away_is_not_worked_for(self) -> None:
        with self.server() as server:
            begun, go = held(server)
            running = Client(server.port)
            begun.wait(10)
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                body = as_json(digit_images(1))
                head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)
                self.wait(server, 1)
            metrics = server.listeners.service.repository.metrics.of("digits", "1")
            end = time.monotonic() + 10
            while not metrics.failures["CANCELED"] and time.monotonic() < end:
                time.sleep(0.01)
            go.set()
            self.assertEqual(running.answer().status, 200)
            self.assertEqual(metrics.failures["CANCELED"], 1)
        self.assertEqual(metrics.executions, 1)

    def test_a_body_that_never_comes_ends_in_time(self) -> None:
        with self.server(seconds=0.3) as server:
            with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
                head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc"
                connection.sendall(head.encode())
                self.assertTrue(connection.recv(1000).startswith(b"HTTP/1.1 408"))

    def wait(self, server: Server, count: int) -> None:
        """Until so many requests wait."""
        metrics = server.listeners.service.repository.metrics.of("digits", "1")
        end = time.monotonic() + 10
        while metrics.pending != count and time.monotonic() < end:
            time.sleep(0.01)
        self.assertEqual(metrics.pending, count)

    def test_what_is_in_flight_is_answered_before_the_end(self) -> None:
        with self.server() as server:
            begun, go = held(server)
            client = Client(server.port)
            begun.wait(10)
            server.stop()
            threading.Timer(0.2, go.set).start()
        self.assertEqual(client.answer().status, 200)
        with self.assertRaises(OSError):
            request(server.port, "GET", "/v2/health/live")

    def test_the_command_and_its_signals(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = Path(folder.name) / "digits.safetensors"
        train.save(path, digits_model())
        options = ["--port", "0", "--grpc-port", "off", "--device", "numpy", "--max-batch", "2"]
        process = subprocess.Popen(
            [sys.executable, "-m", "dlsys.serve", str(path), *options],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        )
        self.addCleanup(process.kill)
        assert process.stderr is not None
        self.addCleanup(process.stderr.close)

        def line(event: str) -> dict[str, Any]:
            """The next line of the log about an event."""
            for text in process.stderr or ():
                found = json.loads(text)
                if found["event"] == event:
                    return found
            raise AssertionError(f"the service ended without {event}")

        port = int(line("serving")["http"].rpartition(":")[2])
        process.send_signal(signal.SIGHUP)
        self.assertEqual(line("loaded")["model"], "digits")
        self.assertEqual(request(port, "POST", INFER, as_json(digit_images(1))).status, 200)
        self.assertEqual(line("request")["status"], 200)
        process.send_signal(signal.SIGTERM)
        line("ended")
        self.assertEqual(process.wait(20), 0)

    def test_what_is_wrong_with_a_command_is_one_sentence(self) -> None:
        keys = Path(tempfile.mkstemp()[1])
        self.addCleanup(keys.unlink)
        for arguments, sentence in (
            (["/nowhere"], "/nowhere: there is no such file or folder"),
            (["x", "--port", "99999"], "expected a port from 0 to 65535"),
            (["x", "--api-key-file", str(keys)], "has no keys"),
            (["a/x", "b/x"], "two models are named x"),
        ):
            shown = io.StringIO()
            with contextlib.redirect_stderr(shown):
                status = main([*arguments, "--device", "numpy", "--quiet"])
            self.assertIn(status, (1, 2))
            self.assertRegex(shown.getvalue(), rf"^error: .*{re.escape(sentence)}.*\n$")

    def test_missing_packages_are_named(self) -> None:
        with mock.patch("dlsys.serve.server._is_there", lambda name: name != "grpc"):
            with self.assertRaisesRegex(DlsysError, "further packages: pip install grpcio$"):
                Server(["x"]).__enter__()

    def test_what_cannot_be_served_is_said(self) -> None:
        with self.assertRaisesRegex(DataError, "no such file or folder"):
            Server(["/nowhere/cnn"]).__enter__()
        with self.assertRaisesRegex(DataError, "two models are named cnn"):
            Server(["a/cnn", "b/cnn"])
        with self.assertRaisesRegex(DlsysError, "does not serve"):
            print(Server(["cnn"]).url)


if __name__ == "__main__":
    unittest.main()

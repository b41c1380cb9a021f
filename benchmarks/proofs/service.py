"""What dlsys.serve withstands: a million requests, mutated ones, and being killed.

    python benchmarks service [--parts soak,mutations,restart] [--requests 1000000]
                              [--mutations 100000] [--kills 10] [--out FOLDER]

The server is a process of its own with LeNet-5 on the CPU device, and logs each request. soak: 16
clients, and the server's memory after each turn; it is flat where a line through the second half
rises by less than a byte a request. mutations: requests in JSON, in binary and of images with
random changes of their heads and bodies, over connections that stay open; each gets an answer of
its own with a status below 500, or the end of its connection where its head is no HTTP, and a good
one is answered right after each hundredth. restart: the server is killed with SIGKILL under load
and started anew on the same port; each answer that came is the right one, and the clients go on.
Writes the parts into `proofs` of serve.json. Returns 0 where all held.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from shared import measure
from shared.served import INFER, RAW, free_port, resident_kib, serving, write_models

_WINDOW = 5.0  # seconds of a turn of the soak
_ATTACKERS = 8  # connections of mutated requests
_BOUNDARY = "xYzBoundary"
_TIMEOUT = 20.0  # seconds that an answer may take
_PATIENCE = 0.05  # and one to a request whose end the server may still wait for
_BYTES_A_REQUEST = 1.0  # that memory may rise by, fitted over the second half


# ---- a million requests ----
def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Memory and failures over the requests."""
    with serving("dlsys", folder, log=Path(os.devnull)) as running:
        answered, failed, started = 0, 0, time.perf_counter()
        at, kib = [0], [resident_kib(running.process)]
        program = str(measure.HERE / "shared" / "http_load.py")
        arguments = [str(running.port), INFER, "16", str(_WINDOW), RAW]
        while answered < options.requests:
            done = subprocess.run(
                [sys.executable, program, *arguments], capture_output=True, text=True, check=True
            )
            figures = json.loads(done.stdout)
            answered += figures["answered"]
            failed += figures["failed"]
            at.append(answered)
            kib.append(resident_kib(running.process))
        seconds = time.perf_counter() - started
    half = len(at) // 2
    slope = 1024 * np.polyfit(at[half:], kib[half:], 1)[0] if len(at) > 4 else 0.0
    return {
        "requests": answered,
        "failed": failed,
        "seconds": round(seconds),
        "resident_kib": {"at": at[1:], "is": kib[1:]},
        "bytes_a_request": round(float(slope), 3),
        "held": not failed and bool(slope < _BYTES_A_REQUEST),
    }


# ---- mutated requests ----
def good_requests(rng: np.random.Generator) -> list[tuple[bytes, bytes]]:
    """Requests of each form, as heads and bodies."""
    from PIL import Image

    pixels = rng.integers(0, 256, (1, 1, 28, 28), np.uint8)
    tensor: dict[str, Any] = {"name": "input", "datatype": "UINT8", "shape": [1, 1, 28, 28]}
    numbers = {"inputs": [tensor | {"data": pixels.ravel().tolist()}], "id": "a"}
    sized = {"inputs": [tensor | {"parameters": {"binary_data_size": 784}}]}
    text = json.dumps(sized).encode()
    length = b"Inference-Header-Content-Length: %d\r\n"
    made = [
        (INFER.encode(), length % 0, pixels.tobytes()),
        (INFER.encode(), length % len(text), text + pixels.tobytes()),
        (INFER.encode(), b"", json.dumps(numbers).encode()),
    ]
    kind = f"Content-Type: multipart/form-data; boundary={_BOUNDARY}\r\n".encode()
    for name in ("PNG", "JPEG"):
        file = io.BytesIO()
        Image.fromarray(pixels[0, 0]).save(file, name)
        field = 'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        begin = f"--{_BOUNDARY}\r\n{field}".encode()
        body = begin + file.getvalue() + f"\r\n--{_BOUNDARY}--\r\n".encode()
        made.append((b"/classify", kind, body))
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n"
    return [(head % (path, len(body), extra), body) for path, extra, body in made]


def changed(rng: random.Random, data: bytes) -> bytes:
    """The bytes with one to three changes."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at, kind = rng.randrange(len(made)), rng.randrange(4)
        if kind == 0:
            made[at] = rng.randrange(256)
        elif kind == 1:
            del made[at : at + rng.randint(1, 40)]
        elif kind == 2:
            made[at:at] = rng.choice([b"null", b"-1", b"1e999", b"[[", b'"', b"9" * 30, b"\r\n"])
        else:
            made[at:at] = rng.randbytes(8)
        made = made or bytearray(b"x")
    return bytes(made)


def mutated(rng: random.Random, head: bytes, body: bytes) -> tuple[bytes, bool]:
    """A request at fault, and whether its head is as it was. Where bytes of its body are others in
    their places, its head repeats, so that it takes the shortcut.
    """
    kind = rng.randrange(4)
    if kind == 0:  # the same length
        made = bytearray(body)
        for _ in range(rng.randint(1, 8)):
            made[rng.randrange(len(made))] = rng.randrange(256)
        return head + made, True
    if kind == 1:  # anything, also of the head
        return changed(rng, head) + body, False
    made = changed(rng, body)
    lines = [x for x in head.split(b"\r\n") if not x.startswith(b"Content-Length")]
    lines[1:1] = [b"Content-Length: %d" % len(made)]
    return b"\r\n".join(lines) + made, True


class Wire:
    """A connection that stays open until the server ends it."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), _TIMEOUT)
        self._file = self.socket.makefile("rb")

    def close(self) -> None:
        """Ends it."""
        self._file.close()
        self.socket.close()

    def ask(self, data: bytes) -> tuple[int, bytes, bool]:
        """The status and the body of the next answer, and whether the connection stays.
        ConnectionError at its end.
        """
        self.socket.sendall(data)
        line = self._file.readline()
        if not line:
            raise ConnectionError("the server closed the connection")
        length, stays = 0, True
        while text := self._file.readline().strip().lower():
            if text.startswith(b"content-length:"):
                length = int(text.split(b":")[1])
            stays = stays and text != b"connection: close"
        return int(line.split()[1]), self._file.read(length), stays


def mutations(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """How requests at fault were answered."""
    log = folder / "mutations.log"
    started = time.perf_counter()
    with serving("dlsys", folder, log=log) as running:
        with ThreadPoolExecutor(_ATTACKERS) as pool:
            share = -(-options.mutations // _ATTACKERS)
            seeds = range(options.seed, options.seed + _ATTACKERS)
            found = [*pool.map(lambda seed: attack(running.port, share, seed), seeds)]
    seen, wrong = sum((each for each, _ in found), Counter()), sum(each for _, each in found)
    faults = sum(b'"event": "fault"' in line for line in log.read_bytes().splitlines())
    failed = sum(count for outcome, count in seen.items() if outcome.startswith("5"))
    return {
        "requests": seen.total(),
        "connections": _ATTACKERS,
        "seed": options.seed,
        "seconds": round(time.perf_counter() - started),
        "outcomes": dict(sorted(seen.items())),
        "faults": faults,
        "wrong_afterwards": wrong,
        "held": not (failed or faults or wrong),
    }


def attack(port: int, count: int, seed: int) -> tuple[Counter[str], int]:
    """What became of mutated requests over one connection, and of how many good ones between them
    the answer was another.
    """
    rng = random.Random(seed)
    good = good_requests(np.random.default_rng(seed))
    seen: Counter[str] = Counter()
    wrong = 0
    wire = Wire(port)
    right = {head + body: wire.ask(head + body)[1] for head, body in good}
    for k in range(count):
        head, body = good[(k // 20) % len(good)]  # a head repeats for a while
        outcome, stays = attempt(wire, *mutated(rng, head, body))
        seen[outcome] += 1
        if not stays:
            wire.close()
            wire = Wire(port)
        if k % 100 == 0:
            status, answer, _ = wire.ask(head + body)
            wrong += status != 200 or not same(answer, right[head + body])
    wire.close()
    return seen, wrong


def attempt(wire: Wire, data: bytes, is_framed: bool) -> tuple[str, bool]:
    """What became of a request, and whether the connection can go on.

    is_framed: whether its length is as its head says. Else what follows it on the connection would
    be taken for its rest, and a part of one is left waiting.
    """
    try:
        if not is_framed:
            wire.socket.settimeout(_PATIENCE)
        status, _, stays = wire.ask(data)
        return str(status), stays and is_framed
    except TimeoutError:
        return ("waits for more" if not is_framed else "5: no answer"), False
    except ConnectionError:
        return "closed", False


def same(one: bytes, other: bytes) -> bool:
    """Whether the numbers of two answers are the same, but for what other batches round."""
    first, second = numbers(one), numbers(other)
    return first.shape == second.shape and np.allclose(first, second, atol=1e-5)


def numbers(body: bytes) -> np.ndarray:
    """Those of an answer: of its JSON, or the ten float32 behind it."""
    try:
        json.loads(body)
    except ValueError:
        return np.frombuffer(body[-40:], "<f4")
    return np.array([float(text) for text in re.findall(rb"-?\d[\d.]*(?:e-?\d+)?", body)])


# ---- killed ----
def restart(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What clients saw of a server that is killed and started anew."""
    images, wanted = known_answers(folder)
    port, end = free_port(), threading.Event()
    clients: list[Counter[str]] = [Counter() for _ in range(8)]
    threads = [
        threading.Thread(target=keep_asking, args=(port, k, images, wanted, end, found))
        for k, found in enumerate(clients)
    ]
    down, stuck = [], 0
    for turn in range(options.kills + 1):
        began = time.perf_counter()
        with serving("dlsys", folder, log=folder / "killed.log", port=port) as running:
            down.append(time.perf_counter() - began)
            for thread in threads if turn == 0 else ():
                thread.start()
            stuck += not answered(clients, 400)
            if turn == options.kills:
                end.set()
                for thread in threads:
                    thread.join()
            os.killpg(running.process, signal.SIGKILL)
    found = sum(clients, Counter())
    return {
        "kills": options.kills,
        "clients": len(threads),
        "answers": found["right"],
        "wrong": found["wrong"],
        "broken_connections": found["broken"],
        "seconds_until_it_serves": round(statistics.median(down), 2),
        "held": not (found["wrong"] or stuck),
    }


def answered(clients: list[Counter[str]], count: int) -> bool:
    """Waits until clients got so many more answers; whether they did."""
    before = sum(found["right"] for found in clients)
    end = time.monotonic() + _TIMEOUT
    while time.monotonic() < end:
        if sum(found["right"] for found in clients) >= before + count:
            return True
        time.sleep(0.01)
    return False


def known_answers(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and the probabilities that the model gives for them."""
    from dlsys import train

    images = np.random.default_rng(0).integers(0, 256, (64, 1, 28, 28), np.uint8)
    model = train.load_model(folder / "lenet.safetensors")
    logits = np.asarray(train.predict(model, images), np.float64)
    grown = np.exp(logits - logits.max(axis=1, keepdims=True))
    return images, grown / grown.sum(axis=1, keepdims=True)


def keep_asking(
    port: int, first: int, images: np.ndarray, wanted: np.ndarray, end: threading.Event,
    found: Counter[str],
) -> None:  # fmt: skip
    """A client that connects again whenever its connection breaks."""
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 784\r\n{RAW.replace('=', ': ')}"
    wire: Wire | None = None
    k = first
    while not end.is_set():
        k = (k + 8) % len(images)
        try:
            wire = wire or Wire(port)
            status, body, _ = wire.ask(head.encode() + b"\r\n\r\n" + images[k].tobytes())
        except OSError:
            found["broken"] += wire is not None
            wire = None
            time.sleep(0.01)
            continue
        probabilities = np.frombuffer(body[-40:], "<f4")
        is_right = status == 200 and np.allclose(probabilities, wanted[k], atol=1e-5)
        found["right" if is_right else "wrong"] += 1


PARTS = {"soak": soak, "mutations": mutations, "restart": restart}


def main() -> int:
    """Returns 0 when all parts held."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    path = options.out / "serve.json"
    held = True
    for name in options.parts.split(","):
        with tempfile.TemporaryDirectory() as text:
            write_models(Path(text))
            part = PARTS[name](options, Path(text))
        print(f"{name}: {part}", flush=True)
        record = json.loads(path.read_text()) if path.exists() else {}
        facts = {**measure.origin(options), "machine": measure.machine(), **part}
        record.setdefault("proofs", {})[name] = facts
        path.write_text(measure.as_json(record))
        held &= part["held"]
    return int(not held)

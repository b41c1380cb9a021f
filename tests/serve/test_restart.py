"""A service that is killed under load and started anew: no answer is wrong, and clients go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections import Counter
from pathlib import Path

import numpy as np

import dlsys
from dlsys import train
from serve.test_service import INFER, RAW
from support import devices
from support.serving import (
    Wire,
    digit_images,
    digits_model,
    needs_serve,
    post_bytes,
    probabilities,
)

PACKAGE = Path(dlsys.__file__).parent
CLIENTS = 4


@needs_serve
class Killed(unittest.TestCase):
    def start(self, port: int) -> tuple[subprocess.Popen, int]:
        """The command, when it serves, and its port."""
        options = ["--port", str(port), "--grpc-port", "off", "--device", "numpy", "--quiet"]
        process = subprocess.Popen(
            [sys.executable, "-m", "dlsys.serve", str(self.path), *options, "--max-batch", "4"],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        )
        self.addCleanup(process.kill)
        assert process.stderr is not None
        self.addCleanup(process.stderr.close)
        for line in process.stderr:
            found = json.loads(line)
            if found["event"] == "serving":
                return process, int(found["http"].rpartition(":")[2])
        raise AssertionError("the service ended before it served")

    def keep_asking(self, port: int, first: int, end: threading.Event) -> None:
        """Asks over connections that stay open, each made anew when it breaks."""
        wire, k = None, first
        while not end.is_set():
            k = (k + CLIENTS) % len(self.images)
            try:
                wire = wire or Wire(port)
                answer = wire.ask(post_bytes(INFER, self.images[k].tobytes(), **RAW))
            except OSError:
                if wire is not None:
                    wire.close()
                    wire, self.seen[first]["broken"] = None, self.seen[first]["broken"] + 1
                time.sleep(0.02)
                continue
            got = np.frombuffer(answer.body[-40:], "<f4")
            right = answer.status == 200 and np.allclose(got, self.wanted[k], atol=1e-6)
            self.seen[first]["right" if right else "wrong"] += 1
        if wire is not None:
            wire.close()

    def more(self, count: int) -> None:
        """Waits until each client got so many more answers."""
        before = [seen["right"] for seen in self.seen]
        end = time.monotonic() + 30
        while any(s["right"] < b + count for s, b in zip(self.seen, before)):
            self.assertLess(time.monotonic(), end, f"clients are stuck: {self.seen}")
            time.sleep(0.01)

    @devices.slow
    def test_killed_and_started_anew(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "digits.safetensors"
        model = digits_model()
        train.save(self.path, model)
        self.images = digit_images(32)
        self.wanted = probabilities(model, self.images)
        self.seen: list[Counter[str]] = [Counter() for _ in range(CLIENTS)]
        process, port = self.start(0)
        end = threading.Event()
        threads = [
            threading.Thread(target=self.keep_asking, args=(port, k, end)) for k in range(CLIENTS)
        ]
        self.addCleanup(end.set)
        for thread in threads:
            thread.start()
        self.more(20)
        process.send_signal(signal.SIGKILL)
        self.assertEqual(process.wait(20), -signal.SIGKILL)
        process, again = self.start(port)
        self.assertEqual(again, port)
        self.more(20)
        end.set()
        for thread in threads:
            thread.join()
        process.terminate()
        self.assertEqual(process.wait(30), 0)
        total = sum(self.seen, Counter())
        self.assertEqual(total["wrong"], 0)
        self.assertGreaterEqual(total["broken"], 1)


if __name__ == "__main__":
    unittest.main()

"""numpy works on every system: with nothing that only Linux or POSIX has, models train and are
saved.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What Python has not on Windows: modules, and names of modules that it has there too.
MODULES = "fcntl grp posix pty pwd resource syslog termios tty".split()
NAMES = {
    "os": (
        "O_CLOEXEC O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC RTLD_GLOBAL RTLD_LOCAL "
        "chown fchmod fchown fork getloadavg getuid geteuid killpg mkfifo nice pread pwrite "
        "register_at_fork sched_getaffinity sched_setaffinity sendfile set_blocking sysconf uname "
        "wait4"
    ),
    "signal": "SIGALRM SIGKILL SIGPIPE SIGUSR1 alarm pthread_sigmask setitimer",
}
BEFORE = f"""
import builtins, importlib.metadata, inspect, logging, multiprocessing, numpy, platform, shutil
import subprocess, sys, tempfile, tqdm, unittest.mock, urllib.request, safetensors.numpy

for module, names in {NAMES!r}.items():
    for name in names.split():
        vars(__import__(module)).pop(name, None)
sys.modules.update(dict.fromkeys({MODULES!r}))  # an import of them fails
"""
WORK = """
import os
import numpy as np
import dlsys as dl
from dlsys import autodiff, data, functional as F, gpumat, init, micrograd, ndarray, nn, optim
from dlsys import profile, train, viz

x = dl.tensor([[1.0, 2.0]], requires_grad=True)
F.softmax(x).sum().backward()
points = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
labels = (points[:, 0] > 0).astype(np.int64)
batches = data.Loader((points, labels), 16, workers=2)
run = dict(callbacks=[train.Checkpoint("run"), train.JsonLog("log.jsonl")], quiet=True)
model = nn.Linear(2, 2)
train.fit(model, batches, optim.Adam(0.1), epochs=3, **run)
run["callbacks"] = [train.Checkpoint("run")]
history = train.fit(model, batches, optim.Adam(0.1), epochs=6, resume="run", **run)
train.save("model.safetensors", nn.Sequential(model))
again = train.load_model("model.safetensors")
assert (train.predict(again, points) == train.predict(model, points)).all()
print(dl.best_device(), history.epochs[-1]["accuracy"] > 0.9, sorted(os.listdir("run")))
"""


class Systems(unittest.TestCase):
    def test_numpy_needs_nothing_of_posix(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-c", BEFORE + WORK],
                cwd=folder,
                env={"PYTHONPATH": str(ROOT / "python"), "DLSYS_LIBRARY": "none.so"},
                capture_output=True,
                text=True,
            )
        self.assertEqual(done.stderr, "")
        kept = "['best.safetensors', 'last.safetensors']"
        self.assertEqual(done.stdout, f"numpy True {kept}\n")

    def test_what_is_hidden_is_seen(self) -> None:
        for use in ("import fcntl", "import os; os.O_DIRECTORY"):
            done = subprocess.run([sys.executable, "-c", BEFORE + use], capture_output=True)
            self.assertNotEqual(done.returncode, 0, use)


if __name__ == "__main__":
    unittest.main()

"""A model trained, saved, loaded again, and served over HTTP.

python examples/serve.py              # trains, serves one request to itself, and ends
python examples/serve.py --port 8000  # then: curl -d '[[0.5, -1.0]]' localhost:8000
"""

import argparse
import json
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.request import urlopen

import numpy as np

from dlsys import nn, optim, train
from dlsys.data import Dataset, Loader

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, help="serve there until Ctrl-C")
port = parser.parse_args().port or 0


points = np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)
data = Dataset(points, (points.prod(axis=1) > 0).astype(np.int64))
model = nn.Sequential(nn.Linear(2, 16, rng=0), nn.ReLU(), nn.Linear(16, 2, rng=1))
train.fit(model, Loader(data, 50, shuffle=True), optim.Adam(0.02), epochs=10, quiet=True)
path = Path(tempfile.mkdtemp()) / "model.safetensors"
train.save(path, model)  # the weights, and how the model was made: no code is in the file
served = train.load_model(path)


class Handler(BaseHTTPRequestHandler):
    """Answers a list of points with their classes."""

    def do_POST(self) -> None:  # noqa: N802 (the name that http.server calls)
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = train.predict(served, np.array(sent, np.float32))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(scores.argmax(axis=1).tolist()).encode())

    def log_message(self, *args: object) -> None:
        pass  # no line for each request


server = HTTPServer(("localhost", port), Handler)
if port:
    server.serve_forever()
threading.Thread(target=server.handle_request).start()
with urlopen(f"http://localhost:{server.server_port}", b"[[1, 1], [1, -1]]") as answer:
    print(f"classes of (1, 1) and (1, -1): {json.load(answer)}, expected [1, 0]")

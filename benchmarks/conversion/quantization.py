"""Quantizes trained networks and holds their accuracy against float32, and times both beside ONNX
Runtime on the CPU.

    python benchmarks quantization --out FOLDER [--epochs 2] [--samples 20000]
        [--networks lenet,resnet,resnet50]

LeNet-5 and the residual network are trained on MNIST, quantized by each method from 512 images of
the training set, and evaluated on the test set; the accuracy may fall by 0.3 points. The files in
QDQ form are run by ONNX Runtime, whose results must lie within one quantization step. Latencies are
of batches of 1 and 32, from host array to host array, in turns, with as many threads on either
side; ResNet-50 has random weights and is only timed. Writes quantization.json; the status is 0 when
all that is judged holds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import dlsys as dl
from dlsys import data, nn, optim, train
from dlsys.data import mnist_sets
from shared import measure

THREADS = int(os.environ.get("DLSYS_THREADS", "2"))
LOSS = 0.003  # of accuracy
ROUNDS, TURN = 5, 0.4  # turns of each contestant, and seconds of one
NETWORKS = {"lenet": nn.LeNet5, "resnet": nn.ResNetMNIST}
METHODS = ("minmax", "percentile", "entropy")


def session(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """A file in ONNX Runtime, with the threads that the CPU device has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    made = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: made.run(None, {"input": x})[0]


def contestants(model: Any, quantized: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """The programs that are compared, by name."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("float.onnx", "int8.onnx")]
        for each, path in zip((model, quantized), paths):
            dl.onnx.export(each, path, inputs=(None, *shape))
        return {
            "float32": dl.infer(model, ctx="cpu"),
            "int8": dl.infer(quantized, ctx="cpu"),
            "onnxruntime float32": session(paths[0]),
            "onnxruntime int8": session(paths[1]),
        }


def latencies(programs: dict[str, Any], x: np.ndarray) -> dict[str, Any]:
    """Milliseconds of a call of each program, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            program(x)
            times[name] += measure.step_ms(lambda: program(x), TURN)  # noqa: B023
    return {name: measure.summary(each) for name, each in times.items()}


def accuracy(program: Any, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images whose largest output is that of their class."""
    parts = [program(images[k : k + 500]).argmax(axis=1) for k in range(0, len(images), 500)]
    return round(float(np.mean(np.concatenate(parts) == labels)), 5)


def trained(name: str, epochs: int, samples: int) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """A network, a loader of 512 training images, and the test set as the network takes it."""
    sets = mnist_sets()
    model = NETWORKS[name](seed=0)
    some = (sets.train.images[:samples], sets.train.labels[:samples])
    loader = data.Loader(some, 100, shuffle=True)
    train.fit(model, loader, optim.Adam(1e-3), epochs=epochs, ctx="cpu", quiet=True)
    images, labels = next(iter(data.Loader(sets.test, len(sets.test)).in_order()))
    few = data.Loader((sets.train.images[:512], sets.train.labels[:512]), 64)
    return model, few, np.asarray(images), np.asarray(labels)


def prove(name: str, epochs: int, samples: int) -> dict[str, Any]:
    """The accuracies of one network, and its latencies."""
    start = time.monotonic()
    model, few, images, labels = trained(name, epochs, samples)
    exact = dl.infer(model, ctx="cpu")
    found: dict[str, Any] = {
        "epochs": epochs,
        "samples": samples,
        "float32": accuracy(exact, images, labels),
    }
    for method in METHODS:
        quantized = dl.quantize(model, few, method=method)
        found[method] = accuracy(dl.infer(quantized, ctx="cpu"), images, labels)
    quantized = dl.quantize(model, few)
    programs = contestants(model, quantized, images.shape[1:])
    ours, theirs, numpy = (
        program(images[:500])
        for program in (programs["int8"], programs["onnxruntime int8"], dl.infer(quantized))
    )
    found["numpy_equal"] = bool(np.array_equal(ours, numpy))
    found["onnxruntime_apart"] = float(np.abs(ours - theirs).max() / np.abs(ours).max())
    found["onnxruntime_accuracy"] = accuracy(programs["onnxruntime int8"], images, labels)
    found["ok"] = found["numpy_equal"] and all(found["float32"] - found[m] <= LOSS for m in METHODS)
    found["ms"] = {str(n): latencies(programs, images[:n]) for n in (1, 32)}
    found["seconds"] = round(time.monotonic() - start, 1)
    return found


def timed() -> dict[str, Any]:
    """The latencies of ResNet-50 for images of 224 by 224."""
    model = nn.ResNet50(seed=0)
    x = np.random.default_rng(0).normal(size=(32, 3, 224, 224)).astype(np.float32)
    quantized = dl.quantize(model, data.Loader((x[:4], np.zeros(4, np.int64)), 2), ctx="cpu")
    programs = contestants(model, quantized, x.shape[1:])
    return {"ok": True, "ms": {str(n): latencies(programs, x[:n]) for n in (1, 32)}}


def main() -> int:
    """Returns 0 when all that is judged holds."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=20_000, help="images that train")
    parser.add_argument("--networks", default="lenet,resnet,resnet50")
    options = parser.parse_args()
    networks: dict[str, Any] = {}
    for name in options.networks.split(","):
        given = (name, options.epochs, options.samples)
        networks[name] = timed() if name == "resnet50" else prove(*given)
        print(name, measure.as_json(networks[name]), flush=True)
    ok = all(each["ok"] for each in networks.values())
    results = {"ok": ok, "threads": THREADS, "allowed_loss": LOSS, "networks": networks}
    print(
        f"{'ok' if ok else 'NOT OK'}, written to {measure.save('quantization', options, results)}"
    )
    return 0 if ok else 1

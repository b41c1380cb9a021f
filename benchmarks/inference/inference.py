"""The time of a prediction by `dl.infer`, beside other runtimes.

    python benchmarks inference [--device cpu] [--networks lenet,resnet,resnet50]
        [--batches 1,32] [--kinds float32,int8] [--rounds 5] [--seconds 0.4]

From host array to host array, in turns. On the CPU beside ONNX Runtime with as many threads, which
reads the files that `dl.onnx.export` writes; on a GPU beside PyTorch, compiled and captured, where
it is installed. On a GPU `device_us` is a replay of the captured graph among many that are queued.
Weights are random, which changes no time. Outputs are compared before anything is timed. Writes
inference_<device>.json; figures of other networks and batches that are there already stay.
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
from dlsys import data, nn
from dlsys.eager.device import context_of
from shared import measure

THREADS = int(os.environ.get("DLSYS_THREADS", "2"))
NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "lenet": (nn.LeNet5, (1, 28, 28)),
    "resnet": (nn.ResNetMNIST, (1, 28, 28)),
    "resnet50": (nn.ResNet50, (3, 224, 224)),
}
CLOSE = {"float32": 1e-4, "int8": 0.03}  # of the largest output, to ONNX Runtime and PyTorch
REPLAYS = 200

Program = Callable[[np.ndarray], np.ndarray]


def models(name: str, ctx: Any) -> dict[str, Any]:
    """The network, and the same quantized."""
    make, shape = NETWORKS[name]
    model = make(seed=0)
    some = np.random.default_rng(1).normal(size=(16, *shape)).astype(np.float32)
    quantized = dl.quantize(model, data.Loader((some, np.zeros(16, np.int64)), 8), ctx=ctx)
    return {"float32": model, "int8": quantized}


def onnxruntime(model: Any, shape: tuple[int, ...]) -> Program:
    """The model in ONNX Runtime on the CPU, with the threads that dlsys has."""
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = THREADS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        dl.onnx.export(model, path, inputs=(None, *shape))
        made = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: made.run(None, {"input": x})[0]


def torch_compiled(name: str, model: Any, batch: int, shape: tuple[int, ...]) -> Program:
    """The model in PyTorch on a GPU, compiled, and captured as one CUDA graph with its copies."""
    import torch

    from shared.torch_networks import for_inference

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    compiled = torch.compile(for_inference(name, model).cuda())
    host = torch.zeros(batch, *shape).pin_memory()
    x = host.cuda()
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            y = compiled(x)
        out = torch.empty(y.shape).pin_memory()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            x.copy_(host, non_blocking=True)
            out.copy_(compiled(x), non_blocking=True)

    def run(images: np.ndarray) -> np.ndarray:
        host.numpy()[...] = images
        with torch.cuda.stream(stream):
            graph.replay()
            stream.synchronize()
        return out.numpy().copy()

    return run


def device_us(program: Any, x: np.ndarray) -> list[float]:
    """Microseconds of a replay of the captured graph on a GPU, of several groups of many."""
    from dlsys.runtime.device import stream

    (entry,) = program._executors.values()
    executor = entry.executor
    feeds = {v: dl.ndarray.array(x, executor.ctx) for v in entry._inputs}
    for _ in range(3):
        executor.run(feeds)[0].asnumpy()
    runner = executor._runners[(x.shape, x.dtype),][0]
    captured = next(c for kinds, c in runner.captured.items() if all(kinds))
    on, times = stream(executor.ctx), []
    for _ in range(7):
        executor.run(feeds)[0].asnumpy()
        start = time.perf_counter()
        captured.run(on, REPLAYS)
        executor.run(feeds)[0].asnumpy()
        times.append((time.perf_counter() - start) / (REPLAYS + 1) * 1e6)
    return times


def in_turns(programs: dict[str, Program], x: np.ndarray, rounds: int, seconds: float) -> Any:
    """Microseconds of a call of each program."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            program(x)
            times[name] += measure.step_ms(lambda: program(x), seconds)  # noqa: B023
    return {
        name: {**measure.summary([1e3 * t for t in each], 2), "least": round(1e3 * min(each), 2)}
        for name, each in times.items()
    }


def work(name: str, kind: str, model: Any, batch: int, options: Any) -> dict[str, Any]:
    """The figures of one network, kind of numbers and batch."""
    ctx, shape = context_of(options.device), NETWORKS[name][1]
    x = np.random.default_rng(2).normal(size=(batch, *shape)).astype(np.float32)
    ours = dl.infer(model, ctx=ctx)
    programs: dict[str, Program] = {"dlsys": ours}
    if options.device == "cpu":
        programs["onnxruntime"] = onnxruntime(model, shape)
    elif options.torch and kind == "float32":
        programs["torch compiled"] = torch_compiled(name, model, batch, shape)
    wanted = ours(x)
    apart = {
        other: float(np.abs(program(x) - wanted).max() / np.abs(wanted).max())
        for other, program in programs.items()
        if other != "dlsys"
    }
    if any(error > CLOSE[kind] for error in apart.values()):
        raise SystemExit(f"{name} {kind} {batch}: outputs differ by {apart}")
    found: dict[str, Any] = {"network": name, "kind": kind, "batch": batch, "apart": apart}
    found["us"] = in_turns(programs, x, options.rounds, options.seconds)
    if options.device == "gpu":
        found["device_us"] = measure.summary(device_us(ours, x), 2)
    return found


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--networks", default="lenet,resnet,resnet50")
    parser.add_argument("--kinds", default="float32,int8")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--torch", action="store_true", help="on a GPU: beside PyTorch")
    options = parser.parse_args()
    path = options.out / f"inference_{options.device}.json"
    works = {_key(w): w for w in measure.earlier_works(path, threads=THREADS)}
    for name in options.networks.split(","):
        both = models(name, context_of(options.device))
        for kind in options.kinds.split(","):
            for batch in map(int, options.batches.split(",")):
                made = work(name, kind, both[kind], batch, options)
                works[_key(made)] = made
                print(name, kind, batch, made["us"], made.get("device_us", ""), flush=True)
                measure.save(path.stem, options, {"threads": THREADS, "works": [*works.values()]})
    print(path)


def _key(made: dict[str, Any]) -> tuple[Any, ...]:
    return made["network"], made["kind"], made["batch"]


if __name__ == "__main__":
    main()

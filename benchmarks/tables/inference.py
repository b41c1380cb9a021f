"""The tables of inference.py and onnx_models.py: predictions, and models that packages ship."""

from __future__ import annotations

from .gpu import Results, rows, source

_NAMES = {"lenet": "LeNet-5", "resnet": "ResNetMNIST", "resnet50": "ResNet-50"}
_PEERS = {"cpu": "onnxruntime", "gpu": "torch compiled"}


def predictions(results: Results, device: str) -> str:
    """Microseconds from host array to host array; the least of all calls in brackets."""
    record, peer = results.read(f"inference_{device}"), _PEERS[device]
    body = []
    for work in record["works"]:
        times = [
            f"{us['median']:,.1f} ({us['least']:,.1f})"
            if (us := work["us"].get(name))
            else "not run"
            for name in ("dlsys", peer)
        ]
        device_us = [f"{work['device_us']['median']:.1f}"] if "device_us" in work else []
        name = f"{_NAMES[work['network']]}, {work['kind']}, batch {work['batch']}"
        body.append([name, *times, *device_us])
    head = ["network", "dlsys, µs", {"cpu": "ONNX Runtime"}.get(device, "PyTorch compiled")]
    head += ["on the device, µs"] * (device == "gpu")
    return f"{rows(head, body)}\n\n{source(record)}"


def on_cpu(results: Results) -> str:
    """Predictions on the CPU beside ONNX Runtime."""
    return predictions(results, "cpu")


def on_gpu(results: Results) -> str:
    """Predictions on a GPU beside PyTorch."""
    return predictions(results, "gpu")


def shipped(results: Results) -> str:
    """How far models that packages ship are from ONNX Runtime."""
    record, on_gpu = results.read("onnx_models"), results.read("onnx_models_gpu")
    devices = [*next(iter(record["models"].values()))["apart"]]
    apart_on_gpu = {name: f"{m['apart']['gpu']:.1e}" for name, m in on_gpu["models"].items()}
    body = []
    for name, model in record["models"].items():
        step = model["step"]
        slope = (
            "no" if step is None else f"{step['trained']} of {step['weights']}, {step['ratio']:.3f}"
        )
        apart = [*(f"{model['apart'][d]:.1e}" for d in devices), apart_on_gpu.get(name, "not run")]
        body.append([f"`{name}`", *apart,
                     str(len({e["input"] for e in model["explained"]})), slope])  # fmt: skip
    head = ["file", *devices, "gpu", "inputs beyond 1e-4", "weights trained, slope by differences"]
    note = f"{record['models'] and next(iter(record['models'].values()))['inputs']} inputs each; "
    inputs = next(iter(on_gpu["models"].values()))["inputs"]
    gpu = f"On the GPU {inputs} inputs each; {source(on_gpu)}"
    made = f"{note}ONNX Runtime {record['onnxruntime']}; {source(record)}"
    return f"{rows(head, body)}\n\n{made}\n\n{gpu}"

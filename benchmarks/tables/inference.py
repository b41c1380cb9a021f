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
    """How far models that packages ship are from ONNX Runtime, and both from float64."""
    record, on_gpu = results.read("onnx_models"), results.read("onnx_models_gpu")
    devices = [*next(iter(record["models"].values()))["apart"]]
    body = []
    for name, model in record["models"].items():
        gpu, step = on_gpu["models"].get(name), model["step"]
        apart = [*(model["apart"][d] for d in devices), gpu and gpu["apart"]["gpu"]]
        exact, exact_gpu = model["from_float64"] or {}, gpu and gpu.get("from_float64") or {}
        beside = [*map(exact.get, ("onnxruntime", *devices)), exact_gpu.get("gpu")]
        beyond = len({e["input"] for e in model["explained"]})
        slope = (
            "no" if step is None else f"{step['trained']} of {step['weights']}, {step['ratio']:.3f}"
        )
        body.append([f"`{name}`", *map(_number, (*apart, *beside)), str(beyond), slope])
    columns = [*devices, "gpu"]
    head = ["file", *columns, *(f"{each}, float64" for each in ("ONNX Runtime", *columns))]
    head += ["inputs beyond 1e-4", "weights trained, slope by differences"]
    inputs = record["models"] and next(iter(record["models"].values()))["inputs"]
    counts = sorted({model["inputs"] for model in on_gpu["models"].values()})
    rounded = [f"`{name}`" for name, model in on_gpu["models"].items() if model.get("rounded")]
    files = f"{', '.join(rounded)} with its weights rounded to bfloat16; " if rounded else ""
    gpu_note = f"On the GPU {counts[0]} to {counts[-1]} inputs each; {files}{source(on_gpu)}"
    made = f"{inputs} inputs each; ONNX Runtime {record['onnxruntime']}; {source(record)}"
    return f"{rows(head, body)}\n\n{made}\n\n{gpu_note}"


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.1e}"

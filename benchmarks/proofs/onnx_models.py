"""Models that packages ship, on inputs as their users have them, against ONNX Runtime.

    python benchmarks onnx_models [--models ocr] [--devices numpy,cpu] [--inputs 20]

Photographs of scikit-image, rendered text, the sound of vowels, files of Python's library. An
output agrees where it is within 1e-4 of ONNX Runtime's, relative to its largest element or to
1/500 for outputs that are smaller. Where it is not, both are held to the same file computed in
float64, of which dlsys must be nearer, or to what ONNX Runtime itself makes of an input that
differs by a part in 10^7. Then each model takes one step of training on numpy, whose gradient is
compared with differences of the loss. Writes onnx_models.json; the status is 0 where all agree.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from dlsys.eager.device import context_of
from dlsys.onnx.importer import ImportedModel, load
from dlsys.onnx.importer.reader import read
from shared import measure

sys.path.insert(0, str(measure.ROOT / "tests"))
from support.shipped_models import MODELS, Shipped, located, tuned  # noqa: E402

CLOSE = 1e-4
SMALL = (
    2e-3  # an output below it is compared with it: sigmoids near 0 have few bits in ONNX Runtime
)
SLOPE = 0.1  # of the loss along the gradient, by differences of float32


def apart(y: np.ndarray, z: np.ndarray) -> float:
    """The largest difference, relative to the largest element of z."""
    if not z.size:
        return 0.0
    wide = np.abs(y.astype(np.float64) - z.astype(np.float64))
    return float(wide.max() / max(np.abs(z).max(), SMALL))


def farthest(made: list[Any], wanted: list[Any]) -> float:
    """The largest of the outputs' differences."""
    return max(apart(y, z) for y, z in zip(made, wanted, strict=True))


def in_float64(path: Path) -> ImportedModel:
    """The model with its floats in float64."""
    from onnx import AttributeProto, TensorProto, numpy_helper

    model = read(path)

    def widen(tensor: Any) -> None:
        if tensor.data_type == TensorProto.FLOAT:
            wide = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))

    def visit(graph: Any) -> None:
        for tensor in graph.initializer:
            widen(tensor)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.TENSOR:
                    widen(attribute.t)
                elif attribute.type == AttributeProto.GRAPH:
                    visit(attribute.g)
                elif node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                    attribute.i = TensorProto.DOUBLE

    visit(model.graph)
    return ImportedModel(model, path.parent)


class Proof:
    """What is found of one model."""

    def __init__(self, path: Path, shipped: Shipped, devices: list[str]) -> None:
        import onnxruntime

        self.path, self.shipped = path, shipped
        self.session = onnxruntime.InferenceSession(str(path))
        self.models = {device: load(path) for device in devices}
        self.most = dict.fromkeys(devices, 0.0)
        self.explained: list[dict[str, Any]] = []
        self.ok = True

    def take(self, k: int, carried: dict[str, np.ndarray]) -> list[Any]:
        """Compares the outputs for one input, and returns ONNX Runtime's."""
        feeds = {**self.shipped.inputs(k), **carried}
        wanted = self.session.run(None, feeds)
        for device, model in self.models.items():
            ctx = None if device == "numpy" else context_of(device)
            made = model.run(feeds, ctx)
            found = farthest(made, wanted)
            self.most[device] = max(self.most[device], found)
            if found > CLOSE:
                self.explain(k, device, found, made, wanted, feeds)
        return wanted

    def explain(
        self, k: int, device: str, found: float, made: list[Any], wanted: list[Any], feeds: Any
    ) -> None:
        """Says why an output is farther than that."""
        why: dict[str, Any] = {"input": k, "device": device, "apart": found}
        if self.shipped.trained:
            wide = {
                n: x.astype(np.float64) if x.dtype == np.float32 else x for n, x in feeds.items()
            }
            exact = in_float64(self.path).run(wide)
            why |= {"from_float64": farthest(made, exact)}
            why |= {"onnxruntime_from_float64": farthest(wanted, exact)}
            good = why["from_float64"] <= max(CLOSE, why["onnxruntime_from_float64"])
        else:
            why |= {"onnxruntime_from_itself": self.own_spread(feeds, wanted)}
            good = found <= 2 * why["onnxruntime_from_itself"]
        self.explained.append(why)
        self.ok = self.ok and bool(good)

    def own_spread(self, feeds: Any, wanted: list[Any]) -> float:
        """How far ONNX Runtime's outputs move where the input changes in its last bits."""
        most, draw = 0.0, np.random.default_rng(0)
        for _ in range(8):
            moved = {
                n: x * (1 + 1e-7 * draw.standard_normal(x.shape)).astype(np.float32)
                for n, x in feeds.items()
            }
            most = max(most, farthest(self.session.run(None, moved), wanted))
        return most

    def step(self) -> dict[str, Any] | None:
        """One step of training on numpy."""
        if not self.shipped.trained:
            return None
        made = tuned(self.path, self.shipped, None)
        self.ok = self.ok and abs(made.ratio - 1) <= SLOPE and made.fall > 0
        return made._asdict()


def prove(name: str, options: Any) -> dict[str, Any] | None:
    """The record of one model; None where its package is not installed."""
    path = located(name)
    if path is None:
        return None
    shipped = MODELS[name]
    proof = Proof(path, shipped, options.devices.split(","))
    carried: dict[str, np.ndarray] = {}
    for k in range(options.inputs):
        made = proof.take(k, carried)
        carried = {n: made[j] for n, j in shipped.carried.items()}
    step = proof.step()
    return {"inputs": options.inputs, "ok": proof.ok, "apart": proof.most, "step": step,
            "explained": proof.explained}  # fmt: skip


def main() -> int:
    """Returns 0 where all agree."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--models", default="", help="part of the names")
    parser.add_argument("--devices", default="numpy,cpu")
    parser.add_argument("--inputs", type=int, default=20)
    options = parser.parse_args()
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name in (name for name in MODELS if options.models in name):
        made = prove(name, options)
        print(name, "not installed" if made is None else measure.as_json(made), flush=True)
        if made is not None:
            found[name] = made
    ok = all(each["ok"] for each in found.values())
    results = {"ok": ok, "onnxruntime": onnxruntime.__version__, "close": CLOSE, "models": found}
    print("ok" if ok else "NOT OK", measure.save("onnx_models", options, results))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Models that packages ship, on inputs as their users have them, against ONNX Runtime.

    python benchmarks onnx_models [--models ocr] [--devices numpy,cpu] [--inputs 20] [--save FOLDER]
    python benchmarks onnx_models --saved FOLDER --devices gpu

Photographs of scikit-image, rendered text, the sound of vowels, files of Python's library. An
output agrees where it is within 1e-4 of ONNX Runtime's, relative to its largest element or to
1/500 for outputs that are smaller. Where it is not, both are held to the same file computed in
float64, of which dlsys must be nearer, or to what ONNX Runtime itself makes of an input that
differs by a part in 10^7. Then each model takes one step of training on numpy, whose gradient is
compared with differences of the loss. Writes onnx_models.json; the status is 0 where all agree.

`--save` writes the inputs and ONNX Runtime's outputs to a folder, one file a model. `--saved` takes
them from there, for machines that have the models (DLSYS_TEST_MODELS) but not what their inputs are
made with; it writes onnx_models_gpu.json and trains nothing.
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
VERSION = "onnxruntime.txt"  # in a folder of saved outputs: of the runtime that made them
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


class Saved:
    """Inputs and outputs of a model in a folder, as an ONNX Runtime session of them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name.replace('/', '-')}.npz"
        self.arrays: dict[str, np.ndarray] = {}

    def add(self, k: int, feeds: dict[str, np.ndarray], outputs: list[Any]) -> None:
        """Keeps the k-th inputs and outputs."""
        named = {f"{k}/in/{n}": x for n, x in feeds.items()}
        self.arrays |= named | {f"{k}/out/{j}": y for j, y in enumerate(outputs)}

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(self.path, **self.arrays)  # type: ignore[arg-type]

    def read(self, k: int) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """The k-th inputs and outputs."""
        if not self.arrays:
            with np.load(self.path) as file:
                self.arrays = dict(file)
        begins = f"{k}/in/", f"{k}/out/"
        feeds = {n[len(begins[0]) :]: x for n, x in self.arrays.items() if n.startswith(begins[0])}
        return feeds, [x for n, x in self.arrays.items() if n.startswith(begins[1])]


class Proof:
    """What is found of one model. Without a session the outputs are those that were saved."""

    def __init__(self, path: Path, shipped: Shipped, devices: list[str], session: bool) -> None:
        self.path, self.shipped, self.session = path, shipped, None
        if session:
            import onnxruntime

            self.session = onnxruntime.InferenceSession(str(path))
        self.models = {device: load(path) for device in devices}
        self.most = dict.fromkeys(devices, 0.0)
        self.explained: list[dict[str, Any]] = []
        self.ok = True

    def take(self, k: int, feeds: dict[str, np.ndarray], wanted: list[Any]) -> None:
        """Compares the outputs for one input with ONNX Runtime's."""
        for device, model in self.models.items():
            ctx = None if device == "numpy" else context_of(device)
            made = model.run(feeds, ctx)
            found = farthest(made, wanted)
            self.most[device] = max(self.most[device], found)
            if found > CLOSE:
                self.explain(k, device, found, made, wanted, feeds)

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
        elif self.session is None:
            good = False
        else:
            why |= {"onnxruntime_from_itself": self.own_spread(feeds, wanted)}
            good = found <= 2 * why["onnxruntime_from_itself"]
        self.explained.append(why)
        self.ok = self.ok and bool(good)

    def own_spread(self, feeds: Any, wanted: list[Any]) -> float:
        """How far ONNX Runtime's outputs move where the input changes in its last bits."""
        assert self.session is not None
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
    proof = Proof(path, shipped, options.devices.split(","), session=options.saved is None)
    kept = Saved(options.saved or options.save or Path(), name)
    carried: dict[str, np.ndarray] = {}
    for k in range(options.inputs):
        if proof.session is None:
            feeds, wanted = kept.read(k)
        else:
            feeds = {**shipped.inputs(k), **carried}
            wanted = proof.session.run(None, feeds)
            kept.add(k, feeds, wanted)
        proof.take(k, feeds, wanted)
        carried = {n: wanted[j] for n, j in shipped.carried.items()}
    if options.save:
        kept.write()
    step = proof.step() if proof.session is not None else None
    return {"inputs": options.inputs, "ok": proof.ok, "apart": proof.most, "step": step,
            "explained": proof.explained}  # fmt: skip


def main() -> int:
    """Returns 0 where all agree."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--models", default="", help="part of the names")
    parser.add_argument("--devices", default="numpy,cpu")
    parser.add_argument("--inputs", type=int, default=20)
    parser.add_argument("--save", type=Path, help="folder for inputs and outputs")
    parser.add_argument("--saved", type=Path, help="folder of inputs and outputs to compare with")
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
    version = onnxruntime.__version__
    if options.save:
        (options.save / VERSION).write_text(version)
    if options.saved:
        version = (options.saved / VERSION).read_text()
    results = {"ok": ok, "onnxruntime": version, "close": CLOSE, "models": found}
    record = "onnx_models_gpu" if options.saved else "onnx_models"
    print("ok" if ok else "NOT OK", measure.save(record, options, results))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())

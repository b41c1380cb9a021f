"""Models that packages ship, on inputs as their users have them, against ONNX Runtime.

    python benchmarks onnx_models [--models ocr,cnn] [--devices numpy,cpu] [--inputs 20]
    python benchmarks onnx_models --save FOLDER [--bfloat16]
    python benchmarks onnx_models --from FOLDER [--devices gpu]

Photographs of scikit-image, rendered text, the sound of vowels, files of Python's library. An
output agrees where it is within 1e-4 of ONNX Runtime's, relative to its largest element or to
1/500 for outputs that are smaller. Where it is not, dlsys must be nearer to the same file computed
in float64, whose distance from both is in the record, or no farther than twice what ONNX Runtime
itself makes of an input that differs by a part in 10^7. Then each model takes one step of training
on numpy, whose gradient is compared with differences of the loss. Writes onnx_models.json; the
status is 0 where all agree. Of models that `--models` leaves out, what is in the record stays.

`--save` writes to a folder what a machine without these packages needs: the models, the inputs,
ONNX Runtime's outputs and those of float64. With `--bfloat16` the weights are rounded first, so
that the file can be compressed to less than half, and all outputs are those of the rounded file.
`--from` takes them from there, writes onnx_models_gpu.json and trains nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlsys.dtypes import bfloat16, rounded
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


def graphs(graph: Any) -> Iterator[Any]:
    """A graph and those inside it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs(attribute.g)


def convert_floats(graph: Any, converted: Callable[[np.ndarray], np.ndarray]) -> None:
    """Replaces the float32 tensors of a graph and of those inside it."""
    from onnx import TensorProto, numpy_helper

    for each in graphs(graph):
        held = [a.t for node in each.node for a in node.attribute if a.HasField("t")]
        for tensor in (*each.initializer, *held):
            if tensor.data_type == TensorProto.FLOAT:
                made = converted(numpy_helper.to_array(tensor))
                tensor.CopyFrom(numpy_helper.from_array(made, tensor.name))


def in_float64(path: Path) -> ImportedModel:
    """The model with its floats in float64."""
    from onnx import TensorProto

    model = read(path)
    convert_floats(model.graph, lambda x: x.astype(np.float64))
    for graph in graphs(model.graph):
        for node in graph.node:
            for attribute in node.attribute:
                if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                    attribute.i = TensorProto.DOUBLE
    return ImportedModel(model, path.parent)


def round_weights(path: Path, to: Path) -> None:
    """Writes the model with its weights rounded to bfloat16, in float32 as they were."""
    model = read(path)
    convert_floats(model.graph, lambda x: rounded(x, bfloat16))
    to.write_bytes(model.SerializeToString())


class Example(NamedTuple):
    """An input, and what it is compared with.

    outputs: ONNX Runtime's. exact: of the file in float64; empty where that is another function, of
    activations that are rounded to 8 bits. spread: how far ONNX Runtime's outputs move where the
    input changes in its last bits; only where there are no exact ones.
    """

    feeds: dict[str, np.ndarray]
    outputs: list[Any]
    exact: list[Any]
    spread: float


class Saved:
    """A model with its examples in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.model = folder / name.replace("/", "-")
        self._path = self.model.with_suffix(".npz")
        self._arrays: dict[str, np.ndarray] = {}

    def take_model(self, path: Path, rounds: bool) -> None:
        """Copies the model to the folder, with `rounds` as `round_weights` does."""
        self.model.parent.mkdir(parents=True, exist_ok=True)
        (round_weights if rounds else shutil.copyfile)(path, self.model)
        self._arrays["rounded"] = np.array(rounds)

    def add(self, k: int, example: Example) -> None:
        """Keeps the k-th example."""
        for n, x in example.feeds.items():
            self._arrays[f"{k}/in/{n}"] = x
        for j, y in enumerate(example.outputs):
            self._arrays[f"{k}/out/{j}"] = y
        for j, (y, z) in enumerate(zip(example.exact, example.outputs)):
            self._arrays[f"{k}/beyond/{j}"] = (y - z).astype(np.float32)  # in half the bytes
        self._arrays[f"{k}/spread"] = np.array(example.spread)

    def write(self) -> None:
        """Writes the examples."""
        np.savez(self._path, **self._arrays)  # type: ignore[arg-type]

    def load(self) -> bool:
        """Reads the examples; True where the model's weights are rounded to bfloat16."""
        with np.load(self._path) as file:
            self._arrays = dict(file)
        return bool(self._arrays.get("rounded", False))

    def read(self, k: int) -> Example:
        """The k-th example."""

        def named(kind: str) -> dict[str, np.ndarray]:
            begin = f"{k}/{kind}/"
            return {n[len(begin) :]: x for n, x in self._arrays.items() if n.startswith(begin)}

        outputs = [*named("out").values()]
        exact = [z + y.astype(np.float64) for z, y in zip(outputs, named("beyond").values())]
        return Example(named("in"), outputs, exact, float(self._arrays[f"{k}/spread"]))


class Runtime:
    """ONNX Runtime and the file in float64, which make examples."""

    def __init__(self, path: Path, shipped: Shipped) -> None:
        import onnxruntime

        self._session = onnxruntime.InferenceSession(str(path))
        self._exact = in_float64(path) if shipped.trained else None
        self._shipped = shipped
        self._carried: dict[str, np.ndarray] = {}

    def read(self, k: int) -> Example:
        """The k-th example; they are made in order."""
        feeds = {**self._shipped.inputs(k), **self._carried}
        outputs, exact = self._session.run(None, feeds), []
        self._carried = {n: outputs[j] for n, j in self._shipped.carried.items()}
        if self._exact is not None:
            floats = np.float32
            wide = {n: x.astype(np.float64) if x.dtype == floats else x for n, x in feeds.items()}
            exact = self._exact.run(wide)
        return Example(feeds, outputs, exact, 0.0 if exact else self._spread(feeds, outputs))

    def _spread(self, feeds: dict[str, np.ndarray], outputs: list[Any]) -> float:
        most, draw = 0.0, np.random.default_rng(0)
        for _ in range(8):
            moved = {
                n: x * (1 + 1e-7 * draw.standard_normal(x.shape)).astype(np.float32)
                for n, x in feeds.items()
            }
            most = max(most, farthest(self._session.run(None, moved), outputs))
        return most


class Proof:
    """What is found of one model."""

    def __init__(self, path: Path, devices: list[str]) -> None:
        self.models = {device: load(path) for device in devices}
        self.most = dict.fromkeys(devices, 0.0)
        self.from_exact = dict.fromkeys((*devices, "onnxruntime"), 0.0)
        self.explained: list[dict[str, Any]] = []
        self.ok = True

    def take(self, k: int, example: Example) -> None:
        """Compares the outputs for one input."""
        exact, distance = example.exact, self.from_exact
        theirs = farthest(example.outputs, exact) if exact else 0.0
        distance["onnxruntime"] = max(distance["onnxruntime"], theirs)
        for device, model in self.models.items():
            made = model.run(example.feeds, None if device == "numpy" else context_of(device))
            found = farthest(made, example.outputs)
            self.most[device] = max(self.most[device], found)
            ours = farthest(made, exact) if exact else 0.0
            distance[device] = max(distance[device], ours)
            if found <= CLOSE:
                continue
            why: dict[str, Any] = {"input": k, "device": device, "apart": found}
            if exact:
                why |= {"from_float64": ours, "onnxruntime_from_float64": theirs}
                good = ours <= max(CLOSE, theirs)
            else:
                why |= {"onnxruntime_from_itself": example.spread}
                good = found <= 2 * example.spread
            self.explained.append(why)
            self.ok = self.ok and good

    def step(self, path: Path, shipped: Shipped) -> dict[str, Any] | None:
        """One step of training on numpy."""
        if not shipped.trained:
            return None
        made = tuned(path, shipped, None)
        self.ok = self.ok and abs(made.ratio - 1) <= SLOPE and made.fall > 0
        return made._asdict()


def prove(name: str, options: Any) -> dict[str, Any] | None:
    """The record of one model; None where it is not there."""
    kept = Saved(options.taken or options.save or Path(), name)
    path = located(name) if options.taken is None else kept.model
    if path is None or not path.is_file():
        return None
    shipped, is_rounded = MODELS[name], options.bfloat16
    if options.save:
        kept.take_model(path, is_rounded)
        path = kept.model
    elif options.taken is not None:
        is_rounded = kept.load()
    proof = Proof(path, [device for device in options.devices.split(",") if device])
    source = Runtime(path, shipped) if options.taken is None else kept
    for k in range(options.inputs):
        example = source.read(k)
        proof.take(k, example)
        if options.save:
            kept.add(k, example)
    if options.save:
        kept.write()
    step = proof.step(path, shipped) if options.taken is options.save is None else None
    exact = proof.from_exact if shipped.trained else None
    return {"inputs": options.inputs, "rounded": is_rounded, "ok": proof.ok, "apart": proof.most,
            "from_float64": exact, "step": step, "explained": proof.explained}  # fmt: skip


def others(record: str, options: Any) -> dict[str, Any]:
    """What the record has of models that are left out now."""
    path = options.out / f"{record}.json"
    found = json.loads(path.read_text())["models"] if path.exists() else {}
    return {name: made for name, made in found.items() if not _wanted(name, options)}


def _wanted(name: str, options: Any) -> bool:
    return any(part in name for part in options.models.split(","))


def main() -> int:
    """Returns 0 where all agree."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--models", default="", help="parts of the names")
    parser.add_argument("--devices", default="numpy,cpu")
    parser.add_argument("--inputs", type=int, default=20)
    parser.add_argument("--save", type=Path, help="folder for models, inputs and outputs")
    parser.add_argument(
        "--bfloat16", action="store_true", help="round the saved weights to bfloat16"
    )
    parser.add_argument("--from", type=Path, dest="taken", help="folder that --save has written")
    options = parser.parse_args()
    if options.bfloat16 and not options.save:
        parser.error("--bfloat16 needs --save: weights are rounded in the files that it writes")
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    warnings.simplefilter("ignore")
    record = "onnx_models" if options.taken is None else "onnx_models_gpu"
    made: dict[str, Any] = others(record, options)
    for name in filter(lambda name: _wanted(name, options), MODELS):
        found = prove(name, options)
        print(name, "not there" if found is None else measure.as_json(found), flush=True)
        if found is not None:
            made[name] = found
    version = onnxruntime.__version__
    if options.save:
        (options.save / VERSION).write_text(version)
        return 0
    if options.taken:
        version = (options.taken / VERSION).read_text()
    models = {name: made[name] for name in MODELS if name in made}
    ok = all(each["ok"] for each in models.values())
    results = {"ok": ok, "onnxruntime": version, "close": CLOSE, "models": models}
    print("ok" if ok else "NOT OK", measure.save(record, options, results))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())

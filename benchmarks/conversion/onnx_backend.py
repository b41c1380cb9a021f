"""The tests of the package onnx for backends, on `dlsys.onnx.load`, and why each failure fails.

    python benchmarks onnx_backend [--device cpu] [--kind node] [--form dynamic]

Forms: `plain`; `dynamic`, in which no input and no value declares an extent; `constants`, in which
the inputs are initializers of the model. Outputs are compared by the package's own function, at the
tolerances of its tests.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dlsys import ndarray
from dlsys.onnx.importer import ImportedModel
from shared.measure import arguments, save

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator", "light")
FORMS = ("plain", "dynamic", "constants")
# Why the outputs of some tests differ, found by looking.
KNOWN = {
    "test_squeezenet": "equal weights make logits of 1e10, so that the rounding of a product, "
    "which depends on the threads of the BLAS, decides the softmax",
}
RANDOM = "draws random numbers, whose bits nothing prescribes"
Sets = list[tuple[list[Any], list[Any]]]


def cases(kind: str) -> Iterator[tuple[str, Any, Sets, float, float]]:
    """Name, model, pairs of inputs and outputs, and the tolerances of all tests of a kind."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package's own formulas
        found = load_model_tests(kind="real" if kind == "light" else kind)
    for case in found:
        if kind == "light":
            model, sets = _light(case.url)
        elif case.model is not None:
            model = case.model
            sets = [([_array(x) for x in a], [_array(x) for x in b]) for a, b in case.data_sets]
        else:
            model, sets = _stored(Path(case.model_dir))
        yield case.name, model, sets, case.rtol, case.atol


def _array(value: Any) -> Any:
    """A value of a test as an array; some are given as TensorProtos."""
    import onnx

    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _stored(folder: Path) -> tuple[Any, Sets]:
    """A model and the data beside it."""
    import onnx

    model = onnx.load(folder / "model.onnx")
    sets = []
    for data in sorted(folder.glob("test_data_set_*")):
        several = []
        for kind, values in (("input", model.graph.input), ("output", model.graph.output)):
            files = [data / f"{kind}_{k}.pb" for k in range(len(values))]
            several.append([_value(f, v) for f, v in zip(files, values) if f.exists()])
        sets.append((several[0], several[1]))
    return model, sets


def _value(path: Path, info: Any) -> Any:
    import onnx

    kind = info.type.WhichOneof("value")
    proto = {"sequence_type": onnx.SequenceProto, "optional_type": onnx.OptionalProto}.get(
        kind, onnx.TensorProto
    )()
    proto.ParseFromString(path.read_bytes())
    helper = onnx.numpy_helper
    return {"sequence_type": helper.to_list, "optional_type": helper.to_optional}.get(
        kind, helper.to_array
    )(proto)


def _light(url: str) -> tuple[Any, Sets]:
    """A model of the package without its weights, which the file computes, and its outputs."""
    import onnx
    from onnx.backend.test.runner import Runner

    path = Path(onnx.__file__).parent / url.removeprefix("onnx/")
    model = onnx.load(path)
    initial = {t.name for t in model.graph.initializer}
    made = [Runner.generate_dummy_data(v) for v in model.graph.input if v.name not in initial]
    return model, [
        (made, [_value(path.with_name(f"{path.stem}_output_0.pb"), model.graph.output[0])])
    ]


def formed(model: Any, inputs: list[Any], form: str) -> tuple[Any, dict[str, Any]]:
    """A model in a form, and its feeds."""
    import onnx

    initial = {t.name for t in model.graph.initializer}
    names = [v.name for v in model.graph.input if len(inputs) == len(model.graph.input)
             or v.name not in initial]  # fmt: skip
    feeds = dict(zip(names, inputs))
    made = onnx.ModelProto()
    made.CopyFrom(model)
    if form == "dynamic":
        del made.graph.value_info[:]
        for value in (*made.graph.input, *made.graph.output):
            for k, extent in enumerate(value.type.tensor_type.shape.dim):
                extent.dim_param = f"{value.name}_{k}"
    if form == "constants":
        for name, x in [*feeds.items()]:
            if isinstance(x, np.ndarray):
                made.graph.initializer.append(onnx.numpy_helper.from_array(x, name))
                del feeds[name]
    return made, feeds


def outcome(model: Any, sets: Sets, form: str, ctx: Any, rtol: float, atol: float) -> str | None:
    """None where all outputs are as the test has them, else why not."""
    from onnx.backend.test.runner import Runner

    try:
        for inputs, wanted in sets:
            made, feeds = formed(model, inputs, form)
            got = ImportedModel(made).run(feeds, ctx)
            a, b = _flat(wanted), _flat(got)  # its function cannot compare numbers in sequences
            assert len(wanted) == len(got), f"{len(got)} outputs, expected {len(wanted)}"
            Runner.assert_similar_outputs(a, b, rtol, atol)
    except AssertionError as error:
        if any("Bernoulli" in n.op_type or "Random" in n.op_type for n in model.graph.node):
            return RANDOM
        return "differs: " + " ".join(str(error).split())[:100]
    except Exception as error:
        return " ".join(str(error).split())[:160]
    return None


def _flat(values: Any) -> list[Any]:
    """Arrays and those of sequences, in order, less the Nones of empty optionals."""
    several = isinstance(values, (list, tuple))
    if several:
        return [y for x in values for y in _flat(x)]
    return [] if values is None else [values]


def counts(kind: str, form: str, ctx: Any) -> dict[str, Any]:
    """How many tests of a kind pass, and the others with the reason."""
    refused, total = {}, 0
    bar = tqdm(_listed(kind), desc=f"{kind}, {form}, {'numpy' if ctx is None else ctx}")
    for name, model, sets, rtol, atol in bar:
        total += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            why = outcome(model, sets, form, ctx, rtol, atol)
        if why is not None:
            refused[name] = KNOWN.get(name, why) if why.startswith("differs") else why
        bar.set_postfix(refused=len(refused))
    return {"passed": total - len(refused), "of": total, "refused": refused}


@functools.cache
def _listed(kind: str) -> list[tuple[str, Any, Sets, float, float]]:
    return [*cases(kind)]


def main(argv: list[str] | None = None) -> None:
    """Runs the tests and writes onnx.json."""
    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("numpy", "cpu", "gpu"), action="append")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--form", choices=FORMS, action="append")
    options = parser.parse_args(argv)
    devices = {"numpy": None, "cpu": ndarray.cpu(0), "gpu": ndarray.gpu(0)}
    results: dict[str, Any] = {}
    for device in options.device or ("numpy", "cpu"):
        for form in options.form or FORMS:
            for kind in options.kind or KINDS:
                found = counts(kind, form, devices[device])
                results.setdefault(device, {}).setdefault(form, {})[kind] = found
                print(f"{device}, {form}, {kind}: {found['passed']} of {found['of']}")
    save("onnx_import", options, results)


if __name__ == "__main__":
    main()

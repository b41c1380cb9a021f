"""Damaged ONNX files by the thousand, in bytes and in fields: each is refused or runs, quickly.

python benchmarks onnx_mutations [--count 5000]
"""

from __future__ import annotations

import random
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dlsys.errors import DlsysError
from dlsys.onnx.importer import ImportedModel
from dlsys.onnx.importer.registry import RULES
from shared.measure import arguments, save

OPERATORS = sorted(name for domain, name in RULES if not domain)


def files() -> list[bytes]:
    """The models of PyTorch's layers and operators that the package onnx ships, the small ones."""
    import onnx

    root = Path(onnx.__file__).parent / "backend" / "test" / "data"
    found = [p.read_bytes() for p in sorted(root.glob("*/*/model.onnx"))]
    return [data for data in found if len(data) < 20_000]


def mutant(data: bytes, draw: random.Random) -> bytes:
    """A copy with up to four bytes changed, or short runs inserted or cut out."""
    made = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, run = draw.randrange(len(made)), draw.randint(1, 8)
        kind = draw.randrange(3)
        if kind == 0:
            made[at] = draw.randrange(256)
        elif kind == 1:
            made[at:at] = draw.randbytes(run)
        else:
            del made[at : at + run]
    return bytes(made)


def misfit(proto: Any, draw: random.Random) -> None:
    """Changes a readable model: an attribute's number, a name, an operator or an extent."""
    nodes, kind = proto.graph.node, draw.randrange(5)
    node, number = draw.choice(nodes), draw.choice((-1, 0, 1, 3, 7, 1 << 31, -(1 << 40), 1 << 62))
    if kind == 0 and node.attribute:
        attribute = draw.choice(node.attribute)
        attribute.i = number
        for k in range(len(attribute.ints)):
            attribute.ints[k] = draw.choice((number, attribute.ints[k]))
    elif kind == 1 and node.input:
        others = [v.name for v in proto.graph.input] + [n.output[0] for n in nodes if n.output]
        node.input[draw.randrange(len(node.input))] = draw.choice(others)
    elif kind == 2:
        node.op_type = draw.choice(OPERATORS)
    elif kind == 3 and proto.graph.initializer:
        tensor = draw.choice(proto.graph.initializer)
        for k in range(len(tensor.dims)):
            tensor.dims[k] = draw.choice((number, tensor.dims[k]))
    else:
        proto.opset_import[0].version = draw.randint(1, 26)


def feeds_of(model: ImportedModel) -> dict[str, Any]:
    """Small arrays for the inputs that a model declares."""
    made = {}
    for name, dtype, shape in model.inputs:
        extents = [min(n, 64) if isinstance(n, int) and n >= 0 else 1 for n in shape or ()]
        if dtype is not None and dtype.kind in "fiub":
            made[name] = np.ones(extents[:8], dtype)
    return made


def main(argv: list[str] | None = None) -> None:
    """Runs them and writes onnx_mutations.json. AssertionError for one that ends otherwise."""
    import onnx

    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=5000)
    options = parser.parse_args(argv)
    draw, models = random.Random(0), files()
    found = {"count": options.count, "unreadable": 0, "refused": 0, "ran": 0, "slowest_s": 0.0}
    for _ in tqdm(range(options.count), desc="damaged files"):
        data, start = draw.choice(models), time.perf_counter()
        try:
            if draw.random() < 0.5:
                proto = onnx.ModelProto.FromString(mutant(data, draw))
            else:
                proto = onnx.ModelProto.FromString(data)
                misfit(proto, draw)
        except Exception:
            found["unreadable"] += 1
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = ImportedModel(proto)
                model.run(feeds_of(model))
            found["ran"] += 1
        except DlsysError as error:
            assert "\n" not in str(error), error
            found["refused"] += 1
        found["slowest_s"] = max(found["slowest_s"], round(time.perf_counter() - start, 2))
    print(found)
    save("onnx_mutations", options, found)


if __name__ == "__main__":
    main()

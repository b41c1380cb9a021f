"""The program of gpumat's page, two 5000 × 5000 matrices that are multiplied, beside PyTorch's.

    python benchmarks gpumat [--rounds N] [--extent 5000] [--devices cpu gpu]

The program loads both matrices to the device, multiplies, and loads the product back into a numpy
array that is there already; "product" is the multiplication alone, operands and result on the
device. fp32 on both sides, PyTorch without TF32. Contestants take turns in one process. Sampled
elements are held against float64.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from shared import measure

DEVICES = ("cpu", "gpu")
SAMPLED = 200  # elements of the product
# Of |A| |B|, in roundings of float32: the sum of 5000 terms, in any order of blocks.
BOUND = 16 * 2.0**-24

Matrices = tuple[np.ndarray, np.ndarray, np.ndarray]


class Contestant(NamedTuple):
    """program: all of it; product: the multiplication, and what waits for the device."""

    program: Callable[[], Any]
    product: Callable[[], Any]


def matrices(extent: int) -> Matrices:
    """A, B and the array of their product, which each program writes."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((extent, extent), np.float32) for _ in range(2))
    return a, b, np.zeros_like(a)


def ours(device: str, arrays: Matrices) -> Contestant:
    """The page's program on dlsys.gpumat."""
    import dlsys as dl
    from dlsys.gpumat import PyGpuMatrix

    n = len(arrays[0])

    def made() -> list[PyGpuMatrix]:
        return [PyGpuMatrix(array, n, n, device=device) for array in arrays]

    def program() -> None:
        A, B, C = made()  # noqa: N806 (the page's names)
        A.mul(n, n, n, B, C)
        C.loadFromDevice()

    A, B, C = made()  # noqa: N806

    def product() -> None:
        A.mul(n, n, n, B, C)
        dl.synchronize()

    return Contestant(program, product)


def torchs(device: str, arrays: Matrices) -> Contestant:
    """PyTorch's."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    where = "cuda" if device == "gpu" else "cpu"
    a, b, c = map(torch.from_numpy, arrays)
    there = a.to(where), b.to(where), c.to(where)

    def program() -> None:
        c.copy_(a.to(where) @ b.to(where))

    def product() -> None:
        torch.mm(*there[:2], out=there[2])
        if where == "cuda":
            torch.cuda.synchronize()

    return Contestant(program, product)


def error(arrays: Matrices) -> float:
    """The largest error of sampled elements of the product, in units of |A| |B|."""
    a, b, c = arrays
    rows, columns = np.random.default_rng(1).integers(len(a), size=(2, SAMPLED))
    left, right = a[rows].astype(np.float64), b[:, columns].T.astype(np.float64)
    wrong = np.abs((left * right).sum(1) - c[rows, columns])
    return float((wrong / (np.abs(left) * np.abs(right)).sum(1)).max())


def ms(call: Callable[[], Any]) -> float:
    """Milliseconds of one call, which waits for its device."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def compare(device: str, extent: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each contestant on a device."""
    arrays = matrices(extent)
    systems = {"gpumat": ours(device, arrays)}
    if find_spec("torch"):
        import torch

        if device == "cpu" or torch.cuda.is_available():
            systems["torch"] = torchs(device, arrays)
    errors = {}
    for name, each in systems.items():
        arrays[2][...] = np.nan
        each.program()  # and warms up
        each.product()
        errors[name] = error(arrays)
    times: dict[tuple[str, str], list[float]] = {
        (name, part): [] for name in systems for part in Contestant._fields
    }
    for _ in range(rounds):
        for (name, part), found in times.items():
            found.append(ms(getattr(systems[name], part)))
    return [
        {"device": device, "system": name, "error": errors[name], "right": errors[name] < BOUND}
        | {part: measure.summary(times[name, part], 3) for part in Contestant._fields}
        for name in systems
    ]


def main() -> int:
    """Returns 0 when all products are right."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--extent", type=int, default=5000)
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    options = parser.parse_args()
    from dlsys.eager.device import context_of
    from dlsys.runtime.device import unavailable

    found: list[dict[str, Any]] = []
    for device in options.devices:
        reason = unavailable(context_of(device))
        if reason is not None:
            print(f"{device} is left out: {reason}", file=sys.stderr)
            continue
        found += compare(device, options.extent, options.rounds)
    for row in found:
        print(
            f"{row['device']:4} {row['system']:7} program {row['program']['median']:9.2f} ms, "
            f"product {row['product']['median']:9.2f} ms, error {row['error']:.1e}"
            f"{'' if row['right'] else ' WRONG'}"
        )
    print(measure.save("gpumat", options, {"extent": options.extent, "systems": found}))
    return 0 if found and all(row["right"] for row in found) else 1

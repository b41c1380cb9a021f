"""Non-maximum suppression and Soft-NMS of one YOLO image, 80 classes of 8,400 boxes.

    python benchmarks suppression [--device cpu|gpu] [--rounds N]

Leaves results/suppression_DEVICE.json. Boxes lie around 40 things, as a detector's do; candidates
are those whose score is above 0.25, as for pictures, above 0.001, as for average precision, or all,
and 300 boxes a class may stay. ONNX Runtime's operator, one thread of the CPU, is given the same
arrays in the same process, and takes turns with ours; that both choose the same boxes is checked.
PyTorch has no such operator. A run of ours begins with arrays on the device and ends when the
device is done.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from shared import measure

CLASSES, BOXES, THINGS, MOST, OVERLAP = 80, 8400, 40, 300, 0.5
THRESHOLDS = (0.25, 0.001, None)
Call = Callable[[], Any]


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Boxes (1, 8400, 4) and scores (1, 80, 8400): 2 % of the boxes find a thing, of one class."""
    rng = np.random.default_rng(0)
    middle, side = rng.uniform(0, 640, (THINGS, 2)), np.exp(rng.uniform(2.5, 5.5, (THINGS, 2)))
    of = rng.integers(0, THINGS, BOXES)
    noise = rng.normal(0, 0.1, (2, BOXES, 2))
    middle, side = middle[of] + noise[0] * side[of], side[of] * np.exp(noise[1])
    boxes = np.concatenate([middle - side / 2, middle + side / 2], 1)
    scores = 0.01 * rng.random((CLASSES, BOXES)) ** 4
    sure = np.flatnonzero(rng.random(BOXES) < 0.02)
    scores[of[sure] % CLASSES, sure] = rng.uniform(0.1, 0.95, len(sure))
    return boxes[None].astype(np.float32), scores[None].astype(np.float32)


def ours(op: Any, given: tuple[np.ndarray, ...], ctx: Any, **attrs: Any) -> Call:
    """A run, which returns arrays of the device."""
    from dlsys import autodiff as ad
    from dlsys import ndarray

    nodes = [ad.Variable(f"x{k}", x.shape, x.dtype) for k, x in enumerate(given)]
    executor = ad.Executor([*op(*nodes, max_output_boxes_per_class=MOST, **attrs)], ctx)
    fed = given if ctx is None else [ndarray.array(x, ctx) for x in given]
    feeds = dict(zip(nodes, fed))

    def run() -> list[Any]:
        made = executor.run(feeds)
        if ctx is not None:
            ndarray.synchronize(ctx)
        return made

    return run


def theirs(given: tuple[np.ndarray, ...], threshold: float | None) -> Call:
    """A run of ONNX Runtime."""
    import onnxruntime
    from onnx import TensorProto, helper

    names = ["boxes", "scores", "most", "overlap", *(["least"] if threshold is not None else [])]
    values = [*given, np.array([MOST]), np.array([OVERLAP], np.float32)]
    values += [np.array([threshold], np.float32)] if threshold is not None else []
    kinds = [TensorProto.INT64 if x.dtype == np.int64 else TensorProto.FLOAT for x in values]
    graph = helper.make_graph(
        [helper.make_node("NonMaxSuppression", names, ["rows"])], "suppression",
        [helper.make_tensor_value_info(n, k, x.shape) for n, k, x in zip(names, kinds, values)],
        [helper.make_tensor_value_info("rows", TensorProto.INT64, [None, 3])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = dict(zip(names, values))
    return lambda: session.run(None, feeds)


def timed(calls: dict[str, Call], rounds: int) -> dict[str, measure.Summary]:
    """Milliseconds of each contestant, which take turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append((time.perf_counter() - start) * 1e3)
    return {name: measure.summary(values) for name, values in samples.items()}


def main() -> int:
    """Returns 0."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    from dlsys import autodiff as ad
    from dlsys import ndarray

    ctx = getattr(ndarray, options.device)(0)
    boxes, scores = given = arrays()
    works, found = [], {}
    if find_spec("onnxruntime") and find_spec("onnx"):
        found["onnxruntime"] = importlib.metadata.version("onnxruntime")
    for threshold in THRESHOLDS:
        attrs = {"iou_threshold": OVERLAP, "score_threshold": threshold}
        calls = {"hard": ours(ad.non_max_suppression_op, given, ctx, **attrs)}
        rows, count = (np.asarray(x.asnumpy()) for x in calls["hard"]())
        calls["soft"] = ours(ad.soft_nms_op, given, ctx, **attrs)
        calls["soft"]()
        if found:
            calls["onnxruntime"] = theirs(given, threshold)
            np.testing.assert_array_equal(rows[:count], calls["onnxruntime"]()[0])
        candidates = scores.size if threshold is None else int((scores > threshold).sum())
        work = {"threshold": threshold, "candidates": candidates, "boxes": int(count)}
        work["ms"] = timed(calls, options.rounds)
        works.append(work)
        told = ", ".join(f"{name} {t['median']:.3f} ms" for name, t in work["ms"].items())
        print(f"above {threshold}: {candidates} candidates, {count} stay: {told}", flush=True)
    measure.save(f"suppression_{options.device}", options, {**found, "works": works})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The repr of every public class: one or a few lines, with the class and what it was made with."""

from __future__ import annotations

import inspect
import tempfile
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import data, init, ndarray, nn, optim, profile, train, viz
from dlsys.dtypes import BFloat16, bfloat16
from dlsys.executor.debug import report
from dlsys.executor.plan import memory

PUBLIC: tuple[ModuleType, ...] = (
    dl, ad, data, init, memory, ndarray, nn, optim, profile, report, train, viz.report,
)  # fmt: skip
_LETTERS, _LINES = 500, 13

# What no object is made of for this: interfaces, and what a file of operators keeps to itself.
_NOT_MADE = {
    "Block", "Callback", "CountersSince", "DLArray", "Kind", "Lifetimes", "Metric", "MemoryStats",
    "Module", "Optimizer", "Run", "Runner", "RngKind", "Schedule", "SegmentReport", "Timed",
    "OneOf", "Int", "no_grad", "Number", "Shape", "DLContext", "HostNumbers",
}  # fmt: skip
_NAMELESS = {ad.Node, ad.Parameter, ndarray.Context, BFloat16, nn.Summary}
# Arguments of constructors by their names; others are numbers.
_ARGUMENTS: dict[str, Any] = {
    "after": optim.Constant(0.1), "gamma": 0.5, "lr": 0.1, "milestones": [1, 2], "name": "w",
    "peak": 0.1, "schedule": optim.ReduceOnPlateau(0.1), "sizes": (4, 3), "shape": (2, 2),
    "block": nn.BasicBlock, "depths": (1, 1, 1, 1), "probability": 0.5, "title": "MLP",
    "value": 1.0, "samples": [1, 2], "fields": (np.zeros(2), np.zeros(2)),
}  # fmt: skip
_DATASET = data.Dataset(np.zeros((20, 1, 8, 8), np.uint8), np.zeros(20, np.int64))
_LOADER = data.Loader(_DATASET, 5, shuffle=True)


def trained() -> tuple[ad.Executor, memory.Plan]:
    """An executor that has run, and its plan."""
    x, w = ad.Variable("x", (None, 4), np.float32), ad.Parameter(np.ones((4, 2)), "w")
    loss = ad.sum_op(ad.matmul_op(x, w))
    executor = ad.Executor([loss, optim.SGD(0.1).minimize(loss, [w])], ctx=ndarray.cpu(0))
    executor.run({x: np.ones((3, 4), np.float32)})
    return executor, executor.plans[0]


def makers() -> dict[type, Callable[[], Any]]:
    """Objects that take more than numbers to make, by their class."""
    executor, plan = trained()
    model = nn.MLP((64, 10))
    call = nn.Call("", model, (), None)
    made = executor.report()
    arrays = np.zeros((20, 3)), np.zeros(20)
    return {
        BFloat16: lambda: bfloat16,
        memory.Buffer: lambda: plan.buffers[0],
        dl.Tensor: lambda: dl.zeros(100, 100, device="cpu"),
        nn.Call: lambda: call,
        train.Checkpoint: lambda: train.Checkpoint("runs/a"),
        data.CenterCrop: lambda: data.CenterCrop((2, 2)),
        data.RandomResizedCrop: lambda: data.RandomResizedCrop((2, 2)),
        data.Resize: lambda: data.Resize((2, 2)),
        data.Compose: lambda: data.Compose([data.Flip(), data.Shift(2)]),
        ndarray.Context: lambda: ndarray.cpu(0),
        profile.Counters: lambda: profile.counters(ndarray.cpu(0)),
        data.DataDescription: lambda: data.DataDescription.of(_LOADER),
        data.Dataset: lambda: _DATASET,
        nn.Upsample: lambda: nn.Upsample(scale=2),
        nn.HookHandle: lambda: model.register_forward_hook(lambda *call: None),
        nn.Decoder: lambda: nn.Decoder(
            nn.GPT(vocabulary=7, context=4, layers=1, heads=1, features=4)
        ),
        nn.GPT: lambda: nn.GPT(vocabulary=7, context=4, layers=1, heads=1, features=4),
        data.DeviceLoader: lambda: data.DeviceLoader(_DATASET, 5),
        nn.Differences: lambda: nn.Differences([], []),
        train.Evaluator: lambda: train.Evaluator(
            model, _LOADER, None, ad.softmax_cross_entropy, None
        ),
        ad.Executor: lambda: executor,
        train.JsonLog: lambda: train.JsonLog("log.jsonl"),
        data.Loader: lambda: _LOADER,
        optim.LBFGS: lambda: optim.LBFGS(model.parameters()),
        viz.report.Mistakes: lambda: viz.report.Mistakes(
            arrays[0], arrays[1], arrays[1], arrays[1]
        ),
        data.Mnist: lambda: data.Mnist(*[data.Split(*arrays)] * 3),
        ndarray.NDArray: lambda: ndarray.array(np.zeros((100, 100))),
        ad.Node: lambda: ad.group_op(*(ad.Variable() for _ in range(300))),
        data.Normalization: lambda: data.Normalization((0.1,), (0.3,)),
        ad.Op: lambda: ad.matmul_op,
        memory.Plan: lambda: plan,
        report.PlanReport: lambda: made.plans[0],
        viz.report.Points: lambda: viz.report.Points(*arrays),
        profile.Profile: profile.Profile,
        nn.Residual: lambda: nn.Residual(nn.Linear(4, 4)),
        nn.Row: lambda: model.summary((1, 64)).rows[0],
        data.SampleRng: lambda: data.SampleRng(0, 1, np.arange(3000)),
        train.Saved: lambda: train.Saved({"w": np.zeros((100, 100))}, {"epoch": 3}),
        viz.report.Section: lambda: viz.report.Section("graph", "Graph", "<p>…</p>"),
        nn.Sequential: lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        data.Sets: lambda: data.Sets(_DATASET, _DATASET, _DATASET),
        ad.Spec: lambda: ad.Spec((2, 3), np.dtype(np.float32)),
        data.Split: lambda: data.Split(*arrays),
        memory.Step: lambda: plan.steps[0],
        nn.Summary: lambda: model.summary((1, 64)),
        train.TensorBoard: lambda: train.TensorBoard(tempfile.gettempdir()),
        train.Validation: lambda: train.Validation(_LOADER),
        memory.Value: lambda: plan.steps[0].outputs[0],
        dl.QuantizedModel: lambda: dl.QuantizedModel([], [], False, {}, "minmax"),
        dl.InferenceProgram: lambda: dl.infer(nn.MLP((4, 3)), buckets=(1, 8)),
        profile.Row: lambda: profile.Row("matmul", 3, 0.5, 100, 200),
        report.Report: lambda: made,
    }


def arguments(cls: type) -> list[Any]:
    """Values for the arguments that a constructor must be given."""
    asked = inspect.signature(cls).parameters.values()
    return [
        _ARGUMENTS.get(parameter.name, 4)
        for parameter in asked
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def classes() -> list[type]:
    """The public classes of ours, but for exceptions and what is not made."""
    found: dict[type, None] = {}
    for module in PUBLIC:
        for name in getattr(module, "__all__", None) or vars(module):
            item = getattr(module, name)
            if inspect.isclass(item) and item.__module__.startswith("dlsys."):
                if not issubclass(item, BaseException) and name[0] != "_":
                    if name not in _NOT_MADE:
                        found[item] = None
    return list(found)


class Reprs(unittest.TestCase):
    def test_one_or_a_few_lines_with_the_class(self):
        known, all_of_them = makers(), classes()
        self.assertGreater(len(all_of_them), 90)
        for cls in all_of_them:
            with self.subTest(f"{cls.__module__}.{cls.__name__}"):
                if cls is train.TensorBoard and find_spec("tensorboardX") is None:
                    self.skipTest("not here: tensorboardX")
                made = known[cls]() if cls in known else cls(*arguments(cls))
                self.assertIsInstance(made, cls)
                text = repr(made)
                self.assertNotIn(" object at 0x", text)
                if cls not in _NAMELESS:
                    self.assertIn(type(made).__name__, text)
                if isinstance(made, nn.Module):
                    self.assertLessEqual(len(text.splitlines()), 3 * len([*made.named_modules()]))
                elif cls is not nn.Summary:  # whose repr is the table that one asks for
                    self.assertLess(len(text), _LETTERS, text[:2000])
                    self.assertLessEqual(len(text.splitlines()), _LINES)

    def test_the_facts(self):
        wanted = {
            "Adam(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-08)": optim.Adam(0.01, beta2=0.99),
            "SGD(lr=Cosine(lr=0.1, steps=9, end=0.0), momentum=0.9, ema=EMA(decay=0.5))": optim.SGD(
                optim.Cosine(0.1, 9), 0.9, ema=0.5
            ),
            "TopK(k=3)": train.TopK(3),
            "Loader(dataset=Dataset(20 images (1, 8, 8) uint8), batch_size=5, shuffle=True, seed=0,"
            " workers=0, targets=1)": _LOADER,
            "Checkpoint(folder='runs/a', epochs=2, steps=0)": train.Checkpoint("runs/a", 2),
            "Plan(6 steps, arena 1,024 bytes)": trained()[1],
            "MatMulOp()": ad.matmul_op,
            "Split(images=float64 (2, 3), labels=int64 (2,))": data.Split(
                np.zeros((2, 3)), np.zeros(2, np.int64)
            ),
        }
        for text, x in wanted.items():
            self.assertEqual(repr(x), text)

    def test_a_rate_that_was_set_is_told(self):
        optimizer = optim.SGD(0.1)
        optimizer.lr.set(0.02)
        self.assertEqual(repr(optimizer), "SGD(lr=0.02)")

    def test_a_history_tells_its_last_figures(self):
        history = train.History([{"epoch": 1, "loss": 0.51234, "lr": 0.1, "val_accuracy": 0.9}])
        wanted = "History(1 epoch, 0 points of the curve, loss=0.5123, val_accuracy=0.9)"
        self.assertEqual(repr(history), wanted)

    def test_an_executor_tells_fetches_device_and_plans(self):
        text = repr(trained()[0])
        for words in ("Executor([sum.", "ctx=cpu(0)", "precision=fp32", "nodes, 1 plan)"):
            self.assertIn(words, text)

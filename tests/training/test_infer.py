"""Inference programs: the model's outputs, by fewer operators, from weights that no longer move."""

from __future__ import annotations

import unittest
from collections.abc import Callable

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn
from dlsys.errors import GraphError, ShapeError
from dlsys.graph.node import Node
from dlsys.ndarray import gpu
from support import devices
from support.devices import each_context
from support.graphs import evaluate

RNG = np.random.default_rng(0)


def moved(model: nn.Module) -> nn.Module:
    """The model with statistics, scales and shifts as after training."""
    for name, state in model.named_state():
        if "running" in name or state.spec.shape and state.asnumpy().std() == 0:
            state.set(RNG.uniform(0.5, 1.5, state.shape).astype(np.float32))
    return model


def operators(program: dl.InferenceProgram) -> list[str]:
    """The operators of the program's one graph."""
    (entry,) = program._executors.values()
    return [node.op.name for node in entry.executor.topo_order if not node.op.leaf]


class Programs(unittest.TestCase):
    def check(self, model: nn.Module, *shape: int, batches: tuple[int, ...] = (1, 3, 9)) -> None:
        x = RNG.standard_normal((max(batches), *shape)).astype(np.float32)
        wanted = model.eval()(dl.tensor(x, device=None)).numpy()
        model.train()
        for ctx in each_context():
            for buckets in (None, (1, 4)):
                self.program = dl.infer(model, ctx=ctx, buckets=buckets)
                for count in batches:
                    got = self.program(x[:count])
                    scale = np.abs(wanted).max()
                    # Folding rounds weights once more: 1e-6 of the largest output was measured.
                    np.testing.assert_allclose(got, wanted[:count], rtol=0, atol=1e-5 * scale)

    def test_filters_are_kept_in_their_layout(self) -> None:
        """The bits are those of convolutions that pack their filters in each run: by products, by
        tiles of 2 by 2 and of 4 by 4, with a residual, ReLU, both and neither, and with infinities.
        """
        filters = RNG.standard_normal((48, 32, 3, 3)).astype(np.float32) / 17
        wide = RNG.standard_normal((32, 48, 1, 1)).astype(np.float32) / 7

        class Model(nn.Module):
            def __init__(self) -> None:
                self.f, self.w = ad.Parameter(filters, "f"), ad.Parameter(wide, "w")
                self.b = ad.Parameter(np.linspace(-1, 1, 48).astype(np.float32), "b")

            def forward(self, x: Node) -> Node:
                y = F.relu(F.conv2d(x, self.f, self.b, padding=1))
                z = F.relu(F.conv2d(y, self.w) + x)
                return F.conv2d(z, self.f, padding=1, stride=2) + F.mean(z)

        program = dl.infer(Model(), ctx="cpu")
        for shape in ((1, 32, 7, 7), (2, 32, 30, 30)):
            x = RNG.standard_normal(shape).astype(np.float32)
            for value in (0.0, np.inf):
                x[0, 0, 3, 3] = value
                fed, weights = ad.Variable("x"), Model()
                weights.to(dl.ndarray.cpu(0))
                executor = ad.Executor([weights(fed)], ctx="cpu")
                wanted = executor.run({fed: x}, convert_to_numpy_ret_vals=True)[0]
                for _ in range(2):
                    np.testing.assert_array_equal(program(x), wanted)
        plans = [plan for e in program._executors.values() for plan in e.executor.plans]
        kept = [step.node.op.name for plan in plans for step in plan.steps]
        self.assertEqual(kept.count("conv2d_kept"), 6)

    @devices.require(gpu(0))
    def test_few_images_split_their_sums_on_a_gpu(self) -> None:
        """Strides, dilation, groups, filters of more than 32 offsets, quads and single columns, and
        what is added: by one kernel each, as numpy computes them.
        """
        cases = (
            ((1, 24, 13, 11), (40, 24, 3, 3), dict(stride=2, padding=1)),
            ((2, 12, 14, 14), (32, 12, 7, 7), dict(padding=3)),
            ((1, 64, 9, 9), (64, 32, 3, 3), dict(padding=2, dilation=2, groups=2)),
            ((3, 80, 6, 6), (72, 80, 1, 1), {}),
            ((1, 96, 8, 8), (48, 96, 1, 1), dict(stride=2)),
        )
        for x_shape, f_shape, attrs in cases:
            with self.subTest(f=f_shape, **attrs):
                f = RNG.standard_normal(f_shape).astype(np.float32)
                weight, bias = ad.Parameter(f, "f"), ad.Parameter(f[:, 0, 0, 0].copy(), "b")

                class Model(nn.Module):
                    def forward(self, x: Node) -> Node:
                        y = F.conv2d(x, weight, bias, **attrs)  # noqa: B023
                        return F.relu(F.conv2d(x, weight, **attrs) + y)  # noqa: B023

                x = RNG.standard_normal(x_shape).astype(np.float32)
                on_gpu, on_numpy = dl.infer(Model(), ctx="gpu"), dl.infer(Model())
                wanted = on_numpy(x)
                for _ in range(3):  # by steps, and as a captured graph
                    # 2e-7 was measured.
                    apart = np.abs(on_gpu(x) - wanted).max() / np.abs(wanted).max()
                    self.assertLess(apart, 2e-6)
                ((plan,),) = [e.executor.plans for e in on_gpu._executors.values()]
                kernels = [step.node.op.name for step in plan.steps]
                self.assertEqual(kernels, ["conv2d_kept", "conv2d_kept"])

    @devices.require(gpu(0))
    def test_linear_layers_in_a_row_are_one_launch_on_a_gpu(self) -> None:
        for sizes, rows in (((36, 20, 8, 5), 1), ((400, 132, 1000, 12), 4), ((8, 8, 8, 8), 5)):
            model, x = nn.MLP(sizes, seed=0), RNG.standard_normal((rows, sizes[0])).astype("f")
            program = dl.infer(model, ctx="gpu")
            for _ in range(2):
                np.testing.assert_allclose(program(x), dl.infer(model)(x), rtol=0, atol=1e-5)
            ((plan,),) = [e.executor.plans for e in program._executors.values()]
            kernels = [step.node.op.name for step in plan.steps]
            self.assertEqual("matvec_chain" in kernels, rows <= 4, kernels)

    def test_batch_normalization_goes_into_convolutions(self) -> None:
        self.check(moved(nn.ResNetMNIST(seed=0)), 1, 28, 28, batches=(1, 3))
        self.assertNotIn("batch_normalize", operators(self.program))

    def test_and_into_linear_layers(self) -> None:
        for bias in (True, False):
            layers = [nn.Linear(6, 8, bias=bias), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU()]
            self.check(moved(nn.Sequential(*layers, nn.Linear(8, 3))), 6)
            self.assertNotIn("batch_normalize", operators(self.program))

    def test_not_where_the_layer_is_read_otherwise(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

            def forward(self, x: Node) -> Node:
                y = self.layer(x)
                return self.norm(y) + y

        self.check(moved(Twice()), 4)
        self.assertIn("batch_normalize", operators(self.program))

    def test_what_depends_on_no_input_is_a_value(self) -> None:
        class Attending(nn.Module):
            def __init__(self) -> None:
                self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 4)

            def forward(self, x: Node) -> Node:
                return x @ F.softmax(self.b.weight @ self.a.weight, axis=-1)

        model, x = Attending(), RNG.standard_normal((3, 4)).astype(np.float32)
        node = ad.Variable("x", (None, 4), np.float32)
        for ctx in each_context():
            program = dl.infer(model, ctx=ctx)
            wanted = evaluate([model(node)], {node: x})[0]
            np.testing.assert_allclose(program(x), wanted, rtol=1e-5, atol=1e-6)
            self.assertEqual(operators(program), ["product"])

    def test_later_changes_of_the_model_do_not_matter(self) -> None:
        model = nn.MLP((4, 3), seed=0)
        program, x = dl.infer(model), np.ones((2, 4), np.float32)
        before = model(dl.tensor(x, device=None)).numpy()
        for state in model.parameters():
            state.set(np.zeros(state.shape, np.float32))
        np.testing.assert_allclose(program(x), before, rtol=1e-6)

    def test_what_is_refused(self) -> None:
        class Mixing(nn.Module):
            def forward(self, x: Node) -> Node:
                return x - F.mean(x, axis=0)

        ones = np.ones((3, 2), np.float32)
        calls: list[tuple[str, type, Callable]] = [
            ("buckets are batches of at least 1", GraphError,
             lambda: dl.infer(Mixing(), buckets=())),
            ("samples of a batch depend on each other", GraphError,
             lambda: dl.infer(Mixing(), buckets=(4,))(ones)),
            ("outputs with the samples along axis 0", GraphError,
             lambda: dl.infer(nn.Sequential(nn.Linear(2, 2), Total()))(ones)),
            ("as many samples in each input", ShapeError,
             lambda: dl.infer(Mixing())(ones, ones[:1])),
        ]  # fmt: skip
        for message, kind, call in calls:
            with self.subTest(message), self.assertRaisesRegex(kind, message):
                call()


class Total(nn.Module):
    def forward(self, x: Node) -> Node:
        return F.sum(x)


if __name__ == "__main__":
    unittest.main()

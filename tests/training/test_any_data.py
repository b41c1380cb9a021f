"""fit, evaluate and predict over several fields, names, sets, loaders and image files."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import numpy as np

from dlsys import functional as F
from dlsys import nn, optim, train
from dlsys.data import Dataset, Loader, Resize
from dlsys.errors import DataError, GraphError, ShapeError
from dlsys.runtime.device import Context
from support.devices import on_native_devices

rng = np.random.default_rng(0)
X = rng.normal(size=(40, 3)).astype(np.float32)
Z = rng.normal(size=(40, 2)).astype(np.float32)
Y = (X[:, :1] - 2 * Z[:, 1:]).astype(np.float32)


class Two(nn.Module):
    """A line through two inputs."""

    def __init__(self) -> None:
        self.a, self.b = nn.Linear(3, 1), nn.Linear(2, 1)

    def forward(self, x: Any, z: Any) -> Any:
        return self.a(x) + self.b(z)


class Heads(Two):
    """Two outputs."""

    def forward(self, x: Any, z: Any) -> Any:
        return self.a(x), self.b(z)


def both(outputs: Any, targets: Any) -> Any:
    pairs = targets.values() if isinstance(targets, dict) else targets
    first, second = (F.mse_loss(o, t) for o, t in zip(outputs, pairs))
    return first + second


class SeveralFields:
    ctx: Context | None

    def test_inputs_by_position_and_by_name_learn_the_same(self) -> None:
        losses, outputs = [], []
        for given in ((X, Z, Y), {"x": X, "z": Z, "y": Y}, {"z": Z, "x": X, "y": Y}):
            model = Two()
            for _, p in model.named_state():
                p.set(np.full(p.shape, 0.1, np.float32))
            history = train.fit(
                model, Loader(given, 10), optim.SGD(0.1), F.mse_loss, epochs=30,
                validation=Loader(given, 40), ctx=self.ctx, quiet=True,
            )  # fmt: skip
            losses.append(history.column("val_loss")[-1])
            outputs.append(train.predict(model, Loader(given, 7, shuffle=True)))
            np.testing.assert_allclose(outputs[-1], Y, atol=0.05)
        self.assertAlmostEqual(losses[0], losses[1], places=6)
        self.assertLess(losses[0], 1e-3)
        np.testing.assert_array_equal(outputs[1], train.predict(model, {"x": X, "z": Z}))

    def test_several_outputs_and_targets(self) -> None:
        targets = X[:, :1], Z[:, :1]
        for given in ((X, Z, *targets), {"x": X, "z": Z, "p": targets[0], "q": targets[1]}):
            data = Loader(given, 20, targets=2)
            history = train.fit(
                Heads(),
                data,
                optim.SGD(0.1),
                both,
                epochs=40,
                validation=data,
                ctx=self.ctx,
                quiet=True,
            )
            self.assertLess(history.column("val_loss")[-1], 0.05)
            self.assertEqual(set(history.epochs[-1]) & {"accuracy", "binary_accuracy"}, set())

    def test_several_outputs_are_told_apart(self) -> None:
        class Named(Heads):
            def forward(self, x: Any, z: Any) -> Any:
                first, second = super().forward(x, z)
                return {"first": first, "pair": F.concatenate([second, first], axis=1)}

        heads, named = Heads(), Named()
        named.load_state_dict(heads.state_dict())
        first, second = (
            train.predict(layer, x, self.ctx) for layer, x in ((heads.a, X), (heads.b, Z))
        )
        for size in (7, 1000):
            with self.subTest(size=size):
                found = train.predict(heads, (X, Z), self.ctx, size)
                self.assertIsInstance(found, tuple)
                np.testing.assert_allclose(found[0], first, rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(found[1], second, rtol=1e-5, atol=1e-6)
                both = train.predict(named, (X, Z), self.ctx, size)
                self.assertEqual([*both], ["first", "pair"])
                pair = np.concatenate([second, first], 1)
                np.testing.assert_allclose(both["pair"], pair, rtol=1e-5, atol=1e-6)

    def test_outputs_that_are_no_rows_of_samples_are_refused(self) -> None:
        steps = np.ones((4, 5, 3), np.float32)
        with self.assertRaisesRegex(GraphError, r"predict: LSTM returns .* wrap the model"):
            train.predict(nn.LSTM(3, 2, batch_first=True), steps, self.ctx)
        total = nn.Sequential(nn.Linear(3, 2), F.sum)
        with self.assertRaisesRegex(ShapeError, r"of shape \(\) does not have rows for each of 4"):
            train.predict(total, steps, self.ctx)

    def test_inputs_without_targets_cannot_be_fitted(self) -> None:
        with self.assertRaisesRegex(DataError, "no target to compare"):
            train.fit(nn.Linear(3, 1), Loader(X, 10), optim.SGD(0.1), ctx=self.ctx, quiet=True)

    def test_tokens(self) -> None:
        tokens = np.tile(np.arange(8), (16, 1))
        model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
        data = Loader((tokens[:, :-1], tokens[:, 1:]), 8)
        history = train.fit(model, data, optim.Adam(0.1), epochs=15, ctx=self.ctx, quiet=True)
        self.assertEqual(history.column("accuracy")[-1], 1.0)
        self.assertEqual(
            train.predict(model, tokens[:2, :5]).argmax(-1).tolist(), [[1, 2, 3, 4, 5]] * 2
        )


class OnNumpy(SeveralFields, unittest.TestCase):
    ctx = None


CpuSeveralFields, GpuSeveralFields = on_native_devices(SeveralFields)


class Predictions(unittest.TestCase):
    def test_sets_loaders_and_files_are_normalized_as_in_training(self) -> None:
        images = rng.integers(0, 256, (12, 1, 4, 5)).astype(np.uint8)
        dataset = Dataset(images, np.arange(12) % 3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(20, 3))
        train.fit(model, Loader(dataset, 4, normalize=(0.2, 0.3)), optim.SGD(0.1), quiet=True)
        wanted = train.predict(model, images)
        for given in (dataset, Loader(dataset, 5), Loader(dataset, 5, shuffle=True)):
            np.testing.assert_array_equal(train.predict(model, given), wanted)
        other = train.predict(model, Loader(dataset, 5, normalize=(0.0, 1.0)))
        self.assertGreater(np.abs(other - wanted).max(), 0.01)
        try:
            from PIL import Image
        except ImportError:
            self.skipTest("Pillow is not installed")
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{k:02}.png" for k in range(12)]
            for path, image in zip(paths, images):
                Image.fromarray(image[0]).save(path)
            np.testing.assert_array_equal(train.predict(model, folder), wanted)
            # A product of fewer rows may be summed in another order: a few roundings of float32.
            for given, part in ((paths[2:4], slice(2, 4)), (str(paths[5]), slice(5, 6))):
                found = train.predict(model, given)
                np.testing.assert_allclose(found, wanted[part], rtol=1e-5, atol=1e-6)
            small = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
            data = Loader(dataset, 4, augment=[Resize((2, 3))])
            train.fit(small, data, optim.SGD(0.1), quiet=True)
            self.assertEqual(small.trained_on.shape, (1, 2, 3))
            self.assertEqual(train.predict(small, folder).shape, (12, 3))
            with self.assertRaisesRegex(DataError, "nobody noted"):
                train.predict(nn.Linear(2, 1), folder)

"""The description of the data that a model was trained on: everything that gives a model inputs
treats them as training did.
"""

from __future__ import annotations

import json
import tempfile
import unittest
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from dlsys import nn, optim, train
from dlsys.data import DataDescription, Dataset, DeviceLoader, Loader, Normalization
from dlsys.errors import DataError, ShapeError
from dlsys.runtime.device import Context
from dlsys.viz.classification import _winners
from dlsys.viz.layers import layer_values
from support.devices import on_native_devices
from support.small_runs import sgd

NAMES = ("dark", "light", "other")


def pictures(count: int = 60, seed: int = 0, channels: int = 2) -> Dataset:
    """uint8 images whose class is a matter of brightness; channels differ in scale."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    images = rng.integers(0, 40, (count, channels, 3, 3)) + 60 * labels[:, None, None, None] + 40
    return Dataset(images.astype(np.uint8), labels, NAMES)


def network(channels: int = 2) -> nn.Module:
    rng = np.random.default_rng(4)
    return nn.Sequential(nn.Flatten(), nn.Linear(9 * channels, 3, rng=rng))


def right(net: nn.Module, samples: Any, labels: np.ndarray, ctx: Context | None = None) -> float:
    return float(np.mean(train.predict(net, samples, ctx).argmax(axis=1) == labels))


class Normalized:
    ctx: Context | None

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)  # type: ignore[attr-defined]
        self.folder = Path(folder.name)
        self.set, self.other = pictures(), pictures(40, 1)
        self.normal = Normalization.of(self.set)

    def trained(self, make: Any = Loader, **options: Any) -> nn.Module:
        net = network()
        data = make(self.set, 20, shuffle=True, normalize=self.normal)
        self.history = train.fit(
            net, data, optim.SGD(0.02), epochs=20, ctx=self.ctx,
            validation=Loader(self.other, 16), **options, quiet=True,
        )  # fmt: skip
        return net

    def test_everything_sees_what_training_saw(self) -> None:
        """The loader of another set does not say how it normalizes, and takes the model's."""
        for make in (Loader, DeviceLoader):
            net = self.trained(make)
            last = self.history.epochs[-1]
            self.assertGreater(last["val_accuracy"], 0.8)
            stated = train.evaluate(net, Loader(self.other, 16, normalize=self.normal))
            for data in (Loader(self.other, 16), DeviceLoader(self.other, 20)):
                found = train.evaluate(net, data, ctx=self.ctx)
                self.assertEqual(found["accuracy"], last["val_accuracy"])
                self.assertAlmostEqual(found["loss"], stated["loss"], places=6)
            images, labels = self.other.images, self.other.labels
            for samples in (
                images, images / np.float32(255), images / 255, images.astype(np.int64),
                images.tolist(), images.reshape(40, 18),
            ):  # fmt: skip
                self.assertEqual(right(net, samples, labels, self.ctx), last["val_accuracy"])
            logits = train.predict(net, images[:5], self.ctx)
            for image, wanted in zip(images, logits):
                for given in (image, image / np.float32(255)):
                    shown = list(layer_values(net, given).values())[-1]
                    np.testing.assert_allclose(shown, wanted, rtol=1e-4, atol=1e-5)

    def test_points_of_a_plane_are_normalized_too(self) -> None:
        rng = np.random.default_rng(0)
        points = (rng.standard_normal((60, 2)) * [1, 100] + [50, 900]).astype(np.float32)
        labels = (points[:, 1] > 900).astype(np.int64)
        net = nn.Linear(2, 2, rng=rng)
        normal = (points.mean(), points.std())
        train.fit(
            net,
            Loader((points, labels), 20, normalize=normal),
            optim.SGD(0.5),
            epochs=20,
            quiet=True,
        )
        expected = train.predict(net, points).argmax(axis=1)
        np.testing.assert_array_equal(_winners(net, points), expected)

    def test_it_travels_with_the_checkpoint(self) -> None:
        keep = train.Checkpoint(self.folder)
        net = self.trained(callbacks=[keep])
        saved = train.load(keep.last)
        description = DataDescription((2, 3, 3), "uint8", *self.normal, NAMES)
        self.assertEqual(saved.trained_on("x"), description)
        loaded, copied = network(), network()
        loaded.load_state_dict(saved.part("model"))
        copied.load_state_dict(net.state_dict())
        wanted = train.predict(net, self.other.images)
        for other in (loaded, copied):
            self.assertEqual(other.trained_on, description)
            got = train.predict(other, self.other.images, self.ctx)
            np.testing.assert_array_equal(got, wanted)
            self.assertEqual(
                train.evaluate(other, Loader(self.other, 16), ctx=self.ctx)["accuracy"],
                self.history.epochs[-1]["val_accuracy"],
            )

    def resumed(self, epochs: int, make: Any, **options: Any) -> dict[str, np.ndarray]:
        net, keep = network(), train.Checkpoint(self.folder)
        given = {"normalize": self.normal} | options
        resume = given.pop("resume", None)
        data = make(self.set, 20, shuffle=True, **given)
        train.fit(
            net,
            data,
            sgd(),
            epochs=epochs,
            ctx=self.ctx,
            callbacks=[keep],
            resume=resume,
            quiet=True,
        )
        return net.state_dict()

    def test_a_run_goes_on_with_it(self) -> None:
        for make in (Loader, DeviceLoader):
            with tempfile.TemporaryDirectory() as folder:
                self.folder = Path(folder) / "whole"
                wanted = self.resumed(4, make)
                self.folder = Path(folder) / "cut"
                self.resumed(2, make)
                with self.assertRaisesRegex(DataError, "cut was trained on .* normalize= out"):
                    self.resumed(4, make, normalize=(0.5, 0.25), resume=self.folder)
                got = self.resumed(4, make, normalize=None, resume=self.folder)
            for name, value in wanted.items():
                np.testing.assert_array_equal(got[name], value, name)


class NumpyNormalized(Normalized, unittest.TestCase):
    ctx = None


CpuNormalized, GpuNormalized = on_native_devices(Normalized)


class Rules(unittest.TestCase):
    def setUp(self) -> None:
        self.set = pictures()
        self.normal = Normalization.of(self.set)

    def fit(self, net: nn.Module, data: Any, **options: Any) -> None:
        train.fit(net, data, sgd(), **options, quiet=True)

    def test_a_loader_that_normalizes_otherwise_is_refused(self) -> None:
        net = network()
        self.fit(net, Loader(self.set, 20, normalize=self.normal))
        for wrong in ((0.0, 1.0), (0.5, 0.25), Normalization.of(pictures(30, 2))):
            with self.assertRaisesRegex(DataError, "the model was trained on data normalized with"):
                train.evaluate(net, Loader(self.set, 20, normalize=wrong))
        with self.assertRaisesRegex(DataError, "do not fit images of"):
            train.evaluate(net, Loader(pictures(channels=1), 20))

    def test_training_anew_decides_anew(self) -> None:
        net = network()
        self.fit(net, Loader(self.set, 20, normalize=self.normal))
        self.fit(net, Loader(self.set, 20))
        self.assertEqual(net.trained_on.normalization, self.normal, "what it had is kept")
        self.fit(net, Loader(self.set, 20, normalize=(0.5, 0.25)))
        self.assertEqual(net.trained_on.normalization, Normalization((0.5,), (0.25,)))
        floats = np.float32(self.set.images / 3).reshape(60, 18)
        self.fit(net, Loader((floats, self.set.labels), 20))
        self.assertEqual(net.trained_on, DataDescription((18,), "float32", (0.0,), (1.0,)))

    def test_a_loader_of_ones_own_and_a_model_that_was_not_trained_have_none(self) -> None:
        class Own:
            samples, inner = 60, Loader(self.set, 20)

            def __len__(self) -> int:
                return 3

            def inputs(self) -> Any:
                return self.inner.inputs()

            def epoch(self, number: int, start: int = 0) -> Any:
                return self.inner.epoch(number, start)

        net = network()
        x = np.random.default_rng(0).random((5, 2, 3, 3), np.float32)
        before = train.predict(net, x)
        self.assertIsNone(net.trained_on)
        self.fit(net, Loader(self.set, 20, normalize=self.normal), epochs=1)
        self.fit(net, Own())
        self.assertIsNone(net.trained_on)
        self.assertEqual(train.predict(net, x).shape, before.shape)

    def test_a_run_that_is_refused_leaves_it(self) -> None:
        net = network()
        self.fit(net, Loader(self.set, 20, normalize=self.normal))
        before = net.trained_on
        with self.assertRaises(ShapeError):
            self.fit(net, Loader((np.zeros((9, 5), np.float32), np.arange(9) % 3), 3))
        self.assertEqual(net.trained_on, before)

    def test_floats_are_not_scaled_and_pixels_not_guessed(self) -> None:
        net = network()
        floats = np.float32(self.set.images)
        self.fit(net, Loader((floats, self.set.labels), 20, normalize=(100, 50)))
        for given in (self.set.images, self.set.images.astype(complex)):
            with self.assertRaisesRegex(DataError, "trained on float32 samples and got"):
                train.predict(net, given)
        wanted = train.predict(net, floats[:3])
        np.testing.assert_array_equal(train.predict(net, floats[:3].astype(np.int32)), wanted)
        pixels = network()
        self.fit(pixels, Loader(self.set, 20, normalize=self.normal))
        with self.assertRaisesRegex(DataError, "integers from -1 to 7, expected 0 to 255"):
            train.predict(pixels, np.arange(-1, 8).repeat(2).reshape(1, 2, 3, 3) % 9 - 1)
        with self.assertRaisesRegex(ShapeError, r"trained on samples \(2, 3, 3\)"):
            train.predict(pixels, np.zeros((1, 3, 5, 5), np.float32))

    def test_a_double_model_keeps_its_digits(self) -> None:
        """Nothing is rounded where there is nothing to normalize."""
        net, x = network(), np.random.default_rng(0).random((60, 2, 3, 3))
        self.fit(net, Loader((x, self.set.labels), 20))
        self.assertIs(net.trained_on.prepared(x), x)

    def test_older_checkpoints_load_and_say_so(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            keep = train.Checkpoint(folder)
            normal = {"normalize": self.normal}
            self.fit(network(), Loader(self.set, 20, **normal), callbacks=[keep])
            tensors, header = train.load(keep.last)
            del header["trained_on"]
            train.save(keep.last, tensors, header)
            net = network()
            with self.assertWarnsRegex(RuntimeWarning, "without the description of its data"):
                net.load_state_dict(train.load(keep.last).part("model"))
            self.assertIsNone(net.trained_on)
            with self.assertWarnsRegex(RuntimeWarning, f"^{folder} was written by dlsys 0"):
                self.fit(net, Loader(self.set, 20, **normal), epochs=2, resume=folder)
            self.assertEqual(net.trained_on.normalization, self.normal)
            by_hand = folder / "hand.safetensors"
            train.save(by_hand, tensors, {})
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                net.load_state_dict(train.load(by_hand).part("model"))

    def test_a_description_survives_json_and_others_are_refused(self) -> None:
        made = DataDescription((2, 3, 3), "uint8", *self.normal, NAMES)
        values = json.loads(json.dumps(made.as_dict()))
        self.assertEqual(DataDescription.from_dict("x", values), made)
        for change in (
            {"std": [0.0, 1.0]}, {"mean": [1.0]}, {"dtype": "bool"}, {"dtype": 7}, {"shape": [0]},
            {"shape": None}, {"shape": ["a"]}, {"classes": 3}, {"more": 1}, {"std": "ab"},
        ):  # fmt: skip
            with self.assertRaisesRegex(DataError, "x does not say what .* malformed", msg=change):
                DataDescription.from_dict("x", values | change)
        for bad in (None, 3, [], {}):
            with self.assertRaises(DataError):
                DataDescription.from_dict("x", bad)

    def test_batches_of_another_normalization_are_the_same_batches(self) -> None:
        data = Loader(self.set, 16, shuffle=True, seed=3)
        made = data.normalized_by(self.normal)
        stated = Loader(self.set, 16, shuffle=True, seed=3, normalize=self.normal)
        for ours, theirs in zip(made.batches(2), stated.batches(2), strict=True):
            np.testing.assert_array_equal(ours.images, theirs.images)
        self.assertIsNot(data.normalization, made.normalization)

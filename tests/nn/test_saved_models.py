"""train.save and train.load_model: models that come back from a file as they were."""

from __future__ import annotations

import copy
import tracemalloc
from typing import Any

import numpy as np

from dlsys import functional as F
from dlsys import nn, optim, train
from dlsys.data import Dataset, Loader
from dlsys.errors import DataError
from dlsys.nn.models.mnist import LeNet5, ResNetMNIST
from dlsys.train.files.checkpoint import save as save_arrays
from support.small_runs import InFolder

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 1, 28, 28)).astype(np.uint8)


class Own(nn.Module):
    """A model of somebody's own."""

    def __init__(self, width: int, *, depth: int = 1) -> None:
        self.layers = [nn.Linear(width, width) for _ in range(depth)]

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class SavedModels(InFolder):
    SHAPES = {"weight": (1, 2), "bias": (1,)}  # of Linear(2, 1)

    def setUp(self) -> None:
        super().setUp()
        self.path = self.folder / "model.safetensors"

    def check(self, model: nn.Module, x: Any, *given: Any) -> nn.Module:
        train.save(self.path, model)
        found = train.load_model(self.path, *given)
        self.assertIs(type(found), type(model))
        np.testing.assert_array_equal(train.predict(found, x), train.predict(model, x))
        return found

    def test_ready_models_and_sequences_of_layers(self) -> None:
        x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
        body = nn.Sequential(nn.Linear(6, 6), F.relu)
        model = nn.Sequential(
            nn.Linear(6, 6, bias=False, rng=3), nn.Residual(body), nn.Dropout(0.3)
        )
        model.append(nn.Linear(6, 2))
        self.assertEqual(len(self.check(model, x)), 4)
        conv = nn.Conv2d(1, 4, (3, 3), stride=2, padding=(1, 1))
        pixels = (IMAGES / 255).astype(np.float32)
        self.check(nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), pixels)
        self.check(LeNet5(7, seed=1), pixels)
        self.check(ResNetMNIST(), pixels)

    def test_a_class_of_ones_own_is_passed(self) -> None:
        x = np.ones((2, 3), np.float32)
        model = Own(3, depth=2)
        self.assertEqual(len(self.check(model, x, Own).layers), 2)
        self.check(model, x, Own(3, depth=2))
        with self.assertRaisesRegex(DataError, r"Own.*no part of dlsys.*load_model\(path, MyModel"):
            train.load_model(self.path)
        with self.assertRaisesRegex(DataError, "does not fit, nothing was loaded"):
            train.load_model(self.path, Own(4))
        train.save(self.path, nn.Sequential(nn.Linear(3, 3), lambda x: x))
        with self.assertRaisesRegex(DataError, "no plain data"):
            train.load_model(self.path)

    def test_the_normalization_travels_with_it(self) -> None:
        data = Loader(Dataset(IMAGES, np.arange(6) % 3, "abc"), 3, normalize=(0.2, 0.4))
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 3))
        keep = train.Checkpoint(self.folder / "run")
        train.fit(model, data, optim.SGD(1e-2), callbacks=[keep], quiet=True)
        found = self.check(model, IMAGES)
        self.assertEqual(found.trained_on.classes, ("a", "b", "c"))
        of_run = train.load_model(keep.folder)
        np.testing.assert_array_equal(train.predict(of_run, IMAGES), train.predict(model, IMAGES))

    def test_a_copy_is_built_alike(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2))
        self.assertEqual(list(copy.deepcopy(model).state_dict()), ["0.weight", "0.bias"])
        self.check(copy.deepcopy(model), np.ones((1, 3), np.float32))
        with self.assertRaisesRegex(TypeError, r"ReLU6\(\) takes no arguments"):
            nn.ReLU6(4)

    def test_files_that_name_other_code_are_refused(self) -> None:
        linear = {"class": "Linear", "arguments": [2, 1], "options": {}}
        for change, message in (
            ({"class": "os.system"}, "no part of dlsys"),
            ({"class": "models.mnist.Nothing"}, "does not have"),
            ({"class": "Node"}, "does not have"),
            ({"class": "Linear", "arguments": [0, 1]}, "cannot be built"),
            ({"options": {"x": 1}}, "cannot be built"),
            ({"class": 3}, "damaged or forged"),
            ({"class": "Sequential", "arguments": [{"function": "init.np.load"}]}, "not have"),
            ({"class": "Sequential", "arguments": [{"function": "functional.__loader__"}]}, "not"),
            ({"arguments": None}, "no plain data"),
        ):
            with self.subTest(change), self.assertRaisesRegex(DataError, message):
                save_arrays(self.path, {}, {"model": linear | change})
                train.load_model(self.path)
        save_arrays(self.path, {}, {})
        with self.assertRaisesRegex(DataError, "does not say how its model is built"):
            train.load_model(self.path)

    def test_a_model_larger_than_its_weights_is_not_built(self) -> None:
        size = 3_000_000
        for made in (
            {"class": "Linear", "arguments": [size, size]},
            {"class": "Linear", "arguments": [10**12, 10**12]},
            {"class": "Linear", "arguments": [1, 5 * size]},
            {"class": "BatchNorm2d", "arguments": [5 * size]},
            {"class": "LearnedPositions", "arguments": [size, 10]},
            {"class": "Linear", "arguments": [size, 1],
             "options": {"initializer": {"function": "init.orthogonal"}}},
        ):  # fmt: skip
            linear = {"class": "Linear", "arguments": [2, 1], "options": {}}
            recipe = {"class": "Sequential", "arguments": [linear, {"options": {}} | made]}
            weights = {f"model.0.{k}": np.ones(s, np.float32) for k, s in self.SHAPES.items()}
            save_arrays(self.path, weights, {"model": recipe | {"options": {}}})
            tracemalloc.start()
            with self.subTest(made), self.assertRaisesRegex(DataError, "weights to come"):
                train.load_model(self.path)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            self.assertLess(peak, 4_000_000)
        nn.Linear(2_000_000, 1)  # the limit ends with the call

    def test_tied_weights_and_layers_of_many_parts_fit(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                self.table, self.out = nn.Embedding(3000, 400), nn.Linear(400, 3000, bias=False)
                self.out.weight = self.table.weight

            def forward(self, x: Any) -> Any:
                return self.out(self.table(x))

        self.check(Tied(), np.arange(3), Tied)
        recurrent = nn.LSTM(300, 400, 2, bidirectional=True)
        train.save(self.path, recurrent)
        found = train.load_model(self.path).state_dict()
        for name, value in recurrent.state_dict().items():
            np.testing.assert_array_equal(found[name], value, name)

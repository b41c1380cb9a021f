"""`dlsys detect`: runs from scenes to figures, COCO's figures, files of VOC and COCO, losses."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import nn
from dlsys.apps import cli
from dlsys.apps.detect import coco, fresh, made, network, prediction, scenes
from dlsys.apps.detect.training import load
from dlsys.errors import DataError
from dlsys.ops import boxes
from dlsys.train.files import safetensors
from support.devices import on_native_devices, slow
from support.small_digits import needs
from support.table.families.boxes import selected
from support.table.onnx_rows import run_onnxruntime

SMALL = "--steps 4 --every 2 --batch-size 2 --size 64 --width 8 --seed 3 -c numpy".split()


def dlsys(*words: object) -> tuple[int, str, str]:
    """The status of `dlsys detect …`, and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["detect", *map(str, words)])
    return status, out.getvalue(), err.getvalue()


def photo(seed: int, height: int = 50, width: int = 60) -> np.ndarray:
    """A made photo (height, width, 3) uint8 with a bright square at (10, 20) to (30, 40)."""
    pixels = np.random.default_rng(seed).integers(0, 90, (height, width, 3)).astype(np.uint8)
    pixels[20:40, 10:30] = 230
    return pixels


def write_voc(root: Path, count: int = 3) -> Path:
    """A folder in the format of VOC; returns its list of photos."""
    from PIL import Image

    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / name).mkdir(parents=True)
    thing = (
        "<object><name>{}</name><difficult>{}</difficult><bndbox><xmin>{}</xmin>"
        "<ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
    )
    for k in range(count):
        Image.fromarray(photo(k)).save(root / "JPEGImages" / f"{k:06}.jpg")
        things = thing.format("square", 0, 11, 21, 30, 40) + thing.format("cat", 1, 1, 1, 5, 6)
        text = f"<annotation><filename>{k:06}.jpg</filename>{things}</annotation>"
        (root / "Annotations" / f"{k:06}.xml").write_text(text)
    path = root / "ImageSets" / "Main" / "train.txt"
    path.write_text("".join(f"{k:06}\n" for k in range(count)))
    return path


def write_coco(root: Path, count: int = 3) -> Path:
    """A folder in the format of COCO; returns its JSON file."""
    from PIL import Image

    for name in ("annotations", "val2017"):
        (root / name).mkdir(parents=True)
    for k in range(count):
        Image.fromarray(photo(k)).save(root / "val2017" / f"{k}.jpg")
    square = {"category_id": 7, "bbox": [10, 20, 20, 20], "area": 350.5, "iscrowd": 0}
    crowd = {"category_id": 3, "bbox": [0, 0, 4.5, 6], "area": 27, "iscrowd": 1, "image_id": 0}
    content = {
        "images": [{"id": k, "file_name": f"{k}.jpg"} for k in range(count)],
        "categories": [{"id": 7, "name": "square"}, {"id": 3, "name": "cat"}],
        "annotations": [crowd, *({**square, "image_id": k} for k in range(count))],
    }
    path = root / "annotations" / "instances_val2017.json"
    path.write_text(json.dumps(content))
    return path


@needs("PIL", "images")
class Application(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.root = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.voc, cls.coco = write_voc(cls.root / "VOC"), write_coco(cls.root / "COCO")
        cls.folder = cls.root / "run"
        cls.data = ("--data", cls.voc, "--held", cls.coco)
        cls.made = dlsys("train", cls.folder, *cls.data, "--flip", 1, *SMALL)

    def test_what_training_prints_and_writes(self) -> None:
        status, out, err = self.made
        self.assertEqual((status, err), (0, ""))
        self.assertIn("3 photos to train on, 3 held out, 2 classes", out)
        self.assertRegex(out, r"step 4/4  loss \d+\.\d+  held out \d+\.\d+  lr ")
        settings, model = load(self.folder)
        self.assertEqual(settings.names, ("cat", "square"))
        self.assertEqual(model.outputs, 6)

    def test_a_run_that_was_stopped_ends_with_the_same_bits(self) -> None:
        from dlsys.apps.detect.training import Lines

        class Stops(Lines):
            def on_step(self, run) -> None:
                super().on_step(run)
                if run.step == 3:
                    run.stop("here")

        again = self.root / "again"
        with mock.patch("dlsys.apps.detect.training.Lines", Stops):
            self.assertEqual(dlsys("train", again, *self.data, "--flip", 1, *SMALL)[0], 0)
        status, out, err = dlsys("train", again, "--resume", "-c", "numpy")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("going on after 3 steps", out)
        a, b = (
            safetensors.read(folder / "last.safetensors").tensors for folder in (self.folder, again)
        )
        self.assertEqual(a.keys(), b.keys())
        for name, value in a.items():
            np.testing.assert_array_equal(value, b[name], err_msg=name)

    def test_the_figures(self) -> None:
        from PIL import Image

        for way in prediction.SUPPRESSIONS:
            path, sheet = self.root / f"{way}.json", self.root / f"{way}.webp"
            words = ("--suppression", way, "--json", path, "--pictures", sheet, "-c", "numpy")
            status, out, err = dlsys("evaluate", self.folder, *words)
            self.assertEqual((status, err), (0, ""))
            self.assertIn("3 things in 3 photos", out)
            found = json.loads(path.read_text())
            self.assertEqual(len(found["figures"]), 12)
            self.assertIsNone(found["AP50_by_class"]["cat"])  # only a crowd of them is there
            self.assertIn(f"| AP50 square | {found['AP50_by_class']['square']:.3f} |", out)
            self.assertEqual(Image.open(sheet).size, (4 * 124 - 4, 2 * 104 - 4))

    def test_boxes_are_drawn(self) -> None:
        from PIL import Image

        out = self.root / "out"
        (self.root / "text.png").write_text("no photo")
        photos = self.root / "VOC" / "JPEGImages"
        words = ("--least", 0.001, "-o", out, "-c", "numpy")
        status, said, err = dlsys("run", self.folder, self.root / "text.png", photos, *words)
        self.assertEqual((status, err.count("\n")), (1, 1))  # and the others are shown
        self.assertIn("text.png: cannot be read as an image", err)
        self.assertRegex(said, r"(?m)^  (cat|square)  0\.\d\d  at \d+, \d+, \d+, \d+$")
        self.assertEqual(Image.open(out / "000001_found.png").size, (60, 50))
        status, _, err = dlsys("run", self.folder, photos / "000001.jpg", *words)
        self.assertEqual((status, "is there already" in err), (1, True))

    def test_faults_are_one_sentence(self) -> None:
        new = self.root / "new"
        for words, status, said in (
            (("train", self.folder), 2, "go on with it"),
            (("train", self.folder, "--resume", "--size", 96), 2, "has --size 64, not 96"),
            (("train", self.root / "none", "--resume"), 1, "no run to go on with"),
            (("train", new, "photo.jpg"), 2, "what is photo.jpg?"),
            (("train", new, "--data", self.voc), 2, "belong together"),
            (("train", new, *self.data, "--size", 100), 2, "no multiple of 32"),
            (("train", new, *self.data, "--width", 12), 2, "no multiple of 8"),
            (("train", new, "--images", 0, "--size", 96), 2, "makes scenes of 128 pixels"),
            (("train", new, "--data", "x.csv", "--held", "y"), 1, "neither a list of VOC"),
            (("train", new, "--data", "x.txt", "--held", "y"), 1, "x.txt: No such file"),
            (("run", self.folder), 2, "run needs photos"),
            (("run", self.folder, "/none.png"), 1, "no such photo"),
            (("evaluate", self.folder, "x"), 2, "what is x?"),
            (("evaluate", self.folder, "--pictures", "x.bmp"), 1, "the ending says no format"),
        ):
            got, _, err = dlsys(*words, "-c", "numpy")
            self.assertEqual(got, status, (words, err))
            self.assertIn(said, err)
            self.assertEqual(err.count("\n"), 1)
        self.assertFalse((new / "run.json").exists())


@needs("PIL", "images")
class Files(unittest.TestCase):
    def setUp(self) -> None:
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_voc_and_coco_say_the_same(self) -> None:
        voc = scenes.read(write_voc(self.root / "a"))
        coco_ = scenes.read(write_coco(self.root / "b"))
        self.assertEqual((voc.names, coco_.names), (("cat", "square"), ("cat", "square")))
        one, other = voc.scenes[0], coco_.scenes[0]
        np.testing.assert_array_equal(one.boxes, [[10, 20, 30, 40], [0, 0, 5, 6]])
        np.testing.assert_array_equal(other.boxes, [[0, 0, 4.5, 6], [10, 20, 30, 40]])
        np.testing.assert_array_equal((*one.labels, *other.labels), (1, 0, 0, 1))
        np.testing.assert_array_equal((*one.ignored, *other.ignored), (0, 1, 1, 0))
        np.testing.assert_array_equal((*one.areas, *other.areas), (400, 30, 27, 350.5))
        for each in (one, other):
            self.assertEqual(scenes.pixels_of(each.photo).shape, (50, 60, 3))

    def test_damaged_files_are_named(self) -> None:
        voc, file = write_voc(self.root / "a"), write_coco(self.root / "b")
        annotation = self.root / "a" / "Annotations" / "000001.xml"
        for text, said in (
            ("<annotation><object>", "is no annotation of VOC"),
            ("<a><object><name>x</name></object></a>", "an object has no bndbox"),
            ("<!DOCTYPE a><a/>", "declares entities"),
        ):
            annotation.write_text(text)
            with self.assertRaisesRegex(DataError, said):
                scenes.read(voc)
        for text in ("{", "[]", '{"categories": [], "images": []}', '{"categories": 3}'):
            file.write_text(text)
            with self.assertRaisesRegex(DataError, "is no file of COCO"):
                scenes.read(file)


@needs("PIL", "images")
class Changed(unittest.TestCase):
    """Boxes go where the pixels go."""

    def setUp(self) -> None:
        pixels = np.zeros((64, 64, 3), np.uint8)
        pixels[20:40, 8:24] = 255
        self.scene = scenes.scene(pixels, [(8, 20, 24, 40, 1), (60, 60, 64, 64, 0)])

    def check(self, found: scenes.Scene, label: int = 1) -> None:
        (box,) = found.boxes[found.labels == label]
        rows, columns = (np.flatnonzero((found.photo[..., 0] > 127).any(k)) for k in (1, 0))
        edges = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        np.testing.assert_allclose(box, edges, atol=1)

    def test_flipped_and_cut_and_framed(self) -> None:
        self.check(scenes.flipped(self.scene))
        part = scenes.cut(self.scene, (4, 10, 52, 58))
        self.check(part)
        np.testing.assert_array_equal(part.ignored, (False, True))
        self.check(scenes.cut(self.scene, (10, 22, 50, 62)))
        wide = self.scene._replace(photo=self.scene.photo[:48])
        self.check(scenes.framed_scene(wide, 128))

    def test_a_batch_is_a_function_of_seed_and_number(self) -> None:
        given = scenes.Scenes([self.scene], ("a", "b"))
        loader = scenes.SceneLoader(given, 64, 2, 5, seed=7, flip=True)
        epoch = [list(feed.values()) for feed in loader.epoch(1)]
        rest = [list(feed.values()) for feed in loader.epoch(1, 3)]
        np.testing.assert_array_equal(epoch[3][0], rest[0][0])
        np.testing.assert_array_equal(epoch[3][1], rest[0][1])
        self.assertFalse(np.array_equal(epoch[3][0], epoch[4][0]))


class Targets(unittest.TestCase):
    def test_what_a_detector_should_say_is_decoded_as_the_boxes(self) -> None:
        rng = np.random.default_rng(0)
        places = network.positions(128)
        low = rng.uniform(0, 64, (60, 2))
        given = np.concatenate([low, low + rng.uniform(9, 64, (60, 2))], 1).astype(np.float32)
        for k in range(60):
            target = network.targets(places, given[k : k + 1], np.array([1]), 3)
            output = np.concatenate([40 * target[:, :3] - 20, np.log(target[:, 3:])], 1)
            given_output = dl.tensor(output[None].astype(np.float32))
            found, scores = (x[0].numpy() for x in prediction.boxes_of(given_output, places))
            rows, labels = np.nonzero(scores > 0.5)
            self.assertTrue(len(rows) and (labels == 1).all())
            # Measured: 8e-6 of pixels up to 128.
            np.testing.assert_allclose(found[rows], given[[k] * len(rows)], atol=1e-4)

    def test_the_smaller_of_two_things_has_a_position_of_both(self) -> None:
        places = network.positions(64)
        given = np.array([[8, 8, 32, 32], [12, 12, 28, 28]], np.float32)
        middle = np.flatnonzero((places == (20, 20, 8)).all(1))
        for order in ((0, 1), (1, 0)):
            rows = list(order)
            target = network.targets(places, given[rows], np.array(rows), 2)
            np.testing.assert_array_equal(target[middle], [[0, 1, 1, 1, 1, 1]])
        nothing = network.targets(places, given[:0], np.array([], int), 2)
        self.assertFalse(nothing[:, :2].any())


class Identity(nn.Module):
    """A detector whose images are its output."""

    def forward(self, x: ad.Node) -> ad.Node:
        return x


class Predictions:
    """From a detector's output to boxes, in one program, against a formula in float64."""

    ctx: object
    LEAST, CLASSES, SIZE = 0.05, 3, 96

    def program(self, way: str) -> dl.InferenceProgram:
        """It takes outputs and frames."""
        found = prediction.Prediction(Identity(), self.SIZE, self.LEAST, way)
        return dl.infer(found, ctx=self.ctx)

    def expected(self, output: np.ndarray, frame: np.ndarray, way: str) -> list[tuple]:
        """Score, class and box of each thing, the highest score first."""
        x, y, stride = network.positions(self.SIZE).astype(np.float64).T
        left, top, right, low = np.exp(np.minimum(output[:, -4:].T, 5)) * stride
        edges = np.stack([x - left, y - top, x + right, y + low], 1) / frame[0]
        edges = np.clip(edges, 0, [*frame[1:], *frame[1:]])
        scores = 1 / (1 + np.exp(-output[:, :-4]))
        best = np.sort(scores.ravel())[-prediction.CANDIDATES :].min()
        scores = np.where(scores >= max(best, self.LEAST), scores, 0).T
        lower = {
            "hard": lambda s, iou: 0 if iou > prediction.OVERLAP else s,
            "soft": lambda s, iou: s * np.exp(-(iou**2) / 0.5),
            "none": lambda s, iou: s,
        }[way]
        rows = selected(edges[None], scores[None], 1000, self.LEAST, False, lower)
        things = sorted(((s, label, *edges[k]) for _, label, k, s in rows), reverse=True)
        return things[: prediction.MOST]

    def test_what_is_in_a_batch_of_photos(self) -> None:
        rng = np.random.default_rng(4)
        count = len(network.positions(self.SIZE))
        logits, edges = rng.normal(-1, 2, (2, count, self.CLASSES)), rng.normal(1, 1, (2, count, 4))
        logits[1] -= 4  # fewer than a photo may have
        output = np.concatenate([logits, edges], 2).astype(np.float32)
        frames = np.array([[0.5, 180, 192], [1.5, 64, 40]], np.float32)
        lengths = []
        for way in prediction.SUPPRESSIONS:
            made = self.program(way)(output, frames)
            for image, (boxes_, labels, scores) in enumerate(zip(*made)):
                with self.subTest(suppression=way, image=image):
                    wanted = self.expected(output[image].astype(float), frames[image], way)
                    found = scores > 0
                    lengths.append(found.sum())
                    self.assertEqual(found.sum(), len(wanted))
                    self.assertFalse(found[len(wanted) :].any())
                    wanted_scores, wanted_labels, *corners = np.array(wanted).T
                    np.testing.assert_array_equal(labels[found], wanted_labels)
                    # Measured: 1.3e-6, of scores that Soft-NMS lowered many times.
                    np.testing.assert_allclose(scores[found], wanted_scores, rtol=1e-5)
                    # Measured: 1.4e-5 of pixels up to 192.
                    np.testing.assert_allclose(boxes_[found].T, corners, atol=1e-4)
        self.assertTrue(10 < min(lengths) < max(lengths) == prediction.MOST, lengths)

    def test_nothing_is_found_in_noise(self) -> None:
        count = len(network.positions(self.SIZE))
        output = np.full((1, count, self.CLASSES + 4), -9, np.float32)
        for way in prediction.SUPPRESSIONS:
            *_, scores = self.program(way)(output, np.ones((1, 3), np.float32))
            self.assertFalse(scores.any())


class NumpyPredictions(Predictions, unittest.TestCase):
    ctx = None

    @needs("onnx", "onnx")
    @needs("onnxruntime", "test")
    def test_a_file_of_onnx_has_the_suppression(self) -> None:
        model = prediction.Prediction(network.Detector(3, 8, seed=1), 64, 0.001, "hard")
        inputs = [ad.Variable(n, (None, *s), "f4") for n, s in (("x", (3, 64, 64)), ("f", (3,)))]
        with model.in_mode(False):
            made = model(*inputs)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.onnx"
            dl.onnx.export(list(made), path)
            images = np.random.default_rng(0).normal(size=(2, 3, 64, 64)).astype(np.float32)
            frames = np.array([[1, 64, 64], [0.5, 128, 100]], np.float32)
            got = run_onnxruntime(path, {"x": images, "f": frames})
        boxes_, labels, scores = dl.infer(model)(images, frames)
        self.assertGreater((scores > 0).sum(), 100)
        np.testing.assert_array_equal(got[1], labels)
        # Measured: 1.6e-5 of pixels up to 128, and 7e-8.
        np.testing.assert_allclose(got[0], boxes_, atol=1e-4)
        np.testing.assert_allclose(got[2], scores, atol=1e-6)


CpuPredictions, GpuPredictions = on_native_devices(Predictions)


class Losses:
    """Both losses against their formulas in numpy, on each device."""

    ctx: object

    def value(self, function, *arrays: np.ndarray) -> np.ndarray:
        nodes = [ad.Variable(f"x{k}") for k in range(len(arrays))]
        feeds = dict(zip(nodes, (x.astype(np.float32) for x in arrays)))
        executor = ad.Executor([function(*nodes)], ctx=self.ctx)
        return executor.run(feeds, convert_to_numpy_ret_vals=True)[0]

    def test_focal(self) -> None:
        rng = np.random.default_rng(1)
        x, y = rng.normal(0, 4, (5, 7)), (rng.random((5, 7)) < 0.3) * 1.0
        p = 1 / (1 + np.exp(-x))
        right = np.where(y, p, 1 - p)
        wanted = -0.5 * (1 - right) ** 2 * np.log(right)
        # Measured: 2e-6 of 1, where 1 - p_t is a difference of numbers near 1.
        np.testing.assert_allclose(
            self.value(network.focal_loss, x, y), wanted, rtol=2e-5, atol=2e-6
        )

    def test_giou(self) -> None:
        a, b = np.random.default_rng(2).uniform(0.1, 5, (2, 50, 4))
        corners = [np.concatenate([-d[:, :2], d[:, 2:]], 1) for d in (a, b)]
        low, high = np.minimum(*corners)[:, :2], np.maximum(*corners)[:, 2:]
        around = np.prod(high - low, 1)
        union = boxes.area(corners[0]) + boxes.area(corners[1]) - boxes.intersection(*corners)
        wanted = 1 - boxes.iou(*corners) + (around - union) / around
        np.testing.assert_allclose(
            self.value(network.giou_loss, a, b), wanted, rtol=1e-5, atol=1e-6
        )


class NumpyLosses(Losses, unittest.TestCase):
    ctx = None


CpuLosses, GpuLosses = on_native_devices(Losses)


class Coco(unittest.TestCase):
    def scenes_and_found(self, seed: int) -> tuple[list[scenes.Scene], list[coco.Found]]:
        """Random scenes with crowds, and boxes near what is there, twice, with equal scores too."""
        rng = np.random.default_rng(seed)
        truth, found = [], []
        for _ in range(30):
            k = rng.integers(0, 12)
            low, extent = rng.uniform(0, 300, (k, 2)), np.exp(rng.uniform(1.5, 5.5, (k, 2)))
            rows = np.concatenate([low, low + extent, rng.integers(0, 4, (k, 1))], 1)
            one = scenes.scene(np.zeros((1, 1, 3), np.uint8), rows, ignored=rng.random(k) < 0.15)
            one = one._replace(areas=one.areas * rng.uniform(0.5, 1, k))
            near = np.repeat(one.boxes, 2, 0) + rng.normal(0, 4, (2 * k, 4))
            more = np.concatenate([low, low + 20], 1)
            given = np.concatenate([near, more]).astype(np.float64)
            given[:, 2:] = np.maximum(given[:, 2:], given[:, :2] + 1)
            labels = np.concatenate([np.repeat(one.labels, 2), rng.integers(0, 5, k)])
            truth.append(one)
            found.append(coco.Found(given, labels, rng.random(3 * k).round(2)))
        return truth, found

    def test_by_hand(self) -> None:
        truth = [scenes.scene(photo(0), [(0, 0, 10, 10, 0), (50, 50, 60, 60, 0)])]
        # A hit, a miss, a hit: precision 1 up to recall 0.5, then 2/3.
        given = np.array([[0, 0, 10, 10], [20, 20, 30, 30], [50, 50, 60, 60]], float)
        found = [coco.Found(given, np.zeros(3, int), np.array([0.9, 0.8, 0.7]))]
        figures = coco.measured(truth, found, 1)
        self.assertAlmostEqual(figures.means["AP50"], (51 + 50 * 2 / 3) / 101)
        self.assertEqual((figures.means["AR_1"], figures.means["AR_100"]), (0.5, 1.0))
        self.assertTrue(np.isnan(figures.means["AP_large"]))

    @needs("pycocotools", "test")
    def test_they_are_those_of_pycocotools(self) -> None:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        for seed in range(3):
            truth, found = self.scenes_and_found(seed)
            annotations, results = [], []
            for k, (one, given) in enumerate(zip(truth, found)):
                for box, label, size, crowd in zip(*one[1:]):
                    annotations.append({
                        "id": len(annotations) + 1, "image_id": k + 1, "category_id": int(label),
                        "bbox": as_wide(box), "area": float(size), "iscrowd": int(crowd),
                    })  # fmt: skip
                for box, label, score in zip(*given):
                    results.append({
                        "image_id": k + 1, "category_id": int(label), "bbox": as_wide(box),
                        "score": float(score),
                    })  # fmt: skip
            reference = COCO()
            reference.dataset = {
                "images": [{"id": k + 1} for k in range(len(truth))], "annotations": annotations,
                "categories": [{"id": k, "name": str(k)} for k in range(5)],
            }  # fmt: skip
            with contextlib.redirect_stdout(io.StringIO()):
                reference.createIndex()
                judge = COCOeval(reference, reference.loadRes(results), "bbox")
                judge.evaluate()
                judge.accumulate()
                judge.summarize()
            means = list(coco.measured(truth, found, 5).means.values())
            self.assertTrue(0.05 < means[0] < 0.9)
            np.testing.assert_allclose(means, judge.stats, rtol=0, atol=1e-6)


def as_wide(box: np.ndarray) -> list[float]:
    """x, y, width and height, as COCO has them."""
    x1, y1, x2, y2 = map(float, box)
    return [x1, y1, x2 - x1, y2 - y1]


class Page(unittest.TestCase):
    def test_its_table_is_that_of_the_record(self) -> None:
        root = Path(__file__).resolve().parents[2]
        page = (root / "docs" / "detect.md").read_text()
        gpu, cpu = (
            json.loads((root / "benchmarks" / "results" / f"detect_{where}.json").read_text())
            for where in ("gpu", "cpu")
        )
        self.assertTrue(gpu["ok"])
        self.assertGreaterEqual(gpu["hard"]["figures"]["AP50"], 0.9)
        for name in ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AR_100"):
            found = [gpu[way]["figures"][name] for way in ("hard", "soft", "none")]
            found.append(cpu["hard"]["figures"][name])
            self.assertIn(f"| {name} | {' | '.join(f'{x:.3f}' for x in found)} |", page)

    def test_its_times_are_those_of_the_record(self) -> None:
        root = Path(__file__).resolve().parents[2]
        page = (root / "docs" / "detect.md").read_text()
        record = json.loads((root / "benchmarks" / "results" / "suppression_gpu.json").read_text())
        self.assertEqual(len(record["works"]), 3)
        for work in record["works"]:
            least, times = work["threshold"], work["ms"]
            ms = [f"{times[name]['median']:.3f}" for name in ("hard", "soft", "onnxruntime")]
            counts = f"{work['candidates']:,} | {work['boxes']:,} | {' | '.join(ms)}"
            self.assertIn(f"| {'all' if least is None else f'above {least}'} | {counts} |", page)


@needs("sklearn", "photos")
@needs("skimage", "photos")
class Made(unittest.TestCase):
    @slow
    def test_scenes_are_a_function_of_the_seed(self) -> None:
        one, same, other = made.made(6, 1), made.made(6, 1), made.made(6, 2)
        held = made.made(6, 1, held=True)
        self.assertEqual(one.names, same.names)
        for a, b in zip(one.scenes, same.scenes):
            np.testing.assert_array_equal(a.photo, b.photo)
            np.testing.assert_array_equal(a.boxes, b.boxes)
        for rest in (other, held):
            self.assertFalse(np.array_equal(one.scenes[0].photo, rest.scenes[0].photo))
        for each in (*one.scenes, *held.scenes):
            self.assertEqual((each.photo.shape, each.photo.dtype), ((128, 128, 3), np.uint8))
            self.assertTrue(1 <= len(each.boxes) <= 6)
            self.assertTrue((each.boxes >= 0).all() and (each.boxes <= 128).all())
            self.assertGreaterEqual((each.boxes[:, 2:] - each.boxes[:, :2]).min(), 3)

    def test_new_scenes_of_each_batch_are_made_by_a_process(self) -> None:
        loader = fresh.FreshScenes(4, 2, seed=3)
        loader._workers = 1
        epoch = [list(feed.values()) for feed in loader.epoch(1)]
        rest = [list(feed.values()) for feed in loader.shard(1, 2).epoch(1, 1)]
        for number, (pixels, wanted) in enumerate(epoch, 2):
            images, targets = loader.batch(number)
            np.testing.assert_array_equal(pixels, images)
            np.testing.assert_array_equal(wanted, targets)
        for a, b in zip(epoch[1], rest[0]):
            np.testing.assert_array_equal(a[2:], b)
        self.assertFalse(np.array_equal(epoch[0][0], epoch[1][0]))
        self.assertTrue(epoch[0][1][..., :-4].any(axis=(1, 2)).all())  # something in each


if __name__ == "__main__":
    unittest.main()

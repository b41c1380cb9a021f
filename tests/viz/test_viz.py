"""Pictures of data: what is drawn where, read back from the figures; and saving pictures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET
from pathlib import Path
from unittest import mock

import numpy as np

import dlsys
from dlsys import autodiff as ad
from dlsys import data, nn, optim, train, viz
from dlsys import functional as F
from dlsys.errors import DataError, DlsysError, ShapeError
from dlsys.viz import figure as figures
from dlsys.viz.layers import layer_values
from dlsys.viz.samples import probabilities
from support.devices import each_context

try:
    import matplotlib
except ImportError:
    matplotlib = None

needs_matplotlib = unittest.skipIf(matplotlib is None, "no matplotlib: pip install matplotlib")


@needs_matplotlib
class Images(unittest.TestCase):
    def shown(self, figure, k=0):
        return np.ma.filled(figure.axes[k].images[0].get_array(), np.nan)

    def test_filters_stand_in_rows(self):
        weights = np.arange(6 * 25, dtype=np.float32).reshape(6, 1, 5, 5) - 75
        mosaic = self.shown(viz.filters(ad.Parameter(weights, "w")))
        np.testing.assert_array_equal(mosaic[:5, :5], weights[0, 0])
        np.testing.assert_array_equal(mosaic[:5, 6:11], weights[1, 0])
        np.testing.assert_array_equal(mosaic[6:11, :5], weights[4, 0])
        self.assertTrue(np.isnan(mosaic[5]).all())

    def test_colors_are_the_same_for_both_signs(self):
        image = viz.filters(np.array([-3.0, 1.0] * 8).reshape(1, 1, 4, 4)).axes[0].images[0]
        self.assertEqual((image.norm.vmin, image.norm.vmax), (-3.0, 3.0))

    def test_a_matrix_is_read_along_its_inputs(self):
        rng = np.random.default_rng(0)
        weights = rng.normal(size=(784, 100))
        for matrix in (weights, weights.T):
            mosaic = self.shown(viz.filters(matrix))
            np.testing.assert_array_equal(mosaic[:28, :28], weights[:, 0].reshape(28, 28))
        wide = self.shown(viz.filters(rng.normal(size=(12, 5)), shape=(3, 4)))
        self.assertEqual(wide.shape[0], 2 * 3 + 1)
        self.assertRaisesRegex(ShapeError, "say its shape", viz.filters, np.ones((7, 5)))
        self.assertRaises(ShapeError, viz.filters, np.ones(7))

    def test_filters_of_three_channels_are_in_color(self):
        weights = np.zeros((2, 3, 4, 4))
        weights[0, 1] = 1.0
        mosaic = self.shown(viz.filters(weights))
        self.assertEqual(mosaic.shape[2], 4)
        np.testing.assert_array_equal(mosaic[0, 0], [0, 1, 0, 1])

    def test_the_title_says_what_is_left_out(self):
        figure = viz.filters(np.ones((100, 1, 3, 3)), limit=10)
        self.assertEqual(figure.axes[0].get_title(), "100 filters of 3 × 3, the first 10")

    def test_activations_of_planes_and_vectors(self):
        planes = np.random.default_rng(0).normal(size=(5, 6, 6))
        np.testing.assert_array_equal(self.shown(viz.activations(planes))[:, :6], planes[0])
        vector = viz.activations(np.array([1.0, -2.0, 3.0])).axes[0]
        self.assertEqual([bar.get_height() for bar in vector.patches], [1.0, -2.0, 3.0])

    def test_large_vectors_are_one_area_and_matrices_images(self):
        vector = viz.activations(np.arange(4096.0)).axes[0]
        self.assertEqual((len(vector.patches), len(vector.collections)), (0, 1))
        matrix = np.random.default_rng(0).normal(size=(20, 16))
        np.testing.assert_array_equal(self.shown(viz.activations(matrix)), matrix)

    def test_what_is_not_finite_is_told(self):
        weights = np.ones((2, 1, 3, 3))
        weights[0, 0, 0] = np.nan, np.inf, -2.0
        figure = viz.filters(weights)
        self.assertIn("2 not finite", figure.axes[0].get_title())
        self.assertEqual(figure.axes[0].images[0].norm.vmax, 2.0)
        self.assertIn("1 not finite", viz.activations([1.0, np.nan]).axes[0].get_title())
        image = np.eye(4)
        image[0, 1] = np.nan
        figure = viz.mistakes(image[None], [0], [1], [0.5])
        np.testing.assert_array_equal(self.shown(figure), np.eye(4))

    def test_integer_images_and_images_of_one_color(self):
        images = np.full((2, 4, 4), 200, np.uint8)
        images[1, 0, 0] = 250
        figure = viz.mistakes(images, [0, 0], [1, 1], [0.9, 0.8])
        np.testing.assert_array_equal(self.shown(figure, 0), np.zeros((4, 4)))
        self.assertEqual(self.shown(figure, 1)[0, 0], 1.0)

    def test_arrays_of_mistakes_that_do_not_fit(self):
        images = np.ones((2, 4, 4))
        for labels, taken, sure in (
            ([0], [1, 1], [0.5, 0.5]),
            (np.eye(2), [1, 1], [0.5, 0.5]),
            ([0, 0], [1, 1], [0.5]),
        ):
            with self.assertRaisesRegex(ShapeError, "of each image"):
                viz.mistakes(images, labels, taken, sure)

    def test_one_mistake_is_one_and_long_names_stay_with_their_image(self):
        names = ["a name that goes on and on", "$\\foo{$", "z"]
        figure = viz.mistakes(np.ones((3, 4, 4)), [0, 1, 2], [1, 1, 2], [0.5] * 3, classes=names)
        self.assertEqual(figure.get_suptitle(), "1 mistake in 3 images: label → prediction")
        lines = figure.axes[0].get_title().splitlines()
        self.assertEqual(len(lines), 3)
        self.assertLess(max(map(len, lines)), 16)
        figure.canvas.draw()  # dollars are no mathematics

    def test_mistakes_are_the_surest_first(self):
        images = np.arange(5)[:, None, None] + np.eye(28) * np.arange(1, 6)[:, None, None]
        labels, taken = np.array([0, 1, 2, 3, 4]), np.array([0, 2, 1, 3, 9])
        sure = np.array([0.99, 0.6, 0.9, 0.5, 0.7])
        figure = viz.mistakes(images, labels, taken, sure, limit=2)
        titles = [axes.get_title() for axes in figure.axes]
        self.assertEqual(titles, ["2 → 1\n90%", "4 → 9\n70%"])
        np.testing.assert_allclose(self.shown(figure), np.eye(28), atol=1e-9)
        self.assertIn("3 mistakes in 5 images", figure.get_suptitle())
        table = np.zeros((5, 10))
        table[np.arange(5), taken] = sure
        again = viz.mistakes(images.reshape(5, 784), labels, taken, table, classes="abcdefghij")
        self.assertEqual([axes.get_title()[:5] for axes in again.axes], ["c → b", "e → j", "b → c"])

    def test_no_mistake_is_no_error(self):
        figure = viz.mistakes(np.ones((2, 28, 28)), [1, 2], [1, 2], [0.5, 0.5])
        self.assertEqual(figure.axes[0].get_title(), "0 mistakes in 2 images")

    def test_mistakes_in_color_and_what_is_no_image(self):
        figure = viz.mistakes(np.random.default_rng(0).random((1, 3, 8, 8)), [0], [1], [0.5])
        self.assertEqual(self.shown(figure).shape, (8, 8, 3))
        wrong = np.ones((1, 5, 8, 8))
        self.assertRaisesRegex(ShapeError, "is no image", viz.mistakes, wrong, [0], [1], [0.5])


@needs_matplotlib
class Curves(unittest.TestCase):
    HISTORY = [
        {"epoch": 1, "step": 10, "loss": 1.0, "val_loss": 1.5, "accuracy": 0.5, "lr": 0.1,
         "seconds": 3.0, "samples_per_second": 10.0, "samples/s": 10.0},
        {"epoch": 2, "step": 20, "loss": 0.01, "val_loss": None, "accuracy": 0.9, "lr": 0.05,
         "seconds": 3.0, "samples_per_second": 10.0, "samples/s": 10.0},
    ]  # fmt: skip

    def lines(self, axes):
        return {line.get_label(): np.c_[line.get_data()].tolist() for line in axes.lines}

    def test_each_measure_has_a_panel_with_training_and_validation(self):
        figure = viz.curves(self.HISTORY)
        self.assertEqual([axes.get_title() for axes in figure.axes], ["loss", "accuracy", "lr"])
        loss = self.lines(figure.axes[0])
        self.assertEqual(loss, {"training": [[1, 1.0], [2, 0.01]], "validation": [[1, 1.5]]})
        self.assertEqual(figure.axes[0].get_yscale(), "log")
        self.assertEqual(figure.axes[1].get_yscale(), "linear")

    def test_the_fine_curve_lies_at_its_steps(self):
        fine = [{"step": 5, "loss": 2.0}, {"step": 20, "loss": 0.5}, {"step": 7, "loss": None}]
        axes = viz.curves(self.HISTORY, fine).axes[0]
        self.assertEqual(np.c_[axes.lines[0].get_data()].tolist(), [[0.5, 2.0], [2.0, 0.5]])
        told = [text.get_text() for text in axes.get_legend().get_texts()]
        self.assertEqual(told, ["within epochs", "training", "validation"])
        lines = viz.curves(self.HISTORY, fine[:1]).axes[0].lines  # a point is no curve
        self.assertEqual([line.get_label() for line in lines], ["training", "validation"])

    def test_epochs_are_whole(self):
        for history in (self.HISTORY[:1], self.HISTORY, [{"loss": 1.0}]):
            for axes in viz.curves(history).axes:
                ticks = axes.get_xticks()
                np.testing.assert_array_equal(ticks, np.round(ticks))
                low, high = axes.get_xlim()
                self.assertTrue(low <= 1 and len(history) <= high)

    def test_accuracies_are_percent(self):
        axes = viz.curves(self.HISTORY).axes[1]
        self.assertEqual(axes.yaxis.get_major_formatter()(0.125, None), "12.5%")

    def test_a_loss_that_is_lost_is_told_and_its_epochs_shown(self):
        history = [{"loss": 1.0, "val_loss": np.inf}, {"loss": 0.5}, {"loss": np.nan}]
        axes = viz.curves(history).axes[0]
        self.assertIn("training: no finite number in epoch 3", axes.get_xlabel())
        self.assertIn("validation: no finite number in epoch 1", axes.get_xlabel())
        self.assertGreaterEqual(axes.get_xlim()[1], 3)
        self.assertNotIn("finite", viz.curves(self.HISTORY).axes[0].get_xlabel())

    def test_a_loss_that_was_lost_and_an_empty_history(self):
        figure = viz.curves([{"loss": float("nan")}, {"loss": 1.0}])
        self.assertEqual(len(figure.axes), 1)
        self.assertEqual(len(viz.curves([]).axes), 1)


@needs_matplotlib
class Classes(unittest.TestCase):
    def test_counts_stand_in_their_cells(self):
        counts = np.array([[8, 2, 0], [0, 5, 0], [1, 0, 4]])
        axes = viz.confusion_matrix(counts, classes=["cat", "dog", "owl"]).axes[0]
        cells = {text.get_position(): text.get_text() for text in axes.texts}
        expected = {(0, 0): "8", (1, 0): "2", (1, 1): "5", (0, 2): "1", (2, 2): "4"}
        self.assertEqual(cells, expected)
        self.assertEqual(axes.get_title(), "17 of 20 right, 85.00%")
        rows = [label.get_text() for label in axes.get_yticklabels()]
        self.assertEqual(rows, ["cat\u200280.0%", "dog\u2002100.0%", "owl\u200280.0%"])
        opacity = np.asarray(axes.images[0].get_array())[..., 3]
        self.assertEqual(opacity[0, 2], 0)
        self.assertGreater(opacity[0, 1], 0)

    def test_what_is_no_matrix_of_counts(self):
        self.assertRaises(ShapeError, viz.confusion_matrix, np.ones((2, 3)))
        large = viz.confusion_matrix(np.ones((60, 60), int)).axes[0]
        self.assertEqual(len(large.texts), 0)
        viz.confusion_matrix(np.zeros((3, 3), int))

    def test_shares_instead_of_counts(self):
        axes = viz.confusion_matrix(np.array([[0.75, 0.25], [0.5, 0.5]])).axes[0]
        self.assertEqual([text.get_text() for text in axes.texts], ["0.75", "0.25", "0.50", "0.50"])
        self.assertEqual(axes.get_title(), "62.50% right")
        rows = [label.get_text() for label in axes.get_yticklabels()]
        self.assertEqual(rows, ["0\u200275.0%", "1\u200250.0%"])

    def test_names_of_classes_are_text(self):
        names = np.array(["<b>&", "$\\foo{$", "a name that goes on and on and on"])
        figure = viz.confusion_matrix(np.eye(3, dtype=int), names)
        labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
        self.assertEqual(labels[0], "<b>&")
        self.assertLess(len(labels[2]), 30)
        self.assertIn("&lt;b&gt;&amp;", figures.svg_of(figure, "x"))
        self.assertRaisesRegex(ShapeError, "names for 2", viz.confusion_matrix, np.eye(3), "ab")

    def test_what_a_row_does_not_say_is_not_promised(self):
        large = viz.confusion_matrix(np.ones((60, 60), int)).axes[0]
        self.assertEqual(large.get_ylabel(), "label")
        self.assertRaises(ShapeError, viz.confusion_matrix, np.zeros((0, 0)))

    def test_the_boundary_is_where_the_classifier_changes(self):
        points = np.array([[-1, 0], [1, 0], [0.5, 1], [-0.5, -1]], np.float32)
        labels = np.array([0, 1, 1, 1])
        figure = viz.decision_boundary(lambda p: p[:, 0], points, labels, resolution=50)
        axes = figure.axes[0]
        self.assertEqual(axes.get_title(), "1 of 4 points on the wrong side")
        regions = np.asarray(axes.images[0].get_array())[0]
        changes = np.flatnonzero(np.any(regions[1:] != regions[:-1], axis=1))
        left, right = axes.images[0].get_extent()[:2]
        self.assertEqual(len(changes), 1)
        self.assertAlmostEqual(left + (changes[0] + 0.5) / 49 * (right - left), 0, delta=0.05)

    def test_a_model_of_several_classes(self):
        model = nn.Linear(2, 3, rng=np.random.default_rng(0))
        points = np.random.default_rng(1).normal(size=(60, 2)).astype(np.float32)
        truth = points @ model.weight.asnumpy().T + model.bias.asnumpy()
        figure = viz.decision_boundary(model, points, truth.argmax(axis=1), resolution=20)
        self.assertEqual(figure.axes[0].get_title(), "0 of 60 points on the wrong side")

    def test_points_that_do_not_fit(self):
        for points, labels in ((np.ones((3, 3)), [0] * 3), (np.ones((3, 2)), [0]), ([], [])):
            with self.assertRaises(ShapeError):
                viz.decision_boundary(lambda p: p[:, 0], points, labels)


@needs_matplotlib
class Sets(unittest.TestCase):
    """Loaders and data sets in place of arrays."""

    def setUp(self) -> None:
        rng = np.random.default_rng(4)
        self.images = rng.integers(0, 256, (30, 1, 6, 6)).astype(np.uint8)
        self.labels = np.arange(30) % 3
        dataset = data.Dataset(self.images, self.labels, ("cat", "dog", "owl"))
        loader = data.Loader(dataset, 7, shuffle=True, normalize=(0.4, 0.3))
        self.sets = dataset, loader, data.DeviceLoader(dataset, 10, shuffle=True)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3, rng=2))
        train.fit(self.model, loader, optim.SGD(0.01), quiet=True)
        scores = train.predict(self.model, self.images)
        powers = np.exp(scores.astype(np.float64))
        self.chances = powers / powers.sum(axis=1, keepdims=True)
        self.taken = scores.argmax(axis=1)

    def test_a_confusion_matrix(self):
        counts = np.zeros((3, 3), int)
        np.add.at(counts, (self.labels, self.taken), 1)
        wanted = viz.confusion_matrix(counts, ["cat", "dog", "owl"])
        for given in self.sets:
            figure = viz.confusion_matrix(given, model=self.model)
            self.assertEqual(self.texts(figure), self.texts(wanted))

    def test_mistakes(self):
        names = ["cat", "dog", "owl"]
        wanted = viz.mistakes(self.images, self.labels, self.taken, self.chances, 5, names)
        for given in self.sets:
            figure = viz.mistakes(given, limit=5, model=self.model)
            self.assertEqual(self.texts(figure), self.texts(wanted))

    def test_points_and_the_first_sample(self):
        points = np.array([[-1, 0], [1, 0], [0.5, 1], [-0.5, -1]], np.float32)
        given = data.Loader((points, np.array([0, 1, 1, 1])), 2)
        figure = viz.decision_boundary(lambda p: p[:, 0], given, resolution=9)
        self.assertEqual(figure.axes[0].get_title(), "1 of 4 points on the wrong side")
        wanted = self.texts(viz.layer_activations(self.model, self.images[0]))
        for each in self.sets:
            self.assertEqual(self.texts(viz.layer_activations(self.model, each)), wanted)

    def test_one_output_decides_between_two_classes(self):
        two = data.Dataset(self.images, (self.labels > 0)[:, None].astype(np.float32))
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 1, rng=2))
        train.fit(model, data.Loader(two, 5), optim.SGD(0.01),
                  F.binary_cross_entropy_with_logits, quiet=True)  # fmt: skip
        score = train.predict(model, two)[:, 0].astype(np.float64)
        found = probabilities(model, two)
        np.testing.assert_allclose(found[:, 1], 1 / (1 + np.exp(-score)), rtol=1e-12)
        viz.confusion_matrix(two, model=model)

    def test_several_fields_are_refused(self):
        fields = data.Loader((self.images, self.images, self.labels), 5)
        with self.assertRaisesRegex(DataError, "mistakes: expected a Loader or a Dataset of"):
            viz.mistakes(fields, model=self.model)

    def texts(self, figure) -> list[str]:
        return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


class Layers(unittest.TestCase):
    def model(self):
        rng = np.random.default_rng(0)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, rng=rng), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
            nn.Linear(3 * 6 * 6, 4, rng=rng),
        )  # fmt: skip

    def test_values_are_those_of_evaluation_and_modes_stay(self):
        image = np.random.default_rng(1).normal(size=(1, 8, 8)).astype(np.float32)
        for ctx in each_context():
            model = self.model()
            model.to(ctx)
            model[0].eval()
            values = layer_values(model, image)
            self.assertEqual(list(values), ["0 Conv2d", "1 ReLU", "4 Linear"])
            conv, relu, linear = values.values()
            np.testing.assert_array_equal(relu, np.maximum(conv, 0))
            w, b = model[4].weight.asnumpy(), model[4].bias.asnumpy()
            np.testing.assert_allclose(linear, w @ relu.reshape(-1) + b, rtol=1e-4, atol=1e-5)
            self.assertEqual((model.training, model[0].training), (True, False))

    @needs_matplotlib
    def test_each_layer_is_a_panel(self):
        figure = viz.layer_activations(self.model(), np.ones((1, 8, 8), np.float32), layers=2)
        titles = [axes.get_title() for axes in figure.axes]
        self.assertEqual(titles, ["input  (1, 8, 8)", "0 Conv2d  (3, 6, 6)", "1 ReLU  (3, 6, 6)"])
        shown = figure.axes[0].images[0].get_array()
        self.assertEqual(shown.shape, (8, 8))
        self.assertEqual(figure.get_supxlabel(), "layers that follow: 1")
        whole = viz.layer_activations(self.model(), np.ones((1, 8, 8), np.float32))
        self.assertEqual(whole.get_supxlabel(), "")


class Saving(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    @needs_matplotlib
    def test_the_name_says_the_kind(self):
        figure = viz.curves([{"loss": 1.0}])
        for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")):
            viz.save(figure, self.folder / name)
            self.assertTrue((self.folder / name).read_bytes().startswith(start))

    def test_texts_are_saved_as_they_are(self):
        svg = viz.graph_svg(ad.Variable("x"))
        viz.save(svg, self.folder / "graph.svg")
        self.assertEqual((self.folder / "graph.svg").read_text(encoding="utf-8"), svg)
        with self.assertRaisesRegex(DataError, "name it .svg or .dot"):
            viz.save(svg, self.folder / "graph.png")

    def test_an_earlier_picture_survives_a_failure(self):
        path = self.folder / "graph.svg"
        viz.save("first", path)
        with mock.patch("os.replace", side_effect=OSError("disk full")):
            self.assertRaises(OSError, viz.save, "second", path)
        self.assertEqual(path.read_text(), "first")
        self.assertEqual(os.listdir(self.folder), ["graph.svg"])

    @needs_matplotlib
    def test_a_figure_inside_a_page_keeps_to_itself(self):
        figure = viz.confusion_matrix(np.eye(3, dtype=int))
        svg = figures.svg_of(figure, "first")
        root = ET.fromstring(svg)
        names = [item.get("id") for item in root.iter() if item.get("id")]
        self.assertTrue(names and all(name.startswith("first-") for name in names))
        for target in re.findall(r'(?:href="|url\()#([^")]+)', svg):
            self.assertIn(target, names)
        self.assertNotIn(figures.INK, svg)
        self.assertIn("currentColor", svg)
        again = viz.confusion_matrix(np.eye(3, dtype=int))
        self.assertEqual(svg, figures.svg_of(again, "first"))


class WithoutMatplotlib(unittest.TestCase):
    def test_one_sentence_names_the_extra(self):
        with mock.patch.dict(sys.modules, {"matplotlib": None, "matplotlib.figure": None}):
            with self.assertRaisesRegex(DlsysError, r"pip install matplotlib"):
                viz.curves([{"loss": 1.0}])

    @needs_matplotlib
    def test_pyplot_is_never_loaded(self):
        program = (
            "import sys, numpy as np\n"
            "from dlsys import viz\n"
            "assert 'matplotlib' not in sys.modules\n"
            "viz.confusion_matrix(np.eye(3, dtype=int)).savefig('/dev/null', format='png')\n"
            "viz.filters(np.ones((4, 1, 3, 3)))\n"
            "assert 'matplotlib.pyplot' not in sys.modules\n"
        )
        environment = dict(os.environ, PYTHONPATH=str(Path(dlsys.__file__).parent.parent))
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)

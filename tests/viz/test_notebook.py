"""What objects show in notebooks: read back from their HTML, and in a real kernel.

`PYTHONPATH=python:tests python tests/viz/test_notebook.py --write` draws docs/notebook.png of the
page on notebooks, with the Chromium that is on PATH and Pillow.
"""

from __future__ import annotations

import base64
import html
import os
import re
import struct
import subprocess
import sys
import tempfile
import unittest
import zlib
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np

import dlsys
from dlsys import autodiff as ad
from dlsys import ndarray, nn, optim, profile, viz
from dlsys.train import History
from dlsys.viz import notebook
from dlsys.viz.png import png
from support.devices import slow

try:
    import ipykernel  # noqa: F401 (the kernel that nbclient starts)
    import nbclient
    import nbformat
except ImportError:
    nbclient = None

try:
    import matplotlib.backends.backend_agg
    import matplotlib.figure
except ImportError:
    matplotlib = None

needs_matplotlib = unittest.skipIf(matplotlib is None, "no matplotlib: pip install matplotlib")
DOCS = Path(dlsys.__file__).parents[2] / "docs"
VOID = {"img", "input", "br", "meta", "link"}


class Balance(HTMLParser):
    """Collects the tags of a fragment, and that each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def pixels(fragment: str) -> np.ndarray:
    """The image (H, W, 4) of the first `<img>`."""
    file = base64.b64decode(re.search(r"data:image/png;base64,([^\"]+)", fragment)[1])
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(file):
        (length,) = struct.unpack(">I", file[at : at + 4])
        kind, content = file[at + 4 : at + 8], file[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", file[at + 8 + length : at + 12 + length])
        assert checksum == zlib.crc32(kind + content), kind
        chunks[kind], at = content, at + 12 + length
    width, height, depth, color = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, color) == (8, 6) and b"IEND" in chunks
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 4)


def shown(array: np.ndarray) -> str:
    return notebook.array_html(array, "NDArray", array.dtype, "cpu(0)")


class Arrays(unittest.TestCase):
    def test_values_facts_and_range(self):
        text = notebook.array_html(np.array([1.0, 3.0]), "Tensor", "float32", "gpu:0", True)
        self.assertIn("<b>Tensor</b> float32 (2,) on gpu:0, requires grad", text)
        self.assertIn("<pre>[1., 3.]</pre>", text)
        self.assertIn("from 1 to 3, mean 2", text)
        self.assertNotIn("<img", text)

    def test_an_ndarray_shows_its_own_facts(self):
        text = ndarray.array(np.arange(3.0))._repr_html_()
        self.assertIn("<b>NDArray</b> float32 (3,) on cpu(0)", text)
        self.assertIn("[0., 1., 2.]", text)

    def test_a_tensor_shows_its_own_facts(self):
        for device in ("numpy", "cpu"):
            x = dlsys.tensor([[1.0, 2.0]], device=device, requires_grad=True)
            text = (2 * x)._repr_html_()
            self.assertIn(f"<b>Tensor</b> float32 (1, 2) on {x.device}, requires grad", text)
            self.assertIn("[[2., 4.]]", text)
        self.assertIn("drawn as 9 images", dlsys.rand(9, 3, 16, 16)._repr_html_())

    def test_pixels_are_drawn_as_they_are(self):
        image = np.random.default_rng(0).integers(0, 256, (9, 12), np.uint8)
        drawn = pixels(shown(image))
        np.testing.assert_array_equal(drawn[..., 0], image)
        np.testing.assert_array_equal(drawn[..., 2], image)
        self.assertTrue((drawn[..., 3] == 255).all())

    def test_channels_before_and_after(self):
        image = np.random.default_rng(0).random((6, 7, 3))
        wanted = np.round(image * 255)
        np.testing.assert_array_equal(pixels(shown(image))[..., :3], wanted)
        first = np.moveaxis(image, -1, 0)
        np.testing.assert_array_equal(pixels(shown(first))[..., :3], wanted)
        np.testing.assert_array_equal(pixels(shown(first[None]))[..., :3], wanted)

    def test_many_images_stand_in_rows_with_clear_lines_between(self):
        images = np.random.default_rng(0).random((100, 1, 14, 14))
        text = shown(images)
        drawn = pixels(text)
        self.assertEqual(drawn.shape, (3 * 15 - 1, 8 * 15 - 1, 4))
        np.testing.assert_array_equal(drawn[15:29, :14, 0], np.round(images[8, 0] * 255))
        self.assertFalse(drawn[14, :, 3].any())
        self.assertIn("drawn as 100 images, the first 24 here", text)

    def test_other_floats_are_stretched_and_what_is_not_finite_is_told(self):
        matrix = np.linspace(-3, 1, 100).reshape(10, 10)
        matrix[5, 5] = np.nan
        text = shown(matrix)
        drawn = pixels(text)[..., 0]
        self.assertEqual((drawn[0, 0], drawn[9, 9], drawn[5, 5]), (0, 255, 0))
        self.assertIn("1 not finite", text)
        self.assertIn("black the lowest", text)

    def test_large_images_are_thinned_out(self):
        text = shown(np.zeros((600, 1000), np.uint8))
        self.assertEqual(pixels(text).shape, (150, 250, 4))
        self.assertIn("one pixel in 4", text)

    def test_what_is_no_image_is_not_drawn(self):
        for shape in ((5,), (), (3, 4), (784, 10), (2, 5, 6, 7), (0, 28, 28), (2, 1, 3, 9, 9)):
            self.assertNotIn("<img", shown(np.zeros(shape)), shape)
        self.assertNotIn("<img", shown(np.full((9, 9), "x")))

    def test_every_image_has_words(self):
        tags = Balance(shown(np.zeros((28, 28)))).seen
        words = dict(tags)["img"]["alt"]
        self.assertIn("float64 (28, 28)", words)

    def test_the_png_of_a_single_pixel(self):
        file = png(np.array([[[1, 2, 3, 255]]], np.uint8))
        fragment = f'<img src="data:image/png;base64,{base64.b64encode(file).decode()}">'
        self.assertEqual(pixels(fragment).tolist(), [[[1, 2, 3, 255]]])


class Objects(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        x = ad.Variable("x", (None, 4), np.float32)
        cls.w = ad.Parameter(np.ones((4, 2), np.float32), "w")
        cls.loss = ad.sum_op(ad.matmul_op(x, cls.w))
        step = optim.SGD(0.1).minimize(cls.loss, [cls.w])
        cls.executor = ad.Executor([cls.loss, step], ctx=ndarray.cpu(0))
        cls.fresh = ad.Executor([cls.loss])
        cls.profile = cls.executor.recorder = profile.Profile()
        cls.executor.run({x: np.ones((3, 4), np.float32)})

    def check(self, fragment: str, *wanted: str) -> None:
        """A closed fragment that loads nothing, in which these words stand."""
        balance = Balance(fragment)
        self.assertEqual(balance.open, [])
        self.assertNotRegex(fragment, r"(src|href)=\"(?!data:|#)")
        self.assertTrue(fragment.startswith('<div class="dlsys">'))
        for words in wanted:
            self.assertIn(words, html.unescape(fragment))

    def test_a_node_shows_its_graph(self):
        self.check(self.loss._repr_html_(), repr(self.loss), "<svg", "matmul", 'role="img"')

    def test_a_parameter_shows_its_value(self):
        self.check(self.w._repr_html_(), "Parameter w", "float32 (4, 2) on cpu(0)", "[0.7, 0.7]")

    def test_a_large_graph_is_bounded_and_says_so(self):
        y = ad.Variable("x", (3,), np.float32)
        for _ in range(500):
            y = ad.tanh_op(y)
        fragment = y._repr_html_()
        self.check(fragment, "The graph has 501 nodes, too many")
        self.assertLess(fragment.count("<rect"), 60)

    def test_a_plan_and_an_executor_show_memory(self):
        plan = self.executor.plans[0]
        self.check(plan._repr_html_(), f"of {len(plan.steps)} steps", "<svg", "live bytes")
        self.check(self.executor._repr_html_(), "ctx=cpu(0)", "1 plan", "x (3, 4)", "<svg")
        self.check(self.fresh._repr_html_(), "Nothing is planned before the first run.")
        self.check(self.executor.report()._repr_html_(), "1 plan(s) on cpu(0)")

    def test_profiles_and_counters(self):
        self.check(self.profile._repr_html_(), "1 run, ", "<svg", "matmul")
        self.check(profile.Profile()._repr_html_(), "No run was timed yet")
        self.check(profile.counters(ndarray.cpu(0))._repr_html_(), "free_nbytes")

    def test_models(self):
        model = nn.LeNet5()
        self.check(model._repr_html_(), "61,706 parameters", "conv1", "(6, 1, 5, 5)")
        self.check(model.summary((1, 1, 28, 28))._repr_html_(), "(1, 6, 28, 28)", "846,066")
        deep = nn.Sequential(*(nn.ReLU() for _ in range(200)))
        self.check(deep._repr_html_(), "and 141 more layers")

    def test_a_history(self):
        self.check(History()._repr_html_(), "Nothing is measured")
        epochs = [{"epoch": k, "step": k, "loss": 1 / k, "val_loss": 2 / k} for k in range(1, 31)]
        history = History(epochs)
        with mock.patch.dict("sys.modules", {"matplotlib.figure": None}):
            self.check(history._repr_html_(), "pip install matplotlib", "0.033333", "…")
        self.assertLess(history._repr_html_().count("<tr>"), 15)

    @needs_matplotlib
    def test_curves_are_drawn_with_ids_of_their_own(self):
        history = History([{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": 0.5}])
        first, second = history._repr_html_(), history._repr_html_()
        self.check(first, "<svg", 'aria-label="curves of History(2 epochs')
        ids = [set(re.findall(r'\bid="([^"]+)"', text)) for text in (first, second)]
        self.assertTrue(ids[0])
        self.assertFalse(ids[0] & ids[1])

    def test_a_report_is_a_page_of_its_own(self):
        report = viz.report.Report("MLP <1>", settings={"rate": 0.1})
        self.check(report._repr_html_(), "Report", "<!DOCTYPE html>")
        (frame,) = [attrs for tag, attrs in Balance(report._repr_html_()).seen if tag == "iframe"]
        self.assertEqual(frame["title"], "MLP <1>")
        self.assertIn("<h2>", frame["srcdoc"])


SETUP = """
import os, signal, threading
import numpy as np
from dlsys import autodiff as ad, data, ndarray, nn, optim, train

rng = np.random.default_rng(0)
images, labels = rng.random((200, 1, 28, 28), np.float32), rng.integers(0, 10, 200)
loader = data.Loader((images, labels), 20, shuffle=True)
optimizer = optim.SGD(0.1)
"""
TRAIN = """
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
history = train.fit(
    model, loader, optimizer, epochs=3, ctx=ndarray.cpu(0), callbacks=[train.Progress()]
)
history
"""
INTERRUPTED = """
class Stops(train.Callback):
    def on_step(self, run):
        if run.step == 15:
            os.kill(os.getpid(), signal.SIGINT)

model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
train.fit(model, loader, optimizer, epochs=3, ctx=ndarray.cpu(0), callbacks=[Stops()])
"""


def executed(cells: list[str]) -> list:
    """The cells of a notebook after a kernel has run them; a failed one does not end it."""
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(text) for text in cells]
    path = str(Path(dlsys.__file__).parents[1])
    with mock.patch.dict(os.environ, PYTHONPATH=path, OPENBLAS_NUM_THREADS="1"):
        nbclient.NotebookClient(book, timeout=120, allow_errors=True).execute()
    return book.cells


def page_cells() -> list[str]:
    """The cells of the page on notebooks."""
    text = (DOCS / "notebooks.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.S)


@slow
@unittest.skipIf(nbclient is None, "not here: ipykernel and nbclient")
class Kernel(unittest.TestCase):
    """Cells in a real kernel, as Jupyter runs them."""

    @classmethod
    def setUpClass(cls):
        cells = {
            "setup": SETUP,
            "array": "ndarray.array(images[:10, 0])",
            "number": "loss = ndarray.array(0.5)\nprint(f'{loss:.3f}', loss)\nloss",
            "tensor": "import dlsys as dl\nt = dl.tensor(images[:4, 0])\nt * 2",
            "model": "nn.LeNet5()",
            "graph": "nn.MLP((784, 9))(ad.Variable('x', (1, 784), np.float32))",
            "train": TRAIN,
            "interrupted": INTERRUPTED,
            "kept": "print(len(model.history.epochs))\nmodel.history",
            "again": TRAIN,
            "wrong": "n = 3\n\nad.Variable('x', (3, 4)) @ ad.Variable('y', (5, 6))",
        }
        cells |= {f"page {k}": text for k, text in enumerate(page_cells())}
        cls.cells = dict(zip(cells, executed([*cells.values()])))

    def outputs(self, name: str, kind: str) -> list:
        return [output for output in self.cells[name].outputs if output.output_type == kind]

    def result(self, name: str) -> dict:
        (output,) = self.outputs(name, "execute_result")
        return output.data

    def printed(self, name: str, stream: str = "stdout") -> str:
        outputs = self.outputs(name, "stream")
        return "".join(output.text for output in outputs if output.name == stream)

    def test_only_two_cells_fail(self):
        for name in self.cells:
            kinds = [error.ename for error in self.outputs(name, "error")]
            wanted = {"interrupted": ["KeyboardInterrupt"], "wrong": ["ShapeError"]}
            self.assertEqual(kinds, wanted.get(name, []), name)

    def test_results_are_text_and_pictures(self):
        pictures = {
            "array": "<img",
            "tensor": "<img",
            "model": "<table",
            "graph": "<svg",
            "train": "<table",
        }
        for name, tag in pictures.items():
            result = self.result(name)
            self.assertIn(tag, result["text/html"], name)
            self.assertLess(len(result["text/plain"].splitlines()), 20, name)

    def test_a_bar_moves_within_the_epoch(self):
        """A bar of text, or a widget where ipywidgets is installed, and the lines of the epochs."""
        told = self.printed("train")
        self.assertEqual(re.findall(r"^epoch (\d)/3  loss", told, re.M), ["1", "2", "3"])
        widgets = [output.data for output in self.outputs("train", "display_data")]
        if find_spec("ipywidgets"):
            self.assertTrue(any("application/vnd.jupyter.widget-view+json" in w for w in widgets))
        else:
            bar = self.printed("train", "stderr")
            shown = re.findall(r"epoch 2/3:\s+(\d+)%", bar)
            self.assertIn("100", shown)
            self.assertGreater(len(set(shown)), 1)

    def test_a_fetch_reads_like_a_number(self):
        self.assertEqual(self.printed("number"), "0.500 0.5\n")
        self.assertIn("NDArray(0.5, shape=()", self.result("number")["text/plain"])

    def test_an_interrupted_cell_keeps_the_history(self):
        (error,) = self.outputs("interrupted", "error")
        self.assertIn("1 of 3 epochs and 5 of 10 batches", error.evalue)
        self.assertEqual(self.printed("kept"), "1\n")
        self.assertIn("History(1 epoch", self.result("kept")["text/plain"])

    def test_an_error_names_the_cell_and_its_line(self):
        (error,) = self.outputs("wrong", "error")
        number = self.cells["wrong"].execution_count
        self.assertTrue(error.evalue.endswith(f"[In[{number}]:3]"), error.evalue)

    def test_a_cell_that_is_run_again_trains_again(self):
        for name in ("train", "again"):
            self.assertIn("History(3 epochs", self.result(name)["text/plain"])
            self.assertEqual(self.printed(name).count("epoch 3/3"), 1)

    def test_every_cell_of_the_page_shows_something(self):
        self.assertGreaterEqual(len(page_cells()), 8)
        for k in range(len(page_cells())):
            self.assertIn('<div class="dlsys">', self.result(f"page {k}")["text/html"])
        self.assertEqual(self.printed("page 2").split()[:2], ["0.024", "True"])


_LIGHT, _DARK = "background:#fff;color:#1f2328", "background:#16191e;color:#dfe4ea"
_DRAWN = (0, 3, 5, 9)  # cells of the page, one below the other
_WIDTH, _HEIGHT = 860, 1900  # of one half of the picture, in pixels


def write_picture() -> None:
    """Draws some cells of the page, light and dark side by side, by Chromium."""
    from PIL import Image, ImageChops

    cells = executed(page_cells())
    shown = [(cells[k].source.splitlines()[-1], cells[k].outputs[-1]) for k in _DRAWN]
    column = "".join(
        f'<pre style="opacity:.7;margin:1.6em 0 .6em">{html.escape(line)}</pre>'
        f"{output.data['text/html']}"
        for line, output in shown
    )
    halves = "".join(
        f'<div style="{colors};width:{_WIDTH}px;padding:4px 24px;box-sizing:border-box">'
        f"{column}</div>"
        for colors in (_LIGHT, _DARK)
    )
    body = f'<body style="margin:0;display:flex;font:14px sans-serif">{halves}'
    page = f'<!DOCTYPE html><meta charset="utf-8">{body}'
    target = DOCS / "notebook.png"
    with tempfile.TemporaryDirectory() as folder:
        source, taken = Path(folder) / "page.html", Path(folder) / "page.png"
        source.write_text(page, encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--screenshot={taken}"]
        size = f"--window-size={2 * _WIDTH},{_HEIGHT}"
        subprocess.run(["chromium", *options, size, source.as_uri()], check=True, timeout=120)
        image = Image.open(taken).convert("RGB")
    used = ImageChops.difference(
        image, Image.new("RGB", image.size, image.getpixel((0, _HEIGHT - 1)))
    )
    bottom = used.crop((0, 0, _WIDTH, _HEIGHT)).getbbox()[3]
    image.crop((0, 0, 2 * _WIDTH, min(bottom + 24, _HEIGHT))).quantize(128).save(
        target, optimize=True
    )


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write_picture()

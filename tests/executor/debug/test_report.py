"""The report: one page, complete in itself, from any subset of its parts."""

from __future__ import annotations

import html.parser
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn, optim, profile
from dlsys.apps.report import Sampled
from dlsys.errors import DlsysError
from dlsys.viz import report
from dlsys.viz.report import Evidence, Mistakes, Points, Report

try:
    from matplotlib.image import imread
except ImportError:
    imread = None

needs_matplotlib = unittest.skipIf(imread is None, "no matplotlib: pip install matplotlib")
VOID = {"meta", "link", "br", "input", "img", "hr"}
SECTIONS = {
    "run": "Run",
    "training": "Training",
    "model": "Model",
    "filters": "Learned filters",
    "activations": "Activations",
    "confusion": "Confusion matrix",
    "mistakes": "Worst mistakes",
    "evidence": "Evidence",
    "graph": "Graph",
    "memory": "Memory plan",
    "operators": "Operators",
    "device": "Device",
}


class Page(html.parser.HTMLParser):
    """Reads a page: its ids, what it refers to, its tables; `faults` has tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.faults: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.faults += self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data", "poster"):
                self.references.append(value)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        if not self._open or self._open.pop() != tag:
            self.faults.append(f"</{tag}>")

    def handle_data(self, data):
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def full_report() -> Report:
    """A trained LeNet-5 in small: every part that one run can have."""
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, rng=rng), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(4 * 3 * 3, 5, rng=rng),
    )  # fmt: skip
    x = ad.Variable("images", shape=(None, 1, 8, 8), dtype=np.float32)
    labels = ad.Variable("labels", shape=(None,), dtype=np.int64)
    loss = ad.softmax_cross_entropy(model(x), labels)
    train = optim.SGD(0.1, momentum=0.9).minimize(loss, model.parameters())
    step = ad.Executor([loss, train])
    step.recorder = profile.Profile()
    images = rng.random((20, 1, 8, 8), np.float32)
    truth = rng.integers(0, 5, 20)
    for _ in range(3):
        step.run({x: images, labels: truth})
    predictions = rng.integers(0, 5, 20)
    confusion = np.zeros((5, 5), int)
    np.add.at(confusion, (truth, predictions), 1)
    shapes = {x: (20, 1, 8, 8), labels: (20,)}
    return Report(
        "Small <LeNet> & co",
        numbers={"test accuracy": 0.98765, "parameters": 235, "seconds": 1.25},
        command="dlsys mnist --augment a<b",
        settings={"optimizer": "momentum", "lr": 0.1},
        history=[
            {"epoch": k, "step": 10 * k, "loss": 1 / k, "val_accuracy": 0.9, "confusion": confusion}
            for k in (1, 2, 3)
        ],
        fine=[{"step": 1, "loss": 2.0}, {"step": 15, "loss": 0.7}],
        model=model,
        image=images[0],
        confusion=confusion,
        mistakes=Mistakes(images, truth, predictions, rng.random(20)),
        evidence=Evidence(
            rng.integers(0, 255, (2, 8, 8, 4)).astype(np.uint8), ["one\n90%", "two\n8%"], "grad_cam"
        ),
        graph=[loss, train],
        plan=step.plan(shapes),
        profile=step.recorder,
        counters="device cpu",
    )


def svgs(text: str) -> list[str]:
    return re.findall(r"<svg\b.*?</svg>", text, re.S)


@needs_matplotlib
class Full(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.report = full_report()
        cls.text = report.html(cls.report)
        cls.page = Page(cls.text)

    def test_it_has_every_section(self):
        headings = re.findall(r'<section id="(\w+)"><h2>([^<]*)</h2>', self.text)
        self.assertEqual(dict(headings), SECTIONS)
        self.assertLessEqual({f"#{anchor}" for anchor in SECTIONS}, set(self.page.references))

    def test_it_is_well_formed(self):
        self.assertEqual(self.page.faults, [])
        self.assertEqual(len(self.page.ids), len(set(self.page.ids)))
        drawn = svgs(self.text)
        self.assertEqual(len(drawn), 9)
        for svg in drawn:
            ET.fromstring(svg)

    def test_it_loads_nothing(self):
        for reference in self.page.references:
            self.assertRegex(reference, r"^(#|data:)")
        self.assertFalse({"script", "iframe", "object", "embed"} & set(self.page.tags))
        self.assertNotIn("@import", self.text)
        for target in re.findall(r"url\(([^)]*)\)", self.text):
            self.assertTrue(target.startswith("#"), target)

    def test_references_inside_it_lead_somewhere(self):
        inside = [r[1:] for r in self.page.references if r.startswith("#")]
        inside += re.findall(r"url\(#([^)]*)\)", self.text)
        self.assertLessEqual(set(inside), set(self.page.ids))

    def test_titles_are_text(self):
        self.assertIn("<h1>Small &lt;LeNet&gt; &amp; co</h1>", self.text)
        self.assertNotIn("<LeNet>", self.text)

    def test_numbers_and_tables(self):
        self.assertIn("<b>98.77%</b>test accuracy", self.text)
        self.assertIn("<b>235</b>parameters", self.text)
        self.assertIn("<pre>dlsys mnist --augment a&lt;b</pre>", self.text)
        rows = self.page.rows
        self.assertIn(["optimizer", "momentum"], rows)
        self.assertIn(["epoch", "step", "loss", "val accuracy"], rows)
        self.assertIn(["2", "20", "0.5", "90.00%"], rows)
        operators = {row[0]: row[1] for row in rows if len(row) == 6}
        timed = self.report.profile.rows()
        counted = {row.name: f"{row.calls:,}" for row in timed}
        total = {"total of 3 runs": f"{sum(row.calls for row in timed):,}"}
        self.assertEqual(operators, {"operator": "calls"} | counted | total)
        self.assertIn("python", [row[0] for row in rows])

    def test_sections_tell_what_they_show(self):
        leads = re.findall(r"</h2>\n<p>(.*?)</p>", self.text, re.S)
        self.assertEqual(len(leads), 9)

    def test_pictures_stay_readable_where_there_is_no_room(self):
        least = [float(k) for k in re.findall(r"--least: (\d+)px", self.text)]
        widths = [float(re.search(r' width="([\d.]+)', svg)[1]) for svg in svgs(self.text)]
        self.assertEqual(len(least), len(widths))
        for minimum, width in zip(least, widths):
            self.assertTrue(0.5 * min(width, 640) < minimum <= 640)

    def test_it_is_small(self):
        self.assertLess(len(self.text.encode()), 2_000_000)


class Parts(unittest.TestCase):
    def headings(self, **parts):
        text = report.html(Report("title", environment={}, **parts))
        self.assertEqual(Page(text).faults, [])
        return re.findall(r"<h2>([^<]*)</h2>", text)

    def test_each_part_alone(self):
        x = ad.Variable("x")
        executor = ad.Executor([ad.exp_op(x) * 2.0])
        executor.recorder = profile.Profile()
        executor.run({x: np.ones(3, np.float32)})
        self.assertEqual(self.headings(), [])
        self.assertEqual(self.headings(settings={"a": 1}), ["Run"])
        self.assertEqual(self.headings(graph=executor.eval_node_list), ["Graph"])
        self.assertEqual(self.headings(plan=executor.plan({x: (3,)})), ["Graph", "Memory plan"])
        self.assertEqual(self.headings(profile=executor.recorder), ["Operators"])
        self.assertEqual(self.headings(profile=profile.Profile()), [])
        self.assertEqual(self.headings(counters="text"), ["Device"])

    @needs_matplotlib
    def test_each_part_of_data_alone(self):
        self.assertEqual(self.headings(history=[{"loss": 1.0}]), ["Training"])
        self.assertEqual(self.headings(confusion=np.eye(3, dtype=int)), ["Confusion matrix"])
        self.assertEqual(
            self.headings(mistakes=Mistakes(np.ones((1, 4, 4)), [0], [1], [0.5])),
            ["Worst mistakes"],
        )

    @needs_matplotlib
    def test_models_with_and_without_an_image(self):
        rng = np.random.default_rng(0)
        mlp = nn.Sequential(nn.Linear(16, 8, rng=rng), nn.ReLU(), nn.Linear(8, 3, rng=rng))
        self.assertEqual(self.headings(model=mlp), ["Model", "Learned filters"])
        seen = self.headings(model=mlp, image=np.ones(16, np.float32))
        self.assertEqual(seen, ["Model", "Learned filters", "Activations"])
        plane = nn.Linear(2, 2, rng=rng)
        points = rng.normal(size=(10, 2)).astype(np.float32)
        seen = self.headings(model=plane, points=Points(points, np.arange(10) % 2))
        self.assertEqual(seen, ["Model", "Decision boundary"])

    def test_the_environment_is_this_process(self):
        found = report.environment()
        self.assertEqual(found["python"], sys.version.split()[0])
        self.assertEqual(found["numpy"], np.__version__)


class Writing(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "out.html"

    def test_a_failure_leaves_the_earlier_page(self):
        report.write(self.path, Report("first"))
        before = self.path.read_bytes()
        with mock.patch("os.replace", side_effect=OSError("disk full")):
            self.assertRaises(OSError, report.write, self.path, Report("second"))
        self.assertEqual(self.path.read_bytes(), before)
        self.assertEqual(os.listdir(self.path.parent), ["out.html"])

    def test_matplotlib_is_asked_for_only_where_it_is_needed(self):
        missing = {"matplotlib": None, "matplotlib.figure": None}
        with mock.patch.dict(sys.modules, missing):
            report.write(self.path, Report("plain", graph=[ad.Variable("x")]))
            before = self.path.read_bytes()
            with self.assertRaisesRegex(DlsysError, r"pip install matplotlib"):
                report.write(self.path, Report("curves", history=[{"loss": 1.0}]))
        self.assertEqual(self.path.read_bytes(), before)


class Sampling(unittest.TestCase):
    """Which steps of a run are timed for its page."""

    def timed(self, batches: int, epochs: int = 1, after: int = 0) -> list[int]:
        run = SimpleNamespace(
            step=after, epochs=epochs, data=range(batches), executor=SimpleNamespace(recorder=None)
        )
        sampled, found = Sampled(always=False, some=True), []
        sampled.on_start(run)
        for step in range(after, epochs * batches):
            if run.executor.recorder is not None:
                found.append(step)
            run.step += 1
            sampled.on_step(run)
        return found

    def test_a_few_after_the_first_ones(self):
        self.assertEqual(self.timed(100), list(range(10, 40)))
        self.assertEqual(self.timed(100, epochs=2, after=130), list(range(140, 170)))

    def test_short_runs_are_timed_too(self):
        self.assertEqual(self.timed(1), [0])
        self.assertEqual(self.timed(6), [3, 4, 5])
        self.assertEqual(self.timed(4, epochs=3), list(range(6, 12)))


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@needs_matplotlib
@unittest.skipIf(BROWSER is None, "not here: Chromium")
class Browser(unittest.TestCase):
    """Headless Chromium opens the page from a file."""

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        report.write(cls.folder / "out.html", full_report())

    def open(self, *options: str) -> subprocess.CompletedProcess:
        command = [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={self.folder / 'profile'}", "--virtual-time-budget=5000",
            "--window-size=1280,2000", *options, f"file://{self.folder / 'out.html'}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        return done

    def test_it_renders_without_complaints(self):
        done = self.open("--dump-dom")
        for heading in SECTIONS.values():
            self.assertIn(f"<h2>{heading}</h2>", done.stdout)
        self.assertEqual(done.stdout.count("<svg"), 9)
        complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        self.assertEqual(complaints, [])

    def test_it_is_light_or_dark_as_the_reader_wishes(self):
        pictures = {}
        for name, scheme in (("light", 1), ("dark", 0)):
            out = self.folder / f"{name}.png"
            self.open(f"--screenshot={out}", f"--blink-settings=preferredColorScheme={scheme}")
            pictures[name] = imread(out)[..., :3].mean(axis=2)
        light, dark = pictures["light"], pictures["dark"]
        self.assertGreater(np.median(light), 0.9)
        self.assertLess(np.median(dark), 0.2)
        for picture in (light, dark):  # letters and lines stand out from the paper
            self.assertGreater(np.mean(abs(picture - np.median(picture)) > 0.4), 0.01)

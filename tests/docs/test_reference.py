"""The reference: every public name is in it, documented, and its examples run."""

from __future__ import annotations

import doctest
import inspect
import os
import pydoc
import re
import sys
import tempfile
import threading
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import data, explain, init, ndarray, nn, optim, profile, train, viz
from dlsys import functional as F
from dlsys.runtime.device import unavailable

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
sys.path.insert(0, str(SITE))

import check  # noqa: E402
import surface  # noqa: E402

# What examples are typed after, as docs/reference/index.md says.
SCOPE = dict(
    np=np, dl=dl, ad=ad, data=data, explain=explain, F=F, init=init, ndarray=ndarray, nn=nn,
    optim=optim, profile=profile, train=train, viz=viz,
)  # fmt: skip
LAYERS = (
    "Module Sequential Residual Linear Embedding Flatten Reshape Conv2d ConvTranspose2d Conv1d "
    "MaxPool2d AvgPool2d BatchNorm1d BatchNorm2d LayerNorm GroupNorm RMSNorm Dropout RNN LSTM GRU "
    "MultiheadAttention TransformerBlock MLP LeNet5 ResNet18"
)
NUMBER = re.compile(r"[-+]?\d+\.\d*(?:e[-+]?\d+)?")


class Nearly(doctest.OutputChecker):
    """Floats may differ in their last digits, as processors and versions of numpy do."""

    def check_output(self, want: str, got: str, flags: int) -> bool:
        if super().check_output(want, got, flags):
            return True
        numbers = [[*map(float, NUMBER.findall(text))] for text in (want, got)]
        texts = ["".join(NUMBER.sub("0.", text).split()) for text in (want, got)]
        return texts[0] == texts[1] and np.allclose(*numbers, rtol=1e-4, atol=1e-6)


def entries() -> Iterator[tuple[str, Any]]:
    """What is public, with the public members of classes, by its full name."""
    for module in surface.MODULES:
        for name in surface.names(module):
            value = surface.value(module, name)
            yield f"{module}.{name}", value
            if inspect.isclass(value):
                for member in surface.members(value):
                    yield f"{module}.{name}.{member}", getattr(value, member)


class Described:
    """Which parameters the docstrings describe: by their names, in the docstring itself or that of
    the class, or of a public function that it refers to in backticks; or for all of them in that
    of the module, or in docs/reference/index.md.
    """

    def __init__(self) -> None:
        page = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
        terms = re.findall(r"^- ((?:\*\*\w+\*\*(?:, )?)+):", page, re.M)
        self.everywhere = {name for term in terms for name in re.findall(r"\w+", term)}
        self.texts: dict[str, str] = {}
        said = ("dlsys.init", "dlsys.gpu_op")  # modules whose functions share their parameters
        self.modules = {name: inspect.getdoc(sys.modules[name]) for name in said}
        for name, value in entries():
            last = name.rpartition(".")[2]
            self.texts[last] = f"{self.texts.get(last, '')} {inspect.getdoc(value)}"

    def missing(self, name: str, value: Any, owner: str) -> list[str]:
        if isinstance(value, property):
            return []
        text = f"{inspect.getdoc(value)} {owner} {self.modules.get('.'.join(name.split('.')[:2]))}"
        if inspect.isclass(value):
            text += inspect.getdoc(value.__init__) or ""
        for used in re.findall(r"`[\w.]*?(\w+)`", text):
            text += self.texts.get(used, "")
        attributes = getattr(getattr(value, "signature", None), "attributes", None)
        keys = surface.parameters(value) if attributes is None else attributes
        left = [key for key in keys if key not in self.everywhere and key[0] != "_"]
        return [f"{name}({key})" for key in left if not re.search(rf"\b{key}\b", text)]


def on_numpy(work: Callable[[], None]) -> None:
    """Does work in a thread of its own, where Tensors are on numpy unless they say otherwise, and
    files go to a folder that is removed.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    before = os.getcwd()
    best = mock.patch("dlsys.eager.device.best_context", lambda: (None, ""))
    with best, tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        finally:
            os.chdir(before)
    if raised:
        raise raised[0]


class Pages(unittest.TestCase):
    def test_every_public_name_is_on_one(self) -> None:
        shown: list[tuple[str, str]] = []
        for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
            text = page.read_text(encoding="utf-8")
            for module, files in re.findall(r"```\{public\} (\S+)\n(?::from: (.*)\n)?```", text):
                chosen = surface.files(module, files.split())
                shown += [(module, name) for name in surface.names(module, chosen)]
        wanted = {(module, name) for module in surface.MODULES for name in surface.names(module)}
        self.assertEqual(set(shown), wanted)
        self.assertEqual(len(shown), len(wanted), "a name is on two pages")

    def test_the_start_page_has_the_first_example_of_the_readme(self) -> None:
        """Whose tests run it; what is typed before all examples imports."""
        code = [
            re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)[0]
            for page in ("README.md", "docs/index.md", "docs/reference/index.md")
        ]
        readme, start = (re.sub(r" +#.*", "", text) for text in code[:2])
        self.assertEqual(start, readme)
        scope: dict[str, Any] = {}
        exec(code[2], scope)
        self.assertEqual(SCOPE.keys() - scope.keys(), set())

    def test_every_page_is_in_the_contents(self) -> None:
        start = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
        listed = set(re.findall(r"^[\w/-]+$", start, re.M)) | {"index"}
        docs = ROOT / "docs"
        pages = {str(p.relative_to(docs).with_suffix("")) for p in docs.rglob("*.md")}
        pages -= {page for page in pages if page.startswith("learn/")}
        self.assertEqual(pages - listed, set())


class Docstrings(unittest.TestCase):
    def test_enough_are_found(self) -> None:
        self.assertGreater(len(list(entries())), 800)

    def test_everything_has_one(self) -> None:
        without = [name for name, value in entries() if not inspect.getdoc(value)]
        self.assertEqual(without, [])

    def test_every_parameter_is_described(self) -> None:
        described, everything = Described(), dict(entries())
        missing = []
        for name, value in everything.items():
            owner = everything.get(name.rpartition(".")[0])
            missing += described.missing(name, value, inspect.getdoc(owner) if owner else "")
        self.assertEqual(missing, [])

    def test_help_says_all_of_softmax(self) -> None:
        text = pydoc.plain(pydoc.render_doc(dl.functional.softmax))
        for part in (
            "softmax(x: 'Array', axis: 'int' = -1) -> 'Array'",
            "exp(x) / Σ exp(x) over one axis",
            "x: at least one dimension",
            "the result has x's",
            "axis: ",
            "ShapeError for an axis that x does not have",
            ">>> F.softmax(",
        ):
            self.assertIn(part, text)


class Examples(unittest.TestCase):
    """Every `>>>` of a public docstring runs on numpy and shows what it says."""

    def test_they_run(self) -> None:
        told: list[str] = []
        count = 0

        def work() -> None:
            nonlocal count
            parser = doctest.DocTestParser()
            runner = doctest.DocTestRunner(Nearly(), verbose=False)
            for name, text in self.texts().items():
                if "cpu" in text and unavailable(ndarray.cpu(0)):
                    continue
                test = parser.get_doctest(text, dict(SCOPE), name, name, 0)
                count += len(test.examples)
                runner.run(test, out=told.append)

        on_numpy(work)
        self.assertEqual("".join(told), "")
        self.assertGreater(count, 350)

    def texts(self) -> dict[str, str]:
        found = {name: inspect.getdoc(value) or "" for name, value in entries()}
        for module in surface.MODULES:
            found[module] = inspect.getdoc(sys.modules[module]) or ""
        seen = {text: name for name, text in found.items()}
        return {name: text for text, name in seen.items() if ">>>" in text}

    def test_what_users_reach_for_first_has_one(self) -> None:
        wanted = {f"dlsys.{name}" for name in surface.names("dlsys")}
        for module in ("dlsys.functional", "dlsys.optim", "dlsys.init"):
            wanted |= {f"{module}.{name}" for name in surface.names(module)}
        wanted |= {f"dlsys.nn.{name}" for name in LAYERS.split()}
        wanted |= {f"dlsys.train.{name}" for name in "fit evaluate predict save load_model".split()}
        wanted |= {"dlsys.data.Loader", "dlsys.data.Dataset", "dlsys.autodiff.Executor"}
        members = surface.members(dl.Tensor)
        methods = [n for n in members if not isinstance(getattr(dl.Tensor, n), property)]
        wanted |= {f"dlsys.Tensor.{name}" for name in methods}
        found = dict(entries())
        without = [name for name in sorted(wanted) if ">>>" not in (found[name].__doc__ or "")]
        self.assertEqual(without, [])


class Site(unittest.TestCase):
    """What `make docs` checks of the pages that it made."""

    def test_what_loads_from_elsewhere_is_found(self) -> None:
        for text, wrong in (
            ('<script src="https://x.org/a.js"></script>', True),
            ('<link rel="stylesheet" href="//fonts.org/a.css">', True),
            ('<img src="http://x.org/a.png">', True),
            ("<style>@import 'https://x.org/a.css'</style>", True),
            ('<a href="https://x.org">elsewhere</a>', False),
            ('<script src="_static/a.js"></script>', False),
        ):
            with self.subTest(text):
                self.assertEqual(bool(check.loaded_from_elsewhere(text)), wrong)

    def test_broken_links_are_found(self) -> None:
        pages = {"a.html": '<a href="b.html#there"></a><a href="b.html#gone"></a><img src="c.png">',
                 "b.html": '<p id="there"></p><a href="https://x.org"></a>'}  # fmt: skip
        self.assertEqual(check.broken(pages, set(pages)), ["a.html: b.html#gone", "a.html: c.png"])


if __name__ == "__main__":
    unittest.main()

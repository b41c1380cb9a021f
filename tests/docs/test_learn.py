"""docs/learn: each program runs and prints what its page shows, and what pages name is there.

`PYTHONPATH=python:tests python tests/docs/test_learn.py --write` puts the outputs and the
generated pictures there. Numbers with a unit of time or speed are those of one machine and are not
compared; other fractions are compared up to what another processor's rounding makes of a training.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dlsys.ndarray import cpu, gpu
from support import sample
from support.devices import emulated_gpu, not_emulated, require, slow, together

ROOT = Path(__file__).resolve().parents[2]
LEARN = ROOT / "docs" / "learn"
PROGRAMS, DRAWN = LEARN / "programs", LEARN / "pictures"
PAGES = sorted(LEARN.glob("*.md"))
MOST_LINES = 90
QUOTE = re.compile(r"```text\n\$ python docs/learn/programs/(\w+\.py)\n(.*?)```", re.S)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")
MEASURED = re.compile(rf" *{NUMBER.pattern} (?=ms\b|GB/s|GFLOP/s|images/s)")
PICTURES = {"arena.svg": "4_plan.py", "fused.svg": "4_fusion.py", "explain.png": "6_explain.py"}
COMPILER = next(filter(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "c++")), None)


@functools.cache
def programs() -> list[Path]:
    """The files that a reader runs; without a C++ compiler not the one that needs it, and in a
    sample not those of the chapter of applications, which train for seconds.
    """
    found = sorted(PROGRAMS.glob("[1-5]_*.py"))
    if not COMPILER:
        found.remove(PROGRAMS / "1_kernels.py")
    return [*found, *sample.rest(sorted(PROGRAMS.glob("6_*.py")))]


def run(path: Path, *arguments: str, hidden: str | None = "") -> str:
    """What a program prints; on the CPU, in one thread, unless a GPU shall be seen."""
    environment = {"PYTHONPATH": str(ROOT / "python"), "DLSYS_THREADS": "1", "DLSYS_TUNE": "off"}
    environment |= {"OPENBLAS_NUM_THREADS": "1"}  # each has memory of its own in numpy
    if hidden is not None:
        environment["CUDA_VISIBLE_DEVICES"] = hidden
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode or done.stderr:
        raise AssertionError(f"{path.name}: status {done.returncode}\n{done.stderr}")
    return done.stdout


@functools.cache
def outputs() -> tuple[dict[str, str], dict[str, bytes]]:
    """What each program prints, and the pictures that some draw."""
    drawn = {program: picture for picture, program in PICTURES.items()}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:

        def one(path: Path) -> str:
            name = drawn.get(path.name)
            return run(path, *(["--picture", str(Path(folder) / name)] if name else []))

        printed = dict(zip((p.name for p in programs()), pool.map(one, programs())))
        pictures = [name for name, program in PICTURES.items() if program in printed]
        return printed, {name: (Path(folder) / name).read_bytes() for name in pictures}


def near(shown: str, found: str) -> bool:
    """Whether two numbers as printed are those of one computation on two processors."""
    a, b = (float(text.replace(",", "")) for text in (shown, found))
    if "e" in shown:  # an error: its size
        return abs(np.log10(a / b)) < 1.5
    if "." not in shown:
        return a == b
    decimals = len(shown.split(".")[1])
    return abs(a - b) <= max(0.05 * abs(a), 0.06 if decimals < 3 else 0.002)


def differences(shown: str, found: str) -> list[str]:
    """The lines of a page that are not what the program printed."""
    pairs = [(MEASURED.sub("# ", a), MEASURED.sub("# ", b)) for a, b in
             zip(shown.splitlines(), found.splitlines())]  # fmt: skip
    wrong = [
        f"{a!r}, found {b!r}"
        for a, b in pairs
        if NUMBER.split(a) != NUMBER.split(b)
        or not all(map(near, NUMBER.findall(a), NUMBER.findall(b)))
    ]
    count = len(shown.splitlines()), len(found.splitlines())
    return wrong if count[0] == count[1] else [*wrong, f"{count[0]} lines, found {count[1]}"]


def with_outputs(page: str) -> str:
    """The page with what its programs print, where that is something else."""

    def fill(quote: re.Match[str]) -> str:
        found = outputs()[0][quote[1]]
        same = not differences(quote[2], found)
        return quote[0] if same else f"```text\n$ python docs/learn/programs/{quote[1]}\n{found}```"

    return QUOTE.sub(fill, page)


@together
@slow
@require(cpu(0))
class Programs(unittest.TestCase):
    def test_each_prints_what_its_page_shows(self) -> None:
        quoted = {}
        for page in PAGES:
            for program, shown in QUOTE.findall(page.read_text(encoding="utf-8")):
                quoted[program] = shown
        self.assertEqual(sorted(quoted), sorted(p.name for p in PROGRAMS.glob("*.py")))
        for name, found in outputs()[0].items():
            with self.subTest(name):
                self.assertEqual(differences(quoted[name], found), [])

    def test_pictures_are_those_that_programs_draw(self) -> None:
        for name, drawn in outputs()[1].items():
            with self.subTest(name):
                if name.endswith(".svg"):  # a training's last digits would show in the other
                    self.assertEqual((DRAWN / name).read_bytes(), drawn)
                self.assertTrue(drawn.startswith((b"<svg", b"\x89PNG")))

    def test_what_the_pages_conclude(self) -> None:
        printed = outputs()[0]
        numbers = {name: [float(x.replace(",", "")) for x in re.findall(r"\d[\d,]*\.?\d*", text)]
                   for name, text in printed.items()}  # fmt: skip
        if "6_explain.py" in numbers:
            chance, saliency, cam = numbers["6_explain.py"][2:]
            self.assertLess(max(saliency, cam), chance - 0.05)
            clean, scans, *rest = numbers["6_transfer.py"]
            self.assertLess(scans, clean)
            for _, head, _, scratch in zip(*[iter(rest)] * 4):
                self.assertGreater(head, scratch)
        self.assertNotIn("False", "".join(printed.values()))
        self.assertNotIn("WRONG", "".join(printed.values()))

    @unittest.skipUnless(COMPILER, "not here: a C++ compiler")
    def test_kernels_without_their_barriers_are_wrong(self) -> None:
        source = (PROGRAMS / "kernels.cu").read_text(encoding="utf-8")
        for barrier in ("    __syncthreads();\n    if", "    __syncthreads();  // nobody reads"):
            self.assertEqual(source.count(barrier), 1)
            source = source.replace(barrier, barrier.replace("__syncthreads();", ""))
        with tempfile.TemporaryDirectory() as folder:
            changed = Path(folder) / "changed.cu"
            changed.write_text(source)
            found = run(PROGRAMS / "1_kernels.py", str(changed))
        self.assertEqual(re.findall(r"(\w+) +WRONG", found), ["Sum", "ProductTiled"])

    def test_answers_about_tiles_of_32(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            names = runpy.run_path(str(PROGRAMS / "1_memory.py"))
        column = np.arange(32)
        self.assertEqual(names["sectors"](column * 4096), 32)
        self.assertEqual(names["conflict"](column * 32), 32)
        self.assertEqual(names["conflict"](column * 33), 1)


@emulated_gpu
class Emulated(unittest.TestCase):
    def test_kernels_by_name(self) -> None:
        found = run(PROGRAMS / "1_library.py", "--device", "gpu", hidden=None)
        self.assertEqual(re.findall(r"(\w+) +\w+s +right", found),
                         ["add", "relu", "reduce_sum", "softmax", "matmul"])  # fmt: skip

    def test_a_step_is_captured_as_one_graph(self) -> None:
        found = run(PROGRAMS / "4_fusion.py", "--gpu", hidden=None)
        page = " ".join((LEARN / "4-executor.md").read_text(encoding="utf-8").split())
        (report,) = re.findall(r"`(4 steps captured: [^`]*)`", page)
        self.assertIn(report, found)
        self.assertIn("the same loss: True", found)


@not_emulated
@require(gpu(0))
class OnGpu(unittest.TestCase):
    def test_programs_run_there(self) -> None:
        for path in programs():
            with self.subTest(path.name):
                found = run(path, hidden=None)
                self.assertNotIn("WRONG", found)
                self.assertNotIn("False", found)


class Pages(unittest.TestCase):
    def test_programs_are_short_and_their_numbers_are_chapters(self) -> None:
        for path in PROGRAMS.glob("*.py"):
            lines = path.read_text(encoding="utf-8").splitlines()
            self.assertLessEqual(len(lines), MOST_LINES, path.name)
            self.assertTrue(lines[0].startswith(f'"""Chapter {path.name[0]}: '), path.name)

    def test_links_lead_somewhere_and_names_are_there(self) -> None:
        count = 0
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            for name, link in re.findall(r"\[([^]]*)\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
                target = (LEARN / link).resolve()
                self.assertTrue(target.exists(), f"{page.name}: {link}")
                if name.startswith("`") and target.is_file() and "/" not in name:
                    word, named = name.strip("`"), target.read_text(encoding="utf-8")
                    self.assertTrue(word == target.name or word in named, f"{page.name}: {name}")
                    count += 1
        self.assertGreater(count, 25)

    def test_the_index_has_all_and_every_chapter_has_its_parts(self) -> None:
        index = (LEARN / "README.md").read_text(encoding="utf-8")
        for path in (*PROGRAMS.glob("*.py"), *(p for p in PAGES if p.name[0].isdigit())):
            self.assertIn(f"]({path.relative_to(LEARN).as_posix()})", index)
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            self.assertEqual(text.count("<details>"), text.count("</details>"), page.name)
            if page.name[0].isdigit():
                self.assertGreaterEqual(text.count("<b>Try:</b>"), 4, page.name)
                self.assertIn("[Index](README.md)", text)

    def test_a_wrong_number_would_be_seen(self) -> None:
        self.assertEqual(differences("a 1.25 b 3 ms\n", "a 1.26 b 9 ms\n"), [])
        for wrong in ("a 1.40 b 3 ms\n", "a 1.25 c 3 ms\n", "a 1.25 b 3 ms\nmore\n"):
            self.assertNotEqual(differences("a 1.25 b 3 ms\n", wrong), [])
        self.assertNotEqual(differences("9 steps\n", "8 steps\n"), [])


if __name__ == "__main__" and "--write" in sys.argv:
    for page in PAGES:
        page.write_text(with_outputs(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name, content in outputs()[1].items():
        (DRAWN / name).write_bytes(content)

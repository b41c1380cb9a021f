"""The floors of the package: what may import what, and what the engine may know of operators."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
import unittest
from collections.abc import Mapping, Set
from pathlib import Path

import dlsys

PACKAGE = Path(dlsys.__file__).parent

# A file imports only from floors below its own, from its own folder, and along ON_ONE_FLOOR. A
# folder's name stands for all of its files.
FLOORS = {
    "__init__.py": 0,
    "describe.py": 1,
    "dtypes.py": 1,
    "errors.py": 1,
    "rungs.py": 1,
    "settings.py": 1,
    "files.py": 1,
    "interrupts.py": 1,
    "methods.py": 1,
    "system.py": 1,
    "graph": 2,
    "arguments": 2,
    "runtime": 2,
    "ops": 3,
    "values.py": 2,
    "ndarray.py": 3,
    "passes": 4,
    "functional": 4,
    "fusion": 4,
    "gpu_op": 4,
    "executor": 5,
    "autodiff.py": 6,
    "init.py": 6,
    "dist": 6,
    "eager": 7,
    "gpumat.py": 8,
    "micrograd": 8,
    "nn": 8,
    "optim": 8,
    "data": 8,
    "viz": 8,
    "profile": 8,
    "learn": 9,
    "train": 9,
    "inference": 9,
    "explain": 9,
    "onnx": 10,
    "apps": 11,
    "serve": 12,
    "__main__.py": 12,
}
ON_ONE_FLOOR = {
    ("settings.py", "errors.py"),
    ("settings.py", "rungs.py"),
    ("describe.py", "errors.py"),
    ("files.py", "errors.py"),
    ("files.py", "system.py"),
    ("arguments", "graph"),
    ("fusion", "passes"),
}
ENGINE = ("graph", "passes", "executor")


def files() -> list[Path]:
    """Every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, which nobody changes."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(tree_of(path)))


def entry(path: Path) -> str:
    """The entry of FLOORS that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0]


@functools.cache
def imported(path: Path) -> frozenset[Path]:
    """The files of the package that a file imports, anywhere in it and for types too."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [[*_absolute(path, node), alias.name] for alias in node.names]
        else:
            continue
        found |= {_file(name[1:]) for name in names if name[0] == "dlsys"}
    return frozenset(found - {path})


def imports_of(path: Path, folder: str) -> set[str]:
    """The modules of a folder of the package that a file imports."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            base = _absolute(path, node)
            if base[:2] == ["dlsys", folder]:
                found |= {base[2]} if len(base) > 2 else {alias.name for alias in node.names}
    return found


def _absolute(path: Path, node: ast.ImportFrom) -> list[str]:
    module = node.module.split(".") if node.module else []
    if not node.level:
        return module
    package = ["dlsys", *path.relative_to(PACKAGE).parts[:-1]]
    return package[: len(package) - node.level + 1] + module


def _file(module: list[str]) -> Path:
    """The file of a module below dlsys, or of the one that has a name like this."""
    folder = PACKAGE
    for name in module:
        if (folder / name).is_dir():
            folder /= name
        elif (folder / f"{name}.py").exists():
            return folder / f"{name}.py"
        else:
            break
    return folder / "__init__.py"


def imports(path: Path) -> set[str]:
    """The entries of FLOORS that a file imports."""
    return {entry(other) for other in imported(path)}


def circle(graph: Mapping[Path, Set[Path]]) -> list[Path]:
    """Files that import each other in a circle, each the next; empty where there is none."""
    left = dict(graph)
    while True:
        ends = {path for path, others in left.items() if not others & left.keys()}
        if not ends:
            break
        left = {path: others for path, others in left.items() if path not in ends}
    if not left:
        return []
    way = [min(left)]
    while way[-1] not in way[:-1]:
        way.append(min(left[way[-1]] & left.keys()))
    return way[way.index(way[-1]) :]


class Floors(unittest.TestCase):
    def test_every_file_has_a_floor(self):
        self.assertGreater(len(files()), 20)
        self.assertEqual({entry(path) for path in files()}, set(FLOORS))

    def test_the_readme_has_the_floors(self):
        text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
        rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, re.MULTILINE)
        told = {
            name: int(floor) for floor, names in rows for name in re.findall(r"`([\w.]+)/?`", names)
        }
        self.assertEqual(told, {name: floor for name, floor in FLOORS.items() if floor})

    def test_imports_go_down(self):
        for path in files():
            own = entry(path)
            for other in imports(path) - {own}:
                with self.subTest(path=str(path.relative_to(PACKAGE)), imports=other):
                    if (own, other) not in ON_ONE_FLOOR:
                        self.assertLess(FLOORS[other], FLOORS[own])

    def test_no_files_import_each_other_in_a_circle(self):
        found = circle({path: imported(path) for path in files()})
        self.assertEqual([str(path.relative_to(PACKAGE)) for path in found], [])

    def test_no_module_hides_a_name_that_its_package_imports_late(self):
        """Importing a module makes it an attribute of its package, where `__getattr__` of the
        package is no longer asked for a function of that name.
        """
        lazy = [path for path in PACKAGE.rglob("__init__.py") if "__getattr__" in path.read_text()]
        self.assertGreater(len(lazy), 2)
        for path in lazy:
            module = ".".join(("dlsys", *path.parent.relative_to(PACKAGE).parts))
            package = importlib.import_module(module)
            late = getattr(package, "_HOMES", {}).keys()
            self.assertEqual(late & {file.stem for file in path.parent.iterdir()}, set(), module)

    def test_a_circle_is_found(self):
        a, b, c, d = (Path(name) for name in "abcd")
        self.assertEqual(circle({a: {b}, b: {c}, c: set(), d: {a}}), [])
        self.assertEqual(circle({a: {b}, b: {c}, c: {b}, d: {a}}), [b, c, b])

    def test_this_test_sees_imports(self):
        seen = imports(PACKAGE / "executor" / "executor.py")
        self.assertLessEqual({"graph", "ops", "passes", "runtime", "executor", "errors.py"}, seen)
        self.assertIn("graph", imports(PACKAGE / "autodiff.py"))

    def test_operators_import_no_device(self):
        for path in files():
            if entry(path) in ("graph", "ops", "passes", "fusion"):
                # The layouts of arguments, numpy's threads, and what devices and kernels have.
                allowed = {"interface", "host_threads"} if entry(path) == "ops" else set()
                if entry(path) in ("passes", "fusion"):
                    allowed = {"interface", "target"}
                self.assertLessEqual(imports_of(path, "runtime"), allowed, path)
                self.assertNotIn("ndarray.py", imports(path), path)

    def test_only_targets_know_what_a_device_is(self):
        asks = re.compile(r"\b(DL_CPU|DL_GPU|is_gpu\w*|device_type)\b")
        for path in files():
            if entry(path) in ("runtime", "ndarray.py"):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                where = f"{path.relative_to(PACKAGE)}:{number}: {line}"
                self.assertIsNone(asks.search(line), where)


def private_of_tensors() -> set[str]:
    """The underscored names of the classes of `eager`: what they assign, and their methods."""
    found = set()
    for path in (PACKAGE / "eager").glob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.ClassDef):
                found |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def reads_of(tree: ast.AST, names: set[str]) -> set[str]:
    """Which of these attributes a file reads or writes and does not assign to a `self` of its own:
    such a name is its own.
    """
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {
        node.attr
        for node in attributes
        if isinstance(node.ctx, ast.Store) and getattr(node.value, "id", None) == "self"
    }
    used = {node.attr for node in attributes if getattr(node.value, "id", None) != "self"}
    return used & names - own


class Tensors(unittest.TestCase):
    """What is private to Tensors and their engine stays in `eager`."""

    def test_nobody_else_reads_their_private_attributes(self):
        names = private_of_tensors()
        self.assertLessEqual({"_tape", "_value", "_requires", "_looked"}, names)
        for path in files():
            if entry(path) != "eager":
                found = reads_of(tree_of(path), names)
                self.assertEqual(found, set(), path.relative_to(PACKAGE))

    def test_a_read_is_found(self):
        read = ast.parse("def f(x): return x._value + x.other._tape")
        self.assertEqual(reads_of(read, {"_value", "_tape", "_out"}), {"_value", "_tape"})
        own = ast.parse("class C:\n def f(self, x): self._value = x._value")
        self.assertEqual(reads_of(own, {"_value"}), set())


class Engine(unittest.TestCase):
    """Graph, passes and executor read an operator's traits, never what it is; only fusions name the
    operators of their patterns.
    """

    def trees(self):
        for path in files():
            if entry(path) in ENGINE:
                yield path, tree_of(path)

    def test_no_operator_is_imported(self):
        for path, tree in self.trees():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module and "ops" in node.module:
                    names = {alias.name for alias in node.names}
                    with self.subTest(path=path.name):
                        self.assertLessEqual(
                            names, {"Parameter", "ANYWHERE", "PRECISIONS", "flush", "unflushed"}
                        )

    def test_no_class_of_operators_is_asked_for(self):
        for path, tree in self.trees():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                    asked = ast.unparse(node.args[1])
                    self.assertNotIn("Op", asked, f"{path.name}:{node.lineno}")

    def test_no_operator_is_compared_or_named(self):
        for path, tree in self.trees():
            for node in ast.walk(tree):
                if not isinstance(node, ast.Compare):
                    continue
                sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
                if "output_op" in sides:  # the graph's own, no operator of ops/
                    continue
                for side in sides:
                    named = side.endswith((".op.name", "_op", "op.kernel"))
                    against_none = "None" in sides
                    where = f"{path.name}:{node.lineno}: {' '.join(sides)}"
                    self.assertFalse(named and not against_none, where)
                    self.assertFalse(side.endswith(".op") and not against_none, where)


class Imports(unittest.TestCase):
    """The modules that a fresh interpreter loads."""

    def loaded(self, statement: str, **environment: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-c", f"import sys\n{statement}\nprint(*sys.modules)"],
            env={"PYTHONPATH": str(PACKAGE.parent), **environment},
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return set(done.stdout.split())

    def test_the_package_loads_nothing_else(self):
        modules = self.loaded("import dlsys")
        self.assertFalse({name for name in modules if name.startswith("dlsys.")})
        self.assertNotIn("numpy", modules)

    def test_autodiff_needs_neither_library_nor_data(self):
        modules = self.loaded(
            "from dlsys import autodiff, ndarray, gpu_op",
            DLSYS_LIBRARY="/nowhere/libdlsys.so",
        )
        for name in ("data", "optim", "profile", "train", "nn"):
            self.assertNotIn(f"dlsys.{name}", modules)
        heavy = {"tqdm", "urllib", "ssl", "gzip", "subprocess", "torch", "unittest"}
        heavy |= {"pathlib", "json", "difflib", "pkgutil", "numpy.typing", "hashlib"}
        self.assertEqual(heavy & (modules - self.loaded("import numpy")), set())

    def test_autodiff_opens_no_library(self):
        opened = self.loaded(
            "import ctypes\n"
            "def refuse(*a, **k): raise SystemExit('a library was opened')\n"
            "import numpy\n"
            "ctypes.CDLL.__init__ = refuse\n"
            "from dlsys import autodiff as ad, ndarray, optim\n"
            "x = ad.Variable('x')\n"
            "ad.Executor([x * 2]).run({x: [1.0]})"
        )
        self.assertIn("dlsys.executor.executor", opened)

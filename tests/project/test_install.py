"""Installation: paths are data to make and the shell, what is missing is said, hints name packages.

The compilers here are scripts that write what they are asked for at once, and copy the library that
is tested where they link; they lie in folders with the worst of names, like the checkout.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from dlsys.errors import PACKAGES
from dlsys.runtime import library
from support.devices import slow

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "a b'c $(touch pwned1);`touch pwned2` \"é& #"
BLANKS = "a b'c;é& #"  # nvcc itself would obey the rest
SHIPPED = ("Makefile", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE",
           "mnist_dlsys.py", "src", "python")  # fmt: skip
TOOLS = (
    "make",
    "sh",
    "mkdir",
    "mv",
    "cmp",
    "cp",
    "nproc",
    "touch",
    "grep",
    "tr",
    "sed",
    "sort",
    "ln",
    "dirname",
    "mktemp",
    "rm",
    "uname",
)

# What it is asked to write with -o; a whole library where it links.
COMPILER = """#!/bin/sh
shared=
while [ $# -gt 0 ]; do
  case "$1" in -shared) shared=yes;; -o) shift; output=$1;; esac
  shift
done
if [ -n "$shared" ] && [ -f "$REAL_LIBRARY" ]; then cp "$REAL_LIBRARY" "$output"
else echo compiled > "$output"; fi
"""


def missing_tools() -> str:
    """What of pip and setuptools this Python lacks."""
    try:
        new = int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        new = False
    if not new:
        return "setuptools 77 or later"
    return "" if importlib.util.find_spec("pip") else "pip"


@slow
@unittest.skipIf(missing_tools(), f"not here: {missing_tools()}")
@unittest.skipIf(shutil.which("make") is None, "not here: make")
class Installed(unittest.TestCase):
    """A copy of the checkout in a folder with a hostile name, in a folder of the test's own."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.base = Path(folder.name).resolve()
        self.checkout = self.base / HOSTILE
        self.checkout.mkdir()
        ignored = shutil.ignore_patterns("__pycache__", "libdlsys.so*", "*.egg-info")
        for name in SHIPPED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.checkout / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, self.checkout / name)
        (self.checkout / "data" / "mnist").mkdir(parents=True)
        self.target = self.base / f"to {HOSTILE}"
        self.tools = self.base / f"bin {HOSTILE}"
        self.tools.mkdir()
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None, name
            (self.tools / name).symlink_to(found)
        self.environment = {
            "PATH": str(self.tools),
            "HOME": str(self.base),
            "CUDA": "off",
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "REAL_LIBRARY": library.library_path(),
        }

    def script(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def install(self) -> str:
        """`pip install .` in the checkout; its output."""
        options = ("--no-build-isolation", "--no-deps", "--target", str(self.target))
        return self.run_python("-m", "pip", "install", *options, ".")

    def run_python(self, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.checkout,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def check_nothing_ran(self) -> None:
        ran = [path for path in self.base.rglob("*") if re.fullmatch(r"pwned\d", path.name)]
        self.assertEqual(ran, [])

    def test_paths_are_data(self) -> None:
        self.script(self.tools / "g++", COMPILER)
        self.check_installed_beside_a_neighbor()

    def test_paths_of_cuda_are_data(self) -> None:
        self.checkout = self.checkout.rename(self.base / BLANKS)
        cuda = self.base / f"cuda {HOSTILE}"
        self.script(self.tools / "g++", COMPILER)
        self.script(cuda / "bin" / "nvcc", COMPILER)
        self.script(self.tools / "nvidia-smi", "#!/bin/sh\necho 9.0\n")
        for name in ("include/cuda_runtime.h", "lib64/libcudart_static.a"):
            (cuda / name).parent.mkdir()
            (cuda / name).write_text("")
        self.environment |= {"CUDA": "auto", "CUDA_HOME": str(cuda)}
        self.check_installed_beside_a_neighbor()
        self.assertTrue((self.checkout / "build" / "obj" / "gpu_op.cu.o").is_file())
        shutil.rmtree(self.checkout / "build")
        self.checkout = self.checkout.rename(self.base / HOSTILE)
        shutil.rmtree(self.target)
        self.check_installed_beside_a_neighbor()
        self.assertFalse((self.checkout / "build" / "obj" / "gpu_op.cu.o").exists())

    def check_installed_beside_a_neighbor(self) -> None:
        neighbor = self.base / HOSTILE.split()[0]
        neighbor.write_text("a neighbor's")
        self.assertIn("-py3-none-linux", self.install())
        self.check_nothing_ran()
        self.assertEqual(neighbor.read_text(), "a neighbor's")
        real = Path(library.library_path())
        content = real.read_bytes() if real.is_file() else b"compiled\n"
        self.assertEqual((self.target / "dlsys" / "libdlsys.so").read_bytes(), content)

    def test_a_missing_compiler_is_said_and_the_installed_package_is_used(self) -> None:
        self.assertIn("-0_without_native_library-py3-none-any.whl", self.install())
        path = {"PYTHONPATH": str(self.target)}
        program = self.target / "bin" / "dlsys"
        shown = self.run_python(str(program), "info", **path)
        self.assertIn(f"{self.target / 'dlsys'}\n", shown)
        self.assertRegex(shown, r"best device +numpy\n")
        self.assertIn(
            "when dlsys was installed there was no C++ compiler",
            self.run_python(
                "-c", "from dlsys.runtime import device; print(device.best_context())", **path
            ),
        )
        # The command line of the checkout, and the data in it.
        program = (
            "import runpy; runpy.run_path('mnist_dlsys.py'); import dlsys; print(dlsys.__file__)"
        )
        self.assertEqual(
            self.run_python("-c", program, **path).strip(), str(self.target / "dlsys/__init__.py")
        )
        nowhere = (  # the interpreter of these tests may have a dlsys of its own
            "import os, sys; "
            "sys.path[:] = [p for p in sys.path if not os.path.isdir(p + '/dlsys')]; "
            "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
        )
        self.assertEqual(
            self.run_python("-c", nowhere + program).strip(),
            str(self.checkout / "python/dlsys/__init__.py"),
        )
        where = "from dlsys.data.formats import paths; print(paths.default_folder('mnist'))"
        self.assertEqual(
            self.run_python("-c", where, **path).strip(), str(self.checkout / "data" / "mnist")
        )
        self.check_nothing_ran()


class Packages(unittest.TestCase):
    def test_every_folder_is_installed(self) -> None:
        """setuptools takes the folders that have an __init__.py, and no others."""
        folders = {path.parent for path in (ROOT / "python" / "dlsys").rglob("*.py")}
        self.assertGreater(len(folders), 30)
        for folder in folders:
            self.assertTrue((folder / "__init__.py").is_file(), folder)


class Systems(unittest.TestCase):
    def test_elsewhere_nothing_is_compiled_and_numpy_does_the_work(self) -> None:
        for given, said in (
            (["SYSTEM=Darwin"], "it is for Linux"),
            (["SYSTEM=Linux", "CXX="], "no C++ compiler here (g++,"),
        ):
            done = subprocess.run(
                ["make", "--silent", "optional-lib", "VENV=", *given],
                cwd=ROOT, capture_output=True, text=True,
            )  # fmt: skip
            wanted = f"native library: not built, {said}"
            self.assertEqual((done.returncode, done.stdout[: len(wanted)]), (0, wanted))


class Hints(unittest.TestCase):
    """What hints have people install."""

    def test_no_hint_names_this_project_on_an_index(self) -> None:
        files = [ROOT / "Makefile", ROOT / "README.md", ROOT / "setup.py", ROOT / "mnist_dlsys.py"]
        files += [*(ROOT / "python").rglob("*.py"), *(ROOT / "src").rglob("*.*")]
        for path in files:
            found = re.search(r"pip install[^`\n]*\bdlsys", path.read_text())
            self.assertIsNone(found, f"{path}: {found}")

    def test_they_name_packages_of_the_extras(self) -> None:
        project = (ROOT / "pyproject.toml").read_text()
        for package in PACKAGES.values():
            first, *_ = package.split()
            self.assertRegex(project, rf'"{first}[<>=]')
        self.assertNotIn('name = "dlsys"', project)

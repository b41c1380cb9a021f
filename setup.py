"""Builds the native library into the package; everything else is in pyproject.toml.

DLSYS_BUILD_LIBRARY chooses: unset builds what this machine can build (pure Python where there is
no C++ compiler), `none` builds nothing, else it is the path of a library that is packed as it is.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = Path(__file__).parent.resolve()
BUILT = Path("build", "install", "libdlsys.so")  # where make puts it, a path without blanks
NOTE = "no_library.txt"  # in the package: why there is no library beside it
NO_LIBRARY = "0_without_native_library"


def make(*arguments: str) -> bool:
    """Runs our Makefile, unsteered by the variables of a make that may have called us."""
    steering = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    environment = {k: v for k, v in os.environ.items() if k not in steering}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment).returncode == 0


def build_library(library: Path) -> str | None:
    """Puts the native library at `library`; where that is not possible, the reason."""
    choice = os.environ.get("DLSYS_BUILD_LIBRARY")
    if choice == "none":
        return "DLSYS_BUILD_LIBRARY=none left it out"
    if choice:
        place(Path(choice), library)
        return None
    if not sys.platform.startswith("linux"):
        return "this was no Linux, for which it is"
    if not shutil.which("make"):
        return "there was no make on this machine"
    if not make("--silent", "cxx"):
        return "there was no C++ compiler on this machine (g++, clang++ or c++ on PATH)"
    # make expands what its variables hold once more, and splits paths at blanks.
    interpreter = sys.executable.replace("$", "$$")
    if not make("lib", f"LIB={BUILT}", f"PYTHON={interpreter}", "VENV="):
        return "the compiler failed, `pip install -v .` shows its messages"
    place(ROOT / BUILT, library)
    return None


def place(source: Path, library: Path) -> None:
    """Copies a library to its place, where a process may have the previous one open."""
    library.parent.mkdir(parents=True, exist_ok=True)
    fresh = library.with_name(f"{library.name}.new")
    shutil.copyfile(source, fresh)
    os.replace(fresh, library)


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        folder = ROOT / "python" if self.editable_mode else Path(self.build_lib).resolve()
        library, note = (folder / "dlsys" / name for name in ("libdlsys.so", NOTE))
        for stale in (note,) if self.editable_mode else (note, library):
            stale.unlink(missing_ok=True)
        reason = build_library(library)
        self.distribution.has_library = reason is None
        if reason is not None and not self.editable_mode:
            note.write_text(reason)  # pip shows nothing of an installation that succeeds
        if reason is not None:
            print(
                f"dlsys: installing without the native library, numpy does the work: {reason}.",
                file=sys.stderr,
            )


class PlatformWheel(bdist_wheel):
    """The library knows no Python, so that one wheel serves every version on a platform.

    A wheel without it says so in its name, the only thing of a build that pip shows of its own.
    """

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        if not self.distribution.has_library:
            self.build_number = NO_LIBRARY
        return ("py3", "none", platform if self.distribution.has_library else "any")


class PlatformDistribution(Distribution):
    has_library = False

    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
    distclass=PlatformDistribution,
)

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


def make(*arguments: str) -> bool:
    """Runs our Makefile, unsteered by the variables of a make that may have called us."""
    steering = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    environment = {k: v for k, v in os.environ.items() if k not in steering}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment).returncode == 0


def build_library(library: Path) -> bool:
    """Puts the native library at `library`; False, with a notice, where that is not possible."""
    choice = os.environ.get("DLSYS_BUILD_LIBRARY")
    if choice == "none":
        return False
    library.parent.mkdir(parents=True, exist_ok=True)
    if choice:
        shutil.copyfile(choice, library)
        return True
    if not shutil.which("make"):
        notice("there is no make on this machine")
    elif not make("--silent", "cxx"):
        notice("there is no C++ compiler on this machine")
    elif not make("lib", f"LIB={library}", f"PYTHON={sys.executable}", "VENV="):
        notice("the compiler failed, its messages are above")
    else:
        return True
    return False


def notice(reason: str) -> None:
    print(f"dlsys: installing without the native library, numpy does the work: {reason}.")


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        folder = ROOT / "python" if self.editable_mode else Path(self.build_lib).resolve()
        library = folder / "dlsys" / "libdlsys.so"
        if not self.editable_mode:
            library.unlink(missing_ok=True)
        self.distribution.has_library = build_library(library)


class PlatformWheel(bdist_wheel):
    """The library knows no Python, so that one wheel serves every version on a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return ("py3", "none", platform if self.distribution.has_library else "any")


class PlatformDistribution(Distribution):
    has_library = False

    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
    distclass=PlatformDistribution,
)

"""Trains networks on MNIST: python mnist_dlsys.py -m mlp -c auto -e 10 -l

The same as `dlsys mnist`, from a checkout in which nothing need be installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# What is installed has the library; a checkout where nothing is installed runs what is in it. The
# look at a file tells this package from another one of its name.
if __package__ in (None, ""):
    installed = importlib.util.find_spec("dlsys")
    folders = installed.submodule_search_locations if installed else None
    if not any((Path(folder) / "apps" / "cli.py").is_file() for folder in folders or ()):
        sys.path.insert(0, str(Path(__file__).resolve().parent / "python"))

from dlsys.apps import cli


def main(arguments: list[str] | None = None) -> int:
    """The exit status of `dlsys mnist` with these arguments, or with those of the process."""
    return cli.main(arguments, command="mnist", program="mnist_dlsys.py")


if __name__ == "__main__":
    sys.exit(main())

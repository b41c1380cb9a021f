"""`python -m dlsys.onnx COMMAND …`: the modules of `commands/` are its commands."""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module

from ..errors import DlsysError
from . import commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status: 1 for an error that was explained.

    arguments: what follows the program's name; those of the process by default.
    """
    parser = argparse.ArgumentParser(prog="python -m dlsys.onnx", description=__doc__)
    parts = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in sorted(module.name for module in pkgutil.iter_modules(commands.__path__)):
        module = import_module(f"{commands.__name__}.{name}")
        about = module.__doc__ or ""
        part = parts.add_parser(name, help=about.splitlines()[0], description=about)
        module.add_arguments(part)
        part.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    try:
        return options.run(options) or 0
    except DlsysError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

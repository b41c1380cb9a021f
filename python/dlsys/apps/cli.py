"""The command line: `dlsys COMMAND …`. The modules of `commands/` are its commands.

Exit statuses: 0, 1 for an error that was explained, 2 for options that cannot be, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ..errors import DlsysError
from ..graph.lines import where
from . import commands, streams
from .usage import Parser, UsageError, nearest

_EXIT = """\
A command's own help: %(prog)s COMMAND --help.

exit status: 0; 1 for an error that was explained; 2 for options that cannot be; 130 after Ctrl-C"""


def main(
    arguments: Sequence[str] | None = None, command: str | None = None, program: str = "dlsys"
) -> int:
    """Runs a command line and returns its exit status; SystemExit never leaves it.

    arguments: what follows the program's name; those of the process by default. command: a command
    that they are all for, in place of the first of them. program: its name in help and errors.
    """
    typed = program if arguments is not None else _typed(program)
    given = list(sys.argv[1:] if arguments is None else arguments)
    return streams.guarded(lambda: _run(given, command, program, typed))


def names() -> list[str]:
    """The commands that there are."""
    return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))


def _run(given: list[str], command: str | None, program: str, typed: str) -> int:
    """The exit status, of what is not the fault of standard output."""
    try:
        if command is None:
            command, program = _chosen(given, program), f"{program} {given[0]}"
            given, typed = given[1:], f"{typed} {command}"
        module = _load(command)
        if given and given[0] in getattr(module, "ALIASES", ()):
            module, program = _load(given[0]), f"{program} {given[0]}"
            given = given[1:]
        return _do(module, given, program, typed)
    except KeyboardInterrupt as interrupt:
        print(f"interrupted; done: {str(interrupt) or 'nothing'}", file=sys.stderr)
        return 130
    except DlsysError as error:
        # Errors end with the line that called dlsys, which here is none of the user's.
        streams.say(str(error).removesuffix(f" [{where()}]"))
        return 1
    except MemoryError as error:
        streams.say(f"there is not enough memory: {error}")
        return 1


def _do(module: ModuleType, given: list[str], program: str, typed: str) -> int:
    parser = Parser(
        prog=program,
        typed=typed,
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    options = parser.parse_args(given)
    try:
        return module.run(options, parser) or 0
    except UsageError as error:
        parser.error(str(error))


def _chosen(given: list[str], program: str) -> str:
    """The command of a whole command line. SystemExit after the help or a version that was asked
    for, and with status 2 for what is no command.
    """
    if given and given[0] in names():
        return given[0]
    asked = not given or given[0].startswith("-")
    rows = [(name, _load(name).__doc__ or "") for name in names()] if asked else []
    width = max((len(name) for name, _ in rows), default=0)
    table = "\n".join(f"  {name:<{width}}  {text.splitlines()[0]}" for name, text in rows)
    parser = Parser(
        prog=program,
        usage="%(prog)s COMMAND ...",
        description=f"Deep learning on a symbolic graph.\n\ncommands:\n{table}",
        epilog=_EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_version()
    if not given:
        parser.print_help()
        parser.exit()
    if asked:
        parser.parse_args(given[:1])  # which ends with the help, the version or an error
    meant = nearest(given[0], names())
    parser.error(f"there is no command {given[0]!r}, only {', '.join(names())}{meant}")


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"{commands.__name__}.{name}")


def _typed(program: str) -> str:
    """The words that started this process, up to its own arguments, as hints repeat them."""
    words = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    if not words or Path(sys.argv[0]).name not in (program, "__main__.py"):
        return program
    if "-m" in words or program.endswith(".py"):
        return shlex.join(words)
    found = shutil.which(program)  # an installed program: its interpreter was not typed
    return program if found and Path(found).samefile(words[-1]) else shlex.quote(words[-1])

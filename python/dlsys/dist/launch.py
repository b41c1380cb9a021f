"""launch: starts the ranks of a program on this host by MPI, ends them all where one dies, and
starts them again as often as is allowed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ..errors import CommunicationError, how_to_install

_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # as launchers of MPI call it
_PARENT_DIED = 1  # PR_SET_PDEATHSIG of prctl
_ENDED = 128  # a shell's status of a program that a signal ended, before the signal's number


def launch(program: Sequence[str], ranks: int, restarts: int = 0) -> int:
    """Runs a Python program as several ranks on this host; its exit status, 0 where all went well.

    program: a script and its arguments. restarts: how often all ranks are started anew after a
    failure, from what the program then finds of its checkpoints. CommunicationError without MPI.
    """
    command = [*_mpiexec(), "-n", str(ranks), sys.executable, "-m", "dlsys.dist", "rank", *program]
    for attempt in range(restarts + 1):
        status = _run(command)
        if status in (0, _ENDED + signal.SIGINT, _ENDED + signal.SIGTERM):
            break
        if attempt < restarts:
            print(
                f"dlsys.dist: the run ended with status {status}; start {attempt + 2} of at most "
                f"{restarts + 1}",
                file=sys.stderr,
                flush=True,
            )
    return status


def run_rank(program: Sequence[str]) -> int:
    """Runs the program of one rank and returns its status, after a sentence where it was killed:
    then this process, which MPI watches, ends with that status, and MPI ends the other ranks.
    """
    prctl = ctypes.CDLL(None).prctl

    def die_with_parent() -> None:
        prctl(_PARENT_DIED, signal.SIGKILL)

    status = subprocess.Popen(
        [sys.executable, *program], close_fds=False, preexec_fn=die_with_parent
    ).wait()
    if status >= 0:
        return status
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "?")
    print(
        f"dlsys.dist: rank {rank} was ended by {signal.Signals(-status).name}; all ranks end",
        file=sys.stderr,
        flush=True,
    )
    return _ENDED - status


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `python -m dlsys.dist`; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m dlsys.dist", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("launch", help="start a program as several ranks on this host")
    start.add_argument("-n", type=int, required=True, help="ranks")
    start.add_argument("--restarts", type=int, default=0, help="starts after a failure")
    one = commands.add_parser("rank", help="run one rank of it, which launch does")
    for each in (start, one):
        each.add_argument("program", nargs=argparse.REMAINDER, help="a script and its arguments")
    options = parser.parse_args(arguments)
    if not options.program:
        parser.error("which script? python -m dlsys.dist launch -n 4 script.py")
    if options.command == "rank":
        return run_rank(options.program)
    if options.n < 1 or options.restarts < 0:
        parser.error(f"expected -n >= 1 and --restarts >= 0, got {options.n}, {options.restarts}")
    try:
        return launch(options.program, options.n, options.restarts)
    except CommunicationError as error:
        print(f"dlsys.dist: {error}", file=sys.stderr)
        return 1


def _mpiexec() -> list[str]:
    """The command that starts ranks: of this Python's environment first."""
    here = str(Path(sys.executable).parent)
    found = shutil.which("mpiexec", path=here) or shutil.which("mpiexec")
    if found is None:
        raise CommunicationError(
            f"launch: there is no mpiexec, which starts the ranks: {how_to_install('mpi4py')} mpich"
        )
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    # Open MPI refuses more ranks than cores otherwise.
    return [found, "--oversubscribe"] if "Open MPI" in version else [found]


def _run(command: Sequence[str]) -> int:
    """The status of a command, to which the signals that end this process are passed on."""
    process = subprocess.Popen(command)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    former = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        status = process.wait()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.terminate()
    return status if status >= 0 else _ENDED - status

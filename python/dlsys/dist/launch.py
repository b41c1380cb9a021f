"""launch: starts the ranks of a program on this host, ends them all where one dies, and starts them
again as often as is allowed.

MPI starts them where it is there. Without it each rank gets the variables that torchrun sets, and
NCCL alone connects them, so that every rank needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from ..errors import CommunicationError, how_to_install
from ..runtime.device import gpu, unavailable

_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "RANK")  # as launchers call it
_AS_ROOT = "OMPI_ALLOW_RUN_AS_ROOT"  # by which a user tells Open MPI to start as root
_HOST = "127.0.0.1"  # where ranks without MPI find each other
_PARENT_DIED = 1  # PR_SET_PDEATHSIG of prctl
_LOOK = 1.0  # seconds between two looks at whether a rank has failed
_PATIENCE = 5.0  # seconds for MPI to end the others
_ENDED = 128  # a shell's status of a program that a signal ended, before the signal's number


def launch(program: Sequence[str], ranks: int, restarts: int = 0) -> int:
    """Runs a Python program as several ranks on this host; its exit status, 0 where all went well.

    program: a script and its arguments. restarts: how often all ranks are started anew after a
    failure, from what the program then finds of its checkpoints. CommunicationError without MPI
    where there are no GPUs either.
    """
    mpiexec = _mpiexec(ranks)
    for attempt in range(restarts + 1):
        with tempfile.TemporaryDirectory() as folder:
            ended = Path(folder) / "ended"
            rank = [sys.executable, "-m", "dlsys.dist", "rank", "--ended", str(ended), *program]
            if mpiexec:
                status = _run([*mpiexec, "-n", str(ranks), *rank], ended)
            else:
                status = _run_without_mpi(rank, ranks)
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


def run_rank(program: Sequence[str], ended: Path) -> int:
    """Runs the program of one rank and returns its status, after a sentence where it was killed:
    then this process, which MPI watches, ends with that status, and MPI ends the other ranks. Where
    the rank had not come to know them yet MPI does not: `launch` does so when it finds the file
    `ended`.
    """
    prctl = ctypes.CDLL(None).prctl

    def die_with_parent() -> None:
        prctl(_PARENT_DIED, signal.SIGKILL)

    status = subprocess.Popen(
        [sys.executable, *program], close_fds=False, preexec_fn=die_with_parent
    ).wait()
    if status:
        ended.touch()
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
    one.add_argument("--ended", type=Path, required=True, help="the file that tells of a failure")
    for each in (start, one):
        each.add_argument("program", nargs=argparse.REMAINDER, help="a script and its arguments")
    options = parser.parse_args(arguments)
    if not options.program:
        parser.error("which script? python -m dlsys.dist launch -n 4 script.py")
    if options.command == "rank":
        return run_rank(options.program, options.ended)
    if options.n < 1 or options.restarts < 0:
        parser.error(f"expected -n >= 1 and --restarts >= 0, got {options.n}, {options.restarts}")
    try:
        return launch(options.program, options.n, options.restarts)
    except CommunicationError as error:
        print(f"dlsys.dist: {error}", file=sys.stderr)
        return 1


def _mpiexec(ranks: int) -> list[str]:
    """The command that starts ranks: of this Python's environment first. Empty where MPI is
    not there, but each rank has a GPU.
    """
    here = str(Path(sys.executable).parent)
    found = shutil.which("mpiexec", path=here) or shutil.which("mpiexec")
    version = ""
    if found is not None:
        version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
        if _is_open_mpi(version) and os.geteuid() == 0 and not os.environ.get(_AS_ROOT):
            found = None  # it refuses root, as whom programs in containers run
    if found is None or find_spec("mpi4py") is None:
        reason = unavailable(gpu(ranks - 1))
        if reason is None:
            return []
        raise CommunicationError(
            f"launch: there is no mpiexec, which starts the ranks: {how_to_install('mpi4py')} "
            f"mpich (Open MPI refuses root); without it each rank needs a GPU ({reason})"
        )
    # Open MPI refuses more ranks than cores otherwise.
    return [found, "--oversubscribe"] if _is_open_mpi(version) else [found]


def _is_open_mpi(version: str) -> bool:
    return "Open MPI" in version or "OpenRTE" in version  # before release 5 it tells the latter


def _run(command: Sequence[str], ended: Path) -> int:
    """The status of a command, to which the signals that end this process are passed on. It is
    ended, too, where it goes on after a rank has failed.
    """
    process = subprocess.Popen(command)

    with _passed_on(lambda number, frame: process.send_signal(number)):
        try:
            status = _watched(process, ended)
        finally:
            if process.poll() is None:
                process.terminate()
    return status if status >= 0 else _ENDED - status


def _run_without_mpi(rank: Sequence[str], ranks: int) -> int:
    """The status of the first rank that failed, 0 where none did; the others are ended then."""
    with socket.socket() as free:
        free.bind((_HOST, 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            rank,
            env={
                **os.environ,
                **{"RANK": str(k), "LOCAL_RANK": str(k)},
                **{"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
                **{"MASTER_ADDR": _HOST, "MASTER_PORT": str(port)},
            },
        )
        for k in range(ranks)
    ]

    def end(number: int) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    with _passed_on(lambda number, frame: end(number)):
        try:
            while True:
                statuses = [process.poll() for process in processes]
                failed = next(filter(None, statuses), 0)
                if failed or None not in statuses:
                    return failed if failed >= 0 else _ENDED - failed
                time.sleep(_LOOK / 10)
        finally:
            end(signal.SIGTERM)
            limit = time.monotonic() + _PATIENCE
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(limit - time.monotonic(), 0.0))
            end(signal.SIGKILL)


@contextlib.contextmanager
def _passed_on(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Gives the signals that end this process to a handler in the meantime."""
    former = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)


def _watched(process: subprocess.Popen[bytes], ended: Path) -> int:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK)
        if ended.exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_PATIENCE)  # MPI ends the others by itself, as a rule
            process.terminate()
            process.wait()
            return 1

"""Files that are replaced atomically, and folders to put them into."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .errors import DataError
from .system import HAS_LOCKS, NO_WAIT, PLAIN, at_fork, lock, open_folder, unlock

_ENDING = ".dlsys-partial"  # of the files that `replacing` writes to; nobody else's end so
_DIGITS = 16
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a device",
}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that becomes `path` when the block ends, and vanishes if it raises.

    It is on the disk when it gets its name, so that `path` is complete after a power failure too. A
    symbolic link stays, and what it points to is replaced; a file that is there keeps its mode.
    What cannot be replaced is written to as it is: a device such as /dev/null, a FIFO that somebody
    reads, and standard output under any of its names. DataError for a folder, a socket, a block
    device, a FIFO without a reader and a file that is write-protected; OSErrors name `path`.
    """
    with _naming(path):
        found = _checked(path)
        if found is not None and not _is_replaceable(found):
            with _written_through(path, found) as file:
                yield file
            return
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".{target.name}.{os.urandom(_DIGITS // 2).hex()}{_ENDING}")
        try:
            with _new_file(temporary, found) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_folder(target.parent)


def check_replaceable(path: Path) -> None:
    """Raises DataError where `replacing` would, as far as that can be known beforehand."""
    _checked(path)


def appending(path: Path) -> IO[bytes]:
    """A binary file to write behind what `path` has, or to what is written to as it is (see
    `replacing`, whose DataErrors it raises). OSError where it cannot be opened.
    """
    found = _checked(path)
    if found is not None and not _is_replaceable(found):
        return _written_through(path, found)
    return open(path, "ab")


def opened(path: str | os.PathLike[str]) -> IO[bytes]:
    """A regular file to read. DataError for anything else, without waiting for whoever may write
    into a FIFO; OSError where it cannot be opened.
    """
    handle = os.open(path, os.O_RDONLY | NO_WAIT | PLAIN)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise DataError(f"{os.fspath(path)} is {_kind(mode)}, expected a file")
    return os.fdopen(handle, "rb")


def sweep(path: Path) -> None:
    """Removes what processes that were killed had written of `path` with `replacing`. A file that
    a process is still writing is locked by it and stays.
    """
    target = Path(os.path.realpath(path))
    own = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{{_DIGITS}}}{re.escape(_ENDING)}")
    for found in target.parent.iterdir():
        if own.fullmatch(found.name) and stat.S_ISREG(found.lstat().st_mode):
            with contextlib.suppress(OSError):
                _remove_unlocked(found)


def _remove_unlocked(path: Path) -> None:
    """Removes a file. OSError where a process has locked it, or without locks has it open."""
    if not HAS_LOCKS:
        path.unlink()
        return
    with open(path, "rb") as file:
        lock(file.fileno())
        path.unlink()


def make_folder(path: Path) -> None:
    """Makes a folder unless it is there. DataError where files cannot be put into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path}: no folder can be made there: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise DataError(f"{path}: nothing can be written into this folder; choose another one")


class FolderLock:
    """A folder that nobody else can lock until `release`, or the end of this process; a fork's
    child does not hold it. BlockingIOError where somebody has it. Systems and file systems without
    locks give it to everybody.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle = open_folder(folder)
        self._held = True
        if self._handle is not None:
            try:
                lock(self._handle)
            except BlockingIOError:
                os.close(self._handle)
                raise
            except OSError:
                pass  # without locks the handle still shows whether the folder is the same
        _locks.add(self)

    @property
    def holds(self) -> bool:
        """True if the folder of that name is still the one that was locked, and by this process."""
        try:
            there = os.stat(self._folder)
        except OSError:
            return False
        same = self._handle is None or os.path.samestat(os.fstat(self._handle), there)
        return self._held and same

    def release(self) -> None:
        """Lets go of the folder."""
        if self._handle is not None:
            with contextlib.suppress(OSError):  # the file system has none
                unlock(self._handle)
        self.forget()

    def forget(self) -> None:
        """Closes this process's handle; another one that has a copy of it still holds the lock."""
        _locks.discard(self)
        self._held = False
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


_locks: set[FolderLock] = set()


def _forget_in_child() -> None:
    """The lock is the parent's, and with a copy of its handle the child would keep it when the
    parent has ended.
    """
    for held in list(_locks):
        held.forget()


at_fork(after_in_child=_forget_in_child)


def _checked(path: Path) -> os.stat_result | None:
    """The status of a path, links followed; None for nothing. DataError where nothing can be
    written.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    if _standard_stream(found) is not None:
        return found
    mode = found.st_mode
    if stat.S_ISDIR(mode) or stat.S_ISSOCK(mode) or stat.S_ISBLK(mode):
        raise DataError(f"{path} is {_kind(mode)}: name a file to write to")
    if not os.access(path, os.W_OK):
        raise DataError(f"{path} is write-protected: name another file, or change its mode")
    return found


def _is_replaceable(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and _standard_stream(found) is None


def _standard_stream(found: os.stat_result) -> int | None:
    """The number of standard output or error if that is what was found, else None."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(number), found):
                return number
    return None


def _written_through(path: Path, found: os.stat_result) -> IO[bytes]:
    """The existing file, opened for writing; no FIFO is waited for."""
    number = _standard_stream(found)
    if number is not None:  # opened anew it would be written from its beginning
        if sys.stdout is not None:
            sys.stdout.flush()
        return os.fdopen(os.dup(number), "wb")
    try:
        handle = os.open(path, os.O_WRONLY | NO_WAIT | PLAIN)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise DataError(
            f"{path} is {_kind(found.st_mode)} that nobody reads: name a file to write to"
        ) from None
    if NO_WAIT:
        os.set_blocking(handle, True)
    return os.fdopen(handle, "wb")


def _new_file(temporary: Path, before: os.stat_result | None) -> IO[bytes]:
    """A new file with the mode and, where that is allowed, the owner of the one before; locked, so
    that `sweep` leaves it alone.
    """
    mode = 0o666 if before is None else stat.S_IMODE(before.st_mode) & 0o600
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN
    file = os.fdopen(os.open(temporary, flags, mode), "wb")
    with contextlib.suppress(OSError):  # the file system has no locks
        lock(file.fileno())
    if before is not None and hasattr(os, "fchown"):  # not on Windows
        with contextlib.suppress(OSError):
            os.fchown(file.fileno(), before.st_uid, before.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
    return file


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """OSErrors name `path`, not a temporary file or nothing."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and str(error.filename or _ENDING).endswith(_ENDING):
            error.filename, error.filename2 = str(path), None
        raise


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "no file")


def _sync_folder(folder: Path) -> None:
    """Puts the names in a folder on the disk too, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

"""Differences of operating systems: Windows has no locks of open files as used here, opens no
folders, and never forks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None
# Flags of os.open: bytes as they are, not for programs that are started, and without waiting.
PLAIN = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def lock(handle: int, wait: bool = False) -> None:
    """Locks an open file or folder for this process until the handle is closed.

    BlockingIOError where another one has the lock, unless this one waits for it; OSError where the
    file system has no locks. Where the system has none, nothing happens.
    """
    if HAS_LOCKS:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def unlock(handle: int) -> None:
    """Lets go of a lock, also for forks that have a copy of the handle."""
    if HAS_LOCKS:
        fcntl.flock(handle, fcntl.LOCK_UN)


def open_folder(folder: Path) -> int | None:
    """A handle of a folder, None where the system gives none. OSError for what is no folder."""
    if not hasattr(os, "O_DIRECTORY"):
        return None
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | PLAIN)


def at_fork(**hooks: Callable[[], Any]) -> None:
    """Has functions called at each fork, by the names that `os.register_at_fork` has for when."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**hooks)

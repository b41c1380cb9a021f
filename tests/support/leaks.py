"""Memory that the native library allocated and nobody can reach any more.

AddressSanitizer counts it where the process runs under it (`make asan`); elsewhere nothing is said.
The interpreter and numpy leak too, by design, so a leak counts if the library is on its stack.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
import tempfile
from collections.abc import Iterator

FRAME = re.compile(
    r"libdlsys\.so| src/\S+\.(?:cc|cu|h|cuh):\d"
)  # with its lines, if they are known
BLOCK = re.compile(r"^(?:Direct|Indirect) leak of .*?(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)


def of_library(text: str) -> list[str]:
    """Those blocks of a LeakSanitizer's report that have the library on their stacks."""
    return [block.strip() for block in BLOCK.findall(text) if FRAME.search(block)]


@contextlib.contextmanager
def errors_in(path: str) -> Iterator[None]:
    """What native code prints to stderr goes to a file."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(path, "w") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def report() -> int:
    """Prints the leaks of the library to stderr; returns 1 if there is one, else 0."""
    count = getattr(ctypes.CDLL(None), "__lsan_do_recoverable_leak_check", None)
    if count is None:
        return 0
    gc.collect()
    with tempfile.NamedTemporaryFile("r", errors="replace") as file:
        with errors_in(file.name):
            count()
        found = of_library(file.read())
    for block in found:
        print(f"leaked by the library: {block}\n", file=sys.stderr, flush=True)
    return 1 if found else 0

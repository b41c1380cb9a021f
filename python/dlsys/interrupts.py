"""Ctrl-C between two steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """Inside `with Interrupts() as keys`, Ctrl-C sets `keys.pressed`; a second one raises
    KeyboardInterrupt at once. In threads other than the main one, and where somebody else handles
    Ctrl-C already, nothing is changed.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._ours = False

    def __enter__(self) -> Interrupts:
        self.pressed = False
        in_main = threading.current_thread() is threading.main_thread()
        self._ours = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *error: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

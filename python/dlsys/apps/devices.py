"""The device that a command works on."""

from __future__ import annotations

import argparse

from ..errors import DeviceError
from ..runtime import device
from .usage import shortened


def add_device(group: argparse._ArgumentGroup) -> None:
    """Adds the option, under the course's name and the usual one."""
    group.add_argument(
        "-c",
        "--device",
        "--executor-context",
        dest="device",
        metavar="DEVICE",
        type=_name,
        default="auto",
        help="numpy, cpu, gpu, gpu:1, or auto, the default: the best one that is here",
    )


def choose_device(name: str) -> device.Context | None:
    """The device asked for, None for numpy, or the best one that is there, with the reasons against
    better ones.
    """
    if name != "auto":
        return device.context_of(name)
    ctx, reasons = device.best_context()
    for reason in reasons:
        print(f"not used: {reason}")
    return ctx


def _name(text: str) -> str:
    try:
        if text != "auto":
            choose_device(text)
    except (DeviceError, ValueError):
        got = shortened(text) or "nothing"
        expected = f"expected auto, numpy, cpu, gpu or gpu:1, got {got}"
        raise argparse.ArgumentTypeError(expected) from None
    return text

"""The device that a command works on."""

from __future__ import annotations

import argparse
import re

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
    if name == "numpy":
        return None
    if name != "auto":
        kind, _, number = name.partition(":")
        return {"cpu": device.cpu, "gpu": device.gpu}[kind](int(number or 0))
    ctx, reasons = device.best_context()
    for reason in reasons:
        print(f"not used: {reason}")
    return ctx


def _name(text: str) -> str:
    if not re.fullmatch(r"auto|numpy|cpu|gpu(:\d{1,4})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"expected auto, numpy, cpu, gpu or gpu:1, got {shortened(text) or 'nothing'}"
        )
    return text

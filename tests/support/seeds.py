"""The seed of the tests that draw their cases: DLSYS_TEST_SEED, read here and nowhere else.

It is FIXED unless the variable says otherwise, so that a failure is of the change at hand, not of
new luck; `DLSYS_TEST_SEED=drawn`, as `make fuzz` sets it, draws one. Every process that starts from
this one has the same seed. A module that draws has `from seeds import SEED`, and names the seed
where a case fails; `tests/run.py --drawn` runs such modules alone.
"""

from __future__ import annotations

import os

VARIABLE = "DLSYS_TEST_SEED"
FIXED = 20


def read(text: str) -> int:
    """The seed that a value of the variable stands for; ValueError for what is none."""
    if text == "drawn":
        return int.from_bytes(os.urandom(4), "little")
    if text and not (text.isascii() and text.isdecimal() and int(text) < 2**32):
        raise ValueError(f"{VARIABLE}={text}: it takes a number below 2**32, or `drawn`")
    return int(text or FIXED)


SEED = read(os.environ.get(VARIABLE, ""))
os.environ[VARIABLE] = str(SEED)

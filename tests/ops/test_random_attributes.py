"""The rows of samples.py with shapes and attributes drawn at random, from one seed (seeds.py).

Every failure names the seed; DLSYS_TEST_SEED=<seed> draws the same cases again.
"""

from __future__ import annotations

import sys
import unittest
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ops.test_operators as test_operators
from dlsys import ndarray
from ops.test_operators import NativeOperators, Operators
from support.devices import require
from support.seeds import SEED
from support.table.draws import DRAWS, SCALES, Draw
from support.table.rows import Sample
from support.table.samples import SAMPLES

COUNT = 8  # cases of a row
GRADIENT_ULPS = 64  # at least: some of the gradients drawn are sums of hundreds, which cancel


def setUpModule() -> None:
    print(f"{__name__}: DLSYS_TEST_SEED={SEED}", file=sys.stderr)


def with_draws(cls: type) -> type:
    """Adds tests of the values and gradients of every row of DRAWS."""
    for row in SAMPLES:
        if row.name in DRAWS:
            ulps = max(row.gradient_ulps, GRADIENT_ULPS)
            sample = replace(row, scale=SCALES.get(row.name, row.scale), gradient_ulps=ulps)
            setattr(cls, f"test_{sample.name}_values", drawn(cls.each_values, sample))
            if sample.differentiable != ():
                setattr(cls, f"test_{sample.name}_gradients", drawn(cls.each_gradients, sample))
    return cls


def drawn(check: Callable, sample: Sample) -> Callable:
    def test(self: Any) -> None:
        draw = Draw(SEED, zlib.crc32(sample.name.encode()))
        for _ in range(COUNT):
            case = DRAWS[sample.name](draw)
            with self.subTest(shapes=case.shapes, **case.attrs):
                try:
                    check(self, sample, case)
                except Exception as error:
                    what = f"{sample.name} of {case.shapes} with {case.attrs}"
                    raise AssertionError(f"DLSYS_TEST_SEED={SEED}: {what}: {error}") from error

    test.__doc__ = check.__doc__
    test.row = sample  # type: ignore[attr-defined]
    return test


@with_draws
class NumpyAttributes(Operators, unittest.TestCase):
    dtypes = test_operators.NumpyOperators.dtypes
    each_gradients = test_operators.NumpyOperators.each_gradients


@require(ndarray.cpu(0))
@with_draws
class CpuAttributes(NativeOperators, unittest.TestCase):
    ctx = ndarray.cpu(0)


@require(ndarray.gpu(0))
@with_draws
class GpuAttributes(NativeOperators, unittest.TestCase):
    ctx = ndarray.gpu(0)


class Draws(unittest.TestCase):
    def test_every_draw_has_a_row(self) -> None:
        self.assertEqual(set(DRAWS) - {sample.name for sample in SAMPLES}, set())

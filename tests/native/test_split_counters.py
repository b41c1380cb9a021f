"""The splits of a product along K count each other's parts by counters that every launch leaves at
zero: on streams, in captured graphs and in their branches, and where a launch fails.
"""

from __future__ import annotations

import ctypes
import unittest
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys.dtypes import bfloat16, rounded
from dlsys.errors import DeviceError, KernelError
from dlsys.ndarray import NDArray, array, empty, launch
from dlsys.runtime.device import SideStream, gpu, memory_stats, synchronize
from dlsys.runtime.library import load
from dlsys.settings import settings
from support.devices import EMULATED, require

K = 3000 if EMULATED else 30000
# Of one tile, of several, and of an odd number of columns.
SHAPES = [(60, 40, K), (140, 72, K), (70, 13, K)]


@require(gpu(0))
class SplitCounters(unittest.TestCase):
    ctx = gpu(0)

    def setUp(self) -> None:
        names = load().algorithms("cuda", "matmul")
        if "hopper" not in names:
            raise unittest.SkipTest("no rung `hopper` here")
        self.number = names.index("hopper") + 1
        try:
            load().algorithm_source("cuda", "matmul", self.number)
        except DeviceError as error:
            raise unittest.SkipTest(str(error)) from None
        rng = np.random.default_rng(3)
        self.operands = [
            [rounded(rng.standard_normal((k, x), np.float32), bfloat16) for x in (m, n)]
            for m, n, k in SHAPES
        ]
        self.given = [[array(x, self.ctx, bfloat16) for x in pair] for pair in self.operands]

    def launched(self, case: int) -> NDArray:
        m, n, _ = SHAPES[case]
        (a, b), c = self.given[case], empty((m, n), self.ctx, bfloat16)
        c[:] = np.nan
        launch("matmul", self.ctx, a, 1, b, 0, self.number, 0, c)
        return c

    def check(self, case: int, c: NDArray | np.ndarray) -> None:
        a, b = (x.astype(np.float64) for x in self.operands[case])
        got = (c if isinstance(c, np.ndarray) else c.asnumpy()).astype(np.float64)
        limit = 2.0**-8 * np.abs(a.T @ b) + (len(a) + 1) * 2.0**-23 * (np.abs(a).T @ np.abs(b))
        self.assertTrue((np.abs(got - a.T @ b) <= limit).all())

    def test_one_after_the_other(self) -> None:
        for case in (0, 1, 0, 2, 1):
            self.check(case, self.launched(case))

    def test_on_several_streams(self) -> None:
        streams = [SideStream(self.ctx) for _ in range(2)]
        made = []
        for case in (0, 2, 0):
            for stream in streams:
                with stream:
                    made.append((case, self.launched(case)))
        for case, c in made:
            self.check(case, c)

    def test_behind_a_launch_that_fails(self) -> None:
        wrong = empty((SHAPES[0][0] + 1, SHAPES[0][1]), self.ctx, bfloat16)
        self.check(0, self.launched(0))
        with self.assertRaises(KernelError):
            launch("matmul", self.ctx, *self.given[0][:1], 1, self.given[0][1], 0, 0, 0, wrong)
        self.check(0, self.launched(0))

    def test_memory_statistics_count_those_of_a_stream(self) -> None:
        library, stream = load(), ctypes.c_void_p()
        c = empty(SHAPES[0][:2], self.ctx, bfloat16)
        arguments = self.given[0][0], 1, self.given[0][1], 0, self.number, 0, c
        library.check(library.cdll.DLStreamCreate(self.ctx.struct, ctypes.byref(stream)))
        synchronize(self.ctx)  # the operands are there
        before = memory_stats(self.ctx).in_use_nbytes
        library.kernel(*library.key("cuda", "matmul", arguments))(*arguments, stream.value)
        library.check(library.cdll.DLStreamSynchronize(self.ctx.struct, stream))
        self.check(0, c)
        self.assertEqual(memory_stats(self.ctx).in_use_nbytes - before, 4 * 4096)
        library.check(library.cdll.DLStreamFree(self.ctx.struct, stream))
        self.assertEqual(memory_stats(self.ctx).in_use_nbytes, before)

    def test_in_graphs_and_their_branches(self) -> None:
        """Two executors replay in turns, beside launches of their own, on streams of their own."""
        # With an arena of separate blocks nothing is captured.
        with mock.patch.multiple(settings, capture=True, streams=4, separate_arena=False):
            executors, feeds = [], []
            for _ in range(2):
                nodes = [[ad.Variable(f"{x}{c}", dtype=bfloat16) for x in "ab"] for c in range(2)]
                products = [ad.matmul_op(*pair, trans_A=True, algo="hopper") for pair in nodes]
                executors.append(ad.Executor(products, self.ctx))
                pairs = zip(nodes, self.given)
                feeds.append({x: y for pair, two in pairs for x, y in zip(pair, two)})
            streams = [SideStream(self.ctx) for _ in executors]
            made: list[tuple[int, Any]] = []
            for _ in range(2):
                for executor, feed, stream in zip(executors, feeds, streams):
                    with stream:
                        made += enumerate(executor.run(feed))
                made.append((1, self.launched(1)))
            synchronize(self.ctx)
            for executor in executors:
                kinds = [segment.kind for segment in executor.report().plans[0].segments]
                self.assertEqual(kinds, ["captured"])
            for case, c in made:
                self.check(case, c)

"""Executor.check and DLSYS_DEBUG=4 find the first step that differs between devices."""

from __future__ import annotations

import contextlib
import io
import unittest
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import optim
from dlsys.errors import KernelError
from dlsys.ops import elementwise
from dlsys.settings import settings
from support.devices import native_contexts


class Check(unittest.TestCase):
    def setUp(self):
        rng = np.random.default_rng(5)
        self.x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
        self.w = [
            ad.Parameter(rng.normal(0, 0.3, shape).astype(np.float32), f"w{k}")
            for k, shape in enumerate([(20, 15), (15, 4)])
        ]
        hidden = ad.relu_op(ad.matmul_op(self.x, self.w[0]))
        loss = ad.softmax_cross_entropy(ad.matmul_op(hidden, self.w[1]), y)
        self.nodes = [loss, optim.SGD(0.1, momentum=0.5).minimize(loss, self.w)]
        rows = rng.normal(size=(33, 20)).astype(np.float32)
        self.feeds = {self.x: rows, y: rng.integers(0, 4, 33)}

    def test_devices_that_agree_pass_and_the_state_is_kept(self):
        contexts = [None, *native_contexts()]
        for ctx in contexts:
            for w in self.w:
                w.to(ctx)
            for reference in contexts:
                with self.subTest(ctx=ctx, reference=reference):
                    optimizer_free = ad.Executor(self.nodes[:1], ctx=ctx)
                    optimizer_free.check(self.feeds, reference)

    def test_updates_are_checked_and_undone(self):
        executor = ad.Executor(self.nodes)
        before = [w.asnumpy() for w in self.w]
        executor.check(self.feeds)
        for w, value in zip(self.w, before):
            np.testing.assert_array_equal(w.asnumpy(), value)

    def test_the_first_wrong_step_is_named(self):
        # A relu that lets negative numbers through in float32 alone stands for a broken kernel.
        right = elementwise.relu_op._numpy

        def wrong(x, y):
            right(x, y) if x.dtype == np.float64 else np.copyto(y, x)

        for run in (self.check, self.debug):
            with self.subTest(run=run), mock.patch.object(elementwise.relu_op, "_numpy", wrong):
                with self.assertRaisesRegex(
                    KernelError,
                    r"relu\.\d+ \(relu\) differs from numpy: largest error \S+ at \(\d+, \d+\), "
                    r"got -\S+, expected 0, tolerance .*\(33, 15\).* \[test_check.py:\d+\]",
                ):
                    run()

    def check(self):
        ad.Executor(self.nodes).check(self.feeds)

    def debug(self):
        told = contextlib.redirect_stdout(io.StringIO())  # the plan and the graph
        with mock.patch.object(settings, "debug", 4), told:
            ad.Executor(self.nodes).run(self.feeds)

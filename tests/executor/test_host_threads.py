"""Threads of operators in numpy: order, errors, and the threads of BLAS afterwards."""

from __future__ import annotations

import os
import threading
import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys.runtime.host_threads import blas, share, thread_count
from fusion.conv.test_conv_pool import Layer


@unittest.skipIf(blas() is None, "numpy's BLAS is no OpenBLAS here")
class Threads(unittest.TestCase):
    def setUp(self) -> None:
        found = blas()
        assert found is not None
        self.blas = found
        self.addCleanup(found.set_threads, found.threads())
        found.set_threads(2)

    def test_results_are_in_the_order_of_items(self) -> None:
        self.assertEqual(thread_count(), 2)
        for items in range(8):
            made = share(lambda item, state: (item, state), range(items), "abc")
            self.assertEqual([item for item, _ in made], list(range(items)))

    def test_a_state_belongs_to_one_thread(self) -> None:
        made = share(lambda _, state: (state, threading.get_ident()), range(20), "ab")
        self.assertEqual({state for state, _ in made}, {"a", "b"})
        self.assertEqual(len(set(made)), 2)

    def test_blas_has_one_thread_meanwhile(self) -> None:
        self.assertEqual(share(lambda *_: self.blas.threads(), range(4), "ab"), [1] * 4)
        self.assertEqual(self.blas.threads(), 2)

    def test_errors_of_every_thread_arrive(self) -> None:
        for bad in range(4):

            def work(item: int, _: str, bad: int = bad) -> None:
                if item == bad:
                    raise ValueError(f"item {item}")

            with self.assertRaisesRegex(ValueError, f"item {bad}"):
                share(work, range(4), "ab")
            self.assertEqual(self.blas.threads(), 2)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork on this system")
    def test_a_child_has_threads_again(self) -> None:
        share(lambda *_: None, range(4), "ab")
        child = os.fork()
        if child == 0:
            right = share(lambda item, _: item, range(4), "ab") == [0, 1, 2, 3]
            os._exit(0 if right else 1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)

    def test_any_number_gives_the_same_bits(self) -> None:
        layer = Layer(channels=2, filters=3, size=3, padding=1)
        feeds = layer.feeds((150, 2, 13, 12))
        made = []
        for count in (1, 2, 3):
            self.blas.set_threads(count)
            executor = ad.Executor(layer.fetches)
            made.append(executor.run(feeds, convert_to_numpy_ret_vals=True))
            self.assertEqual(self.blas.threads(), count)
        for other in made[1:]:
            for a, b in zip(made[0], other):
                np.testing.assert_array_equal(a, b)


if __name__ == "__main__":
    unittest.main()

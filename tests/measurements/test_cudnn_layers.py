"""benchmarks/operators/cudnn_layers.py: what it counts and computes, and the table made of it."""

from __future__ import annotations

import json
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

from dlsys import autodiff as ad

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from operators.cudnn_layers import WORKS, Work, inputs, nodes
from tables import cudnn_layers
from tables.gpu import Results


class Benchmark(unittest.TestCase):
    def test_every_work_computes_forward_and_its_gradients(self) -> None:
        for work in WORKS:
            with self.subTest(work=work.name):
                small = work._replace(shape=(2, 3, *work.shape[2:]))
                if work.shape[2] > 30:
                    small = small._replace(shape=(2, 3, 14, 14))
                given = inputs(small, 2, np.dtype(np.float32))
                rng = np.random.default_rng(0)
                for fetches in nodes(small, given, "auto").values():
                    executor = ad.Executor(fetches)
                    used = set(executor.topo_order)
                    feeds = {
                        given[k]: rng.standard_normal(given[k].shape).astype(np.float32)
                        for k in ("x", "dy")
                        if given[k] in used
                    }
                    self.assertEqual(len(executor.run(feeds)), len(fetches))

    def test_bytes_that_move_once(self) -> None:
        relu = Work("relu", (2, 3, 4, 4))
        self.assertEqual(relu.nbytes("forward", 4), 4 * 2 * 96)
        self.assertEqual(relu.nbytes("gradient", 4), 4 * 3 * 96)
        pool = Work("max pool", (2, 3, 4, 4), 2, 2)
        self.assertEqual(pool.nbytes("gradient", 2), 2 * (96 + 24))

    def test_the_table_has_both_sides(self) -> None:
        side = {"us": 2.0, "of_bandwidth": 0.5, "error": 1e-7}
        row = dict(work="relu of x", dtype="float32", direction="forward", nbytes=8)
        record = {
            "cudnn": "cuDNN 9.1.0", "works": [{**row, "own": side, "cudnn": {**side, "us": 5.0}}],
            "machine": {"gpu": "a GPU", "python": "3"}, "date": "then", "commit": "c",
            "command": "it",
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "cudnn_layers.json").write_text(json.dumps(record))
            told = cudnn_layers.table(Results(Path(folder)))
        self.assertIn("| layer | forward, own | forward, cuDNN | gradient, own |", told)
        self.assertIn(
            "| relu of x, float32 | 2.0 (50%) | 5.0 (50%) | - | - | 1e-07 | 1e-07 |", told
        )
        self.assertIn("cuDNN 9.1.0. a GPU", told)


if __name__ == "__main__":
    unittest.main()

"""Loaders of any data: loops over them, tokens, several fields, names, sequences, parts."""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np

from dlsys.data import Loader, Samples, SampleSequence, balanced_weights, split
from dlsys.errors import DataError


class Squares:
    """A set as PyTorch has them: a length, and samples one by one."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, k: int) -> Any:
        return np.full(3, k, np.float64), k * k


class TestLoops(unittest.TestCase):
    def test_each_loop_is_the_next_epoch(self) -> None:
        loader = Loader((np.arange(20.0).reshape(10, 2), np.arange(10)), 4, shuffle=True)
        first = [y for x, y in loader]
        second = np.concatenate([y for _, y in loader])
        self.assertEqual([len(y) for y in first], [4, 4, 2])
        wanted = [[b.labels for b in loader.batches(epoch)] for epoch in (0, 1)]
        np.testing.assert_array_equal(np.concatenate(first), np.concatenate(wanted[0]))
        np.testing.assert_array_equal(second, np.concatenate(wanted[1]))
        self.assertNotEqual(np.concatenate(first).tolist(), second.tolist())

    def test_tokens_stay_integers(self) -> None:
        tokens = np.arange(12, dtype=np.int32).reshape(4, 3)
        loader = Loader((tokens, tokens + 1), 2)
        x, y = next(iter(loader))
        self.assertEqual((x.dtype, y.dtype), (np.int32, np.int64))
        np.testing.assert_array_equal(x, tokens[:2])
        np.testing.assert_array_equal(y, tokens[:2] + 1)
        self.assertEqual([n.attrs["dtype"] for n in loader.inputs()], [np.int32, np.int64])
        with self.assertRaisesRegex(DataError, "normalize and augment are for images"):
            Loader((tokens, tokens), 2, normalize=(0.5, 0.5))

    def test_fields_by_position_and_by_name(self) -> None:
        a, b, y = np.arange(5.0), np.arange(10).reshape(5, 2), np.arange(5)
        for workers in (0, 2):
            batches = list(Loader((a, b, y), 2, workers=workers))
            self.assertEqual([tuple(p.shape for p in t) for t in batches][-1], ((1,), (1, 2), (1,)))
            self.assertEqual(batches[0][0].dtype, np.float32)
            named = list(Loader({"a": a, "b": b, "y": y}, 2, workers=workers, targets=2))
            self.assertEqual(list(named[0]), ["a", "b", "y"])
            np.testing.assert_array_equal(named[1]["b"], b[2:4])
        (alone,) = next(iter(Loader(a, 5)))
        np.testing.assert_array_equal(alone, a)

    def test_sequences_of_samples(self) -> None:
        x, y = next(iter(Loader(Squares(), 3)))
        np.testing.assert_array_equal(x, np.repeat([[0.0], [1.0], [2.0]], 3, axis=1))
        np.testing.assert_array_equal(y, [0, 1, 4])
        self.assertEqual((x.dtype, y.dtype), (np.float32, np.int64))
        rows = next(iter(Loader([{"x": [1, 2], "y": 0}, {"x": [3, 4], "y": 1}], 2)))
        np.testing.assert_array_equal(rows["x"], [[1, 2], [3, 4]])
        with self.assertRaisesRegex(DataError, r"sample 1 has the shapes \[\(1,\)\]"):
            list(Loader([np.zeros(2).tolist(), [1.0]], 2))

    def test_weights(self) -> None:
        labels = np.repeat([0, 1], [900, 100])
        loader = Loader((np.arange(1000.0), labels), 1000, weights=balanced_weights(labels))
        (_, first), (_, second) = next(iter(loader)), next(iter(loader))
        self.assertAlmostEqual(first.mean(), 0.5, delta=0.06)  # 4 deviations of 1,000 draws
        self.assertNotEqual(first.tolist(), second.tolist())
        (_, again) = next(loader.batches(0))
        np.testing.assert_array_equal(again, first)
        only = Loader((np.arange(4.0), np.arange(4)), 4, weights=[0, 0, 3, 0])
        np.testing.assert_array_equal(next(iter(only))[1], [2, 2, 2, 2])
        for wrong in ([1, 1], [0, 0, 0, 0], [1, -1, 1, 1], [1, np.nan, 1, 1]):
            with self.assertRaisesRegex(DataError, "weights"):
                Loader((np.arange(4.0), np.arange(4)), 4, weights=wrong)

    def test_refusals(self) -> None:
        for given, message in (
            ((np.zeros(3), np.zeros(2), np.zeros(3)), "one length"),
            ({"a": np.array(["x"])}, "a: expected numbers"),
            ([], "one length"),
            ("abc", "got str"),
        ):
            with self.subTest(message), self.assertRaisesRegex(DataError, message):
                Loader(given, 2)
        with self.assertRaisesRegex(DataError, "targets=3, expected 0 to 2"):
            Samples((np.zeros(2), np.zeros(2)), 3)


class TestSplit(unittest.TestCase):
    def test_parts_have_every_sample_once(self) -> None:
        numbers = np.arange(50)
        for given in ((numbers + 0.5, numbers), (numbers, numbers, numbers), Numbers()):
            parts = split(given, (0.6, 0.2, 0.2), seed=3)
            self.assertEqual([len(p) for p in parts], [30, 10, 10])
            taken = np.concatenate([p.take(slice(None))[-1] for p in parts])
            self.assertEqual(sorted(taken), list(numbers))
        again, other = (split((numbers, numbers), 0.9, seed=seed)[1] for seed in (0, 1))
        np.testing.assert_array_equal(again.labels, split((numbers, numbers), 0.9)[1].labels)
        self.assertNotEqual(again.labels.tolist(), other.labels.tolist())
        self.assertIsInstance(parts[0], SampleSequence)

    def test_each_class_in_the_same_shares(self) -> None:
        labels = np.repeat([0, 1, 2], [60, 30, 10])
        whole = (np.arange(100.0), labels)
        for stratify in (True, labels.astype(str)):
            train, rest = split(whole, 0.8, stratify=stratify)
            self.assertEqual(np.bincount(train.labels).tolist(), [48, 24, 8])
            self.assertEqual(np.bincount(rest.labels).tolist(), [12, 6, 2])

    def test_refusals(self) -> None:
        whole = (np.arange(4.0), np.arange(4.0))
        for shares in (0, 1, 1.5, (0.5, 0.6), ()):
            with self.subTest(shares), self.assertRaisesRegex(DataError, "add up to 1"):
                split(whole, shares)
        with self.assertRaisesRegex(DataError, "leave a part without any"):
            split(whole, 0.99)
        with self.assertRaisesRegex(DataError, "labels of a regression have no classes"):
            split(whole, 0.5, stratify=True)


class Numbers:
    def __len__(self) -> int:
        return 50

    def __getitem__(self, k: int) -> Any:
        if not 0 <= k < 50:
            raise IndexError
        return {"x": float(k), "y": k}

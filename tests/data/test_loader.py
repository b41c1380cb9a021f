"""Loader: which samples come when, the same for any number of threads, and threads that end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path

import numpy as np

from dlsys import autodiff as ad
from dlsys.data import Dataset, Loader, Mixup, Normalization, Rotate, Shift
from dlsys.data.prefetch import ordered_map
from dlsys.errors import DataError

PYTHON = str(Path(__file__).resolve().parents[2] / "python")


def numbered(n: int, shape: tuple[int, ...] = (1, 6, 6)) -> Dataset:
    """Images that hold their own number everywhere, labeled with it."""
    return Dataset(
        np.full((n, *shape), np.arange(n).reshape(-1, 1, 1, 1), np.float32), np.arange(n)
    )


def digits(n: int) -> Dataset:
    rng = np.random.default_rng(0)
    return Dataset(rng.integers(0, 256, (n, 1, 12, 12)).astype(np.uint8), np.arange(n) % 10)


def content(loader: Loader, number: int, start: int = 0) -> list[bytes]:
    return [array.tobytes() for batch in loader.batches(number, start) for array in batch]


def our_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("dlsys.data")]


class TestBatches(unittest.TestCase):
    def test_every_sample_once_an_epoch_with_its_label(self):
        for n, size, workers in ((1, 1, 0), (7, 3, 2), (10, 5, 0), (103, 10, 3), (5, 8, 1)):
            loader = Loader(numbered(n), size, shuffle=True, workers=workers)
            batches = list(loader.batches(4))
            self.assertEqual(len(batches), len(loader))
            self.assertEqual(loader.samples, n)
            self.assertTrue(all(len(b.labels) == size for b in batches[:-1]))
            seen = np.concatenate([b.labels for b in batches])
            self.assertEqual(sorted(seen), list(range(n)))
            for b in batches:
                np.testing.assert_array_equal(b.images[:, 0, 3, 2], b.labels)

    def test_epochs_and_seeds_have_orders_of_their_own(self):
        orders = [
            np.concatenate(
                [b.labels for b in Loader(numbered(50), 7, shuffle=True, seed=s).batches(e)]
            )
            for s, e in ((0, 0), (0, 1), (0, 2), (1, 0), (2**40, 0))
        ]
        self.assertEqual(len({tuple(order) for order in orders}), 5)
        again = Loader(numbered(50), 50, shuffle=True, seed=0)
        np.testing.assert_array_equal(next(again.batches(2)).labels, orders[2])
        plain = Loader(numbered(50), 50)
        np.testing.assert_array_equal(next(plain.batches(2)).labels, np.arange(50))

    def test_drop_last(self):
        loader = Loader(numbered(23), 5, shuffle=True, drop_last=True)
        self.assertEqual((len(loader), loader.samples), (4, 20))
        self.assertEqual([len(b.labels) for b in loader.batches(0)], [5] * 4)
        with self.assertRaisesRegex(DataError, "23 samples make no full batch of 24"):
            Loader(numbered(23), 24, drop_last=True)

    def test_the_same_bits_for_any_number_of_workers_and_after_a_start_in_the_middle(self):
        def make(workers: int) -> Loader:
            steps = [Shift(2), Rotate(10), Mixup(10)]
            return Loader(
                digits(101), 8, shuffle=True, seed=3, workers=workers, augment=steps,
                normalize=(0.3, 0.4),
            )  # fmt: skip

        wanted = content(make(0), 5)
        for workers in (1, 2, 5):
            self.assertEqual(content(make(workers), 5), wanted)
        for start in (1, 6, 12, 13):
            self.assertEqual(content(make(2), 5, start), wanted[2 * start :])
        self.assertNotEqual(content(make(0), 6), wanted)

    def test_augmentation_goes_with_the_sample_and_not_with_its_place(self):
        loaders = [Loader(digits(40), 40, shuffle=s, augment=[Shift(2)]) for s in (False, True)]
        plain, shuffled = (next(loader.batches(3)) for loader in loaders)
        order = next(Loader(numbered(40), 40, shuffle=True).batches(3)).labels
        np.testing.assert_array_equal(shuffled.images, plain.images[order])

    def test_pixels_are_augmented_before_they_are_normalized(self):
        dataset = digits(30)
        normalization = Normalization.of(dataset)
        batch = next(Loader(dataset, 30, augment=[Shift(5)], normalize=normalization).batches(0))
        black = -normalization.mean[0] / normalization.std[0]
        self.assertAlmostEqual(float(batch.images.min()), black, places=5)
        self.assertEqual(batch.images.dtype, np.float32)
        self.assertGreater((np.abs(batch.images - black) < 1e-5).mean(), 0.2)

    def test_refusals(self):
        for arguments, message in (
            ({"batch_size": 0}, "batch_size >= 1 and workers >= 0, got 0 and 0"),
            ({"batch_size": 2, "workers": -1}, "got 2 and -1"),
            ({"batch_size": 2, "normalize": (0, 0)}, "one positive deviation a mean"),
        ):
            with self.assertRaisesRegex(DataError, message):
                Loader(digits(4), **arguments)


class TestFeeds(unittest.TestCase):
    def test_inputs_are_fed_and_last_batches_may_be_smaller(self):
        loader = Loader(digits(25), 10, shuffle=True)
        images, labels = loader.inputs()
        self.assertIs(images, loader.inputs()[0])
        self.assertEqual(images.attrs["shape"], (None, 1, 12, 12))
        executor = ad.Executor([ad.sum_op(images), labels])
        for feeds, batch in zip(loader.epoch(1), loader.batches(1), strict=True):
            total, fed = executor.run(feeds)
            np.testing.assert_array_equal(fed, batch.labels)
            np.testing.assert_allclose(total, batch.images.sum(dtype=np.float64), rtol=1e-5)

    def test_soft_labels_and_other_shapes(self):
        loader = Loader(digits(6), 3, augment=[Mixup(10)])
        self.assertEqual(loader.inputs()[1].attrs["shape"], (None, 10))
        self.assertEqual(loader.inputs()[1].attrs["dtype"], np.float32)
        flat = Dataset(np.zeros((4, 144), np.uint8), np.arange(4))
        loader = Loader(flat, 3, augment=[Shift(1)], shape=(1, 12, 12))
        self.assertEqual(loader.inputs()[0].attrs["shape"], (None, 144))

    def test_a_pair_of_arrays(self):
        points = np.random.default_rng(0).normal(size=(9, 2))
        feeds = next(Loader((points, np.arange(9) % 2), 9).epoch(0))
        np.testing.assert_array_equal(list(feeds.values())[0], points.astype(np.float32))


class TestThreads(unittest.TestCase):
    def wait_for_none(self):
        end = time.monotonic() + 10
        while our_threads() and time.monotonic() < end:
            time.sleep(0.01)
        self.assertEqual(our_threads(), [])

    def test_threads_work_and_end_with_the_epoch(self):
        makers = set()

        def note(images, labels, draws):
            makers.add(threading.current_thread().name)
            return images, labels

        list(Loader(digits(40), 2, workers=2, augment=[note]).batches(0))
        self.assertTrue(makers and all(name.startswith("dlsys.data") for name in makers))
        self.assertEqual(our_threads(), [])

    def test_an_abandoned_iterator_stops_its_threads(self):
        loader = Loader(digits(400), 2, workers=3)
        for make in (loader.batches, loader.epoch):
            batches = make(0)
            next(batches)
            self.assertTrue(our_threads())
            batches.close()
            self.assertEqual(our_threads(), [])
            batches = make(0)
            next(batches)
            del batches
            self.wait_for_none()

    def test_no_thread_runs_far_ahead(self):
        made = []
        steps = ordered_map(lambda k: made.append(k) or k, range(1000), workers=3, ahead=6)
        for k in range(5):
            self.assertEqual(next(steps), k)
            time.sleep(0.02)
            self.assertLessEqual(max(made), k + 6)
        steps.close()

    def test_an_exception_comes_in_its_place_with_its_cause(self):
        def fail(images, labels, draws):
            if 7 in labels:
                raise ZeroDivisionError("seven")
            return images, labels

        for workers in (0, 3):
            batches = Loader(numbered(20), 2, workers=workers, augment=[fail]).batches(0)
            self.assertEqual([next(batches).labels[0] for _ in range(3)], [0, 2, 4])
            with self.assertRaisesRegex(
                DataError, "batch of epoch 0 .* ZeroDivisionError: seven"
            ) as e:
                next(batches)
            self.assertIsInstance(e.exception.__cause__, ZeroDivisionError)
            self.assertEqual(our_threads(), [])

    def test_a_sample_that_cannot_be_taken_is_named(self):
        class Images:
            shape, dtype = (20, 4), np.dtype(np.float32)

            def __init__(self, faulty):
                self.faulty = faulty

            def __getitem__(self, chosen):
                return self.faulty(np.arange(20)[chosen])

        def missing(numbers):
            if 7 in numbers:
                raise KeyError("the seventh")
            return np.zeros((len(numbers), 4), np.float32)

        def wide(numbers):
            return np.zeros((len(numbers), 5 if 7 in numbers else 4), np.float32)

        def bytes_instead(numbers):
            return np.zeros((len(numbers), 4), np.uint8 if 7 in numbers else np.float32)

        for faulty, message in (
            (missing, "for sample 7: KeyError: 'the seventh'"),
            (wide, r"for sample 7: .*images are float32 \(4, 5\), where the set says .*\(4, 4\)"),
            (bytes_instead, "for sample 7: .*images are uint8 .* the set says float32"),
        ):
            loader = Loader(Dataset(Images(faulty), np.arange(20)), 4, workers=2)
            batches = loader.batches(0)
            next(batches)
            with self.assertRaisesRegex(DataError, message):
                next(batches)

    def test_an_error_of_ours_is_left_as_it_is(self):
        def fail(images, labels, draws):
            raise DataError("a sentence")

        with self.assertRaisesRegex(DataError, "^a sentence$"):
            next(Loader(digits(4), 2, workers=2, augment=[fail]).batches(0))

    def test_ctrl_c_ends_a_waiting_program(self):
        script = (
            "import time\n"
            "from dlsys.data import Loader\n"
            "import numpy as np\n"
            "def slow(images, labels, draws):\n"
            "    print('working', flush=True); time.sleep(0.3); return images, labels\n"
            "pair = np.zeros((1000, 1, 4, 4), np.uint8), np.zeros(1000, np.int64)\n"
            "try:\n"
            "    for _ in Loader(pair, 1, workers=2, augment=[slow]).batches(0): pass\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted', flush=True)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script], env={"PYTHONPATH": PYTHON}, text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        with contextlib.closing(process.stdout) as output:
            output.readline()
            process.send_signal(2)
            self.assertIn("interrupted", output.read())
        self.assertEqual(process.wait(10), 0)

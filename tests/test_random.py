"""Random numbers: known answers, equality of devices, what steps and effects do, distributions."""

from __future__ import annotations

import unittest

import numpy as np

from devices import require
from dlsys import autodiff as ad
from dlsys import ndarray, optim
from dlsys.errors import DeviceError, GraphError
from dlsys.ops.philox import normal_quantile, philox, words
from dlsys.ops.random import bernoulli_op

# Counter, key and words of Philox4x32-10 as its authors' Random123 distribution lists them.
KNOWN = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
)  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


class Philox(unittest.TestCase):
    def test_known_answers(self) -> None:
        for counter, key, wanted in KNOWN:
            made = philox(numbers(counter), tuple(numbers(key)))
            self.assertEqual([int(word) for word in made], numbers(wanted))

    def test_numbers_of_a_part_are_those_of_the_whole(self) -> None:
        whole = words(5, 6, 7, 0, 103)
        np.testing.assert_array_equal(words(5, 6, 7, 40, 21), whole[40:61])

    def test_blocks_beyond_32_bits_have_words_of_their_own(self) -> None:
        first = 1 << 34  # elements; block 2^32
        self.assertFalse(np.array_equal(words(1, 2, 3, first, 4), words(1, 2, 3, 0, 4)))

    def test_the_quantile_inverts_the_distribution(self) -> None:
        known = {
            0.5: 0.0,
            0.841344746068543: 1.0,
            0.0227501319481792: -2.0,
            1e-9: -5.99780701500768,
        }
        for p, x in known.items():
            self.assertAlmostEqual(normal_quantile(np.array([p]))[0], x, places=12)


class Steps(unittest.TestCase):
    ctx = None

    def test_a_training_step_draws_a_new_mask_and_evaluation_repeats_it(self) -> None:
        generator = ad.Generator(3)
        x, w = ad.Variable("x"), ad.Parameter(np.ones(64, np.float32), "w")
        y = ad.dropout(x * w, 0.5, generator)
        loss = ad.sum_op(y)
        train = optim.SGD(0.0).minimize(loss, [w])
        feed = {x: np.ones(64, np.float32)}
        step, look = ad.Executor([y, train], self.ctx), ad.Executor([y], self.ctx)
        seen = [look.run(feed, True)[0] for _ in range(2)]
        np.testing.assert_array_equal(seen[0], seen[1])
        trained = [step.run(feed, True)[0] for _ in range(3)]
        np.testing.assert_array_equal(trained[0], seen[0])
        self.assertFalse(np.array_equal(trained[0], trained[1]))
        self.assertFalse(np.array_equal(trained[1], trained[2]))
        self.assertEqual(generator.step.asnumpy(), 3)
        generator.step.set(0)
        np.testing.assert_array_equal(look.run(feed, True)[0], seen[0])

    def test_the_gradient_has_the_mask_of_the_output(self) -> None:
        x = ad.Variable("x")
        y = ad.dropout(x, 0.25, ad.Generator(1))
        gradient = ad.gradients(y, [x])[0]
        values = np.ones((33, 31), np.float32)
        outputs = ad.Executor([y, gradient], self.ctx).run({x: values}, True)
        np.testing.assert_array_equal(outputs[0], outputs[1])
        self.assertEqual(set(np.unique(outputs[0])), {0.0, 4.0})

    def test_two_nodes_draw_different_numbers_and_equal_programs_equal_ones(self) -> None:
        def build() -> list[ad.Node]:
            ad.seed(11)
            return [ad.random_uniform((50,)), ad.random_uniform((50,))]

        first, second = (ad.Executor(build(), self.ctx).run({}, True) for _ in range(2))
        self.assertFalse(np.array_equal(first[0], first[1]))
        for a, b in zip(first, second):
            np.testing.assert_array_equal(a, b)

    def test_random_nodes_are_never_merged(self) -> None:
        generator = ad.Generator(0)
        attrs = dict(shape=(8,), seed=0, node=0, threshold=1 << 31)
        a, b = (bernoulli_op(generator.step, **attrs) for _ in range(2))
        plan = ad.Executor([a, b]).plan({})
        self.assertEqual(len(plan.steps), 2)

    def test_all_and_nothing(self) -> None:
        x = ad.Variable("x")
        self.assertIs(ad.dropout(x, 1.0), x)
        self.assertIs(ad.dropout(x, 0.5, training=False), x)
        for probability in (0.0, 1.0):
            node = ad.random_bernoulli((1000,), probability, ad.Generator(2))
            value = ad.Executor([node], self.ctx).run({}, True)[0]
            np.testing.assert_array_equal(value, np.full(1000, probability))

    def test_distributions(self) -> None:
        n = 200_000
        cases = (
            (ad.random_uniform((n,), -1, 3), 1.0, 4 / 12**0.5, -1, 3),
            (ad.random_normal((n,), 2, 0.5), 2.0, 0.5, -2, 6),
            (ad.random_truncated_normal((n,)), 0.0, 0.8796256610342398, -2, 2),
            (ad.random_bernoulli((n,), 0.3), 0.3, 0.21**0.5, 0, 1),
        )
        for node, mean, deviation, low, high in cases:
            value = ad.Executor([node], self.ctx).run({}, True)[0].astype(np.float64)
            self.assertLess(abs(value.mean() - mean), 5 * deviation / n**0.5)
            self.assertLess(abs(value.std() - deviation), 5 * deviation / n**0.5)
            self.assertTrue(low <= value.min() and value.max() <= high)

    def test_arguments_that_do_not_fit(self) -> None:
        x = ad.Variable("x")
        for make, message in (
            (lambda: ad.dropout(x, 0.0), "keep_prob must be a number above 0 and up to 1, got 0.0"),
            (lambda: ad.dropout(x, 1.5), "keep_prob must be a number above 0 and up to 1, got 1.5"),
            (lambda: ad.random_uniform((2,), 1, 0), "expected low <= high, got 1 and 0"),
            (
                lambda: ad.random_normal((2,), 0, -1),
                "deviation must be a finite number that is not negative, got -1",
            ),
            (
                lambda: ad.random_bernoulli((2,), 2),
                "probability must be a number from 0 to 1, got 2",
            ),
            (
                lambda: ad.random_uniform((-2,)),
                r"shape must be a tuple of extents such as \(3, 4\), got \(-2,\)",
            ),
        ):
            with self.assertRaisesRegex(GraphError, message):
                make()


class SameOnDevices:
    """What one device draws, compared with numpy."""

    ctx = None

    def values(self, node: ad.Node, generator: ad.Generator, ctx: object) -> np.ndarray:
        generator.step.to(ctx)
        return ad.Executor([node], ctx).run({}, True)[0]

    def test_bits_are_those_of_numpy(self) -> None:
        for shape in ((1,), (5,), (257,), (3, 4099), (300_001,)):
            generator = ad.Generator(0xFEDCBA9876543210)
            generator.step.set(123)
            x = ad.constant(
                np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
            )
            for node in (
                ad.random_uniform(shape, -1.25, 2.5, generator),
                ad.random_bernoulli(shape, 0.37, generator),
                ad.dropout(x, 0.8, generator),
            ):
                here, there = (self.values(node, generator, ctx) for ctx in (None, self.ctx))
                self.assertEqual(here.tobytes(), there.tobytes(), node.op.name)

    def test_normals_are_within_4_ulp_of_numpy(self) -> None:
        generator = ad.Generator(5)
        for node in (
            ad.random_normal((300_001,), generator=generator),
            ad.random_truncated_normal((300_001,), 0.0, 2.0, -1.0, 3.0, generator),
        ):
            here, there = (self.values(node, generator, ctx) for ctx in (None, self.ctx))
            apart = np.abs(here.view(np.int32).astype(np.int64) - there.view(np.int32))
            self.assertLessEqual(apart.max(), 4)


@require(ndarray.cpu(0))
class CpuRandom(SameOnDevices, unittest.TestCase):
    ctx = ndarray.cpu(0)


@require(ndarray.cpu(0))
class CpuSteps(Steps):
    ctx = ndarray.cpu(0)


@require(ndarray.gpu(0))
class GpuSteps(Steps):
    ctx = ndarray.gpu(0)


@require(ndarray.gpu(0))
class GpuRandom(SameOnDevices, unittest.TestCase):
    ctx = ndarray.gpu(0)

    def test_words_are_those_of_curand(self) -> None:
        """cuRAND gives each of its threads a subsequence: words 2 and 3 of the counter. Which
        words come first is its own affair, so that only their set is compared.
        """
        seed, count = 1234567, 1 << 16
        out = ndarray.empty((count,), ctx=self.ctx, dtype=np.int32)
        try:
            ndarray.launch("rand", self.ctx, seed, 0, out)
        except DeviceError as error:
            self.skipTest(str(error))
        theirs = out.asnumpy().view(np.uint32)
        subsequence = np.repeat(np.arange(1 << 17, dtype=np.uint64), 4)
        block = np.tile(np.arange(4, dtype=np.uint64), 1 << 17)
        ours = np.stack(philox((block, 0, subsequence, 0), (seed, 0)), axis=1).reshape(-1)
        known = np.isin(theirs, ours.astype(np.uint32))
        self.assertGreater(known.mean(), 0.999)

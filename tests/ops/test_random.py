"""Random numbers: known answers, equality of devices, what steps and effects do, distributions."""

from __future__ import annotations

import unittest

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray, optim
from dlsys.errors import DeviceError, DlsysError, GraphError
from dlsys.ops.random.philox import normal_quantile, philox, step_of_draw, words
from dlsys.ops.random.sampling import bernoulli_op
from support.devices import require

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


class FailsOp(ad.Op):
    """Its input, unless it is to fail."""

    def infer_shape(self, node, input_shapes):
        return input_shapes[0]

    def compute(self, node, input_vals, output_val, use_numpy=True):
        if node.attrs["when"][0]:
            raise DlsysError("told to fail")
        output_val[:] = input_vals[0]


class Steps(unittest.TestCase):
    ctx = None

    def network(self) -> tuple[ad.Node, ad.Node, ad.Generator, dict]:
        """Dropout before a sum, its training step, the generator and a feed."""
        generator = ad.Generator(3)
        x, w = ad.Variable("x"), ad.Parameter(np.ones(64, np.float32), "w")
        y = ad.dropout(x * w, 0.5, generator)
        train = optim.SGD(0.0).minimize(ad.sum_op(y), [w])
        return y, train, generator, {x: np.ones(64, np.float32)}

    def test_a_training_step_draws_a_new_mask_and_looking_changes_nothing(self) -> None:
        y, train, generator, feed = self.network()
        step, look = ad.Executor([y, train], self.ctx), ad.Executor([y], self.ctx)
        alone = [step.run(feed, True)[0] for _ in range(4)]
        self.assertEqual(generator.step.asnumpy(), 4)
        self.assertEqual((step.draws, look.draws), (0, 0))
        generator.step.set(0)
        for k in range(4):
            look.draws = 0
            seen = [look.run(feed, True)[0] for _ in range(3)]
            self.assertEqual(generator.step.asnumpy(), k)
            look.draws = 0
            np.testing.assert_array_equal(look.run(feed, True)[0], seen[0])
            np.testing.assert_array_equal(step.run(feed, True)[0], alone[k])
            look.draws = 0
            generator.step.set(k)
            np.testing.assert_array_equal(look.run(feed, True)[0], alone[k])
            generator.step.set(k + 1)
        self.assertEqual(len({mask.tobytes() for mask in [*alone, *seen[1:]]}), 6)

    def test_every_run_draws_anew(self) -> None:
        nodes = [make((40,)) for make in (ad.random_uniform, ad.random_normal)]
        fixed = ad.Parameter(np.int64(0), "fixed", trainable=False)
        nodes.append(bernoulli_op(fixed, shape=(40,), seed=1, node=2, threshold=1 << 31))
        executor, other = (ad.Executor(nodes, self.ctx) for _ in range(2))
        runs = [executor.run({}, True) for _ in range(6)]
        for k in range(len(nodes)):
            self.assertEqual(len({run[k].tobytes() for run in runs}), 6)
        for run in runs:  # an executor over the same graph draws the same
            self.assert_same(other.run({}, True), run)
        self.assertEqual(executor.draws, 6)
        for k in (0, 4, 2):
            executor.draws = k
            self.assert_same(executor.run({}, True), runs[k])
        self.assertEqual(fixed.asnumpy(), 0)

    def test_runs_that_are_queued_draw_like_runs_one_by_one(self) -> None:
        node = ad.random_uniform((1000,)) * 2.0
        one, many = (ad.Executor([node], self.ctx) for _ in range(2))
        wanted = [one.run({}, True) for _ in range(150)]
        at = 0
        for count in (1, 3, 140, 6):
            at += count
            self.assert_same(many.run_many(count, {}, True), wanted[at - 1])
            self.assertEqual(many.draws, at)

    def test_a_node_beside_a_training_step_draws_anew(self) -> None:
        y, train, generator, feed = self.network()
        noise = ad.random_uniform((8,))
        executor = ad.Executor([y, noise, train], self.ctx)
        runs = [executor.run(feed, True)[1] for _ in range(4)]
        self.assertEqual(len({run.tobytes() for run in runs}), 4)
        self.assertEqual(generator.step.asnumpy(), 4)
        generator.step.set(0)
        masks = [ad.Executor([y, train], self.ctx).run(feed, True)[0] for _ in range(2)]
        generator.step.set(0)
        executor.draws = 0
        for mask, run in zip(masks, runs):
            self.assert_same(executor.run(feed, True)[:2], [mask, run])

    def test_a_run_that_fails_draws_nothing(self) -> None:
        node = ad.random_uniform((3, 2))
        broken = [False]
        executor = ad.Executor([FailsOp()(node, when=broken)], self.ctx)
        whole = ad.Executor([node], self.ctx)
        for k in range(4):
            self.assert_same(executor.run({}, True), whole.run({}, True))
            broken[0] = True
            with self.assertRaises(DlsysError):
                executor.run({}, True)
            broken[0] = False
            self.assertEqual(executor.draws, k + 1)

    def test_checking_and_refused_numbers_draw_nothing(self) -> None:
        executor = ad.Executor([ad.random_uniform((3,))], self.ctx)
        executor.check()
        self.assertEqual(executor.draws, 0)
        for number in (-1, 2**32, 1.5, "0"):
            with self.assertRaisesRegex(GraphError, "expected a number of runs, got"):
                executor.draws = number

    def assert_same(self, values: list, wanted: list) -> None:
        for value, expected in zip(values, wanted, strict=True):
            np.testing.assert_array_equal(value, expected)

    def test_a_step_of_a_draw_has_words_of_its_own(self) -> None:
        steps = [step_of_draw(7, draw) for draw in (0, 1, 2, 1 << 31)]
        self.assertEqual(steps[0], 7)
        self.assertEqual(steps[1], 7 | 1 << 63)
        self.assertEqual(steps[3], 7 | 1 << 32)
        self.assertEqual(len({words(1, step, 3, 0, 8).tobytes() for step in steps}), 4)

    def test_the_gradient_has_the_mask_of_the_output(self) -> None:
        x = ad.Variable("x")
        y = ad.dropout(x, 0.75, ad.Generator(1))
        gradient = ad.gradients(y, [x])[0]
        values = np.ones((33, 31), np.float32)
        executor = ad.Executor([y, gradient], self.ctx)
        for _ in range(3):
            outputs = executor.run({x: values}, True)
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
        plan = ad.Executor([a, b, generator.advance]).plan({})
        self.assertEqual([step.node.op for step in plan.steps].count(bernoulli_op), 2)

    def test_all_and_nothing(self) -> None:
        x = ad.Variable("x")
        self.assertIs(ad.dropout(x, 0.0), x)
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
            (lambda: ad.dropout(x, 1.0), "p must be a probability from 0 to below 1, got 1.0"),
            (lambda: ad.dropout(x, -0.5), "p must be a probability from 0 to below 1, got -0.5"),
            (
                lambda: ad.dropout_op(x, 0.0),
                "keep_prob must be a number above 0 and up to 1, got 0.0",
            ),
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
    """The draws of one device, compared with numpy."""

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
                ad.dropout(x, 0.2, generator),
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

"""Training by `fit` under the policy bf16: the same result, float32 checkpoints, the same bits."""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import optim, train
from dlsys.dtypes import FLOAT32
from dlsys.train.files import checkpoint
from support.devices import each_context
from support.small_runs import InFolder, final, loader, model

METRICS = (train.accuracy,)


class Fit(InFolder):
    def trained(self, ctx: Any, precision: str, **options: Any) -> tuple[Any, Any, Any]:
        net, optimizer = model(), optim.Adam(0.01)
        data = loader(count=240)
        history = train.fit(
            net, data, optimizer, ctx=ctx, precision=precision, metrics=METRICS, quiet=True,
            validation=loader(count=240, seed=1), **options,
        )  # fmt: skip
        return net, optimizer, history

    def test_it_reaches_what_float32_does(self) -> None:
        """Of 240 samples of validation. Measured: one sample and 0.006 of the loss apart."""
        for ctx in each_context():
            (_, _, wanted), (_, _, found) = (
                self.trained(ctx, word, epochs=8) for word in ("fp32", "bf16")
            )
            last, reached = wanted.epochs[-1], found.epochs[-1]
            self.assertGreater(last["val_accuracy"], 0.8)
            self.assertAlmostEqual(reached["val_accuracy"], last["val_accuracy"], delta=5 / 240)
            self.assertAlmostEqual(reached["val_loss"], last["val_loss"], delta=0.02)
            self.assertNotEqual(reached["loss"], last["loss"])

    def test_a_run_that_is_resumed_ends_with_the_same_bits(self) -> None:
        for ctx in each_context():
            with self.subTest(ctx=ctx):
                folder = self.folder / str(ctx)
                wanted = self.trained(ctx, "bf16", epochs=3)
                self.trained(ctx, "bf16", epochs=2, callbacks=[train.Checkpoint(folder)])
                saved = checkpoint.load(folder).tensors
                weights = [
                    a.dtype for name, a in saved.items() if name.endswith(("weight", "bias"))
                ]
                self.assertEqual(set(weights), {FLOAT32})
                resumed = self.trained(ctx, "bf16", epochs=3, resume=folder)
                before, after = final(*wanted[:2]), final(*resumed[:2])
                self.assertEqual(before.keys(), after.keys())
                for name, value in before.items():
                    np.testing.assert_array_equal(after[name], value, err_msg=name)

    def test_evaluation_and_prediction(self) -> None:
        net, _, _ = self.trained(None, "bf16", epochs=2)
        data = loader(count=240, shuffle=False)
        exact, found = (train.evaluate(net, data, METRICS, precision=p) for p in ("fp32", "bf16"))
        self.assertNotEqual(found["loss"], exact["loss"])
        self.assertAlmostEqual(found["loss"], exact["loss"], delta=0.01)
        x = np.ones((3, 4), np.float32)
        exact, found = (train.predict(net, x, precision=p) for p in ("fp32", "bf16"))
        self.assertEqual(found.dtype, FLOAT32)
        np.testing.assert_allclose(found, exact, atol=0.05)
        self.assertTrue((found != exact).any())


class Rules(unittest.TestCase):
    def test_clipping_averaging_and_accumulation_are_of_float32(self) -> None:
        """Rules read gradients of bfloat16; what they store is float32, on every device."""
        for ctx in each_context():
            rng = np.random.default_rng(0)
            w = ad.Parameter(rng.normal(size=(6, 5)).astype(np.float32), "w")
            x = ad.Variable("x", (8, 5), np.float32)
            y = ad.matmul_op(x, w, trans_B=True)
            optimizer = optim.Adam(0.1, clip_norm=1.0, accumulate=2, ema=0.9, weight_decay=0.01)
            step = optimizer.minimize(ad.mean_op(y * y), [w])
            executor = ad.Executor([ad.mean_op(y * y), step], ctx, "bf16")
            feeds = {x: rng.normal(size=(8, 5)).astype(np.float32)}
            losses = [float(executor.run(feeds, True)[0]) for _ in range(6)]
            self.assertLess(losses[-1], losses[0])
            slots = [w, *optimizer.slots[w].values(), optimizer.ema.averages[w]]
            self.assertEqual({slot.storage.array.dtype for slot in slots}, {FLOAT32})


if __name__ == "__main__":
    unittest.main()

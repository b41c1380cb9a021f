"""GPT: shapes, variants, gradients and checkpoints beside PyTorch's, and cached generation."""

from __future__ import annotations

import importlib.util
import json
import tempfile
import unittest
from pathlib import Path

import numpy as np

import dlsys as dl
from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, train
from dlsys.errors import DataError, GraphError
from dlsys.ops.random.token import draw_token
from dlsys.runtime.device import cpu, gpu, unavailable
from dlsys.train.files import safetensors
from support.gradcheck import check_gradients

SIZES = dict(vocabulary=11, context=16, layers=2, heads=2, features=8)
MODERN = dict(positions="rotary", norm="rms", mlp="swiglu", bias=False, tied=False)
DEVICES = [None, *(ctx for ctx in (cpu(0), gpu(0)) if unavailable(ctx) is None)]
TOKENS = np.random.default_rng(0).integers(0, 11, 16)
_TORCH = importlib.util.find_spec("torch") is not None
_TRANSFORMERS = _TORCH and importlib.util.find_spec("transformers") is not None


def logits_of(model: nn.GPT, tokens: np.ndarray, ctx=None) -> np.ndarray:
    """The logits (N, L, vocabulary) in inference mode."""
    x = ad.Variable("x", tokens.shape, np.int64)
    model.to(ctx)
    with model.in_mode(training=False):
        executor = ad.Executor([model(x)], ctx=ctx)
    return executor.run({x: tokens}, True)[0]


class Models(unittest.TestCase):
    def test_sizes_of_the_public_ones(self) -> None:
        config = nn.GPTConfig()
        per_layer = 12 * config.features**2 + 13 * config.features
        outer = (config.vocabulary + config.context + 2) * config.features
        self.assertEqual(12 * per_layer + outer, 124_439_808)  # as published: "124M"
        small = nn.GPT(nn.GPTConfig(**SIZES))
        self.assertEqual(small.num_parameters(), 2 * (12 * 64 + 13 * 8) + (11 + 16 + 2) * 8)

    def test_later_tokens_leave_earlier_outputs_as_they_are(self) -> None:
        for options in ({}, MODERN):
            model = nn.GPT(**SIZES, **options, seed=0)
            other = TOKENS.copy()
            other[9:] = (other[9:] + 1) % 11
            a, b = (logits_of(model, tokens[None]) for tokens in (TOKENS, other))
            np.testing.assert_array_equal(a[:, :9], b[:, :9])
            self.assertTrue((a[:, 9:] != b[:, 9:]).any(-1).all())

    def test_rotary_scores_depend_on_distances_only(self) -> None:
        from dlsys.nn.models.gpt import rotate

        q, k = (dl.tensor(np.random.default_rng(s).normal(size=(1, 1, 1, 8))) for s in (0, 1))
        turned = [
            [rotate(x, 16, dl.tensor(np.int64(at))).numpy().ravel() for x in (q, k) for at in ats]
            for ats in ([2, 5], [7, 10])
        ]
        (q2, _, _, k5), (q7, _, _, k10) = turned
        self.assertAlmostEqual(q2 @ k5, q7 @ k10, places=5)
        self.assertGreater(abs(q2 @ k5 - q.numpy().ravel() @ k.numpy().ravel()), 1e-3)

    def test_dropout_is_for_training_only(self) -> None:
        model = nn.GPT(**SIZES, dropout=0.5, seed=0)
        x = dl.tensor(TOKENS[None])
        self.assertFalse(np.array_equal(model(x).numpy(), model(x).numpy()))
        model.eval()
        np.testing.assert_array_equal(model(x).numpy(), model(x).numpy())

    def test_faults_are_one_sentence(self) -> None:
        for options, text in (
            (dict(heads=3), "heads must divide"),
            (dict(heads=8, positions="rotary"), "even extents"),
            (dict(norm="batch"), "norm is 'batch', expected layer or rms"),
            (dict(layers=0), "expected positive integers, got layers=0"),
            (dict(width=3), "has no field width"),
        ):
            with self.assertRaisesRegex(GraphError, text):
                nn.GPT(**(SIZES | options))
        with self.assertRaisesRegex(GraphError, "17 positions are more than the context of 16"):
            nn.GPT(**SIZES)(dl.zeros(1, 17, dtype="int64"))

    def test_a_saved_one_is_built_again(self) -> None:
        model = nn.GPT(nn.GPTConfig(**SIZES, **MODERN), seed=0)
        with tempfile.TemporaryDirectory() as folder:
            train.save(f"{folder}/m.safetensors", model)
            again = train.load_model(f"{folder}/m.safetensors")
        self.assertEqual(again.config, model.config)
        np.testing.assert_array_equal(*(logits_of(m, TOKENS[None]) for m in (model, again)))

    def test_groups_of_weight_decay(self) -> None:
        decays, others = nn.decay_groups(nn.GPT(**SIZES), 0.1)
        self.assertEqual({len(p.shape) for p in decays["params"]}, {2})
        self.assertEqual({len(p.shape) for p in others["params"]}, {1})
        self.assertEqual((decays["weight_decay"], others["weight_decay"]), (0.1, 0.0))

    def test_a_vision_transformer_learns(self) -> None:
        from dlsys import data, optim

        rng = np.random.default_rng(0)
        labels = rng.integers(0, 2, 64)
        images = rng.normal(0, 0.1, (64, 1, 8, 8)).astype(np.float32)
        images[labels == 1, :, :4] += 1
        model = nn.VisionTransformer(2, 8, 4, 1, 16, 1, 2, seed=0)
        loader = data.Loader((images, labels), 16)
        history = train.fit(model, loader, optim.Adam(1e-2), epochs=6, quiet=True)
        self.assertEqual(history.epochs[-1]["accuracy"], 1.0)
        with self.assertRaisesRegex(GraphError, "patches of 5 do not divide images of 8"):
            nn.VisionTransformer(size=8, patch=5)


class Gradients(unittest.TestCase):
    def test_of_blocks_in_float64(self) -> None:
        rng = np.random.default_rng(0)
        # Rotary positions come in float32 alone; the next test has their gradient.
        for options in ({}, MODERN | dict(positions="learned")):
            block = nn.GPT(**(SIZES | dict(features=4, layers=1)), **options, seed=0).h[0]
            for _, module in block.named_modules():
                for name, value in list(vars(module).items()):
                    if isinstance(value, ad.Parameter):
                        moved = rng.normal(size=value.shape)
                        setattr(module, name, ad.Parameter(moved, name))
            x, weights = ad.Variable("x", (1, 3, 4), np.float64), rng.normal(size=(1, 3, 4))
            loss = F.sum(block(x) * weights)
            parameters = block.parameters()
            executor = ad.Executor([loss, *ad.gradients(loss, [x, *parameters])])
            point = [rng.normal(size=(1, 3, 4)), *(p.asnumpy() for p in parameters)]

            def at(values, x=x, parameters=parameters, executor=executor) -> list:
                for parameter, value in zip(parameters, values[1:]):
                    parameter.set(value)
                return executor.run({x: values[0]}, True)

            check_gradients(lambda values, at=at: at(values)[0], at(point)[1:], point, rng)

    def test_of_rotary_positions(self) -> None:
        # They are linear: the gradient of <rotate(x), w> with any d is <rotate(d), w>.
        from dlsys.nn.models.gpt import rotate

        x, d, w = np.random.default_rng(0).normal(size=(3, 2, 2, 5, 8)).astype(np.float32)
        given = dl.tensor(x, requires_grad=True)
        (rotate(given, 16) * dl.tensor(w)).sum().backward()
        wanted = (rotate(dl.tensor(d), 16).numpy() * w).sum()
        self.assertAlmostEqual(float((given.grad.numpy() * d).sum()), float(wanted), places=4)


@unittest.skipUnless(_TRANSFORMERS, "needs transformers: pip install transformers")
class Published(unittest.TestCase):
    """A tiny GPT-2 of `transformers`, with random weights, biases and gains."""

    @classmethod
    def setUpClass(cls) -> None:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=37, n_positions=12, n_embd=24, n_layer=2, n_head=3,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        cls.theirs = GPT2LMHeadModel(config)
        with torch.no_grad():
            for parameter in cls.theirs.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        cls.tokens = np.random.default_rng(0).integers(0, 37, (2, 12))

    def test_logits_and_gradients(self) -> None:
        import torch

        with tempfile.TemporaryDirectory() as folder:
            self.theirs.save_pretrained(folder)
            ours = train.load_gpt2(folder)
        given = torch.tensor(self.tokens)
        output = self.theirs(given, labels=given)
        wanted = output.logits.detach().numpy()
        for ctx in DEVICES:
            # Measured: 2e-7 on numpy and the CPU.
            np.testing.assert_allclose(logits_of(ours, self.tokens, ctx), wanted, atol=1e-4)
        self.theirs.zero_grad()
        ours.to(None)
        output.loss.backward()
        logits = ours(dl.tensor(self.tokens, device="numpy"))[:, :-1]
        F.cross_entropy(logits, dl.tensor(self.tokens[:, 1:], device="numpy")).backward()
        grads = {
            n.removeprefix("transformer."): p.grad.numpy()
            for n, p in self.theirs.named_parameters()
        }
        for name, parameter in ours.named_parameters():
            wanted = grads[name].T if "c_" in name and grads[name].ndim == 2 else grads[name]
            np.testing.assert_allclose(
                parameter.grad.numpy(), wanted, rtol=1e-3, atol=1e-5, err_msg=name
            )

    def test_state_files_and_back(self) -> None:
        import torch

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "pytorch_model.bin")
            torch.save(self.theirs.state_dict(), path)
            ours = train.load_gpt2(path, heads=3)
        back = {n: torch.tensor(v) for n, v in ours.gpt2_state_dict().items()}
        self.theirs.transformer.load_state_dict(back)  # strict: all names and shapes
        for name, value in self.theirs.transformer.state_dict().items():
            np.testing.assert_array_equal(value.numpy(), back[name].numpy())


class Files(unittest.TestCase):
    def test_what_is_no_checkpoint(self) -> None:
        model = nn.GPT(**SIZES, seed=0)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.safetensors")
            with self.assertRaisesRegex(DataError, "has no model.safetensors and no pytorch"):
                train.load_gpt2(folder)
            safetensors.write(path, model.gpt2_state_dict(), {})
            with self.assertRaisesRegex(DataError, "heads=… where a head does not have 64"):
                train.load_gpt2(folder)
            again = train.load_gpt2(path, heads=2)
            np.testing.assert_array_equal(*(logits_of(m, TOKENS[None]) for m in (model, again)))
            Path(folder, "config.json").write_text(json.dumps({"n_head": 2}))
            self.assertEqual(train.load_gpt2(folder).config, again.config)
            safetensors.write(path, {"wte.weight": np.zeros((3, 64), np.float32)}, {})
            with self.assertRaisesRegex(DataError, "wpe.weight, ln_f.weight, which these 1 arrays"):
                train.load_gpt2(path)


class Generation(unittest.TestCase):
    def test_the_cache_gives_what_full_recomputation_gives(self) -> None:
        for options in ({}, MODERN):
            model = nn.GPT(**SIZES, **options, seed=0)
            for ctx in DEVICES:
                full = logits_of(model, TOKENS[None], ctx)[0]
                decoder = nn.Decoder(model, ctx)
                got = [decoder.read(TOKENS[:7]), *(decoder.read([t]) for t in TOKENS[7:])]
                # Measured: 3e-8 of logits about 0.1; other shapes of products round otherwise.
                np.testing.assert_allclose(np.stack(got), full[6:], atol=1e-6)
                if ctx == gpu(0):
                    report = str(decoder._programs[1][0].report())
                    self.assertIn("1 launch(es) a run", report)  # a token is one captured graph

    def test_what_stands_behind_a_reset_is_not_seen(self) -> None:
        model = nn.GPT(**SIZES, seed=0)
        decoder = nn.Decoder(model)
        first = decoder.read(TOKENS[:3])
        decoder.read(TOKENS)
        decoder.reset()
        np.testing.assert_array_equal(decoder.read(TOKENS[:3]), first)

    def test_beyond_the_context_the_newer_half_is_read_anew(self) -> None:
        model = nn.GPT(**SIZES, seed=0)
        decoder = nn.Decoder(model)
        decoder.read(TOKENS)
        got = decoder.read([3])
        wanted = logits_of(model, np.append(TOKENS[-7:], 3)[None])[0, -1]
        np.testing.assert_allclose(got, wanted, atol=1e-6)
        self.assertEqual(len(decoder.tokens), 8)

    def test_sampling(self) -> None:
        logits = np.log(np.array([0.1, 0.5, 0.15, 0.25]))
        cases = {
            nn.Sampling(): [0.1, 0.5, 0.15, 0.25],
            nn.Sampling(temperature=0): [0, 1, 0, 0],
            nn.Sampling(top_k=2): [0, 2 / 3, 0, 1 / 3],
            nn.Sampling(top_p=0.5): [0, 1, 0, 0],
            nn.Sampling(top_p=0.6): [0, 2 / 3, 0, 1 / 3],
            nn.Sampling(temperature=0.5): np.array([0.01, 0.25, 0.0225, 0.0625]) / 0.345,
        }
        for sampling, wanted in cases.items():
            np.testing.assert_allclose(sampling.probabilities(logits), wanted, atol=1e-12)
        settings = nn.Sampling(top_k=2).settings
        drawn = [draw_token(logits, settings, 0, step) for step in range(3000)]
        # Three deviations of a share of 3000 draws are 0.026.
        self.assertAlmostEqual(np.mean(np.array(drawn) == 1), 2 / 3, delta=0.026)
        self.assertEqual(set(drawn), {1, 3})
        for options in (dict(temperature=-1), dict(top_k=0), dict(top_p=0)):
            with self.assertRaisesRegex(GraphError, "expected temperature >= 0"):
                nn.Sampling(**options)

    def test_seeds(self) -> None:
        decoder = nn.Decoder(nn.GPT(**SIZES, seed=0))
        made = []
        for seed in (1, 1, 2):
            decoder.reset()
            made.append(list(decoder.generate([1, 2, 3], 20, seed=seed)))
        self.assertEqual(made[0], made[1])
        self.assertNotEqual(made[0], made[2])
        with self.assertRaisesRegex(DataError, "at least one token"):
            next(decoder.generate([], 1))

    def test_devices_write_what_full_recomputation_draws(self) -> None:
        sampling = nn.Sampling(0.9, top_k=20, top_p=0.95)
        for ctx in DEVICES:
            model = nn.GPT(**SIZES, seed=0)
            decoder, prompt, count = nn.Decoder(model, ctx), [1, 2, 3], 40
            got = list(decoder.generate(prompt, count, sampling, seed=3))
            number = int(np.random.default_rng(3).integers(2**63))
            context, tokens = model.config.context, list(prompt)
            for step in range(count):
                if len(tokens) > context:
                    tokens = tokens[-(context // 2) :]
                logits = logits_of(model, np.array([tokens]), ctx)[0, -1]
                tokens.append(draw_token(logits, sampling.settings, number, step))
                self.assertEqual(got[step], tokens[-1], (ctx, step))

    def test_who_stops_reading_goes_on_where_they_stopped(self) -> None:
        decoder = nn.Decoder(nn.GPT(**SIZES, seed=0))
        written = decoder.generate([1, 2, 3], 10, nn.Sampling(0))
        got = [next(written) for _ in range(5)]
        written.close()
        self.assertEqual(decoder.tokens, [1, 2, 3, *got[:4]])
        logits = decoder.read([got[4]])
        decoder.reset()
        np.testing.assert_allclose(decoder.read([1, 2, 3, *got]), logits, atol=1e-6)


if __name__ == "__main__":
    unittest.main()

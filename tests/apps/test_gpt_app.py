"""`dlsys gpt`: a run from its text to its samples, resumed bit for bit; its count of FLOPs."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import functional as F
from dlsys import nn, profile, train
from dlsys.apps import cli
from dlsys.apps.gpt.training import Settings, optimizer_of
from dlsys.train.files import safetensors

SMALL = (
    "--max-bytes 20000 --layers 1 --heads 2 --features 16 --context 16 --batch-size 4 --steps 12 "
    "--every 4 --accumulate 2 --dropout 0.1 --warmup 3 -c numpy -n 20"
).split()


def dlsys(*words: object) -> tuple[int, str, str]:
    """The status of `dlsys gpt …`, and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["gpt", *map(str, words)])
    return status, out.getvalue(), err.getvalue()


class Application(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.root = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.folder = cls.root / "run"
        cls.status, cls.out, cls.err = dlsys("train", cls.folder, *SMALL)

    def test_what_training_prints_and_writes(self) -> None:
        self.assertEqual((self.status, self.err), (0, ""), self.err)
        line = (
            r"step 12/12  loss \d\.\d{4}  val_loss \d\.\d{4}  lr \d\.\d\de-\d\d  [\d,]+ tokens/s"
            r"  [\d,.]+ GFLOP/s"
        )
        self.assertRegex(self.out, line)
        self.assertEqual(len(re.findall(r"^step ", self.out, re.M)), 3)
        self.assertEqual(len(re.findall(r"^  ['\"]def ", self.out, re.M)), 3)  # samples
        records = [json.loads(s) for s in (self.folder / "log.jsonl").read_text().splitlines()]
        epochs = [record for record in records if record["event"] == "epoch"]
        self.assertEqual([record["step"] for record in epochs], [8, 16, 24])
        self.assertLess(epochs[-1]["val_loss"], epochs[0]["val_loss"])

    def test_precision(self) -> None:
        folder = self.root / "bf16"
        self.assertEqual(dlsys("train", folder, *SMALL, "--precision", "bf16")[0], 0)
        self.assertEqual(json.loads((folder / "run.json").read_text())["precision"], "bf16")
        weights = [
            safetensors.read(path / "last.safetensors").tensors["model.h.0.mlp.c_fc.weight"]
            for path in (self.folder, folder)
        ]
        np.testing.assert_allclose(*weights, atol=0.02)
        self.assertFalse(np.array_equal(*weights))

    def test_a_run_that_was_stopped_ends_with_the_same_bits(self) -> None:
        from dlsys.apps.gpt.training import Lines

        class Stops(Lines):
            def on_step(self, run) -> None:
                super().on_step(run)
                if run.step == 11:  # between two updates, within an epoch
                    run.stop("here")

        again = self.root / "again"
        with mock.patch("dlsys.apps.gpt.training.Lines", Stops):
            self.assertEqual(dlsys("train", again, *SMALL)[0], 0)
        status, out, err = dlsys("train", again, "--resume", "-c", "numpy")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("going on after 5 steps", out)
        a, b = (
            safetensors.read(folder / "last.safetensors").tensors for folder in (self.folder, again)
        )
        self.assertEqual(a.keys(), b.keys())
        for name, value in a.items():
            np.testing.assert_array_equal(value, b[name], err_msg=name)

    def test_samples(self) -> None:
        words = ("sample", self.folder, "--prompt", "def ", "-n", 30, "-c", "numpy")
        first, second, other = (dlsys(*words, "--seed", seed) for seed in (1, 1, 2))
        self.assertEqual((first[0], len(first[1])), (0, 4 + 30 + 1))
        self.assertTrue(first[1].startswith("def "))
        self.assertEqual(first, second)
        self.assertNotEqual(first, other)
        greedy = [dlsys(*words, "--temperature", 0, "--seed", seed)[1] for seed in (1, 2)]
        self.assertEqual(*greedy)

    def test_evaluation(self) -> None:
        status, out, _ = dlsys("evaluate", self.folder, "--batch-size", 4, "-c", "numpy")
        self.assertEqual(status, 0)
        logged = [json.loads(s) for s in (self.folder / "log.jsonl").read_text().splitlines()]
        best = min(record["val_loss"] for record in logged if "val_loss" in record)
        self.assertIn(f"loss {best:.4f} a token, perplexity {np.exp(best):.2f}", out)
        path = self.root / "words.txt"
        path.write_text("import sys\n" * 10)
        status, out, _ = dlsys("evaluate", self.folder, "--text", path, "-c", "numpy")
        self.assertEqual(status, 0)
        # A token is a byte of this text.
        loss, bits = map(float, re.search(r"loss (\S+) .* (\S+) bits", out).groups())
        self.assertAlmostEqual(bits, loss / np.log(2), places=2)

    def test_a_public_checkpoint_writes(self) -> None:
        from data.test_text import ENGINES, gpt2_files

        if not ENGINES:
            self.skipTest("needs tokenizers or tiktoken")
        folder = self.root / "gpt2"
        folder.mkdir()
        gpt2_files(folder)
        model = nn.GPT(vocabulary=263, context=16, layers=1, heads=2, features=8, seed=0)
        safetensors.write(folder / "model.safetensors", model.gpt2_state_dict(), {})
        (folder / "config.json").write_text('{"n_head": 2}')
        words = ("sample", folder, "--prompt", "in the", "-n", 20, "--top-k", 5, "-c", "numpy")
        status, out, err = dlsys(*words)
        self.assertEqual((status, err), (0, ""))
        self.assertTrue(out.startswith("in the"))

    def test_faults_are_one_sentence(self) -> None:
        for words, status, said in (
            (("train", self.folder), 2, "go on with it"),
            (("train", self.folder, "--resume", "--lr", "1"), 2, "has --lr 0.001, not 1.0"),
            (("train", self.root / "none", "--resume"), 1, "no run to go on with"),
            (("train", self.root / "new", "--heads", 3, *SMALL[:2]), 1, "heads must divide"),
            (("sample", self.root), 1, "has no model.safetensors"),
            (("sample", self.folder, "--tokenizer", "byte"), 2, "leave --tokenizer out"),
            (("sample", self.folder, "--top-p", "2"), 1, "0 < top_p <= 1"),
            (("sample", self.folder, "--prompt", "\u03a9"), 1, "is none of its"),
        ):
            got, _, err = dlsys(*words, "-c", "numpy")
            self.assertEqual(got, status, (words, err))
            self.assertIn(said, err)
            self.assertEqual(err.count("\n"), 1)


class Rates(unittest.TestCase):
    def test_the_schedule(self) -> None:
        settings = Settings(steps=1000, every=100, warmup=50, lr=1e-3)
        schedule = optimizer_of(settings)._given
        rates = [schedule(step) for step in (0, 25, 50, 525, 1000)]
        np.testing.assert_allclose(rates, [2e-5, 5.1e-4, 1e-3, 5.5e-4, 1e-4], rtol=1e-9)

    def test_flops_are_those_of_the_formula(self) -> None:
        # A forward pass has 2 FLOPs a weight of a matrix and token, and of attention 4 d a layer
        # for each key that a token sees; gradients cost twice that (Kaplan et al., 2020).
        batch, length = 4, 16
        for options, matrices in (({}, 12), (dict(hidden=48, mlp="swiglu"), 4 + 9)):
            config = nn.GPTConfig(50, length, 3, 2, 16, **options)
            model = nn.GPT(config, seed=0)
            x, y = (ad.Variable(name, (batch, length), np.int64) for name in "xy")
            loss = F.cross_entropy(model(x), y)
            weights = 3 * matrices * 16**2 + 50 * 16
            attention = 3 * 4 * 16 * length * (length + 1) // 2
            wanted = batch * (length * 2 * weights + attention)
            self.assertEqual(profile.product_flops([loss]), wanted)
            step = ad.gradients(loss, model.parameters())
            self.assertEqual(profile.product_flops([loss, *step]), 3 * wanted)


class Learning(unittest.TestCase):
    def test_a_sequence_that_repeats_is_learned(self) -> None:
        from dlsys import optim
        from dlsys.data import text

        tokens = np.tile(np.arange(7), 60)
        model = nn.GPT(vocabulary=7, context=8, layers=1, heads=1, features=16, seed=0)
        loader = text.TokenLoader(tokens, 8, 8, 30, shuffle=True)
        train.fit(model, loader, optim.AdamW(1e-2), epochs=3, metrics=(), quiet=True)
        drawn = nn.Decoder(model).generate([3, 4], 12, nn.Sampling(0))
        self.assertEqual(list(drawn), [(5 + k) % 7 for k in range(12)])


if __name__ == "__main__":
    unittest.main()

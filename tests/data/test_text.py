"""Text: tokenizers say what they were told, corpora, token shards, and packed sequences."""

from __future__ import annotations

import importlib.util
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

from dlsys.data import text
from dlsys.errors import DataError

TEXTS = ["", "def f(x):\n    return x\n", "naïve — 日本語 🙂 \x00\t", "it's 2026's  end\r\n\n  "]
ENGINES = [n for n in ("tokenizers", "tiktoken") if importlib.util.find_spec(n)]


def gpt2_files(folder: str | Path) -> None:
    """A vocabulary of GPT-2's kind: all bytes, a few merges, and the token between documents."""
    from dlsys.data.text.tokenizers import _letters

    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "in"), ("e", "r")]
    words = [*_letters().values(), *("".join(pair) for pair in merges), "<|endoftext|>"]
    Path(folder, "vocab.json").write_text(json.dumps({w: k for k, w in enumerate(words)}))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    Path(folder, "merges.txt").write_text("\n".join(lines) + "\n")


class Tokenizers(unittest.TestCase):
    def check(self, tokenizer: text.Tokenizer, texts: list[str]) -> None:
        """Round trips, also through its description, and streams."""
        again = text.tokenizer_from(json.loads(json.dumps(tokenizer.as_dict())))
        for given in texts:
            tokens = tokenizer.encode(given)
            self.assertEqual((tokens.dtype, tokens.ndim), (np.int64, 1))
            self.assertEqual(tokenizer.decode(tokens), given)
            self.assertEqual("".join(tokenizer.stream(tokens)), given)
            np.testing.assert_array_equal(again.encode(given), tokens)
        self.assertEqual(tokenizer.decode([tokenizer.end]), "")
        self.assertEqual(again.vocabulary, tokenizer.vocabulary)
        for token in (-1, tokenizer.vocabulary):
            with self.assertRaisesRegex(DataError, f"{token} is no token, they are 0 to"):
                tokenizer.decode([token])

    def test_bytes(self) -> None:
        self.check(text.ByteTokenizer(), TEXTS)
        pieces = list(text.ByteTokenizer().stream("é!".encode()))
        self.assertEqual(pieces, ["", "é", "!", ""])  # a letter comes with its last byte
        self.assertEqual(text.ByteTokenizer().decode([0xC3, 65]), "\ufffdA")

    def test_characters(self) -> None:
        tokenizer = text.CharTokenizer.of(TEXTS)
        self.check(tokenizer, TEXTS)
        with self.assertRaisesRegex(DataError, "'Ω' is none of its"):
            tokenizer.encode("Ω")
        for wrong in ("", "aba"):
            with self.assertRaisesRegex(DataError, "expected different characters"):
                text.CharTokenizer(wrong)

    @unittest.skipUnless(ENGINES, "needs tokenizers or tiktoken")
    def test_gpt2(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            gpt2_files(folder)
            made = [text.GPT2Tokenizer(folder, engine) for engine in ENGINES]
            texts = [*TEXTS, "in the other theatre, therein", "a <|endoftext|> b"]
            for tokenizer in made:
                self.check(tokenizer, texts)
                self.assertEqual(tokenizer.encode(" the").tolist(), [258])  # one merged token
            for given in texts:
                np.testing.assert_array_equal(made[0].encode(given), made[-1].encode(given))

    def test_gpt2_without_packages_or_files(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(DataError, "has no vocab.json and no encoder.json"):
                text.GPT2Tokenizer(folder)
            gpt2_files(folder)
            with mock.patch.dict("sys.modules", {"tokenizers": None, "tiktoken": None}):
                with self.assertRaisesRegex(DataError, "needs tokenizers: pip install tokenizers"):
                    text.GPT2Tokenizer(folder)
            Path(folder, "vocab.json").write_text('{"a": 1}')
            with self.assertRaisesRegex(DataError, "not numbered from 0"):
                text.GPT2Tokenizer(folder)

    def test_descriptions_of_nothing(self) -> None:
        for wrong in (None, {}, {"kind": "char"}, {"kind": "word"}):
            with self.assertRaisesRegex(DataError, "describes no tokenizer"):
                text.tokenizer_from(wrong)


class Corpora(unittest.TestCase):
    def test_pythons_library(self) -> None:
        documents = list(text.python_library(100_000))
        size = sum(len(document.text.encode()) for document in documents)
        self.assertTrue(99_997 <= size <= 100_000)  # a letter is not cut
        self.assertGreater(len(documents), 1)
        self.assertEqual(documents, list(text.python_library(100_000)))

    def test_files(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(DataError, "no file that ends in .txt"):
                list(text.text_files([folder]))
            Path(folder, "b.txt").write_text("two")
            Path(folder, "a.md").write_text("one")
            found = [document.text for document in text.text_files([folder])]
            self.assertEqual(found, ["one", "two"])
            with self.assertRaisesRegex(DataError, "No such file"):
                list(text.text_files([f"{folder}/none"]))


class Shards(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        rng = np.random.default_rng(0)
        self.texts = ["".join(rng.choice(list("abc\n"), size=50 + k)) for k in range(20)]
        documents = [text.Document(str(k), t) for k, t in enumerate(self.texts)]
        text.write_tokens(self.folder, documents, text.ByteTokenizer(), 0.1, shard=333)
        self.train, self.held = (text.Tokens(self.folder, p) for p in ("train", "validation"))

    def test_every_token_is_in_one_part(self) -> None:
        decode = text.ByteTokenizer().decode
        said = decode(self.train[:]) + decode(self.held[:])
        self.assertEqual(sorted(said), sorted("".join(self.texts)))
        self.assertEqual(len(self.train) + len(self.held), sum(map(len, self.texts)) + 20)
        self.assertAlmostEqual(len(self.held) / (len(self.train) + len(self.held)), 0.1, places=2)
        self.assertGreater(len(list(Path(self.folder).glob("train-*.npy"))), 3)

    def test_slices_go_across_shards(self) -> None:
        everything = self.train[:]
        for a, b in ((0, 5), (330, 340), (332, 1000), (999, 999), (len(self.train) - 3, None)):
            np.testing.assert_array_equal(self.train[a:b], everything[a:b])
        self.assertEqual(everything.dtype, np.int64)

    def test_damage_is_named(self) -> None:
        with self.assertRaisesRegex(DataError, "write_tokens makes such a folder"):
            text.Tokens(f"{self.folder}/none")
        with self.assertRaisesRegex(DataError, "part is 'test'"):
            text.Tokens(self.folder, "test")
        Path(self.folder, "train-00001.npy").unlink()
        with self.assertRaisesRegex(DataError, "the shards of train have .* tokens.json says"):
            text.Tokens(self.folder)
        Path(self.folder, "train-00002.npy").write_bytes(b"nothing")
        with self.assertRaisesRegex(DataError, "a shard of train cannot be read"):
            text.Tokens(self.folder)
        Path(self.folder, "tokens.json").write_text("{}")
        with self.assertRaisesRegex(DataError, "no description of token shards"):
            text.Tokens(self.folder)
        with self.assertRaisesRegex(DataError, "are too few"):
            text.write_tokens(self.folder, [text.Document("", "a")], text.ByteTokenizer())


class Batches(unittest.TestCase):
    def test_a_pass_has_every_sequence_once(self) -> None:
        tokens = np.arange(101)
        for shuffle in (False, True):
            loader = text.TokenLoader(tokens, 3, 5, shuffle=shuffle, seed=4)
            rows = np.concatenate([x for x, _ in loader])
            self.assertEqual(len(np.unique(rows[:, 0])), len(rows))
            self.assertEqual(len(set((rows[:, 0] % 5).tolist())), 1)  # one offset a pass
            for x, y in loader:
                np.testing.assert_array_equal(x + 1, y)
                self.assertEqual(x.shape, (3, 5))
        firsts = [np.sort(loader.batch(6 * turn + 0)[0][:, 0]).tolist() for turn in range(3)]
        self.assertNotEqual(firsts[0], firsts[1])

    def test_a_batch_depends_on_its_number_alone(self) -> None:
        tokens = np.arange(101)
        short, long = (text.TokenLoader(tokens, 3, 5, n, shuffle=True, seed=1) for n in (4, 10))
        a = [x for k in range(5) for feed in short.epoch(k) for x in feed.values()]
        b = [x for k in range(2) for feed in long.epoch(k) for x in feed.values()]
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
        resumed = [x for feed in long.epoch(1, 7) for x in feed.values()]
        np.testing.assert_array_equal(resumed, b[-6:])

    def test_shares_of_ranks_are_the_batches(self) -> None:
        loader = text.TokenLoader(np.arange(101), 4, 5, shuffle=True, seed=1)
        shares = [loader.shard(rank, 2) for rank in range(2)]
        self.assertEqual([x.spec.shape for x in shares[0].inputs()], [(2, 5)] * 2)
        for number, start in ((0, 0), (1, 2)):
            feeds = [loader.epoch(number, start), *(one.epoch(number, start) for one in shares)]
            for batch, *parts in zip(*feeds, strict=True):
                for x, *of_ranks in zip(*(one.values() for one in (batch, *parts)), strict=True):
                    np.testing.assert_array_equal(x, np.concatenate(of_ranks))
        with self.assertRaisesRegex(DataError, "batches of 4 samples have no 3 equal shares"):
            loader.shard(0, 3)

    def test_faults(self) -> None:
        for arguments, words in (
            ((np.arange(10), 3, 5), "10 tokens make no batch of 3 sequences of 5"),
            ((np.arange(10), 0, 5), "expected batch_size, length and steps >= 1"),
        ):
            with self.assertRaisesRegex(DataError, words):
                text.TokenLoader(*arguments)


if __name__ == "__main__":
    unittest.main()

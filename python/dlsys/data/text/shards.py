"""Token shards: memory-mapped files of tokens, and packed sequences of them as batches."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ...files import make_folder, replacing
from ...ops.random.device_batch import epoch_order
from ..numbered import NumberedBatches
from .corpus import Document
from .tokenizers import Tokenizer, tokenizer_from

Array = np.ndarray[Any, Any]
PARTS = ("train", "validation")
_ABOUT = "tokens.json"
_SHARD = 100_000_000  # tokens of a file


def write_tokens(
    folder: str | Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    validation: float = 0.05,
    shard: int = _SHARD,
) -> None:
    """Writes documents as token shards: `train-00000.npy` and so on, uint16 or uint32 (n,), and
    likewise `validation-…`; `tokens.json` comes last, so that a folder that has it is complete.

    Behind each document stands the token `tokenizer.end`. validation: the share of tokens that are
    held back, in pieces of at most a document, spread evenly. shard: the most tokens of a file.
    DataError for shares and texts that leave a part without tokens.
    """
    folder = Path(folder)
    make_folder(folder)
    dtype = np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32
    writers = {part: _Writer(folder, part, dtype, shard) for part in PARTS}
    for document in documents:
        tokens = np.append(tokenizer.encode(document.text), tokenizer.end)
        train, held = (writers[part].count for part in PARTS)
        # What this document may give so that the share is reached and not passed; its end, since
        # its beginning is what the rest follows from.
        due = int(validation * (train + held + len(tokens)) - held)
        due = due if due >= 2 else 0
        writers["train"].add(tokens[: len(tokens) - due])
        writers["validation"].add(tokens[len(tokens) - due :])
    counts = {part: writer.close() for part, writer in writers.items()}
    if min(counts.values()) < 2:
        raise DataError(
            f"{folder}: {counts['train']} tokens to train on and {counts['validation']} to "
            f"validate with are too few; take more text, or another share than {validation}"
        )
    about = {"format": 1, "tokenizer": tokenizer.as_dict(), "counts": counts}
    with replacing(folder / _ABOUT) as file:
        file.write(json.dumps(about, indent=1).encode())


class _Writer:
    """The shards of a part, one after the other."""

    def __init__(self, folder: Path, part: str, dtype: Any, shard: int) -> None:
        self._folder, self._part, self._dtype, self._shard = folder, part, dtype, shard
        self._pending: list[Array] = []
        self._waiting = self._files = self.count = 0

    def add(self, tokens: Array) -> None:
        self._pending.append(tokens.astype(self._dtype))
        self._waiting += len(tokens)
        self.count += len(tokens)
        while self._waiting >= self._shard:
            self._write(self._shard)

    def close(self) -> int:
        """Writes what is left; how many tokens there were."""
        if self._waiting:
            self._write(self._waiting)
        return self.count

    def _write(self, count: int) -> None:
        joined = np.concatenate(self._pending)
        with replacing(self._folder / f"{self._part}-{self._files:05d}.npy") as file:
            np.save(file, joined[:count])
        self._pending, self._waiting = [joined[count:]], len(joined) - count
        self._files += 1


class Tokens:
    """The tokens of a part of a folder that `write_tokens` wrote, memory-mapped: `tokens[a:b]` is
    an array (b - a,) int64, read where it is needed.

    part: "train" or "validation". DataError for a folder that is none, or is not complete.
    """

    def __init__(self, folder: str | Path, part: str = "train") -> None:
        self.folder, self.part = Path(folder), part
        about = _about(self.folder)
        if part not in PARTS:
            raise DataError(f"Tokens: part is {part!r}, expected {' or '.join(PARTS)}")
        self._description = about["tokenizer"]
        paths = sorted(self.folder.glob(f"{part}-*.npy"))
        try:
            self._shards = [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
        except (OSError, ValueError) as error:
            raise DataError(f"{self.folder}: a shard of {part} cannot be read: {error}") from None
        ends = np.cumsum([0, *map(len, self._shards)])
        if ends[-1] != about["counts"][part]:
            raise DataError(
                f"{self.folder}: the shards of {part} have {ends[-1]} tokens, {_ABOUT} says "
                f"{about['counts'][part]}; write them again"
            )
        self._ends = ends

    @property
    def tokenizer(self) -> Tokenizer:
        """The one that made the tokens."""
        return tokenizer_from(self._description)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, part: slice) -> Array:
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise DataError(f"Tokens: slices have step 1, got {step}")
        made = np.empty(max(stop - start, 0), np.int64)
        first = int(np.searchsorted(self._ends, start, side="right")) - 1
        at = start
        while at < stop:
            end = min(stop, int(self._ends[first + 1]))
            offset = int(self._ends[first])
            made[at - start : end - start] = self._shards[first][at - offset : end - offset]
            at, first = end, first + 1
        return made

    def __repr__(self) -> str:
        return f"Tokens({self.part}, {len(self):,} in {len(self._shards)} shards)"


def _about(folder: Path) -> dict[str, Any]:
    """The description of a folder of tokens."""
    path = folder / _ABOUT
    try:
        about = json.loads(path.read_bytes())
        counts = [about["counts"][part] for part in PARTS]
        fits = about["format"] == 1 and all(type(n) is int for n in counts)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; write_tokens makes such a folder") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        fits = False
    if not fits or "tokenizer" not in about:
        raise DataError(f"{path} is no description of token shards")
    return about


class TokenLoader(NumberedBatches):
    """Batches of packed sequences, for `train.fit`: inputs (batch_size, length) and targets of the
    same shape, which are one token later, both int64. A sequence goes on across documents.

    tokens: a `Tokens`, or an array (n,). steps: batches in what counts as an epoch, by default as
    many as one pass has. shuffle: each pass takes the sequences in an order of its own, and begins
    at an offset of its own, so that other tokens stand first. What a batch holds is a function of
    (seed, its number) alone, for resumed runs too. DataError for too few tokens.

    >>> loader = data.text.TokenLoader(np.arange(9), 2, 4)
    >>> [(x.tolist(), y.tolist()) for x, y in loader]
    [([[0, 1, 2, 3], [4, 5, 6, 7]], [[1, 2, 3, 4], [5, 6, 7, 8]])]
    """

    def __init__(
        self,
        tokens: Any,
        batch_size: int,
        length: int,
        steps: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if min(batch_size, length, steps or 1) < 1:
            raise DataError(
                f"TokenLoader: expected batch_size, length and steps >= 1, got {batch_size}, "
                f"{length} and {steps}"
            )
        self.tokens, self.length = tokens, length
        self.shuffle, self.seed = shuffle, seed
        # Shuffled passes begin at offsets below `length`, which leaves them a sequence less.
        self._count = (len(tokens) - 1) // length - shuffle
        self._batches = self._count // batch_size
        if self._batches < 1:
            raise DataError(
                f"TokenLoader: {len(tokens)} tokens make no batch of {batch_size} sequences of "
                f"{length}; take smaller batches, shorter sequences or more text"
            )
        self._order: tuple[int, Array] = (-1, np.arange(0))
        field = (length,), np.int64
        super().__init__(batch_size, steps or self._batches, {"tokens": field, "targets": field})

    def batch(self, number: int) -> tuple[Array, Array]:
        """The inputs and targets of a batch, by its number since the first epoch's beginning."""
        turn, at = divmod(number, self._batches)
        chosen = np.arange(at * self.batch_size, (at + 1) * self.batch_size)
        offset = 0
        if self.shuffle:
            chosen = self._order_of(turn)[chosen]
            offset = int(np.random.default_rng((self.seed, turn)).integers(self.length))
        starts = chosen * self.length + offset
        rows = np.stack([np.asarray(self.tokens[a : a + self.length + 1]) for a in starts])
        rows = rows.astype(np.int64, copy=False)
        return rows[:, :-1], rows[:, 1:]

    def _order_of(self, turn: int) -> Array:
        """The order of the sequences in a pass; the last one is remembered."""
        if self._order[0] != turn:
            self._order = (turn, epoch_order(self._count, self.seed, turn))
        return self._order[1]

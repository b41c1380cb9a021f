"""Tokenizers: text to tokens and back, by bytes, by characters, and by GPT-2's pairs of bytes."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError, how_to_install, quoted

Tokens = np.ndarray[Any, Any]
_END = "<|endoftext|>"  # as GPT-2's vocabulary has it
# How GPT-2 cuts text into words before it merges bytes: Radford et al. (2019), encoder.py of the
# published model.
_WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class Tokenizer:
    """The base of tokenizers: a subclass has `vocabulary`, how many tokens there are, `end`, the
    token between documents, `encode`, `bytes_of` and `as_dict`.
    """

    vocabulary: int
    end: int

    def encode(self, text: str) -> Tokens:
        """The tokens (n,) of a text, int64. DataError for a text that it cannot say."""
        raise NotImplementedError

    def bytes_of(self, token: int) -> bytes:
        """The UTF-8 bytes that a token stands for, which may be a part of a letter; none for
        `end`.
        """
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """What `tokenizer_from` makes an equal one of, as JSON values."""
        raise NotImplementedError

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD. DataError for a number that is
        no token.
        """
        return b"".join(self.bytes_of(self._checked(token)) for token in tokens).decode(
            "utf-8", "replace"
        )

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of tokens as they come, a piece a token: a letter comes with its last byte."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            yield decoder.decode(self.bytes_of(self._checked(token)))
        yield decoder.decode(b"", final=True)

    def _checked(self, token: int) -> int:
        if not 0 <= int(token) < self.vocabulary:
            raise DataError(
                f"{type(self).__name__}: {int(token)} is no token, they are 0 to "
                f"{self.vocabulary - 1}"
            )
        return int(token)


class ByteTokenizer(Tokenizer):
    """A token for each byte of UTF-8, and 256 between documents: it can say every text.

    >>> tokenizer = data.text.ByteTokenizer()
    >>> tokenizer.encode("né").tolist()
    [110, 195, 169]
    >>> tokenizer.decode([110, 195, 169])
    'né'
    """

    vocabulary, end = 257, 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int64)

    def bytes_of(self, token: int) -> bytes:
        return bytes([token]) if token != self.end else b""

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "byte"}


class CharTokenizer(Tokenizer):
    """A token for each of the given characters, and one between documents. DataError for none, or
    one twice.

    >>> tokenizer = data.text.CharTokenizer.of(["hello"])
    >>> tokenizer.characters, tokenizer.encode("hell").tolist()
    ('ehlo', [1, 0, 2, 2])
    """

    def __init__(self, characters: str) -> None:
        if not characters or len(set(characters)) < len(characters):
            raise DataError(f"CharTokenizer: expected different characters, got {characters!r:.60}")
        self.characters = characters
        self.vocabulary, self.end = len(characters) + 1, len(characters)
        points = np.array([ord(c) for c in characters])
        self._order = np.argsort(points)
        self._points = points[self._order]

    @classmethod
    def of(cls, texts: Iterable[str]) -> CharTokenizer:
        """The one for all characters of some texts, in their order in Unicode."""
        return cls("".join(sorted(set().union(*texts))))

    def encode(self, text: str) -> Tokens:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        at = np.minimum(np.searchsorted(self._points, points), len(self._points) - 1)
        strange = points[self._points[at] != points]
        if strange.size:
            raise DataError(
                f"CharTokenizer: {quoted(chr(strange[0]))} is none of its {len(self.characters)} "
                "characters; take the bytes of ByteTokenizer for texts of any characters"
            )
        return self._order[at].astype(np.int64)

    def bytes_of(self, token: int) -> bytes:
        return self.characters[token].encode("utf-8", "replace") if token != self.end else b""

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "char", "characters": self.characters}


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte pair encoding, from the user's `vocab.json` and `merges.txt` (also under their
    first names `encoder.json` and `vocab.bpe`), by `tokenizers`, or by `tiktoken` where that is
    missing. Sennrich et al. (2016), Radford et al. (2019).

    folder: where the files are. engine: "tokenizers" or "tiktoken". The text `<|endoftext|>` in a
    document is text like any other. DataError where files are missing or are none, and where
    neither package is there.
    """

    def __init__(self, folder: str | Path, engine: str | None = None) -> None:
        self.folder = Path(folder)
        vocabulary = _one_of(self.folder, "vocab.json", "encoder.json")
        merges = _one_of(self.folder, "merges.txt", "vocab.bpe")
        known = _vocabulary(vocabulary)
        self.vocabulary = len(known)
        if sorted(known.values()) != list(range(len(known))):
            raise DataError(f"{vocabulary}: tokens are not numbered from 0 on, each once")
        letters = {letter: byte for byte, letter in _letters().items()}
        self._bytes = [b""] * len(known)
        for text, token in known.items():
            if text != _END:
                try:
                    self._bytes[token] = bytes(letters[c] for c in text)
                except KeyError:
                    raise DataError(f"{vocabulary}: {quoted(text)} is no text of bytes") from None
        if _END not in known:
            raise DataError(f"{vocabulary} has no {_END}, which stands between documents")
        self.end = known[_END]
        self._encode = _engine(engine)(vocabulary, merges, self._bytes)

    def encode(self, text: str) -> Tokens:
        return np.array(self._encode(text), np.int64)

    def bytes_of(self, token: int) -> bytes:
        return self._bytes[token]

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "gpt2", "folder": str(self.folder.resolve())}


def tokenizer_from(what: Any) -> Tokenizer:
    """The tokenizer that `as_dict` described. DataError for anything else.

    what: the dictionary.
    """
    kind = what.get("kind") if isinstance(what, Mapping) else None
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char" and isinstance(what.get("characters"), str):
        return CharTokenizer(what["characters"])
    if kind == "gpt2" and isinstance(what.get("folder"), str):
        return GPT2Tokenizer(what["folder"])
    raise DataError(f"{quoted(what)} describes no tokenizer")


# ---- GPT-2's files ----
def _one_of(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder} has no {' and no '.join(names)}, which GPT-2's tokenizer needs")


def _vocabulary(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is no vocabulary: {error}") from None
    if not isinstance(found, dict) or not all(type(token) is int for token in found.values()):
        raise DataError(f"{path} is no vocabulary: expected a number for each text")
    return found


def _letters() -> dict[int, str]:
    """The letter by which GPT-2's files write each byte: itself where it is visible in Latin-1,
    else, in the order of the bytes, those from U+0100 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    found = {byte: chr(byte) for byte in visible}
    return found | {byte: chr(0x100 + k) for k, byte in enumerate(others)}


def _engine(name: str | None) -> Any:
    engines = {"tokenizers": _by_tokenizers, "tiktoken": _by_tiktoken}
    if name not in (None, *engines):
        raise DataError(f"GPT2Tokenizer: engine is {name!r}, expected {' or '.join(engines)}")
    for candidate in engines if name is None else [name]:
        try:
            __import__(candidate)
        except ImportError:
            continue
        return engines[candidate]
    wanted = name or "tokenizers"
    raise DataError(f"GPT-2's tokenizer needs {wanted}: {how_to_install(wanted)}")


def _by_tokenizers(vocabulary: Path, merges: Path, known: list[bytes]) -> Any:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the package raises the bare class
        raise DataError(f"{merges} has no merges: {error}") from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return lambda text: tokenizer.encode(text).ids


def _by_tiktoken(vocabulary: Path, merges: Path, known: list[bytes]) -> Any:
    import tiktoken

    # Merges are in the order of the tokens that they make, so that a token's number is its rank.
    ranks = {text: token for token, text in enumerate(known) if text}
    encoding = tiktoken.Encoding("gpt2", pat_str=_WORDS, mergeable_ranks=ranks, special_tokens={})
    return encoding.encode_ordinary

"""Text: splitting, normalizing, matching, counting words and labels."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ..call import Call
from ..registry import host
from .elementwise import wide

MOST_TEXT = 1 << 16  # characters that a regular expression is matched against


def _texts(values: list[str], shape: tuple[int, ...]) -> np.ndarray:
    made = np.empty(len(values), object)
    made[:] = values
    return made.reshape(shape)


@host("StringSplit", dynamic=True)
def _string_split(call: Call, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    by, most = call.get("delimiter") or None, call.get("maxsplit", -1)
    rows = [str(text).split(by, most if most is not None else -1) for text in x.ravel()]
    width = max(map(len, rows), default=0)
    flat = [word for row in rows for word in (*row, *[""] * (width - len(row)))]
    counts = np.asarray([len(row) for row in rows], np.int64).reshape(x.shape)
    return _texts(flat, (*x.shape, width)), counts


@host("StringNormalizer", dynamic=True)
def _string_normalizer(call: Call, x: np.ndarray) -> np.ndarray:
    change, stop = call.get("case_change_action", "NONE"), set(call.words("stopwords"))
    exact = bool(call.get("is_case_sensitive", 0))
    folded = stop if exact else {word.lower() for word in stop}
    words = [w for w in map(str, x.ravel()) if (w if exact else w.lower()) not in folded]
    changes: dict[str, Any] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}
    words = [changes[change](w) for w in words] or [""]
    return _texts(words, (len(words),) if x.ndim == 1 else (1, len(words)))


@host("RegexFullMatch")
def _regex(call: Call, x: np.ndarray) -> np.ndarray:
    pattern = call.get("pattern")
    if re.search(r"[+*}]\)?[+*{]|\)[+*{]", pattern):  # Python's matcher would backtrack without end
        raise call.error("a repeated group is not supported in a regular expression")
    compiled = re.compile(pattern)
    found = [bool(compiled.fullmatch(str(text)[:MOST_TEXT])) for text in x.ravel()]
    return np.asarray(found, bool).reshape(x.shape)


@host("TfIdfVectorizer")
def _tfidf(call: Call, x: np.ndarray) -> np.ndarray:
    low, high = call.get("min_gram_length"), call.get("max_gram_length")
    skips, starts = call.get("max_skip_count", 0), [*call.get("ngram_counts")]
    pool = call.get("pool_int64s") or call.words("pool_strings")
    at, weights = call.get("ngram_indexes"), call.get("weights")
    grams: dict[tuple[Any, ...], int] = {}
    for k, (a, b) in enumerate(zip(starts, [*starts[1:], len(pool)])):
        for i in range(a, b, k + 1):
            if low <= k + 1 <= high:
                grams[tuple(pool[i : i + k + 1])] = len(grams)
            else:
                grams[(None, k, i)] = len(grams)
    rows = x if x.ndim == 2 else x[None]
    counts = np.zeros((len(rows), max(at, default=-1) + 1), np.float32)
    for r, row in enumerate(rows.tolist()):
        for n in range(low, high + 1):
            for skip in range(1, (skips + 2) if n > 1 else 2):
                for i in range(len(row) - skip * (n - 1)):
                    found = grams.get(tuple(row[i : i + skip * (n - 1) + 1 : skip]))
                    if found is not None:
                        counts[r, at[found]] += 1
    counts = _weighted(call.get("mode"), counts, at, weights)
    return counts if x.ndim == 2 else counts[0]


def _weighted(mode: str, counts: np.ndarray, at: Any, weights: Any) -> np.ndarray:
    """Counts, weights where there are any, or their product."""
    scale = np.ones(counts.shape[1], np.float32)
    if weights:
        scale[np.asarray(at)] = weights
    if mode == "TF":
        return counts
    return ((counts > 0) if mode == "IDF" else counts) * scale


@host("LabelEncoder", domain="ai.onnx.ml")
def _label_encoder(call: Call, x: np.ndarray) -> np.ndarray:
    from ..reader import array_of

    def listed(kind: str) -> tuple[list[Any], Any]:
        for suffix, dtype in (("int64s", np.int64), ("floats", np.float32), ("strings", object)):
            if f"{kind}_{suffix}" in call.attrs:
                texts = suffix == "strings"
                return (call.words(f"{kind}_strings") if texts else [*call.get(f"{kind}_{suffix}")],
                        dtype)  # fmt: skip
        tensor = array_of(call.attrs[f"{kind}_tensor"], None)
        return [v.decode() if isinstance(v, bytes) else v for v in tensor.tolist()], tensor.dtype

    (keys, _), (found, dtype) = listed("keys"), listed("values")
    kind = np.dtype(dtype).kind
    usual: Any = {
        "O": lambda: call.get("default_string", "_Unused"),
        "i": lambda: call.get("default_int64", -1),
    }.get(kind, lambda: call.get("default_float", -0.0))()
    if "default_tensor" in call.attrs:
        usual = array_of(call.attrs["default_tensor"], None).ravel()[0]
        usual = usual.decode() if isinstance(usual, bytes) else usual
    table = dict(zip(keys, found))
    nan = next((v for k, v in table.items() if k != k), usual)
    made = [nan if v != v else table.get(v, usual) for v in wide(x).ravel().tolist()]
    return np.asarray(made, dtype).reshape(x.shape)

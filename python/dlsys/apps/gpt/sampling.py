"""Writes with a GPT that was trained, and measures one."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ... import nn, train
from ...data import text
from ...errors import DataError
from ...runtime.device import Context
from ..usage import UsageError
from .training import prompt_of

_TOKENS = 500


def load(folder: Path, tokenizer: str | None) -> tuple[nn.GPT, text.Tokenizer]:
    """The best model of a run, or the GPT-2 whose files are in a folder, with its tokenizer."""
    if (folder / "run.json").exists():
        model = train.load_model(folder)
        if not isinstance(model, nn.GPT):
            raise DataError(f"{folder} has the run of a {type(model).__name__}, not of a GPT")
        if tokenizer is not None:
            raise UsageError(f"the run in {folder} has its tokenizer: leave --tokenizer out")
        return model, text.Tokens(folder / "tokens").tokenizer
    model = train.load_gpt2(folder)
    found = text.GPT2Tokenizer(tokenizer or folder)
    if found.vocabulary != model.config.vocabulary:
        raise DataError(
            f"{folder} has a model of {model.config.vocabulary} tokens and a tokenizer of "
            f"{found.vocabulary}"
        )
    return model, found


def write(options: argparse.Namespace, ctx: Context | None) -> None:
    """Prints a prompt and what follows, a token at a time."""
    model, tokenizer = load(options.folder, options.tokenizer)
    given = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    sampling = nn.Sampling(**{name: value for name, value in given.items() if value is not None})
    prompt = options.prompt or ""
    decoder = nn.Decoder(model, ctx)
    print(prompt, end="", flush=True)
    drawn = decoder.generate(
        prompt_of(tokenizer, prompt), options.tokens or _TOKENS, sampling, options.seed or 0
    )
    for piece in tokenizer.stream(drawn):
        print(piece, end="", flush=True)
    print()


def evaluate(options: argparse.Namespace, ctx: Context | None) -> None:
    """Prints the mean loss a token, its perplexity, and the bits that a byte of text takes."""
    model, tokenizer = load(options.folder, options.tokenizer)
    if options.text:
        joined = "".join(document.text for document in text.text_files(options.text))
        tokens = tokenizer.encode(joined)
    elif (options.folder / "tokens").exists():
        tokens = text.Tokens(options.folder / "tokens", "validation")[:]
    else:
        raise UsageError(f"{options.folder} has no tokens of a run: say over which --text")
    length = min(model.config.context, len(tokens) - 1)
    sequences = max((len(tokens) - 1) // max(length, 1), 1)
    data = text.TokenLoader(tokens, min(options.batch_size or 16, sequences), max(length, 1))
    loss = train.evaluate(model, data, metrics=(), ctx=ctx)["loss"]
    counted = data.samples * length
    nbytes = sum(len(tokenizer.bytes_of(int(token))) for token in tokens[1 : counted + 1])
    print(f"loss {loss:.4f} a token, perplexity {math.exp(loss):.2f}", end=", ")
    print(f"{loss / math.log(2) * counted / max(nbytes, 1):.3f} bits a byte, {counted:,} tokens")

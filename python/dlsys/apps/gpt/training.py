"""Trains a GPT: its text, its run, and what a run prints."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ... import functional as F
from ... import nn, optim, profile, train
from ...data import text
from ...learn.gemm import limit_of
from ...runtime.device import Context, device_name
from .. import run_file
from ..progress import kept

_MODEL = ("layers", "heads", "features", "context", "dropout", "positions", "norm", "mlp")
_MOST_SAMPLED = 200  # tokens of a sample while it trains
_VALIDATED = 40  # batches, a sample of the text held back; `evaluate` takes all of it


@dataclass(frozen=True)
class Settings(run_file.Counted):
    """A run's settings, which `run.json` has. `steps` are updates, `every` those between
    validations, `accumulate` the batches of one; `lr` grows over `warmup` updates and falls to a
    tenth along a cosine.
    """

    tokenizer: str = "char"
    max_bytes: int = 20_000_000
    layers: int = 4
    heads: int = 4
    features: int = 128
    context: int = 64
    dropout: float = 0.0
    positions: str = "learned"
    norm: str = "layer"
    mlp: str = "gelu"
    steps: int = 2000
    every: int = 200
    batch_size: int = 12
    accumulate: int = 1
    lr: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: str = "fp32"
    seed: int = 0
    prompt: str = "def "
    tokens: int = _MOST_SAMPLED


# Recipes of `--preset`, whose settings options may change. "30m" is for a GPU with tensor cores of
# bfloat16: 31.9 million parameters, which go over the default corpus several times.
PRESETS: dict[str, dict[str, Any]] = {
    "30m": dict(
        layers=10, heads=8, features=512, context=512, dropout=0.1, batch_size=64, steps=15_000,
        every=500, lr=6e-4, warmup=300, precision="bf16",
    ),
}  # fmt: skip


def run(options: argparse.Namespace, ctx: Context | None) -> None:
    """Trains a new model, or goes on with a run. KeyboardInterrupt, after Ctrl-C, says what was
    done.
    """
    folder = options.folder
    settings = _resumed(folder, options) if options.resume else _begun(folder, options)
    tokens = {part: text.Tokens(folder / "tokens", part) for part in ("train", "validation")}
    model = nn.GPT(_config(settings, tokens["train"].tokenizer.vocabulary), seed=settings.seed)
    batch = settings.batch_size, settings.context
    data = text.TokenLoader(
        tokens["train"], *batch, settings.every * settings.accumulate, shuffle=True,
        seed=settings.seed,
    )  # fmt: skip
    lines = Lines(settings, tokens["train"].tokenizer)
    train.fit(
        model,
        data,
        optimizer_of(settings),
        F.cross_entropy,
        settings.epochs,
        validation=_validation(tokens["validation"], *batch),
        ctx=ctx,
        metrics=(),
        callbacks=kept(folder, lines),
        log_every=max(settings.every * settings.accumulate // 10, 1),
        parameters=nn.decay_groups(model, settings.weight_decay),
        resume=folder if options.resume else None,
        precision=settings.precision,
    )


def optimizer_of(settings: Settings) -> optim.Optimizer:
    """AdamW along a cosine to a tenth of the rate, after a warm-up."""
    total = settings.epochs * settings.every
    warmup = min(settings.warmup, max(total // 10, 1))
    cosine = optim.Cosine(settings.lr, max(total - warmup, 1), settings.lr / 10)
    return optim.AdamW(
        optim.Warmup(cosine, warmup, 1 / warmup),
        beta2=0.99,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip or None,
        accumulate=settings.accumulate,
    )


def _validation(tokens: text.Tokens, batch_size: int, length: int) -> text.TokenLoader:
    """All batches of the text that is held back, or, of more, the same sample each time."""
    everything = text.TokenLoader(tokens, batch_size, length)
    if len(everything) <= _VALIDATED:
        return everything
    return text.TokenLoader(tokens, batch_size, length, _VALIDATED, shuffle=True)


def _config(settings: Settings, vocabulary: int) -> nn.GPTConfig:
    given = {name: getattr(settings, name) for name in _MODEL}
    return nn.GPTConfig(vocabulary=vocabulary, **given)


# ---- the folder of a run ----
def _begun(folder: Path, options: argparse.Namespace) -> Settings:
    """The settings of a new run, whose text is tokens in its folder then."""
    run_file.begin(folder, "train")
    given = {name: value for name, value in vars(options).items() if value is not None}
    settings = run_file.chosen(Settings, PRESETS.get(options.preset, {}) | given)
    documents = _documents(options, settings)
    tokenizer = _tokenizer(settings.tokenizer, documents)
    _config(settings, tokenizer.vocabulary)  # refuses sizes before the text is written
    text.write_tokens(folder / "tokens", documents, tokenizer)
    run_file.write(folder, settings)
    return settings


def _resumed(folder: Path, options: argparse.Namespace) -> Settings:
    """The settings of the run in a folder. UsageError for options that differ from them."""
    settings = run_file.read(folder, Settings)
    run_file.check_same(folder, settings, vars(options))
    return settings


def _documents(options: argparse.Namespace, settings: Settings) -> list[text.Document]:
    limit = settings.max_bytes
    if options.text:
        return list(text.text_files(options.text, options.max_bytes))
    return list(text.python_library(limit))


def _tokenizer(name: str, documents: list[text.Document]) -> text.Tokenizer:
    if name == "byte":
        return text.ByteTokenizer()
    if name == "char":
        return text.CharTokenizer.of(document.text for document in documents)
    return text.GPT2Tokenizer(name)


# ---- what a run prints ----
class Lines(train.Progress):
    """A line for each validation: losses, rate, tokens a second, and the use of the chip's peak
    where that is known, else the rate of its products; then a sample.
    """

    def __init__(self, settings: Settings, tokenizer: text.Tokenizer) -> None:
        super().__init__("tokens")
        self._settings, self._tokenizer = settings, tokenizer
        self._flops_per_token = 0.0
        self._peak: float | None = None
        self._decoder: nn.Decoder | None = None

    def on_start(self, run: train.Run) -> None:
        model: Any = run.model
        per_batch = profile.product_flops(run.executor.eval_node_list)
        self._flops_per_token = per_batch / (run.data.batch_size * run.data.length)
        name = device_name(run.ctx) if run.ctx is not None else "numpy"
        peak = limit_of(name, run.executor.precision)
        self._peak = None if peak is None else peak * 1e12
        self._decoder = nn.Decoder(model, run.ctx)
        print(
            f"{model.num_parameters():,} parameters, {len(run.data.tokens):,} tokens of "
            f"{self._tokenizer.vocabulary}, {self._flops_per_token / 1e6:,.2f} MFLOP a token, on "
            f"{run.ctx or 'numpy'} ({name})",
            flush=True,
        )
        if run.step:
            print(f"going on after {run.step // self._settings.accumulate} steps", flush=True)

    def on_epoch_end(self, run: train.Run, record: dict[str, Any]) -> None:
        super().on_epoch_end(run, record)
        rate = record["samples_per_second"] * run.data.length
        record["tokens_per_second"] = rate
        record["flops_per_second"] = rate * self._flops_per_token
        if self._peak:
            record["mfu"] = record["flops_per_second"] / self._peak

    def on_record(self, run: train.Run, record: dict[str, Any]) -> None:
        used = f"{record['flops_per_second'] / 1e9:,.1f} GFLOP/s"
        if "mfu" in record:
            used = f"MFU {record['mfu']:.1%}"
        done = record["step"] // self._settings.accumulate
        print(
            f"step {done}/{self._settings.epochs * self._settings.every}",
            f"loss {record['loss']:.4f}",
            f"val_loss {record['val_loss']:.4f}",
            f"lr {record['lr']:.2e}",
            f"{record['tokens_per_second']:,.0f} tokens/s",
            used,
            sep="  ",
            flush=True,
        )
        print(f"  {self._sample(record['epoch'])!r}", flush=True)

    def _sample(self, number: int) -> str:
        """What the model writes by now; equal seeds write the same."""
        assert self._decoder is not None
        self._decoder.reset()
        prompt = prompt_of(self._tokenizer, self._settings.prompt)
        rng = np.random.default_rng((self._settings.seed, number))
        drawn = self._decoder.generate(
            prompt, min(self._settings.tokens, _MOST_SAMPLED), nn.Sampling(0.8), rng
        )
        return self._settings.prompt + "".join(self._tokenizer.stream(drawn))


def prompt_of(tokenizer: text.Tokenizer, prompt: str) -> np.ndarray:
    """The tokens of a prompt; of an empty one the token between documents, behind which one
    begins.
    """
    return tokenizer.encode(prompt) if prompt else np.array([tokenizer.end])

"""Generation with a GPT: one program a token, over a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import autodiff as ad
from ...errors import DataError, GraphError
from ...graph.lines import where
from ...ops.leaf import home_of
from ...runtime.device import Context
from .gpt import GPT

Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits: they are divided by `temperature`, where 0 takes the
    largest; only the `top_k` largest count, and of those the fewest whose probabilities reach
    `top_p` together (Holtzman et al., 2020). GraphError for values out of range.

    >>> nn.Sampling(temperature=0).draw(np.array([0.1, 2.0, 1.0]), np.random.default_rng(0))
    1
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        fits = 0 <= self.temperature < float("inf")
        fits &= self.top_k is None or self.top_k >= 1
        fits &= self.top_p is None or 0 < self.top_p <= 1
        if not fits:
            raise GraphError(
                "Sampling: expected temperature >= 0, top_k >= 1 and 0 < top_p <= 1, got "
                f"{self.temperature}, {self.top_k} and {self.top_p} [{where()}]"
            )

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """The probabilities (vocabulary,) float64 of logits (vocabulary,)."""
        logits = logits.astype(np.float64)
        order = np.argsort(-logits, kind="stable")
        if self.temperature == 0:
            order = order[:1]
        order = order[: self.top_k]
        chances = np.exp((logits[order] - logits[order[0]]) / (self.temperature or 1))
        chances /= chances.sum()
        if self.top_p is not None:
            # A token counts while those before it do not reach top_p, so that one always does.
            counted = np.concatenate([[0.0], np.cumsum(chances)[:-1]]) < self.top_p
            order, chances = order[counted], chances[counted] / chances[counted].sum()
        made = np.zeros(len(logits))
        made[order] = chances
        return made

    def draw(self, logits: np.ndarray, rng: np.random.Generator) -> int:
        """A token, from logits (vocabulary,)."""
        chances = self.probabilities(logits)
        # The last token that has a probability, where rounding leaves the sum below the number.
        found = np.searchsorted(np.cumsum(chances), rng.random(), side="right")
        return int(min(found, np.flatnonzero(chances)[-1]))


class Decoder:
    """A GPT with the keys and values of the tokens that it has read, so that each further token
    costs one program of fixed shapes, which a GPU replays as one captured graph.

    model: the GPT. ctx: by default where its Parameters are. Prompts are read in pieces whose
    lengths are powers of two, so that any length takes few programs. The context's end drops the
    older half of the tokens, and what is left is read anew. The Decoder shares the model's
    Parameters: behind a `reset` it writes with those of then.

    >>> model = nn.GPT(vocabulary=5, context=8, layers=1, heads=1, features=4, seed=0)
    >>> decoder = nn.Decoder(model)
    >>> len(list(decoder.generate([1, 2], 10, nn.Sampling(top_k=3), seed=0)))
    10
    """

    def __init__(self, model: GPT, ctx: Context | None = None) -> None:
        self.model = model
        self.ctx = ctx or home_of(model)
        self.tokens: list[int] = []
        config = model.config
        shape = (1, config.heads, config.context, config.head_size)
        self._memory = [
            (_zeros("keys", shape), _zeros("values", shape)) for _ in range(config.layers)
        ]
        self._programs: dict[int, tuple[ad.Executor, ad.Node, ad.Node]] = {}

    def __repr__(self) -> str:
        context = self.model.config.context
        return f"Decoder({len(self.tokens)} of {context} tokens, on {self.ctx or 'numpy'})"

    def reset(self) -> None:
        """Forgets all tokens."""
        self.tokens = []

    def read(self, tokens: Tokens) -> np.ndarray:
        """Reads further tokens; the logits (vocabulary,) float32 of the one that follows. DataError
        for none.
        """
        if not len(tokens):
            raise DataError("a Decoder reads at least one token, got none")
        context = self.model.config.context
        left = [int(token) for token in tokens]
        if len(self.tokens) + len(left) > context:
            left = (self.tokens + left)[-max(context // 2, 1) :]
            self.tokens = []
        while left:
            count = 1 << (len(left).bit_length() - 1)
            logits = self._step(left[:count])
            left = left[count:]
        return logits

    def generate(
        self,
        prompt: Tokens,
        count: int,
        sampling: Sampling | None = None,
        seed: int | np.random.Generator = 0,
    ) -> Iterator[int]:
        """The next `count` tokens behind a prompt, one by one.

        prompt: tokens, at least one. sampling: by default with temperature 1 from all tokens. seed:
        of the draws: equal seeds give equal tokens.
        """
        rng, sampling = np.random.default_rng(seed), sampling or Sampling()
        logits = self.read(prompt)
        for k in range(count):
            token = sampling.draw(logits, rng)
            yield token
            if k + 1 < count:
                logits = self.read([token])

    def _step(self, tokens: list[int]) -> np.ndarray:
        if len(tokens) not in self._programs:
            self._programs[len(tokens)] = self._program(len(tokens))
        executor, given, start = self._programs[len(tokens)]
        feeds = {
            given: np.array([tokens], np.int64),
            start: np.array(len(self.tokens), np.int64),
        }
        logits: Any = executor.run(feeds, convert_to_numpy_ret_vals=True)[0]
        self.tokens += tokens
        return logits[0]

    def _program(self, length: int) -> tuple[ad.Executor, ad.Node, ad.Node]:
        tokens = ad.Variable("tokens", (1, length), np.int64)
        start = ad.Variable("start", (), np.int64)
        with self.model.in_mode(training=False):
            logits, memory = self.model.cached(tokens, start, self._memory)
        stored = [
            ad.assign_op(old, new)
            for before, after in zip(self._memory, memory)
            for old, new in zip(before, after)
        ]
        update = ad.group_op(*stored, name="remember")
        return ad.Executor([logits, update], ctx=self.ctx), tokens, start


def _zeros(name: str, shape: tuple[int, ...]) -> ad.Parameter:
    return ad.Parameter(np.zeros(shape, np.float32), name, trainable=False)

"""Generation with a GPT: one program a token, over a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import autodiff as ad
from ... import functional as F
from ...errors import DataError, GraphError
from ...graph.lines import where
from ...ops.leaf import home_of
from ...ops.random.token import draw_token, draw_token_op, token_probabilities
from ...runtime.device import Context
from .gpt import GPT

_MOST = 32  # tokens of a group

Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits: they are divided by `temperature`, where 0 takes the
    largest; only the `top_k` largest count, and of those the fewest whose probabilities reach
    `top_p` together (Holtzman et al., 2020). GraphError for values out of range.

    >>> nn.Sampling(temperature=0).probabilities(np.array([0.1, 2.0, 1.0]))
    array([0., 1., 0.])
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
        return token_probabilities(logits, *self.settings)

    @property
    def settings(self) -> tuple[float, int, float]:
        """The numbers as kernels take them; a top_k of 0 means all tokens."""
        return self.temperature, self.top_k or 0, 1.0 if self.top_p is None else self.top_p


class Decoder:
    """A GPT with the keys and values of the tokens that it has read, so that each further token
    costs one program of fixed shapes, which a GPU replays as one captured graph.

    model: the GPT. ctx: by default where its Parameters are. Prompts are read in pieces whose
    lengths are powers of two, so that any length takes few programs. The program that writes draws
    its token on the device and goes on from it, so that tokens are queued in groups and the host
    waits once a group. The context's end drops the older half of the tokens, and what is left is
    read anew. The Decoder shares the model's Parameters: behind a `reset` it writes with those of
    then.

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
        self._writer: ad.Executor | None = None
        # What the writing program goes on from: seed, number of the draw, position, and the last
        # tokens, of which the last is to be read.
        self._state = ad.Parameter(np.zeros(3 + _MOST, np.int64), "state", trainable=False)
        self._settings = ad.Parameter(np.zeros(3, np.float32), "settings", trainable=False)

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
        sampling = sampling or Sampling()
        number = int(np.random.default_rng(seed).integers(2**63))
        logits, last, drawn, group = self.read(prompt), 0, 0, 1
        while drawn < count:
            if drawn:  # the last token is still to be read
                room = self.model.config.context - len(self.tokens)
                if room:
                    most = min(group, room, count - drawn)
                    for token in self._written(last, sampling, number, drawn, most):
                        self.tokens.append(last)
                        last, drawn = token, drawn + 1
                        yield token
                    group = min(2 * group, _MOST)
                    continue
                logits = self.read([last])
            last, drawn = draw_token(logits, sampling.settings, number, drawn), drawn + 1
            yield last

    def _written(
        self, last: int, sampling: Sampling, seed: int, drawn: int, count: int
    ) -> list[int]:
        """The `count` tokens behind `last`, which is not read yet; `drawn` were drawn before."""
        if self._writer is None:
            self._writer = self._writing()
        state = np.zeros(self._state.shape, np.int64)
        state[:3], state[-1] = (seed, drawn, len(self.tokens)), last
        self._state.set(state)
        settings = np.array(sampling.settings, np.float32)
        if not np.array_equal(self._settings.asnumpy(), settings):
            self._settings.set(settings)
        self._writer.run_many(count)
        return self._state.asnumpy()[-count:].tolist()

    def _writing(self) -> ad.Executor:
        """The program that reads the last token of the state and draws the next one into it."""
        state = self._state
        seed, step, start = (F.reshape(state[k : k + 1], ()) for k in range(3))
        with self.model.in_mode(training=False):
            logits, stored = self.model.cached(F.reshape(state[-1:], (1, 1)), start, self._memory)
        token = draw_token_op(logits, self._settings, seed, step)
        counted = state[:3] + np.array([0, 1, 1])
        update = ad.assign_op(state, F.concatenate([counted, state[4:], token]))
        return ad.Executor([ad.group_op(*stored, update, name="write")], ctx=self.ctx)

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
            logits, stored = self.model.cached(tokens, start, self._memory)
        update = ad.group_op(*stored, name="remember")
        return ad.Executor([logits, update], ctx=self.ctx), tokens, start


def _zeros(name: str, shape: tuple[int, ...]) -> ad.Parameter:
    return ad.Parameter(np.zeros(shape, np.float32), name, trainable=False)

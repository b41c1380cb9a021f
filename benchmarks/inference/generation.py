"""The time of a token that GPT-2 124M writes at batch 1, over a cache of keys and values.

    python benchmarks generation [--device gpu] [--tokens 256]

Weights are random, which changes no time. `us` are of a token between two that a caller gets from
`Decoder.generate`, median and quartiles of groups of 32, at the beginning of the context and near
its end, for several ways to draw. Writes generation_<device>.json.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from dlsys import nn
from dlsys.eager.device import context_of
from shared import measure

WAYS = {
    "the largest": nn.Sampling(0),
    "all": nn.Sampling(),
    "top_k 40": nn.Sampling(0.8, top_k=40),
    "top_p 0.9": nn.Sampling(top_p=0.9),
    "top_k 200, top_p 0.9": nn.Sampling(0.8, 200, 0.9),
}
GROUP = 32


def token_us(decoder: nn.Decoder, sampling: nn.Sampling, position: int, count: int) -> list[float]:
    """Microseconds a token of each group, behind a prompt of `position` tokens."""
    prompt = np.random.default_rng(0).integers(0, decoder.model.config.vocabulary, position)
    decoder.reset()
    times, start = [], 0.0
    for k, _ in enumerate(decoder.generate(prompt, 2 * GROUP + count, sampling, seed=0)):
        if k >= 2 * GROUP and k % GROUP == 0:
            now = time.perf_counter()
            times += [(now - start) / GROUP * 1e6] if start else []
            start = now
    return times


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--device", choices=("numpy", "cpu", "gpu"), default="gpu")
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    ctx = context_of(options.device)
    model = nn.GPT(seed=0)
    if ctx is not None:
        model.to(ctx)
    decoder = nn.Decoder(model, ctx)
    found: dict[str, Any] = {}
    for name, sampling in WAYS.items():
        token_us(decoder, sampling, 32, GROUP)
        last = model.config.context - 2 * GROUP - options.tokens
        found[name] = {
            str(position): measure.summary(token_us(decoder, sampling, position, options.tokens), 1)
            for position in (32, last)
        }
        texts = (f"{us['median']:.0f} µs at {position}" for position, us in found[name].items())
        print(f"{name}: {', '.join(texts)}", flush=True)
    results = {"device": options.device, "positions": "of the first token", "us": found}
    print(measure.save(f"generation_{options.device}", options, results))


if __name__ == "__main__":
    main()

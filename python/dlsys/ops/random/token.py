"""A token drawn from logits, by settings that are state, so that one captured program serves all of
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...arguments.signature import Signature
from ...graph.node import Node, Op
from ...graph.spec import Spec
from ..optim.assign import check_count
from .philox import wide_unit, words


def token_probabilities(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float
) -> np.ndarray:
    """The probabilities (n,) float64 by which a token is drawn from logits (n,): softmax(logits /
    temperature), where only the `top_k` largest count, all with 0, and of those the fewest whose
    probabilities reach `top_p` together. Temperature 0 takes the largest; among equals the first
    count.
    """
    logits = logits.astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    if temperature == 0:
        order = order[:1]
    order = order[: top_k or None]
    chances = np.exp((logits[order] - logits[order[0]]) / (temperature or 1))
    chances /= chances.sum()
    if top_p < 1:
        # A token counts while those before it do not reach top_p, so that one always does.
        counted = np.concatenate([[0.0], np.cumsum(chances)[:-1]]) < top_p
        order, chances = order[counted], chances[counted] / chances[counted].sum()
    made = np.zeros(len(logits))
    made[order] = chances
    return made


def draw_token(
    logits: np.ndarray,
    settings: Sequence[float] | np.ndarray,
    seed: int,
    step: int,
    row: int = 0,
) -> int:
    """A token from logits (n,), by the temperature, top_k and top_p of `settings`."""
    temperature, top_k, top_p = settings
    chances = token_probabilities(logits, float(temperature), int(top_k), float(top_p))
    sums = np.cumsum(chances)
    high, low = words(seed, step, 0, 4 * row, 2)
    found = np.searchsorted(sums, wide_unit(high, low) * sums[-1], side="right")
    # The last token that has a probability, where rounding leaves the sum below the number.
    return int(min(found, np.flatnonzero(chances)[-1]))


class DrawTokenOp(Op):
    """A token of each row of logits (rows, n), drawn as `token_probabilities` says: (rows,) int64.

    settings: (3,) float32, the temperature, top_k (0: all) and top_p. seed, step: int64 scalars:
    of these and of the row's number the draw is a function, by Philox. Devices draw the same token,
    but where the number falls within rounding of the border between two.
    """

    name = kernel = "draw_token"
    vocabulary = False
    random = True
    step_at = 3
    any_dtype = True
    signature = Signature("logits", "settings", "seed", "step")

    def infer(self, node: Node, *specs: Spec) -> Spec:
        logits, settings, seed, step = specs
        check_count(node, "seed", seed)
        check_count(node, "step", step)
        for x, spec in zip(node.inputs, specs[:2]):
            if spec.dtype is not None and spec.dtype.kind != "f":
                raise node.error(
                    f"expected logits and settings in floats, got {x.name} {spec.dtype}"
                )
        if len(logits.shape) != 2 or logits.shape[1] < 1 or settings.shape != (3,):
            raise node.error(
                f"expected logits (rows, n) and settings (3,), got {logits.shape} and "
                f"{settings.shape}"
            )
        return Spec(logits.shape[:1], np.dtype(np.int64))

    def numpy(self, node: Node, *arrays: np.ndarray) -> None:
        logits, settings, seed, step, tokens = arrays
        for row, values in enumerate(logits):
            tokens[row] = draw_token(values, settings, int(seed.item()), int(step.item()), row)

    def gradient(self, node: Node, output_grad: Node) -> list[Node | None]:
        return [None] * 4

    def cost(self, node: Node, inputs: list[Spec], output: Spec) -> int:
        return 60 * inputs[0].size


draw_token_op = DrawTokenOp()

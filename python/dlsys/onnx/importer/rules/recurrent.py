"""RNN, GRU and LSTM, unrolled over time: of nodes by matrix products, of arrays on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .... import functional as F
from ..call import Call
from ..registry import Unfit, graph, host
from .elementwise import _Arrays

MOST_STEPS = 4096  # of a sequence that is unrolled


class _OfArrays:
    """What the steps use, of arrays."""

    concatenate, stack, reshape, transpose = (
        np.concatenate, np.stack, np.reshape, np.transpose
    )  # fmt: skip
    sigmoid, tanh, clip = _Arrays.sigmoid, np.tanh, np.clip

    @staticmethod
    def relu(x: np.ndarray) -> np.ndarray:
        return np.maximum(x, 0)

    @staticmethod
    def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a @ b


def _activations(call: Call, ns: Any, usual: list[str], direction: int) -> list[Callable[..., Any]]:
    names = call.words("activations") or usual * 2
    named = {
        "sigmoid": ns.sigmoid, "tanh": ns.tanh, "relu": ns.relu,
        "affine": lambda x: (
            x * _of(call, "activation_alpha", 1.0) + _of(call, "activation_beta", 0.0)
        ),
        "hardsigmoid": lambda x: ns.clip(x * 0.2 + 0.5, 0.0, 1.0),
    }  # fmt: skip
    n = len(usual)
    wanted = [name.lower() for name in names[direction * n : direction * n + n]]
    if not set(wanted) <= set(named):
        raise call.error(f"activations {names} are not supported")
    return [named[name] for name in wanted]


def _of(call: Call, name: str, default: float) -> float:
    values = call.get(name)
    return float(values[0]) if values else default


def _clipped(call: Call, ns: Any, x: Any) -> Any:
    limit = call.get("clip")
    return x if limit is None else ns.clip(x, -float(limit), float(limit))


def _rnn_step(call: Call, ns: Any, acts: Any, x: Any, state: Any, R: Any, bias: Any, n: int,
              peep: Any) -> Any:  # fmt: skip
    z = x + ns.matmul(state[0], R)
    z = z if bias is None else z + (bias[:n] + bias[n:])
    return (acts[0](_clipped(call, ns, z)),)


def _lstm_step(call: Call, ns: Any, acts: Any, x: Any, state: Any, R: Any, bias: Any, n: int,
               peep: Any) -> Any:  # fmt: skip
    h, c = state
    z = x + ns.matmul(h, R)
    z = z if bias is None else z + (bias[: 4 * n] + bias[4 * n :])
    i, o, f, g = (z[:, k * n : (k + 1) * n] for k in range(4))
    if peep is not None:
        i, f = i + peep[:n] * c, f + peep[2 * n :] * c
    i = acts[0](_clipped(call, ns, i))
    f = 1.0 - i if call.get("input_forget", 0) else acts[0](_clipped(call, ns, f))
    c = f * c + i * acts[1](_clipped(call, ns, g))
    o = acts[0](_clipped(call, ns, o if peep is None else o + peep[n : 2 * n] * c))
    return o * acts[2](c), c


def _gru_step(call: Call, ns: Any, acts: Any, x: Any, state: Any, R: Any, bias: Any, n: int,
              peep: Any) -> Any:  # fmt: skip
    (h,) = state
    wb = rb = None
    if bias is not None:
        wb, rb = bias[: 3 * n], bias[3 * n :]
        x = x + wb
    zr = x[:, : 2 * n] + ns.matmul(h, R[:, : 2 * n])
    zr = acts[0](_clipped(call, ns, zr if rb is None else zr + rb[: 2 * n]))
    z, r = zr[:, :n], zr[:, n:]
    if call.get("linear_before_reset", 0):
        hidden = ns.matmul(h, R[:, 2 * n :])
        hidden = r * (hidden if rb is None else hidden + rb[2 * n :])
    else:
        hidden = ns.matmul(r * h, R[:, 2 * n :])
        hidden = hidden if rb is None else hidden + rb[2 * n :]
    g = acts[1](_clipped(call, ns, x[:, 2 * n :] + hidden))
    return ((1.0 - z) * g + z * h,)


_KINDS: dict[str, tuple[Callable[..., Any], list[str], int]] = {
    "RNN": (_rnn_step, ["Tanh"], 1),
    "LSTM": (_lstm_step, ["Sigmoid", "Tanh", "Tanh"], 2),
    "GRU": (_gru_step, ["Sigmoid", "Tanh"], 1),
}
_KINDS["DynamicQuantizeLSTM"] = _KINDS["LSTM"]


def _scan(call: Call, ns: Any, zeros: Any, X: Any, W: Any, R: Any, B: Any, lengths: Any,
          initial: list[Any], P: Any) -> tuple[Any, ...]:  # fmt: skip
    """Y and the last states of all directions. lengths: None, or an array of the rows' lengths."""
    step, usual, states = _KINDS[call.node.op_type]
    batch_first, n = call.get("layout", 0), call.get("hidden_size", R.shape[-1])
    X = ns.transpose(X, (1, 0, 2)) if batch_first else X
    steps, batch, width = X.shape
    if steps > MOST_STEPS:
        raise call.error(f"{steps} steps, the limit is {MOST_STEPS}")
    way, outputs, lasts = call.get("direction", "forward"), [], []
    for d in range(W.shape[0]):
        acts = _activations(call, ns, usual, d)
        state = tuple(zeros((batch, n)) if s is None else (s[:, d] if batch_first else s[d])
                      for s in initial)  # fmt: skip
        w, r = ns.transpose(W[d], (1, 0)), ns.transpose(R[d], (1, 0))
        flat = ns.matmul(ns.reshape(X, (steps * batch, width)), w)
        flat = ns.reshape(flat, (steps, batch, w.shape[1]))
        made: list[Any] = [None] * steps
        for t in range(steps)[:: -1 if way == "reverse" or d == 1 else 1]:
            new = step(call, ns, acts, flat[t], state, r, None if B is None else B[d], n,
                       None if P is None else P[d])  # fmt: skip
            made[t] = new[0]
            if lengths is not None:  # rows that have ended keep their state and give zeros
                on = (t < np.asarray(lengths))[:, None].astype(np.float32)
                made[t] = new[0] * on
                new = tuple(a * on + b * (1 - on) for a, b in zip(new, state))
            state = new
        outputs.append(ns.stack(made, axis=0))
        lasts.append(state)
    Y = ns.stack(outputs, axis=1)  # (steps, directions, batch, n)
    ends = [ns.stack([last[k] for last in lasts], axis=0) for k in range(states)]
    if batch_first:
        Y = ns.transpose(Y, (2, 0, 1, 3))
        ends = [ns.transpose(end, (1, 0, 2)) for end in ends]
    return (Y, *ends)


@graph("RNN GRU LSTM", known=(4,))
def _nodes(call: Call, X: Any, W: Any, R: Any, B: Any = None, lengths: Any = None, h: Any = None,
           c: Any = None, P: Any = None) -> Any:  # fmt: skip
    if 0 in X.shape:
        raise Unfit
    initial = [h, c] if call.node.op_type == "LSTM" else [h]
    full = None if lengths is None or (np.asarray(lengths) >= X.shape[
        1 if call.get("layout", 0) else 0]).all() else lengths  # fmt: skip
    if full is not None:
        full = np.asarray(full)
    zeros = lambda shape: call.walker.value(np.zeros(shape, np.float32))  # noqa: E731
    return _scan(call, F, zeros, X, W, R, B, full, initial, P)


@host("RNN GRU LSTM")
def _arrays(call: Call, X: Any, W: Any, R: Any, B: Any = None, lengths: Any = None, h: Any = None,
            c: Any = None, P: Any = None) -> Any:  # fmt: skip
    initial = [h, c] if call.node.op_type == "LSTM" else [h]
    made = _scan(call, _OfArrays, lambda shape: np.zeros(shape, X.dtype), X, W, R, B, lengths,
                 initial, P)  # fmt: skip
    return tuple(y.astype(X.dtype) for y in made)


class _Quantizing(_OfArrays):
    """What the steps of a quantized LSTM use: the left factor is rounded to 255 steps of its range
    before a product, as DynamicQuantizeLinear does.
    """

    @staticmethod
    def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        low, high = min(float(a.min()), 0.0), max(float(a.max()), 0.0)
        scale = (high - low) / 255 or 1.0
        zero = np.clip(np.rint(-low / scale), 0, 255)
        return ((np.clip(np.rint(a / scale) + zero, 0, 255) - zero) * scale).astype(a.dtype) @ b


@host("DynamicQuantizeLSTM", domain="com.microsoft")
def _quantized_lstm(call: Call, X: Any, W: Any, R: Any, B: Any, lengths: Any, h: Any, c: Any,
                    P: Any, *scales: Any) -> Any:  # fmt: skip
    """ONNX Runtime's LSTM with weights of 8 bits, (directions, input, 4 hidden)."""
    w, r = (
        np.transpose((q.astype(np.float32) - zero.astype(np.float32).reshape(len(q), 1, -1))
                     * scale.reshape(len(q), 1, -1), (0, 2, 1))
        for q, scale, zero in ((W, *scales[:2]), (R, *scales[2:]))
    )  # fmt: skip
    return _scan(call, _Quantizing, lambda shape: np.zeros(shape, X.dtype), X, w, r, B, lengths,
                 [h, c], P)  # fmt: skip

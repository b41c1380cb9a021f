"""The methods that nodes share with other values on which the vocabulary works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ArrayMethods:
    """Functions as methods, `x.sum(axis=0)`: `dlsys.functional.methods` fills in what stands here
    by name, so that no file below it needs to know the functions.
    """

    __slots__ = ()

    T: Any
    ndim: int | None
    size: int | None
    abs: Callable[..., Any]
    all: Callable[..., Any]
    any: Callable[..., Any]
    argmax: Callable[..., Any]
    argmin: Callable[..., Any]
    argsort: Callable[..., Any]
    astype: Callable[..., Any]
    broadcast_to: Callable[..., Any]
    ceil: Callable[..., Any]
    clip: Callable[..., Any]
    copy: Callable[..., Any]
    cos: Callable[..., Any]
    cumprod: Callable[..., Any]
    cumsum: Callable[..., Any]
    detach: Callable[..., Any]
    erf: Callable[..., Any]
    exp: Callable[..., Any]
    expand_dims: Callable[..., Any]
    flatten: Callable[..., Any]
    flip: Callable[..., Any]
    floor: Callable[..., Any]
    isfinite: Callable[..., Any]
    isinf: Callable[..., Any]
    isnan: Callable[..., Any]
    log: Callable[..., Any]
    log1p: Callable[..., Any]
    log_softmax: Callable[..., Any]
    logsumexp: Callable[..., Any]
    masked_fill: Callable[..., Any]
    max: Callable[..., Any]
    mean: Callable[..., Any]
    min: Callable[..., Any]
    prod: Callable[..., Any]
    relu: Callable[..., Any]
    reshape: Callable[..., Any]
    roll: Callable[..., Any]
    round: Callable[..., Any]
    rsqrt: Callable[..., Any]
    sigmoid: Callable[..., Any]
    sign: Callable[..., Any]
    sin: Callable[..., Any]
    softmax: Callable[..., Any]
    sort: Callable[..., Any]
    split: Callable[..., Any]
    sqrt: Callable[..., Any]
    squeeze: Callable[..., Any]
    std: Callable[..., Any]
    sum: Callable[..., Any]
    swapaxes: Callable[..., Any]
    take_along_axis: Callable[..., Any]
    tanh: Callable[..., Any]
    tile: Callable[..., Any]
    topk: Callable[..., Any]
    transpose: Callable[..., Any]
    tril: Callable[..., Any]
    triu: Callable[..., Any]
    unsqueeze: Callable[..., Any]
    var: Callable[..., Any]

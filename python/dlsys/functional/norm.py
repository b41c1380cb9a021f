"""Normalization. `weight` and `bias` are 1 and 0 where they are not given."""

from __future__ import annotations

from typing import Any

from ..errors import GraphError, ShapeError
from ..graph.lines import where
from ..graph.node import Node
from ..ops.elementwise import as_node
from ..ops.leaf import full_op, oneslike_op, zeroslike_op
from ..ops.norm import batch_norm as batch
from ..ops.norm import layer_norm as rows
from .record import Array, optional, recorded

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"]


@recorded
def batch_norm(
    x: Array,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Array | None = None,
    bias: Array | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    algo: str | None = None,
) -> Array:
    """(x - mean) / sqrt(variance + eps) · weight + bias for each channel of x (N, C, …).

    All others are (C,). In training mean and variance are the batch's own, over N and all
    positions; running statistics, which are Parameters, then become (1 - momentum) · running +
    momentum · new (the variance times n / (n - 1)) in every step that an optimizer makes. Otherwise
    the running statistics are used. Floats keep their dtype; over x of 16 bits the statistics are
    float32. running_mean and running_var: Parameters, (C,), or None in training. algo: "cudnn"
    computes the training form with its gradient, or the inference form, by cuDNN on a GPU, where
    sums of gradients may not reach 1e9; without it DLSYS_BATCH_NORM counts.

    ShapeError where extents differ, GraphError for running statistics that are missing, and where
    the number of channels is not known; NotApplicableError at the first run where the device lacks
    the rung or cuDNN cannot compute this. After Ioffe and Szegedy (2015).

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.batch_norm(x, training=True)
    Tensor([[-0.99998  , -0.9999978],
            [ 0.99998  ,  0.9999978]],
           device=numpy)
    """
    x = as_node(x)
    like = next((v for v in (weight, bias, running_mean) if v is not None), None)
    scale, shift = _scale_and_bias("batch_norm", x, weight, bias, like, _channels(x))
    return batch.batch_normalization(
        x, scale, shift, running_mean, running_var, momentum, eps, training, algo
    )


@recorded
def layer_norm(
    x: Array,
    normalized_shape: int | tuple[int, ...],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
) -> Array:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the trailing axes of x, whose extents
    are `normalized_shape`, at each of the leading positions.

    weight and bias have the normalized shape. Floats keep their dtype; over x of 16 bits weight and
    bias are of its dtype or float32. ShapeError where shapes or dtypes do not fit. After Ba, Kiros
    and Hinton (2016).

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.layer_norm(x, 2)
    Tensor([[-0.999995 ,  0.999995 ],
            [-0.9999988,  0.9999988]],
           device=numpy)
    """
    x, shape = as_node(x), _extents(normalized_shape)
    _check_shape("layer_norm", shape, weight, bias)
    scale, shift = _scale_and_bias("layer_norm", x, weight, bias, None, shape)
    return rows.layer_normalization(x, scale, shift, eps)


@recorded
def rms_norm(
    x: Array,
    normalized_shape: int | tuple[int, ...],
    weight: Array | None = None,
    eps: float = 1e-5,
    bias: Array | None = None,
) -> Array:
    """x / sqrt(mean(x²) + eps) · weight + bias over the trailing axes of x, whose extents are
    `normalized_shape`.

    Shapes, dtypes and errors are those of `layer_norm`. After Zhang and Sennrich (2019).

    >>> x = dl.tensor([[1.0, 3.0], [2.0, 6.0]])
    >>> F.rms_norm(x, 2)
    Tensor([[0.44721317, 1.3416395 ],
            [0.4472135 , 1.3416405 ]],
           device=numpy)
    """
    x, shape = as_node(x), _extents(normalized_shape)
    _check_shape("rms_norm", shape, weight, bias)
    scale, shift = _scale_and_bias("rms_norm", x, weight, bias, None, shape)
    return rows.rms_normalization(x, scale, shift, eps)


@recorded
def group_norm(
    x: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
) -> Array:
    """(x - mean) / sqrt(variance + eps) · weight + bias of x (N, C, …), the statistics those of
    each of `num_groups` groups of neighboring channels of each of the N.

    weight and bias are (C,). Floats keep their dtype. ShapeError where shapes do not fit or the
    groups do not divide C, GraphError where C is not known. After Wu and He (2018).

    >>> x = dl.arange(4.0).reshape(1, 4, 1)
    >>> F.group_norm(x, 2).reshape(4)
    Tensor([-0.99998,  0.99998, -0.99998,  0.99998], device=numpy)
    """
    x = as_node(x)
    scale, shift = _scale_and_bias("group_norm", x, weight, bias, None, _channels(x))
    return rows.group_normalization(x, scale, shift, num_groups, eps)


@recorded
def instance_norm(
    x: Array, weight: Array | None = None, bias: Array | None = None, eps: float = 1e-5
) -> Array:
    """`group_norm` with a group for each channel: the statistics are those of each plane of x
    (N, C, …).

    Shapes, dtypes and errors are those of `group_norm`. weight, bias and eps: as of `group_norm`.
    After Ulyanov, Vedaldi and Lempitsky (2016).

    >>> x = dl.arange(4.0).reshape(1, 2, 2)
    >>> F.instance_norm(x)
    Tensor([[[-0.99998,  0.99998],
             [-0.99998,  0.99998]]],
           device=numpy)
    """
    x = as_node(x)
    scale, shift = _scale_and_bias("instance_norm", x, weight, bias, None, _channels(x))
    return rows.instance_normalization(x, scale, shift, eps)


def _scale_and_bias(
    name: str,
    x: Node,
    weight: Array | None,
    bias: Array | None,
    like: Array | None,
    shape: tuple[int, ...] | None,
) -> tuple[Node, Node]:
    """weight and bias, where they are missing 1 and 0: like the other, like another node, or else
    of a shape. GraphError where that is None too.
    """
    scale, shift = optional(weight), optional(bias)
    like = next((node for node in (scale, shift, optional(like)) if node is not None), None)
    if like is not None:
        scale = oneslike_op(like) if scale is None else scale
        return scale, zeroslike_op(like) if shift is None else shift
    if shape is None:
        raise GraphError(
            f"{name}: the number of channels of {x.name} is not known; give weight or bias, or "
            f"declare the Variable's shape [{where()}]"
        )
    return full_op(shape, 1.0), full_op(shape, 0.0)


def _channels(x: Node) -> tuple[int, ...] | None:
    """(C,) of x (N, C, …), None where that is not known."""
    known = x.shape is not None and len(x.shape) > 1 and x.shape[1] is not None
    return (x.shape[1],) if known else None


def _extents(shape: int | tuple[int, ...]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _check_shape(name: str, shape: tuple[int, ...], *values: Array | None) -> None:
    """Refuses weight or bias of another shape than the normalized one."""
    for node in map(optional, values):
        if node is not None and node.shape not in (None, shape):
            raise ShapeError(
                f"{name}: {node.name} {node.shape} has not the normalized shape {shape} [{where()}]"
            )

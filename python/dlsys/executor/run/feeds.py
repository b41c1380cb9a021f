"""Feeds: the arrays that a run gives the Variables of a graph, and their signatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ...dtypes import host, is_narrow
from ...errors import GraphError, ShapeError
from ...graph.node import Node
from ...graph.spec import FLOAT32, Spec
from ...ndarray import NDArray
from ...ops.leaf import Parameter
from ...runtime.device import Context

Signature = tuple[tuple[int, ...], Any]  # the shape and dtype of an array


class Feeds:
    """The Variables of a graph, `nodes`, in the order in which plans take them."""

    def __init__(self, order: Sequence[Node], ctx: Context | None) -> None:
        self.nodes = [node for node in order if node.op.leaf == "feed"]
        self._known = frozenset(self.nodes)
        self._ctx = ctx
        self._asis = NDArray if ctx is not None else None  # fed unchecked
        self._floating = _floating_of([p for p in order if isinstance(p, Parameter)])

    def values(self, feed_dict: Mapping[Node, Any]) -> tuple[list[Any], tuple[Signature, ...]]:
        """The array of each node, and its signature. Raises GraphError for a missing or unknown
        feed, ShapeError for a value that is no array.
        """
        values, signatures = [], []
        for node in self.nodes:
            try:
                value = feed_dict[node]
            except KeyError:
                raise GraphError(
                    f"{node.name} is not fed; the graph reads it, so add it to feed_dict "
                    f"[{node.where}]"
                ) from None
            kind = type(value)
            if kind is not self._asis and (kind is not np.ndarray or not value.flags.aligned):
                value = self._as_array(node, value)
            values.append(value)
            signatures.append((value.shape, value.dtype))
        if len(feed_dict) != len(values):
            self._refuse_unknown(feed_dict)
        return values, tuple(signatures)

    def specs(self, given: Sequence[Signature]) -> dict[Node, Spec]:
        """The spec of each node for arrays of these signatures; a dtype of None is not yet known.

        Raises ShapeError where a declared shape or dtype does not fit. A float that is fed where no
        dtype was declared is cast, to the floating dtype of the graph's Parameters on numpy and to
        float32, or the 16 bits of all Parameters, on native devices; without Parameters numpy
        computes in the dtype that is fed.
        """
        return {node: self._spec(node, *one) for node, one in zip(self.nodes, given)}

    def signatures_of(self, shapes: Mapping[Node, tuple[int, ...]]) -> tuple[Signature, ...]:
        """The signatures of arrays whose shapes alone are known. GraphError for missing ones."""
        missing = [node.name for node in self.nodes if node not in shapes]
        if missing:
            raise GraphError(f"the shapes of these Variables are missing: {', '.join(missing)}")
        for node in self.nodes:
            if not isinstance(shapes[node], (tuple, list)):
                raise ShapeError(
                    f"{node.name}: {shapes[node]!r} is no shape, expected a tuple of extents"
                )
        return tuple([(tuple(shapes[node]), None) for node in self.nodes])

    def _as_array(self, node: Node, value: Any) -> Any:
        """Converts any other value to an array with aligned elements; lists and Python scalars get
        the declared dtype.
        """
        if type(value) is NDArray:
            return value.asnumpy()
        try:
            array = np.asarray(value)
        except ValueError:
            array = np.asarray(None)
        if array.dtype.kind not in "fiub":
            raise ShapeError(
                f"{node.name} is fed {type(value).__name__} that is no array of numbers "
                f"[{node.where}]"
            )
        if not hasattr(value, "dtype"):
            weak = FLOAT32 if array.dtype.kind == "f" else array.dtype
            return array.astype(host(node.attrs.get("dtype", weak)))
        return array if array.flags.aligned else array.copy()

    def _refuse_unknown(self, feed_dict: Mapping[Node, Any]) -> NoReturn:
        unknown = next(node for node in feed_dict if node not in self._known)
        if isinstance(unknown, Parameter):
            raise GraphError(
                f"{unknown.name} is a Parameter and cannot be fed; use {unknown.name}.set(array)"
            )
        if not isinstance(unknown, Node):
            raise GraphError(f"feed_dict has the key {unknown!r}, expected a Variable")
        kind = "is not used by this graph" if unknown.op.leaf == "feed" else "is computed, not fed"
        raise GraphError(f"{unknown.name} {kind}; remove it from feed_dict [{unknown.where}]")

    def _spec(self, node: Node, shape: tuple[int, ...], dtype: Any) -> Spec:
        declared_shape, declared = node.attrs.get("shape"), node.attrs.get("dtype")
        if declared_shape is not None:
            fits = len(shape) == len(declared_shape) and all(
                wanted in (None, got) for wanted, got in zip(declared_shape, shape)
            )
            if not fits:
                raise ShapeError(
                    f"{node.name} is fed shape {shape}, expected {declared_shape} [{node.where}]"
                )
        if dtype is not None:
            dtype = dtype.newbyteorder("=")
        if declared is not None:
            if dtype is not None and dtype not in (declared, host(declared)):
                raise ShapeError(f"{node.name} is fed {dtype}, declared {declared} [{node.where}]")
            return Spec(shape, declared)
        if dtype is None:
            dtype = self._floating or FLOAT32
        if dtype.kind not in "fiub":
            raise ShapeError(
                f"{node.name} is fed an array of {dtype}, expected numbers [{node.where}]"
            )
        if self._ctx is not None:
            dtype = self._floating if is_narrow(self._floating) else FLOAT32
        elif dtype.kind == "f":
            dtype = self._floating or dtype
        return Spec(shape, dtype, declared=False)


def _floating_of(parameters: Sequence[Parameter]) -> Any:
    """The floating dtype of a graph's Parameters, those that are trained before others; None where
    there is none, or several.
    """
    trained = [p for p in parameters if p.trainable and p.dtype.kind == "f"]
    dtypes = {p.dtype for p in trained or parameters if p.dtype.kind == "f"}
    return dtypes.pop() if len(dtypes) == 1 else None

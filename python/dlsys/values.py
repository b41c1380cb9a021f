"""Arrays of a device that read like numpy's: printed, formatted, converted, compared, reckoned
with.

All of it works on a copy in the host's memory, for which it waits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .describe import drawn_by
from .errors import ShapeError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_ELEMENTS, _ROWS = 100, 12  # up to which an array is shown completely
_EDGES = 3  # elements at either end of an axis that is not
_HEAD, _TAIL = 8, 3  # lines of a longer text


class Values:
    """Base of arrays that show their values; it needs `shape`, `dtype` and `asnumpy()`."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents."""
        raise NotImplementedError

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        raise NotImplementedError

    def asnumpy(self) -> np.ndarray:
        """A fresh numpy array of the values."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """The repr's facts besides the values."""
        return {"shape": self.shape, "dtype": self.dtype}

    # ---- conversion ----
    def item(self) -> Any:
        """The value of one element as a Python number. ShapeError for another number of them.

        >>> dl.tensor([[2.5]]).item()
        2.5
        """
        return self._one("item()").item()

    def tolist(self) -> Any:
        """The values as Python numbers in nested lists; a number alone for the shape ().

        >>> dl.tensor([[1, 2], [3, 4]]).tolist()
        [[1, 2], [3, 4]]
        """
        return self.asnumpy().tolist()

    def __float__(self) -> float:
        return float(self._one("float()").item())

    def __int__(self) -> int:
        return int(self._one("int()").item())

    def __index__(self) -> int:
        return operator.index(self._one("an index").item())

    def __bool__(self) -> bool:
        return bool(self._one("a truth value").item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array of shape ()")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        """The rows, or the elements of a vector, as numpy has them."""
        len(self)
        return iter(self.asnumpy())

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            name = type(self).__name__
            raise ValueError(f"an {name} becomes a numpy array by a copy; np.from_dlpack shares")
        values = self.asnumpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def _one(self, what: str) -> np.ndarray:
        values = self.asnumpy()
        if values.size != 1:
            raise ShapeError(f"{what}: expected an array of one element, got shape {self.shape}")
        return values

    # ---- text ----
    def __repr__(self) -> str:
        """The class, the values, cut to a few lines, and the facts."""
        name = f"{type(self).__name__}("
        text = text_of(self.asnumpy(), separator=", ", prefix=name)
        facts = ", ".join(f"{key}={value}" for key, value in self.facts().items())
        return f"{name}{text},{_gap(text, name)}{facts})"

    def __str__(self) -> str:
        """The values alone, cut to a few lines."""
        return text_of(self.asnumpy())

    def __round__(self, digits: int | None = None) -> int | float:
        return round(self._one("round()").item(), digits)

    def __format__(self, spec: str) -> str:
        """`f"{loss:.3f}"`: one element as its number would be formatted, several each so."""
        if not spec:
            return str(self)
        values = self.asnumpy()
        if values.size == 1:
            return format(values.item(), spec)
        return text_of(values, formatter={"all": lambda value: format(value.item(), spec)})


def text_of(values: np.ndarray, **options: Any) -> str:
    """Values as numpy prints them (`np.set_printoptions` says with how many digits), in at most
    about a dozen lines. options: of `np.array2string`.
    """
    rows = values.size // max(values.shape[-1], 1) if values.ndim else 1
    complete = values.size <= _ELEMENTS and rows <= _ROWS
    edges = _EDGES if values.ndim <= 2 else 1
    threshold = _ELEMENTS if complete else 0
    text = np.array2string(values, threshold=threshold, edgeitems=edges, **options)
    lines = text.splitlines()
    if len(lines) > _ROWS + 1:
        lines = [*lines[:_HEAD], " " * len(options.get("prefix", "")) + "…", *lines[-_TAIL:]]
    return "\n".join(lines)


def _gap(text: str, name: str) -> str:
    return "\n" + " " * len(name) if "\n" in text else " "


def _on_host(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compute(x: Values, other: Any) -> Any:
        return operation(x.asnumpy(), other.asnumpy() if isinstance(other, Values) else other)

    return compute


def _swapped(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return _on_host(lambda x, other: operation(other, x))


class HostNumbers(Values):
    """Values whose operators compute on the host: comparisons by value give numpy arrays of bool,
    arithmetic gives numpy arrays, as if each side were `np.asarray(x)`. `x += y` makes `x` a new
    numpy array. An array is a key of dictionaries and sets by identity.
    """

    __slots__ = ()
    __hash__ = object.__hash__  # a class with an __eq__ of its own has none otherwise
    __eq__, __ne__ = _on_host(operator.eq), _on_host(operator.ne)
    __lt__, __le__ = _on_host(operator.lt), _on_host(operator.le)
    __gt__, __ge__ = _on_host(operator.gt), _on_host(operator.ge)
    __add__, __radd__ = _on_host(operator.add), _swapped(operator.add)
    __sub__, __rsub__ = _on_host(operator.sub), _swapped(operator.sub)
    __mul__, __rmul__ = _on_host(operator.mul), _swapped(operator.mul)
    __truediv__, __rtruediv__ = _on_host(operator.truediv), _swapped(operator.truediv)
    __floordiv__, __rfloordiv__ = _on_host(operator.floordiv), _swapped(operator.floordiv)
    __mod__, __rmod__ = _on_host(operator.mod), _swapped(operator.mod)
    __pow__, __rpow__ = _on_host(operator.pow), _swapped(operator.pow)
    __matmul__, __rmatmul__ = _on_host(operator.matmul), _swapped(operator.matmul)

    def __neg__(self) -> Any:
        return -self.asnumpy()

    def __abs__(self) -> Any:
        return abs(self.asnumpy())

    def __getitem__(self, index: Any) -> Any:
        """The values there as numpy has them, which cannot be written to: `x[:] = y` writes."""
        values = self.asnumpy()
        values.flags.writeable = False
        return values[index]

    _repr_html_ = drawn_by("values_html")

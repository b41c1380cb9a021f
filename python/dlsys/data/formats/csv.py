"""Tables in CSV files: numbers and texts by column."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError, quoted
from ..dataset import Array, Dataset

_SNIFFED = 1 << 16  # characters in which the delimiter is looked for
_DELIMITERS = ",;\t|"


def read_csv(
    path: str | os.PathLike[str],
    columns: Sequence[str | int] | None = None,
    *,
    types: Mapping[str, Any] | None = None,
    header: bool | None = None,
    delimiter: str | None = None,
) -> dict[str, Array]:
    """The columns of a CSV file (UTF-8) by name, arrays (rows,).

    columns: names, or positions from 0, of those to read, in this order; all by default. types: a
    dtype by name, or str; by default int64 where all values of a column are integers, float64
    where they are numbers, else texts. header: whether the first row has names; by default it does
    if a column that is of numbers below has none there, or if none of its fields is a number;
    columns without names are called "0", "1", and so on. delimiter: by default the one of , ; | and
    tab that the first lines have most of.

    DataError, with the line and the column, for a value that is missing or of another type, a row
    of another length, a column that there is not, and a file that cannot be read.
    """
    rows, lines = _rows(Path(path), delimiter)
    named = _has_names(rows[:100]) if header is None else header
    names = [field.strip() for field in rows[0]] if named else [str(k) for k in range(len(rows[0]))]
    if len(set(names)) < len(names):
        raise DataError(f"{path}: two columns have one name: {', '.join(names)}")
    if len(rows) <= named:
        raise DataError(f"{path}: there is no row below the names of the columns")
    wanted = [_name_of(path, column, names) for column in columns or names]
    for name in types or {}:
        _name_of(path, name, names)
    made = {}
    for name in wanted:
        at = names.index(name)
        texts = [row[at].strip() for row in rows[named:]]
        made[name] = _column(path, name, texts, lines[named:], (types or {}).get(name))
    return made


def csv_dataset(
    path: str | os.PathLike[str],
    target: str | int | Sequence[str | int],
    columns: Sequence[str | int] | None = None,
    **options: Any,
) -> Dataset:
    """The rows of a CSV file as samples (columns,) float32 with what `target` names as labels:
    classes, int64 (n,), where that is a column of integers or of texts, whose sorted values are the
    set's `classes`; float32 (n, targets) of a column of floats or of several columns.

    columns: those that are inputs, by default all others. options: as for `read_csv`. DataError as
    there, and for a column of texts among the inputs.
    """
    table = read_csv(path, **options)
    names = list(table)
    several = isinstance(target, (list, tuple))
    given: Any = target if several else [target]
    targets = [_name_of(path, column, names) for column in given]
    rest = [name for name in names if name not in targets]
    inputs = rest if columns is None else [_name_of(path, c, names) for c in columns]
    texts = [n for n in inputs + (targets if several else []) if table[n].dtype.kind not in "fiub"]
    if texts or not inputs:
        raise DataError(
            f"{path}: expected columns of numbers, got texts in {', '.join(texts) or 'none'}: name "
            "others with columns=, or read_csv it and make numbers of them"
        )
    features = np.stack([table[name].astype(np.float32) for name in inputs], axis=1)
    label = table[targets[0]]
    if several or label.dtype.kind == "f":
        values = [table[name].astype(np.float32) for name in targets]
        return Dataset(features, np.stack(values, axis=1))
    if label.dtype.kind in "iub":
        return Dataset(features, label)
    classes, labels = np.unique(label, return_inverse=True)
    return Dataset(features, labels, classes.tolist())


def _rows(path: Path, delimiter: str | None) -> tuple[list[list[str]], list[int]]:
    """The rows that are not empty, all as long as the first, and the lines that they end in."""
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            if delimiter is None:
                start = file.read(_SNIFFED).splitlines()[:20]
                counts = {mark: sum(line.count(mark) for line in start) for mark in _DELIMITERS}
                delimiter = max(counts, key=counts.__getitem__)
                file.seek(0)
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            for row in reader:
                if not row:
                    continue
                if rows and len(row) != len(rows[0]):
                    raise DataError(
                        f"{path}, line {reader.line_num}: the row has {len(row)} fields, the first "
                        f"one {len(rows[0])}"
                    )
                rows.append(row)
                lines.append(reader.line_num)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: is no CSV file in UTF-8: {error}") from error
    if not rows:
        raise DataError(f"{path}: the file has no row")
    return rows, lines


def _has_names(rows: list[list[str]]) -> bool:
    first, below = rows[0], rows[1:]
    if not any(_is_number(field) for field in first):
        return True
    return any(
        not _is_number(name) and all(_is_number(row[k]) for row in below)
        for k, name in enumerate(first)
        if name.strip() and below
    )


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _name_of(path: Any, column: str | int, names: list[str]) -> str:
    if isinstance(column, int) and 0 <= column < len(names):
        return names[column]
    if column in names:
        return str(column)
    raise DataError(f"{path}: there is no column {column!r}, it has {', '.join(names)}")


def _column(path: Any, name: str, texts: list[str], lines: list[int], dtype: Any) -> Array:
    missing = next((n for t, n in zip(texts, lines) if not t or t.lower() == "nan"), None)
    if missing is not None:
        raise DataError(
            f"{path}, line {missing}: the value of column {quoted(name)} is missing; remove the "
            "row or write a value"
        )
    if dtype is None:
        for kind in (np.int64, np.float64):
            try:
                return np.array(texts).astype(kind)
            except (ValueError, OverflowError):
                continue
        return np.array(texts)
    wanted = np.dtype(dtype)
    for text, line in zip(texts, lines):
        try:
            np.array(text).astype(wanted)
        except (ValueError, OverflowError):
            raise DataError(
                f"{path}, line {line}: column {quoted(name)} has {quoted(text)}, expected "
                f"{wanted.name}"
            ) from None
    return np.array(texts).astype(wanted)

"""The table of operators that are read, as docs/onnx-operators.md shows it."""

from __future__ import annotations

from typing import NamedTuple

from ..package import onnx_package
from . import rules as rules
from .registry import RULES, Rule

_KINDS = {"f": "floats", "i": "int32 and int64", "u": "uint8", "b": "bool"}
_DYNAMIC = "no Nodes: values decide the shape"
_EXPERIMENTAL = ("ai.onnx.preview", "ai.onnx.preview.training", "ai.onnx.training")


class Row(NamedTuple):
    """An operator: its domain and name, the versions of its set that the standard has, where it is
    computed, and what limits that.
    """

    domain: str
    name: str
    versions: str
    where: str
    limits: str


def table() -> list[Row]:
    """All operators of the installed package onnx, by domain and name."""
    versions: dict[tuple[str, str], list[int]] = {}
    bodies: set[tuple[str, str]] = set()
    for schema in onnx_package("onnx.defs").get_all_schemas_with_history():
        key = schema.domain, schema.name
        versions.setdefault(key, []).append(schema.since_version)
        if schema.has_function or schema.has_context_dependent_function:
            bodies.add(key)
    return [
        Row(key[0], key[1], ", ".join(map(str, sorted(versions[key]))), *_how(key, key in bodies))
        for key in sorted(versions)
    ]


def _how(key: tuple[str, str], has_body: bool) -> tuple[str, str]:
    rule = RULES.get(key)
    if rule is None:
        if has_body:
            return "by its standard body", "as far as the operators of the body"
        training = key[0] in _EXPERIMENTAL or key[0].endswith("training")
        why = "training of a preview domain" if training else (
            "classical machine learning" if key[0] == "ai.onnx.ml" else "no rule")  # fmt: skip
        return "refused", why
    if rule.nodes is not None and rule.dynamic:
        return "every device, else host", _DYNAMIC
    if rule.nodes is not None and rule.host is not None:
        return "every device, else host", "Nodes of 8 bits with known scales, see quantization"
    if rule.nodes is not None:
        return "while the graph is walked", "what decides it is known or is looked at, on Tensors"
    limits = []
    if rule.graph is not None:
        limits.append(f"kernels take {' and '.join(_KINDS[k] for k in rule.kinds)}")
    if rule.known:
        limits.append(f"inputs {', '.join(str(k) for k in rule.known)} known or looked at")
    if rule.dynamic:
        limits.append(_DYNAMIC)
    return _where(rule), "; ".join(limits)


def _where(rule: Rule) -> str:
    if rule.graph is None:
        return "host"
    return "every device" if rule.host is None else "every device, else host"


def markdown() -> str:
    """The page."""
    rows = table()
    taken = sum(row.where != "refused" for row in rows)
    lines = [
        "# ONNX operators that are read",
        "",
        f"`dlsys.onnx.load` takes {taken} of the {len(rows)} operators of the package onnx "
        f"{onnx_package().__version__}, in all versions. `python -m dlsys.onnx table` prints "
        "this page from the code.",
        "",
        "- *Every device*: the operator becomes functions of `dlsys.functional`, with kernels and "
        "a gradient.",
        "- *Host*: numpy computes it, between the steps of a device, without a gradient. So are "
        "dtypes that devices lack (int8, uint16, uint32, uint64, float8, 4 bits and fewer, "
        "bfloat16, and float64 on native devices) and what only depends on constants.",
        "- *Standard body*: the function that the standard defines it by is walked in its stead.",
        "",
        "| operator | versions | computed | limits |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {f'{r.domain}.' if r.domain else ''}{r.name} | {r.versions} | {r.where} | {r.limits} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"

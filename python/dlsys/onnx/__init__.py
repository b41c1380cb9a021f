"""ONNX: `export` writes a graph or a model as an ONNX file, `load` reads one.

    import dlsys as dl
    dl.onnx.export(model, "lenet.onnx", inputs=(None, 1, 28, 28))
    model = dl.onnx.load("lenet.onnx")

The files are those of https://onnx.ai, made with the package `onnx`
(`pip install onnx`), which is imported at the first use.
"""

from __future__ import annotations

from importlib import import_module as _import_module

_NAMES = {
    "exporter": "Exportable export exportable", "importer": "ImportedModel load",
    "engine": "Engine build_engine engine_targets", "drawing": "picture",
}  # fmt: skip
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

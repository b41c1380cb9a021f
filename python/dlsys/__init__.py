"""dlsys: symbolic graphs, their gradients, a memory plan made once, and native kernels that run it.

    import dlsys as dl
    x = dl.tensor([[1.0, 2.0]], requires_grad=True)

Tensors (`dl.tensor`, `dl.functional`, `dl.nn`, `dl.optim`) are one way in, graphs
(`dlsys.autodiff`) the other, over the same operators. Importing this package loads nothing else:
each name below loads what it needs when it is first used.
"""

from importlib import import_module as _import_module

__version__ = "0.2.0"

_NAMES = {
    "eager.autograd": "enable_grad grad no_grad value_and_grad",
    "eager.create": (
        "arange eye from_dlpack from_numpy full linspace ones ones_like tensor zeros zeros_like"
    ),
    "eager.device": "best_device set_precision synchronize",
    "eager.jit": "jit",
    "eager.random": "manual_seed rand randint randn",
    "eager.tensor": "Tensor apply",
    "inference": "InferenceProgram QuantizedModel infer quantize",
    "autodiff": "Executor Node Op Parameter Variable gradients",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
_MODULES = tuple("autodiff data dist functional init ndarray nn onnx optim train viz".split())

__all__ = ["__version__", *_HOMES, *_MODULES]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return _import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

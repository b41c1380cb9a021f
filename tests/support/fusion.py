"""Graphs after some of the fusions, and which fusions executors use."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from dlsys import autodiff as ad
from dlsys.fusion import FUSIONS, select
from dlsys.graph.node import Node
from dlsys.passes.pipeline import Options, Pass
from dlsys.runtime.target import Target
from dlsys.settings import settings


class _Every:
    """The kernels of a target that has all there are."""

    def __contains__(self, kernel: object) -> bool:
        return True


def _fits(kernel: str, *arguments: Any) -> bool:
    """As a GPU answers, but for the sizes that few tests have."""
    return not kernel.endswith("_mlp_head") or sum(w.size for w in arguments[1]) <= 32768


# Targets as passes see them, for tests that need no device.
CPU = Target("cpu", _Every())
GPU = Target("cuda", _Every(), streams=True, capture=True, kernel_fits=_fits)


def fused(fetches: Sequence[Node], *names: str, target: Target = CPU) -> list[Node]:
    """The fetches of a simplified graph after the fusions of these names, in their order."""
    for fusion in FUSIONS:
        if fusion.name in names:
            fetches = fusion.run(fetches, Options(target))
    return list(fetches)


def lacking(executor: ad.Executor, lacks: Callable[[str], bool]) -> ad.Executor:
    """The executor on a target without the kernels of those names."""
    backend = executor._backend
    kernels = frozenset(key for key in backend.target.kernels if not lacks(key[0]))
    backend.target = replace(backend.target, kernels=kernels)
    return executor


def named(name: str, target: Target) -> Pass:
    """A fusion that rewrites for a target, whatever an executor's is."""
    (fusion,) = (one for one in FUSIONS if one.name == name)

    def run(fetches: Sequence[Node], options: Options) -> list[Node]:
        return fusion.run(fetches, options._replace(target=target))

    return fusion._replace(run=run, needs=())


def fusions(setting: str) -> AbstractContextManager:
    """Plans that are made meanwhile use the fusions that such a DLSYS_FUSION leaves."""
    return mock.patch.object(settings, "fusion", setting)


def without(*names: str) -> AbstractContextManager:
    """Plans that are made meanwhile do without these fusions."""
    left = [one.name for one in select(FUSIONS, settings.fusion) if one.name not in names]
    return fusions(",".join(left) or "off")


def require_fusion(*names: str) -> Callable[[Any], Any]:
    """Decorates a test class or method that sees a fusion happen."""
    chosen = {one.name for one in select(FUSIONS, settings.fusion)}
    missing = ", ".join(name for name in names if name not in chosen)
    return unittest.skipIf(missing, f"DLSYS_FUSION={settings.fusion} leaves out {missing}")

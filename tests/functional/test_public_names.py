"""The names of `dlsys.autodiff`: those in the `__all__` of the files of operators."""

from __future__ import annotations

import collections
import re
import types
import unittest
from pathlib import Path

import dlsys
from dlsys import autodiff as ad
from support.table.operators import modules_of_operators

PACKAGE = Path(dlsys.__file__).parent
FAMILIES = [module for module in modules_of_operators() if module.__name__.startswith("dlsys.ops.")]
OTHERS = {"Executor", "gradients", "sum_node_list", "Node", "Op", "find_topo_sort", "Spec", "text"}


class PublicNames(unittest.TestCase):
    def test_autodiff_has_them_all_and_no_others(self) -> None:
        found = {name for module in FAMILIES for name in getattr(module, "__all__", ())}
        public = {name for name in vars(ad) if not name.startswith("_")} - {"annotations"}
        self.assertEqual(public, found | OTHERS)
        self.assertGreater(len(found), 150)

    def test_each_is_that_of_its_file(self) -> None:
        for module in FAMILIES:
            for name in getattr(module, "__all__", ()):
                self.assertIs(getattr(ad, name), vars(module)[name], name)

    def test_an_operator_that_is_not_public_is_used(self) -> None:
        """An operator that nobody uses was forgotten in `__all__`."""
        words = collections.Counter[str]()
        for path in PACKAGE.rglob("*.py"):
            words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
        for module in FAMILIES:
            for name, value in vars(module).items():
                if name.endswith("_op") and not isinstance(value, types.FunctionType):
                    if name not in getattr(module, "__all__", ()):
                        self.assertGreater(words[name], 1, f"{module.__name__}.{name}")

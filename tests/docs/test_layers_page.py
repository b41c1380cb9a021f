"""docs/layers.md names every layer, and shows what its code prints."""

from __future__ import annotations

import contextlib
import io
import re
import unittest
from pathlib import Path

import numpy as np

from dlsys import autodiff as ad
from dlsys import nn

TEXT = (Path(__file__).parents[2] / "docs" / "layers.md").read_text(encoding="utf-8")


class LayersPage(unittest.TestCase):
    def test_every_layer_is_named_and_every_name_is_a_layer(self) -> None:
        head = TEXT[: TEXT.index("Recurrent layers are unrolled")]
        rows = [line.split("|")[1] for line in head.splitlines() if line.startswith("| `")]
        models = head[head.index("Models that are ready") :]
        named = re.findall(r"`(\w+)", " ".join([*rows, models]))
        layers = {
            name
            for name, item in vars(nn).items()
            if isinstance(item, type) and issubclass(item, nn.Module) and item is not nn.Module
        }
        self.assertEqual(set(named), layers)
        self.assertEqual(len(named), len(set(named)), "each is named once")

    def test_the_code_prints_what_is_shown(self) -> None:
        first, second = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        (shown,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
        names: dict = {}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(first, names)
        self.assertEqual(printed.getvalue(), shown)
        exec(second, names)
        x = ad.Variable("x", shape=(None, 5), dtype=np.int64)
        model = names["Language"](7, 8)
        feeds = {x: np.zeros((2, 5), np.int64)}
        self.assertEqual(ad.Executor([model(x)]).run(feeds, True)[0].shape, (2, 5, 7))
        self.assertIn("blocks.1.self_attn.in_proj_weight", model.state_dict())
        self.assertNotIn("head.weight", model.state_dict())

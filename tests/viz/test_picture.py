"""docs/step.svg shows what becomes of the README's graph; `python tests/viz/test_picture.py
--write` draws it anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import unittest
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "step.svg"
GAP, HEAD = 24.0, 40.0


def drawn() -> str:
    """The picture, by a Python of its own: nodes are numbered as they are made."""
    environment = {name: value for name, value in os.environ.items() if "DLSYS_" not in name}
    environment["PYTHONPATH"] = str(ROOT / "python")
    command = [sys.executable, str(Path(__file__).resolve()), "--print"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    if done.returncode:
        raise RuntimeError(done.stderr.decode())
    return done.stdout.decode()


def draw() -> str:
    """The example's graph, what runs of it, and the memory of that, side by side on white."""
    from dlsys import viz
    from dlsys.viz import svg

    page = (ROOT / "README.md").read_text(encoding="utf-8")
    scope: dict = {}
    example = re.findall(r"```python\n(.*?)```", page, re.S)[1]
    exec(compile(example, "README.md", "exec"), scope)
    step = scope["step"]
    plan = step.plan({scope["x"]: scope["points"].shape, scope["y"]: scope["labels"].shape})
    parts = [viz.graph_svg(step.eval_node_list), viz.graph_svg(plan), viz.memory_plan(plan)]
    left, right, memory = map(size, parts)
    beside = left[0] + GAP
    width = beside + right[0]
    memory_height = memory[1] * right[0] / memory[0]
    below = right[1] + HEAD
    height = max(left[1] + HEAD, below + HEAD + memory_height)
    heads = (
        (0.0, 0.0, "The graph: the loss, its gradients, the updates"),
        (beside, 0.0, f"What runs of it: {len(plan.steps)} steps"),
        (beside, below, "In which memory"),
    )
    body = [
        svg.element("rect", width=width, height=height, fill="#ffffff"),
        *(svg.label(x + 12, y + 26, words, font_size=17) for x, y, words in heads),
        placed(parts[0], 0.0, HEAD),
        placed(parts[1], beside, HEAD),
        placed(parts[2], beside, below + HEAD, right[0], memory_height),
    ]
    picture = svg.drawing(width, height, "One training step of the README's first example", body)
    return picture.replace("<svg ", '<svg color="#22272e" ', 1) + "\n"


def size(drawing: str) -> tuple[float, float]:
    """The width and height of a drawing."""
    root = ET.fromstring(drawing)
    return float(root.get("width", 0)), float(root.get("height", 0))


def placed(drawing: str, x: float, y: float, width: float = 0.0, height: float = 0.0) -> str:
    """A drawing as part of another one, of its own size or another one."""
    if width:
        drawing = re.sub(r' width="[^"]*" height="[^"]*"', "", drawing, count=1)
        drawing = drawing.replace("<svg ", f'<svg width="{width:.2f}" height="{height:.2f}" ', 1)
    return drawing.replace("<svg ", f'<svg x="{x:.2f}" y="{y:.2f}" ', 1)


class Picture(unittest.TestCase):
    def test_it_shows_the_example_as_it_is(self) -> None:
        kept, now = PICTURE.read_text(encoding="utf-8"), drawn()
        told = "docs/step.svg is out of date: python tests/viz/test_picture.py --write"
        self.assertTrue(kept == now, told)

    def test_it_is_whole_and_named_in_the_readme(self) -> None:
        root = ET.fromstring(PICTURE.read_text(encoding="utf-8"))
        letters = " ".join("".join(item.itertext()) for item in root.iter() if "text" in item.tag)
        for expected in ("matmul", "sgd_momentum_update", "backward", "live bytes"):
            self.assertIn(expected, letters)
        self.assertIn("](docs/step.svg)", (ROOT / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    if "--print" in sys.argv:
        sys.stdout.buffer.write(draw().encode())
    elif "--write" in sys.argv:
        PICTURE.write_text(drawn(), encoding="utf-8")
    else:
        unittest.main()

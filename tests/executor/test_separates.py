"""A perceptron separates a separable set of the plane, through loader, fit and picture."""

from __future__ import annotations

import importlib.util
import unittest
from typing import Any

import numpy as np

from dlsys import nn, optim, train, viz
from dlsys.data import Loader
from dlsys.runtime.device import Context
from support.devices import on_native_devices

MARGIN = 0.15


def separable(seed: int, count: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Points (n, 2) that keep a distance from some line, and their sides, 0 or 1."""
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, 2 * np.pi)
    normal, offset = np.array([np.cos(angle), np.sin(angle)]), rng.uniform(-0.4, 0.4)
    points = rng.uniform(-1, 1, (4 * count, 2))
    sides = points @ normal + offset
    points, sides = (x[np.abs(sides) > MARGIN][:count] for x in (points, sides))
    return points.astype(np.float32), (sides > 0).astype(np.int64)


class UntilSeparated(train.Callback):
    """Ends a run when no point is on the wrong side."""

    def __init__(self, points: np.ndarray, labels: np.ndarray) -> None:
        self._set = points, labels

    def on_epoch_end(self, run: train.Run, record: Any) -> None:
        if run.model.separates(*self._set):  # type: ignore[attr-defined]
            run.stop("separated")


class Separation:
    ctx: Context | None = None

    def trained(self, points: np.ndarray, labels: np.ndarray, epochs: int) -> Any:
        model = nn.Perceptron()
        history = train.fit(
            model, Loader((points, labels), 16, shuffle=True, seed=3), optim.SGD(lr=0.1),
            model.loss, epochs, ctx=self.ctx, metrics=(),
            callbacks=[UntilSeparated(points, labels)], quiet=True,
        )  # fmt: skip
        return model, len(history.epochs)

    def test_it_separates_and_its_line_is_between(self) -> None:
        for seed in range(3):
            with self.subTest(seed=seed):
                points, labels = separable(seed)
                self.assertEqual(set(labels), {0, 1})
                model, epochs = self.trained(points, labels, 300)
                self.assertLess(epochs, 300)
                self.assertTrue(model.separates(points, labels))
                begin, end = model.boundary(points.min(axis=0) - 1, points.max(axis=0) + 1)
                along, to = end - begin, points - begin
                sides = along[0] * to[:, 1] - along[1] * to[:, 0]
                self.assertEqual(len(np.unique(np.sign(sides[labels == 1]))), 1)
                self.assertEqual(
                    set(np.sign(sides[labels == 0])), {-np.sign(sides[labels == 1][0])}
                )

    def test_it_goes_on_in_vain_where_no_line_separates(self) -> None:
        points = np.array([[0, 0], [1, 1], [0, 1], [1, 0]], np.float32)
        model, epochs = self.trained(points, np.array([0, 0, 1, 1]), 50)
        self.assertEqual(epochs, 50)
        self.assertTrue(np.isfinite(model.line()[0]).all())

    @unittest.skipIf(importlib.util.find_spec("matplotlib") is None, "no matplotlib")
    def test_the_boundary_is_drawn_where_the_line_is(self) -> None:
        points, labels = separable(1)
        model, _ = self.trained(points, labels, 300)
        (axes,) = viz.decision_boundary(model, points, labels).axes
        self.assertEqual(axes.get_title(loc="left") or axes.get_title(),
                         f"0 of {len(points)} points on the wrong side")  # fmt: skip
        drawn = [path.vertices for lines in axes.collections for path in lines.get_paths()
                 if type(lines).__name__ == "QuadContourSet"]  # fmt: skip
        (normal, offset), places = model.line(), np.concatenate(drawn)
        distances = np.abs(places @ normal + offset) / np.linalg.norm(normal)
        self.assertGreater(len(places), 50)
        self.assertLess(distances.max(), 2 * 2.5 / 200, "two cells of the picture")


class NumpySeparation(Separation, unittest.TestCase):
    pass


CpuSeparation, GpuSeparation = on_native_devices(Separation)

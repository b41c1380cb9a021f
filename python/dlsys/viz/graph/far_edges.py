"""Replaces long edges of a drawing: a value that is used far away is repeated there by name."""

from __future__ import annotations

from collections.abc import Iterable

from .boxes import LEAVES, Box, Edge
from .layered import rank

_NEAR = 2  # ranks between users of a box that share one copy of it
_FAR = 6  # ranks that a line may span in a crowded drawing
_CROWDED = 500  # ranks that all lines pass together from which on a drawing is crowded


def uncrowded(boxes: list[Box], edges: list[Edge]) -> tuple[list[Box], list[Edge]]:
    """The boxes and edges with fewer long edges.

    Feeds, Parameters and constants are repeated near users that are far from the first. In a
    drawing that is crowded even so, a reference by name replaces an operator's result near a far
    user, and a far update below its input.
    """
    boxes = list(boxes)
    edges = _leaves_again(boxes, edges)
    ranks = rank(len(boxes), edges)
    if sum(ranks[b] - ranks[a] - 1 for a, b in edges) > _CROWDED:
        edges = _updates_by_name(boxes, edges, ranks)
        edges = _results_by_name(boxes, edges)
    ends = {v for edge in edges for v in edge}
    left = [k for k, box in enumerate(boxes) if k in ends or box.fetched or box.kind not in LEAVES]
    index = {k: position for position, k in enumerate(left)}
    return [boxes[k] for k in left], [(index[a], index[b]) for a, b in edges]


def _leaves_again(boxes: list[Box], edges: list[Edge]) -> list[Edge]:
    """Repeats a leaf near each group of its users but the first."""
    ranks, users = rank(len(boxes), edges), _users(len(boxes), edges)
    moved = {}
    for k, box in enumerate(list(boxes)):
        if box.kind in LEAVES:
            for group in _groups(users[k], ranks)[1:]:
                boxes.append(box)
                moved.update({(k, user): (len(boxes) - 1, user) for user in group})
    return [moved.get(edge, edge) for edge in edges]


def _updates_by_name(boxes: list[Box], edges: list[Edge], ranks: list[int]) -> list[Edge]:
    """Replaces a far update by its name below its input."""
    kept = []
    for source, target in edges:
        far = ranks[target] - ranks[source] > _FAR
        if far and boxes[target].kind == "update":
            boxes.append(boxes[target].again(f"→ {boxes[target].lines[0]}"))
            target = len(boxes) - 1
        kept.append((source, target))
    return kept


def _results_by_name(boxes: list[Box], edges: list[Edge]) -> list[Edge]:
    """Replaces a result by its name above its far users."""
    ranks, users = rank(len(boxes), edges), _users(len(boxes), edges)
    moved = {}
    for k, box in enumerate(list(boxes)):
        far = [user for user in users[k] if ranks[user] - ranks[k] > _FAR]
        for group in _groups(far, ranks):
            boxes.append(box.again(box.name))
            moved.update({(k, user): (len(boxes) - 1, user) for user in group})
        if far:
            box.named()
    return [moved.get(edge, edge) for edge in edges]


def _groups(users: Iterable[int], ranks: list[int]) -> list[list[int]]:
    """Users that are near each other, from the top."""
    groups: list[list[int]] = []
    for user in sorted(users, key=ranks.__getitem__):
        if groups and ranks[user] <= ranks[groups[-1][0]] + _NEAR:
            groups[-1].append(user)
        else:
            groups.append([user])
    return groups


def _users(count: int, edges: Iterable[Edge]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        users[source].append(target)
    return users

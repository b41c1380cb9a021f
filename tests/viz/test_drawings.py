"""Drawings in SVG and DOT: layouts, graphs, memory plans, times; read back from their text."""

from __future__ import annotations

import re
import unittest
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import numpy as np

from dlsys import autodiff as ad
from dlsys import optim, profile, viz
from dlsys.viz.graph.boxes import AGAIN, boxes_of
from dlsys.viz.graph.coordinates import Columns
from dlsys.viz.graph.far_edges import uncrowded
from dlsys.viz.graph.layered import layout, rank
from dlsys.viz.svg import PURPLE, axis_steps
from support.devices import native_contexts
from support.graphs import Training, two_fold

SVG = "{http://www.w3.org/2000/svg}"


def words(svg: str) -> list[str]:
    """Every line of letters of a drawing."""
    return ["".join(text.itertext()) for text in ET.fromstring(svg).iter(f"{SVG}text")]


def deep_training(layers: int) -> list[ad.Node]:
    """The fetches of a training step with values that are kept for long."""
    y = x = ad.Variable("x", shape=(4, 8), dtype=np.float32)
    weights = [ad.Parameter(np.eye(8, dtype=np.float32), f"w{k}") for k in range(layers)]
    for w in weights:
        y = ad.tanh_op(ad.matmul_op(y, w))
    loss = ad.sum_op(y * x)
    return [loss, optim.SGD(0.1).minimize(loss, weights)]


def random_dag(rng, count: int, density: float) -> list[tuple[int, int]]:
    return [(a, b) for a in range(count) for b in range(a + 1, count) if rng.random() < density]


class Layouts(unittest.TestCase):
    def test_ranks_are_longest_paths_and_sources_stand_above_their_user(self):
        edges = [(0, 1), (1, 2), (0, 2), (3, 2), (2, 4)]
        self.assertEqual(rank(5, edges), [0, 1, 2, 1, 3])
        self.assertEqual(rank(2, []), [0, 0])

    def test_nothing_overlaps_in_a_rank(self):
        rng = np.random.default_rng(0)
        for count, density in ((2, 1.0), (12, 0.3), (40, 0.08), (40, 0.2), (90, 0.02)):
            edges = random_dag(rng, count, density)
            widths = rng.uniform(20, 200, count).tolist()
            placed = layout(widths, edges)
            rows: dict[int, list[tuple[float, float]]] = {}
            for v in range(count):
                rows.setdefault(placed.ranks[v], []).append((placed.x[v], widths[v]))
            for (source, _), bends in zip(edges, placed.bends):
                for k, x in enumerate(bends, placed.ranks[source] + 1):
                    rows[k].append((x, 0.0))
            for row in rows.values():
                row.sort()
                for (a, width_a), (b, width_b) in zip(row, row[1:]):
                    self.assertGreaterEqual(b - a, (width_a + width_b) / 2 - 1e-6)
                for x, width in row:
                    self.assertGreaterEqual(x - width / 2, -1e-6)
                    self.assertLessEqual(x + width / 2, placed.width + 1e-6)

    def test_edges_lead_down_and_bend_in_every_rank_between(self):
        edges = random_dag(np.random.default_rng(1), 30, 0.1)
        placed = layout([50.0] * 30, edges)
        for (source, target), bends in zip(edges, placed.bends):
            self.assertEqual(len(bends), placed.ranks[target] - placed.ranks[source] - 1)

    def test_a_chain_is_a_straight_line_and_a_tree_has_no_crossing(self):
        chain = layout([30.0, 90.0, 50.0, 10.0], [(0, 1), (1, 2), (2, 3)])
        self.assertLess(max(chain.x) - min(chain.x), 1e-6)
        children = [(k, child) for k in range(15) for child in (2 * k + 1, 2 * k + 2)]
        order = np.random.default_rng(2).permutation(31)
        tree = layout([20.0] * 31, [(int(order[a]), int(order[b])) for a, b in children])
        by_rank: dict[int, list[tuple[float, float]]] = {}
        for a, b in children:
            a, b = order[a], order[b]
            by_rank.setdefault(tree.ranks[a], []).append((tree.x[a], tree.x[b]))
        for pieces in by_rank.values():
            pieces.sort()
            lower = [b for _, b in pieces]
            self.assertEqual(lower, sorted(lower))

    def test_no_exchange_of_neighbors_leaves_fewer_crossings(self):
        rng = np.random.default_rng(3)
        for _ in range(20):
            edges = random_dag(rng, 16, 0.15)
            placed = layout([30.0] * 16, edges)
            pieces: dict[
                int, list[tuple[float, float]]
            ] = {}  # below each rank: upper and lower end
            rows: dict[int, set[float]] = {}
            for (source, target), bends in zip(edges, placed.bends):
                chain = [placed.x[source], *bends, placed.x[target]]
                for r, piece in enumerate(zip(chain, chain[1:]), placed.ranks[source]):
                    pieces.setdefault(r, []).append(piece)
            for r in pieces:
                rows.setdefault(r, set()).update(upper for upper, _ in pieces[r])
                rows.setdefault(r + 1, set()).update(lower for _, lower in pieces[r])
            for r, row in rows.items():
                order = sorted(row)
                for left, right in zip(order, order[1:]):
                    above, below = pieces.get(r - 1, []), pieces.get(r, [])
                    ends = [(lower, upper) for upper, lower in above], below
                    of = [[[b for a, b in side if a == x] for side in ends] for x in (left, right)]
                    pairs = [(a, b) for k in (0, 1) for a in of[0][k] for b in of[1][k]]
                    crossing = sum(a > b for a, b in pairs)
                    self.assertLessEqual(crossing, sum(a < b for a, b in pairs))

    def test_a_long_edge_is_straight_beside_the_chain_that_it_skips(self):
        count = 9
        edges = [(k, k + 1) for k in range(count - 1)] + [(0, count - 1)]
        bends = layout([60.0] * count, edges).bends[-1]
        self.assertEqual(len(bends), count - 2)
        self.assertLess(max(bends) - min(bends), 1e-6)

    def test_an_edge_between_boxes_gives_way_to_a_long_one_that_it_crosses(self):
        long, short = [0, 5, 6, 4], [1, 2, 3]  # 5 and 6 are bends; 5 → 6 crosses 2 → 3
        above: list[list[int]] = [[] for _ in range(7)]
        below: list[list[int]] = [[] for _ in range(7)]
        for chain in (long, short):
            for a, b in zip(chain, chain[1:]):
                below[a].append(b)
                above[b].append(a)
        columns = Columns([[0, 1], [5, 2], [3, 6], [4]], above, below, [30.0] * 7, real=5)
        x = columns.centers()
        self.assertLess(abs(x[5] - x[6]), 1e-6)
        self.assertGreater(abs(x[2] - x[3]), 1.0)


class Graphs(unittest.TestCase):
    def setUp(self) -> None:
        self.training = Training((784, 128, 10), momentum=0.9)
        self.fetches = [self.training.loss, self.training.train]
        self.shapes = self.training.shapes(100)

    def test_the_drawing_has_every_operator_once(self):
        svg = viz.graph_svg(self.fetches)
        drawn = words(svg)
        nodes = ad.find_topo_sort(self.fetches)
        for name in {node.op.name for node in nodes if not node.op.leaf and node.op.outputs}:
            expected = sum(node.op.name == name for node in nodes)
            self.assertEqual(sum(line.split()[0] == name for line in drawn), expected, name)

    def test_shapes_that_depend_on_feeds_are_shown_when_given(self):
        executor = ad.Executor(self.fetches)
        executor.infer_shape(self.shapes)
        self.assertNotIn("(100, 128)", words(viz.graph_svg(self.fetches)))
        drawn = words(viz.graph_svg(self.fetches, executor.node_to_shape_map))
        self.assertGreaterEqual(drawn.count("(100, 128)"), 3)

    def test_a_plans_graph_is_what_runs(self):
        plan = ad.Executor(self.fetches).plan(self.shapes)
        drawn = words(viz.graph_svg(plan))
        for step in plan.steps:
            self.assertIn(step.node.op.name, [line.split()[0] for line in drawn])
        self.assertNotIn("sum_to_like", drawn)

    def test_boxes_do_not_overlap_and_letters_fit_into_them(self):
        root = ET.fromstring(viz.graph_svg(self.fetches))
        boxes = []
        for group in root.iter(f"{SVG}g"):
            frame = group.find(f"{SVG}rect")
            if frame is None:
                continue
            x, y, width, height = (float(frame.get(k)) for k in ("x", "y", "width", "height"))
            boxes.append((x, y, x + width, y + height))
            for text in group.findall(f"{SVG}text"):
                self.assertLess(0.6 * float(group.get("font-size")) * len(text.text), width)
        self.assertGreater(len(boxes), 20)
        for k, a in enumerate(boxes):
            for b in boxes[k + 1 :]:
                apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
                self.assertTrue(apart, (a, b))

    def test_lines_leave_below_the_highest_box_of_their_rank(self):
        x, w = ad.Variable("x"), ad.Parameter(np.ones((3, 2), np.float32), "w")
        root = ET.fromstring(viz.graph_svg(ad.matmul_op(x, w)))
        frames = {
            group.find(f"{SVG}text").text: group.find(f"{SVG}rect")
            for group in root.iter(f"{SVG}g")
            if group.find(f"{SVG}rect") is not None
        }
        bottoms = {name: float(f.get("y")) + float(f.get("height")) for name, f in frames.items()}
        self.assertLess(bottoms["x"], bottoms["w"])
        for path in root.iter(f"{SVG}path"):
            first = float(re.match(r"M\S+ \S+V([\d.]+)", path.get("d"))[1])
            self.assertAlmostEqual(first, bottoms["w"], places=1)

    def test_gradients_have_a_color_of_their_own_before_and_after_the_rewrites(self):
        x, w = ad.Variable("x"), ad.Parameter(np.ones((3, 2), np.float32), "w")
        loss = ad.sum_op(ad.tanh_op(ad.matmul_op(x, w)))
        (gradient,) = ad.gradients(loss, [w])
        plan = ad.Executor([loss, gradient]).plan({x: (5, 3)})
        for graph in ([loss, gradient], plan):
            kinds: dict[str, set[str]] = {}
            for box in boxes_of(graph, None, 100)[0]:
                kinds.setdefault(box.kind, set()).add(box.nodes[0].op.name)
            self.assertEqual(kinds["operator"], {"matmul", "tanh", "sum"})
            self.assertIn("matmul", kinds["gradient"])
            self.assertIn(PURPLE, viz.graph_svg(graph))
            self.assertIn("backward", words(viz.graph_svg(graph)))
        self.assertNotIn("backward", words(viz.graph_svg(loss)))

    def test_a_fused_operator_tells_what_it_computes(self):
        x = ad.Variable("x")
        for ctx in native_contexts():
            plan = ad.Executor([ad.tanh_op(x * 2.0) * x], ctx).plan({x: (4, 4)})
            svg = viz.graph_svg(plan)
            self.assertIn("mul_const, tanh, mul", words(svg))
            self.assertIn("mul(tanh(mul_const(x, 2)), x)", svg)

    def test_what_is_far_away_is_named_in_a_crowded_drawing(self):
        fetches = deep_training(30)
        boxes, edges = boxes_of(fetches, None, 10**6)
        self.assertTrue(all(box.kind != AGAIN for box in boxes))
        drawn, lines = uncrowded(boxes, edges)
        ranks = rank(len(drawn), lines)
        spans = [ranks[b] - ranks[a] for a, b in lines]
        before = rank(len(boxes), edges)
        self.assertGreater(max(before[b] - before[a] for a, b in edges), 40)
        self.assertLess(sum(spans), 2 * len(lines))
        shown = {line for box in drawn if box.kind != AGAIN for line in box.lines}
        named = [box for box in drawn if box.kind == AGAIN]
        self.assertGreater(len(named), 10)
        for box in named:
            self.assertIn(box.lines[0].removeprefix("→ "), shown)

        # every line of before is still there, if only by name
        def of(pairs, found):
            return {(found[a].nodes[0], found[b].nodes[0]) for a, b in pairs}

        self.assertEqual(of(lines, drawn), of(edges, boxes))

    def test_a_small_drawing_has_all_of_its_lines(self):
        self.assertNotIn("elsewhere, by name", words(viz.graph_svg(self.fetches)))

    def test_extents_that_are_not_known_are_dots(self):
        x = ad.Variable("x", shape=(None, 3), dtype=np.float32)
        self.assertIn("(·, 3)", words(viz.graph_svg(x)))

    def test_updates_name_what_they_write(self):
        drawn = words(viz.graph_svg(self.fetches))
        self.assertIn("w0, w0.velocity", drawn)
        self.assertNotIn("w0.velocity", drawn)

    def test_what_is_asked_for_has_thick_lines(self):
        x = ad.Variable("x")
        root = ET.fromstring(viz.graph_svg([ad.exp_op(x) + 1.0]))
        thick = [
            group.find(f"{SVG}text").text
            for group in root.iter(f"{SVG}g")
            if (frame := group.find(f"{SVG}rect")) is not None
            and float(frame.get("stroke-width")) > 2
        ]
        self.assertEqual(thick, ["add_const"])

    def test_values_of_one_operator_are_one_box(self):
        double, square = two_fold(ad.Variable("x"))
        drawn = words(viz.graph_svg([double * square]))
        self.assertEqual([line for line in drawn if "two_fold" in line], ["two_fold"])

    def test_any_name_can_be_drawn(self):
        node = ad.exp_op(ad.Variable('<x & "y">\x00\ud800'), name="a\\b\n]]>")
        self.assertIn('<x & "y">��', words(viz.graph_svg(node)))
        dot = viz.graph_dot(node)
        self.assertIn('label="<x & \\"y\\">', dot)
        self.assertEqual(dot.count("\n"), len(dot.splitlines()))

    def test_a_large_graph_is_drawn_in_pieces_with_a_note(self):
        x = ad.Variable("x", shape=(4,), dtype=np.float32)
        y, kept = x, []
        for k in range(2000):
            kept.append(y)
            y = y + kept[k // 2] if k % 5 == 0 else ad.relu_op(y)
        svg = viz.graph_svg(y)
        self.assertLess(len(svg), 300_000)
        root = ET.fromstring(svg)
        self.assertLess(float(root.get("width")), 6000)
        self.assertLess(float(root.get("height")), 6000)
        note = [line for line in words(svg) if "drawn as" in line][0]
        self.assertTrue(note.startswith("2,001 nodes, drawn as 41 pieces of up to 50"), note)

    def test_parameters_belong_to_the_pieces_that_use_them(self):
        svg = viz.graph_svg(deep_training(30), limit=50)
        self.assertFalse([line for line in words(svg) if line.startswith("Parameter ×")])
        note = [line for line in words(svg) if "drawn as" in line][0]
        self.assertTrue(note.startswith(f"{len(boxes_of(deep_training(30), None, None)[0]):,} "))

    def test_dot_has_every_node_and_edge(self):
        x = ad.Variable("x")
        y = ad.exp_op(x)
        dot = viz.graph_dot([y * x])
        self.assertEqual(len(re.findall(r"^  n\d+ \[label=", dot, re.M)), 3)
        names = {k: line for k, line in re.findall(r'^  (n\d+) \[label="(\w+)', dot, re.M)}
        edges = {(names[a], names[b]) for a, b in re.findall(r"(n\d+) -> (n\d+);", dot)}
        self.assertEqual(edges, {("x", "exp"), ("x", "mul"), ("exp", "mul")})


class MemoryPlans(unittest.TestCase):
    def rectangles(self, svg):
        found = []
        for group in ET.fromstring(svg).iter(f"{SVG}g"):
            title, area = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
            if title is not None and area is not None:
                at = [float(area.get(k)) for k in ("x", "y", "width", "height")]
                found.append((title.text, *at))
        return found

    def test_every_buffer_is_a_rectangle_of_its_lifetime_and_bytes(self):
        training = Training((784, 256, 100, 10))
        plan = ad.Executor([training.loss, training.train]).plan(training.shapes(1000))
        inside = [b for b in plan.buffers if b.kind == "arena" and b.nbytes]
        drawn = self.rectangles(viz.memory_plan(plan))
        self.assertEqual(len(drawn), len(inside))
        largest = max(inside, key=lambda buffer: buffer.nbytes)
        text, _, _, width, height = drawn[0]
        self.assertIn(
            f"{largest.nbytes:,} bytes at {largest.offset:,}, steps {largest.first} to "
            f"{largest.last}",
            text,
        )
        steps = largest.last + 1 - largest.first
        self.assertAlmostEqual(width + 0.5, 860 * steps / len(plan.steps), delta=0.6)
        self.assertAlmostEqual(height + 0.5, 380 * largest.nbytes / plan.arena_nbytes, delta=0.6)

    def test_rectangles_do_not_overlap(self):
        training = Training((64, 32, 10), momentum=0.9)
        plan = ad.Executor([training.loss, training.train]).plan(training.shapes(50))
        drawn = [(x, y, x + w, y + h) for _, x, y, w, h in self.rectangles(viz.memory_plan(plan))]
        for k, a in enumerate(drawn):
            for b in drawn[k + 1 :]:
                wide = min(a[2], b[2]) - max(a[0], b[0])
                high = min(a[3], b[3]) - max(a[1], b[1])
                self.assertFalse(wide > 0.6 and high > 0.6, (a, b))

    def test_the_smallest_go_first_when_there_are_too_many(self):
        training = Training((64, 32, 10))
        plan = ad.Executor([training.loss, training.train]).plan(training.shapes(50))
        svg = viz.memory_plan(plan, limit=3)
        self.assertEqual(len(self.rectangles(svg)), 3)
        self.assertIn("the 3 largest of", words(svg)[0])

    def test_steps_are_whole_and_scratch_is_called_so(self):
        x, y = ad.Variable("x"), ad.Variable("y", dtype=np.int64)
        loss = ad.softmax_cross_entropy(ad.exp_op(x), y)
        plan = ad.Executor([loss]).plan({x: (50, 10), y: (50,)})
        self.assertLess(len(plan.steps), 5)
        drawn = words(viz.memory_plan(plan))
        steps = [line for line in drawn if line.replace(".", "").isdigit()]
        self.assertEqual(steps[-len(plan.steps) :], [str(k) for k in range(len(plan.steps))])
        self.assertTrue(any(line.startswith("scratch") for line in drawn), drawn)

    def test_a_plan_without_an_arena(self):
        x = ad.Variable("x")
        plan = ad.Executor([ad.exp_op(x)]).plan({x: (3,)})
        self.assertIn("arena 0 bytes", words(viz.memory_plan(plan))[0])

    def test_axis_steps_are_round_and_inside(self):
        for largest in (0.013, 0.9, 3, 19, 461.8, 1455, 98_765):
            steps = axis_steps(largest)
            self.assertTrue(3 <= len(steps) <= 6, (largest, steps))
            self.assertLessEqual(steps[-1], largest * (1 + 1e-9))
            self.assertRegex(f"{steps[1]:.0e}", "^[125]e")


class Times(unittest.TestCase):
    def test_bars_are_as_long_as_their_times(self):
        rows = [profile.Row(name, 2, ms, 0, 0) for name, ms in (("a", 8.0), ("b", 4.0), ("c", 2.0))]
        table = SimpleNamespace(runs=2, rows=lambda: rows)
        root = ET.fromstring(viz.operator_times(table))
        widths = [float(bar.get("width")) for bar in root.iter(f"{SVG}rect")]
        self.assertAlmostEqual(widths[1] / widths[0], 0.5, places=3)
        self.assertAlmostEqual(widths[2] / widths[0], 0.25, places=3)
        short = viz.operator_times(table, limit=1)
        self.assertIn("2 more operators", words(short))
        self.assertTrue(any(line.startswith("42.9%") for line in words(short)), words(short))

    def test_a_profile_without_runs(self):
        self.assertIn("0.0 µs in 0 runs", words(viz.operator_times(profile.Profile()))[0])

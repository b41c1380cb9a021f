"""Tensors as values: looking at them, arithmetic, indexing, views, changes in place, devices."""

from __future__ import annotations

import copy
import pickle
import threading
import unittest
from unittest import mock

import numpy as np

import dlsys as dl
from dlsys import functional as F
from dlsys.eager import engine
from dlsys.eager.device import engine_of
from dlsys.eager.tape import State
from dlsys.errors import DeviceError, GraphError, ShapeError, SignatureError
from dlsys.ndarray import cpu, gpu
from support.devices import require


class Tensors:
    """What Tensors do on `device`."""

    device = "numpy"

    def tensor(self, data, **options):
        return dl.tensor(data, self.device, **options)

    def assert_is(self, tensor, values):
        np.testing.assert_array_equal(tensor.numpy(), np.asarray(values))

    # ---- values ----
    def test_data_keeps_its_dtype_and_python_numbers_get_the_usual_one(self):
        for data, dtype in (
            ([1.0, 2.0], np.float32), ([1, 2], np.int64), ([True], np.bool_), (3.5, np.float32),
            (np.float32([1]), np.float32), (np.int32([1]), np.int32),
        ):  # fmt: skip
            with self.subTest(data=data):
                self.assertEqual(self.tensor(data).dtype, dtype)
                self.assert_is(self.tensor(data), data)
        self.assertEqual(self.tensor([1, 2], dtype="float32").dtype, np.float32)

    def test_it_is_shown_with_its_values(self):
        x = self.tensor([[1.5, 2.0]])
        name = x.device
        self.assertEqual(repr(x), f"Tensor([[1.5, 2. ]], device={name})")
        y = self.tensor(2.0, requires_grad=True) * 3
        self.assertEqual(repr(y), f"Tensor(6., device={name}, requires_grad=True)")
        self.assertEqual(f"{y:.2f} {y.item()} {float(y)} {int(y)}", "6.00 6.0 6.0 6")
        self.assertEqual(x.tolist(), [[1.5, 2.0]])
        self.assertEqual(f"{x}", "[[1.5 2. ]]")
        self.assertEqual(
            repr(dl.zeros(0, 2, device=self.device)[:, 0]), f"Tensor([], shape=(0,), device={name})"
        )

    def test_one_element_is_true_or_false_and_several_are_neither(self):
        self.assertTrue(self.tensor(1.0) > 0)
        self.assertFalse(self.tensor([2.0]) == 3.0)
        with self.assertRaisesRegex(ShapeError, r"shape \(2,\) is neither true nor false"):
            bool(self.tensor([1.0, 2.0]))
        with self.assertRaisesRegex(ShapeError, r"item\(\): expected an array of one element"):
            self.tensor([1.0, 2.0]).item()

    def test_numpys_functions_and_pythons_round_take_its_values(self):
        x = self.tensor([[1.0, 2.0], [3.0, 5.0]])
        self.assertEqual((np.sum(x), np.mean(x), np.max(x)), (11, 2.75, 5))
        np.testing.assert_array_equal(np.stack([x, x + 1])[1], [[2, 3], [4, 6]])
        np.testing.assert_array_equal(np.sum(x, axis=0, keepdims=True), [[4, 7]])
        y = x + 1
        self.assertEqual((np.shape(y), np.ndim(y), y._value), ((2, 2), 2, None))
        self.assertEqual((round(x.mean(), 1), round(x.mean())), (2.8, 3))
        with self.assertRaisesRegex(ShapeError, "round"):
            round(x)

    def test_all_and_any_make_comparisons_by_value_one(self):
        x = self.tensor([[1.0, np.nan], [3.0, 4.0]])
        self.assert_is((x == x).all(axis=1), [False, True])
        self.assert_is((x > 3).any(axis=0, keepdims=True), [[False, True]])
        self.assertTrue((x == x).any())
        self.assertEqual((x[:0].all().item(), x[:0].any().item()), (True, False))

    def test_errors_speak_of_tensors_and_of_axes(self):
        x = self.tensor([[1.0, 2.0]])
        with self.assertRaisesRegex(ShapeError, r"do not broadcast: Tensor \(1, 2\) and Tensor"):
            x + self.tensor([1.0, 2.0, 3.0])
        for call in (lambda: x.sum(dim=1), lambda: F.mean(x, keepdim=True)):
            with self.assertRaisesRegex(SignatureError, "axis and keepdims instead of dim and"):
                call()

    def test_what_is_no_array_of_numbers_is_refused(self):
        for data in ([[1.0], [1.0, 2.0]], "abc", [None], object()):
            with self.subTest(data=data), self.assertRaises(ShapeError):
                self.tensor(data)
        with self.assertRaisesRegex(DeviceError, 'device is "tpu"|device is .tpu.'):
            dl.tensor(1.0, "tpu")

    def test_it_is_a_copy_of_its_data(self):
        data = np.ones(3, np.float32)
        x = self.tensor(data)
        data[0] = 5
        x.numpy()[1] = 7
        self.assert_is(x, [1, 1, 1])

    def test_copies_and_pickles_are_tensors_of_their_own(self):
        x = self.tensor([1.0, 2.0], requires_grad=True)
        for made in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
            self.assert_is(made, [1, 2])
            self.assertTrue(made.requires_grad and made.is_leaf)
            self.assertEqual(made.device, x.device)
        self.assert_is(pickle.loads(pickle.dumps(x * 2)), [2, 4])

    # ---- arithmetic ----
    def test_operators_are_those_of_numpy(self):
        a, b = np.float32([[1, -2, 3]]), np.float32([[2], [0.5]])
        x, y = self.tensor(a), self.tensor(b)
        for name, f in {
            "add": lambda p, q: p + q, "sub": lambda p, q: p - q, "mul": lambda p, q: p * q,
            "div": lambda p, q: p / q, "pow": lambda p, q: q**p, "scalar": lambda p, q: 2 - p * 3,
            "rdiv": lambda p, q: 1 / q, "less": lambda p, q: p < q, "ge": lambda p, q: p >= 1,
            "eq": lambda p, q: p == q, "and": lambda p, q: (p > 0) & (q > 1),
            "invert": lambda p, q: ~(p > 0), "neg": lambda p, q: -p, "square": lambda p, q: p**2,
        }.items():  # fmt: skip
            with self.subTest(name):
                got, wanted = f(x, y), f(a, b)
                self.assertEqual(got.shape, wanted.shape)
                np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6)
        np.testing.assert_allclose((x @ self.tensor(a.T)).numpy(), a @ a.T)
        np.testing.assert_allclose((a + x).numpy(), a + a)  # an array leaves it to the Tensor

    def test_integers_become_float32_where_floats_come_out(self):
        k = self.tensor([1, 2])
        for made, wanted in (
            (k / 2, [0.5, 1]),
            (k / k, [1, 1]),
            (k + 0.5, [1.5, 2.5]),
            (2.0 * k, [2, 4]),
        ):
            self.assertEqual(made.dtype, np.float32)
            self.assert_is(made, wanted)
        self.assertEqual((k * 2).dtype, np.int64)
        self.assertEqual((k // 2).dtype, np.int64)

    def test_a_tape_that_nobody_looks_at_stays_short(self):
        x = self.tensor([1.0])
        most = 0
        with mock.patch.object(engine, "_MOST_ENTRIES", 1000):
            for _ in range(2500):
                x + 1
                most = max(most, len(engine_of(self.device).tape.states))
        self.assertLess(most, 1010)
        self.assertGreater(most, 990)

    def test_what_does_not_fit_raises_where_it_is_written(self):
        x, y = self.tensor(np.ones((2, 3), "f")), self.tensor(np.ones((4,), "f"))
        for _ in range(2):  # also when it was refused before
            with self.assertRaisesRegex(ShapeError, r"broadcast.*\(2, 3\).*\(4,\).*test_tensor.py"):
                x + y
        with self.assertRaisesRegex(SignatureError, "softmax"):
            F.softmax(x, axis="one")
        self.assert_is((x + 1)[0, 0], 2)  # and the tape goes on

    def test_a_node_of_a_graph_is_refused(self):
        node = dl.Variable("x", shape=(2,)) + 1
        with self.assertRaisesRegex(GraphError, "is a node of a graph"):
            F.where(self.tensor([1.0, 2.0]) > 1, node, 0.0)

    def test_a_number_that_changes_each_time_needs_few_programs(self):
        x, expected = self.tensor([1.0, 2.0]), np.float32([1, 2])
        made = State.made
        for k in range(40):
            x = x * (1 + 1 / (k + 2))
            expected = expected * np.float32(1 + 1 / (k + 2))
            x.numpy()
        np.testing.assert_allclose(x.numpy(), expected, rtol=1e-6)
        self.assertLess(State.made - made, 20)

    # ---- indexing ----
    def test_numbers_that_are_equal_and_not_the_same_have_programs_of_their_own(self):
        x = self.tensor([1.0])
        signs = [np.signbit((x * zero).numpy()).item() for zero in (0.0, -0.0, 0.0, -0.0)]
        self.assertEqual(signs, [False, True, False, True])
        ints = dl.tensor([2], self.device)
        self.assertEqual([str((ints * n).dtype) for n in (2, 2.0, True)],
                         ["int64", "float32", "int64"])  # fmt: skip

    def test_indexing_is_that_of_numpy(self):
        a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        for x in (self.tensor(a), self.tensor(a) * 1):  # a value, and one that is not computed
            for key in (
                0, -1, (1, 2), slice(None, None, 2), (..., 1), (None, 0), (slice(1), slice(1, 3)),
                (slice(None), -1, slice(None, None, -1)), (0, 1, 2), [1, 0], np.array([[0], [1]]),
                ([0, 1], [1, 2]), (slice(None), [2, 0]), a > 10, (0, a[0] > 5),
            ):  # fmt: skip
                with self.subTest(key=str(key)):
                    self.assert_is(x[key], a[key])
        with self.assertRaisesRegex(ShapeError, "out of range|out of bounds"):
            self.tensor(a)[2].numpy()

    def test_tensors_are_indices(self):
        a = np.arange(12, dtype=np.float32).reshape(3, 4)
        x, index = self.tensor(a), self.tensor([2, 0])
        self.assert_is(x[index], a[[2, 0]])
        self.assert_is(x[x > 4], a[a > 4])
        self.assert_is(x[index, index], a[[2, 0], [2, 0]])
        self.assertEqual([10, 20, 30][self.tensor(1)], 20)

    def test_assignment_is_that_of_numpy(self):
        for key, value in (
            (0, 5.0), ((slice(None), 1), [7.0, 8.0, 9.0]), (slice(1, 3), 0.0), (..., 2.0),
            ([0, 2], -1.0), (([0, 1], [1, 1]), [3.0, 4.0]), ([1, 1], np.float32([[1], [2]])),
            ((slice(None, None, 2), slice(1)), 6.0),
        ):  # fmt: skip
            with self.subTest(key=str(key)):
                a = np.arange(12, dtype=np.float32).reshape(3, 4)
                x = self.tensor(a)
                a[key] = value
                x[key] = value
                self.assert_is(x, a)
        a = np.arange(6, dtype=np.float32)
        x = self.tensor(a)
        x[x > 3] = 0.0
        a[a > 3] = 0.0
        self.assert_is(x, a)
        with self.assertRaisesRegex(ShapeError, "broadcast"):
            x[0:2] = [1.0, 2.0, 3.0]

    # ---- views and changes in place ----
    def test_views_show_changes_of_their_base_and_the_other_way_round(self):
        a = np.arange(6, dtype=np.float32).reshape(2, 3)
        x = self.tensor(a)
        row, turned, flat = x[0], x.T, x.reshape(-1)
        part = turned[1:]
        row += 10
        a[0] += 10
        self.assert_is(x, a)
        self.assert_is(flat, a.reshape(-1))
        part[0, 1] = -1.0
        a.T[1:][0, 1] = -1
        for view, wanted in ((x, a), (row, a[0]), (turned, a.T), (part, a.T[1:])):
            self.assert_is(view, wanted)
        x *= 2
        self.assert_is(part, a.T[1:] * 2)
        self.assert_is(x.expand_dims(0).squeeze(0).swapaxes(0, 1), a.T * 2)

    def test_a_copy_does_not_follow(self):
        x = self.tensor([1.0, 2.0])
        y, z = x.copy(), x * 1
        x[0] = 5.0
        self.assert_is(y, [1, 2])
        self.assert_is(z, [1, 2])

    def test_what_was_computed_before_a_change_keeps_its_value(self):
        x = self.tensor([1.0, 2.0])
        y = x * 2
        x += 1
        z = x * 2
        self.assert_is(y, [2, 4])
        self.assert_is(z, [4, 6])

    def test_changes_in_place_keep_shape_and_dtype(self):
        x = self.tensor([1, 2])
        x += 1
        self.assertEqual(x.dtype, np.int64)
        self.assert_is(x, [2, 3])
        with self.assertRaisesRegex(ShapeError, "cannot become"):
            x += self.tensor([[1, 1], [1, 1]])
        with self.assertRaisesRegex(GraphError, "broadcast.*copy"):
            self.tensor([1.0]).broadcast_to((3,))[0] = 2.0

    # ---- elsewhere ----
    def test_it_moves_and_casts(self):
        x = self.tensor([1.5, 2.5])
        self.assertEqual(x.to("numpy").device, "numpy")
        self.assertIs(x.to(self.device), x)
        self.assertEqual(x.to("int32").dtype, np.int32)
        self.assertEqual(x.to(dtype=np.float16).dtype, np.float16)
        self.assert_is(x.to("int32"), [1, 2])

    def test_two_devices_do_not_mix(self):
        other = "cpu" if self.device == "numpy" else "numpy"
        with self.assertRaisesRegex(DeviceError, "met one of|no native library"):
            self.tensor([1.0]) + dl.tensor([1.0], other)

    def test_another_thread_sees_what_is_not_computed_yet(self):
        x = self.tensor([1.0, 2.0]) * 3
        seen = []
        thread = threading.Thread(target=lambda: seen.append((x + 1).tolist()))
        thread.start()
        thread.join()
        self.assertEqual(seen, [[4.0, 7.0]])
        self.assert_is(x, [3, 6])

    def test_only_what_is_held_is_computed(self):
        x = self.tensor([1.0])
        y = x + 1
        z = (y * 2) + 3
        engine = engine_of(self.device)
        tape = engine.tape
        z.numpy()
        programs = [p for p in tape.state.programs.values()]
        self.assertEqual([len(p.executor.eval_node_list) for p in programs], [2])  # y and z
        self.assertIsNotNone(y._value)

    def test_memory_is_flat_over_many_steps(self):
        x = self.tensor(np.ones(1000, np.float32))
        engine = engine_of(self.device)
        for _ in range(5):
            x = x * 0.5 + 1
            x.numpy()
        before = len(states_of(engine))
        for _ in range(300):
            x = x * 0.5 + 1
            x.numpy()
        self.assertEqual(len(states_of(engine)), before)

    def test_creation(self):
        d = {"device": self.device}
        self.assert_is(dl.zeros(2, 3, **d), np.zeros((2, 3)))
        self.assert_is(dl.ones((2,), **d), [1, 1])
        self.assert_is(dl.full((2, 2), 7, **d), np.full((2, 2), 7))
        self.assertEqual(dl.full((2,), 7, **d).dtype, np.int64)
        self.assert_is(dl.arange(5, **d), np.arange(5))
        self.assertEqual(dl.arange(0, 1, 0.25, **d).dtype, np.float32)
        self.assert_is(dl.linspace(0, 1, 3, **d), [0, 0.5, 1])
        self.assert_is(dl.eye(2, 3, **d), np.eye(2, 3))
        self.assert_is(dl.ones_like(dl.zeros(3, **d)), [1, 1, 1])
        with self.assertRaisesRegex(ShapeError, "zeros: expected extents"):
            dl.zeros(-1, **d)
        with self.assertRaisesRegex(ShapeError, "zeros: expected extents"):
            dl.zeros(1.5, **d)

    def test_random_numbers_repeat_with_the_seed(self):
        def drawn():
            dl.manual_seed(3)
            d = {"device": self.device}
            parts = dl.rand(4, **d), dl.randn(4, **d), dl.randint(0, 9, (4,), **d), dl.rand(4, **d)
            return [part.tolist() for part in parts]

        first = drawn()
        self.assertEqual(drawn(), first)
        self.assertNotEqual(first[0], first[3])
        self.assertTrue(all(0 <= x < 1 for x in first[0]))
        self.assertTrue(all(0 <= k < 9 for k in first[2]))
        with self.assertRaisesRegex(GraphError, "randint: expected low < high"):
            dl.randint(3, 3, device=self.device)


def states_of(engine):
    """All states that can be reached from the root without a Parameter."""
    found, stack = {}, [engine._root]
    while stack:
        state = stack.pop()
        if state not in found:
            found[state] = None
            stack += state.next.values()
    return list(found)


class NumpyTensors(Tensors, unittest.TestCase):
    def test_numpy_reads_its_memory(self):
        x = self.tensor([1.0, 2.0])
        np.testing.assert_array_equal(np.from_dlpack(x), [1, 2])


@require(cpu(0))
class CpuTensors(Tensors, unittest.TestCase):
    device = "cpu"

    def test_dlpack_shares_both_ways(self):
        x = self.tensor([1.0, 2.0])
        shared = np.from_dlpack(x)
        np.testing.assert_array_equal(shared, [1, 2])
        y = dl.from_dlpack(np.float32([3, 4]))
        self.assertEqual(y.device, "cpu:0")
        self.assert_is(y * 2, [6, 8])


@require(gpu(0))
class GpuTensors(Tensors, unittest.TestCase):
    device = "gpu"


class Package(unittest.TestCase):
    def test_names_load_when_they_are_used(self):
        self.assertLessEqual({"tensor", "jit", "functional", "nn", "no_grad"}, set(dir(dl)))
        for name in dl.__all__:
            self.assertIsNotNone(getattr(dl, name), name)
        with self.assertRaisesRegex(AttributeError, "no attribute 'tensr'"):
            dl.tensr  # noqa: B018

    def test_the_stub_has_the_names(self):
        import ast
        from pathlib import Path

        stub = Path(dl.__file__).with_suffix(".pyi")
        names = {
            alias.asname or alias.name
            for node in ast.walk(ast.parse(stub.read_text()))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        self.assertEqual(names, set(dl.__all__) - {"__version__"})

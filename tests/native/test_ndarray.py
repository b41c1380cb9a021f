"""Device arrays: conversions, copies, assignment, views, DLPack, and memory that is reused."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import unittest

import numpy as np

from dlsys import dtypes, ndarray
from dlsys.errors import OutOfMemoryError, ShapeError
from dlsys.runtime import dlpack
from dlsys.runtime.device import Block, Context, cpu, gpu, memory_stats
from dlsys.runtime.library import DTYPE_CODES
from support.devices import native_contexts, needs_torch, require


class Arrays:
    ctx: Context

    def arr(self, host, dtype=None):
        return ndarray.array(host, ctx=self.ctx, dtype=dtype)

    def test_round_trip_of_every_dtype(self):
        for dtype in DTYPE_CODES:
            held = dtypes.host(dtype)
            host = (np.arange(24).reshape(2, 3, 4) % 2).astype(held)
            arr = self.arr(host, dtype=dtype)
            back = arr.asnumpy()
            self.assertEqual((back.dtype, arr.dtype), (held, dtype))
            np.testing.assert_array_equal(back, host)
            self.assertTrue(back.flags.writeable and back.flags.owndata)

    def test_default_dtypes(self):
        for host, dtype in [
            ([1.5, 2.5], "float32"),
            (np.ones(2), "float32"),
            ([1, 2], "int64"),
            (np.ones(2, np.uint8), "uint8"),
            ([True, False], "bool"),
            (np.ones(2, ">f8"), "float32"),
        ]:
            self.assertEqual(self.arr(host).dtype, np.dtype(dtype))
        self.assertEqual(self.arr(np.ones(2), dtype=np.float64).dtype, np.float64)
        self.assertEqual(ndarray.empty((2, 3), ctx=self.ctx).dtype, np.float32)

    def test_attributes(self):
        arr = self.arr(np.zeros((4, 5)))
        self.assertEqual((arr.shape, arr.ndim, arr.size, arr.nbytes), ((4, 5), 2, 20, 80))
        self.assertEqual(len(arr), 4)
        self.assertIs(arr.ctx, self.ctx)
        self.assertTrue(repr(arr).endswith(f"shape=(4, 5), dtype=float32, ctx={self.ctx})"))
        handle = arr.handle
        self.assertEqual((handle.data, handle.ndim, handle.dtype), (arr.data_address, 2, 0))
        self.assertEqual(handle.ctx.device_type, self.ctx.device_type)
        self.assertEqual(handle.shape[:2], [4, 5])
        with self.assertRaises(AttributeError):
            arr.shape = (5, 4)

    def test_awkward_inputs(self):
        base = np.arange(24, dtype=np.float32).reshape(4, 6)
        read_only = base.copy()
        read_only.flags.writeable = False
        for host in (
            base.T,
            base[::2, ::3],
            base[::-1],
            read_only,
            base[:0],
            np.float32(3),
            base[1:],
        ):
            np.testing.assert_array_equal(self.arr(host).asnumpy(), host)
        self.assertEqual(self.arr(np.zeros((0, 3))).asnumpy().shape, (0, 3))
        self.assertTrue(np.isnan(self.arr([np.nan, 1]).asnumpy()[0]))

    def test_assignment(self):
        arr = ndarray.empty((2, 3), ctx=self.ctx)
        for value in (np.arange(6).reshape(2, 3), 2.5, np.nan, np.float64(0.1), 7, True):
            arr[:] = value
            expected = np.broadcast_to(np.asarray(value, np.float32), (2, 3))
            np.testing.assert_array_equal(arr.asnumpy(), expected)
        arr[:] = self.arr(np.full((2, 3), 4), dtype=np.int32)
        np.testing.assert_array_equal(arr.asnumpy(), np.full((2, 3), 4))
        arr[...] = arr
        large = self.arr(np.zeros(3, np.int64))
        large[:] = 2**53 + 1
        np.testing.assert_array_equal(large.asnumpy(), np.full(3, 2**53 + 1))

    def test_refused_assignments_change_nothing(self):
        arr = self.arr(np.ones((2, 3)))
        number = self.arr(np.ones(2, np.int32))
        for target, key, value, text in [
            (arr, slice(None), np.ones((3, 2)), "shapes differ: (2, 3) and (3, 2)"),
            (arr, slice(None), self.arr(np.ones(6)), "shapes differ: (2, 3) and (6,)"),
            (arr, 0, 1.0, "assigned as a whole"),
            (arr, slice(0, 1), 1.0, "assigned as a whole"),
            (
                number,
                slice(None),
                np.array([0.5, 0.5]),
                "cannot store float64 in an array of int32",
            ),
        ]:
            with self.assertRaises(ShapeError) as caught:
                target[key] = value
            self.assertIn(text, str(caught.exception))
            np.testing.assert_array_equal(target.asnumpy(), np.ones(target.shape))

    def test_copyto(self):
        arr = self.arr(np.arange(6.0).reshape(2, 3))
        other = ndarray.empty((2, 3), ctx=self.ctx)
        on_cpu = ndarray.empty((2, 3), ctx=cpu(0), dtype=np.float64)
        host = np.zeros((3, 2)).T
        for target in (other, on_cpu, host):
            arr.copyto(target)
            np.testing.assert_array_equal(np.asarray(target), arr.asnumpy())
        with self.assertRaisesRegex(ShapeError, "copyto: shapes differ"):
            arr.copyto(np.zeros(6))
        with self.assertRaisesRegex(TypeError, "got list"):
            arr.copyto([1, 2])

    def test_numbers(self):
        self.assertEqual(float(self.arr([2.5])), 2.5)
        self.assertEqual(float(self.arr(3)), 3.0)
        self.assertTrue(self.arr([1.0]))
        self.assertFalse(self.arr([0.0]))
        with self.assertRaisesRegex(ShapeError, "one element, got shape \\(2,\\)"):
            float(self.arr([1, 2]))
        with self.assertRaises(TypeError):
            len(self.arr(3))
        np.testing.assert_array_equal(np.asarray(self.arr([1, 2])) + 1, [2, 3])

    def test_refused_shapes_and_dtypes(self):
        for call, text in [
            (lambda: self.arr(np.zeros(2, np.int8)), "int8 is not supported"),
            (lambda: ndarray.empty((1,) * 9, ctx=self.ctx), "at most 8"),
            (lambda: ndarray.empty((2, -1), ctx=self.ctx), "negative"),
        ]:
            with self.assertRaisesRegex(ShapeError, text):
                call()
        with self.assertRaisesRegex(TypeError, "expected a context"):
            ndarray.empty((2,), ctx="cpu")

    def test_copies_own_their_memory(self):
        arr = self.arr(np.ones((2, 3)))
        for twin in (copy.copy(arr), copy.deepcopy(arr), pickle.loads(pickle.dumps(arr))):
            self.assertNotEqual(twin.data_address, arr.data_address)
            self.assertIs(twin.ctx, self.ctx)
            twin[:] = 2
        np.testing.assert_array_equal(arr.asnumpy(), np.ones((2, 3)))

    def test_views_share_a_block_and_keep_it(self):
        block = Block(self.ctx, 1024)
        first = ndarray.NDArray.from_block(block, 0, (4,), np.dtype(np.float32))
        second = ndarray.NDArray.from_block(block, 256, (2, 2), np.dtype(np.float32))
        del block
        first[:] = 1
        second[:] = 2
        np.testing.assert_array_equal(first.asnumpy(), np.ones(4))
        np.testing.assert_array_equal(second.asnumpy(), np.full((2, 2), 2))
        self.assertEqual(second.data_address - first.data_address, 256)

    def test_memory_is_freed_and_reused(self):
        def work():
            arrays = [self.arr(np.ones((k, 1000))) for k in (1, 5, 50)]
            return [arr.asnumpy() for arr in arrays]

        gc.collect()
        work()
        before = memory_stats(self.ctx)
        for _ in range(20):
            work()
        after = memory_stats(self.ctx)
        self.assertEqual(after.device_allocations, before.device_allocations)
        self.assertEqual(after.in_use_nbytes, before.in_use_nbytes)
        self.assertEqual(after.requests, before.requests + 60)

    def test_out_of_memory_leaves_everything_usable(self):
        arr = self.arr(np.ones(10))
        for shape in ((2**44,), (2**60, 4)):
            with self.assertRaisesRegex(OutOfMemoryError, f"out of memory on .*{self.ctx.name}"):
                ndarray.empty(shape, ctx=self.ctx)
        np.testing.assert_array_equal(self.arr(arr).asnumpy(), np.ones(10))

    def test_arrays_pass_between_threads(self):
        shared = self.arr(np.zeros(100_000))
        wrong = []

        def add_one(previous):
            if previous:
                previous.join()
            mine = self.arr(np.ones(100_000))
            ndarray.launch("add", self.ctx, shared, mine, shared)
            if not (mine.asnumpy() == 1).all():
                wrong.append(mine)

        thread = None
        for _ in range(8):
            thread = threading.Thread(target=add_one, args=(thread,))
            thread.start()
        thread.join()
        self.assertFalse(wrong)
        np.testing.assert_array_equal(shared.asnumpy(), np.full(100_000, 8))


class SharedMemory:
    """DLPack out of our arrays and in again, without another library."""

    ctx: Context

    def test_ours_to_ours(self):
        for version in (None, (1, 0)):
            arr = ndarray.array(np.arange(6.0).reshape(2, 3), ctx=self.ctx)
            twin = ndarray.from_dlpack(_Producer(arr, version))
            self.assertEqual((twin.shape, twin.dtype), ((2, 3), np.float32))
            self.assertEqual(twin.data_address, arr.data_address)
            arr[:] = 5
            del arr
            np.testing.assert_array_equal(twin.asnumpy(), np.full((2, 3), 5))

    def test_memory_goes_back(self):
        gc.collect()
        before = memory_stats(self.ctx).in_use_nbytes
        arr = ndarray.array(np.ones(1000), ctx=self.ctx)
        twin = ndarray.from_dlpack(arr)
        capsule = arr.__dlpack__()
        del arr
        self.assertGreater(memory_stats(self.ctx).in_use_nbytes, before)
        del twin, capsule
        self.assertEqual(memory_stats(self.ctx).in_use_nbytes, before)
        self.assertEqual(dlpack._exports, {})

    def test_another_device_is_refused(self):
        arr = ndarray.array(np.ones(2), ctx=self.ctx)
        with self.assertRaisesRegex(BufferError, "this array is on"):
            arr.__dlpack__(dl_device=(self.ctx.device_type, 7))


class _Producer:
    # Speaks DLPack in the version given; None is from before version 1, which takes no max_version.
    def __init__(self, arr, version):
        self.arr, self.version = arr, version

    def __dlpack_device__(self):
        return self.arr.__dlpack_device__()

    def __dlpack__(self, stream=None, **options):
        if self.version is None and options:
            raise TypeError("unexpected keyword max_version")
        return self.arr.__dlpack__(stream=stream, max_version=self.version)


def _numpy_exchanges(array):
    # numpy 1.24 gives neither bool nor read-only arrays away.
    try:
        np.from_dlpack(array)
    except (BufferError, TypeError):
        return False
    return True


_READ_ONLY = np.arange(6, dtype=np.float32).reshape(2, 3)
_READ_ONLY.flags.writeable = False


@require(cpu(0))
class NumpyExchange(unittest.TestCase):
    def test_out_to_numpy(self):
        for dtype in DTYPE_CODES:
            arr = ndarray.array(np.ones((2, 3)), dtype=dtype)
            shared = ndarray.from_dlpack(arr)
            self.assertEqual((shared.dtype, shared.data_address), (dtype, arr.data_address))
            if dtype is dtypes.bfloat16 or dtype == np.bool_:  # numpy has none; below
                continue
            view = np.from_dlpack(arr)
            self.assertEqual((view.dtype, view.ctypes.data), (dtype, arr.data_address))

    @unittest.skipUnless(_numpy_exchanges(np.ones(1, bool)), "this numpy exchanges no bool")
    def test_bool_out_to_numpy(self):
        arr = ndarray.array(np.ones((2, 3)), dtype=np.bool_)
        view = np.from_dlpack(arr)
        self.assertEqual((view.dtype, view.ctypes.data), (np.bool_, arr.data_address))
        view[0, 0] = False
        self.assertFalse(arr.asnumpy()[0, 0])
        del arr
        self.assertTrue(view[1, 1])

    def test_what_numpy_refuses_is_told_by_numpy(self):
        before = memory_stats(cpu(0)).in_use_nbytes
        arr = ndarray.array(np.ones(3), cpu(0), dtype="bfloat16")
        for _ in range(2):
            with self.assertRaisesRegex((RuntimeError, BufferError), "[Uu]nsupported dtype"):
                np.from_dlpack(arr)
        np.testing.assert_array_equal(ndarray.from_dlpack(arr).asnumpy(), 1)
        del arr
        self.assertEqual(memory_stats(cpu(0)).in_use_nbytes, before)
        self.assertEqual(dlpack._exports, {})

    def test_in_from_numpy(self):
        host = np.arange(6, dtype=np.float32).reshape(2, 3)
        arr = ndarray.from_dlpack(host)
        self.assertEqual(arr.data_address, host.ctypes.data)
        host[0, 0] = 9
        del host
        self.assertEqual(arr.asnumpy()[0, 0], 9)

    def test_awkward_numpy(self):
        host = np.arange(6, dtype=np.float32).reshape(2, 3)
        self.assertEqual(ndarray.from_dlpack(host[:0]).shape, (0, 3))
        self.assertEqual(float(ndarray.from_dlpack(np.float32([3]).reshape(()))), 3)
        with self.assertRaisesRegex(ShapeError, "contiguous row-major"):
            ndarray.from_dlpack(host.T)
        with self.assertRaisesRegex(ShapeError, "bits"):
            ndarray.from_dlpack(host.astype(np.complex64))
        with self.assertRaisesRegex(TypeError, "no __dlpack__"):
            ndarray.from_dlpack([1, 2])

    @unittest.skipUnless(_numpy_exchanges(_READ_ONLY), "this numpy exchanges no read-only arrays")
    def test_read_only_numpy_is_copied(self):
        host = _READ_ONLY
        copied = ndarray.from_dlpack(host)
        self.assertNotEqual(copied.data_address, host.ctypes.data)
        np.testing.assert_array_equal(copied.asnumpy(), host)


@require(cpu(0))
class CpuArrays(Arrays, SharedMemory, unittest.TestCase):
    ctx = cpu(0)


@require(gpu(0))
class GpuArrays(Arrays, SharedMemory, unittest.TestCase):
    ctx = gpu(0)


@needs_torch
@require(cpu(0))
class TorchExchange(unittest.TestCase):
    def test_both_ways(self):
        import torch

        for ctx in native_contexts():
            if ctx is gpu(0) and not torch.cuda.is_available():
                continue
            with self.subTest(ctx=ctx):
                arr = ndarray.array(np.arange(6.0).reshape(2, 3), ctx=ctx)
                tensor = torch.from_dlpack(arr)
                self.assertEqual(tensor.data_ptr(), arr.data_address)
                np.testing.assert_array_equal((tensor + 1).cpu().numpy(), arr.asnumpy() + 1)
                source = torch.ones(4, 5, device=tensor.device)
                twin = ndarray.from_dlpack(source)
                self.assertEqual(twin.data_address, source.data_ptr())
                del source
                np.testing.assert_array_equal(twin.asnumpy(), np.ones((4, 5)))

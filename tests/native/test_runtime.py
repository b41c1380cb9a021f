"""The library, contexts, streams, forks, and what is said where something is missing."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import unittest

import numpy as np

from dlsys import ndarray
from dlsys.errors import DeviceError, KernelError, OutOfMemoryError
from dlsys.runtime import device, toolchain
from dlsys.runtime.device import Block, Context, cpu, gpu
from dlsys.runtime.library import load
from support.devices import EMULATED, gpu_skip_reason, noted, require

_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(toolchain.__file__)))


def _python(source: str, **environment: str) -> subprocess.CompletedProcess:
    merged = {**os.environ, "PYTHONPATH": _PACKAGE_ROOT, **environment}
    command = [sys.executable, "-c", source]
    return subprocess.run(command, env=merged, capture_output=True, text=True, timeout=120)


class Contexts(unittest.TestCase):
    def test_equal_contexts_are_the_same_object(self):
        self.assertIs(cpu(0), cpu())
        self.assertIs(pickle.loads(pickle.dumps(gpu(1))), gpu(1))
        self.assertIsNot(cpu(0), gpu(0))
        self.assertEqual(
            (repr(gpu(1)), gpu(1).name, gpu(1).kernel_device), ("gpu(1)", "gpu", "cuda")
        )

    def test_they_are_constant_and_checked(self):
        with self.assertRaisesRegex(AttributeError, "constant"):
            cpu(0).device_id = 1
        for arguments in ((3, 0), (1, -1)):
            with self.assertRaisesRegex(ValueError, "no such device"):
                Context(*arguments)


class NothingThere(unittest.TestCase):
    """Each case is a fresh process, because a library is loaded once."""

    report = (
        "from dlsys.runtime.device import best_context, cpu, unavailable\n"
        "print(unavailable(cpu(0)))\n"
        "print(best_context()[0])\n"
    )

    def test_no_library(self):
        ran = _python(self.report, DLSYS_LIBRARY="/nowhere/libdlsys.so")
        self.assertIn("the native library is not built: run `make lib`", ran.stdout)
        self.assertTrue(ran.stdout.endswith("None\n"), ran)

    def test_a_file_that_is_no_library(self):
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(b"not a library")
            file.flush()
            ran = _python(self.report, DLSYS_LIBRARY=file.name)
        self.assertIn("the native library cannot be loaded", ran.stdout)
        self.assertIn("make lib", ran.stdout)

    def test_another_library(self):
        path = np._core._multiarray_umath.__file__
        ran = _python(self.report, DLSYS_LIBRARY=path)
        self.assertIn("the native library", ran.stdout)
        self.assertTrue(ran.stdout.endswith("None\n"), ran)

    @require(cpu(0))
    def test_no_such_device(self):
        self.assertRegex(device.unavailable(cpu(3)), r"cpu\(3\)")
        self.assertIsNotNone(device.unavailable(gpu(1000)))
        with self.assertRaises(DeviceError):
            ndarray.empty((2,), ctx=gpu(1000))


class Toolchain(unittest.TestCase):
    def run_script(self, *arguments, **environment):
        command = [sys.executable, toolchain.__file__, *arguments]
        merged = {**os.environ, **environment}
        return subprocess.run(command, env=merged, capture_output=True, text=True, timeout=60)

    def test_answers_are_existing_paths_or_nothing(self):
        for what in ("nvcc", "include", "libs", "nccl"):
            ran = self.run_script(what)
            self.assertEqual(ran.returncode, 0, ran.stderr)
            answer = ran.stdout.strip()
            self.assertTrue(not answer or os.path.exists(answer), answer)
        self.assertIn(self.run_script("gpu").stdout, ("", "yes\n"))
        self.assertEqual(self.run_script("wrong").returncode, 2)

    def test_a_toolkit_in_wheels(self):
        with tempfile.TemporaryDirectory() as site:
            root = os.path.join(site, "nvidia", "cu13")
            for name in ("bin/nvcc", "include/cuda_runtime.h", "lib/libcudart_static.a"):
                path = os.path.join(root, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w") as file:
                    file.write("")
                os.chmod(path, 0o755)
            environment = {"PATH": "/nowhere", "CUDA_HOME": "", "PYTHONPATH": site}
            if not os.path.isdir("/usr/local/cuda"):
                self.assertEqual(
                    self.run_script("nvcc", **environment).stdout, f"{root}/bin/nvcc\n"
                )
            environment["CUDA_HOME"] = root
            for what, name in (("nvcc", "bin/nvcc"), ("include", "include"), ("libs", "lib")):
                answer = self.run_script(what, **environment).stdout
                self.assertEqual(answer, os.path.join(root, name) + "\n")


class LibraryCase:
    ctx: Context

    def test_the_table(self):
        library = load()
        self.assertIs(load(), library)
        name = self.ctx.kernel_device
        self.assertEqual(library.signature[name, "add"].rstrip("s"), "iio")
        self.assertIs(library.kernel(name, "add"), library.kernel(name, "add"))
        with self.assertRaisesRegex(KernelError, "no such kernel"):
            library.kernel(name, "no_such_kernel")

    def test_a_kernel_checks_its_arity(self):
        arr = ndarray.array(np.ones(3), ctx=self.ctx)
        add = load().kernel(self.ctx.kernel_device, "add")
        with self.assertRaisesRegex(TypeError, "add"):
            add(arr, arr)
        with self.assertRaises(TypeError):
            add(arr, arr, arr, 0, 0)

    def test_errors_of_threads_do_not_mix(self):
        wrong = []

        def fail_often(extent):
            bad, good = (ndarray.empty((n,), ctx=self.ctx) for n in (extent, extent + 100))
            for _ in range(200):
                try:
                    ndarray.launch("add", self.ctx, good, good, bad)
                except KernelError as error:
                    if f"({extent},)" not in str(error):
                        wrong.append(str(error))

        threads = [threading.Thread(target=fail_often, args=(n,)) for n in range(3, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_a_status_becomes_its_error(self):
        library = load()
        with self.assertRaisesRegex(OutOfMemoryError, r"\[who: me\]$"):
            library.check(
                library.cdll.DLMemoryAlloc(self.ctx.struct, 2**55, None, b"12345678"), who="me"
            )

    def test_streams_belong_to_threads_and_are_reused(self):
        own = device.stream(self.ctx)
        self.assertEqual(own, device.stream(self.ctx))
        seen = []
        for _ in range(3):
            thread = threading.Thread(target=lambda: seen.append(device.stream(self.ctx)))
            thread.start()
            thread.join()
        self.assertEqual(len(set(seen)), 1)
        self.assertEqual(own == seen[0], self.ctx is cpu(0))

    def test_counters(self):
        before = device.memory_stats(self.ctx)
        block = Block(self.ctx, 10_000_000)
        during = device.memory_stats(self.ctx)
        self.assertGreaterEqual(during.in_use_nbytes - before.in_use_nbytes, 10_000_000)
        self.assertGreaterEqual(during.peak_in_use_nbytes, during.in_use_nbytes)
        del block
        device.reset_peak(self.ctx)
        device.trim(self.ctx)
        after = device.memory_stats(self.ctx)
        self.assertEqual(after.in_use_nbytes, before.in_use_nbytes)
        self.assertEqual(after.peak_in_use_nbytes, after.in_use_nbytes)
        self.assertLessEqual(after.reserved_nbytes, during.reserved_nbytes - 10_000_000)

    def test_a_block_is_not_copied(self):
        with self.assertRaisesRegex(TypeError, "cannot be copied"):
            pickle.dumps(Block(self.ctx, 8))

    def test_the_device_has_a_name(self):
        self.assertTrue(device.device_name(self.ctx))
        self.assertGreaterEqual(device.device_count(self.ctx.device_type), 1)
        self.assertIsNone(device.unavailable(self.ctx))

    def test_a_clean_exit_with_live_arrays_and_threads(self):
        ran = _python(
            "import threading, time, numpy as np\n"
            "from dlsys import ndarray\n"
            "from dlsys.runtime.device import Context\n"
            f"ctx = Context({self.ctx.device_type}, 0)\n"
            "def work():\n"
            "    global theirs\n"
            "    theirs = ndarray.array(np.ones(1000), ctx=ctx)\n"
            "    started.set()\n"
            "    time.sleep(60)\n"
            "started = threading.Event()\n"
            "threading.Thread(target=work, daemon=True).start()\n"
            "started.wait()\n"
            "ndarray.launch('add', ctx, theirs, theirs, theirs)\n"
            "ours = [theirs]\n"
            "ours.append(ours)\n"
            "shared = ndarray.from_dlpack(theirs)\n"
            "print(float(theirs.asnumpy().sum()))\n"
        )
        self.assertEqual((ran.returncode, ran.stdout, ran.stderr), (0, "2000.0\n", ""))

    def test_a_forked_child_works_on_the_cpu(self):
        # A matrix product makes the pool of worker threads, which the child does not inherit.
        ran = _python(
            "import os, sys, warnings, numpy as np\n"
            "warnings.simplefilter('ignore')\n"
            "from dlsys import ndarray\n"
            "from dlsys.runtime.device import Context, cpu, unavailable\n"
            f"ctx = Context({self.ctx.device_type}, 0)\n"
            "def product(ctx):\n"
            "    a, c = (ndarray.array(np.ones((300, 300)), ctx=ctx) for _ in range(2))\n"
            "    ndarray.launch('matmul', ctx, a, 0, a, 0, 0, 0, c)\n"
            "    return c\n"
            "held = product(cpu(0)), product(ctx)\n"
            "child = os.fork()\n"
            "good = float(product(cpu(0)).asnumpy()[7, 7]) == 300\n"
            "if child == 0:\n"
            "    good = good and (ctx is cpu(0) or unavailable(ctx) is not None)\n"
            "    del held\n"
            "    sys.exit(0 if good else 5)\n"
            "_, status = os.waitpid(child, 0)\n"
            "print(good, os.waitstatus_to_exitcode(status), held[1].asnumpy()[0, 0])\n"
        )
        self.assertEqual((ran.stdout, ran.stderr), ("True 0 300.0\n", ""), ran)

    def test_a_child_that_is_the_first_to_use_the_device(self):
        ran = _python(
            "import os, sys, warnings, numpy as np\n"
            "warnings.simplefilter('ignore')\n"
            "from dlsys import ndarray\n"
            "from dlsys.runtime.device import Context, memory_stats\n"
            f"ctx = Context({self.ctx.device_type}, 0)\n"
            "if os.fork() == 0:\n"
            "    ndarray.array(np.ones(1000), ctx=ctx)\n"
            "    sys.exit(memory_stats(ctx).in_use_nbytes)\n"
            "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        )
        self.assertEqual((ran.stdout, ran.stderr), ("0\n", ""), ran)


@require(cpu(0))
class CpuLibrary(LibraryCase, unittest.TestCase):
    ctx = cpu(0)

    def threads(self, **environment: str) -> str:
        report = (
            "import ctypes\n"
            "from dlsys.runtime.library import load\n"
            "count = ctypes.c_int()\n"
            "for reset in (False, True):\n"
            "    load().cdll.DLCpuSetThreads(0) if reset else None\n"
            "    load().check(load().cdll.DLCpuGetThreads(ctypes.byref(count)))\n"
            "    print(count.value)\n"
        )
        ran = _python(report, **environment)
        self.assertEqual(ran.returncode, 0, ran)
        return ran.stdout.split()

    def test_threads_of_openmp_where_there_is_no_number_of_its_own(self):
        cores = self.threads(DLSYS_THREADS="", OMP_NUM_THREADS="")[0]
        for given, wanted in (
            ("3", "3"), ("5,2", "5"), (" 7 ", "7"), ("100000", "1024"), ("0", cores),
            ("-2", cores), ("many", cores), ("4x", cores), (",3", cores),
        ):  # fmt: skip
            with self.subTest(OMP_NUM_THREADS=given):
                found = self.threads(DLSYS_THREADS="", OMP_NUM_THREADS=given)
                self.assertEqual(found, [wanted] * 2)
        self.assertEqual(self.threads(DLSYS_THREADS="2", OMP_NUM_THREADS="3")[0], "2")
        self.assertEqual(self.threads(DLSYS_THREADS="0", OMP_NUM_THREADS="3"), [cores] * 2)

    def test_every_task_of_a_loop_is_done_once_by_any_number_of_threads(self):
        """More threads than tasks, as many, and fewer, which help each other at the end."""
        ran = _python(
            "import numpy as np\n"
            "from dlsys import autodiff as ad, ndarray\n"
            "from dlsys.runtime.library import load\n"
            "x = ad.Variable('x', dtype=np.float32)\n"
            "double = ad.Executor([x * 2], ctx=ndarray.cpu(0))\n"
            "for threads in (1, 2, 3, 7, 4):\n"
            "    load().check(load().cdll.DLCpuSetThreads(threads))\n"
            "    for tasks in (1, 2, 3, 4, 5, 8, 9, 33):\n"
            "        given = np.arange(tasks * 32768 - 5, dtype=np.float32)\n"
            "        for _ in range(5):\n"
            "            made = double.run({x: given})[0].asnumpy()\n"
            "            assert (made == 2 * given).all(), (threads, tasks)\n",
        )
        self.assertEqual(ran.returncode, 0, ran)

    def test_a_fork_beside_a_thread_that_builds_its_first_executor(self):
        """The thread is held where it loads the library; and nothing is imported behind that."""
        ran = _python(
            "import os, sys, threading, time, warnings, numpy as np\n"
            # From Python 3.12 on every fork beside threads is warned of.
            "warnings.simplefilter('ignore')\n"
            "from dlsys import autodiff as ad, ndarray\n"
            "from dlsys.runtime import library\n"
            "loaded = set()\n"
            "inside, make = threading.Event(), library.Library.__init__\n"
            "def slowly(self, path):\n"
            "    loaded.update(sys.modules)\n"
            "    inside.set()\n"
            "    time.sleep(0.3)\n"
            "    make(self, path)\n"
            "library.Library.__init__ = slowly\n"
            "def build():\n"
            "    x, w = ad.Variable('x'), ad.Parameter(np.ones((300, 300), np.float32))\n"
            "    train = ad.assign_op(w, w + ad.matmul_op(w, w))\n"
            "    y = ad.conv2d(x, ad.constant(np.ones((1, 1, 3, 3))))\n"
            "    executor = ad.Executor([y, train], ndarray.cpu(0))\n"
            "    return executor.run({x: np.ones((1, 1, 5, 5))}, True)[0].sum()\n"
            "def work():\n"
            "    print(build(), sorted(set(sys.modules) - loaded), flush=True)\n"
            "thread = threading.Thread(target=work)\n"
            "thread.start()\n"
            "inside.wait()\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    os._exit(0 if build() == 81 else 5)\n"
            "thread.join()\n"
            "for _ in range(100):\n"
            "    done, status = os.waitpid(child, os.WNOHANG)\n"
            "    if done:\n"
            "        break\n"
            "    time.sleep(0.1)\n"
            "else:\n"
            "    os.kill(child, 9)\n"
            "print(done and os.waitstatus_to_exitcode(status))\n"
        )
        self.assertEqual((ran.stdout, ran.stderr), ("81.0 []\n0\n", ""), ran)


@require(gpu(0))
class GpuLibrary(LibraryCase, unittest.TestCase):
    ctx = gpu(0)

    def test_work_on_two_streams_is_ordered(self):
        block = Block(self.ctx, 64)
        seen = []

        def use():
            block.use(device.stream(self.ctx))
            seen.append(block.stream)

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        self.assertNotEqual(seen[0], block.home)
        block.use(block.home)
        self.assertEqual(block.stream, block.home)


class OneOf(unittest.TestCase):
    @noted("gpu")
    @noted("cpu")
    def test_the_best_device_is_the_first_that_works(self):
        best, reasons = device.best_context()
        working = [ctx for ctx in (cpu(0), gpu(0)) if device.unavailable(ctx) is None]
        usable = [ctx for ctx in working if not (EMULATED and ctx is gpu(0))]
        self.assertIs(best, usable[-1] if usable else None)
        self.assertEqual(bool(reasons), EMULATED or gpu_skip_reason() is not None)

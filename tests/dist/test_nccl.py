"""The calls of NCCL: with a stand-in of one rank on the emulated GPU, and without the library."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import dist, optim
from dlsys import functional as F
from dlsys.dist import nccl
from dlsys.dist.group import Alone
from dlsys.dist.nccl import NcclGroup
from dlsys.errors import DeviceError, DlsysError, KernelError
from dlsys.ndarray import cpu, gpu
from dlsys.runtime.device import unavailable
from dlsys.settings import settings
from support.devices import emulated_gpu, require

HERE = Path(__file__).resolve().parent
FLOAT32, FLOAT16, BFLOAT16, UINT8, INT64 = 7, 6, 9, 1, 4  # as in nccl.h
SUM, MEAN = 0, 4


@emulated_gpu
class StandIn(unittest.TestCase):
    """NCCL's C API, as calls of a library that copies."""

    fake: Any
    group: Alone

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        path = Path(folder.name) / "libnccl.so.2"
        source = HERE.parents[1] / "src"
        compiler = ["gcc", "-shared", "-fPIC", f"-I{source}", "-o", path, HERE / "fake_nccl.c"]
        subprocess.run(compiler, check=True, capture_output=True)
        before = dict(os.environ)
        cls.addClassCleanup(lambda: (os.environ.clear(), os.environ.update(before)))
        os.environ["DLSYS_EMULATED_LIBRARIES"] = folder.name
        os.environ["DLSYS_LIBRARY"] = str(settings.library)
        cls.group = Alone()
        cls.group.handle = nccl.communicator(gpu(0), nccl.new_id(gpu(0)), 0, 1)
        cls.fake = ctypes.CDLL(str(path))
        cls.fake.FakeNotes.restype = ctypes.c_char_p

    def setUp(self) -> None:
        self.fake.FakeForget()

    def notes(self) -> list[str]:
        """The calls since the last look at them."""
        found = self.fake.FakeNotes().decode().splitlines()
        self.fake.FakeForget()
        return found

    def test_every_collective(self) -> None:
        x = ad.Variable("x", (4, 3), np.float32)
        group = self.group
        wanted = {
            dist.all_reduce_op(x, group=group, op="max"): [
                f"all_reduce 12 of {FLOAT32}, 2 grouped"
            ],
            dist.all_gather_op(x, group=group): [f"all_gather 12 of {FLOAT32}, 0"],
            dist.reduce_scatter_op(x, group=group): [f"reduce_scatter 12 of {FLOAT32}, 0"],
            dist.broadcast_op(x, group=group): [f"broadcast 12 of {FLOAT32}, 0"],
            dist.reduce_op(x, group=group): [f"reduce 12 of {FLOAT32}, 0"],
            dist.all_to_all_op(x, group=group): [
                f"send 12 of {FLOAT32}, 0 grouped", f"recv 12 of {FLOAT32}, 0 grouped",
            ],
            dist.send_recv_op(x, group=group, pairs=[(0, 0)]): [
                f"send 12 of {FLOAT32}, 0 grouped", f"recv 12 of {FLOAT32}, 0 grouped",
            ],
            dist.send_recv_op(x, group=group, pairs=[]): [],
        }  # fmt: skip
        values = np.arange(12, dtype=np.float32).reshape(4, 3)
        for node, calls in wanted.items():
            executor = ad.Executor([node], gpu(0))
            for _ in range(3):  # the second run is captured, the third replayed
                (got,) = executor.run({x: values}, True)
                empty = node.attrs.get("pairs") == ()
                np.testing.assert_array_equal(got, 0 * values if empty else values)
            self.assertEqual(self.notes(), 2 * calls, "a replay calls nothing")

    def test_dtypes(self) -> None:
        codes = {np.float16: FLOAT16, np.uint8: UINT8, np.int64: INT64, np.bool_: UINT8}
        for dtype, code in codes.items():
            x = ad.Variable("x", (6,), dtype)
            values = np.array([0, 1, 1, 0, 1, 0], dtype)
            (got,) = ad.Executor([dist.all_gather_op(x, group=self.group)], gpu(0)).run({x: values})
            np.testing.assert_array_equal(got.asnumpy(), values)
            self.assertEqual(self.notes(), [f"all_gather 6 of {code}, 0"])

    def test_training_in_a_captured_graph(self) -> None:
        """The buckets of a step are in the graph, in a stream of their own."""

        def trained(group: Any) -> tuple[list[float], ad.Executor]:
            x = ad.Variable("x", (8, 6))
            w1, w2 = (ad.Parameter(np.full(s, 0.1, "f"), "w") for s in ((6, 5), (5, 4)))
            loss = F.mean(F.relu(x @ w1) @ w2)
            update = optim.SGD(0.1, momentum=0.9).minimize(loss, [w1, w2])
            executor = ad.Executor([loss, update], gpu(0), group=group)
            feed = {x: np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6)}
            return [float(executor.run(feed, True)[0]) for _ in range(4)], executor

        together, executor = trained(self.group)
        # Both gradients as one array: the first is filled up to 256 bytes.
        self.assertEqual(self.notes(), 2 * [f"all_reduce {64 + 30} of {FLOAT32}, {SUM} grouped"])
        np.testing.assert_allclose(together, trained(None)[0], rtol=1e-6)
        self.assertIn("captured", str(executor.report()))

    def test_sums_in_the_kernel_that_makes_gradients(self) -> None:
        """One launch makes a few small gradients, sums them over ranks and updates by them."""
        rng = np.random.default_rng(0)
        x = ad.Variable("x", (70, 90))
        w, c = (rng.normal(0, 0.1, s).astype("f") for s in ((90, 75), (75, 10)))
        feed = {x: rng.normal(size=(70, 90)).astype("f")}

        def trained(in_kernels: bool, adam: bool = False, fetched: bool = False) -> tuple[Any, Any]:
            initial = {"w1": w, "b": w[0], "w2": c}
            w1, b, w2 = (ad.Parameter(value.copy(), name) for name, value in initial.items())
            y = F.relu(x @ w1 + b) @ w2
            loss = F.mean(y * y)
            optimizer = optim.Adam(1e-3) if adam else optim.SGD(0.1)
            update = optimizer.minimize(loss, [w1, b, w2])
            self.group.sums_in_kernels = in_kernels
            fetches = [loss, update, *(ad.gradients(loss, [w1]) if fetched else ())]
            executor = ad.Executor(fetches, gpu(0), group=self.group)
            losses = [float(executor.run(feed, True)[0]) for _ in range(4)]
            return [*losses, *(p.asnumpy() for p in (w1, b, w2))], executor

        self.assertGreater(nccl.sums_in_kernels(gpu(0), self.group.handle), 0)
        self.addCleanup(setattr, self.group, "sums_in_kernels", False)
        for adam in (False, True):
            wanted, _ = trained(False, adam)
            self.assertEqual(len(self.notes()), 2)
            got, executor = trained(True, adam)
            self.assertEqual(self.notes(), [], "no collective")
            for a, b in zip(got, wanted):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
            (plan,) = executor.report().plans
            self.assertEqual(len(plan.exchanged), 1)
            self.assertEqual(plan.exchanged[0].nbytes, 4 * (90 * 75 + 75 + 75 * 10))
        # Where somebody else reads a gradient, or they are many bytes, a collective does it; then
        # ranks are not told the same.
        with mock.patch.object(self.group, "agree") as agree:
            trained(True, fetched=True)
            trained(True)
        told = [call.args for call in agree.call_args_list if call.args[1]["exchanges"]]
        kinds = {digest: what["exchanges"][0].split()[0] for digest, what in told}
        self.assertEqual(sorted(kinds.values()), ["all_reduce", "matmul_sgd_update"])
        self.assertEqual(len(self.notes()), 2 * 3)
        few = mock.patch("dlsys.fusion.weight_update.MOST_SENT", -1)
        with few:
            trained(True)
        self.assertEqual(len(self.notes()), 2)

    def test_a_collective_where_blocks_would_not_run_together(self) -> None:
        """A kernel that sums over ranks waits for their blocks: a long gradient has too many."""
        self.group.sums_in_kernels = True
        self.addCleanup(setattr, self.group, "sums_in_kernels", False)
        x, w = ad.Variable("x", (2, 200_000)), ad.Parameter(np.zeros((200_000, 1), np.float32), "w")
        update = optim.SGD(0.1).minimize(F.mean(x @ w), [w])
        ad.Executor([update], gpu(0), group=self.group).run({x: np.ones((2, 200_000), np.float32)})
        self.assertIn(f"all_reduce 200000 of {FLOAT32}, {SUM} grouped", self.notes())
        np.testing.assert_allclose(w.asnumpy(), np.full((200_000, 1), -0.1), rtol=1e-6)

    def test_means_where_others_read_them_too(self) -> None:
        """The norm that clips reads the mean; an update alone divides the sum itself."""
        x, w = ad.Variable("x", (8, 6)), ad.Parameter(np.full((6, 5), 0.1, "f"), "w")
        update = optim.SGD(0.1, clip_norm=1.0).minimize(F.mean(F.relu(x @ w)), [w])
        ad.Executor([update], gpu(0), group=self.group).run({x: np.ones((8, 6), np.float32)})
        self.assertIn(f"all_reduce 30 of {FLOAT32}, {MEAN} grouped", self.notes())

    def test_16_bits_for_what_products_read_so(self) -> None:
        """A tied embedding's gradient, of float32, is reduced in bfloat16 as that of a product."""
        tokens = ad.Variable("tokens", (4,), np.int64)
        table = ad.Parameter(np.full((16, 8), 0.1, "f"), "table")
        loss = F.mean(ad.embedding_lookup_op(table, tokens) @ ad.transpose_op(table))
        update = optim.SGD(0.1).minimize(loss, [table])
        executor = ad.Executor([update], gpu(0), "bf16", group=self.group)
        executor.run({tokens: np.arange(4)})
        self.assertIn(f"all_reduce 128 of {BFLOAT16}, {SUM} grouped", self.notes())

    def test_sums_behind_backward(self) -> None:
        """Within a host they wait for it, and each update for its own bucket; else they leave as
        soon as they can.
        """
        x = ad.Variable("x", (8, 300))
        weights = [ad.Parameter(np.full((300, 300), 0.01, "f"), f"w{k}") for k in range(4)]
        y: Any = x
        for w in weights:
            y = F.relu(y @ w)
        update = optim.SGD(0.1).minimize(F.mean(y), weights)
        self.addCleanup(setattr, self.group, "one_host", True)
        within = mock.patch("dlsys.dist.data_parallel.BUCKET_WITHIN", 800_000)
        self.enterContext(within)
        for one_host, wanted in ((True, "^-+susu$"), (False, "^-+s-+s-*u+")):
            self.group.one_host = one_host
            plan = ad.Executor([update], gpu(0), group=self.group).plan({x: (8, 300)})
            letters = {"all_reduce": "s", "sgd_update": "u"}
            order = "".join(letters.get(step.node.op.name, "-") for step in plan.steps)
            self.assertRegex(order, wanted)

    def test_errors_of_other_ranks(self) -> None:
        self.fake.FakeBreak(6)
        with self.assertRaisesRegex(KernelError, "NCCL error 6, remote process exited"):
            nccl.check(gpu(0), self.group.handle)
        self.fake.FakeBreak(0)
        nccl.check(gpu(0), self.group.handle)
        with self.assertRaisesRegex(KernelError, "NCCL error 4, invalid argument"):
            nccl.communicator(gpu(0), nccl.new_id(gpu(0)), 1, 2)

    def test_a_group_without_a_communicator(self) -> None:
        x, pair = ad.Variable("x", (2,)), Alone()
        pair.size = 2
        executor = ad.Executor([dist.all_gather_op(x, group=pair)], gpu(0))
        with self.assertRaisesRegex(DeviceError, "call its connect"):
            executor.run({x: [1.0, 2.0]})

    def test_a_world_without_mpi(self) -> None:
        """What torchrun starts, as one rank."""
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
        group = NcclGroup(0, 1, 0)
        self.assertEqual(os.environ["NCCL_COMM_ID"], "localhost:29501")
        self.assertEqual(group.objects(["a", 1]), [["a", 1]])
        x = np.arange(6, dtype=np.float64).reshape(2, 3)
        for got in (group.all_reduce(x, "mean"), group.all_gather(x)[0], group.broadcast(x)):
            np.testing.assert_array_equal(got, x)
        for exchange in (group.exchange_into, lambda x, y: group.permute_into(x, y, 0, 0)):
            y = np.empty_like(x)
            exchange(x, y)
            np.testing.assert_array_equal(y, x)
        y = np.empty_like(x)
        group.scatter_into(x, y, "sum")
        np.testing.assert_array_equal(y, x)
        group.agree(3, {})
        group.check()


class Without(unittest.TestCase):
    """Machines that lack something say so in one sentence."""

    @require(cpu(0))
    def test_the_cpu_has_no_communicators(self) -> None:
        with self.assertRaisesRegex(DeviceError, "cpu: this device has no communicators"):
            nccl.new_id(cpu(0))

    @unittest.skipIf(unavailable(gpu(0)) is None, "not here: a machine without a GPU")
    def test_torchrun_without_a_gpu(self) -> None:
        program = "from dlsys import dist; dist.init()"
        told = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="x", MASTER_PORT="1")
        path = str(Path(dist.__file__).parents[2])
        done = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | told | {"PYTHONPATH": path},
            capture_output=True, text=True,
        )  # fmt: skip
        self.assertRegex(done.stderr, "DeviceError: .*(driver|CUDA|native library)")

    @emulated_gpu
    def test_no_library(self) -> None:
        program = "from dlsys.dist import nccl; from dlsys.ndarray import gpu; nccl.new_id(gpu(0))"
        path = str(Path(dist.__file__).parents[2])
        done = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path},
            capture_output=True, text=True,
        )  # fmt: skip
        self.assertIn("DeviceError: NCCL cannot be used (libnccl.so.2 needs a GPU", done.stderr)
        self.assertTrue(issubclass(DeviceError, DlsysError))


if __name__ == "__main__":
    unittest.main()

"""The calls of NCCL: with a stand-in of one rank on the emulated GPU, and without the library."""

from __future__ import annotations

import ctypes
import itertools
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
from dlsys import dist, nn, optim
from dlsys import functional as F
from dlsys.dist import nccl
from dlsys.dist.group import Alone
from dlsys.dist.nccl import NcclGroup
from dlsys.dtypes import bfloat16
from dlsys.errors import DeviceError, DlsysError, GraphError, KernelError
from dlsys.executor.capture import joined as joined_module
from dlsys.ndarray import cpu, gpu
from dlsys.ops.optim.apply import UPDATES
from dlsys.runtime.device import unavailable
from dlsys.settings import settings
from support.devices import emulated_gpu, require
from support.fusion import without

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
        # Where somebody else reads a gradient, a collective does it; then ranks are not told the
        # same. Where they are many bytes, the update does.
        with mock.patch.object(self.group, "agree") as agree:
            trained(True, fetched=True)
            trained(True)
        told = [call.args for call in agree.call_args_list if call.args[1]["exchanges"]]
        kinds = {digest: what["exchanges"][0].split()[0] for digest, what in told}
        self.assertEqual(sorted(kinds.values()), ["all_reduce", "matmul_sgd_update"])
        self.assertEqual(len(self.notes()), 2 * 3)
        few = mock.patch("dlsys.fusion.weight_update.MOST_SENT", -1)
        with few:
            _, executor = trained(True)
            self.assertEqual(self.exchanged(executor), ["all_reduce_sgd_update"])
            with without("all_reduce_update"):
                trained(True)
        self.assertEqual(len(self.notes()), 2)

    def exchanged(self, executor: ad.Executor) -> list[str]:
        """The names of what the only plan exchanges."""
        (plan,) = executor.report().plans
        return [found.name for found in plan.exchanged]

    def test_no_kernel_of_gradients_where_blocks_would_not_run_together(self) -> None:
        """One that sums over ranks waits for their blocks: a long gradient has too many."""
        self.group.sums_in_kernels = True
        self.addCleanup(setattr, self.group, "sums_in_kernels", False)
        x, w = ad.Variable("x", (2, 200_000)), ad.Parameter(np.zeros((200_000, 1), np.float32), "w")
        update = optim.SGD(0.1).minimize(F.mean(x @ w), [w])
        executor = ad.Executor([update], gpu(0), group=self.group)
        executor.run({x: np.ones((2, 200_000), np.float32)})
        self.assertEqual(self.exchanged(executor), ["all_reduce_sgd_update"])
        np.testing.assert_allclose(w.asnumpy(), np.full((200_000, 1), -0.1), rtol=1e-6)

    def test_sums_in_updates(self) -> None:
        """An update reads the gradients where they lie, which other ranks read too: in captured
        graphs and without, in one stream and in several. It is one of 16 bits and of float32, and
        of several buckets.
        """
        self.enterContext(mock.patch("dlsys.dist.data_parallel.BUCKET_WITHIN", 1 << 12))
        rng = np.random.default_rng(0)
        initial = [
            rng.normal(0, 0.1, shape).astype("f") for shape in ((90, 64), (64, 51), (51, 64))
        ]
        tokens = [rng.integers(0, 90, rows) for rows in (16, 16, 25, 16, 25, 25)]

        def trained(precision: str, maker: Any, **options: Any) -> tuple[list[Any], ad.Executor]:
            table, w1, w2 = (ad.Parameter(value.copy(), "w") for value in initial)
            b = ad.Parameter(np.zeros(51, np.float32), "b")
            x = ad.Variable("x", (None,), np.int64)
            y = F.gelu(ad.embedding_lookup_op(table, x) @ w1 + b) @ w2 @ ad.transpose_op(table)
            loss = F.mean(y * y) + F.mean(y)
            update = maker().minimize(loss, [table, w1, b, w2])
            executor = ad.Executor([loss, update], gpu(0), precision, group=self.group, **options)
            losses = [float(executor.run({x: rows}, True)[0]) for rows in tokens]
            return [*losses, *(p.asnumpy() for p in (table, w1, b, w2))], executor

        self.addCleanup(setattr, self.group, "sums_in_kernels", False)
        makers = [
            lambda: optim.Adam(1e-3, weight_decay=0.1),
            lambda: optim.SGD(0.1, momentum=0.9, clip_value=0.01),
        ]  # fmt: skip
        for precision, maker in itertools.product(("fp32", "bf16"), makers):
            self.group.sums_in_kernels = False
            wanted, _ = trained(precision, maker)
            self.assertTrue(self.notes())
            self.group.sums_in_kernels = True
            for streams, capture in ((8, True), (1, True), (8, False)):
                with (
                    self.subTest(precision, streams=streams, capture=capture),
                    mock.patch.object(settings, "streams", streams),
                    mock.patch.object(settings, "capture", capture),
                ):
                    got, executor = trained(precision, maker)
                    self.assertEqual(self.notes(), [], "no collective")
                    for a, b in zip(got, wanted):
                        np.testing.assert_array_equal(a, b)
                    for plan in executor.report().plans:
                        nbytes = sum(found.nbytes for found in plan.exchanged)
                        size = 2 if precision == "bf16" else 4
                        self.assertEqual(nbytes, size * sum(x.size for x in initial) + 4 * 51)
                        (found,) = plan.exchanged  # of both dtypes
                        name = found.name.removesuffix("update")
                        self.assertIn(name, ("all_reduce_adam_", "all_reduce_sgd_momentum_"))

    def test_updates_that_are_not_one(self) -> None:
        """With other options or another rate each waits for the ranks by itself."""
        self.group.sums_in_kernels = True
        self.addCleanup(setattr, self.group, "sums_in_kernels", False)

        def trained(group: Any, way: str) -> tuple[list[Any], list[str]]:
            x = ad.Variable("x", (8, 70))
            w, v = (ad.Parameter(np.full((70, 9), 0.1, "f"), name) for name in "wv")
            rate: ad.Node = ad.constant(np.float32(0.1))
            dw, dv = ad.gradients(F.mean(F.exp(x @ (v * w))), [w, v])
            update = UPDATES["sgd_update"]
            first = update(w, dw, rate)
            if way == "a rate of the other's values":
                rate = F.mean(first) * 0.1
            second = update(v, dv, rate, **({"l2": 0.1} if way == "a penalty" else {}))
            executor = ad.Executor([first, second], gpu(0), group=group)
            executor.run({x: np.linspace(-1, 1, 560, dtype=np.float32).reshape(8, 70)})
            return [w.asnumpy(), v.asnumpy()], self.exchanged(executor)

        for way, count in {"": 1, "a penalty": 2, "a rate of the other's values": 2}.items():
            with self.subTest(way):
                got, found = trained(self.group, way)
                self.assertEqual(found, ["all_reduce_sgd_update"] * count)
                for a, b in zip(got, trained(None, way)[0]):
                    np.testing.assert_array_equal(a, b)

    def test_a_gradient_that_needs_an_update(self) -> None:
        x, rate = ad.Variable("x", (8, 70)), ad.constant(np.float32(0.1))
        w, v = (ad.Parameter(np.full((70, 9), 0.1, "f"), name) for name in "wv")
        first = UPDATES["sgd_update"](w, ad.gradients(F.mean(x @ w), [w])[0], rate)
        second = UPDATES["sgd_update"](v, ad.gradients(F.mean(x @ (v * first)), [v])[0], rate)
        executor = ad.Executor([second], gpu(0), group=self.group)
        with self.assertRaisesRegex(GraphError, "a gradient depends on sgd_update.*two graphs"):
            executor.plan({x: (8, 70)})

    def test_gradients_of_a_dtype_lie_side_by_side(self) -> None:
        """A range that is summed may have no bits of another dtype."""
        self.group.sums_in_kernels = True
        self.addCleanup(setattr, self.group, "sums_in_kernels", False)
        joined = joined_module._joined

        def shuffled(buffers: Any, kind: str, node: ad.Node) -> Any:
            return joined([buffers[0], buffers[-1], *buffers[1:-1]], kind, node)

        x = ad.Variable("x", (8, 64))
        layers = nn.Sequential(nn.Linear(64, 64, rng=0), nn.GELU(), nn.Linear(64, 64, rng=1))
        update = optim.SGD(0.1).minimize(F.mean(F.exp(layers(x))), layers.parameters())
        executor = ad.Executor([update], gpu(0), "bf16", group=self.group)
        with (
            mock.patch.object(joined_module, "_joined", shuffled),
            self.assertRaisesRegex(KernelError, "of float32 side by side, got bfloat16 between"),
        ):
            executor.run({x: np.ones((8, 64), np.float32)})

    def test_sums_of_several_updates(self) -> None:
        """Groups of Parameters have an update each, which share the sums of a bucket: all of them
        make these, or none.
        """
        self.group.sums_in_kernels = True
        self.addCleanup(setattr, self.group, "sums_in_kernels", False)

        def trained(fetched: bool) -> tuple[list[Any], list[str]]:
            x = ad.Variable("x", (8, 30))
            w, b, v = (ad.Parameter(np.full(s, 0.1, "f"), "w") for s in ((30, 20), (20,), (20, 7)))
            h = x @ w + b
            loss = F.mean(F.relu(h) @ v) + F.mean(h * h)
            groups = [{"params": [w, v], "weight_decay": 0.1}, {"params": [b]}]
            update = optim.SGD(0.1).minimize(loss, groups)
            fetches = [loss, update, *(ad.gradients(loss, [b]) if fetched else ())]
            executor = ad.Executor(fetches, gpu(0), group=self.group)
            feed = {x: np.linspace(-1, 1, 240, dtype=np.float32).reshape(8, 30)}
            losses = [float(executor.run(feed, True)[0]) for _ in range(4)]
            return [*losses, *(p.asnumpy() for p in (w, b, v))], self.exchanged(executor)

        with without("weight_update"):
            inside, names = trained(fetched=False)
            self.assertEqual(names, ["all_reduce_sgd_update"] * 2)
            apart, names = trained(fetched=True)
            self.assertEqual(names, ["all_reduce"])
        for a, b in zip(inside, apart):
            np.testing.assert_array_equal(a, b)

    def test_updates_that_cannot_sum(self) -> None:
        """Gradients that others read, of Parameters of 16 bits, or of rounds: collectives."""
        self.group.sums_in_kernels = True
        self.addCleanup(setattr, self.group, "sums_in_kernels", False)

        def kinds(optimizer: Any, fetched: bool = False, dtype: Any = np.float32) -> list[str]:
            x, w = ad.Variable("x", (4, 70), dtype), ad.Parameter(np.ones((70, 9)), "w", dtype)
            loss = F.mean(F.exp(x @ w * 0.01))
            update = optimizer.minimize(loss, [w])
            fetches = [update, *(ad.gradients(loss, [w]) if fetched else ())]
            executor = ad.Executor(fetches, gpu(0), group=self.group)
            executor.run({x: np.ones((4, 70), np.float32)})
            return self.exchanged(executor)

        with without("weight_update"):
            self.assertEqual(kinds(optim.SGD(0.1)), ["all_reduce_sgd_update"])
            self.assertEqual(kinds(optim.SGD(0.1), fetched=True), ["all_reduce"])
            self.assertEqual(kinds(optim.SGD(0.1), dtype=bfloat16), ["all_reduce"])
            self.assertEqual(kinds(optim.SGD(0.1, clip_norm=1.0)), ["all_reduce"])
            self.assertEqual(kinds(optim.SGD(0.1, accumulate=2)), ["all_reduce"])

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

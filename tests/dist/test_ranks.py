"""Ranks over MPI: collectives, data parallelism, one training run of several ranks, and its end.

Every case of ranks.py is a test for 2 and for 4 ranks; the cases of one number of ranks run in one
start of MPI, since most of their time is the interpreter's start.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import data, dist
from dlsys.dist.launch import main
from dlsys.errors import CommunicationError, DataError, GraphError, ShapeError
from support import sample
from support.devices import four_gpus, not_emulated, slow, together, two_gpus

HERE = Path(__file__).resolve().parent
RANKS = HERE / "ranks.py"
LIMIT = 120.0  # seconds of a program
MPIEXEC = Path(sys.executable).parent / "mpiexec"
missing = [name for name in ("mpi4py",) if find_spec(name) is None]
missing += [] if MPIEXEC.exists() else ["mpiexec"]
needs_mpi = unittest.skipIf(
    missing, f"not here: {' and '.join(missing)}; pip install 'mpi4py' 'mpich'"
)
# What four ranks do besides: a part of two ranks' cases, since these are the slower ones.
OF_FOUR = "collectives gradients host_arrays data_parallel shards disagreement fit".split()
OF_FOUR_GPUS = "collectives data_parallel repeats shards sums_in_kernels sums_in_updates".split()
CASES = re.findall(r"^def case_(\w+)", RANKS.read_text(), re.M)


def environment(**more: str) -> dict[str, str]:
    """One thread a rank, and this package."""
    path = str(Path(dist.__file__).parents[2])
    return os.environ | {
        "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "DLSYS_THREADS": "1", **more,
    }  # fmt: skip


def run(*command: object, **more: str) -> subprocess.CompletedProcess[str]:
    """What a program printed; one that takes longer than two minutes is ended, with its ranks."""
    program = subprocess.Popen(
        [*map(str, command)], env=environment(**more), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        told = program.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        told = program.communicate()
    return subprocess.CompletedProcess(command, program.returncode, *told)


@functools.cache
def outcomes(ranks: int, gpus: bool = False) -> dict[str, str]:
    """What went wrong in each case, "" where nothing did. All run in one start, up to one that ends
    it, as a fault on GPUs does; those behind that one run in another.
    """
    cases = CASES if ranks == 2 else OF_FOUR_GPUS if gpus else OF_FOUR
    found: dict[str, str] = {}
    while len(found) < len(cases):
        left = [case for case in cases if case not in found]
        if gpus:
            launch = [sys.executable, "-m", "dlsys.dist", "launch", "-n", ranks]
            done = run(*launch, RANKS, *left, RANKS_ON_GPUS="1")
        else:
            done = run(MPIEXEC, "-n", ranks, sys.executable, RANKS, *left)
        for line in done.stdout.splitlines():
            found |= json.loads(line) if line.startswith("{") else {}
        ended = next((case for case in left if case not in found), None)
        if ended is not None:
            found[ended] = f"status {done.returncode}: {done.stdout}{done.stderr}"
    return found


def add_cases(cases: list[str]) -> Callable[[type], type]:
    """Decorates a class whose method `look` becomes a test of each case."""

    def decorate(kind: Any) -> type:
        for case in cases:
            setattr(kind, f"test_{case}", functools.partialmethod(kind.look, case))
        return kind

    return decorate


class Ranks:
    ranks: int
    gpus = False

    def look(self, case: str) -> None:
        found = outcomes(self.ranks, self.gpus)[case]
        if found.startswith("skipped: "):
            raise unittest.SkipTest(found)
        if found:
            raise AssertionError(found)


@together
@slow
@needs_mpi
@add_cases(CASES)
class TwoRanks(Ranks, unittest.TestCase):
    ranks = 2


@together
@slow
@needs_mpi
@add_cases(OF_FOUR)
class FourRanks(Ranks, unittest.TestCase):
    ranks = 4


@two_gpus
@not_emulated
@add_cases(CASES)
class TwoGpus(Ranks, unittest.TestCase):
    """Each rank has a GPU, and NCCL between them."""

    ranks = 2
    gpus = True


@four_gpus
@not_emulated
@add_cases(OF_FOUR_GPUS)
class FourGpus(Ranks, unittest.TestCase):
    """The same of four: sums of more than two arrays."""

    ranks = 4
    gpus = True


@two_gpus
@not_emulated
class SteadyState(unittest.TestCase):
    """What CUPTI sees of steps of two ranks, once these are captured: `benchmarks dist_dlsys`."""

    def test_a_launch_a_step_and_communication_within(self) -> None:
        works = "mlp", "lenet-1000"
        launch = [sys.executable, "-m", "dlsys.dist", "launch", "-n", 2]
        program = (
            HERE.parents[1] / "benchmarks",
            "dist_dlsys",
            ",".join(f"trace-{x}" for x in works),
        )
        done = run(*launch, *program, 1)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        self.assertEqual([each["work"] for each in found], [f"trace-{x}" for x in works])
        for each in found:
            with self.subTest(each["work"]):
                self.assertEqual(each["calls"].get("cudaGraphLaunch"), each["steps"])
                self.assertGreaterEqual(each["kernels"], each["steps"])
                waits = re.compile("Alloc|Free|Synchronize|Query|Memcpy|Memset|HostRegister")
                self.assertEqual([call for call in each["calls"] if waits.search(call)], [])
                self.assertEqual(each["copies"], 0)


def launched(
    ranks: int, *arguments: object, restarts: int = 0, patience: float | None = None, **more: str
) -> tuple[int, str]:
    """The status and all output of a program of ranks.py under `launch`. MPI has `patience` seconds
    to end the other ranks, which keep a core busy meanwhile.
    """
    program = ["-m", "dlsys.dist"]
    if patience is not None:
        setting = f"from dlsys.dist import launch; launch._PATIENCE = {patience}"
        program = ["-c", f"import sys; {setting}; sys.exit(launch.main())"]
    command = [sys.executable, *program, "launch", "-n", ranks, "--restarts", restarts]
    done = run(*command, RANKS, "program", *arguments, **more)
    return done.returncode, done.stdout + done.stderr


def losses(output: str) -> list[float]:
    """What program_fit prints."""
    return json.loads(next(line for line in output.splitlines() if line.startswith("[")))


@slow
@needs_mpi
class Ends(unittest.TestCase):
    """A run that a rank ends early, and its resumption."""

    def test_ranks_are_killed_and_others_go_on_with_their_checkpoint(self) -> None:
        """4, then 2, then 3 ranks, started again, with the losses of one; none is left running."""
        with tempfile.TemporaryDirectory() as folder:
            status, output = launched(4, "fit", folder, "2:9")
            self.assertNotEqual(status, 0)
            self.assertIn("dlsys.dist: rank 2 was ended by SIGKILL; all ranks end", output)
            for ranks, kill in sample.rest([(2, "0:15")]):
                status, output = launched(ranks, "fit", folder, kill)
                self.assertNotEqual(status, 0)
                self.assertIn("dlsys.dist: rank 0 was ended by SIGKILL; all ranks end", output)
            status, output = launched(3, "fit", folder, "1:21", restarts=2)
            self.assertEqual(status, 0, output)
            self.assertIn("; start 2 of at most 3", output)
            self.assertNotIn("start 3", output)
            found = subprocess.run(["pgrep", "-f", folder], capture_output=True, text=True)
            self.assertEqual(found.stdout, "")
        with tempfile.TemporaryDirectory() as folder:
            alone = run(sys.executable, RANKS, "program", "fit", folder)
        np.testing.assert_allclose(losses(output), losses(alone.stdout), rtol=0, atol=1e-6)

    def test_a_rank_is_killed_before_it_knows_the_others(self) -> None:
        status, output = launched(2, "early", patience=1.0)
        self.assertNotEqual(status, 0)
        self.assertIn("dlsys.dist: rank 1 was ended by SIGKILL; all ranks end", output)

    def test_a_rank_that_does_not_come_is_named(self) -> None:
        status, output = launched(4, "hang", RANKS_TIMEOUT="2")
        self.assertNotEqual(status, 0)
        self.assertRegex(
            output, r"dlsys\.dist: rank 1 did not come to call \d+, all_reduce, within 2 s"
        )

    def test_an_error_of_one_rank_ends_all(self) -> None:
        status, output = launched(2, "raise")
        self.assertNotEqual(status, 0)
        self.assertIn("ValueError: of rank 1 alone", output)
        self.assertIn("dlsys.dist: rank 1 ended by ValueError; all ranks end", output)


@slow
@two_gpus
@not_emulated
class EndsOnGpus(unittest.TestCase):
    """The same on GPUs."""

    def test_a_rank_is_killed_and_others_go_on_with_its_checkpoint(self) -> None:
        """2, then 1, then 2 ranks, started again, with the losses of one."""
        on = {"RANKS_ON_GPUS": "1"}
        with tempfile.TemporaryDirectory() as folder:
            status, output = launched(2, "fit", folder, "1:9", **on)
            self.assertNotEqual(status, 0)
            self.assertIn("dlsys.dist: rank 1 was ended by SIGKILL; all ranks end", output)
            status, output = launched(1, "fit", folder, "0:15", **on)
            self.assertNotEqual(status, 0)
            status, output = launched(2, "fit", folder, "1:21", restarts=2, **on)
            self.assertEqual(status, 0, output)
            self.assertIn("; start 2 of at most 3", output)
        with tempfile.TemporaryDirectory() as folder:
            alone = run(sys.executable, RANKS, "program", "fit", folder, **on)
        np.testing.assert_allclose(losses(output), losses(alone.stdout), rtol=0, atol=1e-6)


class Alone(unittest.TestCase):
    """What one process says, with MPI or without."""

    def test_a_world_of_one(self) -> None:
        world = dist.init()
        self.assertEqual((world.rank, world.size, world.local_rank), (0, 1, 0))
        self.assertIs(world, dist.init())
        x = ad.Variable("x", (4, 2))
        nodes = [
            dist.all_reduce_op(x, group=world, op="mean"), dist.all_gather_op(x, group=world),
            dist.reduce_scatter_op(x, group=world), dist.broadcast_op(x, group=world),
            dist.all_to_all_op(x, group=world), dist.reduce_op(x, group=world),
            dist.send_recv_op(x, group=world, pairs=[(0, 0)]),
        ]  # fmt: skip
        (zeros,) = ad.Executor([dist.send_recv_op(x, group=world, pairs=[])]).run(
            {x: np.ones((4, 2))}
        )
        self.assertFalse(zeros.any())
        values = np.arange(8, dtype=np.float32).reshape(4, 2)
        for got in ad.Executor(nodes).run({x: values}):
            np.testing.assert_array_equal(got, values)
        self.assertEqual(world.all_reduce([1, 2]).tolist(), [1, 2])
        self.assertEqual(world.objects("a"), ["a"])

    def test_refusals(self) -> None:
        world, x = dist.init(), ad.Variable("x", (3, 2), np.int64)
        one: dict = {"group": world}
        scalar = ad.Variable("s", ())
        refused = [
            (ShapeError, "floats for a mean", lambda: dist.all_reduce_op(x, op="mean", **one)),
            (GraphError, "op must be sum, mean", lambda: dist.all_reduce_op(x, op="or", **one)),
            (GraphError, "group must be a Group", lambda: dist.all_reduce_op(x, group=2)),
            (ShapeError, "root is 1, but the", lambda: dist.broadcast_op(x, root=1, **one)),
            (ShapeError, "an axis 0", lambda: dist.all_gather_op(scalar, **one)),
            (ShapeError, "name ranks", lambda: dist.send_recv_op(x, pairs=[(0, 4)], **one)),
            (GraphError, "once", lambda: dist.send_recv_op(x, pairs=[(0, 1), (0, 2)], **one)),
            (CommunicationError, "timeout > 0", lambda: dist.init(timeout=0)),
            (GraphError, "group is one of dist.init", lambda: ad.Executor([x], group=3)),
        ]
        for kind, text, call in refused:
            with self.subTest(text), self.assertRaisesRegex(kind, text):
                call()

    def test_shares_that_do_not_divide(self) -> None:
        samples = np.zeros((10, 3), np.float32), np.arange(10)
        with self.assertRaisesRegex(DataError, "batches of 4 samples have no 3 equal shares"):
            data.Loader(samples, 4).shard(0, 3)
        with self.assertRaisesRegex(DataError, "a last batch of 1 samples have no 3 equal"):
            data.Loader(samples, 9).shard(0, 3)
        with self.assertRaisesRegex(DataError, "no rank 3 of 3"):
            data.Loader(samples, 9, drop_last=True).shard(3, 3)
        share = data.Loader(samples, 6).shard(1, 3)
        self.assertEqual([y.tolist() for _, y in share], [[2, 3], [7]])

    def test_variables_without_a_launcher(self) -> None:
        program = "from dlsys import dist; dist.init()"
        done = run(sys.executable, "-c", program, WORLD_SIZE="2", RANK="0")
        self.assertIn("WORLD_SIZE is 2, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT not", done.stderr)

    def test_mpi_without_mpi4py(self) -> None:
        program = "import sys; sys.modules['mpi4py'] = None; from dlsys import dist; dist.init()"
        done = run(sys.executable, "-c", program, PMI_SIZE="2")
        self.assertIn("needs mpi4py and MPI: pip install mpi4py mpich", done.stderr)

    def test_launch_without_mpi(self) -> None:
        done = run(
            sys.executable, "-c",
            "import sys; sys.executable = '/nowhere/python'; from dlsys.dist.launch import main; "
            "sys.exit(main(['launch', '-n', '2', 'x.py']))", PATH="/nowhere",
        )  # fmt: skip
        self.assertEqual(done.returncode, 1)
        self.assertIn(
            "there is no mpiexec, which starts the ranks: pip install mpi4py", done.stderr
        )

    def test_launch_as_root_by_open_mpi(self) -> None:
        """It refuses root, so it counts as not there; else more ranks than cores are allowed."""
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "mpiexec"
            program.write_text("#!/bin/sh\necho 'mpiexec (OpenRTE) 4.1.6'\n")
            program.chmod(0o755)
            code = (
                "import os, sys; sys.executable = '/nowhere/python'\n"
                "import dlsys.dist.launch as m\n"
                "m.find_spec = bool; m.unavailable = lambda ctx: None\n"
                "for user in (0, 1): os.geteuid = lambda: user; print(m._mpiexec(2)[1:])"
            )
            done = run(sys.executable, "-c", code, PATH=f"{folder}:{os.environ['PATH']}")
        self.assertEqual(done.stdout, "[]\n['--oversubscribe']\n", done.stderr)

    def test_launch_refuses(self) -> None:
        for arguments in (["launch", "-n", "0", "x.py"], ["launch", "-n", "2"], []):
            told = io.StringIO()
            with self.subTest(arguments), contextlib.redirect_stderr(told):
                with self.assertRaises(SystemExit):
                    main(arguments)
                self.assertIn("error:", told.getvalue())


if __name__ == "__main__":
    unittest.main()

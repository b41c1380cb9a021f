"""What each rank of test_ranks does: `python ranks.py CASE ...` under mpiexec. Rank 0 prints a JSON
object as each case ends, which maps it to "" or to what went wrong on the first rank where it did.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
import traceback
import unittest
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dlsys import autodiff as ad
from dlsys import data, dist, nn, optim, profile, train
from dlsys import functional as F
from dlsys.dist.nccl import NcclGroup
from dlsys.dist.shard import Shard, Slice
from dlsys.errors import CommunicationError, GraphError
from dlsys.ndarray import cpu, gpu
from dlsys.nn.tensor_parallel import ColumnLinear, RowLinear
from dlsys.runtime.device import unavailable

ON_GPUS = "RANKS_ON_GPUS" in os.environ
if sys.argv[1:] == ["program", "early"] and "1" in map(os.environ.get, ("PMI_RANK", "RANK")):
    os.kill(os.getpid(), 9)
TIMEOUT = 20.0
world = dist.init(timeout=float(os.environ.get("RANKS_TIMEOUT", TIMEOUT)))
rank, size = world.rank, world.size
DEVICES: list[Any] = [None] + [cpu(0)] * (unavailable(cpu(0)) is None)
if ON_GPUS:
    DEVICES = [gpu(world.local_rank)]
    world.connect(DEVICES[0])  # as an Executor with a group does, which not every case has
Arrays = Any


def parts(x: Arrays) -> list[Arrays]:
    """The equal parts of an array for the ranks."""
    return np.split(x, size)


# ---- collectives ----
def expected(name: str, all_x: Arrays) -> Arrays:
    """What a collective gives this rank, by numpy from all ranks' arrays."""
    total = all_x.sum(axis=0)
    return {
        "sum": total,
        "mean": all_x.mean(axis=0),
        "max": all_x.max(axis=0),
        "min": all_x.min(axis=0),
        "all_gather": np.concatenate(list(all_x)),
        "reduce_scatter": parts(total)[rank],
        "reduce_scatter_mean": parts(total / size)[rank],
        "broadcast": all_x[1],
        "reduce": total * (rank == 1),
        "all_to_all": np.concatenate([parts(x)[rank] for x in all_x]),
        "send_recv": all_x[(rank - 1) % size] if rank < size - 1 or size == 2 else 0 * total,
    }[name]


def collectives(x: ad.Node, mean: bool = True) -> dict[str, ad.Node]:
    """A ring of sends, whose last rank of more than two gets nothing, and all others."""
    ops = ["sum", "max", "min", *["mean"] * mean]
    scattered = {"reduce_scatter_mean": "mean"} if mean else {}
    ring = [(k, (k + 1) % size) for k in range(size) if size == 2 or (k + 1) % size < size - 1]
    found = {op: dist.all_reduce_op(x, group=world, op=op) for op in ops}
    found |= {name: dist.reduce_scatter_op(x, group=world, op=op) for name, op in scattered.items()}
    return found | {
        "all_gather": dist.all_gather_op(x, group=world),
        "reduce_scatter": dist.reduce_scatter_op(x, group=world),
        "broadcast": dist.broadcast_op(x, group=world, root=1),
        "reduce": dist.reduce_op(x, group=world, root=1),
        "all_to_all": dist.all_to_all_op(x, group=world),
        "send_recv": dist.send_recv_op(x, group=world, pairs=ring),
    }


def case_collectives() -> None:
    """Values of every dtype that a collective takes, on numpy and the CPU."""
    for dtype in (np.float32, np.float64, np.float16, np.int64, np.int32):
        all_x = np.arange(size * 24).reshape(size, 8, 3) % 37 - 11
        all_x = all_x.astype(dtype)
        x = ad.Variable("x", (8, 3), dtype)
        nodes = collectives(x, mean=np.dtype(dtype).kind == "f")
        for ctx in DEVICES:
            if ctx is not None and dtype == np.float64:
                continue
            found = ad.Executor(list(nodes.values()), ctx).run({x: all_x[rank]}, True)
            for name, got in zip(nodes, found):
                wanted = expected(name, all_x)
                assert got.dtype == dtype and got.shape == wanted.shape, (name, got.dtype)
                np.testing.assert_allclose(got, wanted, rtol=1e-3, err_msg=name)


def case_gradients() -> None:
    """<dy, f(x)> summed over ranks has the gradient that finite differences give: collectives are
    linear, so one difference of any size does.
    """
    rng = np.random.default_rng(1)
    x = ad.Variable("x", (8, 3), np.float64)
    for name, y in collectives(x).items():
        if name in ("max", "min"):
            continue
        all_x, all_d = rng.normal(size=(2, size, 8, 3))
        weights = rng.normal(size=(size, 8 * size, 3))[rank]
        loss = F.sum(y * ad.constant(weights[: y.shape[0]]))
        (dx,) = ad.gradients(loss, [x])
        executor = ad.Executor([loss, dx])
        before, gradient = executor.run({x: all_x[rank]})
        after, _ = executor.run({x: (all_x + all_d)[rank]})
        change = world.all_reduce(after - before)
        told = world.all_reduce(np.sum(gradient * all_d[rank]))
        np.testing.assert_allclose(told, change, rtol=1e-10, err_msg=name)


def case_host_arrays() -> None:
    assert world.all_gather(np.float32(rank)).tolist() == [*range(size)]
    assert world.all_reduce(np.float32(rank), "max").shape == ()
    assert world.broadcast(np.array([rank]), 1)[0] == 1
    assert world.local_rank == rank
    assert world.agreed(7) == 7 and world.agreed(rank) == 0
    if ON_GPUS:
        return
    half = world.split(rank % 2)
    assert half.size == size // 2 and half.all_reduce(np.int64(rank)) == rank % 2 * half.size + (
        half.size * (half.size - 1)
    )
    world.barrier()


# ---- data parallelism ----
def network(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32, rng=seed), nn.ReLU(), nn.Linear(32, 4, rng=seed + 1))


def steps(ctx: Any, group: Any, optimizer: Any, **options: Any) -> tuple[Arrays, list[Arrays], str]:
    """The losses and Parameters of a few steps, alone or of a group, from other weights on each
    rank; and the report.
    """
    rng = np.random.default_rng(0)
    xs, ys = rng.normal(size=(6, 24, 16)).astype(np.float32), rng.integers(0, 4, (6, 24))
    x, y = ad.Variable("x", (None, 16)), ad.Variable("y", (None,), np.int64)
    model = network(1 + (0 if group is None else 10 * group.rank))
    loss = F.cross_entropy(model(x), y)
    update = optimizer.minimize(loss, model.parameters())
    executor = ad.Executor([loss, update], ctx, group=group, **options)
    losses = []
    for batch, labels in zip(xs, ys):
        if group is not None:
            batch, labels = parts(batch)[rank], parts(labels)[rank]
        mean = executor.run({x: batch, y: labels}, True)[0]
        losses.append(mean if group is None else group.all_reduce(mean, "mean"))
    return np.array(losses), [p.asnumpy() for p in model.parameters()], str(executor.report())


def case_data_parallel() -> None:
    """Losses are those of one rank with the batch of all, and Parameters equal to the last bit."""
    makers: list[Callable[[], Any]] = [
        lambda: optim.Adam(1e-2, clip_norm=0.5),
        lambda: optim.SGD(0.1, momentum=0.9, weight_decay=0.01),
        lambda: optim.SGD(0.1, accumulate=3, ema=0.9),
    ]
    for ctx in DEVICES:
        for maker in makers:
            alone, wanted, _ = steps(ctx, None, maker())
            together, got, report = steps(ctx, world, maker())
            np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)
            for a, b in zip(got, wanted):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
                assert (world.all_gather(a) == a).all(), "ranks differ"
            assert ctx is None or ON_GPUS or "all_reduce exchanges" in report, report


def case_repeats() -> None:
    """The same world gives the same bits, and the report tells what is exchanged."""
    for ctx in DEVICES:
        (losses, values, report), (again, same, _) = (
            steps(ctx, world, optim.Adam(1e-2)) for _ in range(2)
        )
        assert (losses == again).all() and all((a == b).all() for a, b in zip(values, same))
        nbytes = 4 * (16 * 32 + 32 + 32 * 4 + 4)
        assert f"exchanged with other ranks a run, in bytes: {nbytes:,}" in report, report
        name = "matmul_adam_update" if world.sums_in_kernels and ON_GPUS else "all_reduce"
        assert f"{name}: 4 arrays, {nbytes:,} bytes, " in report, report


def case_accumulation_reduces_once_a_round() -> None:
    for accumulate, wanted in ((1, 6), (3, 2)):
        with mock.patch.object(world, "reduce_into", wraps=world.reduce_into) as reductions:
            steps(None, world, optim.SGD(0.1, accumulate=accumulate))
        sizes = [call.args[0].size for call in reductions.call_args_list]
        assert sum(size > 2 for size in sizes) == wanted, sizes


def case_shared_gradient() -> None:
    """A gradient that flows on into others stays the rank's own there."""
    x = ad.Variable("x", (2, 3))
    w, b = ad.Parameter(np.ones((3, 2), np.float32), "w"), ad.Parameter(np.ones((2, 2), "f"), "b")
    loss = F.sum((x @ w + b) ** 2)  # b's gradient is that of the sum, which w's is made of
    executor = ad.Executor([optim.SGD(0.1).minimize(loss, [w, b])], group=world)
    all_x = np.random.default_rng(5).normal(size=(size, 2, 3)).astype(np.float32)
    executor.run({x: all_x[rank]})
    dys = 2 * (all_x @ np.ones((3, 2), np.float32) + 1)
    np.testing.assert_allclose(b.asnumpy(), 1 - 0.1 * dys.mean(0), rtol=1e-5)
    dw = np.mean([a.T @ dy for a, dy in zip(all_x, dys)], axis=0)
    np.testing.assert_allclose(w.asnumpy(), 1 - 0.1 * dw, rtol=1e-5)


def case_buckets() -> None:
    """Gradients larger than a bucket take several, in the order of backward."""
    widths = [64, 600, 600, 600, 8]
    layers = [nn.Linear(a, b, rng=0) for a, b in zip(widths, widths[1:])]
    x = ad.Variable("x", (4, 64))
    model = nn.Sequential(*layers)
    update = optim.SGD(0.1).minimize(F.sum(model(x)), model.parameters())
    plan = ad.Executor([update], group=world).plan({x: (4, 64)})
    found = [step.node for step in plan.steps if step.node.op.communicates]
    shapes = [[value.shape for value in node.inputs] for node in found]
    assert len(found) == 2 and shapes[0][0] == (8, 600), shapes
    last = [k for k, step in enumerate(plan.steps) if step.node.op.communicates]
    assert last[0] < len(plan.steps) // 2, "the first bucket leaves before backward ends"


@mock.patch.object(world, "sums_in_kernels", False)
def case_buckets_of_two_dtypes() -> None:
    """Gradients of 16 bits and those of float32, which alternate, have a bucket each."""
    x = ad.Variable("x", (4, 16))
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(16, 16), nn.GELU())))
    update = optim.SGD(0.1).minimize(F.sum(model(x)), model.parameters())
    plan = ad.Executor([update], DEVICES[-1], precision="bf16", group=world).plan({x: (4, 16)})
    buckets = [step.node for step in plan.steps if step.node.op.communicates]
    kinds = [{value.spec.dtype for value in node.inputs} for node in buckets]
    assert all(len(kind) == 1 for kind in kinds), kinds
    assert sorted(len(node.inputs) for node in buckets) == [4, 4], buckets
    if not ON_GPUS:  # of one host, where the largest leaves first
        ends = [max(x.number for x in node.inputs) for node in buckets]
        assert ends == sorted(ends), "buckets leave in the order in which they are complete"


@mock.patch.object(world, "sums_in_kernels", False)
def case_report() -> None:
    """What a bucket is made of, how much can run beside it, and its speed once it was timed."""
    x = ad.Variable("x", (4, 64))
    model = nn.Sequential(*(nn.Linear(a, b, rng=0) for a, b in [(64, 600), (600, 600), (600, 8)]))
    update = optim.SGD(0.1).minimize(F.sum(model(x)), model.parameters())
    executor = ad.Executor([update], DEVICES[-1], group=world)
    executor.recorder = profile.Profile()
    with mock.patch("dlsys.dist.data_parallel.BUCKET_WITHIN", 1 << 20):
        executor.run({x: np.ones((4, 64), np.float32)})
    (plan,) = executor.report().plans
    # The last bias has a gradient of ones, which is no bucket's.
    arrays = sorted(bucket.arrays for bucket in plan.exchanged)
    assert arrays == ([1, 2, 2] if ON_GPUS else [2, 3]), plan.exchanged
    ends = 4 * (
        8 * 600 + 600
    )  # bytes of what backward makes first; on GPUs the largest leaves first
    (first,) = (bucket for bucket in plan.exchanged if bucket.nbytes == ends)
    assert (first.name, first.arrays) == ("all_reduce", 2), plan.exchanged
    assert first.bus_nbytes == first.nbytes * 2 * (size - 1) / size
    earliest = plan.exchanged[0]
    assert earliest.beside < earliest.steps, plan.exchanged
    assert any(bucket.beside for bucket in plan.exchanged), plan.exchanged
    assert first.ms and first.bus_gigabytes_per_second, first
    assert "GB/s on the bus" in str(executor.report())


def case_sums_in_kernels() -> None:
    """On GPUs the kernel that makes the gradients of a small network sums them over ranks, to what
    a collective sums; the same bits on all ranks, and in repeats with other shapes in between.
    """
    if ON_GPUS and not world.sums_in_kernels:
        raise unittest.SkipTest("built without NCCL's headers, or the GPUs share no memory")

    def trained(widths: tuple[int, ...], batch: int, inside: bool, adam: bool) -> list[Arrays]:
        pairs = list(zip(widths, widths[1:]))
        layers = [part for a, b in pairs for part in (nn.Linear(a, b, rng=0), nn.ReLU())]
        model = nn.Sequential(*layers[:-1])
        x = ad.Variable("x", (None, widths[0]), np.float32)
        y = model(x)
        optimizer = optim.Adam(1e-3) if adam else optim.SGD(0.1, momentum=0.9)
        update = optimizer.minimize(F.mean(y * y), model.parameters())
        with mock.patch.object(world, "sums_in_kernels", inside and world.sums_in_kernels):
            executor = ad.Executor([update], DEVICES[-1], group=world)
            rng = np.random.default_rng(rank)
            for rows in (batch, batch, batch + 9, batch, batch + 9, batch + 9):
                executor.run({x: rng.normal(size=(rows, widths[0])).astype("f")})
            for plan in executor.report().plans:
                names = [found.name for found in plan.exchanged]
                assert len(names) == 1, names
                assert (names[0] != "all_reduce") == (inside and ON_GPUS), names
                assert size > 2 or names[0].startswith(
                    ("all_reduce", "matmul_")[inside and ON_GPUS]
                )
        values = np.concatenate([p.asnumpy().ravel() for p in model.parameters()])
        assert len(set(world.all_gather(np.array([zlib.crc32(values)])).ravel())) == 1
        return values

    for widths, batch, adam in [
        ((70, 90, 10), 33, False), ((784, 256, 100, 10), 200, False), ((5, 300, 3), 64, True),
    ]:  # fmt: skip
        inside, apart = (trained(widths, batch, where, adam) for where in (True, False))
        # Adam takes steps of the rate at the sign of a gradient that only rounding keeps from zero.
        np.testing.assert_allclose(inside, apart, atol=2 * 6 * 1e-3 if adam else 2e-6)
        np.testing.assert_array_equal(inside, trained(widths, batch, True, adam))


def case_sums_in_updates() -> None:
    """On GPUs an update reads the gradients of the other ranks where they lie: what a collective
    sums, the same bits on all ranks and in repeats, with other shapes in between; with gradients of
    16 bits beside those of float32, one of them of a table that a product reads too. Each rank sums
    all, as of two ranks, or a share.
    """
    if ON_GPUS and not world.sums_in_kernels:
        raise unittest.SkipTest("built without NCCL's headers, or the GPUs share no memory")
    sizes = 500 * 640 + 2 * 640 * 801, 801 + 640  # of matrices and of biases

    def trained(inside: bool, precision: str, maker: Callable[[], Any]) -> list[Arrays]:
        table = ad.Parameter(np.linspace(-0.1, 0.1, 320_000, dtype="f").reshape(500, 640), "table")
        layers = nn.Sequential(nn.Linear(640, 801, rng=0), nn.GELU(), nn.Linear(801, 640, rng=1))
        tokens = ad.Variable("tokens", (None,), np.int64)
        y = layers(F.embedding(tokens, table)) @ ad.transpose_op(table)
        loss = F.mean(y * y) + F.mean(y)
        update = maker().minimize(loss, [table, *layers.parameters()])
        with mock.patch.object(world, "sums_in_kernels", inside and world.sums_in_kernels):
            executor = ad.Executor([loss, update], DEVICES[-1], precision, group=world)
            rng, losses = np.random.default_rng(rank), []
            for rows in (32, 32, 48, 32, 48, 48):
                losses.append(float(executor.run({tokens: rng.integers(0, 500, rows)}, True)[0]))
            for plan in executor.report().plans:
                names = {found.name.startswith("all_reduce_") for found in plan.exchanged}
                assert names == {inside and ON_GPUS}, plan.exchanged
                nbytes = sum(found.nbytes for found in plan.exchanged)
                assert nbytes == (2 if precision == "bf16" else 4) * sizes[0] + 4 * sizes[1], nbytes
        values = np.concatenate([p.asnumpy().ravel() for p in (table, *layers.parameters())])
        assert len(set(world.all_gather(np.array([zlib.crc32(values)])).ravel())) == 1
        return [np.array(losses), values]

    makers: list[tuple[Callable[[], Any], float]] = [  # and what rounding changes at most
        (lambda: optim.SGD(0.1, momentum=0.9), 1e-4),  # 3.4e-5, of a loss, between two H200
        (lambda: optim.Adam(1e-3, weight_decay=0.1), 2 * 6 * 1e-3),  # where a gradient is near zero
    ]
    ways = (2, 3) if size == 2 else (3,)
    for precision, (maker, most) in itertools.product(("fp32", "bf16")[: 1 + ON_GPUS], makers):
        apart = trained(False, precision, maker)
        for shares_from in ways:
            with mock.patch("dlsys.fusion.all_reduce_update.SHARES_FROM", shares_from):
                inside, again = (trained(True, precision, maker) for _ in range(2))
            # A collective rounds the sum of two as that of a share is rounded.
            same = size == 2 and (precision == "fp32" or shares_from == 2)
            for a, b, c in zip(inside, again, apart):
                np.testing.assert_array_equal(a, b)
                np.testing.assert_allclose(a, c, rtol=0, atol=0 if same else most)


def case_random_numbers() -> None:
    """Ranks drop other units, rank 0 those of a run alone."""
    masks = []
    for group in (world, None):
        ad.seed(3)
        w = ad.Parameter(np.ones((1, 64), np.float32), "w")
        y = ad.dropout(w * 1.0, 0.5)
        loss = F.sum(y)
        masks.append(
            ad.Executor([y, optim.SGD(0.0).minimize(loss, [w])], group=group).run()[0] != 0
        )
    shared = world.all_gather(masks[0])
    assert len({row.tobytes() for row in shared}) == size
    assert (shared[0] == masks[1]).all()


def case_parts_are_moved() -> None:
    """A shard or a slice on another device is still this rank's part."""
    weight = ad.Parameter(np.arange(12.0).reshape(4, 3), "w")
    shard = Shard(weight, "w.moment", world, None)
    shard.set(weight.asnumpy())
    part = Slice(weight.asnumpy(), "w", world, 1 if size == 3 else 0)
    for each in (shard, part):
        shape = each.shape
        each.to(DEVICES[-1])
        assert ad.Parameter.asnumpy(each).shape == shape, each
        np.testing.assert_array_equal(each.asnumpy(), weight.asnumpy())


def case_shards() -> None:
    """Each rank keeps a part of the optimizer's state, and losses are those of one rank."""
    makers: list[Callable[[Any], Any]] = [
        lambda shard: optim.Adam(1e-2, clip_norm=0.5, shard=shard),
        lambda shard: optim.SGD(0.1, momentum=0.9, ema=0.9, shard=shard),
    ]
    for ctx, maker in itertools.product(DEVICES, makers):
        alone, wanted, _ = steps(ctx, None, maker(None))
        optimizer = maker(world)
        together, got, _ = steps(ctx, world, optimizer)
        np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)
        for a, b in zip(got, wanted):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
        for parameter, slots in optimizer.slots.items():
            for slot in slots.values():
                assert slot.shape == (-(-np.prod(parameter.shape) // size),)
                assert slot.asnumpy().shape == parameter.shape


def case_shards_saved() -> None:
    """The state of an optimizer is complete and the same as without shards; setting it sets all."""
    states, after = [], []
    for shard in (None, world):
        optimizer = optim.Adam(1e-2, shard=shard)
        _, parameters, _ = steps(None, world, optimizer)
        state = optimizer.state_dict()
        states.append(state)
        optimizer.load_state_dict({name: value * 2 for name, value in state.items()})
        after.append(optimizer.state_dict())
    for found in (states, after):
        assert found[0].keys() == found[1].keys()
        for name, value in found[0].items():
            np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def case_shards_in_fit() -> None:
    """A checkpoint of shards is one without them, and goes on either way."""
    folder = shared_folder()
    fitted(folder, 1, "data", optimizer=optim.Adam(1e-2, shard=world))
    history, model = fitted(folder, 2, "data", optimizer=optim.Adam(1e-2))
    folder = shared_folder()
    fitted(folder, 1, "data", optimizer=optim.Adam(1e-2))
    other, wanted = fitted(folder, 2, "data", optimizer=optim.Adam(1e-2, shard=world))
    for p, q in zip(model.parameters(), wanted.parameters()):
        np.testing.assert_allclose(p.asnumpy(), q.asnumpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(history.epochs[1]["loss"], other.epochs[1]["loss"], atol=1e-6)


def case_synchronized_batch_norm() -> None:
    """Statistics, gradients and running statistics are those of all shares as one batch."""
    rng = np.random.default_rng(0)
    xs = (rng.normal(size=(4, 24, 5, 3)) * 2 + 3).astype(np.float32)
    for ctx in DEVICES:
        found = []
        for group in (None, world):
            layer = nn.BatchNorm1d(5, group=group)
            first = nn.Conv1d(5, 5, 1, rng=1)
            x = ad.Variable("x", (None, 5, 3))
            y = F.sigmoid(layer(first(x)))
            loss = F.mean(y * y * y)
            update = optim.SGD(0.5).minimize(loss, [*first.parameters(), *layer.parameters()])
            executor = ad.Executor([loss, update], ctx, group=group)
            losses = []
            for batch in xs:
                share = batch if group is None else parts(batch)[rank]
                mean = executor.run({x: share}, True)[0]
                losses.append(mean if group is None else world.all_reduce(mean, "mean"))
            state = [p.asnumpy() for m in (first, layer) for _, p in m.named_state()]
            found.append([np.array(losses), *state])
        for a, b in zip(*found):
            np.testing.assert_allclose(b, a, rtol=0, atol=2e-6)


def case_divided_linear() -> None:
    """A column-parallel layer and a row-parallel one are two Linears, in values, training and what
    is saved, also with layers on either side that every rank has.
    """
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(5, 6, 8)).astype(np.float32)
    for ctx in DEVICES:
        found = []
        for group in (None, world):
            first, last = nn.Linear(8, 8, rng=1), nn.Linear(8, 1, rng=4)
            given: dict[str, Any] = {} if group is None else {"group": group}
            wide, narrow = (ColumnLinear, RowLinear) if given else (nn.Linear, nn.Linear)
            middle = nn.Sequential(wide(8, 32, rng=2, **given), nn.GELU(), narrow(32, 8, **given))
            weight = np.random.default_rng(3).normal(size=(8, 32)).astype(np.float32)
            state = middle.state_dict()
            middle.load_state_dict(state | {"2.weight": weight})
            x = ad.Variable("x", (6, 8))
            hidden = F.relu(first(x))
            loss = F.mean(last(hidden + middle(hidden)) ** 2)
            model = nn.Sequential(first, middle, last)
            optimizer = optim.Adam(1e-2)
            update = optimizer.minimize(loss, model.parameters())
            executor = ad.Executor([loss, update], ctx, group=group)
            losses = [executor.run({x: batch}, True)[0] for batch in xs]
            slots = optimizer.state_dict()
            found.append([np.array(losses), *model.state_dict().values(), *slots.values()])
        for a, b in zip(*found, strict=True):
            np.testing.assert_allclose(b, a, rtol=0, atol=5e-6)


def case_divided_linear_refuses() -> None:
    for kind in (ColumnLinear, RowLinear):
        try:
            kind(3 * size + 1, 3 * size + 1, group=world)
        except GraphError as error:
            assert f"{size} ranks do not divide" in str(error), error
        else:
            raise AssertionError("nothing was refused")
    layer, x = RowLinear(2 * size, 2, group=world, rng=0), ad.Variable("x", (3, 2))
    update = optim.SGD(0.1, clip_norm=1.0).minimize(F.sum(layer(x)), layer.parameters())
    try:
        ad.Executor([update], group=world).run({x: np.ones((3, 2), np.float32)})
    except GraphError as error:
        assert "clip_norm is not for weights that are divided" in str(error), error
    else:
        raise AssertionError("nothing was refused")


# ---- disagreement ----
def refused(make: Callable[[], Any], part: str) -> None:
    """All ranks get the same sentence, which has this part."""
    try:
        make()
    except CommunicationError as error:
        assert part in str(error), str(error)
        assert len(set(world.objects(str(error)))) == 1
        return
    raise AssertionError("nothing was refused")


def trained(shape: tuple[int, int] = (4, 2), dtype: Any = np.float32, mean: bool = False) -> Any:
    x, w = ad.Variable("x"), ad.Parameter(np.ones(shape, dtype), "w", dtype=dtype)
    y = x @ w
    loss = F.mean(y) if mean else F.sum(y)
    executor = ad.Executor([loss, optim.SGD(0.1).minimize(loss, [w])], DEVICES[0], group=world)
    return lambda rows=4: executor.run({x: np.ones((rows, 4), dtype)})


def case_disagreement() -> None:
    other = rank == 1
    refused(trained(shape=(4, 3) if other else (4, 2)), "it has Parameter w float32 (4, 3)")
    if not ON_GPUS:  # which hold no float64
        refused(trained(dtype=np.float64 if other else np.float32), "it has x float64 (4, 4)")
    refused(trained(mean=other), "it has mean float32 ()")
    if isinstance(world, NcclGroup):
        return  # it compares at the first run of each shape, which rank 0 has made
    run = trained()
    run()
    refused(lambda: run(6 if other else 4), "it has x float32 (6, 4), where rank 0 has x float32")
    run()  # and goes on


# ---- fit ----
def fitted(
    folder: str,
    epochs: int,
    parallel: str | None,
    *callbacks: train.Callback,
    optimizer: Any = None,
) -> Any:
    """The history and model of a run that keeps checkpoints, and goes on from those it finds."""
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(80, 1, 6, 6)).astype(np.float32), rng.integers(0, 4, 80)
    loader = data.Loader(samples, 12, shuffle=True, seed=3, drop_last=True)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(36, 16, rng=1), nn.ReLU(), nn.Linear(16, 4, rng=2)
    )
    found = folder if (Path(folder) / "last.safetensors").exists() else None
    history = train.fit(
        model, loader, optimizer or optim.Adam(1e-2), epochs=epochs, log_every=4, quiet=True,
        resume=found, parallel=parallel, callbacks=[train.Checkpoint(folder, steps=2), *callbacks],
        ctx=DEVICES[0],
    )  # fmt: skip
    return history, model


def shared_folder() -> str:
    """A new folder that all ranks know."""
    return world.objects(tempfile.mkdtemp() if rank == 0 else "")[0]


def case_fit() -> None:
    """One logical run: the same losses, metrics and weights as of one rank."""
    history, model = fitted(shared_folder(), 2, "data")
    with tempfile.TemporaryDirectory() as folder:
        alone, wanted = fitted(folder, 2, None)
    for got, record in zip(history.epochs, alone.epochs):
        for figure in ("loss", "accuracy", "step"):
            np.testing.assert_allclose(got[figure], record[figure], rtol=0, atol=1e-6)
    for p, q in zip(model.parameters(), wanted.parameters()):
        np.testing.assert_allclose(p.asnumpy(), q.asnumpy(), rtol=0, atol=1e-6)


def case_runs_from_other_steps() -> None:
    """A rank that does not find the checkpoint that the others go on from is told of."""
    folder = shared_folder()
    fitted(folder, 1, "data")
    refused(
        lambda: fitted(folder if rank != 1 else tempfile.mkdtemp(), 2, "data"),
        "rank 1 differs from rank 0 in its steps so far: it has 0, where rank 0 has 6",
    )


def case_running_statistics() -> None:
    """Those of a saved model are the means of the ranks', equal on all."""
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(16, 3)).astype(np.float32), rng.integers(0, 2, 16)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2, rng=0))
    train.fit(model, data.Loader(samples, 8), optim.SGD(0.0), quiet=True, parallel="data")
    norm = model.state_dict()
    name = next(name for name in norm if "mean" in name)
    assert (world.all_gather(norm[name]) == norm[name]).all()
    means = [x.mean(axis=0) for x in np.split(samples[0], 2)]
    np.testing.assert_allclose(norm[name], 0.9 * 0.1 * means[0] + 0.1 * means[1], rtol=1e-4)


def case_loaders() -> None:
    """The shares of a batch, joined, are the batch, for both loaders."""
    images = np.arange(48, dtype=np.float32).reshape(24, 2)
    for kind in (data.Loader, data.DeviceLoader):
        loader: Any = kind((images, np.arange(24)), 4 * size, shuffle=True, seed=2)
        share = loader.shard(rank, size)
        for part, batch in zip(share.batches(1), loader.batches(1)):
            joined = np.concatenate([*world.all_gather(np.asarray(part[0]))])
            assert (joined == batch[0]).all()
    for ctx in DEVICES:
        loader = data.DeviceLoader((images, np.arange(24)), 4 * size, shuffle=True, seed=2)
        share = loader.shard(rank, size)
        run = ad.Executor([*share.inputs(), share.advance], ctx).run
        for batch in loader.batches(0):
            got = run({}, True)
            assert (np.concatenate([*world.all_gather(got[0])]) == batch[0]).all()


# ---- programs of their own, whose end is looked at ----
class Kill(train.Callback):
    """Ends a rank in a step as `kill -9` does, once."""

    def __init__(self, text: str, folder: str) -> None:
        self._rank, self._step = map(int, text.split(":"))
        self._done = Path(folder) / f"killed {text}"

    def on_step(self, run: Any) -> None:
        if rank == self._rank and run.step == self._step and not self._done.exists():
            self._done.touch()
            os.kill(os.getpid(), 9)


def program_fit(folder: str, kill: str = "-1:0") -> None:
    """Four epochs, in which a rank may die; rank 0 prints the losses."""
    history, _ = fitted(folder, 4, "data", Kill(kill, folder))
    if rank == 0:
        print(json.dumps([record["loss"] for record in history.epochs]), flush=True)


def program_hang() -> None:
    run = trained()
    run()
    if rank == 1:
        time.sleep(60)
    run()


def program_raise() -> None:
    run = trained()
    run()
    if rank == 1:
        raise ValueError("of rank 1 alone")
    run()


def run_cases(names: list[str]) -> None:
    for name in names:
        fault = ""
        try:
            globals()[f"case_{name}"]()
        except unittest.SkipTest as skip:
            fault = f"skipped: {skip}"
        except Exception:
            fault = f"rank {rank}: {traceback.format_exc()}"
            if ON_GPUS:  # other ranks may wait in a kernel
                world.abort(f"case {name}, {fault}")
        found = next(filter(None, world.objects(fault)), "")
        if rank == 0:
            print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "program":
        globals()[f"program_{sys.argv[2]}"](*sys.argv[3:])
    else:
        run_cases(sys.argv[1:])

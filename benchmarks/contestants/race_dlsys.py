"""dlsys in the race: run_many over data on the device, and single runs with feeds there.

`run_many` and `tuned` measure the same, `warm` how long the first two steps of it take; DLSYS_TUNE
and DLSYS_TUNE_CACHE say with which implementations (race.py sets them).
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from dlsys import autodiff as ad
from dlsys import ndarray, optim
from dlsys.data import Dataset, DeviceLoader
from dlsys.executor.debug.observe import flops
from dlsys.runtime.device import gpu, memory_stats, reset_peak, synchronize
from shared import workloads
from shared.networks import model
from shared.workloads import RATE, Work

GPU = gpu(0)
PEAK_FLOPS = 61e12  # fp32 of an H200, measured
LAUNCH_MS = 1.4e-3  # of a captured graph


def step(work: Work, precision: str, inputs: tuple[ad.Node, ...]) -> ad.Executor:
    """The executor of a training step; it fetches the loss and the update."""
    network = model(work)
    images, labels = inputs
    loss = ad.softmax_cross_entropy(network(images), labels)
    update = optim.SGD(RATE).minimize(loss, network.parameters())
    return ad.Executor([loss, update], ctx=GPU, precision=precision)


def wait() -> None:
    synchronize(GPU)


def started(work: Work, precision: str, dataset: Dataset) -> tuple[ad.Executor, float]:
    """The executor of steps that take their batches from data on the device; and how many seconds
    it took to plan (and where DLSYS_TUNE=full to measure), to run once and to record.
    """
    loader = DeviceLoader(dataset, work.batch, shuffle=True, normalize=(0.0, 1.0))
    start = time.perf_counter()
    executor = step(work, precision, loader.inputs())
    executor.run()
    executor.run()
    wait()
    return executor, round(time.perf_counter() - start, 3)


def chosen(executor: ad.Executor) -> dict[str, str]:
    """The algorithms that are not the heuristic's, by the kernels that they are of."""
    return {key: name for key, name in executor.algorithms().items() if name}


def resident(work: Work, precision: str, mode: str, dataset: Dataset, rounds: int) -> None:
    """Steps that take their batches from data on the device."""
    executor, first_s = started(work, precision, dataset)
    gc.collect()  # earlier works' graphs
    reset_peak(GPU)
    ms, steps = workloads.queued_ms(executor.run_many, wait, rounds)
    (plan,) = executor.report().plans
    work_flops = sum(flops(each) for each in planned(executor))
    workloads.tell(
        work,
        precision,
        mode,
        ms=ms,
        steps=steps,
        first_s=first_s,
        launches=plan.launches,
        kernels=sum(segment.kernels for segment in plan.segments),
        peak_nbytes=memory_stats(GPU).peak_in_use_nbytes,
        data_nbytes=dataset.images.nbytes + dataset.labels.nbytes,
        floor_ms=round(LAUNCH_MS + work_flops / PEAK_FLOPS * 1e3, 5),
        choices=chosen(executor),
    )


def first(work: Work, precision: str, mode: str, dataset: Dataset, rounds: int) -> None:
    """The first two steps alone."""
    executor, first_s = started(work, precision, dataset)
    workloads.tell(work, precision, mode, first_s=first_s, choices=chosen(executor))


def planned(executor: ad.Executor) -> list[Any]:
    """The steps of a plan without feeds."""
    return executor.plan({}).steps


def fed(work: Work, precision: str, mode: str, dataset: Dataset, rounds: int) -> None:
    """Single runs whose feeds lie on the device."""
    inputs = (
        ad.Variable("images", shape=(None, 784), dtype=np.float32),
        ad.Variable("labels", shape=(None,), dtype=np.int64),
    )
    executor = step(work, precision, inputs)
    images, labels = dataset.take(np.arange(work.batch))
    values = (images.astype(np.float32) / 255, labels)
    feeds = {node: ndarray.array(value, GPU) for node, value in zip(inputs, values)}

    def queue(n: int) -> None:
        for _ in range(n):
            executor.run(feeds)

    ms, steps = workloads.queued_ms(queue, wait, rounds)
    us = workloads.host_us(lambda: executor.run(feeds), wait)
    workloads.tell(work, precision, mode, ms=ms, steps=steps, host_us=us)


MODES = {"run_many": resident, "run": fed, "tuned": resident, "warm": first}


def main() -> None:
    options = workloads.arguments(__doc__)
    modes = options.modes.split(",") if options.modes else ["run_many", "run"]
    dataset = Dataset(*workloads.data())
    for work in workloads.chosen(options):
        for precision in work.precisions:
            for mode in modes:
                MODES[mode](work, precision, mode, dataset, options.rounds)

"""A campaign: generators in processes of their own, which are watched, and what came of them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .harness import Batch, Tally

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a generator is run: the cases of a batch, the share of a campaign's time, and the seconds
    after which a case that does not end is a finding.
    """

    size: int
    share: float
    patience: float
    what: str


GENERATORS = {
    "operators": Kind(400, 4, 60, "operators and losses against PyTorch"),
    "training": Kind(40, 2, 60, "optimizers, schedules and networks against PyTorch"),
    "formats": Kind(500, 4, 30, "mutated files over every reader"),
    "options": Kind(50, 2, 90, "command lines"),
    "kills": Kind(2, 4, 240, "runs that are killed and resumed"),
}
_ENDLESS = 10**12


@dataclasses.dataclass
class Options:
    """The command line."""

    generators: list[str]
    seconds: float
    cases: int | None
    seed: int
    jobs: int = 1
    devices: str = "numpy,cpu"
    only: str = ""
    batch: int | None = None
    worker: int | None = None
    replay: str | None = None
    verbose: bool = False
    record: Path | None = None


class Campaign:
    """The generators asked for, one after the other, each in `jobs` processes."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def run(self) -> int:
        """The exit status: 1 where something did not hold."""
        options = self.options
        if options.replay:
            return self._replay(options.generators[0], options.replay)
        shares = sum(GENERATORS[name].share for name in options.generators)
        found = 0
        for name in options.generators:
            missing = importlib.import_module(f"fuzz.{name}").missing()
            if missing:
                print(f"{name}: SKIPPED, 0 cases tried: {missing}", flush=True)
                continue
            seconds = options.seconds * GENERATORS[name].share / shares
            tally, took = self._attack(name, seconds)
            found += len(tally.findings)
            self._report(name, tally, took)
            if options.record is not None:
                record(options.record, name, tally, took, self._again(name), options)
        return 1 if found else 0

    def _replay(self, name: str, text: str) -> int:
        module: Any = importlib.import_module(f"fuzz.{name}")
        trial = module.trial(self.options.devices.split(","), self._parts())
        tally = Batch(trial, 0, 1, verbose=True).run(text)
        for finding in tally.findings:
            print(finding["text"])
        print(f"{name}: the case {'does not hold' if tally.findings else 'holds'}")
        return 1 if tally.findings else 0

    def _parts(self) -> list[str]:
        return [part for part in self.options.only.split(",") if part]

    # ---- processes ----
    def _attack(self, name: str, seconds: float) -> tuple[Tally, float]:
        options, tally, start = self.options, Tally(), time.monotonic()
        one = options.worker is not None
        workers = [options.worker or 0] if one else list(range(options.jobs))
        lines: queue.Queue[tuple[int, Any]] = queue.Queue()
        each = -(-(options.cases or _ENDLESS) // len(workers))
        if one:
            each = GENERATORS[name].size
        threads = [
            threading.Thread(target=self._drive, args=(name, k, seconds, each, lines), daemon=True)
            for k in workers
        ]
        for thread in threads:
            thread.start()
        running, told = len(threads), time.monotonic()
        while running:
            worker, line = lines.get()
            if line is None:
                running -= 1
                continue
            for finding in line["findings"]:
                if finding["kind"] not in {f["kind"] for f in tally.findings}:
                    self._tell(name, worker, line["batch"], finding)
            tally.add(line)
            if time.monotonic() - told > 30:
                told = time.monotonic()
                print(f"{name}: {tally.tried:,} tried, {tally.held:,} held", flush=True)
        return tally, time.monotonic() - start

    def _drive(
        self, name: str, worker: int, seconds: float, cases: int, lines: queue.Queue[Any]
    ) -> None:
        """One worker process after another, should one end before its time."""
        until = time.monotonic() + min(seconds, 1e9)
        batch = self.options.batch or 0
        while cases > 0 and time.monotonic() < until:
            left = until - time.monotonic()
            end, began = None, False
            for line in self._lines(name, worker, left, cases, batch):
                if "ended" in line:
                    end = line["ended"]
                elif "tally" in line:
                    cases -= max(line["tally"]["tried"], 1)
                    lines.put((worker, {"batch": line["batch"], **line["tally"]}))
                    batch = line["batch"] + 1
                elif "batch" in line:
                    began = True
                    batch = line["batch"]
            if end is None:
                break
            kind, text = end
            finding = {"kind": kind, "text": text, "replay": ""}
            counts = {"tried": 1, "held": 0, "unjudged": 0, "kinds": {kind: 1}}
            lines.put((worker, {"batch": batch, **counts, "findings": [finding]}))
            cases, batch = cases - 1, batch + 1
            if self.options.worker is not None or not began:
                break
        lines.put((worker, None))

    def _lines(
        self, name: str, worker: int, seconds: float, cases: int, batch: int
    ) -> Iterator[dict[str, Any]]:
        """What a worker says, and at last {"ended": why} where that was not its end."""
        options = self.options
        values = [name, options.seed, worker, GENERATORS[name].size, seconds, cases, batch]
        values += [options.devices, options.only, int(options.verbose)]
        command = [sys.executable, str(HERE), "--as-worker", *map(str, values)]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        said: queue.Queue[str | None] = queue.Queue()
        assert process.stdout is not None
        threading.Thread(target=_pass_on, args=(process.stdout, said), daemon=True).start()
        while True:
            try:
                line = said.get(timeout=GENERATORS[name].patience)
            except queue.Empty:
                process.send_signal(signal.SIGABRT)  # faulthandler prints where it stands
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                yield {"ended": ("hang", f"no case ended in {GENERATORS[name].patience:g} s")}
                return
            if line is None:
                break
            yield json.loads(line)
        status = process.wait()
        if status:
            yield {"ended": (f"worker ended with status {status}", "see its message above")}

    # ---- what is told ----
    def _command(self, name: str) -> list[str]:
        command = ["python", "tests/fuzz", name]
        if self.options.devices != "numpy,cpu":
            command += ["--devices", self.options.devices]
        if self.options.only:
            command += ["--only", self.options.only]
        return command

    def _tell(self, name: str, worker: int, batch: int, finding: dict[str, str]) -> None:
        command = self._command(name)
        if finding["replay"]:
            command += ["--replay", finding["replay"]]
        else:
            command += ["--seed", str(self.options.seed), "--worker", str(worker)]
            command += ["--batch", str(batch), "--verbose"]
        print(f"FOUND by {name}: {finding['text']}\n  again: {shlex.join(command)}", flush=True)

    def _again(self, name: str) -> str:
        command = [*self._command(name), "--seed", str(self.options.seed)]
        if self.options.jobs > 1:
            command += ["--jobs", str(self.options.jobs)]
        if self.options.cases:
            command += ["--cases", str(self.options.cases)]
        else:
            command += ["--seconds", f"{self.options.seconds:g}"]
        return shlex.join(command)

    def _report(self, name: str, tally: Tally, took: float) -> None:
        rate = tally.tried / max(took, 1e-9)
        print(
            f"{name}: {tally.tried:,} tried, {tally.held:,} held, {tally.unjudged:,} unjudged, "
            f"{len(tally.findings)} findings, in {took:.0f} s ({rate:,.1f} a second)",
            flush=True,
        )
        for kind, count in sorted(tally.kinds.items(), key=lambda item: -item[1]):
            print(f"  {count:7,} x {kind}", flush=True)


def _pass_on(stream: Any, said: queue.Queue[str | None]) -> None:
    for line in stream:
        said.put(line)
    said.put(None)


def record(
    path: Path, name: str, tally: Tally, took: float, command: str, options: Options
) -> None:
    """Adds a campaign's counts to the record of its generator, under the state of the tree."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from shared import measure

    machine = measure.machine()
    for library in ("torch", "hypothesis"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            machine[library] = importlib.metadata.version(library)
    whole = json.loads(path.read_text()) if path.exists() else {"attacks": []}
    whole["attacks"].append(
        {
            "attack": name, "what": GENERATORS[name].what, "tried": tally.tried,
            "held": tally.held, "unjudged": tally.unjudged, "found": tally.kinds,
            "seconds": round(took, 1), "seed": options.seed, "jobs": options.jobs,
            "devices": options.devices, "command": command, "commit": measure.commit(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine,
        }
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(measure.as_json(whole))

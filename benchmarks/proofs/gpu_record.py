"""Proves this checkout on a GPU and leaves a JSON record of what was run and what came of it.

    python benchmarks gpu_record --out FOLDER [--commit ID] [--parts build,tests,...]

Parts: build the library; all tests, none skipped for want of the GPU; MNIST on three devices, with
CUDA's calls counted; compute-sanitizer's four tools. All but the first run side by side. Each has a
time limit and leaves FOLDER/<part>.json; record.json merges those that are there, output.log has
every word that was printed. The exit status is 0 when every part is as it should be.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from proofs.part import FEW_THREADS, Part, brief
from proofs.sanitizers import sanitizers
from shared import measure

ROOT = measure.ROOT
COUNTED = "tests/gpu/counted.py"
PROCESSES = 10  # share the tests
EPOCHS = (10, 30)
DEVICES = ("numpy", "cpu", "gpu")
MODELS = {"logreg": 0.92, "mlp": 0.965}  # with the validation accuracy that is expected
LARGEST_DIFFERENCE = 1e-3  # between the devices' losses
# The MLP's curves are judged at a tenth of the assignment's rate. At that rate itself, 1.0 of the
# mean loss, its first epochs amplify rounding: float32 and float64 on one device part by 0.06.
GENTLE = {"mlp": ["--lr", "0.1"]}


def build(part: Part, keep: bool = False) -> None:
    """The library for this machine's GPU; `keep`: the one that is there."""
    if keep:
        part.result.update(ok=True, command="none: the library that was there")
    else:
        done = part.run(["make", "lib", "VENV=", f"PYTHON={sys.executable}"])
        part.result.update(brief(done), ok=done["status"] == 0)
    part.result["versions"] = versions()
    program = (
        "import json, sys; sys.path.insert(1, '../python'); from shared import measure; "
        "print(json.dumps(measure.machine()))"
    )
    facts = part.run([sys.executable, "-c", program], cwd=measure.HERE)
    if facts["status"] == 0:
        part.result["machine"] = json.loads(facts["output"].splitlines()[-1])


def tests(part: Part) -> None:
    """Every test, dealt to several processes; a skip for want of a GPU is a failure."""
    env = {"DLSYS_REQUIRE_GPU": "1", "DLSYS_TEST_LARGE": "1", **FEW_THREADS}
    done = part.run([sys.executable, "tests/run.py", "-j", str(PROCESSES)], env=env)
    part.result.update(
        **counts(done["output"]),
        processes=PROCESSES,
        seconds=done["seconds"],
        command="DLSYS_REQUIRE_GPU=1 DLSYS_TEST_LARGE=1 python tests/run.py",
        skips=sorted(line.split(" x ", 1)[1] for line in skips(done["output"])),
    )
    if done["status"] != 0:  # None where a limit ended it, which prints no counts
        part.result["failures"] = [brief(done)["tail"]]
    part.result["ok"] = done["status"] == 0


def skips(output: str) -> list[str]:
    """The test runner's lines of reasons for skipping."""
    return re.findall(r"^ +\d+ x .*$", output, re.M)


def mnist(part: Part) -> None:
    """The command line on each device: losses, accuracies, and how often CUDA was called."""
    with tempfile.TemporaryDirectory() as folder:
        counter, trouble = build_counter(Path(folder))
        part.result.update(cupti=trouble or "counts", epochs=EPOCHS)
        runs: dict[str, Any] = {}
        part.result["runs"] = runs
        for model in MODELS:
            for device in DEVICES:
                runs[f"{model} {device}"] = train(part, model, device, EPOCHS[0], counter, folder)
                if model in GENTLE:
                    gentle = train(part, model, device, EPOCHS[0], None, folder, GENTLE[model])
                    runs[f"{model} {device}, lr 0.1"] = gentle
                part.save()
            longer = train(part, model, "gpu", EPOCHS[1], counter, folder)
            runs[f"{model} gpu, {EPOCHS[1]} epochs"] = longer
            part.save()
    verdicts = {model: judge(model, runs) for model in MODELS}
    part.result.update(models=verdicts)
    part.result["ok"] = not trouble and all(verdict["ok"] for verdict in verdicts.values())


def build_counter(folder: Path) -> tuple[Path | None, str]:
    """The library that counts CUDA's calls, or why there is none."""
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    import cupti_counter

    try:
        return cupti_counter.build(folder), ""
    except cupti_counter.CuptiMissing as missing:
        return None, str(missing)


def train(
    part: Part,
    model: str,
    device: str,
    epochs: int,
    counter: Path | None,
    folder: str,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """One training: its losses by epoch, its accuracies, and on the GPU the counters."""
    program = ["mnist_dlsys.py", "-m", model, "-c", device, "-e", str(epochs), "-l", *options]
    out = Path(folder) / f"{model}-{epochs}.json"
    counted = device == "gpu" and counter is not None
    if counted:
        program = [COUNTED, str(counter), str(out), *program]
    done = part.run([sys.executable, *program], limit=90)
    result = {
        "status": done["status"],
        "seconds": done["seconds"],
        "losses": [float(x) for x in re.findall(r"^epoch .*\bloss[ =](\S+)", done["output"], re.M)],
        "accuracy": {
            kind: float(value)
            for kind, value in re.findall(r"^(\w+) set accuracy=(\S+)$", done["output"], re.M)
        },
    }
    if done["status"] != 0:
        result["tail"] = done["output"][-2000:]
    if counted and out.exists():
        result["counters"] = json.loads(out.read_text())
    return result


def judge(model: str, runs: dict[str, Any]) -> dict[str, Any]:
    """True if the devices agree, learn, and allocate nothing more in a longer training."""
    curves = [runs[f"{model} {device}"]["losses"] for device in DEVICES]
    judged = curves
    if model in GENTLE:
        judged = [runs[f"{model} {device}, lr 0.1"]["losses"] for device in DEVICES]
    complete = all(len(curve) == EPOCHS[0] for curve in [*curves, *judged])
    difference = largest_difference(judged) if complete else None
    accuracies = [
        runs[f"{model} {device}"]["accuracy"].get("validation", 0.0) for device in DEVICES
    ]
    allocations = {
        f"{source} {name}": [
            runs[run].get("counters", {}).get(source, {}).get(name)
            for run in (f"{model} gpu", f"{model} gpu, {EPOCHS[1]} epochs")
        ]
        for source, name in (
            ("library", "device_allocations"),
            ("cupti", "runtime_allocations"),
            ("cupti", "driver_allocations"),
            ("cupti", "host_allocations"),
        )
    }
    counted = all(short is not None and short == long for short, long in allocations.values())
    learned = min(accuracies) >= MODELS[model] and all(curve[-1] < curve[0] for curve in curves)
    return {
        "ok": complete and learned and counted and (difference or 0.0) <= LARGEST_DIFFERENCE,
        "largest_difference_of_losses": difference,
        "at": " ".join(GENTLE.get(model, ["the default rate"])),
        "largest_difference_at_the_default_rate": largest_difference(curves) if complete else None,
        "validation_accuracies": dict(zip(DEVICES, accuracies)),
        "allocations": allocations,
    }


def largest_difference(curves: Sequence[Sequence[float]]) -> float:
    """The most that the devices' losses of one epoch differ."""
    return max(max(losses) - min(losses) for losses in zip(*curves))


PARTS: dict[str, tuple[Callable[..., None], float]] = {
    "build": (build, 170.0),
    "tests": (tests, 480.0),
    "mnist": (mnist, 300.0),
    "sanitizers": (sanitizers, 480.0),
}


def counts(output: str) -> dict[str, int]:
    """The numbers of the test runner's last line."""
    found = re.findall(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", output, re.M)
    numbers = found[-1] if found else (0, 0, 0)
    return dict(zip(("passed", "failed", "skipped"), map(int, numbers)))


def versions() -> dict[str, str]:
    """The versions of the machine's tools."""
    commands = {
        "nvidia-smi": ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap"],
        "nvcc": [shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", "--version"],
        "compiler": ["g++", "--version"],
        "torch": [sys.executable, "-c", "import torch; print(torch.__version__)"],
    }
    commands["nvidia-smi"].append("--format=csv,noheader")
    said = {}
    for name, command in commands.items():
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except OSError as error:
            said[name] = str(error)
            continue
        lines = done.stdout.strip().splitlines() or ["nothing"]
        said[name] = lines[-2] if name == "nvcc" and len(lines) > 1 else lines[0]
    return said


def merge(out: Path, commit: str | None, seconds: float) -> dict[str, Any]:
    """record.json from the parts that are there; each says of which commit it is."""
    parts = {}
    for name in PARTS:
        path = out / f"{name}.json"
        if path.exists():
            parts[name] = json.loads(path.read_text())
    record = {
        "commit": commit,
        "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "command": "python benchmarks gpu_record",
        "machine": parts.get("build", {}).get("machine"),
        "seconds": round(seconds, 1),
        "ok": all(part["ok"] for part in parts.values()) and len(parts) == len(PARTS),
        **{key: parts.get("tests", {}).get(key) for key in ("passed", "failed", "skipped")},
        "parts": parts,
    }
    (out / "record.json").write_text(measure.as_json(record))
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default=None, help="the commit, where there is no git")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--keep-library", action="store_true", help="do not build it")
    parser.add_argument("--seconds", type=float, default=560.0, help="for all parts together")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    names, commit = options.parts.split(","), options.commit or measure.commit()

    def run(name: str) -> None:
        do, limit = PARTS[name]
        left = options.seconds - (time.monotonic() - start)
        part = Part(name, options.out, max(1.0, min(limit, left)))
        part.result["commit"] = commit
        try:
            do(part, options.keep_library) if name == "build" else do(part)
        except Exception as error:  # the other parts are still worth their time
            part.result["error"] = repr(error)
        part.save()
        outcome = "ok" if part.result["ok"] else "NOT OK"
        print(f"{name:12} {outcome:8} {time.monotonic() - start:6.0f} s", flush=True)

    if "build" in names:
        run("build")
    with concurrent.futures.ThreadPoolExecutor() as pool:  # nothing is timed: side by side
        list(pool.map(run, [name for name in names if name != "build"]))
    record = merge(options.out, commit, time.monotonic() - start)
    print(f"{record['passed']} passed, {record['failed']} failed, {record['skipped']} skipped")
    return 0 if record["ok"] else 1

"""Writes the tables of docs/performance.md, reliability.md, scale.md, serve.md, inference.md and
onnx.md, and the README's figures, from the JSON in results/.

    python benchmarks table [--results FOLDER]

A table goes between the markers `<!-- name -->` and `<!-- /name -->`. One whose JSON is not there
stays as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables import (
    attention_ladder,
    conv_ladder,
    counters,
    cudnn_layers,
    eager,
    gemm_ladder,
    gpu,
    inference,
    language,
    large,
    losses,
    operators,
    overlap,
    reliability,
    scale,
    serve,
)
from tables.gpu import Results, rows, source

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
FILES = (
    *(
        ROOT / "docs" / name
        for name in (
            "performance.md",
            "reliability.md",
            "scale.md",
            "serve.md",
            "inference.md",
            "onnx.md",
        )
    ),
    *(
        ROOT / "docs" / "learn" / name
        for name in ("3-layers.md", "gemm.md", "conv.md", "attention.md")
    ),
    ROOT / "README.md",
)
NETWORKS = {
    "logreg": "logistic regression 784-10, batch 1000",
    "mlp": "MLP 784-256-100-10, batch 1000",
    "lenet-128": "LeNet-5, batch 128",
    "lenet-1000": "LeNet-5, batch 1000",
    "residual-64": "residual network for MNIST, batch 64",
    "resnet18-16": "ResNet-18 at 64 × 64, batch 16",
    "gpt-12": "GPT, 4 layers of 128, 12 sequences of 64 characters",
}


def cpu(results: Results) -> str:
    """Training steps on the CPU, as ratios to PyTorch in the same run."""
    record = results.read("cpu")
    body = []
    for name in filter(record["networks"].__contains__, NETWORKS):
        network = record["networks"][name]
        ratios = [
            f"{ratio['median']:.2f} × ({ratio['q1']:.2f} to {ratio['q3']:.2f})"
            if (ratio := network.get("ratio", {}).get(system))
            else "not run"
            for system in ("numpy", "native")
        ]
        body.append([NETWORKS[name], *ratios, network.get("rival", "no PyTorch")])
    head = ["training step", "numpy", "native CPU", "of the fastest PyTorch eager"]
    rounds = record["networks"]["mlp"]["ms"]["numpy"]["n"]
    note = f"Median and quartiles of {rounds} rounds; PyTorch is 1. {source(record)}"
    return f"{rows(head, body)}\n\n{note}"


def overhead(results: Results) -> str:
    """Import, runs and planning."""
    record = results.read("overhead")
    targets, native = record["targets"], record["native_run"]
    per_node = max(record[name]["us_a_node"] for name in ("numpy_run", "numpy_chain"))
    planning, chains = record["planning"], record["chain_seconds"]
    chain = chains["relu"]["build_differentiate_plan"]
    products = chains["mul"]
    body = [
        [
            "import of `dlsys.autodiff` after numpy, ms",
            record["import_ms"]["median"],
            targets["import_ms"],
        ],
        [
            "a run of the MLP at batch 1 on the CPU device, beyond its program, µs",
            native["overhead"]["median"] if "overhead" in native else "not run",
            targets["native_run_us"],
        ],
        ["a run on numpy, beyond its numpy calls, µs a node", per_node, targets["numpy_us_a_node"]],
        [
            "the MLP: build and differentiate, ms",
            planning["build_and_differentiate_ms"]["median"],
            "",
        ],
        ["the MLP: infer, simplify, schedule and plan, ms", planning["plan_ms"]["median"], ""],
        [
            "100,000 chained `relu`: build, differentiate and plan, s",
            chain,
            targets["chain_seconds"],
        ],
        [
            f"100,000 chained products ({products['nodes_with_gradient']:,} nodes with their "
            "gradient): the same, s",
            products["build_differentiate_plan"],
            "",
        ],
    ]
    return f"{rows(['what', 'median', 'at most'], body)}\n\n{source(record)}"


def gpu_record(results: Results) -> str:
    """The proofs on the GPU."""
    record = results.read("gpu_record")
    parts = record["parts"]
    body = [[name, _counts(part)] for name, part in parts.items() if "passed" in part]
    failures = [text for part in parts.values() for text in part.get("failures", ())]
    body += [["failed", text.partition(" (")[0]] for text in failures]
    body += _mnist_rows(parts.get("mnist", {}))
    for tool, result in parts.get("sanitizers", {}).get("tools", {}).items():
        tests = f", {result['tests']} tests" if result.get("tests") else ""
        body.append([f"compute-sanitizer {tool}{tests}", result["outcome"]])
    commits = ", ".join(f"{name} {x['commit']}" for name, x in parts.items() if "commit" in x)
    machine = record["machine"]
    facts = [f"driver {machine.get('driver')}", f"library {machine.get('library')}"]
    note = (
        f"{machine.get('gpu')}, {', '.join(facts)}; {record['date']}, commit {record['commit']}; "
        f"`{record['command']}`"
    )
    told = [note, f"Commits of the parts: {commits}." if commits else "", record.get("note", "")]
    return "\n\n".join([rows(["proof", "result"], body), *filter(None, told)])


def _counts(of: dict[str, Any]) -> str:
    return ", ".join(f"{of[key]} {key}" for key in ("passed", "failed", "skipped"))


def _mnist_rows(part: dict[str, Any]) -> list[list[str]]:
    body = []
    for model, verdict in part.get("models", {}).items():
        difference = verdict["largest_difference_of_losses"]
        apart = "incomplete" if difference is None else f"{difference:.1e} apart at most"
        accuracy = verdict["validation_accuracies"]["gpu"]
        body.append([f"MNIST, {model}: validation accuracy", f"{accuracy}"])
        judged = f"MNIST, {model}: losses of numpy, CPU and GPU over 10 epochs"
        body.append([f"{judged}, at {verdict['at']}", apart])
        rest = verdict["largest_difference_at_the_default_rate"]
        if rest is not None and rest != difference:
            body.append(
                [f"{judged}, at the default rate", f"{rest:.1e} apart at most (not judged)"]
            )
        for name, pair in verdict["allocations"].items():
            epochs = " and ".join(str(count) for count in part["epochs"])
            told = " and ".join(str(count) for count in pair)
            body.append([f"MNIST, {model}: {name} in {epochs} epochs", told])
    return body


def accuracy(results: Results) -> str:
    """The accuracies of the command line's networks."""
    record = results.read("accuracy")
    body = [
        [
            f"`{run['command']}`",
            proof["network"],
            proof["expected"],
            run.get("test_accuracy", "failed"),
            run.get("validation_accuracy", ""),
            run["seconds"],
        ]
        for proof in record["proofs"].values()
        for run in proof["runs"]
    ]
    head = ["command", "network", "at least", "test accuracy", "validation", "s, all in all"]
    return f"{rows(head, body)}\n\n{source(record)}"


def figures(results: Results) -> str:
    """The README's few lines."""
    lines = []
    for sentence in (_cpu_sentence, _gpu_sentence, large.sentence):
        try:
            lines.append(f"- {sentence(results)}")
        except FileNotFoundError:
            continue
    if not lines:
        raise FileNotFoundError("no figures yet")
    return "\n".join(lines)


def _cpu_sentence(results: Results) -> str:
    record = results.read("cpu")
    told = []
    for name in filter(record["networks"].__contains__, NETWORKS):
        ratio = record["networks"][name].get("ratio")
        if ratio is None:
            raise FileNotFoundError("the CPU was measured without PyTorch")
        systems = [f"{each['median']:.2f} × on {system}" for system, each in ratio.items()]
        told.append(f"{name} {' and '.join(systems)}")
    return (
        f"A training step on {record['machine']['cores']} CPU cores, at batch 1000 unless the name "
        f"says another, as a share of PyTorch eager's time: {'; '.join(told)}."
    )


def _gpu_sentence(results: Results) -> str:
    record = gpu.raced(results)
    told = []
    for work in gpu.NAMES:
        ours, best = gpu.fastest(record, work, "fp32")
        rival = f" (best of PyTorch and JAX {best['ms']['median']:.3f})" if best else ""
        told.append(f"{work} {ours['ms']['median']:.3f}{rival}")
    return f"On one {record['machine']['gpu']}, fp32, ms a training step: {', '.join(told)}."


TABLES: dict[str, Callable[[Results], str]] = {
    "generation": language.generation,
    "ten steps": language.ten_steps,
    "cpu": cpu,
    "operators": operators.table,
    "overhead": overhead,
    "eager recording": eager.recording,
    "eager loops": eager.loops,
    "gpu race": gpu.race,
    "gpu memory": gpu.memory,
    "gpu drawn": gpu.drawn,
    "gpu kernels": gpu.kernels,
    "gpu limits": gpu.limits,
    "small mlps": gpu.small_mlps,
    "gpu to99": gpu.to99,
    "gpu overlap": overlap.table,
    "dist bandwidth": scale.bandwidth,
    "dist steps": scale.steps,
    "dist traces": scale.traces,
    "dist model": scale.model,
    "large": large.steps,
    "large kernels": large.kernels,
    "gpu record": gpu_record,
    "accuracy": accuracy,
    "losses": losses.table,
    "gemm rungs": gemm_ladder.squares,
    "gemm shapes": gemm_ladder.table,
    "gemm cpu rungs": gemm_ladder.cpu_squares,
    "gemm cpu shapes": gemm_ladder.cpu_table,
    "attention cpu": attention_ladder.cpu_table,
    "attention gpu": attention_ladder.gpu_table,
    "conv rungs": conv_ladder.drawn,
    "conv shapes": conv_ladder.table,
    "conv errors": conv_ladder.errors,
    "conv networks": conv_ladder.networks,
    "gemm counters": counters.gemm,
    "conv counters": counters.conv,
    "cudnn layers": cudnn_layers.table,
    "figures": figures,
    "attacks": reliability.attacks,
    "sanitizers": reliability.sanitizers,
    "soak": reliability.soak,
    "services": serve.services,
    "layers": serve.layers,
    "withstood": serve.withstood,
    "inference cpu": inference.on_cpu,
    "inference gpu": inference.on_gpu,
    "shipped models": inference.shipped,
}


def fill(text: str, results: Results) -> str:
    """The text with every table whose JSON is there."""
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if start not in text or end not in text:
            continue
        try:
            made = table(results)
        except (FileNotFoundError, KeyError) as missing:
            print(f"{name}: left as it is, for want of {missing}")
            continue
        before, rest = text.split(start, 1)
        text = f"{before}{start}{made}\n{end}{rest.split(end, 1)[1]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    for path in FILES:
        if path.exists():
            path.write_text(fill(path.read_text(), Results(options.results)))
    print(gpu.draw(Results(options.results), ROOT / "docs" / "race.svg"))
    print(operators.draw(Results(options.results), ROOT / "docs" / "operators.svg"))
    pictures = ROOT / "docs" / "learn" / "pictures"
    print(gemm_ladder.draw(Results(options.results), pictures / "gemm.svg"))
    print(conv_ladder.draw(Results(options.results), pictures / "conv.svg"))
    print(overlap.draw(Results(options.results), ROOT / "docs" / "overlap.svg"))
    print(large.draw(Results(options.results), ROOT / "docs" / "large.svg"))

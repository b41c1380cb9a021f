"""The tables of docs/serve.md: services beside each other, and what this one withstood."""

from __future__ import annotations

from typing import Any

from .gpu import Results, rows, source

_NAMES = {
    "bare": "uvicorn alone, a constant answer",
    "dlsys": "dlsys.serve",
    "dlsys alone": "dlsys.serve, `--max-batch 1`",
    "plain": "FastAPI around ONNX Runtime",
    "litserve": "LitServe around ONNX Runtime",
}


def services(results: Results) -> str:
    """A row a service and a count of clients."""
    record = results.read("serve")
    found = record["results"]
    body = [
        [
            name if clients == "1" else "",
            clients,
            f"{row['requests_per_second']:,.0f}",
            _share(record, key, clients),
            *(f"{row[f'{each}_ms']:.2f}" for each in ("p50", "p95", "p99")),
            f"{row['server_us']:,.0f}",
            f"{row['beside_compute_ms']:.2f}" if "beside_compute_ms" in row else "",
        ]
        for key, name in _NAMES.items()
        for clients, row in found.get(key, {}).items()
    ]
    head = [
        "service", "clients", "requests/s", "of uvicorn alone", "p50 ms", "p95 ms", "p99 ms",
        "processor, µs a request", "beside compute, p50 ms",
    ]  # fmt: skip
    theirs = ", ".join(
        f"{name} {version}" for name, version in record["versions"]["theirs"].items()
    )
    before, after = record["load_average"]
    note = (
        f"Median of {record['rounds']} turns of {record['seconds']:g} s, in turns with the others; "
        f"load average {before} to {after} from all that ran; {theirs}; {source(record)}"
    )
    return f"{rows(head, body)}\n\n{note}"


def _share(record: dict[str, Any], name: str, clients: str) -> str:
    return f"{record['share_of_bare'][name][clients]:.2f} ×" if name != "bare" else "1"


def layers(results: Results) -> str:
    """A row a layer, a column a count of clients."""
    record = results.read("serve")["layers"]
    us = record["us"]
    what = {
        "uvicorn": "uvicorn and an endpoint with a constant answer",
        "shortcut": "dlsys.serve, a head that repeats, without the model",
        "whole way": "dlsys.serve, through uvicorn's parser and the gateway, without the model",
        "model": "LeNet-5, its batch run on the CPU device",
    }
    clients = [*us["model"]]
    body = [[what[name], *(f"{us[name][n]:.1f}" for n in clients)] for name in what]
    body.append(
        ["both ends of the connection in the kernel and uvloop", *[f"{us['echo']:.1f}"] * 3]
    )
    return f"{rows(['µs a request', *clients], body)}\n\n{source(record)}"


def withstood(results: Results) -> str:
    """A row a proof."""
    proofs = results.read("serve")["proofs"]
    made = {"soak": _soak, "mutations": _mutations, "restart": _restart}
    body = [
        [*made[name](proofs[name]), "yes" if proofs[name]["held"] else "no"]
        for name in made
        if name in proofs
    ]
    notes = [f"`{proof['command']}`, {proof['date']}, commit {proof['commit']}"
             for proof in proofs.values()]  # fmt: skip
    table = rows(["what", "requests", "what came of it", "held"], body)
    return f"{table}\n\n{'; '.join(dict.fromkeys(notes))}"


def _soak(proof: dict[str, Any]) -> list[str]:
    kib = proof["resident_kib"]["is"]
    return [
        "soak, 16 clients, each request logged",
        f"{proof['requests']:,}",
        f"{proof['failed']:,} failed; memory {kib[0] / 1024:.1f} MiB after the first turn, "
        f"{kib[-1] / 1024:.1f} MiB after the last, {proof['bytes_a_request']:.2f} bytes a request "
        "in the second half",
    ]


def _mutations(proof: dict[str, Any]) -> list[str]:
    outcomes = ", ".join(f"{name}: {count:,}" for name, count in proof["outcomes"].items())
    return [
        "random changes of heads and bodies",
        f"{proof['requests']:,}",
        f"{outcomes}; {proof['faults']:,} faults of the service, "
        f"{proof['wrong_afterwards']:,} wrong answers afterwards",
    ]


def _restart(proof: dict[str, Any]) -> list[str]:
    return [
        f"{proof['kills']} times SIGKILL and a new start, {proof['clients']} clients",
        f"{proof['answers']:,}",
        f"{proof['wrong']:,} wrong, {proof['broken_connections']:,} connections that broke and "
        f"were made again; it serves {proof['seconds_until_it_serves']:.1f} s after its start",
    ]

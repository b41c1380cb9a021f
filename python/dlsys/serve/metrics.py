"""Counts of what the service did, under Triton's names, in the text format of Prometheus.

The format is the exposition format 0.0.4 of Prometheus: https://prometheus.io/docs/instrumenting.
Counts change on the event loop alone, so that they need no locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")

# name, kind, help, the attribute of Counts, by how much it is multiplied
_ROWS = (
    ("nv_inference_request_success", "counter", "Inference requests that were answered",
     "success", 1),
    ("nv_inference_count", "counter", "Samples that were inferred", "samples", 1),
    ("nv_inference_exec_count", "counter", "Batches that ran", "executions", 1),
    ("nv_inference_pending_request_count", "gauge", "Requests that wait for a batch", "pending", 1),
    ("nv_inference_request_duration_us", "counter",
     "Microseconds of requests from arrival to answer", "request_seconds", 1e6),
    ("nv_inference_queue_duration_us", "counter",
     "Microseconds that requests waited for their batch", "queue_seconds", 1e6),
    ("nv_inference_compute_input_duration_us", "counter",
     "Microseconds of reading requests", "input_seconds", 1e6),
    ("nv_inference_compute_infer_duration_us", "counter",
     "Microseconds of running batches, for each request of one", "infer_seconds", 1e6),
    ("nv_inference_compute_output_duration_us", "counter",
     "Microseconds of writing answers", "output_seconds", 1e6),
)  # fmt: skip
_FAILURES = ("nv_inference_request_failure", "Inference requests that failed, by reason")


@dataclass
class Counts:
    """What one version of a model did."""

    success: int = 0
    samples: int = 0
    executions: int = 0
    pending: int = 0
    request_seconds: float = 0.0
    queue_seconds: float = 0.0
    input_seconds: float = 0.0
    infer_seconds: float = 0.0
    output_seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)


class Metrics:
    """The counts of all models. They stay when a model is loaded anew, as counters must."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Counts] = {}

    def of(self, model: str, version: str) -> Counts:
        """The counts of a version of a model."""
        return self._counts.setdefault((model, version), Counts())

    def text(self) -> str:
        """All counts as Prometheus reads them."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        rows = sorted(self._counts.items())
        for name, kind, about, attribute, scale in _ROWS:
            values = (
                (_labels(model=model, version=version), round(getattr(counts, attribute) * scale))
                for (model, version), counts in rows
            )
            yield from _metric(name, kind, about, values)
        failures = (
            (_labels(model=model, reason=reason, version=version), counts.failures[reason])
            for (model, version), counts in rows
            for reason in _REASONS
        )
        yield from _metric(_FAILURES[0], "counter", _FAILURES[1], failures)


def _metric(name: str, kind: str, about: str, values: Iterable[tuple[str, int]]) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        yield f"{name}{{{labels}}} {value}"


def _labels(**labels: str) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

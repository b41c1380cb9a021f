"""A version of a model in service: its program, its queues and what it counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...errors import DlsysError, GraphError, quoted
from ...explain import METHODS, Explainer, Explanation
from ..faults import RequestError
from ..metrics import Counts
from ..protocol.inference import InferRequest, Wanted, selected
from ..settings import Limits
from .batcher import Batcher, Waiting
from .program import Classifier, Program


class ServedModel:
    """A version of a model that answers requests until it is closed.

    name, version: its address. program: what it runs. limits, counts: as the service has them.
    `batcher` is its queue; `answers` what is the same in all of its answers of some shapes.
    """

    def __init__(
        self, name: str, version: str, program: Program, limits: Limits, counts: Counts
    ) -> None:
        self.name, self.version, self.program = name, version, program
        self.counts = counts
        self.answers: dict[Any, tuple[bytes, bytes]] = {}
        self.batcher = Batcher(
            program.run, program.largest, limits.waiting, counts, program.threads
        )
        self._explainers: Explainers | None = None
        if program.classifier is not None:
            self._explainers = Explainers(program.classifier, limits)

    def metadata(self, versions: list[str]) -> dict[str, Any]:
        """As `GET /v2/models/NAME` has it. versions: those of the model that are ready."""
        signature = self.program.signature
        return {
            "name": self.name,
            "versions": versions,
            "platform": self.program.platform,
            "inputs": [spec.as_dict() for spec in signature.inputs],
            "outputs": [spec.as_dict() for spec in signature.outputs],
        }

    # ---- inference ----
    async def infer(self, inputs: list[np.ndarray]) -> tuple[list[np.ndarray], Waiting]:
        """The outputs of arrays that fit the signature, and when they ran. OverloadedError where
        too many wait; RequestError for values that the model refuses.
        """
        self.check(inputs)
        waiting = self.batcher.submit(inputs)
        try:
            outputs = await waiting.future
        except DlsysError as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"the model refuses the request: {error}") from error
        except asyncio.CancelledError:
            self.batcher.withdraw(waiting)
            raise
        self.count(waiting)
        return outputs, waiting

    def check(self, inputs: list[np.ndarray]) -> None:
        """RequestError for inputs that do not belong together."""
        if len(inputs) > 1 and self.program.largest > 1:
            if len({len(x) for x in inputs if x.ndim}) > 1:
                raise RequestError("inputs have different counts of samples along their first axis")

    def count(self, waiting: Waiting) -> None:
        """Counts a request whose batch ran."""
        ran, counts = waiting.ran, self.counts
        assert ran is not None, "it ran"
        counts.queue_seconds += ran.started - waiting.arrived
        counts.infer_seconds += ran.ended - ran.started
        counts.samples += waiting.size

    async def answer(
        self, request: InferRequest
    ) -> tuple[list[tuple[Wanted, np.ndarray]], Waiting]:
        """The outputs that a request asks for."""
        outputs, waiting = await self.infer(request.inputs)
        return selected(request, self.program.signature, outputs), waiting

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the request that is answered within, or why it failed."""
        started = time.perf_counter()
        try:
            yield
        except (RequestError, asyncio.TimeoutError, asyncio.CancelledError) as fault:
            self.counts.failures[getattr(fault, "reason", "CANCELED")] += 1
            raise
        except Exception:
            self.counts.failures["BACKEND"] += 1
            raise
        self.counts.request_seconds += time.perf_counter() - started
        self.counts.success += 1

    def facts(self, waiting: Waiting) -> dict[str, Any]:
        """What the log tells of a request that ran."""
        ran = waiting.ran
        assert ran is not None, "it ran"
        return {
            "model": self.name,
            "version": self.version,
            "batch": ran.samples,
            "queue_ms": round(1e3 * (ran.started - waiting.arrived), 3),
            "compute_ms": round(1e3 * (ran.ended - ran.started), 3),
        }

    # ---- images ----
    @property
    def classifier(self) -> Classifier:
        """RequestError where the model takes no image files."""
        if self.program.classifier is None:
            raise RequestError(
                f"{self.name} takes no image files: its file does not say that it was trained on "
                f"images of classes; use /v2/models/{self.name}/infer"
            )
        return self.program.classifier

    async def probabilities(self, pixels: np.ndarray) -> np.ndarray:
        """Of each class (classes,), for pixels (1, C, H, W) uint8."""
        outputs, _ = await self.infer([self.classifier.prepared(pixels)])
        return self.classifier.probabilities(outputs)[0]

    async def explain(
        self, pixels: np.ndarray, wanted: int | None, method: str | None
    ) -> tuple[Explanation, str]:
        """The map of pixels (1, C, H, W) uint8, and by which method it was made."""
        assert self._explainers is not None, "only classifiers are asked"
        return await self._explainers.explain(pixels, wanted, method)

    async def close(self) -> None:
        """Waits until all that was submitted has run."""
        await self.batcher.close()
        if self._explainers is not None:
            await self._explainers.close()


class Explainers:
    """The explanations of a classifier, by method, each with a queue: they run one at a time."""

    def __init__(self, classifier: Classifier, limits: Limits) -> None:
        self._model, self._limits = classifier.model, limits
        self._queues: dict[str, Batcher] = {}
        self.default = self._usual()

    def _usual(self) -> str:
        """Grad-CAM where the network has a layer for it, else saliency."""
        about = self._model.trained_on
        assert about is not None, "a classifier says what it was trained on"
        try:
            Explainer(self._model, "grad_cam")(np.zeros((1, *about.shape), about.dtype))
        except GraphError:
            return "saliency"
        return "grad_cam"

    async def explain(
        self, pixels: np.ndarray, wanted: int | None, method: str | None
    ) -> tuple[Explanation, str]:
        """The map of pixels (1, C, H, W) for a class, by default the likeliest."""
        method = method or self.default
        if method not in METHODS:
            raise RequestError(
                f"method: expected one of {', '.join(METHODS)}, got {quoted(method)}"
            )
        if method not in self._queues:
            explainer = Explainer(self._model, method)

            def run(inputs: list[np.ndarray]) -> list[np.ndarray]:
                images, classes = inputs
                return [*explainer(images, None if classes[0] < 0 else classes)]

            self._queues[method] = Batcher(run, 1, self._limits.waiting, Counts(), threads=True)
        chosen = np.array([-1 if wanted is None else wanted], np.int64)
        queue = self._queues[method]
        waiting = queue.submit([pixels, chosen])
        try:
            return Explanation(*await waiting.future), method
        except DlsysError as error:
            raise RequestError(str(error)) from error
        except asyncio.CancelledError:
            queue.withdraw(waiting)
            raise

    async def close(self) -> None:
        for queue in self._queues.values():
            await queue.close()

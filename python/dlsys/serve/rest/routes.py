"""The REST routes beside inference: health, metadata, the repository, images, metrics, the page."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, File, Query, Request, Response, UploadFile
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict

from ... import __version__
from ...errors import DataError
from ...explain import METHODS, overlay
from ...viz.png import png
from ..faults import RequestError
from ..metrics import CONTENT_TYPE
from ..models.served import ServedModel
from ..protocol.inference import EXTENSIONS
from ..service import Service

_SIDE = 224  # pixels that an overlay has at least, so that 28 by 28 can be seen
_DECODERS = 2  # images decoded at once, each with up to 100 MB of pixels
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


class Prediction(BaseModel):
    """A class with its probability."""

    label: str
    index: int
    probability: float


class Classified(BaseModel):
    """What `/classify` answers: the likeliest classes, first the likeliest."""

    model_config = ConfigDict(protected_namespaces=())
    model_name: str
    model_version: str
    predictions: list[Prediction]


class Explained(Classified):
    """What `/explain` answers. overlay: a data URI of a PNG file, the image as the model sees it
    with the map over it.
    """

    explained: Prediction
    method: str
    overlay: str


Image = Annotated[UploadFile, File(description="PNG, JPEG, WebP, GIF, BMP, TIFF or PPM")]
Model = Annotated[str | None, Query(description="the model's name; by default the first one")]
Version = Annotated[str | None, Query(description="by default the highest")]
Top = Annotated[int, Query(ge=1, le=1000, description="classes of the answer")]


def routes(service: Service) -> APIRouter:
    """All routes of a service but that of inference."""
    router = APIRouter()
    _add_health(router, service)
    _add_metadata(router, service)
    _add_repository(router, service)
    _add_images(router, service)

    @router.get("/metrics", response_class=Response, tags=["operation"])
    async def metrics() -> Response:
        """Counts under Triton's names, as Prometheus reads them."""
        service.settle()
        return Response(service.repository.metrics.text(), media_type=CONTENT_TYPE)

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        text = resources.files(__package__).joinpath("page.html").read_text("utf-8")
        return HTMLResponse(text, headers={"content-security-policy": _POLICY})

    return router


def _add_health(router: APIRouter, service: Service) -> None:
    tags: list[Any] = ["protocol"]

    @router.get("/v2/health/live", tags=tags)
    async def live() -> dict[str, bool]:
        """Whether the service runs."""
        return {"live": True}

    @router.get("/v2/health/ready", tags=tags, responses={503: {"description": "not yet"}})
    async def ready() -> JSONResponse:
        """Whether it takes requests, with all of its models."""
        return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)

    @router.get("/v2/models/{name}/ready", tags=tags)
    @router.get("/v2/models/{name}/versions/{version}/ready", tags=tags)
    async def model_ready(name: str, version: str = "") -> dict[str, Any]:
        """Whether a model takes requests."""
        model = service.repository.find(name, version)
        return {"name": model.name, "ready": True}


def _add_metadata(router: APIRouter, service: Service) -> None:
    tags: list[Any] = ["protocol"]

    @router.get("/v2", tags=tags)
    async def server() -> dict[str, Any]:
        """The server and what it knows beyond the protocol."""
        return {"name": "dlsys", "version": __version__, "extensions": [*EXTENSIONS]}

    @router.get("/v2/models/{name}", tags=tags)
    @router.get("/v2/models/{name}/versions/{version}", tags=tags)
    async def metadata(name: str, version: str = "") -> dict[str, Any]:
        """A model's inputs and outputs."""
        model = service.repository.find(name, version)
        return model.metadata(service.repository.versions(name))


def _add_repository(router: APIRouter, service: Service) -> None:
    tags: list[Any] = ["repository"]

    @router.post("/v2/repository/index", tags=tags)
    async def index() -> list[dict[str, Any]]:
        """All models with their states."""
        return service.repository.index()

    @router.post("/v2/repository/models/{name}/load", tags=tags)
    async def load(name: str) -> dict[str, Any]:
        """Loads a model anew from its path; requests go on meanwhile."""
        await service.repository.load(name)
        return {}

    @router.post("/v2/repository/models/{name}/unload", tags=tags)
    async def unload(name: str) -> dict[str, Any]:
        """Takes a model out of service."""
        await service.repository.unload(name)
        return {}


def _add_images(router: APIRouter, service: Service) -> None:
    decoders = ThreadPoolExecutor(_DECODERS, thread_name_prefix="dlsys-decode")

    async def pixels_of(model: ServedModel, file: UploadFile) -> np.ndarray:
        read, content = model.classifier.read, await file.read()
        most = service.settings.limits.pixels
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(decoders, read, content, most)
        except DataError as error:
            raise RequestError(str(error)) from error

    @router.post("/classify", tags=["images"])
    async def classify(
        request: Request, file: Image, model: Model = None, version: Version = None, k: Top = 5
    ) -> Classified:
        """The likeliest classes of an image file."""
        served = service.first(model, version)
        request.state.exchange.facts = {"model": served.name, "version": served.version}
        chances = await served.probabilities(await pixels_of(served, file))
        return Classified(
            model_name=served.name,
            model_version=served.version,
            predictions=_top(chances, served.program.signature.labels, k),
        )

    with_picture: dict[int | str, Any] = {200: {"content": {"image/png": {}}}}

    @router.post("/explain", tags=["images"], response_model=Explained, responses=with_picture)
    async def explain(
        request: Request,
        file: Image,
        model: Model = None,
        version: Version = None,
        k: Top = 5,
        label: Annotated[str | None, Query(description="by default the likeliest")] = None,
        method: Annotated[str | None, Query(description=" or ".join(METHODS))] = None,
    ) -> Any:
        """Which pixels speak for a class, over the image as the model sees it. With the header
        `Accept: image/png` the picture alone.
        """
        served = service.first(model, version)
        request.state.exchange.facts = {"model": served.name, "version": served.version}
        pixels = await pixels_of(served, file)
        labels = served.program.signature.labels
        explanation, used = await served.explain(pixels, _index(label, labels), method)
        chances, index = explanation.probabilities[0], int(explanation.classes[0])
        shown = pixels[0] if pixels.shape[1] in (1, 3) else pixels[0, :3]
        scale = max(1, -(-_SIDE // max(shown.shape[1:])))
        picture = png(overlay(shown, explanation.maps[0], scale))
        if "image/png" in request.headers.get("accept", ""):
            return Response(picture, media_type="image/png")
        return Explained(
            model_name=served.name,
            model_version=served.version,
            predictions=_top(chances, labels, k),
            explained=_prediction(chances, labels, index),
            method=used,
            overlay=f"data:image/png;base64,{base64.b64encode(picture).decode()}",
        )


def _top(chances: np.ndarray, labels: Sequence[str], count: int) -> list[Prediction]:
    """The likeliest classes, the first of equals first."""
    order = np.argsort(-chances, kind="stable")[:count].tolist()
    return [_prediction(chances, labels, k) for k in order]


def _prediction(chances: np.ndarray, labels: Sequence[str], index: int) -> Prediction:
    probability = round(float(chances[index]), 6)
    return Prediction(label=labels[index], index=index, probability=probability)


def _index(label: str | None, labels: tuple[str, ...]) -> int | None:
    """The index of a class by its name. RequestError where there is none."""
    if label is None:
        return None
    if label not in labels:
        raise RequestError(f"there is no class of that label; there are {', '.join(labels[:20])}")
    return labels.index(label)

"""The REST application: routes behind the gateway, errors in the protocol's form, OpenAPI."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from ... import __version__
from ...errors import printable
from ..faults import RequestError
from ..protocol.inference import HEADER_LENGTH
from ..service import Service
from .gateway import App, Gateway, failure
from .routes import routes

_ABOUT = """The Open Inference Protocol, version 2, with the extensions for binary tensors,
classification and model repositories; beside it image files in, classes and explanations out."""
_INFER = "/v2/models/{name}/infer"
_HEADERS = ("authorization", "content-type", "x-api-key", "x-request-id", HEADER_LENGTH)


def make_app(service: Service) -> App:
    """The ASGI application of a service."""
    app = FastAPI(title="dlsys", version=__version__, description=_ABOUT, redoc_url=None)
    app.include_router(routes(service))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestError, _at_fault)
    app.add_exception_handler(Exception, _failed)
    schema = app.openapi()
    schema["paths"][_INFER] = {"post": _infer_schema()}
    gateway: App = Gateway(service, app)
    if service.settings.origins:
        return CORSMiddleware(
            gateway,
            allow_origins=service.settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=_HEADERS,
            expose_headers=["x-request-id", "retry-after", HEADER_LENGTH],
        )
    return gateway


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """What FastAPI refuses: the first of its reasons, in one sentence."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = " ".join(str(part) for part in first["loc"])
    return JSONResponse({"error": printable(f"{where}: {first['msg']}")}, 400)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """What there is no route for, or no form in the body."""
    assert isinstance(error, HTTPException)
    sentences = {
        404: "there is no such address; /docs has all of them",
        405: f"{request.method} is not for this address; /docs has its methods",
    }
    sentence = sentences.get(error.status_code, printable(str(error.detail)))
    return JSONResponse({"error": sentence}, error.status_code, error.headers)


async def _at_fault(request: Request, error: Exception) -> JSONResponse:
    """What a route refuses."""
    assert isinstance(error, RequestError)
    return JSONResponse({"error": str(error)}, error.status, error.headers)


async def _failed(request: Request, error: Exception) -> JSONResponse:
    """An error of the service, which goes on to the gateway for its log."""
    return JSONResponse({"error": failure(request.state.exchange.id)}, 500)


def _infer_schema() -> dict[str, Any]:
    """Inference in OpenAPI: the gateway answers it before FastAPI's routes."""
    tensor = {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"type": "string"},
            "datatype": {"type": "string", "examples": ["UINT8", "FP32"]},
            "shape": {"type": "array", "items": {"type": "integer"}},
            "data": {"type": "array", "items": {}},
            "parameters": {"type": "object"},
        },
    }

    def body(*names: str) -> dict[str, Any]:
        listed = {name: {"type": "array", "items": tensor} for name in names}
        properties = {"id": {"type": "string"}, "parameters": {"type": "object"}, **listed}
        schema = {"type": "object", "required": [names[0]], "properties": properties}
        return {"application/json": {"schema": schema}, "application/octet-stream": {}}

    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "tags": ["protocol"],
        "summary": "Infer",
        "description": "Outputs of inputs, as JSON or as binary tensors; "
        "`/v2/models/{name}/versions/{version}/infer` asks one version.",
        "parameters": [name],
        "requestBody": {"required": True, "content": body("inputs", "outputs")},
        "responses": {"200": {"description": "the outputs", "content": body("outputs")}},
    }

"""Services that dlsys.serve is compared with, as ASGI applications for uvicorn.

`bare` reads a body and answers a constant: what HTTP itself takes. `plain` is what one writes in an
hour: FastAPI around a session of ONNX Runtime, a run for each request.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

PATH = "/infer"


def bare() -> Any:
    """An endpoint without a framework; the body of its answer is as long as ten float32."""
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"40")]
    answer = bytes(40)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


class Session:
    """The ONNX file that SERVED_ONNX names, on one thread of ONNX Runtime."""

    def __init__(self) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(os.environ["SERVED_ONNX"], options)
        self._name = self._session.get_inputs()[0].name

    def probabilities(self, pixels: np.ndarray) -> np.ndarray:
        """Of each class (n, classes), for pixels (n, 1, 28, 28) uint8."""
        (logits,) = self._session.run(None, {self._name: pixels.astype(np.float32) / 255})
        grown = np.exp(logits - logits.max(axis=1, keepdims=True))
        return grown / grown.sum(axis=1, keepdims=True)


def plain() -> Any:
    """FastAPI with a run for each request."""
    from fastapi import FastAPI, Request, Response

    session = Session()
    app = FastAPI()

    async def infer(request: Request) -> Response:
        pixels = np.frombuffer(await request.body(), np.uint8).reshape(-1, 1, 28, 28)
        found = session.probabilities(pixels)
        return Response(found.tobytes(), media_type="application/octet-stream")

    infer.__annotations__ = {"request": Request, "return": Response}  # which were texts till here
    app.post(PATH)(infer)
    return app

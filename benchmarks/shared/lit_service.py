"""The model behind LitServe: python benchmarks/shared/lit_service.py PORT

One process for HTTP and one for the model, as by default; batches of up to 64 of what waits,
without a delay, as those of dlsys.serve.
"""

import sys
from typing import Annotated, Any

import litserve
import numpy as np
from fastapi import Body, Response
from services import PATH, Session


class Api(litserve.LitAPI):
    """Pixels (1, 28, 28) uint8 as bytes to the probabilities of ten classes, float32 as bytes."""

    def setup(self, device: Any) -> None:
        self.session = Session()

    # Without a type LitServe takes JSON or forms alone.
    def decode_request(
        self, request: Annotated[bytes, Body(media_type="application/octet-stream")]
    ) -> np.ndarray:
        return np.frombuffer(request, np.uint8).reshape(1, 28, 28)

    def batch(self, inputs: Any) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, x: np.ndarray) -> Any:
        return self.session.probabilities(x.reshape(-1, 1, 28, 28))

    def unbatch(self, output: np.ndarray) -> Any:
        return list(output)

    def encode_response(self, output: np.ndarray) -> Any:
        return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    api = Api(max_batch_size=64, batch_timeout=0.0, api_path=PATH)
    server = litserve.LitServer(api, accelerator="cpu", fast_queue=True)
    server.run("127.0.0.1", int(sys.argv[1]), 1, log_level="warning", generate_client_file=False)

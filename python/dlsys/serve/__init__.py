"""A service for trained models: REST and gRPC by the Open Inference Protocol, and images.

    python -m dlsys.serve runs/cnn other.onnx --port 8000 --grpc-port 8001

`Server` is the same within a program. FastAPI, uvicorn and grpcio are loaded when one starts.
"""

from .logs import Log
from .server import Listeners, Server
from .settings import Limits, Settings

__all__ = ["Limits", "Listeners", "Log", "Server", "Settings"]

"""What a request can be refused for: one sentence, with its status of HTTP and of gRPC."""

from __future__ import annotations

from ..errors import DlsysError


class RequestError(DlsysError):
    """A request that is at fault: the text says what was expected and what came."""

    status = 400
    grpc = "INVALID_ARGUMENT"
    reason = "REJECTED"  # of nv_inference_request_failure

    @property
    def headers(self) -> dict[str, str]:
        """Of its response, by HTTP."""
        return {}


class UnauthorizedError(RequestError):
    """A request without a key that the service knows."""

    status = 401
    grpc = "UNAUTHENTICATED"

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class UnknownError(RequestError):
    """A model, a version or a page that there is not."""

    status = 404
    grpc = "NOT_FOUND"


class TooSlowError(RequestError):
    """A body that did not arrive in time."""

    status = 408
    grpc = "DEADLINE_EXCEEDED"
    reason = "CANCELED"


class TooLargeError(RequestError):
    """A body of more bytes, or an image of more pixels, than the service takes."""

    status = 413
    grpc = "RESOURCE_EXHAUSTED"


class OverloadedError(RequestError):
    """More requests than the service holds. retry_after: seconds until another try makes sense."""

    status = 503
    grpc = "UNAVAILABLE"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after)}


class DeadlineError(RequestError):
    """A request that was not answered by its deadline."""

    status = 504
    grpc = "DEADLINE_EXCEEDED"
    reason = "CANCELED"

"""The protocol over gRPC, by stubs of its messages and by the protocol's own client."""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np

from support.serving import Serving, digit_images, needs_serve, probabilities


def has_client() -> bool:
    """Whether tritonclient is here with what its gRPC part needs."""
    try:
        import tritonclient.grpc as client
    except ImportError:
        return False
    return hasattr(client, "InferenceServerClient")


@needs_serve
class Grpc(Serving):
    options = {"keys": ["secret"]}

    def call(self, method: str, key: str | None = "secret", **fields: Any) -> Any:
        """The response of a method."""
        import grpc

        from dlsys.serve.rpc.messages import SERVICE, messages

        found = messages()
        with grpc.insecure_channel(f"127.0.0.1:{self.server.grpc_port}") as channel:
            stub = channel.unary_unary(
                f"/{SERVICE}/{method}",
                request_serializer=found[f"{method}Request"].SerializeToString,
                response_deserializer=found[f"{method}Response"].FromString,
            )
            metadata = [("x-api-key", key)] if key else []
            return stub(found[f"{method}Request"](**fields), timeout=20, metadata=metadata)

    def infer(self, pixels: np.ndarray, raw: bool, **changes: Any) -> Any:
        tensor: dict[str, Any] = {
            "name": "input", "datatype": "UINT8", "shape": pixels.shape,
        }  # fmt: skip
        fields: dict[str, Any] = {"model_name": "digits", "inputs": [tensor | changes]}
        if raw:
            fields["raw_input_contents"] = [pixels.tobytes()]
        else:
            tensor["contents"] = {"uint_contents": pixels.ravel().tolist()}
            fields["inputs"] = [tensor | changes]
        return self.call("ModelInfer", **fields)

    def test_server_and_models(self) -> None:
        self.assertTrue(self.call("ServerLive").live)
        self.assertTrue(self.call("ServerReady").ready)
        self.assertTrue(self.call("ModelReady", name="digits").ready)
        self.assertEqual(self.call("ServerMetadata").name, "dlsys")
        found = self.call("ModelMetadata", name="digits")
        self.assertEqual([*found.inputs[0].shape], [-1, 1, 28, 28])
        self.assertEqual(self.call("RepositoryIndex").models[0].state, "READY")
        self.call("RepositoryModelLoad", model_name="digits")

    def test_inference(self) -> None:
        pixels = digit_images(2)
        wanted = probabilities(self.model, pixels)
        for raw in (True, False):
            response = self.infer(pixels, raw)
            got = np.frombuffer(response.raw_output_contents[0], "<f4").reshape(2, 10)
            np.testing.assert_allclose(got, wanted, atol=1e-6)

    def test_faults_are_statuses(self) -> None:
        import grpc

        pixels = digit_images(1)
        for status, ask in (
            ("INVALID_ARGUMENT", lambda: self.infer(pixels, True, shape=[2, 1, 28, 28])),
            ("INVALID_ARGUMENT", lambda: self.infer(pixels, True, datatype="FP32")),
            ("INVALID_ARGUMENT", lambda: self.infer(pixels + 0, False, name="x")),
            ("NOT_FOUND", lambda: self.call("ModelInfer", model_name="none")),
            ("NOT_FOUND", lambda: self.call("ModelReady", name="digits", version="7")),
            ("UNAUTHENTICATED", lambda: self.call("ServerLive", key=None)),
            ("UNAUTHENTICATED", lambda: self.call("ServerLive", key="other")),
        ):
            with self.assertRaises(grpc.RpcError) as caught:
                ask()
            self.assertEqual(caught.exception.code().name, status)
            self.assertNotIn("\n", caught.exception.details())

    @unittest.skipUnless(has_client(), "not here: tritonclient with its gRPC part")
    def test_the_protocols_own_client(self) -> None:
        import tritonclient.grpc as client

        pixels = digit_images(3, seed=1)
        wanted = probabilities(self.model, pixels)
        with client.InferenceServerClient(f"127.0.0.1:{self.server.grpc_port}") as triton:
            key = {"x-api-key": "secret"}
            self.assertTrue(triton.is_server_ready(headers=key))
            given = client.InferInput("input", pixels.shape, "UINT8")
            given.set_data_from_numpy(pixels)
            found = triton.infer("digits", [given], headers=key).as_numpy("probabilities")
            np.testing.assert_allclose(found, wanted, atol=1e-6)
            top = client.InferRequestedOutput("probabilities", class_count=1)
            found = triton.infer("digits", [given], outputs=[top], headers=key)
            texts = found.as_numpy("probabilities").ravel()
            self.assertEqual([int(x.split(b":")[1]) for x in texts], wanted.argmax(1).tolist())


@unittest.skipUnless(has_client(), "not here: tritonclient with its gRPC part")
class Messages(unittest.TestCase):
    def test_fields_are_the_protocols(self) -> None:
        """Names, numbers, types and labels of every field that both sides have."""
        from tritonclient.grpc import service_pb2

        from dlsys.serve.rpc.messages import messages

        def fields(message: Any) -> dict[str, tuple[Any, ...]]:
            return {
                each.name: (each.number, each.type, each.label)
                for each in message.DESCRIPTOR.fields
            }

        theirs = service_pb2.DESCRIPTOR.message_types_by_name
        nested = {inner.name: inner for each in theirs.values() for inner in each.nested_types}
        for name, own in messages().items():
            other = theirs.get(name) or nested[name]
            known = {f.name: (f.number, f.type, f.label) for f in other.fields}
            self.assertLessEqual(fields(own).items(), known.items(), name)


if __name__ == "__main__":
    unittest.main()

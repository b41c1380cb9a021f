"""The Open Inference Protocol's requests, responses and tensors, by REST and by gRPC."""

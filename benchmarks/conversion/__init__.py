"""ONNX files that run elsewhere, those of others here, damaged ones; quantization."""

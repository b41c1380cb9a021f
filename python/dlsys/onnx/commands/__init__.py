"""Commands of `python -m dlsys.onnx`, a module each: `add_arguments(parser)`, `run(options)`."""

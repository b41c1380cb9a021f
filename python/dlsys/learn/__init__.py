"""The ladders of the matrix product on the machine at hand: `python -m dlsys.learn gemm`."""
